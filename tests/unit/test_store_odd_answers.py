"""Test answers that do not come from a store, although the status is 200."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import SecretStr

from distributed_training.config.settings import StoreSettings
from distributed_training.node.buckets import _errors_of_a_start
from distributed_training.node.start import NetworkFailure
from distributed_training.store import s3, transfer
from distributed_training.store.base import PartInfo
from distributed_training.store.errors import (
    CertificateError,
    IntegrityError,
    StoreError,
    TransientError,
)
from distributed_training.store.presigned import AccessStore
from distributed_training.store.s3 import AccessKeys, S3ObjectStore
from tests.tools.store_shim import make_certificate

pytestmark = pytest.mark.timeout(60)

BUNDLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
LISTED = b"<R xmlns='http://s3.amazonaws.com/doc/2006-03-01/'><Contents/><Upload/><Part/></R>"


class Page(BaseHTTPRequestHandler):
    """Answer with a proxy's page, or with XML whose entries are empty."""

    protocol_version = "HTTP/1.1"  # a client waits a second for its "100 Continue"
    body = b""
    status = 200
    more: ClassVar[dict[str, str]] = {}
    requests = 0

    def answer(self) -> None:
        type(self).requests += 1
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response_only(self.status)
        # Otherwise a client would send its next request on the connection that is being closed.
        own = {"Content-Length": str(len(self.body)), "Connection": "close"}
        for name, value in (own | self.more).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(self.body)

    do_GET = do_PUT = do_HEAD = do_POST = answer

    def handle_one_request(self) -> None:
        super().handle_one_request()
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        del format, args


class Drip(Page):
    """Send one byte after another until the reader hangs up."""

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
    """Send 40 bytes, which is fewer than announced."""

    length = "100"

    def answer(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", self.length)
        self.end_headers()
        self.wfile.write(b"x" * 40)

    do_GET = answer


@contextlib.contextmanager
def store_at(handler: type[Page], certificate: Path | None = None) -> Iterator[S3ObjectStore]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, certificate.with_suffix(".key"))
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        store = S3ObjectStore(
            bucket="llama-007",
            endpoint_url=f"http{'s' if certificate else ''}://127.0.0.1:{server.server_port}",
            keys=AccessKeys(SecretStr("a" * 32), SecretStr("b" * 64)),
            settings=StoreSettings(),
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
    """botocore's errors about them are not BotoCoreErrors, so they once ended the thread."""
    with store_at(type("Odd", (Page,), page)) as store:
        with pytest.raises(TransientError, match="so it does not come from an object store"):
            OPERATIONS[name](store)


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [
        (403, "RequestTimeTooSkewed", "set the clock"),
        (403, "InvalidAccessKeyId", "does not accept these keys"),
        (400, "ExpiredToken", "does not accept these keys"),
        (403, "AccessDenied", "lacks the permission"),
        (403, "SignatureDoesNotMatch", "a proxy before the store changes Host"),
        (413, "EntityTooLarge", "client_max_body_size 65m"),
        (301, "PermanentRedirect", "redirects elsewhere"),
        (307, "TemporaryRedirect", "redirects elsewhere"),
    ],
)
def test_a_refusal_is_called_by_its_cause(status: int, code: str, text: str) -> None:
    """An answer to HEAD has no body, so the cause comes from another request."""
    body = f"<Error><Code>{code}</Code><Message>m</Message></Error>".encode()

    refuses: type[Page] = type("Refuses", (Page,), {"status": status, "body": body})
    with store_at(refuses) as store:
        for name in ("head", "put"):
            refuses.requests = 0
            with pytest.raises(StoreError, match=text):
                OPERATIONS[name](store)
            assert refuses.requests <= 4, "a redirect was asked about again and again"


def test_members_hear_what_a_proxy_before_the_store_does() -> None:
    store = AccessStore(
        lambda request: None, bucket="net", settings=StoreSettings(endpoint_url="http://a")
    )
    for status, code, text in (
        (403, "SignatureDoesNotMatch", "tell the founder that a proxy .* must not change Host"),
        (403, "AccessDenied", "set this machine's clock"),
        (413, "", "whoever runs the proxy must raise its limit to 65 MB"),
    ):
        answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
        assert re.search(text, str(store._refused("write", "k", answer)))
    assert "Host" not in refused(403, "SignatureDoesNotMatch", "m", at=R2)


