"""Test members that use a real store without its key, by the URLs that a registry signs."""

from __future__ import annotations

import logging
import os
import posixpath
import re
import subprocess
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from distributed_training.chain.registry import Busy, RefusedWrite, RegistryChain
from distributed_training.common.ports import free_ports, listen
from distributed_training.config import ConfigError, load_config
from distributed_training.config.settings import StoreSettings
from distributed_training.network_command import build_parser
from distributed_training.node.buckets import open_by_registry
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Master
from distributed_training.registry import access, service
from distributed_training.registry import command as program
from distributed_training.registry.files import SECRET
from distributed_training.store import presigned
from distributed_training.store.base import md5_of, put_once
from distributed_training.store.errors import (
    AccessDeniedError,
    RefusedError,
    StoreError,
    TakenError,
    TransientError,
)
from distributed_training.store.presigned import AccessStore
from distributed_training.store.s3 import base64_md5
from distributed_training.telemetry.events import EventLog
from distributed_training.telemetry.logs import LineFormatter
from tests.tools.access_world import AccessWorld
from tests.tools.chain_program import serve_command, url_of
from tests.tools.chain_world import MINER, PEER, STRANGER, VALIDATOR, answers, registry_at
from tests.tools.network import network_file
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(240)
MIB = 1024 * 1024
OURS = keys.upload_key(1, 3, 7)


@pytest.fixture(autouse=True)
def no_state_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_STATE_KEPT", 0.0)


