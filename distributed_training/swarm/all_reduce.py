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

A failing peer costs its own values only. A *sender* that fails is left out of the parts it has not
sent; of the share of a *reducer* that fails the remaining parts keep the local values.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import torch
from hivemind.averaging.partition import TensorPartContainer
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from torch import Tensor

from . import wire
from .wire import FrameError, Stream

log = logging.getLogger(__name__)

FLOAT_BYTES = 4
#: Parts of one sender that may wait for their average, or for the sender to take its differences.
_AHEAD = 4
#: p2pd ends a stream by closing both of its directions, and now and then resets it instead: what
#: the other p2pd still holds is lost then. So a sender that does not close first gets the time to
#: take this many bytes at the pace so far: least and most seconds.
_ON_ITS_WAY = 8 << 20
_TAKEN_WITHIN = 0.1, 2.0

OpenStream = Callable[[PeerID], AbstractAsyncContextManager[Stream]]


class GroupFailed(RuntimeError):
    """There is nobody left to average with, or never was."""


@dataclass(frozen=True)
class Group:
    """The peers that average with each other: the same at each of them, in the same order."""

    id: bytes
    peers: tuple[PeerID, ...]
    fractions: tuple[int, ...]  # values that a peer averages for all; 0: only sends and takes
    auxiliaries: frozenset[PeerID] = frozenset()  # average for others and send nothing


