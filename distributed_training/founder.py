"""Start the programs that a network needs on its founder's machine, and keep them running.

    dt-network run FOLDER           registry and validator
    dt-network run FOLDER --print   the commands that it runs, to run them on separate machines

The arguments of each program follow from the network's file in FOLDER. ``run.toml`` next to it adds
flags for each program. Each line that a program prints is shown after the program's name. A program
that ends is started again. If the registry ends with a status that a restart cannot fix (2, 3),
everything is stopped. The end of the validator never stops the registry, because members can
continue to train without it; it is started again after growing pauses.
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
from distributed_training.registry.command import parse_serve, require_store

if TYPE_CHECKING:
    from distributed_training.node.start import StopSignals

MASTER = "master"  # name of the master's wallet
RUN_FILE = "run.toml"
INVITATION = "invitation.txt"  # file with the invitation to the current version
REGISTRY_PORT = 8100  # port of the registry behind a proxy
PIDS = "programs.json"  # file with the processes of the current run, or of the last one
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
_READY = timedelta(minutes=3)  # longest time until the registry is ready, on a busy machine
_SERVICES_STOP = timedelta(seconds=20)
# At a stop, the validator has this time to publish. pm2 waits 600 s for all programs together.
_VALIDATOR_STOPS = timedelta(seconds=540)
# Pauses before the validator is started again after a final exit status.
_FIRST_PAUSE, _LONGEST_PAUSE = timedelta(minutes=1), timedelta(hours=1)


@dataclass(frozen=True)
class FounderPlan:
    """Describe a network's programs in starting order. ``words``: the arguments of each."""

    folder: Path
    file: Path
    words: Mapping[str, list[str]]
    places: Mapping[str, tuple[str, int]]  # program -> address and port on which it listens
    environ: Mapping[str, str]  # environment of the validator
    signs: frozenset[str] = frozenset()  # variables with the key that the registry signs URLs with

    @classmethod
    def of(cls, folder: Path, environ: Mapping[str, str] = os.environ) -> FounderPlan:
        """Read the network's file and ``run.toml``.

        Raises ConfigError, also if the store's folder is missing or is from the previous edition.
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
        # If the file names the same URL as registry and store, the registry serves a folder.
        url, served = config.chain.registry_url, folder / STORE
        own = url is not None and url == config.store.endpoint_url
        if own or served.exists():
            require_store(served)
        store = served if own else None
        if url is not None:
            words[_REGISTRY] = [*given, "--folder", str(folder / _REGISTRY)]
            # Without a proxy in front of it, members connect to the registry directly.
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
                    f"{folder / RUN_FILE} has flags for {program}, which this network does not "
                    "need, so nothing was started: remove them"
                )
            words[program] += flags
        places = {}
        if _REGISTRY in words:
            serve = parse_serve(words[_REGISTRY])  # for a bad flag, prints a line and exits with 2
            places[_REGISTRY] = serve.host, serve.port
        signs = frozenset(() if config.has_bucket or store else config.key_variables)
        return cls(folder, file, words, places, environ, signs)

    def line(self, program: str) -> str:
        """Return the command that starts a program, quoted for a shell."""
        return f"{_PROGRAMS[program][0]} {shlex.join(self.words[program])}"

    @property
    def invite(self) -> list[str]:
        """The arguments of ``dt-network`` that make invitations on this machine."""
        host, port = self.places[_REGISTRY]
        url = f"http://{_bracketed('127.0.0.1' if host == '0.0.0.0' else host)}:{port}"
        wallet = ["--wallet.path", str(self.folder / "wallets"), "--wallet.name", MASTER]
        return ["invite", "--network", str(self.file), "--url", url, "--uses", "5", *wallet]


def read_more(path: Path) -> dict[str, list[str]]:
    """Return the flags in ``run.toml`` by program, if the file exists. Raises ConfigError."""
    if not path.exists():
        return {}
    try:
        tables = parse_toml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}), so nothing was started: fix that file"
        ) from None
    found = {}
    for program, table in tables.items():
        if program not in _PROGRAMS or not isinstance(table, dict):
            raise ConfigError(
                f"{path}: {program!r} is not a table of it, so nothing was started: write the "
                f"flags below [{'], ['.join(_PROGRAMS)}]"
            )
        found[program] = [
            word
            for flag, value in flatten(table).items()  # "a.b" = 1 and a.b = 1 name the same flag
            for each in (value if isinstance(value, list) else [value])
            for word in (f"--{flag}", str(each))
        ]
    return found


def _place(url: str) -> tuple[str, int]:
    """Return the address and port to listen on for ``url``; loopback for a URL of a proxy."""
    parts = urlsplit(url)
    if parts.scheme != "http":
        return "127.0.0.1", REGISTRY_PORT
    host = parts.hostname or ""
    with suppress(ValueError):
        return str(ipaddress.ip_address(host)), parts.port or 80
    return "0.0.0.0", parts.port or 80  # the machine's own host name may resolve to loopback


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


# --- checks before a start ------------------------------------------------------------------------


def check(plan: FounderPlan) -> Config:
    """Return the validator's configuration.

    Raises ConfigError if something is missing: a file, a key or a free port.
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
            f"the wallet in {plan.folder / 'wallets'} is {hotkey}, but {plan.file} names {master} "
            "as the master, so nothing was started: put the master's wallet there"
        )
    places = dict(plan.places)
    if config.averages:
        places["swarm"] = config.swarm.dht_listen_ip, config.swarm.dht_port
    for program, (host, port) in places.items():
        try:
            listen(host, port).close()
        except OSError as error:
            # An address may appear late after a boot, so pm2 and systemd should try again.
            late = error.errno == errno.EADDRNOTAVAIL
            place = f"set another one for the {program} in {plan.folder / RUN_FILE}"
            raise (ConfigAway if late else ConfigError)(
                f"the {program} cannot listen on {_bracketed(host)}:{port} ({error.strerror}), so "
                f"nothing was started: end the program that uses the port, or {place}"
            ) from None
    return config