@pytest.fixture(params=["s3", "folder"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AccessWorld]:
    """Provide a network whose bucket is at an S3 store, or in a folder that its registry serves."""
    server = request.getfixturevalue("server") if request.param == "s3" else None
    with AccessWorld(server, tmp_path / "registry") as made:
        yield made


@pytest.fixture(scope="module")
def peer(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryChain]:
    """Provide a member of a network with a close, for tests that change nothing."""
    with AccessWorld(server, tmp_path_factory.mktemp("lasting") / "registry") as made:
        made.publish()
        yield made.chain(PEER)


@pytest.fixture
def store(world: AccessWorld) -> AccessStore:
    """Return the store of uid 1, in a network whose next close is of outer step 3, serial 7."""
    world.publish()
    return world.member(PEER)


def write_request(data: bytes, key: str = OURS) -> dict[str, Any]:
    return {"do": "write", "key": key, "size": len(data), "md5": [md5_of(data)]}


def test_a_member_writes_its_next_upload_once_and_nothing_else(
    world: AccessWorld, store: AccessStore
) -> None:
    assert store.head(OURS) is None
    etag = put_once(store, OURS, b"ours")
    assert world.owner.get(OURS, limit=9) == b"ours"
    assert put_once(store, OURS, b"ours") == store.put(OURS, b"ours") == etag
    info = store.head(OURS)
    assert info is not None and (info.size, info.etag) == (4, etag)
    with pytest.raises(TakenError, match="the first one counts"):
        put_once(store, OURS, b"another")
    theirs = keys.upload_key(2, 3, 7)
    for key in (theirs, "outer/3/manifest.json", "state.json", "uploads/1/x", "uploads/1/3.7"):
        with pytest.raises((RefusedError, StoreError)):
            store.put(key, b"x")
        assert world.owner.get(key, limit=1000) in (None, world.owner.get("state.json", limit=1000))
    for refused in (
        lambda: store.delete(OURS),
        lambda: store.list_objects("uploads/"),
        lambda: store.list_objects(),
    ):
        with pytest.raises(AccessDeniedError):
            refused()
    assert [o.key for o in world.owner.list_objects("uploads/")] == [OURS]


def test_uploads_are_read_by_nobody_but_the_owner_of_the_key(
    world: AccessWorld, store: AccessStore
) -> None:
    other = world.member(MINER)
    store.put(OURS, b"ours")
    for member in (store, other):
        with pytest.raises(RefusedError, match="only the validator may read"):
            member.get(OURS, limit=9)
        with pytest.raises(RefusedError):
            member.get_range(OURS, 0, 1)
    with pytest.raises(RefusedError, match="not an upload of uid 2"):
        other.head(OURS)
    world.owner.put(keys.merged_key(4, 1), b"merged")
    assert other.get(keys.merged_key(4, 1), limit=9) == b"merged"


def test_a_url_is_good_only_for_its_signed_request(
    world: AccessWorld, store: AccessStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused for other objects, lengths, bytes and methods, and after it has expired."""
    chain = world.chain(PEER)
    data = b"0123456789"
    url = chain.access(write_request(data))["urls"]["put_object"]
    theirs = url.replace("uploads/1/", "uploads/2/")
    state = url.replace(OURS, keys.STATE)
    good = {"content-md5": base64_md5(md5_of(data))}
    before = world.owner.get(keys.STATE, limit=10**6)
    with httpx.Client(trust_env=False, timeout=60) as client:
        for method, place, body, headers in (
            ("PUT", theirs, data, good),
            ("PUT", state, data, good),
            ("PUT", url, data + b"x", good),
            ("PUT", url, data[:-1], good),
            ("PUT", url, data + b"x", {"content-md5": base64_md5(md5_of(data + b"x"))}),
            ("PUT", url, data[::-1], good),
            ("PUT", url, data[::-1], {"content-md5": base64_md5(md5_of(data[::-1]))}),
            ("PUT", url, data, {}),
            ("PUT", url.partition("?")[0], data, good),
            ("GET", url, b"", {}),
            ("DELETE", url, b"", {}),
            ("POST", url + "&uploads", b"", {}),
        ):
            answer = client.request(method, place, content=body, headers=headers)
            assert 400 <= answer.status_code < 500, (method, body, headers, answer.text)
        assert [o.key for o in world.owner.list_objects("uploads/")] == []
        assert world.owner.get(keys.STATE, limit=10**6) == before
        assert client.put(url, content=data, headers=good).status_code == 200
        assert world.owner.get(OURS, limit=99) == data
        monkeypatch.setattr(access, "READ_SECONDS", 2.0)
        read = chain.access({"do": "read", "key": keys.STATE})["urls"]
        assert client.get(read["get_object"]).content == before
        assert client.get(read["head_object"]).status_code == 403
        assert client.put(read["get_object"], content=b"x").status_code == 403
        assert client.delete(read["get_object"]).status_code in (403, 404)
        other = read["get_object"].replace(keys.STATE, OURS)
        assert client.get(other).status_code == 403
        wait_for(lambda: client.get(read["get_object"]).status_code == 403, what="the URL to end")


def test_a_member_gets_urls_for_one_file_of_a_close(world: AccessWorld, store: AccessStore) -> None:
    chain, one, other = world.chain(PEER), b"A" * 1000, b"B" * 2000
    url = chain.access(write_request(one))["urls"]["put_object"]
    for _ in range(2):  # before the first file has arrived
        with pytest.raises(RefusedWrite, match="another file was granted as"):
            chain.access(write_request(other))
    assert chain.access(write_request(one))["urls"]["put_object"], "it may be asked for again"
    with httpx.Client(trust_env=False, timeout=60) as client:
        good = {"content-md5": base64_md5(md5_of(one))}
        assert client.put(url, content=one, headers=good).status_code == 200
    assert world.owner.get(OURS, limit=9999) == one
    world.publish(serial=8)  # for the next close, any file may be sent
    with pytest.raises(RefusedWrite, match="another close"):
        chain.access(write_request(one))
    assert chain.access(write_request(other, keys.upload_key(1, 3, 8)))["urls"]


@pytest.mark.parametrize("late", [-3600.0, 0.0, 700.0, 3600.0])
def test_access_goes_by_the_stores_clock(
    world: AccessWorld, late: float, caplog: pytest.LogCaptureFixture
) -> None:
    world.late = late
    world.publish(closes_in=300)
    chain = world.chain(PEER)
    seconds = chain.access(write_request(b"x"))["seconds"]
    assert seconds == pytest.approx(300 + 30 + access.AFTER_SECONDS, abs=60)
    line = re.findall(r"This machine's clock is (\d+) s (ahead of|behind) the store's", caplog.text)
    assert line == [] if not late else [line[0][1]] == ["ahead of" if late > 0 else "behind"]
    world.publish(closes_in=-31 - access.AFTER_SECONDS, serial=8)
    with pytest.raises(RefusedWrite, match="is over"):
        chain.access(write_request(b"x", keys.upload_key(1, 3, 8)))


def test_only_the_next_close_is_written_for(world: AccessWorld) -> None:
    store = world.member(PEER)
    with pytest.raises(TransientError, match="has no state yet"):
        store.put(OURS, b"x")
    world.publish(wallet=MINER)
    with pytest.raises(TransientError, match="not signed by the network's master"):
        store.put(OURS, b"x")
    world.publish()
    for outer_step, serial in ((2, 7), (4, 7), (3, 6), (3, 8)):
        with pytest.raises(RefusedError, match="another close"):
            store.put(keys.upload_key(1, outer_step, serial), b"x")
    with pytest.raises(RefusedError, match="larger than any upload of this model"):
        store.put(OURS, bytes(2 * MIB))
    world.publish(closes_in=-30 - access.AFTER_SECONDS - 1)
    with pytest.raises(RefusedError, match="is over"):
        store.put(OURS, b"x")
    world.publish(closes_in=-30 - access.AFTER_SECONDS + 60)
    store.put(OURS, b"x")
    world.publish(serial=8, finished="enough tokens")
    with pytest.raises(RefusedError, match="is over"):
        store.put(keys.upload_key(1, 3, 8), b"x")


@pytest.mark.parametrize(
    "fields",
    [
        {"key": "outer/../uploads/1/3.7.safetensors"},
        {"key": "x" * 301},
        {"do": "delete"},
        {"do": "write", "key": OURS, "size": 0},
        {"do": "write", "key": OURS, "size": -1},
        {"do": "write", "key": OURS, "size": 10**15, "md5": []},
        {"do": "write", "key": OURS, "size": 5, "md5": []},
        {"do": "write", "key": OURS, "size": 5, "md5": ["0" * 32] * 2},
        {"do": "write", "key": OURS, "size": 5, "md5": ["0" * 31]},
        {"do": "write", "key": OURS, "size": 5, "md5": "0" * 32},
        {"do": "complete", "key": OURS, "size": 5, "md5": ["0" * 32] * 4097},
        {"uid": 2},
        {"url": "http://x"},
        {"key": None},
    ],
)
def test_nonsense_is_refused(peer: RegistryChain, fields: dict[str, Any]) -> None:
    with pytest.raises(RefusedWrite):
        peer.access({"do": "read", "key": keys.STATE, **fields})


def test_non_member_gets_no_url(world: AccessWorld, store: AccessStore) -> None:
    founder, stranger = world.chain(VALIDATOR), world.chain(STRANGER, register=False)
    with pytest.raises(RefusedWrite, match="has no uid"):
        stranger.access({"do": "read", "key": keys.STATE})
    chain = world.chain(PEER)
    founder.administer("expel", hotkey=PEER.ss58)
    for request in ({"do": "read", "key": keys.STATE}, write_request(b"x")):
        with pytest.raises(RefusedWrite, match="was expelled"):
            chain.access(request)
    with pytest.raises(RefusedError, match="was expelled"):
        store.get("network.json", limit=9)


def test_member_that_asks_too_often_waits_and_nobody_else_does(
    world: AccessWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_GRANTS_PER_SECOND", 1e-3)
    monkeypatch.setattr(service, "_GRANTS_BURST", 4.0)
    world.server.stop()
    world.server.start()
    world.publish()
    one, other = world.chain(PEER), world.chain(MINER)
    for _ in range(4):
        one.access({"do": "look", "key": OURS})
    with pytest.raises(Busy, match="too many requests"):
        one.access({"do": "look", "key": OURS})
    with pytest.raises(TransientError, match="too many requests"):
        world.member(PEER).put(OURS, b"x")
    other.access({"do": "look", "key": keys.upload_key(2, 3, 7)})
    one.access({"do": "read", "key": keys.STATE})  # this needs no request to the store


class TestParts:
    @pytest.fixture(autouse=True)
    def smaller(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(presigned, "PART", 5 * MIB)
        monkeypatch.setattr(presigned, "CONCURRENT", 1)

    @pytest.fixture
    def world(self, server: Any, tmp_path: Path) -> Iterator[AccessWorld]:
        with AccessWorld(server, tmp_path / "registry", parameters=32 * MIB) as made:
            yield made

    def test_multipart_upload_for_a_close_is_aborted_at_the_next(self, world: AccessWorld) -> None:
        world.publish()
        one, other = world.chain(PEER), world.chain(MINER)
        md5 = ["0" * 32] * 2
        for uid, chain in ((1, one), (2, other)):
            key = keys.upload_key(uid, 3, 7)
            chain.access({"do": "write", "key": key, "size": 9 * MIB, "md5": md5})
            with pytest.raises(RefusedWrite, match="lacks 2 of 2 parts"):
                chain.access({"do": "complete", "key": key, "size": 9 * MIB, "md5": md5})
        assert len(world.owner.list_multiparts("uploads/")) == 2
        world.publish(serial=8)
        key = keys.upload_key(1, 3, 8)
        with pytest.raises(RefusedWrite, match="another close"):
            one.access({"do": "complete", "key": OURS, "size": 9 * MIB, "md5": md5})
        small = other.access(write_request(b"x", keys.upload_key(2, 3, 8)))
        assert small["urls"] and world.owner.list_multiparts("uploads/") == []
        one.access({"do": "write", "key": key, "size": 9 * MIB, "md5": md5})
        assert [u.key for u in world.owner.list_multiparts("uploads/")] == [key]

    def test_a_part_is_taken_with_its_own_length_and_bytes(self, world: AccessWorld) -> None:
        world.publish()
        chain = world.chain(PEER)
        data = os.urandom(5 * MIB)
        request = {"key": OURS, "size": 6 * MIB, "md5": [md5_of(data), md5_of(data[:MIB])]}
        urls = chain.access({"do": "write", **request})["urls"]
        assert sorted(urls) == ["1", "2"]
        with httpx.Client(trust_env=False, timeout=60) as client:
            for number, body in (("1", data[1:]), ("2", data), ("2", data[1 : MIB + 1])):
                headers = {"content-md5": base64_md5(md5_of(body))}
                assert client.put(urls[number], content=body, headers=headers).status_code >= 400
        with pytest.raises(RefusedWrite, match="lacks 2 of 2"):
            chain.access({"do": "complete", **request})


@contextmanager
def elsewhere(status: int = 200, location: str = "", body: bytes = b"") -> Iterator[Any]:
    """Run a server that answers every request with ``status`` and records it."""
    asked: list[str] = []
    headers = {"etag": '"x"', "last-modified": "Thu, 01 Jan 2026 00:00:00 GMT"}

    def answer(request: BaseHTTPRequestHandler) -> tuple[Any, ...]:
        asked.append(request.path)
        return status, body, headers | ({"location": location} if location else {})

    # A client waits a second for the "100 Continue" of 1.1.
    with answers(answer, "HTTP/1.1") as port:
        yield SimpleNamespace(asked=asked, url=f"http://127.0.0.1:{port}")


def asked_of(url: str, answers: list[dict[str, Any]]) -> tuple[AccessStore, list[Any]]:
    """Return a member's store whose registry gives ``answers``, and the recorded requests."""
    seen: list[Any] = []

    def ask(request: Any) -> Any:
        seen.append(request)
        return answers[min(len(seen), len(answers)) - 1]

    of_store = StoreSettings(endpoint_url=url, region="us-east-1")
    return AccessStore(ask, bucket="bucket", settings=of_store), seen


SIGNED = "X-Amz-Credential=planted-id&X-Amz-Signature=planted-secret"


def granted(url: str) -> dict[str, Any]:
    names = ("get_object", "head_object", "put_object", "1", "2")
    return {"urls": dict.fromkeys(names, f"{url}?{SIGNED}"), "seconds": 600.0}


@pytest.mark.parametrize(
    "place",
    [
        "{elsewhere}/bucket/state.json",
        "http://127.0.0.1.example.org/bucket/state.json",
        "http://user@{host}/state.json",
        "http://127.0.0.1:1/bucket/state.json",
        "ftp://{host}/bucket/state.json",
        "file:///etc/passwd",
        "http:///state.json",
        "http://[::1/state.json",
        "http://{host}:99999/x",
        "",
    ],
)
def test_a_registry_that_leads_elsewhere_is_not_followed(place: str) -> None:
    with elsewhere() as other, elsewhere() as right:
        host = urlsplit(right.url).netloc
        url = place.format(elsewhere=other.url, host=host)
        store, _ = asked_of(right.url, [granted(url)])
        for refused in (
            lambda: store.get("state.json", limit=9),
            lambda: store.head("state.json"),
            lambda: store._remember("x", presigned.Grant({"put_object": url}, 9.0)),
        ):
            with pytest.raises(RefusedError, match=r"nothing was sent.*store\.hosts") as caught:
                refused()
            assert "planted" not in str(caught.value)
        assert other.asked == [] and right.asked == []


def test_plain_http_is_spoken_only_in_a_private_network() -> None:
    url = "http://10.1.2.3:9000"
    of_store = StoreSettings(endpoint_url=url, region="us-east-1")
    grant = presigned.Grant({"get_object": f"{url}/bucket/a"}, 9.0)
    secure = presigned.Grant({"get_object": "https://bucket.example.org/a"}, 9.0)
    store = AccessStore(lambda _: None, bucket="bucket", settings=of_store)
    with pytest.raises(RefusedError):
        store._remember("a", grant)
    AccessStore(lambda _: None, bucket="bucket", settings=of_store, private=True)._remember(
        "a", grant
    )
    of_store = StoreSettings(endpoint_url="https://example.org", addressing="virtual")
    AccessStore(lambda _: None, bucket="bucket", settings=of_store)._remember("a", secure)
    of_store = StoreSettings(endpoint_url="https://other.org", hosts=("Bucket.example.org",))
    AccessStore(lambda _: None, bucket="bucket", settings=of_store)._remember("a", secure)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(status: int) -> None:
    with elsewhere() as other, elsewhere(status, other.url + "/bucket/a") as right:
        store, _ = asked_of(right.url, [granted(f"{right.url}/bucket/a")])
        for asks in (
            lambda: store.get("a", limit=9),
            lambda: store.head("a"),
            lambda: store.get_range("a", 0, 1),
        ):
            with pytest.raises(RefusedError, match="is not followed"):
                asks()
        answers = [{"info": None}, granted(f"{right.url}/bucket/a")]
        store, _ = asked_of(right.url, answers)
        with pytest.raises(RefusedError, match="is not followed"):
            store.put(OURS, b"x")
        assert other.asked == []
        assert len(right.asked) <= 8, "nor asked where the bucket is"


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {"urls": 5},
        {"urls": {"get_object": 7}, "seconds": 5},
        {"urls": {"get_object": "x" * 9000}, "seconds": 5},
        {"urls": {}, "seconds": "soon"},
        {"urls": {}, "seconds": 600},
    ],
)
def test_an_answer_that_grants_nothing_is_refused_in_one_line(answer: Any) -> None:
    with elsewhere() as right:
        store, _ = asked_of(right.url, [answer])
        with pytest.raises(StoreError) as caught:
            store.get("state.json", limit=9)
        assert "\n" not in str(caught.value)
        assert right.asked == []


