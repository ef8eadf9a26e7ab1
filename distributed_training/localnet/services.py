"""The options of a local subnet, its child processes, and its S3 server.

The children of a subnet are started, watched and stopped in time, and they leave nothing behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from distributed_training.common.files import atomic_file, write_bytes
from distributed_training.common.kinds import plugin_environment
from distributed_training.common.ports import free_ports
from distributed_training.common.processes import kill_tree, with_starter
from distributed_training.config.installed import install
from distributed_training.config.settings import Exchange, StoreSettings
from distributed_training.config.types import ConfigError, parse_duration
from distributed_training.network import built_in_rules
from distributed_training.protocol.lines import counted

# The operator's own keys and settings must not reach a subnet that is only for experiments.
FOREIGN_PREFIXES = ("R2_", "BT_", "DT_", "WANDB_", "LOKI_", "AWS_", "HF_", "INFLUXDB_")
_MOST_RANKS = 10


@dataclass(frozen=True)
class SubnetOptions:
    """Options of a run of the local subnet.

    Args:
        folder: Where everything is written: a folder that is new, empty, or from an earlier local
            subnet.
        ranks: World size of each miner, in order.
        exchange: ``hivemind`` or ``store``.
        outer_steps: Outer steps that the run should take; fewer are a problem in the summary.
        period: Seconds from one close to the next. None: the period in ``networks/local.toml``,
            multiplied by ``slowness``.
        slowness: How many times slower this machine is than two free cores; timeouts are
            multiplied by it. It is measured at the start if there is no ``period``.
        least_miners: Fewest uploads in an outer step. None: one from each miner, so that a slow
            start leaves no miner out. Set a lower number in order to kill miners.
        restart_miners: Whether to restart a miner that ended with a fault, as pm2 would.
        miner_flags: Additional flags for every miner.
        validator_flags: Additional flags for the validator.
        rules: Keys of the network's file, such as ``training.sequence_length``, and their values.
        miner_script: Program of the miners; None: this package's.
        validator_script: Program of the validator; None: this package's.

    Examples:
        >>> options = SubnetOptions(Path("runs/trial"), period=60, outer_steps=2)
        >>> options.longest
        datetime.timedelta(seconds=300)
    """

    folder: Path
    ranks: tuple[int, ...] = (2, 1)
    exchange: Exchange = "store"
    outer_steps: int = 2
    period: float | None = None
    slowness: float = 1.0
    least_miners: int | None = None
    restart_miners: bool = False
    miner_flags: tuple[str, ...] = ()
    validator_flags: tuple[str, ...] = ()
    rules: Mapping[str, Any] = field(default_factory=dict)
    miner_script: Path | None = None
    validator_script: Path | None = None

    @property
    def longest(self) -> timedelta:
        """The time limit of a run: two minutes plus one and a half times its round periods."""
        periods = self.outer_steps * self.seconds
        return timedelta(seconds=120 * self.slowness + 1.5 * periods)

    @property
    def seconds(self) -> float:
        """The seconds from one close to the next."""
        usual = parse_duration(built_in_rules("local")["round"]["period"]).total_seconds()
        return self.period or usual * self.slowness


def parse_ranks(text: str | None, miners: int | None) -> tuple[int, ...]:
    """Return the miners' world sizes, parsed from ``--ranks 2,1`` and ``--miners N``.

    Without ``--ranks``, the first miner has 2 ranks and the others have 1, so that world sizes
    differ; a list that is too short is filled up with 1. Raises ConfigError.
    """
    given = [int(word) if word.isdecimal() else 0 for word in text.split(",")] if text else [2]
    count = miners or (len(given) if text else 2)
    if (text and len(given) > count) or not all(1 <= ranks <= _MOST_RANKS for ranks in given):
        raise ConfigError(
            f"--ranks {text!r} does not give each of {counted(count, 'miner')} 1 to {_MOST_RANKS} "
            "ranks, so nothing was started: correct it or --miners, e.g. --miners 2 --ranks 2,1"
        )
    return tuple((given + [1] * count)[:count])


# --- children -----------------------------------------------------------------------------------


class ChildFailure(RuntimeError):
    """A program failed, or a member could not join. The text is for the operator."""


@dataclass(eq=False)
class Child:
    """A long-running command, whose output goes to ``log.txt`` in its folder.

    It gets its own session, so Ctrl-C at the terminal reaches only the orchestrator, which stops
    its children in order. If the orchestrator itself is killed, the kernel sends the child SIGTERM.
    """

    name: str
    command: list[str]
    environment: dict[str, str]
    folder: Path
    stopping: bool = field(default=False, init=False)
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    def start(self) -> None:
        """Start the command, appending to the log so that a neuron's restarts are in one file."""
        if self.running:
            raise RuntimeError(f"{self.name} is already running")
        self.stopping = False
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*with_starter(), *self.command],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def exit_status(self) -> int | None:
        """The exit status; None while it runs or before its start; -N if signal N ended it."""
        return self._process.poll() if self._process else None

    @property
    def problem(self) -> str:
        """A description of how it ended on its own, with the end of its log; "" if it did not."""
        status = self.exit_status
        if status is None or self.stopping:
            return ""
        return self._describe(
            f"ended with {f'signal {-status}' if status < 0 else f'status {status}'}"
        )

    def _describe(self, what: str) -> str:
        lines = "\n".join(f"    {line}" for line in self.last_lines())
        return f"{self.name} {what}; its log {self.log} ends:\n{lines}"

    def wait_ready(self) -> None:
        """Wait until the child is ready. Raises ChildFailure if it ends or is too late."""
        deadline = time.monotonic() + _STARTS
        while not self.is_ready():
            late = time.monotonic() > deadline
            # Describe the problem before the kill, since a child that is being stopped has none.
            if problem := self._describe("does not answer") if late else self.problem:
                self.kill_tree()
                raise ChildFailure(problem)
            time.sleep(0.05)

    def is_ready(self) -> bool:
        """Return whether it is ready, for :meth:`wait_ready`."""
        return self.running

    def signal(self, number: signal.Signals) -> None:
        """Signal the command itself, which must pass the signal on to its descendants."""
        # From now on, its end is not a failure.
        if number in (signal.SIGTERM, signal.SIGINT):
            self.stopping = True
        if self._process is not None and self.running:
            self._process.send_signal(number)

    def kill_tree(self) -> None:
        """Send SIGKILL to the command and all its current descendants."""
        self.stopping = True
        if self._process is not None and self.running:
            kill_tree(self._process.pid)
            # Limit the wait: if a process hangs in a system call, the others must still be stopped.
            self.wait(timedelta(seconds=10))

    def wait(self, timeout: timedelta) -> int | None:
        """Return the exit status, or None if it still runs after ``timeout``."""
        if self._process is None:
            return None
        try:
            return self._process.wait(timeout=timeout.total_seconds())
        except subprocess.TimeoutExpired:
            return None

    def last_lines(self) -> list[str]:
        """Return the last lines of the log, at most 12."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return [line for line in text.splitlines() if line.strip()][-12:]


def stop_together(children: Sequence[Child], grace: timedelta) -> list[str]:
    """Send SIGTERM to ``children``, and after ``grace`` SIGKILL to those that still run.

    Returns one line for each child that had to be killed.
    """
    running = [child for child in children if child.running]
    for child in running:
        child.signal(signal.SIGTERM)
    # Use one deadline for all, since they stop at the same time.
    deadline = time.monotonic() + grace.total_seconds()
    defects = []
    for child in running:
        if child.wait(timedelta(seconds=max(0.0, deadline - time.monotonic()))) is None:
            child.kill_tree()
            defects.append(f"{child.name} did not stop within {grace.total_seconds():.0f} s")
    return defects


class ObjectStoreServer(Child):
    """SeaweedFS as a child; its objects are in ``folder`` and survive a restart.

    As a context manager, the store runs inside the block and is stopped when the block ends.
    """

    def __init__(self, folder: Path) -> None:
        parts = [f"{part}.port{rpc}" for part in _WEED for rpc in ("", ".grpc")]
        ports = dict(zip(parts, free_ports(len(parts)), strict=True))
        self._master = ports["master.port"]
        self.endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        #: The R2 variables with which a neuron reaches its bucket; all neurons use one account.
        #: The lengths are those of R2 (32, 32, 64 characters): a commitment on a public chain
        #: allows no others.
        self.keys = {"R2_ENDPOINT_URL": self.endpoint, "R2_ACCOUNT_ID": secrets.token_hex(16)}
        self._identities: list[dict[str, Any]] = []
        for kind, actions in (("READ", ["Read", "List"]), ("WRITE", ["Admin"])):
            key = {"accessKey": secrets.token_hex(16), "secretKey": secrets.token_hex(32)}
            self.keys[f"R2_{kind}_ACCESS_KEY_ID"] = key["accessKey"]
            self.keys[f"R2_{kind}_SECRET_ACCESS_KEY"] = key["secretKey"]
            identity = {"name": kind, "credentials": [key], "actions": actions}
            self._identities.append(identity)
        flags = {
            **ports,
            **{"dir": folder.absolute(), "ip": "127.0.0.1", "ip.bind": "127.0.0.1"},
            **{"filer": "true", "s3": "true", "s3.config": _KEYS, "s3.autoCreateBucket": "false"},
            **{"s3.port.iceberg": 0, "s3.port.lance": 0, "master.telemetry": "false"},
            **{"volume.max": 20_000, "master.volumeSizeLimitMB": 64},
        }
        words = [f"-{name}={value}" for name, value in flags.items()]
        super().__init__(
            name="object store",
            # Log to our log.txt, not to files in /tmp.
            command=[find_weed(), "-logtostderr", "server", *words],
            environment=clean_environment(),
            folder=folder,
        )

    def start(self) -> None:
        # Let a bucket begin with one volume (an empty file at first) instead of seven.
        growth = b"[master.volume_growth]\ncopy_1 = 1\n"
        write_bytes(self.folder / "master.toml", growth, durable=False)
        with atomic_file(self.folder / _KEYS, private=True, durable=False) as file:
            file.write(json.dumps({"identities": self._identities}).encode())
        super().start()

    def is_ready(self) -> bool:
        import httpx

        with contextlib.suppress(httpx.HTTPError):
            assigned = httpx.get(f"http://127.0.0.1:{self._master}/dir/assign", trust_env=False)
            answer = httpx.get(self.endpoint, trust_env=False)
            return "fid" in assigned.text and answer.status_code == 403  # 403: no key was sent
        return False

    def settings(self, **more: Any) -> StoreSettings:
        """Return the settings with which a neuron reaches its bucket. ``more``: other fields."""
        found: dict[str, Any] = {n.removeprefix("R2_").lower(): v for n, v in self.keys.items()}
        found |= {name: SecretStr(key) for name, key in found.items() if "access_key" in name}
        return StoreSettings(**found | more)

    def stop(self) -> None:
        stop_together([self], timedelta(seconds=1))  # all acknowledged writes are already on disk

    def __enter__(self) -> ObjectStoreServer:
        self.start()
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


_KEYS = "s3.json"  # file with the keys, in the server's folder, which is its working directory
_WEED = ("s3", "master", "volume", "filer")  # parts of SeaweedFS, each with two ports
_STARTS = 120.0  # seconds that a service may take to be ready


def find_weed() -> str:
    """Return the path of SeaweedFS's program, or raise ConfigError if it is not installed."""
    found = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if found is None:
        raise ConfigError(
            "weed, the object store of a subnet on this machine, is not installed, so nothing was "
            f"started: {install('local')}"
        )
    return found


def clean_environment() -> dict[str, str]:
    """Return this process's environment without the operator's own keys and settings."""
    # Drop variables by their prefix: a miner here must not write to the bucket of the operator's
    # real miner.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN_PREFIXES)}
    return inherited | {
        **plugin_environment(),  # the caller's import path and plug-ins
        # The neurons share this machine: one thread per core in each would slow all of them down.
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        # Nothing here needs the hub, and without a network a lookup would wait for its timeout.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
