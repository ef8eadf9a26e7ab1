"""Recognise the weights that an outer step of this miner began with, long after they are gone.

All miners take the outer step at the end of a round; the validator publishes it minutes later, or
not at all: it refused the step, was killed, or its store was away. Then the network continues from
the outer step before, and every miner has to go back to the weights that it had then. They are
taken whatever it costs: a young network wins several nats by one outer step.

So a miner remembers each outer step that it leaves. Peers add up an average in another order, so
equal weights of two peers differ in their last bits, and no hash of them is the same. What is kept
is a *sketch* (Johnson and Lindenstrauss): each parameter between random signs of its rows and of
its columns. It is linear, so each rank adds that of its own rows, and the distance of two sketches
is about that of the weights. The signs are this miner's secret: nobody else can make weights that
differ and have the same sketch. With it is kept the loss of the first inner step, by which other
weights of that outer step are judged.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .collectives import ParameterShard, RowStream

#: Sign vectors for each side of a parameter: 64 bytes of sketch each, 20 kB for a large model.
SIGNS = 4
#: Distance of two sketches, relative to one of them, of weights that count as the same.
SAME = 1e-4
#: Outer steps that are remembered.
REMEMBERED = 8


@dataclass(frozen=True)
class _Start:
    """``loss``: of the first inner step from these weights, None if there was none."""

    loss: float | None
    sketch: Tensor  # float32 (parameters, SIGNS * SIGNS)


class EpochStarts:
    """The last outer steps that this miner left. All ranks call the same methods alike."""

    def __init__(self, *, shards: Sequence[ParameterShard], stream: RowStream) -> None:
        self.loss: float | None = None  # of the present epoch start
        self._shards = shards
        self._stream = stream
        self._seed: int = stream.from_rank_0(secrets.randbits(48))
        self._left: dict[int, _Start] = {}

    def sketch(self, rows: Iterable[Tensor]) -> Tensor:
        """Return the sketch of weights, given this rank's host ``rows``. Collective.

        Raises RankFailedError on all ranks alike when one has no memory.
        """
        own = self._stream.run_on_all(lambda: self._of_rows(rows))
        whole = torch.tensor(self._stream.sum(own.flatten().tolist()), dtype=torch.float32)
        # Each copy of the model has added the same.
        return whole.view_as(own) / self._stream.layout.replicas

    def _of_rows(self, rows: Iterable[Tensor]) -> Tensor:
        found = torch.zeros(len(self._shards), SIGNS * SIGNS)
        for index, (shard, values) in enumerate(zip(self._shards, rows, strict=True)):
            generator = torch.Generator().manual_seed(self._seed + index)
            width = math.prod(shard.shape[1:])
            # Of the whole parameter on every rank: the sketch is the same at each world size.
            left, right = (
                torch.randint(0, 2, (SIGNS, count), generator=generator).float().mul_(2).sub_(1)
                for count in (shard.shape[0], width)
            )
            part = left[:, shard.start : shard.stop] @ values.reshape(-1, width)
            found[index] = (part @ right.t()).flatten()
        return found

    def leave(self, outer_step: int, sketch: Tensor) -> None:
        """Remember the outer step that is left, by the ``sketch`` of its start. Local."""
        # Later ones were given up when the network went back: they must not push this one out.
        before = sorted(step for step in self._left if step < outer_step)[1 - REMEMBERED :]
        self._left = {step: self._left[step] for step in before}
        self._left[outer_step] = _Start(self.loss, sketch)
        self.loss = None

    def __contains__(self, outer_step: int) -> bool:
        return outer_step in self._left

    def are_ours(self, outer_step: int, rows: Iterable[Tensor]) -> bool:
        """Return whether ``rows`` are what that known outer step began with. Collective."""
        ours, theirs = self._left[outer_step].sketch, self.sketch(rows)
        # Each parameter separately: a large one would hide a broken small one. NaN is not equal.
        return bool(((theirs - ours).norm(dim=1) <= SAME * ours.norm(dim=1)).all())

    def loss_before(self, outer_step: int, *, ours: int) -> float | None:
        """Return the highest loss of the starts left from the step before ``outer_step`` on.

        None: none of them was left by an outer step of this miner; infinite: of one there is no
        loss. ``ours``: the outer step of this miner. Its own steps since then may be those that
        the validator did not publish, so they are no measure for another state of ``outer_step``.
        """
        first = min(outer_step, ours) - 1
        losses = (start.loss for step, start in self._left.items() if first <= step < ours)
        return max((math.inf if loss is None else loss for loss in losses), default=None)

    def state_dict(self) -> dict[str, Any]:
        """Return JSON-able values, the same on every rank."""
        left = [
            [step, start.loss, start.sketch.numpy().tobytes().hex()]
            for step, start in sorted(self._left.items())
        ]
        # One value: the sketches are of no use without their seed.
        return {"epoch_starts": [self._seed, self.loss, left]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seed, self.loss, left = state["epoch_starts"]
        self._left = {
            step: _Start(
                loss,
                torch.frombuffer(bytearray.fromhex(sketch), dtype=torch.float32).view(
                    len(self._shards), SIGNS * SIGNS
                ),
            )
            for step, loss, sketch in left
        }
