"""Average by a butterfly all-reduce: each peer averages one share of all values, for everybody.

The values are cut into parts. A peer sends each other peer the parts of that peer's share, and gets
back, part by part, the difference between the average and what it sent. At the same time it is the
*reducer* of its own share: it takes the others' parts, sums them, and answers each with its
difference. So a peer of n moves 2 (n-1)/n of the model in each direction, the least that any
all-reduce can (Rabenseifner 2004). A round among miners is one such all-reduce of their
pseudo-gradients (protocol page, section 6).

The wire is hivemind's (1.1.12), so that any hivemind averager can be one of the peers. The way
between memory and wire is our own: parts are sent from where the tensors lie and received into
buffers that are used again, sums and differences are made in place, and differences are added as
they come. hivemind copies each part about ten times and keeps all differences of a tensor.

With *four bits* a value the reducer answers in another way: it encodes the average once, sends the
same bytes to all, and itself keeps the values that these bytes decode to. So all peers hold the
same average to the bit.

A failing peer costs its own values only. A *sender* that fails is left out of the parts it has not
sent; if a *reducer* fails, the remaining parts of its share keep the local values.

Nor is a peer believed. Values that are not finite, a weight above one, and work that cannot be done
in time count as failures. A contribution is shortened if it is longer than twice the usual norm of
its part (:func:`usual_norm`). A reducer's average is held against our own values, before it is
taken: a part that is out of bounds (:data:`BOUND`) keeps the local values.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from hivemind.averaging.partition import TensorPartContainer
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from torch import Tensor

from distributed_training.protocol import four_bits

from . import wire
from .wire import FrameError, Stream

log = logging.getLogger(__name__)

FLOAT_BYTES = 4
#: Parts of one sender that may wait for their average, or for the sender to take its differences.
_AHEAD = 4
#: p2pd ends a stream by closing both of its directions, and now and then resets it instead:
#: the bytes that the other p2pd still holds are lost then. So a sender that does not close first
#: gets the time to take this many bytes at the pace so far: least and most seconds.
_ON_ITS_WAY = 8 << 20
_TAKEN_WITHIN = 0.1, 2.0

#: An average may be this many times as long as the values that it is compared with.
BOUND = 2.0
#: A contribution is shortened to this many times the usual norm. Norms grow by less than the inner
#: steps do: if most peers took half of the steps, peers that took all have no longer norms than
#: that.
LONGEST = 2.0
#: A sound average is at most this many times as long as usual: half of the contributions are at
#: most usual then, and the others LONGEST.
_MOST_OF_USUAL = 1.5
#: Of two contributions the longer may be this many times as long as the shorter: no third shows
#: which of the two is usual, and a peer that joined late has a short one.
_BETWEEN_TWO = 10.0
#: hivemind wants a positive weight of a peer that contributes nothing (the validator's 1e-6).
MOST_WEIGHT_OF_NOTHING = 1e-6
#: A part of fewer values may by chance be far longer at some peers than at others.
_FEW_VALUES = 64
#: A peer whose own values are zeros, or few steps old, knows the scale of one share, not of each
#: layer. Few values of other layers (norms') may still be out of bounds, at nobody's fault.
_SCALE_OF_LAYERS = 5.0
_FEW_OF_A_SHARE = 0.05
# Shares of the time for the all-reduce: the last ones are for senders, and for reducers.
_FIRST_LOOK, _LAST_LOOKS = 0.25, (0.85, 0.95)
_LEAST_WINDOW = 5.0  # seconds: over a shorter time a pace says little
_HELD_UP = 0.1  # share of a window: if our own loop stood still for longer, its pace says nothing
_BEHIND = 2  # parts: senders of one pace are about this far apart

OpenStream = Callable[[PeerID], AbstractAsyncContextManager[Stream]]


class GroupFailed(RuntimeError):
    """The group has no other live peer, or never had one."""


@dataclass(frozen=True)
class Group:
    """The peers that average with each other: the same at each of them, in the same order."""

    id: bytes
    peers: tuple[PeerID, ...]
    fractions: tuple[int, ...]  # values that a peer averages for all; 0: only sends and takes
    auxiliaries: frozenset[PeerID] = frozenset()  # average for others and send nothing


@dataclass(frozen=True)
class Terms:
    """The terms on which this peer averages.

    ``chunk_timeout``, in seconds, covers one part from a sender, and one difference on its way to
    it. A reducer's difference may take twice as long, since the reducer waits for all senders.
    ``timeout``, in seconds, covers the whole all-reduce.
    """

    weight: float
    part_values: int  # all peers of a group must cut the tensors into parts of as many values
    compression: int
    chunk_timeout: float
    timeout: float = math.inf
    usual_rms: float = 0.0  # root mean square of past averages; 0: none is known


class AllReduce:
    """One all-reduce of this peer, ``own``, in a group that was found.

    ``tensors`` (float32, contiguous) become averages in place. ``open_stream`` opens a stream to a
    peer's all-reduce; the streams that peers open to ours are given to :meth:`serve`.
    """

    def __init__(
        self,
        group: Group,
        own: PeerID,
        *,
        tensors: Sequence[Tensor],
        terms: Terms,
        open_stream: OpenStream,
    ) -> None:
        # hivemind's own arithmetic: which part is whose must be the same at each peer.
        cut = TensorPartContainer(
            tensors, group.fractions, part_size_bytes=FLOAT_BYTES * terms.part_values
        )
        self._shares = [cut.get_raw_input_parts(i) for i in range(len(group.peers))]
        mine = group.peers.index(own)
        senders = [p for p in group.peers if p != own and p not in group.auxiliaries]
        self._buffers = Buffers(terms.part_values)
        self._four = terms.compression == wire.FOUR_BITS
        self.reducer = Reducer(
            self._shares[mine],
            weight=terms.weight,
            senders=senders,
            buffers=self._buffers,
            four=self._four,
        )
        self.closing: set[asyncio.Task[None]] = set()  # streams whose reducer has yet to end
        self.kept_local = 0  # values of the others' shares for which no average was taken
        self.out_of_time = False  # somebody was not done at the last look
        self.group = group
        self._mine = mine
        self._terms = terms
        self._open_stream = open_stream
        self._not_yet_come = set(senders)
        self._left = [list(reversed(share)) for share in self._shares]  # the next part last
        self._patience: dict[int, asyncio.Timeout] = {}  # by the index of a reducer
        self._failed_reducers: dict[PeerID, str] = {}

    @property
    def part_bytes(self) -> int:
        """The bytes that the values of the longest part take on the wire, at most."""
        values = self._terms.part_values
        return four_bits.bytes_of(values) if self._four else FLOAT_BYTES * values

    @property
    def causes(self) -> Mapping[PeerID, str]:
        """The causes for which peers were left out, as senders or as reducers."""
        return self._failed_reducers | self.reducer.causes

    async def run(self) -> None:
        """Average every value, or give it up.

        Raises GroupFailed if all other peers failed, TimeoutError if none of them was done in time.

        The differences of our share may still be on their way to peers: :meth:`serve` sends them.
        """
        reducers = [i for i, share in enumerate(self._shares) if share and i != self._mine]
        loop = asyncio.get_running_loop()

        def leave_out_who_did_not_come() -> None:
            for sender in self._not_yet_come:
                self.reducer.leave_out(sender, "it sent nothing")

        missing = loop.call_later(self._terms.chunk_timeout, leave_out_who_did_not_come)
        watching = loop.create_task(self._watch_pace())
        try:
            gone = await asyncio.gather(*map(self._exchange, reducers))
            await self.reducer.complete.wait()
        finally:
            missing.cancel()
            watching.cancel()
        if all(gone) and self.reducer.alone:
            if self.out_of_time:
                raise TimeoutError
            raise GroupFailed("all other peers of the group failed")

    # --- in time -------------------------------------------------------------------------------

    async def _watch_pace(self) -> None:
        """Leave out peers that cannot be done in time, while there is time for the others.

        A slow link shows in the bytes that its peer sends and takes. So reducers get the benefit
        of the doubt: one that sent in time may itself wait for a sender that is slow only to it,
        until it leaves that one out. At the end every peer that is not done is left out, senders
        first: the reducers that waited for these senders then have time to answer.
        """
        loop, timeout = asyncio.get_running_loop(), self._terms.timeout
        began = loop.time()
        all_sent, all_averaged = (began + share * timeout for share in _LAST_LOOKS)
        window = max(_FIRST_LOOK * timeout, _LEAST_WINDOW)
        averaged, left = self.reducer.averaged, [len(parts) for parts in self._left]
        while loop.time() + window < all_sent:
            if await _sleep(window) > _HELD_UP * window:
                averaged, left = self.reducer.averaged, [len(parts) for parts in self._left]
                continue
            remaining = (all_sent - loop.time()) / window  # windows of the same pace
            missing = len(self._shares[self._mine]) - self.reducer.averaged
            if (self.reducer.averaged - averaged) * remaining < missing:
                for sender in self.reducer.behind():
                    self.reducer.leave_out(sender, "it is too slow to be done in time")
            for index, parts in enumerate(self._left):
                late = (left[index] - len(parts)) * remaining < len(parts)
                if late and self.group.peers[index] in self.reducer.causes:
                    self._give_up(index, "it is too slow to be done in time")
            averaged, left = self.reducer.averaged, [len(parts) for parts in self._left]
        if (held_up := await _sleep(all_sent - loop.time())) > _HELD_UP * window:
            # Bytes that arrived meanwhile are still to be read.
            await asyncio.sleep(min(held_up, (all_averaged - loop.time()) / 2))
        for sender in self.reducer.unfinished():
            self.out_of_time = True
            self.reducer.leave_out(sender, "it was not done in time")
        await asyncio.sleep(all_averaged - loop.time())
        self.out_of_time = True
        for index in range(len(self._left)):
            self._give_up(index, "it was not done in time")

    def _give_up(self, index: int, cause: str) -> None:
        """Keep local values where a reducer has not averaged yet; stop waiting for it."""
        patience = self._patience.pop(index, None)
        if patience is not None:
            self._blame(self.group.peers[index], cause)
            patience.reschedule(asyncio.get_running_loop().time())

    def _blame(self, reducer: PeerID, cause: str) -> None:
        if reducer not in self._failed_reducers:
            log.warning("Averaging with %s failed: %s", reducer, cause)
            self._failed_reducers[reducer] = cause

    # --- as a sender ---------------------------------------------------------------------------

    async def _exchange(self, index: int) -> bool:
        """Send our parts to a reducer and take its differences. Return whether it failed."""
        peer, share, left = self.group.peers[index], self._shares[index], self._left[index]
        try:
            async with (
                asyncio.timeout(None) as self._patience[index],
                contextlib.AsyncExitStack() as opened,
            ):
                async with asyncio.timeout(2 * self._terms.chunk_timeout):
                    stream = await opened.enter_async_context(self._open_stream(peer))
                async with asyncio.TaskGroup() as tasks:
                    sending = tasks.create_task(self._send_parts(stream, share))
                    await self._receive_differences(stream, left)
                    # A sound reducer has read all our parts by now.
                    async with asyncio.timeout(self._terms.chunk_timeout):
                        await asyncio.wait([sending])
                # A hivemind reducer that sees us go before it has ended its side counts us as
                # failed. Nobody needs to wait for that.
                task = asyncio.create_task(self._close_after(stream, opened.pop_all()))
                self.closing.add(task)
                task.add_done_callback(self.closing.discard)
        except* (OSError, TimeoutError) as errors:
            self._blame(peer, _why(errors))
        finally:
            self._patience.pop(index, None)
        self.kept_local += sum(len(part) for part in left)
        return bool(left)

    async def _send_parts(self, stream: Stream, share: Sequence[Tensor]) -> None:
        terms = self._terms
        first = averaging_pb2.PART_FOR_AVERAGING
        for i, part in enumerate(share):
            await stream.send(
                *wire.encode(
                    part,
                    compression=terms.compression,
                    code=averaging_pb2.NO_CODE if i else first,
                    group_id=b"" if i else self.group.id,
                    weight=terms.weight,
                )
            )
        await stream.send(wire.END)

    async def _receive_differences(self, stream: Stream, left: list[Tensor]) -> None:
        difference = self._buffers.borrow()
        refused, few = 0, _FEW_OF_A_SHARE * sum(map(len, left))
        while left:
            part = left[-1]
            values = difference[: len(part)]
            async with asyncio.timeout(2 * self._terms.chunk_timeout):
                arriving = await self._next(stream)
                if arriving is None:
                    raise FrameError("it ended before all parts were averaged")
                if (code := arriving.code) != averaging_pb2.AVERAGED_PART:
                    known = averaging_pb2.MessageCode.values()
                    name = averaging_pb2.MessageCode.Name(code) if code in known else code
                    raise FrameError(f"it answered {name}")
                await wire.finish(stream, arriving, values, four=self._four)
            # Aside: the local values must come through an average that is refused.
            if not self._four:
                torch.add(part, values, out=values)
            if await self._in_bounds(part, values):
                part.copy_(values)
            else:
                refused += len(part)
                self.kept_local += len(part)
                if refused > few:
                    self._blame(stream.peer, "its averages are out of proportion")
            left.pop()
        self._buffers.give_back(difference)

    async def _in_bounds(self, part: Tensor, average: Tensor) -> bool:
        """Return whether ``average`` may take the place of ``part``, our own values.

        Usually it is at most :data:`BOUND` times as long as our own part. If it is longer, the
        values that senders have sent for our share show the usual norm (:meth:`Scale.longest`).
        Raises FrameError if it is not finite.
        """
        norm, own = _norm(average), _norm(part)
        if not math.isfinite(norm):
            raise FrameError("its averages hold NaN, Inf or values above 1e18")
        if norm <= BOUND * own:
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._terms.chunk_timeout / 2):
                await self.reducer.heard.wait()
        seen, usual = self.reducer.scale, self._terms.usual_rms
        past = BOUND * _norm_of(usual, len(part))
        if seen is not None:
            longest = seen.longest(own, len(part))
            return norm <= (longest if seen.own else max(longest, _SCALE_OF_LAYERS * past))
        # If we average nothing for others, only past averages are known, or nothing.
        return norm <= past or not (usual or self._shares[self._mine])

    async def _close_after(self, stream: Stream, opened: contextlib.AsyncExitStack) -> None:
        async with opened:
            await _until_closed(stream, self._terms.chunk_timeout)

    # --- as a reducer --------------------------------------------------------------------------

    async def serve(self, stream: Stream, first: wire.Arriving) -> None:
        """Average a peer's values with the others' and answer with the differences.

        ``first`` is the beginning of its first message. A peer that sends something else than the
        parts of our share, or takes too long, is left out.
        """
        sender = stream.peer
        if sender not in self._not_yet_come or first.code != averaging_pb2.PART_FOR_AVERAGING:
            await stream.send(wire.encode_code(averaging_pb2.PROTOCOL_VIOLATION))
            return
        self._not_yet_come.discard(sender)
        # A peer that averages nothing for others takes no difference before it has sent all.
        patient = not self.group.fractions[self.group.peers.index(sender)]
        sums: asyncio.Queue[_Pending | None] = asyncio.Queue(0 if patient else _AHEAD)
        try:
            async with asyncio.TaskGroup() as tasks:
                collecting = tasks.create_task(self._collect(stream, first, sums))
                tasks.create_task(self._answer(stream, sums, collecting if patient else None))
        except* (OSError, TimeoutError, ValueError) as errors:
            if sender not in self.reducer.causes:
                log.warning("Averaging what %s sends failed: %s", sender, _why(errors))

    async def _collect(
        self, stream: Stream, first: wire.Arriving, sums: asyncio.Queue[_Pending | None]
    ) -> None:
        """Add the parts that arrive to the sums, and queue each until its average is there."""
        share = self._shares[self._mine]
        try:
            for index, part in enumerate(share):
                buffer = self._buffers.borrow()
                values = buffer[: len(part)]
                async with asyncio.timeout(self._terms.chunk_timeout):
                    arriving = await self._next(stream) if index else first
                    if arriving is None:
                        raise FrameError(f"{index} parts instead of {len(share)}")
                    message = await wire.finish(stream, arriving, values, four=self._four)
                done = self.reducer.add(stream.peer, index, values, message.weight)
                compression = message.tensor_part.compression
                await sums.put(_Pending(buffer, values, done, compression))
            async with asyncio.timeout(self._terms.chunk_timeout):
                if await self._next(stream) is not None:
                    raise FrameError(f"more than {len(share)} parts")
        except asyncio.CancelledError:
            self.reducer.leave_out(stream.peer, "it did not take its averages")
            raise
        except Exception as error:  # no sum may wait for a peer, for any message of it
            self.reducer.leave_out(stream.peer, _why(error))
            raise
        await sums.put(None)

    async def _next(self, stream: Stream) -> wire.Arriving | None:
        return await wire.begin(stream, part_bytes=self.part_bytes)

    async def _answer(
        self,
        stream: Stream,
        sums: asyncio.Queue[_Pending | None],
        collecting: asyncio.Task[None] | None,
    ) -> None:
        if collecting is not None:
            await asyncio.wait([collecting])
        began, sent = time.monotonic(), 1
        while (pending := await sums.get()) is not None:
            await pending.done.wait()
            if (average := pending.done.encoded) is not None:
                chunks = wire.encode_average(average, len(pending.values))
            else:
                chunks = wire.encode(
                    pending.values,
                    compression=pending.compression,
                    code=averaging_pb2.AVERAGED_PART,
                )
            async with asyncio.timeout(self._terms.chunk_timeout):
                await stream.send(*chunks)
            sent += sum(map(len, chunks))
            self._buffers.give_back(pending.buffer)
        took = (time.monotonic() - began) * min(1.0, _ON_ITS_WAY / sent)
        await _until_closed(stream, min(max(took, _TAKEN_WITHIN[0]), _TAKEN_WITHIN[1]))
        stream.end_sending()
        await _until_closed(stream, self._terms.chunk_timeout)


async def _sleep(seconds: float) -> float:
    """Sleep; return for how many of the seconds something else held up this event loop."""
    loop = asyncio.get_running_loop()
    ends, held_up = loop.time() + seconds, 0.0
    while (now := loop.time()) < ends:
        due = min(ends, now + max(_HELD_UP * seconds, 0.1))
        await asyncio.sleep(due - now)
        held_up += loop.time() - due
    return held_up


class Averaged(asyncio.Event):
    """Set once a part is averaged. ``encoded``: the average in four bits, for everybody."""

    encoded: Tensor | None = None


@dataclass(frozen=True)
class _Pending:
    """A part that waits for its average. Then ``values``, or ``done.encoded``, goes back."""

    buffer: Tensor
    values: Tensor
    done: Averaged
    compression: int


async def _until_closed(stream: Stream, timeout: float) -> None:
    """Wait until the peer closes the stream. Errors are ignored: all data was sent."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout):
            await stream.receive_end()


