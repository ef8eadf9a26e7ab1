"""torchrun, but a rank's failure is one line instead of torchrun's traceback.

The launcher runs ``python -m distributed_training.miner.torchrun <torchrun's arguments>``. The rank
has told what went wrong itself; the agent only adds which rank ended how.
"""

from __future__ import annotations

import logging
import signal
import sys

from distributed_training.miner.process import die_with_parent


def main(argv: list[str]) -> int:
    """torchrun's exit status: 0 if all ranks returned 0, else 1; 128 + signal when stopped."""
    die_with_parent(signal.SIGTERM)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    try:
        run.run(run.parse_args(argv))
    except ChildFailedError as error:
        for rank, failure in sorted(error.failures.items()):
            code = failure.exitcode
            how = signal.Signals(-code).name if code < 0 else f"status {code}"
            print(f"torchrun: rank {rank} (pid {failure.pid}) ended with {how}", flush=True)
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
