"""Compress pseudo-gradients, and read the file of an upload (protocol page, section 4).

After many inner steps a miner uploads how far its weights moved: the *pseudo-gradient*, epoch-start
weights minus current weights. Most of that movement is in few entries, so of each row of a matrix
only the 32 entries largest in magnitude are sent, with their columns; of a vector, the same per
chunk of at most 64. A model of 4 billion parameters shrinks from 16 GB to about 230 MB. Source
of the format: protocol page, section 4, and the public network's compressor, which the vectors in
``tests/vectors`` were recorded from.

A dimension is cut into chunks of its largest divisor that is at most ``target_chunk``. So the code
of a range of whole rows of a matrix is the same range of the code of the matrix: ranks that each
hold some rows encode their own and rank 0 concatenates along rows (:func:`encode_rows`,
:func:`encoded_shape`).

With DCT a matrix is cut into tiles, each tile transformed (DCT-II, orthonormal) and the largest
coefficients of the tile kept. The two forms cannot be told apart by a reader and must not be mixed;
the public network never uses DCT.

A ``(idxs int16, vals float32)`` pair has the shape :func:`encoded_shape` gives. The order of
entries within a row carries no meaning; this encoder writes ascending indices.

``gradients.pt`` holds all parameters' codes and where they were taken, a dictionary
``{name + "idxs": int16, name + "vals": float32, ..., "metadata": {...}}``, metadata being the
integers ``block``, ``inner_step``, ``outer_step`` and the float ``loss``; written with
``torch.save`` and read with ``weights_only``. Payloads come from untrusted peers: size, types,
shapes, indices and finiteness are checked before anything is decoded.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .compression import Code, Compression
from .metadata import GradientMetadata, PayloadError
from .pt_file import PtFileError, read_pt, refuse_calls

TOPK = 32
TARGET_CHUNK = 64
MAX_INDEX = 32767  # int16

# Elements handled at once: copies of a slab stay in the cache, and below malloc's mmap limit.
_SLAB = 1 << 17
_CUDA_SLAB = 1 << 26


@dataclass(frozen=True)
class Layout:
    """The arrangement of a parameter's entries for selection.

    ``view``: the shape the chunks make of the tensor, in memory order. ``coded``: leading
    dimensions of the code, one selection each. ``candidates``: how many entries each selection
    chooses from; indices are in ``[0, candidates)``.
    """

    view: tuple[int, ...]
    coded: tuple[int, ...]
    candidates: int


def largest_divisor(n: int, limit: int) -> int:
    """Return the largest divisor of ``n`` that is at most ``limit`` (2048 -> 64, 1000 -> 50)."""
    return next((d for d in range(min(n, limit), 0, -1) if n % d == 0), 1)


def layout(shape: Sequence[int], *, target_chunk: int = TARGET_CHUNK, use_dct: bool) -> Layout:
    """Return the layout of a parameter of ``shape``.

    Raises ValueError unless the shape has 1 or 2 dimensions and its indices fit into int16.
    """
    if len(shape) == 1:
        chunk = largest_divisor(shape[0], target_chunk)
        found = Layout((shape[0] // chunk, chunk), (shape[0] // chunk,), chunk)
    elif len(shape) == 2:
        rows, columns = shape
        h, w = largest_divisor(rows, target_chunk), largest_divisor(columns, target_chunk)
        view = (rows // h, h, columns // w, w)
        if use_dct:
            found = Layout(view, (rows // h, columns // w), h * w)
        else:
            found = Layout(view, (rows // h, h), columns)
    else:
        raise ValueError(f"a parameter of shape {tuple(shape)} has no code: 1 or 2 dimensions only")
    if found.candidates - 1 > MAX_INDEX:
        raise ValueError(
            f"a parameter of shape {tuple(shape)} needs indices up to {found.candidates - 1}, "
            f"but they travel as int16 (at most {MAX_INDEX})"
        )
    return found


def encoded_shape(
    shape: Sequence[int],
    *,
    topk: int = TOPK,
    target_chunk: int = TARGET_CHUNK,
    use_dct: bool = False,
) -> tuple[int, ...]:
    """Return the shape that ``idxs`` and ``vals`` of a parameter have.

    Args:
        shape: The parameter's, of 1 or 2 dimensions.
        topk: Entries to keep in each selection, at least 1.
        target_chunk: Upper bound of a chunk's length, in entries.
        use_dct: Whether entries are coefficients of tiles instead of the values themselves.

    Raises:
        ValueError: As :func:`layout`.
    """
    found = layout(shape, target_chunk=target_chunk, use_dct=use_dct)
    return (*found.coded, min(topk, found.candidates))


def encode(
    tensor: torch.Tensor,
    *,
    topk: int = TOPK,
    target_chunk: int = TARGET_CHUNK,
    use_dct: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compress a parameter-shaped tensor to its entries largest in magnitude.

    NaN counts as the largest magnitude, so it is sent and not hidden. Which of two equal entries is
    sent is up to the implementation.

    Args:
        tensor: Any floating dtype, of 1 or 2 dimensions, on any device.
        topk: Entries to keep in each selection, at least 1.
        target_chunk: Upper bound of a chunk's length, in entries.
        use_dct: Transform tiles by a DCT-II first, and keep its largest coefficients.

    Returns:
        ``idxs`` (int16) and ``vals`` (float32), both of :func:`encoded_shape`, on the tensor's
            device.

    Raises:
        ValueError: As :func:`layout`, and for ``topk < 1``.
    """
    if topk < 1:
        raise ValueError(f"topk is {topk}; at least 1 entry must be kept")
    found = layout(tensor.shape, target_chunk=target_chunk, use_dct=use_dct)
    x = tensor.detach().to(torch.float32).contiguous()
    if use_dct:
        x = _dct(x.view(found.view))
    idxs, vals = encode_rows(x.reshape(-1, found.candidates), topk=topk)
    shape = (*found.coded, idxs.shape[-1])
    return idxs.view(shape), vals.view(shape)


