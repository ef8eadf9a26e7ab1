"""Test how the validator judges uploads: repository, resets, arithmetic, scores and weights."""

from __future__ import annotations

import io
import math
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed_training.chain.base import Neuron
from distributed_training.node.start import Stopped
from distributed_training.protocol import gradients as codec
from distributed_training.protocol.gradients import GradientPayload
from distributed_training.protocol.scoring import MAX_MISSED_SWEEPS
from distributed_training.protocol.synapses import IsAliveReply
from distributed_training.scoring import upload
from distributed_training.scoring.evaluator import EvaluationModel, Evaluator
from distributed_training.scoring.upload import Cause, DataUnavailable, inspect
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.errors import StoreError
from distributed_training.validator import scorer
from distributed_training.validator.rounds import Attendance
from distributed_training.validator.scorer import Ends, Reached, Standings
from tests.tools.validator_world import (  # noqa: F401
    LENGTH,
    MODEL_CONFIG,
    World,
    one_thread,
    pages,
    sequences,
    settings,
    trained,
)

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return trained(tmp_path, uids=(3, 17, 42))


def _scored(world: World) -> dict[int, dict[str, Any]]:
    return {e["uid"]: e for e in world.events.of("upload_scored")}


# --- judging ---


@pytest.mark.slow
def test_honest_uploads_lower_the_loss_and_harmful_ones_raise_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert world.validator.round()  # around random weights even a wrong direction helps
    world.train_and_publish()
    world.chain_ledger.advance(30)
    world.miners[42].publish(factor=-1.0)
    # The earliest block that may be drawn.
    monkeypatch.setattr(random.Random, "randrange", lambda self, start, *_: start)
    judgements = {j.uid: j for j in world.validator.score()}
    for uid in (3, 17):
        assert judgements[uid].ok
        for found in (judgements[uid].random, judgements[uid].assigned):
            before, after = found.losses
            assert after < before - 0.01
    before, after = judgements[42].random.losses
    assert after > before
    mu = {uid: world.validator.standings.board.rating(uid)[0] for uid in (3, 17, 42)}
    assert mu[42] < min(mu[3], mu[17])
    blocks = {e["random_block"] for e in _scored(world).values()}
    assert blocks == {world.chain.block() + 20}


def test_the_arithmetic_is_the_protocol_pages(world: World) -> None:
    """Written from the page: weights - outer_lr * 0.5 * decoded, loss over all predicted words."""
    from transformers import AutoModelForCausalLM
    from transformers.models.llama import LlamaConfig

    miner = world.miners[3]
    judgement = next(j for j in world.validator.score() if j.uid == 3)
    raw = torch.load(io.BytesIO(miner.bucket.objects["epoch-0/gradients.pt"][0]), weights_only=True)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**MODEL_CONFIG), dtype=torch.float32)

    def loss(batch: torch.Tensor) -> float:
        with torch.no_grad():
            return float(model(input_ids=batch, labels=batch).loss)

    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for (name, _), weight in zip(
            world.validator.state.schema, world.validator.state.weights, strict=True
        ):
            parameters[name].copy_(weight)
    on_random, on_assigned = (
        pages(3, *judgement.random.blocks),
        pages(3, *judgement.assigned.blocks),
    )
    before = loss(on_random), loss(on_assigned)
    with torch.no_grad():
        for name, parameter in parameters.items():
            decoded = codec.decode(raw[name + "idxs"], raw[name + "vals"], parameter.shape)
            parameter -= 0.8 * 0.5 * decoded
    assert judgement.assigned.blocks[0] in miner.blocks
    assert judgement.random.losses == pytest.approx((before[0], loss(on_random)), abs=1e-5)
    assert judgement.assigned.losses == pytest.approx((before[1], loss(on_assigned)), abs=1e-5)
    with pytest.raises(ValueError):
        world.model.loss(on_random[:0])


def test_reset_miner_ranks_last(world: World) -> None:
    world.miners[17].publish(factor=-0.01)  # does a little harm
    del world.miners[3].bucket.objects["epoch-0/config.json"]
    judgements = {j.uid: j for j in world.validator.score()}
    assert not judgements[3].ok and "block_list" in judgements[3].reason
    assert judgements[17].ok and judgements[42].ok
    assert _scored(world)[3]["ok"] is False and "random_before" not in _scored(world)[3]
    assert Cause[_scored(world)[3]["cause"]] is judgements[3].cause
    assert _scored(world)[17]["cause"] == ""
    entries, board = world.validator.standings.entries, world.validator.standings.board
    assert entries[3].repo_valid == 1 and board.assigned_score(3) == 0.0
    assert board.rating(3)[0] < board.rating(42)[0]


