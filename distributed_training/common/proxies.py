"""Decide which requests go through a proxy of the environment, once for all clients.

The variables are the usual ones: ``http_proxy``, ``https_proxy`` and ``all_proxy`` name a proxy,
``no_proxy`` the exceptions; of each the lower-case name wins over the upper-case one. Libraries
differ in how they read address ranges, websockets and ``all_proxy``. So our own clients are given
what :func:`proxy_for` says, and :func:`share` brings the others to the same answer.

Loopback and private addresses are never asked through a proxy. It could not reach them, and a
machine that sets these variables for downloads has its own services there.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from .addresses import Reach, reach

#: Where tokenizers come from.
HUB = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
VARIABLES = ("http_proxy", "https_proxy", "all_proxy")
_LIKE = {"ws": "http", "wss": "https"}  # a websocket begins as a request
_PORTS = {"http": 80, "https": 443}
# Only HTTP: for SOCKS each library needs another package, or has nothing.
_PROXY = re.compile(
    r"(?P<scheme>https?)://(?:(?P<user>[^\s:/?#@]*)(?P<word>:[^\s/?#@]*)?@)?"
    r"(?P<place>(?:[\w.-]+|\[[\da-f:.]+\])(?::(?P<port>\d{1,5}))?)/?",
    re.ASCII | re.IGNORECASE,
)


def proxy_for(url: str) -> str | None:
    """Return the proxy's URL for a request to ``url``, None where it goes straight there.

    Proxies that are not HTTP or whose URL cannot be read count as not set: :func:`unusable` names
    them.
    """
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:  # whoever sends the request says so
        return None
    scheme = _LIKE.get(parts.scheme, parts.scheme)
    proxy = _usable(variable(f"{scheme}_proxy")) or _usable(variable("all_proxy"))
    if proxy is None or not host or host == "localhost" or host.endswith(".localhost"):
        return None
    address = _address(host)
    if address is not None and reach(str(address)) is not Reach.EVERYWHERE:
        return None
    # no_proxy: domains, addresses or ranges, each with a port or not. A domain stands for all below
    # it, with a dot or "*." in front or without; "*" for all.
    for entry in re.split(r"[,\s]+", variable("no_proxy").lower()):
        name, of_port = entry, None
        if found := re.fullmatch(r"([^:]+|\[.*\]):(\d+)", entry):
            name, of_port = found[1], int(found[2])
        if of_port not in (None, port or _PORTS.get(scheme)):
            continue
        if name == "*":
            return None
        name = name.strip("[]")
        if address is None:
            domain = name.removeprefix("*").strip(".")
            if domain and f".{host}".endswith(f".{domain}"):
                return None
            continue
        with contextlib.suppress(ValueError):  # a domain, or no range
            if address in ipaddress.ip_network(name, strict=False):
                return None
    return proxy


def via(url: str) -> str:
    """Return " through the proxy HOST:PORT" where a request to ``url`` takes one, else ""."""
    proxy = proxy_for(url)
    return f" through the proxy {urlsplit(proxy).netloc.rpartition('@')[2]}" if proxy else ""


def share(url: str) -> None:
    """Set the environment so that libraries which read it send ``url`` where we would."""
    for name in unusable():  # the hub's client refuses to be made where one is of SOCKS
        for spelled in (name, name.upper()):
            os.environ.pop(spelled, None)
    proxy, parts = proxy_for(url), urlsplit(url)
    if proxy is not None:
        os.environ[f"{parts.scheme}_proxy"] = proxy
    elif parts.hostname and any(map(variable, (*VARIABLES, "ws_proxy", "wss_proxy"))):
        excepted = variable("no_proxy")
        if parts.hostname not in excepted.split(","):
            # Both: libraries differ in which of them they read first.
            excepted = f"{excepted},{parts.hostname}".strip(",")
            os.environ["no_proxy"] = os.environ["NO_PROXY"] = excepted


def unusable() -> Sequence[str]:
    """Return the names of the variables that name an unusable proxy."""
    return [name for name in VARIABLES if variable(name) and _usable(variable(name)) is None]


def variable(name: str) -> str:
    """Return a variable by its lower-case name, else its upper-case one, or ""."""
    value = os.environ.get(name)
    return (os.environ.get(name.upper(), "") if value is None else value).strip()


def _usable(proxy: str) -> str | None:
    """Return the proxy's URL in the one form that all clients read, None if it has none."""
    found = _PROXY.fullmatch(proxy if "://" in proxy else f"http://{proxy}")
    if found is None or not 0 < int(found["port"] or 80) < 1 << 16:
        return None
    # Clients of websockets want both, or neither.
    login = f"{found['user']}{found['word'] or ':'}@" if found["user"] else ""
    return f"{found['scheme'].lower()}://{login}{found['place']}"


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        # 127.1 and 0x7f000001, as the resolver reads them.
        with contextlib.suppress(OSError, ValueError):
            return ipaddress.IPv4Address(socket.inet_aton(host))
        return None
    return getattr(address, "ipv4_mapped", None) or address