def encode_rows(rows: torch.Tensor, *, topk: int = TOPK) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the ``min(topk, columns)`` entries of each row that are largest in magnitude.

    Without DCT, :func:`encode` of a matrix is exactly this, reshaped.

    Args:
        rows: float32, contiguous, ``(n, columns)``.
        topk: Entries to keep in each row, at least 1.

    Returns:
        ``idxs`` (int16) and ``vals`` (float32), both ``(n, min(topk, columns))`` and ascending by
        index within a row.

    Raises:
        ValueError: If an index would not fit into int16.
    """
    n, columns = rows.shape
    k = min(topk, columns)
    if columns - 1 > MAX_INDEX:
        raise ValueError(f"{columns} columns need indices beyond int16")
    if k == columns or n == 0:
        idxs = torch.arange(columns, dtype=torch.int16, device=rows.device)[:k].expand(n, k)
        return idxs.contiguous(), rows[:, :k].clone()
    if rows.device.type != "cpu":
        return _select_on_device(rows, k)
    idxs = torch.empty((n, k), dtype=torch.int16)
    vals = torch.empty((n, k), dtype=torch.float32)
    # torch.topk on CPU walks rows entry by entry; numpy's partition of the magnitudes' bit patterns
    # is vectorized and finds the same threshold several times faster.
    step = max(1, _SLAB // columns)
    slabs = [slice(start, min(start + step, n)) for start in range(0, n, step)]
    source, out_idxs, out_vals = rows.numpy(), idxs.numpy(), vals.numpy()

    def work(slab: slice) -> None:
        _select(source[slab], k, out_idxs[slab], out_vals[slab])

    # No more than torch has: the encoder runs during training.
    threads = min(torch.get_num_threads(), len(slabs))
    if threads > 1:
        list(_pool(threads).map(work, slabs))  # list: raises what a slab raised
    else:
        for slab in slabs:
            work(slab)
    return idxs, vals


def decode(
    idxs: torch.Tensor,
    vals: torch.Tensor,
    shape: Sequence[int],
    *,
    target_chunk: int = TARGET_CHUNK,
    use_dct: bool = False,
) -> torch.Tensor:
    """Rebuild the tensor that a pair ``idxs``, ``vals`` stands for; an entry not sent is 0.

    As the network's validators do, accepts fewer entries or rows than the full code, and averages
    entries that were sent twice.

    Args:
        idxs: int16, int32 or int64, of :func:`encoded_shape` or smaller.
        vals: float32, of the same shape.
        shape: The parameter's, of 1 or 2 dimensions.
        target_chunk: As the encoder had it.
        use_dct: As the encoder had it.

    Returns:
        float32 of ``shape``, on the device of ``vals``.

    Raises:
        ValueError: For any other shape or dtype, and for an index outside its range.
    """
    found = layout(shape, target_chunk=target_chunk, use_dct=use_dct)
    check_code(idxs, vals, found)
    rows = torch.zeros((*found.coded, found.candidates), dtype=torch.float32, device=vals.device)
    index = idxs.to(torch.int64)
    if bool((index[..., 1:] > index[..., :-1]).all()):  # ascending, so nothing was sent twice
        rows.scatter_(-1, index, vals)
    else:
        rows.scatter_reduce_(-1, index, vals, reduce="mean", include_self=False)
    if use_dct:
        return _inverse_dct(rows, found.view).reshape(tuple(shape))
    return rows.view(tuple(shape))


def subtract_sent_(
    tensor: torch.Tensor,
    idxs: torch.Tensor,
    vals: torch.Tensor,
    *,
    target_chunk: int = TARGET_CHUNK,
    use_dct: bool = False,
) -> None:
    """Subtract ``decode(idxs, vals)`` from ``tensor`` in place.

    Without DCT the entries that were sent are the tensor's own, so they are set to 0 and nothing is
    decoded.

    Args:
        tensor: float32, contiguous, of 1 or 2 dimensions.
        idxs: int16, as :func:`encode` returned them for this very tensor.
        vals: float32, as :func:`encode` returned them.
        target_chunk: As the encoder had it.
        use_dct: As the encoder had it.
    """
    if use_dct:
        tensor -= decode(idxs, vals, tensor.shape, target_chunk=target_chunk, use_dct=True)
        return
    found = layout(tensor.shape, target_chunk=target_chunk, use_dct=False)
    rows = tensor.view(-1, found.candidates)
    rows.scatter_(-1, idxs.reshape(rows.shape[0], -1).to(torch.int64), 0.0)


@dataclass(frozen=True)
class TopK(Compression):
    """Sends the entries of each row that are largest in magnitude: the public network's kind."""

    topk: int = TOPK
    target_chunk: int = TARGET_CHUNK
    use_dct: bool = False

    endings = ("idxs", "vals")
    scaled = ("vals",)

    @property
    def by_rows(self) -> bool:
        return not self.use_dct

    def encode(self, whole: torch.Tensor) -> Code:
        return encode(whole, topk=self.topk, target_chunk=self.target_chunk, use_dct=self.use_dct)

    def encode_rows(self, rows: torch.Tensor) -> Code:
        return encode_rows(rows, topk=self.topk)

    def decode(self, code: Code, shape: Sequence[int]) -> torch.Tensor:
        idxs, vals = code
        return decode(idxs, vals, shape, target_chunk=self.target_chunk, use_dct=self.use_dct)

    def subtract_sent(self, whole: torch.Tensor, code: Code) -> None:
        idxs, vals = code
        subtract_sent_(whole, idxs, vals, target_chunk=self.target_chunk, use_dct=self.use_dct)

    def check(self, code: Code, shape: Sequence[int]) -> None:
        idxs, vals = code
        check_code(idxs, vals, layout(shape, target_chunk=self.target_chunk, use_dct=self.use_dct))

    def shapes(self, shape: Sequence[int]) -> list[tuple[tuple[int, ...], torch.dtype]]:
        coded = encoded_shape(
            shape, topk=self.topk, target_chunk=self.target_chunk, use_dct=self.use_dct
        )
        return [(coded, torch.int16), (coded, torch.float32)]


