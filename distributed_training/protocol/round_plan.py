"""Compute a member's bytes and utilization in an outer step, and when its update comes.

``dt-plan`` prints it. ``tests/vectors/exchange-grid.json`` has figures of real miners at links of
many speeds (``python -m bench.exchange_grid``), and a test compares these formulas with them. A
link moves files, with :data:`HEADERS`, and nothing else but looks at the state.

*Utilization* is what a member trains and the network takes, of what it could train: 1 without
holds and uploads that come late.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from distributed_training.protocol.growth import CHECKPOINT, file_bytes
from distributed_training.protocol.types import UPDATE_CODEC

HEADERS = 1.045  # bytes on the wire for each of a file
_ACKS = 0.018  # bytes that acknowledge each byte which comes
_LOOK, _LOOK_SOON = 30.0, 5.0  # seconds between two looks at the state; while an update is awaited
_LOOK_BYTES = 3500.0  # each way
_FIRST = 1.0  # seconds from a close until its first byte is sent, without step and checkpoint
_JUDGED = 4.0  # seconds from the last upload to the published update, without fetching and judging


@dataclass(frozen=True)
class PlannedMember:
    """A member, as a plan has it."""

    step: float  # seconds
    up: float  # Mbit/s
    down: float  # Mbit/s
    held: float = 0.0  # seconds of a round

    def sending(self, count: float) -> float:
        """Return the seconds that it takes to send ``count`` bytes."""
        return 8 * count * HEADERS / (self.up * 1e6)

    def receiving(self, count: float) -> float:
        return 8 * count * HEADERS / (self.down * 1e6)


@dataclass(frozen=True)
class PlannedStep:
    """An outer step of a member: seconds, bytes."""

    inner_steps: float
    sent: float
    received: float
    transfer: float  # of the upload, or of the all-reduce
    late: float  # from its close to its update
    utilization: float
    in_time: bool = True
    averages: bool = False  # an all-reduce ends in the grace


def through_store(
    parameters: int,
    member: PlannedMember,
    *,
    period: float,
    grace: float,
    codec: str = UPDATE_CODEC,
    slowest: float | None = None,
) -> PlannedStep:
    """Return an outer step of a network of exchange ``store``.

    ``slowest``: Mbit/s up of the slowest member, which the validator waits for; None: this one.
    """
    upload, update = file_bytes(parameters, codec), file_bytes(parameters)
    begun = member.step / 2 + _FIRST + CHECKPOINT * parameters
    waits = begun + 8 * upload * HEADERS / ((slowest or member.up) * 1e6)
    seen = min(waits, grace) + _JUDGED + _LOOK_SOON / 2
    late = seen + member.receiving(update)
    # Who has no update at the next close uploads nothing for that one.
    in_time = begun + member.sending(upload) <= grace and late <= period
    looks = min(late, period) / _LOOK_SOON + max(0.0, period - late) / _LOOK
    rest = looks * _LOOK_BYTES
    # Sending ends when the outer step is seen to be over.
    whole = min(upload * HEADERS, max(0.0, seen - begun) * member.up * 1e6 / 8)
    return PlannedStep(
        inner_steps=max(0.0, period - member.held) / member.step,
        sent=whole + _ACKS * update + rest,
        received=update * HEADERS + _ACKS * whole + rest,
        transfer=member.sending(upload),
        late=late,
        utilization=max(0.0, 1 - member.held / period) if in_time else 0.0,
        in_time=in_time,
    )


def over_hivemind(
    parameters: int,
    member: PlannedMember,
    *,
    period: float,
    grace: float,
    average_after: float,
    peers: int,
    codec: str = UPDATE_CODEC,
) -> PlannedStep:
    """Return an outer step of a network of exchange ``hivemind``: a store's, and an all-reduce.

    ``average_after``: seconds from a close until the ``peers`` members average, in float16. The
    validator reduces nothing and receives the average too. An all-reduce that does not end in the
    grace costs the average and nothing else: then the update is the merge.
    """
    outer = through_store(parameters, member, period=period, grace=grace, codec=codec)
    shares = (peers - 1) / peers
    sent, received = 2 * parameters * (shares + 1), 2 * parameters * 2 * shares
    transfer = max(member.sending(sent), member.receiving(received))
    ends = min(average_after + transfer, grace) + _JUDGED + _LOOK_SOON / 2
    return replace(
        outer,
        sent=outer.sent + sent * HEADERS + _ACKS * received,
        received=outer.received + received * HEADERS + _ACKS * sent,
        transfer=transfer,
        late=max(outer.late, ends + member.receiving(file_bytes(parameters))),
        averages=average_after + transfer <= grace,
    )
