"""A network that somebody founds and others join, by the commands that the programs print."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import SecretStr

from distributed_training.common.ports import free_ports
from distributed_training.config.loader import schema
from distributed_training.config.presets import PRESETS
from distributed_training.config.settings import StoreSettings
from distributed_training.localnet.object_store import ObjectStoreServer
from distributed_training.store.s3 import S3ObjectStore
from distributed_training.telemetry import read_events

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
MODULES = {
    "dt-network": "distributed_training.network_command",
    "dt-registry": "distributed_training.registry",
    "dt-validator": "distributed_training.validator",
    "dt-miner": "distributed_training.miner",
    "dt-export": "distributed_training.scoring.export",
}
#: The rules of a network that this machine runs in minutes.
RULES = [
    word
    for setting in schema("validator")
    if setting.network and setting.name in PRESETS["local"] and setting.fixed
    for word in ("--set", f"{setting.network}={PRESETS['local'][setting.name]}")
] + ["--set", "round.seconds_per_block=1.0"]


class Founded:
    """Programs of one machine, each with a home of its own."""

    def __init__(self, folder: Path, store: ObjectStoreServer) -> None:
        self.folder = folder
        self.running: list[subprocess.Popen[bytes]] = []
        c = store.credentials
        self.keys = {
            "R2_ENDPOINT_URL": store.endpoint,
            "R2_ACCOUNT_ID": c.account_id,
            "R2_READ_ACCESS_KEY_ID": c.read_key,
            "R2_READ_SECRET_ACCESS_KEY": c.read_secret,
            "R2_WRITE_ACCESS_KEY_ID": c.write_key,
            "R2_WRITE_SECRET_ACCESS_KEY": c.write_secret,
        }

    def environ(self, home: Path) -> dict[str, str]:
        home.mkdir(exist_ok=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("R2_", "DT_", "BT_"))}
        return {**kept, "HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def command(self, line: str, *more: str) -> list[str]:
        program, *words = shlex.split(line)
        return [sys.executable, "-m", MODULES[program], *words, *more]

    def call(self, line: str, *more: str, home: str = "founder", status: int = 0) -> str:
        """Run a command to its end; what it printed."""
        place = self.folder / home
        done = subprocess.run(
            self.command(line, *more),
            cwd=place if place.exists() else self.folder,
            env=self.environ(place),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start(self, line: str, *more: str, home: str) -> Path:
        """Start a program; the file of what it prints."""
        place = self.folder / home
        environ = self.environ(place)
        log = place / f"{len(self.running)}.log"
        with log.open("wb") as file:
            self.running.append(
                subprocess.Popen(
                    self.command(line, *more), cwd=place, env=environ, stdout=file, stderr=file
                )
            )
        return log

    def stop(self) -> list[int]:
        """Stop all, the newest first, as Ctrl-C does; their exit statuses."""
        for program in reversed(self.running):
            program.send_signal(2)
            try:
                program.wait(90)
            except subprocess.TimeoutExpired:
                program.kill()
        return [program.wait(10) for program in self.running]

    def make_bucket(self, name: str) -> None:
        settings = replace(
            StoreSettings(),
            endpoint_url=self.keys["R2_ENDPOINT_URL"],
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


@contextmanager
def founded(folder: Path) -> Iterator[Founded]:
    with ObjectStoreServer(folder=folder / "store") as store:
        network = Founded(folder, store)
        try:
            yield network
        finally:
            network.stop()


def wait_for(log: Path, text: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while text not in log.read_text(errors="replace"):
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-4000:]
        time.sleep(0.5)


def outer_steps(run_folder: Path) -> set[int]:
    path = run_folder / "events.jsonl"
    events = read_events(path) if path.exists() else []
    return {e["outer_step"] for e in events if e["kind"] == "outer_step"}


def test_founded_joined_and_trained(tmp_path: Path) -> None:
    port, dht, *ports = free_ports(8)
    url = f"http://127.0.0.1:{port}"
    with founded(tmp_path) as network:
        network.write_keys("founder")
        words = ["init", "lab", "--name", "lab", "--host", "127.0.0.1", "--dht-port", str(dht)]
        words += ["--registry", url, "--data-source", "stdlib", *RULES]
        words += ["--store", network.keys["R2_ENDPOINT_URL"]]
        out = network.call("dt-network", *words)
        lines = [line.strip() for line in out.splitlines() if line.startswith("  dt-")]
        serve, invite, validate, join, mine = lines
        served = network.start(serve, "--port", str(port), home="founder")
        wait_for(served, "READY", 60)
        invitation = re.search(r"^DT_INVITATION=(\S+)$", network.call(invite), re.M)
        assert invitation is not None

        network.make_bucket("lab")
        local = ("--preset", "local")
        network.start(validate, *local, "--axon.port", str(ports[0]), home="founder")

        file = tmp_path / "founder" / "lab" / "network.toml"
        join, mine = (line.replace("network.toml", str(file)) for line in (join, mine))
        network.write_keys("stranger")
        refused = network.call(join, home="stranger", status=1)
        assert refused.startswith("network lab version 1") and "nvit" in refused.splitlines()[-1]
        folders = []
        for index in (0, 1):
            home = f"joiner-{index}"
            network.write_keys(home, DT_INVITATION=invitation[1])
            said = network.call(join, home=home)
            bucket = re.search(r"^bucket (lab-\d{3}):", said, re.M)
            assert bucket is not None and "missing in .env" not in said, said
            network.make_bucket(bucket[1])
            folders.append(tmp_path / home / "run")
            network.start(
                mine, *local, "--neuron.run_folder", str(folders[-1]),
                "--axon.port", str(ports[1 + 2 * index]), "--dht.port", str(ports[2 + 2 * index]),
                home=home,
            )  # fmt: skip

        deadline = time.monotonic() + 480
        while not all(outer_steps(folder) >= {1} for folder in folders):
            logs = [log.read_text(errors="replace")[-1500:] for log in tmp_path.glob("*/*.log")]
            assert time.monotonic() < deadline, "\n=====\n".join(logs)
            assert all(p.poll() is None for p in network.running), "\n=====\n".join(logs)
            time.sleep(1)
        out = network.call(
            "dt-export", str(tmp_path / "model"), "--network", str(file), *local, "--sample", "def "
        )
        assert re.search(r"exported the model of outer step \d+ ", out) and "\ndef " in out
        assert network.stop() == [0, 0, 0, 0]
