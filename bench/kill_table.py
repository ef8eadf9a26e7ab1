"""Every kind of process killed in every phase of a miner, in one local subnet that goes on.

    python -m bench.kill_table                       the whole table, about half an hour
    python -m bench.kill_table --kinds p2pd --phases upload --ranks 1     a quick look

In each turn every miner has one process killed with ``kill -9``, each in a phase of its own choice;
then the next round that everybody takes part in is waited for. A launcher that ends is started
again, as pm2 would. Phases are seen from outside:

    training      inner steps run, and no publication
    matchmaking   the round was called; p2pd has not moved anything as large as the weights since
    transfer      p2pd moves the weights
    commit        the outer step is taken; its checkpoint is not complete
    snapshot      a snapshot's files are being written
    upload        the uploader has them, and has not reported

The table tells for each cell how long until the log told of it, and until the next inner step: of a
miner whose ranks start again, the first after that start. It also tells how many outer steps later
everybody took one. It ends as ``bench.kills`` does: weights, memory, files.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from bench import kills
from bench.kills import KINDS, Kill, kill_one, processes_of
from distributed_training.common.files import read_json_object
from distributed_training.localnet.services import parse_ranks
from distributed_training.localnet.subnet import LocalSubnet, Neuron
from distributed_training.telemetry import read_events

PHASES = ("training", "matchmaking", "transfer", "commit", "snapshot", "upload")
BLOCKS = 40  # between two rounds, a second each: a start on a busy machine is to come in between
#: What a killed miner waits for must be over before the next round, its reload
#: (--neuron.round_reload_timeout) where the validator refused an outer step included.
TIMEOUTS = (
    *("--neuron.next_chunk_timeout", "5", "--neuron.allreduce_timeout", "12"),
    *("--neuron.round_timeout", "18", "--neuron.round_reload_timeout", "20"),
)
TURN = timedelta(seconds=240)  # the longest until every miner came to its phase
_MOVED = 300_000  # bytes through p2pd that are no talk of the DHT any more
_LOOK = 0.01  # seconds
_EVENTS_EVERY = 0.1  # seconds between two readings of a miner's events


@dataclass
class Cell:
    kind: str
    phase: str
    kill: Kill | None = None
    rounds: int = 0  # that began after it, up to the one that everybody took


@dataclass
class Watch:
    """Tell a miner's phase from outside."""

    miner: Neuron
    cell: Cell
    _p2pd: psutil.Process | None = None
    _moved_before: int = 0
    _read_at: float = 0.0
    _kinds: list[str] = field(default_factory=list)  # of its events
    _last_state: str = ""
    _outer_step: int = 0

    def there(self) -> bool:
        match self.cell.phase:
            case "training":
                return self._events() and self._last_state == "training" and not self._publishing()
            case "matchmaking":
                return self._events() and self._last_state == "averaging" and self._moved() < _MOVED
            case "transfer":
                if not self._events() or self._last_state != "averaging":
                    self._note_traffic()
                    return False
                return self._moved() >= _MOVED
            case "commit":
                return self._events() and self._outer_step > 0 and not self._checkpointed()
            case "snapshot":
                return any(not self._written(folder) for folder in self._snapshots())
            case _:
                return self._events() and self._publishing()

    def _events(self) -> bool:
        """Read them again from time to time; True when there are any."""
        now = time.monotonic()
        if now - self._read_at > _EVENTS_EVERY:
            self._read_at = now
            events = list(read_events(self.miner.plan.events))
            self._kinds = [event["kind"] for event in events]
            states = [event["after"] for event in events if event["kind"] == "state"]
            started = "start" in self._kinds
            self._last_state = states[-1] if states else "training" if started else ""
            if self._last_state == "awaiting_global":
                self._last_state = "training"
            taken = [event["outer_step"] for event in events if event["kind"] == "outer_step"]
            self._outer_step = taken[-1] if taken else 0
        return bool(self._kinds)

    def _publishing(self) -> bool:
        last = [kind for kind in self._kinds if kind in ("preview", "publication", "start")][-1:]
        return last == ["preview"]

    def _snapshots(self) -> list[Path]:
        return [p for p in (self.miner.plan.folder / "snapshots").glob("*") if p.is_dir()]

    def _written(self, folder: Path) -> bool:
        ranks = self.miner.plan.world_size
        return all((folder / f"rank-{rank}.done.json").exists() for rank in range(ranks))

    def _checkpointed(self) -> bool:
        """Return whether a complete checkpoint of the present outer step is there."""
        for path in (self.miner.plan.folder / "checkpoints").glob("checkpoint-*"):
            manifests = [
                read_json_object(path / f"rank-{rank}.json")
                for rank in range(self.miner.plan.world_size)
            ]
            if all(m and m["progress"]["outer_step"] >= self._outer_step for m in manifests):
                return True
        return False

    def _moved(self) -> int:
        """Bytes that p2pd read since the last :meth:`_note_traffic`."""
        if self._p2pd is None:
            self._note_traffic()
        return self._traffic() - self._moved_before

    def _note_traffic(self) -> None:
        if self._p2pd is None or not self._p2pd.is_running():
            self._p2pd = next(iter(processes_of(self.miner).get("p2pd", ())), None)
        self._moved_before = self._traffic()

    def _traffic(self) -> int:
        with contextlib.suppress(psutil.Error):
            if self._p2pd is not None:
                return int(self._p2pd.io_counters().read_chars)
        return 0


