"""``paced_miner.py`` of a hostile member: what it uploads is multiplied by ``HOSTILE_FACTOR``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from distributed_training.miner.__main__ import main

    sys.exit(main(program="tests.tools.hostile_miner"))
else:  # in each rank
    from distributed_training.training import outer_step
    from tests.tools.paced_miner import run_rank  # noqa: F401 - its import paces

    _rows = outer_step._Movement.rows

    def _hostile(self: outer_step._Movement, *place: Any) -> Any:
        return _rows(self, *place).mul_(float(os.environ["HOSTILE_FACTOR"]))

    outer_step._Movement.rows = _hostile  # type: ignore[method-assign]
