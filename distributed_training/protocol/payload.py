"""``gradients.pt``: all parameters' codes and where they were taken (protocol page, section 4).

A dictionary ``{name + "idxs": int16, name + "vals": float32, ..., "metadata": {...}}``, metadata
being the integers ``block``, ``inner_step``, ``outer_step`` and the float ``loss``; written with
``torch.save`` and read with ``weights_only``. Payloads come from untrusted peers: size, types,
shapes, indices and finiteness are checked before anything is decoded.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from distributed_training.protocol.gradients import check_code, decode, encoded_shape, layout
from distributed_training.protocol.metadata import GradientMetadata, PayloadError
from distributed_training.protocol.pt_file import PtFileError, read_pt, refuse_calls

Schema = Sequence[tuple[str, tuple[int, ...]]]  # (parameter name, shape), state_dict order

_METADATA = "metadata"
_BYTES_PER_ENTRY = 2 + 4
_BYTES_PER_RECORD = 1024  # zip headers, alignment and pickle of one tensor, generously


@dataclass(frozen=True)
class GradientPayload:
    """A checked payload. ``codes``: parameter name -> (idxs, vals); names may be missing."""

    metadata: GradientMetadata
    codes: Mapping[str, tuple[torch.Tensor, torch.Tensor]]

    def decode(self, name: str, shape: Sequence[int]) -> torch.Tensor | None:
        """Return the parameter's float32 pseudo-gradient, None if it was not sent."""
        code = self.codes.get(name)
        if code is None:
            return None
        return decode(*code, shape)


def max_payload_bytes(schema: Schema) -> int:
    """Return more bytes than any honest ``gradients.pt`` takes; check it before downloading."""
    total = 64 * 1024
    for name, shape in schema:
        total += math.prod(encoded_shape(shape)) * _BYTES_PER_ENTRY + 2 * (
            _BYTES_PER_RECORD + 8 * len(name)
        )
    return total


def load_payload(source: Path | bytes, schema: Schema) -> GradientPayload:
    """Read and check a ``gradients.pt`` for a model with the parameters of ``schema``.

    Follows what the network's validators accept: parameters may be missing, rows and entries fewer
    than the full code, indices of any integer width. Entries of no parameter are ignored. Raises
    PayloadError for everything validators reset an upload for: too large, unreadable, no metadata,
    wrong type or shape, an index out of range, NaN or Inf.
    """
    raw = _read(source, max_payload_bytes(schema))
    metadata = GradientMetadata.parse(raw.get(_METADATA))
    codes = {}
    for name, shape in schema:
        idxs, vals = raw.get(name + "idxs"), raw.get(name + "vals")
        if idxs is None and vals is None:
            continue
        # Others (sparse, quantized, of a device) obey other rules than the checks below go by.
        if not _plain_tensor(idxs) or not _plain_tensor(vals):
            raise PayloadError(f"{name}: idxs and vals are not both dense tensors on the CPU")
        try:
            # Before the values: one element with stride 0 may claim to be terabytes of them.
            check_code(idxs, vals, layout(shape, use_dct=False))
        except ValueError as error:
            raise PayloadError(f"{name}: {error}") from None
        if not bool(torch.isfinite(vals).all()):
            raise PayloadError(f"{name}: vals hold NaN or Inf")
        # A parameter in place of a tensor would have autograd record, and keep, all done with it.
        codes[name] = (idxs, vals.detach())
    return GradientPayload(metadata, codes)


def _plain_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
    )


def _read(source: Path | bytes, limit: int) -> dict[str, Any]:
    size = len(source) if isinstance(source, bytes) else source.stat().st_size
    if size > limit:
        raise PayloadError(f"gradients.pt has {size} bytes; this model's has at most {limit}")
    file: Any = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        # torch reads the file again and by rules of its own: read_pt refuses where they differ.
        refuse_calls(read_pt(file))
        if isinstance(source, bytes):
            file.seek(0)
        # On the CPU, whatever GPU the file names: that may be one that trains.
        raw = torch.load(file, map_location="cpu", weights_only=True)
    except PtFileError as error:
        raise PayloadError(f"gradients.pt cannot be read: {error}") from None
    except (
        pickle.UnpicklingError,
        RuntimeError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        EOFError,
        OverflowError,
        MemoryError,
    ) as error:  # what torch.load raises on files made by others
        first = str(error).strip().splitlines()[:1]
        raise PayloadError(
            f"gradients.pt cannot be read: {first[0] if first else error!r}"
        ) from None
    if not isinstance(raw, dict):
        raise PayloadError("gradients.pt is not a dictionary")
    return raw
