"""Rank 0's services, opened from the configuration: wallet, chain, buckets, swarm and server.

Each may take long or fail. All are opened before a model is built, so that a missing key or an
unregistered hotkey is reported at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from distributed_training import __version__
from distributed_training.chain.base import Chain, find
from distributed_training.chain.identity import AddressUnknown
from distributed_training.chain.registration import INTERVAL as REGISTRATION_INTERVAL
from distributed_training.chain.registration import (
    MISSING_FOR,
    Belief,
)
from distributed_training.chain.server import MinerCallbacks, SignedServer
from distributed_training.common.memory import ModelShape
from distributed_training.config import Config, ConfigError
from distributed_training.config.settings import StoreSettings
from distributed_training.health.clock import ClockWatch, measure
from distributed_training.miner import events as ev
from distributed_training.miner.global_state import (
    GlobalBucket,
    GlobalEpoch,
    first_global_state,
    open_global_bucket,
)
from distributed_training.miner.income import standing
from distributed_training.miner.own_bucket import Published, open_own_bucket
from distributed_training.miner.ranks import Ranks
from distributed_training.miner.registration import join_network
from distributed_training.miner.round_clock import RoundClock
from distributed_training.node import identity
from distributed_training.node.identity import (
    Member,
    check_global_state,
    keep_state,
    public_address,
)
from distributed_training.node.start import (
    NetworkFailure,
    fetch_tokenizer,
    require_data,
)
from distributed_training.protocol import keys
from distributed_training.store.snapshot_folder import disk_allows
from distributed_training.store.upload_schedule import UploadSchedule
from distributed_training.store.uploader import Uploader
from distributed_training.swarm.supervisor import HostLaunch, SwarmUnavailable
from distributed_training.swarm.swarm import HivemindSwarm, launch_host
from distributed_training.telemetry import MetricsFile
from distributed_training.training.outer_step import Rows, model_config

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartupInfo:
    """The facts that rank 0 found out and every rank needs; JSON-able."""

    uid: int = 0
    model_config: dict[str, Any] = field(default_factory=dict)
    tokenizer_path: str = ""
    eos_id: int = 0
    global_outer_step: int = 0
    global_seen: bool = True  # in the bucket; else it is the newest on rank 0's disk
    global_uid: int | None = None  # of that bucket's owner
    first_block: int = 0  # of the chain: what a fresh start trains on first
    hotkey: str = ""
    problem: str = ""  # why there is no start; the other ranks leave quietly then


@dataclass(frozen=True)
class Services:
    """The connections that :func:`connect` opened for rank 0, and later ones of the model."""

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
    info: StartupInfo
    round_clock: RoundClock
    schedule: UploadSchedule
    uploader: Uploader
    metrics: MetricsFile
    clock: ClockWatch

    @property
    def chain(self) -> Chain:
        return self.member.chain

    def open_swarm(self, schema: Sequence[tuple[str, tuple[int, ...]]]) -> HivemindSwarm:
        """Open the swarm. Raises NetworkFailure."""
        try:
            return HivemindSwarm(
                settings=replace(self.config.swarm, dht_ip=_swarm_ip(self.config, self.ip)),
                schema=schema,
                run_folder=self.folder,
                launch=self.swarm_launch,
            )
        except SwarmUnavailable as error:
            why = self.clock.fault()
            raise NetworkFailure(f"{error}; {why}" if why else str(error)) from None

    def watch_global_bucket(
        self,
        post: Callable[[ev.Event], None],
        epoch_start: Callable[[], tuple[int, Sequence[Rows]]],
    ) -> GlobalEpoch:
        return GlobalEpoch(
            bucket=self.global_bucket,
            post=post,
            interval=global_interval(self.config),
            epoch_start=epoch_start,
            network=self.config.network,
        )

    def open_server(self, callbacks: MinerCallbacks) -> SignedServer:
        """Return it bound, not yet answering. Raises ConfigError when the port is taken."""
        return SignedServer(
            settings=self.config.chain,
            wallet=self.member.wallet,
            chain=self.chain,
            master_hotkey=self.config.miner.master_ss58_address,
            miner=callbacks,
            folder=self.folder,
        )

    def disk_problem(self, needed: int) -> str | None:
        """Return why a snapshot of ``needed`` bytes would not fit on the disk; None if it does."""
        return disk_allows(self.folder, needed)

    def announce(
        self,
        port: int,
        swarm: HivemindSwarm,
        stop: Callable[[str, int], None],
        stack: ExitStack,
    ) -> None:
        """Write our endpoint to the chain unless it is there, and follow the chain's view of us.

        Returns at once. Chain and ``swarm`` get another address of this machine when it changes.
        ``stop``: why this miner must end, and the exit status.
        """
        endpoint = self.ip, self.config.chain.external_port or port
        identity.announce(self.member, *endpoint)

        # A miner that is called has the right address: the services that tell it are left alone.
        def public_ip() -> str | None:
            with suppress(AddressUnknown):
                return public_address(self.config) if self.round_clock.missed() else None
            return None

        def moved(ip: str) -> None:
            try:
                if (announced := _swarm_ip(self.config, ip)) is not None:
                    swarm.announce(announced)
            except SwarmUnavailable as error:  # its keeper goes on trying, with the new address
                log.warning("%s", error)

        local = self.config.preset == "local"  # where a minute is a long time
        watcher = identity.follow_registration(
            self.member,
            endpoint=endpoint,
            commitment=self.commitment,
            stop=stop,
            belief=Belief(
                self.config.miner.master_ss58_address,
                timedelta(seconds=5) if local else MISSING_FOR,
                self.config.chain.how_to_register,
            ),
            on_read=lambda: keep_state(self.chain, self.config.chain, self.folder),
            interval=timedelta(seconds=1) if local else REGISTRATION_INTERVAL,
            public_ip=public_ip,
            moved=moved,
        )
        stack.callback(watcher.close)


def connect(
    config: Config, folder: Path, stack: ExitStack, *, wanted: Callable[[], bool]
) -> Services:
    """Open rank 0's connections.

    Raises ConfigError, NetworkFailure, StopBeforeStart (``wanted`` turned False).
    """
    # First: it imports hivemind, for seconds, while all else is asked.
    swarm_launch = launch_host(folder)
    stack.callback(swarm_launch.end)
    require_data(config)
    member = join_network(config, folder, stack, wanted)
    clock = ClockWatch(partial(measure, config, member.chain))
    stack.callback(clock.close)
    # Before a download of hours: the network's rounds may have stopped.
    if config.is_public and (state := check_global_state(config, member.chain)).status == "warn":
        log.warning("%s", state.line)
    bucket = keys.miner_bucket(config.store.global_model_name, member.uid)
    log.info("%s", identity_line(member, netuid=config.chain.netuid, bucket=bucket))
    ip = _address(config, member)
    published, commitment = open_own_bucket(config, member, bucket)
    # After the read key was tried: what is committed stays on the chain for good.
    identity.commit(member, commitment)
    global_bucket = open_global_bucket(config, member.chain, folder, wanted)
    resumes = any((folder / "checkpoints").glob("checkpoint-*"))
    outer_step, global_folder, seen = first_global_state(global_bucket, wanted, resumes=resumes)
    model = model_config(global_folder)
    log.info("%s", model_line(model, outer_step))
    tokenizer_path, eos_id = fetch_tokenizer(config, folder)
    snapshots = folder / "snapshots"
    uploader = Uploader(settings=config.store, bucket=bucket, folder=folder, snapshots=snapshots)
    stack.callback(uploader.close)
    return Services(
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
        info=StartupInfo(
            uid=member.uid,
            model_config=model,
            tokenizer_path=str(tokenizer_path),
            eos_id=eos_id,
            global_outer_step=outer_step,
            global_seen=seen,
            global_uid=member.chain.uid(config.miner.master_ss58_address),
            first_block=member.chain.block(),
            hotkey=member.hotkey,
        ),
        round_clock=_round_clock(config, member.chain, model, outer_step),
        schedule=_upload_schedule(config.store, published),
        uploader=uploader,
        metrics=MetricsFile(folder / "metrics.prom"),
        clock=clock,
    )


def global_interval(config: Config) -> timedelta:
    """Return the time between two looks at the global bucket."""
    blocks = config.miner.epoch_check_blocks
    return timedelta(seconds=blocks * config.chain.seconds_per_block)


def _round_clock(
    config: Config, chain: Chain, model: Mapping[str, Any], outer_step: int
) -> RoundClock:
    """Make the round clock."""
    shortest = period = config.miner.blocks_per_allreduce
    # From the network's first success on validators leave more time between two rounds.
    if outer_step > 0:
        period = max(period, config.miner.blocks_per_allreduce_later)
    last = model.get("last_allreduce_block")
    return RoundClock(
        chain_block=chain.block,
        blocks_per_allreduce=period,
        shortest_period=shortest,  # which a validator falls back to when it starts again
        last_allreduce_block=last if isinstance(last, int) else None,
        chain_age=chain.age,
        seconds_per_block=config.chain.seconds_per_block,
    )


def _address(config: Config, member: Member) -> str:
    """Return the address that others call. Raises NetworkFailure."""
    try:
        return public_address(config)
    except AddressUnknown as error:
        # What was right before the restart mostly is; should it not be, no call comes, and the
        # address is asked for again.
        me = find(member.chain.neurons(), member.hotkey)
        if me is None or me.port is None:
            raise NetworkFailure(str(error)) from None
        log.warning("%s. Going on with %s, which the chain shows for it", error, me.ip)
        return me.ip


def _swarm_ip(config: Config, ip: str) -> str | None:
    """Return the address to announce to the swarm, which knows IPv4 only; None: p2pd's own guess.

    ``ip``: at which others reach this machine, where ``--dht.ip`` gives no other.
    """
    return config.swarm.dht_ip or (None if ":" in ip else ip)


def _upload_schedule(settings: StoreSettings, published: Published) -> UploadSchedule:
    return UploadSchedule(
        upload_steps=settings.upload_steps,
        minimum_inner_step=settings.minimum_valid_inner_step,
        age_limit=settings.age_limit,
        published_at=published.at,
    )


def identity_line(member: Member, *, netuid: int, bucket: str) -> str:
    """Return who this miner is and what it earns, for the log: before anything is downloaded."""
    found = standing(member.chain.neurons(), member.hotkey)
    return (
        f"Miner {__version__}: uid {member.uid}, hotkey {member.hotkey}, netuid {netuid}, "
        f"bucket {bucket}{', ' + found.words if found else ''}"
    )


def model_line(content: Mapping[str, Any], outer_step: int) -> str:
    """Return the size of the network's model, for the log; a size that is not known is left out."""
    try:
        parameters = ModelShape.from_config(content).parameters
    except ValueError:  # the trainer refuses it in words
        return f"Global state of outer step {outer_step}"
    size = f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"
    return f"Global state of outer step {outer_step}: a model of {size} parameters"


def on_this_node(config: Config, folder: Path, ranks: Ranks, info: StartupInfo) -> StartupInfo:
    """Rank 0's ``info``, where other machines have the tokenizer in a folder of their own."""
    node, found = ranks.rank // ranks.local_world_size, None
    if node == 0 or info.problem:
        return info
    if ranks.local_rank == 0:
        path, eos_id = fetch_tokenizer(config, folder)
        if eos_id != info.eos_id:
            raise ConfigError(
                "--neuron.global_tokenizer_name is another tokenizer here than on node 0 (its end "
                f"of text is token {eos_id}, there {info.eos_id}), so this node would train on "
                f"other tokens: remove {path}, and start again"
            )
        found = {"path": str(path)}
    return replace(info, tokenizer_path=ranks.share(f"tokenizer-{node}", found)["path"])
