"""Reads event files that other processes are writing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from distributed_training.common.files import json_line, rotated

_CHUNK = 1 << 20  # bytes


class EventFollower:
    """Reads a growing file of JSON lines; a line still being written is read next time.

    The file may be rotated: the old one is read to its end before the new one is begun.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    def history(self, *, at_most: int) -> Iterator[dict[str, Any]]:
        """What the last ``at_most`` bytes hold, of the file before too; :meth:`poll` goes on there.

        One by one: a week of them takes ten times as much memory as the file.
        """
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < at_most:
            older = EventFollower(rotated(self.path))
            yield from older._from_end(at_most - size)
            older.close()
        yield from self._from_end(at_most)

    def poll(self) -> list[dict[str, Any]]:
        """The events that were completed since the last call; none if the file is not there yet."""
        events = [*self._events()]
        if self._rotated():
            events += self._events()  # what came between our read and the rotation
            self.close()
            events += self._events()
        return events

    def _rotated(self) -> bool:
        """Whether ``path`` is now another file than the one we read."""
        if self._file is None:
            return False
        try:
            return self.path.stat().st_ino != os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            return False  # between the rename and the new file

    def _from_end(self, count: int) -> Iterator[dict[str, Any]]:
        try:
            self._file = self.path.open("rb")
        except FileNotFoundError:
            return
        start = max(0, self._file.seek(0, os.SEEK_END) - count)
        self._file.seek(start)
        if start:
            self._file.readline()  # its beginning is cut off
        yield from self._events()

    def _events(self) -> Iterator[dict[str, Any]]:
        if self._file is None:
            try:
                self._file = self.path.open("rb")
            except FileNotFoundError:
                return
            self._rest = b""
        while chunk := self._file.read(_CHUNK):
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            # A line that a kill cut off is None; the next one is whole again.
            yield from (event for event in map(json_line, lines) if event is not None)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
