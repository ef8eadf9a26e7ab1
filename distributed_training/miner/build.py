"""Build the parts of a miner's rank, for either exchange.

open_connections   on rank 0: wallet, registry, the network's bucket and its newest weights
resume             on every rank: the weights and the data to continue with
build_rounds       on rank 0: controller and telemetry; on every rank: its part of the rounds
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distributed_training import __version__
from distributed_training.common.backoff import Repeats, Throttle
from distributed_training.common.files import read_json_object
from distributed_training.common.memory import DISK_RESERVE, checkpoint_bytes
from distributed_training.config import Config
from distributed_training.config.types import ConfigError, choose_kind
from distributed_training.config.versions import Versions, for_script, parse_version, under
from distributed_training.data.block_builder import WorkerSpec
from distributed_training.data.pipeline import DataPipeline
from distributed_training.exchange.opening import open_exchange, uploads_folder
from distributed_training.exchange.store_rounds import StoreRounds
from distributed_training.health.gpus import visible_gpu_count
from distributed_training.network import Network
from distributed_training.node.buckets import check_as_member, open_as_member, open_own
from distributed_training.node.identity import Member, commit
from distributed_training.node.published import fetch_published, open_versions
from distributed_training.node.start import (
    NetworkFailure,
    StopNow,
    WrongPlace,
    fetch_tokenizer,
    require_data,
)
from distributed_training.protocol import keys
from distributed_training.protocol.codecs import CODECS
from distributed_training.protocol.keys import miner_bucket
from distributed_training.protocol.pages import block_at
from distributed_training.protocol.update_file import Header, largest_file
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.errors import StoreError
from distributed_training.store.transfer import describe_full_disk
from distributed_training.telemetry import EventLog, MetricsFile
from distributed_training.telemetry.facts import Facts
from distributed_training.telemetry.own_facts import OwnFacts
from distributed_training.telemetry.trackers import open_trackers
from distributed_training.training.checkpoint import (
    Checkpointer,
    is_complete,
    newest_first,
    oldest_outer_step,
    outer_step_of,
)
from distributed_training.training.held_weights import HeldWeights
from distributed_training.training.model import build_meta_model, count_parameters
from distributed_training.training.weights import read_model_config

from . import events as ev
from .blocks import Blocks, NoBlocks
from .events import MinerState, Mode, Rules
from .loop import Controller, Subscriber
from .network_watch import (
    NetworkWatch,
    chain_facts,
    follow_registration,
    join_network,
    read_version,
)
from .ranks import RankChannel
from .reporter import Metrics, Record, Reporter, gauges_by_rank, machine_gauges
from .rounds import RoundRank

log = logging.getLogger(__name__)

_NO_DIGEST = "0" * 64
_SAY_AGAIN = 600.0  # seconds between two log lines about the same cause
_LOOK_AGAIN = 1.0  # seconds between two checks for weights that do not exist yet
_START_AGAIN = 300.0  # seconds between two log lines while a start waits for the same thing
_START_EXPECTED = 600.0  # seconds that a start may wait for the first state before it warns
#: How often "auto" writes a checkpoint: after this many inner steps and seconds of training.
_CHECKPOINT_STEPS, _CHECKPOINT_SECONDS = 25, 600.0


@dataclass(frozen=True)
class RankContext:
    """The environment in which a rank is built."""

    config: Config
    folder: Path
    device: torch.device
    ranks: RankChannel
    events: queue.SimpleQueue[ev.Event]  # read only on rank 0
    stack: ExitStack  # closes everything that was opened
    # True in a script's process, where nothing may end that process or change its log.
    guest: bool = False


@dataclass(frozen=True)
class StartupInfo:
    """The facts that rank 0 found out and every rank needs, as JSON-serializable values."""

    uid: int = 0
    model_config: dict[str, Any] = field(default_factory=dict)
    tokenizer_path: str = ""
    eos_id: int = 0
    global_outer_step: int = 0
    inner_steps: int = 0  # inner steps that the network took before that outer step
    hotkey: str = ""
    rules: str = ""  # text of the network's file in force; empty if it is the file that was given
    problem: str = ""  # why the start failed; if set, the other ranks exit quietly


def describe_size(model: Mapping[str, Any], config: Config) -> str:
    """Return the model's size for a log line.

    Raises ConfigError if the network's file states a different number of parameters than its
    model has, since memory and disk space are planned from that number.
    """
    parameters, _ = count_parameters(build_meta_model(model))
    network = config.network
    if network.model and network.head.parameters != parameters:
        raise ConfigError(
            f"--network {network.place}: model.parameters is {network.head.parameters} and its "
            f"model has {parameters}. Memory and disk are planned from it, so nothing was "
            "started: ask the founder to sign a corrected file"
        )
    unit, prefix = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    return f": a model of {parameters / unit:.2f} {prefix} parameters"


@dataclass(frozen=True)
class RankParts:
    """The objects that every rank has, whether the miner or a script trains."""

    trainer: HeldWeights
    checkpointer: Checkpointer
    data: DataPipeline | None  # None if a script brings its own data
    kept: Mapping[str, Any]  # this rank's part of the checkpoint; empty on a fresh start


def resume(
    context: RankContext,
    info: StartupInfo,
    trainer: HeldWeights,
    data: DataPipeline | None,
    connections: Connections | None,
) -> RankParts:
    """Continue from the last checkpoint, or else from the network's weights. Collective.

    Any checkpoint will do, because updates lead from its outer step to the network's. Training
    continues at the network's place in the learning rate's schedule. Raises NetworkFailure if the
    weights do not fit this model.
    """
    folder, keep = context.folder / "checkpoints", context.config.miner.keep_checkpoints
    checkpointer = Checkpointer(trainer=trainer, folder=folder, keep=keep)
    kept: dict[str, Any] = {}
    if (restored := checkpointer.restore()) is not None:
        progress, kept = restored
        log.info(
            "Resumed at outer step %d, inner step %d", progress.outer_step, progress.inner_step
        )
    else:
        try:
            weights = connections.global_folder / keys.MODEL if connections else None
            trainer.load_global(weights, info.global_outer_step)
        except ValueError as error:  # raised on all ranks alike, before anything was changed
            raise NetworkFailure(
                f"the network's weights do not fit this program ({error}), so nothing is trained: "
                "look for a newer version; other weights are fetched as soon as they are published"
            ) from None
    # The checkpoint may be behind the network's known place in the schedule.
    trainer.follow_schedule(info.global_outer_step, info.inner_steps)
    if data is not None:
        data.load_state_dict(kept.get("data", {}))
        if not kept:
            data.request(block_at(trainer.outer_step, 0))  # prepared while rank 0 joins the network
    return RankParts(trainer, checkpointer, data, kept)


def open_data(context: RankContext, info: StartupInfo, micro_batch_size: int) -> DataPipeline:
    """Open this rank's data; the context's stack closes it."""
    config, ranks = context.config, context.ranks
    data = DataPipeline(
        WorkerSpec(
            settings=config.data,
            uid=info.uid,
            rank=ranks.rank,
            world_size=ranks.world_size,
            sequence_length=config.training.sequence_length,
            tokenizer_path=Path(info.tokenizer_path),
            eos_id=info.eos_id,
            folder=context.folder / "data",
            vocabulary=int(info.model_config["vocab_size"]),
            draw_pages=config.draw_pages,
        ),
        micro_batch_size=micro_batch_size,
        device=context.device,
    )
    context.stack.callback(data.close)
    return data


@dataclass(frozen=True)
class Connections:
    """The connections that rank 0 opens before there is a model."""

    member: Member
    rounds: StoreRounds
    global_folder: Path  # folder with the weights that a fresh start begins with
    versions: Versions | None = None  # versions of the network's file; None if it has none
    commitment: str = ""  # the read key of our own bucket


def open_connections(
    config: Config,
    folder: Path,
    stack: ExitStack,
    post: Callable[[ev.Event], None],
    *,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[Connections, StartupInfo]:
    """Open rank 0's connections. Return them, and the facts that every rank needs.

    ``post``: queues an event, from any thread. ``stopped``: returns whether this start should end.
    Raises ConfigError, NetworkFailure, StopNow.
    """
    checkpoints = folder / "checkpoints"
    refuse_old_checkpoints(checkpoints)
    choose_kind(CODECS, config.rounds.codec, key="round.codec")
    network = config.network
    if config.data.own:
        require_data(config)
    member = join_network(config, folder, stack)
    own = miner_bucket(config.store.global_model_name, member.uid) if config.has_bucket else ""
    log.info(
        "Miner %s: uid %d, hotkey %s, netuid %d%s",
        __version__,
        member.uid,
        member.hotkey,
        config.chain.netuid,
        f", bucket {own}" if own else "",
    )
    store = uploads = open_as_member(config, member.chain)
    commitment = ""
    if own:
        commitment = check_as_member(config.store, member.chain, member.hotkey, own)
        uploads = open_own(config.store, own)
    stack.callback(uploads.close)
    reader = BucketReader(store, large=config.rounds.period)
    watch = NetworkWatch(reader, network, None, post)
    rounds = open_exchange(
        config,
        member,
        folder,
        store=store,
        uploads=uploads,
        at_head=watch.compare,
    )
    stack.callback(rounds.stop)
    resumes = any(checkpoints.glob("checkpoint-*"))
    outer_step, global_folder, steps = first_weights(rounds, stopped, resumes=resumes)
    model = read_model_config(global_folder)
    log.info("Global state of outer step %d%s", outer_step, describe_size(model, config))
    first = first_outer_step(checkpoints, outer_step)
    read = partial(read_version, reader)
    versions = watch.versions = open_versions(network, folder, first, read)
    # Do this before the data is fetched, because the file that was given may name outdated data.
    config = under(config, versions.in_force)
    fetch_published(config, lambda: reader)
    require_data(config)
    tokenizer_path, eos_id = Path(), 0
    if config.reads_text:  # a script may bring its own text
        tokenizer_path, eos_id = fetch_tokenizer(config, folder)
    info = StartupInfo(
        uid=member.uid,
        model_config=model,
        tokenizer_path=str(tokenizer_path),
        eos_id=eos_id,
        global_outer_step=outer_step,
        inner_steps=steps,
        hotkey=member.hotkey,
        rules=versions.in_force.text,
    )
    return Connections(member, rounds, global_folder, versions, commitment), info


def share_start(
    config: Config, ranks: RankChannel, opened: Callable[[], tuple[Connections, StartupInfo]]
) -> tuple[Config, StartupInfo, Connections | None]:
    """Return the configuration in force, what rank 0 found out and, on rank 0, its connections.

    ``opened`` opens the connections, only on rank 0. If it raises, so does this function on rank 0,
    and the other ranks get the error's text as ``problem``.
    """
    connections = None
    if ranks.rank == 0:
        try:
            connections, info = opened()
        except BaseException as error:
            # The other ranks wait for this message, and without it only a SIGKILL would end them.
            with suppress(RuntimeError):  # if they are gone, that must not hide the reason
                ranks.share("start", {"problem": str(error) or type(error).__name__})
            raise
        ranks.share("start", asdict(info))
    else:
        info = StartupInfo(**ranks.share("start", None))
    if info.rules:
        config = under(config, parse_version(info.rules, config.network))
    return config, info, connections


def first_weights(
    rounds: StoreRounds, stopped: Callable[[], bool] = lambda: False, *, resumes: bool
) -> tuple[int, Path, int]:
    """Wait for whole weights. Return their outer step, their folder and the inner steps before it.

    ``resumes``: whether there is a checkpoint to continue from, so that any weights on the disk
    will do. Raises StopNow once ``stopped`` returns True.
    """
    due, began = Throttle(_START_AGAIN), time.monotonic()
    while True:
        if resumes and (held := rounds.held_weights()) is not None:
            outer_step = int(held.name)
            manifest = rounds.manifest(outer_step)
            return outer_step, held, manifest.total_inner_steps if manifest else 0
        try:
            found = rounds.fetch_newest()
            return found.outer_step, found.path.parent, found.inner_steps
        except (StoreError, OSError) as error:
            if due(str(error)):
                # Warn about an empty bucket only if it stays empty.
                early = time.monotonic() - began < _START_EXPECTED
                log.log(
                    logging.INFO if early else logging.WARNING,
                    "Waiting for the network's weights: %s. Training cannot begin without them; if "
                    "this lasts, ask whether the founder's validator is running",
                    error,
                )
        if stopped():  # Python discards what a signal handler raises in a finalizer
            raise StopNow
        time.sleep(_LOOK_AGAIN)


class RankZero:
    """Rank 0's own part of a miner: the blocks, the controller and the subscribers."""

    def __init__(
        self,
        context: RankContext,
        info: StartupInfo,
        connections: Connections,
        training: RankParts,
    ) -> None:
        self._context, self._info = context, info
        self._connections, self._training = connections, training
        config, trainer = context.config, training.trainer
        trained = sum(math.prod(shape) for _, shape in trainer.schema)
        needed = largest_file(trainer.schema, config.rounds.codec)
        needed += checkpoint_bytes(trained, trainer.moments)
        often = config.miner.checkpoint_steps
        self.blocks: Blocks = NoBlocks()
        if training.data is not None:
            self.blocks = Blocks(
                data=training.data,
                ranks=context.ranks,
                micro_batch_size=trainer.micro_batch_size,
                pages=config.data.pages_per_block,
                uid=info.uid,
                outer_step=trainer.outer_step,
            )
            self.blocks.load_state_dict(
                training.kept.get("rank_zero", {}).get("blocks", {}),
                training.kept.get("data", {}),
                exact=training.checkpointer.exact,
            )
        self.controller = Controller(
            state=MinerState(
                mode=Mode.TRAINING, outer_step=trainer.outer_step, inner_step=trainer.inner_step
            ),
            rules=Rules(
                checkpoint_steps=_CHECKPOINT_STEPS if often == "auto" else often,
                checkpoint_seconds=_CHECKPOINT_SECONDS if often == "auto" else 0.0,
                upload_from=config.store.minimum_valid_inner_step,
                progress_steps=config.store.upload_steps if config.has_bucket else 0,
            ),
            events=context.events,
            blocks=self.blocks,
            exchange=connections.rounds,
            disk_problem=partial(describe_full_disk, context.folder, needed),
            versions=connections.versions,
        )
        self._subscribe(needed + DISK_RESERVE)

    def _subscribe(self, needed: int) -> None:
        """Build the subscribers that get each event, in this order, after the blocks.

        ``needed``: bytes of disk space that the next upload, a checkpoint and the reserve take.
        """
        context, trainer, data = self._context, self._training.trainer, self._training.data
        config, folder, enter = context.config, context.folder, context.stack.enter_context
        log_of = "distributed_training" if context.guest else ""
        rounds, chain = self._connections.rounds, self._connections.member.chain

        def measured() -> dict[str, Any]:
            # Convert it to Unix time, since monotonic time means nothing to another process.
            silent, ahead = rounds.silent_since, time.time() - time.monotonic()
            return {
                **chain_facts(chain, self._info.hotkey, time.time()),
                "store_silent_since": None if silent is None else silent + ahead,
                "store_trouble": rounds.trouble,
                "gate": rounds.gate,
                "network_step": of_close("outer_step")(),
                "next_round": of_close("closes_at")(),
            }

        def of_close(name: str) -> Callable[[], float | None]:
            return lambda: getattr(rounds.next_close, name, None)

        self.facts = facts = OwnFacts(
            rules=Facts(
                pays=config.chain.kind == "bittensor",
                round_seconds=config.rounds.period.total_seconds(),
                name=config.miner.name,
                uid=self._info.uid,
                mode="training",
                outer_step=trainer.outer_step,
            ),
            measured=measured,
            write=EventLog.open(folder, logger=log_of).write,
            folder=folder,
            needed=needed,
        )
        self.record: Record = facts.record

        def follow(event: ev.Event, state: MinerState) -> None:
            match event:
                case ev.NetworkDiffers(cause=cause, forked=False):
                    facts.compared(cause)
                case ev.Tick():
                    facts.look()
                case ev.OuterStepEnded(committed=True):
                    rounds.forget(oldest_outer_step(folder / "checkpoints", event.outer_step))

        reporter = Reporter(
            record=self.record,
            expect_gpu=expects_gpu(config, context.device),
            bucket=config.store.global_model_name,
            joined=lambda: facts.joined,
            upload_from=lambda: self.controller.rules.upload_from,
        )
        if context.guest:  # the script's output has its own lines about each step
            reporter.step_level = logging.DEBUG
        enter(open_trackers(config.telemetry, folder, name=f"{config.miner.name}-{self._info.uid}"))
        gpus = context.ranks.local_world_size if context.device.type == "cuda" else 0
        metrics = Metrics(
            file=MetricsFile(folder / "metrics.prom"),
            counts={"chain": chain.counters} | ({} if data is None else {"data": data.counters}),
            gauges={
                "chain_age_seconds": lambda: chain.age().total_seconds(),
                "next_round_timestamp_seconds": of_close("closes_at"),
                "global_outer_step": of_close("outer_step"),
                "clock_offset_seconds": lambda: rounds.clock_offset,
                "round_seconds": lambda: reporter.round_seconds,
                "counts": facts.counts,
                **machine_gauges(folder, needed=needed),
            },
            by_rank=partial(gauges_by_rank, folder, gpus=gpus),
            joined=lambda: facts.joined,
        )
        for subscriber in (reporter.on_event, metrics.on_event, follow):
            self.controller.subscribe(_forgiving(subscriber) if context.guest else subscriber)

    def go_live(self, post: Callable[[ev.Event], None]) -> None:
        """Begin to follow the network. Returns at once. ``post``: queues an event."""
        trainer, context = self._training.trainer, self._context
        config, member = context.config, self._connections.member
        follow_registration(config, context.folder, member, context.events.put)
        if text := self._connections.commitment:
            commit(member, text)
        rounds = self._connections.rounds
        rounds.start(post, outer_step=trainer.outer_step, schema=trainer.schema)
        self.record(
            "start",
            uid=self._info.uid,
            hotkey=self._info.hotkey,
            outer_step=trainer.outer_step,
            inner_step=trainer.inner_step,
            world_size=context.ranks.world_size,
            resumed=bool(self._training.kept),
        )