@functools.cache
def one_at(url: str) -> S3ObjectStore:
    keys = AccessKeys(SecretStr(KEY), SecretStr(SECRET), "R2_WRITE")
    return S3ObjectStore(bucket="b-7", endpoint_url=url, keys=keys, settings=StoreSettings())


def refused(status: int, code: str, message: str, *, at: str = "http://a") -> str:
    """Return the class and the text of the error for an answer."""
    store = one_at(at)
    answer = {"Code": code, "Message": message}
    metadata = {"HTTPStatusCode": status}
    error = store._refused("write", "k", {"Error": answer, "ResponseMetadata": metadata})
    return f"{type(error).__name__}: {error}"


KEY, SECRET = "0123456789abcdef" * 2, "sEcret/With+slash" * 3
R2 = "https://fedcba9876543210fedcba9876543210.r2.cloudflarestorage.com"
CODES = """
AccessDenied QuotaExceeded AccountProblem SecondLevelDomainForbidden ObjectLockedByBucketPolicy
InvalidAccessKeyId SignatureDoesNotMatch ExpiredToken RequestTimeTooSkewed NoSuchBucket NoSuchUpload
NoSuchKey EntityTooLarge XMinioStorageFull SlowDown InternalError BadDigest OperationAborted
PermanentRedirect AuthorizationHeaderMalformed InvalidPart NotImplemented
"""
WORDS = "storage cap exceeded see Caps & Alerts \n\r\t\x1b[31m \x00 \u202e ü 日本 payment % {} %s"


def test_a_refusal_has_the_stores_own_sentence_on_one_line_and_no_secret() -> None:
    dice = random.Random(7)
    statuses = [301, 307, 400, 401, 403, 404, 405, 409, 412, 413, 429, 500, 501, 503, 507]
    for _ in range(400):
        words = dice.choices(WORDS.split(" "), k=dice.randint(0, 60))
        secret = dice.choice([KEY, SECRET, f"https://x?X-Amz-Signature={'ab' * 32}", ""])
        words.insert(dice.randint(0, len(words)), secret)
        status = dice.choice(statuses)
        code = dice.choice([*CODES.split(), "", str(status), "Odd\n\x1b[31m", KEY])
        at = dice.choice([R2, "http://a"])
        said = refused(status, code, " ".join(words), at=at)
        shown = " ".join("".join(c if c.isprintable() else " " for c in " ".join(words)).split())
        for hidden in (KEY, SECRET, "ab" * 32):
            assert hidden not in said
        if not secret:
            assert shown[:150] in said
        assert said.isprintable() and len(said) < 600
        if "dashboard" in said:
            keys = code in ("", "403", "AccessDenied") or status == 401 or code in s3._BAD_KEYS
            assert at == R2 and (keys or code == "NoSuchBucket")


@pytest.mark.parametrize(
    ("status", "code", "message", "kind"),
    [
        (403, "AccessDenied", "Storage cap exceeded, see the Caps page", "RefusedError"),
        (403, "AccessDenied", "object protected by object lock", "RefusedError"),
        (403, "AccountProblem", "payment overdue", "RefusedError"),
        (409, "ObjectLockedByBucketPolicy", "The object is locked", "RefusedError"),
        (409, "OperationAborted", "in progress", "TransientError"),
        (501, "NotImplemented", "not here", "UnsupportedError"),
        (507, "XMinioStorageFull", "full", "TransientError"),
        (400, "AuthorizationHeaderMalformed", "expecting 'eu-1'", "StoreError: .*store.region"),
        (403, "AccessDenied", "Access Denied", "AccessDeniedError: .* permission to write$"),
    ],
)
def test_a_retry_and_a_remedy_only_where_they_may_help(
    status: int, code: str, message: str, kind: str
) -> None:
    said = refused(status, code, message)
    assert re.match(kind, said) and message in said and "dashboard" not in said
    assert "dashboard" in refused(403, "AccessDenied", "Access Denied", at=R2)


