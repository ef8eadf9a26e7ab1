"""Test the code that training needs for a GPU, as far as that is possible without one."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch.utils._python_dispatch import TorchDispatchMode

from distributed_training.common.llama import named_config
from distributed_training.config.settings import TrainingSettings
from distributed_training.protocol.types import Progress
from distributed_training.training import collectives, copies
from distributed_training.training.checkpoint import Checkpointer
from distributed_training.training.collectives import HostCopies
from distributed_training.training.memory_plan import MemoryPlan, plan_memory
from distributed_training.training.micro_batches import KnownSize, find_micro_batch, sizes_to_try
from distributed_training.training.model import fused_logit_gradient
from distributed_training.training.sharding import set_up_gpu
from distributed_training.training.throughput import StepMeter
from tests.tools.outer_steps import header, sign
from tests.tools.training_world import (
    SEQUENCE,
    finished,
    same,
    save_checkpoint,
    sequences,
    train,
    trainer,
)

pytestmark = [pytest.mark.timeout(90), pytest.mark.usefixtures("process_group")]

GPU = torch.device("cuda")


class Reads(TorchDispatchMode):
    """Counts operations that make the host wait for a value or for a shape that depends on one."""

    WAITS = ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in self.WAITS:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def reads_of_a_step(**changes: Any) -> list[Counter[str]]:
    """Return what :class:`Reads` counts in each micro-batch of the second step."""
    made = trainer(**changes)
    train(made, 0, 1)
    found = []
    for part in sequences(1).split(made.micro_batch_size):
        with Reads() as reads:
            made.add_micro_batch(part)
        found.append(reads.seen)
    return found


@pytest.mark.parametrize("changes", [{}, {"wrap": "block"}, {"activation_checkpointing": "full"}])
def test_no_micro_batch_waits_for_the_device(changes: dict[str, Any]) -> None:
    *before, last = reads_of_a_step(**changes)
    assert len(before) == 3 and not any(before)
    assert sum(last.values()) <= 1  # loss and norm, read together at the end of the step


def test_tf32_is_for_a_float32_computation_and_never_for_the_rotary_embedding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    now = torch.get_float32_matmul_precision
    inside: list[str] = []
    try:
        for dtype, expected in ((torch.bfloat16, "highest"), (torch.float32, "high")):
            made = trainer()
            rotary = made.sharded.model.get_submodule("model.rotary_emb")

            def watched(*args: Any, real: Any = rotary.forward, **how: Any) -> Any:
                inside.append(now())
                return real(*args, **how)

            monkeypatch.setattr(rotary, "forward", watched)
            lines = set_up_gpu(GPU, made.sharded.model, dtype)
            assert ("✓ Enabled TF32" in str(lines)) == (expected == "high")
            train(made, 0, 1)
            assert now() == expected
        assert set(inside) == {"highest"} and len(inside) == 8
        # A forward that fails leaves the setting as it was.
        monkeypatch.setattr(rotary, "forward", None)
        with pytest.raises(TypeError):
            train(made, 1, 2)
        assert now() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")


# --- memory -------------------------------------------------------------------------------------


SIZES = (1, 2, 4, 8, 16, 32, 64)


@pytest.mark.parametrize("first", SIZES)
def test_auto_finds_the_fastest_size_that_fits(first: int) -> None:
    """Start the search at any size. No size may be tried twice, since each trial compiles."""
    for holds, fast in itertools.product((0, *SIZES), SIZES):
        tried = list[int]()

        def seconds(size: int, *, tried=tried, holds=holds, fast=fast) -> float | None:
            tried.append(size)
            return 1.0 / min(size, fast) if size <= holds else None

        found, rates = find_micro_batch(seconds, SIZES, first)
        assert len(tried) == len(set(tried)) and found <= holds
        assert list(rates) == [size for size in tried if size <= holds]
        if holds:
            assert found == (min(holds, max(first, fast)) if holds >= first else holds)
        assert first != holds or len(tried) <= 2


@pytest.mark.parametrize("card", [24, 48, 80])
def test_where_memory_runs_out_the_next_arrangement_takes_less(card: int) -> None:
    """Recompute activations first, then offload the optimizer's state; flags stay as they are."""

    def plan(rung: int, **fixed: Any) -> MemoryPlan:
        return plan_memory(
            TrainingSettings(**fixed), model_config=named_config("1b"), world_size=1,
            micro_batch=1, device_bytes=card * 10**9, rung=rung,
        )  # fmt: skip

    ladder = [plan(0)]
    while not ladder[-1].is_last:
        ladder.append(plan(len(ladder)))
    needs = [each.bytes_needed for each in ladder]
    assert needs == sorted(needs, reverse=True) and len(set(needs)) == len(needs) >= 2
    assert [each.rung for each in ladder] == list(range(len(ladder)))
    first, last = ladder[0].way, ladder[-1].way
    assert last.checkpointing == "full" and last.offload_optimizer
    if card == 80:
        assert (first.checkpointing, first.offload_optimizer) == ("none", False)
        assert [each.way.checkpointing for each in ladder[:3]] == ["none", "budget", "full"]
    assert plan(99).way == last and "ran out of memory before" in plan(99).note
    fixed = plan(99, activation_checkpointing="none", offload_optimizer="off").way
    assert (fixed.checkpointing, fixed.offload_optimizer) == ("none", False)


