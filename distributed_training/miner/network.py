"""Rank 0's way to the outside: wallet, chain, buckets, swarm and server out of the configuration.

Everything here may take long or fail; it happens before a model is built, so that a missing key or
an unregistered hotkey is told at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from distributed_training.chain.address import AddressUnknown, external_ip
from distributed_training.chain.base import Chain, ChainError, find, wait_ready
from distributed_training.chain.client import SignedClient
from distributed_training.chain.local import LocalChain
from distributed_training.chain.registration import (
    INTERVAL as REGISTRATION_INTERVAL,
)
from distributed_training.chain.registration import (
    Change,
    RegistrationEvent,
    RegistrationWatcher,
)
from distributed_training.chain.server import SignedServer
from distributed_training.chain.wallet import Wallet, load_wallet
from distributed_training.config import Config, ConfigError
from distributed_training.data import build_tokenizer
from distributed_training.miner.drift import Rows
from distributed_training.miner.global_start import (
    first_global_state,
    open_global_bucket,
)
from distributed_training.miner.global_state import GlobalBucket, model_config
from distributed_training.miner.global_watch import GlobalWatch
from distributed_training.miner.round_clock import RoundClock
from distributed_training.miner.state import Event
from distributed_training.protocol import lines, names, schedule
from distributed_training.protocol.commitment import (
    BucketCredentials,
    CommitmentError,
    build_commitment,
)
from distributed_training.protocol.types import RoundRequest
from distributed_training.store.errors import (
    BucketMissingError,
    ClockSkewError,
    DeadlineError,
    StoreError,
)
from distributed_training.store.freshness import UploadSchedule
from distributed_training.store.publisher import Publisher
from distributed_training.store.read_key import check_read_key
from distributed_training.store.remote import RemoteState
from distributed_training.store.retry import deadline_in, retrying
from distributed_training.store.s3 import S3ObjectStore
from distributed_training.swarm import HivemindSwarm, SwarmUnavailable

log = logging.getLogger(__name__)

FAULT, BAD_CONFIGURATION, DEREGISTERED = 1, 2, 3  # exit statuses

_BUCKET_CHECK = timedelta(seconds=30)
_SECOND_MINER_TIMEOUT = timedelta(seconds=2.3)  # as long as validators wait for IsAlive


class NetworkFailure(RuntimeError):
    """The outside cannot be reached; the line says why and what mends it. Exit status 1."""


@dataclass
class Outside:
    """What :func:`connect` found, and what it can open."""

    config: Config
    folder: Path
    wallet: Wallet
    chain: Chain
    uid: int
    published_at: float | None  # time.monotonic() of the newest gradients.pt in our bucket
    ip: str  # validators reach us at
    commitment: str  # our read credentials, as the chain holds them
    bucket: str
    global_bucket: GlobalBucket
    global_outer_step: int
    global_folder: Path
    model_config: dict[str, Any]
    tokenizer_path: Path
    eos_id: int

    @property
    def hotkey(self) -> str:
        return self.wallet.ss58

    def upload_schedule(self) -> UploadSchedule:
        settings = self.config.store
        return UploadSchedule(
            upload_steps=settings.upload_steps,
            minimum_inner_step=settings.minimum_valid_inner_step,
            age_limit=settings.age_limit,
            slack=settings.upload_slack,
            published_at=self.published_at,
        )

    def round_clock(self) -> RoundClock:
        """The public validator's period is longer from the first successful round on."""
        period = self.config.miner.blocks_per_allreduce
        if self.config.preset == "public" and self.global_outer_step > 0:
            period = max(period, schedule.BLOCKS_PER_ALLREDUCE_LATER)
        last = self.model_config.get("last_allreduce_block")
        return RoundClock(
            chain_block=self.chain.block,
            blocks_per_allreduce=period,
            last_allreduce_block=last if isinstance(last, int) else None,
            seconds_per_block=self._seconds_per_block(),
        )

    def open_swarm(self, schema: Sequence[tuple[str, tuple[int, ...]]]) -> HivemindSwarm:
        """Raises NetworkFailure."""
        try:
            return HivemindSwarm(settings=self.config.swarm, schema=schema, run_folder=self.folder)
        except SwarmUnavailable as error:
            raise NetworkFailure(str(error)) from None

    def open_publisher(self, snapshots: Path) -> Publisher:
        return Publisher(
            settings=self.config.store,
            bucket=self.bucket,
            folder=self.folder,
            snapshots=snapshots,
        )

    def watch(
        self, post: Callable[[Event], None], epoch_start: Callable[[], tuple[int, Sequence[Rows]]]
    ) -> GlobalWatch:
        blocks = self.config.miner.epoch_check_blocks
        return GlobalWatch(
            reader=self.global_bucket,
            post=post,
            interval=timedelta(seconds=blocks * self._seconds_per_block()),
            epoch_start=epoch_start,
        )

    def _seconds_per_block(self) -> float:
        return 1.0 if self.config.preset == "local" else schedule.SECONDS_PER_BLOCK

    def open_server(
        self,
        *,
        epoch: Callable[[], int],
        on_all_reduce: Callable[[RoundRequest], None],
        round_phase: Callable[[], str | None],
    ) -> SignedServer:
        """Bound, not yet answering. Raises ConfigError when the port is taken."""

        def called(request: RoundRequest) -> None:
            log.info("%s", lines.RECEIVED_MAIN_ALL_REDUCE)
            on_all_reduce(request)

        return SignedServer(
            settings=self.config.chain,
            wallet=self.wallet,
            chain=self.chain,
            master_hotkey=self.config.miner.master_ss58_address,
            epoch=epoch,
            on_all_reduce=called,
            round_phase=round_phase,
            nonce_file=self.folder / "nonces.json",
        )

    def announce(self, port: int) -> None:
        """Write our endpoint to the chain unless it is there. In a thread: chains are slow."""
        wanted = self._endpoint(port)

        def write() -> None:
            wait = 2.0
            while True:
                try:
                    me = find(self.chain.neurons(), self.hotkey)
                    if me is not None and (me.ip, me.port) == wanted:
                        return
                    self.chain.serve(*wanted)
                    log.info("Endpoint %s:%d written to the chain", *wanted)
                    return
                except ChainError as error:
                    log.warning("The endpoint was not written (%s). Trying again.", error)
                time.sleep(wait)
                wait = min(300.0, 2 * wait)

        threading.Thread(target=write, name="announce", daemon=True).start()

    def follow_registration(
        self, port: int, stop: Callable[[str, int], None], stack: ExitStack
    ) -> None:
        """Call ``stop(reason, exit status)`` when this hotkey is no longer ours alone: deregistered
        or used by a second miner (3: starting again would not help), moved to another uid (1: a
        new start publishes to the new bucket)."""

        def changed(event: RegistrationEvent) -> None:
            stop(event.line, FAULT if event.change is Change.UID_CHANGED else DEREGISTERED)

        def lost(what: str) -> None:
            if what == "endpoint":
                self.announce(port)
            else:
                _commit(self.config, self.chain, self.wallet)

        watcher = RegistrationWatcher(
            chain=self.chain,
            hotkey=self.hotkey,
            uid=self.uid,
            on_event=changed,
            on_lost=lost,
            endpoint=self._endpoint(port),
            commitment=self.commitment,
            interval=self._registration_interval(),
        )
        stack.callback(watcher.close)
        watcher.start()

    def _registration_interval(self) -> timedelta:
        return timedelta(seconds=1) if self.config.preset == "local" else REGISTRATION_INTERVAL

    def _endpoint(self, port: int) -> tuple[str, int]:
        return self.ip, self.config.chain.external_port or port


