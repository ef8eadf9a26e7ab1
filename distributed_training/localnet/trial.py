"""Run one's own training script as all members of a network on this machine.

    dt-network try SCRIPT.py --members 3 --rounds 2

It creates a network as ``dt-network init`` does, starts registry and validator as ``dt-network
run`` does and joins as ``dt-join`` does, all below one folder. A close follows the one before in
seconds, and its round ends as soon as all members have uploaded. What the script prints is in
``member-N/log.txt``, what the programs print in ``network/log.txt``.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, chdir, redirect_stdout, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from distributed_training import founding
from distributed_training.common.control_groups import usable_cores
from distributed_training.common.ports import free_ports
from distributed_training.common.processes import end_sessions
from distributed_training.config.types import ConfigError
from distributed_training.founder import RUN_FILE, FounderPlan, check, sole_runner
from distributed_training.join_command import enter
from distributed_training.localnet.pace import measure_slowness
from distributed_training.localnet.services import Child, to_words
from distributed_training.localnet.subnet import take_folder
from distributed_training.localnet.summary import held_out
from distributed_training.node.start import StopSignals
from distributed_training.protocol.lines import counted
from distributed_training.protocol.types import ExitStatus
from distributed_training.telemetry.neuron_state import NeuronState

NETWORK = "NETWORK"  # this word in --args becomes the network's file
MEMBER = "{member}"  # this text in a word of --args becomes the member's number, from 0
_PERIOD = 12.0  # seconds from close to close, where four processes have two free cores
_LONGEST = 300.0  # seconds without an outer step
_NICE = "5"  # niceness of scripts: on a few cores they would leave the validator no time to judge
_OPERATORS = ("R2_", "BT_", "DT_")  # variables of another network's member, on this machine too
_PATIENCE = timedelta(seconds=20)  # time for members to apply the last update
#: A validator judges an upload on eight pages: eight sequences. ``--set`` wins.
_RULES = {
    "round.minimum_valid_inner_step": 1,
    "data.pages_per_block": 4,
    "data.rows_per_page": 1,
    "data.max_length": 256,
    "training.sequence_length": 256,
    "training.effective_batch": 16,
}
_FLAGS = """\
"neuron.page_port" = "off"
[registry]
"admission" = "open"
"requests-per-address" = 10000
"""  # all requests come from one address


def run(options: argparse.Namespace) -> int:
    """Return the exit status: 0 after the last round, 1 with a line on what went wrong.

    Raises ConfigError before a member is started.
    """
    script = options.script.absolute()
    if not script.is_file():
        raise ConfigError(
            f"there is no script {script}, so nothing was started: give the path of one that calls "
            "join() (docs/join-a-script.md)"
        )
    words = [words_of(options.args, number) for number in range(options.members)]
    for name in [name for name in os.environ if name.startswith(_OPERATORS)]:
        del os.environ[name]
    folder = options.folder.absolute()
    began, network = time.monotonic(), folder / "network"
    with StopSignals() as signals, ExitStack() as stack:
        take_folder(folder, stack)
        print(f"creating a network of {options.members} members in {folder}", flush=True)
        with redirect_stdout(io.StringIO()):
            period = _period_of(options)
            founding.init(_init_options(options, network, period))
        with (network / RUN_FILE).open("a") as file:
            file.write(_FLAGS)
        log = stack.enter_context((network / "log.txt").open("w", buffering=1))  # by lines

        def tell(text: str, program: str = "network") -> None:
            log.write(f"{program:9} | {text}\n")

        stack.enter_context(chdir(network))  # an operator's .env and miner.toml are not for these
        # A thread for each core would slow all, since the members compute too.
        plan = FounderPlan.of(network, {**os.environ, "OMP_NUM_THREADS": "1"})
        running = stack.enter_context(sole_runner(plan, signals, tell=tell))
        check(plan)
        for program in plan.words:
            if not running.start(program):
                if signals.stop.is_set():
                    return ExitStatus.INTERRUPTED
                return _fail(f"the {program} did not start; {log.name} says why")
        longest = options.timeout or max(_LONGEST, 5 * period)
        trial = _Trial(options, longest, NeuronState(network / "validator"), began)
        stack.callback(trial.end)
        for number, own in enumerate(words, start=1):
            trial.start_member(folder / f"member-{number}", plan.file, [str(script), *own])
        print(f"{options.members} members run {script.name}", flush=True)
        while not trial.done:
            if signals.stop.wait(0.2):
                return ExitStatus.INTERRUPTED
            lost = [name for name, each in running.programs.items() if each.refused is not None]
            if lost or (problem := trial.look()):
                return _fail(f"the {lost[0]} ended; {log.name} says why" if lost else problem)
    print(f"done: {counted(trial.reached, 'outer step')}; all logs are in {folder}")
    return ExitStatus.STOPPED


def words_of(args: Sequence[str], member: int) -> list[str]:
    """Return the words of ``--args`` for the member of this number; paths become absolute."""
    words = [word.replace(MEMBER, str(member)) for word in args]
    return [str(Path(word).absolute()) if Path(word).exists() else word for word in words]


def _fail(problem: str) -> int:
    print(f"error: {problem}", file=sys.stderr, flush=True)
    print("stopping all programs", flush=True)  # the validator ends what it computes
    return ExitStatus.FAULT


def _period_of(options: argparse.Namespace) -> float:
    """Return the seconds from close to close: more of them on a slow or busy machine."""
    given = founding.seconds_of(dict(options.more).get("round.period"))
    return given or round(_PERIOD * measure_slowness(options.members + 1))


def _init_options(options: argparse.Namespace, network: Path, period: float) -> argparse.Namespace:
    """Return the options of ``dt-network init``."""
    rules = _RULES | {
        "round.period": f"{period:g}s",
        "round.grace": f"{period / 3 - 0.05:.1f}s",  # at most a third
        "round.least": options.members,
    }
    (port,) = free_ports(1)
    return argparse.Namespace(
        **{**vars(options), "more": [*rules.items(), *options.more], "folder": network},
        **{"name": "trial", "registry": f"http://127.0.0.1:{port}", "store": founding.EMBEDDED},
        **{"miners": options.members, "tokens": 1e9, "unpinned": False, "exchange": "store"},
        **dict.fromkeys(("netuid", "host", "dht_port", "slowest_link")),
    )


@dataclass
class _Trial:
    """The members of a trial, and what the validator's events say of them."""

    options: argparse.Namespace
    longest: float  # seconds without an outer step
    validator: NeuronState
    began: float
    members: dict[int, tuple[Child, NeuronState]] = field(default_factory=dict)  # by uid
    reached: int = 0  # outer steps
    reached_at: float = field(default_factory=time.monotonic)
    refused: Counter[int] = field(default_factory=Counter)  # uploads in a row, by uid

    def start_member(self, home: Path, file: Path, words: list[str]) -> None:
        """Join as ``dt-join`` does in a folder of the member's own, and start its script there."""
        settings = {
            "wallet.path": str(home.parent / "wallets"),
            "wallet.name": home.name,
            "neuron.run_folder": str(home / "run"),
        }
        plugins = ["--plugins", *self.options.plugins] if self.options.plugins else []
        try:
            with redirect_stdout(io.StringIO()), chdir(home.parent):
                _, uid = enter(home, [str(file), *to_words(settings), *plugins])
        except RuntimeError as error:  # the registry has gone meanwhile, or has refused
            raise ConfigError(str(error)) from None
        threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // self.options.members))}
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}
        given = [str(file) if word == NETWORK else word for word in words]
        child = Child(
            name=home.name,
            command=["nice", "-n", _NICE, sys.executable, *given],
            environment={**threads, **os.environ, **path},
            folder=home,
        )
        assert uid is not None  # a registry gives one
        self.members[uid] = child, NeuronState(home / "run")
        child.start()
        with suppress(OSError):  # Linux shares the cores between sessions first
            Path(f"/proc/{child.pid}/autogroup").write_text(_NICE)

    def end(self) -> None:
        pids = [child.pid for child, _ in self.members.values() if child.pid]
        end_sessions(pids, settle=timedelta(0), grace=timedelta(seconds=5))

    @property
    def done(self) -> bool:
        """Return whether all rounds are over, and the members have had time for the last update."""
        waited = time.monotonic() - self.reached_at > _PATIENCE.total_seconds()
        applied = all(state.outer_step >= self.reached for _, state in self.members.values())
        return self.reached >= self.options.rounds and (applied or waited)

    def look(self) -> str:
        """Print what is new. Return why the trial ends here, else ""."""
        for event in self.validator.poll():
            if problem := self._follow(event):
                return problem
        for child, state in self.members.values():
            state.poll()
            if child.exit_status is not None and self.reached < self.options.rounds:
                return self._obituary(child, state)
        if time.monotonic() - self.reached_at > self.longest:
            each = "; ".join(f"{c.name} {_stage(c, s)}" for c, s in self.members.values())
            return (
                f"no outer step came within {self.longest:.0f} s ({each}): a script whose "
                "steps are slow needs a longer --set round.period=60s, one that starts slowly a "
                "longer --timeout"
            )
        return ""

    def _follow(self, event: dict[str, object]) -> str:
        name = lambda uid: self.members[uid][0].name if uid in self.members else f"uid {uid}"
        match event:
            case {
                "kind": "outer_step",
                "outer_step": int(reached),
                "participants": [*uids],
                "carried_over": [*later],
            }:
                self.reached, self.reached_at = reached, time.monotonic()
                self.refused.clear()
                loss = held_out(self.validator.tables["held_out"][-1])
                merged = ", ".join(name(uid) for uid in uids if uid not in later)
                carried = f"; carried over {', '.join(map(name, later))}" if later else ""
                print(
                    f"outer step {reached} after {time.monotonic() - self.began:.0f} s: merged "
                    f"{merged}{carried}; held-out loss {loss}",
                    flush=True,
                )
            case {"kind": "upload_scored", "ok": False, "uid": int(uid), "reason": reason}:
                self.refused[uid] += 1
                if self.refused[uid] > 1:
                    more = "; a longer --set round.period=60s gives the validator more time"
                    more = more if "its turn to be judged" in str(reason) else ""
                    return f"the uploads of {name(uid)} are refused: {reason}{more}"
                print(f"the upload of {name(uid)} is refused: {reason}", flush=True)
        return ""

    def _obituary(self, child: Child, state: NeuronState) -> str:
        if not child.exit_status and not _has_joined(child):
            return (
                f"{self.options.script} ended without a call of join(), so it was no member: see "
                "docs/join-a-script.md"
            )
        last = (child.last_lines() or ["it printed nothing"])[-1]
        return (
            f"the script of {child.name} ended with status {child.exit_status} at inner step "
            f"{state.inner_step}, before outer step {self.reached + 1}: {last} ({child.log})"
        )


def _has_joined(child: Child) -> bool:
    return (child.folder / "run" / "instance.json").exists()


def _stage(child: Child, state: NeuronState) -> str:
    return f"is at inner step {state.inner_step}" if _has_joined(child) else "has not called join()"
