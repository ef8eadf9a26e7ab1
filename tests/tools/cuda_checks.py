"""Check the code that only runs on a GPU; ``tests/unit/test_cuda.py`` runs these checks.

The checks are functions of a device and an empty folder. They do not need pytest, so that
bench/gpu.py can run them on a machine that has little more than torch. On a CPU they check the code
that a CPU uses instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from distributed_training.protocol.codecs import CODECS
from distributed_training.protocol.types import OWN_CODECS, Base, Progress, Update
from distributed_training.training.checkpoint import Checkpointer
from distributed_training.training.model import (
    attention_line,
    fused_logit_gradient,
    hf_config,
    linear_cross_entropy,
    logit_gradient,
)
from distributed_training.training.trainer import Trainer
from distributed_training.validator.merge import digest_of
from testbed.first_weights import begin
from tests.tools import training_world
from tests.tools.outer_steps import header, sign
from tests.tools.store_member import decoded, write_update
from tests.tools.training_world import (
    SETTINGS,
    finished,
    save_checkpoint,
    sequences,
    tiny,
    trainer,
)

Check = Callable[[torch.device, Path], None]
#: Wide enough for tensor cores and flash attention.
MODEL: dict[str, Any] = {"hidden": 128, "heads": 2, "kv_heads": 1, "intermediate": 256}


def make(device: torch.device, **changes: Any) -> Trainer:
    """Return a trainer, by default eager and in float32, so that two runs can be compared."""
    wanted = {"compile": "off", "local_batch_size_train_effective": 4, **changes}
    return trainer(model=tiny(**MODEL), device=device, **wanted)


def train(made: Trainer, first: int, last: int) -> list[float]:
    return [report.loss for report in training_world.train(made, first, last)]


def weights(made: Trainer) -> list[Tensor]:
    return [item.local.clone() for item in made.sharded.shards]


def close(one: list[float], two: list[float], atol: float) -> None:
    apart = max(abs(a - b) for a, b in zip(one, two, strict=True))
    assert apart <= atol, f"{one} and {two} differ by {apart}"


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Raise an error inside if the host waits for the GPU."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


# --- the checks ---------------------------------------------------------------------------------


def float32_gives_the_cpus_losses(device: torch.device, folder: Path) -> None:
    close(train(make(device), 0, 4), train(make(torch.device("cpu")), 0, 4), 5e-3)  # TF32


def as_a_miner_does_it_gives_nearly_those(device: torch.device, folder: Path) -> None:
    """Train with a miner's defaults, which are bf16 and, on a GPU, compiled layers."""
    made = make(device, precision="auto", compile="auto")
    close(train(made, 0, 6), train(make(torch.device("cpu")), 0, 6), 0.05)
    assert made.step.compiled == (device.type == "cuda"), "compiling failed; the log says why"


def no_micro_batch_waits_for_the_device(device: torch.device, folder: Path) -> None:
    made = make(device, precision="auto", compile="auto", local_batch_size_train=1)
    train(made, 0, 2)
    *before, last = sequences(2, count=4).split(1)
    if device.type == "cuda":
        before = [part.pin_memory() for part in before]
    with no_waits(device):
        for part in before:
            assert made.add_micro_batch(part) is None
    assert made.add_micro_batch(last) is not None


def ways_of_a_step_give_the_same_losses(device: torch.device, folder: Path) -> None:
    expected, atol = train(make(device), 0, 3), 1e-4 if device.type == "cpu" else 2e-3
    for changes in (
        {"wrap": "block"},
        {"wrap": "block", "keep_unsharded": "off"},
        {"gradient_sync": "every"},
        {"wrap": "block", "activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "budget", "compile": "auto"},
        {"local_batch_size_train": 4},
    ):
        close(train(make(device, **changes), 0, 3), expected, atol)


def an_offloaded_optimizer_gives_the_same_bits(device: torch.device, folder: Path) -> None:
    from distributed_training.training import inner_optimizer

    for name in ("adamw", "muon"):
        with mock.patch.object(inner_optimizer, "OFFLOAD_BUCKET", 20_000):
            here, there = (
                make(device, optimizer=name, offload_optimizer=where) for where in ("off", "on")
            )
        assert len(there.optimizer._buckets) > 2
        losses = train(here, 0, 4)
        assert train(there, 0, 4) == losses and losses[-1] < losses[0]
        for kind, kept in here.optimizer.state.items():
            for mine, theirs in zip(kept, there.optimizer.state[kind], strict=True):
                assert torch.equal(mine.cpu(), theirs.cpu()), (name, kind)
        assert all(torch.equal(a, b) for a, b in zip(weights(here), weights(there), strict=True))


def a_checkpoint_in_mid_step_goes_on_where_it_was(device: torch.device, folder: Path) -> None:
    made = make(device)
    train(made, 0, 2)
    first, second = sequences(2, count=4).split(2)
    made.add_micro_batch(first)
    keeper = Checkpointer(trainer=made, folder=folder)
    save_checkpoint(keeper, Progress(0, 2, 2))
    assert keeper.last_error is None, keeper.last_error
    expected = made.add_micro_batch(second)
    again = make(device)
    restored = Checkpointer(trainer=again, folder=folder).restore()
    assert restored is not None and len(again.step.batches) == 1
    report = again.add_micro_batch(second)
    assert report is not None and expected is not None
    close([report.loss], [expected.loss], 1e-6)
    for mine, theirs in zip(weights(made), weights(again), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


def an_outer_step_commits_or_leaves_every_bit(device: torch.device, folder: Path) -> None:
    made = make(device)
    train(made, 0, 2)
    before = weights(made)
    own, path = folder / "upload.safetensors", folder / "update.safetensors"
    start = [each.clone() for each in made.outer.epoch_start or []]
    finished(made.write_upload(own, header("upload", 0, serial=1), sign=sign))
    write_update(path, made.schema, [0.7 * each for each in decoded(own, made.schema)])
    after = [a - b for a, b in zip(start, decoded(path, made.schema), strict=True)]
    update = Update(1, path, Base.MERGED, own, digest_of(after))
    made.prepare_update(update)
    made.roll_back_outer_step()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(made), strict=True))
    made.prepare_update(update)
    made.commit_outer_step()
    assert made.outer_step == 1 and not torch.equal(before[0], weights(made)[0])
    found = zip(after, made.outer.epoch_start or [], strict=True)
    assert all(torch.equal(a, b) for a, b in found)
    train(made, 2, 3)