def kill_cells(subnet: LocalSubnet, cells: Sequence[Cell], *, seed: int) -> list[Kill]:
    """Every cell once. A cell whose process or phase did not come stays without a kill."""
    chosen, waiting = random.Random(seed), list(cells)
    chosen.shuffle(waiting)
    while waiting:
        miners = subnet.miners
        turn = [Watch(m, waiting.pop()) for m, _ in zip(miners, range(len(waiting)), strict=False)]
        each_in_phase(subnet, turn, lambda watch: _kill(watch, chosen))
        began = subnet.validator.state.outer_step
        whole = kills.clean_round(subnet)
        for watch in turn:
            watch.cell.rounds = whole - began
            print(f"{watch.cell.kind} in {watch.cell.phase}: whole again at {whole}", flush=True)
    return [cell.kill for cell in cells if cell.kill is not None]


def _kill(watch: Watch, chosen: random.Random) -> bool:
    watch.cell.kill = kill = kill_one(watch.miner, watch.cell.kind, chosen)
    if kill is not None:
        kill.phase = watch.cell.phase
    return kill is not None


def each_in_phase(
    subnet: LocalSubnet, turn: Sequence[Watch], act: Callable[[Watch], bool]
) -> list[Watch]:
    """Call ``act`` of each watch in its phase, until it is True; return those it never was of."""
    waiting, polled = list(turn), 0.0
    deadline = time.monotonic() + TURN.total_seconds()
    while waiting and time.monotonic() < deadline:
        waiting = [watch for watch in waiting if not (watch.there() and act(watch))]
        if waiting and time.monotonic() - polled > 20 * _LOOK:
            polled = time.monotonic()
            subnet.poll()
        if waiting:
            time.sleep(_LOOK)
    return waiting


def show(cells: Sequence[Cell]) -> None:
    print("seconds until told / until the next inner step / rounds until everybody's")
    show_table([(cell.kind, cell.phase, _text(cell)) for cell in cells])


def show_table(cells: Sequence[tuple[str, str, str]]) -> None:
    """Print rows of phases; ``cells``: what died, in which phase, and what follows."""
    table = Table("", *PHASES)
    for row in dict.fromkeys(died for died, _, _ in cells):
        texts = {phase: text for died, phase, text in cells if died == row}
        table.add_row(row, *(texts.get(phase, "") for phase in PHASES))
    Console(width=150).print(table)


def _text(cell: Cell) -> str:
    if cell.kill is None:
        return "not met"
    told, step = (kills.seconds(s) for s in (cell.kill.told_after, cell.kill.step_after))
    return f"{told} / {step} / {cell.rounds}"


def run(
    folder: Path,
    *,
    kinds: Sequence[str] = KINDS,
    phases: Sequence[str] = PHASES,
    ranks: tuple[int, ...] = (2, 1, 1),
    seed: int = 0,
) -> tuple[list[Cell], kills.Outcome]:
    cells = [Cell(kind, phase) for kind, phase in itertools.product(kinds, phases)]
    outcome = kills.run(
        folder,
        killing=lambda subnet: kill_cells(subnet, cells, seed=seed),
        ranks=ranks,
        blocks=BLOCKS,
        miner_flags=("--neuron.page_port", "0", *TIMEOUTS),
        validator_flags=TIMEOUTS,
    )
    for cell in cells:
        if cell.kill is None:
            outcome.problems.append(f"no {cell.kind} could be killed in {cell.phase}")
    return cells, outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", type=kills.some_of(KINDS), default=list(KINDS))
    parser.add_argument("--phases", type=kills.some_of(PHASES), default=list(PHASES))
    parser.add_argument("--ranks", default="2,1,1", help="ranks of each miner")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 16))
    parser.add_argument("--folder", type=Path, help="keep the logs there")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with kills.logs_in(options.folder) as folder:
        cells, outcome = run(
            folder,
            kinds=options.kinds,
            phases=options.phases,
            ranks=parse_ranks(options.ranks, None),
            seed=options.seed,
        )
    kills.show(outcome)
    show(cells)
    return kills.verdict(outcome)


if __name__ == "__main__":
    sys.exit(main())
