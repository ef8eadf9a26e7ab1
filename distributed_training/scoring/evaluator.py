"""Measure whether an upload helps, as the validators do (protocol page, section 5).

The upload is applied to the global weights of its outer step: ``weights - outer_lr * 0.5 *
decoded``. The loss is measured before and after, by one process without sharding. *Random* text
comes from a block that nobody trained on, the same for all uploads of a close. *Assigned* text
comes from a block that the member says it trained on. Both are a few consecutive pages, cut into
sequences the way members cut them (protocol page, section 3).
"""

from __future__ import annotations

import contextlib
import errno
import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distributed_training.chain.base import Neuron
from distributed_training.config import Config, ConfigError
from distributed_training.data.held_out import domain_tokens
from distributed_training.data.page_source import PageSource, PageUnavailable
from distributed_training.data.sources import Source
from distributed_training.data.tokenizer import TextTokenizer
from distributed_training.node.start import NetworkFailure, StopNow
from distributed_training.protocol.pages import (
    JUDGED_OF_DOMAINS,
    JUDGED_PAGES,
    PageDraw,
    place_of,
)
from distributed_training.protocol.scoring import relative_improvement
from distributed_training.protocol.types import Schema
from distributed_training.protocol.update_file import UpdateFile
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.training.model import ModelWithLoss, kind_of, schema_of
from distributed_training.training.weights import load_weights


@dataclass(frozen=True)
class Judged:
    """What all uploads of a close are judged against: the global state, and the same random text.

    Args:
        outer_step: The outer step that the close belongs to.
        weights: The global weights of that outer step, float32 on the CPU, in the schema's order.
        learning_rate: The outer learning rate.
        random_blocks: At least one block of text, drawn at random. With more blocks, the figures
            are more certain.

    Examples:
        ```python
        judged = Judged(
            outer_step=state.outer_step,
            weights=state.weights,
            learning_rate=state.learning_rate,
            random_blocks=[random_block(Random())],
        )
        ```
    """

    outer_step: int
    weights: Sequence[Tensor]
    learning_rate: float
    random_blocks: Sequence[int]


# Opens the bucket that a member's commitment names. Raises NoBucket and ChainError.
OpenBucket = Callable[[Neuron], BucketReader]

# Returns the text of ``(uid, block)``, int64 ``(n, sequence_length)``. Raises DataUnavailable.
Pages = Callable[[int, int], Tensor]


BATCH = 2  # the number of sequences of a text is a multiple of this


class DataUnavailable(RuntimeError):
    """Text or this machine's memory is unavailable now, which says nothing about the upload."""


class ShortText(DataUnavailable):
    """A block has less text than a judgement needs, and will never have more."""


def pages_of(config: Config, tokenizer_path: Path, eos_id: int) -> Pages:
    """Return the function that reads the text on which this network's uploads are judged.

    Raises ConfigError, NetworkFailure.
    """
    length = config.training.sequence_length
    if not config.data.own:
        return PageReader(
            source=Source(config.data, cache=config.data_cache),
            tokenizer=TextTokenizer(tokenizer_path, eos_id=eos_id),
            sequence_length=length,
            rows_per_page=config.data.rows_per_page,
            max_length=config.data.max_length,
            draw_pages=config.draw_pages,
        )
    try:
        tokens = domain_tokens(config, tokenizer_path, eos_id)
    except PageUnavailable as error:
        raise NetworkFailure(f"uploads cannot be judged: {error}") from None

    def read(uid: int, block: int) -> Tensor:
        del uid  # all members are judged on the same text
        draw, found = random.Random(block), []
        for domain in config.domains:
            of_domain = tokens[domain.name]
            for _ in range(max(1, round(JUDGED_OF_DOMAINS * domain.weight))):
                start = draw.randint(0, len(of_domain) - length)
                found.append(torch.from_numpy(of_domain[start : start + length].astype(np.int64)))
        return torch.stack(found)

    return read


