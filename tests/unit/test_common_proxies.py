"""A request goes through a proxy of the environment or straight: the same for each client.

Loopback and private addresses never go through one, whatever is set.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import random
import threading
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx
import httpx2
import pytest
from pydantic import SecretStr
from websockets.proxy import get_proxy
from websockets.uri import parse_uri

from distributed_training.chain.registry import RegistryChain
from distributed_training.common import proxies
from distributed_training.common.proxies import proxy_for, share, unusable
from distributed_training.common.transports import AsyncTransport, Transport
from distributed_training.config.settings import StoreSettings
from distributed_training.health.clock import ClockUnknown, store_offset
from distributed_training.store.errors import StoreError
from distributed_training.store.s3 import AccessKeys, S3ObjectStore
from tests.tools.settings import load_config
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(60)

DEAD = "http://127.0.0.1:9"
OWN = """
127.0.0.1 127.8.9.10 127.1 2130706433 0x7f000001 localhost LOCALHOST a.localhost localhost. [::1]
[::ffff:127.0.0.1] 10.1.2.3 172.16.0.1 172.31.255.254 192.168.178.20 169.254.169.254 100.64.0.1
[fe80::1] [fd00::5] [::ffff:192.168.0.1] 0.0.0.0 [::]
"""
OTHERS = """
8.8.8.8 172.32.0.1 [2606:4700::1] a.r2.cloudflarestorage.com example.com huggingface.co
localhost.example.com 10.example.com buecher.example
"""
SETTINGS = StoreSettings()
ENVIRONMENT = [
    spelled
    for name in (*proxies.VARIABLES, "no_proxy", "ws_proxy", "wss_proxy")
    for spelled in (name, name.upper())
]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        # Set before it is deleted: what `share` sets is taken back at the end.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("hosts", "proxy"), [(OWN, None), (OTHERS, DEAD)])
def test_own_addresses_go_straight_and_others_through_the_proxy(
    hosts: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in proxies.VARIABLES:
        monkeypatch.setenv(name, DEAD)
        monkeypatch.setenv(name.upper(), DEAD)
    urls = [
        f"{scheme}://{host}{port}/x?y=http://z"
        for host in hosts.split()
        for scheme in ("http", "https", "ws", "wss")
        for port in ("", ":8000")
    ]
    assert [url for url in urls if proxy_for(url) != proxy] == []


@pytest.mark.parametrize(
    ("excepted", "url", "straight"),
    [
        ("*", "https://example.com", True),
        ("example.com", "https://example.com", True),
        ("example.com", "https://a.b.Example.com.", True),
        (".example.com", "https://example.com", True),
        ("*.example.com", "https://a.example.com", True),
        ("example.com", "https://badexample.com", False),
        ("example.com:8443", "https://example.com:8443", True),
        ("example.com:8443", "https://example.com", False),
        ("example.com:443", "https://example.com", True),
        ("8.8.0.0/16", "http://8.8.4.4:9000", True),
        ("8.8.0.0/16", "http://8.9.4.4:9000", False),
        ("8.8.4.4:80, 9.9.9.9", "ws://8.8.4.4", True),
        ("8.8.4.4:80, 9.9.9.9", "ws://9.9.9.9:1", True),
        ("2606:4700::/32", "https://[2606:4700::1]", True),
        ("[2606:4700::1]:443", "https://[2606:4700::1]", True),
        ("4.4", "http://8.8.4.4", False),
        ("", "http://8.8.4.4", False),
        (",, ,:,[,*x,/8,0/", "http://example.com", False),
    ],
)
def test_exceptions_are_names_addresses_and_ranges(
    excepted: str, url: str, straight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("all_proxy", DEAD)
    monkeypatch.setenv("NO_PROXY", excepted)
    assert proxy_for(url) == (None if straight else DEAD)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("10.0.0.1:3128", "http://10.0.0.1:3128"),
        ("HTTP://proxy.lab/", "http://proxy.lab"),
        ("https://me:p%40ss@[fd00::1]:8", "https://me:p%40ss@[fd00::1]:8"),
        ("http://me@proxy:8", "http://me:@proxy:8"),
        ("socks5://127.0.0.1:1080", None),
        ("socks5h://127.0.0.1:1080", None),
        ("http://", None),
        ("http://[::1", None),
        ("http://proxy:99999", None),
        ("http://proxy:port", None),
        ("http://a b", None),
        ("http://proxy/path", None),
    ],
)
def test_only_http_proxies_are_used(
    given: str, used: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", given)
    assert proxy_for("https://example.com") == used
    assert list(unusable()) == ([] if used else ["all_proxy"])


def test_the_lower_case_name_and_the_schemes_own_one_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://upper")
    monkeypatch.setenv("all_proxy", "http://all")
    assert proxy_for("https://example.com") == proxy_for("wss://example.com") == "http://upper"
    assert proxy_for("http://example.com") == proxy_for("ws://example.com") == "http://all"
    monkeypatch.setenv("https_proxy", "")
    assert proxy_for("https://example.com") == "http://all"


# --- each client does the same --------------------------------------------------------------------


def _place(proxy: str | None) -> str | None:
    """Return HOST:PORT of a proxy's URL."""
    if proxy is None:
        return None
    url = httpx.URL(proxy)
    return f"{url.host}:{url.port or {'http': 80, 'https': 443}[url.scheme]}"