def expects_gpu(config: Config, device: torch.device) -> bool:
    """Return whether a GPU is or should be used, so that steps without GPU memory are a fault."""
    return device.type == "cuda" or (config.miner.device != "cpu" and visible_gpu_count() > 0)


def _forgiving(subscriber: Subscriber) -> Subscriber:
    """Return a subscriber whose errors become warnings, so that the event is still decided on."""
    repeats = Repeats(_SAY_AGAIN)

    def on_event(event: ev.Event, state: MinerState) -> None:
        try:
            subscriber(event, state)
        except Exception as error:
            if (again := repeats(type(error).__name__)) is not None:
                name = type(event).__name__
                log.warning(
                    "A subscriber failed on %s; training continues%s", name, again, exc_info=error
                )

    return on_event


def build_rounds(
    context: RankContext,
    info: StartupInfo,
    connections: Connections | None,
    training: RankParts,
) -> tuple[RankZero | None, RoundRank]:
    """Build rank 0's own part, and this rank's part of rounds.

    ``connections``: None on all ranks but 0. Raises ConfigError.
    """
    if connections is None:
        return None, RoundRank(training.trainer, context.ranks)
    rank_zero = RankZero(context, info, connections, training)
    round_rank = RoundRank(
        training.trainer,
        context.ranks,
        uploads=uploads_folder(context.folder),
        header=Header(  # the round adds close and pages; the trainer fills in the rest
            kind="upload",
            run_id=context.config.swarm.run_id,
            outer_step=0,
            serial=0,
            hotkey=info.hotkey,
            start=_NO_DIGEST,
            codec=context.config.rounds.codec,
            inner_steps=0,
            tokens=0,
        ),
        sign=connections.member.wallet.hotkey.sign,
    )

    def adopt(before: Network, now: Network) -> None:
        config = under(context.config, now)
        choose_kind(CODECS, config.rounds.codec, key="round.codec")
        round_rank.adopt(config.rounds.codec)
        least = config.store.minimum_valid_inner_step
        rank_zero.controller.rules = replace(rank_zero.controller.rules, upload_from=least)
        log.warning("%s", for_script(before, now))

    if context.guest:
        rank_zero.controller.adopt = adopt
    return rank_zero, round_rank


