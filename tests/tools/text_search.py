"""Look for a text in other bytes: as it is, and as token ids, binary or in decimals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

WINDOW = 32  # bytes of text, and tokens
_STRIDE = 16
_GRAM = 8
_PART = 2**26  # bytes read at once
_NUMBERS = re.compile(rb"(?:\d{1,6}\D{1,3}){31}\d{1,6}")


class Text:
    """All runs of ``WINDOW`` bytes of a text that are in none of ``others``.

    ``ids``: the token of each byte, below 65,535.
    """

    def __init__(self, text: bytes, ids: NDArray[np.int64], others: list[bytes]) -> None:
        known = {other[at : at + WINDOW] for other in others for at in range(len(other))}
        own = [at for at in range(len(text) - WINDOW + 1) if text[at : at + WINDOW] not in known]
        tokens = ids.astype("<u2").tobytes()
        self._windows = {text[at : at + WINDOW] for at in own}
        self._tokens = {tokens[2 * at : 2 * (at + WINDOW)] for at in own}
        self._grams = _grams(self._windows)
        self._token_grams = _grams(self._tokens)

    def __len__(self) -> int:
        return len(self._windows)

    def ways(self, path: Path) -> set[str]:
        """Return how the file holds any of it."""
        return {way for part in _parts(path) for way in self.ways_of(part)}

    def ways_of(self, data: bytes) -> Iterator[str]:
        if _holds(data, self._windows, self._grams, WINDOW):
            yield "bytes"
        for width in (2, 4, 8):
            for start in range(min(width, len(data))):
                count = (len(data) - start) // width
                values = np.frombuffer(data, f"<u{width}", count, start)
                # What is no token becomes one that the text does not have.
                small = np.minimum(values, 65_535).astype("<u2").tobytes()
                if _holds(small, self._tokens, self._token_grams, 2 * WINDOW):
                    yield f"int{8 * width}"
                    break
        for match in _NUMBERS.finditer(data):
            around = data[match.start() : match.end() + 8 * WINDOW]
            numbers = np.array([int(n) for n in re.findall(rb"\d{1,6}", around)])
            small = np.minimum(numbers, 65_535).astype("<u2").tobytes()
            if _holds(small, self._tokens, self._token_grams, 2 * WINDOW):
                yield "decimals"
                return


def _grams(windows: set[bytes]) -> NDArray[np.uint64]:
    """Return all runs of 8 bytes of the windows, sorted."""
    joined = np.frombuffer(b"".join(windows), np.uint8).reshape(len(windows), -1)
    grams = np.lib.stride_tricks.sliding_window_view(joined, _GRAM, axis=1)
    return np.unique(np.ascontiguousarray(grams).view("<u8"))


def _holds(data: bytes, windows: set[bytes], grams: NDArray[np.uint64], size: int) -> bool:
    """Return whether ``data`` has one of ``windows``, of ``size`` bytes each."""
    if len(data) < size:
        return False
    # A window has one of its grams at each multiple of the stride; few others have any.
    words = np.frombuffer(data, "<u8", len(data) // 8)[:: _STRIDE // 8]
    at = np.searchsorted(grams, words)
    found = np.flatnonzero(grams[np.minimum(at, len(grams) - 1)] == words) * _STRIDE
    for place in found.tolist():
        for start in range(max(0, place + _GRAM - size), min(place, len(data) - size) + 1):
            if data[start : start + size] in windows:
                return True
    return False


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        before = b""
        while part := file.read(_PART):
            yield before + part
            before = part[-8 * WINDOW :]
