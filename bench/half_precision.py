"""What ``--neuron.all_reduce_compression float16`` does to the average, and to the outer step.

    python -m bench.half_precision --peers 3 --steps 40

Each peer trains the same small model on text of its own; then real peers average their
pseudo-gradients: all in float32, one in float16 beside peers that send float32 as the public
network does, and all in float16. Of each average: its error against the exact one in float64, its
cosine with it, and the held-out loss after the outer step taken with it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor

from bench.error_feedback import text
from bench.small_model import EFFECTIVE, MICRO, SEQUENCE, new_trainer
from distributed_training.config.swarm import SwarmSettings
from distributed_training.protocol.types import RoundRequest
from distributed_training.swarm import HivemindSwarm
from distributed_training.training.trainer import Trainer

Compression = Literal["none", "float16"]
REQUEST = RoundRequest(
    caller="",
    timeout=timedelta(minutes=2),
    min_matchmaking_time=timedelta(seconds=3),
    request_timeout=timedelta(seconds=1),
)


def trained(model: str, seed: int, steps: int, data: Tensor) -> list[Tensor]:
    """The pseudo-gradient of a peer whose text is drawn from ``seed``; all start alike."""
    trainer = new_trainer(seed=1, model=model)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps * (EFFECTIVE // MICRO)):
        picked = torch.randint(len(data), (MICRO,), generator=generator)
        trainer.add_micro_batch(data[picked])
    buffers = [torch.zeros(shape) for _, shape in trainer.schema]
    trainer.write_pseudo_gradient(buffers)
    return buffers


def averaged(
    gradients: Sequence[Sequence[Tensor]], compressions: Sequence[Compression], folder: Path
) -> list[Tensor]:
    """What the first peer has after a round of all."""
    settings = SwarmSettings(dht_port=0, dht_listen_ip="127.0.0.1", initial_peers=(), run_id="half")
    schema = [(str(i), tuple(t.shape)) for i, t in enumerate(gradients[0])]
    with ExitStack() as stack:
        swarms: list[HivemindSwarm] = []
        for i, compression in enumerate(compressions):
            known = tuple(swarms[0].visible_maddrs) if swarms else ()
            swarm = HivemindSwarm(
                settings=replace(settings, initial_peers=known, compression=compression),
                schema=schema,
                run_folder=folder / f"{'-'.join(compressions)}-{i}",
            )
            stack.callback(swarm.close)
            swarms.append(swarm)
        sizes: list[int] = []

        def take_part(swarm: HivemindSwarm, gradient: Sequence[Tensor]) -> None:
            for buffer, values in zip(swarm.buffers, gradient, strict=True):
                buffer.copy_(values)
            result = swarm.average(replace(REQUEST, min_group_size=len(swarms)))
            sizes.append(0 if result.partial else len(result.peers))

        threads = [
            threading.Thread(target=take_part, args=pair)
            for pair in zip(swarms, gradients, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sizes == [len(swarms)] * len(swarms), "a peer was left out"
        return [buffer.clone() for buffer in swarms[0].buffers]


@torch.no_grad()
def loss_after(model: str, average: Sequence[Tensor] | None, held: Tensor) -> float:
    """On held-out text, after an outer step with ``average``; None: before it."""
    trainer: Trainer = new_trainer(seed=1, model=model)
    if average is not None:
        buffers = [torch.zeros(shape) for _, shape in trainer.schema]
        trainer.write_pseudo_gradient(buffers)
        for buffer, values in zip(buffers, average, strict=True):
            buffer.copy_(values)
        trainer.prepare_outer_step(buffers)
        trainer.commit_outer_step()
    losses = (trainer.sharded.loss_of(batch) for batch in held.split(MICRO))
    return float(sum(losses)) / (len(held) * (SEQUENCE - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="inner steps before the round")
    parser.add_argument("--model", choices=["small", "local"], default="small")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(prefix="bench-half-") as name:
        data, held = text(Path(name))
        gradients = [
            trained(options.model, seed, options.steps, data) for seed in range(options.peers)
        ]
        exact = sum(torch.cat([t.flatten().double() for t in g]) for g in gradients) / len(
            gradients
        )
        assert isinstance(exact, Tensor)
        before = loss_after(options.model, None, held)
        print(
            f"{options.peers} peers, {exact.numel() / 1e6:.2f} M parameters, {options.steps} inner "
            f"steps; held-out loss before the outer step {before:.5f}"
        )
        for number in (0, 1, options.peers):
            compressions: list[Compression] = [
                "float16" if i < number else "none" for i in range(options.peers)
            ]
            average = averaged(gradients, compressions, Path(name))
            flat = torch.cat([t.flatten().double() for t in average])
            error = float((flat - exact).norm() / exact.norm())
            cosine = float(torch.nn.functional.cosine_similarity(flat, exact, dim=0))
            loss = loss_after(options.model, average, held)
            print(
                f"{number} in float16: relative error {error:.1e}, 1 - cosine {1 - cosine:.1e}, "
                f"loss after the outer step {loss:.5f}",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
