"""Keep the global bucket in a folder, and serve it to members under signed URLs.

It replaces an S3 store: :class:`~.access.Access` asks it for URLs, and a member's own client
(:mod:`..store.presigned`) uses them. The validator writes into the same folder
(:mod:`..store.folder`). Each URL is for one method on one object and expires. It carries an HMAC
over both, over its expiry and, for a write, over the length and the MD5 of the content. An existing
object is never replaced.

A write first goes to a temporary file, which gets its final name only after it is synced and its
MD5 matches. The parts of a multipart upload share one file, next to the bucket, until the upload is
completed, or aborted at the next close. Each part is synced while the next one arrives, and counts
as present only once it is synced. When a registry starts, it aborts uploads that are older than
seven days.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from email.utils import formatdate
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, unquote, urlencode
from xml.sax.saxutils import escape

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from distributed_training.common.files import atomic_file, is_full, name_new, sync_folder
from distributed_training.store import presigned
from distributed_training.store.base import MultipartInfo, ObjectInfo, PartInfo
from distributed_training.store.errors import (
    BucketMissingError,
    ObjectMissingError,
    PreconditionError,
    StoreError,
    UploadMissingError,
)
from distributed_training.store.folder import FolderStore, info_of

PREFIX = "/store/"  # start of each URL's path
SECRET = "store.key"  # name of the key's file in the registry's folder
_KEPT = 7 * 86400.0  # seconds for which the parts of an unfinished upload are kept
_BEHIND = 2  # parts of an upload that may still be waiting for their sync
_PIECE = 1024 * 1024  # bytes that are read or written at once
_SENT = 128 * 1024  # bytes that are sent at once: a socket usually accepts them without waiting
_WHOLE = "whole"  # file in a multipart upload's folder that holds each part at its offset
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")
_METHODS = {"get_object": "GET", "head_object": "HEAD", "put_object": "PUT", "upload_part": "PUT"}
_CODES: tuple[tuple[type[StoreError], int, str], ...] = (
    (BucketMissingError, 404, "NoSuchBucket"),
    (ObjectMissingError, 404, "NoSuchKey"),
    (UploadMissingError, 404, "NoSuchUpload"),
    (PreconditionError, 412, "PreconditionFailed"),
    (StoreError, 503, "SlowDown"),
)


class _Answered(Exception):
    """The request is refused with this status and S3 error code."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status, self.code = status, code


def read_secret(folder: Path) -> bytes:
    """Return the secret of the registry in ``folder``, or create it. Raises OSError."""
    path = folder / SECRET
    if not path.exists():
        with atomic_file(path, private=True) as file:
            file.write(secrets.token_hex(32).encode())
    return path.read_bytes()


