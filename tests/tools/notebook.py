"""Be in a thread whose event loop runs, as the cells of a notebook are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Found = TypeVar("Found")


def as_a_cell(cell: Callable[[], Found]) -> Found:
    """Return what ``cell`` does while the loop of this thread runs."""

    async def kernel() -> Found:
        return cell()

    return asyncio.run(kernel())


@contextmanager
def running_loop() -> Iterator[None]:
    """Let this thread's loop count as running, for code that is no single function."""
    loop = asyncio.new_event_loop()
    asyncio._set_running_loop(loop)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        asyncio._set_running_loop(None)  # type: ignore[attr-defined]
        loop.close()
