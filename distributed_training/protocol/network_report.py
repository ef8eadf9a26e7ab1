"""Report how a network is doing, and give the one verdict that all readers show.

The registry keeps and shows the newest report from the founder's validator. The validator's own
dashboard and metrics show the same. Times in a report are ages in seconds, so no clocks have to be
compared. All sizes are bounded. The verdict depends on what the validator has seen, never on what a
member says about itself.

The verdict is the first of these that applies:

- *not yet begun* (idle): there was never a report.
- *finished* (idle): a [stop] of the network's file is reached.
- *stopped* (idle): the validator was asked to stop.
- *waiting for the validator* (wait): its next report is overdue, but the reader has not yet
  listened as long as a report may take.
- *validator silent* (bad): its next report is overdue.
- *held up* (bad): the validator says what keeps it from working.
- *starting* (wait): the validator has not asked its members yet.
- *waiting for members* (wait): fewer members than a round needs sent an upload for the last close.
- *gate* (bad): fewer than half of the last uploads passed the held-out test.
- *rounds fail* (bad): at least the last two rounds failed for other reasons.
- *last round failed* (wait): only the last round failed.
- *first round to come* (wait): no round has succeeded yet.
- *training* (good): none of the above applies.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from .lines import counted

MOST_ROUNDS = 20
MOST_DOMAINS = 16
# Members whose cause is given; with more, the report would be larger than a registry accepts.
MOST_CAUSES = 256
LONGEST_CAUSE = 120  # characters
LONGEST_TEXT = 300
GATE = "GATE"  # fault of a close at which fewer than half of the uploads passed the held-out test
TOO_FEW = "TOO_FEW"  # fault of a close with too few accepted uploads
_NAMED = 5  # members named in one sentence
_FAULTS = {
    GATE: "no half of the uploads passes the held-out text, so the close has moved",
    TOO_FEW: "too few uploads could be merged, so the close has moved",
}

Uid = Annotated[int, Field(ge=0, lt=4096)]
Whole = Annotated[int, Field(ge=0, le=10**18)]
Figure = Annotated[float, Field(ge=0.0, le=1e18)]  # refuses NaN too
Cause = Annotated[str, Field(max_length=LONGEST_CAUSE)]
Text = Annotated[str, Field(max_length=LONGEST_TEXT)]
#: Whether a member sent an upload for the last close; ``new``: it was not a member then.
Answer = Literal["alive", "silent", "new"]


class MemberReport(NamedTuple):
    """A member as the validator sees it."""

    uid: Uid
    answer: Answer
    uploaded: Whole | None  # age of its upload, or None if it has none
    score: Figure
    cause: Cause = ""  # why the score is 0


class RoundReport(NamedTuple):
    """A round, as the validator saw it."""

    outer_step: Whole  # the outer step that the round should have ended
    ended: Whole  # how long ago it ended, in seconds
    seconds: Figure  # how long it took
    participants: Annotated[tuple[Uid, ...], Field(max_length=64)] = ()
    tokens: Whole = 0  # tokens on which its participants had trained
    # GATE, TOO_FEW, or empty after a good round
    fault: Annotated[str, Field(pattern="^[A-Za-z_]{0,32}$")] = ""
    detail: Text = ""


@dataclass(frozen=True)
class NetworkReport:
    """The validator's report on its network; see the module."""

    phase: Literal["starting", "waiting", "round", "finished", "stopped"]
    outer_step: Annotated[int, Field(ge=0, le=10**9)]
    loss: Figure  # mean loss on all held-out text
    # name of a held-out text -> loss on it, in nats per token
    losses: Annotated[
        Mapping[Annotated[str, Field(max_length=100)], Figure], Field(max_length=MOST_DOMAINS)
    ]
    next_report: Figure  # longest time until the next report, in seconds
    next_round: Figure | None = None  # longest time until the next round, in seconds
    least: Annotated[int, Field(ge=1, le=4096)] = 1  # how many miners a round needs
    good_rounds: Whole = 0
    failed_rounds: Whole = 0  # failed rounds since the last good one
    tokens: Whole = 0  # tokens of all good rounds
    tokens_per_second: Figure | None = None  # tokens per second between the last two outer steps
    reason: Text = ""  # why the validator stopped, or what keeps it from working
    rounds: Annotated[tuple[RoundReport, ...], Field(max_length=MOST_ROUNDS)] = ()
    members: Annotated[tuple[MemberReport, ...], Field(max_length=4096)] = field(default=())

    @property
    def alive(self) -> int:
        """How many members sent an upload for the last close."""
        return sum(member.answer == "alive" for member in self.members)


