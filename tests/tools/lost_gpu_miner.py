"""A paced miner whose rank 1 loses its GPU in mid-step, once a file says so.

On a CPU the rank raises what torch raises on a GPU. ``LOST_GPU`` is the file, which the rank
removes before it raises.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from distributed_training.miner.__main__ import main

    sys.exit(main(program="tests.tools.lost_gpu_miner"))
else:  # in each rank
    import torch

    from distributed_training.training.trainer import Trainer
    from tests.tools.paced_miner import run_rank  # noqa: F401 - its import paces

    _add = Trainer.add_micro_batch
    _armed = Path(os.environ["LOST_GPU"])

    @functools.wraps(_add)
    def _lost(self: Trainer, *batch: Any, **more: Any) -> Any:
        if self.rank == 1 and _armed.exists():
            _armed.unlink()
            raise torch.AcceleratorError("CUDA error: unspecified launch failure\nCompile with ...")
        return _add(self, *batch, **more)

    Trainer.add_micro_batch = _lost