_THEIRS = [
    AssertionError("no dict"),
    RecursionError("deep"),
    SystemError("two\nlines"),
    KeyError(5),
]
_OURS = [MemoryError(), OSError(24, "Too many open files"), torch.OutOfMemoryError("of CUDA")]


def _failing(original: Any, error: Exception, of: Callable[..., bool]) -> Any:
    def instead(*args: Any, **kwargs: Any) -> Any:
        if of(*args, **kwargs):
            raise error
        return original(*args, **kwargs)

    return instead


@pytest.mark.parametrize("where", ["opened", "looked at", "read", "measured", "applied", "judged"])
def test_error_of_any_kind_in_a_scored_upload_costs_that_upload(
    world: World, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The others are judged in that pass; what this machine lacks costs no miner its score."""
    world.miners[17].publish(inner_step=77)
    mine = world.miners[17].bucket.objects["epoch-0/gradients.pt"][0]
    holder, name, of = {
        "opened": (world.validator._scorer, "open_bucket", lambda neuron: neuron.uid == 17),
        "looked at": (
            BucketReader,
            "metadata",
            lambda self, *_: self.store is world.miners[17].bucket,
        ),
        "read": (upload, "load_payload", lambda raw, *_: raw == mine),
        "measured": (world, "pages", lambda uid, block: uid == 17),
        "applied": (GradientPayload, "decode", lambda sent, *_: sent.metadata.inner_step == 77),
        "judged": (Evaluator, "judge", lambda self, one, *_, **__: one.uid == 17),
    }[where]
    original = getattr(holder, name)
    for error in [*_THEIRS, *_OURS]:
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, _failing(original, error, of), raising=False)
            judgements = {j.uid: j for j in world.validator.score()}
        assert judgements[3].ok and judgements[42].ok
        if where in ("opened", "looked at"):
            assert 17 not in judgements
            assert world.validator.standings.entries[17].repo_valid == 0
        elif error in _OURS or where == "measured":
            assert 17 not in judgements
        else:
            assert judgements[17].cause is Cause.BAD_GRADIENT
            assert type(error).__name__ in judgements[17].reason
            assert "\n" not in judgements[17].reason
    assert {j.uid for j in world.validator.score()} == {3, 17, 42}


def test_a_loss_that_is_not_finite_without_the_upload_is_not_its_fault(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = EvaluationModel.losses

    def losses(self: Any, text: torch.Tensor) -> tuple[float, ...]:
        return (
            (math.nan,)
            if text.equal(pages(17, world.miners[17].blocks[0]))
            else measured(self, text)
        )

    monkeypatch.setattr(EvaluationModel, "losses", losses)
    assert [j.uid for j in world.validator.score()] == [3, 42]


class Killed(BaseException):
    """End the process, as a signal does: nothing that it would still do is done."""


def _killed_over(world: World, uid: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Score until the process ends over that uid's upload; start again. Return who came before."""
    judged, judge = [], Evaluator.judge

    def dies(self: Any, one: Any, *args: Any, **kwargs: Any) -> Any:
        if one.uid == uid:
            raise Killed
        judged.append(one.uid)
        return judge(self, one, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Evaluator, "judge", dies)
        for _ in range(3):
            world.chain_ledger.advance(1)
            world.validator.score()
    world.closing.close()
    world.restart()
    world.start()
    return judged


def _pass(world: World, blocks: int = 1) -> list[int]:
    world.chain_ledger.advance(blocks)
    return [j.uid for j in world.validator.score() if j.ok]


def test_an_upload_that_ends_the_process_is_not_met_first_again(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert _killed_over(world, 17, monkeypatch) == [3]
    assert "of uid 17 (1. time)" in caplog.text
    assert _pass(world) == [3, 42] and _pass(world) == [17]  # it was a reboot
    assert sorted(_pass(world)) == [3, 17, 42]
    # It was none.
    _killed_over(world, 17, monkeypatch)
    assert sorted(_pass(world)) == [3, 42] == sorted(_pass(world))
    scored = [e for e in world.events.of("upload_scored") if e["uid"] == 17]
    assert scored and not any(e["ok"] for e in scored) and "ended 2 times" in scored[0]["reason"]


def test_uid_that_ends_processes_waits_twice_as_long_each_time() -> None:
    block = 1000
    for count, periods in ((1, 0), (2, 1), (3, 2), (4, 4), (40, 2**10)):
        ends = Ends(count, block)
        assert ends.refused_until(60) == block + 60 * periods
        # Whoever ends one each time it is read again is never forgotten.
        assert ends.forgotten_at(60) > ends.refused_until(60) or count == 40


@pytest.mark.parametrize("how", ["stopped", "no text", "an error"])
def test_a_process_that_ends_otherwise_blames_no_upload(
    world: World, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    error = {"stopped": Stopped(), "no text": DataUnavailable("rows"), "an error": KeyError(5)}[how]
    with monkeypatch.context() as patch, suppress(Stopped):
        patch.setattr(Evaluator, "judge", _failing(Evaluator.judge, error, lambda *_, **__: True))
        world.validator.score()
    world.validator._save()
    world.restart()
    assert all(entry.ends is None for entry in world.validator.standings.entries.values())


def test_inner_step_0_and_empty_buckets_are_not_judged(world: World) -> None:
    world.miners[3].publish(inner_step=0)
    world.miners[17].bucket.objects.clear()
    assert [j.uid for j in world.validator.score()] == [42]


# --- repositories ---


@pytest.mark.parametrize(("age", "valid"), [(4799.9, True), (4800.0, False)])
def test_the_age_limit_itself_is_too_old(
    world: World, monkeypatch: pytest.MonkeyPatch, age: float, valid: bool
) -> None:
    (neuron,) = [n for n in world.chain.neurons() if n.uid == 3]
    bucket = world.open_bucket(neuron)
    info = bucket.head("epoch-0/gradients.pt")
    assert info is not None
    monkeypatch.setattr(bucket, "head", lambda key: replace(info, age_seconds=age))
    limit = timedelta(seconds=4800)
    found = inspect(neuron, lambda n: bucket, outer_step=0, age_limit=limit)
    assert found.valid is valid and found.age == timedelta(seconds=age)


def test_an_upload_that_drips_for_ever_is_reset_and_the_others_are_judged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer, "_UPLOAD_PATIENCE", timedelta(seconds=0.5))
    ended = threading.Event()

    def drip(called: str, key: str) -> None:
        if called == "get_range":
            ended.wait(30)

    world.miners[17].bucket._before = drip
    judgements = {j.uid: j for j in world.validator.score()}
    ended.set()
    assert judgements[17].cause is Cause.TOO_SLOW and "0.5 s" in judgements[17].reason
    assert judgements[3].ok and judgements[42].ok


def test_an_invalid_repository_takes_the_whole_total(world: World) -> None:
    assert world.validator.round()
    world.train_and_publish()
    world.uncommit(3)
    world.chain_ledger.advance(40)
    world.validator.score()
    scores = world.events.of("scores")[-1]["scores"]
    assert scores["3"]["repo_valid"] == 0 and scores["3"]["total"] == 0.0
    assert scores["3"]["all_reduce"] == 1 and scores["17"]["total"] > 0


def test_failed_rounds_prolong_the_age_limit(world: World) -> None:
    world.miners[3].bucket.age(5000)
    world.validator.score()
    assert world.validator.standings.entries[3].repo_valid == 0
    world.validator.standings.failed_rounds = 1
    world.validator.score()
    assert world.validator.standings.entries[3].repo_valid == 1


def test_after_a_round_the_epoch_before_is_judged_for_half_a_period(world: World) -> None:
    assert world.validator.round()
    world.chain_ledger.advance(29)
    judgements = world.validator.score()
    assert {(j.uid, j.outer_step, j.ok) for j in judgements} == {
        (3, 0, True),
        (17, 0, True),
        (42, 0, True),
    }
    world.chain_ledger.advance(1)  # half of 60: now the new epoch's folders are looked at
    assert all(j.outer_step == 1 and not j.ok for j in world.validator.score())
    assert world.validator.standings.entries[3].repo_valid == 0


def test_weights_of_an_epoch_this_machine_has_no_copy_of_are_fetched(world: World) -> None:
    import shutil

    assert world.validator.round()
    shutil.rmtree(world.folder / "global" / "epoch-0")
    assert all(j.ok for j in world.validator.score())


# --- scores and weights ---


def test_scores_are_logged_and_weights_are_set(world: World) -> None:
    assert world.validator.round()
    world.validator.score()
    scores = world.events.of("scores")[-1]["scores"]
    assert set(scores) == {"3", "17", "42"}
    assert sum(s["total"] for s in scores.values()) <= 1.0 + 1e-9
    for uid, figures in scores.items():
        assert figures["published"] == pytest.approx(0.6 * figures["total"])
        assert figures["all_reduce"] == 1 and world.validator.standings.entries[int(uid)]
    world.chain_ledger.up = False  # a chain that refuses them does not stop the validator
    world.validator.tick()
    assert not world.events.of("weights")
    world.chain_ledger.up = True
    world.chain_ledger.advance(10)
    world.validator.tick()
    assert world.chain_ledger.weights(200) == pytest.approx(world.validator.standings.weights())
    assert world.events.of("weights")


@pytest.mark.parametrize("silent", ["a miner's bucket", "the global bucket", "the chain"])
def test_a_stop_does_not_wait_for_an_answer(world: World, silent: str) -> None:
    assert world.validator.round()
    world.validator.score()
    asked, over = threading.Event(), threading.Event()

    def hang(*_: Any) -> Any:
        asked.set()
        over.wait(60)
        raise StoreError("late")

    if silent == "the chain":
        world.chain.set_weights = hang
    else:
        world.validator._weights_at = world.chain.block()
        world.chain_ledger.advance(5)
        if silent == "the global bucket":
            world.publisher.outer_step = hang
        else:
            world.validator._scorer.open_bucket = hang
    runner = threading.Thread(target=world.validator.run, daemon=True)
    runner.start()
    assert asked.wait(30)
    world.stop.set()
    runner.join(20)
    assert not runner.is_alive() and world.kinds()[-1] == "stop"
    over.set()


@pytest.mark.parametrize("begins", ["before a pass", "in a pass", "in an upload"])
def test_an_outage_of_the_store_costs_no_miner_its_score(
    world: World, caplog: pytest.LogCaptureFixture, begins: str
) -> None:
    assert world.validator.round() and world.validator.score()
    before = world.validator.standings.weights()
    buckets = (world.bucket, *(miner.bucket for miner in world.miners.values()))
    scoring = world.validator._scorer

    def away(*_: Any, **__: Any) -> None:
        for bucket in buckets:
            bucket.down = True

    if begins == "before a pass":
        away()
        for miner in world.miners.values():
            miner.answers = False  # the machine's own link
    elif begins == "in a pass":
        world.validator._on_sweep = away  # type: ignore[method-assign]
    else:
        choose = scoring._choose
        scoring._choose = lambda *given: away() or choose(*given)  # type: ignore[method-assign]
    for _ in range(2 * MAX_MISSED_SWEEPS):
        for bucket in buckets:
            bucket.down = begins == "before a pass"
        assert world.validator.score() == []
    assert before and world.validator.standings.weights() == before
    assert all(e.missed_sweeps == 0 for e in world.validator.standings.entries.values())
    assert all(e["ok"] for e in world.events.of("upload_scored"))
    assert "no miner loses by it" in caplog.text


def test_a_full_disk_ends_neither_a_round_nor_a_pass(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(scorer, "write_json", full)
    assert world.validator.round() and world.validator.score()
    assert "No space left" in caplog.text and "free the disk of --neuron.run_folder" in caplog.text


BOTH = [Neuron(1, "a"), Neuron(2, "b")]


def after_a_round() -> Standings:
    ledger = Standings()
    ledger.sync(BOTH)
    ledger.reached = Reached(1, asked=[1, 2], good=[1, 2])
    ledger.published(1)
    return ledger


def test_more_than_ten_missed_sweeps_in_a_row_cost_the_score() -> None:
    ledger = after_a_round()
    one_is_away = Attendance(asked=(1, 2), alive=(2,))
    for _ in range(10):
        ledger.record_sweep(one_is_away, block=0, patience=60)
    assert ledger.judged([], {1: True, 2: True}, block=5)[1]["published"] > 0
    ledger.record_sweep(one_is_away, block=0, patience=60)
    assert ledger.judged([], {1: True, 2: True}, block=6)[1]["published"] == 0.0
    assert set(ledger.weights()) == {2}
    ledger.record_sweep(Attendance(asked=(1, 2), alive=(1,)), block=0, patience=60)
    assert ledger.entries[1].missed_sweeps == 0


def test_an_answer_from_another_outer_step_is_no_missed_sweep_for_a_round_period() -> None:
    ledger = after_a_round()
    reply = IsAliveReply(True, 1)
    elsewhere = Attendance((1, 2), (), answered={1: reply, 2: reply}, elsewhere={1: 1, 2: 1})
    for block in range(0, 65, 5):
        ledger.record_sweep(elsewhere, block=block, patience=60)
    ledger.judged([], {1: True, 2: True}, block=65)
    assert set(ledger.weights()) == {1, 2}
    for block in range(65, 120, 5):
        ledger.record_sweep(elsewhere, block=block, patience=60)
    ledger.judged([], {1: True, 2: True}, block=120)
    assert not ledger.weights()
    ledger.record_sweep(Attendance((1, 2), (1, 2)), block=120, patience=60)
    assert ledger.entries[1].missed_sweeps == 0 and ledger.entries[1].elsewhere_since is None


def test_miner_with_another_file_scores_zero_until_it_has_ours() -> None:
    ledger = after_a_round()
    ledger.judged([], {1: True, 2: True}, block=0)
    other = {1: IsAliveReply(True, 0, run_id="other")}
    found = Attendance((1, 2), (2,), answered=other, other_runs={1: "other"})
    ledger.record_sweep(found, block=0, patience=60)
    assert set(ledger.weights()) == {2}
    assert ledger.judged([], {1: True, 2: True}, block=5)[1]["published"] == 0.0
    ledger.record_sweep(Attendance((1, 2), (2,)), block=0, patience=60)  # it is silent: as before
    ledger.judged([], {1: True, 2: True}, block=5)
    assert set(ledger.weights()) == {2}
    ours = {1: IsAliveReply(True, 0, run_id="ours")}
    ledger.record_sweep(Attendance((1, 2), (1, 2), answered=ours), block=0, patience=60)
    ledger.judged([], {1: True, 2: True}, block=6)
    assert set(ledger.weights()) == {1, 2}


def test_a_uid_with_a_new_hotkey_starts_afresh() -> None:
    ledger = after_a_round()
    ledger.sync([BOTH[0], Neuron(2, "new")])
    assert (ledger.entries[1].all_reduce, ledger.entries[2].all_reduce) == (1, 0)


def test_a_uid_that_is_hidden_for_a_while_keeps_its_standing() -> None:
    ledger = after_a_round()
    ledger.board.update_round(random={1: (3.0, 2.0), 2: (3.0, 2.5)}, assigned={})
    ledger.judged([], {1: True, 2: True}, block=1)
    weights, rating = ledger.weights(), ledger.board.rating(2)
    assert set(weights) == {1, 2} and ledger.board.rating(1)[0] > rating[0]
    ledger.sync(BOTH[:1])
    assert set(ledger.weights()) == set(ledger.judged([], {1: True}, block=2)) == {1}
    ledger.sync(BOTH)
    assert ledger.weights()[2] == weights[2] and ledger.board.rating(2) == rating


def test_those_not_judged_for_longest_come_first(tmp_path: Path) -> None:
    world = trained(tmp_path, uids=(3, 17, 42), score_uids=2)
    assert [j.uid for j in world.validator.score()] == [3, 17]
    world.chain_ledger.advance(1)
    assert [j.uid for j in world.validator.score()] == [42, 3]


def test_text_that_cannot_be_had_holds_up_neither_the_others_nor_a_round(tmp_path: Path) -> None:
    world = trained(tmp_path, uids=(3, 17, 42), score_uids=2)

    def flaky(uid: int, block: int) -> torch.Tensor:
        if uid != 42:
            raise DataUnavailable("no rows")
        return pages(uid, block)

    world.pages = flaky
    world.validator._miners()
    board = world.validator.standings.board
    before = {uid: board.rating(uid) for uid in world.uids}
    assert world.validator.score() == []
    world.chain_ledger.advance(1)
    assert [j.uid for j in world.validator.score()] == [42]
    assert {uid: board.rating(uid) for uid in world.uids} == before
    asked = []

    def slow(uid: int, block: int) -> torch.Tensor:
        asked.append(uid)
        world.chain_ledger.advance(60)  # to the round
        raise DataUnavailable("no rows")

    world.pages = slow
    assert world.validator.score() == [] and len(asked) == 1


def test_a_round_that_falls_due_ends_a_pass_early(world: World) -> None:
    world.chain_ledger.advance(40)
    for miner in world.miners.values():
        miner.blocks = [world.chain.block()]
        miner.publish()
    original = world.pages

    def slow(uid: int, block: int) -> torch.Tensor:
        world.chain_ledger.advance(10)  # two evaluations take the clock to the round
        return original(uid, block)

    world.pages = slow
    assert [j.uid for j in world.validator.score()] == [3]
    assert len(world.events.of("scores")) == 1
