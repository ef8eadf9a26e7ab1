"""Run a whole subnet on this machine: an S3 server, ``dt-network run`` and the miners.

The orchestrator starts these programs, follows their events and stops them. It takes no part in the
protocol: neurons communicate through the store, the registry and the DHT, as they do between
machines. The run folder is also a founder's folder. It is locked while it is used, and emptied only
if a local subnet wrote it. ``make run`` (``command.py``) and tests use this module.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from distributed_training.common.control_groups import usable_cores
from distributed_training.common.files import write_bytes, write_json
from distributed_training.common.llama import local_llama_config
from distributed_training.common.ports import free_ports
from distributed_training.common.processes import end_sessions, tree_of
from distributed_training.config.loader import read_argv
from distributed_training.config.schema import schema
from distributed_training.config.types import ConfigError
from distributed_training.founder import MASTER, RUN_FILE
from distributed_training.join_command import enter
from distributed_training.localnet.pace import measure_slowness
from distributed_training.localnet.services import (
    Child,
    ChildFailure,
    ObjectStoreServer,
    SubnetOptions,
    clean_environment,
    stop_together,
)
from distributed_training.localnet.summary import Summary, event_line, summarize
from distributed_training.network import FILE, built_in_rules, of_exchange, signed, to_toml
from distributed_training.node.start import sole_user
from distributed_training.protocol.keys import miner_bucket
from distributed_training.protocol.types import FINAL
from distributed_training.signing import write_file
from distributed_training.telemetry.neuron_state import NeuronState

if TYPE_CHECKING:
    from distributed_training.store.s3 import S3ObjectStore

STATE_FILE = "localnet.json"  # this file also shows that a folder is ours
LOCK_FILE = ".lock"
_START = timedelta(seconds=120)  # time for the validator to start and publish the first model
_TURN = 12.0  # seconds that a miner's first inner step may delay the next miner's start
_SETTLE = timedelta(seconds=5)  # time for a process to end after the process that started it
_GRACE = 20.0  # seconds after a close in which uploads are accepted
_BUCKET = "local"  # name of the network's global bucket
STORE_FOLDER = "s3"  # folder of the object store's data, in the run folder


def take_folder(path: Path, stack: ExitStack) -> None:
    """Lock a run folder until ``stack`` closes, and empty it.

    If it raises ConfigError, nothing in the folder has changed.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Lock it before looking at its contents: another subnet may be running there.
        other = "use another folder with --folder"
        stack.enter_context(sole_user(path, LOCK_FILE, "local subnet", instead=other))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be used ({error.strerror}), so no subnet was started: use "
            "--folder with a new or empty folder of your own"
        ) from None
    contents = [p for p in path.iterdir() if p.name != LOCK_FILE]
    if contents and not (path / STATE_FILE).exists():
        (path / LOCK_FILE).unlink()
        raise ConfigError(
            f"{path} contains files that no local subnet wrote, so it is not used: "
            "use --folder with a new or empty folder"
        )
    for found in contents:
        # If it is a link, remove the link and not its target.
        if found.is_dir() and not found.is_symlink():
            shutil.rmtree(found)
        else:
            found.unlink()
    # Write this at once, so that the next start recognizes the folder as ours, no matter how this
    # process ends.
    write_json(path / STATE_FILE, {}, durable=False)


class SubnetFailure(RuntimeError):
    """The subnet did not reach its goal.

    The text tells the operator which goal was missed, and the state of each neuron.

    Examples:
        >>> str(SubnetFailure("outer step 1 did not come within 180 s"))
        'outer step 1 did not come within 180 s'
    """


@dataclass(eq=False)
class LocalNeuron(Child):
    """A neuron's program, and the state of its run folder as known from its events.

    ``flags``: the neuron's settings, which are also part of ``command``.
    """

    state: NeuronState
    world_size: int = 1
    flags: Sequence[str] = ()

    @property
    def uid(self) -> int:
        return self.state.uid


