"""Serve the page of run folders as a launcher does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import SecretStr

from distributed_training.telemetry.page import PageProcess
from tests.tools.waiting import wait_for

TOKEN = "a-token-of-more-than-16-characters"


class Page(PageProcess):
    """A page with its ``url``, and the ``lines`` that it sends to its parent's log."""

    url: str
    lines: list[str]


@contextmanager
def served(*folders: Path, port: int = 0, token: str = "") -> Iterator[Page]:
    """Serve ``folders`` until the end of the block."""
    lines: list[str] = []
    secret = SecretStr(token) if token else None
    with Page(folders, port=port, token=secret, told=lines.append) as page:
        page.lines = lines
        page.url = wait_for(lambda: lines, "the page")[0].removeprefix("page: ")
        yield page
