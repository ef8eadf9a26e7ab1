"""Run a whole subnet on this machine: object store, chain, validator and miners as real processes.

The orchestrator starts them, follows their events and ends them. It has no part in the protocol:
neurons talk through the object store, the chain, signed HTTP and the DHT, as between machines. The
run folder is locked while it is used, and emptied only if a local subnet wrote it. ``make run``
(``command.py``) and tests use it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import psutil

from distributed_training.common.control_groups import usable_cores
from distributed_training.common.files import write_json
from distributed_training.common.ports import free_ports
from distributed_training.common.processes import end_sessions, tree_of
from distributed_training.config.types import ConfigError
from distributed_training.localnet.pace import measure_slowness
from distributed_training.localnet.services import (
    Child,
    ChildFailure,
    NeuronPlan,
    Services,
    SubnetOptions,
    plan_neurons,
    stop_together,
)
from distributed_training.localnet.summary import Summary, event_line, summarize
from distributed_training.node.start import sole_user
from distributed_training.protocol.types import FINAL
from distributed_training.telemetry.neuron_state import NeuronState

STATE_FILE = "localnet.json"  # this file also tells that a folder is ours
LOCK_FILE = ".lock"
_START = timedelta(seconds=120)  # time for the validator to start and publish the first model
_TURN = 12.0  # seconds that a miner's first inner step may delay the next miner's start
_SETTLE = timedelta(seconds=5)  # time for a process to end after the one that started it
GUEST = "guest"  # folder of a miner that joins by hand


def take_folder(path: Path, stack: ExitStack) -> None:
    """Lock a run folder until ``stack`` closes, and empty it.

    Raises ConfigError; nothing has changed then.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Locked before a look at the contents: another subnet may be running there.
        other = "give --folder another folder"
        stack.enter_context(sole_user(path, LOCK_FILE, "local subnet", instead=other))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be used ({error.strerror}), so no subnet was started: give "
            "--folder a new or empty folder of yours"
        ) from None
    contents = [p for p in path.iterdir() if p.name != LOCK_FILE]
    if contents and not (path / STATE_FILE).exists():
        (path / LOCK_FILE).unlink()
        raise ConfigError(
            f"{path} holds files that no local subnet wrote, so it is not used: "
            "give --folder a new or empty folder"
        )
    for found in contents:
        # For a link, remove the link and not its target.
        if found.is_dir() and not found.is_symlink():
            shutil.rmtree(found)
        else:
            found.unlink()
    # Write this at once, so that the next start knows the folder as ours, whatever ends this
    # process.
    write_json(path / STATE_FILE, {}, durable=False)


class SubnetFailure(RuntimeError):
    """The subnet did not reach its goal.

    The text is for the operator: the missed goal, and the state of each neuron.

    Examples:
        >>> str(SubnetFailure("outer step 1 did not come within 180 s"))
        'outer step 1 did not come within 180 s'
    """


@dataclass
class LocalNeuron:
    """A neuron's plan, its process and its state by its events."""

    plan: NeuronPlan
    child: Child
    state: NeuronState


