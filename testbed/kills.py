"""Kill processes of the miners of a local subnet by kind and phase, and see that all continue.

``python -m bench.kills`` describes the kinds, the phases and what must be true afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import psutil

from distributed_training.common.files import read_json_object
from distributed_training.common.processes import is_running, send, tree_of
from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalNeuron, LocalSubnet
from distributed_training.miner.run_folder import launcher_of, listening_ranks
from distributed_training.telemetry import read_events

#: What a process is, by a word of its command line.
WORDS = {
    "distributed_training.miner.rank_group": "rank",
    "distributed_training.exchange.hivemind_peer": "DHT peer",
    "p2pd": "p2pd",
    "distributed_training.data.block_builder": "data worker",
    "distributed_training.telemetry.page": "page",
}
#: What the miner's log says of the death of one.
TOLD = {
    "launcher": "Starting [0-9]+ rank",
    "rank": "(ended with|was killed by) SIGKILL",
    "DHT peer": "The DHT peer (ended|did not start)",
    "p2pd": "The DHT peer (ended|did not start)",
    "data worker": "A data worker ended",
    "page": "The page ended",
}
#: Those whose death ends the ranks, so that they start again.
ENDS_RANKS = ("launcher", "rank")
KINDS = tuple(TOLD)
PHASES = ("training", "upload", "commit")
BLOCKS = 40  # between two rounds, a second each: a start on a busy machine is to come in between
TURN = timedelta(seconds=240)  # the longest until every miner came to its phase
ROUND = timedelta(seconds=240)  # the longest that a clean round may take to come
_LOOK = 0.02  # seconds


def processes_of(miner: LocalNeuron) -> dict[str, list[psutil.Process]]:
    """The running processes of a miner by kind."""
    launcher = launcher_of(miner.folder)
    found: dict[str, list[psutil.Process]] = {}
    for process in tree_of(launcher.pid) if launcher and launcher.find() else []:
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            kinds = [kind for word, kind in WORDS.items() if word in line]
            own = "launcher" if launcher and process.pid == launcher.pid else ""
            if kind := own or (kinds[0] if kinds else ""):
                found.setdefault(kind, []).append(process)
    if 0 not in listening_ranks(miner.folder):
        found.pop("rank", None)  # they do not listen yet
    return found


# --- killing ------------------------------------------------------------------------------------


@dataclass
class Kill:
    at: float  # time.time()
    miner: LocalNeuron
    kind: str
    pid: int
    phase: str
    told: str = ""  # the first line of the log that follows from it
    told_after: float | None = None
    step_after: float | None = None
    rounds: int | None = None  # that began after it, up to the one that everybody took


def kill_one(miner: LocalNeuron, kind: str, chosen: random.Random) -> Kill | None:
    """None if the miner has no such process now."""
    there = sorted(processes_of(miner).get(kind, ()), key=lambda process: process.pid)
    if not there:
        return None
    process = chosen.choice(there)
    kill = Kill(time.time(), miner, kind, process.pid, miner.state.phase)
    return kill if send(process, signal.SIGKILL) else None


def follow_up(kill: Kill) -> None:
    """Fill in what its miner's log and events say of it."""
    first = first_step(kill.miner, kill.at, restarted=kill.kind in ENDS_RANKS)
    kill.step_after = first - kill.at if first is not None else None
    for at, line in _lines(kill.miner.log):
        words = TOLD.get(kill.kind)
        if at >= kill.at - 0.001 and words and re.search(words, line):
            kill.told, kill.told_after = line, at - kill.at
            return


def first_step(miner: LocalNeuron, since: float, *, restarted: bool) -> float | None:
    """Return when the first inner step after ``since`` ended, None if there is none; with
    ``restarted`` the first after the ranks' next start. Times are those of ``time.time()``."""

    def first(kind: str, after: float) -> float | None:
        times = (event["time"] for event in read_events(miner.folder / "events.jsonl", kind))
        return next((time for time in times if time > after), None)

    start = first("start", since) if restarted else since
    return None if start is None else first("step", start)


def _lines(log: Path) -> Iterator[tuple[float, str]]:
    for line in log.read_text(errors="replace").splitlines():
        moment, _, rest = line.partition(" | ")
        with contextlib.suppress(ValueError):
            yield datetime.fromisoformat(moment).timestamp(), rest.partition(" | ")[2]


