"""``gradients.pt`` as a miner publishes it, for tests and benches that have codes, no trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from distributed_training.protocol.gradients import GradientMetadata


def build_payload(
    codes: Mapping[str, tuple[torch.Tensor, torch.Tensor]], metadata: GradientMetadata
) -> dict[str, Any]:
    """Return what ``torch.save`` is to write. ``codes``: parameter name -> (idxs, vals)."""
    payload: dict[str, Any] = {"metadata": asdict(metadata)}
    for name, (idxs, vals) in codes.items():
        # A copy: of a view the file would hold the whole storage.
        payload[name + "idxs"], payload[name + "vals"] = idxs.clone(), vals.clone()
    return payload
