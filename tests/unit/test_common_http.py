"""Answers over HTTP are bounded; a compressed one by its unpacked bytes."""

from __future__ import annotations

import asyncio
import gzip

import httpx
import pytest

from distributed_training.common import http

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("compressed", [False, True])
def test_an_answer_is_read_up_to_a_limit(compressed: bool) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["accept-encoding"] == ("gzip" if compressed else "identity")
        # A server may compress all the same: then nothing is unpacked.
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