class NetworkVerdict(NamedTuple):
    """The verdict on a network."""

    word: str
    words: str
    # good: nothing to do; wait: an operator should wait; bad: should act; idle: nothing runs.
    kind: Literal["good", "wait", "bad", "idle"]


def judge_network(
    report: NetworkReport | None, received: float, *, age: float = 0.0, listened: float = 0.0
) -> NetworkVerdict:
    """Return the verdict on a network, based on its last report.

    Args:
        report: The last report, or None if there was never one.
        received: When it arrived, in seconds since the epoch; used only in the text.
        age: Seconds since it arrived.
        listened: Seconds for which the reader could have received a report.
    """
    if report is None:
        return NetworkVerdict("not yet begun", "its validator has not reported yet", "idle")
    at = moment(received)
    if report.phase == "finished":
        return NetworkVerdict(
            "finished", f"at outer step {report.outer_step}: {report.reason}", "idle"
        )
    if report.phase == "stopped":
        why = report.reason or "its validator was stopped"
        return NetworkVerdict("stopped", f"at outer step {report.outer_step}, {at}: {why}", "idle")
    if age > report.next_report:
        last = f"its last report is of {at}, {span(age)} ago"
        if listened <= report.next_report:
            since = f"this registry has listened for only {span(listened)}"
            return NetworkVerdict("waiting for the validator", f"{last}, and {since}", "wait")
        remedy = "its last report is below; its log shows the founder why"
        return NetworkVerdict("validator silent", f"{last}; {remedy}", "bad")
    if report.reason:
        return NetworkVerdict("held up", report.reason, "bad")
    if report.phase == "starting":
        return NetworkVerdict("starting", f"its validator asks the members, {at}", "wait")
    coming = f"a round is under way, {at}"
    if report.phase == "waiting":
        left = None if report.next_round is None else report.next_round - age
        coming = "the next round is due"
        if left is not None and left > 0:
            coming = f"the next round is in {span(left)}"
    if report.alive < report.least:
        after = f"; the last round failed: {_cause(report)}" if report.failed_rounds else ""
        return NetworkVerdict("waiting for members", f"{_missing(report)}; {coming}{after}", "wait")
    if report.failed_rounds:
        words = f"{_cause(report)}; outer step {report.outer_step} stays; {coming}"
        fault = report.rounds[-1].fault if report.rounds else ""
        if fault == GATE:
            return NetworkVerdict("gate", words, "bad")
        if report.failed_rounds > 1:
            return NetworkVerdict("rounds fail", f"{report.failed_rounds} in a row: {words}", "bad")
        return NetworkVerdict("last round failed", words, "wait")
    here = f"{report.alive} of {counted(len(report.members), 'member')} at work"
    if not report.good_rounds:
        return NetworkVerdict("first round to come", f"{here}; {coming}", "wait")
    return NetworkVerdict("training", f"{here} at outer step {report.outer_step}; {coming}", "good")


def _missing(report: NetworkReport) -> str:
    """Return a sentence about the members that the network is waiting for."""
    if not report.members:
        return "no miner has joined yet"
    sentence = f"a round takes {report.least}, and {report.alive} of {len(report.members)} answer"
    for answer, words in (
        ("silent", "silent"),
        ("new", "not asked yet"),
    ):
        if uids := [member.uid for member in report.members if member.answer == answer]:
            more = f" and {len(uids) - _NAMED} more" if len(uids) > _NAMED else ""
            sentence += f"; {words}: uid {', '.join(map(str, uids[:_NAMED]))}{more}"
    return sentence


def _cause(report: NetworkReport) -> str:
    """Return in words why the last round failed."""
    last = report.rounds[-1] if report.rounds else None
    cause = describe_fault(last.fault if last else "")
    return f"{cause} ({last.detail})" if last and last.detail else cause


def describe_fault(fault: str) -> str:
    """Return in words why a round failed, from the name of the fault in its report."""
    return _FAULTS.get(fault, "the cause is not known here")


def moment(seconds: float) -> str:
    """Return a time, in seconds since the epoch, in readable form."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def span(seconds: float) -> str:
    """Return a duration in seconds in readable form."""
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    if whole < 172800:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} days"


def printable(text: str, most: int) -> str:
    """Return ``text`` as one line of ASCII with at most ``most`` characters.

    Any other character may take six bytes in JSON, and text from other peers is limited in bytes.
    """
    line = "".join(c if " " <= c <= "~" else "?" for c in " ".join(text.split()))
    return line if len(line) <= most else f"{line[: most - 3]}..."
