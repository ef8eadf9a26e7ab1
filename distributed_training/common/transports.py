"""Send the requests of httpx's clients straight to their host, or through its proxy."""

from __future__ import annotations

from typing import Any

import httpx

from distributed_training.common.proxies import proxy_for


class Transport(httpx.BaseTransport):
    """For a client of threads: chosen by each request's own URL, so after a redirect too.

    ``options``: of each :class:`httpx.HTTPTransport`, such as ``verify`` and ``limits``. A client
    with a transport of its own reads no proxy from the environment by itself.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._by_proxy: dict[str | None, httpx.HTTPTransport] = {}

    def through(self, proxy: str | None) -> httpx.HTTPTransport:
        if proxy not in self._by_proxy:
            made = httpx.HTTPTransport(proxy=proxy, **self._options)
            self._by_proxy.setdefault(proxy, made)  # another thread's, where it was first
        return self._by_proxy[proxy]

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self.through(proxy_for(str(request.url))).handle_request(request)

    def close(self) -> None:
        for transport in self._by_proxy.values():
            transport.close()


class AsyncTransport(httpx.AsyncBaseTransport):
    """The same for a client of coroutines."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._by_proxy: dict[str | None, httpx.AsyncHTTPTransport] = {}

    def through(self, proxy: str | None) -> httpx.AsyncHTTPTransport:
        if proxy not in self._by_proxy:
            self._by_proxy[proxy] = httpx.AsyncHTTPTransport(proxy=proxy, **self._options)
        return self._by_proxy[proxy]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self.through(proxy_for(str(request.url))).handle_async_request(request)

    async def aclose(self) -> None:
        for transport in self._by_proxy.values():
            await transport.aclose()