class LocalSubnet:
    """A network of real processes on this machine: object store, chain, validator and miners.

    Start it with :meth:`start` or as a context; end it with :meth:`stop`, which may be called at
    any time and more than once.

    Args:
        options: Number of miners, kind of exchange, folder, times.
        tell: Is called with one line of text for each thing that happens.
        refresh: Is called with this object, ten times a second while it waits, to redraw a view.
        stop_grace: Time for the miners' stop; the validator then has half as long. A process that
            does not end in it is killed and reported.
        settle: How long a miner may be behind the validator's published outer step before
            :meth:`wait_for_outer_steps` no longer waits for it.

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
        # what it was asked for
        self.options = options
        self.stop_grace = stop_grace
        self._settle = settle.total_seconds()
        self._tell = tell
        self._refresh = refresh
        # what there is
        self.neurons: list[LocalNeuron] = []
        self.services: Services | None = None
        self._locked = ExitStack()
        # how it went
        self.started_at = time.time()
        self.problems: list[str] = []
        self.strays: list[str] = []  # processes that outlived the one that should have ended them
        self._stopped = False
        self._next_turn = 0.0  # monotonic: when a miner starts though the one before has no step

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all processes and wait for the validator; the miners are not waited for.

        Raises:
            ConfigError: If the folder cannot be used. Nothing was started.
            SubnetFailure: If a service or the validator does not come up. All processes were ended.
        """
        with ExitStack() as undo:
            # Whatever fails below, Ctrl-C too: no process stays.
            undo.callback(self.stop, timedelta(seconds=5))
            take_folder(self.folder, self._locked)
            self.started_at = time.time()
            if self.options.period is None:
                slowness = measure_slowness(sum(self.options.ranks) + 1)
                self.options = replace(self.options, slowness=slowness)
                if slowness > 1:
                    self._tell(
                        f"this machine is {slowness:g} times as busy or slow as two free cores: "
                        f"from round to round it is {self.options.seconds / 60:.1f} minutes"
                    )
            plans = plan_neurons(self.options, self.folder)
            self.services = Services(folder=self.folder, options=self.options, plans=plans)
            self._write_state()
            try:
                self.services.start()
            except ChildFailure as failure:
                raise SubnetFailure(str(failure)) from failure
            self._tell(f"object store at {self.services.store.endpoint}")
            self._tell(f"chain at {self.services.chain_endpoint}")
            for plan in plans:
                plan.folder.mkdir(parents=True, exist_ok=True)
                child = Child(
                    name=plan.name,
                    command=[sys.executable, *self.services.arguments(plan)],
                    environment=self.services.environment(plan),
                    folder=plan.folder,
                )
                state = NeuronState(plan.folder, uid=plan.uid)
                self.neurons.append(LocalNeuron(plan, child, state))
            # First, and waited for: miners have nothing to load before its first model is there.
            self._start_neuron(self.validator)
            validator = self.validator.state
            longest = _START * self.options.slowness
            self.wait_until(lambda: validator.starts > 0, longest, "the validator's start")
            undo.pop_all()

    def stop(self, grace: timedelta | None = None) -> list[str]:
        """End miners, validator, chain and store, in this order, and their remaining processes.

        Called again it does nothing.

        Args:
            grace: Time for the miners' stop, in place of ``stop_grace``.

        Returns:
            One line for each thing that went wrong.
        """
        if self._stopped:
            return []
        self._stopped = True
        grace = grace if grace is not None else self.stop_grace
        # Sessions of all, in which also those are found whose parents will be gone.
        leaders = set[int]()
        for process in self.processes():
            with suppress(OSError):  # it has ended meanwhile
                leaders.add(os.getsid(process.pid))
        # Miners first: while they stop they still upload, and call store, chain and validator.
        problems = stop_together([n.child for n in self.neurons if n.plan.kind == "miner"], grace)
        problems += stop_together([n.child for n in self.neurons], grace / 2)
        for neuron in self.neurons:
            # Once more: its last events belong in the summary.
            self._read_events(neuron)
            neuron.state.close()
            status = neuron.child.exit_status
            if neuron.child.stopping and status is not None and status > 0:
                problems.append(f"{neuron.plan.name} ended with status {status} when stopped")
        if self.services is not None:
            problems += self.services.stop()
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
        """Absolute path of the run folder."""
        return self.options.folder.absolute()

    @property
    def validator(self) -> LocalNeuron:
        """The one validator: plan, process and state."""
        return next(n for n in self.neurons if n.plan.kind == "validator")

    @property
    def miners(self) -> list[LocalNeuron]:
        """All miners, in the order of ``SubnetOptions.ranks``."""
        return [n for n in self.neurons if n.plan.kind == "miner"]

    def processes(self) -> list[psutil.Process]:
        """List all processes of this subnet that run now."""
        children = [neuron.child for neuron in self.neurons]
        children += self.services.children if self.services is not None else []
        pids = [child.pid for child in children if child.pid is not None and child.running]
        return [process for pid in pids for process in tree_of(pid)]

    def kill_miner(self, index: int) -> None:
        """Send SIGKILL to a miner's whole process tree, as a crash of its machine would.

        Args:
            index: The miner's place in ``SubnetOptions.ranks``.
        """
        self.miners[index].child.kill_tree()

    def restart_miner(self, index: int) -> None:
        """Start a miner that was killed or stopped again, in its own folder.

        Args:
            index: The miner's place in ``SubnetOptions.ranks``.
        """
        self._start_neuron(self.miners[index])

    def invite(self) -> str:
        """Register one more hotkey and write settings with which a miner joins from outside.

        Returns:
            The commands to type, for an operator who rehearses with flags and pm2 of his own.
        """
        assert self.services is not None
        dht, page = free_ports(2)
        folder = self.folder / GUEST
        guest = NeuronPlan(GUEST, "miner", len(self.neurons), 1, folder, dht)
        # The subnet's own page shows the miners that it runs, and not this one.
        run = {"neuron.run_folder": str(folder / "run"), "neuron.page_port": str(page)}
        self.services.join(guest, **run)
        typed = shlex.quote(str(folder))
        return (
            f"one more miner can join; its .env and miner.toml are in {folder}\n"
            f"  cd {typed} && {sys.executable} -m distributed_training.miner\n"
            f"or, in the folder of app.config.js:\n"
            f"  DT_NAME={folder.name} DT_HOME={typed} pm2 start app.config.js\n"
            f"its dashboard is then at http://127.0.0.1:{page}/\n"
            f"dt-doctor and scripts/score.py work there too"
        )

    def poll(self) -> None:
        """Read new events, and start a miner whose turn has come.

        Raises:
            SubnetFailure: If a neuron or a service ended that nobody had stopped.
        """
        # The next miner that never ran, if its imports would not delay another's: on two cores the
        # imports of two miners at once double the time to the first inner step.
        starting = [m for m in self.miners if m.child.running and not m.state.losses]
        waiting = [m for m in self.miners if m.child.pid is None]
        its_turn = len(starting) < max(1, usable_cores() - 1) or time.monotonic() > self._next_turn
        if waiting and its_turn and not self._stopped:
            self._next_turn = time.monotonic() + _TURN * self.options.slowness
            self._start_neuron(waiting[0])  # waits by itself for a model to train
        for neuron in self.neurons:
            self._read_events(neuron)
            child = neuron.child
            # Leave out children that a test stopped or killed, and those whose turn has not come.
            if child.running or child.exit_status is None or child.stopping:
                continue
            # Do as pm2 does, which starts a miner again unless its status says that this would not
            # help.
            again = neuron.plan.kind == "miner" and child.exit_status not in FINAL
            if not again or not self.options.restart_miners:
                raise SubnetFailure(child.obituary)
            self._start_neuron(neuron)
        for service in self.services.children if self.services is not None else ():
            # Fail at once, not at the deadline, since nothing works without store or chain.
            if not service.running and not service.stopping:
                raise SubnetFailure(service.obituary)

    def wait_until(
        self, condition: Callable[[], bool], deadline: timedelta, what: str = "the condition"
    ) -> None:
        """Follow the subnet until a condition holds.

        Args:
            condition: Is called ten times a second.
            deadline: The longest wait.
            what: Names the condition in the failure's text.

        Raises:
            SubnetFailure: When ``deadline`` has passed, or as :meth:`poll`.
        """
        if not self._follow(condition, deadline):
            raise SubnetFailure(
                f"{what} did not come within {deadline.total_seconds():.0f} s; it stands at: "
                + "; ".join(
                    f"{n.plan.name} {n.state.phase}, outer step {n.state.outer_step}, "
                    f"inner step {n.state.inner_step}"
                    for n in self.neurons
                )
            )

    def wait_for_outer_steps(self, count: int, deadline: timedelta) -> None:
        """Wait until the validator and every running miner have taken some outer steps.

        A miner that is not there ``settle`` after the validator is not waited for: the summary
        shows that it missed the step.

        Args:
            count: Outer steps since the start.
            deadline: The longest wait.

        Raises:
            SubnetFailure: As :meth:`wait_until`.
        """

        def reached() -> bool:
            published = [at for step, at in self.validator.state.outer_steps if step >= count]
            if not published:
                return False
            # A miner that was killed or is late must not hold up the others for ever.
            settled = time.time() - published[0] > self._settle * self.options.slowness
            return settled or all(
                any(step >= count for step, _ in miner.state.outer_steps)
                for miner in self.miners
                if miner.child.running
            )

        self.wait_until(reached, deadline, f"outer step {count}")

    def wait_for_figures(self, deadline: timedelta) -> None:
        """Wait until an upload of every miner was judged and scored.

        Scores come on the validator's schedule; a summary without them shows that.

        Args:
            deadline: The longest wait, on a machine with two free cores; no failure when it has
                passed.
        """
        state, uids = self.validator.state, {m.plan.uid for m in self.miners}
        scored = lambda: uids <= state.scores.keys() & state.judged.keys()
        self._follow(scored, deadline * self.options.slowness)

    def summary(self, problems: Sequence[str] = ()) -> Summary:
        """Return the content of ``summary.json`` from the events so far.

        Args:
            problems: Lines to add to the problems that were found.
        """
        return summarize(
            wanted_outer_steps=self.options.outer_steps,
            started_at=self.started_at,
            seconds=time.time() - self.started_at,
            validator=self.validator.state,
            miners=[m.state for m in self.miners],
            world_sizes=[m.plan.world_size for m in self.miners],
            problems=[*problems, *self.problems],
        )

    # --- inside ---------------------------------------------------------------------------------

    def _follow(self, condition: Callable[[], bool], longest: timedelta) -> bool:
        """Poll until ``condition()``; return False if it does not come in time."""
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
            line = event_line(event, of_validator=neuron.plan.kind == "validator")
            if line:
                self._tell(f"{neuron.plan.name}: {line}")

    def _start_neuron(self, neuron: LocalNeuron) -> None:
        child = neuron.child
        child.start()
        self._tell(f"{neuron.plan.name} started (pid {child.pid}), log {child.log}")
        self._write_state()

    def _write_state(self) -> None:
        """Write the state for people and tests that look from outside."""
        assert self.services is not None
        state = {
            "pid": os.getpid(),
            "store": self.services.store.endpoint,
            "chain": self.services.chain_endpoint,
            "neurons": [
                {"name": n.plan.name, "uid": n.plan.uid, "pid": n.child.pid} for n in self.neurons
            ],
        }
        write_json(self.folder / STATE_FILE, state, durable=False)
