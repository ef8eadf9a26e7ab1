"""The gradient codec: ours against the public algorithm as described, on the same tensors.

    python -m bench.codec                                   about 2 minutes
    python -m bench.codec --parameters 10e6 --repeat 1      a quick look

One upload of a Llama of about that size: error feedback, top-32 of each row, subtraction of what
was sent. The baseline does per parameter, one after the other, what the protocol page describes
(section 4): EF = 0.999 EF + lr g, cut into chunks, ``torch.topk`` of magnitudes, gather, scatter
into zeros, EF -= sent. Ours is what a snapshot does. They alternate; ratios are of one round.
"""

from __future__ import annotations

import math
import statistics
import time

import torch
from torch import Tensor

from bench.common import parser
from distributed_training.common.llama import llama_config
from distributed_training.protocol import gradients

DECAY, LR = 0.999, 0.8
Code = tuple[Tensor, Tensor]


def baseline(gs: list[Tensor], efs: list[Tensor]) -> list[Code]:
    codes = []
    for g, ef in zip(gs, efs, strict=True):
        ef.mul_(DECAY).add_(g, alpha=LR)
        if ef.dim() == 2:
            h, w = (gradients.largest_divisor(n, 64) for n in ef.shape)
            chunks = ef.view(ef.shape[0] // h, h, ef.shape[1] // w, w).flatten(2)
        else:
            chunks = ef.view(-1, gradients.largest_divisor(ef.shape[0], 64))
        k = min(32, chunks.shape[-1])
        idxs = torch.topk(chunks.abs(), k=k, dim=-1, largest=True, sorted=False).indices
        vals = torch.gather(chunks, -1, idxs)
        sent = torch.zeros_like(chunks)
        sent.scatter_reduce_(-1, idxs, vals, reduce="mean", include_self=False)
        ef.sub_(sent.view(ef.shape))
        codes.append((idxs.to(torch.int16), vals))
    return codes


def ours(gs: list[Tensor], efs: list[Tensor]) -> list[Code]:
    codes = []
    for g, ef in zip(gs, efs, strict=True):
        ef.mul_(DECAY).add_(g, alpha=LR)
        code = gradients.encode(ef)
        gradients.subtract_sent_(ef, *code)
        codes.append(code)
    return codes


def shapes(parameters: float) -> list[tuple[int, ...]]:
    """Return the schema of a Llama with about that many parameters, without allocating it."""
    from distributed_training.training.model import parameter_schema

    hidden = 768 if parameters < 5e8 else 2048
    block = 4 * hidden**2 + 3 * hidden * int(hidden * 2.75)
    vocab = 16000
    layers = max(1, round((parameters - 2 * vocab * hidden) / block))
    heads = hidden // 64
    config = llama_config(
        hidden=hidden, layers=layers, heads=heads, kv_heads=heads,
        intermediate=int(hidden * 2.75), vocab=vocab, max_positions=1024,
    )  # fmt: skip
    return [shape for _, shape in parameter_schema(config)]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--parameters", type=float, default=100e6)
    arguments.add_argument("--repeat", type=int, default=3)
    arguments.add_argument("--device", default="cpu")
    options = arguments.parse_args()
    device = torch.device(options.device)
    wanted = shapes(options.parameters)
    count = sum(math.prod(s) for s in wanted)
    torch.manual_seed(0)
    gs = [torch.randn(s, device=device) for s in wanted]
    efs = {name: [torch.randn(s, device=device) for s in wanted] for name in ("baseline", "ours")}
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), {device}: "
          f"{count / 1e6:.0f} M parameters in {len(wanted)} tensors")  # fmt: skip
    times: dict[str, list[float]] = {"baseline": [], "ours": []}
    codes: dict[str, list[Code]] = {}
    for _ in range(options.repeat):
        for mine, theirs in zip(efs["ours"], efs["baseline"], strict=True):
            mine.copy_(theirs)
        for name, encode in (("baseline", baseline), ("ours", ours)):
            if device.type == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            codes[name] = encode(gs, efs[name])
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - started)
        for (_, theirs), (_, mine) in zip(codes["baseline"], codes["ours"], strict=True):
            # Magnitudes only: among equal ones each may send another.
            assert torch.equal(theirs.abs().sort(-1).values, mine.abs().sort(-1).values)
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:9} {median:7.2f} s  {count / median / 1e6:8.0f} M parameters/s")
    ratio = statistics.median(b / o for b, o in zip(*times.values(), strict=True))
    print(
        f"ratio {ratio:.1f}x (baseline / ours, median over rounds); both keep the same magnitudes"
    )


if __name__ == "__main__":
    main()
