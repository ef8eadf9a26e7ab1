"""Print which product files and functions one inner step executes on rank 0.

    python tests/tools/trace_step.py [STEP]

The miner is that of :mod:`miner_ranks`: everything is the product's but the network. The step is
traced from the report of the step before to its own, with all that happens between (a tick of the
controller, metrics, data asked for ahead). What runs below a subscriber of the events (reporter,
block list, publishing, server) is counted by itself: it is not what a step is.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
PRODUCT = str(ROOT / "distributed_training") + os.sep


class Trace:
    """Functions by file, of this thread; ``below`` holds those that a subscriber called."""

    def __init__(self, subscribers: set[Any]) -> None:
        self.step: dict[str, set[str]] = defaultdict(set)
        self.below: dict[str, set[str]] = defaultdict(set)
        self._subscribers = subscribers
        self._inside: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "return" and frame is self._inside:
            self._inside = None
        if event != "call":
            return
        if self._inside is None and code in self._subscribers:
            self._inside = frame
        if code.co_filename.startswith(PRODUCT):
            found = self.step if self._inside is None else self.below
            found[code.co_filename.removeprefix(PRODUCT)].add(code.co_qualname)

    def show(self) -> None:
        alone = {name: found for name, found in self.below.items() if name not in self.step}
        for title, files in (("the step", self.step), ("subscribers alone", alone)):
            count = sum(map(len, files.values()))
            print(f"{title}: {len(files)} files, {count} functions")
            for name in sorted(files):
                print(f"  {name}: {', '.join(sorted(files[name]))}")


def main(argv: list[str]) -> int:
    from distributed_training.common.ports import free_ports
    from distributed_training.miner.rank_group import rank_variables

    wanted = int(argv[0]) if argv else 7
    (port,) = free_ports(1)
    os.environ |= rank_variables(0, world_size=1, port=port)
    from tests.tools import miner_ranks

    trace: Trace | None = None

    def on_step(miner: Any, step: int) -> None:
        nonlocal trace
        if step == wanted - 1:
            seen = miner.rank_zero.controller._subscribers
            trace = Trace({getattr(see, "__func__", see).__code__ for see in seen})
            sys.setprofile(trace)
        elif step == wanted:
            sys.setprofile(None)
            miner.stop()

    with tempfile.TemporaryDirectory() as folder:
        miner_ranks.Miner(Path(folder), on_step=on_step).run("traced")
    assert trace is not None
    trace.show()
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # as a rank ends: gloo's threads outlive their group