def connect(
    config: Config, folder: Path, stack: ExitStack, *, wanted: Callable[[], bool]
) -> Outside:
    """Raises ConfigError, NetworkFailure, StopBeforeStart (``wanted`` turned False)."""
    wallet = load_wallet(config.chain)
    chain = _open_chain(config, wallet)
    stack.callback(chain.close)
    try:
        wait_ready(chain, config.chain.start_timeout)
    except ChainError as error:
        raise NetworkFailure(str(error)) from None
    uid = chain.uid(wallet.ss58)
    if uid is None:
        raise ConfigError(
            f"hotkey {wallet.ss58} is not registered on subnet {config.chain.netuid}, so nobody "
            "would score or pay this miner: register it with `btcli subnet register`, or give "
            "another --wallet.hotkey"
        )
    bucket = names.miner_bucket(config.store.global_model_name, uid)
    try:
        ip = external_ip(config.chain)
    except AddressUnknown as error:
        raise NetworkFailure(str(error)) from None
    _refuse_second_miner(chain, wallet)
    published_at = _check_bucket(config, bucket)
    _check_read_key(config, bucket)
    commitment = _commit(config, chain, wallet)
    global_bucket = open_global_bucket(config, chain, folder, wanted)
    outer_step, global_folder = first_global_state(global_bucket, wanted)
    tokenizer_path, eos_id = _tokenizer(config, folder)
    return Outside(
        config=config,
        folder=folder,
        wallet=wallet,
        chain=chain,
        uid=uid,
        published_at=published_at,
        ip=ip,
        commitment=commitment,
        bucket=bucket,
        global_bucket=global_bucket,
        global_outer_step=outer_step,
        global_folder=global_folder,
        model_config=model_config(global_folder),
        tokenizer_path=tokenizer_path,
        eos_id=eos_id,
    )


