"""Error feedback: the public miner's way bit for bit, and the length and time of uploads."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distributed_training.protocol import gradients
from distributed_training.protocol.types import Progress
from distributed_training.training.checkpoint import Checkpointer
from distributed_training.training.error_feedback import Direction
from distributed_training.training.local_evaluation import LARGEST, SMALLEST, Found, best_factor
from distributed_training.training.trainer import Trainer
from tests.tools.training_world import save_checkpoint, sequences, take_snapshot, train, trainer

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("process_group")]


def publish(made: Trainer, folder: Path, step: int) -> dict[str, Tensor]:
    handle = take_snapshot(made, folder, Progress(0, step, step, [1]))
    made.check_gradient(handle)
    return torch.load(folder / "gradients.pt", weights_only=True)


class PublicMiner:
    """EF <- 0.999 EF + lr g; send top-k(EF); EF <- EF - sent (protocol page, section 4)."""

    def __init__(self, *, use_dct: bool = False) -> None:
        self.kept: dict[str, Tensor] = {}
        self.use_dct = use_dct

    def publish(self, made: Trainer, start: list[Tensor]) -> dict[str, Tensor]:
        sent = {}
        for item, before in zip(made.sharded.shards, start, strict=True):
            kept = self.kept.get(item.name, torch.zeros_like(before))
            kept = 0.999 * kept + 0.8 * (before - item.local)
            code = gradients.encode(kept, use_dct=self.use_dct)
            sent[item.name] = gradients.decode(*code, item.shape, use_dct=self.use_dct)
            self.kept[item.name] = kept - sent[item.name]
        return sent


@pytest.mark.parametrize(("mode", "dct"), [("best", False), ("upload", False), ("upload", True)])
def test_without_a_preview_the_publication_is_the_public_miners(
    mode: str, dct: bool, tmp_path: Path
) -> None:
    made, public = trainer(error_feedback=mode, use_dct=dct), PublicMiner(use_dct=dct)
    start = [rows.clone() for _, _, rows in made.outer.epoch_start_rows()]
    for step in range(1, 4):
        train(made, step, step + 1)
        expected = public.publish(made, start)
        found = publish(made, tmp_path / str(step), step)
        for item, kept in zip(made.sharded.shards, made.feedback.residual or [], strict=True):
            code = found[item.name + "idxs"], found[item.name + "vals"]
            decoded = gradients.decode(*code, item.shape, use_dct=dct)
            torch.testing.assert_close(decoded, expected[item.name], rtol=1e-5, atol=1e-9)
            torch.testing.assert_close(kept, public.kept[item.name], rtol=1e-4, atol=1e-8)


def test_curved_sends_the_entries_whose_change_weighs_most(tmp_path: Path) -> None:
    made = trainer(topk_compression=2)
    train(made, 0, 2)
    handle = take_snapshot(made, tmp_path, Progress(0, 2, 2, [1]))
    assert list(handle.codes) == ["upload", "off", "curved"]
    moments, others = made.optimizer.state["exp_avg_sq"], 0
    for i, (name, _, start) in enumerate(made.outer.epoch_start_rows()):
        gradient = 0.8 * (start - made.sharded.shards[i].local)
        code, off = handle.codes["curved"][i], handle.codes["off"][i]
        assert code is not None and off is not None
        if gradient.dim() == 1:  # as it is without
            assert all(torch.equal(a, b) for a, b in zip(code, off, strict=True)), name
            continue
        weight = gradient.abs() * moments[i].sqrt()
        where = weight.topk(2, dim=1).indices.sort(dim=1).values
        assert torch.equal(code[0].long(), where), name
        torch.testing.assert_close(code[1], gradient.gather(1, where))
        others += int((code[0] != off[0]).sum())
    assert others > 100, "entries that the largest values leave out"


@pytest.mark.slow
def test_best_publishes_the_direction_that_lowers_the_loss_most(tmp_path: Path) -> None:
    made = {mode: trainer(error_feedback=mode) for mode in ("best", "upload", "off")}
    plain = trainer(error_feedback="upload", step_length="plain")
    deltas: dict[str, list[float]] = {mode: [] for mode in (*made, "plain")}
    for step in range(1, 4):
        for mode, each in (*made.items(), ("plain", plain)):
            each.hold_back(sequences(99, count=4))
            train(each, step, step + 1)
            handle = take_snapshot(each, tmp_path / f"{mode}-{step}", Progress(0, step, step, [1]))
            delta = each.check_gradient(handle)
            assert delta is not None
            deltas[mode].append(delta)
    for best, upload, off, as_it_is in zip(*(deltas[m] for m in deltas), strict=True):
        assert best <= min(upload, off) < as_it_is


def test_residual_in_a_checkpoint_does_not_change_with_the_next_upload(tmp_path: Path) -> None:
    made = trainer()
    train(made, 0, 1)
    publish(made, tmp_path / "one", 1)
    kept = made.feedback.residual
    assert kept is not None
    before = [rows.clone() for rows in kept]
    keeper = Checkpointer(trainer=made, folder=tmp_path / "checkpoints")
    save_checkpoint(keeper, Progress(0, 1, 1, []))
    train(made, 1, 2)
    publish(made, tmp_path / "two", 2)
    assert all(torch.equal(a, b) for a, b in zip(before, kept, strict=True))
    other = trainer(seed=3)
    assert Checkpointer(trainer=other, folder=tmp_path / "checkpoints").restore() is not None
    restored = other.feedback.residual
    assert all(torch.equal(a, b) for a, b in zip(before, restored or [], strict=True))


def test_two_publications_under_way_advance_in_turn(tmp_path: Path) -> None:
    made, one_by_one = trainer(error_feedback="upload"), trainer(error_feedback="upload")
    feedback = made.feedback
    start = [rows for _, _, rows in made.outer.epoch_start_rows()]
    waiting = []
    for step in range(2):
        train(made, step, step + 1)
        waiting += feedback.directions(start, made.outer.current(), 0.8)
        train(one_by_one, step, step + 1)
        publish(one_by_one, tmp_path / str(step), step)
    for direction in waiting:  # the second was fixed before the first was encoded
        direction.encode()
    for a, b in zip(feedback.residual or [], one_by_one.feedback.residual or [], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("fails", ["before", "gradients", "after the replacement", "after"])
def test_a_gradient_that_was_half_replaced_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    from distributed_training.training import snapshot

    made = trainer()
    made.hold_back(sequences(99, count=4))
    train(made, 0, 1)
    handle = take_snapshot(made, tmp_path, Progress(0, 1, 1, [1]))
    gradient, done = tmp_path / "gradients.pt", tmp_path / "rank-0.done.json"
    before = gradient.read_bytes(), json.loads(done.read_text())
    writes, write_json, write_gradients = [], snapshot.write_json, snapshot._write_gradients

    def json_or_full(path: Path, content: object) -> None:
        writes.append(path)
        if len(writes) == {"before": 1, "after": 2}.get(fails):
            raise OSError(28, "No space left on device")
        write_json(path, content)

    def gradients_or_full(folder: Path, content: dict[str, Tensor]) -> str | None:
        if fails == "gradients":
            raise OSError(28, "No space left on device")
        bad = write_gradients(folder, content)
        if fails == "after the replacement":  # the sync of the folder, say
            raise OSError(5, "Input/output error")
        return bad

    monkeypatch.setattr(snapshot, "write_json", json_or_full)
    monkeypatch.setattr(snapshot, "_write_gradients", gradients_or_full)
    delta = made.check_gradient(handle)
    assert delta is not None and delta < 0
    assert "No space left" in caplog.text or "Input/output" in caplog.text
    now = gradient.read_bytes(), json.loads(done.read_text())
    if fails in ("before", "gradients"):
        assert now == before
    else:
        (size,) = [f["size"] for f in now[1]["files"] if f["name"] == "gradients.pt"]
        assert now[0] != before[0] and size == -1  # which the uploader refuses


def test_a_snapshot_under_way_keeps_the_residual_of_a_roll_back() -> None:
    made = trainer(error_feedback="upload")
    train(made, 0, 1)
    feedback, start = made.feedback, made.outer.epoch_start
    assert start is not None
    restored = [torch.full_like(rows, 7.0) for rows in start]

    def publish_in_part() -> Direction:
        (direction,) = feedback.directions(start, made.outer.current(), 0.8)
        return direction

    given_up = publish_in_part()
    feedback.load_state_dict({"residual": restored})
    given_up.encode()
    assert feedback.residual is restored and all(bool((r == 7.0).all()) for r in restored)
    publish_in_part().encode()  # one that begins afterwards counts
    assert feedback.residual is not restored


def test_nan_leaves_the_residual_with_the_next_upload(tmp_path: Path) -> None:
    made, fresh = (trainer(error_feedback="upload") for _ in range(2))
    for each in (made, fresh):
        train(each, 0, 1)
    spoilt = [torch.zeros_like(rows) for _, _, rows in made.outer.epoch_start_rows()]
    for rows in spoilt:
        rows.view(-1)[0] = float("nan")
    made.feedback.load_state_dict({"residual": spoilt})
    ours, theirs = publish(made, tmp_path / "made", 1), publish(fresh, tmp_path / "fresh", 1)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if name != "metadata")
    assert all(bool(rows.isfinite().all()) for rows in made.feedback.residual or [])


def test_a_preview_chooses_a_shorter_step_where_the_plain_one_gives_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(error_feedback="off")
    made.hold_back(sequences(99, count=4))
    train(made, 0, 1)
    handle = take_snapshot(made, tmp_path, Progress(0, 1, 1, [1]))
    losses = iter([3.0, math.nan, math.nan, math.nan, 2.5, *[2.75] * 20])
    monkeypatch.setattr(made.gradient_check, "_mean", lambda *_: next(losses))
    assert made.check_gradient(handle) == -0.5


def test_a_preview_measures_on_the_present_held_out_text(tmp_path: Path) -> None:
    """The loss without a gradient is measured again for other sequences of the same outer step."""

    def delta(made: Trainer, held: int, folder: str) -> float:
        made.hold_back(sequences(held, count=4))
        handle = take_snapshot(made, tmp_path / folder, Progress(0, 1, 1, [1]))
        found = made.check_gradient(handle)
        assert found is not None
        return found

    made, other = (trainer(step_length="plain", error_feedback="off") for _ in range(2))
    for each in (made, other):
        train(each, 0, 1)
    one, two = delta(made, 99, "one"), delta(other, 77, "two")
    assert one != pytest.approx(two, abs=1e-5)
    assert delta(made, 77, "three") == pytest.approx(two, abs=1e-7)


@given(
    best=st.floats(0.25, 30),
    curvature=st.floats(1e-3, 1e3),
    first=st.one_of(st.just(1.0), st.floats(0.25, 30)),
)
def test_nearly_all_of_the_best_step_is_found_with_few_trials(
    best: float, curvature: float, first: float
) -> None:
    # A loss along a step: quadratic near its best factor, 0 at factor 0.
    found = best_factor(lambda factor: curvature * ((factor / best - 1) ** 2 - 1), first=first)
    assert found.loss <= -0.93 * curvature
    assert found.evaluations <= 6 + abs(math.log2(best / first))


@given(
    values=st.lists(
        st.one_of(st.floats(-10, 10), st.sampled_from([math.nan, math.inf])), min_size=20
    ),
    first=st.floats(1e-6, 1e6),
)
def test_any_losses_give_a_bounded_factor_that_was_tried(values: list[float], first: float) -> None:
    tried: dict[float, float] = {}

    def loss(factor: float) -> float:
        tried[factor] = values[len(tried) % len(values)]
        return tried[factor]

    found = best_factor(loss, first=first)
    assert SMALLEST <= found.factor <= LARGEST
    finite = [v for v in tried.values() if math.isfinite(v)]
    if finite:
        assert found.loss == min(finite) == tried[found.factor]
    else:
        assert found == Found(1.0, math.inf, len(tried))
