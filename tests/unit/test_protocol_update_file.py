"""The files of a round through the store: what is written is read, and what is not is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distributed_training.protocol.update_file import (
    Header,
    UpdateFile,
    UpdateLayout,
    finish,
    rows_and_columns,
    write_rows,
)

pytestmark = pytest.mark.timeout(60)

SCHEMA = [("a", (5, 300)), ("b", (256,)), ("c", ()), ("d", (3, 2, 4))]


def header(**given: object) -> Header:
    known: dict[str, object] = {
        **{"kind": "upload", "run_id": "0123456789ab", "outer_step": 7, "serial": 3},
        **{"hotkey": "5Hotkey", "start": "ab" * 32, "bits": 4, "inner_steps": 30, "tokens": 9000},
        "blocks": (11, 12),
    }
    return Header(**{**known, **given})  # type: ignore[arg-type]


def sign(message: bytes) -> bytes:
    return (message + bytes(64))[-64:]


def verify(message: bytes, signature: bytes, hotkey: str) -> bool:
    return signature == sign(message)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_what_is_written_is_read(tmp_path: Path, bits: int) -> None:
    layout = UpdateLayout.of(SCHEMA, header(bits=bits))
    path = tmp_path / "upload.safetensors"
    values = {}
    for index, (name, shape) in enumerate(SCHEMA):
        values[name] = torch.randn(shape)
        write_rows(path, layout, index, 0, values[name].view(rows_and_columns(shape)))
    digest = finish(path, layout, sign)
    opened = UpdateFile.open(
        path, SCHEMA, run_id="0123456789ab", kind="upload", hotkey="5Hotkey", verify=verify
    )
    assert opened.digest == digest and opened.header == layout.header
    for name, shape in SCHEMA:
        off = (opened.decode(name, shape) - values[name]).square().mean()
        assert off <= {4: 0.02, 3: 0.08, 2: 0.3}[bits] * values[name].square().mean()
