"""Read a dataset's Parquet files where they lie, at Hugging Face, by ranges of bytes.

The files of one commit below ``data.folder`` are a table as a local copy of them is: each folder is
a config, its rows are those of its files in the order of their names. So a page is the same
whether it is read here or with ``--data.source parquet:DIR``.

A file's end says where its row groups lie. It is read once, kept in the cache of pages, and all
ranks of a machine take it from there; while one fetches the ends the others wait. After that a
page costs one request, for the text of its row group. Such requests go to ``/resolve/`` URLs, of
which the hub allows more than of its API; they lead to another host, which never sees the token.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import io
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

import httpx

from distributed_training.config.settings import DataSettings

from .dataset_server import PageCache
from .page_source import Counts, NothingToRead, OtherData, PageUnavailable, Pin
from .parquet import KEPT, ParquetSource, is_no_data
from .patient_client import PatientClient

#: Bytes of a row group's column, as it lies in the file. Larger ones are not for ranges.
LARGEST_GROUP = 64 * 2**20
# Bytes of a file's description at its end, and columns of row groups that it may describe: parsed
# it takes up to 230 times its bytes.
_LARGEST_END, _MOST_COLUMNS = 16 * 2**20, 1_000_000
_END = 2**20  # of it that are asked for at once
_ARROW_READS = 2**16  # of a file's end, at least
_MOST_FILES = 50_000
_MOST_LISTS = 500  # replies with 1,000 files and folders each
_ENDS_KEPT = 4  # in memory
_AT_ONCE = 8  # ends
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
_MAGIC = b"PAR1"
_PLAIN = {"Accept-Encoding": "identity"}  # a range of what is compressed on the way is no range


class HubSource(ParquetSource):
    """The rows of ``data.dataset`` at its pinned commit; without one at that of its main branch.

    ``hub``: its URL. ``cache``: keeps the ends of files. ``shared``: a folder that all processes of
    this machine use. Raises PageUnavailable, OtherData for another commit than the pinned one.
    """

    def __init__(
        self,
        settings: DataSettings,
        *,
        hub: str,
        token: str | None,
        cache: PageCache | None,
        shared: Path | None,
        counts: Counts,
    ) -> None:
        if not _NAME.fullmatch(settings.dataset):
            raise NothingToRead(f"data.dataset {settings.dataset!r:.100} is no name of a dataset")
        self._client = PatientClient(
            hub, settings=settings, token=token, counts=counts, shared=shared
        )
        self._dataset, self._cache, self._shared = settings.dataset, cache, shared
        self._root = Path(settings.dataset)
        self._where = f"{settings.dataset} at {self._client.url}"
        self.revision = settings.revision or self._newest()
        self._pin = Pin(self.revision, settings.rows)
        self._key = f"{self._where}@{self.revision} {settings.folder} {settings.text_column}"
        self._sizes: dict[Path, int] = {}
        self._tags: dict[Path, str] = {}  # ETags
        self._ends_lock = threading.Lock()
        self._one_parses = threading.Lock()
        self._ends_read: OrderedDict[Path, Any] = OrderedDict()
        folder = self._root / settings.folder
        super().__init__(folder, text_column=settings.text_column, counts=counts)
        # Pages are of random groups: of a decoded one hardly a second page is read. Several are
        # fetched side by side.
        self._most_kept, self._one_decodes = min(KEPT, 32 * 2**20), contextlib.nullcontext()

    def num_rows(self) -> Mapping[str, int]:
        table = super().num_rows()
        self._pin.check(self._where, rows=sum(table.values()))
        return table

    def rows(self, config: str, row: int, *, split: str, limit: int) -> list[str]:
        texts = super().rows(config, row, split=split, limit=limit)
        self._counts.add("pages_fetched")
        return texts

    # --- the files and their ends --------------------------------------------------------------

    def _newest(self) -> str:
        def read(reply: httpx.Response, body: Callable[[], bytes]) -> str:
            with _as_value_error():
                return str(json.loads(body())["sha"])

        path = f"api/datasets/{self._dataset}/revision/main"
        commit = self._client.get(path, read, what=f"the commit of {self._where}")
        if not _COMMIT.fullmatch(commit):
            raise PageUnavailable(f"the commit of {self._where} is said to be {commit!r:.50}")
        return commit

    def _files(self) -> list[Path]:
        with self._alone_on_this_machine():
            if not self._load():
                self._list()
                # Their ends, while there is one process that asks for them.
                with ThreadPoolExecutor(_AT_ONCE) as pool:
                    for path, rows in zip(
                        self._sizes, pool.map(self._scan_or_none, self._sizes), strict=True
                    ):
                        if rows is not None:
                            self._scanned[path] = rows
                self._store()
        return list(self._sizes)

    def _scan_or_none(self, path: Path) -> int | None:
        with contextlib.suppress(OSError, ValueError):  # scanned again, it is named
            return self._scan(path)
        return None

    @contextlib.contextmanager
    def _alone_on_this_machine(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            # Without room or locks each process asks for itself.
            with contextlib.suppress(OSError):
                if self._shared is not None:
                    self._shared.mkdir(parents=True, exist_ok=True)
                    file = stack.enter_context((self._shared / "files.lock").open("ab"))
                    fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _load(self) -> bool:
        """Take over what another process found; return whether there is such a thing."""
        stored = None if self._cache is None else self._cache.get(self._key)
        for name, size, tag, ends in stored or ():
            path = self._root / name
            self._sizes[path], self._tags[path] = size, tag
            if ends is not None:
                self._group_ends[path], self._scanned[path] = ends, ends[-1] if ends else 0
        return bool(stored)

    def _store(self) -> None:
        if self._cache is not None:
            found = [
                (
                    path.relative_to(self._root).as_posix(),
                    size,
                    self._tags.get(path, ""),
                    self._group_ends[path] if path in self._scanned else None,
                )
                for path, size in self._sizes.items()
            ]
            self._cache.put(self._key, found)

    def _list(self) -> None:
        below = self._folder.relative_to(self._root)
        path = f"api/datasets/{self._dataset}/tree/{self.revision}"
        path += f"/{quote(below.as_posix())}" if below != Path() else ""
        query = {"recursive": "true"}
        for _ in range(_MOST_LISTS):
            files, following = self._client.get(
                path, _read_list, query=query, what=f"the files of {self._where}"
            )
            for name, size in files:
                inner = Path(name).relative_to(below) if Path(name).is_relative_to(below) else None
                if inner is not None and not any(map(is_no_data, inner.parts)):
                    self._sizes[self._root / name] = size
            if len(self._sizes) > _MOST_FILES:
                break
            if not following:
                return
            query = {"recursive": "true", "cursor": following}
        raise NothingToRead(
            f"{self._where} has more than {_MOST_FILES} Parquet files: name a folder of it as "
            "data.folder of the network's file"
        )

    def _metadata(self, path: Path) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with self._ends_lock:
            if path in self._ends_read:
                self._ends_read.move_to_end(path)
                return self._ends_read[path]
        end, size = self._end(path), self._sizes[path]
        part = _HubPart(size, size - len(end), end, partial(self._fetch, path))
        with self._one_parses:
            meta = pq.read_metadata(pa.PythonFile(part, mode="r"))
        columns = sum(meta.row_group(i).num_columns for i in range(meta.num_row_groups))
        if columns > _MOST_COLUMNS:
            raise ValueError(f"it describes {columns} columns of row groups")
        with self._ends_lock:
            self._ends_read[path] = meta
            if len(self._ends_read) > _ENDS_KEPT:
                self._ends_read.popitem(last=False)
        return meta

    def _end(self, path: Path) -> bytes:
        """Return the description at the end of a file. Raises ValueError for one without."""
        key = f"{self._key} end {path}"
        if self._cache is not None and isinstance(known := self._cache.get(key), str):
            return base64.b64decode(known)
        size = self._sizes[path]
        end = self._fetch(path, max(0, size - _END), size)
        length = 8 + int.from_bytes(end[-8:-4], "little")
        if end[-4:] != _MAGIC or not 8 < length <= size:
            raise ValueError("it does not end as a Parquet file does")
        if length > _LARGEST_END:
            raise ValueError(f"its end, which says where rows are, has {length / 1e6:.0f} MB")
        kept = min(size, max(length, _ARROW_READS))
        if kept > len(end):
            end = self._fetch(path, size - kept, size)
        if self._cache is not None:
            self._cache.put(key, base64.b64encode(end[-kept:]).decode())
        return end[-kept:]

    def _open(self, path: Path, group: int) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        # Arrow is to find the group's column itself: of a damaged end the metadata of a column end
        # the process. With pre_buffer it reads that column at once.
        part = _HubPart(self._sizes[path], 0, b"", partial(self._fetch, path))
        return pq.ParquetFile(
            pa.PythonFile(part, mode="r"), metadata=self._metadata(path), pre_buffer=True
        )

    def _fetch(self, path: Path, begin: int, end: int) -> bytes:
        """Return bytes of a file. Raises PageUnavailable, OtherData."""
        if begin >= end:
            return b""
        if end - begin > LARGEST_GROUP:
            raise NothingToRead(
                f"{path} has a row group with {(end - begin) / 1e6:.0f} MB of text, and ranges are "
                f"read up to {LARGEST_GROUP / 1e6:.0f}: download the data, and give --data.source "
                "parquet:DIR"
            )

        def read(reply: httpx.Response, body: Callable[[], bytes]) -> bytes:
            first = (reply.history or [reply])[0].headers  # the hub's own, before another host's
            self._pin.check(self._where, revision=first.get("X-Repo-Commit"))
            if reply.status_code != 206:
                raise NothingToRead(
                    f"{reply.url.host} sends whole files instead of ranges: download the data, and "
                    "give --data.source parquet:DIR"
                )
            tag = first.get("X-Linked-ETag") or reply.headers.get("ETag") or ""
            span, _, size = reply.headers.get("Content-Range", "").partition("/")
            if span != f"bytes {begin}-{end - 1}":
                raise ValueError(f"the answer has another range: {span:.50}")
            known = self._tags.get(path) or self._tags.setdefault(path, tag)
            if (known and tag and known != tag) or size not in ("*", str(self._sizes[path])):
                raise OtherData(
                    f"{path} at {self._client.url} is not the file any more that was read before, "
                    "so its rows would differ from the other members' rows: ask the founder"
                )
            data = body()
            if len(data) != end - begin:
                raise ValueError(f"{len(data)} bytes instead of {end - begin}")
            return data

        name = quote(path.relative_to(self._root).as_posix())
        return self._client.get(
            f"datasets/{self._dataset}/resolve/{self.revision}/{name}",
            read,
            headers=_PLAIN | {"Range": f"bytes={begin}-{end - 1}"},
            most=end - begin,
            what=f"{path}, bytes {begin} to {end}",
        )


def _read_list(
    reply: httpx.Response, body: Callable[[], bytes]
) -> tuple[Sequence[tuple[str, int]], str]:
    """Return path and size of the Parquet files of a list, and where the next list begins."""
    files = []
    with _as_value_error():
        entries = json.loads(body())
        for entry in entries if isinstance(entries, list) else [entries]:
            name, size = entry["path"], int(entry["size"])
            name.encode()  # lone surrogates
            if entry["type"] != "file" or not name.lower().endswith(".parquet"):
                continue
            is_below = not name.startswith("/") and ".." not in name.split("/")
            if size < 0 or not is_below or not name.isprintable():  # names are in log lines
                raise ValueError(f"it names {name!r:.100}")
            files.append((name, size))
    # Of this only the place: the answer does not decide who is asked.
    following = urlsplit(reply.links.get("next", {}).get("url", ""))
    return files, dict(parse_qsl(following.query)).get("cursor", "")


@contextlib.contextmanager
def _as_value_error() -> Iterator[None]:
    """Raise ValueError for an answer of another form."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"the answer has another form: {error!r:.100}") from error


class _HubPart(io.RawIOBase):
    """A file of ``size`` bytes of which ``data`` is here; the rest is fetched."""

    def __init__(
        self, size: int, begin: int, data: bytes, fetch: Callable[[int, int], bytes]
    ) -> None:
        self._size, self._begin, self._data, self._fetch = size, begin, data, fetch
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        begin = self._at
        end = self._size if size < 0 else min(begin + size, self._size)
        self._at = max(begin, end)
        if self._begin <= begin and end <= self._begin + len(self._data):
            return self._data[begin - self._begin : end - self._begin]
        return self._fetch(begin, end)
