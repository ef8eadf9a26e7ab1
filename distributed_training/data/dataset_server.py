"""Read rows of a Hugging Face dataset over the datasets server, and keep fetched pages on disk.

``GET /size?dataset=`` returns the configs and their row counts, ``GET /rows?dataset=&config=&split=
&offset=&length=`` at most 100 rows (protocol page, section 3). Fetched pages stay in a folder of
bounded size that several processes may share.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from distributed_training.common.backoff import Throttle
from distributed_training.common.files import write_bytes
from distributed_training.config.settings import DataSettings
from distributed_training.protocol.lines import counted
from distributed_training.protocol.pages import SPLIT

from .page_source import Counts, NothingToRead, PageUnavailable, Pin, usable_texts
from .patient_client import PatientClient

log = logging.getLogger(__name__)

_DEFAULT = "default"  # a config: left out where there are others (protocol page, section 3)
_SWEEP_EVERY = 10.0  # seconds between two looks at the folder's size
_WRITE_AGAIN = 600.0  # seconds after a write that failed


class PageCache:
    """JSON values by key. The least recently used are deleted above ``limit_bytes``.

    A file that is damaged counts as absent. A full disk or a folder that cannot be written costs
    the cache, not the training: one line, then no write for ten minutes.
    """

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        self._folder = folder
        self._limit = limit_bytes
        self._sweep_due = Throttle(_SWEEP_EVERY)
        self._write_at = 0.0  # time.monotonic(): not before; after a failure

    def get(self, key: str) -> Any | None:
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:  # no descriptor left, a disk that is away: the page may well be whole
            return None
        try:
            # Compared before zlib sees it: damage could tell of gigabytes.
            checksum, body = data[:4], data[4:]
            if zlib.crc32(body).to_bytes(4, "big") != checksum:
                raise ValueError("checksum")
            stored = json.loads(zlib.decompress(body))
            if stored["key"] != key:
                return None
            value = stored["value"]
        except (ValueError, KeyError, TypeError, zlib.error):
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):  # another user's file is as good
            os.utime(path)  # the sweep looks at it
        return value

    def put(self, key: str, value: Any) -> None:
        if time.monotonic() < self._write_at:
            return
        path = self._path(key)
        body = zlib.compress(json.dumps({"key": key, "value": value}).encode(), 1)
        try:
            # No sync for what can be fetched again: it would wait behind a checkpoint's.
            write_bytes(path, zlib.crc32(body).to_bytes(4, "big") + body, durable=False)
        except OSError as error:
            # Not for good: a miner runs for weeks, and room is made or descriptors are freed.
            self._write_at = time.monotonic() + _WRITE_AGAIN
            log.warning(
                "The cache of pages %s cannot be written (%s), so every page is fetched again: "
                "make room or give --data.cache_dir",
                self._folder,
                error.strerror,
            )
            return
        # After the first write too: an earlier process may have had a larger bound.
        if self._sweep_due():
            self.sweep()

    def sweep(self) -> None:
        """Delete down to nine tenths of the bound, oldest use first."""
        files = []
        for path in self._folder.glob("??/*"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                files.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in files)
        if total <= self._limit:
            return
        for _, size, path in sorted(files):
            if total <= self._limit * 0.9:
                return
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()
        return self._folder / name[:2] / name[2:34]


_ASK_AGAIN = 300.0  # for the table, after a failure
_WHOLE_TABLE_LASTS = 86400.0  # against one that leaves out configs; by then validators use that


class RowsApiSource:
    """``/size`` and ``/rows`` with retries over a few connections that are kept open.

    Of the settings, ``table_age``: how old the table of configs may get; the others are those of
    :class:`.patient_client.PatientClient`, as ``token`` and ``shared`` are.
    Replies of another revision than the pinned one are refused, and so is a table of another row
    count; ``revision``: of the last reply, if the server says it.
    """

    def __init__(
        self,
        *,
        settings: DataSettings,
        token: str | None,
        cache: PageCache | None,
        counts: Counts,
        shared: Path | None = None,
    ) -> None:
        self._client = PatientClient(
            settings.rows_url, settings=settings, token=token, counts=counts, shared=shared
        )
        url = self._client.url
        self._dataset = settings.dataset
        self._pages_of = f"{settings.dataset}@{settings.revision or ''}".removesuffix("@")
        self._where = f"{self._dataset} at {url}"
        self._table_key = f"size {url} {self._pages_of}"
        self._settings = settings
        self._pin = Pin(settings.revision, settings.rows)
        self.revision: str | None = None
        self._cache = cache
        self._counts = counts
        self._lock = threading.Lock()
        self._table: dict[str, int] = {}
        self._table_at = 0.0  # time.time()
        self._whole = True  # the table, or the server left out configs
        self._ask_table_at = 0.0  # time.monotonic(): not before; after a failure

    # --- the table -----------------------------------------------------------------------------

    def num_rows(self) -> Mapping[str, int]:
        # Held while the server is asked: its threads want the same table, asked for once.
        with self._lock:
            if not self._table and self._cache is not None:
                stored = self._cache.get(self._table_key)
                if isinstance(stored, dict):
                    table = {str(config): int(rows) for config, rows in stored["rows"].items()}
                    # Else it was kept for another network.
                    if self._pin.rows in (None, sum(table.values())):
                        self._table, self._table_at = table, float(stored["at"])
            now = time.time()
            # Kept while a clock was ahead, a table is of the future: that is no young one.
            age = now - self._table_at
            young = self._whole and 0 <= age < self._settings.table_age.total_seconds()
            if self._table and (young or time.monotonic() < self._ask_table_at):
                return self._table
            try:
                table, left_out = self._fetch_table()
                has_whole = self._table and self._whole and 0 <= age < _WHOLE_TABLE_LASTS
                if left_out and (has_whole or self._pin.rows is not None):
                    raise PageUnavailable(
                        f"the reply of /size leaves out {counted(left_out, 'config')}"
                    )
                self._pin.check(self._where, rows=sum(table.values()))
            except PageUnavailable as error:
                if not self._table:
                    raise
                self._ask_table_later()
                log.warning(
                    "The table of %s cannot be refreshed (%s): the one of %.0f hours ago is used",
                    self._dataset,
                    error,
                    age / 3600,
                )
                return self._table
            changed = table != self._table
            if self._table and changed:
                # Every page after this is another one than before, also for the validators.
                self._counts.add("table_changes")
                log.warning(
                    "The table of %s changed: %d configs (before: %d), %d of them new or of "
                    "another size. Pages are drawn from the new one",
                    self._dataset,
                    len(table),
                    len(self._table),
                    sum(self._table.get(config) != rows for config, rows in table.items()),
                )
            self._table, self._table_at, self._whole = table, now, not left_out
            if self._whole and self._cache is not None:
                self._cache.put(self._table_key, {"at": now, "rows": table})
            if left_out:  # asked for again soon, and not stored for a restart
                self._ask_table_later()
            if left_out and changed:
                log.warning(
                    "The table of %s leaves out %s whose rows the server has not counted: "
                    "until it is whole, pages may differ from the validators' pages",
                    self._dataset,
                    counted(left_out, "config"),
                )
            return table

    def _ask_table_later(self) -> None:
        wait = min(self._settings.table_age.total_seconds(), _ASK_AGAIN)
        self._ask_table_at = time.monotonic() + wait

    def _fetch_table(self) -> tuple[dict[str, int], int]:
        """Fetch the table, and how many configs the server left out.

        Their jobs wait, run or failed there.
        """
        reply = self._client.get(
            "size",
            self._read,
            query={"dataset": self._dataset},
            what=f"/size {self._dataset}",
        )
        try:
            # Pages are of this split. A test split of the same config has other rows.
            entries = [e for e in reply["size"]["splits"] if e.get("split", SPLIT) == SPLIT]
            waiting = [
                e.get("config") for why in ("pending", "failed") for e in reply.get(why) or ()
            ]
            named = {*(entry["config"] for entry in entries), *waiting}
            # Of a data set without configs it is the only one.
            drawn = named - {_DEFAULT} or named
            table: dict[str, int] = {}
            for entry in entries:
                if entry["config"] not in drawn:
                    continue
                config, rows = str(entry["config"]), int(entry["num_rows"])
                config.encode()  # lone surrogates: no request and no name in the cache holds them
                if not 0 <= rows < 2**53:
                    raise ValueError(f"{rows} rows")
                table[config] = rows
            left_out = sum(config in drawn for config in waiting)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise PageUnavailable(f"the reply of /size is not a table: {error!r}") from error
        if not table and left_out:
            raise PageUnavailable(
                f"the server has not counted the rows of {self._dataset} yet: "
                f"{counted(left_out, 'config')} to go"
            )
        if not table:
            raise NothingToRead(
                f"the reply of /size names no config of {self._dataset} with a split {SPLIT!r}"
            )
        return table, left_out

    # --- pages ---------------------------------------------------------------------------------

    def rows(self, config: str, row: int, *, split: str, limit: int) -> list[str]:
        key = f"rows {self._pages_of} {config} {split} {row} {limit} {self._settings.text_column}"
        cached = self._cache.get(key) if self._cache is not None else None
        if isinstance(cached, list):
            self._counts.add("pages_from_cache")
            return cached
        reply = self._client.get(
            "rows",
            self._read,
            query={
                "dataset": self._dataset,
                "config": config,
                "split": split,
                "offset": str(row),
                "length": str(limit),
            },
            what=f"/rows {config}, {row}",
        )
        try:
            entries = list(reply["rows"])[:limit]
            # A proxy that caches without the query answers each page with the same rows.
            numbered = [entry.get("row_idx", row + i) for i, entry in enumerate(entries)]
            values = [entry["row"].get(self._settings.text_column) for entry in entries]
            truncated = sum(bool(entry.get("truncated_cells")) for entry in entries)
        except (KeyError, TypeError, AttributeError) as error:
            raise PageUnavailable(f"the reply of /rows is not a page: {error!r}") from error
        if numbered != list(range(row, row + len(entries))):
            raise PageUnavailable(f"{config}, {row}: the server answered with other rows")
        self._counts.add("rows_truncated_by_server", truncated)
        if not entries:
            raise PageUnavailable(f"{config} has no rows from {row} on")
        texts = usable_texts(values, self._counts)
        self._counts.add("pages_fetched")
        # A short page is not kept: the server may have counted, or sent, only a part of the rows.
        if self._cache is not None and len(entries) == limit:
            self._cache.put(key, texts)
        return texts

    def _read(self, reply: httpx.Response, body: Callable[[], bytes]) -> Any:
        self.revision = reply.headers.get("X-Revision") or reply.headers.get("X-Repo-Commit")
        self._pin.check(self._where, revision=self.revision)
        # Bytes that are not UTF-8 become lone surrogates: only their rows are left out.
        return json.loads(body().decode("utf-8", "surrogateescape"))
