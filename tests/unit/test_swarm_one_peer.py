"""In a round of n peers one of them moves the others' average by at most its share.

Whole all-reduces over real streams, on a loop whose clock jumps to the next thing that is due: what
a peer waits for costs no time, and a busy machine makes nobody late.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.load_balancing import load_balance_peers
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from distributed_training.exchange.sn38 import wire
from distributed_training.exchange.sn38.all_reduce import AllReduce, Group, GroupFailed, Terms
from distributed_training.exchange.sn38.averager_process import _group_of, shares_of
from distributed_training.exchange.sn38.wire import Stream
from distributed_training.protocol import four_bits
from tests.tools.swarm_world import stream_pair

pytestmark = pytest.mark.timeout(120)

PART = 128  # values
PARTS = 6  # of each share
CHUNK, TIMEOUT = 45.0, 795.0  # seconds, as in the public network
NAN, INF = float("nan"), float("inf")


class _Jumping(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout != 0:
            assert timeout is not None, "all wait for each other"
            self.now += timeout
        return ready


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run it on a loop whose clock jumps."""

    def jumping() -> asyncio.AbstractEventLoop:
        selector = _Jumping()
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda: selector.now  # type: ignore[method-assign]
        return loop

    with asyncio.Runner(loop_factory=jumping) as runner:
        return runner.run(coroutine)


def peer(number: int) -> PeerID:
    return PeerID(bytes([number]) * 34)


@dataclass(frozen=True)
class Lie:
    """A peer's conduct in place of its part, as a sender and as a reducer."""

    change: Callable[[Tensor], Tensor] = lambda values: values  # of each part, or each average
    weight: float = 1.0
    sends: int = PARTS  # parts
    pause: float = 0.0  # seconds before each
    late_from: int = PARTS  # the first part before which it waits for nearly the chunk's timeout
    reads: bool = True
    answers: int = PARTS  # parts that it averages
    answer: Callable[[Tensor], Tensor] | None = None  # the difference, of its own values
    answer_pause: float = 0.0
    order: Sequence[int] = tuple(range(PARTS))
    size: int = PART
    code: int = averaging_pb2.PART_FOR_AVERAGING


class Liar(AllReduce):
    lie: Lie

    async def _send_parts(self, stream: Stream, share: Sequence[Tensor]) -> None:
        lie, parts = self.lie, [*share, *share]
        for i in range(lie.sends):
            await asyncio.sleep(lie.pause if i < lie.late_from else 198.0)
            part = lie.change(parts[lie.order[i] if i < PARTS else i].clone())[: lie.size]
            first: dict[str, Any] = {} if i else {"code": lie.code, "group_id": self.group.id}
            fields = first | {"weight": lie.weight, "compression": self._terms.compression}
            await stream.send(*wire.encode(part.contiguous(), **fields))
        if lie.sends < PARTS and lie.pause:
            await asyncio.Event().wait()  # it stalls, the stream open
        await stream.send(wire.END)

    async def _receive_differences(self, stream: Stream, left: list[Tensor]) -> None:
        if not self.lie.reads:
            await asyncio.Event().wait()
        await super()._receive_differences(stream, left)

    async def _answer(self, stream: Stream, sums: Any, collecting: Any) -> None:
        lie, own = self.lie, self._shares[self._mine]
        for i in range(lie.answers):
            await asyncio.sleep(lie.answer_pause)
            if lie.answer is None:
                pending = await sums.get()
                await pending.done.wait()
                values = own[i] if self._four else pending.values
            else:
                values = lie.answer(own[i].clone())
            compression = self._terms.compression
            await stream.send(
                *wire.encode(values, code=averaging_pb2.AVERAGED_PART, compression=compression)
            )
        if lie.answers < PARTS and lie.answer_pause:
            await asyncio.Event().wait()
        stream.end_sending()


