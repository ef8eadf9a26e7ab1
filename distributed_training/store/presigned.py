"""Use the global bucket without a key: each request goes to a URL that the registry hands out.

A presigned URL carries the store owner's signature for one operation on one object, and expires.
Anyone who has the URL can use it. So its query is a secret, like a password: it appears in no log,
exception or event, and it is sent only to the hosts that the network's signed file names. The
registry (:mod:`distributed_training.registry.access`) decides who gets which URLs.

Members may read everything except ``uploads/``, and write one object there per close. A large
object is sent in parts of :data:`PART` bytes; the registry begins and completes the multipart
upload, so a miner that restarts sends only the missing parts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NoReturn
from urllib.parse import quote, urlsplit

from pydantic import Field, TypeAdapter, ValidationError

from distributed_training.common.addresses import keeps_secrets
from distributed_training.common.http import PAST_CACHES
from distributed_training.config.settings import StoreSettings
from distributed_training.protocol.keys import OUTER

from .base import (
    CONCURRENT,
    MOST_LISTED,
    OF_PARTS,
    PART,
    ObjectInfo,
    Section,
    is_md5,
    md5_of,
    same_etag,
)
from .errors import (
    AccessDeniedError,
    RefusedError,
    StoreError,
    TakenError,
)
from .s3 import S3ObjectStore, base64_md5
from .transfer import multipart_etag, run_all

MOST_PARTS = 4096
UPLOADS = "uploads/"
#: Asks the registry, as :meth:`~distributed_training.chain.registry.RegistryChain.access` does.
#: Raises StoreError.
Ask = Callable[[Mapping[str, Any]], Any]
Do = Literal["read", "look", "write", "complete"]
_Url = Annotated[str, Field(max_length=8192)]
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Grant:
    """The registry's answer to one request.

    ``urls``: URLs by operation (``get_object``, ``head_object``, ``put_object``) or by part number,
    valid for ``seconds``; there is no URL for a part that the store already has. ``upload_id``: the
    id of a multipart upload. ``info``: describes the member's own upload; None if it does not
    exist. ``etag``: the etag of a completed upload.
    """

    urls: dict[str, _Url] = field(default_factory=dict)
    seconds: float = 0.0
    upload_id: str = ""
    info: ObjectInfo | None = None
    etag: str = ""


_GRANT = TypeAdapter(Grant)


class AccessStore(S3ObjectStore):
    """The global bucket as an :class:`~.base.ObjectStore` that cannot list or delete objects.

    ``ask``: sends a request to the registry. ``settings``: the endpoint that URLs lead to, other
    allowed hosts, and ``public_url``, from which everything except ``uploads/`` is read without
    asking. ``private``: all machines are in one private network, so plain http is allowed. Raises
    ValueError.
    """

    def __init__(
        self, ask: Ask, *, bucket: str, settings: StoreSettings, private: bool = False
    ) -> None:
        endpoint = settings.endpoint_url or ""  # the file of such a network always names it
        super().__init__(bucket=bucket, endpoint_url=endpoint, keys=None, settings=settings)
        own = _host_of(endpoint)
        # With some values of store.addressing, the host begins with the bucket's name.
        self._hosts = {own, f"{self._container}.{own}", *map(str.lower, settings.hosts)}
        self._ask = ask
        self._public = (settings.public_url or "").rstrip("/")
        self._private = private
        self._changing = threading.Lock()
        # (operation, key) -> URL, and the monotonic time until which it is used
        self._urls: dict[tuple[str, str], tuple[str, float]] = {}
        events = self._client.meta.events
        events.register("before-parameter-build.s3", self._choose_url)
        events.register("before-call.s3", _use_url)

    # --- requests

    def _choose_url(self, params: Any, model: Any, context: Any, **_: Any) -> None:
        """Find the URL of a request before the request is built. Raises StoreError."""
        key = params["Key"].removeprefix(self._prefix)
        # A cache may answer requests without a key.
        context["changing"] = model.name in _READS and not key.startswith(OUTER)
        operation = _READS.get(model.name)
        if operation is None:
            # put() has just asked for this URL.
            operation = str(params.get("PartNumber", "put_object"))
        elif self._public and not key.startswith(UPLOADS):
            context["url"] = f"{self._public}/{quote(key)}"
            return
        url, until = self._urls.get((operation, key), ("", 0.0))
        if operation in _READS.values() and time.monotonic() > until:
            grant = self._granted("read", key)
            self._remember(key, grant)
            url = grant.urls.get(operation, "")
        if not url:
            raise StoreError(
                f"{self._bucket}/{key}: the registry granted no URL for {operation}, so nothing "
                "was sent: ask the founder"
            )
        context["url"] = url

    def _granted(self, do: Do, key: str, **more: Any) -> Grant:
        """Ask the registry for URLs; return the grant. Raises StoreError."""
        try:
            return _GRANT.validate_python(self._ask({"do": do, "key": key, **more}))
        except ValidationError:
            # Leave out the error's text, because it would contain the URLs.
            raise StoreError(
                f"{do} {self._bucket}/{key}: this version does not understand the registry's "
                "answer, so nothing was sent: update this program, or ask the founder"
            ) from None

    def _remember(self, key: str, grant: Grant) -> None:
        """Keep the URLs of a grant until shortly before they expire. Raises RefusedError."""
        for url in grant.urls.values():
            self._refuse_host(key, url)
        now = time.monotonic()
        with self._changing:
            for ended in [place for place, (_, until) in self._urls.items() if until <= now]:
                del self._urls[ended]
            for operation, url in grant.urls.items():
                self._urls[operation, key] = url, now + 0.9 * grant.seconds

    def _refuse_host(self, key: str, url: str) -> None:
        """Raise RefusedError unless requests may be sent to the host of ``url``."""
        try:
            host = _host_of(url)
            if host in self._hosts and keeps_secrets(url, private=self._private):
                return
            place = f"{urlsplit(url).scheme:.8}://{host:.100}"
        except ValueError:
            place = "an invalid address"
        raise RefusedError(
            f"{self._bucket}/{key}: the registry handed out a URL at {place}, but the network's "
            f"file allows https at {', '.join(sorted(self._hosts))}, so nothing was sent: ask the "
            "founder (store.hosts)"
        )

    def _refused(self, verb: str, key: str, response: Any) -> StoreError:
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        place = f"{verb} {self._bucket}/{key}"
        if status in (401, 403):
            # Forget the URL, which may have expired while this machine slept: the next request asks
            # for a new one.
            with self._changing:
                for operation in _READS.values():
                    self._urls.pop((operation, key), None)
            code = self._sentence(str(response.get("Error", {}).get("Code", "")))
            remedy = "set this machine's clock (timedatectl) or ask the founder"
            if code == "SignatureDoesNotMatch":
                remedy = "tell the founder that a proxy in front of the store must not change Host"
            return AccessDeniedError(
                f"{place}: the store refused the URL that the registry handed out ({status} {code})"
                f"; the next request asks for another; if that is refused too, {remedy}"
            )
        if 300 < status < 304 or status in (307, 308):
            return RefusedError(
                f"{place}: {self._endpoint} redirects elsewhere ({status}), which is not followed: "
                "ask the founder"
            )
        return super()._refused(verb, key, response)

    # --- objects

    def head(self, key: str) -> ObjectInfo | None:
        if key.startswith(UPLOADS):  # our own upload, which nobody may read yet
            return self._granted("look", key).info
        return super().head(key)

    def put(self, key: str, data: bytes | Section) -> str:
        """Write our own upload, in parts if it is large; return its etag.

        An interrupted upload continues with the missing parts. It is not an error if the store
        already has the same bytes. Raises TakenError if it has different bytes.
        """
        parts = [
            data.part(at, min(PART, len(data) - at))
            if isinstance(data, Section)
            else data[at : at + PART]
            for at in range(0, len(data) or 1, PART)
        ]
        digests = [md5_of(part) for part in parts]
        if (held := self.head(key)) is not None:
            own = multipart_etag(digests) if len(parts) > 1 else digests[0]
            # An etag that is not an MD5 proves nothing. In that case, assume that the object is the
            # one that was sent earlier.
            is_digest = is_md5(held.etag) or OF_PARTS.fullmatch(held.etag)
            same = same_etag(held.etag, own) or not is_digest
            if held.size == len(data) and same:
                return held.etag
            raise TakenError(
                f"write {self._bucket}/{key}: another file was already sent for this close, and "
                "the first one counts: nothing was written"
            )
        grant = self._granted("write", key, size=len(data), md5=digests)
        self._remember(key, grant)
        if len(parts) > 1:
            return self._put_parts(key, parts, digests, grant)
        return self._put_new(key, data)

    put_new = put

    def _put_parts(
        self, key: str, parts: Sequence[bytes | Section], digests: Sequence[str], grant: Grant
    ) -> str:
        """Send the parts that the store does not have; let the registry complete the upload."""

        def send(number: int) -> None:
            with self._errors("write", key) as call:
                call(
                    self._client.upload_part,
                    Key=key,
                    UploadId=grant.upload_id,
                    PartNumber=number,
                    Body=parts[number - 1],
                    ContentMD5=base64_md5(digests[number - 1]),
                )

        with ThreadPoolExecutor(CONCURRENT, thread_name_prefix="upload") as pool:
            run_all(pool, send, [n for n in range(1, len(parts) + 1) if str(n) in grant.urls])
        size = sum(map(len, parts))
        return self._granted("complete", key, size=size, md5=list(digests)).etag

    def delete(self, key: str) -> NoReturn:
        raise AccessDeniedError(f"delete {self._bucket}/{key}: only the validator may delete")

    def list_objects(self, prefix: str = "", *, most: int = MOST_LISTED) -> NoReturn:
        raise AccessDeniedError(f"list {self._bucket}/{prefix}: no member may list this bucket")

    def multipart(self) -> None:
        """Return None: :meth:`put` cuts a large upload into parts itself."""


_READS = {"GetObject": "get_object", "HeadObject": "head_object"}


def _use_url(params: Any, context: Any, **_: Any) -> None:
    params["url"] = context["url"]
    if context["changing"]:
        params["headers"].update(PAST_CACHES)
    # Otherwise botocore would ask where the bucket is after each redirect.
    context.setdefault("s3_redirect", {}).update(redirected=True)


def _host_of(url: str) -> str:
    """Return ``HOST``, or ``HOST:PORT`` if the port is not the scheme's. Raises ValueError."""
    parts = urlsplit(url)
    if parts.username is not None or not parts.hostname:
        raise ValueError("no host, or a user")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return host if parts.port in (None, _PORTS.get(parts.scheme)) else f"{host}:{parts.port}"