class ServedFolder(FolderStore):
    """The bucket in ``folder``, whose URLs begin with ``url`` and are signed with ``secret``."""

    def __init__(self, folder: Path, *, url: str, secret: bytes) -> None:
        super().__init__(folder, writes=True)
        self._url, self._secret = url.rstrip("/") + PREFIX, secret
        self._uploads = folder.with_name(f".parts-{folder.name}")
        self._uploads.mkdir(parents=True, exist_ok=True)
        # (folder of the upload, number of the part) -> the part's sync to the disk, for which the
        # member does not wait.
        self._syncing: dict[tuple[Path, int], Future[None]] = {}
        self._syncs = ThreadPoolExecutor(4, thread_name_prefix="registry-sync")
        for left in self._uploads.glob("*.new"):  # left by a process that was killed
            left.unlink(missing_ok=True)
        for found in self.list_multiparts():
            if found.age.total_seconds() > _KEPT:
                self.abort_multipart(found.key, found.upload_id)

    # URLs

    def presign(self, operation: str, key: str, seconds: float, **signed: Any) -> str:
        """Return a URL for one operation; see :meth:`~..store.s3.S3ObjectStore.presign`."""
        query = {**signed, "Expires": math.ceil(time.time() + seconds)}
        query["Signature"] = self._sign(_METHODS[operation], key, query)
        return f"{self._url}{quote(key)}?{urlencode(query)}"

    def _sign(self, method: str, key: str, query: Mapping[str, Any]) -> str:
        text = "\n".join([method, key, urlencode(sorted(query.items()))])
        return hmac.digest(self._secret, text.encode(), "sha256").hex()

    def _check(self, method: str, key: str, given: Mapping[str, str]) -> None:
        query = {name: value for name, value in given.items() if name != "Signature"}
        wanted = self._sign(method, key, query)
        if not hmac.compare_digest(wanted.encode(), given.get("Signature", "").encode()):
            raise _Answered(403, "SignatureDoesNotMatch", "this URL is for another request")
        if time.time() > int(query["Expires"]):
            raise _Answered(403, "AccessDenied", "this URL has expired")

    async def answer(self, request: Request, draw: Callable[[], None]) -> Response:
        """Answer a request. ``draw``: counts it against its caller's rate if its URL is invalid."""
        key, query = request.path_params["key"], dict(request.query_params)
        try:
            try:
                self._check(request.method, key, query)
            except _Answered:
                draw()
                raise
            if request.method == "PUT":
                return await self._write(request, key, query)
            return await asyncio.to_thread(self._read, request, key)
        except _Answered as refused:
            status, code, text = refused.status, refused.code, str(refused)
        except OSError as error:
            status, code, text = 500, "InternalError", error.strerror or "a disk error"
            if is_full(error):
                status, code = 507, "InsufficientStorage"
        except StoreError as error:
            status, code = next((s, c) for kind, s, c in _CODES if isinstance(error, kind))
            text = "the store cannot do this"
        body = f"<Error><Code>{code}</Code><Message>{escape(text)}</Message></Error>"
        return Response(body, status, {"connection": "close"}, "application/xml")

    # reading

    def _read(self, request: Request, key: str) -> Response:
        with self._errors(key):
            file = self._path(key).open("rb")
        try:
            info = info_of(key, os.fstat(file.fileno()))
            if (wanted := request.headers.get("if-match")) and wanted.strip('"') != info.etag:
                raise _Answered(412, "PreconditionFailed", "the object has changed")
            start, length, status = 0, info.size, 200
            if found := _RANGE.fullmatch(request.headers.get("range", "")):
                start, status = int(found[1]), 206
                length = min(info.size, int(found[2]) + 1) - start
                if length <= 0:
                    raise _Answered(416, "InvalidRange", f"the object has {info.size} bytes")
            file.seek(start)
        except BaseException:
            file.close()
            raise
        headers = {
            "etag": f'"{info.etag}"',
            "last-modified": formatdate(info.modified, usegmt=True),
            "content-length": str(length),
            "accept-ranges": "bytes",
            "x-content-type-options": "nosniff",
        }
        if status == 206:
            headers["content-range"] = f"bytes {start}-{start + length - 1}/{info.size}"
        body = _pieces(file, 0 if request.method == "HEAD" else length)
        return StreamingResponse(body, status, headers, "application/octet-stream")

    # writing

    async def _write(self, request: Request, key: str, query: Mapping[str, str]) -> Response:
        size, md5 = query["ContentLength"], base64.b64decode(query["ContentMD5"]).hex()
        given = [request.headers.get(name) for name in ("content-length", "content-md5")]
        if given != [size, query["ContentMD5"]]:  # refuse before the body arrives
            raise _Answered(403, "SignatureDoesNotMatch", f"this URL is for {size} different bytes")
        if upload := query.get("UploadId"):
            part = PartInfo(int(query["PartNumber"]), int(size), md5)
            return await self._write_part(request, self._upload(key, upload), part)
        target = self._path(key)
        if target.exists():  # checked before the body arrives; the rename checks again
            raise _Answered(412, "PreconditionFailed", "the object already exists")
        temporary = self._uploads / f"{secrets.token_hex(8)}.new"
        try:
            with temporary.open("xb") as file:
                await self._receive(request, file, md5)
            await asyncio.to_thread(_name, temporary, target)
        except FileExistsError:
            raise _Answered(412, "PreconditionFailed", "the object already exists") from None
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        return Response(headers={"etag": f'"{self._head(key).etag}"'})

    async def _write_part(self, request: Request, folder: Path, part: PartInfo) -> Response:
        """Write a part at its offset in the whole file, so that nothing is copied at the end."""
        mark = folder / f"{part.number}-{part.size}-{part.etag}"
        if (before := self._syncing.get((folder, part.number))) is not None:
            await _ends([before])
        if not mark.exists():
            for other in folder.glob(f"{part.number}-*"):  # the part had other bytes before
                other.unlink(missing_ok=True)
            with (folder / _WHOLE).open("r+b") as file:
                file.seek((part.number - 1) * presigned.PART)
                await self._receive(request, file, part.etag, sync=False)
                handle = os.dup(file.fileno())
            # Sync the part while the next one arrives. If the disk falls behind, make the member
            # wait here, because a caller that lists the parts has to wait for all of them.
            behind = [each for each in self._syncs_of(folder).values() if not each.done()]
            self._syncing[folder, part.number] = self._syncs.submit(_sync_part, handle, mark)
            if len(behind) >= _BEHIND:
                await _ends(behind)
        return Response(headers={"etag": f'"{part.etag}"'})

    def _await_syncs(self, key: str, folder: Path) -> None:
        """Wait until the parts of an upload are on the disk. Raises StoreError if a sync failed."""
        syncs = self._syncs_of(folder)
        wait(syncs.values())  # before any is removed: another thread may ask for the same parts
        for part, sync in syncs.items():
            if self._syncing.get(part) is sync:  # no newer part with this number has arrived
                self._syncing.pop(part, None)
        with self._errors(key):
            for sync in syncs.values():
                sync.result()

    def _syncs_of(self, folder: Path) -> dict[tuple[Path, int], Future[None]]:
        # Copy the dictionary, because other threads change it.
        return {part: sync for part, sync in list(self._syncing.items()) if part[0] == folder}

    async def _receive(
        self, request: Request, file: IO[bytes], md5: str, *, sync: bool = True
    ) -> None:
        """Write a request's body to a file and check its MD5. ``sync``: sync the file too."""
        digest = hashlib.md5(usedforsecurity=False)

        def write(blocks: Sequence[bytes]) -> None:
            piece = b"".join(blocks)
            file.write(piece)
            digest.update(piece)

        blocks, size, writing = list[bytes](), 0, asyncio.ensure_future(asyncio.sleep(0))
        try:
            async for block in request.stream():
                blocks.append(block)
                size += len(block)
                if size >= _PIECE:
                    await writing  # the previous piece was written while this piece arrived
                    writing = asyncio.ensure_future(asyncio.to_thread(write, blocks))
                    blocks, size = [], 0
        finally:  # the caller then closes the file, even if the client has gone away
            await writing
        await asyncio.to_thread(write, blocks)
        file.flush()
        if sync:
            await asyncio.to_thread(os.fsync, file.fileno())
        if digest.hexdigest() != md5:
            raise _Answered(400, "BadDigest", "the bytes do not match the announced MD5")

    def _head(self, key: str) -> ObjectInfo:
        if (info := self.head(key)) is None:
            raise ObjectMissingError(f"{self.bucket}/{key}: deleted meanwhile")
        return info

    # parts

    def _upload(self, key: str, upload_id: str) -> Path:
        folder = self._uploads / f"{quote(key, safe='')}~{upload_id}"
        if not folder.is_dir():
            raise UploadMissingError(f"{self.bucket}/{key}: there is no such multipart upload")
        return folder

    def create_multipart(self, key: str) -> str:
        """Begin a multipart upload; return its id."""
        upload_id = secrets.token_hex(16)
        folder = self._uploads / f"{quote(key, safe='')}~{upload_id}"
        with self._errors(key):
            folder.mkdir()
            (folder / _WHOLE).touch()
        return upload_id

    def list_multiparts(self, prefix: str = "") -> list[MultipartInfo]:
        found, begins = [], quote(prefix, safe="")
        for name in os.listdir(self._uploads):  # only names: hundreds of uploads begin at a close
            if name.startswith(begins) and "~" in name:
                key, _, upload_id = name.rpartition("~")
                with suppress(OSError):
                    since = (self._uploads / name).stat().st_ctime
                    found.append(MultipartInfo(unquote(key), upload_id, since))
        return sorted(found, key=lambda info: info.initiated)

    def list_parts(self, key: str, upload_id: str) -> list[PartInfo]:
        parts, folder = [], self._upload(key, upload_id)
        self._await_syncs(key, folder)
        for mark in folder.glob("*-*-*"):
            number, size, md5 = mark.name.split("-")
            parts.append(PartInfo(int(number), int(size), md5))
        return sorted(parts, key=lambda part: part.number)

    def complete_multipart(self, key: str, upload_id: str, parts: Sequence[PartInfo]) -> str:
        """Complete the upload; return its etag. Raises PreconditionError if the object exists."""
        whole = self._upload(key, upload_id) / _WHOLE
        with self._errors(key):
            # Cut off what is left of earlier, larger parts.
            os.truncate(whole, sum(part.size for part in parts))
            _name(whole, self._path(key))
        self.abort_multipart(key, upload_id)
        return self._head(key).etag

    def abort_multipart(self, key: str, upload_id: str) -> None:
        folder = self._upload(key, upload_id)
        with suppress(StoreError):  # nobody needs the parts any more
            self._await_syncs(key, folder)
        shutil.rmtree(folder, ignore_errors=True)


