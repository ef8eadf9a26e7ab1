"""Uploads and updates of a small schema, drawn, without a model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from distributed_training.protocol.update_file import (
    Header,
    UpdateFile,
    UpdateLayout,
    finish,
    rows_and_columns,
    write_rows,
)

RUN_ID = "0123456789ab"
MASTER = "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY"
#: Whole groups and short ones, a vector that is longer than a group, a scalar.
SCHEMA = [("a", (3, 300)), ("b", (257,)), ("c", (2, 2, 130)), ("d", ())]


def drawn(seed: int, scale: float = 1.0) -> list[Tensor]:
    """Return tensors of the schema, with the same bits on each processor."""
    # Whole numbers: what randn draws depends on the processor.
    generator = torch.Generator().manual_seed(seed)
    limit = 2**20
    return [
        torch.randint(-limit, limit, shape, generator=generator) * (scale / limit)
        for _, shape in SCHEMA
    ]


def hotkey_of(uid: int) -> str:
    return f"5{'uid':z<44}{uid:03d}".replace("0", "z")


def sign(message: bytes) -> bytes:
    return message[-64:]  # the digest in it: whoever flips a bit has another one


def verify(message: bytes, signature: bytes, hotkey: str) -> bool:
    return signature == message[-64:]


def header(kind: str, outer_step: int, *, hotkey: str = MASTER, **changes: object) -> Header:
    values: dict[str, object] = {
        "kind": kind,
        "run_id": RUN_ID,
        "outer_step": outer_step,
        "serial": 0,
        "hotkey": hotkey,
        "start": "0" * 64,
        "bits": 4,
        "inner_steps": 30,
        "tokens": 61440,
    }
    return Header(**values | changes)  # type: ignore[arg-type]


def write_file(path: Path, tensors: list[Tensor], head: Header) -> UpdateFile:
    """Write tensors of the schema as an upload or an update, and open it."""
    layout = UpdateLayout.of(SCHEMA, head)
    path.parent.mkdir(parents=True, exist_ok=True)
    for index, tensor in enumerate(tensors):
        write_rows(path, layout, index, 0, tensor.view(rows_and_columns(tensor.shape)))
    finish(path, layout, sign)
    return UpdateFile.open(
        path, SCHEMA, run_id=RUN_ID, kind=head.kind, hotkey=head.hotkey, verify=verify
    )