def _why(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError) and not str(error):
        return "it was silent for too long"
    return str(error) or repr(error)


class _Sent(NamedTuple):
    values: Tensor
    weight: float
    norm: float


@dataclass
class _Sum:
    """The contributions to one part so far. They are summed once all are there."""

    own_norm: float
    done: Averaged = field(default_factory=Averaged)
    came_from: dict[PeerID, _Sent] = field(default_factory=dict)


class Scale(NamedTuple):
    """The root mean square of the values that were sent for our share, and of our own."""

    usual: float  # among all of them (:func:`usual_norm`)
    own: float

    def longest(self, own: float, values: int) -> float:
        """Return the longest norm of an average of ``values`` where our part's norm is ``own``.

        At most twice as long as our part. But a sound average is longer than that where our values
        are short, as they are at a peer that joined late. By how much, our share shows. Another
        layer may differ: norms grow at least with the square root of the inner steps, and at most
        with the steps. Where our values are zeros nothing is known of layers.
        """
        if not self.own:
            return BOUND * _SCALE_OF_LAYERS * _norm_of(self.usual, values)
        longer = max(1.0, self.usual / self.own)
        times = max(BOUND, _MOST_OF_USUAL * longer * min(longer, _SCALE_OF_LAYERS))
        return times * max(own, _norm_of(self.own, values))


