"""Record events for programs: one JSON object per line in ``events.jsonl``.

Programs such as the dashboard and the tests read this file, even while it is being written
(:class:`EventFollower`). People read the log instead.
"""

from __future__ import annotations

import contextlib
import enum
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from distributed_training.common.backoff import Throttle
from distributed_training.common.files import LONGEST_LINE, json_line, rotated
from distributed_training.telemetry.logs import level_name, mask, moved

log = logging.getLogger(__name__)

_REPEAT_SECONDS = 60.0
_REMEMBERED_LINES = 1000


class EventLog:
    """A file to which events are appended.

    Any thread of the process that owns the file may write.

    Each line is one ``write`` to a file opened for appending, so readers see whole lines. If a kill
    has cut off a line, the next start ends it with a newline. When the file exceeds half of
    ``retention_bytes``, it is renamed to ``<name>.1``, which replaces the previous one. If the disk
    fails, events are lost but training continues: the log says so once, and each write tries again.
    """

    def __init__(self, path: Path, *, retention_bytes: int = 2 * 1024**3) -> None:
        self.path = path
        self._failing = self._closed = False
        self._limit = max(1, retention_bytes // 2)
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: int | None = self._open()

    @classmethod
    def open(cls, folder: Path, *, logger: str = "") -> EventLog:
        """Open ``events.jsonl`` in the run folder.

        From then on, each logged warning or error also becomes an event of the kind ``problem``
        with its level and text. ``logger`` limits this to the records of one logger.
        """
        events = cls(folder / "events.jsonl")
        logging.getLogger(logger).addHandler(_Problems(events))
        return events

    def write(self, kind: str, **fields: Any) -> None:
        """Append ``{"time": <unix seconds>, "kind": kind, **fields}``.

        NaN and Inf become null, values that JSON does not support become text, and secrets are
        masked. Raises ValueError if a field is called ``time``.
        """
        if "time" in fields:
            raise ValueError("an event's time is set when it is written")
        event = {"time": round(time.time(), 3), "kind": kind, **plain(fields)}
        text = mask(json.dumps(event, ensure_ascii=False, allow_nan=False, default=str) + "\n")
        line = text.encode(errors="backslashreplace")  # it may have half a surrogate pair
        failed, was_failing = None, self._failing
        with self._lock:
            if self._closed:
                return
            try:
                if self._file is not None and moved(self.path, self._file):
                    self._shut()
                if self._file is None:
                    self._file = self._open()
                # Write in one call to a file that is open for appending, so that a reader never
                # sees parts of two lines mixed.
                os.write(self._file, line)
                if os.fstat(self._file).st_size > self._limit:
                    self._shut()
                    # Close it first, since later events belong to the new file.
                    os.replace(self.path, rotated(self.path))
                    self._file = self._open()
            except OSError as error:
                failed = error
                self._shut()  # the next write reopens the file and ends a partial line
            self._failing = failed is not None
        if failed is not None and not was_failing:
            log.warning(
                "%s cannot be written (%s): events are lost until it can; training continues",
                self.path,
                failed.strerror,
            )

    def close(self) -> None:
        with self._lock:
            self._shut()
            self._closed = True

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _shut(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def _open(self) -> int:
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(file).st_size
        # If a process was killed while it wrote a line, end that line; otherwise the next event
        # would be appended to it.
        if size and os.pread(file, 1, size - 1) != b"\n":
            os.write(file, b"\n")
        return file


class _Problems(logging.Handler):
    """Record the warnings and errors of this project's packages, each at most once a minute."""

    def __init__(self, events: EventLog) -> None:
        super().__init__(logging.WARNING)
        self._events = events
        self._throttle = Throttle(_REPEAT_SECONDS, most_keys=_REMEMBERED_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(("distributed_training", "neurons", "__main__")):
            return
        if record.name == __name__:  # a warning about failed events must not become an event
            return
        try:
            if self._throttle(str(record.msg)):
                text = record.getMessage()
                self._events.write("problem", level=level_name(record), text=text)
        except (TypeError, ValueError, KeyError):  # a bad log call must not raise in its caller
            self.handleError(record)


def read_events(path: Path, kind: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the events of a file and of the rotated file before it, oldest first.

    Damaged lines are skipped. Nothing is yielded if neither file exists.

    Args:
        path: ``events.jsonl`` of a run folder; ``<path>.1`` is read before it.
        kind: Yield only events of this kind, such as ``step``; None: all events.
    """
    with contextlib.closing(EventFollower(path)) as follower:
        for event in follower.history(at_most=sys.maxsize):
            if kind is None or event.get("kind") == kind:
                yield event


def finite(value: object) -> float | None:
    """Return ``value`` as a float if it is a finite number, and None otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a damaged line may have an integer beyond any float
        return None


def plain(value: Any) -> Any:
    """Return ``value`` in a form that JSON supports: enums by name or number, NaN as None."""
    match value:
        case enum.Enum():  # exit statuses are numbers, so that programs can compare them
            return int(value) if isinstance(value, int) else value.name
        case float() if not math.isfinite(value):
            return None
        case Mapping():
            return {str(name): plain(each) for name, each in value.items()}
        case list() | tuple():
            return [plain(each) for each in value]
    return value


class EventFollower:
    """Reads a growing file of JSON lines.

    A line that is still being written is returned by a later call. If the file is rotated, the old
    file is read to its end before the new one. A line longer than 1 MiB is not kept in memory.

    Args:
        path: The file; it need not exist yet.

    Examples:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "events.jsonl"
        >>> follower = EventFollower(path)
        >>> follower.poll()
        []
        >>> _ = path.write_text('{"time": 0, "kind": "step", "loss": 2.5}' + chr(10))
        >>> [event["loss"] for event in follower.poll()]
        [2.5]
        >>> follower.close()
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    def history(self, *, at_most: int) -> Iterator[dict[str, Any]]:
        """Yield the last events of the file; :meth:`poll` continues after them.

        This includes the rotated file. Events are yielded one by one, since a week of events would
        take ten times as much memory as the file.

        Args:
            at_most: How many bytes to read, counted from the end.
        """
        size = self.path.stat().st_size if self.path.exists() else 0
        if size < at_most:
            # Read the rotated file as well, or a page would start empty just after a rotation.
            older = EventFollower(rotated(self.path))
            yield from older._from_end(at_most - size)
            older.close()
        yield from self._from_end(at_most)

    def poll(self) -> list[dict[str, Any]]:
        """Return the events completed since the last call; an empty list if there is no file."""
        events = [*self._events()]
        if self._file is None:
            return events
        try:
            now, ours = self.path.stat(), os.fstat(self._file.fileno())
        except FileNotFoundError:
            return events  # the file was renamed, and the new one does not exist yet
        # The file may have been rotated, or truncated by logrotate's copytruncate or by
        # "> events.jsonl"; after a truncation there is nothing to read at our position.
        if now.st_ino != ours.st_ino or now.st_size < self._file.tell():
            # Read once more before closing: the writer may have written something between our read
            # and its rename.
            events += self._events()
            self.close()
            events += self._events()
        return events

    def _from_end(self, count: int) -> Iterator[dict[str, Any]]:
        try:
            self._file = self.path.open("rb")
        except FileNotFoundError:
            return
        start = max(0, self._file.seek(0, os.SEEK_END) - count)
        self._file.seek(start)
        if start:
            self._file.readline()  # skip this line, whose beginning is missing
        yield from self._events()

    def _events(self) -> Iterator[dict[str, Any]]:
        if self._file is None:
            try:
                self._file = self.path.open("rb")
            except FileNotFoundError:
                return
            self._rest = b""
        while part := self._file.readline(LONGEST_LINE):
            self._rest += part
            if not part.endswith(b"\n") and len(self._rest) < LONGEST_LINE:
                return
            # A line that was cut off by a kill is not valid JSON, so json_line returns None.
            event, self._rest = json_line(self._rest), b""
            if event is not None:
                yield event

    def close(self) -> None:
        """Close the file; :meth:`poll` would open it again from its beginning."""
        if self._file is not None:
            self._file.close()
            self._file = None