TOP_K = TopK()  # as the public network's miners encode, and its validators read


def check_code(idxs: torch.Tensor, vals: torch.Tensor, found: Layout) -> None:
    """Raise ValueError unless the pair can be the code of a parameter with that layout."""
    if vals.dtype != torch.float32:
        raise ValueError(f"vals are {vals.dtype}, not float32")
    if idxs.dtype not in (torch.int16, torch.int32, torch.int64):
        raise ValueError(f"idxs are {idxs.dtype}, not int16")
    if idxs.shape != vals.shape:
        raise ValueError(f"idxs {tuple(idxs.shape)} and vals {tuple(vals.shape)} differ in shape")
    bound = (*found.coded, found.candidates)
    if idxs.dim() != len(bound) or any(a > b for a, b in zip(idxs.shape, bound, strict=True)):
        raise ValueError(f"a code of shape {tuple(idxs.shape)} does not fit into {bound}")
    if idxs.numel():
        low, high = (int(x) for x in torch.aminmax(idxs))
        if low < 0 or high >= found.candidates:
            raise ValueError(f"indices {low}..{high} are outside 0..{found.candidates - 1}")


def _select(rows: np.ndarray, k: int, idxs: np.ndarray, vals: np.ndarray) -> None:
    """Fill ``idxs`` and ``vals`` for a slab of float32 rows with more than ``k`` columns.

    The bit patterns of non-negative floats order as the floats do (NaN above infinity), and
    integers partition faster.
    """
    n, columns = rows.shape
    magnitude = rows.view(np.int32) & np.int32(0x7FFFFFFF)
    scratch = magnitude.copy()
    scratch.partition(columns - k, axis=-1)
    chosen = magnitude >= scratch[:, columns - k, None]
    flat = np.flatnonzero(chosen)
    if flat.size != n * k:  # some rows have ties at the threshold: take the first of them
        tied_rows = np.flatnonzero(np.count_nonzero(chosen, axis=-1) != k)
        some, threshold = magnitude[tied_rows], scratch[tied_rows, columns - k, None]
        above, at = some > threshold, some == threshold
        room = k - np.count_nonzero(above, axis=-1, keepdims=True)
        chosen[tied_rows] = above | (at & (np.cumsum(at, axis=-1, dtype=np.int32) <= room))
        flat = np.flatnonzero(chosen)
    # clip: numpy would buffer the result to raise for an index, and there is none to raise for.
    np.take(rows.reshape(-1), flat.reshape(n, k), out=vals, mode="clip")
    flat -= np.repeat(np.arange(0, n * columns, columns, dtype=flat.dtype), k)
    idxs[:] = flat.reshape(n, k)