def _open_chain(config: Config, wallet: Wallet) -> Chain:
    if config.chain.local_url is not None:
        return LocalChain(url=config.chain.local_url, wallet=wallet)
    from distributed_training.chain.subtensor import BittensorChain

    return BittensorChain(settings=config.chain, wallet=wallet)


def _refuse_second_miner(chain: Chain, wallet: Wallet) -> None:
    """Raises ConfigError if a running miner with this hotkey answers at the chain's endpoint."""
    me = find(chain.neurons(), wallet.ss58)
    if me is None or me.port is None:
        return
    if SignedClient(wallet=wallet).answers_for_us(me, _SECOND_MINER_TIMEOUT):
        raise ConfigError(
            f"another miner with hotkey {wallet.ss58} answers at {me.ip}:{me.port}, so both would "
            "overwrite each other's uploads: stop it first, or give another --wallet.hotkey"
        )


def _check_bucket(config: Config, bucket: str) -> float | None:
    """That the bucket is there and the write keys work. ``time.monotonic()`` of its newest
    gradient, or None without one.

    Raises ConfigError, NetworkFailure."""
    with _bucket(config, bucket, write=True) as store:
        retrying(
            f"look into bucket {bucket}",
            lambda: store.head("metadata.json"),
            deadline=deadline_in(_BUCKET_CHECK),
        )
        # A missing bucket and a missing object look alike to HEAD; a listing tells them apart.
        store.list_multiparts()
        return _published_at(RemoteState(store=store, deadline=_BUCKET_CHECK))


def _check_read_key(config: Config, bucket: str) -> None:
    """Before it is committed to the chain, where it stays. Raises ConfigError, NetworkFailure."""
    with _bucket(config, bucket, write=False) as store:
        check_read_key(store, timeout=_BUCKET_CHECK)


@contextmanager
def _bucket(config: Config, bucket: str, *, write: bool) -> Iterator[S3ObjectStore]:
    """The bucket, opened with our keys; a store's error ends the start with its line."""
    try:
        store = S3ObjectStore.from_settings(config.store, bucket=bucket, write=write)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        yield store
    except BucketMissingError:
        raise ConfigError(
            f"bucket {bucket} does not exist, so nothing could be published: create it in the R2 "
            "dashboard with exactly this name"
        ) from None
    except StoreError as error:
        # A clock may be set, and a service come back, without anyone: pm2 tries again.
        passes = error.retryable or isinstance(error, (ClockSkewError, DeadlineError))
        raise (NetworkFailure if passes else ConfigError)(str(error)) from None
    finally:
        store.close()


def _published_at(bucket: RemoteState) -> float | None:
    try:
        root = bucket.metadata()
        age = None if root is None else bucket.age(root.outer_step)
    except StoreError as error:
        log.warning("The age of what is published is not known before the next upload: %s", error)
        return None
    return None if age is None else time.monotonic() - age.total_seconds()


def _commit(config: Config, chain: Chain, wallet: Wallet) -> str:
    """The read credentials onto the chain, unless they are there; tried again in the background.

    Returns the commitment's text."""
    settings = config.store
    try:
        text = build_commitment(
            BucketCredentials(
                settings.account_id or "",
                _text(settings.read_access_key_id),
                _text(settings.read_secret_access_key),
            )
        )
    except CommitmentError as error:
        raise ConfigError(
            f"the read keys do not fit into a commitment ({error}), so validators could not read "
            "the uploads: correct R2_ACCOUNT_ID, R2_READ_ACCESS_KEY_ID, R2_READ_SECRET_ACCESS_KEY"
        ) from None

    def write() -> None:
        wait = 5.0
        while True:
            try:
                if chain.commitment(wallet.ss58) == text:
                    return
                chain.commit(text)
                log.info("%s", lines.METADATA_LOGGED)
                return
            except ChainError as error:
                log.warning("The commitment was not written (%s). Trying again.", error)
            time.sleep(wait)
            wait = min(600.0, 2 * wait)

    threading.Thread(target=write, name="commitment", daemon=True).start()
    return text


def _text(value: SecretStr | None) -> str:
    return value.get_secret_value() if value is not None else ""


def _tokenizer(config: Config, folder: Path) -> tuple[Path, int]:
    name = config.miner.global_tokenizer_name
    try:
        return build_tokenizer(name, folder / "tokenizer")
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"the tokenizer {name} cannot be loaded ({error}), so no text could be trained on: "
            "check the network or --neuron.global_tokenizer_name"
        ) from None
