"""One all-reduce round as the validator leads it (protocol page, section 6).

Sweep with IsAlive until enough miners stand at our outer step; order them by our own scores; load
the best one's checkpoint as our own contribution; start our averager, then call the miners. The
result is an average; whether it becomes an outer step is decided by the validator.
"""

from __future__ import annotations

import logging
import queue
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from distributed_training.chain.base import Neuron
from distributed_training.chain.client import SignedClient
from distributed_training.config import Config
from distributed_training.exchange.sn38.swarm import HivemindSwarm
from distributed_training.node.start import Stopped
from distributed_training.protocol import keys, lines
from distributed_training.protocol.keys import is_peer_id
from distributed_training.protocol.metadata import Metadata
from distributed_training.protocol.synapses import ADDRESSES_EACH, MOST_CALLED, IsAliveReply
from distributed_training.protocol.types import (
    AllReduceError,
    AllReduceFault,
    AllReduceResult,
    RoundRequest,
)
from distributed_training.scoring.upload import OpenBucket, Result, begun, fulfil
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.training.model import loss_limit
from distributed_training.training.outer_step import GlobalState, load_weights, model_bytes
from distributed_training.validator.suspects import Suspects

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """One run of the validator.

    ``folder`` keeps what must not be lost; ``record(kind, **fields)`` writes an event (see
    ``events``); ``stop`` is set when the program should end. ``clock_fault``: what is wrong with
    this machine's clock, in words, or nothing.
    """

    folder: Path
    record: Callable[..., None]
    stop: threading.Event
    number: int
    clock_fault: Callable[[], str] = str


Item = TypeVar("Item")


def each(
    task: Callable[[Item], Result], items: Sequence[Item], *, stop: threading.Event
) -> list[Result]:
    """Return ``task(item)`` of all ``items``, of which several are under way at a time.

    For what waits for a store or the chain: each of 256 miners may cost its whole patience. Raises
    Stopped soon after ``stop`` is set, and leaves what is under way behind; else the first error.
    """
    waiting: queue.SimpleQueue[tuple[Item, Future[Result]]] = queue.SimpleQueue()
    futures: list[Future[Result]] = [Future() for _ in items]
    for one in zip(items, futures, strict=True):
        waiting.put(one)

    def work() -> None:
        while not stop.is_set():
            try:
                item, future = waiting.get_nowait()
            except queue.Empty:
                return
            fulfil(future, partial(task, item))

    # Not one for each item: a container may have no room for hundreds of threads.
    for _ in futures[:_AT_ONCE]:
        begun(work)
    while wait(futures, timeout=_LOOK).not_done:
        if stop.is_set():
            raise Stopped
    return [future.result() for future in futures]


def unless_stopped(task: Callable[[], Result], *, stop: threading.Event) -> Result:
    """Return ``task()``. Raises its error, or Stopped soon after ``stop`` is set (:func:`each`)."""
    (result,) = each(lambda _: task(), [None], stop=stop)
    return result


_AT_ONCE = 16  # buckets that are asked
_LOOK = 0.2  # seconds between two looks at a stop
_ALIVE_WANTED = 64  # miners; with fewer two sweeps that find the same ones end the wait
_ALL_ASKED = 10  # after this many sweeps for a round the silent miners are asked again
# Our weight when no miner's checkpoint could be loaded: a pseudo-gradient of zeros must not dilute
# the miners', but hivemind wants a positive weight.
WEIGHT_OF_NOTHING = 1e-6


@dataclass(frozen=True)
class Attendance:
    """The miners of an IsAlive sweep. ``alive``: uids that answered with our outer step.

    ``answered``: all answers, by uid; ``elsewhere``: another outer step that a uid answered from;
    ``other_runs``: the run id of a uid whose network's file is another.
    """

    asked: tuple[int, ...]
    alive: tuple[int, ...]
    answered: Mapping[int, IsAliveReply] = field(default_factory=dict)
    elsewhere: Mapping[int, int] = field(default_factory=dict)
    other_runs: Mapping[int, str] = field(default_factory=dict)