def _of_pool(transport: Any) -> str | None:
    proxy = getattr(transport._pool, "_proxy_url", None)
    return None if proxy is None else _place(str(httpx.URL(str(bytes(proxy), "ascii"))))


def _where_httpx_goes(url: str, monkeypatch: pytest.MonkeyPatch) -> set[str | None]:
    went = set()

    def send(transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        went.add(_of_pool(transport))
        return httpx.Response(200)

    async def send_later(
        transport: httpx.AsyncHTTPTransport, request: httpx.Request
    ) -> httpx.Response:
        went.add(_of_pool(transport))
        return httpx.Response(200)

    async def ask() -> None:
        async with httpx.AsyncClient(transport=AsyncTransport(verify=False)) as client:
            await client.get(url)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", send)
    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", send_later)
    with httpx.Client(transport=Transport(verify=False)) as client:
        client.get(url)
    asyncio.run(ask())
    return went


def _where_the_store_goes(url: str) -> str | None:
    keys = AccessKeys(SecretStr("key"), SecretStr("secret"))
    with closing(
        S3ObjectStore(bucket="bucket", endpoint_url=url, keys=keys, settings=SETTINGS)
    ) as store:
        session = store._client._endpoint.http_session
        return _place(session._proxy_config.proxy_url_for(url))


def _where_libraries_go(url: str) -> set[str | None]:
    """Ask the libraries of the chain and of the hub, which read the environment themselves."""
    share(url)
    if url.startswith("ws"):
        return {_place(get_proxy(parse_uri(url)))}
    with httpx2.Client(verify=False) as client:
        return {_of_pool(client._transport_for_url(httpx2.URL(url)))}


def _draw(dice: random.Random) -> tuple[dict[str, str], str]:
    """Return an environment and a host."""
    usual = ["http://proxy.lab:3128", "https://u:p@10.0.0.9:8", "10.0.0.9:3128", ""]
    odd = ["socks5://127.0.0.1:1080", "http://[x", "http://p/path"] if dice.random() < 0.2 else []
    spelled = [n for name in proxies.VARIABLES for n in (name, name.upper())]
    environment = {name: dice.choice(usual + odd) for name in spelled if dice.random() < 0.5}
    public = str(ipaddress.IPv4Address(dice.getrandbits(32)))
    host = dice.choice([*OWN.split(), *OTHERS.split(), *[public] * 9])
    ranges = [f"{public}/{dice.randint(0, 32)}", "10.0.0.0/8", "fd00::/8", "2606:4700::/16"]
    names = ["example.com", ".example.com", "*.co", host.strip("[]"), "*", f"{host}:443"]
    for name in ("no_proxy", "NO_PROXY"):
        if dice.random() < 0.6:
            entries = dice.choices([*ranges, *names], k=dice.randint(0, 2))
            environment[name] = dice.choice([",", ", "]).join(entries)
    return environment, host


def test_each_client_sends_a_request_to_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    dice, proxied = random.Random(20261126), 0
    for _ in range(90):
        environment, host = _draw(dice)
        scheme, port = dice.choice(["http", "https", "ws", "wss"]), dice.choice([443, 9000])
        url = f"{scheme}://{host}:{port}"
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            expected = _place(proxy_for(url))
            proxied += expected is not None
            assert expected is None or host not in OWN.split()
            found = set()
            if scheme.startswith("http"):
                found |= _where_httpx_goes(url, patch)
                with suppress(ValueError):  # botocore takes no such endpoint
                    found.add(_where_the_store_goes(url))
            found |= _where_libraries_go(url)
            assert found == {expected}, (url, environment)
        for name in ENVIRONMENT:
            os.environ.pop(name, None)
    assert proxied > 20


class Refusing(BaseHTTPRequestHandler):
    """A proxy that notes where it should go, and goes nowhere."""

    asked: ClassVar[set[str]] = set()

    def refuse(self) -> None:
        self.asked.add(urlsplit(self.path).hostname or self.path.partition(":")[0])
        self.send_error(403)

    do_GET = do_HEAD = do_POST = do_PUT = do_CONNECT = refuse

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def _ask_everybody(host: str) -> None:
    """Make a request of each client to a host of its own below ``host``, or to ``host`` itself."""

    def at(name: str) -> str:
        return f"http://{name}.{host}:9" if host[-1].isalpha() else f"http://{host}:9"

    flags = ["--network", "local", "--r2.endpoint_url", at("clock")]
    with suppress(ClockUnknown):
        store_offset(load_config("miner", flags, check=False))
    keys = AccessKeys(SecretStr("key"), SecretStr("secret"))
    store = S3ObjectStore(bucket="b-7", endpoint_url=at("store"), keys=keys, settings=SETTINGS)
    with closing(store), pytest.raises(StoreError):
        store.head("k")
    with closing(RegistryChain(url=at("registry"), wallet=None)) as chain:
        wait_for(lambda: bool(chain.trouble), "the registry's first answer")


def test_chain_and_store_use_the_proxy_only_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        for name in proxies.VARIABLES:
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.server_port}")
        _ask_everybody("127.0.0.1")
        assert set() == Refusing.asked
        _ask_everybody("lab.example")
        names = {f"{name}.lab.example" for name in ("clock", "store", "registry")}
        assert names == Refusing.asked
        server.shutdown()