def test_a_single_sequence_that_does_not_fit_leads_to_the_next_arrangement(tmp_path: Path) -> None:
    made = trainer(run_folder=tmp_path)
    made.step.known.most = 1
    with pytest.raises(torch.OutOfMemoryError, match=r"it starts again, .* way that takes less"):
        made.step.prepare_again(torch.OutOfMemoryError("no"), made.batch_plan)
    assert json.loads((tmp_path / "micro-batch.json").read_text())["rung"] == 1
    again = trainer(run_folder=tmp_path)
    assert (again.sharded.plan.rung, again.step.known.rung) == (1, 1)
    assert again.sharded.plan.way.checkpointing == "budget" and not again.sharded.plan.is_last
    fixed = {"keep_unsharded": "on", "gradient_sync": "last", "offload_optimizer": "off"}
    last = trainer(activation_checkpointing="full", **fixed)
    last.step.known.most = 1
    with pytest.raises(torch.OutOfMemoryError, match="the miner stops: use more GPUs"):
        last.step.prepare_again(torch.OutOfMemoryError("no"), last.batch_plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"activation_checkpointing": "full"}, marks=pytest.mark.long)]
)
def test_a_layer_is_compiled_once_for_each_shape_and_never_breaks(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that all layers share one graph, and that smaller pieces of a batch get another."""
    graphs: list[int] = []
    real = torch.compile

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(next(x for x in inputs if isinstance(x, torch.Tensor))))
        return graph.forward

    def compile(what: Any, **how: Any) -> Any:
        return real(what, backend=backend, fullgraph=True, **how)  # raises if the graph breaks

    monkeypatch.setattr(torch, "compile", compile)
    made = trainer(compile="on", wrap="block", **changes)
    kind: Any = made.sharded.root.kind
    kind.of_logits = compile(fused_logit_gradient, dynamic=False)
    graphs.clear()  # forget the graph of the probe
    train(made, 0, 2)
    assert graphs == [2, 2 * (SEQUENCE - 1)]  # one graph of a layer, one of the loss
    made.step.known.most = 1
    train(made, 2, 4)
    assert graphs[2:] == [1, SEQUENCE - 1]
    assert made.step.compiled
    torch._dynamo.reset()
    for size in (1, 2, 4, 8):  # the sizes that auto tries; each trial resets the compiler
        graphs.clear()
        made.step.seconds_per_sequence(size, SEQUENCE)
        assert graphs == [size, size * (SEQUENCE - 1)]


@pytest.mark.parametrize("compile", ["on", "off"])
def test_only_a_compiler_keeps_to_a_budget_of_activations(
    compile: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **how: None)
    monkeypatch.setattr(torch, "compile", lambda probe: probe)
    caplog.set_level("INFO")
    made = trainer(compile=compile, activation_checkpointing="budget")
    wrapped = [name for name, _ in made.sharded.model.named_modules() if "_checkpoint" in name]
    told = "Activation checkpointing: every second decoder layer" in caplog.text
    assert bool(wrapped) == told == (compile == "off")
    assert functorch_config.activation_memory_budget == (0.5 if compile == "on" else 0.8)
    trainer()  # the next trainer in this process sets it back
    assert functorch_config.activation_memory_budget == 0.8


ALONE: Any = SimpleNamespace(all_gather=lambda value: [value])


def test_micro_batch_that_ran_out_is_remembered_for_this_model_on_this_gpu(tmp_path: Path) -> None:
    path, facts = tmp_path / "micro-batch.json", {"device": "H200", "sequence_length": 1024}
    first = KnownSize(path, facts)
    assert (first.rung, first.most, first.fastest) == (0, None, None)
    first.measured(16)
    assert first.ran_out(16) == 8
    again = KnownSize(path, dict(facts))
    assert (again.rung, again.most, again.fastest) == (0, 8, 8)
    again.agree(ALONE, 0)
    assert (again.most, again.fastest) == (8, 8)
    again.agree(ALONE, 1)  # another rank is at another memory arrangement
    assert (again.rung, again.most, again.fastest) == (1, None, None)
    again.step_down()
    assert KnownSize(path, facts).rung == 2
    assert KnownSize(path, facts | {"sequence_length": 2048}).rung == 0
    assert KnownSize(None, facts).ran_out(3) == 1  # nothing is saved
    path.write_text('{"facts": {}, "most": 8, "fastest": 4}')
    assert KnownSize(path, facts).most is None


def test_a_micro_batch_is_cut_into_unequal_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"local_batch_size_train": 4, "local_batch_size_train_effective": 8}
    (expected,) = [r.loss for r in train(trainer(**sizes), 0, 1)]
    made = trainer(**sizes)
    real, seen = made.sharded.root.forward, list[int]()

    def forward(ids: torch.Tensor) -> Any:
        seen.append(len(ids))
        return real(ids)

    monkeypatch.setattr(made.sharded.root, "forward", forward)
    made.step.known.most = 3
    assert [r.loss for r in train(made, 0, 1)] == pytest.approx([expected], abs=2e-5)
    assert seen == [3, 1, 3, 1]


@pytest.mark.parametrize(
    ("effective", "world_size", "length", "largest"),
    [
        (512, 1, 1024, 32),  # a block has about 300 sequences
        (512, 8, 512, 32),
        (512, 1, 4096, 8),  # as many tokens as 32 sequences of 1024
        (512, 1, 100_000, 1),
        (64, 4, 1024, 16),
        (512, 3, 1024, 4),  # with 8, a step would train on 528 sequences
        (512, 5, 1024, 8),
        (4, 3, 1024, 1),
    ],
)
def test_auto_takes_no_size_that_wastes_data_or_changes_the_step(
    effective: int, world_size: int, length: int, largest: int
) -> None:
    settings = TrainingSettings(local_batch_size_train_effective=effective, sequence_length=length)
    assert sizes_to_try(settings, world_size, GPU)[-1] == largest
    assert sizes_to_try(settings, world_size, torch.device("cpu"))[-1] == min(largest, 16)


def test_auto_finds_a_micro_batch_that_trains_and_is_measured_once(tmp_path: Path) -> None:
    first = trainer(local_batch_size_train="auto", run_folder=tmp_path)
    assert first.micro_batch_size in (1, 2, 4, 8) and first.batch_plan.effective == 8
    expected = [r.loss for r in train(trainer(), 0, 4)]
    assert [r.loss for r in train(first, 0, 4)] == pytest.approx(expected, abs=2e-5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(first.step), "seconds_per_sequence", None)
        again = trainer(local_batch_size_train="auto", run_folder=tmp_path)
    assert again.micro_batch_size == first.micro_batch_size
    first.step.known.measured(512)  # as found with a larger effective batch
    other = trainer(local_batch_size_train="auto", run_folder=tmp_path)
    assert other.micro_batch_size in (1, 2, 4, 8)


class Pinned(torch.Tensor):
    """A tensor that stands for pinned host memory."""


@pytest.mark.parametrize("stage", [1, 7, 64, 1000])
def test_copies_to_the_host_go_through_two_small_buffers(stage: int) -> None:
    copies = HostCopies(torch.device("cpu"), stage=stage)
    copies._buffers = [buffer.as_subclass(Pinned) for buffer in copies._buffers]
    assert [b.numel() for b in copies._buffers] == [stage, stage]
    some = [torch.randn(shape) for shape in ((5, 9), (0, 4), (64,), (), (3, 7))]
    there = [torch.empty(each.shape) for each in some]
    moved: Counter[tuple[bool, bool]] = Counter()  # (source pinned, target pinned): values

    class Bus(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func is torch.ops.aten.copy_.default:
                moved[isinstance(args[1], Pinned), isinstance(args[0], Pinned)] += args[1].numel()
            return func(*args, **(kwargs or {}))

    for _ in range(2):
        moved.clear()
        with Bus():
            copies.fill(list(zip(some, there, strict=True)))
        assert all(map(torch.equal, there, some))
        assert moved == dict.fromkeys([(False, True), (True, False)], 45 + 64 + 1 + 21)


def test_without_pinned_memory_copies_take_other_memory_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = torch.empty

    def empty(*shape: Any, pin_memory: bool = False, **how: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nmore lines")
        return real(*shape, **how)

    monkeypatch.setattr(torch, "empty", empty)
    assert [len(buffer) for buffer in collectives._make_buffers(8, GPU)] == [8, 8]
    (record,) = caplog.records
    assert "cuda: no pinned memory for copies (CUDA error: out of memory)" in record.message


def test_only_a_writing_thread_with_a_gpu_yields_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    before, found = os.getpriority(os.PRIO_PROCESS, 0), list[int]()

    def enters(device: torch.device, background: bool) -> None:
        collectives.enter_thread(device, background=background)
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) - before)

    cases = ((GPU, True), (GPU, False), (torch.device("cpu"), True))
    for case in cases:
        thread = threading.Thread(target=enters, args=case)
        thread.start()
        thread.join()
    enters(GPU, True)  # the main thread, which trains
    assert found == [5, 0, 0, 0]


@pytest.mark.parametrize("how", ["checkpoint", "upload"])
def test_only_the_optimizer_waits_for_copies(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop the copying: the next step's forward and backward passes must continue meanwhile."""
    made = trainer()
    train(made, 0, 1)
    before = [shard.local.clone() for shard in made.sharded.shards]
    moves, waits, done = threading.Event(), threading.Event(), threading.Event()
    copied, real, finish = [0], copies.fill_host, made.copier.finish

    def fill_host(pairs: Any, after: Any = None) -> None:
        if threading.current_thread().name == "copies":
            assert moves.wait(60)
        copied[0] += sum(4 * tensor.numel() for tensor, _ in pairs)
        real(pairs, after)

    def finishes() -> None:
        waits.set()
        finish()

    monkeypatch.setattr(copies, "fill_host", fill_host)
    monkeypatch.setattr(made.copier, "finish", finishes)
    keeper = Checkpointer(trainer=made, folder=tmp_path / "checkpoints")
    written: list[Any] = []
    if how == "upload":
        written.append(made.write_upload(tmp_path / "u", header("upload", 0, serial=1), sign=sign))
    keeper.save({}, Progress(0, 1, 1))  # same boundary, so no byte is copied twice
    waits.clear()
    *most, last = sequences(1).split(made.micro_batch_size)
    for part in most:
        assert made.add_micro_batch(part) is None
    assert not waits.is_set(), "no micro-batch waits"
    reports: list[Any] = []
    end = threading.Thread(
        target=lambda: (reports.append(made.add_micro_batch(last)), done.set()), name="training"
    )
    end.start()
    assert waits.wait(60) and not done.is_set()
    assert same(before, [shard.local for shard in made.sharded.shards])
    assert not any(handle.done() for handle in written) and keeper.saved() is None
    moves.set()
    assert done.wait(60) and reports[0].inner_step == 2
    end.join()
    keeper.wait()
    assert not same(before, [shard.local for shard in made.sharded.shards])
    assert copied[0] == 12 * sum(w.numel() for w in before)
    again = trainer(seed=7)
    assert Checkpointer(trainer=again, folder=tmp_path / "checkpoints").restore() is not None
    assert same(before, [shard.local for shard in again.sharded.shards])
    for handle in written:
        finished(handle)


def test_copies_that_fail_cost_the_write_and_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer()
    train(made, 0, 1)
    real = copies.fill_host

    def lost(pairs: Any, after: Any = None) -> None:
        if after is None and threading.current_thread().name == "copies":
            raise RuntimeError("CUDA error: unspecified launch failure")
        real(pairs, after)

    monkeypatch.setattr(copies, "fill_host", lost)
    handle = made.write_upload(tmp_path / "u", header("upload", 0, serial=1), sign=sign)
    handle.join()
    assert "was not copied: CUDA error" in str(handle.error) and not (tmp_path / "u").exists()
    keeper = Checkpointer(trainer=made, folder=tmp_path / "checkpoints")
    save_checkpoint(keeper, Progress(0, 1, 1))
    assert keeper.last_error is not None and "was not copied" in keeper.last_error
    del handle
    monkeypatch.undo()
    train(made, 1, 2)
    finished(made.write_upload(tmp_path / "u", header("upload", 0, serial=2), sign=sign))


def test_an_offloaded_step_ends_when_the_host_copies_are_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A checkpoint reads the copies right after the step, without waiting on any stream."""
    from distributed_training.training import inner_optimizer

    queued: list[tuple[str, str]] = []

    class Stream:
        """Records the names of the methods that are called, in order."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, what: str) -> Any:
            return lambda *_: queued.append((self._name, what))

    monkeypatch.setattr(inner_optimizer, "OFFLOAD_BUCKET", 5000)
    optimizer = trainer(offload_optimizer="on").optimizer
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("computing"))
    for lane in ("coming", "leaving"):
        setattr(optimizer, f"_{lane}", inner_optimizer._Lane(None, Stream(lane)))
    optimizer.step([torch.randn(p.shape) for p in optimizer._params], 1e-3)
    assert queued.count(("leaving", "record_event")) == len(optimizer._buckets) > 2
    assert queued[-1] == ("leaving", "synchronize")


# --- time ---------------------------------------------------------------------------------------


def test_step_time_is_wall_time_without_the_rounds_pauses() -> None:
    clock = SimpleNamespace(now=100.0)
    meter = StepMeter(
        torch.device("cpu"), utilization=None, flops_per_token=50.0, clock=lambda: clock.now
    )
    meter.peak = 1e6

    def step(*, between: float, pause: float = 0.0) -> Any:
        meter.micro_batch(0.5)
        clock.now += 3.0
        meter.pause(pause)
        clock.now += between + pause  # such as a checkpoint, and the pause of a round
        meter.micro_batch(0.0)
        clock.now += 3.0
        return SimpleNamespace(**meter.finish(80))

    assert step(between=0.0).seconds == pytest.approx(
        6.5
    )  # includes the wait before the first micro-batch
    clock.now += 2.0  # such as an upload between two steps
    report = step(between=1.0, pause=50.0)
    assert report.seconds == pytest.approx(9.0) and report.data_wait_seconds == 0.5
    assert report.mfu == pytest.approx(80 * 100 / 2 / 9.0 / 1e6)
    meter.drop()
    clock.now += 1000.0  # such as a fetch of the global state
    assert step(between=0.0).seconds == pytest.approx(6.5)