def test_a_url_is_asked_for_once_while_it_is_good() -> None:
    with elsewhere(200, body=b"text") as right:
        store, seen = asked_of(right.url, [granted(f"{right.url}/bucket/a")])
        for _ in range(3):
            assert store.get("a", limit=9) == b"text"
            assert store.head("a") is not None
        assert len(seen) == 1
    with elsewhere(403) as right:
        store, seen = asked_of(right.url, [granted(f"{right.url}/bucket/a")])
        for _ in range(2):
            with pytest.raises(AccessDeniedError, match="refused the URL"):
                store.get("a", limit=9)
        assert len(seen) == 2, "one that is refused is not kept"


def test_parts_that_the_store_cannot_take_now_are_sent_again() -> None:
    with elsewhere(503) as busy:
        store, _ = asked_of(busy.url, [])
        grant = granted(f"{busy.url}/bucket/a")
        grant["urls"] = {str(n): grant["urls"]["1"] for n in range(1, 13)}
        store._remember("a", presigned.Grant(**grant))
        for _ in range(2):
            with pytest.raises(TransientError):
                store._put_parts("a", [b"1"] * 12, ["0" * 32] * 12, presigned.Grant(**grant))


@pytest.mark.parametrize("fault", [200, 302, 400, 403, 404, 416, 429, 500, 503, None])
def test_a_signed_query_is_in_no_log_exception_or_event(
    fault: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """This includes all libraries' debug lines. ``fault``: the store's status; None: no answer."""
    caplog.set_level(logging.DEBUG)
    for name in ("botocore", "urllib3", "distributed_training"):
        caplog.set_level(logging.DEBUG, name)
    events = EventLog.open(tmp_path)
    with elsewhere(fault or 200, body=b"<Error><Code>Odd</Code></Error>") as right:
        url = right.url
        if fault is None:
            sock = listen("127.0.0.1", 0)
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            sock.close()
        grant = granted(f"{url}/bucket/a")
        told = []
        for asks in (
            lambda s: s.get("a", limit=9),
            lambda s: s.head("a"),
            lambda s: s.get_range("a", 0, 3, etag="e"),
            lambda s: s._put_parts("a", [b"1", b"2"], ["0" * 32] * 2, presigned.Grant(**grant)),
            lambda s: s._put("a", b"1"),
        ):
            store, _ = asked_of(url, [grant])
            store._remember("a", presigned.Grant(**grant))
            try:
                asks(store)
            except StoreError as error:
                told.append(error)
                logging.getLogger("distributed_training.x").warning("%s", error, exc_info=error)
                events.write("failed", error=str(error))
    logging.getLogger("urllib3").warning("Failed to parse headers (url=%s?%s)", url, SIGNED)
    events.write("odd", url=f"{url}/a?{SIGNED}")
    formatter = LineFormatter(rank=0)
    lines = [formatter.format(record) for record in caplog.records]
    texts = ["".join(traceback.format_exception(error)) for error in told]
    for text in [*lines, *texts, (tmp_path / "events.jsonl").read_text()]:
        assert "planted" not in text, text
    assert told or fault == 200
    for handler in list(logging.getLogger().handlers):
        if type(handler).__name__ == "_Problems":
            logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize("world", ["s3"], indirect=True)
@pytest.mark.parametrize("where", ["environment", "nowhere"])
def test_the_program_has_the_stores_own_key(
    world: AccessWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The key comes from the environment; without it an error says so."""
    monkeypatch.chdir(tmp_path)  # so that no other .env is read
    world.publish()
    store = world.settings
    rules = {
        "exchange": "store",
        "store.endpoint": store.endpoint_url,
        "store.region": store.region,
        "store.global_bucket": world.name,
        "chain.url": "http://127.0.0.1:1",
    }
    words = ["serve", "--network", network_file(tmp_path / "network", rules)]
    words += ["--folder", str(tmp_path / "served")]
    keys_of_store = {n: v for n, v in world.keys.items() if n.startswith("R2_WRITE")}
    for name, value in keys_of_store.items():
        if where == "environment":
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    assert not any(value in words for value in keys_of_store.values())
    options = build_parser().parse_args(words)
    config = load_config("validator", ["--network", options.network], check=False)
    assert not config.has_bucket
    if where == "nowhere":
        with pytest.raises(ConfigError, match="R2_WRITE_ACCESS_KEY_ID is not set"):
            program.open_access(config, options, VALIDATOR.ss58)
        return
    with closing(program.open_access(config, options, VALIDATOR.ss58)[0]) as made:
        url = made.grant(1, "read", keys.STATE)["urls"]["get_object"]
        answer = httpx.get(url, trust_env=False)
        assert answer.content == world.owner.get(keys.STATE, limit=10**6)


@pytest.mark.parametrize("world", ["folder"], indirect=True)
def test_the_program_grants_urls_and_hands_out_no_key(world: AccessWorld, tmp_path: Path) -> None:
    """The secret that signs the URLs is neither in its arguments nor in its output."""
    world.publish()
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    rules = {
        "exchange": "store",
        "store.endpoint": url,
        "store.global_bucket": world.name,
        "chain.url": url,
    }
    words = ["--network", network_file(tmp_path / "network", rules), "--store", str(world.folder)]
    command = serve_command(tmp_path / "served", *words, "--admission", "open", "--port", str(port))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        minute = timedelta(seconds=60)
        with closing(registry_at(url_of(process), PEER, timeout=minute)) as chain:
            assert chain.wait_ready(minute)
            chain.register()
            settings = replace(world.settings, endpoint_url=url)
            member = open_by_registry(settings, chain, private=False)
            assert member.get(keys.STATE, limit=10**6) == world.owner.get(keys.STATE, limit=10**6)
            with pytest.raises(RefusedError, match="only the validator may read"):
                member.get(OURS, limit=9)
        process.terminate()
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait(30)
    secret = (tmp_path / "served" / SECRET).read_text()
    assert not any(secret in text for text in (*command, printed))
    assert (tmp_path / "served" / SECRET).stat().st_mode & 0o077 == 0


def test_the_founder_reads_of_a_refused_key(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AccessDeniedError("the store does not accept these keys")

    store: Any = SimpleNamespace(head=refuse, get=refuse)
    grants = access.Access(store, master=Master("x", "y", lambda *_: True), largest_upload=9)
    for _ in range(3):
        with pytest.raises(access.StoreAway, match="ask the founder, whose registry logs"):
            grants.grant(1, "write", OURS, 1, (md5_of(b"x"),))
    (record,) = [r for r in caplog.records if "cannot access the store" in r.getMessage()]
    assert "does not accept these keys" in record.getMessage()


@given(st.text(alphabet="ab./%-_?#\\ \n", max_size=30))
@settings(max_examples=300, deadline=None)
def test_a_key_that_is_signed_is_the_one_that_the_store_looks_up(key: str) -> None:
    try:
        TypeAdapter(access.Key).validate_python(key)
    except ValidationError:
        return
    assert posixpath.normpath(key) == key == quote(key) and not key.startswith(("/", "."))
