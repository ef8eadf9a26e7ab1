"""Run your own training script as all members of a network on this machine.

    dt-network try SCRIPT.py --members 3 --rounds 2

It creates a network as ``dt-network init`` does, starts ``dt-network run`` and joins as ``dt-join``
does, all below one folder. There are only seconds between closes, and a round ends as soon as all
members have uploaded. The script's output is in ``member-N/log.txt``, that of the network's
programs in ``network/log.txt``.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from distributed_training import founding
from distributed_training.common.control_groups import usable_cores
from distributed_training.common.ports import free_ports
from distributed_training.common.processes import end_sessions
from distributed_training.config.types import ConfigError
from distributed_training.founder import RUN_FILE
from distributed_training.localnet.pace import measure_slowness
from distributed_training.localnet.services import ChildFailure, stop_together
from distributed_training.localnet.subnet import Founder, LocalNeuron, join, take_folder, to_words
from distributed_training.localnet.summary import held_out
from distributed_training.network import FILE
from distributed_training.node.start import StopNow, StopSignals
from distributed_training.protocol.lines import counted
from distributed_training.protocol.types import ExitStatus
from distributed_training.telemetry.neuron_state import NeuronState

NETWORK = "NETWORK"  # this word in --args is replaced by the path of the network's file
MEMBER = "{member}"  # this text in --args is replaced by the member's number, counted from 0
_PERIOD = 12.0  # seconds between two closes if four processes share two free cores
_LONGEST = 300.0  # seconds without an outer step after which the trial fails
_NICE = "5"  # nice value of the scripts, so that on few cores the validator has time to judge
_OPERATORS = ("R2_", "BT_", "DT_")  # prefixes of variables of a real member on this machine
_PATIENCE = timedelta(seconds=20)  # time for members to apply the last update
_STOP = timedelta(minutes=2)  # time for the validator to finish its current computation
#: A validator judges an upload on eight pages, here eight sequences. ``--set`` overrides these.
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
    """Run the trial. Return its exit status: 0 after the last round, 1 if something failed.

    A failure is printed in one line. Raises ConfigError before a member is started.
    """
    script = options.script.absolute()
    if not script.is_file():
        raise ConfigError(
            f"there is no script {script}, so nothing was started: name a script that calls "
            "join() (docs/join-a-script.md)"
        )
    words = [words_of(options.args, number) for number in range(options.members)]
    for name in [name for name in os.environ if name.startswith(_OPERATORS)]:
        del os.environ[name]
    folder = options.folder.absolute()
    began, network = time.monotonic(), folder / "network"
    with StopSignals(interrupts=True) as signals, ExitStack() as stack:
        try:
            take_folder(folder, stack)
            print(f"creating a network of {options.members} members in {folder}", flush=True)
            with redirect_stdout(io.StringIO()):
                # The period, in seconds, is longer on a slow or busy machine.
                period = founding.seconds_of(dict(options.more).get("round.period"))
                period = period or round(_PERIOD * measure_slowness(options.members + 1))
                founding.init(_init_options(options, network, period))
            with (network / RUN_FILE).open("a") as file:
                file.write(_FLAGS)
            path = os.pathsep.join(filter(None, sys.path))
            environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
            # One thread per core would slow everything down, since the members compute too.
            founder = Founder(network, environment | {"OMP_NUM_THREADS": "1"}, folder=network)
            longest = options.timeout or max(_LONGEST, 5 * period)
            trial = _Trial(options, longest, founder, environment, began)
            stack.callback(trial.end)
            founder.start()
            founder.wait_ready()
            for number, own in enumerate(words, start=1):
                trial.start_member(folder / f"member-{number}", network / FILE, [str(script), *own])
            print(f"{options.members} members run {script.name}", flush=True)
            while not trial.done:
                time.sleep(0.2)
                if problem := trial.look():
                    raise ChildFailure(problem)
        except StopNow:
            return ExitStatus.INTERRUPTED
        except ChildFailure as failure:
            print(f"error: {failure}", file=sys.stderr, flush=True)
            print("stopping all programs", flush=True)  # the validator may take a while
            return ExitStatus.FAULT
        finally:
            signals.interrupts = False  # do not interrupt the stop: its time is limited
    print(f"done: {counted(trial.reached, 'outer step')}; all logs are in {folder}")
    return ExitStatus.STOPPED


def words_of(args: Sequence[str], member: int) -> list[str]:
    """Return the words of ``--args`` for the member with this number, with absolute paths."""
    words = [word.replace(MEMBER, str(member)) for word in args]
    return [str(Path(word).absolute()) if Path(word).exists() else word for word in words]


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
    """The members of a trial, and what the validator's events say about them."""

    options: argparse.Namespace
    longest: float  # seconds without an outer step after which the trial fails
    founder: Founder
    environment: dict[str, str]
    began: float
    members: dict[int, LocalNeuron] = field(default_factory=dict)  # by uid
    reached: int = 0  # number of outer steps
    reached_at: float = field(default_factory=time.monotonic)
    refused: Counter[int] = field(default_factory=Counter)  # since the last outer step

    def start_member(self, home: Path, file: Path, words: list[str]) -> None:
        """Join as ``dt-join`` does, in the member's own folder, and start its script there."""
        settings = {
            "wallet.path": str(home.parent / "wallets"),
            "wallet.name": home.name,
            "neuron.run_folder": str(home / "run"),
        }
        plugins = ["--plugins", *self.options.plugins] if self.options.plugins else []
        uid = join(home, file, [*to_words(settings), *plugins])
        given = [str(file) if word == NETWORK else word for word in words]
        threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // self.options.members))}
        self.members[uid] = member = LocalNeuron(
            home.name,
            ["nice", "-n", _NICE, sys.executable, *given],
            threads | self.environment,
            home,
            state=NeuronState(home / "run"),
        )
        member.start()
        with suppress(OSError):  # Linux divides the cores among sessions before it uses niceness
            Path(f"/proc/{member.pid}/autogroup").write_text(_NICE)

    def end(self) -> None:
        pids = [member.pid for member in self.members.values() if member.pid]
        end_sessions(pids, settle=timedelta(0), grace=timedelta(seconds=5))
        stop_together([self.founder], _STOP)

    @property
    def done(self) -> bool:
        """True once all rounds are over and members have had time to apply the last update."""
        waited = time.monotonic() - self.reached_at > _PATIENCE.total_seconds()
        applied = all(m.state.outer_step >= self.reached for m in self.members.values())
        return self.reached >= self.options.rounds and (applied or waited)

    def look(self) -> str:
        """Print new events. Return the reason if the trial must end now, else ""."""
        for event in self.founder.state.poll():
            if problem := self._follow(event):
                return problem
        for member in self.members.values():
            member.state.poll()
            if member.exit_status is None or self.reached >= self.options.rounds:
                continue
            if not member.exit_status and not _has_joined(member):
                return (
                    f"{self.options.script} ended without a call of join(), so it was no member: "
                    "see docs/join-a-script.md"
                )
            last = (member.last_lines() or ["it printed nothing"])[-1]
            return (
                f"the script of {member.name}, which ran in {member.folder}, ended with status "
                f"{member.exit_status} at inner step {member.state.inner_step}, before outer step "
                f"{self.reached + 1}: {last} ({member.log})"
            )
        if time.monotonic() - self.reached_at > self.longest:
            each = "; ".join(f"{m.name} {_stage(m)}" for m in self.members.values())
            return (
                f"no outer step came within {self.longest:.0f} s ({each}): if the script's steps "
                "are slow, set a longer --set round.period=60s; if its start is slow, a longer "
                "--timeout"
            )
        return self.founder.problem

    def _follow(self, event: dict[str, object]) -> str:
        name = lambda uid: self.members[uid].name if uid in self.members else f"uid {uid}"
        match event:
            case {
                "kind": "outer_step",
                "outer_step": int(reached),
                "participants": [*uids],
                "carried_over": [*later],
            }:
                self.reached, self.reached_at = reached, time.monotonic()
                self.refused.clear()
                loss = held_out(self.founder.state.tables["held_out"][-1])
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


def _has_joined(member: LocalNeuron) -> bool:
    return (member.state.folder / "instance.json").exists()


def _stage(member: LocalNeuron) -> str:
    if not _has_joined(member):
        return "has not called join()"
    return f"is at inner step {member.state.inner_step}"