def kill_in_phases(
    subnet: LocalSubnet, cells: Sequence[tuple[str, str]], *, seed: int
) -> list[Kill]:
    """Kill once for each of ``cells`` (kind and phase). One that did not come is left out."""
    kills: list[Kill] = []
    chosen, waiting = random.Random(seed), list(cells)
    chosen.shuffle(waiting)
    while waiting:
        killed = len(kills)
        turn = []
        for miner in subnet.miners[: len(waiting)]:
            kind, phase = waiting.pop()
            turn.append(Watch(miner, phase, partial(_kill_into, kills, miner, kind, phase, chosen)))
        in_phase(subnet, turn)
        began = subnet.validator.state.outer_step
        whole = clean_round(subnet)
        for kill in kills[killed:]:
            kill.rounds = whole - began
            print(f"{kill.kind} in {kill.phase}: whole again at {whole}", flush=True)
    return kills


def _kill_into(
    kills: list[Kill], miner: LocalNeuron, kind: str, phase: str, chosen: random.Random
) -> bool:
    kill = kill_one(miner, kind, chosen)
    if kill is not None:
        kills.append(replace(kill, phase=phase))
    return kill is not None


# --- phases -------------------------------------------------------------------------------------


@dataclass
class Watch:
    """Wait for a miner's phase, seen from outside, to call ``act``. True: it did what it was to."""

    miner: LocalNeuron
    phase: str
    act: Callable[[], bool] = lambda: True

    def there(self) -> bool:
        """Return whether the miner is in the phase, by the events that were read so far."""
        state = self.miner.state
        match self.phase:
            case "training":
                return state.phase == "training" and not self._uploading()
            case "commit":
                return bool(state.outer_steps) and not self._checkpointed(state.outer_steps[-1][0])
            case _:
                return self._uploading()

    def _uploading(self) -> bool:
        """Return whether an upload is written that has not been sent."""
        kinds = ("start", "upload", "publication")
        at = {
            e["kind"]: e["time"]
            for e in read_events(self.miner.folder / "events.jsonl")
            if e["kind"] in kinds
        }
        return max(at, key=lambda kind: at[kind], default="") == "upload"

    def _complete(self, folder: Path, name: str) -> bool:
        ranks = range(self.miner.world_size)
        return all((folder / name.format(rank)).exists() for rank in ranks)

    def _checkpointed(self, outer_step: int) -> bool:
        """Return whether a complete checkpoint of that outer step is there."""
        for folder in (self.miner.folder / "checkpoints").glob("checkpoint-*"):
            manifest = read_json_object(folder / "rank-0.json")
            if not manifest or not self._complete(folder, "rank-{}.json"):
                continue
            if manifest["progress"]["outer_step"] >= outer_step:
                return True
        return False


def in_phase(subnet: LocalSubnet, turn: Sequence[Watch]) -> bool:
    """Let each watch act in its phase; return False if one did not within :data:`TURN`."""
    waiting, deadline = list(turn), time.monotonic() + TURN.total_seconds()
    while waiting and time.monotonic() < deadline:
        subnet.poll()
        waiting = [watch for watch in waiting if not (watch.there() and watch.act())]
        time.sleep(_LOOK)
    return not waiting


# --- what must be true afterwards -----------------------------------------------------------------


#: Limits for the growth of a miner's processes and files since the first outer step, beyond the
#: difference of two moments: a factor and an addition.
GROWTH = {
    "processes": (1, 0),
    "threads": (1, 8),  # those of a publication or a fetch come and go
    "descriptors": (1, 30),
    "files": (1.3, 40),  # blocks kept, uploads, checkpoints
    "megabytes": (1.25, 100),  # a page that n processes share counts 1/n in each
}


def usage(miner: LocalNeuron) -> dict[str, float]:
    """Return what a miner has now of what :data:`GROWTH` names."""
    found = dict.fromkeys(GROWTH, 0.0)
    found["files"] = sum(path.is_file() for path in miner.folder.rglob("*"))
    for process in (p for of_kind in processes_of(miner).values() for p in of_kind):
        with contextlib.suppress(psutil.Error):
            found["megabytes"] += process.memory_full_info().pss / 1e6
            found["threads"] += process.num_threads()
            found["descriptors"] += process.num_fds()
            found["processes"] += 1
    return found


