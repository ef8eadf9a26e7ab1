"""Read a member's own text from the files that ``--data.own_text`` names.

The network's file allows this with ``data.own``. Only this module reads the text. Nothing leaves
this machine except what was learned from it.

All files together form one sequence of bytes, which is cut into *units* of 2 to 32 KiB. A unit
consists of the lines that begin in it, or of the rows in that part of a Parquet file. Each pass
over the text has its own random order, which depends only on the number of units. So the number of
the next unit fully describes the position in the text. Checkpoints contain this number, so that a
kill neither repeats nor loses a unit. The ranks take turns to read units.
"""

from __future__ import annotations

import bisect
import codecs
import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from distributed_training.config.settings import DataSettings
from distributed_training.config.types import ConfigAway, ConfigError

from .page_source import PAGE, TOO_LONG, Counts, PageUnavailable, SourceTokens, usable_texts
from .parquet import ParquetSource, files_below, raise_if_it_may_pass
from .tokenizer import text_tokenizer

log = logging.getLogger(__name__)

UNIT, _SMALLEST = 2**15, 2**11  # bytes
# A token has about four bytes with most tokenizers, and one byte with the byte tokenizer. With a
# value of 2, a block has about as much text as a block of pages has.
_BYTES_OF_TOKEN = 2
_EDGE = 4096  # bytes after a unit in which to search for the end of its last line
_LOOKED_AT = 2**20  # bytes of each file that are checked at the start
_PIECE = 2**16  # characters of a row that are tokenized at once
_JSON_LINES = (".jsonl", ".ndjson")
_WHOLE = 10**9  # more tokens than any piece has, so that no piece is cut
_SEED = 44  # seed of the order; members may share it, because their texts differ