@dataclass
class World:
    """One all-reduce of peers with these ``tensors``; the last one lies, if there is a lie."""

    tensors: list[Tensor]
    lie: Lie | None = None
    liar: type[Liar] = Liar
    all_do: Lie | None = None  # what the honest do: no lie
    chunk: float = CHUNK
    weights: dict[int, float] = field(default_factory=dict)
    usual_rms: float = 0.0
    four: bool = False  # bits a value
    seconds: dict[int, float] = field(default_factory=dict)
    reduces: dict[int, AllReduce] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.before = [tensor.clone() for tensor in self.tensors]
        self.ids = list(map(peer, range(len(self.tensors))))
        run(asyncio.wait_for(self._run(), 10 * TIMEOUT))

    @property
    def honest(self) -> list[int]:
        return list(range(len(self.tensors) - (self.lie is not None)))

    def _lie(self, i: int, local: float, longest: float) -> float:
        """Return how long an average of the liar may be."""
        if self.weights.get(i, 1.0) != 1:
            return 10.5 * self.slack * longest
        return 2.05 * (local if longest < 1.4 * local else self.slack * longest)

    @property
    def slack(self) -> float:
        """The times that a usual norm may be longer than the longest honest part."""
        contribute = sum(self.weights.get(i, 1.0) == 1 for i in self.honest)
        # Who weighs nothing says nothing of what is usual; of two nobody knows which one is.
        return 1.0 if contribute > 1 else 10.0

    async def _run(self) -> None:
        count = len(self.tensors)
        group = Group(b"group", tuple(self.ids), (PARTS * PART,) * count)
        serving: set[asyncio.Task[None]] = set()
        for i, tensor in enumerate(self.tensors):
            lie = self.all_do if i in self.honest else self.lie
            kind = Liar if i in self.honest else self.liar
            self.reduces[i] = (AllReduce if lie is None else kind)(
                group,
                self.ids[i],
                tensors=[tensor],
                terms=Terms(
                    weight=self.weights.get(i, 1.0),
                    part_values=PART,
                    compression=wire.FOUR_BITS if self.four else wire.NONE,
                    chunk_timeout=self.chunk,
                    timeout=TIMEOUT,
                    usual_rms=self.usual_rms,
                ),
                open_stream=self._opener(i, serving),
            )
            if isinstance(reduce := self.reduces[i], Liar) and lie is not None:
                reduce.lie = lie
        honest = [asyncio.create_task(self._average(i)) for i in self.honest]
        if self.lie is not None:
            serving.add(asyncio.create_task(self._average(len(self.tensors) - 1)))
        await asyncio.gather(*honest)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    async def _average(self, i: int) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(TIMEOUT):
                await self.reduces[i].run()
        except (GroupFailed, TimeoutError) as error:
            self.errors[i] = error
        self.seconds[i] = loop.time() - began

    def _opener(self, own: int, serving: set[asyncio.Task[None]]) -> Callable[[PeerID], Any]:
        @contextlib.asynccontextmanager
        async def open_stream(peer: PeerID) -> AsyncIterator[Stream]:
            other = self.reduces[self.ids.index(peer)]
            with stream_pair(self.ids[own], peer) as (ours, theirs):
                task = asyncio.create_task(serve(other, theirs))
                serving.add(task)
                try:
                    yield ours
                finally:
                    ours.end_sending()

        async def serve(other: AllReduce, stream: Stream) -> None:
            with contextlib.suppress(OSError):
                first = await other._next(stream)
                if first is not None:
                    await other.serve(stream, first)

        return open_stream

    def parts(self, tensor: Tensor) -> list[tuple[int, Tensor]]:
        """Return the parts of a tensor, each with the index of its reducer."""
        return [(i // PARTS, part) for i, part in enumerate(tensor.split(PART))]

    def assert_bounded(self) -> None:
        """Assert that nobody was hurt by the lie: the property that this file is about."""
        liar = self.ids[-1]
        for i in self.honest:
            assert i not in self.errors, self.errors
            assert set(self.reduces[i].causes) <= {liar}, self.reduces[i].causes
            assert self.seconds[i] <= 0.96 * TIMEOUT
            for number, (reducer, result) in enumerate(self.parts(self.tensors[i])):
                came = [self.parts(t)[number][1] for t in self.before]
                if reducer in self.honest:
                    self._assert_summed(result, came, reducer)
                    theirs = self.parts(self.tensors[reducer])[number][1]
                    assert not self.four or torch.equal(result, theirs), (i, number)
                else:
                    kept = bool(torch.equal(result, came[i]))
                    longest = max(float(came[j].norm()) for j in self.honest)
                    most = self._lie(i, float(came[i].norm()), longest)
                    assert kept or float(result.norm()) <= most, (i, number)

    def _assert_summed(self, result: Tensor, came: Sequence[Tensor], reducer: int) -> None:
        """Assert that all honest peers are in the average, and at most a bounded part of a liar."""
        weights = [self.weights.get(j, 1.0) for j in self.honest]
        if self.four:
            came = [each if j == reducer else passed(each) for j, each in enumerate(came)]
        honest = sum(w * came[j] for j, w in zip(self.honest, weights, strict=True))
        allowed = 2.05 * self.slack * max(float(came[j].norm()) for j in self.honest)
        without = float((result * sum(weights) - honest).norm())
        moved = float((result * (sum(weights) + 1) - honest).norm())
        # What the average loses by its own four bits.
        lost = 0.25 * float(result.norm()) * (sum(weights) + 1) if self.four else 0.0
        assert without <= 1e-4 * allowed + lost or moved <= allowed + lost, (without, moved)


def passed(values: Tensor) -> Tensor:
    """Return values as they arrive when they are sent with four bits."""
    arrived = torch.empty_like(values)
    four_bits.decode(four_bits.encode(values), arrived)
    return arrived


def contributions(count: int, steps: Sequence[float], seed: int = 0) -> list[Tensor]:
    """Return pseudo-gradients that agree in part, of peers that took ``steps`` inner steps."""
    generator = torch.Generator().manual_seed(seed)
    size = count * PARTS * PART
    common = torch.randn(size, generator=generator)
    return [
        1e-3 * steps[i] * (common + 0.7 * torch.randn(size, generator=generator))
        for i in range(count)
    ]


def put(value: float, at: int) -> Callable[[Tensor], Tensor]:
    return lambda values: values.index_fill(0, torch.tensor(at), value)


places = st.integers(0, PART - 1)
factors = st.sampled_from([-1e30, -1e12, -50.0, -3.0, -1.0, 0.0, 0.01, 2.5, 100.0, 1e17, 1e25])
changes = st.one_of(
    factors.map(lambda factor: lambda values: values * factor),
    st.builds(put, st.sampled_from([NAN, INF, -INF, 3e38, 1e17]), places),
)
lies = st.one_of(
    st.builds(Lie, change=changes, weight=st.sampled_from([1.0, 1e-6])),
    st.builds(Lie, weight=st.sampled_from([0.0, -1.0, 0.5, 2.0, 1e6, 1e300, NAN, INF])),
    st.builds(Lie, sends=st.integers(0, 2 * PARTS - 1), change=changes),
    st.builds(Lie, sends=st.integers(0, PARTS), pause=st.sampled_from([1.0, 44.0, 60.0, 150.0])),
    st.builds(Lie, pause=st.sampled_from([30.0, 44.0]), answer_pause=st.sampled_from([0.0, 89.0])),
    st.builds(Lie, order=st.permutations(range(PARTS))),
    st.builds(Lie, size=st.integers(1, PART - 1)),
    st.builds(Lie, code=st.integers(-5, 20)),
    st.builds(Lie, reads=st.just(False)),
    st.builds(Lie, answer=changes, answers=st.integers(0, PARTS)),
    st.builds(Lie, answers=st.integers(0, PARTS), answer_pause=st.sampled_from([80.0, 100.0])),
)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    count=st.integers(3, 6),
    lie=lies,
    late=st.sampled_from([1.0, 1.0, 0.5, 0.01]),
    nothing=st.booleans(),
    four=st.booleans(),
    seed=st.integers(0, 9),
)
def test_one_peer_moves_the_others_by_at_most_its_share(
    count: int, lie: Lie, late: float, nothing: bool, four: bool, seed: int
) -> None:
    """``late``: the inner steps of one honest peer; ``nothing``: another contributes nothing.

    ``four``: bits a value; then what honest peers averaged is equal to the bit.
    """
    if count - nothing < 4:
        late = max(late, 0.5)  # without the liar there is no majority
    tensors = contributions(count, [late, *[1.0] * (count - 1)], seed)
    weights = {}
    if nothing:
        tensors[1].zero_()
        weights[1] = 1e-6
    World(tensors, lie, weights=weights, four=four).assert_bounded()


@pytest.mark.parametrize("steps", [[1, 1], [0.01, 1, 1, 1], [1, 0.6, 1, 0], [0, 0, 0]])
def test_with_four_bits_all_have_the_same_average_to_the_bit(steps: list[float]) -> None:
    """Peers that joined late or contribute nothing have it too; zeros stay zeros."""
    tensors = contributions(len(steps), steps)
    for tensor in tensors:
        tensor[7 * PART : 8 * PART] = 0
    weights = {3: 1e-6} if len(steps) == 4 and not steps[3] else {}
    world = World(tensors, weights=weights, four=True)
    mean = torch.stack([t for i, t in enumerate(world.before) if i not in weights]).mean(0)
    for i, tensor in enumerate(world.tensors):
        assert not world.reduces[i].causes and not world.reduces[i].kept_local
        assert torch.equal(tensor, world.tensors[0])
        assert float((tensor - mean).norm()) <= 0.2 * float(mean.norm())
        assert not tensor[7 * PART : 8 * PART].any()


def test_peer_without_four_bits_is_left_out() -> None:
    class Plain(Liar):
        async def _send_parts(self, stream: Stream, share: Sequence[Tensor]) -> None:
            self._terms = replace(self._terms, compression=wire.NONE)
            await super()._send_parts(stream, share)

    world = World(contributions(3, [1.0] * 3), Lie(), liar=Plain, four=True)
    world.assert_bounded()
    for i in world.honest:
        assert "bytes instead of" in world.reduces[i].causes[world.ids[-1]]


@pytest.mark.parametrize("pause", [130.0, 150.0, 190.0])
def test_peer_too_slow_for_the_deadline_is_left_out_early(pause: float) -> None:
    """Each of its parts comes in time, all of them do not; the others end by half of it."""
    slow = Lie(pause=pause, answer_pause=pause)
    world = World(contributions(4, [1.0] * 4), slow, chunk=200.0)
    world.assert_bounded()
    for i in world.honest:
        assert world.seconds[i] <= 0.51 * TIMEOUT
        assert world.reduces[i].causes[world.ids[-1]] == "it is too slow to be done in time"


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_peer_slow_for_one_reducer_does_not_set_it_against_the_others(passes: int) -> None:
    """It was in time before, and is for all others: a reducer that waits for it is not slow."""

    class Slowing(Liar):
        async def _send_parts(self, stream: Stream, share: Sequence[Tensor]) -> None:
            self.lie = Lie(pause=100.0, late_from=passes) if stream.peer == peer(0) else Lie()
            await super()._send_parts(stream, share)

    world = World(contributions(4, [1.0] * 4), Lie(), liar=Slowing, chunk=199.0)
    world.assert_bounded()
    assert all(world.reduces[i].kept_local == 0 for i in world.honest)


@pytest.mark.parametrize("when", [150.0, 350.0, 600.0])
def test_a_loop_that_stood_still_names_nobody(when: float) -> None:
    """While ours did nothing, nobody's parts were read: that is no pace of theirs."""

    class Late(Liar):
        async def _send_parts(self, stream: Stream, share: Sequence[Tensor]) -> None:
            selector: Any = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]

            def stand_still() -> None:
                selector.now += 80

            if stream.peer == peer(0):
                asyncio.get_running_loop().call_later(when, stand_still)
            await super()._send_parts(stream, share)

    world = World(contributions(4, [1.0] * 4), Lie(pause=92.0), liar=Late, chunk=200.0)
    assert not any(world.reduces[i].causes for i in world.honest)