async def _ends(syncs: Sequence[Future[None]]) -> None:
    """Wait until these syncs have ended. A part whose sync failed has no mark file."""
    await asyncio.gather(*map(asyncio.wrap_future, syncs), return_exceptions=True)


def _sync_part(handle: int, mark: Path) -> None:
    """Sync a part to the disk, then create its mark file."""
    try:
        os.fsync(handle)
        mark.touch()
    finally:
        os.close(handle)


def _name(temporary: Path, target: Path) -> None:
    """Give a synced file its final name. Raises FileExistsError if the name is taken."""
    target.parent.mkdir(parents=True, exist_ok=True)
    name_new(temporary, target)
    sync_folder(target.parent)


async def _pieces(file: IO[bytes], length: int) -> AsyncIterator[bytes]:
    """Yield ``length`` bytes of an open file from its position, as fast as the client reads."""
    try:
        while length:
            piece = await asyncio.to_thread(file.read, min(_PIECE, length))
            if not piece:
                raise OSError(f"{file.name} was cut")  # the client notices the missing bytes
            length -= len(piece)
            for at in range(0, len(piece), _SENT):
                yield piece[at : at + _SENT]
    finally:
        # Close it on another thread: when a client has left, a read may still be waiting for the
        # disk. Closing the file here would then block all answers until that read ends.
        asyncio.get_running_loop().run_in_executor(None, file.close)
