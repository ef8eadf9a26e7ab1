"""A round of thousands of peers, simulated with SimPy: matchmaking, shares, transfer, deadline.

The rules are hivemind's and this miner's as ``docs/swarm.md`` tells them; what a message, a lookup
and a byte cost comes from real rounds and from hivemind's own code (:class:`Costs`). Parts are not
simulated one by one: a group moves its values in slices, each as fast as its slowest line, since a
reducer answers nobody before all senders have sent. Times are seconds, rates Mbit/s.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from bench.scale_costs import REPLICAS, WORKERS

Process = Generator[simpy.Event, Any, Any]

_MEGABIT = 1e6 / 8  # bytes
_SLICES = 8  # of a transfer: what a death in the middle of it costs is as fine as this
_LOST = 3.0  # after which a call of the DHT is given up
_BETWEEN_LOOKUPS = 0.1  # at first; the product backs off to 1 s, so its lookups weigh less
_ANSWER = 1e-3  # seconds of a node's interpreter for one answer without a value


@dataclass(frozen=True)
class Costs:
    """What things cost: ``bench.scale`` measures them, ``bench/scale_measured.json`` keeps them."""

    framing: float  # bytes on the wire for each byte of values
    pace: float = 1.0  # share of a line's rate that a transfer reaches
    apart: float = 0.0  # what the transfer takes besides moving bytes
    settle: float = 0.0  # how much longer matchmaking takes than it gathers
    call: float = 0.0  # seconds of a lookup in the DHT, beyond the network's latency
    tries: float = 0.0  # lookups of a peer before a leader takes it
    lookup_calls: float = 0.0  # peers that one lookup asks
    entry_bytes: float = 54.0  # in the answer to a lookup, for each peer that seeks a group
    entry_seconds: float = 5e-7  # to write it, and as much to read it
    join: float = 2e-3  # of a group's leader, to take one follower
    member_bytes: float = 70.0  # of each member in the leader's last word to each follower
    shares_factor: float = 0.0  # the linear program of the shares: factor * n ** exponent
    shares_exponent: float = 1.0
    message_bytes: float = 1000.0  # of a call of the DHT and its answer, without a value


@dataclass(frozen=True)
class Rules:
    """Of the round: a validator's call, and the averager's timeouts."""

    values: int = 4_000_000_000
    matchmaking: float = 30.0
    request_timeout: float = 10.0
    chunk_timeout: float = 45.0
    transfer_deadline: float = 795.0
    round_deadline: float = 840.0
    min_group: int = 2
    balance: bool = True  # shares by the bandwidths that peers tell; or else equal ones
    passes: float = 2.0  # of the values over the lines: parts one way, differences back
    latency: float = 0.05  # from one peer to another, one way
    host_rate: float = 2000.0  # what a peer's processes move at best


@dataclass
class Peer:
    rate: float  # of its line, in either direction
    late: float = 0.0  # after the call until it takes part
    dies: float | None = None  # after this share of its transfer, without a word
    # What became of it:
    messages: float = 0.0
    sent: float = 0.0  # bytes on the wire
    received: float = 0.0
    matched: float | None = None  # when its group was found
    ended: float | None = None  # when it had its average
    balanced: float = 1.0  # its share of the sums, where 1 is an equal one


@dataclass
class Group:
    members: list[Peer]
    absent: list[Peer] = field(default_factory=list)  # never heard that the group began


class Round:
    """Peers that seek a group under one key of the DHT, and average. It begins at once.

    ``known``: they know each other already, and only wait for one another.
    """

    def __init__(
        self,
        env: simpy.Environment,
        peers: Sequence[Peer],
        costs: Costs,
        rules: Rules,
        *,
        known: bool = False,
    ) -> None:
        self.env, self.costs, self.rules = env, costs, rules
        self.peers = peers
        self.groups: list[Group] = []
        self._start = env.now
        self._declared: list[tuple[float, int]] = []  # until when it gathers, peer; sorted
        self._search = [_Search(env) for _ in peers]
        # The nodes that hold the key answer all lookups, one after the other. They are alike, so
        # one of them stands for all.
        self._hot = simpy.Resource(env, capacity=1)
        self._moved: dict[int, simpy.Event] = {}
        if known:
            env.process(self._meet())
            return
        for i in range(len(peers)):
            env.process(self._take_part(i))

    # --- matchmaking ---------------------------------------------------------------------------

    def _take_part(self, i: int) -> Process:
        peer, search = self.peers[i], self._search[i]
        yield self.env.timeout(peer.late)
        deadline = self._start + self.rules.round_deadline
        while self.env.now < deadline and search.group is None:
            search.until = min(self.env.now + self.rules.matchmaking, deadline)
            self.env.process(self._declare(i, search.until))
            yield from self._seek(i)
            if search.group is None and not search.follows:
                self._lead(i)
            if search.group is None:
                yield self.env.timeout(_BETWEEN_LOOKUPS)
        if search.group is not None:
            yield from self._transfer(peer, search.group)

    def _lookup(self, i: int) -> Process:
        """Whether it was answered in time. Asks ``lookup_calls`` peers, some at a time."""
        calls = self.costs.lookup_calls
        self.peers[i].messages += calls
        turns = math.ceil(calls / WORKERS)
        began = self.env.now
        with self._hot.request() as turn:
            answered = yield turn | self.env.timeout(_LOST)
            if turn not in answered:
                return False
            entries = len(self._declared) * self.costs.entry_seconds
            rate = min(self.rules.host_rate, self.peers[i].rate) * _MEGABIT
            wire = len(self._declared) * self.costs.entry_bytes / rate
            yield self.env.timeout(_ANSWER + max(entries, wire))
        waited = self.env.now - began
        yield self.env.timeout(self.costs.call + turns * 2 * self.rules.latency)
        return waited < _LOST

    def _declare(self, i: int, until: float) -> Process:
        stored = yield from self._lookup(i)
        # Once to say that it seeks, and once, with a lookup, that it does not any more.
        stores = min(REPLICAS, self.costs.lookup_calls)
        self.peers[i].messages += 2 * stores + self.costs.lookup_calls
        if stored:
            bisect.insort(self._declared, (until, i))

    def _seek(self, i: int) -> Process:
        """Look for peers that gather until earlier than we do, and follow the first that takes us;
        until our own time is over."""
        search = self._search[i]
        tried: set[int] = set()
        if self.peers[i].late > min(peer.late for peer in self.peers):  # or else it leads
            self.peers[i].messages += self.costs.tries * self.costs.lookup_calls
        while self.env.now < search.until and search.group is None:
            began = self.env.now
            if (yield from self._lookup(i)):
                while (leader := self._earliest_but(tried, before=(search.until, i))) is not None:
                    tried.add(leader)
                    yield from self._follow(i, leader)
                    if search.group is not None or self.env.now >= search.until:
                        return
            rest = _BETWEEN_LOOKUPS - (self.env.now - began)
            yield self.env.timeout(max(rest, 1e-3))

    def _earliest_but(self, tried: set[int], before: tuple[float, int]) -> int | None:
        """Of the peers that seek a group, who gathers until the earliest time."""
        while self._declared and self._declared[0][0] < self.env.now:
            self._declared.pop(0)
        for entry in self._declared:
            if entry >= before:
                return None
            if entry[1] not in tried:
                return entry[1]
        return None

    def _follow(self, i: int, j: int) -> Process:
        """Ask ``j`` to lead us; if it does, wait for its group to begin or to be disbanded."""
        search, leader = self._search[i], self._search[j]
        with leader.door.request() as turn:
            asked = yield turn | self.env.timeout(self.rules.request_timeout)
            if turn not in asked:
                return
            yield self.env.timeout(
                self.costs.join + 2 * self.rules.latency / max(1, len(self.peers))
            )
        if leader.group is not None or leader.follows or leader.until > search.until:
            return
        leader.followers.append(i)
        search.follows = True
        for mine in self._search[i].followers:  # they are told to follow our leader
            self._search[mine].news.succeed(j)
            self._search[mine].news = self.env.event()
        search.followers.clear()
        patience = max(0.0, search.until - self.env.now) + self.rules.request_timeout
        news = search.news
        yield news | self.env.timeout(patience)
        search.follows = False
        if news.triggered and isinstance(news.value, Group):
            search.group = news.value
        elif i in leader.followers:
            leader.followers.remove(i)
        elif news.triggered and isinstance(news.value, int) and news.value != i:
            yield from self._follow(i, news.value)

    def _lead(self, i: int) -> None:
        """Our time is over: begin with those who follow us, if they are enough."""
        search = self._search[i]
        followers, search.followers = search.followers, []
        enough = len(followers) + 1 >= self.rules.min_group and followers
        group = Group([self.peers[j] for j in (i, *followers)])
        word = self.costs.member_bytes * len(group.members)
        rate = min(self.peers[i].rate, self.rules.host_rate) * _MEGABIT
        for number, j in enumerate(followers):
            after = (number + 1) * word / rate + self.rules.latency
            if enough and after > self.rules.request_timeout:
                group.absent.append(self.peers[j])
                continue
            self.env.process(self._tell(j, group if enough else None, after if enough else 0.0))
        if enough:
            self.peers[i].sent += word * len(followers)
            search.group = group
            self.groups.append(group)

    def _tell(self, j: int, group: Group | None, after: float) -> Process:
        news = self._search[j].news
        yield self.env.timeout(after)
        if not news.triggered:
            if group is not None:
                self.peers[j].received += self.costs.member_bytes * len(group.members)
            news.succeed(group)

    def _meet(self) -> Process:
        """Nobody waits for a peer longer than for a reducer's difference."""
        first = min(peer.late for peer in self.peers)
        patience = first + 2 * self.rules.chunk_timeout
        group = Group([peer for peer in self.peers if peer.late <= patience])
        all_here = len(group.members) == len(self.peers)
        yield self.env.timeout(max(p.late for p in group.members) if all_here else patience)
        self.groups.append(group)
        for peer in group.members:
            self.env.process(self._transfer(peer, group))

    # --- transfer ------------------------------------------------------------------------------

    def _transfer(self, peer: Peer, group: Group) -> Process:
        peer.matched = self.env.now + self.costs.settle
        if group.members[0] is peer:
            self._moved[id(group)] = self.env.event()
            self.env.process(self._move(group))
        moved = self._moved.get(id(group)) or self._moved.setdefault(id(group), self.env.event())
        yield moved
        if moved.value and peer.dies is None and peer not in group.absent:
            peer.ended = self.env.now

    def _move(self, group: Group) -> Process:
        """All slices of all members, until the end or the deadline. Succeeds with whether it was
        in time."""
        costs, rules, began = self.costs, self.rules, self.env.now
        moved = self._moved[id(group)]
        count = len(group.members)
        yield self.env.timeout(costs.settle)
        if rules.balance and count > 2:
            balance(group.members, rules.host_rate)
            yield self.env.timeout(costs.shares_factor * count**costs.shares_exponent)
        yield self.env.timeout(costs.apart)
        silent_until = began
        left = list(group.members)
        gone: list[Peer] = []
        for number in range(_SLICES):
            dead = [p for p in left if p in group.absent or _dies_in(p, number)]
            if dead:
                left = [p for p in left if p not in dead]
                gone += dead
                # Its parts are missed first, what it should have averaged for the others longer.
                silent_until = self.env.now + 2 * rules.chunk_timeout
                yield self.env.timeout(rules.chunk_timeout)
            if len(left) < 2:
                break
            lines = [self._slice(p, left, count) for p in left]
            yield self.env.all_of([self.env.process(line) for line in lines])
            if self.env.now - began > rules.transfer_deadline:
                break
        yield self.env.timeout(max(0.0, silent_until - self.env.now))
        moved.succeed(self.env.now - began <= rules.transfer_deadline and len(left) > 1)

    def _slice(self, peer: Peer, left: Sequence[Peer], count: int) -> Process:
        """Its parts to the others' shares, the differences of its own share to them; and back."""
        costs, rules = self.costs, self.rules
        whole = rules.passes / 2 * 4 * rules.values / _SLICES * costs.framing
        own = peer.balanced / count
        others = sum(p.balanced for p in left) / count - own
        bytes_ = whole * (others + own * (len(left) - 1))
        peer.sent += bytes_
        peer.received += whole * own * (len(left) - 1) + whole * others
        rate = min(peer.rate, rules.host_rate) * costs.pace * _MEGABIT
        yield self.env.timeout(bytes_ / rate)


def balance(members: Sequence[Peer], most: float) -> None:
    """Shares of the sums for which the slowest of ``members`` is done first, as hivemind's linear
    program finds them: a peer moves 1 + (n - 2) s of the values, s being its share."""
    count = len(members)
    rates = [min(peer.rate, most) for peer in members]

    def shares(time: float) -> list[float]:
        return [max(0.0, (time * rate - 1) / (count - 2)) for rate in rates]

    low, high = 0.0, count / min(rates)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(shares(middle)) < 1 else (low, middle)
    # A peer that averages nothing still moves its own values: nobody gains by being done before.
    found = shares(max(high, 1 / min(rates)))
    for peer, share in zip(members, found, strict=True):
        peer.balanced = share / sum(found) * count


@dataclass
class _Search:
    env: simpy.Environment
    until: float = 0.0
    follows: bool = False
    group: Group | None = None
    followers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.door = simpy.Resource(self.env, capacity=1)
        self.news: simpy.Event = self.env.event()


def _dies_in(peer: Peer, number: int) -> bool:
    return peer.dies is not None and int(peer.dies * _SLICES) == number
