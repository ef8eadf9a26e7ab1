"""Use the global bucket without a key: each request goes to a URL that the registry hands out.

A presigned URL bears the signature of the store's owner for one operation on one object, and
expires. Whoever has the URL may use it. So its query is a secret, as a password is: no log,
exception or event has it, and it is sent only to the hosts that the network's signed file names.
The registry (:mod:`distributed_training.registry.access`) decides who gets which.

Members read everything but ``uploads/``, and write one object there, once for each close. A large
one goes in parts of :data:`PART` bytes; the registry begins and completes that, so a miner that
restarts sends the missing parts and nothing twice.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NoReturn
from urllib.parse import quote, urlsplit

from pydantic import Field, TypeAdapter, ValidationError

from distributed_training.common.addresses import keeps_secrets
from distributed_training.config.settings import StoreSettings

from .base import CONCURRENT, MOST_LISTED, ObjectInfo, Section, md5_of, same_etag
from .errors import (
    AccessDeniedError,
    RefusedError,
    StoreError,
    TakenError,
)
from .s3 import S3ObjectStore, base64_md5
from .transfer import multipart_etag, run_all

PART = 64 * 1024 * 1024  # bytes of a request; a larger object goes in parts of this size
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
    """An answer of the registry to one request.

    ``urls``: URLs by operation (``get_object``, ``head_object``, ``put_object``) or by number of a
    part, good for ``seconds``; a part that the store holds has no URL. ``upload_id``: the id of an
    upload in parts. ``info``: describes one's own upload; None: it is not there. ``etag``: the etag
    of an upload that was completed.
    """

    urls: dict[str, _Url] = field(default_factory=dict)
    seconds: float = 0.0
    upload_id: str = ""
    info: ObjectInfo | None = None
    etag: str = ""


_GRANT = TypeAdapter(Grant)


class AccessStore(S3ObjectStore):
    """The global bucket, an :class:`~.base.ObjectStore` without listing and deleting.

    ``ask``: sends a request to the registry. ``settings``: the endpoint that URLs lead to, further
    hosts, and ``public_url``, where all but ``uploads/`` is read without asking. ``private``: all
    machines are in one private network, where http may be spoken. Raises ValueError.
    """

    def __init__(
        self, ask: Ask, *, bucket: str, settings: StoreSettings, private: bool = False
    ) -> None:
        endpoint = settings.endpoint_url or ""  # the file of such a network has an endpoint
        super().__init__(bucket=bucket, endpoint_url=endpoint, keys=None, settings=settings)
        own = _host_of(endpoint)
        # The bucket's name may stand in front: store.addressing.
        self._hosts = {own, f"{self._container}.{own}", *map(str.lower, settings.hosts)}
        self._ask = ask
        self._public = (settings.public_url or "").rstrip("/")
        self._private = private
        self._changing = threading.Lock()
        self._urls: dict[tuple[str, str], tuple[str, float]] = {}  # and when each ends
        events = self._client.meta.events
        events.register("before-parameter-build.s3", self._choose_url)
        events.register("before-call.s3", _use_url)

    # requests

    def _choose_url(self, params: Any, model: Any, context: Any, **_: Any) -> None:
        """Find the URL of a request before the request is built. Raises StoreError."""
        key = params["Key"].removeprefix(self._prefix)
        operation = _READS.get(model.name)
        if operation is None:
            # put() has asked for its URL just now.
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
            # Leave out the error's text, because it would hold the URLs.
            raise StoreError(
                f"{do} {self._bucket}/{key}: the registry's answer grants nothing that this "
                "version knows, so nothing was sent: update it, or ask the founder"
            ) from None

    def _remember(self, key: str, grant: Grant) -> None:
        """Keep the URLs of a grant until shortly before they end. Raises RefusedError."""
        for url in grant.urls.values():
            self._refuse_host(key, url)
        now = time.monotonic()
        with self._changing:
            for ended in [place for place, (_, until) in self._urls.items() if until <= now]:
                del self._urls[ended]
            for operation, url in grant.urls.items():
                self._urls[operation, key] = url, now + 0.9 * grant.seconds

    def _refuse_host(self, key: str, url: str) -> None:
        """Raise RefusedError unless requests may go where ``url`` leads."""
        try:
            host = _host_of(url)
            if host in self._hosts and keeps_secrets(url, private=self._private):
                return
            place = f"{urlsplit(url).scheme:.8}://{host:.100}"
        except ValueError:
            place = "no place at all"
        raise RefusedError(
            f"{self._bucket}/{key}: the registry hands out a URL at {place}, and the network's "
            f"file names https at {', '.join(sorted(self._hosts))}, so nothing was sent: ask the "
            "founder (store.hosts)"
        )

    def _refused(self, verb: str, key: str, response: Any) -> StoreError:
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        place = f"{verb} {self._bucket}/{key}"
        if status in (401, 403):
            # Forget the URL, which may have ended while this machine slept: the next request asks
            # for another.
            with self._changing:
                for operation in _READS.values():
                    self._urls.pop((operation, key), None)
            code = self._sentence(str(response.get("Error", {}).get("Code", "")))
            remedy = "set this machine's clock (timedatectl) or ask the founder"
            if code == "SignatureDoesNotMatch":
                remedy = "tell the founder that a proxy before the store must not change Host"
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

    # objects

    def head(self, key: str) -> ObjectInfo | None:
        if key.startswith(UPLOADS):  # one's own upload, which nobody may read yet
            return self._granted("look", key).info
        return super().head(key)

    def put(self, key: str, data: bytes | Section) -> str:
        """Write one's own upload, in parts if it is large; return its etag.

        An interrupted upload continues with the missing parts. It is not an error if the store has
        the same bytes already. Raises TakenError if it has others.
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
            # An etag that is not an MD5 proves nothing. Then take the object for the one sent
            # before.
            same = same_etag(held.etag, own) or not _OF_MD5.fullmatch(held.etag)
            if held.size == len(data) and same:
                return held.etag
            raise TakenError(
                f"write {self._bucket}/{key}: another file was sent for this close, and the first "
                "counts: nothing was written"
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
        """Send the parts that the store does not hold; have the registry complete them."""

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
        raise AccessDeniedError(f"delete {self._bucket}/{key}: only the validator deletes")

    def list_objects(self, prefix: str = "", *, most: int = MOST_LISTED) -> NoReturn:
        raise AccessDeniedError(f"list {self._bucket}/{prefix}: no member may list this bucket")

    def multipart(self) -> None:
        """Return None: :meth:`put` cuts a large upload into parts itself."""


_READS = {"GetObject": "get_object", "HeadObject": "head_object"}
_OF_MD5 = re.compile(r"[0-9a-fA-F]{32}(-[0-9]+)?")


def _use_url(params: Any, context: Any, **_: Any) -> None:
    params["url"] = context["url"]
    # Or botocore asks where the bucket is, wherever an answer leads elsewhere.
    context.setdefault("s3_redirect", {}).update(redirected=True)


def _host_of(url: str) -> str:
    """Return ``HOST``, or ``HOST:PORT`` if that is not the scheme's. Raises ValueError."""
    parts = urlsplit(url)
    if parts.username is not None or not parts.hostname:
        raise ValueError("no host, or a user")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return host if parts.port in (None, _PORTS.get(parts.scheme)) else f"{host}:{parts.port}"
