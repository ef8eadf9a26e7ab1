"""The gradient check: what a compressed pseudo-gradient would do to the loss, before its upload.

For a moment the weights become ``epoch start - scale * outer_lr * 0.5 * decoded`` (protocol page,
section 4). Validators use scale 1; an upload whose values are multiplied by a scale has the effect
of that scale. So a short search finds which direction and which scale to upload, for some forward
passes: only the entries that were sent differ between two trials. The sequences are this rank's
own, held out from training; the loss without a gradient is measured once per outer step.

The loss along one direction has one valley, flat at the bottom, so scales are compared on a
logarithmic axis: double (or halve) while that helps, then look where the parabola through the last
three points has its minimum. Five evaluations are typical.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distributed_training.protocol import lines
from distributed_training.protocol.types import RankFailedError

from .collectives import RowStream, to_host
from .error_feedback import Code, ErrorFeedback
from .model import loss_limit
from .sharding import ShardedModel
from .snapshot import Epoch, SnapshotHandle, publish_instead

log = logging.getLogger(__name__)

# At 1 % of the values a step of the first inner steps wants more than 64 times.
SMALLEST, LARGEST = 1 / 8, 1024.0


@dataclass(frozen=True)
class Found:
    """``loss``: at ``factor``; ``evaluations``: how many factors were tried."""

    factor: float
    loss: float
    evaluations: int


def best_factor(loss: Callable[[float], float], *, first: float = 1.0) -> Found:
    """Return the scale within ``SMALLEST``..``LARGEST`` with the lowest ``loss`` of those tried.

    ``first``: the scale to begin with, such as the one found last time; powers of two are tried,
    from the nearest one on, and one scale between them. A loss that is NaN or infinite counts as
    worse than any other; where nothing finite is found the scale is 1.
    """
    seen: dict[float, float] = {}

    def at(factor: float) -> float:
        if factor not in seen:
            value = loss(factor)
            seen[factor] = value if math.isfinite(value) else math.inf
        return seen[factor]

    best = 2.0 ** round(math.log2(min(max(first, SMALLEST), LARGEST)))
    for ratio in (2.0, 0.5):
        while SMALLEST <= best * ratio <= LARGEST and at(best * ratio) < at(best):
            best *= ratio
    low, high = best / 2, best * 2
    if low in seen and high in seen and at(low) < math.inf and at(high) < math.inf:
        bend = at(low) - 2 * at(best) + at(high)
        if bend > 0:
            at(best * 2.0 ** (0.5 * (at(low) - at(high)) / bend))
    factor = min(seen, key=lambda tried: seen[tried])
    if seen[factor] == math.inf:
        return Found(1.0, math.inf, len(seen))
    return Found(factor, seen[factor], len(seen))


#: Of the decoded gradient times the outer learning rate (protocol page, section 4).
APPLIED_FRACTION = 0.5


@dataclass(frozen=True)
class Choice:
    """The upload that was chosen: ``factor`` times the values of ``direction``.

    Losses are means in nats per token, of which the one without a gradient was subtracted: below 0
    is good.
    """

    direction: str
    factor: float
    delta: float
    plain_delta: float  # of the first direction as it is
    evaluations: int


@dataclass(frozen=True)
class Text:
    """Micro-batches of this rank's own to measure a loss on, equally many on all ranks.

    ``counts``: False where it has too few now. It then runs others, for which nothing is counted:
    each gather of weights needs all ranks.
    """

    batches: Sequence[Tensor]  # int64 (sequences, length)
    counts: bool

    @classmethod
    def of(cls, sequences: Tensor | None, *, batches: int, micro_batch: int, length: int) -> Text:
        """Take ``batches`` of ``micro_batch`` sequences, if there are enough."""
        wanted = batches * micro_batch
        counts = sequences is not None and len(sequences) >= wanted > 0
        if sequences is None or not counts:
            sequences = torch.zeros((wanted, length), dtype=torch.int64)
        return cls(sequences[:wanted].split(micro_batch), counts)


def _mean_loss(sharded: ShardedModel, stream: RowStream, text: Text) -> float:
    """Return the mean loss of the present weights, in nats per token; NaN if no rank's counts."""
    # FSDP would compute with the weights that it gathered for the trial before.
    sharded.discard_gradients()
    total = torch.zeros((), dtype=torch.float64, device=sharded.device)
    for batch in text.batches:
        total += sharded.loss_of(batch)
    tokens = sum(batch.shape[0] * (batch.shape[1] - 1) for batch in text.batches)
    # The same bits on every rank: the search branches on them, and a rank that took another
    # branch would leave the others in a gather.
    summed, counted = stream.sum([float(total), tokens] if text.counts else [0.0, 0.0])
    return summed / counted if counted else float("nan")