class Founder(LocalNeuron):
    """``dt-network run`` as a child. Its log has the lines of the registry and the validator.

    ``network``: the founder's folder; ``words``: additional arguments for the program.
    """

    def __init__(
        self,
        network: Path,
        environment: Mapping[str, str],
        *words: str,
        folder: Path,
    ) -> None:
        module = "distributed_training.network_command"
        command = [sys.executable, "-m", module, "run", str(network), *words]
        state = NeuronState(network / "validator", uid=0)
        super().__init__("validator", command, dict(environment), folder, state=state)
        self._read = 0  # number of bytes of the log that were read
        self._answers = self._has_lost = False

    def is_ready(self) -> bool:
        """Return whether the registry answers."""
        self._read_log()
        return self._answers

    @property
    def problem(self) -> str:
        """Why the network is incomplete, or "". The program itself restarts what has ended."""
        self._read_log()
        lost = self._has_lost and not self.stopping
        return self._describe("or the registry has ended") if lost else super().problem

    def _read_log(self) -> None:
        with self.log.open("rb") as log:
            log.seek(self._read)
            lines, newline, _ = log.read().rpartition(b"\n")
        self._read += len(lines + newline)
        self._answers |= b"registry  | READY" in lines
        self._has_lost |= _LOST.search(lines) is not None


#: A line of ``dt-network run`` which says that one of its programs has ended.
_LOST = re.compile(rb"^(registry|validator) *\| The \1 ended|^network *\| the \w+ ended", re.M)


