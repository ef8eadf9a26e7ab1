"""Judge whether this miner earns, in one verdict, and name the action if it does not.

Validators judge a miner's uploads and write weights to the chain. The chain turns them into
*incentive*, the miner's share of the network's payments (0 to 1), and into *emission* per tempo.
The incentive follows hours behind the cause. So the verdict looks first at causes that would make
the next score zero, and only then at the incentive: a miner may still earn from scores it has lost
already.

:class:`Income` (hivemind) or :class:`StoreIncome` subscribes to the event stream. It logs a line
that begins with ``Income:`` when the verdict changes and once an hour, writes an ``income`` event,
and gives the metrics their figures.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from distributed_training.chain.base import Chain, ChainUnavailable, Neuron, find
from distributed_training.common.backoff import Throttle
from distributed_training.protocol.lines import counted
from distributed_training.protocol.types import Base
from distributed_training.telemetry import unix_time

from . import events as ev
from .events import MinerState

log = logging.getLogger(__name__)

# In seconds: between two looks, as the metrics file is written; between two events and two lines
# while the verdict stays.
_LOOK_EVERY, _RECORD_EVERY, _LOG_EVERY = 15.0, 300.0, 3600.0
_OFFLINE = 300.0  # seconds without an answer of the chain


class Verdict(StrEnum):
    """The verdicts in the order in which they are tried."""

    UNKNOWN = "unknown"
    OTHER_VERSION = "other version"
    NOTHING_UPLOADED = "nothing uploaded"
    RESET = "reset"
    BEHIND = "behind the network"
    NOT_CALLED = "not called"
    JOINING = "joining"
    REFUSED = "refused"
    NOT_MERGED = "not merged"
    EARNING = "earning"
    NOT_YET = "not yet"


_EARNS = {Verdict.UNKNOWN: None, Verdict.EARNING: True}


@dataclass(frozen=True)
class Standing:
    """The chain's figures of one miner among the others.

    ``rank`` is 1 for the highest incentive of ``miners`` neurons without a validator's permit;
    equal ones share it. ``emission`` is per tempo, in the subnet's token. ``weights_block``: at
    which a validator last set weights, 0 for never.
    """

    incentive: float
    emission: float
    rank: int
    miners: int
    weights_block: int

    @property
    def words(self) -> str:
        words = f"incentive {self.incentive:.4f}, rank {self.rank} of {self.miners} miners"
        # None by a registry.
        return words + (f", emission {self.emission:.4g} per tempo" if self.emission else "")


def standing(neurons: Sequence[Neuron], hotkey: str) -> Standing | None:
    """Return where ``hotkey`` stands; None if the chain does not show it."""
    me = find(neurons, hotkey)
    if me is None:
        return None
    # A miner with much stake has a permit too.
    miners = [n for n in neurons if not n.validator_permit or n is me]
    return Standing(
        incentive=me.incentive,
        emission=me.emission,
        rank=1 + sum(n.incentive > me.incentive for n in miners),
        miners=len(miners),
        weights_block=max((n.last_update for n in neurons if n.validator_permit), default=0),
    )


@dataclass(frozen=True)
class Facts:
    """The facts that a verdict is made of; ages in seconds, None where there is none.

    ``upload_age`` is that of the newest upload, ``blocks_left`` how many blocks its block list will
    still count (negative: it does not). ``behind``: how long the network has been at a later outer
    step. ``silent``: since a validator called, or since the start. ``patience``: how long a load of
    the global state may take. ``round_period``: within it every validator calls. ``chain_silent``:
    since when no chain endpoint answers. ``other_version``: how the network's file of the global
    bucket differs from ours, in words.
    """

    standing: Standing | None
    running: float
    upload_age: float | None
    age_limit: float
    blocks_left: float | None
    behind: float | None
    silent: float
    patience: float
    round_period: float
    chain_silent: float = 0.0
    other_version: str = ""


def judge_income(facts: Facts) -> tuple[Verdict, str, bool]:
    """Return the verdict, what to know or do in words, and whether an operator must act."""
    standing = facts.standing
    if standing is None:
        return Verdict.UNKNOWN, "the chain does not show this hotkey now", False
    paid = f". Still paid for earlier scores: {standing.words}" if standing.incentive > 0 else ""
    # In this order: what stands first makes all that follows meaningless.
    if facts.other_version:
        return Verdict.OTHER_VERSION, facts.other_version + paid, True
    if facts.upload_age is None:
        late = facts.running > facts.age_limit
        span = f"in the {_span(facts.running)} " if facts.running >= 1 else ""
        words = f"nothing was uploaded {span}since the start"
        remedy = "; grep -iE 'UPLOAD BLOCKED|upload failed|snapshot' in the log for the cause"
        return Verdict.NOTHING_UPLOADED, words + remedy * late + paid, late
    if facts.upload_age > facts.age_limit:
        words = (
            f"the newest upload is {_span(facts.upload_age)} old, and validators take none older "
            f"than {_span(facts.age_limit)}; grep -iE 'UPLOAD BLOCKED|upload failed' in the log"
        )
        return Verdict.RESET, words + paid, True
    if facts.blocks_left is not None and facts.blocks_left < 0:
        words = (
            f"the newest upload lists blocks that are {counted(-facts.blocks_left, 'block')} too "
            "old for validators; the next upload cures it; if it lasts, steps are too slow"
        )
        # Behind the network the load that is due helps here as well, without an operator.
        return Verdict.RESET, words + paid, facts.behind is None
    if facts.behind is not None and facts.behind > facts.patience:
        words = (
            f"the network has been at a later outer step for {_span(facts.behind)}; grep "
            "'global state' in the log for why it is not loaded"
        )
        return Verdict.BEHIND, words + paid, True
    if facts.silent > facts.round_period:
        remedy = (
            "see from another machine whether --axon.port is reached (python -m "
            "distributed_training doctor --probe IP)"
        )
        if facts.chain_silent > _OFFLINE:
            remedy = (
                f"nor has the chain answered for {_span(facts.chain_silent)}, so see the network "
                "of this machine first"
            )
        words = f"no validator has called for {_span(facts.silent)}: {remedy}"
        return Verdict.NOT_CALLED, words + paid, True
    # The next score is above zero.
    if standing.incentive > 0:
        return Verdict.EARNING, standing.words, False
    words = "uploads count; no validator has set weights yet"
    if standing.weights_block:
        words = (
            "uploads count; the weights that validators set last give nothing to it yet "
            "(python scripts/score.py --background scores the upload here)"
        )
    return Verdict.NOT_YET, words, False


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class _Income:
    """Look at the verdict of one miner, log and record it, by the network's exchange."""

    def __init__(
        self,
        *,
        hotkey: str,
        chain: Chain,
        record: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._other_version = ""
        self._hotkey = hotkey
        self._chain = chain
        self._record = record
        self._clock = clock
        self._began = clock()
        self._behind_since: float | None = None
        self._look, self._record_again, self._log_again = (
            Throttle(every, clock=clock) for every in (_LOOK_EVERY, _RECORD_EVERY, _LOG_EVERY)
        )
        self._standing: Standing | None = None
        self._verdict = Verdict.UNKNOWN
        self._bad = False

    def on_event(self, event: ev.Event, state: MinerState) -> None:
        match event:
            case ev.GlobalEpochSeen(outer_step=seen):
                # The state is that before the event: right after a round ours may be ahead.
                if seen <= state.outer_step:
                    self._behind_since = None
                elif self._behind_since is None:
                    self._behind_since = self._clock()
            case ev.Loaded() | ev.OuterStepEnded(committed=True):
                self._behind_since = None
            case ev.NetworkCompared(problem=problem):
                self._other_version = problem
        if not isinstance(event, ev.Tick) or not self._look():
            return
        try:
            self._standing = standing(self._chain.neurons(), self._hotkey)
        except ChainUnavailable:  # it has not answered once
            return
        verdict, words, bad = self._judge(self._clock())
        changed = (verdict, bad) != (self._verdict, self._bad)
        self._verdict, self._bad = verdict, bad
        if self._log_again() or changed:
            level = logging.WARNING if bad else logging.INFO
            log.log(level, "Income: %s: %s", verdict, words)
        if self._record_again() or changed:
            found = asdict(self._standing) if self._standing else {}
            self._record("income", verdict=verdict.value, words=words, bad=bad, **found)

    def _judge(self, now: float) -> tuple[Verdict, str, bool]:
        """Return the verdict, what to know or do in words, and whether an operator must act."""
        raise NotImplementedError

    def _behind(self, now: float) -> float | None:
        return None if self._behind_since is None else now - self._behind_since

    def gauges(self) -> Mapping[str, Callable[[], float | None]]:
        """Return what measures each metric of this subject."""

        def of_standing(name: str) -> Callable[[], float | None]:
            return lambda: getattr(self._standing, name, None)

        return {
            "incentive": of_standing("incentive"),
            "emission": of_standing("emission"),
            "incentive_rank": of_standing("rank"),
            "weights_block": of_standing("weights_block"),
            "earning": lambda: _EARNS.get(self._verdict, False),
        }


class Income(_Income):
    """Follow the verdict of one miner of a network that averages over hivemind.

    ``limits``: measures of the uploads by metric (:func:`~.metrics.limits`). ``called_at``: moment
    of a validator's last call, of ``clock``. ``round_period``: in seconds. ``patience``: see
    :class:`Facts`.
    """

    def __init__(
        self,
        *,
        hotkey: str,
        chain: Chain,
        limits: Mapping[str, Callable[[], float | None]],
        called_at: Callable[[], float | None],
        round_period: Callable[[], float],
        patience: float,
        record: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(hotkey=hotkey, chain=chain, record=record, clock=clock)
        self._limits = limits
        self._called_at = called_at
        self._round_period = round_period
        self._patience = patience

    def _judge(self, now: float) -> tuple[Verdict, str, bool]:
        called_at = self._called_at()
        facts = Facts(
            standing=self._standing,
            running=now - self._began,
            upload_age=self._limits["publication_age_seconds"](),
            age_limit=self._limits["publication_age_limit_seconds"]() or math.inf,
            blocks_left=self._limits["block_list_blocks_left"](),
            behind=self._behind(now),
            silent=now - (self._began if called_at is None else called_at),
            patience=self._patience,
            round_period=self._round_period(),
            chain_silent=self._chain.age().total_seconds(),
            other_version=self._other_version,
        )
        return judge_income(facts)

    def gauges(self) -> Mapping[str, Callable[[], float | None]]:
        """Return what measures each metric of this subject."""
        called = {"last_call_timestamp_seconds": lambda: unix_time(self._called_at())}
        return {**super().gauges(), **called}


class StoreIncome(_Income):
    """Follow the verdict of one miner of a store network: what the manifests say of its uploads.

    ``round_period``: seconds from one close to the next.
    """

    def __init__(
        self,
        *,
        hotkey: str,
        chain: Chain,
        round_period: float,
        record: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(hotkey=hotkey, chain=chain, record=record, clock=clock)
        self._round_period = round_period
        self._fate: Base | None = None  # of the upload of the last outer step that was applied
        self._cause = ""
        self._forked = ""

    def on_event(self, event: ev.Event, state: MinerState) -> None:
        match event:
            case ev.OuterStepEnded(committed=True) if (update := state.update) is not None:
                # One that sent nothing is still joining, or is no worse than before.
                if update.base is not Base.KEPT or update.cause:
                    why = f" ({update.cause})" if update.cause else ""
                    self._fate, self._cause = update.base, f"outer step {state.outer_step}{why}"
            case ev.ChainForked(cause=cause):
                self._forked = cause
        super().on_event(event, state)

    def _judge(self, now: float) -> tuple[Verdict, str, bool]:
        found, behind, fate = self._standing, self._behind(now), self._fate
        if found is None:
            return Verdict.UNKNOWN, "the chain does not show this hotkey now", False
        paid = f". Still paid for earlier scores: {found.words}" if found.incentive > 0 else ""
        # In this order: what stands first makes all that follows meaningless.
        if self._other_version or self._forked:
            return Verdict.OTHER_VERSION, (self._other_version or self._forked) + paid, True
        if behind is not None and behind > self._round_period:
            words = (
                f"the network has been at a later outer step for {_span(behind)}; grep 'taken "
                "over' in the log for why it is not applied"
            )
            return Verdict.BEHIND, words + paid, True
        if fate is None:
            running = now - self._began
            late = running > 3 * self._round_period
            words = f"no upload was judged in the {_span(running)} since the start"
            remedy = "; grep -iE 'UPLOAD BLOCKED|upload failed' in the log for the cause"
            return Verdict.JOINING, words + remedy * late + paid, late
        if fate is Base.REFUSED:
            return Verdict.REFUSED, f"the validator refused the upload of {self._cause}{paid}", True
        if fate is Base.KEPT:
            words = f"the upload was not merged in {self._cause}; what it held goes into the next"
            return Verdict.NOT_MERGED, words + paid, True
        if found.incentive > 0:
            return Verdict.EARNING, found.words, False
        return Verdict.NOT_YET, "uploads are merged; no weights give anything to it yet", False