@dataclass(frozen=True)
class Terms:
    """The terms on which this peer takes part.

    ``chunk_timeout``, in seconds, covers one part from a sender, and one difference on its way to
    it. A reducer's difference may take twice as long, since the reducer waits for all senders.
    """

    weight: float
    part_values: int  # all peers of a group must cut the tensors into parts of as many values
    compression: int
    chunk_timeout: float


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
        senders = frozenset(group.peers) - {own} - group.auxiliaries
        self._buffers = Buffers(terms.part_values)
        self.reducer = Reducer(
            self._shares[mine], weight=terms.weight, senders=senders, buffers=self._buffers
        )
        self.closing: set[asyncio.Task[None]] = set()  # streams whose reducer has yet to end
        self.kept_local = 0  # values for which no average came back
        self.group = group
        self._mine = mine
        self._terms = terms
        self._open_stream = open_stream
        self._not_yet_come = set(senders)

    async def run(self) -> None:
        """Average every value, or give it up.

        Raises GroupFailed if all other peers failed.

        The differences of our share may still be on their way to peers: :meth:`serve` sends them.
        """
        reducers = [i for i, share in enumerate(self._shares) if share and i != self._mine]
        loop = asyncio.get_running_loop()
        missing = loop.call_later(self._terms.chunk_timeout, self._leave_out_who_did_not_come)
        try:
            gone = await asyncio.gather(*map(self._exchange, reducers))
            await self.reducer.complete.wait()
        finally:
            missing.cancel()
        if all(gone) and self.reducer.alone:
            raise GroupFailed("all other peers of the group failed")

    def _leave_out_who_did_not_come(self) -> None:
        for sender in self._not_yet_come:
            log.warning("%s sent nothing: it is left out", sender)
            self.reducer.leave_out(sender)

    # --- as a sender ---------------------------------------------------------------------------

    async def _exchange(self, index: int) -> bool:
        """Send our parts to a reducer and take its differences. Return whether it failed."""
        peer, share = self.group.peers[index], self._shares[index]
        left = list(reversed(share))  # without a difference yet, the next one last
        try:
            async with contextlib.AsyncExitStack() as opened:
                stream = await opened.enter_async_context(self._open_stream(peer))
                async with asyncio.TaskGroup() as tasks:
                    sending = tasks.create_task(self._send_parts(stream, share))
                    await self._take_differences(stream, left)
                    # A sound reducer has read all our parts by now.
                    async with asyncio.timeout(self._terms.chunk_timeout):
                        await asyncio.wait([sending])
                # A hivemind reducer that sees us go before it has ended its side counts us as
                # failed. Nobody needs to wait for that.
                task = asyncio.create_task(self._close_after(stream, opened.pop_all()))
                self.closing.add(task)
                task.add_done_callback(self.closing.discard)
        except* (OSError, TimeoutError) as errors:
            log.warning("Averaging with %s failed: %s", peer, _why(errors))
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

    async def _take_differences(self, stream: Stream, left: list[Tensor]) -> None:
        difference = self._buffers.take()
        while left:
            part = left[-1]
            values = difference[: len(part)]
            async with asyncio.timeout(2 * self._terms.chunk_timeout):
                arriving = await self._next(stream)
                if arriving is None or arriving.code != averaging_pb2.AVERAGED_PART:
                    raise FrameError(_refusal(arriving))
                await wire.finish(stream, arriving, values)
            part.add_(values)
            left.pop()
        self._buffers.give_back(difference)

    async def _close_after(self, stream: Stream, opened: contextlib.AsyncExitStack) -> None:
        async with opened:
            await _until_closed(stream, self._terms.chunk_timeout)

    # --- as a reducer --------------------------------------------------------------------------

    async def serve(self, stream: Stream, first: wire.Arriving) -> None:
        """Average what a peer sends with the others' and answer with the differences.

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
            log.warning("Averaging what %s sends failed: %s", sender, _why(errors))

    async def _collect(
        self, stream: Stream, first: wire.Arriving, sums: asyncio.Queue[_Pending | None]
    ) -> None:
        with contextlib.ExitStack() as undo:
            # Unless all its parts come: no sum may wait for one that failed.
            undo.callback(self.reducer.leave_out, stream.peer)
            async for pending in self._parts_from(stream, first):
                await sums.put(pending)
            undo.pop_all()
        await sums.put(None)

    async def _parts_from(self, stream: Stream, first: wire.Arriving) -> AsyncIterator[_Pending]:
        """Yield the parts that arrive, already added to the sums."""
        share = self._shares[self._mine]
        for index, part in enumerate(share):
            buffer = self._buffers.take()
            values = buffer[: len(part)]
            async with asyncio.timeout(self._terms.chunk_timeout):
                arriving = await self._next(stream) if index else first
                if arriving is None:
                    raise FrameError(f"{index} parts instead of {len(share)}")
                message = await wire.finish(stream, arriving, values)
            done = self.reducer.add(stream.peer, index, values, message.weight)
            yield _Pending(buffer, values, done, message.tensor_part.compression)
        async with asyncio.timeout(self._terms.chunk_timeout):
            if await self._next(stream) is not None:
                raise FrameError(f"more than {len(share)} parts")

    async def _next(self, stream: Stream) -> wire.Arriving | None:
        return await wire.begin(stream, part_bytes=FLOAT_BYTES * self._terms.part_values)

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
            async with asyncio.timeout(self._terms.chunk_timeout):
                await stream.send(
                    *wire.encode(
                        pending.values,
                        compression=pending.compression,
                        code=averaging_pb2.AVERAGED_PART,
                    )
                )
            sent += FLOAT_BYTES * len(pending.values)
            self._buffers.give_back(pending.buffer)
        took = (time.monotonic() - began) * min(1.0, _ON_ITS_WAY / sent)
        await _until_closed(stream, min(max(took, _TAKEN_WITHIN[0]), _TAKEN_WITHIN[1]))
        stream.end_sending()
        await _until_closed(stream, self._terms.chunk_timeout)


@dataclass(frozen=True)
class _Pending:
    """A part that waits for its average: then ``values`` is what goes back to the sender."""

    buffer: Tensor
    values: Tensor
    done: asyncio.Event
    compression: int


async def _until_closed(stream: Stream, timeout: float) -> None:
    """Wait until the peer closes the stream. Errors are ignored: all data was sent."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout):
            await stream.receive_end()


