"""Inner steps: ours against the way of the public miner, same model, tokens and process group.

    python -m bench.inner_step --ranks 2                            about 5 minutes on two cores
    python -m bench.inner_step --effective 8 --steps 3              a quick look
    python -m bench.inner_step --ranks 4 --model 1b --micro-batch 8 --length 1024   four GPUs

The baseline is written by us from the protocol page, section 3: FSDP at the root only, everything
in bf16, bf16 autocast, gradients reduced and ``.item()`` called at every micro-batch, logits whole,
eager, TF32 off, AdamW and clipping over DTensors. (Its fetching of data between steps is not in it,
so the ratio compares only the computation.) ``--engineer`` adds a second one, what somebody who
knows torch writes in 40 lines: FSDP of each layer, float32 weights computed in bf16, one reduction
and one wait for a step, fused AdamW, each layer compiled. Steps of all alternate; medians are
compared.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from bench.common import joined, parser
from distributed_training.common.gpus import peak_flops
from distributed_training.common.llama import named_config
from distributed_training.config.settings import TrainingSettings
from distributed_training.protocol.types import StepReport
from distributed_training.training.collectives import Layout, ParameterShard
from distributed_training.training.model import build_meta_model
from distributed_training.training.throughput import flops_per_token
from distributed_training.training.trainer import Trainer
from testbed.first_weights import begin

WARM_UP = 2  # steps that do not count


def our_step(trainer: Trainer, batches: Sequence[Tensor]) -> StepReport:
    for batch in batches:
        report = trainer.add_micro_batch(batch)
    assert report is not None
    return report


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
        self.device, self.low, self.rate, self.steps = device, low, rate, 0
        model: Any = build_meta_model(config)
        self.shard(model, init_device_mesh(device.type, (world_size,)))
        allocate(model, device)
        if shards is None:
            set_weights([p.data.to_local() for p in model.parameters()])
        else:
            for mine, theirs in zip(model.parameters(), shards, strict=True):
                mine.data.to_local().copy_(theirs.local)
        self.model = model.eval()
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=rate(0), betas=(0.9, 0.95), weight_decay=0.1, fused=self.fused
        )

    @classmethod
    def next_to(cls, trainer: Trainer, config: dict[str, Any]) -> Self:
        """Return one that begins with the weights of ``trainer``, in its dtype and at its rates."""
        return cls(
            config,
            trainer.device,
            world_size=dist.get_world_size(),
            low=trainer.sharded.compute_dtype,
            shards=trainer.sharded.shards,
            rate=trainer.schedule.rate,
        )

    fused = False

    def shard(self, model: Any, mesh: DeviceMesh) -> None:
        policy = MixedPrecisionPolicy(
            param_dtype=self.low, reduce_dtype=self.low, output_dtype=self.low
        )
        fully_shard(model, mesh=mesh, mp_policy=policy)

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
        self._update()
        torch.set_float32_matmul_precision(tf32)
        return mean_over_ranks(total / len(batches))

    def _update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(self.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1


class AsAGoodEngineer(AsThePublicMiner):
    """Train with torch's own parts, as somebody does who knows them."""

    fused = True

    def shard(self, model: Any, mesh: DeviceMesh) -> None:
        policy = MixedPrecisionPolicy(param_dtype=self.low, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            layer.compile()
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    def step(self, batches: list[Tensor]) -> float:
        total = torch.zeros((), device=self.device)
        for number, ids in enumerate(batches, 1):
            self.model.set_requires_gradient_sync(number == len(batches))
            ids = ids.to(self.device)
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss / len(batches)
            loss.backward()
            total += loss.detach()
        self._update()
        return mean_over_ranks(float(total))


def mean_over_ranks(loss: float) -> float:
    mean = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(mean)  # on the CPU, by gloo
    return float(mean) / dist.get_world_size()


def allocate(model: torch.nn.Module, device: torch.device) -> None:
    """Give a model its memory on ``device``: buffers keep their values, weights have any."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device=device)
    for name, buffer in buffers.items():
        model.get_buffer(name).copy_(buffer)


@torch.no_grad()
def set_weights(tensors: Iterable[Tensor]) -> None:
    """Some initial weights, made where the tensors are: gigabytes take seconds on a CPU."""
    for tensor in tensors:
        if tensor.dim() == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02)


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, args=(folder, options), nprocs=options.ranks)


def run(rank: int, folder: str, options: argparse.Namespace) -> None:
    """Run one of ``options.ranks`` processes."""
    store, cuda = dist.FileStore(f"{folder}/store", options.ranks), torch.cuda.is_available()
    say = print if rank == 0 else (lambda *_: None)
    wait = timedelta(minutes=10)
    with joined(store, rank, options.ranks, cuda=cuda, timeout=wait) as device:
        trainer = Trainer(
            settings=TrainingSettings(
                local_batch_size_train=options.micro_batch,
                local_batch_size_train_effective=options.effective,
                sequence_length=options.length,
                precision=options.precision,
                warmup_steps=4,
            ),
            model_config=named_config(options.model),
            device=device,
            layout=Layout(rank, options.ranks),
            say=say,
        )
        begin(trainer)
        seconds, losses = measure(trainer, options)
        report(trainer, options, seconds, losses, say)


def measure(
    trainer: Trainer, options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return seconds and losses of each step by way, but for those that warm up; ours is last."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), trainer.device
    config = named_config(options.model)
    ways = {"baseline": AsThePublicMiner}
    if options.engineer:
        ways["engineer"] = AsAGoodEngineer
    steps: dict[str, Callable[[list[Tensor]], float]] = {
        name: way.next_to(trainer, config).step for name, way in ways.items()
    }
    steps["ours"] = lambda batches: our_step(trainer, batches).loss
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for step in range(WARM_UP + options.steps):
        where = rank, world
        batches = tokens(config["vocab_size"], step, trainer.batch_plan, options.length, *where)
        for name, take in steps.items():
            wait(device)
            dist.barrier()
            started = time.perf_counter()
            losses[name].append(take(batches))
            wait(device)
            if step >= WARM_UP:
                seconds[name].append(time.perf_counter() - started)
    return seconds, losses


def report(
    trainer: Trainer,
    options: argparse.Namespace,
    seconds: dict[str, list[float]],
    losses: dict[str, list[float]],
    say: Callable[..., None],
) -> None:
    cuda, world = trainer.device.type == "cuda", options.ranks
    name = torch.cuda.get_device_name() if cuda else "CPU"
    flops = flops_per_token(trainer.sharded.model, options.length)
    ceiling, plan = peak_flops(name) if cuda else None, trainer.batch_plan
    count = plan.effective * options.length
    say(
        f"torch {torch.__version__}, {world} rank(s), {name}, {torch.get_num_threads()} thread(s) "
        f"each\n{options.model}: {plan.micro_batch} x {options.length} tokens, "
        f"{plan.micro_batches} micro-batches, {options.steps} steps each, alternating"
    )
    for way, values in seconds.items():
        rate = count / statistics.median(values)
        mfu = f"  MFU {rate * flops / ceiling / world:.1%}" if ceiling else ""
        say(f"{way:9} {statistics.median(values):8.3f} s/step  {rate:10.0f} tokens/s{mfu}")
    ours, loss = seconds.pop("ours"), losses.pop("ours")
    say(f"losses {loss[0]:.4f} -> {loss[-1]:.4f}")
    for way, values in seconds.items():
        ratio = statistics.median(b / o for b, o in zip(values, ours, strict=True))
        apart = max(abs(b - o) for b, o in zip(losses[way], loss, strict=True))
        say(
            f"ratio {ratio:.2f}x ({way} / ours, median over pairs of steps); "
            f"largest difference of the two loss curves {apart:.4f}"
        )


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tokens(vocab: int, step: int, plan: Any, length: int, rank: int, world: int) -> list[Tensor]:
    """Learnable text-like tokens: Markov-free counting sequences with random starts."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, vocab, (plan.effective, 1), generator=generator)
    stride = torch.randint(1, 5, (plan.effective, 1), generator=generator)
    ids = (start + stride * torch.arange(length)) % vocab
    return list(ids[rank::world].split(plan.micro_batch))


def parse() -> argparse.Namespace:
    arguments = parser(__doc__)
    arguments.add_argument("--model", default="tiny", choices=("tiny", "125m", "1b", "4b"))
    arguments.add_argument("--ranks", type=int, default=1)
    arguments.add_argument("--micro-batch", type=lambda x: x if x == "auto" else int(x), default=2)
    arguments.add_argument(
        "--effective", type=int, default=64, help="sequences per step, all ranks"
    )
    arguments.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    arguments.add_argument("--steps", type=int, default=7)
    arguments.add_argument("--engineer", action="store_true", help="compiles: a minute more")
    arguments.add_argument("--precision", default="auto", choices=("auto", "bf16", "fp32"))
    return arguments.parse_args()


if __name__ == "__main__":
    main()