def units_of_block(settings: DataSettings, sequence_length: int) -> tuple[int, int]:
    """Return how many units a rank reads for a block, and how many bytes a unit has.

    Together, the units have about as much text as the pages of a block would have.
    """
    sequences = settings.pages_per_block * settings.rows_per_page
    wanted = sequences * sequence_length * _BYTES_OF_TOKEN
    unit = min(UNIT, max(_SMALLEST, wanted))
    return -(-wanted // unit), unit


class OwnText:
    """The files of ``--data.own_text``, as one sequence of units.

    Parquet files and JSON lines are recognized by their suffixes; any other file is text. A file
    that is named explicitly must be readable. If a file in a named folder cannot be read,
    ``left_out`` has a line about it. ``unit`` is the number of bytes in a unit, ``UNIT`` by
    default.

    Raises ConfigError if there is no text, and PageUnavailable while a disk is unavailable.
    """

    def __init__(self, settings: DataSettings, counts: Counts, *, unit: int | None = None) -> None:
        self._unit = unit or UNIT
        self._column = settings.text_column
        self._counts = counts
        self._parquet = _ParquetFiles(Path(), text_column=self._column, counts=counts)
        self.left_out: list[str] = []
        self._files: list[Path] = []
        sizes = []
        for path, named in _listed(settings.own_text).items():
            try:
                sizes.append(self._size(path))
                self._files.append(path)
            except (OSError, ValueError) as error:
                raise_if_it_may_pass(error, path)
                why = getattr(error, "strerror", None) or " ".join(str(error).split())
                if named:
                    raise ConfigError(
                        _refusal(f"{path} cannot be trained on: {why:.200}")
                    ) from None
                self.left_out.append(f"{path}: {why:.200}")
        if not self._files:
            first = f" ({self.left_out[0]})" if self.left_out else ""
            given = " ".join(settings.own_text)
            raise ConfigError(_refusal(f"no file of {given} contains text{first}"))
        self._ends = list(itertools.accumulate(sizes))
        self.units = -(-self._ends[-1] // self._unit)

    @property
    def finding(self) -> str:
        """A description of the files that were found."""
        found = f"{len(self._files)} files, {self._ends[-1] / 1e6:.1f} MB"
        if self.left_out:
            found += f"; {len(self.left_out)} left out, first {self.left_out[0]}"
        return found

    def _size(self, path: Path) -> int:
        """Return how many bytes of text a file has. Raises ValueError or OSError for a bad file."""
        size = path.stat().st_size
        if not size:
            raise ValueError("it is empty")
        if path.suffix == ".parquet":
            return self._parquet.open(path)
        with path.open("rb") as file:
            start = file.read(_LOOKED_AT)
        if b"\0" in start:
            raise ValueError("it is not UTF-8 text")
        try:
            codecs.getincrementaldecoder("utf-8")().decode(start, final=len(start) == size)
        except UnicodeDecodeError as error:
            raise ValueError(f"it is not UTF-8 text (byte {error.start})") from None
        if path.suffix in _JSON_LINES and len(start) < PAGE:
            whole = start if len(start) == size else start[: start.rfind(b"\n") + 1]
            if whole and not any(
                isinstance(self._text_of(line), str) for line in whole.split(b"\n")
            ):
                raise ValueError(f"no line has text in {self._column!r}")
        return size

    def rows(self, unit: int) -> Iterator[str]:
        """Yield the text of a unit in pieces of bounded length. Raises OSError, ValueError."""
        first = unit * self._unit
        end = min(first + self._unit, self._ends[-1])
        at = bisect.bisect_right(self._ends, first)
        while first < end:
            start, path = self._ends[at - 1] if at else 0, self._files[at]
            until = min(end, self._ends[at])
            for row in usable_texts(self._read(path, first - start, until - start), self._counts):
                yield from _pieces(row)
            first, at = until, at + 1

    def _read(self, path: Path, begin: int, end: int) -> Iterator[object]:
        if path.suffix == ".parquet":
            yield from self._parquet.part(path, begin, end)
            return
        with path.open("rb") as file:
            if path.suffix in _JSON_LINES:
                for line in _lines(file, begin, end):
                    yield TOO_LONG if line is None else self._text_of(line)
            else:
                begin, end = _edge(file, begin), _edge(file, end)
                file.seek(begin)
                yield file.read(end - begin).decode("utf-8", "surrogateescape")

    def _text_of(self, line: bytes) -> object:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return entry.get(self._column) if isinstance(entry, dict) else None


class OwnTokens:
    """Own text as a source of tokens, for a ``block_builder.WorkerSpec``.

    :meth:`block` expects the number of the block's first unit instead of a block number.
    """

    def __init__(self, spec: Any, counts: Counts) -> None:
        self._spec = spec
        self._counts = counts
        self._tokenizer = text_tokenizer(spec.tokenizer_path, spec.eos_id)
        self._text: OwnText | None = None
        self._orders: dict[int, np.ndarray[Any, Any]] = {}

    def block(self, first: int, pages: int) -> SourceTokens:
        del pages
        count, size = units_of_block(self._spec.settings, self._spec.sequence_length)
        self._text = self._text or OwnText(self._spec.settings, self._counts, unit=size)
        pieces, missing = [np.zeros(0, dtype=np.int32)], []
        for number in range(count):
            unit = self._at(first + number * self._spec.world_size + self._spec.rank)
            try:
                rows = [*self._text.rows(unit)]
            except (OSError, ValueError) as error:
                # If the disk may come back, fail the whole block, so that it is requested again
                # and no text is lost.
                raise_if_it_may_pass(error, Path(str(getattr(error, "filename", "own text"))))
                missing.append(" ".join(str(error).split()))
                continue
            pieces.append(
                self._tokenizer.encode_rows(
                    rows,
                    max_length=_WHOLE,
                    vocabulary=self._spec.vocabulary,
                    counts=self._counts,
                )
            )
        return SourceTokens(np.concatenate(pieces), missing)

    def _at(self, number: int) -> int:
        """Return the unit of the text that is the ``number``-th to be read, over all passes."""
        assert self._text is not None
        passed, place = divmod(number, self._text.units)
        if passed not in self._orders:
            order = np.random.default_rng([_SEED, passed]).permutation(self._text.units)
            # Also keep the order of the previous or next pass, since a block may belong to two.
            self._orders = {p: o for p, o in self._orders.items() if abs(p - passed) == 1}
            self._orders[passed] = order
        return int(self._orders[passed][place])


def require_own_text(settings: DataSettings) -> None:
    """Read the beginning of each file, and log what was found.

    Raises ConfigError with a one-line message if there is no text. A start calls this before it
    signs or writes anything.
    """
    try:
        found = OwnText(settings, Counts())
    except PageUnavailable as error:
        raise ConfigAway(_refusal(str(error))) from None
    level = logging.WARNING if found.left_out else logging.INFO
    log.log(level, "Own text: %s", found.finding)


def _refusal(cause: str) -> str:
    return f"--data.own_text: {cause}, so there is nothing to train on: name files with text"


def _listed(given: tuple[str, ...]) -> dict[Path, bool]:
    """Return each file, and whether it was named explicitly.

    Raises ConfigError, PageUnavailable.
    """
    found: dict[Path, bool] = {}
    for text in given:
        try:
            path = Path(text).expanduser()
            below = sorted(files_below(path)) if path.is_dir() else [path]
        # expanduser raises RuntimeError if no user has that name.
        except (OSError, RuntimeError) as error:
            raise_if_it_may_pass(error, Path(text))
            raise ConfigError(_refusal(f"{text} cannot be read ({error})")) from None
        for file in below:
            found.setdefault(file, not path.is_dir())
    return found


def _edge(file: Any, at: int) -> int:
    """Return the first place from ``at`` on where text may be cut.

    That is after the end of a line, or after a character if no line ends nearby.
    """
    if not at:
        return 0
    file.seek(at)
    after = file.read(_EDGE)
    if (line := after.find(b"\n")) >= 0:
        return at + line + 1
    if len(after) < _EDGE:
        return at + len(after)
    return at + next(i for i, byte in enumerate(after) if byte & 0xC0 != 0x80 or i == 3)


def _lines(file: Any, begin: int, end: int) -> Iterator[bytes | None]:
    """Yield the lines that begin in the bytes from ``begin`` to before ``end``.

    Yield None for a line that is longer than ``PAGE``.
    """
    at = begin
    if begin:
        file.seek(begin - 1)
        # Do not read beyond the end of the unit. Otherwise each unit inside a line of 60 MB would
        # read the rest of that line.
        at = begin - 1 + len(file.readline(end - begin + 1))
    while at < end:
        line = file.readline(PAGE + 1)
        if not line:
            return
        at += len(line)
        if len(line) <= PAGE:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(PAGE)
            at += len(line)
        yield None


def _pieces(row: str) -> Iterator[str]:
    """Cut a long row into pieces, after the end of a line or a word if possible."""
    while len(row) > _PIECE:
        cut = 1 + max(row.rfind("\n", 1, _PIECE), row.rfind(" ", 1, _PIECE))
        cut = cut if cut > _PIECE // 2 else _PIECE
        yield row[:cut]
        row = row[cut:]
    yield row


class _ParquetFiles(ParquetSource):
    """Parquet files, each of which is addressed by the bytes of its text column."""

    def _listed(self) -> dict[str, list[Path]]:
        self._found: dict[Path, tuple[int, int]] = {}  # file -> its rows and bytes
        return {}

    def open(self, path: Path) -> int:
        """Return how many bytes a file's text column has. Raises OSError, ValueError."""
        rows, meta = self._scan(path), self._metadata(path)
        groups = [meta.row_group(number) for number in range(meta.num_row_groups)]
        columns = [group.column(at) for group in groups for at in range(group.num_columns)]
        size = sum(
            column.total_uncompressed_size
            for column in columns
            if column.path_in_schema.partition(".")[0] == self._column
        )
        if not rows or size <= 0:
            raise ValueError("it is empty")
        self._found[path] = rows, size
        return size

    def part(self, path: Path, begin: int, end: int) -> Iterator[object]:
        rows, size = self._found[path]
        first, last = begin * rows // size, end * rows // size
        yield from self._read(path, first, last - first)
