"""Reads event files that other processes are writing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO


class EventFollower:
    """Reads a growing file of JSON lines; a line still being written is read next time.

    The file may be rotated: the old one is read to its end before the new one is begun. With
    ``skip_existing`` what the file holds now belongs to an earlier run and is passed over.
    """

    def __init__(self, path: Path, *, skip_existing: bool = False) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._rest = b""
        if skip_existing and path.exists():
            self._file = path.open("rb")
            self._file.seek(0, os.SEEK_END)

    @classmethod
    def with_history(
        cls, path: Path, *, at_most: int
    ) -> tuple[EventFollower, list[dict[str, Any]]]:
        """A follower, and what the last ``at_most`` bytes hold, also of the file before."""
        follower = cls(path)
        before = path.with_name(path.name + ".1")
        size = path.stat().st_size if path.exists() else 0
        earlier: list[dict[str, Any]] = []
        if size < at_most and before.exists():
            older = cls(before)
            earlier = older._read_from_end(at_most - size)
            older.close()
        return follower, earlier + follower._read_from_end(at_most)

    def poll(self) -> list[dict[str, Any]]:
        """The events that were completed since the last call; none if the file is not there yet."""
        events = self._read()
        if self._rotated():
            events += self._read()  # what came between our read and the rotation
            self.close()
            events += self._read()
        return events

    def _rotated(self) -> bool:
        """Whether ``path`` is now another file than the one we read."""
        if self._file is None:
            return False
        try:
            return self.path.stat().st_ino != os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            return False  # between the rename and the new file

    def _read_from_end(self, count: int) -> list[dict[str, Any]]:
        try:
            self._file = self.path.open("rb")
        except FileNotFoundError:
            return []
        start = max(0, self._file.seek(0, os.SEEK_END) - count)
        self._file.seek(start)
        if start:
            self._file.readline()  # its beginning is cut off
        return self._read()

    def _read(self) -> list[dict[str, Any]]:
        if self._file is None:
            try:
                self._file = self.path.open("rb")
            except FileNotFoundError:
                return []
            self._rest = b""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        events = []
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # cut off by a kill in mid-write; the next line is whole again
            if isinstance(event, dict):
                events.append(event)
        return events

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