def join(
    folder: Path,
    network: Path,
    words: Sequence[str],
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Join a network on this machine as ``dt-join`` does; return the uid.

    ``folder``: the member's folder. ``words``: the member's settings. Raises ConfigError,
    ChildFailure.
    """
    try:
        with contextlib.chdir(folder.parent), contextlib.redirect_stdout(io.StringIO()):
            _, uid = enter(folder, [str(network), *words], environ)
    except RuntimeError as error:  # the registry has ended in the meantime, or has refused
        raise ChildFailure(str(error)) from None
    assert uid is not None  # a registry always assigns one
    return uid


def to_words(flags: Mapping[str, str]) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", value)]


class LocalSubnet:
    """A network of real processes on this machine: object store, chain, validator and miners.

    Start it with :meth:`start` or as a context manager; end it with :meth:`stop`, which may be
    called at any time and more than once.

    Args:
        options: Number of miners, kind of exchange, folder, times.
        tell: Called with one line of text for each event.
        refresh: Called with this object, ten times per second while it waits, to redraw a view.
        stop_grace: How long the miners get to stop; after that, the founder's programs get the same
            time. A process that takes longer is killed and reported.
        settle: How long :meth:`wait_for_outer_steps` waits for a miner after the validator has
            published the outer step.

    Examples:
        ```python
        from datetime import timedelta
        from pathlib import Path

        from distributed_training.localnet.services import SubnetOptions
        from distributed_training.localnet.subnet import LocalSubnet

        options = SubnetOptions(folder=Path("runs/trial"), exchange="store", ranks=(1, 1))
        with LocalSubnet(options=options, tell=print) as subnet:
            subnet.wait_for_outer_steps(1, deadline=timedelta(minutes=5))
            subnet.kill_miner(0)
            subnet.restart_miner(0)
            print(subnet.summary().text())
        ```
    """

    def __init__(
        self,
        *,
        options: SubnetOptions,
        tell: Callable[[str], None] = lambda line: None,
        refresh: Callable[[LocalSubnet], None] = lambda subnet: None,
        stop_grace: timedelta = timedelta(seconds=40),
        settle: timedelta = timedelta(seconds=15),
    ) -> None:
        # Given by the caller
        self.options = options
        self.stop_grace = stop_grace
        self._settle = settle.total_seconds()
        self._tell = tell
        self._refresh = refresh
        # The programs
        self.neurons: list[LocalNeuron] = []  # the validator first
        self.store = ObjectStoreServer(self.folder / STORE_FOLDER)
        self.chain_endpoint = f"http://127.0.0.1:{free_ports(1)[0]}"
        self._locked = ExitStack()
        # What has happened so far
        self.started_at = time.time()
        self.problems: list[str] = []
        self.strays: list[str] = []  # processes that outlived the parent that should end them
        self._stopped = False
        self._next_turn = 0.0  # monotonic time from which the next miner need not wait to start

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all processes and wait for the validator, but not for the miners.

        Raises:
            ConfigError: If the folder cannot be used. Nothing was started.
            SubnetFailure: If a service or the validator does not start. All processes have ended.
        """
        with ExitStack() as undo:
            # If anything below fails, or after Ctrl-C, leave no process behind.
            undo.callback(self.stop, timedelta(seconds=5))
            take_folder(self.folder, self._locked)
            self.started_at = time.time()
            if self.options.period is None:
                slowness = measure_slowness(sum(self.options.ranks) + 1)
                self.options = replace(self.options, slowness=slowness)
                if slowness > 1:
                    self._tell(
                        f"this machine is {slowness:g} times slower or busier than two free cores: "
                        f"a round comes every {self.options.seconds / 60:.1f} minutes"
                    )
            try:
                self.store.start()  # this takes seconds; continue meanwhile
                self._write_network()
                self.neurons = self._list_neurons()
                with contextlib.closing(self.open_bucket(write=True)) as bucket:
                    self.store.wait_ready()
                    bucket.create_bucket()
                self._tell(f"object store at {self.store.endpoint}")
                self._tell(f"chain at {self.chain_endpoint}")
                self._start_neuron(self.validator)
                self.validator.wait_ready()
                # The registry assigns uids in this order, and the founder has the first.
                for miner in self.miners:
                    join(miner.folder, self.network, miner.flags, miner.environment)
            except ChildFailure as failure:
                raise SubnetFailure(str(failure)) from failure
            # Wait for the validator: miners have nothing to load until its first model exists.
            validator = self.validator.state
            longest = _START * self.options.slowness
            self.wait_until(lambda: validator.starts > 0, longest, "the validator's start")
            undo.pop_all()

    def stop(self, grace: timedelta | None = None) -> list[str]:
        """Stop the miners, the founder's programs and the store in this order, and then any strays.

        A second call does nothing.

        Args:
            grace: How long the miners get to stop, instead of ``stop_grace``.

        Returns:
            One line for each thing that went wrong.
        """
        if self._stopped:
            return []
        self._stopped = True
        grace = grace if grace is not None else self.stop_grace
        # Note the sessions now: they include processes whose parents will have ended by then.
        leaders = set[int]()
        for process in self.processes():
            with suppress(OSError):  # the process has ended in the meantime
                leaders.add(os.getsid(process.pid))
        # Stop miners first: they still upload then, and need the store, chain and validator.
        problems = stop_together(self.miners, grace)
        problems += stop_together(self.neurons, grace)
        for neuron in self.neurons:
            # Read the events again, because the last ones belong in the summary.
            self._read_events(neuron)
            neuron.state.close()
            status = neuron.exit_status
            if neuron.stopping and status is not None and status > 0:
                problems.append(f"{neuron.name} ended with status {status} when stopped")
        self.store.stop()
        self.strays = end_sessions(leaders, settle=_SETTLE, grace=timedelta(0))
        problems += [f"left behind, killed: {stray}" for stray in self.strays]
        self._locked.close()
        self.problems += problems
        return problems

    def __enter__(self) -> LocalSubnet:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- for tests and the command line ---------------------------------------------------------

    @property
    def folder(self) -> Path:
        """The absolute path of the run folder."""
        return self.options.folder.absolute()

    @property
    def validator(self) -> LocalNeuron:
        """The validator; its program is ``dt-network run``."""
        return self.neurons[0]

    @property
    def miners(self) -> list[LocalNeuron]:
        """All miners, in the order of ``SubnetOptions.ranks``."""
        return self.neurons[1:]

    @property
    def network(self) -> Path:
        """The path of the network's file."""
        return self.folder / FILE

    def processes(self) -> list[psutil.Process]:
        """List all processes of this subnet that are running now."""
        children: list[Child] = [*self.neurons, self.store]
        pids = [child.pid for child in children if child.pid is not None and child.running]
        return [process for pid in pids for process in tree_of(pid)]

    def kill_miner(self, index: int) -> None:
        """Send SIGKILL to a miner's whole process tree, as a crash of its machine would.

        Args:
            index: The miner's place in ``SubnetOptions.ranks``.
        """
        self.miners[index].kill_tree()

    def restart_miner(self, index: int) -> None:
        """Restart a miner that was killed or stopped, in its own folder.

        Args:
            index: The miner's place in ``SubnetOptions.ranks``.
        """
        self._start_neuron(self.miners[index])

    def invite(self) -> str:
        """Register one more hotkey, and write the settings for a miner that the operator starts.

        Returns:
            The commands to type, for an operator who wants to practise with his own flags and pm2.
        """
        (page,) = free_ports(1)
        guest = self._new_miner("guest", len(self.neurons), 1)
        # The subnet's own page shows only the miners that the subnet runs, not this one.
        own = {"neuron.run_folder": str(guest.folder / "run"), "neuron.page_port": str(page)}
        join(guest.folder, self.network, [*guest.flags, *to_words(own)], guest.environment)
        typed = shlex.quote(str(guest.folder))
        return (
            f"one more miner can join; its .env and miner.toml are in {guest.folder}\n"
            f"  cd {typed} && {sys.executable} -m distributed_training.miner\n"
            f"its dashboard is then at http://127.0.0.1:{page}/"
        )

    def poll(self) -> None:
        """Read new events, and start a miner whose turn has come.

        Raises:
            SubnetFailure: If a program ended without having been stopped.
        """
        # Start the next miner only when its imports do not delay those of another: on two cores,
        # two miners that import at once take twice as long to their first inner step.
        starting = [m for m in self.miners if m.running and not m.state.losses]
        waiting = [m for m in self.miners if m.pid is None]
        its_turn = len(starting) < max(1, usable_cores() - 1) or time.monotonic() > self._next_turn
        if waiting and its_turn and not self._stopped:
            self._next_turn = time.monotonic() + _TURN * self.options.slowness
            self._start_neuron(waiting[0])  # the miner itself waits for a model to train
        for neuron in self.neurons:
            self._read_events(neuron)
            if not neuron.problem:
                continue
            # Do what pm2 does: restart a miner unless its exit status says that it would not help.
            again = neuron.uid and neuron.exit_status not in FINAL
            if not again or not self.options.restart_miners:
                raise SubnetFailure(neuron.problem)
            self._start_neuron(neuron)
        if self.store.problem:  # fail now rather than at the deadline
            raise SubnetFailure(self.store.problem)

    def wait_until(
        self, condition: Callable[[], bool], deadline: timedelta, what: str = "the condition"
    ) -> None:
        """Follow the subnet until a condition is true.

        Args:
            condition: Called ten times per second.
            deadline: The longest wait.
            what: Name of the condition for the failure's text.

        Raises:
            SubnetFailure: If ``deadline`` has passed, or for the reasons that :meth:`poll` lists.
        """
        if not self._follow(condition, deadline):
            raise SubnetFailure(
                f"{what} did not come within {deadline.total_seconds():.0f} s; current state: "
                + "; ".join(
                    f"{n.name} {n.state.phase}, outer step {n.state.outer_step}, "
                    f"inner step {n.state.inner_step}"
                    for n in self.neurons
                )
            )

    def wait_for_outer_steps(self, count: int, deadline: timedelta) -> None:
        """Wait until the validator and every running miner have taken some outer steps.

        After the validator, this waits for a miner no longer than ``settle``; the summary then
        shows that the miner missed the step.

        Args:
            count: Number of outer steps since the start.
            deadline: The longest wait.

        Raises:
            SubnetFailure: For the same reasons as :meth:`wait_until`.
        """

        def reached() -> bool:
            published = [at for step, at in self.validator.state.outer_steps if step >= count]
            if not published:
                return False
            # A miner that was killed or is late must not hold up the others forever.
            settled = time.time() - published[0] > self._settle * self.options.slowness
            return settled or all(
                any(step >= count for step, _ in miner.state.outer_steps)
                for miner in self.miners
                if miner.running
            )

        self.wait_until(reached, deadline, f"outer step {count}")

    def wait_for_figures(self, deadline: timedelta) -> None:
        """Wait until an upload of every miner has been judged and scored.

        Scores come on the validator's schedule; if some are missing, the summary shows it.

        Args:
            deadline: The longest wait on a machine with two free cores. It is no failure if it
                passes.
        """
        state, uids = self.validator.state, {m.uid for m in self.miners}
        scored = lambda: uids <= state.scores.keys() & state.judged.keys()
        self._follow(scored, deadline * self.options.slowness)

    def summary(self, problems: Sequence[str] = ()) -> Summary:
        """Summarize the events so far, as in ``summary.json``.

        Args:
            problems: Lines to add to the problems that were found.
        """
        return summarize(
            wanted_outer_steps=self.options.outer_steps,
            started_at=self.started_at,
            seconds=time.time() - self.started_at,
            validator=self.validator.state,
            miners=[m.state for m in self.miners],
            world_sizes=[m.world_size for m in self.miners],
            problems=[*problems, *self.problems],
        )

    # --- inside ---------------------------------------------------------------------------------

    def _follow(self, condition: Callable[[], bool], longest: timedelta) -> bool:
        """Poll until ``condition()`` is true; return False if that takes too long."""
        end = time.monotonic() + longest.total_seconds()
        while True:
            self.poll()
            self._refresh(self)
            if condition():
                return True
            if time.monotonic() >= end:
                return False
            time.sleep(0.1)

    def _read_events(self, neuron: LocalNeuron) -> None:
        for event in neuron.state.poll():
            line = event_line(event, of_validator=neuron is self.validator)
            if line:
                self._tell(f"{neuron.name}: {line}")

    def _start_neuron(self, neuron: LocalNeuron) -> None:
        neuron.start()
        self._tell(f"{neuron.name} started (pid {neuron.pid}), log {neuron.log}")
        # Write the state for people and tests that inspect the subnet from outside.
        state = {
            "pid": os.getpid(),
            "store": self.store.endpoint,
            "chain": self.chain_endpoint,
            "neurons": [{"name": n.name, "uid": n.uid, "pid": n.pid} for n in self.neurons],
        }
        write_json(self.folder / STATE_FILE, state, durable=False)

    # --- the founder's folder, and the neurons' settings ------------------------------------------

    def open_bucket(
        self, neuron: LocalNeuron | None = None, *, write: bool = False
    ) -> S3ObjectStore:
        """Open a miner's bucket, or the global bucket, with the read keys. The caller closes it.

        ``write``: whether to open it with the write keys instead.
        """
        from distributed_training.store.s3 import S3ObjectStore

        bucket = miner_bucket(_BUCKET, neuron.uid) if neuron and neuron.uid else _BUCKET
        return S3ObjectStore.from_settings(self.store.settings(), bucket=bucket, write=write)

    def _write_network(self) -> None:
        """Write the founder's folder with everything that ``dt-network run`` needs.

        The rules come from ``networks/local.toml``. ``dt-network init`` is not used: it would load
        torch to examine the model, and draw pages, which takes six seconds. Raises ConfigError.
        """
        from distributed_training.chain.identity import create_wallet

        master = create_wallet(self.folder / "wallets", MASTER)
        text = signed(to_toml(self._rules(master.ss58)), master.hotkey)
        write_file(self.network, text)
        more = read_argv(self.options.validator_flags, schema("validator"))
        settings = self._settings() | {name: given.text for name, given in more.items()}
        flags = to_toml({"registry": _REGISTRY, "validator": settings})
        write_bytes(self.folder / RUN_FILE, flags.encode(), durable=False)

    def _rules(self, master: str) -> dict[str, Any]:
        """Return this subnet's rules. ``master``: the address of the founder's key."""
        options = self.options
        rules = of_exchange(built_in_rules(), options.exchange)
        rules.pop("run_id")  # it is derived from the file
        # Token 256 is the byte tokenizer's end of text.
        model = local_llama_config(sequence_length=1024) | {
            "eos_token_id": 256,
            "pad_token_id": 256,
        }
        # Take at most a third of the period; the subtraction keeps rounding from exceeding it.
        grace = min(_GRACE * options.slowness, options.seconds / 3 - 0.05)
        changed: dict[str, Any] = {
            "model.config": {key: value for key, value in model.items() if value is not None},
            "private": True,  # the store speaks plain HTTP, on this machine
            "chain.url": self.chain_endpoint,
            "chain.master_hotkey": master,
            "store.endpoint": self.store.endpoint,
            "round.period": f"{options.seconds:g}s",
            "round.grace": f"{grace:.1f}s",
            "round.least": options.least_miners or len(options.ranks),
        }
        if options.exchange == "hivemind":
            changed["round.average_after"] = f"{grace / 4:.1f}s"
        for key, value in {**changed, **options.rules}.items():
            table, _, name = key.rpartition(".")
            (rules.setdefault(table, {}) if table else rules)[name] = value
        return rules

    def _settings(self) -> dict[str, str]:
        """Return the settings that all neurons here share, by flag."""
        flags = {"neuron.device": "cpu", "neuron.page_port": "off", "neuron.stop_timeout": "30"}
        if self.options.exchange == "hivemind":
            flags |= {"dht.port": str(free_ports(1)[0]), "dht.ip": "127.0.0.1"}
        return flags

    def _list_neurons(self) -> list[LocalNeuron]:
        """Return the validator, which publishes the first model, and the miners that load it."""
        script = self.options.validator_script
        words = ["--validator-script", str(script)] if script else []
        environment = clean_environment() | self.store.keys
        place = self.folder / "validator"
        return [
            Founder(self.folder, environment, *words, folder=place),
            *(
                self._new_miner(f"miner-{uid}", uid, ranks)
                for uid, ranks in enumerate(self.options.ranks, start=1)
            ),
        ]

    def _new_miner(self, name: str, uid: int, ranks: int) -> LocalNeuron:
        folder, script = self.folder / name, self.options.miner_script
        settings = self._settings() | {
            "network": str(self.network),
            "neuron.local_batch_size_train": "2",
            "neuron.checkpoint_steps": "10",
            "neuron.name": name,
            "neuron.run_folder": str(folder),
            "wallet.path": str(self.folder / "wallets"),
            "wallet.name": name,
            "nproc_per_node": str(ranks),
        }
        flags = to_words(settings)
        program = [str(script)] if script else ["-m", "distributed_training.miner"]
        usual = "registry" if self.options.exchange == "store" else "own"
        own = self.options.rules.get("store.access", usual) == "own"  # each member has a bucket
        return LocalNeuron(
            name,
            [sys.executable, *program, *flags, *self.options.miner_flags],
            clean_environment() | (self.store.keys if own else {}),
            folder,
            state=NeuronState(folder, uid=uid),
            world_size=ranks,
            flags=flags,
        )


#: Flags for the registry. It gets all requests from one address.
_REGISTRY = {"admission": "open", "requests-per-address": "10000"}
