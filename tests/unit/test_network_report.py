"""Test that the verdict on a network equals its table's, for drawn reports."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from distributed_training.protocol.network_report import (
    GATE,
    LONGEST_CAUSE,
    LONGEST_TEXT,
    MOST_CAUSES,
    MOST_DOMAINS,
    MOST_ROUNDS,
    TOO_FEW,
    MemberReport,
    NetworkReport,
    RoundReport,
    judge_network,
    printable,
    span,
)
from distributed_training.registry.service import MAX_BODY

REPORT = NetworkReport(
    phase="waiting",
    outer_step=7,
    loss=3.25,
    losses={"8 pages of the data": 3.25},
    next_report=900.0,
    next_round=600.0,
    least=2,
    good_rounds=7,
    rounds=(RoundReport(6, 40, 8.5, (1, 2), 10**6),),
    members=(MemberReport(1, "alive", 30, 0.5), MemberReport(2, "alive", 90, 0.25)),
)
ADAPTER = TypeAdapter(NetworkReport)
FAULTS = [TOO_FEW, GATE, "SOMETHING_NEW"]
SILENT = (MemberReport(1, "alive", 30, 0.5), MemberReport(2, "silent", None, 0.0, "it sleeps"))


def failed(fault: str, count: int = 1, detail: str = "") -> dict[str, Any]:
    return {"rounds": (RoundReport(7, 5, 9.0, (), 0, fault, detail),), "failed_rounds": count}


def oracle(report: NetworkReport | None, age: float, listened: float) -> tuple[str, str]:
    """The table of the module, word by word."""
    if report is None:
        return "not yet begun", "idle"
    alive = len([m for m in report.members if m.answer == "alive"])
    last = report.rounds[-1].fault if report.rounds else ""
    table = [
        (report.phase == "finished", "finished", "idle"),
        (report.phase == "stopped", "stopped", "idle"),
        (age > report.next_report >= listened, "waiting for the validator", "wait"),
        (age > report.next_report, "validator silent", "bad"),
        (report.reason != "", "held up", "bad"),
        (report.phase == "starting", "starting", "wait"),
        (alive < report.least, "waiting for members", "wait"),
        (report.failed_rounds > 0 and last == GATE, "gate", "bad"),
        (report.failed_rounds > 1, "rounds fail", "bad"),
        (report.failed_rounds == 1, "last round failed", "wait"),
        (report.good_rounds == 0, "first round to come", "wait"),
        (True, "training", "good"),
    ]
    return next((word, kind) for holds, word, kind in table if holds)


def draw(rng: random.Random) -> NetworkReport:
    answers = ("alive", "alive", "alive", "silent", "new")
    rounds = [
        RoundReport(n, 5, 9.0, (1,), 10, rng.choice(["", rng.choice(FAULTS)])) for n in range(3)
    ]
    return replace(
        REPORT,
        phase=rng.choice(
            ["starting", "waiting", "waiting", "round", "round", "stopped", "finished"]
        ),
        reason=rng.choice(["", "", "", "the global bucket does not answer"]),
        next_round=rng.choice([None, 0.0, 600.0]),
        least=rng.choice([1, 2, 3]),
        good_rounds=rng.choice([0, 7]),
        failed_rounds=rng.choice([0, 0, 1, 2, 9]),
        rounds=tuple(rounds[: rng.randrange(4)]),
        members=tuple(
            MemberReport(uid, rng.choice(answers), None, 0.0) for uid in range(rng.randrange(6))
        ),
    )


def test_the_verdict_is_the_tables() -> None:
    rng, seen = random.Random(44), set()
    for _ in range(4000):
        report = rng.choice([None, *[draw(rng)] * 30])
        listened = rng.choice([1.0, 800.0, 5000.0])
        age = rng.choice([0.0, 899.0, 901.0, 4000.0])
        found = judge_network(report, 1.7e9, age=age, listened=listened)
        assert found[::2] == oracle(report, age, listened), (report, age, listened)
        assert len(found.words) < 1000 and "\n" not in found.words and "None" not in found.words
        seen.add(found.word)
    assert len(seen) == 13, seen


@pytest.mark.parametrize(
    ("report", "age", "words"),
    [
        (REPORT, 60.0, "2 of 2 members at work at outer step 7; the next round is in 9 min"),
        (REPORT, 700.0, "the next round is due"),
        (replace(REPORT, phase="round"), 5.0, "a round is under way, 2023-11-14 22:13 UTC"),
        (replace(REPORT, members=()), 0.0, "no miner has joined yet"),
        (replace(REPORT, members=SILENT), 0.0, "takes 2, and 1 of 2 answer; silent: uid 2;"),
        (
            replace(REPORT, **failed(GATE)),
            0.0,
            "so the close has moved; outer step 7 s",
        ),
        (
            replace(REPORT, **failed(TOO_FEW, 3, "1 accepted of 2")),
            0.0,
            "3 in a row: too few uploads could be merged, so the close has moved (1 accepted of 2)",
        ),
        (replace(REPORT, **failed("SOMETHING_NEW")), 0.0, "the cause is not known here"),
        (REPORT, 7200.0, "its last report is of 2023-11-14 22:13 UTC, 2 h 0 min ago"),
    ],
)
def test_the_words_name_the_cause(report: NetworkReport, age: float, words: str) -> None:
    assert words in judge_network(report, 1.7e9, age=age, listened=1e6).words


def test_no_word_of_a_member_changes_the_verdict() -> None:
    """A cause may hold its words, and the detail of a round."""
    rng = random.Random(1)
    for _ in range(300):
        report = draw(rng)
        words = "".join(map(chr, rng.choices(range(1, 0x500), k=LONGEST_CAUSE)))
        members = tuple(m._replace(cause=words, uploaded=rng.randrange(99)) for m in report.members)
        rounds = tuple(r._replace(detail=words) for r in report.rounds)
        lying = replace(report, members=members, rounds=rounds)
        assert judge_network(lying, 0.0)[::2] == judge_network(report, 0.0)[::2]


def test_the_longest_report_is_one_that_a_registry_takes() -> None:
    cause = printable('"\\é\n' * 100, LONGEST_CAUSE)
    member = MemberReport(4095, "silent", 10**8, 0.123456)
    longest = replace(
        REPORT,
        losses={printable(f'{i}{"<" * 200}', 100): 12.345678901234 for i in range(MOST_DOMAINS)},
        rounds=(
            RoundReport(10**9, 10**8, 12345.6, (4095,) * 64, 10**15, GATE, cause * 2),
        ) * MOST_ROUNDS,
        members=(member._replace(cause=cause),) * MOST_CAUSES + (member,) * (4096 - MOST_CAUSES),
    )  # fmt: skip
    body = json.dumps({"report": asdict(longest)})
    assert len(body) < MAX_BODY
    assert ADAPTER.validate_json(json.dumps(asdict(longest))) == longest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("phase", "training"),
        ("loss", float("nan")),
        ("loss", -1.0),
        ("outer_step", -1),
        ("losses", {"x" * 101: 1.0}),
        ("losses", {str(i): 1.0 for i in range(MOST_DOMAINS + 1)}),
        ("losses", {"text": float("inf")}),
        ("next_report", float("nan")),
        ("least", 0),
        ("reason", "x" * (LONGEST_TEXT + 1)),
        ("rounds", [REPORT.rounds[0]] * (MOST_ROUNDS + 1)),
        ("rounds", [REPORT.rounds[0]._replace(participants=(1,) * 65)]),
        ("rounds", [REPORT.rounds[0]._replace(fault="<b>")]),
        ("members", [REPORT.members[0]] * 4097),
        ("members", [REPORT.members[0]._replace(uid=4096)]),
        ("members", [REPORT.members[0]._replace(answer="well")]),
        ("members", [REPORT.members[0]._replace(cause="x" * (LONGEST_CAUSE + 1))]),
    ],
)
def test_a_report_beyond_its_bounds_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValidationError):
        ADAPTER.validate_python({**asdict(REPORT), field: value})


def test_times_and_texts_for_people() -> None:
    assert [span(s) for s in (-1, 90, 600, 9000, 1e6)] == ["0 s", "90 s", "10 min", "2 h 30 min",
                                                          "11 days"]  # fmt: skip
    assert printable("a\n\u202eb\x00 é", 99) == "a ?b? ?" and printable("abcdef", 5) == "ab..."
