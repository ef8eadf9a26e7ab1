"""Rank 0's way to the outside: wallet, chain, buckets, swarm and server out of the configuration.

Everything here may take long or fail; it happens before a model is built, so that a missing key or
an unregistered hotkey is told at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from distributed_training.chain.address import AddressUnknown, external_ip
from distributed_training.chain.base import Chain
from distributed_training.chain.registration import INTERVAL as REGISTRATION_INTERVAL
from distributed_training.chain.server import MinerCallbacks, SignedServer
from distributed_training.config import Config, ConfigError
from distributed_training.miner import events as ev
from distributed_training.miner.drift import Rows
from distributed_training.miner.global_bucket import (
    GlobalBucket,
    first_global_state,
    model_config,
    open_global_bucket,
    pause,
)
from distributed_training.miner.global_epoch import GlobalEpoch
from distributed_training.miner.proof import Proof
from distributed_training.miner.ranks import Ranks
from distributed_training.miner.round_clock import RoundClock
from distributed_training.node import announce, buckets
from distributed_training.node.chain import (
    Member,
    join_subnet,
    refuse_second_node,
    seconds_per_block,
)
from distributed_training.node.failures import Deregistered, NetworkFailure, NotRegistered
from distributed_training.node.start import fetch_tokenizer
from distributed_training.protocol import lines, names, schedule
from distributed_training.protocol.types import RoundRequest
from distributed_training.store.errors import StoreError
from distributed_training.store.remote_state import RemoteState
from distributed_training.store.upload_schedule import UploadSchedule
from distributed_training.store.uploader import Uploader
from distributed_training.swarm import (
    HivemindSwarm,
    HostLaunch,
    SwarmUnavailable,
    launch_host,
)

log = logging.getLogger(__name__)

#: How long a hotkey that was registered is asked for before its deregistration is believed.
DEREGISTERED_FOR = timedelta(minutes=5)


@dataclass(frozen=True)
class Facts:
    """What rank 0 found out and every rank needs; JSON-able."""

    uid: int = 0
    model_config: dict[str, Any] = field(default_factory=dict)
    tokenizer_path: str = ""
    eos_id: int = 0
    global_outer_step: int = 0
    first_block: int = 0  # of the chain: what a fresh start trains on first
    hotkey: str = ""
    problem: str = ""  # why there is no start; the other ranks leave quietly then


@dataclass(frozen=True)
class Published:
    """What our bucket held when this process started; None: nothing, or it could not be read."""

    at: float | None = None  # time.monotonic() of its newest gradients.pt
    newest_block: int | None = None  # of the block list beside it


@dataclass
class Outside:
    """What :func:`connect` found, and what it can open."""

    config: Config
    folder: Path
    swarm_launch: HostLaunch
    member: Member
    published: Published
    ip: str  # validators reach us at
    commitment: str  # our read credentials, as the chain holds them
    bucket: str
    global_bucket: GlobalBucket
    global_folder: Path
    facts: Facts

    @property
    def hotkey(self) -> str:
        return self.member.hotkey

    @property
    def chain(self) -> Chain:
        return self.member.chain

    @property
    def uid(self) -> int:
        return self.member.uid

    def upload_schedule(self) -> UploadSchedule:
        settings = self.config.store
        return UploadSchedule(
            upload_steps=settings.upload_steps,
            minimum_inner_step=settings.minimum_valid_inner_step,
            age_limit=settings.age_limit,
            slack=settings.upload_slack,
            published_at=self.published.at,
        )

    def round_clock(self) -> RoundClock:
        """The public validator's period is longer from the first successful round on."""
        shortest = period = self.config.miner.blocks_per_allreduce
        if self.config.is_public and self.facts.global_outer_step > 0:
            period = max(period, schedule.BLOCKS_PER_ALLREDUCE_LATER)
        last = self.facts.model_config.get("last_allreduce_block")
        return RoundClock(
            chain_block=self.chain.block,
            blocks_per_allreduce=period,
            shortest_period=shortest,  # which a validator falls back to when it starts again
            last_allreduce_block=last if isinstance(last, int) else None,
            chain_age=self.chain.age,
            seconds_per_block=seconds_per_block(self.config),
        )

    def open_swarm(self, schema: Sequence[tuple[str, tuple[int, ...]]]) -> HivemindSwarm:
        """Raises NetworkFailure."""
        try:
            return HivemindSwarm(
                settings=self.config.swarm,
                schema=schema,
                run_folder=self.folder,
                launch=self.swarm_launch,
            )
        except SwarmUnavailable as error:
            raise NetworkFailure(str(error)) from None

    def open_publisher(self, snapshots: Path) -> Uploader:
        return Uploader(
            settings=self.config.store,
            bucket=self.bucket,
            folder=self.folder,
            snapshots=snapshots,
        )

    def watch(
        self,
        post: Callable[[ev.Event], None],
        epoch_start: Callable[[], tuple[int, Sequence[Rows]]],
    ) -> GlobalEpoch:
        blocks = self.config.miner.epoch_check_blocks
        return GlobalEpoch(
            bucket=self.global_bucket,
            post=post,
            interval=timedelta(seconds=blocks * seconds_per_block(self.config)),
            epoch_start=epoch_start,
        )

    def open_server(
        self,
        *,
        epoch: Callable[[], int],
        on_all_reduce: Callable[[RoundRequest], None],
        round_phase: Callable[[], str | None],
        round_due: Callable[[], bool | None],
    ) -> SignedServer:
        """Bound, not yet answering. Raises ConfigError when the port is taken."""

        def called(request: RoundRequest) -> None:
            log.info("%s", lines.RECEIVED_MAIN_ALL_REDUCE)
            on_all_reduce(request)

        return SignedServer(
            settings=self.config.chain,
            wallet=self.member.wallet,
            chain=self.chain,
            master_hotkey=self.config.miner.master_ss58_address,
            miner=MinerCallbacks(epoch, called, round_phase, round_due),
            folder=self.folder,
        )

    def announce(self, port: int) -> None:
        """Write our endpoint to the chain unless it is there. Returns at once."""
        announce.announce(self.member, *self._endpoint(port))

    def follow_registration(
        self,
        port: int,
        stop: Callable[[str, int], None],
        stack: ExitStack,
        *,
        round_missed: Callable[[], bool],
    ) -> None:
        """See :func:`~distributed_training.node.announce.follow_registration`."""

        def public_ip() -> str | None:
            with suppress(AddressUnknown):
                return external_ip(self.config.chain) if round_missed() else None
            return None

        watcher = announce.follow_registration(
            self.member,
            endpoint=self._endpoint(port),
            commitment=self.commitment,
            stop=stop,
            interval=self._registration_interval(),
            public_ip=public_ip,
        )
        stack.callback(watcher.close)

    def _registration_interval(self) -> timedelta:
        return timedelta(seconds=1) if self.config.preset == "local" else REGISTRATION_INTERVAL

    def _endpoint(self, port: int) -> tuple[str, int]:
        return self.ip, self.config.chain.external_port or port


