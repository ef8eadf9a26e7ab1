"""Kill processes of miners in a local subnet, and check that all continue.

    python -m bench.kills --ranks 2,1,1                             each kind in each phase
    python -m bench.kills --phases upload --kinds rank --ranks 1    one of them, a quick look

Each kind of a miner's processes gets ``kill -9`` once in each phase, one in each miner at a time:
ranks, launcher, DHT peer, p2pd, data workers, page. A launcher that ends is started again, as pm2
would. Then the next round that everybody takes part in is waited for. The run is good when
everybody takes that outer step, whose weights each rank compares with the manifest's digest, and
the stop leaves nothing. Memory, threads, descriptors and files must be what they were after the
first outer step. Phases are seen from outside:

    training      inner steps run, and no upload
    commit        the outer step is taken; its checkpoint is not complete
    upload        the upload is written, and has not been sent

The table has for each kill the phase it came in, the seconds until the miner's log said so, and
those until the next inner step: of a miner whose ranks start again, the first after that start.
``rounds``: outer steps until everybody took one.
"""

from __future__ import annotations

import random
import statistics
import sys
from pathlib import Path

from bench.common import folder_or_temporary, parser, some_of, table
from distributed_training.localnet.services import parse_ranks
from testbed.kills import GROWTH, KINDS, PHASES, Outcome, run


def show(outcome: Outcome) -> None:
    """Print each kill, the median of each kind, and what miners held before and after."""
    titles = ("miner", "killed", "phase", "told s", "next step s", "rounds", "said")
    rows = [
        (
            *(kill.miner.name, f"{kill.kind} ({kill.pid})", kill.phase),
            *(seconds(kill.told_after), seconds(kill.step_after)),
            *("" if kill.rounds is None else kill.rounds, kill.told[:80]),
        )
        for kill in sorted(outcome.kills, key=lambda kill: (kill.kind, kill.phase))
    ]
    table(titles, rows)
    for kind in KINDS:
        waits = [k.step_after for k in outcome.kills if k.kind == kind and k.step_after is not None]
        if waits:
            print(
                f"{kind:16} {len(waits)} killed, next inner step after "
                f"{statistics.median(waits):.1f} s (most {max(waits):.1f} s)"
            )
    moments = {"after the first outer step": outcome.before, "after the last": outcome.after}
    rows_of_usage = [
        (name, moment, *(f"{value:.0f}" for value in found.values()))
        for moment, all_found in moments.items()
        for name, found in all_found.items()
    ]
    table(("miner", "", *GROWTH), rows_of_usage)


def seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f}"


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--kinds", type=some_of(KINDS), default=list(KINDS))
    arguments.add_argument("--phases", type=some_of((*PHASES, "all")), default=["all"])
    arguments.add_argument("--ranks", default="2,1", help="ranks of each miner")
    arguments.add_argument("--seed", type=int, default=random.randrange(1 << 16))
    arguments.add_argument("--folder", type=Path, help="keep the logs there")
    options = arguments.parse_args()
    print(f"seed {options.seed}", flush=True)
    with folder_or_temporary(options.folder) as folder:
        outcome = run(
            folder,
            seed=options.seed,
            kinds=options.kinds,
            phases=PHASES if options.phases == ["all"] else options.phases,
            ranks=parse_ranks(options.ranks, None),
        )
    show(outcome)
    for problem in outcome.problems:
        print(f"PROBLEM: {problem}")
    print("good" if not outcome.problems else f"{len(outcome.problems)} problems")
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
