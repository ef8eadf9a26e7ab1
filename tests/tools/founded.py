"""A network that somebody founds and others join, by the commands that the programs print.

Each program has a home of its own.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import SecretStr

from distributed_training.config.settings import StoreSettings
from distributed_training.localnet.services import ObjectStoreServer
from distributed_training.network import built_in_rules, flatten, toml_value
from distributed_training.store.s3 import S3ObjectStore
from distributed_training.telemetry import read_events
from tests.tools.waiting import wait_for

ROOT = Path(__file__).parents[2]
MODULES = {
    "dt-network": "distributed_training.network_command",
    "dt-join": "distributed_training.join_command",
    "dt-registry": "distributed_training.network_command",
    "dt-validator": "distributed_training.validator",
    "dt-miner": "distributed_training.miner",
    "dt-export": "distributed_training.scoring.export",
    "dt-status": "distributed_training.status_command",
}
#: The rules of a network that this machine runs in minutes.
RULES = [
    word
    for key, value in flatten(built_in_rules("local")).items()
    if key.partition(".")[0] in ("training", "round") or "per_" in key
    for word in ("--set", f"{key}={toml_value(value)}")
]
PATIENCE = 300.0  # seconds for a command, or a first line: a busy machine imports slowly


@dataclass
class Program:
    """A program that runs until it is stopped. ``log``: the lines of all its starts."""

    command: list[str]
    environ: Mapping[str, str]
    place: Path
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, cwd=self.place, env=self.environ, stdout=log, stderr=log
            )

    @property
    def status(self) -> int | None:
        """None while it runs."""
        assert self.process is not None
        return self.process.poll()

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        """Until it has printed ``text``."""

        def there() -> bool:
            assert self.status is None, self.said[-4000:]
            return text in self.said

        wait_for(there, f"{text!r} of {self.command[2]}", PATIENCE, every=0.2)

    def stop(self) -> None:
        """As Ctrl-C does, if it runs."""
        assert self.process is not None
        if self.status is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(90)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)


class Founded:
    """Programs with a home each."""

    def __init__(self, folder: Path, store: ObjectStoreServer) -> None:
        self.folder = folder
        self.store = store
        self.running: list[Program] = []
        self.join_line = self.mine_line = ""  # once it is founded
        self.keys = dict(store.keys)

    def environ(self, home: Path) -> dict[str, str]:
        home.mkdir(exist_ok=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("R2_", "DT_", "BT_"))}
        ours = {"HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return {**kept, **ours}

    def command(self, line: str, *more: str) -> list[str]:
        program, *words = shlex.split(line)
        return [sys.executable, "-m", MODULES[program], *words, *more]

    def call(self, line: str, *more: str, home: str = "founder", status: int | None = 0) -> str:
        """Run a command to its end; what it printed. ``status`` None: any."""
        place = self.folder / home
        done = subprocess.run(
            self.command(line, *more),
            cwd=place if place.exists() else self.folder,
            env=self.environ(place),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert status in (None, done.returncode), done.stdout + done.stderr
        return done.stdout + done.stderr

    def start(self, line: str, *more: str, home: str) -> Program:
        place = self.folder / home
        program = Program(
            self.command(line, *more),
            self.environ(place),
            place,
            place / f"{len(self.running)}.log",
        )
        program.start()
        self.running.append(program)
        return program

    # --- founding and joining ---------------------------------------------------------------------

    @property
    def file(self) -> Path:
        """The network's."""
        return self.folder / "founder" / "lab" / "network.toml"

    def run_folder(self, who: str) -> Path:
        """Of a joiner, or of the founder's validator."""
        own = who != "validator"
        return self.folder / who / "run" if own else self.folder / "founder" / "lab" / "validator"

    def found(
        self, *more: str, host: str, url: str, port: int, flags: Sequence[str]
    ) -> tuple[Program, Program]:
        """Found "lab" by ``init`` with ``more`` words. Returns its registry, which serves at
        loopback's ``port``, and its validator, started with ``flags`` next to those printed."""
        self.write_keys("founder")
        words = ["init", "lab", "--name", "lab", "--host", host, "--registry", url, *RULES]
        words += ["--data-source", "stdlib", "--store", self.keys["R2_ENDPOINT_URL"], *more]
        words += ["--exchange", "hivemind"]
        out = self.call("dt-network", *words)
        lines = [line.strip() for line in out.splitlines() if line.startswith("  dt-")]
        run, join, self.mine_line = lines
        with (self.file.parent / "run.toml").open("a") as file:
            file.write(f"[registry]\nport = {port}\n")
        serve, validate, invite = self.call(f"{run} --print").splitlines()
        registry = self.start(serve, home="founder")
        registry.wait_for("READY")
        line = re.search(r"^dt-join \S+$", self.call(invite), re.M)
        assert line is not None and join == "dt-join INVITATION"
        self.join_line = line[0]
        self.make_bucket("lab")
        return registry, self.start(validate, *flags, home="founder")

    def refuse(self, home: str) -> None:
        """See that who has the network's file and no invitation gets no uid."""
        self.write_keys(home)
        (self.folder / home / self.file.name).write_bytes(self.file.read_bytes())
        (said,) = self.call(f"dt-join {self.file.name}", home=home, status=1).splitlines()
        assert "takes invited neurons only" in said

    def join(self, home: str, *flags: str) -> Program:
        """Join by the line of the invitation with ``flags``, and start a miner as printed."""
        self.write_keys(home)
        own = ["--neuron.run_folder", str(self.run_folder(home)), "--diagnostics.measure", "0"]
        # The doctor's status: a network that has not begun fails some of its checks.
        said = self.call(self.join_line, *own, *flags, home=home, status=None)
        assert re.search(r"^bucket lab-\d{3} made$", said, re.M), said
        assert re.search(r": dt-miner$", said, re.M), said
        return self.start(self.mine_line, home=home)

    # --- what the founder has ---------------------------------------------------------------------

    def stop(self) -> list[int]:
        """Stop all, the newest first, as Ctrl-C does; their exit statuses."""
        for program in reversed(self.running):
            program.stop()
        return [program.status or 0 for program in self.running]

    def make_bucket(self, name: str) -> None:
        settings = replace(
            StoreSettings(),
            endpoint_url=self.store.endpoint,
            account_id=self.keys["R2_ACCOUNT_ID"],
            write_access_key_id=SecretStr(self.keys["R2_WRITE_ACCESS_KEY_ID"]),
            write_secret_access_key=SecretStr(self.keys["R2_WRITE_SECRET_ACCESS_KEY"]),
        )
        with closing(S3ObjectStore.from_settings(settings, bucket=name, write=True)) as bucket:
            bucket.create_bucket()

    def write_keys(self, home: str, **more: str) -> None:
        place = self.folder / home
        place.mkdir(exist_ok=True)
        (place / ".env").write_text("".join(f"{k}={v}\n" for k, v in {**self.keys, **more}.items()))
        (place / ".env").chmod(0o600)

    def logs(self, last: int = 1500) -> str:
        """The ends of all that was printed."""
        paths = sorted(self.folder.glob("*/*.log"))
        return "\n".join(f"===== {p}\n{p.read_text(errors='replace')[-last:]}" for p in paths)


@contextmanager
def founded(folder: Path) -> Iterator[Founded]:
    """A network's programs, and its store."""
    store = ObjectStoreServer(folder=folder / "store")
    store.start()
    try:
        network = Founded(folder, store)
        try:
            yield network
        except BaseException:
            print(network.logs())
            raise
        finally:
            network.stop()
    finally:
        store.stop()


def outer_steps(run_folder: Path) -> dict[int, dict[str, object]]:
    """The events of outer steps, by number."""
    path = run_folder / "events.jsonl"
    events = read_events(path) if path.exists() else []
    return {e["outer_step"]: e for e in events if e["kind"] == "outer_step"}
