"""Start the programs that a network needs on its founder's machine, and keep them running.

    dt-network run FOLDER           registry and validator
    dt-network run FOLDER --print   the commands that it starts, for a machine of their own each

What each is started with follows from the network's file in FOLDER. ``run.toml`` next to it adds
flags, by program. The children's lines are printed after the program's name. One that ends is
started again. A registry that ends with a status that no start helps (2, 3) ends all. The
validator never does: without it members train on, and it is tried again after growing pauses.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from distributed_training.common.backoff import Backoff
from distributed_training.common.files import atomic_file, parse_toml, read_state, write_state
from distributed_training.common.ports import listen
from distributed_training.common.processes import (
    ChildLog,
    ProcessId,
    Program,
    end_sessions,
    sessions_of,
    without_secrets,
)
from distributed_training.config import Config, load_config, rules_at
from distributed_training.config.installed import require
from distributed_training.config.types import ConfigAway, ConfigError
from distributed_training.network import (
    FILE,
    VERSIONS,
    Network,
    NetworkFileError,
    digest_of,
    flatten,
    read_text,
    tree_of,
)
from distributed_training.protocol.types import FINAL, ExitStatus
from distributed_training.registry.command import parse_serve, refuse_old_store

if TYPE_CHECKING:
    from distributed_training.node.start import StopSignals

MASTER = "master"  # name of the master's wallet
RUN_FILE = "run.toml"
INVITATION = "invitation.txt"  # file of the invitation to the present version
REGISTRY_PORT = 8100  # port behind a proxy, or if no other is named
PIDS = "programs.json"  # file with the programs that run, or ran last
STORE = "store"  # folder that the registry serves if --store is embedded
_REGISTRY, _VALIDATOR = "registry", "validator"
_PROGRAMS = {
    _REGISTRY: ("dt-network serve", "distributed_training.network_command serve"),
    _VALIDATOR: ("dt-validator", "distributed_training.validator"),
}
_EFFECT = {
    _REGISTRY: "nobody can join until then; miners continue with the state they know",
    _VALIDATOR: "no outer step is taken until then",
}
_READY = timedelta(minutes=3)  # time until the registry is ready on a busy machine
_SERVICES_STOP = timedelta(seconds=20)
# Time for the validator to publish. pm2 and others wait 600 s for all programs.
_VALIDATOR_STOPS = timedelta(seconds=540)
# Pause after a final exit status.
_FIRST_PAUSE, _LONGEST_PAUSE = timedelta(minutes=1), timedelta(hours=1)


@dataclass(frozen=True)
class FounderPlan:
    """A network's programs in the order of their start. ``words``: each one's arguments."""

    folder: Path
    file: Path
    words: Mapping[str, list[str]]
    places: Mapping[str, tuple[str, int]]  # program -> address and port on which it listens
    environ: Mapping[str, str]  # environment of the validator
    signs: frozenset[str] = frozenset()  # variables of the key by which the registry signs URLs

    @classmethod
    def of(cls, folder: Path, environ: Mapping[str, str] = os.environ) -> FounderPlan:
        """Read the network's file and ``run.toml``.

        Raises ConfigError, also for a store's folder of the edition before or one that is missing.
        """
        file = folder / FILE
        if not file.is_file():
            raise ConfigError(
                f"there is no {FILE} in {folder}, so nothing was started: give the folder of a "
                f"network, or create one with dt-network init {folder}"
            )
        more = read_more(folder / RUN_FILE)
        given = ["--network", str(file)]
        config = rules_at(file, "validator")
        words: dict[str, list[str]] = {}
        # The registry serves the folder if the file names the registry as the store too.
        url, served = config.chain.registry_url, folder / STORE
        own = url is not None and url == config.store.endpoint_url
        if own or served.exists():
            refuse_old_store(served)
        store = served if own else None
        if url is not None:
            words[_REGISTRY] = [*given, "--folder", str(folder / _REGISTRY)]
            # If no proxy is in front, members reach the registry itself.
            place = _place(url if config.chain.private else "")
            if urlsplit(url).scheme == "https":
                words[_REGISTRY] += ["--proxy", "127.0.0.1"]
            words[_REGISTRY] += ["--host", place[0], "--port", str(place[1])]
            if (host := urlsplit(url).hostname) and host != place[0]:
                words[_REGISTRY] += ["--host-name", host]
            if store is not None:
                words[_REGISTRY] += ["--store", str(store)]
        words[_VALIDATOR] = [
            *given,
            *("--neuron.run_folder", str(folder / _VALIDATOR)),
            *("--wallet.path", str(folder / "wallets"), "--wallet.name", MASTER),
            *("--neuron.name", _VALIDATOR),
        ]
        if store is not None:
            words[_VALIDATOR] += ["--r2.endpoint_url", f"folder://{quote(str(store.absolute()))}"]
        for program, flags in more.items():
            if program not in words:
                raise ConfigError(
                    f"{folder / RUN_FILE} has flags of {program}, which is not started for this "
                    "network, so nothing was: take them out"
                )
            words[program] += flags
        places = {}
        if _REGISTRY in words:
            serve = parse_serve(words[_REGISTRY])  # ends with status 2 and its line
            places[_REGISTRY] = serve.host, serve.port
        signs = frozenset(() if config.has_bucket or store else config.key_variables)
        return cls(folder, file, words, places, environ, signs)

    def line(self, program: str) -> str:
        """Return the command of a program, as a shell takes it."""
        return f"{_PROGRAMS[program][0]} {shlex.join(self.words[program])}"

    @property
    def invite(self) -> list[str]:
        """The words of ``dt-network invite`` on this machine."""
        host, port = self.places[_REGISTRY]
        url = f"http://{_bracketed('127.0.0.1' if host == '0.0.0.0' else host)}:{port}"
        wallet = ["--wallet.path", str(self.folder / "wallets"), "--wallet.name", MASTER]
        return ["invite", "--network", str(self.file), "--url", url, "--uses", "5", *wallet]


def read_more(path: Path) -> dict[str, list[str]]:
    """Return the flags of ``run.toml`` by program; none without it. Raises ConfigError."""
    if not path.exists():
        return {}
    try:
        tables = parse_toml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}), so nothing was started: correct it"
        ) from None
    found = {}
    for program, table in tables.items():
        if program not in _PROGRAMS or not isinstance(table, dict):
            raise ConfigError(
                f"{path}: {program!r} is no table of it, so nothing was started: write the flags "
                f"below [{'], ['.join(_PROGRAMS)}]"
            )
        found[program] = [
            word
            for flag, value in flatten(table).items()  # with or without quotation marks
            for each in (value if isinstance(value, list) else [value])
            for word in (f"--{flag}", str(each))
        ]
    return found


def _place(url: str) -> tuple[str, int]:
    """Return address and port at which to listen for ``url``; behind a proxy loopback's."""
    parts = urlsplit(url)
    if parts.scheme != "http":
        return "127.0.0.1", REGISTRY_PORT
    host = parts.hostname or ""
    with suppress(ValueError):
        return str(ipaddress.ip_address(host)), parts.port or 80
    return "0.0.0.0", parts.port or 80  # a name, which on its own machine may lead to loopback


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


