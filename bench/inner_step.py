"""Inner steps: ours against the way of the public miner, same model, tokens and process group.

    python bench/inner_step.py --ranks 2 --model tiny --sequence-length 256 --effective 64
    python bench/inner_step.py --ranks 1 --model 1b --micro-batch 8 --effective 64      # one GPU
    python bench/inner_step.py --model 4b --only ours --micro-batch auto --profile trace.json

The baseline is written by us from the protocol page, section 5: FSDP at the root only, everything
in bf16, bf16 autocast, gradients reduced and ``.item()`` called at every micro-batch, logits whole,
eager, TF32 off, AdamW and clipping over DTensors. (Its fetching of data between steps is not in it,
so the ratio is that of the computation alone.) Steps of both alternate; medians are compared.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor

from distributed_training.config.settings import TrainingSettings
from distributed_training.training.collectives import Layout, ParameterShard
from distributed_training.training.memory_plan import named_config
from distributed_training.training.model import build_meta_model
from distributed_training.training.throughput import flops_per_token, peak_flops
from distributed_training.training.trainer import Trainer


class Stepper(Protocol):
    def step(self, batches: list[Tensor]) -> float: ...


class Ours:
    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def step(self, batches: list[Tensor]) -> float:
        for batch in batches:
            report = self.trainer.add_micro_batch(batch, data_wait_seconds=0.0)
        assert report is not None
        return report.loss


class AsThePublicMiner:
    """``shards``: initial weights; None: any. ``rate``: finished steps -> learning rate."""

    def __init__(
        self,
        config: dict[str, Any],
        device: torch.device,
        *,
        world_size: int,
        low: torch.dtype,
        shards: list[ParameterShard] | None,
        rate: Callable[[int], float],
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        model: Any = build_meta_model(config)
        buffers = {n: b.clone() for n, b in model.named_buffers()}
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low, output_dtype=low)
        fully_shard(model, mesh=init_device_mesh(device.type, (world_size,)),
                    mp_policy=policy)  # fmt: skip
        model.to_empty(device=device)
        for name, buffer in buffers.items():
            model.get_buffer(name).copy_(buffer)
        if shards is None:
            set_weights([p.data.to_local() for p in model.parameters()])
        else:
            for mine, theirs in zip(model.parameters(), shards, strict=True):
                mine.data.to_local().copy_(theirs.local)
        self.model = model.eval()
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=rate(0), betas=(0.9, 0.95), weight_decay=0.1
        )
        self.device, self.low, self.rate, self.steps = device, low, rate, 0

    def step(self, batches: list[Tensor]) -> float:
        tf32 = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        total = 0.0
        for ids in batches:
            ids = ids.to(self.device)
            with torch.autocast(
                self.device.type, dtype=self.low, enabled=self.low != torch.float32
            ):
                loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
            (loss / len(batches)).backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        torch.set_float32_matmul_precision(tf32)
        mean = torch.tensor([total / len(batches)], dtype=torch.float64)
        dist.all_reduce(mean)  # on the CPU, by gloo
        return float(mean) / dist.get_world_size()


@torch.no_grad()
def set_weights(tensors: Iterable[Tensor]) -> None:
    """Some initial weights, made where the tensors are: gigabytes take seconds on a CPU."""
    for tensor in tensors:
        if tensor.dim() == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02)


def main() -> int:
    options = parse()
    if "RANK" not in os.environ:
        return launch(options.ranks)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = torch.cuda.is_available() and options.device != "cpu"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=dist.FileStore(os.environ["BENCH_STORE"], world),
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=10),
    )
    run(options, device, rank, world)
    dist.destroy_process_group()
    return 0


def run(options: argparse.Namespace, device: torch.device, rank: int, world: int) -> None:
    config = named_config(options.model)
    say = print if rank == 0 else (lambda *_: None)
    say(f"torch {torch.__version__}, {world} rank(s), {device_name(device)}")
    settings = TrainingSettings(
        local_batch_size_train=options.micro_batch,
        local_batch_size_train_effective=options.effective,
        sequence_length=options.sequence_length,
        compile=options.compile,
        activation_checkpointing=options.activation_checkpointing,
        precision=options.precision,
        warmup_steps=4,
    )
    memory: dict[str, int] = {}
    trainer = Trainer(
        settings=settings, model_config=config, device=device, layout=Layout(rank, world), say=say
    )
    trainer.load_weights(None)
    trainer.begin_epoch(0)
    memory["ours"] = allocated(device)
    steppers: dict[str, Stepper] = {}
    if options.only != "ours":
        steppers["baseline"] = AsThePublicMiner(
            config,
            device,
            world_size=world,
            low=trainer.sharded.compute_dtype,
            shards=trainer.sharded.shards,
            rate=trainer.schedule.rate,
        )
        memory["baseline"] = allocated(device) - memory["ours"]
    if options.only != "baseline":
        steppers["ours"] = Ours(trainer)
    plan = trainer.batch_plan
    seconds: dict[str, list[float]] = {name: [] for name in steppers}
    losses: dict[str, list[float]] = {name: [] for name in steppers}
    peak: dict[str, int] = {}
    for step in range(options.warm_up + options.steps):
        batches = tokens(config["vocab_size"], step, plan, options.sequence_length, rank, world)
        for name, stepper in steppers.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
            dist.barrier()
            started = time.perf_counter()
            losses[name].append(stepper.step(batches))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                others = sum(m for n, m in memory.items() if n != name)
                used = torch.cuda.max_memory_allocated(device) - others
                peak[name] = max(peak.get(name, 0), used)
            if step >= options.warm_up:
                seconds[name].append(time.perf_counter() - started)
    flops = flops_per_token(trainer.sharded.model, options.sequence_length)
    ceiling = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    count = plan.effective * options.sequence_length
    say(f"\n{options.model}: {plan.micro_batch} x {options.sequence_length} tokens, "
        f"{plan.micro_batches} micro-batches, {options.steps} steps each, alternating")  # fmt: skip
    for name, values in seconds.items():
        median = statistics.median(values)
        mfu = f"{count * flops / median / ceiling / world:6.1%}" if ceiling else "   n/a"
        held = f"{peak[name] / 1e9:6.1f} GB" if name in peak else "n/a"
        say(f"{name:9} {median:8.3f} s/step (of {min(values):.3f}..{max(values):.3f})  "
            f"{count / median:10.0f} tokens/s  MFU {mfu}  peak memory {held}")  # fmt: skip
    if len(steppers) == 2:
        ratio = statistics.median(
            b / o for b, o in zip(seconds["baseline"], seconds["ours"], strict=True)
        )
        apart = max(abs(b - o) for b, o in zip(losses["baseline"], losses["ours"], strict=True))
        say(f"ratio {ratio:.2f}x (baseline / ours, median over pairs of steps)")
        say(f"losses {losses['ours'][0]:.4f} -> {losses['ours'][-1]:.4f}; "
            f"largest difference of the two curves {apart:.4f}")  # fmt: skip
    if options.profile and "ours" in steppers:
        with torch.profiler.profile() as profiler:
            steppers["ours"].step(batches)
        if rank == 0:
            profiler.export_chrome_trace(options.profile)
            say(f"trace of one step: {options.profile}")


def tokens(vocab: int, step: int, plan: Any, length: int, rank: int, world: int) -> list[Tensor]:
    """Learnable text-like tokens: Markov-free counting sequences with random starts."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, vocab, (plan.effective, 1), generator=generator)
    stride = torch.randint(1, 5, (plan.effective, 1), generator=generator)
    ids = (start + stride * torch.arange(length)) % vocab
    return list(ids[rank::world].split(plan.micro_batch))


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        model = "CPU"
    return f"{model}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s) per rank"


def launch(ranks: int) -> int:
    """Start this program once per rank; the first failure ends the others."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, *sys.argv],
                env={"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}
                | os.environ
                | {"RANK": str(r), "WORLD_SIZE": str(ranks), "BENCH_STORE": f"{folder}/store"},
            )
            for r in range(ranks)
        ]
        try:
            while any(p.poll() is None for p in processes):
                if any(p.poll() for p in processes):
                    break
                time.sleep(0.1)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
        return max(abs(p.wait()) for p in processes)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="tiny", choices=("tiny", "125m", "1b", "4b"))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu"))
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--micro-batch", type=lambda x: x if x == "auto" else int(x), default=2)
    parser.add_argument("--effective", type=int, default=64, help="sequences per step, all ranks")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--compile", default="auto", choices=("auto", "on", "off"))
    parser.add_argument("--precision", default="auto", choices=("auto", "bf16", "fp32"))
    parser.add_argument(
        "--activation-checkpointing",
        default="none",
        choices=("none", "budget", "selective", "full"),
    )
    parser.add_argument("--only", choices=("ours", "baseline"))
    parser.add_argument("--profile", help="write a torch profiler trace of one of our steps here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
