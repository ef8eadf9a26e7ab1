"""HTTP answers have a size limit, which counts the bytes after decompression."""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
import threading
from pathlib import Path

import httpx
import pytest

from distributed_training.common import http
from tests.tools.notebook import as_a_cell

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("compressed", [False, True])
def test_an_answer_is_read_up_to_a_limit(compressed: bool) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["accept-encoding"] == ("gzip" if compressed else "identity")
        # If a server compresses its answer anyway, it is not decompressed.
        body = gzip.compress(b"x" * 9999) if compressed else b"x" * 9999
        return httpx.Response(
            200,
            headers={"content-encoding": "gzip"},
            stream=httpx.ByteStream(body),
        )

    async def ask(most: int) -> bytes:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            _, body = await http.ask(
                client, "GET", "http://a", most=most, seconds=30, compressed=compressed
            )
            return body

    assert asyncio.run(ask(9999)) == b"x" * 9999
    with pytest.raises(http.TooLong):
        asyncio.run(ask(9998))


def test_a_coroutine_runs_to_its_end_where_a_loop_runs_already() -> None:
    """A notebook's cell already runs a loop. A runner keeps its own loop between calls."""
    loops = []

    async def ask() -> int:
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())
        return threading.get_ident()

    with asyncio.Runner() as runner:
        for run in (http.run_to_end, lambda work: http.run_to_end(work, runner)):
            assert run(ask()) == threading.get_ident()
            assert as_a_cell(lambda run=run: run(ask())) != threading.get_ident()
    assert loops[2] is loops[3]

    async def fails() -> None:
        raise KeyError("its own error")

    with pytest.raises(KeyError, match="its own error"):
        as_a_cell(lambda: http.run_to_end(fails()))


def test_an_interrupt_in_a_cell_ends_what_the_cell_waits_for() -> None:
    began, cancelled = threading.Event(), threading.Event()

    async def waits() -> None:
        began.set()
        try:
            await asyncio.sleep(1000)
        finally:
            cancelled.set()

    def interrupt() -> None:
        began.wait(10)
        os.kill(os.getpid(), signal.SIGINT)

    def cell() -> None:
        # Use the handler of a notebook's kernel: asyncio.run would cancel its task instead.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            http.run_to_end(waits())

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        as_a_cell(cell)
    finally:
        signal.signal(signal.SIGINT, before)
    thread.join(10)
    assert cancelled.wait(10)


def test_no_other_code_takes_its_callers_thread_for_a_loop() -> None:
    product = Path(http.__file__).parents[1]
    found = {
        str(path.relative_to(product))
        for path in product.rglob("*.py")
        if "asyncio.run(" in path.read_text()
    }
    assert found <= {"common/http.py"}