def test_peers_of_one_pace_leave_nobody_out_however_slow_they_are() -> None:
    world = World(contributions(4, [1.0] * 4), all_do=Lie(pause=100.0), chunk=200.0)
    for i in world.honest:
        assert not world.reduces[i].causes and not world.reduces[i].kept_local


@pytest.mark.parametrize(
    "steps",
    [[0.01, 1, 1, 1], [1, 0.6, 1], [1, 0.6, 0.01], [1, 1, 0.01, 0.01], [0.6, 0.6, 1]],
)
def test_peers_that_took_fewer_steps_shorten_nobody(steps: list[float]) -> None:
    """A peer that joined late is such a peer, and takes the average too."""
    world = World(contributions(len(steps), steps))
    mean = torch.stack(world.before).mean(0)
    for i, tensor in enumerate(world.tensors):
        assert not world.reduces[i].causes
        assert torch.allclose(tensor, mean, atol=1e-6)


def of_layers(steps: Sequence[int], seed: int) -> list[Tensor]:
    """Return pseudo-gradients whose parts grow as layers do, by the inner steps or their root."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tensors = [torch.empty(0)] * len(steps)
    for _ in range(len(steps) * PARTS):
        growth, scale = draw.uniform(0.5, 1.0), 10 ** draw.uniform(-4, -2)
        common = torch.randn(PART, generator=generator)
        for i, count in enumerate(steps):
            own = common + 0.7 * torch.randn(PART, generator=generator)
            tensors[i] = torch.cat([tensors[i], scale * count**growth * own])
    return tensors


@settings(max_examples=15, deadline=None)
@given(
    steps=st.sampled_from([2, 3, 8]).flatmap(
        lambda n: st.lists(st.integers(1, 64) | st.sampled_from([1, 64]), min_size=n, max_size=n)
    ),
    validator=st.booleans(),
    seed=st.integers(0, 9),
)
@example(steps=[10, 20, 64], validator=False, seed=0)
@example(steps=[1, 1, 1, 1, 1, 64, 64, 64], validator=False, seed=0)
def test_honest_peers_of_any_progress_are_not_named(
    steps: list[int], validator: bool, seed: int
) -> None:
    """``validator``: one more, that contributes nothing."""
    tensors = of_layers([*steps, 0] if validator else steps, seed)
    past = float(torch.stack(tensors).mean(0).square().mean().sqrt())
    weights = {len(steps): 1e-6} if validator else {}
    world = World(tensors, weights=weights, usual_rms=past)
    for each in world.reduces.values():
        assert not each.causes
        assert each.kept_local < 0.05 * len(tensors[0])


def test_peer_without_steps_leaves_the_other_its_own() -> None:
    world = World(contributions(2, [0.0, 1.0]))
    own = world.parts(world.before[1])
    for (reducer, result), (_, part) in zip(world.parts(world.tensors[1]), own, strict=True):
        assert reducer == 0 or torch.allclose(result, part / 2)


def told(bandwidth: object, mode: int = 0) -> bytes:
    return MSGPackSerializer.dumps([bandwidth, mode, b""])


@pytest.mark.parametrize(
    "nonsense",
    [told(NAN), told(INF), told(-1.0), told("fast"), told([1]), told(None, 7), b"", b"\xc1"]
    + [MSGPackSerializer.dumps(each) for each in (None, [], [1.0], {"a": 1}, 7)],
)
def test_peer_with_nonsense_claims_averages_nothing_and_the_others_do(nonsense: bytes) -> None:
    gathered = (told(100.0), nonsense, told(None), told(90))
    group = asyncio.run(_group_of(GroupInfo(b"id", tuple(map(peer, range(4))), gathered), 3000))
    assert group.fractions[1] == 0 and not group.auxiliaries
    assert sum(group.fractions) == 3000 and max(group.fractions) <= 1500


@given(
    st.lists(
        st.none() | st.floats(1e-3, 1e9) | st.sampled_from([1.0, 100.0, 200.0, 1e300, 1e-300]),
        min_size=2,
        max_size=16,
    )
)
@settings(max_examples=50, deadline=None)
@pytest.mark.filterwarnings("ignore::Warning")  # scipy's, of what a linear program is given
def test_nobody_gets_more_than_two_of_n_shares(stated: list[float | None]) -> None:
    values = 1_000_000
    shares = shares_of(values, stated)
    assert sum(shares) == values
    assert max(shares) <= 2 * values / len(stated) + 1


@pytest.mark.parametrize("stated", [[None] * 3, [7.0] * 5, [100.0, None, 90.0, 110.0]])
def test_shares_are_hiveminds_where_nobody_states_much(stated: list[float | None]) -> None:
    assert shares_of(1000, stated) == load_balance_peers(1000, stated, 0)
