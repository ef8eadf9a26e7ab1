"""Train on local text: ``--plugins examples.line_files --data.source jsonl:DIR``, or ``text:DIR``.

Rows are groups of consecutive lines; their offsets are found in one scan of each file.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import tokenize
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from distributed_training.common.files import atomic_file
from distributed_training.data.page_source import PAGE, TOO_LONG, Counts
from distributed_training.data.parquet import FolderSource
from distributed_training.data.sources import SOURCES, Opening, SourceKind

log = logging.getLogger(__name__)

_ROW_BYTES = 1000  # bytes of plain text in a row; short enough in any tokenizer's tokens
_INDEX_CHUNK = 4 * 2**20
# Errors that np.load raises for an empty file, or bytes that look like a header or another format.
_DAMAGED = (
    *(OSError, ValueError, EOFError, LookupError, OverflowError, SyntaxError),
    *(zipfile.BadZipFile, tokenize.TokenError),
)


class _LinesSource(FolderSource):
    """Rows are groups of consecutive lines; their offsets are found in one scan."""

    def __init__(self, folder: Path, *, counts: Counts) -> None:
        super().__init__(folder, counts=counts)
        self._starts: dict[Path, np.ndarray[Any, Any]] = {}  # int64 (rows + 1,), byte offsets

    def _scan(self, path: Path) -> int:
        self._starts[path] = self._row_starts(path)
        return len(self._starts[path]) - 1

    def _row_starts(self, path: Path) -> np.ndarray[Any, Any]:
        raise NotImplementedError

    def _read(self, path: Path, first: int, count: int) -> Iterator[object]:
        starts = self._starts[path][first : first + count + 1].tolist()
        with path.open("rb") as file:
            file.seek(starts[0])
            for begin, end in itertools.pairwise(starts):
                if end - begin > PAGE:
                    file.seek(end)
                    yield TOO_LONG
                else:
                    yield self._value(file.read(end - begin).decode("utf-8", "surrogateescape"))

    def _value(self, text: str) -> object:
        return text


class JsonLinesSource(_LinesSource):
    """``*.jsonl`` and ``*.ndjson``. The offsets of the lines are kept in the folder ``index``."""

    suffixes = (".jsonl", ".ndjson")

    def __init__(self, folder: Path, *, text_key: str, index: Path | None, counts: Counts) -> None:
        super().__init__(folder, counts=counts)
        self._key = text_key
        self._index = index

    def _value(self, text: str) -> object:
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError):  # RecursionError: the line is nested too deeply
            return None
        return entry.get(self._key) if isinstance(entry, dict) else None

    def _row_starts(self, path: Path) -> np.ndarray[Any, Any]:
        if self._index is None:
            return _scan_lines(path)
        stat = path.stat()
        name = f"{path.absolute()} {stat.st_size} {stat.st_mtime_ns}"
        kept = self._index / f"lines-{hashlib.sha256(name.encode()).hexdigest()[:24]}.npy"
        try:
            starts = np.asarray(np.load(kept, mmap_mode="r"))
            # Checking both ends is enough: a power loss leaves the front of a file, or zeros.
            if starts.ndim == 1 and (starts[0], starts[-1]) == (0, stat.st_size):
                return starts
            log.warning("%s is damaged and will be made again", kept)
        except FileNotFoundError:
            pass
        except _DAMAGED as error:
            log.warning("%s is damaged and will be made again: %s", kept, error)
        starts = _scan_lines(path)
        # Sync this to the disk: a file is scanned only once, but that may take an hour.
        with atomic_file(kept) as file:
            np.save(file, starts)
        return starts


class TextSource(_LinesSource):
    """``*.txt``, ``*.md`` and ``*.rst``, cut at line ends into rows of about 1000 bytes."""

    suffixes = (".txt", ".md", ".rst")

    def _row_starts(self, path: Path) -> np.ndarray[Any, Any]:
        return _scan_lines(path, stretch=_ROW_BYTES)


def _scan_lines(path: Path, *, stretch: int = 1) -> np.ndarray[Any, Any]:
    """Return the offsets of the rows and of the end of the file: int64 (rows + 1,).

    The first line that begins in each ``stretch`` of bytes begins a row.
    """
    pieces = [np.zeros(1, dtype=np.int64)]
    at = 0
    with path.open("rb") as file:
        while chunk := file.read(_INDEX_CHUNK):
            starts = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n")) + (at + 1)
            at += len(chunk)
            # Do this for each chunk: the offsets of short lines take more memory than the file.
            _, firsts = np.unique(starts // stretch, return_index=True)
            starts = starts[firsts]
            if len(starts) and starts[0] // stretch == pieces[-1][-1] // stretch:
                starts = starts[1:]
            if len(starts):
                pieces.append(starts)
    found = np.concatenate(pieces)
    return np.append(found[found < at], at)


def _open_jsonl(opening: Opening) -> FolderSource:
    key, counts = opening.settings.text_column, opening.counts
    return JsonLinesSource(opening.folder, text_key=key, index=opening.cache, counts=counts)


def _open_text(opening: Opening) -> FolderSource:
    return TextSource(opening.folder, counts=opening.counts)


KINDS = {"jsonl": _open_jsonl, "text": _open_text}
for _kind, _open in KINDS.items():
    SOURCES.register(_kind, SourceKind(_open, in_folder=True))