# --- what may be missing --------------------------------------------------------------------------


def check(plan: FounderPlan) -> Config:
    """Return the validator's configuration.

    Raises ConfigError for what is missing: a file, a key, a port.
    """
    from distributed_training.chain.identity import load_wallet
    from distributed_training.health.machine import refuse_model, refuse_unknown_kinds

    require(validator="a validator")
    config = load_config("validator", plan.words[_VALIDATOR], environ=plan.environ)
    refuse_unknown_kinds(config)
    refuse_model(config, ranks=1)
    hotkey, master = load_wallet(config.chain).ss58, config.miner.master_ss58_address
    if hotkey != master:
        raise ConfigError(
            f"the wallet in {plan.folder / 'wallets'} is {hotkey} and {plan.file} names the master "
            f"{master}, so nothing was started: put that wallet there"
        )
    places = dict(plan.places)
    if config.averages:
        places["swarm"] = config.swarm.dht_listen_ip, config.swarm.dht_port
    for program, (host, port) in places.items():
        try:
            listen(host, port).close()
        except OSError as error:
            # An address may come late after a boot, so pm2 and systemd should try again.
            late = error.errno == errno.EADDRNOTAVAIL
            place = f"give the {program} another in {plan.folder / RUN_FILE}"
            raise (ConfigAway if late else ConfigError)(
                f"the {program} cannot listen on {_bracketed(host)}:{port} ({error.strerror}), so "
                f"nothing was started: stop what uses the port, or {place}"
            ) from None
    return config


