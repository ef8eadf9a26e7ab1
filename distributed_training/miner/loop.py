"""The loop every rank runs: take the next order, carry it out, report.

One iteration is one micro-batch boundary. Rank 0 owns a :class:`~.leader.Leader`, which decides;
the other ranks pass None and obey. No network call happens here: what takes long (averaging,
uploads, downloads) runs in threads and processes of rank 0, and comes back as events.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from distributed_training.protocol.types import (
    Progress,
    StepReport,
)

if TYPE_CHECKING:
    pass

log = logging.getLogger(__name__)


class TrainerLike(Protocol):
    """What the loop needs of ``training.Trainer``; all ranks call in the same order."""

    progress: Progress

    def add_micro_batch(
        self, batch: torch.Tensor, *, data_wait_seconds: float = 0.0
    ) -> StepReport | None: ...
    def write_pseudo_gradient(self, buffers: Sequence[torch.Tensor] | None) -> float: ...
    def prepare_outer_step(self, averaged: Sequence[torch.Tensor] | None) -> None: ...
    def commit_outer_step(self) -> None: ...
    def roll_back_outer_step(self) -> None: ...


class DataLike(Protocol):
    def request(self, block: int) -> None: ...
    def ready(self, block: int) -> int | None: ...
    def begin(self, block: int, sequences: int) -> None: ...
    def next(self) -> torch.Tensor | None: ...
    def cursor(self) -> dict[str, Any]: ...


#: Named places where a test may inject a fault: called with (place, rank).
FaultHook = Callable[[str, int], None]


def _no_fault(place: str, rank: int) -> None:
    del place, rank