def clean_round(subnet: LocalSubnet, longest: timedelta = ROUND) -> int:
    """Wait for an outer step that begins from now and that everybody takes; its number.

    Raises SubnetFailure if there is none within ``longest``.
    """
    first = subnet.validator.state.outer_step + 1
    names = {neuron.name for neuron in subnet.neurons}

    def reached() -> int:
        steps = [step for step, _ in subnet.validator.state.outer_steps if step >= first]
        whole = [
            step.outer_step
            for step in subnet.summary().outer_steps
            if step.outer_step in steps and set(step.participants) == names
        ]
        return max(whole, default=0)

    subnet.wait_until(lambda: bool(reached()), longest, "an outer step that everybody takes")
    step = reached()
    trained = [len(miner.state.losses) for miner in subnet.miners]
    subnet.wait_until(
        lambda: all(
            len(m.state.losses) >= n + 3 for m, n in zip(subnet.miners, trained, strict=True)
        ),
        ROUND,
        "three inner steps after it",
    )
    return step


# --- the run ------------------------------------------------------------------------------------


@dataclass
class Outcome:
    kills: list[Kill] = field(default_factory=list)
    before: dict[str, dict[str, float]] = field(default_factory=dict)
    after: dict[str, dict[str, float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def run(
    folder: Path,
    *,
    seed: int,
    kinds: Sequence[str] = KINDS,
    phases: Sequence[str] = PHASES,
    ranks: tuple[int, ...] = (2, 1),
) -> Outcome:
    """Kill each of ``kinds`` once in each of ``phases``."""
    outcome = Outcome()
    temporary = Path(tempfile.mkdtemp(prefix="kills-"))  # short: sockets are made there
    options = SubnetOptions(
        folder=folder / "subnet",
        exchange="hivemind",
        ranks=ranks,
        least_miners=1,
        restart_miners=True,
        period=BLOCKS,
        miner_flags=("--neuron.page_port", "0"),
    )
    cells = list(itertools.product(kinds, phases))
    subnet = LocalSubnet(options=options, stop_grace=timedelta(seconds=40))
    there: list[psutil.Process] = []
    with mock.patch.dict(os.environ, TMPDIR=str(temporary)), subnet:
        clean_round(subnet)
        outcome.before = {m.name: usage(m) for m in subnet.miners}
        outcome.kills = kill_in_phases(subnet, cells, seed=seed)
        step = clean_round(subnet)
        outcome.after = {m.name: usage(m) for m in subnet.miners}
        there += subnet.processes()
        reached = [m.state.outer_step for m in subnet.miners]
    for kind, phase in set(cells) - {(kill.kind, kill.phase) for kill in outcome.kills}:
        outcome.problems.append(f"no {kind} could be killed in {phase}")
    if set(reached) != {step}:  # another outer step was taken before the stop
        outcome.problems.append(f"the miners stand at outer steps {reached}, not {step}")
    outcome.problems += [*_unwell(outcome), *subnet.problems]
    outcome.problems += [f"left behind: {p}" for p in there if is_running(p)]
    caches = "torchinductor_"  # kept on purpose
    left = [path for path in temporary.iterdir() if not path.name.startswith(caches)]
    outcome.problems += [f"left behind: {path}" for path in left]
    shutil.rmtree(temporary, ignore_errors=True)
    return outcome


def _unwell(outcome: Outcome) -> Iterator[str]:
    """Follow up each kill; yield what is wrong with it and with resources."""
    for kill in outcome.kills:
        follow_up(kill)
        if kill.step_after is None:
            yield f"no inner step after the kill of {kill.kind}"
        if kill.told_after is None:
            yield f"the log does not tell of the kill of {kill.kind}"
    for name, after in outcome.after.items():
        before = outcome.before[name]
        for what, (times, more) in GROWTH.items():
            if after[what] > times * before[what] + more:
                yield f"{name}: {what} {before[what]:.0f} -> {after[what]:.0f}"
