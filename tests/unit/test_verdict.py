"""Test the verdict that the table gives for facts: word, sentence, remedy, colour and alert."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from typing import Any

import pytest

from distributed_training.telemetry import notify
from distributed_training.telemetry.facts import (
    Disk,
    Fact,
    Facts,
    KnownUpload,
    Launch,
    parse,
)
from distributed_training.telemetry.verdict import TABLE, Level, Verdict, hides, judge

pytestmark = pytest.mark.timeout(30)

NOW = 1e9
MERGED = KnownUpload(6, NOW - 700, "6.3", "merged", NOW - 300)
WELL = Facts(
    round_seconds=600.0,
    looked=NOW,
    started=NOW - 20000,
    mode="training",
    outer_step=7,
    step=Fact(900, NOW - 10),
    step_seconds=15.0,
    uploads=(MERGED,),
    chain_at=NOW - 5,
    registered=Fact(True, NOW - 5),
    network_step=7,
    other_version=Fact("", NOW),
    disk=Fact(Disk(9e11, 1e12, 1e11), NOW),
)
NEW = replace(WELL, uploads=(), started=NOW - 600)
BLANK = Facts()
PAYS = replace(WELL, pays=True)
STARTS = Launch("starting", "loading global state 12.4 of 32.0 GB", NOW - 60, 1620.0)
SETTING = Launch("stopped", stopped_by="its settings", text="192 is not its: leave it out")
REFUSED = Launch("refused", text="no hotkey", attempt=6, next_try_at=NOW + 40)


def launched(launch: Launch, **more: Any) -> dict[str, Any]:
    return {"launch": replace(launch, **more)}


def silent(seconds: float, **more: Any) -> dict[str, Any]:
    return {"chain_at": NOW - seconds, "store_silent_since": NOW - seconds, **more}


def fate(word: str, cause: str = "", at: float = NOW - 300) -> dict[str, Any]:
    return {"uploads": (replace(MERGED, fate=word, cause=cause, fate_at=at),)}


def miss(cause: str, count: int = 1) -> dict[str, Any]:
    return {"missed": count, "missed_cause": cause, "missed_at": NOW - 60}


def store_silent(seconds: float, closed: float = -400.0, **more: Any) -> dict[str, Any]:
    return {"store_silent_since": NOW - seconds, "next_round": NOW - closed, **more}


V, RED, ORANGE, GREEN, GREY = Verdict, Level.BAD, Level.WAIT, Level.GOOD, Level.IDLE
CLOSED = "connection refused"
#: The facts, changes to them, the verdict, its colour, and some words of its cause or remedy.
CASES: list[tuple[Facts, dict[str, Any], Verdict, Level, str]] = [
    # --- the process
    (BLANK, launched(STARTS), V.STARTING, ORANGE, "12.4 of 32.0 GB, 26 min left; then it trains"),
    (BLANK, launched(STARTS, text="no hotkey", attempt=1), V.STARTING, ORANGE, "2; the one"),
    (BLANK, launched(STARTS, text="no hotkey", attempt=2), V.CANNOT_START, RED, "key (attempt 3"),
    (BLANK, launched(SETTING), V.CANNOT_START, RED, "leave it out; then pm2 start app.config.js"),
    (BLANK, launched(REFUSED), V.CANNOT_START, RED, "no hotkey (attempt 6, next try in 40 s)"),
    (WELL, launched(Launch("running")), V.COUNTS, GREEN, ""),
    (WELL, launched(Launch("stopped", stopped_by="signal 9")), V.STOPPED, GREY, "(signal 9)"),
    (WELL, launched(Launch("stopping", stopped_by="signal 9")), V.STOPPED, GREY, "is stopping"),
    (WELL, launched(Launch("stopped", stopped_by="failures")), V.STOPPED, RED, "end of its log"),
    (WELL, launched(Launch("stopped", stopped_by="SIGKILL or")), V.STOPPED, RED, "pm2 resurrect"),
    (WELL, {"gone": Fact(True, NOW)}, V.STOPPED, RED, "none of its processes runs"),
    # --- its machine
    (WELL, {"disk": Fact(Disk(1e10, 1e12, 1e11), NOW)}, V.DISK_FULL, RED, "10.0 GB are free"),
    (BLANK, {}, V.UNKNOWN, GREY, "no miner has written anything here yet"),
    (BLANK, launched(Launch("running")), V.STARTING, ORANGE, "written nothing yet"),
    (WELL, {"looked": NOW + 60}, V.UNKNOWN, ORANGE, "clock was set back"),
    (WELL, {"looked": NOW - 400}, V.STUCK, RED, "written nothing for 6 min"),
    (WELL, {"looked": NOW - 400, "step": None}, V.STARTING, ORANGE, "6 min, as while it compiles"),
    (WELL, {"step": Fact(900, NOW - 130)}, V.STUCK, RED, "no inner step for 2 min"),
    (WELL, {"step": Fact(900, NOW - 130), "mode": "starting"}, V.STUCK, RED, "step for 2 min"),
    (WELL, {"step": Fact(9, NOW - 9e3), "started": NOW - 60}, V.COUNTS, GREEN, ""),
    (WELL, {"step": Fact(900, NOW - 700), "mode_since": NOW - 20}, V.COUNTS, GREEN, ""),
    # --- its link
    (WELL, silent(94.0), V.NO_CONNECTION, RED, "have not answered for 94 s: this"),
    (WELL, silent(94.0, chain_trouble=CLOSED), V.NO_CONNECTION, RED, "link works"),
    (WELL, silent(94.0, store_trouble=CLOSED), V.NO_CONNECTION, RED, "tell the founder"),
    (PAYS, silent(94.0, chain_trouble=CLOSED), V.NO_CONNECTION, RED, "check this machine's net"),
    (WELL, {"chain_at": NOW - 119}, V.COUNTS, GREEN, ""),
    (WELL, {"chain_at": NOW - 125}, V.NO_CONNECTION, RED, "the registry has not answered"),
    (PAYS, {"chain_at": NOW - 700}, V.NO_CONNECTION, RED, "the chain has not answered for 11 min;"),
    (WELL, store_silent(119), V.COUNTS, GREEN, ""),
    (WELL, store_silent(200), V.NO_CONNECTION, RED, "not answered for 3 min; no close was"),
    (WELL, store_silent(200, store_trouble="403"), V.NO_CONNECTION, RED, "for 3 min (403); no cl"),
    (WELL, store_silent(1300, 1250.0), V.NO_CONNECTION, RED, "2 closes have passed without"),
    (WELL, store_silent(200, missed=2), V.NO_CONNECTION, RED, "2 closes have passed without"),
    # --- the network
    (WELL, {"registered": Fact(False, NOW)}, V.NOT_REGISTERED, RED, "ask the founder whether it"),
    (PAYS, {"registered": Fact(False, NOW)}, V.NOT_REGISTERED, RED, "register it again"),
    (WELL, {"other_version": Fact("at 2", NOW)}, V.OTHER_VERSION, RED, "at 2; ask the founder"),
    (WELL, {"other_version": Fact("at 2: get it", NOW)}, V.OTHER_VERSION, RED, "at 2; get it"),
    (WELL, {"forked": "two manifests"}, V.OTHER_VERSION, RED, "two manifests"),
    (WELL, {"behind_since": NOW - 300}, V.COUNTS, GREEN, ""),
    (WELL, {"behind_since": NOW - 700}, V.BEHIND, RED, "for 11 min; see the line of the log"),
    (WELL, {"gate": 1}, V.WAITING, ORANGE, "no outer step after 1 close: no half"),
    # --- nothing was sent
    (NEW, {}, V.WAITING, ORANGE, "in the 10 min since the start: that is normal before the first"),
    (NEW, {"started": NOW - 2000}, V.MISSED, RED, "since the start; run dt-doctor"),
    (WELL, miss("blocked: 3 inner steps"), V.MISSED, RED, "more inner steps"),
    (WELL, miss("no room: 1 GB"), V.MISSED, RED, "free the disk"),
    (WELL, miss("not running: it came"), V.MISSED, RED, "pm2 startup"),
    (WELL, miss("silent: the store did not answer"), V.MISSED, RED, "tell the founder"),
    (WELL, miss("not sent: write k: 403: copy R2_X again"), V.MISSED, RED, "copy R2_X again"),
    (WELL, miss(f"not sent: no answer ({CLOSED})"), V.MISSED, RED, "tell the fou"),
    (WELL, miss("not sent: the store refused this (403)"), V.MISSED, RED, "ask the founder why"),
    (WELL, miss("not ready: it did not hold"), V.MISSED, RED, "not taken over"),
    (WELL, miss("late: it was written after", 3), V.MISSED, RED, "for the last 3 closes (late"),
    (WELL, miss("void: the close moved"), V.MISSED, ORANGE, "void"),
    (WELL, fate("not merged", "not sent: it is full"), V.MISSED, RED, "dt-doctor"),
    # --- what became of an upload
    (WELL, {"uploads": (KnownUpload(7, NOW - 1900),)}, V.WAITING, ORANGE, "next update"),
    (WELL, fate("merged", at=NOW - 1300), V.WAITING, RED, "named an upload of this miner for"),
    (NEW, fate("merged", at=NOW - 1300), V.WAITING, ORANGE, "named an upload of this miner for"),
    (WELL, {"uploads": (KnownUpload(6, NOW - 1900),)}, V.WAITING, RED, "yet; see on the"),
    (WELL, fate("refused", "worse: 3.4, not 3.0"), V.REFUSED, RED, "read some of the text"),
    (WELL, fate("refused", "spoiler: with it 3.4"), V.REFUSED, RED, "text that this miner"),
    (WELL, fate("refused", "copy: of uid 3"), V.REFUSED, RED, "hotkey and a --neuron.run"),
    (WELL, fate("refused", "the network went back to outer step 3"), V.REFUSED, ORANGE, "back"),
    (WELL, fate("not merged", "late: it came 3 s after"), V.REFUSED, RED, "free this machine's"),
    (WELL, fate("not merged", "damaged: no header"), V.REFUSED, RED, "install the version"),
    (WELL, fate("not merged", "not-judged: no text"), V.WAITING, ORANGE, "into the next"),
    (WELL, fate("not merged", "not judged: the validator"), V.WAITING, ORANGE, "into the next"),
    (WELL, fate("not merged", "void: the close moved"), V.WAITING, ORANGE, "void"),
    (WELL, fate("not merged", "carried over: by chance"), V.COUNTS, GREEN, "was accepted"),
    (WELL, {}, V.COUNTS, GREEN, "the upload of outer step 6 was merged"),
    (WELL, {"uploads": (MERGED, KnownUpload(7, NOW - 20, "7.4"))}, V.COUNTS, GREEN, "outer step 6"),
    (PAYS, {}, V.COUNTS, GREEN, "merged; validators pay for it hours later"),
    (PAYS, {"incentive": Fact(0.2, NOW)}, V.EARNING, GREEN, "the chain pays: incentive 0.2"),
    (PAYS, {"incentive": Fact(0.2, NOW - 8000)}, V.COUNTS, GREEN, "hours later"),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "changed", "word", "level", "words"), CASES)
def test_the_first_thing_in_the_way_is_named(
    facts: Facts, changed: dict[str, Any], word: Verdict, level: Level, words: str
) -> None:
    facts = replace(facts, **changed)
    found = judge(facts, NOW)
    assert (found.verdict, found.level) == (word, level), found
    assert words in found.words
    assert judge(parse(Facts, json.loads(json.dumps(asdict(facts)))), NOW) == found
    # If the verdict is red, the operator must act, reads what to do, and gets a message.
    assert found.bad == bool(found.alert) and (found.remedy or not found.bad), found
    assert found.status == (3 if word is V.STOPPED or level == GREY else 1 if found.bad else 0)
    assert "grep" not in found.words
    pay = re.search(r"\b(paid|pays?|incentive|income|earn)", found.words)
    assert facts.pays or (not pay and word is not V.EARNING), found


def test_each_row_is_reached_and_alerts_are_troubles() -> None:
    reached = {judge(replace(facts, **changed), NOW).row for facts, changed, *_ in CASES}
    assert reached == set(range(len(TABLE)))
    assert {row.word for row in TABLE} == set(Verdict)
    assert {row.alert for row in TABLE} == {*notify.TROUBLES, ""} - {"finished"}


def test_trouble_of_a_later_row_may_last() -> None:
    starts, well = judge(replace(BLANK, launch=STARTS), NOW), judge(WELL, NOW)
    for name in ("stuck", "silent", "counts"):
        assert hides(starts, name) and not hides(well, name)
    assert hides(judge(replace(WELL, **silent(94.0)), NOW), "counts")