def the_compiled_loss_is_the_eager_one(device: torch.device, folder: Path) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.randn(70, 64).to(device, dtype).requires_grad_()
    weight = torch.randn(300, 64).to(device, dtype).requires_grad_()
    labels = torch.randint(0, 300, (70,)).to(device)
    found = []
    compiled = torch.compile(fused_logit_gradient, dynamic=False)
    for form in (logit_gradient, compiled if device.type == "cuda" else fused_logit_gradient):
        loss = linear_cross_entropy(hidden, weight, labels, chunk=300 * 32, of_logits=form)
        found.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    for one, two in zip(*found, strict=True):
        assert torch.allclose(one.float(), two.float(), rtol=2e-2, atol=2e-2)


def attention_is_a_fast_kernel(device: torch.device, folder: Path) -> None:
    line = attention_line(hf_config(tiny(**MODEL)), device, torch.bfloat16, 1024)
    assert line.endswith(("on the CPU", "SDPA, flash kernel", "SDPA, cudnn kernel")), line


def auto_finds_a_micro_batch_and_remembers_it(device: torch.device, folder: Path) -> None:
    how = {"local_batch_size_train": "auto", "compile": "auto", "precision": "auto"}
    first = make(device, run_folder=folder, **how)
    train(first, 0, 1)
    again = make(device, run_folder=folder, **how)
    assert again.micro_batch_size == first.micro_batch_size
    assert again.step.known.fastest == first.micro_batch_size


def the_memory_model_is_not_far_off(device: torch.device, folder: Path) -> None:
    """Compare the estimate with the memory allocated; it adds 0.8 GB for CUDA itself."""
    if device.type != "cuda":
        return
    from distributed_training.common.llama import named_config

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    made = Trainer(
        settings=dataclasses.replace(
            SETTINGS, sequence_length=1024, local_batch_size_train=8, precision="auto",
            local_batch_size_train_effective=16,
        ),
        model_config=named_config("125m"), device=device,
    )  # fmt: skip
    begin(made)
    batch = torch.zeros((8, 1024), dtype=torch.int64)
    reports = [made.add_micro_batch(batch) for _ in range(4)]
    # Use the reports, because each step resets the peak at its end.
    used = max(report.gpu_memory_gb or 0.0 for report in reports if report) * 1e9 - before
    expected = made.sharded.plan.bytes_needed - 0.8e9
    assert 0.5 < used / expected < 1.25, f"{used / 1e9:.1f} GB used, {expected / 1e9:.1f} expected"


def the_gauge_and_the_report_see_the_device(device: torch.device, folder: Path) -> None:
    from distributed_training.health.gpus import describe_cuda, sample_gpu

    (report,) = training_world.train(make(device), 0, 1)
    assert (report.gpu_memory_gb is None) == (device.type == "cpu")
    if device.type == "cuda":
        assert describe_cuda(device.index)[0] == "✓ CUDA available: True"
        sample = sample_gpu(device.index or 0)
        assert sample is None or sample.memory_used_gb > 0


def an_upload_is_encoded_and_decoded_to_the_cpus_bits(device: torch.device, folder: Path) -> None:
    rows = torch.randn(40, 1000, generator=torch.Generator().manual_seed(0)).pow(3)
    for codec in (CODECS[name] for name in OWN_CODECS):
        scales, codes = codec.encode_rows(rows)
        found = codec.encode_rows(rows.to(device))
        assert torch.equal(found[0].cpu(), scales) and torch.equal(found[1].cpu(), codes)
        expected, out = torch.empty_like(rows), torch.empty(rows.shape, device=device)
        codec.decode_rows(scales, codes, expected)
        codec.decode_rows(*found, out)
        assert torch.equal(out.cpu(), expected)


CHECKS: tuple[Check, ...] = (
    as_a_miner_does_it_gives_nearly_those,
    no_micro_batch_waits_for_the_device,
    float32_gives_the_cpus_losses,
    a_checkpoint_in_mid_step_goes_on_where_it_was,
    an_outer_step_commits_or_leaves_every_bit,
    an_offloaded_optimizer_gives_the_same_bits,
    an_upload_is_encoded_and_decoded_to_the_cpus_bits,
    the_compiled_loss_is_the_eager_one,
    attention_is_a_fast_kernel,
    the_gauge_and_the_report_see_the_device,
    auto_finds_a_micro_batch_and_remembers_it,
    the_memory_model_is_not_far_off,
    ways_of_a_step_give_the_same_losses,
)