def _select_on_device(rows: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    step = max(1, _CUDA_SLAB // rows.shape[1])
    idxs, vals = [], []
    for part in rows.split(step):
        # Ascending, as on the CPU: decode() has a faster way for it.
        index = part.abs().topk(k, dim=-1, sorted=False).indices.sort(dim=-1).values
        idxs.append(index.to(torch.int16))
        vals.append(part.gather(-1, index))
    return torch.cat(idxs), torch.cat(vals)


@functools.lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="encode")


# --- DCT ----------------------------------------------------------------------------------------
# Both bases are made by way of a float32 FFT of the unit vectors, as the network's peers make them:
# exact cosines differ from theirs in the last bits, by which processors differ too.


@functools.lru_cache(maxsize=64)
def _dct_basis(n: int) -> torch.Tensor:
    """Return the ``(n, n)`` float32 basis by which the orthonormal DCT-II is ``x @ basis``."""
    eye = torch.eye(n, dtype=torch.float64)  # see _dct
    spectrum = torch.fft.fft(torch.cat([eye[:, ::2], eye[:, 1::2].flip([1])], dim=1), dim=1)
    angle = -torch.arange(n, dtype=torch.float64)[None, :] * math.pi / (2 * n)
    basis = spectrum.real * torch.cos(angle) - spectrum.imag * torch.sin(angle)
    return (2 * (basis / _norms(n))).float()


@functools.lru_cache(maxsize=64)
def _inverse_basis(n: int) -> torch.Tensor:
    """Return ``(n, n)`` float32 such that ``x @ basis`` undoes ``x @ _dct_basis(n)``."""
    real = torch.eye(n) / 2 * _norms(n)
    imaginary = torch.cat([torch.zeros(n, 1), -real.flip([1])[:, :-1]], dim=1)
    angle = torch.arange(n, dtype=torch.float32)[None, :] * math.pi / (2 * n)
    cos, sin = torch.cos(angle), torch.sin(angle)
    spectrum = torch.complex(real * cos - imaginary * sin, real * sin + imaginary * cos)
    folded = torch.fft.irfft(spectrum[:, : n // 2 + 1], n=n, dim=1)
    basis = torch.empty(n, n)
    basis[:, ::2] = folded[:, : n - n // 2]
    basis[:, 1::2] = folded.flip([1])[:, : n // 2]
    return basis


def _norms(n: int) -> torch.Tensor:
    return torch.tensor([math.sqrt(n) * 2] + [math.sqrt(n / 2) * 2] * (n - 1))


def _dct(x: torch.Tensor) -> torch.Tensor:
    """Transform ``(chunks, n)`` by chunk, or ``(row chunks, h, column chunks, w)`` by tile."""
    # float32 products differ in the last bits with the number of threads on some processors, and
    # equal weights must give equal indices on all miners. In float64 rounding hides that.
    if x.dim() == 2:
        return (x.double() @ _dct_basis(x.shape[1]).to(x.device).double()).to(x.dtype)
    tiles = x.permute(0, 2, 1, 3).double()
    down, across = (_dct_basis(n).to(x.device).double() for n in tiles.shape[-2:])
    return (down.T @ tiles @ across).to(x.dtype)


def _inverse_dct(rows: torch.Tensor, view: tuple[int, ...]) -> torch.Tensor:
    """Transform coefficients ``(..., candidates)`` back, to the parameter's memory order."""
    if len(view) == 2:
        return rows @ _inverse_basis(view[1]).to(rows.device)
    row_chunks, h, column_chunks, w = view
    down, across = (_inverse_basis(n).to(rows.device) for n in (h, w))
    tiles = rows.view(row_chunks, column_chunks, h, w)
    return (down.T @ tiles @ across).permute(0, 2, 1, 3)


# --- gradients.pt -------------------------------------------------------------------------------

Schema = Sequence[tuple[str, tuple[int, ...]]]  # (parameter name, shape), state_dict order

_METADATA = "metadata"
_BYTES_PER_RECORD = 1024  # zip headers, alignment and pickle of one tensor, generously


@dataclass(frozen=True)
class GradientPayload:
    """A checked payload. ``codes``: by parameter name; names may be missing."""

    metadata: GradientMetadata
    codes: Mapping[str, Code]
    compression: Compression = TOP_K

    def decode(self, name: str, shape: Sequence[int]) -> torch.Tensor | None:
        """Return the parameter's float32 pseudo-gradient, None if it was not sent."""
        code = self.codes.get(name)
        if code is None:
            return None
        return self.compression.decode(code, shape)


def max_payload_bytes(schema: Schema, compression: Compression = TOP_K) -> int:
    """Return more bytes than any honest ``gradients.pt`` takes; check it before downloading."""
    total = 64 * 1024
    for name, shape in schema:
        for coded, dtype in compression.shapes(shape):
            total += math.prod(coded) * dtype.itemsize + _BYTES_PER_RECORD + 8 * len(name)
    return total


def load_payload(
    source: Path | bytes, schema: Schema, compression: Compression = TOP_K
) -> GradientPayload:
    """Read and check a ``gradients.pt`` for a model with the parameters of ``schema``.

    Follows what the network's validators accept: parameters may be missing, rows and entries fewer
    than the full code, indices of any integer width. Entries of no parameter are ignored. Raises
    PayloadError for everything validators reset an upload for: too large, unreadable, no metadata,
    wrong type or shape, an index out of range, NaN or Inf.
    """
    raw = _read(source, max_payload_bytes(schema, compression))
    metadata = GradientMetadata.parse(raw.get(_METADATA))
    codes = {}
    for name, shape in schema:
        sent = [raw.get(name + ending) for ending in compression.endings]
        if all(part is None for part in sent):
            continue
        # Others (sparse, quantized, of a device) obey other rules than the checks below go by.
        parts = [
            part
            for part in sent
            if isinstance(part, torch.Tensor)
            and part.layout == torch.strided
            and part.device.type == "cpu"
            and not part.is_quantized
        ]
        if len(parts) != len(sent):
            what = " and ".join(compression.endings)
            raise PayloadError(f"{name}: {what} are not all dense tensors on the CPU")
        # A parameter in place of a tensor would have autograd record, and keep, all done with it.
        code = tuple(part.detach() for part in parts)
        try:
            # Before the values: one element with stride 0 may claim to be terabytes of them.
            compression.check(code, shape)
        except ValueError as error:
            raise PayloadError(f"{name}: {error}") from None
        for ending, part in zip(compression.endings, code, strict=True):
            if part.is_floating_point() and not bool(torch.isfinite(part).all()):
                raise PayloadError(f"{name}: {ending} hold NaN or Inf")
        codes[name] = code
    return GradientPayload(metadata, codes, compression)


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
    except Exception as error:  # torch promises none for foreign bytes, and asserts in places
        first = str(error).strip().splitlines()[:1]
        raise PayloadError(
            f"gradients.pt cannot be read: {first[0] if first else error!r}"
        ) from error
    if not isinstance(raw, dict):
        raise PayloadError("gradients.pt is not a dictionary")
    return raw
