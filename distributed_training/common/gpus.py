"""The known GPUs: their peak rates and their prices.

Peaks are dense bf16 tensor-core rates with float32 accumulation, without sparsity. They come from
NVIDIA's data sheets (A100, A10, A40, L4, L40S, H100, H200, B200) and architecture white papers
(GA102, AD102, Blackwell RTX). Unknown GPUs and CPUs have no MFU: better no value than a wrong one.
"""

from __future__ import annotations

from dataclasses import dataclass

# Longer names come first, since "H100 PCIe" must be found before "H100".
PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H200 NVL", 835.0),
    ("GH200", 989.4),
    ("H200", 989.4),
    ("H100", 989.4),
    ("B200", 2250.0),
    ("A100", 312.0),
    ("L40S", 362.0),
    ("RTX A6000", 154.8),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090 Ti", 80.0),
    ("RTX 3090", 71.0),
    ("A40", 149.7),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L4", 121.0),
)
# Cut-down variants whose names contain a name from above but whose peak differs or is not known.
_NOT_KNOWN = ("RTX 4090 D", "RTX 4090 Laptop", "RTX 5090 D", "RTX 5090 Laptop", "GB200")


def peak_flops(device_name: str) -> float | None:
    """Return the peak dense bf16 FLOP/s of a GPU by its name, or None if it is not known."""
    if any(name in device_name for name in _NOT_KNOWN):
        return None
    words = device_name.replace("-", " ").split()
    for name, tera in PEAK_TFLOPS:
        wanted = name.split()
        if any(words[i : i + len(wanted)] == wanted for i in range(len(words))):
            return tera * 1e12
    return None


@dataclass(frozen=True)
class Card:
    """A GPU to make plans for. ``memory``: in GB; ``price``: in dollars per hour."""

    name: str
    memory: float
    price: float

    @property
    def peak(self) -> float:
        """The peak rate in FLOP/s."""
        found = peak_flops(self.name)
        assert found is not None
        return found


#: Month of the prices below. They are medians of hourly rents without a contract
#: (aimultiple.com/gpu-index, mercatus-ai.com/blog/cloud-gpu-pricing) and change each month.
PRICED = "2026-05"
CARDS = {
    "h200": Card("H200", 141, 4.00),
    "h100": Card("H100", 80, 2.95),
    "b200": Card("B200", 180, 6.00),
    "a100": Card("A100", 80, 1.30),
    "l40s": Card("L40S", 48, 0.90),
    "a6000": Card("RTX A6000", 48, 0.50),
    "5090": Card("RTX 5090", 32, 0.65),
    "4090": Card("RTX 4090", 24, 0.40),
    "3090": Card("RTX 3090", 24, 0.20),
}
