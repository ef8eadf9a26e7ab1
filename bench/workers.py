"""Simulate the rounds of a store network in one process, for ``bench.lora`` and ``compare.py``.

What is exchanged is the product's own: uploads and updates are its files
(``protocol/update_file.py``), merged as a validator merges them (``validator/merge.py``) by the
outer rule that is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor

from distributed_training.protocol.types import UPDATE_CODEC
from distributed_training.protocol.update_file import (
    Header,
    UpdateFile,
    UpdateLayout,
    finish,
    rows_and_columns,
    write_rows,
)
from distributed_training.training.outer_rule import OUTER_RULES, UploadFacts
from distributed_training.validator.merge import (
    Measured,
    OuterState,
    Rule,
    Values,
    merge,
    norm_of,
    whole_uploads,
)

WORKERS = 4  # of a store network


@dataclass
class Network:
    """The rounds of one store network: the outer state, and what each worker's upload left out.

    ``sent`` and ``received``: bytes of one worker in all outer steps, by the body of the files.
    """

    rule: Rule
    names: Sequence[str]
    state: OuterState
    workers: int = WORKERS
    sent: float = 0.0
    received: float = 0.0
    residuals: dict[int, Sequence[Tensor]] = field(default_factory=dict)  # by worker

    def exchange(self, weights: Sequence[Tensor], folder: Path, outer_step: int) -> None:
        """Upload what the workers trained, and take the outer step that follows from it.

        ``weights``: ``(workers, ...)`` of each parameter, on the CPU.
        """
        uploads = [
            self.upload(worker, [each[worker] for each in weights], folder, outer_step)
            for worker in range(self.workers)
        ]
        self.merge_all(uploads, folder, outer_step)

    def state_of(self, worker: int) -> OuterState:
        """Return the state that a worker begins its inner steps with."""
        return self.state

    def merge_all(self, uploads: Sequence[UpdateFile], folder: Path, outer_step: int) -> None:
        """Merge uploads that all gain the same, none of which is clipped."""
        found = [Measured(norm_of(upload), 1.0, 0.0) for upload in uploads]
        factors = [1.0] * len(uploads)
        update = self.merge(uploads, factors, whole_uploads(found), folder, outer_step)
        self.sent += sum(upload.layout.body_bytes for upload in uploads) / self.workers
        self.received += update.layout.body_bytes

    def merge(
        self,
        uploads: Sequence[Values],
        factors: Sequence[float],
        divisor: float,
        folder: Path,
        outer_step: int,
        facts: Sequence[UploadFacts] = (),
    ) -> UpdateFile:
        """Take the outer step of ``uploads``; return its update, a file in ``folder``."""
        path = folder / "update"
        path.unlink(missing_ok=True)
        layout = self._layout("update", outer_step)
        _, self.state = merge(
            uploads, factors, self.state, self.rule,
            path=path, layout=layout, sign=lambda _: bytes(64), divisor=divisor, facts=facts,
        )  # fmt: skip
        return UpdateFile.reopen(path, layout.schema)

    def upload(
        self, worker: int, weights: Sequence[Tensor], folder: Path, outer_step: int
    ) -> UpdateFile:
        """Write one worker's upload as a member does; keep what it left out."""
        rule = OUTER_RULES[self.rule.name]
        moved = [s - w for s, w in zip(self.state_of(worker).weights, weights, strict=True)]
        if (residual := self.residuals.get(worker)) is not None:
            moved = [m + r * rule.feedback for m, r in zip(moved, residual, strict=True)]
        path = folder / f"upload-{worker}"
        path.unlink(missing_ok=True)
        layout = self._layout("upload", outer_step)
        for index, tensor in enumerate(moved):
            rows = tensor.reshape(rows_and_columns(tensor.shape))
            write_rows(path, layout, index, 0, rows if rule.select is None else rule.select(rows))
        finish(path, layout, lambda _: bytes(64))
        upload = UpdateFile.reopen(path, layout.schema)
        self.residuals[worker] = [
            m - upload.decode(name, m.shape) for name, m in zip(self.names, moved, strict=True)
        ]
        return upload

    def _layout(self, kind: Literal["upload", "update"], outer_step: int) -> UpdateLayout:
        header = Header(
            kind=kind, run_id="bench", outer_step=outer_step, serial=0, hotkey="bench",
            start="0" * 64, codec=UPDATE_CODEC, inner_steps=1, tokens=1,
        )  # fmt: skip
        shapes = [tuple(weight.shape) for weight in self.state.weights]
        return UpdateLayout.of(list(zip(self.names, shapes, strict=True)), header)