# --- the run --------------------------------------------------------------------------------------


def say(text: str, program: str = "network") -> None:
    with suppress(OSError):  # if nobody reads the output any more, that must not end a child
        print(f"{program:9} | {text}", flush=True)


@dataclass(frozen=True)
class _Processes:
    processes: list[ProcessId]


@dataclass
class Running:
    """Start, watch and end the programs of one run. ``signals`` ask all of them to stop."""

    plan: FounderPlan
    signals: StopSignals
    validators_stop: timedelta = _VALIDATOR_STOPS
    programs: dict[str, Program] = field(default_factory=dict)
    once: tuple[str, ...] = ()  # additional arguments for the validator's first start
    script: Path | None = None  # another program to run as the validator

    def start(self, name: str) -> bool:
        """Start a program. Wait until the registry answers, and return False if it does not."""
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
        """Record the running processes: if this one is killed, the next start waits for them."""
        pids = {each.pid for each in (*self.programs.values(), program)}
        processes = _Processes([ProcessId.of(pid) for pid in pids])
        lost = "after a kill, a start will not wait for the processes left"
        write_state(self.plan.folder / PIDS, processes, lost=lost)

    def follow(self) -> int:
        """Wait for the stop; return the exit status.

        If the validator ends with a final status, because another one leads or because of a
        setting, it is started again after a pause. Meanwhile the registry keeps running, since
        members need it.
        """
        pauses, again = Backoff(first=_FIRST_PAUSE, longest=_LONGEST_PAUSE), 0.0
        while not self.signals.stop.wait(0.2):
            for name, program in self.programs.items():
                if (status := program.refused) is None:
                    continue
                if name != _VALIDATOR:
                    say(f"the {name} ended with status {status}, which a restart cannot fix")
                    return status
                now = time.monotonic()
                if not again:
                    pause = pauses.failed().total_seconds()
                    again = now + pause
                    say(
                        f"the validator ended with status {status}, for the reason above, so no "
                        "outer step is taken; everything else keeps running. It is started again "
                        f"in {pause:.0f} s; to start it now, stop and restart this program"
                    )
                elif now >= again:
                    # Starting may fail for lack of memory: then try again at the next check.
                    with suppress(OSError):
                        again = 0.0
                        self.start(name)
                        break
        return ExitStatus.STOPPED

    def end(self) -> None:
        """End the validator, then the registry, then any processes that they have left.

        A second Ctrl-C immediately kills the programs that have not ended yet.
        """
        for name, program in reversed(self.programs.items()):
            limit = self.validators_stop if name == _VALIDATOR else _SERVICES_STOP
            if name == _VALIDATOR:
                say(f"stopping: the validator first, within {limit.total_seconds():.0f} s at most")
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

    ``take_over``: let the validator lead at once, even if another one is leading. ``script``: run
    this program as the validator. Call this in the main thread. Raises ConfigError before anything
    is started.
    """
    from distributed_training.node.start import StopSignals, sole_user

    plan = FounderPlan.of(folder)
    with ExitStack() as stack:
        signals = stack.enter_context(StopSignals())
        lock = sole_user(plan.folder, "run.lock", "dt-network run", instead="wait for it")
        stack.enter_context(lock)
        running = Running(plan, signals)
        # Processes of a killed run may still be ending, and hold their ports until then.
        before = read_state(plan.folder / PIDS, _Processes, lost="they will not be waited for")
        left = sessions_of(before.processes if before else ())
        end_sessions(left, settle=timedelta(seconds=90), grace=timedelta(seconds=5))
        stack.callback(running.end)
        config = check(plan)
        # Take over at the first start only, because two validators that take over at every start
        # would keep ending each other.
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
            say(f"the {name} did not answer in {_READY.total_seconds():.0f} s, so everything stops")
            return ExitStatus.FAULT
        # The validator is still loading at this point.
        if _REGISTRY in plan.words:
            _invite(plan, config.network)
        return running.follow()


def _invite(plan: FounderPlan, network: Network) -> None:
    """Make an invitation for the founder to send, unless there is one to a version of this file.

    It replaces an invitation to another file, which admits nobody any more. An invitation is never
    logged, because it is a secret.
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
        say(f"could not make an invitation ({done.stderr.strip()[-300:]}): the next start will try")
        return
    with atomic_file(path, private=True) as file:
        file.write(done.stdout.encode())
    say(f"the invitation for new members is in {path}; keep it secret")
    if sys.stdout.isatty():
        print(done.stdout, flush=True)
