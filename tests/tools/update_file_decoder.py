"""Decode an upload or an update, as another program would by the protocol page (section 4).

Nothing of the product is imported, so the page is enough to write another program. The signature
is returned with what it signs; who checks it needs sr25519.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np

PLANES = {4: (4,), 3: (2, 1), 2: (2,)}
FILLED = {4: 2, 3: 8, 2: 4}


@dataclass
class Decoded:
    header: dict[str, Any]
    values: dict[str, np.ndarray]  # float32 (rows, columns)
    digest: str
    message: bytes
    signature: bytes


def canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def parameter(scales: np.ndarray, codes: np.ndarray, columns: int, bits: int) -> np.ndarray:
    """Decode codes (rows, bytes) and scales (rows, groups) into (rows, columns)."""
    filled = -(-columns // FILLED[bits]) * FILLED[bits]
    numbers = np.zeros((len(codes), filled), np.int32)
    shift = begin = 0
    for width in PLANES[bits]:
        length = filled * width // 8
        plane = codes[:, begin : begin + length]
        for place in range(8 // width):
            number = (plane >> (width * place)) & (2**width - 1)
            at = slice(place * length, (place + 1) * length)
            numbers[:, at] += number.astype(np.int32) << shift
        begin, shift = begin + length, shift + width
    assert begin == codes.shape[1]
    whole = {4: numbers - 8, 3: 2 * numbers - 7, 2: 2 * numbers - 3}[bits]
    each = np.repeat(scales, 256, axis=1)[:, :columns]
    return whole[:, :columns].astype(np.float32) * each


def decode(data: bytes, columns: dict[str, int]) -> Decoded:
    """Decode and check a file; ``columns``: of each parameter. Raises ValueError."""
    length = int.from_bytes(data[:8], "little")
    text, body = data[8 : 8 + length], data[8 + length :]
    table = json.loads(text)
    metadata = table["__metadata__"]
    header, signature = json.loads(metadata["header"]), metadata["signature"]
    if canonical(table).encode() + b" " * (length - len(text.rstrip())) != text or length % 8:
        raise ValueError("the header is not canonical")
    if canonical(header) != metadata["header"] or len(signature) != 128:
        raise ValueError("what the header says is not canonical")
    if hashlib.sha256(body).hexdigest() != metadata["body"]:
        raise ValueError("another body than was signed")
    unsigned = canonical({**table, "__metadata__": {**metadata, "signature": "0" * 128}}).encode()
    unsigned = data[:8] + unsigned.ljust(length)
    message = b"update-file 1 " + hashlib.sha256(unsigned).hexdigest().encode()
    found: dict[str, np.ndarray] = {}
    for name, entry in table.items():
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            kind = {"F32": "<f4", "U8": "u1"}[entry["dtype"]]
            found[name] = np.frombuffer(body[first:last], kind).reshape(entry["shape"])
    values = {}
    for name, count in columns.items():
        scales, codes = found[f"{name}.scales"], found[f"{name}.codes"]
        if not ((scales == 0) | ((scales >= 2.0**-126) & (scales < 2.0**125))).all():
            raise ValueError("a scale that is none")
        values[name] = parameter(scales, codes, count, header["bits"])
    return Decoded(
        header, values, hashlib.sha256(data).hexdigest(), message, bytes.fromhex(signature)
    )
