"""Read an HTTP answer from an untrusted server, with limits on its size and time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import httpx


Found = TypeVar("Found")


def run_to_end(work: Coroutine[Any, Any, Found], runner: asyncio.Runner | None = None) -> Found:
    """Run a coroutine and return its result, even if this thread already runs a loop (a notebook).

    ``runner``: runs the coroutine in its loop; None: use a new loop. An interrupt cancels the
    coroutine.
    """
    run: Callable[[Coroutine[Any, Any, Found]], Found] = (runner or asyncio).run
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run(work)
    begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = []

    async def known() -> Found:
        begun.append((asyncio.get_running_loop(), asyncio.current_task()))
        return await work

    pool = ThreadPoolExecutor(1, "loop")
    try:
        return pool.submit(run, known()).result()
    except BaseException:  # also Ctrl-C in this thread: the work in the other thread must end
        for loop, task in begun:
            with suppress(RuntimeError):  # the work has already ended
                loop.call_soon_threadsafe(task.cancel if task is not None else loop.stop)
        raise
    finally:
        pool.shutdown()


#: Request headers that tell caches to ask the origin again. Caches need not obey: see
#: :func:`answered_at`.
PAST_CACHES = {"cache-control": "no-cache"}


def answered_at(headers: Mapping[str, str]) -> tuple[float, bool]:
    """Return the server's time at its answer, and whether a cache may have answered instead.

    A cache keeps the origin's ``Date`` and adds its own ``Age`` (RFC 9111, 5.1), so their sum is
    the origin's current time, to within a second or two. An ``Age`` that is not a number of seconds
    counts as 0.

    Args:
        headers: The answer's headers, in any mapping that finds lower-case names.

    Raises:
        KeyError: There is no ``Date``.
        ValueError, OverflowError: ``Date`` is not a valid date.
    """
    age = headers.get("age")
    seconds = re.fullmatch("[0-9]{1,9}", age or "")
    held = int(seconds[0]) if seconds else 0
    return parsedate_to_datetime(headers["date"]).timestamp() + held, age is not None


class TooLong(ValueError):
    """An answer is longer than any valid answer."""


def refuses(error: BaseException | None) -> bool:
    """Return whether ``error`` means that the machine answered but nothing listens on the port."""
    while error is not None and not isinstance(error, ConnectionRefusedError):
        error = error.__cause__ or error.__context__
    return error is not None


async def ask(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    *,
    most: int,
    seconds: float,
    content: bytes | None = None,
    headers: dict[str, str] | None = None,
    compressed: bool = False,
) -> tuple[httpx.Response, bytes]:
    """Return an answer and its body of at most ``most`` bytes, whatever its status.

    A redirect is returned as it is: the caller decides what to request next.

    ``seconds`` limits the whole request, from the connection to the last byte. ``compressed``:
    accept gzip; ``most`` then counts the decompressed bytes. Raises TooLong, TimeoutError and
    httpx's errors; HTTPStatusError only if the body is too long.
    """
    body = bytearray()
    # Do not accept a compressed body by default: 64 KiB that are read at once may become 64 MiB
    # before they are counted.
    headers = {**(headers or {}), "accept-encoding": "gzip" if compressed else "identity"}
    # httpx limits only each single read, so a head or a body that trickles in would never end.
    async with (
        asyncio.timeout(seconds),
        client.stream(
            method, url, content=content, headers=headers, follow_redirects=False
        ) as reply,
    ):
        async for part in reply.aiter_bytes() if compressed else reply.aiter_raw():
            body += part
            if len(body) > most:
                reply.raise_for_status()  # do not read an error page: its status says more
                raise TooLong(f"it has more than {most} bytes")
    return reply, bytes(body)
