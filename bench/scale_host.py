"""The swarm host of ``bench.scale``: the product's, which counts what its DHT node asks others.

Started in the place of ``distributed_training.swarm.host``. The counts stand in a file of the
folder ``BENCH_SCALE_COUNTS``, named by the process id: calls of find, store and ping as 8-byte
integers. A call is one message to a peer and its answer.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from hivemind.dht.protocol import DHTProtocol

from distributed_training.swarm import host

KINDS = ("find", "store", "ping")
_LAYOUT = struct.Struct("<3q")
FOLDER = "BENCH_SCALE_COUNTS"


def read(folder: Path, pid: int) -> dict[str, int]:
    return dict(zip(KINDS, _LAYOUT.unpack((folder / str(pid)).read_bytes()), strict=True))


def count_calls(path: Path) -> None:
    """From here on each call of this process's DHT node is counted in the file."""
    path.write_bytes(bytes(_LAYOUT.size))
    with path.open("r+b") as file:
        counts = mmap.mmap(file.fileno(), _LAYOUT.size)

    def counted(index: int, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def wrapper(*arguments: Any, **options: Any) -> Any:
            at = 8 * index
            number = int.from_bytes(counts[at : at + 8], "little")
            counts[at : at + 8] = (number + 1).to_bytes(8, "little")
            return await call(*arguments, **options)

        return wrapper

    for i, kind in enumerate(KINDS):
        name = f"call_{kind}"
        setattr(DHTProtocol, name, counted(i, getattr(DHTProtocol, name)))


if __name__ == "__main__":
    count_calls(Path(os.environ[FOLDER]) / str(os.getpid()))
    sys.exit(host.main())
