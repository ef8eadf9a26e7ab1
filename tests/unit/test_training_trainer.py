"""One rank in this process: steps, skips, retries, snapshots, checkpoints."""

from __future__ import annotations

import errno
import json
import logging
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

sys.path.insert(0, str(Path(__file__).parent.parent))
from device_stand_in import OnDevice
from training_world import (
    SEQUENCE,
    evaluate,
    sequences,
    tiny,
    train,
    trainer,
    whole_weights,
)

from distributed_training.common.files import json_line
from distributed_training.protocol.types import Progress
from distributed_training.training import checkpoint
from distributed_training.training.checkpoint import Checkpointer
from distributed_training.training.micro_batch_size import find_micro_batch
from distributed_training.training.outer import OuterOptimizerState, save_outer_optimizer
from distributed_training.training.trainer import Trainer
from tests.hostile_files import damage, other_values

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("process_group")]


def losses(made: Trainer, first: int = 0, last: int = 4) -> list[float]:
    return [r.loss for r in train(made, first, last)]


def test_loss_and_gradient_are_those_of_plain_torch() -> None:
    from transformers import AutoModelForCausalLM

    from distributed_training.training.model import hf_config

    made = trainer(gradient_clip=0.0)
    plain = AutoModelForCausalLM.from_config(hf_config(tiny())).float()
    weights = whole_weights(made)
    assert weights is not None
    names = [n for n, _ in made.schema]
    plain.load_state_dict(dict(zip(names, weights, strict=True)))
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
    after = whole_weights(made)
    assert after is not None
    for (name, p), ours in zip(plain.named_parameters(), after, strict=True):
        assert torch.allclose(p, ours, atol=2e-5), name
    assert (report.tokens, report.samples, report.micro_batches) == (8 * 32, 8, 4)
    assert report.mfu is None and report.gpu_memory_gb is None  # a CPU has neither