# --- the run --------------------------------------------------------------------------------------


def say(text: str, program: str = "network") -> None:
    with suppress(OSError):  # that nobody reads the output any more must not end a child
        print(f"{program:9} | {text}", flush=True)


@dataclass(frozen=True)
class _Processes:
    processes: list[ProcessId]


@dataclass
class Running:
    """The programs of one run, and the ``signals`` by which all are asked to stop."""

    plan: FounderPlan
    signals: StopSignals
    validators_stop: timedelta = _VALIDATOR_STOPS
    programs: dict[str, Program] = field(default_factory=dict)
    once: tuple[str, ...] = ()  # words of the validator's first start only
    script: Path | None = None  # another validator's program

    def start(self, name: str) -> bool:
        """Start a program and, of a service, wait until it answers; False: it never will."""
        ready = threading.Event()

        def log_line(line: ChildLog) -> None:
            if line.text.startswith("READY "):
                ready.set()
            say(line.text, name)

        signs = self.plan.signs if name == _REGISTRY else ()
        own, once = without_secrets(os.environ, keep=signs), tuple[str, ...]()
        command = ["-m", *_PROGRAMS[name][1].split()]
        if name == _VALIDATOR:
            own = {**self.plan.environ}
            once, self.once = self.once, ()
            command = [str(self.script)] if self.script else command
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}
        program = Program(
            f"The {name}",
            [sys.executable, *command, *self.plan.words[name], *once],
            environment={**own, **path},
            effect=_EFFECT[name],
            begin=lambda: self._remember(program),
            log_line=log_line,
            final=FINAL,
        )
        program.start()
        self.programs[name] = program
        deadline = time.monotonic() + _READY.total_seconds()
        while name != _VALIDATOR and not ready.wait(0.1):
            if (
                self.signals.stop.is_set()
                or program.refused is not None
                or time.monotonic() > deadline
            ):
                return False
        return True

    def _remember(self, program: Program) -> None:
        """Write down which processes run, for the start after a kill of this one."""
        pids = {each.pid for each in (*self.programs.values(), program)}
        processes = _Processes([ProcessId.of(pid) for pid in pids])
        lost = "what is left of it after a kill is not waited for"
        write_state(self.plan.folder / PIDS, processes, lost=lost)

    def follow(self) -> int:
        """Wait for the stop; return the exit status.

        The validator may end for good, by another that leads or by a setting, and is started again
        after a pause. The registry stays, since members need it.
        """
        pauses, again = Backoff(first=_FIRST_PAUSE, longest=_LONGEST_PAUSE), 0.0
        while not self.signals.stop.wait(0.2):
            for name, program in self.programs.items():
                if (status := program.refused) is None:
                    continue
                if name != _VALIDATOR:
                    say(f"the {name} ended with status {status}, which no start helps")
                    return status
                now = time.monotonic()
                if not again:
                    pause = pauses.failed().total_seconds()
                    again = now + pause
                    say(
                        f"the validator ended with status {status}, for the reason above, so no "
                        "outer step is taken; everything else keeps running. It is started again "
                        f"in {pause:.0f} s; at once: end this program and start it again"
                    )
                elif now >= again:
                    # If no memory or process is left, try again at the next look.
                    with suppress(OSError):
                        again = 0.0
                        self.start(name)
                        break
        return ExitStatus.STOPPED

    def end(self) -> None:
        """End the validator, then what it needs, then whatever is left of them.

        A second Ctrl-C ends at once what does not end by itself.
        """
        for name, program in reversed(self.programs.items()):
            limit = self.validators_stop if name == _VALIDATOR else _SERVICES_STOP
            if name == _VALIDATOR:
                say(f"stopping: the validator first, in at most {limit.total_seconds():.0f} s")
            closing = threading.Thread(target=partial(program.close, timeout=limit), daemon=True)
            closing.start()
            while closing.is_alive():
                closing.join(0.2)
                if self.signals.hurry:
                    program.close(timeout=timedelta(0))
        pids = [program.pid for program in self.programs.values()]
        limit = timedelta(seconds=5)
        for left in end_sessions(pids, settle=limit, grace=limit):
            say(f"had to be ended: {left}")


