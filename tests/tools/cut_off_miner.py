"""``neurons/miner.py``, which hears of no new version while its run folder has a file ``cut-off``.

The fork server imports this file last, so that its ranks are deaf for the versions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from distributed_training.miner import rank_group
    from distributed_training.miner.__main__ import main

    rank_group.PRELOAD = (*rank_group.PRELOAD, "tests.tools.cut_off_miner")
    sys.exit(main())
else:  # in the fork server
    from distributed_training.config.versions import Versions

    _look = Versions.look

    def _deaf(self: Versions, read: Callable[[int], str | None], **how: Any) -> str:
        return "" if (self._folder.parents[1] / "cut-off").exists() else _look(self, read, **how)

    Versions.look = _deaf  # type: ignore[method-assign]
