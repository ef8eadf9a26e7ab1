"""Test a bundle, which others will read: it has only the listed files, and no secrets."""

from __future__ import annotations

import errno
import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from distributed_training.config import Config, ConfigError
from distributed_training.config.schema import schema
from distributed_training.health import bundle
from distributed_training.health.bundle import RUN_FILES, write_bundle
from distributed_training.protocol.types import Check
from distributed_training.telemetry import logs
from tests.tools.settings import load_config

pytestmark = pytest.mark.timeout(60)

SECRETS = {setting.env: f"sesame-{n}-\"open-long" for n, setting in enumerate(schema("miner"))
           if setting.secret and setting.env}  # fmt: skip
SECRETS |= {"DT_NOTIFY_URL": "jsons://example.org/sesame-hook", "HF_TOKEN": "sesame-hub"}
SIGNED = "https://s3.example.org/b/uploads/1?X-Amz-Signature=sesame-signed&X-Amz-Date=1"
OPEN = "Outer Step: 7 | Inner Step: 12 | LR: 0.0004 | Loss: 2.512 | Step Time: 3.1s"


class Home:
    """Creates a folder in which a miner is started, with its run folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.log = folder / "help.tar.gz", folder / "pm2.log"
        monkeypatch.chdir(folder)
        monkeypatch.setattr(bundle, "distributions", lambda: [])
        monkeypatch.setattr(logs, "_secrets", ())
        Path(".env").write_text("OTHER_TOKEN=sesame-other\nBT_WALLET_NAME=default\n")
        flags = ["--network", "local", "--neuron.run_folder", str(folder / "run")]
        self.config: Config = load_config("miner", flags, environ=SECRETS, check=False)

    def plant(self, text: str, *more: str) -> None:
        run = [f"run/{name}" for name in RUN_FILES]
        for name in (*run, "miner.toml", "pm2.log", *more):
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text)

    def write(self, *checks: Check) -> dict[str, str]:
        lines = write_bundle(self.path, self.config, checks, log=self.log, environ=SECRETS)
        assert self.path.stat().st_mode & 0o777 == 0o600
        with tarfile.open(self.path) as archive:
            found = {
                member.name.removeprefix("bundle/"): archive.extractfile(member).read().decode()
                for member in archive.getmembers()
            }
        assert [line.split()[0] for line in lines] == list(found)
        return found


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return Home(tmp_path, monkeypatch)


def test_no_secret_is_in_a_bundle(home: Home) -> None:
    secrets = [*SECRETS.values(), "sesame-other", SIGNED]
    lines = [form for text in secrets for form in (f"GET {text} 404", json.dumps({"text": text}))]
    home.plant("\n".join([OPEN, *lines]))
    for name, text in home.write(Check("x", "fail", f"no {secrets[0]}", secrets[1])).items():
        assert "sesame" not in text, name
        assert not name.startswith("run/") or (OPEN in text and "https://s3.example.org" in text)


def test_only_files_of_the_list_are_in_a_bundle(home: Home) -> None:
    home.plant("x", "app.config.override.js", "run/chain.json", "run/data/text.jsonl")
    names = {"doctor.json", "versions.txt", "settings.txt", "miner.toml", "log.txt"}
    assert set(home.write()) == names | {f"run/{name}" for name in RUN_FILES}


def test_a_log_is_cut_at_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("x" * bundle._MOST_BYTES + "sesame\nend\n")
    assert bundle._end_of(path) == "end\n" and bundle._end_of(tmp_path / "none") is None


def test_a_bundle_is_written_only_to_a_new_file_and_through_no_link(home: Home) -> None:
    for path in (home.path.with_name("there"), home.path.with_name("none") / "help.tar.gz"):
        if path.parent.exists():
            path.symlink_to(home.path.with_name("elsewhere"))
        with pytest.raises(ConfigError, match=r"--bundle .*: choose "):
            write_bundle(path, home.config, [], log=None, environ={})
    assert not home.path.with_name("elsewhere").exists()


def test_a_disk_that_fills_leaves_no_part_of_a_bundle(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.FileIO):
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", Full)
        with pytest.raises(ConfigError, match=r"No space left on device.*so there is no bundle"):
            write_bundle(home.path, home.config, [], log=None, environ={})
    assert not home.path.exists()
    assert write_bundle(home.path, home.config, [], log=None, environ={})
