"""Decide which requests go through the environment's proxy, in the same way for all clients.

The variables are the usual ones, as Python reads them: ``http_proxy``, ``https_proxy`` and
``all_proxy`` name a proxy, ``no_proxy`` the exceptions; a lower-case name has precedence over its
upper-case form. Our own clients use the result of :func:`proxy_for`, and :func:`share` makes
libraries that read the environment do the same.

Requests to loopback and private addresses never go through a proxy. It could not reach them, and a
machine that sets these variables for downloads has its own services there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from urllib import request
from urllib.parse import urlsplit

from .addresses import Reach, reach

#: Where tokenizers come from.
HUB = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
VARIABLES = ("http_proxy", "https_proxy", "all_proxy")
_LIKE = {"ws": "http", "wss": "https"}  # a websocket begins as an HTTP request


def proxy_for(url: str) -> str | None:
    """Return the URL of the proxy for a request to ``url``; None for a direct request.

    Proxies that are not HTTP proxies are ignored: :func:`unusable` lists their variables.
    """
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:  # the request itself will fail and say so
        return None
    proxy = _usable(f"{_LIKE.get(parts.scheme, parts.scheme)}_proxy") or _usable("all_proxy")
    place = f"{host}:{port}" if port else host
    known = {"no": variable("no_proxy")}
    if not host or host == "localhost" or host.endswith(".localhost"):
        return None
    if request.proxy_bypass_environment(place, known):  # type: ignore[attr-defined]
        return None
    with suppress(ValueError):  # the host is a name
        if reach(host) is not Reach.EVERYWHERE:
            return None
    return proxy


def via(url: str) -> str:
    """Return " through the proxy HOST:PORT" if a request to ``url`` uses a proxy, else ""."""
    proxy = proxy_for(url)
    return f" through the proxy {urlsplit(proxy).netloc.rpartition('@')[2]}" if proxy else ""


def share(url: str) -> None:
    """Set the environment so that libraries which read it treat ``url`` as our clients do."""
    for name in unusable():  # the hub's client cannot be created if one of them is a SOCKS proxy
        for spelled in (name, name.upper()):
            os.environ.pop(spelled, None)
    host = urlsplit(url).hostname
    if host and proxy_for(url) is None and any(map(variable, VARIABLES)):
        # Set both, since libraries differ in which of them they read first.
        excepted = {*filter(None, variable("no_proxy").split(",")), host}
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(sorted(excepted))


def unusable() -> Sequence[str]:
    """Return the names of variables whose value is not an HTTP proxy, such as a SOCKS proxy."""
    return [name for name in VARIABLES if variable(name) and _usable(name) is None]


def variable(name: str) -> str:
    """Return the value of a proxy variable: of its lower-case or upper-case name, or ""."""
    return request.getproxies_environment().get(name.removesuffix("_proxy"), "").strip()


def _usable(name: str) -> str | None:
    value = variable(name)
    proxy = value if "://" in value else f"http://{value}"
    with suppress(ValueError):
        parts = urlsplit(proxy)
        if value and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return proxy
    return None
