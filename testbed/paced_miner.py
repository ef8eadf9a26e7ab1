"""``neurons/miner.py``, whose ranks train a third of the time, or a tenth, or less.

A miner trains on all that a machine has, for as long as it runs. Where a test asks what else
happens in a subnet, that only takes the cores from what it waits for and from other tests.
Nothing else differs. Ranks import this file in the place of ``miner/start.py``.

``PACED_HELD`` is the path of a file that has a miner's name. While it exists, each micro-batch of
that miner lasts ``HELD`` seconds; steps of half as long are logged as slow ones. With ``OWN_TEXT``
a miner trains on the folder of its name in that one. With ``HOSTILE_FACTOR`` it multiplies what it
uploads.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

PAUSE = 2.0  # seconds for each that a micro-batch took of a core
HELD = 12.0
ALONE = 9.0  # the same, where it is the whole step: such steps take about as long as others

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from distributed_training.miner.__main__ import main

    if Path(os.environ.get("PACED_HELD", "")).name not in sys.argv:
        os.environ.pop("PACED_HELD", None)
    if "OWN_TEXT" in os.environ:
        name = sys.argv[sys.argv.index("--neuron.name") + 1]
        sys.argv += ["--data.own_text", f"{os.environ['OWN_TEXT']}/{name}"]
    sys.exit(main(program="testbed.paced_miner"))
else:  # in each rank
    from distributed_training.miner.start import run_rank  # noqa: F401 - each rank calls it
    from distributed_training.protocol import lines
    from distributed_training.training import outer_step
    from distributed_training.training.trainer import Trainer

    _add = Trainer.add_micro_batch
    _least = float(os.environ.get("PACED_STEP", "0"))  # seconds; see tests/tools/subnet_tools.py
    _held = os.environ.get("PACED_HELD")
    if _held:
        lines.SLOW_STEP = HELD / 2

    @functools.wraps(_add)
    def _paced(self: Trainer, *batch: Any, **more: Any) -> Any:
        began, worked = time.monotonic(), time.thread_time()
        try:
            return _add(self, *batch, **more)
        finally:
            pause = ALONE if self.batch_plan.micro_batches == 1 else PAUSE
            pause *= time.thread_time() - worked
            rest = _least / self.batch_plan.micro_batches - (time.monotonic() - began)
            time.sleep(max(pause, rest))
            while _held and Path(_held).exists() and time.monotonic() - began < HELD:
                time.sleep(0.1)

    Trainer.add_micro_batch = _paced  # type: ignore

    if "HOSTILE_FACTOR" in os.environ:
        _rows = outer_step._Movement.rows

        def _hostile(self: outer_step._Movement, *place: Any) -> Any:
            return _rows(self, *place).mul_(float(os.environ["HOSTILE_FACTOR"]))

        outer_step._Movement.rows = _hostile  # type: ignore