@pytest.mark.parametrize("name", ["put", "part"])
def test_an_etag_of_other_bytes_is_named_and_one_that_is_no_md5_tells_nothing(name: str) -> None:
    md5 = hashlib.md5(b"x").hexdigest()
    for etag, accepted in (
        (f'"{"0" * 32}"', False),
        (f'W/"{md5}"', True),
        (f'"{md5.upper()}"', True),
        ('"v1"', True),
    ):
        refuses = pytest.raises(IntegrityError, match=r"other bytes than those sent .*KMS")
        with store_at(type("Odd", (Page,), {"more": {"ETag": etag}})) as store:
            with contextlib.nullcontext() if accepted else refuses:
                OPERATIONS[name](store)


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize(
    ("handler", "said"),
    [(Drip, "of 100000 bytes arrived in"), (Cut, "llama-007")],
    ids=["drip", "cut"],
)
def test_an_object_that_trickles_in_or_is_cut_short_is_tried_again(
    name: str, handler: type[Page], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_LONGEST_READ", 0.2)  # receiving everything would take half an hour
    with store_at(handler) as store, pytest.raises(TransientError, match=said):
        READS[name](store)


@pytest.mark.parametrize("name", LISTS)
def test_a_list_with_empty_entries_is_a_transient_error(
    store: S3ObjectStore, name: str, request: pytest.FixtureRequest
) -> None:
    if "page" in request.node.callspec.id:
        assert LISTS[name](store) == []
        return
    with pytest.raises(TransientError, match="llama-007"):
        LISTS[name](store)


class Endless(Page):
    """Answer with a list in which each page has ``entries`` and names another page."""

    entries = b""

    def answer(self) -> None:
        number = type(self).requests + 1
        self.body = (
            b"<R xmlns='http://s3.amazonaws.com/doc/2006-03-01/'><IsTruncated>true</IsTruncated>"
            b"<NextContinuationToken>%d</NextContinuationToken><NextKeyMarker>%d</NextKeyMarker>"
            b"<NextUploadIdMarker>%d</NextUploadIdMarker><NextPartNumberMarker>%d"
            b"</NextPartNumberMarker>%s</R>" % (number, number, number, number, self.entries)
        )
        super().answer()

    do_GET = answer


_ENTRY = (
    b"<Contents><Key>k</Key><Size>1</Size><ETag>e</ETag><LastModified>%s</LastModified></Contents>"
)


@pytest.mark.parametrize("name", LISTS)
def test_a_list_without_an_end_is_given_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "_MOST_PAGES", 7)
    pages: Any = type("Pages", (Endless,), {})
    with store_at(pages) as store:
        assert LISTS[name](store) == [] and pages.requests == 7
    full: Any = type("Full", (Endless,), {"entries": 3 * (_ENTRY % b"2026-11-23T17:00:00Z")})
    with store_at(full) as store, pytest.raises(StoreError, match="more than 4 objects"):
        store.list_objects(most=4)
    assert full.requests == 2


def test_a_certificate_that_is_not_accepted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an outage it would be retried for an hour, and no line would name the remedy."""
    for name in BUNDLES:
        monkeypatch.delenv(name, raising=False)
    certificate = make_certificate(tmp_path)
    with store_at(Page, certificate) as store:
        with pytest.raises(CertificateError, match=r"not accepted \(self-signed.*AWS_CA_BUNDLE"):
            transfer.Retry(each=timedelta(hours=1))(store.list_objects)
    with pytest.raises(NetworkFailure, match="not accepted"), _errors_of_a_start("llama-007"):
        raise CertificateError("it is not accepted")
    for name in BUNDLES:
        monkeypatch.setenv(name, str(certificate))
        with store_at(Page, certificate) as store:
            assert store.list_objects() == []  # the handshake succeeded, and the page is empty
        for bad in (tmp_path / "missing", tmp_path, certificate.with_suffix(".key")):
            monkeypatch.setenv(name, str(bad))
            with (
                pytest.raises(ValueError, match=f"{name}=.* cannot be read"),
                store_at(Page, certificate),
            ):
                pass
        monkeypatch.delenv(name)
