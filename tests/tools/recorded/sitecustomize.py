"""Write down all bytes that any Python process sends, into ``$RECORD_SENT``.

A folder on PYTHONPATH: each process imports it at its start. What goes to hivemind's daemon is
written down too, before that encrypts it.
"""

from __future__ import annotations

import os
import socket
from typing import Any

_folder = os.environ.get("RECORD_SENT")


def _record(*parts: Any) -> None:
    # Opened for each: ranks are forked, and have files of their own.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    file = os.open(f"{_folder}/{os.getpid()}.sent", flags, 0o600)
    try:
        for part in parts:
            with memoryview(part) as data, data.cast("B") as flat:
                os.write(file, flat)
    finally:
        os.close(file)


class _Socket(socket.socket):
    def send(self, data: Any, *more: Any) -> int:
        sent = super().send(data, *more)
        _record(memoryview(data).cast("B")[:sent])
        return sent

    def sendall(self, data: Any, *more: Any) -> None:
        _record(data)
        super().sendall(data, *more)

    def sendto(self, data: Any, *more: Any) -> int:
        _record(data)
        return super().sendto(data, *more)

    def sendmsg(self, buffers: Any, *more: Any) -> int:
        held = [*buffers]
        _record(*held)
        return super().sendmsg(held, *more)

    def sendfile(self, file: Any, offset: int = 0, count: int | None = None) -> int:
        # Without os.sendfile, whose bytes nobody sees.
        return self._sendfile_use_send(file, offset, count)  # type: ignore[attr-defined, no-any-return]


if _folder:
    socket.socket = socket.SocketType = _Socket  # type: ignore[misc]
