"""Test that what answers at the store's address with status 200 need not be the store."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import botocore.loaders
import pytest
from pydantic import SecretStr

from distributed_training.config.settings import StoreSettings
from distributed_training.store import s3
from distributed_training.store.s3 import (
    AccessKeys,
    IntegrityError,
    PartInfo,
    S3ObjectStore,
    StoreError,
    TransientError,
)

pytestmark = pytest.mark.timeout(60)

LISTED = b"<R xmlns='http://s3.amazonaws.com/doc/2006-03-01/'><Contents/><Upload/><Part/></R>"


class Page(BaseHTTPRequestHandler):
    """The page of a proxy, or XML with entries that say nothing."""

    body = b""
    status = 200
    more: ClassVar[dict[str, str]] = {}
    requests = 0

    def answer(self) -> None:
        type(self).requests += 1
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response_only(self.status)
        for name, value in ({"Content-Length": str(len(self.body))} | self.more).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(self.body)

    do_GET = do_PUT = do_HEAD = do_POST = answer

    def log_message(self, format: str, *args: object) -> None:
        del format, args


class Drip(Page):
    """One byte after the other, until the reader hangs up: never as many as a reader wants."""

    def answer(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "100000")
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(100_000):
                self.wfile.write(b"x")
                time.sleep(0.02)

    do_GET = answer


class Cut(Page):
    """40 bytes, fewer than it announces."""

    length = "100"

    def answer(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", self.length)
        self.end_headers()
        self.wfile.write(b"x" * 40)

    do_GET = answer


@contextlib.contextmanager
def store_at(handler: type[Page]) -> Iterator[S3ObjectStore]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        store = S3ObjectStore(
            bucket="llama-007",
            endpoint_url=f"http://127.0.0.1:{server.server_port}",
            keys=AccessKeys(SecretStr("a" * 32), SecretStr("b" * 64)),
            settings=StoreSettings(write_interval=timedelta(0)),
        )
        yield store
        store.close()
        server.shutdown()


@pytest.fixture(
    scope="module",
    params=[b"<html>maintenance</html>", LISTED],
    ids=["page", "empty entries"],
)
def store(request: pytest.FixtureRequest) -> Iterator[S3ObjectStore]:
    with store_at(type("Odd", (Page,), {"body": request.param})) as store:
        yield store


OPERATIONS: dict[str, Callable[[S3ObjectStore], Any]] = {
    "head": lambda s: s.head("k"),
    "put": lambda s: s.put("k", b"x"),
    "create": lambda s: s.create_multipart("k"),
    "part": lambda s: s.upload_part("k", "id", 1, b"x"),
    "complete": lambda s: s.complete_multipart("k", "id", [PartInfo(1, 1, "0" * 32)]),
}
READS: dict[str, Callable[[S3ObjectStore], Any]] = {
    "range": lambda s: s.get_range("k", 0, 100_000),
    "whole": lambda s: s.get("k", limit=100_000),
}
LISTS: dict[str, Callable[[S3ObjectStore], list[Any]]] = {
    "objects": lambda s: s.list_objects(),
    "parts": lambda s: s.list_parts("k", "id"),
    "uploads": lambda s: s.list_multiparts(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_answer_that_is_no_stores_is_tried_again(store: S3ObjectStore, name: str) -> None:
    with pytest.raises(TransientError, match="llama-007"):
        OPERATIONS[name](store)


NOW = "Mon, 23 Nov 2026 17:00:00 GMT"


@pytest.mark.parametrize(
    ("name", "page"),
    [
        *(
            ("head", {"more": {"ETag": '"x"', "Last-Modified": NOW, "Date": NOW} | odd})
            for odd in ({"Last-Modified": "x"}, {"Date": "x"}, {"Content-Length": "x"})
        ),
        ("put", {"status": 201, "body": b"created"}),
    ],
    ids=["modified", "date", "length", "text"],
)
def test_headers_and_bodies_that_botocore_cannot_read_are_tried_again(
    name: str, page: dict[str, Any]
) -> None:
    """Its own errors for them are no BotoCoreError; they ended the thread that met them."""
    with store_at(type("Odd", (Page,), page)) as store:
        with pytest.raises(TransientError, match="so it is not an object store's"):
            OPERATIONS[name](store)


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [
        (403, "RequestTimeTooSkewed", "set the clock"),
        (403, "InvalidAccessKeyId", "does not accept these keys"),
        (400, "ExpiredToken", "does not accept these keys"),
        (403, "AccessDenied", "lacks the permission"),
        (301, "PermanentRedirect", "redirects elsewhere"),
        (307, "TemporaryRedirect", "redirects elsewhere"),
    ],
)
def test_a_refusal_is_called_by_its_cause(status: int, code: str, text: str) -> None:
    """An answer to HEAD has no body, so it does not say why."""
    body = f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode()

    refuses: type[Page] = type("Refuses", (Page,), {"status": status, "body": body})
    with store_at(refuses) as store:
        for name in ("head", "put"):
            refuses.requests = 0
            with pytest.raises(StoreError, match=text):
                OPERATIONS[name](store)
            assert refuses.requests <= 4, "a redirect was asked about again and again"


@pytest.mark.slow
def test_a_bucket_whose_etags_are_no_md5_is_named_at_once() -> None:
    more = {"ETag": f'"{"0" * 32}"', "x-amz-server-side-encryption": "aws:kms"}
    with store_at(type("Kms", (Page,), {"more": more})) as store:
        for name in ("put", "part"):
            with pytest.raises(IntegrityError, match="KMS"):
                OPERATIONS[name](store)


@pytest.mark.parametrize("name", READS)
def test_an_object_that_trickles_in_is_given_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "_LONGEST_READ", 0.2)  # all of it would take half an hour
    with store_at(Drip) as store, pytest.raises(TransientError, match="of 100000 bytes came in"):
        READS[name](store)


@pytest.mark.parametrize("name", READS)
def test_an_object_cut_short_is_tried_again(name: str) -> None:
    with store_at(Cut) as store, pytest.raises(TransientError, match="llama-007"):
        READS[name](store)


@pytest.mark.parametrize("name", LISTS)
def test_so_is_a_list_whose_entries_say_nothing(
    store: S3ObjectStore, name: str, request: pytest.FixtureRequest
) -> None:
    if "page" in request.node.callspec.id:
        assert LISTS[name](store) == []
        return
    with pytest.raises(TransientError, match="llama-007"):
        LISTS[name](store)


@pytest.mark.parametrize("profile", ["absent", "", None])
def test_settings_of_other_programs_for_aws_are_not_read(
    profile: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile that this machine lacks, and files that would redirect or fail every request."""
    if profile is not None:
        monkeypatch.setenv("AWS_PROFILE", profile)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        (tmp_path / name).write_text("[default]\nregion = nowhere\n[broken")
        monkeypatch.setenv(name, str(tmp_path / name))
    s3._session.cache_clear()
    with store_at(type("Whole", (Cut,), {"length": "40"})) as store:
        assert store.get("k", limit=100) == b"x" * 40


def test_what_s3_is_is_read_once_for_all_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a validator of 250 miners parses a megabyte of JSON 250 times."""
    with store_at(Page):
        monkeypatch.delattr(botocore.loaders.JSONFileLoader, "load_file")
        with store_at(Page):
            pass