def run(folder: Path, *, take_over: bool = False, script: Path | None = None) -> int:
    """Run the network of ``folder`` until SIGTERM or Ctrl-C; return the exit status.

    ``take_over``: its validator leads at once, although another may. ``script``: another
    validator's program. Call it in the main thread. Raises ConfigError before anything is started.
    """
    from distributed_training.node.start import StopSignals, sole_user

    plan = FounderPlan.of(folder)
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        lock = sole_user(plan.folder, "run.lock", "dt-network run", instead="wait for it")
        stack.enter_context(lock)
        running = Running(plan, signals)
        # Processes of a killed founder may still be ending, and hold their ports until then.
        before = read_state(plan.folder / PIDS, _Processes, lost="they are not waited for")
        left = sessions_of(before.processes if before else ())
        end_sessions(left, settle=timedelta(seconds=90), grace=timedelta(seconds=5))
        stack.callback(running.end)
        config = check(plan)
        # Only at the first start: two validators that always took over would end each other.
        running.once = ("--take-over",) if take_over else ()
        running.script = script
        running.validators_stop = max(config.miner.stop_timeout, _VALIDATOR_STOPS)
        for name in plan.words:
            if running.start(name):
                continue
            if signals.stop.is_set():
                return ExitStatus.STOPPED
            if (status := running.programs[name].refused) is not None:
                return status
            say(f"the {name} did not answer within {_READY.total_seconds():.0f} s, so all is ended")
            return ExitStatus.FAULT
        # The validator loads its programs meanwhile.
        if _REGISTRY in plan.words:
            _invite(plan, config.network)
        return running.follow()


def _invite(plan: FounderPlan, network: Network) -> None:
    """Make an invitation for the founder to send, unless there is one to a version of this file.

    It replaces an invitation that belongs to another file, since that one no longer admits anybody.
    It is a secret: no log gets it.
    """
    path, before = plan.folder / INVITATION, ""
    versions = {f"#{network.digest}."}
    for each in plan.folder.glob(f"{VERSIONS}/*.toml"):
        with suppress(NetworkFileError):
            versions.add(f"#{digest_of(flatten(tree_of(read_text(each))))}.")
    with suppress(OSError):
        before = path.read_text()
    place = f"{str(network.values.get('chain.url')).rstrip('/')}/{FILE}"
    if any(f"{place}{digest}" in before for digest in versions):
        return

    def registry(*words: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-m", "distributed_training.network_command"]
        command = [*program, *plan.invite, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = registry()
    if not done.returncode and (old := re.match(r"invitation (\w+),", before)):
        registry("--revoke", old[1])  # fails if the invitation was used up
    if done.returncode:
        say(f"no invitation could be made ({done.stderr.strip()[-300:]}): the next start tries")
        return
    with atomic_file(path, private=True) as file:
        file.write(done.stdout.encode())
    say(f"the invitation for those who join is in {path}; it is a secret")
    if sys.stdout.isatty():
        print(done.stdout, flush=True)