@dataclass(frozen=True)
class PageReader:
    """Read the text of ``(uid, block)`` for the evaluator, as the miner with that uid reads it.

    Args:
        source: Has the rows of the data set.
        tokenizer: Turns rows into tokens.
        sequence_length: Number of tokens in a sequence.
        rows_per_page: Number of rows in a page.
        max_length: Number of tokens after which a row is cut.
        draw_pages: The network's way to draw pages.
        patience: How long the pages of a block may take, not counting the last page.

    Examples:
        ```python
        read = pages_of(config, tokenizer_path, eos_id=0)
        sequences = read(17, block_at(3, 40))  # uid, outer step, page: int64 (n, sequence_length)
        ```
    """

    source: PageSource
    tokenizer: TextTokenizer
    sequence_length: int
    rows_per_page: int
    max_length: int
    draw_pages: PageDraw
    patience: timedelta = timedelta(minutes=5)

    def __call__(self, uid: int, block: int) -> Tensor:
        """Return the text of a block as int64 ``(n, sequence_length)``.

        Raises DataUnavailable if rows are unavailable now, or come too slowly, and ShortText if
        they are too few for two sequences or a page.
        """
        rows: list[str] = []
        deadline = time.monotonic() + self.patience.total_seconds()
        outer_step, first = place_of(block)
        try:
            for config, row, split in self.draw_pages(
                uid=uid,
                outer_step=outer_step,
                first=first,
                count=JUDGED_PAGES,
                num_rows=self.source.num_rows(),
            ):
                # A slow server may take two minutes per page, and the validator cannot end a round
                # before it has the text.
                if time.monotonic() >= deadline:
                    took = f"its pages take longer than {self.patience.total_seconds():g} s"
                    raise PageUnavailable(took)
                rows += self.source.rows(config, row, split=split, limit=self.rows_per_page)
            tokens = self.tokenizer.encode_rows(rows, max_length=self.max_length)
        # A ValueError means that the data set has too few pages.
        except (PageUnavailable, OSError, ValueError) as error:
            kind = ShortText if isinstance(error, ValueError) else DataUnavailable
            why = f"pages of uid {uid} from {first} on, outer step {outer_step}"
            raise kind(f"{why}: {error}") from error
        length = self.sequence_length
        count = len(tokens) // (BATCH * length) * BATCH
        if count == 0:
            raise ShortText(
                f"pages of uid {uid} from {first} on, outer step {outer_step} have fewer than two "
                "sequences"
            )
        return torch.from_numpy(tokens[: count * length].astype(np.int64)).reshape(count, length)


def in_a_line(error: BaseException) -> str:
    """Return the type and the text of an unexpected error, at most 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


_LACKING = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EIO)


def of_this_machine(error: BaseException | None) -> bool:
    """Return whether the error means that this machine lacks something, such as memory."""
    if isinstance(error, OSError):
        return error.errno in _LACKING
    lacking = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
    # torch raises a RuntimeError if the host has no memory left.
    return isinstance(error, lacking) or "t allocate memory" in str(error)


def evaluation_device(wanted: str) -> torch.device:
    """Return the device of ``--neuron.device``. Raises ConfigError for cuda without a GPU."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "no GPU is visible, so nothing can be evaluated on one: use --neuron.device cpu"
        )
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(auto if wanted == "auto" else wanted)