@pytest.mark.parametrize("wrap", ["root", "block"])
def test_one_reduction_per_group_and_step(wrap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    calls: list[int] = []
    real = _fsdp_param_group.foreach_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(_fsdp_param_group, "foreach_reduce", counted)
    made = trainer(wrap=wrap)
    groups = 1 if wrap == "root" else 3
    train(made, 0, 1)
    assert len(calls) == groups
    train(made, 1, 3)
    assert len(calls) == 3 * groups
    often = trainer(wrap=wrap, gradient_sync="every")
    calls.clear()
    train(often, 0, 1)
    assert len(calls) == 4 * groups  # the control: four micro-batches


@pytest.mark.parametrize(
    "changes",
    [
        {"wrap": "block"},
        {"wrap": "block", "keep_unsharded": "off"},
        {"gradient_sync": "every"},
        {"activation_checkpointing": "full", "wrap": "block"},
        {"activation_checkpointing": "selective"},
        {"local_batch_size_train": 4},
    ],
    ids=str,
)
def test_how_a_step_is_carried_out_does_not_change_it(changes: dict[str, Any]) -> None:
    assert losses(trainer(**changes)) == pytest.approx(losses(trainer()), abs=2e-5)


def test_offloaded_optimizer_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    from distributed_training.training import inner_optimizer

    monkeypatch.setattr(inner_optimizer, "OFFLOAD_BUCKET", 5000)  # several buckets
    here, there = trainer(), trainer(offload_optimizer="on")
    assert len(there.optimizer._buckets) > 2
    assert losses(here) == losses(there)
    for a, b in zip(here.optimizer.exp_avg_sq, there.optimizer.exp_avg_sq, strict=True):
        assert torch.equal(a, b)


def test_bf16_computation_learns_about_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from distributed_training.training import plan

    monkeypatch.setattr(plan, "_cpu_has_bf16", lambda: True)
    low = trainer(precision="bf16")
    assert losses(low, 0, 6) == pytest.approx(losses(trainer(), 0, 6), abs=0.02)
    assert all(item.local.dtype == torch.float32 for item in low.sharded.shards)


def test_nan_steps_are_skipped_counted_and_ask_for_a_roll_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer()
    keeper = Checkpointer(trainer=made, folder=tmp_path)
    train(made, 0, 2)
    keeper.save({}, Progress(0, 2, 2, [1]))
    keeper.wait()
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
    assert all(
        torch.equal(a, b) for a, b in zip(good or [], whole_weights(made) or [], strict=True)
    )
    report = train(made, 2, 3)[0]
    assert not report.skipped and report.learning_rate == pytest.approx(normal / 2)
    assert "learning rate is halved for 50 inner steps" in caplog.text


def out_of_memory_once(made: Trainer, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ``at``-th forward runs out of memory in its backward."""
    real, seen = made.sharded.root.forward, [0]

    def forward(ids: torch.Tensor) -> torch.Tensor:
        seen[0] += 1
        loss = real(ids)
        if seen[0] == at:
            loss.register_hook(_raise_out_of_memory)
        return loss

    monkeypatch.setattr(made.sharded.root, "forward", forward)


def _raise_out_of_memory(_: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("at", [1, 3, 4])
def test_out_of_memory_halves_the_micro_batch_of_the_same_step(
    at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer()
    out_of_memory_once(made, at, monkeypatch)
    reports = train(made, 0, 3)
    assert [r.loss for r in reports] == pytest.approx(losses(trainer(), 0, 3), abs=2e-5)
    assert "retried with 1 instead of 2 sequences" in reports[0].note
    assert reports[0].samples == 8 and reports[1].note == ""
    assert sum("retried" in r.message for r in caplog.records) == 1


def test_out_of_memory_with_one_sequence_ends_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(local_batch_size_train=1)
    out_of_memory_once(made, 2, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError, match=r"--neuron\.activation_checkpointing full"):
        train(made, 0, 1)


def test_a_failing_compiler_is_announced_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.exc import Unsupported

    said: list[str] = []
    made = trainer()
    made.step.say, made.step.compiled = said.append, True
    real, seen = made.sharded.root.forward, [0]

    def forward(ids: torch.Tensor) -> torch.Tensor:
        seen[0] += 1
        if seen[0] == 2:
            raise Unsupported("no such graph")
        return real(ids)

    monkeypatch.setattr(made.sharded.root, "forward", forward)
    assert losses(made) == pytest.approx(losses(trainer()), abs=2e-5)
    assert len(said) == 1 and "torch.compile: off from here" in said[0]


def test_auto_finds_a_micro_batch_that_trains() -> None:
    made = trainer(local_batch_size_train="auto")
    assert made.micro_batch_size in (1, 2, 4, 8)
    assert made.batch_plan.effective == 8
    assert losses(made) == pytest.approx(losses(trainer()), abs=2e-5)


def test_auto_stops_where_memory_ends_or_speed_does() -> None:
    cuda_like = torch.device("meta")  # no memory to ask about

    def measure(limit: int, best: int) -> Any:
        def seconds(n: int) -> float:
            if n > limit:
                raise torch.OutOfMemoryError("no")
            return 1.0 / min(n, best)

        return seconds

    said: list[str] = []
    options: dict[str, Any] = {"device": cuda_like, "vote": lambda p: p, "say": said.append}
    assert find_micro_batch(measure(4, 99), largest=16, **options) == 4
    assert find_micro_batch(measure(99, 2), largest=16, **options) == 2
    assert find_micro_batch(measure(99, 99), largest=8, **options) == 8
    assert "does not fit" in said[0] and "not faster" in said[1]


def test_a_round_in_mid_step_drops_only_what_it_must() -> None:
    made, same = trainer(), trainer()
    for m in (made, same):
        train(m, 0, 2)
        for part in sequences(2)[:4].split(2):
            m.add_micro_batch(part, data_wait_seconds=0.0)
    buffers = [torch.zeros(s) for _, s in made.schema]
    made.write_pseudo_gradient(buffers)
    made.prepare_outer_step(buffers)
    made.roll_back_outer_step()
    assert evaluate(made, sequences(9)) > 0  # also leaves the step under way alone
    ends = []
    for m in (made, same):
        for part in sequences(2)[4:].split(2):
            report = m.add_micro_batch(part, data_wait_seconds=0.0)
        assert report is not None
        ends.append((report.loss, report.grad_norm))
    assert ends[0] == ends[1]
    made.add_micro_batch(sequences(3)[:2], data_wait_seconds=0.0)
    made.prepare_outer_step(buffers)
    made.commit_outer_step()
    assert made.pending_micro_batches == 0 and (made.outer_step, made.inner_step) == (1, 0)


def test_wrong_micro_batch_shape_is_refused() -> None:
    made = trainer()
    with pytest.raises(ValueError, match="expected"):
        made.add_micro_batch(sequences(0)[:3], data_wait_seconds=0.0)


def test_snapshot_loads_in_transformers_and_its_optimizer_with_weights_only(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from transformers import AutoModelForCausalLM

    made = trainer(model=tiny() | {"last_allreduce_block": 5})
    train(made, 0, 2)
    weights = whole_weights(made)
    handle = made.snapshot(tmp_path, progress=Progress(0, 2, 2, [4, 6]), block=6, last_loss=3.5)
    handle.wait(timedelta(seconds=60))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).float()
    state = loaded.state_dict()
    assert weights is not None
    for (name, _), mine in zip(made.schema, weights, strict=True):
        assert torch.equal(state[name], mine)
    ids = sequences(50)
    assert float(loaded(input_ids=ids, labels=ids).loss) == pytest.approx(
        evaluate(made, ids), rel=1e-5
    )
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["block_list"] == [4, 6] and config["inner_step"] == 2
    assert config["last_allreduce_block"] == 5
    allowed = [DTensorSpec, DTensor, DeviceMesh, Shard, TensorMeta]
    with torch.serialization.safe_globals(allowed):
        inner = torch.load(tmp_path / "inner_optimizer.rank0001-of-1.pt", weights_only=True)
    assert set(inner) == {"optimizer_state_dict", "learning_rate", "scheduler_state", "epoch"}
    first = made.schema[0][0]
    entry = inner["optimizer_state_dict"]["state"][first]
    assert isinstance(entry["exp_avg"], DTensor) and float(entry["step"]) == 2.0
    assert torch.equal(entry["exp_avg"].to_local(), made.optimizer.exp_avg[0])
    assert inner["optimizer_state_dict"]["param_groups"][0]["params"] == [n for n, _ in made.schema]


def test_weights_of_another_model_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    made = trainer()
    before = whole_weights(made)
    assert before is not None
    good = {n: t.contiguous() for (n, _), t in zip(made.schema, before, strict=True)}
    save_file(good, tmp_path / "good.safetensors")
    other = trainer(seed=1)
    other.load_weights(tmp_path / "good.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(before, whole_weights(other) or [], strict=True))
    name = made.schema[0][0]
    for broken in ({k: v for k, v in good.items() if k != name}, good | {name: torch.zeros(3)},
                   good | {"extra": torch.zeros(1)}):  # fmt: skip
        save_file(broken, tmp_path / "bad.safetensors")
        with pytest.raises(ValueError, match="was not loaded"):
            made.load_weights(tmp_path / "bad.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="was not loaded"):
        made.load_weights(tmp_path / "bad.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(before, whole_weights(made) or [], strict=True))


def test_a_global_state_of_which_one_file_is_anothers_changes_nothing(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    made = trainer()
    train(made, 0, 1)
    before, start = whole_weights(made), made.outer.epoch_start
    momentum = [torch.ones(shape) for _, shape in made.schema]
    save_outer_optimizer(tmp_path / "good.pt", OuterOptimizerState(momentum, 0.5, 0.8, 4))
    save_outer_optimizer(tmp_path / "bad.pt", OuterOptimizerState(momentum[1:], 0.5, 0.8, 4))
    good = {n: torch.zeros(shape) for n, shape in made.schema}
    save_file(good, tmp_path / "good.safetensors")
    save_file(good | {"extra": torch.zeros(1)}, tmp_path / "bad.safetensors")
    for weights, outer in (("bad", "good"), ("good", "bad")):
        files = tmp_path / f"{weights}.safetensors", tmp_path / f"{outer}.pt"
        with pytest.raises(ValueError, match="not loaded"):
            made.load_global(*files, 4)
        with pytest.raises(ValueError, match="not loaded"):
            made.rebase(*files)
        assert made.outer.momentum is None and made.outer.epoch_start is start
        assert (made.outer.learning_rate, made.outer.mu) == (0.8, 0.9)
        assert (made.outer_step, made.inner_step) == (0, 1)
        now = whole_weights(made)
        assert all(torch.equal(a, b) for a, b in zip(before or [], now or [], strict=True))
    made.load_global(tmp_path / "good.safetensors", tmp_path / "good.pt", 4)
    assert (made.outer_step, made.inner_step, made.outer.learning_rate) == (4, 0, 0.5)
    assert not any(t.any() for t in whole_weights(made) or [])


def test_micro_batches_of_another_shape_are_dropped_at_a_restart(tmp_path: Path) -> None:
    made = trainer()
    made.add_micro_batch(sequences(0)[:2])
    keeper = Checkpointer(trainer=made, folder=tmp_path)
    keeper.save({}, Progress(0, 0, 0, []))
    keeper.wait()
    shorter = trainer(sequence_length=SEQUENCE // 2)
    assert Checkpointer(trainer=shorter, folder=tmp_path).restore() is not None
    assert shorter.pending_micro_batches == 0


def test_checkpoint_in_mid_step_resumes_to_the_bit(tmp_path: Path) -> None:
    made = trainer()
    buffers = [torch.zeros(s) for _, s in made.schema]
    train(made, 0, 2)
    made.write_pseudo_gradient(buffers)
    made.prepare_outer_step(buffers)
    made.commit_outer_step()
    published = made.snapshot(
        tmp_path / "snapshot", progress=Progress(1, 0, 2, [8]), block=8, last_loss=1.0
    )
    published.wait()  # from here on there is error feedback
    train(made, 2, 3)
    for part in sequences(3)[:4].split(2):
        made.add_micro_batch(part, data_wait_seconds=0.0)
    keeper = Checkpointer(trainer=made, folder=tmp_path / "checkpoints")
    keeper.save({"cursor": 3}, Progress(1, 1, 3, [8]))
    keeper.wait()
    other = trainer(seed=5)
    restored = Checkpointer(trainer=other, folder=tmp_path / "checkpoints").restore()
    assert restored == (Progress(1, 1, 3, [8]), {"cursor": 3})
    assert (other.outer_step, other.inner_step, other.total_inner_steps) == (1, 1, 3)
    assert other.pending_micro_batches == 2
    ends = []
    for m in (made, other):
        for part in sequences(3)[4:].split(2):
            report = m.add_micro_batch(part, data_wait_seconds=0.0)
        assert report is not None
        m.write_pseudo_gradient(buffers)
        m.prepare_outer_step(buffers)
        m.commit_outer_step()
        ends.append((report.loss, whole_weights(m), m.outer.feedback.residual, m.outer.momentum))
    assert ends[0][0] == ends[1][0]
    for kind in (1, 2, 3):
        for a, b in zip(ends[0][kind], ends[1][kind], strict=True):  # type: ignore[arg-type]
            assert torch.equal(a, b)


def test_checkpoint_in_mid_step_of_batches_that_lie_on_a_device(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="numpy"):
        OnDevice(sequences(0)).numpy()  # the control: a write of this would fail
    made = trainer()
    batches = list(sequences(0).split(2))
    for batch in (OnDevice(batches[0]), OnDevice(batches[1])):
        made.add_micro_batch(batch)
    keeper = Checkpointer(trainer=made, folder=tmp_path)
    for expected in (2, 3):  # the second time: two from the checkpoint and a new one
        keeper.save({}, Progress(0, 0, 0, []))
        keeper.wait()
        assert keeper.last_error is None
        made = trainer()
        keeper = Checkpointer(trainer=made, folder=tmp_path)
        assert keeper.restore() is not None and made.pending_micro_batches == expected
        pending = made.step.pending()
        assert pending is not None and torch.equal(pending, torch.stack(batches[:expected]))
        made.add_micro_batch(OnDevice(batches[expected]))
    assert made.inner_step == 1


def test_damaged_checkpoints_are_skipped_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer()
    keeper = Checkpointer(trainer=made, folder=tmp_path, keep=3)
    assert keeper.restore() is None
    for step in range(3):
        train(made, step, step + 1)
        keeper.save({}, Progress(0, step + 1, step + 1, []))
        keeper.wait()
    newest, middle, _ = sorted(tmp_path.glob("checkpoint-*"), reverse=True)
    (newest / "rank-0.json").unlink()  # killed while writing
    data = bytearray((middle / "rank-0.safetensors").read_bytes())
    data[-3] ^= 1
    (middle / "rank-0.safetensors").write_bytes(data)
    restored = keeper.restore()
    assert restored is not None and restored[0].inner_step == 1
    lines = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert any("incomplete" in x and newest.name in x for x in lines)
    assert any("damaged" in x and middle.name in x for x in lines)


def test_whatever_damage_a_manifest_has_the_one_before_is_taken(tmp_path: Path) -> None:
    made = trainer()
    keeper = Checkpointer(trainer=made, folder=tmp_path, keep=3)
    for step in range(2):
        train(made, step, step + 1)
        keeper.save({}, Progress(0, step + 1, step + 1, []))
        keeper.wait()
    path = max(tmp_path.glob("checkpoint-*")) / "rank-0.json"
    honest = path.read_bytes()
    whole = json.loads(honest)

    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(other_values(honest) | damage(honest))
    def check(content: bytes) -> None:
        path.write_bytes(content)
        restored = keeper.restore()
        assert restored is not None
        honest = json.dumps(json_line(content), sort_keys=True) == json.dumps(whole, sort_keys=True)
        assert restored[0].inner_step == (2 if honest else 1)  # False is 0 to Python, not to JSON

    check()
    del whole["manifest_sha256"]  # of a miner from before manifests had one
    path.write_text(json.dumps(whole | {"format": 1}))
    restored = keeper.restore()
    assert restored is not None and restored[0].inner_step == 2


def test_only_the_last_checkpoints_and_their_epochs_stay(tmp_path: Path) -> None:
    made = trainer()
    keeper = Checkpointer(trainer=made, folder=tmp_path, keep=2)
    for epoch in range(4):
        made.begin_epoch(epoch)
        keeper.save({}, Progress(epoch, 0, 0, []))
        keeper.wait()
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2
    assert len(list(tmp_path.glob("epoch-*"))) == 2
    restored = keeper.restore()
    assert restored is not None and restored[0].outer_step == 3


def test_a_clock_that_was_set_back_makes_no_checkpoint_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer()
    keeper = Checkpointer(trainer=made, folder=tmp_path, keep=2)
    real = time.time_ns
    for epoch in range(4):
        monkeypatch.setattr(time, "time_ns", lambda epoch=epoch: real() - epoch * 10**13)
        made.begin_epoch(epoch)
        keeper.save({}, Progress(epoch, 0, 0, []))
        keeper.wait()
        restored = keeper.restore()
        assert restored is not None and restored[0].outer_step == epoch


def test_a_checkpoint_that_could_not_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer()
    keeper = Checkpointer(trainer=made, folder=tmp_path)
    keeper.save({}, Progress(0, 1, 1, []))
    keeper.wait()
    real = checkpoint.write_json

    def full(path: Path, content: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_json", full)
    for _ in range(3):
        keeper.save({}, Progress(0, 2, 2, []))
        keeper.wait()
        assert keeper.last_error is not None and "No space left" in keeper.last_error
    assert sum(len(list(f.iterdir())) for f in tmp_path.glob("checkpoint-*")) == 2
    monkeypatch.setattr(checkpoint, "write_json", real)
    keeper.save({}, Progress(0, 3, 3, []))
    keeper.wait()
    assert [len(list(f.iterdir())) for f in tmp_path.glob("checkpoint-*")] == [2, 2]


def test_a_disk_that_is_away_costs_the_checkpoint_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = Checkpointer(trainer=trainer(), folder=tmp_path)

    def away(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoint, "write_json", away)
    monkeypatch.setattr(Path, "unlink", away)
    keeper.save({}, Progress(0, 1, 1, []))
    keeper.wait()
    assert "was not written" in caplog.text and "Input/output error" in caplog.text


def test_a_checkpoint_is_kept_when_older_ones_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer()
    keeper = Checkpointer(trainer=made, folder=tmp_path, keep=1)

    def stale(self: Checkpointer, newest: str) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Checkpointer, "_prune", stale)
    keeper.save({}, Progress(0, 1, 1, []))
    keeper.wait()
    assert keeper.last_error is None and "were not deleted" in caplog.text
    restored = keeper.restore()
    assert restored is not None and restored[0].inner_step == 1


def test_a_roll_back_that_did_not_help_goes_further_back(tmp_path: Path) -> None:
    made = trainer()
    keeper = Checkpointer(trainer=made, folder=tmp_path, keep=2)
    for step in range(2):
        train(made, step, step + 1)
        keeper.save({}, Progress(0, step + 1, step + 1, []))
        keeper.wait()
    assert [(keeper.roll_back() or [None])[0] for _ in range(3)] == [
        Progress(0, 2, 2, []),
        Progress(0, 1, 1, []),
        Progress(0, 1, 1, []),  # there is none before
    ]
    train(made, 1, 2)  # a step that works: the newest is tried first again
    restored = keeper.roll_back()
    assert restored is not None and restored[0].inner_step == 2


def test_unwritable_folder_is_one_line_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer()
    (tmp_path / "file").write_text("in the way")
    keeper = Checkpointer(trainer=made, folder=tmp_path / "file")
    keeper.save({}, Progress())
    keeper.wait()
    assert keeper.last_error is not None and "check the disk" in caplog.text
    assert losses(made, 0, 1)


def test_profile_writes_a_trace_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = trainer(profile_steps=1, profile_start=1)
    train(made, 0, 3)
    trace = json.loads((tmp_path / "profile-rank-0.json").read_text())
    assert any("mm" in event.get("name", "") for event in trace["traceEvents"])


def test_snapshot_into_an_impossible_folder_is_one_line(tmp_path: Path) -> None:
    made = trainer()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="cannot hold a snapshot"):
        made.snapshot(tmp_path / "file" / "x", progress=Progress(), block=1, last_loss=1.0)
