"""The verdict on a miner: the first obstacle, else the chain's pay, and who logs it."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_training.chain.base import Neuron
from distributed_training.common.backoff import Clocks
from distributed_training.miner import events as ev
from distributed_training.miner.events import MinerState, Mode
from distributed_training.miner.income import Income, standing
from distributed_training.protocol.types import Base, Update
from distributed_training.telemetry.metrics import METRICS
from distributed_training.telemetry.verdict import (
    FACTS_FILE,
    Disk,
    Fact,
    Facts,
    Launch,
    Place,
    Standing,
    Upload,
    Verdict,
    judge,
)

pytestmark = pytest.mark.timeout(30)

NEURONS = (
    Neuron(0, "master", validator_permit=True, last_update=900, incentive=0.5),
    Neuron(1, "me", incentive=0.2, emission=0.4),
    Neuron(2, "other", incentive=0.3),
    Neuron(3, "equal", incentive=0.2),
)
NOW = 1e9
RULES = Facts(round_seconds=600.0)
PAID = Standing(0.2, 0.4, 2, 3, 1450)
MERGED = Upload(6, NOW - 700, "6.3", "merged", NOW - 300)
WELL = STORE = replace(
    RULES,
    looked=NOW,
    started=NOW - 20000,
    mode="training",
    outer_step=7,
    step=Fact(900, NOW - 10),
    step_seconds=15.0,
    uploads=(MERGED,),
    block=Fact(1440, NOW - 5),
    registered=Fact(True, NOW - 5),
    standing=Fact(PAID, NOW - 5),
    place=Fact(Place(7), NOW - 30),
    other_version=Fact("", NOW),
    disk=Fact(Disk(9e11, 1e12, 1e11), NOW),
)
UNPAID = replace(WELL, standing=Fact(Standing(0.0, 0.0, 3, 3, 1450), NOW))
MEMBER = replace(STORE, pays=False)
STARTS = Launch("starting", "loading global state 12.4 of 32.0 GB", NOW - 60, 1620.0)
SETTING = Launch("stopped", stopped_by="its settings", text="192 is not its: leave it out")
REFUSED = Launch("refused", text="no hotkey", attempt=6, next_try_at=NOW + 40)


def launched(launch: Launch) -> dict[str, Any]:
    return {"launch": launch}


def pays(incentive: float, weights_block: int = 1450) -> dict[str, Any]:
    return {"standing": Fact(Standing(incentive, 0.0, 1, 200, weights_block), NOW)}


def silent(seconds: float, **more: Any) -> dict[str, Any]:
    return {"block": Fact(1440, NOW - seconds), "store_silent_since": NOW - seconds, **more}


def fate(word: str, cause: str = "", at: float = NOW - 300) -> dict[str, Any]:
    return {"uploads": (replace(MERGED, fate=word, cause=cause, fate_at=at),)}


def miss(cause: str, count: int = 1) -> dict[str, Any]:
    return {"missed": count, "missed_cause": cause, "missed_at": NOW - 60}


def store_silent(seconds: float, closed: float = -400.0, **more: Any) -> dict[str, Any]:
    return {"store_silent_since": NOW - seconds, "next_round": NOW - closed, **more}


V = Verdict
#: Facts, what is changed in them, the verdict, words of it, whether an operator must act.
CASES: list[tuple[Facts, dict[str, Any], Verdict, str, bool]] = [
    (WELL, {}, V.EARNING, "incentive 0.2000, rank 2 of 3 miners, emission 0.4 per tempo", False),
    (WELL, pays(0.0004), V.HARDLY_EARNING, "below a tenth of an equal share (5.0e-04)", False),
    (WELL, pays(6e-6), V.HARDLY_EARNING, "incentive 6.0e-06", False),
    (UNPAID, {}, V.NOT_YET_PAID, "fine; validators pay for it hours later", False),
    (WELL, {"standing": Fact(PAID, NOW - 8000)}, V.UNKNOWN, "is not known now", False),
    # --- the network
    (WELL, {"behind_since": NOW - 300}, V.EARNING, "incentive", False),
    (WELL, {"registered": Fact(False, NOW)}, V.NOT_REGISTERED, "register it again", True),
    (WELL, {"other_version": Fact("at 2", NOW)}, V.OTHER_VERSION, "at 2", True),
    (WELL, {"other_version": Fact("at 2", NOW), "outdated": True}, V.OUTDATED, "at 2", True),
    # --- the machine
    (WELL, silent(94.0), V.OFFLINE, "not answered for 94 s: this machine's link", True),
    (WELL, {"block": Fact(1440, NOW - 94)}, V.EARNING, "", False),
    (WELL, {"block": Fact(1440, NOW - 700)}, V.REGISTRY_SILENT, "the chain has not answered", True),
    (WELL, {"disk": Fact(Disk(1e10, 1e12, 1e11), NOW)}, V.DISK_FULL, "10.0 GB are free", True),
    (WELL, {"step": Fact(900, NOW - 130)}, V.STUCK, "no inner step for 2 min", True),
    (WELL, {"step": Fact(9, NOW - 9e3), "started": NOW - 60}, V.EARNING, "", False),
    (WELL, {"step": Fact(900, NOW - 700), "mode_since": NOW - 20}, V.EARNING, "", False),
    (WELL, {"looked": NOW - 400}, V.STUCK, "written nothing for 6 min", True),
    (WELL, {"looked": NOW - 400, "step": None}, V.UNKNOWN, "as while it compiles", False),
    (WELL, {"looked": NOW + 60}, V.UNKNOWN, "clock was set back", False),
    (RULES, {}, V.UNKNOWN, "written nothing yet", False),
    # --- the process
    (RULES, launched(STARTS), V.STARTING, "12.4 of 32.0 GB, 26 min left", False),
    (RULES, launched(replace(STARTS, text="no hotkey", attempt=1)), V.STARTING, "2; the", False),
    (RULES, launched(replace(STARTS, text="no hotkey", attempt=2)), V.CANNOT_START, "key (a", True),
    (RULES, launched(SETTING), V.CANNOT_START, "leave it out; then pm2 start app.config.js", True),
    (RULES, launched(REFUSED), V.CANNOT_START, "no hotkey (attempt 6, next try in 40 s)", True),
    (WELL, launched(Launch("running")), V.EARNING, "", False),
    (WELL, launched(Launch("stopped", stopped_by="signal 9")), V.STOPPED, "(signal 9)", False),
    (WELL, launched(Launch("stopped", stopped_by="failures")), V.STOPPED, "end of its log", True),
    (WELL, launched(Launch("stopped", stopped_by="SIGKILL or")), V.STOPPED, "pm2 resurrect", True),
    (WELL, {"gone": Fact(True, NOW)}, V.STOPPED, "none of its processes runs", True),
    # --- a store network
    (STORE, {}, V.EARNING, "incentive", False),
    (STORE, {"uploads": ()}, V.JOINING, "run dt-doctor", True),
    (STORE, {"uploads": (), "started": NOW - 600}, V.JOINING, "in the 10 min", False),
    (STORE, {"uploads": (replace(MERGED, fate_at=NOW - 1801),)}, V.NOT_JUDGED_YET, "", True),
    (STORE, {"uploads": (Upload(7, NOW - 1900),)}, V.NOT_JUDGED_YET, "next update", False),
    (STORE, {"uploads": (replace(MERGED, fate="refused", cause="copy"),)}, V.REFUSED, "copy", True),
    (STORE, {"uploads": (replace(MERGED, fate="kept", cause="late"),)}, V.NOT_MERGED, "late", True),
    (STORE, {"gate": 1}, V.GATE, "no outer step after 1 close: no half", False),
    (STORE, {"forked": "two manifests"}, V.OTHER_VERSION, "two manifests", True),
    (STORE, {"behind_since": NOW - 700}, V.BEHIND, "taken over", True),
    # --- a registry's, which pays nobody
    (MEMBER, {}, V.COUNTS, "the upload of outer step 6 was merged", False),
    (MEMBER, fate("refused", "worse: 3.4, not 3.0"), V.REFUSED, "lower the learning rate", True),
    (MEMBER, fate("refused", "spoiler: with it 3.4"), V.REFUSED, "text that this miner", True),
    (MEMBER, fate("refused", "copy: of uid 3"), V.REFUSED, "hotkey and a --neuron.run", True),
    (MEMBER, fate("refused", "the network went back to outer step 3"), V.REFUSED, "back", False),
    (MEMBER, fate("kept", "late: it came 3 s after"), V.NOT_MERGED, "free this machine's", True),
    (MEMBER, fate("kept", "damaged: no header"), V.NOT_MERGED, "install the version", True),
    (MEMBER, fate("kept", "not-judged: no text"), V.NOT_MERGED, "goes into the next", False),
    (MEMBER, fate("kept", "not judged: the validator"), V.NOT_MERGED, "goes into the next", False),
    (MEMBER, fate("kept", "void: the close moved"), V.NOT_MERGED, "void", False),
    (MEMBER, fate("kept", "not sent: it is full"), V.MISSED, "dt-doctor", True),
    (MEMBER, fate("merged", at=NOW - 1300), V.NOT_JUDGED_YET, "has named an upload", True),
    (MEMBER, {"uploads": (MERGED, Upload(7, NOW - 20, "7.4"))}, V.COUNTS, "outer step 6", False),
    (MEMBER, miss("blocked: 3 inner steps"), V.MISSED, "more inner steps", True),
    (MEMBER, miss("no room: 1 GB"), V.MISSED, "free the disk", True),
    (MEMBER, miss("not running: it came"), V.MISSED, "pm2 startup", True),
    (MEMBER, miss("silent: the store did not answer"), V.MISSED, "tell the founder", True),
    (MEMBER, miss("not sent: write k: 403: copy R2_X again"), V.MISSED, "copy R2_X again", True),
    (MEMBER, miss("not sent: no answer (connection refused)"), V.MISSED, "tell the fou", True),
    (MEMBER, miss("not sent: the store refused this (403)"), V.MISSED, "ask the founder why", True),
    (MEMBER, miss("not ready: it did not hold"), V.MISSED, "not taken over", True),
    (MEMBER, miss("late: it was written after", 3), V.MISSED, "for the last 3 closes (late", True),
    # --- one of the two does not answer
    (MEMBER, {"block": Fact(1440, NOW - 119)}, V.COUNTS, "", False),
    (MEMBER, {"block": Fact(1440, NOW - 125)}, V.REGISTRY_SILENT, "registry has not an", True),
    (MEMBER, store_silent(119), V.COUNTS, "", False),
    (MEMBER, store_silent(200), V.STORE_SILENT, "the store has not answered for 3 min", True),
    (MEMBER, store_silent(200), V.STORE_SILENT, "no close was missed", True),
    (MEMBER, store_silent(1300, 1250.0), V.STORE_SILENT, "2 closes have passed without", True),
    (MEMBER, store_silent(200, missed=2), V.STORE_SILENT, "2 closes have passed without", True),
    (MEMBER, silent(94.0), V.OFFLINE, "registry and store have not answered for 94 s", True),
    (MEMBER, silent(94.0, chain_trouble="connection refused"), V.NETWORK_DOWN, "link works", True),
    (MEMBER, silent(94.0, store_trouble="connection refused"), V.NETWORK_DOWN, "founder", True),
]  # fmt: skip


def test_validators_are_no_rivals_and_equal_miners_share_a_place() -> None:
    assert standing(NEURONS, "me") == Standing(0.2, 0.4, rank=2, miners=3, weights_block=900)
    assert standing(NEURONS, "stranger") is None


@pytest.mark.parametrize(("facts", "changed", "verdict", "words", "bad"), CASES)
def test_the_first_thing_in_the_way_is_named(
    facts: Facts, changed: dict[str, Any], verdict: Verdict, words: str, bad: bool
) -> None:
    facts = replace(facts, **changed)
    found = judge(facts, NOW)
    assert (found.verdict, found.bad) == (verdict, bad), found
    assert words in found.words
    assert judge(Facts.from_json(facts.to_json()), NOW) == found


def test_a_member_is_told_of_no_pay_and_sent_to_no_grep() -> None:
    for facts, changed, *_ in CASES:
        if facts is MEMBER:
            found = judge(replace(facts, **changed), NOW)
            assert not re.search(r"\b(grep|paid|pays|incentive|earn)", found.words), found
            assert found.bad == bool(found.remedy), found


def test_each_verdict_is_reached() -> None:
    assert {case[2] for case in CASES} == set(Verdict)


_FACTS = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 10**12) | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["value", "at", "state", "outer_step", "x"]), inner)
    ),
    max_leaves=9,
)


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from([*vars(RULES), "new"]), _FACTS), st.floats(0, 2e9))
def test_facts_file_of_any_content_leads_to_a_verdict(content: dict[str, Any], now: float) -> None:
    judge(Facts.from_json(json.dumps(content)), now)
    judge(Facts.from_json(json.dumps(content)[:-1]), now)


class View:
    block_number = 1440

    def neurons(self) -> tuple[Neuron, ...]:
        return NEURONS

    def age(self) -> timedelta:
        return timedelta()

    def block(self) -> int:
        return self.block_number


def test_a_change_is_logged_at_once_and_the_rest_once_an_hour(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    now, written, chain = [0.0], list[dict[str, Any]](), View()
    income = Income(
        hotkey="me",
        chain=chain,  # type: ignore[arg-type]
        rules=RULES,
        measured=dict,
        record=lambda kind, **fields: written.append({"kind": kind, **fields}),
        folder=tmp_path,
        clocks=Clocks(lambda: now[0], lambda: NOW + now[0]),
    )
    update = Update(8, Path("u"), Base.MERGED, None, "ab")
    # In no mode in which inner steps would be missed.
    state = MinerState(mode=Mode.STOPPING, outer_step=7, update=update)

    def measured() -> dict[str, Any]:
        return {name: measure() for name, measure in income.gauges().items()}

    assert measured()["earning"] is None and measured().keys() <= set(METRICS)
    income.on_event(ev.HeadSeen(7), state)
    income.on_event(ev.UploadEnded(7, 0, size=10, seconds=9.0), state)
    income.on_event(ev.OuterStepEnded(True, 8), state)
    with caplog.at_level(logging.INFO):
        for second in range(7300):
            now[0] = float(second)
            # Two hours without another manifest, at a chain that stands still.
            if second % 60 == 0:
                income.on_event(ev.HeadSeen(7), state)
            income.on_event(ev.Tick(now[0]), state)
    # By number: hivemind, once imported, gives levels other names.
    lines = [(r.levelno, r.message.split(":")[1].strip()) for r in caplog.records]
    late = (logging.INFO, "not judged yet")
    assert lines == [(logging.INFO, "earning"), late, late, late], "at a change and once an hour"
    assert len(written) == pytest.approx(7300 / 300 + 1, abs=2)
    assert written[-1]["verdict"] == "not judged yet" and written[-1]["rank"] == 2
    assert measured()["earning"] is True, "for earlier scores"
    assert measured()["incentive"] == 0.2
    facts = Facts.from_json((tmp_path / FACTS_FILE).read_bytes())
    assert judge(facts, NOW + now[0]).verdict is Verdict.NOT_JUDGED_YET
    income.on_event(ev.HeadSeen(8), state)
    now[0] = 9000.0
    income.on_event(ev.Tick(now[0]), state)
    assert written[-1]["verdict"] == "behind"
