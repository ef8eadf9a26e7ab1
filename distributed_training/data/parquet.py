"""Read the rows of a folder of Parquet files, here or at Hugging Face (:mod:`.hub`).

Each folder that contains files is a config, and the given folder itself is the config ``root``. The
rows of a config are those of its files, in the order of the file names. Only two parts of a file
are read: its end, and the text column in the row groups that contain a page.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import itertools
import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from .page_source import MINIMUM_ROWS, Counts, NothingToRead, PageUnavailable, usable_texts

log = logging.getLogger(__name__)

#: Bytes of decoded row groups that each data worker keeps for later pages.
KEPT = 64 * 2**20
#: The most bytes that the end of a file may have, which says where the rows are. Once parsed, it
#: takes many times as much memory.
LARGEST_END = 16 * 2**20
_TAIL = 2**16  # bytes of a file's end that pyarrow reads first
_AT_ONCE = 8  # files that are scanned at once
#: Rows that are decoded at once. Each may expand to a megabyte if the column has a dictionary.
_ROWS = 64
_BUFFER = 2**20  # bytes that are read from a column at once
# Errors that may pass, because a network disk failed or because this process is at its limits.
_MAY_PASS = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_COMMIT = re.compile(r"[0-9a-f]{40}")


def raise_if_it_may_pass(error: Exception, path: Path) -> None:
    """Raise PageUnavailable if the file is not the cause of the error, so that it may pass."""
    if isinstance(error, OSError) and error.errno in _MAY_PASS:
        raise PageUnavailable(f"{path} cannot be read now: {error.strerror}") from None


def folder_revision(folder: Path, *, wanted: str | None = None) -> str | None:
    """Return the commit at Hugging Face from which ``folder`` was downloaded, or None.

    The commit is known if the folder is a snapshot in the cache of ``huggingface_hub``, or if
    ``huggingface_hub`` left notes about the download in it.
    """
    path = folder.resolve()
    commits = {path.parts[at + 1] for at, part in enumerate(path.parts[:-1]) if part == "snapshots"}
    for root in (path, *path.parents):
        notes = root / ".cache" / "huggingface" / "download" / path.relative_to(root)
        for note in notes.rglob("*.metadata"):
            with contextlib.suppress(OSError, UnicodeDecodeError), note.open() as file:
                commits.add(file.readline(100).strip())
    # If there are several commits, return one that is not wanted: even one file of another commit
    # means that the folder is not the wanted commit.
    told = sorted(filter(_COMMIT.fullmatch, commits), key=lambda commit: commit == wanted)
    return told[0] if told else None


def spans(ends: Sequence[int], first: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the pieces that contain the rows from ``first`` to before ``end``.

    Each is yielded as its number, the first of these rows in it, and how many of them it has.
    ``ends`` has the number of rows up to the end of each piece; the last is at least ``end``.
    """
    at = bisect.bisect_right(ends, first)
    while first < end:
        begin = ends[at - 1] if at else 0
        rows = min(end, ends[at]) - first
        if rows:  # a piece may be empty
            yield at, first - begin, rows
        first, at = first + rows, at + 1


def is_no_data(name: str) -> bool:
    """Return whether a file or folder with this name is always left out."""
    # There are no rows in notes about a download (.cache), in the markers of programs that write
    # data (_SUCCESS), or in lost+found, which only the root user can list.
    return name.startswith((".", "_")) or name == "lost+found"


