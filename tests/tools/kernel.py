"""A kernel of a notebook as a process: its loop runs, and cells are run in it one after the other.

    python -m tests.tools.kernel    each line of stdin is a cell, as JSON

As in ipykernel a cell runs in the thread of the loop, an interrupt raises KeyboardInterrupt in the
cell only, and names stay for the next cell. After each cell a line says how it ended.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import traceback


async def serve() -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    reading = asyncio.get_running_loop().run_in_executor
    while line := await reading(None, sys.stdin.readline):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            exec(compile(json.loads(line), "<cell>", "exec"), names)
            print("cell: done", flush=True)
        except BaseException as error:  # noqa: BLE001 - a kernel shows whatever a cell raises
            traceback.print_exc()
            print(f"cell: {type(error).__name__}: {error}", flush=True)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    loop = asyncio.new_event_loop()
    loop.run_until_complete(serve())