def _norm_of(rms: float, values: int) -> float:
    return rms * math.sqrt(max(values, _FEW_VALUES))


class Buffers:
    """Memory for one part each, used again: fresh memory costs time at its first touch."""

    def __init__(self, values: int) -> None:
        self._values = values
        self._free: list[Tensor] = []

    def borrow(self) -> Tensor:
        return self._free.pop() if self._free else torch.empty(self._values)

    def give_back(self, buffer: Tensor) -> None:
        self._free.append(buffer)


def _norm(values: Tensor) -> float:
    """Return the Euclidean norm; NaN or Inf if any value is, or is above 1e18 or so.

    One float32 reduction, while the part is in the cache: cheaper than a look at each value.
    """
    return math.sqrt(torch.dot(values, values))  # vector_norm takes half as long again


def usual_norm(norms: Collection[float]) -> float:
    """Return the norm that is usual among ``norms`` of contributions.

    It is the median; of an even number, the greater of the two middle norms. So a single peer never
    decides it, not even the longest, and peers that joined late and have short norms decide it only
    if they are the majority. Of two contributions no majority shows which is usual: the longer
    counts, as at most ten times the shorter.
    """
    ordered = sorted(norms)
    usual = ordered[len(ordered) // 2]
    return min(usual, _BETWEEN_TWO * ordered[0]) if len(ordered) == 2 else usual


class Reducer:
    """Averages ``parts``, this peer's own values of its share, in place.

    A part is complete once every one of ``senders`` (the others) that has not failed has sent it.
    It is summed then, in the order of ``senders``, each contribution, our own too, shortened to at
    most :data:`LONGEST` times the usual norm (:func:`usual_norm`): so one peer of n moves the
    average by at most 1/n of a vector of that norm, and the averages of all reducers have one
    scale. Peers that took half as many inner steps, or one, are honest: their contributions
    are short, and stay as they are.

    ``complete`` is set once all parts are; the averages then stand in ``parts``. Parts that a
    sender has sent before it failed stay in the sums: all peers get the same averages. ``heard`` is
    set once each sender has sent a part or failed. ``four``: averages have four bits a value.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        *,
        weight: float,
        senders: Sequence[PeerID],
        buffers: Buffers,
        four: bool = False,
    ) -> None:
        self.complete = asyncio.Event()
        self.heard = asyncio.Event()
        self.causes: dict[PeerID, str] = {}  # why senders were left out
        self.averaged = 0  # parts
        self.kept_local = sum(map(len, parts))  # values that are averaged with nobody's yet
        self._parts = parts
        self._weight = weight
        self._senders = tuple(senders)
        self._active = set(senders) if parts else set()
        self._buffers = buffers
        self._four = four
        self._sums: dict[int, _Sum] = {}
        self._came = dict.fromkeys(senders, 0)  # parts of each sender
        self._squares: dict[PeerID, tuple[float, float, int]] = {}  # theirs, ours, their number
        self._check_heard()
        self._check_complete()

    @property
    def alone(self) -> bool:
        """True when no sender is left."""
        return not self._active

    @property
    def scale(self) -> Scale | None:
        """The scale of the others' values; None where nobody has sent any."""
        if not self._squares:
            return None
        sent = self._squares.values()
        _, ours, count = max(sent, key=lambda each: each[2])
        own = math.sqrt(ours / count)
        rms = self._usual(own, [math.sqrt(theirs / count) for theirs, _, count in sent])
        return Scale(rms, own)

    def add(self, sender: PeerID, index: int, values: Tensor, weight: float) -> Averaged:
        """Add ``sender``'s values of part ``index``. Each sender sends each part once, in order.

        Once the event is set, ``values`` holds the average minus its values before, unless
        averages have four bits. Raises ValueError for a weight or values that nobody may send, and
        when the sender has been left out already.
        """
        if sender not in self._active:
            raise ValueError("the peer was left out, since it came too late or failed")
        if not (weight == 1 or 0 < weight <= MOST_WEIGHT_OF_NOTHING):
            raise ValueError(f"a weight of {weight} instead of 1")
        norm = _norm(values)
        if not math.isfinite(norm):
            raise ValueError("it sent NaN, Inf or values above 1e18")
        sums = self._sums.get(index)
        if sums is None:
            sums = self._sums[index] = _Sum(_norm(self._parts[index]))
        sums.came_from[sender] = _Sent(values, weight, norm)
        self._came[sender] += 1
        if weight == 1:
            theirs, ours, count = self._squares.get(sender, (0.0, 0.0, 0))
            squares = theirs + norm**2, ours + sums.own_norm**2, count + len(values)
            self._squares[sender] = squares
        self._check_heard()
        self._finish_part(index)
        return sums.done

    def leave_out(self, sender: PeerID, cause: str = "it failed") -> None:
        """Leave a failed sender out: the parts that it has not sent are averaged without it."""
        if sender not in self._active:
            return
        log.warning("%s is left out: %s", sender, cause)
        self._active.discard(sender)
        self.causes[sender] = cause
        self._check_heard()
        # A copy: a part that is complete by this leaves the dictionary.
        for index in list(self._sums):
            self._finish_part(index)
        self._check_complete()

    def behind(self) -> list[PeerID]:
        """Return the senders that all wait for; none if none is behind the others."""
        came = {sender: self._came[sender] for sender in self._active}
        least, most = min(came.values(), default=0), max(came.values(), default=0)
        if least == most or (most - least < _BEHIND and most < len(self._parts)):
            return []
        return [sender for sender, count in came.items() if count == least]

    def unfinished(self) -> list[PeerID]:
        """Return the senders whose parts are missing."""
        return [sender for sender in self._active if self._came[sender] < len(self._parts)]

    def _check_heard(self) -> None:
        if all(self._came[sender] for sender in self._active):
            self.heard.set()

    def _finish_part(self, index: int) -> None:
        """Average a part, if all who may still send it have."""
        sums = self._sums[index]
        if not self._active <= sums.came_from.keys():
            return
        del self._sums[index]
        own, total = self._parts[index], self._weight
        # Contributions of (nearly) no weight do not show how long one may be.
        norms = [sent.norm for sent in sums.came_from.values() if sent.weight == 1]
        # 1.001: in float32, one of two equal norms may come out longer.
        longest = 1.001 * LONGEST * self._usual(sums.own_norm, norms)

        def share(weight: float, norm: float) -> float:
            return weight * longest / norm if norm > longest else weight

        if (ours := share(self._weight, sums.own_norm)) != 1:
            own.mul_(ours)
        # In place of our own values, and in one order: floating-point sums depend on it.
        for sender in self._senders:
            if sender in sums.came_from:
                values, weight, norm = sums.came_from[sender]
                own.add_(values, alpha=share(weight, norm))
                total += weight
        own.div_(total)
        if self._four:
            sums.done.encoded = four_bits.encode(own)
            # All others will have these values: ours must be the same to the bit.
            four_bits.decode(sums.done.encoded, own)
        else:
            for values, _, _ in sums.came_from.values():
                # The answer takes the memory that the part came in.
                torch.sub(own, values, out=values)
        sums.done.set()
        self.averaged += 1
        self.kept_local -= len(own)
        self._check_complete()

    def _usual(self, own: float, norms: Sequence[float]) -> float:
        if self._weight == 1:
            # A peer that sends zeros, after no step, must not shorten ours to nothing.
            norms = [own, *(norm for norm in norms if norm or not own)]
        return usual_norm(norms) if norms else math.inf

    def _check_complete(self) -> None:
        # Without senders, the parts that nobody has sent keep their values.
        if self.averaged == len(self._parts) or not self._active:
            self.complete.set()
