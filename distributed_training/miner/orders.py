"""What may be ordered: the orders that reach all ranks, and the tasks of rank 0 alone.

An *order* reaches all ranks at a micro-batch boundary, is carried out by the loop, and its outcome
is an event. A *task* is what rank 0 starts beside the loop; it, too, is answered by an event.
:func:`~.decide.decide` gives both.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Order(enum.IntEnum):
    """What every rank does next. ``Command.arg`` is 0 unless something else is said."""

    TRAIN = 0  # one micro-batch
    IDLE = 1  # nothing: rank 0 waits for something
    WAIT_FOR_DATA = 2  # nothing: no block is ready on all ranks
    WRITE_PSEUDO_GRADIENT = 3  # into the swarm's buffers
    OUTER_STEP = 4  # prepare, vote, commit everywhere or nowhere
    LOAD = 5  # the fetched global state; arg: its outer step
    REBASE = 6  # the same, keeping what was trained since the epoch began; arg: outer step
    SNAPSHOT = 7  # of everything a publication needs; arg: the chain's block
    PREVIEW = 8  # try the snapshot's gradient as a validator would
    CHECKPOINT = 9
    ROLL_BACK = 10  # to the last good checkpoint
    STOP = 11  # checkpoint and leave the loop; arg: exit status


class Task(enum.Enum):
    """What rank 0 alone starts, beside the loop."""

    AVERAGE = "let the swarm average in its own thread"
    CANCEL_AVERAGE = "the round is over: free the swarm"
    COMPARE_EPOCHS = "read the global epoch soon"
    COMPARE_WEIGHTS = "compare a sample of the global weights with our epoch start"
    FETCH_GLOBAL = "download the global state"
    DISCARD_GLOBAL = "delete the fetched global state: it does not fit this model"


class DataOrder(NamedTuple):
    """What a boundary says about data; 0 where there is nothing to say.

    ``request``: a block to prefetch. ``begin``: the block to train on from here, cut to
    ``sequences`` on every rank, of which the first ``start`` were trained on before a restart.
    """

    request: int = 0
    begin: int = 0
    sequences: int = 0
    start: int = 0


class Given(NamedTuple):
    """What rank 0 has for an order and the other ranks have not; it is never sent."""

    folder: Path | None = None  # LOAD, REBASE: the fetched global state
    blocks: Sequence[int] = ()  # SNAPSHOT, CHECKPOINT, STOP: trained on since the last publication
    kept: Mapping[str, Any] = {}  # CHECKPOINT, STOP: more for rank 0's checkpoint, JSON-able


@dataclass(frozen=True)
class Command:
    """One boundary: the order, its number, what it says about data, and what rank 0 adds."""

    order: Order
    arg: int = 0
    data: DataOrder = field(default=DataOrder())
    given: Given = field(default=Given(), compare=False)
