"""When the published weights are taken after a round, over all timeouts and periods.

The miner's side of a round is :func:`decide`; who calls, averages and publishes is played here by
a list of events with their times.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from distributed_training.miner import events as ev
from distributed_training.miner.events import Action, GlobalView, MinerState, Mode, Rules, Task
from distributed_training.miner.state_machine import decide
from distributed_training.protocol.types import AllReduceResult, RoundRequest

CALL = RoundRequest(caller="5Validator")


@dataclass
class Subnet:
    """Times in seconds. ``interval``: between two looks at the bucket. ``publishing``: from the end
    of a round until the bucket's root metadata says so; ``fetching``: a global state."""

    period: float
    interval: float
    publishing: float
    fetching: float
    reload: float
    lost: bool  # whether each average has failed parts
    averaging: float = 1.0

    state: MinerState = field(default_factory=lambda: MinerState(Mode.TRAINING, outer_step=0))
    published: int = 0
    now: float = 0.0
    looked: list[Action | Task] = field(default_factory=list)  # since the last call
    _later: list[tuple[float, int, object]] = field(default_factory=list)
    _number: Iterator[int] = field(default_factory=count)

    def run(self, rounds: int) -> Iterator[tuple[MinerState, list[Action | Task]]]:
        """Return state and orders since the call before, at each call of a round."""
        for number in range(1, rounds + 2):
            self._at(number * self.period, "call")
        for look in range(1, int((rounds + 1) * self.period / self.interval) + 1):
            self._at(look * self.interval, "look")
        while self._later:
            self.now, _, what = heapq.heappop(self._later)
            if what == "call":
                yield self.state, self.looked
                self.looked = []
                self._happens(ev.AllReduceCalled(CALL, self.now))
            elif what == "look":
                self._happens(ev.Tick(self.now))
                self._happens(ev.GlobalEpochSeen(self.published, self.now))
            elif isinstance(what, int):
                self.published = what
            else:
                assert isinstance(what, ev.Event)
                self._happens(what)

    def _at(self, time: float, what: object) -> None:
        heapq.heappush(self._later, (time, next(self._number), what))

    def _happens(self, event: ev.Event) -> None:
        self.state, actions = decide(self.state, event, Rules(self.reload, checkpoint_steps=10))
        for action in actions:
            self.looked.append(action)
            self._answer(action)

    def _answer(self, action: Action | Task) -> None:
        outer, now = self.state.outer_step, self.now
        match action:
            case Action.WRITE_PSEUDO_GRADIENT:
                self._happens(ev.PseudoGradientWritten(0.0))
            case Task.AVERAGE:
                failed = ("b",) if self.lost else ()
                result = AllReduceResult(("a", "b", "c"), failed, 0.1, 0.9, self.averaging)
                self._at(now + self.averaging, ev.Averaged(result))
            case Action.OUTER_STEP:
                self._at(now + self.publishing, outer + 1)
                self._happens(ev.OuterStepEnded(True, outer + 1))
            case Task.COMPARE_EPOCHS:
                self._happens(ev.GlobalEpochSeen(self.published, now))
            case Task.COMPARE_WEIGHTS:
                self._happens(ev.WeightsCompared(outer, same=True))
            case Task.FETCH_GLOBAL:
                fetched = ev.GlobalFetched(Path(f"epoch-{self.state.fetch_target}"))
                self._at(now + self.fetching, fetched)
            case Action.LOAD | Action.REBASE:
                self._happens(ev.Loaded(self.state.fetch_target or 0))


SECONDS = st.floats(0.5, 3000)


@given(
    interval=st.floats(10, 3000),
    publishing=SECONDS,
    fetching=SECONDS,
    reload=st.floats(1, 86400),
    spare=st.floats(1, 5000),
    lost=st.booleans(),
)
def test_the_next_round_begins_from_the_publication_if_it_was_fetched_in_time(
    interval: float, publishing: float, fetching: float, reload: float, spare: float, lost: bool
) -> None:
    """This holds for every time that the validator has to publish, also above a period."""
    subnet = Subnet(
        period=1 + publishing + interval + fetching + spare,
        interval=interval,
        publishing=publishing,
        fetching=fetching,
        reload=max(reload, 2 + publishing),  # a shorter one gives a good outer step up
        lost=lost,
    )
    for number, (at_call, since) in enumerate(subnet.run(rounds=4)):
        assert at_call.outer_step == number
        assert at_call.mode in (Mode.TRAINING, Mode.AWAITING_GLOBAL)
        if number:
            assert at_call.view in (GlobalView.SAME, GlobalView.UNPUBLISHED)
            assert Task.COMPARE_WEIGHTS in since or Action.REBASE in since
            assert (Action.REBASE in since) == lost
            assert since.count(Task.FETCH_GLOBAL) == int(lost), "what is as big as the model"