class EvaluationModel:
    """A model of any kind whose weights are changed between evaluations.

    Computes in bf16 on CUDA, as the network's validators do, and in float32 on the CPU, where
    improvements of small models would drown in rounding.

    Args:
        model_config: Content of a ``config.json``.
        device: Where the model computes.
        frozen: File of the tensors that nobody trains; None: all tensors are trained.
        stop: When it is set, an evaluation ends between two sequences; None: there is no stop.

    Examples:
        ```python
        model = EvaluationModel(model_config=config, device=torch.device("cpu"))
        model.load(weights)
        before = model.loss(sequences)  # nats per predicted token
        model.subtract("lm_head.weight", delta, factor=0.35)
        print(before - model.loss(sequences))
        ```
    """

    def __init__(
        self,
        *,
        model_config: Mapping[str, Any],
        device: torch.device,
        frozen: Path | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        kind = kind_of(model_config)
        model = kind.build(model_config)
        self.schema: Schema = schema_of(model)
        fixed = schema_of(model, frozen=True)
        self.device = device
        self._vocabulary = int(model_config["vocab_size"])
        # Switch gradients off, because torch refuses in-place changes of weights that need them.
        self._model = model.to(device).eval().requires_grad_(False)
        self._loss = ModelWithLoss(kind, self._model)
        self._parameters = dict(self._model.named_parameters())
        if frozen is not None:
            for entry in fixed:  # load one tensor at a time, since together they may fill memory
                (values,) = load_weights(frozen, [entry])
                self._parameters[entry[0]].copy_(values)
        if device.type == "cpu":
            self._model.float()  # a bf16 base keeps its values, but computes in float32
        self._stop = stop if stop is not None else threading.Event()

    def load(self, weights: Sequence[Tensor]) -> None:
        """Copy weights into the model.

        Args:
            weights: One tensor per parameter, in the order of ``schema``.
        """
        for (name, _), tensor in zip(self.schema, weights, strict=True):
            self._parameters[name].copy_(tensor)

    def subtract(self, name: str, delta: Tensor, factor: float) -> None:
        """Subtract ``factor * delta`` from one parameter.

        Args:
            name: The parameter's name.
            delta: float32 of the parameter's shape, on any device.
            factor: The factor of ``delta``.
        """
        self._parameters[name].sub_(delta.to(self.device), alpha=factor)

    @torch.no_grad()
    def losses(self, sequences: Tensor) -> tuple[float, ...]:
        """Return the mean cross-entropy of each sequence, in nats per predicted token.

        Args:
            sequences: int64 ``(n, length)``, on any device.

        Raises:
            ValueError: If there are no sequences.
            ConfigError: If there are tokens that the model does not have.
            StopNow: If ``stop`` was set.
        """
        if sequences.shape[0] == 0:
            raise ValueError("there is no sequence to evaluate")
        # Refuse such tokens here, because on a GPU the embedding would raise an error after which
        # all later calls fail.
        if (most := int(sequences.max())) >= self._vocabulary:
            raise ConfigError(
                f"the text has token {most} but the model has {self._vocabulary} words, so its "
                "loss cannot be measured: set tokenizer.name to the model's own "
                "tokenizer"
            )
        found = []
        for batch in sequences.split(1):  # each sequence is one observation of an upload's effect
            # A judgement takes minutes, and a stop must not wait until it ends.
            if self._stop.is_set():
                raise StopNow
            with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
                total, count = self._loss(self._loss.kind.batch(batch.to(self.device)))
            found.append(float(total) / count)
        return tuple(found)

    def loss(self, sequences: Tensor) -> float:
        """Return the mean cross-entropy over all predicted tokens, in nats.

        Args:
            sequences: int64 ``(n, length)``, on any device.
        """
        return fmean(self.losses(sequences))


# Fraction of the decoded gradient, multiplied by the outer learning rate, that is applied for
# judging (protocol page, section 5).
APPLIED_FRACTION = 0.5

TRIED = 4  # how many blocks are tried until one has enough text


@dataclass(frozen=True)
class Comparison:
    """The losses before and after one upload, on the text of some blocks.

    Args:
        blocks: The blocks whose text was read.
        before: Loss of each sequence without the upload, in nats per predicted token.
        after: Loss of each sequence with it.

    Examples:
        >>> found = Comparison((5120,), before=(2.0, 3.0), after=(1.75, 2.5))
        >>> found.losses
        (2.5, 2.125)
        >>> found.absolute
        0.375
    """

    blocks: tuple[int, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]

    @property
    def losses(self) -> tuple[float, float]:
        """The mean losses before and after the upload, which validators score."""
        return fmean(self.before), fmean(self.after)

    @property
    def relative(self) -> float:
        """The improvement as a fraction of the loss before the upload."""
        return relative_improvement(*self.losses)

    @property
    def absolute(self) -> float:
        """The improvement in nats per predicted token."""
        before, after = self.losses
        return before - after

    @property
    def error(self) -> float:
        """The standard error of ``absolute``, from its spread over sequences.

        It is inf for fewer than two sequences. Texts of one page resemble each other, so the true
        error is somewhat larger.
        """
        # Compare in pairs, since losses differ far more between texts than an upload changes them.
        gains = [b - a for b, a in zip(self.before, self.after, strict=True)]
        n = len(gains)
        if n < 2:
            return math.inf
        mean = self.absolute
        return math.sqrt(sum((g - mean) ** 2 for g in gains) / (n - 1) / n)

    @property
    def chance(self) -> float:
        """Nats per token by which mere chance may change the loss: three standard errors or more.

        With few sequences the standard error itself is uncertain. So the number of standard errors
        is the quantile of Student's t that is as rare as three standard deviations of a normal
        distribution. It is inf for fewer than two sequences.
        """
        return t_quantile(len(self.before) - 1, NormalDist().cdf(3)) * self.error


def t_quantile(freedom: int, chance: float) -> float:
    """Return the quantile ``chance`` of Student's t with ``freedom`` degrees of freedom.

    It uses the Cornish-Fisher series (Abramowitz and Stegun 26.7.5), and exact formulas for 1 and 2
    degrees of freedom, where the series is inaccurate.
    """
    if freedom < 1:
        return math.inf
    if freedom == 1:
        return math.tan(math.pi * (chance - 0.5))
    if freedom == 2:
        return (2 * chance - 1) / math.sqrt(2 * chance * (1 - chance))
    z = NormalDist().inv_cdf(chance)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom ** (i + 1) for i, term in enumerate(terms))


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one upload on random and assigned text.

    Args:
        uid: The miner's uid.
        outer_step: The outer step of the upload's close.
        random: The comparison on text that nobody was assigned; None if the upload was reset.
        assigned: The comparison on text that the miner was assigned; None if the upload was reset,
            if miners train on their own text, or if the miner's blocks are too short.
        cause: Why it was reset, in the form of events: ``STALE`` (it came too late), ``NO_DATA``
            (it could not be judged in time), ``BAD_GRADIENT`` (the file cannot be used),
            ``NOT_FINITE`` (the loss after it) or ``MAKES_IT_WORSE``; empty if it was not reset.
        reason: The cause in words; empty if it was not reset.

    Examples:
        >>> better = Comparison((5120,), (2.0, 2.1), (1.9, 2.0))
        >>> judgement = Evaluation(uid=17, outer_step=3, random=better, assigned=better)
        >>> judgement.ok, round(judgement.chance, 3)
        (True, 0.5)
    """

    uid: int
    outer_step: int
    random: Comparison | None = None
    assigned: Comparison | None = None
    cause: str = ""
    reason: str = ""

    @property
    def ok(self) -> bool:
        """False if the upload was reset."""
        return self.random is not None

    @property
    def chance(self) -> float | None:
        """The probability that the upload really helps more on assigned text than on random text.

        None if the upload was reset, or if there was too little text.
        """
        if self.random is None or self.assigned is None:
            return None
        error = math.hypot(self.random.error, self.assigned.error)
        gain = self.assigned.absolute - self.random.absolute
        if not math.isfinite(error):
            return None
        return NormalDist().cdf(gain / error) if error else float(gain > 0)


@dataclass(frozen=True)
class Evaluator:
    """Judge uploads against the global weights of one outer step.

    Args:
        model: Computes the losses.
        pages: Returns the text of ``(uid, block)``, int64 ``(n, sequence_length)``.
        assigned: Whether to measure assigned text too; False if miners train on their own text.

    Examples:
        ```python
        evaluator = Evaluator(model, pages_of(config, tokenizer_path, eos_id=0))
        own = (block_at(3, 40),)
        judgement = evaluator.judge(uid, file, own, judged)
        print(judgement.random.relative, judgement.chance)
        ```
    """

    model: EvaluationModel
    pages: Pages
    assigned: bool = True

    def judge(
        self,
        uid: int,
        file: UpdateFile,
        own_blocks: Sequence[int],
        judged: Judged,
    ) -> Evaluation:
        """Measure by how much an upload lowers the loss on random and assigned text.

        Args:
            uid: The member's uid.
            file: The member's upload.
            own_blocks: Blocks of text that the upload was trained on, to be tried in this order;
                never empty.
            judged: The global weights to apply the upload to, the outer learning rate, and the
                random text.

        Raises:
            DataUnavailable: If the text cannot be read or measured, which says nothing about the
                upload.
            StopNow: If the model's ``stop`` was set.
            torch.AcceleratorError: If the GPU failed; this process cannot use it any more.
        """
        outer_step = judged.outer_step
        try:
            drawn = [
                self._text(uid, range(block, block + TRIED * JUDGED_PAGES, JUDGED_PAGES))
                for block in judged.random_blocks
            ]
            blocks = [tuple(block for block, _ in drawn)]
            texts = [torch.cat([text for _, text in drawn])]
            # An upload with too little text is judged on random text only.
            with contextlib.suppress(ShortText):
                if self.assigned:
                    block, text = self._text(uid, own_blocks)
                    blocks.append((block,))
                    texts.append(text)
            # Load the weights after the text, because nothing can be judged without a text. Load
            # them again for each upload, because the previous upload is still subtracted.
            self.model.load(judged.weights)
            before = [self.model.losses(text) for text in texts]
        except (DataUnavailable, torch.AcceleratorError):
            raise
        except ConfigError as error:
            # A few tokenizers have words outside their model's vocabulary. Such a word makes one
            # text unusable, but must not affect the scores.
            raise DataUnavailable(str(error)) from None
        # The cause is the text or this machine, because the upload has not been read yet.
        except Exception as error:
            raise DataUnavailable(f"its text cannot be measured: {in_a_line(error)}") from error
        # Scores follow from both losses, and a loss that is not finite would spoil the scores of
        # all members.
        if not all(math.isfinite(loss) for losses in before for loss in losses):
            raise DataUnavailable("the loss before it is not finite")
        try:
            # Decode one parameter at a time, because all of them are as large as the model.
            for name, shape in self.model.schema:
                factor = judged.learning_rate * APPLIED_FRACTION
                self.model.subtract(name, file.decode(name, shape), factor)
            after = [self.model.losses(text) for text in texts]
        except torch.AcceleratorError:
            raise
        except Exception as error:  # without the upload the same computation succeeded
            if of_this_machine(error):
                raise DataUnavailable(f"it cannot be applied here: {in_a_line(error)}") from error
            why = f"it cannot be applied: {in_a_line(error)}"
            return Evaluation(uid, outer_step, cause="BAD_GRADIENT", reason=why)
        found = [
            Comparison(of_text, b, a) for of_text, b, a in zip(blocks, before, after, strict=True)
        ]
        if not all(math.isfinite(loss) for comparison in found for loss in comparison.after):
            why = "the loss after it is not finite"
            return Evaluation(uid, outer_step, cause="NOT_FINITE", reason=why)
        return Evaluation(uid, outer_step, found[0], found[1] if len(found) > 1 else None)

    def _text(self, uid: int, blocks: Sequence[int]) -> tuple[int, Tensor]:
        """Return the first block with enough text, and that text. Raises DataUnavailable."""
        *others, last = blocks
        for block in others:
            with contextlib.suppress(ShortText):
                return block, self.pages(uid, block)
        return last, self.pages(uid, last)


def judgement_fields(judgement: Evaluation, revision: str) -> Mapping[str, object]:
    """Return the fields of an ``upload_scored`` event; an empty ``revision`` is left out."""
    fields: dict[str, object] = {
        "uid": judgement.uid,
        "outer_step": judgement.outer_step,
        "ok": judgement.ok,
        "cause": judgement.cause,
        "reason": judgement.reason,
    }
    if revision:
        fields["revision"] = revision
    # Leave out figures that were not measured, as after a reset.
    for name, found in (("random", judgement.random), ("assigned", judgement.assigned)):
        if found is not None:
            fields[f"{name}_before"], fields[f"{name}_after"] = found.losses
            fields[f"{name}_relative"] = found.relative
            fields[f"{name}_page"] = place_of(found.blocks[0])[1]
    return fields
