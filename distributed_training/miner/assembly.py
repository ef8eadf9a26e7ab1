"""Build what a rank of either exchange is made of: its surroundings, and what it trains with."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch

from distributed_training import __version__
from distributed_training.chain.base import Chain
from distributed_training.chain.kinds import how_to_register
from distributed_training.chain.registration import INTERVAL, MISSING_FOR, Belief
from distributed_training.common.memory import ModelShape
from distributed_training.config import Config
from distributed_training.config.versions import Versions, has_versions, under
from distributed_training.data.block_builder import WorkerSpec
from distributed_training.data.own_text import require_one_sequence
from distributed_training.data.pipeline import DataPipeline
from distributed_training.node.identity import Member
from distributed_training.node.published import fetch_published
from distributed_training.node.start import NetworkFailure, fetch_tokenizer, require_data
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.telemetry import MetricsFile
from distributed_training.telemetry.trackers import open_trackers
from distributed_training.telemetry.verdict import Facts
from distributed_training.training.checkpoint import Checkpointer
from distributed_training.training.collectives import Layout
from distributed_training.training.held_weights import HeldWeights
from distributed_training.training.trainer import Trainer

from . import events as ev
from .block_list import BlockList, NoBlocks
from .controller import Controller
from .device import utilization_of
from .global_state import (
    GlobalBucket,
    GlobalUnavailableError,
)
from .income import standing
from .metrics import MachineGauges, Metrics
from .ranks import Ranks
from .reporter import Record
from .resume import StartupInfo, first_sample, resume_training

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankContext:
    """The surroundings in which a rank is built.

    Its settings, folder, device and fellow ranks, rank 0's queue of events, and the stack that
    closes what was opened. ``tick``: of the controller. ``guest``: the process is a script's, in
    which nothing here may end it or change its log.
    """

    config: Config
    folder: Path
    device: torch.device
    ranks: Ranks
    events: queue.SimpleQueue[ev.Event]
    stack: ExitStack
    tick: timedelta = timedelta(seconds=1)
    guest: bool = False


def describe_size(model: Mapping[str, Any], config: Config) -> str:
    """Return the model's size for a log line; empty where no formula knows the model."""
    count = config.network.head.parameters if config.network and config.network.model else None
    try:
        parameters = ModelShape.from_config(model, count).parameters
    except ValueError:  # the trainer refuses such a model in words
        return ""
    unit, prefix = (1e9, "B") if parameters >= 1e9 else (1e6, "M")
    return f": a model of {parameters / unit:.2f} {prefix} parameters"


def prepare_text(config: Config, folder: Path) -> tuple[Path, int]:
    """Return the tokenizer's path and its end of text, and check a member's own text.

    Nothing of both where a script reads its own. Raises ConfigError, NetworkFailure.
    """
    if not config.reads_text:
        return Path(), 0
    tokenizer_path, eos_id = fetch_tokenizer(config, folder)
    if config.data.own:
        length = config.training.sequence_length
        require_one_sequence(config.data, tokenizer_path, eos_id, length)
    return tokenizer_path, eos_id


def describe_member(config: Config, member: Member, bucket: str = "") -> None:
    """Log who this miner is. ``bucket``: its own, empty where it has none."""
    found = standing(member.chain.neurons(), member.hotkey)
    log.info(
        "Miner %s: uid %d, hotkey %s, netuid %d%s%s",
        __version__,
        member.uid,
        member.hotkey,
        config.chain.netuid,
        f", bucket {bucket}" if bucket else "",
        f", {found.words}" if found else "",
    )


def registration_terms(config: Config) -> tuple[Belief, timedelta]:
    """Return when a lost registration is believed, and the time between two looks at it."""
    local = config.preset == "local"  # where a minute is a long time
    belief = Belief(
        config.miner.master_ss58_address,
        timedelta(seconds=5) if local else MISSING_FOR,
        how_to_register(config.chain),
    )
    return belief, timedelta(seconds=1) if local else INTERVAL


def open_versions(
    config: Config,
    folder: Path,
    bucket: GlobalBucket,
    outer_step: int,
    read: Callable[[], BucketReader],
) -> tuple[Config, Versions | None]:
    """Return the settings that hold at ``outer_step``, and the versions of the network's file.

    None where it has no versions. ``read``: opens the network's bucket, which has its data. Raises
    ConfigError, and NetworkFailure where an older version than the file's holds and nobody has it.
    """
    network = config.network
    if network is None or not has_versions(config):
        return config, None
    versions = Versions(network, folder)
    try:
        for problem in (versions.look_beside(network.place), bucket.learn(versions)):
            if problem:
                log.warning("%s", problem)
    except GlobalUnavailableError as error:
        log.warning("The global bucket was not asked for versions of the network's file: %s", error)
    if not versions.knows(outer_step):
        raise NetworkFailure(
            f"{network.place} holds from outer step {network.head.from_outer_step} and the network "
            f"is at {outer_step}, and the version before it is not in the global bucket, so the "
            "rules are not known and nothing is trained: wait, or start with the older file"
        )
    versions.in_force = versions.at(outer_step)
    if versions.in_force is not network:
        log.info(
            "Outer step %d is trained by version %d of the network's file",
            outer_step,
            versions.in_force.head.version,
        )
    # Before its data are asked for: those of the file given may be of the past.
    config = under(config, versions.in_force)
    fetch_published(config, read)
    require_data(config)
    return config, versions


@dataclass(frozen=True)
class Held:
    """The objects that every rank holds, whoever trains. ``data``: None where they are a script's.

    ``kept``: this rank's part of its checkpoint, empty after a fresh start; ``first_block``: the
    block that a fresh start trains on first, else 0.
    """

    trainer: HeldWeights
    checkpointer: Checkpointer
    data: DataPipeline | None
    kept: Mapping[str, Any]
    first_block: int


