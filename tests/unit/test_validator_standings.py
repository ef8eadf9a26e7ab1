"""Test how scores follow from the judge's measurements, and what a restart keeps of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distributed_training.chain.base import Neuron
from distributed_training.protocol.scoring import RESET, ScoreBoard, moving_average
from distributed_training.scoring.evaluator import Comparison, Evaluation
from distributed_training.validator.global_state import GlobalStateError
from distributed_training.validator.standings import Standings
from tests.tools.store_world import StoreWorld
from tests.tools.validator_world import one_thread  # noqa: F401

pytestmark = pytest.mark.timeout(120)
BOTH = [Neuron(1, "a"), Neuron(2, "b")]


def compared(before: float, after: float) -> Comparison:
    return Comparison((5120,), (before, before), (after, after))


def judged(uid: int, random: float, assigned: float | None = None) -> Evaluation:
    return Evaluation(
        uid, 0, compared(3.0, random), None if assigned is None else compared(3.0, assigned)
    )


def after_a_round() -> Standings:
    ledger = Standings()
    ledger.sync(BOTH)
    for entry in ledger.entries.values():
        entry.all_reduce = 1
    return ledger


def test_scores_are_those_of_the_score_board() -> None:
    ledger, board = after_a_round(), ScoreBoard([1, 2])
    reset = Evaluation(2, 0, cause="BAD_GRADIENT", reason="it is damaged")
    published = {1: 0.0, 2: 0.0}
    for second in (judged(2, 2.5, 2.6), reset, judged(2, 2.9)):
        given = [judged(1, 2.0, 1.5), second]
        valid = {1: True, 2: second.ok}
        scores = ledger.judged(given, valid)
        board.update_round(
            random={j.uid: j.random.losses if j.random else RESET for j in given},
            assigned={j.uid: j.assigned.losses if j.assigned else RESET for j in given},
            unknown={j.uid for j in given if j.ok and j.assigned is None},
        )
        totals = board.total_scores(all_reduce={1: 1, 2: 1}, repo_valid=valid)
        for uid in (1, 2):
            published[uid] = moving_average(published[uid], totals[uid])
            assert scores[uid]["total"] == totals[uid]
            assert scores[uid]["published"] == published[uid]
            assert (scores[uid]["mu"], scores[uid]["sigma"]) == board.rating(uid)
            assert scores[uid]["assigned"] == board.assigned_score(uid)
    assert ledger.weights() == {uid: score for uid, score in published.items() if score > 0}
    assert ledger.entries[2].cause == "its uploads have gained nothing so far"


def test_a_uid_with_a_new_hotkey_starts_afresh() -> None:
    ledger = after_a_round()
    ledger.sync([BOTH[0], Neuron(2, "new")])
    assert (ledger.entries[1].all_reduce, ledger.entries[2].all_reduce) == (1, 0)


def test_a_uid_that_is_hidden_for_a_while_keeps_its_standing() -> None:
    ledger = after_a_round()
    ledger.board.update_round(random={1: (3.0, 2.0), 2: (3.0, 2.5)}, assigned={})
    ledger.judged([], {1: True, 2: True})
    weights, rating = ledger.weights(), ledger.board.rating(2)
    assert set(weights) == {1, 2} and ledger.board.rating(1)[0] > rating[0]
    ledger.sync(BOTH[:1])
    assert set(ledger.weights()) == set(ledger.judged([], {1: True})) == {1}
    ledger.sync(BOTH)
    assert ledger.weights()[2] == weights[2] and ledger.board.rating(2) == rating


def test_a_ledger_is_read_again_also_with_fields_of_another_edition(tmp_path: Path) -> None:
    path, ledger = tmp_path / "ledger.json", after_a_round()
    ledger.judged([judged(1, 2.0, 1.5), judged(2, 2.5, 2.6)], {1: True, 2: True})
    ledger.save(path)
    assert Standings.load(path) == ledger
    content = json.loads(path.read_text()) | {"last_round_block": 4}
    for entry in content["entries"].values():
        entry["ends"] = {"count": 1}
    path.write_text(json.dumps(content))
    found = Standings.load(path)
    assert found == ledger and found.board.state() == ledger.board.state()


def test_a_damaged_ledger_is_said_and_nothing_is_overwritten(tmp_path: Path) -> None:
    world = StoreWorld(tmp_path)
    path = tmp_path / "validator" / "ledger.json"
    for text in ("", "{", "[]", "{}", '{"entries": {"1": {"x": 1}}}'):
        path.write_text(text)
        with pytest.raises(GlobalStateError, match="remove it"):
            world.restart()
        assert path.read_text() == text


def test_scores_stand_in_the_manifest_and_weights_are_set_by_them(tmp_path: Path) -> None:
    world = StoreWorld(tmp_path)
    manifest = world.round()
    scores = world.events.of("scores")[-1]["scores"]
    assert {str(uid): score for uid, score in manifest.scores.items()} == {
        uid: figures["published"] for uid, figures in scores.items()
    }
    assert max(manifest.scores.values()) > 0
    world.validator._weights_due = lambda: True
    world.tick()
    weights = world.events.of("weights")[-1]["weights"]
    assert weights == {str(uid): score for uid, score in manifest.scores.items() if score > 0}
