"""What only rank 0 does around the loop: reports, publishes, keeps the block list.

Implements :class:`~.loop.RankZero` out of the leader (decisions), the block feed (data), the
publisher, the swarm and the log. Called on the training thread, so nothing here waits for a network.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from distributed_training.miner import state as st
from distributed_training.miner.leader import Leader, PublisherLike, SwarmLike
from distributed_training.miner.orders import Order
from distributed_training.protocol.types import (
    AllReduceError,
    Progress,
    PublicationReport,
    Revision,
    StepReport,
)
from distributed_training.telemetry import lines

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cadence:
    """How often, in inner steps of an outer step."""

    checkpoint_steps: int


class SnapshotSchedule(Protocol):
    """Decides whether this inner step ends with a snapshot (``store``'s gate and freshness)."""

    def step(self, report: StepReport) -> bool: ...
    def published(self, report: PublicationReport) -> None: ...


class BlockBook(Protocol):
    """The block list and what feeds it; see :class:`~.blocks.BlockFeed`."""

    def micro_batch_done(self) -> None: ...
    def block_used_up(self) -> None: ...
    def step_done(self) -> None: ...
    def blocks(self) -> list[int]: ...
    def snapshot_taken(self, revision: Revision) -> None: ...
    def publication_ended(self, revision: Revision, *, ok: bool) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def restore(self, state: dict[str, Any]) -> None: ...