def connect(
    config: Config, folder: Path, stack: ExitStack, *, wanted: Callable[[], bool]
) -> Outside:
    """Raises ConfigError, NetworkFailure, StopBeforeStart (``wanted`` turned False)."""
    swarm_launch = launch_host(folder)
    stack.callback(swarm_launch.end)
    member = _join(config, stack, wanted)
    bucket = names.miner_bucket(config.store.global_model_name, member.uid)
    try:
        ip = external_ip(config.chain)
    except AddressUnknown as error:
        raise NetworkFailure(str(error)) from None
    refuse_second_node(member)
    published = _check_bucket(config, bucket)
    commitment = buckets.own_commitment(config.store, bucket)
    announce.commit(member, commitment)
    global_bucket = open_global_bucket(config, member.chain, folder, wanted)
    outer_step, global_folder = first_global_state(global_bucket, wanted)
    tokenizer_path, eos_id = fetch_tokenizer(config, folder)
    return Outside(
        config=config,
        folder=folder,
        swarm_launch=swarm_launch,
        member=member,
        published=published,
        ip=ip,
        commitment=commitment,
        bucket=bucket,
        global_bucket=global_bucket,
        global_folder=global_folder,
        facts=Facts(
            uid=member.uid,
            model_config=model_config(global_folder),
            tokenizer_path=str(tokenizer_path),
            eos_id=eos_id,
            global_outer_step=outer_step,
            first_block=member.chain.block(),
            hotkey=member.hotkey,
        ),
    )


def _join(config: Config, stack: ExitStack, wanted: Callable[[], bool]) -> Member:
    """:func:`join_subnet`. A hotkey with which this miner ran before is asked for again, by a new
    connection each time: nothing starts again after :class:`Deregistered`."""
    proven, believed_at = Proof(config).holds, time.monotonic() + DEREGISTERED_FOR.total_seconds()
    while True:
        try:
            with ExitStack() as attempt:
                member = join_subnet(config, attempt)
                stack.enter_context(attempt.pop_all())
                return member
        except NotRegistered as error:
            if not proven:
                raise
            if time.monotonic() >= believed_at:
                raise Deregistered(f"{error}; it was registered when this miner ran") from None
            log.warning("%s. This miner ran with it before, so the chain is asked again", error)
        pause(wanted)


def on_this_node(config: Config, folder: Path, ranks: Ranks, facts: Facts) -> Facts:
    """Rank 0's ``facts``, where other machines have the tokenizer in a folder of their own."""
    node, found = ranks.rank // ranks.local_world_size, None
    if node == 0 or facts.problem:
        return facts
    if ranks.local_rank == 0:
        path, eos_id = fetch_tokenizer(config, folder)
        if eos_id != facts.eos_id:
            raise ConfigError(
                "--neuron.global_tokenizer_name is another tokenizer here than on node 0 (its end "
                f"of text is token {eos_id}, there {facts.eos_id}), so this node would train on "
                f"other tokens: remove {path}, and start again"
            )
        found = {"path": str(path)}
    return replace(facts, tokenizer_path=ranks.share(f"tokenizer-{node}", found)["path"])


def _check_bucket(config: Config, bucket: str) -> Published:
    """That the bucket is there and the write keys work, and what it holds.

    Raises ConfigError, NetworkFailure."""
    store = buckets.open_own(config.store, bucket)
    try:
        buckets.check_own(store)
        return read_published(RemoteState(store=store, deadline=buckets.BUCKET_CHECK))
    finally:
        store.close()


def read_published(bucket: RemoteState) -> Published:
    found = Published()
    try:
        root = bucket.metadata()
        age = None if root is None else bucket.age(root.outer_step)
        if root is not None and age is not None:
            found = Published(at=time.monotonic() - age.total_seconds())
            newest = max(bucket.block_list(root.outer_step), default=None)
            found = replace(found, newest_block=newest)
    except StoreError as error:
        what = "what is published" if found.at is None else "the published block list"
        log.warning("The age of %s is not known before the next upload: %s", what, error)
    return found
