"""The network link that transfers share with rounds, and the bytes sent over it.

An all-reduce needs the whole link for a minute or two. So transfers check it between parts and at
each read of a part, and parts that a pause interrupts are sent again.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
import time

from .errors import StoppedError


class Uplink:
    """Open, paused while an all-reduce needs the network link, or stopped for good. Thread-safe."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._paused_at: float | None = None
        self._paused_for = 0.0  # seconds, of the pauses that are over

    def clock(self) -> float:
        """Return ``time.monotonic()`` less all time spent paused.

        Deadlines of transfers count by it, since a round may keep the uplink for longer than a
        transfer takes.
        """
        with self._lock:
            now = time.monotonic() if self._paused_at is None else self._paused_at
            return now - self._paused_for

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def pause(self) -> None:
        with self._lock:
            self._open.clear()
            if self._paused_at is None:
                self._paused_at = time.monotonic()

    def resume(self) -> None:
        with self._lock:
            self._open.set()
            if self._paused_at is not None:
                self._paused_for += time.monotonic() - self._paused_at
                self._paused_at = None

    def stop(self) -> None:
        # In this order: whoever waits for the uplink must find it stopped once it opens.
        self._stopped.set()
        self._open.set()

    def wait_open(self) -> None:
        """Wait until the uplink is not paused. Raises StoppedError."""
        self._open.wait()
        self.check_stopped()

    def check_stopped(self) -> None:
        """Raise StoppedError once stopped; long work on files calls it, also while paused."""
        if self._stopped.is_set():
            raise StoppedError("stopped as asked")

    def sleep(self, seconds: float) -> None:
        """Sleep; raises StoppedError as soon as the uplink is stopped."""
        self._stopped.wait(seconds)
        self.wait_open()


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
        if self._uplink is not None and (self._uplink.paused or self._uplink.stopped):
            # Into urllib3's loop, which then drops the connection: a round gets the network link
            # within one block instead of one part.
            raise OSError("the uplink is closed")
        wanted = self._size - self._at
        if size is not None and size >= 0:
            # http.client asks for 16 KiB at a time and sends whatever it gets; larger pieces save a
            # third of the CPU time of an upload.
            wanted = min(wanted, max(size, self.BLOCK)) if size else 0
        data = os.pread(self._handle, wanted, self._start + self._at)
        self._at += len(data)
        return data
