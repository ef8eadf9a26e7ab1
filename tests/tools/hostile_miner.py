"""``paced_miner.py`` of a hostile member: what it uploads is multiplied by ``HOSTILE_FACTOR``.

The fork server imports this file last, so that its ranks do so.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from distributed_training.miner import rank_group
    from distributed_training.miner.__main__ import main

    ours = ("tests.tools.paced_miner", "tests.tools.hostile_miner")
    rank_group.PRELOAD = (*rank_group.PRELOAD, *ours)
    sys.exit(main())
elif __name__ == "tests.tools.hostile_miner":  # in the fork server, and not in its ranks again
    from distributed_training.training import outer_step

    _rows = outer_step._Movement.rows

    def _hostile(self: outer_step._Movement, *place: Any) -> Any:
        return _rows(self, *place).mul_(float(os.environ["HOSTILE_FACTOR"]))

    outer_step._Movement.rows = _hostile  # type: ignore[method-assign]
