"""Time encoding and decoding of a store round's files against a copy of the same tensor.

    python -m bench.update_file                             100 M parameters, about 2 minutes
    python -m bench.update_file --parameters 10e6 --codec 4-bit  a quick look

A matrix of that size is encoded row block by row block, as a rank does with its rows, and decoded
again. Copy, encode and decode take turns; a ratio is of one turn, and the median of all is printed.
Behind it is the error: mean square of what is lost over mean square of the values.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from bench.common import parser, table
from distributed_training.protocol.codecs import CODECS

COLUMNS = 2048
GOALS = {"encode": 6.0, "decode": 3.0}  # copies


def seconds(call: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def measure(rows: Tensor, name: str, turns: int) -> tuple[str, ...]:
    """Return a row of the table."""
    other = torch.empty_like(rows)
    codec = CODECS[name]
    scales, codes = codec.encode_rows(rows)
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: other.copy_(rows),
        "encode": lambda: codec.encode_rows(rows),
        "decode": lambda: codec.decode_rows(scales, codes, other),
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns + 1):  # the first one touches memory for the first time
        for name, call in calls.items():
            found[name].append(seconds(call, rows.device))
    ratios = {
        name: statistics.median(
            each / copy for each, copy in zip(found[name][1:], found["copy"][1:], strict=True)
        )
        for name in GOALS
    }
    lost = float((other - rows).square().mean() / rows.square().mean())
    size = (scales.nbytes + codes.nbytes) / rows.numel()
    copy = 1000 * statistics.median(found["copy"][1:])
    return (
        name, f"{size:.3f}", f"{copy:.0f}", *(f"{ratios[name]:.1f}" for name in GOALS),
        f"{lost:.4f}",
    )  # fmt: skip


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--parameters", type=float, default=100e6)
    arguments.add_argument("--codec", choices=[*CODECS], help="only this one")
    arguments.add_argument("--turns", type=int, default=7)
    arguments.add_argument("--device", default="cpu")
    options = arguments.parse_args()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(round(options.parameters / COLUMNS), COLUMNS, generator=generator)
    rows = rows.to(options.device)
    table(
        ("codec", "bytes a value", "copy ms", "encode, copies", "decode, copies", "error"),
        [
            *(
                measure(rows, name, options.turns)
                for name in CODECS
                if options.codec in (None, name)
            ),
            ("goal", "", "", *(f"<={goal:.0f}" for goal in GOALS.values()), ""),
        ],
    )


if __name__ == "__main__":
    main()
