"""A line between the launchers of two nodes: JSON both ways, and a beat each second.

Silence tells that the machine at the other end is gone, where no connection breaks.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_BEAT = 1.0  # seconds
_LONGEST = 65536  # bytes of a message


class Line:
    """JSON lines over one connection. ``got`` is called with each message, ``ended`` once with
    why there are no more; both in a thread of this connection."""

    def __init__(self, connection: socket.socket, silence: timedelta) -> None:
        self._socket = connection
        self._file = connection.makefile("rb")
        self._writing = threading.Lock()
        self._closed = threading.Event()
        self.expect(silence)

    def expect(self, silence: timedelta) -> None:
        """From here on ``silence`` ends it."""
        self._silence = silence
        self._socket.settimeout(silence.total_seconds())

    def run(self, got: Callable[[dict[str, Any]], None], ended: Callable[[str], None]) -> None:
        threading.Thread(target=self._beat, name="node-beat", daemon=True).start()
        threading.Thread(
            target=self._follow, args=(got, ended), name="node-line", daemon=True
        ).start()

    def _follow(self, got: Callable[[dict[str, Any]], None], ended: Callable[[str], None]) -> None:
        why = "its launcher closed the connection"
        try:
            while message := self.read():
                if len(message) > 1:  # more than a beat
                    got(message)
        except TimeoutError:
            why = f"nothing was heard of it for {self._silence.total_seconds():.0f} s"
        except (OSError, ValueError, LookupError, TypeError) as error:  # or no launcher's words
            why = f"the connection broke: {error}"
        self.close()
        ended(why)

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT):
            self.send()

    def read(self) -> dict[str, Any] | None:
        """The next message; None at the end. Raises OSError, ValueError for anything else."""
        text = self._file.readline(_LONGEST)
        if not text:
            return None
        message = json.loads(text)
        if not isinstance(message, dict) or not text.endswith(b"\n"):
            raise ValueError("what arrived is no message of a launcher")
        return message

    def send(self, **message: Any) -> None:
        data = json.dumps(message | {"time": time.time()}).encode() + b"\n"
        with self._writing:
            try:
                self._socket.sendall(data)
            except OSError:
                self.close()

    def finish(self) -> None:
        """Nothing more is said. The other side reads the last word and closes; closed here at once,
        with a beat of theirs unread, the kernel would take that word back."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