@dataclass
class RoundOutcome:
    """The course of a round, filled in during the round.

    ``averaged``: copies of the buffers after a good round, None after a failed one;
    ``inner_steps``: median of the inner steps that the called miners uploaded. ``left_out``: why a
    living miner was not called; ``causes``: why a called miner is not in the average.
    """

    attendance: Attendance
    called: tuple[int, ...] = ()
    participants: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    left_out: dict[int, str] = field(default_factory=dict)
    causes: dict[int, str] = field(default_factory=dict)
    top_uid: int | None = None
    result: AllReduceResult | None = None
    averaged: list[Tensor] | None = None
    inner_steps: int = 0
    fault: AllReduceFault | None = None
    detail: str = ""
    seconds: float = 0.0


@dataclass
class _Candidate:
    neuron: Neuron
    bucket: BucketReader
    metadata: Metadata


class RoundCaller:
    """Leads rounds. ``caller`` is our hotkey. A stop ends a round early, as a failure CANCELLED.

    ``loss``: of weights on held-out data, nats per token; may raise Stopped.
    """

    def __init__(
        self,
        *,
        client: SignedClient,
        swarm: HivemindSwarm,
        open_bucket: OpenBucket,
        config: Config,
        caller: str,
        run: Run,
        loss: Callable[[Sequence[Tensor]], float],
    ) -> None:
        self._client = client
        self._swarm = swarm
        self._open_bucket = open_bucket
        self._settings = config.validator
        self._swarm_settings = config.swarm
        self.rules_id = config.rules_id  # what a miner answers that trains by our rules
        self._caller = caller
        self._loss = loss
        self._scratch = run.folder / "scratch"  # for one downloaded checkpoint
        self._stop = run.stop
        self._number = run.number
        self._rng = random.Random(self._settings.seed or None)
        self._rounds = 0
        self._called: dict[int, int] = {}  # by uid: the last of these rounds to which it was called

    @property
    def peer_id(self) -> str:
        """Our averager's peer id; a new one after each restart of the swarm."""
        return self._swarm.peer_id

    @property
    def maddrs(self) -> Sequence[str]:
        """The addresses of our DHT: others' initial peers."""
        return self._swarm.visible_maddrs

    def sweep(self, neurons: Sequence[Neuron], outer_step: int) -> Attendance:
        """Make one IsAlive sweep; alive are those that answered with our outer step."""
        timeout = self._settings.alive_timeout
        ask = partial(self._client.sweep_is_alive, neurons, timeout, epoch=outer_step)
        replies = unless_stopped(ask, stop=self._stop)
        answered = {uid: r for uid, r in replies.items() if r is not None and r.alive}
        ours = self.rules_id
        # The public miner does not say, and may not be ours to judge.
        other_runs = {u: r.run_id for u, r in answered.items() if r.run_id and r.run_id != ours}
        steps = {u: r.epoch for u, r in answered.items() if u not in other_runs}
        return Attendance(
            asked=tuple(n.uid for n in neurons),
            alive=tuple(uid for uid, step in steps.items() if step == outer_step),
            answered=answered,
            elsewhere={u: s for u, s in steps.items() if s is not None and s != outer_step},
            other_runs=other_runs,
        )

    def run(
        self,
        state: GlobalState,
        miners: Callable[[], Sequence[Neuron]],
        suspects: Suspects,
        scores: Mapping[int, float],
        on_sweep: Callable[[Attendance], None],
    ) -> RoundOutcome:
        """Run one round; ``miners`` lists the registered ones before each sweep.

        ``scores``, by uid, order the miners: nothing that these say of themselves may. ``suspects``
        choose who is not called; it is for the caller to tell them how it ended. Never raises for
        what a peer does, only Stopped and what ``miners`` and ``on_sweep`` raise.
        """
        neurons, attendance = self._gather(miners, state.outer_step, on_sweep)
        outcome = RoundOutcome(attendance)
        try:
            if not self._swarm.alive():
                log.warning("The swarm's process is not running. Starting it again.")
                try:
                    self._swarm.restart()
                except RuntimeError as error:  # its text is for the operator
                    raise AllReduceError(AllReduceFault.SWARM_DOWN, str(error)) from None
            if self._stop.is_set():
                raise AllReduceError(AllReduceFault.CANCELLED, "the validator stops")
            if len(attendance.alive) < self.least(len(neurons)):
                elsewhere = lines.counted(len(attendance.elsewhere), "miner")
                raise AllReduceError(
                    AllReduceFault.NO_GROUP,
                    f"{len(attendance.alive)} of {len(neurons)} miners are alive at outer step "
                    f"{state.outer_step}"
                    + (f", {elsewhere} at another" if attendance.elsewhere else ""),
                )
            alive = [n for n in neurons if n.uid in attendance.alive]
            found = each(self._candidate, alive, stop=self._stop)
            # The inner step is the miner's own word: a liar must not come before who has a score.
            candidates = sorted(
                (c for c in found if c is not None),
                key=lambda c: (-scores.get(c.neuron.uid, 0), -c.metadata.inner_step),
            )
            # A running miner's answer is newer than its published metadata.
            published = {c.neuron.uid: c.metadata.peer_id for c in candidates}
            answered = attendance.answered
            peer_ids = published | {uid: r.peer_id for uid, r in answered.items() if r.peer_id}
            # If there are too many, the lowest scores are left out; of equals the last ones called.
            # Between miners without a score, the inner steps that they claim decide.
            steps = {c.neuron.uid: c.metadata.inner_step for c in candidates}
            ordered = sorted(
                alive,
                key=lambda n: (
                    -scores.get(n.uid, 0),
                    self._called.get(n.uid, 0),
                    -steps.get(n.uid, 0),
                ),
            )
            # All ids go to every miner, which refuses the whole call for one that is none. Of two
            # miners with one id the better answers for it.
            owners: dict[str, Neuron] = {}
            for neuron in ordered:
                if is_peer_id(peer_id := peer_ids.get(neuron.uid)):
                    owners.setdefault(peer_id, neuron)
            able = {neuron.uid: neuron for neuron in owners.values()}
            chosen = self._choose(outcome, list(able), suspects)
            uids_of = {peer_ids[uid]: uid for uid in chosen}
            # Both are called: the better may have copied the id, to keep the other out.
            copies = (n for n in ordered if n.uid not in chosen and peer_ids.get(n.uid) in uids_of)
            called = [*(able[uid] for uid in chosen), *copies]
            self._rounds += 1
            self._called.update(dict.fromkeys(chosen, self._rounds))
            outcome.called = tuple(chosen)
            # A checkpoint of one that is not called would spoil the round without it as well.
            candidates = [c for c in candidates if c.neuron.uid in chosen]
            steps_now = [
                c.metadata.inner_step
                for c in candidates
                if c.metadata.outer_step == state.outer_step
            ]
            # The median: one miner, a liar or a beginner, does not move it.
            outcome.inner_steps = statistics.median_low(steps_now) if steps_now else 0
            # Uploads of only the scored files hold no model, so the validator contributes none.
            of_models = candidates if self._settings.upload_content == "all" else ()
            outcome.top_uid = self._contribute(state, of_models)
            addresses = [a for n in called for a in answered[n.uid].addresses]
            self._average(outcome, called, uids_of, addresses[: ADDRESSES_EACH * MOST_CALLED])
        except AllReduceError as error:
            outcome.fault, outcome.detail = error.fault, error.detail
        return outcome

    def _choose(self, outcome: RoundOutcome, able: Sequence[int], suspects: Suspects) -> list[int]:
        """Return which of the uids that are ``able`` to call, the best first."""
        choice = suspects.choose(able, least=self._needed, most=MOST_CALLED, rng=self._rng)
        outcome.left_out.update(choice.left_out)
        if choice.left_out:
            log.info(
                "Not called: %s",
                "; ".join(f"uid {uid} ({why})" for uid, why in choice.left_out.items()),
            )
        if choice.no_choice:
            log.warning(
                "Among the miners no choice is left: of %d that are alive %d are needed, so "
                "uids %s are called although they spoil rounds; ask their operators, expel whose "
                "fault it is (dt-registry expel), or lower --validator.minimum_peers",
                len(able),
                self._needed,
                ", ".join(map(str, choice.no_choice)),
            )
        return list(choice.called)

    # --- steps of a round -----------------------------------------------------------------------

    @property
    def _needed(self) -> int:
        """The number of miners that a good round needs, the validator not counted."""
        peers = max(self._settings.minimum_peers, self._swarm_settings.min_group_size)
        return max(1, peers - 1)

    def least(self, registered: int) -> int:
        """Return how many miners must be alive for a round: what a good one takes."""
        # A network that has just begun has fewer miners.
        return max(1, min(self._needed, registered))

    def _gather(
        self,
        miners: Callable[[], Sequence[Neuron]],
        outer_step: int,
        on_sweep: Callable[[Attendance], None],
    ) -> tuple[Sequence[Neuron], Attendance]:
        """Sweep until two sweeps find the same, enough are alive or patience ends.

        Returns who is registered then, and who of them answered. The endpoints of a chain are dead
        for the most part, and each that drops packets costs a call's whole time: those that were
        silent twice are asked again after each tenth sweep.
        """
        deadline = time.monotonic() + self._settings.sweep_patience.total_seconds()
        silences: Counter[tuple[str, str, int | None]] = Counter()
        before: set[int] | None = None
        for number in count():
            neurons = miners()
            if number % _ALL_ASKED == 0:
                silences.clear()
            # Twice: one call that is lost must not cost a miner that trains its round.
            asked = [n for n in neurons if silences[n.hotkey, n.ip, n.port] < 2]
            attendance = self.sweep(asked, outer_step)
            missing = (n for n in asked if n.uid not in attendance.answered)
            silences.update((n.hotkey, n.ip, n.port) for n in missing)
            attendance = replace(attendance, asked=tuple(n.uid for n in neurons))
            on_sweep(attendance)
            alive = set(attendance.alive)
            least = self.least(len(neurons))
            enough = len(alive) >= max(least, min(_ALIVE_WANTED, len(neurons)))
            same = alive == before and len(alive) >= least
            if enough or same or time.monotonic() >= deadline:
                break
            before = alive
            if self._stop.wait(self._settings.sweep_interval.total_seconds()):
                break
        return neurons, attendance

    def _candidate(self, neuron: Neuron) -> _Candidate | None:
        try:
            bucket = self._open_bucket(neuron)
            metadata = bucket.metadata()
        except Exception as error:  # noqa: BLE001 - foreign bytes: they cost their owner its rank
            log.info("uid %d: no usable root metadata (%s)", neuron.uid, error)
            return None
        return _Candidate(neuron, bucket, metadata) if metadata is not None else None

    def _contribute(self, state: GlobalState, candidates: Sequence[_Candidate]) -> int | None:
        """Fill the buffers with epoch start minus the best loadable checkpoint.

        Returns the uid it came from; None (zeros) if no candidate's could be used.
        """
        buffers, limit = self._swarm.buffers, None
        for candidate in candidates[: self._settings.top_candidates]:
            uid = candidate.neuron.uid
            try:
                fetch = partial(self._checkpoint, state, candidate)
                weights = unless_stopped(fetch, stop=self._stop)
                if limit is None:
                    limit = loss_limit(state.model_config, self._loss(state.weights))
                # Finite values are not enough: one miner could move the network to where it likes.
                if not (loss := self._loss(weights)) <= limit:
                    raise ValueError(f"loss {loss:.2f} on held-out data, limit {limit:.2f}")
            except Exception as error:  # noqa: BLE001 - foreign bytes: the next one's will do
                log.info("uid %d cannot be the top uid: %s", uid, error)
                continue
            for buffer, start, reached in zip(buffers, state.weights, weights, strict=True):
                # Into the swarm's shared memory: one more copy would take a model's room.
                torch.sub(start, reached, out=buffer)
            return uid
        for buffer in buffers:
            # They still hold the average of the round before.
            buffer.zero_()
        return None

    def _checkpoint(self, state: GlobalState, candidate: _Candidate) -> list[Tensor]:
        # While an upload is under way the folder's is missing, then newer than the root's. Its
        # weights are whole all the same, the old ones or the new: a store replaces them at once.
        metadata = candidate.bucket.metadata(state.outer_step) or candidate.metadata
        if (metadata.run, metadata.outer_step) != (self._number, state.outer_step):
            raise ValueError(f"it holds {metadata.revision.tag}, not outer step {state.outer_step}")
        if metadata.inner_step == 0:
            raise ValueError("it has not published an inner step")
        self._scratch.mkdir(parents=True, exist_ok=True)
        path = self._scratch / keys.MODEL
        try:
            candidate.bucket.download(
                keys.epoch_key(state.outer_step, keys.MODEL),
                path,
                limit=model_bytes(state.schema),
            )
            return load_weights(path, state.schema)
        finally:
            path.unlink(missing_ok=True)

    def _average(
        self,
        outcome: RoundOutcome,
        called: Sequence[Neuron],
        uids_of: Mapping[str, int],
        addresses: Sequence[str],
    ) -> None:
        """Average with the miners that were ``called``, at ``addresses`` among others.

        Raises AllReduceError.
        """
        began = time.monotonic()
        own = [a for a in self.maddrs if keys.addressed_peer(a) == self._swarm.peer_id]
        ours = sorted(own, key=keys.distance)[:ADDRESSES_EACH]
        # A public network's peers dial no address of somebody's private network.
        farthest = min(map(keys.distance, ours), default=0)
        request = RoundRequest(
            caller=self._caller,
            timeout=self._swarm_settings.round_timeout,
            min_group_size=self._swarm_settings.min_group_size,
            # Nobody else: the swarm is open to all who know the network's file.
            peers=(self._swarm.peer_id, *uids_of),
            addresses=(*ours, *(a for a in addresses if keys.distance(a) <= farthest)),
        )
        weight = 1.0 if outcome.top_uid is not None else WEIGHT_OF_NOTHING
        with ThreadPoolExecutor(1, thread_name_prefix="average") as pool:
            # Before the miners are called: they look for our group at once.
            future = pool.submit(self._swarm.average, request, weight=weight)
            with ExitStack() as undo:
                undo.callback(self._swarm.cancel)  # or leaving would wait for the whole round
                replies = self._client.sweep_all_reduce(called, request)
                undo.pop_all()
            acknowledged = [uid for uid, reply in replies.items() if reply is not None]
            log.info(
                "AllReduce called at %d miners, %d acknowledged", len(called), len(acknowledged)
            )
            try:
                while not wait([future], timeout=_LOOK).done:
                    if not acknowledged or self._stop.is_set():
                        # Again and again: the first may come before the round has begun.
                        self._swarm.cancel()
                result = future.result()
            except AllReduceError as error:
                outcome.causes = {uids_of[p]: w for p, w in error.causes.items() if p in uids_of}
                if acknowledged:
                    raise
                raise AllReduceError(error.fault, "no miner acknowledged the call") from None
            finally:
                outcome.seconds = time.monotonic() - began
        outcome.result = result
        outcome.participants = tuple(sorted(uids_of[p] for p in result.peers if p in uids_of))
        outcome.failed = tuple(sorted(uids_of[p] for p in result.failed_peers if p in uids_of))
        causes = dict.fromkeys(result.failed_peers, "it failed in the average")
        causes.update(result.causes)
        outcome.causes = {uids_of[p]: why for p, why in causes.items() if p in uids_of}
        # Banned senders stay in the group's list.
        good = result.group_size - len(set(result.failed_peers) & set(result.peers))
        if good < self._settings.minimum_peers:
            raise AllReduceError(
                AllReduceFault.PEER_FAILED,
                f"{good} good peers, {self._settings.minimum_peers} are needed",
            )
        outcome.averaged = [buffer.clone() for buffer in self._swarm.buffers]