def files_below(folder: Path, above: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield the files of a folder and its subfolders, following links. Raises OSError.

    ``above`` has the folders that contain this one, so that a link back to one of them is not
    followed.
    """
    here = os.path.realpath(folder)
    if here in above:
        return
    for path in folder.iterdir():
        if is_no_data(path.name):
            continue
        if path.is_dir():
            yield from files_below(path, above | {here})
        # Yield a broken link too, as a file that cannot be read.
        elif path.is_file() or path.is_symlink():
            yield path


class FolderSource:
    """A folder with files of one kind. Each is scanned once, and damaged files are left out."""

    suffixes: tuple[str, ...]

    def __init__(self, folder: Path, *, counts: Counts) -> None:
        self._folder = folder
        self._counts = counts
        self._lock = threading.Lock()
        self._scanned: dict[Path, int] = {}
        # Config -> the row at which each of its files ends; empty until the files are scanned.
        self._ends: dict[str, list[int]] = {}
        # List the files only once, because a file that is added later would shift the rows of all
        # files after it.
        self._paths = self._listed()

    def _listed(self) -> dict[str, list[Path]]:
        """Return the files by config. Raises PageUnavailable if there are none."""
        found: dict[str, list[Path]] = {}
        # Sort the files, so that the rows have the same numbers in every process and on every
        # machine.
        for path in sorted(self._files()):
            if path.suffix.lower() in self.suffixes:
                config = path.relative_to(self._folder).parent.as_posix()
                found.setdefault("root" if config == "." else config, []).append(path)
        if not found:
            # A folder with other files is the wrong one, but an empty one may not be mounted yet.
            others = next((path.suffix for path in self._files()), None)
            kind = PageUnavailable if others is None else NothingToRead
            found_are = f", only others such as *{others}" if others else ""
            raise kind(f"{self._folder} contains no {' or '.join(self.suffixes)} files{found_are}")
        return found

    def _files(self) -> list[Path]:
        """Return the files below the folder, in any order. Raises PageUnavailable."""
        try:
            return list(files_below(self._folder))
        except OSError as error:  # this does not mean that the folder is empty
            raise PageUnavailable(f"{error.filename} cannot be read: {error.strerror}") from None

    def num_rows(self) -> Mapping[str, int]:
        return self._table

    @cached_property
    def _table(self) -> dict[str, int]:
        rows = self.all_rows()
        table = {config: count for config, count in rows.items() if count >= MINIMUM_ROWS}
        self._counts.add("configs_too_small", len(rows) - len(table))
        if not table:
            raise PageUnavailable(
                f"{self._folder}: the largest config has {max(rows.values(), default=0)} rows "
                f"and a page needs a config of at least {MINIMUM_ROWS}: add text"
            )
        return table

    def all_rows(self) -> dict[str, int]:
        """Count the rows of each config, including configs too small for the page selection.

        Raises PageUnavailable while the disk of a file is unavailable.
        """
        with self._lock:
            if not self._ends:
                files = itertools.chain.from_iterable(self._paths.values())
                unknown = [path for path in files if path not in self._scanned]
                with ThreadPoolExecutor(_AT_ONCE) as pool:
                    for path, found in zip(unknown, pool.map(self._try, unknown), strict=True):
                        if isinstance(found, int):
                            self._scanned[path] = found
                            continue
                        # If a file is left out, the rows after it have other numbers than at the
                        # validator until the next restart. So if the error may pass, raise it
                        # here, and try again later.
                        raise_if_it_may_pass(found, path)
                        self._counts.add("files_unreadable")
                        log.warning("%s is left out: %s", path, found)
                for config, paths in self._paths.items():
                    paths[:] = [path for path in paths if path in self._scanned]
                    rows = (self._scanned[path] for path in paths)
                    self._ends[config] = list(itertools.accumulate(rows))
            return {config: ends[-1] if ends else 0 for config, ends in self._ends.items()}

    def rows(self, config: str, row: int, *, split: str, limit: int) -> list[str]:
        del split  # a folder has only one split
        count = self.all_rows().get(config, 0)
        if row >= count:
            raise PageUnavailable(f"{config} of {self._folder} has {count} rows, but no row {row}")
        # Read one value at a time, so that a page of long rows is cut off before it fills the
        # memory.
        return usable_texts(self._values(config, row, min(row + limit, count)), self._counts)

    def _values(self, config: str, first: int, end: int) -> Iterator[object]:
        for at, begin, rows in spans(self._ends[config], first, end):
            path = self._paths[config][at]
            try:
                yield from self._read(path, begin, rows)
            except (OSError, ValueError) as error:
                why = " ".join(str(error).split())  # Arrow's error messages have several lines
                raise PageUnavailable(f"{path}, row {begin}: {why:.300}") from error

    def _try(self, path: Path) -> int | Exception:
        """Return the result of :meth:`_scan`, or the error that it raised."""
        try:
            return self._scan(path)
        except (OSError, ValueError) as error:
            return error

    def _scan(self, path: Path) -> int:
        """Count the rows of a file. Raises OSError, ValueError."""
        raise NotImplementedError

    def _read(self, path: Path, first: int, count: int) -> Iterator[object]:
        """Yield the values of ``count`` rows of a file. Raises OSError, ValueError."""
        raise NotImplementedError


class ParquetSource(FolderSource):
    """A folder of ``*.parquet`` files.

    The row groups that were decoded last are kept, up to ``KEPT`` bytes. A larger group is decoded
    again for each page, up to the rows of the page. Files written by pandas have one such group.
    """

    suffixes = (".parquet",)

    def __init__(self, folder: Path, *, text_column: str, counts: Counts) -> None:
        self._column = text_column
        self._group_ends: dict[Path, list[int]] = {}
        self._groups: OrderedDict[tuple[Path, int], list[Any]] = OrderedDict()
        self._too_large: set[tuple[Path, int]] = set()
        super().__init__(folder, counts=counts)

    def _scan(self, path: Path) -> int:
        meta = self._metadata(path)  # Arrow's errors are OSErrors and ValueErrors
        if self._column not in meta.schema.to_arrow_schema().names:
            raise ValueError(
                f"it has no column {self._column!r}: see data.text_column of the network's file"
            )
        groups = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
        # Without this check, rows of a damaged file might be read from groups that do not exist.
        if sum(groups) != meta.num_rows or min(groups, default=0) < 0:
            raise ValueError(f"its row groups do not add up to its {meta.num_rows} rows")
        self._group_ends[path] = list(itertools.accumulate(groups))
        return int(meta.num_rows)

    def _open(self, path: Path) -> Any:
        """Open a file with pyarrow, which accepts a name that is not UTF-8 only as bytes."""
        import pyarrow as pa

        return pa.OSFile(os.fsencode(path))

    def _metadata(self, path: Path) -> Any:
        import pyarrow.parquet as pq

        with self._open(path) as file:
            file.seek(max(0, file.size() - _TAIL))
            length = int.from_bytes(file.read()[-8:-4], "little")
            if length > LARGEST_END:
                raise ValueError(f"its end, which says where rows are, has {length / 1e6:.0f} MB")
            return pq.read_metadata(file)

    def _parquet(self, path: Path) -> Any:
        import pyarrow.parquet as pq

        # By default, Arrow would read the whole column of a group before it returns the first row.
        return pq.ParquetFile(self._open(path), buffer_size=_BUFFER, pre_buffer=False)

    def _read(self, path: Path, first: int, count: int) -> Iterator[object]:
        import pyarrow as pa

        for group, begin, rows in spans(self._group_ends[path], first, first + count):
            at = 0
            for batch in self._batches(path, group, begin + rows):
                skipped = max(0, begin - at)
                part = batch.slice(skipped, max(0, begin + rows - max(at, begin)))
                at += len(batch)
                # Arrow does not check whether text that a file declares as UTF-8 really is UTF-8.
                if pa.types.is_string(part.type):
                    part = part.cast(pa.binary())
                elif pa.types.is_large_string(part.type):
                    part = part.cast(pa.large_binary())
                for scalar in part:
                    text = scalar.as_py()
                    # Bytes that are not UTF-8 become lone surrogates, and the row is left out.
                    is_text = isinstance(text, bytes)
                    yield text.decode("utf-8", "surrogateescape") if is_text else text

    def _batches(self, path: Path, group: int, end: int) -> Iterator[Any]:
        """Yield the arrays of a group's column, at least up to row ``end``.

        While the whole group may still fit into ``KEPT`` bytes, the rows after ``end`` are decoded
        too, so that the group can be kept.
        """
        key, rows, size = (path, group), 0, 0
        decoded: list[Any] = []
        with self._lock:
            known = self._groups.get(key)
        if known is not None:
            yield from known
            return
        # Open the file for each group, because a process cannot keep all files of a mirror open.
        with self._parquet(path) as file:
            # Do not use threads, with which Arrow would occupy all cores. The ranks need them.
            how: dict[str, Any] = {"columns": [self._column], "use_threads": False}
            for table in file.iter_batches(batch_size=_ROWS, row_groups=[group], **how):
                batch = table.column(0)
                yield batch
                rows, size = rows + len(batch), size + batch.nbytes
                if size > KEPT:
                    self._too_large.add(key)
                if key not in self._too_large:
                    decoded.append(batch)
                elif rows >= end:
                    return
                else:
                    decoded.clear()
        if key not in self._too_large:
            with self._lock:
                self._groups[key] = decoded
                while sum(part.nbytes for parts in self._groups.values() for part in parts) > KEPT:
                    self._groups.popitem(last=False)