def _copy_weights(sharded: ShardedModel, stream: RowStream) -> list[Tensor]:
    """Copy the weights, for after a trial. Raises RankFailedError on all ranks alike."""
    # Where a GPU has no room it takes host memory, which may end on a single rank.
    return stream.run_on_all(lambda: _aside([shard.local for shard in sharded.shards]))


def _aside(weights: Sequence[Tensor]) -> list[Tensor]:
    """Copy weights where they are, or to host memory if the device has too little.

    Between two steps a GPU has the memory of the activations free.
    """
    # Ranks may differ in this: nothing here is collective.
    try:
        return [rows.clone() for rows in weights]
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return to_host(weights)


class TrialStep:
    """A step from the present weights along one direction, for this rank's rows, on the device.

    Of a matrix only the entries that were sent are kept and written; of a vector all.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        stream: RowStream,
        feedback: ErrorFeedback,
        codes: Sequence[Code | None],
    ) -> None:
        self._shards = sharded.shards
        # Where, the weights there at the beginning, what was sent.
        self._parts: list[tuple[Tensor | None, Tensor, Tensor]] = []
        for i, shard in enumerate(self._shards):
            code, local = codes[i], shard.local
            if feedback.by_rows(i):
                assert code is not None
                where, sent = (part.to(local.device) for part in code)
                self._parts.append((where, local.gather(1, where.long()), sent))
                continue
            rows = shard.empty_rows()

            def decode(code: Code | None = code, shape: tuple[int, ...] = shard.shape) -> Any:
                return None if code is None else feedback.compression.decode(code, shape)

            # With DCT a whole matrix, for which rank 0 may have no room.
            whole = stream.run_on_all(decode)
            stream.scatter(shard.shape, whole, rows)
            self._parts.append((None, local.clone(), rows.to(local.device)))

    def apply(self, factor: float) -> None:
        """Set the weights to those of the beginning - ``factor`` * what was sent."""
        for shard, (where, start, sent) in zip(self._shards, self._parts, strict=True):
            value = torch.add(start, sent, alpha=-factor)
            if where is None:
                shard.local.copy_(value)
            else:
                shard.local.scatter_(1, where.long(), value)


class GradientCheck:
    """Checks finished snapshots, on the training thread of every rank, between two micro-batches.

    What is found best takes the place of the gradient that the snapshot wrote. ``search``: look for
    the best length; otherwise only measure factor 1.
    """

    def __init__(
        self,
        *,
        sharded: ShardedModel,
        stream: RowStream,
        feedback: ErrorFeedback,
        search: bool,
        sequence_length: int,
    ) -> None:
        self._sharded = sharded
        self._stream = stream
        self._feedback = feedback
        self._search = search
        self._sequence_length = sequence_length
        self._before: tuple[str, float] | None = None  # epoch, loss without a gradient
        self._last: dict[str, float] = {}  # by direction, the factor found last
        self._held: Tensor | None = None
        self._others_held = False  # since the last preview

    def hold_back(self, sequences: Tensor | None) -> None:
        """Take int64 (n, sequence) of this rank as held-out data; None: it has none."""
        self._held = sequences
        self._others_held = True

    def run(self, handle: SnapshotHandle, *, micro_batch: int, batches: int) -> float | None:
        """Return the loss with minus without the gradient of a finished snapshot, on held-out data.

        ``batches`` of ``micro_batch`` sequences are run on each rank. In nats per token; below 0 is
        good. None when no rank has held-out data, or one has no memory. Collective, at a
        micro-batch boundary, in a round and after it too; rank 0 must have seen ``handle.done()``.
        Nothing of the training state changes.
        """
        if not self._stream.layout.on_node_0:  # rank 0 knows when its node's codes are made
            handle.join()
        held = Text.of(
            self._held, batches=batches, micro_batch=micro_batch, length=self._sequence_length
        )
        epoch = handle.epoch
        # What one rank lacks is all ranks' problem, since each trial gathers weights.
        problem = float(not handle.codes or epoch is None)
        there, problems, others = self._stream.sum([held.counts, problem, self._others_held])
        if not there or problems:
            handle.forget()
            return None
        assert epoch is not None
        if others:  # on any rank; all of them forget, since measuring is collective
            self._before, self._others_held = None, False
        try:
            choice = self.choose(epoch, handle.codes, held)
        except RankFailedError as error:  # on all ranks alike; the weights are as before
            log.warning("The gradient is not checked: %s", error)
            handle.forget()
            return None
        published = self._stream.rank != 0 or self._publish(handle, choice)
        handle.forget()
        return choice.delta if published else choice.plain_delta

    def _publish(self, handle: SnapshotHandle, choice: Choice) -> bool:
        """Rank 0: write what was chosen. False: what the snapshot wrote is uploaded."""
        first = next(iter(handle.contents))
        plain = f"error feedback {first}, scale 1"
        chosen = not choice.delta >= choice.plain_delta  # with NaN too
        if chosen:
            scaled = self._feedback.compression.scaled
            try:
                publish_instead(handle, choice.direction, choice.factor, scaled)
            except OSError as error:
                chosen = False
                log.warning(
                    "%s: the gradient is uploaded as it was written before, or not at all if its "
                    "files do not agree any more",
                    error,
                )
        if chosen:
            how = f"error feedback {choice.direction}, scale {choice.factor:.3g}"
            how += f"; {plain}: {choice.plain_delta:+.4f}; {choice.evaluations} tried"
            log.info("%s", lines.preview(choice.delta, how))
        else:
            log.info("%s", lines.preview(choice.plain_delta, plain))
        return chosen

    @torch.no_grad()
    def choose(
        self, epoch: Epoch, codes: Mapping[str, Sequence[Code | None]], held: Text
    ) -> Choice:
        """Return the best of the directions, equal on all ranks.

        ``codes``: by direction, of this rank's rows, or whole on rank 0; the first one unscaled is
        always among those tried. At a micro-batch boundary; the weights, and the gradients of a
        step under way, are afterwards the same to the bit.
        """
        applied = epoch.learning_rate * APPLIED_FRACTION
        with self._sharded.gradients_aside(), contextlib.ExitStack() as stack:
            current = {"weights": _copy_weights(self._sharded, self._stream)}
            # After an error too: whatever saves or trains next would take the trial's weights.
            stack.callback(self._sharded.load_state_dict, current)
            self._sharded.load_state_dict({"weights": epoch.start})
            if self._before is None or self._before[0] != epoch.epoch_id:
                self._before = (epoch.epoch_id, self._mean(held))
            found: dict[str, Found] = {}
            plain = 0.0
            for name, parts in codes.items():
                step = TrialStep(self._sharded, self._stream, self._feedback, parts)

                def loss(factor: float, step: TrialStep = step) -> float:
                    step.apply(factor * applied)
                    return self._mean(held)

                if not found:
                    # As the snapshot has it on disk: the choice must not be worse than that.
                    plain = loss(1.0)
                    found[name] = Found(1.0, plain, 1)
                if self._search:
                    best = best_factor(loss, first=self._last.get(name, 1.0))
                    self._last[name] = best.factor
                    # Not "<": the loss at scale 1 may be NaN, and a shorter step's is not.
                    if name not in found or not best.loss >= found[name].loss:
                        found[name] = best
                # The next direction writes other entries: these must be the epoch start's again.
                step.apply(0.0)
        name = min(found, key=lambda n: found[n].loss)
        return Choice(
            direction=name,
            factor=found[name].factor,
            delta=found[name].loss - self._before[1],
            plain_delta=plain - self._before[1],
            evaluations=sum(f.evaluations for f in found.values()),
        )

    def _mean(self, held: Text) -> float:
        return _mean_loss(self._sharded, self._stream, held)


#: Micro-batches of each rank that the weights of another are measured on.
MEASURED = 2


class WeightsWorseThanGuess(ValueError):
    """Weights that fit the model, and whose loss is beyond the limit."""


@torch.no_grad()
def load_measured(
    sharded: ShardedModel,
    stream: RowStream,
    load: Callable[[], None],
    text: Text,
    *,
    own: Sequence[Tensor] | None,
    earlier: float | None = None,
    are_ours: Callable[[], bool] | None = None,
) -> bool:
    """Call ``load``, which replaces the weights, and measure what it loaded on ``text``.

    Collective. ``own``: weights of about the same outer step, see :func:`loss_limit`; ``earlier``:
    the loss of older ones, which counts where it is higher. ``are_ours``: whether the weights that
    were loaded are ones that this miner had, which need no measure. Returns what it said. Raises
    WeightsWorseThanGuess, the ValueErrors of ``load``, and RankFailedError for a rank without
    memory, on all ranks alike; weights and the gradients of a step under way are as they were then.
    """
    config: Any = sharded.model.config
    with sharded.gradients_aside():
        before = _copy_weights(sharded, stream)
        known = None
        try:
            if are_ours is not None:
                load()
                if are_ours():
                    return True
            if own is not None:
                sharded.load_state_dict({"weights": own})
                known = _mean_loss(sharded, stream, text)
                if earlier is not None:
                    known = max(known, earlier)
            load()
            loss = _mean_loss(sharded, stream, text)
            limit = loss_limit(config.to_dict(), known)
            # NaN too: finite weights may overflow in the first layer.
            if not loss <= limit:
                ours = "" if known is None else f", our epoch-start weights {known:.2f}"
                raise WeightsWorseThanGuess(
                    f"loss {loss:.2f} on text of this miner, limit {limit:.2f}; a uniform guess "
                    f"has {math.log(config.vocab_size):.2f}{ours}"
                )
        except BaseException:
            # Whatever saves or trains next would take weights that were refused.
            sharded.load_state_dict({"weights": before})
            raise
    return False
