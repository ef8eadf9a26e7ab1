"""The way out of this machine: one uplink that training shares with all transfers.

An all-reduce needs the whole uplink for a minute or two. Transfers look at it between parts and at
each read of a part under way, so a pause frees it at once; parts it interrupts are sent again.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading

from .errors import StoppedError


class Uplink:
    """Open, paused while an all-reduce needs the line, or stopped for good. Thread-safe."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._stopped = threading.Event()

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def pause(self) -> None:
        self._open.clear()

    def resume(self) -> None:
        self._open.set()

    def stop(self) -> None:
        self._stopped.set()
        self._open.set()

    def wait_open(self) -> None:
        """Until not paused. Raises StoppedError."""
        self._open.wait()
        self.check_stopped()

    def check_stopped(self) -> None:
        """For long work on files, which needs no line: it goes on while the uplink is paused.

        Raises StoppedError.
        """
        if self._stopped.is_set():
            raise StoppedError("stopped as asked; what was sent stays in the journal")

    def sleep(self, seconds: float) -> None:
        """Raises StoppedError as soon as the uplink is stopped."""
        self._stopped.wait(seconds)
        self.wait_open()


class UplinkClosedError(OSError):
    """Raised inside a transfer's read when the uplink is paused or stopped."""


class Section(io.RawIOBase):
    """A range of a file as a request body, hashed on its way out.

    Read with ``pread``, so one file handle serves all parts; nothing but the block under way is in
    memory. ``md5`` is that of the bytes read since the last seek to 0.
    """

    BLOCK = 1024 * 1024

    def __init__(self, handle: int, start: int, size: int, uplink: Uplink | None = None) -> None:
        super().__init__()
        self._handle = handle
        self._start = start
        self._size = size
        self._uplink = uplink
        self._at = 0
        self._md5 = _new_hash()

    def __len__(self) -> int:
        return self._size

    @property
    def md5(self) -> str:
        return self._md5.hexdigest()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        target = offset + (0, self._at, self._size)[whence]
        if target == 0:
            self._md5 = _new_hash()
        self._at = target
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Hazard: returns up to ``BLOCK`` bytes, also when fewer are asked for.

        http.client asks for 16 KiB at a time and sends whatever it gets; larger pieces save a third
        of the CPU time of an upload.
        """
        if self._uplink is not None and (self._uplink.paused or self._uplink.stopped):
            raise UplinkClosedError("the uplink is closed")
        wanted = self._size - self._at
        if size is not None and size >= 0:
            wanted = min(wanted, max(size, self.BLOCK)) if size else 0
        data = os.pread(self._handle, wanted, self._start + self._at)
        self._at += len(data)
        self._md5.update(data)
        return data


def _new_hash() -> hashlib._Hash:
    return hashlib.md5(usedforsecurity=False)