@dataclass(frozen=True)
class Training(Held):
    """The objects that every rank trains with."""

    trainer: Trainer
    data: DataPipeline


def build_training(
    context: RankContext, info: StartupInfo, global_folder: Path | None, alive: Callable[[], None]
) -> Training:
    """Build model and data, and continue from the last checkpoint or the global state."""
    config, ranks, folder = context.config, context.ranks, context.folder
    trainer = Trainer(
        settings=config.training,
        model_config=info.model_config,
        device=context.device,
        layout=Layout(ranks.rank, ranks.world_size, ranks.local_world_size),
        utilization=utilization_of(context.device),
        run_folder=folder,
        exchange=config.exchange,
    )
    checkpointer = Checkpointer(
        trainer=trainer,
        folder=folder / "checkpoints",
        keep=config.miner.keep_checkpoints,
    )
    alive()
    data = open_data(context, info, trainer.micro_batch_size)
    kept = resume_training(
        trainer,
        checkpointer,
        info,
        global_folder,
        sample=lambda: first_sample(data, info.first_block, trainer.measured_sequences, alive),
        store=config.exchange == "store",
    )
    data.load_state_dict(kept.get("data", {}))
    first_block = 0 if kept else info.first_block
    if first_block:
        data.request(first_block)  # prepared while the swarm comes
    alive()
    return Training(trainer, checkpointer, data, kept, first_block)


def open_data(context: RankContext, info: StartupInfo, micro_batch_size: int) -> DataPipeline:
    """Open this rank's data; the context's stack closes them."""
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


def rules_of(config: Config, uid: int) -> Facts:
    """Return the facts of a verdict that the settings and the network's file hold."""
    rounds, pace = config.miner, config.chain.seconds_per_block
    hivemind = config.exchange == "hivemind"
    blocks = rounds.blocks_per_allreduce
    later = rounds.blocks_per_allreduce_later if hivemind else 0
    return Facts(
        kind=config.exchange,
        pays=hivemind or config.chain.kind != "registry",
        blocks_per_round=blocks,
        blocks_per_round_later=later,
        seconds_per_block=pace,
        round_seconds=max(blocks, later) * pace,
        age_limit=config.store.age_limit.total_seconds(),
        patience=rounds.round_reload_timeout.total_seconds(),
        name=rounds.name,
        uid=uid,
    )


def open_block_list(
    context: RankContext,
    training: Held,
    chain: Chain,
    *,
    uid: int,
    recent: Callable[[], int],
) -> BlockList:
    """Return the block list as the checkpoint left it. ``recent``: see :class:`BlockList`."""
    if training.data is None:
        return NoBlocks(chain.block)
    blocks = BlockList(
        chain_block=chain.block,
        data=training.data,
        ranks=context.ranks,
        micro_batch_size=training.trainer.micro_batch_size,
        uid=uid,
        hold_back=training.trainer.preview_micro_batches,
        recent=recent,
    )
    blocks.load_state_dict(
        training.kept.get("rank_zero", {}).get("blocks", {}),
        training.kept.get("data", {}),
        exact=training.checkpointer.exact,
        first=training.first_block,
    )
    return blocks


def open_metrics(
    context: RankContext,
    training: Held,
    blocks: BlockList,
    chain: Chain,
    *,
    uid: int,
    needed: int,
    gauges: Mapping[str, Callable[[], float | None]],
    counts: Mapping[str, Callable[[], Mapping[str, float]]] = MappingProxyType({}),
    joined: Callable[[], bool] = lambda: True,
) -> Metrics:
    """Open the metrics file and the trackers. ``gauges`` and ``counts`` are the exchange's own.

    ``needed``: bytes of disk that the next upload, a checkpoint and the reserve take. ``joined``:
    see :class:`Metrics`.
    """
    config, open_until_end = context.config, context.stack.enter_context
    trackers = open_trackers(
        config.telemetry,
        context.folder,
        name=f"{config.miner.name}-{uid}",
        first_step=training.trainer.total_inner_steps + 1,
    )
    machine = MachineGauges(
        context.folder,
        needed=needed,
        gpus=context.ranks.local_world_size if context.device.type == "cuda" else 0,
    )
    file = MetricsFile(context.folder / "metrics.prom")
    file.registry.set("protocol_run", config.store.run)
    return Metrics(
        trackers=[open_until_end(closing(tracker)) for tracker in trackers],
        file=file,
        counts={
            **({} if training.data is None else {"data": training.data.counters}),
            "chain": chain.counters,
            **counts,
        },
        gauges={
            "chain_age_seconds": lambda: chain.age().total_seconds(),
            "chain_block": chain.block,
            "block_list_newest_block": lambda: blocks.newest_trained,
            **gauges,
            **machine.single(),
        },
        by_rank=open_until_end(closing(machine)).by_rank,
        joined=joined,
    )


def record_start(
    record: Record, context: RankContext, info: StartupInfo, training: Held, **more: object
) -> None:
    """Write the event of a start. ``more``: fields of the exchange's own."""
    record(
        "start",
        uid=info.uid,
        hotkey=info.hotkey,
        outer_step=training.trainer.outer_step,
        inner_step=training.trainer.inner_step,
        world_size=context.ranks.world_size,
        resumed=bool(training.kept),
        **more,
    )


class RankZero(Protocol):
    """Rank 0's own part: sources of events, the controller, and subscribers."""

    controller: Controller
    blocks: BlockList

    def go_live(self) -> None:
        """Show this miner to others, and begin to follow them. Returns at once."""
