"""Rows of a Hugging Face dataset over the datasets server's HTTP API (protocol page, section 5)."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from .source import PageUnavailable

log = logging.getLogger(__name__)

_MAX_REPLY = 64 * 2**20  # a page of 100 rows is about 0.5 MB; more is not a page
_MAX_WAIT = 30.0
_TABLE_AGE = 6 * 3600.0


class RowsApiSource:
    """``/size`` and ``/rows`` with retries.

    ``timeout`` covers one request; ``attempts`` are made for each, waiting 0.5, 1, 2, ... s (with
    jitter) or what ``Retry-After`` asks for, at most 30 s.
    """

    def __init__(self, *, url: str, dataset: str, timeout: timedelta, attempts: int) -> None:
        self._url = url.rstrip("/")
        self._dataset = dataset
        self._timeout = timeout.total_seconds()
        self._attempts = attempts
        self._lock = threading.Lock()
        self._table: dict[str, int] = {}
        self._table_at = 0.0

    def num_rows(self) -> Mapping[str, int]:
        with self._lock:
            if self._table and time.monotonic() - self._table_at < _TABLE_AGE:
                return self._table
            try:
                reply = self._get("size", {"dataset": self._dataset})
                table = {
                    str(split["config"]): int(split["num_rows"])
                    for split in reply["size"]["splits"]
                    if split["config"] != "default"
                }
            except (KeyError, TypeError, ValueError) as error:
                raise PageUnavailable(f"the reply of /size is not a table: {error!r}") from error
            except PageUnavailable:
                if self._table:
                    return self._table  # old, and better than none
                raise
            if self._table and table != self._table:
                # Every page after this is another one than before, also for the validators.
                log.warning("The dataset's table changed: %d configs now", len(table))
            self._table, self._table_at = table, time.monotonic()
            return table

    def rows(self, config: str, row: int, *, split: str, limit: int) -> list[str]:
        reply = self._get(
            "rows",
            {
                "dataset": self._dataset,
                "config": config,
                "split": split,
                "offset": str(row),
                "length": str(limit),
            },
        )
        try:
            texts = [entry["row"].get("text") for entry in reply["rows"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise PageUnavailable(f"the reply of /rows is not a page: {error!r}") from error
        return [text for text in texts if isinstance(text, str) and text]

    def _get(self, path: str, query: Mapping[str, str]) -> Any:
        url = f"{self._url}/{path}?{urllib.parse.urlencode(query)}"
        wait, problem = 0.5, ""
        for attempt in range(self._attempts):
            asked = None
            try:
                with urllib.request.urlopen(url, timeout=self._timeout) as reply:
                    body = reply.read(_MAX_REPLY + 1)
                if len(body) > _MAX_REPLY:
                    raise PageUnavailable(f"{path}: the reply is larger than {_MAX_REPLY} bytes")
                return json.loads(body)
            except urllib.error.HTTPError as error:
                problem = f"HTTP {error.code}"
                if error.code not in (408, 425, 429) and error.code < 500:
                    break  # asking again gives the same answer
                asked = error.headers.get("Retry-After")
            except (OSError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            if attempt + 1 < self._attempts:
                pause = (
                    float(asked) if asked and asked.isdigit() else wait * random.uniform(0.7, 1.3)
                )
                time.sleep(min(pause, _MAX_WAIT))
                wait *= 2
        raise PageUnavailable(f"{path} of {self._dataset}: {problem}")