def _refusal(arriving: wire.Arriving | None) -> str:
    if arriving is None:
        return "it ended before all parts were averaged"
    known = averaging_pb2.MessageCode.values()
    code = arriving.code
    return f"it answered {averaging_pb2.MessageCode.Name(code) if code in known else code}"


def _why(errors: BaseExceptionGroup[BaseException]) -> str:
    first = errors.exceptions[0]
    if isinstance(first, TimeoutError) and not str(first):
        return "it was silent for too long"
    return str(first) or repr(first)


@dataclass
class _Sum:
    """The weighted sum of one part so far."""

    buffer: Tensor
    total: Tensor
    weight: float
    done: asyncio.Event = field(default_factory=asyncio.Event)
    came_from: dict[PeerID, Tensor] = field(default_factory=dict)


class Buffers:
    """Memory for one part each, used again: the first touch of fresh memory is what costs."""

    def __init__(self, values: int) -> None:
        self._values = values
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        return self._free.pop() if self._free else torch.empty(self._values)

    def give_back(self, buffer: Tensor) -> None:
        self._free.append(buffer)


class Reducer:
    """Averages ``parts``, this peer's own values of its share, in place.

    A part is complete once every one of ``senders`` (the others) that has not failed has sent it.
    ``complete`` is set once all parts are; the averages then stand in ``parts``. What a sender has
    sent before it failed stays in the sums: all peers get the same averages.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        *,
        weight: float,
        senders: Collection[PeerID],
        buffers: Buffers,
    ) -> None:
        self.complete = asyncio.Event()
        self.failed: set[PeerID] = set()
        self._parts = parts
        self._weight = weight
        self._active = set(senders) if parts else set()
        self._buffers = buffers
        self._sums: dict[int, _Sum] = {}
        self._left = len(parts)
        self._look_whether_complete()

    @property
    def alone(self) -> bool:
        """True when no sender is left."""
        return not self._active

    def add(self, sender: PeerID, index: int, values: Tensor, weight: float) -> asyncio.Event:
        """Add what ``sender`` sent of part ``index``. Each sender adds each part once, in order.

        Once the event is set, ``values`` holds the average minus what it held before. Raises
        ValueError for a weight that is none, and when the sender has been left out already.
        """
        if sender not in self._active:
            raise ValueError("the peer was left out, since it came too late or failed")
        # A weight of NaN would make the part's average NaN for all peers.
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"a weight of {weight}")
        sums = self._sums.get(index)
        if sums is None:
            own, buffer = self._parts[index], self._buffers.take()
            total = torch.mul(own, self._weight, out=buffer[: len(own)])
            sums = self._sums[index] = _Sum(buffer, total, self._weight)
        sums.total.add_(values, alpha=weight)
        sums.weight += weight
        sums.came_from[sender] = values
        self._look_whether_done(index)
        return sums.done

    def leave_out(self, sender: PeerID) -> None:
        """Leave a failed sender out: the parts that it has not sent are averaged without it."""
        if sender not in self._active:
            return
        self._active.discard(sender)
        self.failed.add(sender)
        # A copy: a part that is complete by this leaves the dictionary.
        for index in list(self._sums):
            self._look_whether_done(index)
        self._look_whether_complete()

    def _look_whether_done(self, index: int) -> None:
        sums = self._sums[index]
        if not self._active <= sums.came_from.keys():
            return
        del self._sums[index]
        # In place of our own values: they were added to the sum at its start.
        average = torch.div(sums.total, sums.weight, out=self._parts[index])
        for values in sums.came_from.values():
            # The answer takes the memory that the part came in.
            torch.sub(average, values, out=values)
        self._buffers.give_back(sums.buffer)
        sums.done.set()
        self._left -= 1
        self._look_whether_complete()

    def _look_whether_complete(self) -> None:
        # Without senders, the parts that nobody has sent keep their values.
        if not self._left or not self._active:
            self.complete.set()
