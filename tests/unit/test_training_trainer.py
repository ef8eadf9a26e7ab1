"""Test one rank in this process: steps, skips, retries, copies and checkpoints."""

from __future__ import annotations

import errno
import json
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from distributed_training.common.files import json_line
from distributed_training.protocol.types import Progress
from distributed_training.training import checkpoint, copies, sharding
from distributed_training.training.checkpoint import Checkpointer
from distributed_training.training.collectives import Layout
from distributed_training.training.inner_optimizer import Schedule
from distributed_training.training.model import blocks_of, hf_config
from distributed_training.training.trainer import Trainer
from testbed.first_weights import draw
from tests.tools.mutations import mutated
from tests.tools.training_world import (
    SEQUENCE,
    same,
    save_checkpoint,
    sequences,
    tiny,
    train,
    trainer,
    whole_weights,
)

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("process_group")]


def full_disk(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def losses(made: Trainer, first: int = 0, last: int = 4) -> list[float]:
    return [r.loss for r in train(made, first, last)]


def assert_trains_as(made: Trainer, other: Trainer) -> list[Any]:
    """Train both for three steps; return the reports of ``made``, which must be equal."""
    reports, expected = train(made, 0, 3), train(other, 0, 3)
    assert [r.loss for r in reports] == pytest.approx([r.loss for r in expected], abs=2e-5)
    norms = [r.grad_norm for r in expected]
    assert [r.grad_norm for r in reports] == pytest.approx(norms, rel=1e-4)
    return reports


def half_a_step(made: Trainer, step: int) -> None:
    for part in sequences(step)[:4].split(2):
        made.add_micro_batch(part)


def other_half(made: Trainer, step: int) -> Any:
    """Train on the second half of a step; return the step's report."""
    for part in sequences(step)[4:].split(2):
        report = made.add_micro_batch(part)
    assert report is not None
    return report


def plain_model(made: Trainer) -> Any:
    """Return the transformers model with the weights of ``made``, without FSDP."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_config(hf_config(tiny())).float()
    names = [name for name, _ in made.schema]
    plain.load_state_dict(dict(zip(names, whole_weights(made), strict=True)))
    return plain


def test_loss_and_gradient_equal_plain_torchs() -> None:
    made = trainer(gradient_clip=0.0)
    plain = plain_model(made)
    ids = sequences(0)
    expected = plain(input_ids=ids, labels=ids).loss
    expected.backward()
    square = sum(float(p.grad.double().square().sum()) for p in plain.parameters())
    report = train(made, 0, 1)[0]
    assert report.loss == pytest.approx(float(expected), rel=1e-5)
    assert report.grad_norm == pytest.approx(square**0.5, rel=1e-4)
    optimizer = torch.optim.AdamW(
        plain.parameters(), lr=report.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    optimizer.step()
    for (name, p), ours in zip(plain.named_parameters(), whole_weights(made), strict=True):
        assert torch.allclose(p, ours, atol=2e-5), name
    assert (report.tokens, report.samples, report.micro_batches) == (8 * 32, 8, 4)
    assert report.mfu is None and report.gpu_memory_gb is None  # there is no GPU


def test_a_large_gradient_is_clipped_as_torch_clips_it() -> None:
    made = trainer()  # training.gradient_clip 1
    made.sharded.shards[-1].local.mul_(30)  # scale the head, so that the loss is far too high
    made.drop_step()
    plain, ids = plain_model(made), sequences(0)
    plain(input_ids=ids, labels=ids).loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    report = train(made, 0, 1)[0]
    assert report.grad_norm == pytest.approx(norm, rel=1e-4) and norm > 2
    # Compare the first moment, a tenth of the gradient: AdamW's step hardly depends on its length.
    for (name, p), moment in zip(
        plain.named_parameters(), made.optimizer.state["exp_avg"], strict=True
    ):
        assert torch.allclose(p.grad / 10, moment, atol=1e-7), name


def test_bf16_computation_learns_about_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "compute_dtype", lambda *_: (torch.bfloat16, ""))
    low = trainer()
    monkeypatch.undo()
    assert losses(low, 0, 6) == pytest.approx(losses(trainer(), 0, 6), abs=0.02)
    assert all(item.local.dtype == torch.float32 for item in low.sharded.shards)


def test_nan_steps_are_skipped_counted_and_ask_for_a_roll_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer()
    keeper = Checkpointer(trainer=made, folder=tmp_path)
    train(made, 0, 2)
    save_checkpoint(keeper, Progress(0, 2, 2))
    good = whole_weights(made)
    made.sharded.shards[-1].local[0] = float("nan")
    made.drop_step()
    before = made.optimizer.step_count
    for n in range(1, 4):
        report = train(made, 2, 3)[0]
        assert report.skipped and report.inner_step == 2 and report.grad_norm is None
        assert made.skipped_in_a_row == n and made.wants_roll_back == (n == 3)
    assert made.optimizer.step_count == before
    normal = made.schedule.rate(2)
    restored = keeper.roll_back()
    assert restored is not None and restored[0].inner_step == 2
    assert not made.wants_roll_back
    assert same(good, whole_weights(made))
    report = train(made, 2, 3)[0]
    assert not report.skipped and report.learning_rate == pytest.approx(normal / 2)
    assert "learning rate is halved for 50 inner steps" in caplog.text


def test_a_step_of_finite_loss_and_infinite_gradient_is_skipped() -> None:
    made = trainer()
    mlp: Any = blocks_of(made.sharded.model)[0].mlp
    real = mlp.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden * 1.0
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * math.inf)
        return real(hidden)

    mlp.forward = forward
    (report,) = train(made, 0, 1)
    assert math.isfinite(report.loss) and report.skipped and report.grad_norm is None


class _FailingBackward(torch.autograd.Function):
    """The identity, whose backward first calls ``before``, which may raise."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, before: Callable[[], None]) -> torch.Tensor:
        ctx.before = before
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.before()
        return gradient, None


def fail_in_a_backward(made: Trainer, at: int, error: Exception) -> None:
    """Raise ``error`` in the ``at``-th backward, in the layer whose backward comes last.

    By then FSDP has begun the backward of every layer. A hook on the loss would run too early.
    """
    seen = [0]

    def before() -> None:
        seen[0] += 1
        if seen[0] == at:
            raise error

    mlp: Any = blocks_of(made.sharded.model)[0].mlp
    real = mlp.forward
    mlp.forward = lambda hidden: real(_FailingBackward.apply(hidden, before))


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("wrap", ["block", "root"])
@pytest.mark.parametrize("at", [1, 3, 4])
def test_out_of_memory_halves_the_micro_batch_of_the_same_step(
    at: int, wrap: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer(wrap=wrap)
    fail_in_a_backward(made, at, OUT_OF_MEMORY)
    reports = assert_trains_as(made, trainer(wrap=wrap))
    assert all(float(v.abs().max()) > 0 for v in made.optimizer.state["exp_avg_sq"])
    assert "retried with 1 instead of 2 sequences" in reports[0].note
    assert reports[0].samples == 8 and reports[1].note == ""
    assert sum("retried" in r.message for r in caplog.records) == 1


def test_a_size_of_auto_that_runs_out_in_its_backward_leaves_nothing_behind() -> None:
    made = trainer()
    fail_in_a_backward(made, 1, OUT_OF_MEMORY)
    with pytest.raises(torch.OutOfMemoryError):
        made.step.seconds_per_sequence(2, SEQUENCE)
    assert_trains_as(made, trainer())


def test_a_parameter_without_a_gradient_ends_the_miner_instead_of_learning() -> None:
    made = trainer()
    dropped = made.sharded.shards[3]
    real = made.step.gradients

    def gradients() -> list[torch.Tensor]:
        dropped.dtensor.grad = None
        return real()

    made.step.gradients = gradients
    before = whole_weights(made)
    with pytest.raises(RuntimeError, match=f"{dropped.name} has no gradient after the last"):
        train(made, 0, 1)
    assert same(before, whole_weights(made))


def test_the_end_of_the_schedule_is_warned_of_once_and_steps_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = trainer(total_steps=10)
    reports = train(made, 0, 8)
    assert not caplog.records
    reports += train(made, 8, 14)
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "Inner step 9 of training.total_steps 10" in line and "at 10 % of its peak" in line
    shares = [r.learning_rate_share for r in reports]
    assert shares[2] == 1.0 and shares[8:] == [0.1] * 6
    assert all(r.learning_rate == pytest.approx(2e-4) for r in reports[8:])
    again = trainer(total_steps=10)  # a restart warns again
    again.total_inner_steps = 20
    train(again, 0, 1)
    assert len(caplog.records) == 2


@pytest.mark.parametrize("where", ["forward", "backward", "auto"])
def test_a_failing_compiler_is_announced_and_training_continues(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.exc import Unsupported

    said: list[str] = []
    made = trainer()
    made.step.say, made.step.compiled = said.append, True
    real, seen = made.sharded.root.forward, [0]

    def forward(ids: torch.Tensor) -> Any:
        seen[0] += 1
        if seen[0] == 2:
            raise Unsupported("no such graph")
        return real(ids)

    if where == "forward":
        monkeypatch.setattr(made.sharded.root, "forward", forward)
    else:
        fail_in_a_backward(made, 2, Unsupported("no such graph"))
    if where == "auto":
        assert made.step.seconds_per_sequence(2, SEQUENCE) > 0 and not made.step.compiled
    assert losses(made) == pytest.approx(losses(trainer()), abs=2e-5)
    assert len(said) == 1 and "torch.compile: off from now on" in said[0]


def test_wrong_micro_batch_shape_is_refused() -> None:
    made = trainer()
    with pytest.raises(ValueError, match="expected"):
        made.add_micro_batch(sequences(0)[:3])


@pytest.mark.parametrize(
    ("flag", "value", "kept"),
    [
        ("sequence_length", SEQUENCE // 2, 0),
        ("local_batch_size_train", 1, 0),
        ("local_batch_size_train_effective", 4, 0),  # two micro-batches are a whole step now
        ("local_batch_size_train_effective", 6, 2),
    ],
)
def test_micro_batches_of_another_step_are_dropped_at_a_restart(
    flag: str, value: int, kept: int, tmp_path: Path
) -> None:
    made = trainer()
    half_a_step(made, 0)
    keeper = Checkpointer(trainer=made, folder=tmp_path)
    save_checkpoint(keeper, Progress(0, 0, 0))
    other = trainer(**{flag: value})
    keeper = Checkpointer(trainer=other, folder=tmp_path)
    assert keeper.restore() is not None
    assert len(other.step.batches) == kept
    assert keeper.exact == bool(kept), "or their data counts as trained on"


def test_checkpoint_in_mid_step_resumes_to_the_bit(tmp_path: Path) -> None:
    made = trainer()
    train(made, 0, 2)
    made.begin_epoch(1)
    train(made, 2, 3)
    half_a_step(made, 3)
    keeper = Checkpointer(trainer=made, folder=tmp_path / "checkpoints")
    save_checkpoint(keeper, Progress(1, 1, 3), {"cursor": 3})
    other = trainer(seed=5)
    restored = Checkpointer(trainer=other, folder=tmp_path / "checkpoints").restore()
    assert restored == (Progress(1, 1, 3), {"cursor": 3})
    assert (other.outer_step, other.inner_step, other.total_inner_steps) == (1, 1, 3)
    assert len(other.step.batches) == 2
    ends = []
    for m in (made, other):
        loss = other_half(m, 3).loss
        ends.append((loss, [whole_weights(m), m.outer.epoch_start]))
    assert ends[0][0] == ends[1][0]
    assert all(map(same, ends[0][1], ends[1][1]))


class Skipping(Schedule):
    """The schedule of a later version, with another scalar in its state."""

    skipped = 3

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.skipped = state["skipped"]


def test_a_scalar_that_a_component_adds_survives_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, again = trainer(), trainer()

    def passed_on(writer: Schedule, reader: Schedule) -> str:
        """Return the lines about a checkpoint that one version wrote and another reads."""
        caplog.clear()
        made.schedule, again.schedule = writer, reader
        save_checkpoint(Checkpointer(trainer=made, folder=tmp_path), Progress())
        Checkpointer(trainer=again, folder=tmp_path).restore()
        return "".join(r.message for r in caplog.records if "skipped" in r.message)

    caplog.set_level(logging.INFO)
    earlier, added, found = Schedule(1e-3, 2, 8), *(Skipping(1e-3, 2, 8) for _ in range(2))
    added.skipped, added.factor = 7, 0.5
    assert passed_on(added, found) == ""
    assert (found.skipped, found.factor) == (7, 0.5)
    assert "this version does not know" in passed_on(added, earlier) and earlier.factor == 0.5
    found = Skipping(1e-3, 2, 8)
    assert "was written without" in passed_on(earlier, found) and found.skipped == 3


def test_no_two_components_have_one_key() -> None:
    made = trainer()
    keys = [*made.optimizer.state_dict(), *made.outer.state_dict(), "weights", "schedule"]
    assert len(keys) == len(set(keys)) and set(keys) < set(made.state_dict())


@pytest.mark.parametrize("change", ["step", "weights", "moments"])
def test_copies_of_another_boundary_wait_until_these_are_written(
    change: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer()
    train(made, 0, 1)
    first = made.copier.copy_boundary()
    assert made.copier.copy_boundary() is first
    if change == "step":
        train(made, 1, 2)
    elif change == "weights":
        draw(made)
    else:
        made.optimizer.reset()
    first.writers.append(threading.Event())
    made.copier._patience = 0.01
    second = made.copier.copy_boundary()
    assert second is not first and "still being written" in caplog.text
    caplog.clear()
    made.copier._patience = 30.0
    train(made, 2, 3)
    done = threading.Event()
    second.writers.extend((done, first.writers[0]))
    first.writers[0].set()
    threading.Timer(0.2, done.set).start()  # let the writer finish
    third = made.copier.copy_boundary()
    assert done.is_set() and not caplog.records and third not in (first, second)


@pytest.mark.parametrize("what", ["memory", "gpu"])
def test_copies_that_cannot_begin_leave_none_that_was_not_copied_and_nobody_waiting(
    what: str,
) -> None:
    made = trainer()
    train(made, 0, 1)
    held = made.copier.copy_boundary(())
    real, room = (
        torch.empty,
        [len(made.schema) + 1],
    )  # memory ends at the second tensor of the state

    def empty(*shape: Any, **how: Any) -> torch.Tensor:
        room[0] -= 1
        if room[0] < 0:
            raise MemoryError("no memory is left")
        return real(*shape, **how)

    fails = mock.patch.object(torch, "empty", empty)
    if what == "gpu":
        fails = mock.patch.object(copies, "queued", side_effect=RuntimeError("CUDA error"))
    with fails, pytest.raises((MemoryError, RuntimeError), match=r"no memory|CUDA error"):
        made.copier.copy_boundary()
    assert not held.state, "it would count as copied"
    made.copier.finish()
    assert made.copier.copy_boundary() is held
    held.wait()
    for name, rows in made.optimizer.state.items():
        assert same(rows, held.state[name])


def test_damaged_checkpoints_are_skipped_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert Checkpointer(trainer=trainer(), folder=tmp_path).restore() is None
    keeper, _ = checkpoints(tmp_path, 3)
    newest, middle, _ = sorted(tmp_path.glob("checkpoint-*"), reverse=True)
    (newest / "rank-0.json").unlink()  # as if killed while writing
    data = bytearray((middle / "rank-0.safetensors").read_bytes())
    data[-3] ^= 1
    (middle / "rank-0.safetensors").write_bytes(data)
    restored = keeper.restore()
    assert restored is not None and restored[0].inner_step == 1
    lines = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert any("incomplete" in x and newest.name in x for x in lines)
    assert any("damaged" in x and middle.name in x for x in lines)


def checkpoints(folder: Path, count: int, *, keep: int = 3) -> tuple[Checkpointer, Path]:
    """Train and save ``count`` times; return the keeper and the newest manifest's path."""
    made = trainer()
    keeper = Checkpointer(trainer=made, folder=folder, keep=keep)
    for step in range(count):
        train(made, step, step + 1)
        save_checkpoint(keeper, Progress(0, step + 1, step + 1))
    return keeper, max(folder.glob("checkpoint-*")) / "rank-0.json"


def test_checkpoint_with_any_damaged_manifest_gives_way_to_the_one_before(tmp_path: Path) -> None:
    keeper, path = checkpoints(tmp_path, 2)
    honest = path.read_bytes()
    whole = json.loads(honest)

    for case in range(40):
        content = mutated(random.Random(case), "rank-0.json", honest)
        path.write_bytes(content)
        restored = keeper.restore()
        assert restored is not None
        same = json.dumps(json_line(content), sort_keys=True) == json.dumps(whole, sort_keys=True)
        assert restored[0].inner_step == (
            2 if same else 1
        )  # compare as JSON, since False == 0 in Python


def test_the_last_checkpoints_and_their_epochs_stay_also_when_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer()
    keeper = Checkpointer(trainer=made, folder=tmp_path, keep=2)
    real = time.time_ns
    for epoch in range(4):
        monkeypatch.setattr(time, "time_ns", lambda epoch=epoch: real() - epoch * 10**13)
        made.begin_epoch(epoch)
        save_checkpoint(keeper, Progress(epoch, 0, 0))
        restored = keeper.restore()
        assert restored is not None and restored[0].outer_step == epoch
    assert len(list(tmp_path.glob("checkpoint-*"))) == len(list(tmp_path.glob("epoch-*"))) == 2


def test_a_checkpoint_that_could_not_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer()
    keeper = Checkpointer(trainer=made, folder=tmp_path)
    save_checkpoint(keeper, Progress(0, 1, 1))
    real = checkpoint.write_json

    monkeypatch.setattr(checkpoint, "write_json", full_disk)
    for _ in range(3):
        save_checkpoint(keeper, Progress(0, 2, 2))
        assert keeper.last_error is not None and "No space left" in keeper.last_error
    assert sum(len(list(f.iterdir())) for f in tmp_path.glob("checkpoint-*")) == 2
    monkeypatch.setattr(checkpoint, "write_json", real)
    save_checkpoint(keeper, Progress(0, 3, 3))
    assert [len(list(f.iterdir())) for f in tmp_path.glob("checkpoint-*")] == [2, 2]


def test_a_checkpoint_is_kept_when_older_ones_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer()
    keeper = Checkpointer(trainer=made, folder=tmp_path, keep=1)

    stale = OSError(errno.ESTALE, "Stale file handle")
    monkeypatch.setattr(Checkpointer, "_prune", mock.Mock(side_effect=stale))
    save_checkpoint(keeper, Progress(0, 1, 1))
    assert keeper.last_error is None and "were not deleted" in caplog.text
    restored = keeper.restore()
    assert restored is not None and restored[0].inner_step == 1


def test_training_waits_seconds_for_the_file_of_a_rank_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_HURRIED", 0.1)
    keeper, _ = checkpoints(tmp_path, 1, keep=1)
    keeper._layout, keeper._timeout = Layout(0, 2), 30.0
    train(keeper._trainer, 1, 2)
    began = time.monotonic()
    save_checkpoint(keeper, Progress(0, 2, 2))
    assert time.monotonic() - began < 20
    restored = keeper.restore()
    assert restored is not None and restored[0].inner_step == 1, "nothing older was deleted"


def test_a_roll_back_that_did_not_help_goes_further_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper, _ = checkpoints(tmp_path, 2, keep=2)
    assert [(keeper.roll_back() or [None])[0] for _ in range(3)] == [
        Progress(0, 2, 2),
        Progress(0, 1, 1),
        Progress(0, 1, 1),  # there is no older one
    ]
    train(keeper._trainer, 1, 2)  # after a good step, the newest is tried first again
    restored = keeper.roll_back()
    assert restored is not None and restored[0].inner_step == 2
    assert "Rolled back to the last good checkpoint" in caplog.text
    assert "No usable checkpoint" not in caplog.text
    keeper._folder = tmp_path / "empty"
    assert keeper.roll_back() is None and "No usable checkpoint" in caplog.text


@pytest.mark.parametrize("name", ["file", "x" * 300])
def test_an_unwritable_folder_is_one_line_and_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Try a folder whose path is a file, and one whose name is too long for any disk."""
    made = trainer()
    (tmp_path / "file").write_text("in the way")
    keeper = Checkpointer(trainer=made, folder=tmp_path / name)
    save_checkpoint(keeper, Progress())
    assert keeper.last_error is not None and "check the disk" in caplog.text
    assert losses(made, 0, 1)


def test_profile_writes_a_trace_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = trainer(profile_steps=1)
    train(made, 0, 5)
    trace = json.loads((tmp_path / "profile-rank-0.json").read_text())
    assert any("mm" in event.get("name", "") for event in trace["traceEvents"])
