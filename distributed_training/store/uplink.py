"""The end of transfers on request, and ranges of files as request bodies."""

from __future__ import annotations

import hashlib
import io
import os
import threading

from .errors import StoppedError


class Uplink:
    """Open, or stopped for good: transfers check it between parts and at each read. Thread-safe."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        self._stopped.set()

    def check_stopped(self) -> None:
        """Raise StoppedError once stopped; long work on files calls it."""
        if self._stopped.is_set():
            raise StoppedError("stopped as asked")

    def sleep(self, seconds: float) -> None:
        """Sleep; raises StoppedError as soon as the uplink is stopped."""
        self._stopped.wait(seconds)
        self.check_stopped()


class Section(io.RawIOBase):
    """A range of a file as a request body.

    Read with ``pread``, so one file handle serves all parts; nothing but the block under way is in
    memory.
    """

    BLOCK = 1024 * 1024

    def __init__(self, handle: int, start: int, size: int, uplink: Uplink | None = None) -> None:
        super().__init__()
        self._handle = handle
        self._start = start
        self._size = size
        self._uplink = uplink
        self._at = 0
        self._md5 = ""

    def __len__(self) -> int:
        return self._size

    @property
    def md5(self) -> str:
        """MD5 in hex; reads the range where it is asked for first. Raises StoppedError."""
        if not self._md5:
            digest = hashlib.md5(usedforsecurity=False)
            for at in range(0, self._size, self.BLOCK):
                if self._uplink is not None:
                    self._uplink.check_stopped()
                length = min(self.BLOCK, self._size - at)
                digest.update(os.pread(self._handle, length, self._start + at))
            self._md5 = digest.hexdigest()
        return self._md5

    def part(self, start: int, size: int) -> Section:
        """Return a range of this one as another."""
        return Section(self._handle, self._start + start, size, self._uplink)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Read up to ``BLOCK`` bytes, also when fewer are asked for."""
        if self._uplink is not None and self._uplink.stopped:
            # Into urllib3's loop, which then drops the connection within one block.
            raise OSError("the uplink is closed")
        wanted = self._size - self._at
        if size is not None and size >= 0:
            # http.client asks for 16 KiB at a time and sends whatever it gets; larger pieces save a
            # third of the CPU time of an upload.
            wanted = min(wanted, max(size, self.BLOCK)) if size else 0
        data = os.pread(self._handle, wanted, self._start + self._at)
        self._at += len(data)
        return data
