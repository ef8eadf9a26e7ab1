"""All clients use the environment's proxy for the same requests.

Loopback and private addresses never go through one, whatever is set.
"""

from __future__ import annotations

import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import urlsplit

import pytest
from pydantic import SecretStr

from distributed_training.common import proxies
from distributed_training.common.proxies import proxy_for, unusable
from distributed_training.config.settings import StoreSettings
from distributed_training.health.machine import Examination
from distributed_training.health.outside import check_clock
from distributed_training.store.errors import StoreError
from distributed_training.store.s3 import AccessKeys, S3ObjectStore
from tests.tools.chain_world import registry_at
from tests.tools.settings import load_config
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(60)

DEAD = "http://127.0.0.1:9"
OWN = """
127.0.0.1 127.8.9.10 localhost LOCALHOST a.localhost localhost. [::1]
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
        # Set it before deleting it, so that monkeypatch also undoes what `share` sets.
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
        (".example.com", "https://a.b.example.com", True),
        ("example.com", "https://badexample.com", False),
        ("example.com:8443", "https://example.com:8443", True),
        ("example.com:8443", "https://example.com", False),
        ("8.8.4.4, 9.9.9.9", "ws://9.9.9.9:1", True),
        ("", "http://8.8.4.4", False),
    ],
)
def test_exceptions_go_straight(
    excepted: str, url: str, straight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("all_proxy", DEAD)
    monkeypatch.setenv("NO_PROXY", excepted)
    assert proxy_for(url) == (None if straight else DEAD)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("10.0.0.1:3128", "http://10.0.0.1:3128"),
        ("https://me:p%40ss@[fd00::1]:8", "https://me:p%40ss@[fd00::1]:8"),
        ("socks5h://127.0.0.1:1080", None),
        ("http://[::1", None),
        ("http://proxy:99999", None),
    ],
)
def test_only_http_proxies_are_used(
    given: str, used: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", given)
    assert proxy_for("https://example.com") == proxy_for("wss://example.com") == used
    assert list(unusable()) == ([] if used else ["all_proxy"])


class Refusing(BaseHTTPRequestHandler):
    """A proxy that records the host of each request and refuses it."""

    asked: ClassVar[set[str]] = set()

    def refuse(self) -> None:
        self.asked.add(urlsplit(self.path).hostname or self.path.partition(":")[0])
        self.send_error(403)

    do_GET = do_HEAD = do_POST = do_PUT = do_CONNECT = refuse

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def _ask_everybody(host: str) -> None:
    """Send a request with each client to its own host below ``host``, or to ``host`` itself."""

    def at(name: str) -> str:
        return f"http://{name}.{host}:9" if host[-1].isalpha() else f"http://{host}:9"

    flags = ["--network", "local", "--r2.endpoint_url", at("clock")]
    check_clock(Examination(load_config("miner", flags, check=False), ranks=1))
    keys = AccessKeys(SecretStr("key"), SecretStr("secret"))
    store = S3ObjectStore(bucket="b-7", endpoint_url=at("store"), keys=keys, settings=SETTINGS)
    with closing(store), pytest.raises(StoreError):
        store.head("k")
    with closing(registry_at(at("registry"), None)) as chain:
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