# --- what a start continues from ------------------------------------------------------------------


def first_outer_step(folder: Path, outer_step: int) -> int:
    """Return the outer step that a start continues from: that of the newest complete checkpoint.

    A kill may leave an incomplete checkpoint, perhaps of a later outer step, for which another
    version of the network's file may be in force.

    Args:
        folder: The folder of the checkpoints.
        outer_step: The outer step of the network's weights, for a start without a checkpoint.
    """
    found = (folder / name for name in newest_first(folder))
    complete = next((path for path in found if is_complete(path)), None)
    reached = None if complete is None else outer_step_of(complete)
    return outer_step if reached is None else reached


def refuse_old_checkpoints(folder: Path) -> None:
    """Raise WrongPlace if ``folder`` holds checkpoints of subnet 38's old kind of network.

    Their state belongs to another kind of outer step, and no network today has their weights.
    """
    newest = max(folder.glob("checkpoint-*/rank-0.json"), default=None)
    state = ((newest and read_json_object(newest)) or {}).get("state")
    if isinstance(state, dict) and "outer_momentum" in state:
        raise WrongPlace(
            f"{folder} holds checkpoints of the old hivemind kind of network (subnet 38), which "
            "this version cannot continue, so nothing was started: set --neuron.run_folder to a "
            "new folder; the weights come from the network"
        )
