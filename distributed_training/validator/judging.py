"""Judge the uploads of a close in a store network: each once, and refuse one for a cause.

An upload is refused for its form (it is no file of this member for this close) or for its content:
it makes the loss on text worse by more than chance explains, or it is another's. What lies between
worse and better is merged and scores 0: most of it is noise, and an honest member must never be
kept out.

A copy is found by the angle between two uploads, at places that nobody else knows. Honest members
train on different text, so theirs differ; noise that hides a copy below the limit costs it more of
its improvement than it earns.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from distributed_training.protocol.gradients import Schema
from distributed_training.protocol.manifest import Refused
from distributed_training.protocol.network_report import printable
from distributed_training.protocol.types import Verify
from distributed_training.protocol.update_file import UpdateFile
from distributed_training.scoring.evaluator import Evaluator, Judgement
from distributed_training.scoring.upload import Cause, Judged, Upload

#: The causes of a refusal, by their word in a manifest, and the cause that scores report.
CAUSES: Mapping[str, Cause] = {
    "late": Cause.STALE,
    "not-judged": Cause.NO_DATA,
    "damaged": Cause.BAD_GRADIENT,
    "other-close": Cause.BAD_GRADIENT,
    "other-start": Cause.BAD_GRADIENT,
    "empty": Cause.BAD_GRADIENT,
    "worse": Cause.MAKES_IT_WORSE,
    "copy": Cause.BAD_GRADIENT,
    "spoiler": Cause.MAKES_IT_WORSE,
}
COPY = 0.9  # cosine of two uploads up to which the later one is never called a copy
LONELY_COPY = 0.999  # where there are only two
# Norms of uploads that a factor in float32 clips to each other, and no sum of which is too large.
_LEAST_NORM, _MOST_NORM = 1e-12, 1e12
_SAMPLE = 1 << 16  # values of an upload that are compared
_LONGEST = 300  # characters of a reason


class RefusedError(ValueError):
    """An upload is refused. ``cause``: one of :data:`CAUSES`."""

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


@dataclass(frozen=True)
class Accepted:
    """An upload that was judged and may be merged.

    ``modified``: when it came, by the store's clock; ``sample``: its values at secret places.
    """

    uid: int
    hotkey: str
    modified: float
    file: UpdateFile
    norm: float
    sample: Tensor
    judgement: Judgement

    @property
    def improvement(self) -> float:
        """Nats a token by which it lowers the loss on random text."""
        assert self.judgement.random is not None
        return self.judgement.random.absolute

    def refused(self, cause: str, reason: str) -> Refused:
        return refusal(self.uid, self.hotkey, self.file.digest, cause, reason)


def refusal(uid: int, hotkey: str, digest: str, cause: str, reason: str) -> Refused:
    """Return what a manifest says of an upload that was not merged."""
    return Refused(uid, hotkey, digest, cause, printable(reason, _LONGEST))


@dataclass(frozen=True)
class UploadJudge:
    """Judges uploads from the epoch-start weights of one outer step.

    ``bits``: of each value, by the network's file; ``secret``: chooses the places to compare.
    """

    evaluator: Evaluator
    schema: Schema
    run_id: str
    bits: int
    verify: Verify
    secret: int

    def judge(
        self,
        uid: int,
        hotkey: str,
        path: Path,
        judged: Judged,
        *,
        serial: int,
        start: str,
        modified: float,
        random_block: int,
    ) -> Accepted:
        """Check and measure one upload.

        Args:
            uid: The member's.
            hotkey: The member's, at the close.
            path: The file.
            judged: The epoch-start weights, and from which outer step.
            serial: Of the close.
            start: Digest of the epoch-start weights.
            modified: When it came.
            random_block: Of the text that all uploads of the close are judged on.

        Raises RefusedError, and DataUnavailable, Stopped, OSError, torch.AcceleratorError, which
        say nothing of the upload.
        """
        try:
            file = UpdateFile.open(
                path,
                self.schema,
                run_id=self.run_id,
                kind="upload",
                hotkey=hotkey,
                verify=self.verify,
                bits=self.bits,
            )
        except ValueError as error:
            raise RefusedError("damaged", str(error)) from None
        header = file.header
        if (header.outer_step, header.serial) != (judged.outer_step, serial):
            raise RefusedError(
                "other-close",
                f"it is for close {header.serial} of outer step {header.outer_step}, and lies "
                f"where that of close {serial} of outer step {judged.outer_step} belongs",
            )
        if header.start != start:
            raise RefusedError(
                "other-start",
                f"it counts from weights {header.start:.12}, those of outer step "
                f"{judged.outer_step} are {start:.12}",
            )
        norm, sample = self._measure(file)
        if norm < _LEAST_NORM:
            raise RefusedError("empty", f"its norm is {norm:.3g}: it moves nothing")
        if norm > _MOST_NORM:
            raise RefusedError("worse", f"its norm is {norm:.3g}, above any that trains")
        # Without a block of its own it is judged on random text twice, which is never better.
        upload = Upload(uid, header.blocks or (random_block,), file)
        judgement = self.evaluator.judge(upload, judged, random_blocks=(random_block,))
        if judgement.random is None:
            raise RefusedError("worse", judgement.reason)
        if judgement.random.worse:
            before, after = judgement.random.losses
            raise RefusedError(
                "worse",
                f"with it the loss on random text is {after:.4f} instead of {before:.4f}, by "
                f"{-judgement.random.absolute / judgement.random.error:.1f} standard errors",
            )
        return Accepted(uid, hotkey, modified, file, norm, sample, judgement)

    def _measure(self, file: UpdateFile) -> tuple[float, Tensor]:
        """Return the norm, and the values at the secret places."""
        square, sample = 0.0, list[Tensor]()
        total = sum(math.prod(shape) for _, shape in self.schema)
        for (name, shape), places in zip(self.schema, self._places(total), strict=True):
            values = file.decode(name, shape).reshape(-1)
            square += float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
            sample.append(values[places])
        return math.sqrt(square), torch.cat(sample)

    def _places(self, total: int) -> Iterator[Tensor]:
        """Yield the places of each parameter that are compared: the same for each upload."""
        generator = torch.Generator().manual_seed(self.secret)
        for _, shape in self.schema:
            size = math.prod(shape)
            wanted = min(size, max(1, _SAMPLE * size // max(1, total)))
            yield torch.randint(size, (wanted,), generator=generator)


def find_copies(uploads: Sequence[Accepted], earlier: Mapping[int, Tensor]) -> dict[int, str]:
    """Return which uploads are copies, by uid, and of what; of two the later one is.

    ``earlier``: samples of the uploads merged in the outer step before, which all can read.

    The usual distance between honest members differs from close to close: in the first ones all
    learn the same. So the limit lies at a quarter of the usual distance. Two uploads have no
    usual distance, and must be nearly the same to count as copies.
    """
    ordered = sorted(uploads, key=lambda one: (one.modified, one.uid))
    cosines = {
        (later.uid, one.uid): _cosine(later.sample, one.sample)
        for i, later in enumerate(ordered)
        for one in ordered[:i]
    }
    limit = LONELY_COPY
    if len(uploads) > 2:
        limit = max(COPY, 1 - (1 - statistics.median_low(cosines.values())) / 4)
    found: dict[int, str] = {}
    for i, upload in enumerate(ordered):
        others = [
            (cosines[upload.uid, one.uid], f"that of uid {one.uid}, which came first")
            for one in ordered[:i]
        ]
        others += [
            (_cosine(upload.sample, sample), f"that of uid {uid} in the outer step before")
            for uid, sample in earlier.items()
        ]
        cosine, what = max(others, default=(-1.0, ""))
        if cosine > limit:
            found[upload.uid] = f"it is {what} (cosine {cosine:.4f}, limit {limit:.4f})"
    return found


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file that could not be read as an upload."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
