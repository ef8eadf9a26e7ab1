"""Which nonces of which hotkey have been used, also before the last restart.

A nonce is the caller's clock in nanoseconds. A call is fresh when its nonce lies within a window
before now; it is a replay when the same nonce was accepted before. For each hotkey the memory keeps
the highest accepted nonce and every accepted one less than a window older; anything older still is
refused without asking a clock, so a wall clock that is set back opens no gap.

After a restart the accepted nonces are gone, so each hotkey's highest one of before (the floor,
from a small file) is refused together with everything below it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from datetime import timedelta
from pathlib import Path

log = logging.getLogger(__name__)


class _History:
    __slots__ = ("floor", "highest", "order", "seen")

    def __init__(self, floor: int) -> None:
        self.floor = floor
        self.highest = floor
        self.seen: set[tuple[int, str]] = set()
        self.order: deque[tuple[int, str]] = deque()


class NonceMemory:
    """Replay memory for calls accepted up to ``window`` after their nonce. Thread-safe.

    ``window`` must be at least the longest age at which any call is accepted plus the clock skew
    allowed. ``file`` keeps the floors; None: they are lost with the process.
    """

    def __init__(self, *, window: timedelta, file: Path | None = None) -> None:
        self._window = int(window.total_seconds() * 1e9)
        self._file = file
        self._lock = threading.Lock()  # taken by the event loop: never held over the disk
        self._save_lock = threading.Lock()
        self._hotkeys: dict[str, _History] = {}
        self._dirty = False
        if file is not None:
            now = time.time_ns()
            for hotkey, floor in _load(file).items():
                # A floor from the future (a clock that ran ahead) would lock the caller out.
                if floor <= now + self._window:
                    self._hotkeys[hotkey] = _History(floor)

    def used(self, hotkey: str, nonce: int, salt: str = "") -> bool:
        """True when this nonce was accepted before, or is too old to tell. Changes nothing."""
        with self._lock:
            return self._used(self._hotkeys.get(hotkey), nonce, salt)

    def _used(self, history: _History | None, nonce: int, salt: str) -> bool:
        if history is None:
            return False
        return (
            nonce <= history.floor
            or nonce < history.highest - self._window
            or (nonce, salt) in history.seen
        )

    def use(self, hotkey: str, nonce: int, salt: str = "") -> bool:
        """Record a verified nonce; False (and nothing recorded) when it was used before."""
        with self._lock:
            history = self._hotkeys.get(hotkey)
            if self._used(history, nonce, salt):
                return False
            if history is None:
                history = self._hotkeys[hotkey] = _History(-1)
            history.seen.add((nonce, salt))
            history.order.append((nonce, salt))
            history.highest = max(history.highest, nonce)
            oldest = history.highest - self._window
            while history.order and history.order[0][0] < oldest:
                history.seen.discard(history.order.popleft())
            self._dirty = True
            return True

    def __len__(self) -> int:
        with self._lock:
            return sum(len(history.seen) for history in self._hotkeys.values())

    def save(self) -> None:
        """Make the floors durable if they changed. A full disk is logged, not raised: the memory
        of this process still holds."""
        if self._file is None:
            return
        with self._save_lock:
            with self._lock:
                if not self._dirty:
                    return
                floors = {hotkey: history.highest for hotkey, history in self._hotkeys.items()}
                self._dirty = False
            try:
                _store(self._file, floors)
            except OSError as error:
                with self._lock:
                    self._dirty = True
                log.warning(
                    "Cannot write %s (%s): calls of the last seconds could be replayed after a "
                    "restart; free disk space or correct its permissions",
                    self._file,
                    error.strerror,
                )


def _load(file: Path) -> dict[str, int]:
    try:
        content = json.loads(file.read_text())
        return {str(hotkey): int(floor) for hotkey, floor in content.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.warning(
            "%s cannot be read (%s): calls of the last seconds before this start could be replayed",
            file,
            type(error).__name__,
        )
        return {}


def _store(file: Path, floors: dict[str, int]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(file.name + ".tmp")
    try:
        with open(temporary, "w") as stream:
            json.dump(floors, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
