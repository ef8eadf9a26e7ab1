"""Build rank 0 of a store network, and each rank's part of a round.

    open_connections   wallet, registry, the network's bucket, its newest weights
    RankZero           rounds, controller, then telemetry

Nobody connects to such a miner: it has no server and no swarm, a bucket of its own only with
``store.access = "own"``, and what it imports has nothing of hivemind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bittensor_core import verify

from distributed_training.chain.registration import (
    RegistrationEvent,
    RegistrationWatcher,
    WatcherCallbacks,
)
from distributed_training.common.backoff import Repeats
from distributed_training.common.memory import DISK_RESERVE, checkpoint_bytes
from distributed_training.config import Config
from distributed_training.config.versions import Versions, has_versions
from distributed_training.exchange.base import Close
from distributed_training.exchange.own_uploads import OwnUploads
from distributed_training.exchange.store_rounds import StoreRounds
from distributed_training.network import FILE
from distributed_training.node.buckets import open_as_member, open_own
from distributed_training.node.identity import Member, commit, keep_state
from distributed_training.node.start import require_data
from distributed_training.protocol import lines
from distributed_training.protocol.keys import miner_bucket
from distributed_training.protocol.manifest import Master
from distributed_training.protocol.types import ExitStatus
from distributed_training.protocol.update_file import MOST_BLOCKS, Header, largest_file
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.errors import StoreError
from distributed_training.store.snapshot_folder import describe_full_disk
from distributed_training.telemetry import EventLog, unix_time
from distributed_training.training.outer_step import read_model_config

from . import events as ev
from .assembly import (
    Held,
    RankContext,
    describe_member,
    describe_size,
    open_block_list,
    open_metrics,
    open_versions,
    prepare_text,
    record_start,
    registration_terms,
    rules_of,
)
from .controller import Controller, Subscriber
from .device import expects_gpu
from .events import MinerState, Mode, Rules
from .global_state import GlobalBucket, NetworkWatch, StartWait, pause_start
from .income import Income, with_uploads
from .own_bucket import open_own_bucket
from .registration import join_network
from .reporter import Record, StoreReporter
from .resume import StartupInfo, first_outer_step
from .store_round import StoreRank, StoreTasks, UploadWatch, event_of

log = logging.getLogger(__name__)

_UPDATE_BITS = 4  # of the validator's update, whatever the uploads have
_NO_DIGEST = "0" * 64
_SAY_AGAIN = 600.0  # seconds between two lines of one cause


@dataclass(frozen=True)
class Connections:
    """The connections that rank 0 opens before there is a model.

    ``global_folder``: files of the weights that a fresh start begins with. ``versions``: of the
    network's file, None where it has none. ``commitment``: the read key of our own bucket.
    """

    member: Member
    rounds: StoreRounds
    global_folder: Path
    versions: Versions | None = None
    commitment: str = ""


def open_connections(
    config: Config,
    folder: Path,
    stack: ExitStack,
    wanted: Callable[[], bool],
    post: Callable[[ev.Event], None],
) -> tuple[Connections, StartupInfo]:
    """Open rank 0's connections; return what they are, and what every rank needs of them.

    ``post``: queues an event, from any thread. Raises ConfigError, NetworkFailure, StopBeforeStart
    (``wanted`` turned False).
    """
    if not has_versions(config) or config.data.own:
        require_data(config)
    member = join_network(config, folder, stack, wanted)
    describe_member(config, member)
    store = uploads = open_as_member(config, member.chain)
    commitment = ""
    if config.has_bucket:
        own = miner_bucket(config.store.global_model_name, member.uid)
        commitment = open_own_bucket(config, member, own).commitment
        uploads = open_own(config.store, own)
    stack.callback(uploads.close)
    reader = BucketReader(store, large=config.round_period)
    bucket = GlobalBucket(
        open_bucket=lambda: reader, folder=folder / "global", run=config.store.run
    )
    watch = None if config.network is None else NetworkWatch(bucket, config.network, None, post)
    rounds = _kind_of_rounds(config, member)(
        store,
        folder / "exchange",
        lambda fact: post(event_of(fact)),
        master=Master(config.swarm.run_id, config.miner.master_ss58_address, verify),
        uploads=OwnUploads(uploads, folder / "exchange" / "uploads", member.uid),
        longest=config.round_period,
        at_head=lambda: None if watch is None else watch.look(),
    )
    stack.callback(rounds.stop)
    checkpoints = folder / "checkpoints"
    resumes = any(checkpoints.glob("checkpoint-*"))
    outer_step, global_folder, steps = first_weights(rounds, wanted, resumes=resumes)
    model = read_model_config(global_folder)
    log.info("Global state of outer step %d%s", outer_step, describe_size(model, config))
    first = first_outer_step(checkpoints, outer_step, seen=True, store=True)
    config, versions = open_versions(config, folder, bucket, first, lambda: reader)
    if watch is not None:
        watch.versions = versions
    tokenizer_path, eos_id = prepare_text(config, folder)
    info = StartupInfo(
        uid=member.uid,
        model_config={**model, "total_inner_steps": steps},
        tokenizer_path=str(tokenizer_path),
        eos_id=eos_id,
        global_outer_step=outer_step,
        global_uid=member.chain.uid(config.miner.master_ss58_address),
        first_block=member.chain.block(),
        hotkey=member.hotkey,
        follows=True,
        rules=versions.in_force.files[FILE] if versions else "",
    )
    return Connections(member, rounds, global_folder, versions, commitment), info


def _kind_of_rounds(config: Config, member: Member) -> Callable[..., StoreRounds]:
    if not config.averages:
        return StoreRounds
    # Only here: a member of a store network has nothing of it in its memory.
    from distributed_training.exchange.hivemind import HivemindRounds, Membership

    return partial(
        HivemindRounds,
        membership=Membership(
            member.chain.neurons, member.hotkey, config.miner.master_ss58_address
        ),
        average_after=config.miner.average_after.total_seconds(),
    )


def first_weights(
    rounds: StoreRounds, wanted: Callable[[], bool], *, resumes: bool
) -> tuple[int, Path, int]:
    """Wait for whole weights; return their outer step, folder, and the inner steps before it.

    ``resumes``: there is a checkpoint to train from, so those on the disk will do. Raises
    StopBeforeStart.
    """
    waiting = StartWait("if this lasts: does the founder's validator run?")
    while True:
        if resumes and (held := rounds.held_weights()) is not None:
            outer_step = int(held.name)
            manifest = rounds.manifest(outer_step)
            return outer_step, held, manifest.total_inner_steps if manifest else 0
        try:
            found = rounds.fetch_newest()
            return found.outer_step, found.path.parent, found.inner_steps
        except (StoreError, OSError) as error:
            waiting.report(f"Waiting for the network's weights: {error}", expected=True)
        pause_start(wanted)


class RankZero:
    """Rank 0's own part. Its attributes are built in the order in which they stand."""

    def __init__(
        self,
        context: RankContext,
        info: StartupInfo,
        connections: Connections,
        training: Held,
    ) -> None:
        self._context, self._info = context, info
        self._connections, self._training = connections, training
        config, trainer, chain = context.config, training.trainer, connections.member.chain
        # --- who decides
        period = config.miner.blocks_per_allreduce
        self.blocks = open_block_list(
            context, training, chain, uid=info.uid, recent=lambda: period // 2
        )
        self.controller = Controller(
            state=MinerState(mode=Mode.TRAINING, outer_step=trainer.outer_step),
            rules=Rules(
                reload_seconds=0.0,
                checkpoint_steps=config.miner.checkpoint_steps,
                checkpoint_seconds=config.miner.checkpoint_interval.total_seconds(),
                tick_seconds=context.tick.total_seconds(),
                exchange="store",
            ),
            events=context.events,
            blocks=self.blocks,
            start_task=StoreTasks(connections.rounds).start,
            versions=connections.versions,
            global_outer_step=info.global_outer_step,
        )
        self._subscribe()

    def _subscribe(self) -> None:
        """Build the subscribers that get each event, in this order, after the block list."""
        config, folder = self._context.config, self._context.folder
        trainer, connections = self._training.trainer, self._connections
        log_of = "distributed_training" if self._context.guest else ""
        self.record: Record = EventLog.open(folder, logger=log_of).write
        reporter = StoreReporter(
            record=self.record,
            warnings=lambda report: lines.step_warnings(
                report, expect_gpu=expects_gpu(config, self._context.device)
            ),
            bucket=config.store.global_model_name,
            global_uid=self._info.global_uid,
            joined=lambda: self.income.joined,
        )
        if self._context.guest:  # the script's output has its own lines for a step
            reporter.step_level = logging.DEBUG
        shapes, moments = [shape for _, shape in trainer.schema], trainer.moments
        upload = largest_file(trainer.schema, config.miner.bits)
        needed = upload + checkpoint_bytes(shapes, moments)

        def next_close() -> float | None:
            close = connections.rounds.next_close
            return None if close is None else close.closes_at

        self.income = income = Income(
            hotkey=self._info.hotkey,
            chain=connections.member.chain,
            rules=with_uploads(rules_of(config, self._info.uid), folder),
            measured=lambda: {
                "store_silent_since": unix_time(connections.rounds.silent_since),
                "store_trouble": connections.rounds.trouble,
                "chain_trouble": connections.member.chain.trouble,
                "gate": connections.rounds.gate,
                "next_round": next_close(),
                "next_upload": next_close(),
            },
            record=self.record,
            folder=folder,
            needed=needed + DISK_RESERVE,
        )
        metrics = open_metrics(
            self._context,
            self._training,
            self.blocks,
            connections.member.chain,
            uid=self._info.uid,
            needed=needed + DISK_RESERVE,
            gauges={
                "next_round_timestamp_seconds": next_close,
                "clock_offset_seconds": connections.rounds.clock_offset,
                "round_seconds": lambda: reporter.round_seconds,
                **income.gauges(),
            },
            joined=lambda: income.joined,
        )
        uploads = UploadWatch(
            connections.rounds,
            inner_step=lambda: trainer.inner_step,
            minimum=config.store.minimum_valid_inner_step,
            disk_problem=lambda: describe_full_disk(folder, needed),
            keep=config.miner.keep_checkpoints,
            joined=lambda: income.joined,
        )
        # The reporter before the uploads: a step's line stands above what it led to.
        for subscriber in (income, reporter, metrics, uploads):
            follow: Subscriber = subscriber.on_event
            self.controller.subscribe(_forgiving(follow) if self._context.guest else follow)

    def header(self, close: Close, block_list: Sequence[int]) -> Header:
        """Return the header of the upload for ``close``; the trainer fills in the rest."""
        return Header(
            kind="upload",
            run_id=self._context.config.swarm.run_id,
            outer_step=close.outer_step,
            serial=close.serial,
            hotkey=self._info.hotkey,
            start=_NO_DIGEST,
            bits=self._context.config.miner.bits,
            inner_steps=0,
            tokens=0,
            blocks=tuple(block_list)[-MOST_BLOCKS:],
        )

    def go_live(self) -> None:
        """Begin to follow the network. Returns at once."""
        trainer, context = self._training.trainer, self._context
        config, member = context.config, self._connections.member
        ours = {"commitment": text} if (text := self._connections.commitment) else {}
        belief, interval = registration_terms(config)

        def changed(event: RegistrationEvent) -> None:
            context.events.put(ev.StopRequested(event.line, ExitStatus.FAULT))

        watcher = RegistrationWatcher(
            chain=member.chain,
            hotkey=member.hotkey,
            uid=member.uid,
            ours=ours,  # nobody calls this miner
            callbacks=WatcherCallbacks(
                changed,
                on_lost=lambda _: commit(member, text),
                on_read=lambda: keep_state(member.chain, config.chain, context.folder),
            ),
            belief=belief,
            interval=interval,
        )
        context.stack.callback(watcher.close)
        watcher.start()
        if text:
            commit(member, text)
        rounds = self._connections.rounds
        if config.averages:
            from distributed_training.exchange.hivemind import HivemindRounds
            from distributed_training.node.peer import announcer, peer_settings

            assert isinstance(rounds, HivemindRounds)
            settings = peer_settings(config, trainer.schema, context.folder)
            rounds.open_peer(settings, announcer(config, member))
        largest = largest_file(trainer.schema, _UPDATE_BITS)
        rounds.start(trainer.outer_step, largest_update=largest)
        record_start(self.record, context, self._info, self._training)


def _forgiving(subscriber: Subscriber) -> Subscriber:
    """Return a subscriber whose errors are warnings: the event is decided on all the same."""
    repeats = Repeats(_SAY_AGAIN)

    def on_event(event: ev.Event, state: MinerState) -> Iterable[ev.Event] | None:
        try:
            return subscriber(event, state)
        except Exception as error:
            if (again := repeats(type(error).__name__)) is not None:
                name = type(event).__name__
                log.warning(
                    "%s could not be followed; training continues%s", name, again, exc_info=error
                )
            return None

    return on_event


def build_exchange(
    context: RankContext, info: StartupInfo, connections: Connections | None, training: Held
) -> tuple[RankZero | None, StoreRank]:
    """Build rank 0's own part, and this rank's part of rounds.

    ``connections``: rank 0's, else None. Raises ConfigError.
    """
    if connections is None:
        return None, StoreRank(training.trainer, context.ranks)
    rank_zero = RankZero(context, info, connections, training)
    return rank_zero, StoreRank(
        training.trainer,
        context.ranks,
        rounds=connections.rounds,
        header=rank_zero.header,
        sign=connections.member.wallet.hotkey.sign,
    )
