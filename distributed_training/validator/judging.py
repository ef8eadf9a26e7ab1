"""Judge each upload of a close in a store network, and refuse it if there is a cause.

An upload is refused for its form (it is not a file of this member for this close) or for its
content: it makes the loss on text worse by more than chance explains, or it is a copy of another
upload. An upload whose effect may be due to chance is accepted and scores 0, because an honest
member must never be kept out.

A copy is found by the angle between two uploads, measured at places that only the validator knows.
Honest members train on different text, so their uploads differ. Noise that pushes a copy below the
limit takes more of its improvement than copying gains. The order of arrival proves nothing, because
a member that knows which text another trains on can train on it too, and be faster. But only the
owner has trained on the pages that its upload names.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from distributed_training.common.files import read_state, write_bytes, write_state
from distributed_training.exchange.own_uploads import forget_files
from distributed_training.protocol.pages import JUDGED_PAGES, MOST_PAGES, block_at
from distributed_training.protocol.types import Schema, Verify
from distributed_training.protocol.update_file import UpdateFile
from distributed_training.scoring.evaluator import TRIED, Evaluation, Evaluator, Judged
from distributed_training.validator.merge import HISTORY, Measured, clip_factor, helpful

#: Cause of a refusal in a manifest -> the cause that ``upload_scored`` events report.
CAUSES: Mapping[str, str] = {
    "late": "STALE",
    "not-judged": "NO_DATA",
    "damaged": "BAD_GRADIENT",
    "other-close": "BAD_GRADIENT",
    "other-start": "BAD_GRADIENT",
    "empty": "BAD_GRADIENT",
    "worse": "MAKES_IT_WORSE",
    "copy": "BAD_GRADIENT",
    "spoiler": "MAKES_IT_WORSE",
}
COPY = 0.9  # two uploads with at most this cosine are never copies of each other
LONELY_COPY = 0.999  # two uploads with a larger cosine are copies, no matter how alike others are
_OWN_WORK = 0.99  # required certainty that the loss fell more on an upload's own pages
_CERTAIN = 2.0  # standard errors by which the loss must have fallen more on the owner's pages
#: The usual cosine of uploads that help is taken from the pair after the most alike quarter.
_NEAREST = 4
#: If uploads are alike, the 8th power doubles the share of one that gains a tenth more.
_SHARPLY, _LEAST_SHARE, _NO_GAIN = 8, 1e-3, 1e-9
# Between these norms, a float32 factor can clip any upload to any other's norm without an overflow.
_LEAST_NORM, _MOST_NORM = 1e-12, 1e12
_SAMPLE = 1 << 16  # number of values of an upload that are compared with other uploads
_NOT_JUDGED = Evaluation(-1, -1)


class RefusedUploadError(ValueError):
    """An upload is refused. ``cause``: one of :data:`CAUSES`."""

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


@dataclass(frozen=True)
class Accepted:
    """An upload that was judged and may be merged.

    ``modified``: when it arrived, by the store's clock; ``sample``: its values at the secret
    places; ``factor``: the factor by which it was multiplied when it was judged; ``share``: its
    share of the weight of one upload, which all uploads that are alike share.
    """

    uid: int
    hotkey: str
    modified: float
    file: UpdateFile
    norm: float
    sample: Tensor
    judgement: Evaluation
    factor: float = 1.0
    share: float = 1.0

    @property
    def improvement(self) -> float:
        """Nats per token by which it lowers the loss on random text."""
        assert self.judgement.random is not None
        return self.judgement.random.absolute

    @property
    def measured(self) -> Measured:
        assert self.judgement.random is not None
        chance = min(self.judgement.random.chance, 1e18)
        return Measured(self.norm, self.improvement, chance, self.share)

    @property
    def own_work(self) -> tuple[float, float]:
        """Return how much more the loss fell on its own pages than on random text, and the error.

        Both are in nats per token. If members train on their own text, it is the gain on random
        text, without an error.
        """
        random, assigned = self.judgement.random, self.judgement.assigned
        assert random is not None
        if assigned is None:
            return random.absolute, 0.0
        return assigned.absolute - random.absolute, math.hypot(assigned.error, random.error)


@dataclass(frozen=True)
class UploadJudge:
    """Judge uploads, starting from the epoch-start weights of one outer step.

    ``codec``: the codec of the uploads, from the network's file; ``secret``: the seed of the places
    that are compared.
    """

    evaluator: Evaluator
    schema: Schema
    run_id: str
    codec: str
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
        longest: float,
    ) -> Accepted:
        """Check and measure one upload, as it would be merged.

        Args:
            uid: The member's uid.
            hotkey: The member's hotkey at the close.
            path: The upload's file.
            judged: The epoch-start weights, their outer step, and the close's random text.
            serial: The close's serial.
            start: Digest of the epoch-start weights.
            modified: When the upload arrived.
            longest: The norm to which a longer upload is clipped.

        Raises RefusedUploadError, and DataUnavailable, StopNow, OSError, torch.AcceleratorError,
        which say nothing about the upload.
        """
        try:
            file = UpdateFile.open(
                path,
                self.schema,
                run_id=self.run_id,
                kind="upload",
                hotkey=hotkey,
                verify=self.verify,
                codec=self.codec,
            )
        except ValueError as error:
            raise RefusedUploadError("damaged", str(error)) from None
        header = file.header
        if (header.outer_step, header.serial) != (judged.outer_step, serial):
            raise RefusedUploadError(
                "other-close",
                f"it is for close {header.serial} of outer step {header.outer_step}, but was sent "
                f"as that of close {serial} of outer step {judged.outer_step}",
            )
        if header.start != start:
            raise RefusedUploadError(
                "other-start",
                f"it starts from weights {header.start:.12}, but those of outer step "
                f"{judged.outer_step} are {start:.12}",
            )
        norm, sample = self._measure(file)
        if norm < _LEAST_NORM:
            raise RefusedUploadError("empty", f"its norm is {norm:.3g}: it changes nothing")
        if norm > _MOST_NORM:
            raise RefusedUploadError("worse", f"its norm is {norm:.3g}: no training leads so far")
        factor = clip_factor(norm, longest)
        one = Accepted(uid, hotkey, modified, file, norm, sample, _NOT_JUDGED, factor)
        return self.measure(one, judged)

    def measure(self, one: Accepted, judged: Judged) -> Accepted:
        """Judge an upload, multiplied by its factor, and return it with its judgement.

        Raises the same errors as :meth:`judge`.
        """
        # An upload that names no pages is judged on the same random text twice, so the loss never
        # falls more on its own pages.
        own_blocks = self._draw(one) or judged.random_blocks[:1]
        as_merged = replace(judged, learning_rate=judged.learning_rate * one.factor)
        judgement = self.evaluator.judge(one.uid, one.file, own_blocks, as_merged)
        if (random := judgement.random) is None:
            raise RefusedUploadError("worse", judgement.reason)
        if random.absolute < -random.chance:  # the loss rises by more than chance explains
            before, after = random.losses
            raise RefusedUploadError(
                "worse",
                f"with it the loss on random text rises from {before:.4f} to {after:.4f}, "
                f"{-random.absolute / random.chance:.1f} times what chance may explain",
            )
        return replace(one, judgement=judgement)

    def _draw(self, one: Accepted) -> tuple[int, ...]:
        """Return blocks of the pages that an upload names, to be tried in this order.

        Only whole blocks: a member that names a single page could choose a page that another member
        trained on. The result is empty if the upload names too few pages. Raises RefusedUploadError
        for pages that no member has.
        """
        header = one.file.header
        if not header.pages:
            return ()
        first, last = header.pages[0], header.pages[-1]
        if len(header.pages) != 2 or not first <= last < MOST_PAGES:
            pages = " ".join(map(str, header.pages[:4]))
            raise RefusedUploadError("damaged", f"no member trains on the pages {pages}")
        starts = range(first, last + 2 - JUDGED_PAGES)
        draw = random.Random(f"{self.secret} {one.uid} {header.outer_step} {header.serial}")
        return tuple(
            block_at(header.outer_step, draw.choice(starts)) for _ in range(TRIED if starts else 0)
        )

    def _measure(self, file: UpdateFile) -> tuple[float, Tensor]:
        """Return an upload's norm, and its values at the secret places."""
        square, sample = 0.0, list[Tensor]()
        total = sum(math.prod(shape) for _, shape in self.schema)
        for (name, shape), places in zip(self.schema, self._places(total), strict=True):
            values = file.decode(name, shape).reshape(-1)
            square += float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
            sample.append(values[places])
        return math.sqrt(square), torch.cat(sample)

    def sample(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return the values at the secret places of tensors in the schema's order."""
        total = sum(math.prod(shape) for _, shape in self.schema)
        pairs = zip(tensors, self._places(total), strict=True)
        return torch.cat([tensor.reshape(-1)[places] for tensor, places in pairs])

    def _places(self, total: int) -> Iterator[Tensor]:
        """Yield the places of each parameter that are compared, the same for all uploads."""
        generator = torch.Generator().manual_seed(self.secret)
        for _, shape in self.schema:
            size = math.prod(shape)
            wanted = min(size, max(1, _SAMPLE * size // max(1, total)))
            yield torch.randint(size, (wanted,), generator=generator)


@dataclass(frozen=True)
class _Secret:
    value: int


class KnownSamples:
    """Samples of what all members could read in the last outer steps, kept in ``folder``.

    ``secret``: the seed of the places, if the folder has no secret yet. Samples are of use only
    with the secret that they were taken with.
    """

    def __init__(self, folder: Path, secret: int) -> None:
        self._folder = folder
        self._by_step: dict[int, Mapping[str, Tensor]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "secret.json"
        lost = "a copy of an earlier upload may be accepted for some outer steps"
        kept = read_state(path, _Secret, lost=lost)
        self.secret = secret if kept is None else kept.value
        if kept is None:
            write_state(path, _Secret(secret), lost=lost)
        for file in folder.glob("*.safetensors"):
            if kept is not None and file.stem.isdigit():
                with contextlib.suppress(OSError, SafetensorError):
                    self._by_step[int(file.stem)] = load(file.read_bytes())

    def known(self) -> dict[str, Tensor]:
        """Return all samples, by a description of what was sampled."""
        return {
            what: s.float() for samples in self._by_step.values() for what, s in samples.items()
        }

    def add(self, outer_step: int, samples: Mapping[str, Tensor]) -> None:
        """Keep the samples of an outer step, and forget the samples of old outer steps."""
        # bfloat16 takes half as many bytes, and a cosine needs no more digits.
        self._by_step[outer_step] = {what: s.bfloat16() for what, s in samples.items()}
        # Ignore a full disk: starting without these samples does little harm.
        with contextlib.suppress(OSError):
            data = save(dict(self._by_step[outer_step]))
            write_bytes(self._folder / f"{outer_step}.safetensors", data, durable=False)
            forget_files(self._folder, outer_step + 1 - HISTORY)
        self._by_step = {n: s for n, s in self._by_step.items() if n > outer_step - HISTORY}


def find_copies(uploads: Sequence[Accepted], earlier: Mapping[str, Tensor]) -> dict[int, str]:
    """Return by uid which uploads are copies, and what each of them is a copy of.

    ``earlier``: samples of what all members could read, by description: the uploads and updates of
    the last outer steps, and the outer momentum.

    The usual distance between honest members differs from close to close: at the first closes all
    members learn the same. So two uploads count as copies if their distance (1 - cosine) is below a
    quarter of the usual distance between uploads that help. If fewer than three uploads help, there
    is no usual distance, and two uploads must be nearly identical to count as copies.

    If two uploads are that close, the copy is the one that lowered the loss on its own pages less,
    if that is certain. An upload is never called a copy if it lowered the loss on its own pages
    more than on other text, beyond what chance explains: its member must have trained on them.
    """
    helps = helpful([one.measured for one in uploads])
    helping = [one for one, good in zip(uploads, helps, strict=True) if good]
    found: dict[int, str] = {}

    def blame(one: Accepted, cosine: float, limit: float, what: str) -> None:
        if one.uid not in found and not _has_own_work(one):
            found[one.uid] = f"it is a copy of {what} (cosine {cosine:.4f}, limit {limit:.4f})"

    for what, sample in earlier.items():
        cosines = {one.uid: _cosine(one.sample, sample) for one in uploads}
        limit = _copy_limit([cosines[one.uid] for one in helping], len(helping) // 2, len(helping))
        for one in uploads:
            if cosines[one.uid] > limit:
                blame(one, cosines[one.uid], limit, what)
    pairs = [
        (_cosine(one.sample, other.sample), one, other)
        for one, other in itertools.combinations(uploads, 2)
    ]
    limit = _limit_of_pairs(helping)
    for cosine, one, other in sorted(pairs, key=lambda pair: -pair[0]):
        if cosine <= limit or found.keys() & {one.uid, other.uid}:
            continue
        # The order of arrival decides only if nothing else differs.
        order = sorted((one, other), key=lambda each: (-each.own_work[0], each.modified, each.uid))
        (more, error), (less, other_error) = (each.own_work for each in order)
        # If this is not certain, neither is called a copy, so that nobody loses a close because of
        # an imitator. Over many closes two standard errors happen by chance too.
        sure = more - less >= _CERTAIN * math.hypot(error, other_error)
        if sure and _has_own_work(order[0]):
            blame(
                order[1], cosine, limit, f"uid {order[0].uid}'s upload, whose own text gained more"
            )
    return found


def share_alike(uploads: Sequence[Accepted]) -> list[Accepted]:
    """Return the uploads, each with its share of the weight that all uploads like it share.

    A member that trains on another's pages adds nothing to the other's upload. It is seldom certain
    whose pages they are, so neither upload is refused, and the one that gains more gets by far the
    larger share.
    """
    helps = helpful([one.measured for one in uploads])
    limit = _limit_of_pairs([one for one, good in zip(uploads, helps, strict=True) if good])

    def share(one: Accepted) -> float:
        alike = [o for o in uploads if o is one or _cosine(one.sample, o.sample) > limit]
        gains = [max(o.improvement, _NO_GAIN) / max(one.improvement, _NO_GAIN) for o in alike]
        return max(_LEAST_SHARE, 1 / math.fsum(gain**_SHARPLY for gain in gains))

    return [replace(one, share=share(one)) for one in uploads]


def _limit_of_pairs(helping: Sequence[Accepted]) -> float:
    """Return the cosine above which two uploads of a close are alike."""
    distinct: list[Accepted] = []  # otherwise many identical uploads would decide what is usual
    for one in helping:
        if all(_cosine(one.sample, each.sample) <= LONELY_COPY for each in distinct):
            distinct.append(one)
    cosines = [_cosine(a.sample, b.sample) for a, b in itertools.combinations(distinct, 2)]
    return _copy_limit(cosines, max(1, len(cosines) // _NEAREST), len(distinct))


def _copy_limit(cosines: Sequence[float], place: int, helping: int) -> float:
    """Return the cosine above which two uploads are copies.

    ``place``: the index of the usual cosine, counted from the largest. ``helping``: how many
    uploads help.
    """
    if helping < 3:
        return LONELY_COPY
    usual = sorted(cosines, reverse=True)[place]
    return min(LONELY_COPY, max(COPY, 1 - (1 - usual) / 4))


def _has_own_work(one: Accepted) -> bool:
    chance = one.judgement.chance
    return chance is not None and chance > _OWN_WORK


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))
