"""Print which product files and functions one inner step, upload and AllReduce execute on rank 0.

    python tests/tools/trace_step.py

The miner is that of :mod:`miner_ranks`: everything is the product's but the network. The thread of
the loop is traced from one event to another, with all that happens between (a tick of the
controller, metrics, data asked for ahead). What runs below a subscriber of the events (reporter,
block list, uploads, server) is counted by itself: it is not what a step is.
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
WARM = 6  # steps before the first that is traced
PRODUCT = str(ROOT / "distributed_training") + os.sep


class Trace:
    """Functions by file, of this thread; ``below`` holds those that a subscriber called."""

    def __init__(self, title: str, subscribers: set[Any]) -> None:
        self.title = title
        self.own: dict[str, set[str]] = defaultdict(set)
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
            found = self.own if self._inside is None else self.below
            found[code.co_filename.removeprefix(PRODUCT)].add(code.co_qualname)

    def show(self) -> None:
        alone = {name: found for name, found in self.below.items() if name not in self.own}
        for title, files in ((self.title, self.own), ("subscribers alone", alone)):
            count = sum(map(len, files.values()))
            print(f"{title}: {len(files)} files, {count} functions")
            for name in sorted(files):
                print(f"  {name}: {', '.join(sorted(files[name]))}")


class Tracer:
    """Traces a step, then an upload, then an AllReduce, and stops the miner."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []
        self._runs = False

    def on_event(self, miner: Any, event: object) -> None:
        """Begin or end a trace with ``event``, which the product's subscribers have seen."""
        from distributed_training.miner import events as ev

        spans = (
            ("the step", ev.InnerStepDone, ev.InnerStepDone),
            ("an upload", ev.SnapshotWanted, ev.PublicationEnded),
            ("an AllReduce", ev.AllReduceCalled, ev.OuterStepEnded),
        )
        if len(self.traces) == len(spans) and not self._runs:
            return  # the stop
        title, first, last = spans[len(self.traces) - self._runs]
        if self._runs and isinstance(event, last):
            sys.setprofile(None)
            self._runs = False
            if len(self.traces) == len(spans):
                miner.stop()
            elif spans[len(self.traces)][1] is ev.AllReduceCalled:
                miner.call()
        elif not self._runs and isinstance(event, first) and len(miner.losses) >= WARM:
            seen = miner.rank_zero.controller._subscribers
            self.traces.append(Trace(title, {getattr(s, "__func__", s).__code__ for s in seen}))
            self._runs = True
            sys.setprofile(self.traces[-1])


def main() -> int:
    from distributed_training.common.ports import free_ports
    from distributed_training.miner.rank_group import rank_variables

    (port,) = free_ports(1)
    os.environ |= rank_variables(0, world_size=1, port=port)
    from tests.tools import miner_ranks

    tracer = Tracer()
    with tempfile.TemporaryDirectory() as folder:
        miner = miner_ranks.Miner(Path(folder), on_step=lambda miner, step: None)
        assert miner.rank_zero is not None
        miner.rank_zero.controller.subscribe(lambda event, state: tracer.on_event(miner, event))
        miner.run("traced")
    for trace in tracer.traces:
        trace.show()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # as a rank ends: gloo's threads outlive their group
