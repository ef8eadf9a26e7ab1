"""Test the first steps of a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from distributed_training.chain.identity import create_wallet
from distributed_training.config import Config, ConfigError, problems
from distributed_training.miner.launcher import occupied
from distributed_training.node.start import (
    NetworkFailure,
    exit_status_of,
    fetch_tokenizer,
    make_run_folder,
    require_data,
    sole_sender,
)
from distributed_training.protocol.types import ExitStatus
from tests.tools.miner_parts import config_of
from tests.tools.settings import load_config

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("cause", "end"),
    [
        (LocalEntryNotFoundError("the hub does not answer"), NetworkFailure),
        (HFValidationError("Repo id must use alphanumeric chars"), ConfigError),
    ],
)
def test_a_hub_that_is_away_is_no_fault_of_the_configuration(
    cause: Exception, end: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With status 2, the miner would stay down after the hub has come back."""

    def refused(name: str, **options: object) -> None:
        raise OSError("as transformers says it") from cause

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refused)
    config = config_of(rules={"tokenizer.name": "somebody/tokenizer"})
    with pytest.raises(end, match=r"tokenizer\.name"):
        fetch_tokenizer(config, tmp_path)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("told_by", ["notes", "snapshot"])
@pytest.mark.parametrize(
    ("pinned", "words"),
    [
        ({"data.rows": 300, "data.revision": COMMIT}, ""),
        ({"data.rows": 299}, "has row count 300 and the network's file pins 299"),
        ({"data.revision": "f" * 40}, f"has revision {COMMIT} and the network's file pins ff"),
    ],
)
def test_a_copy_of_other_data_than_the_pinned_ends_a_start_with_status_2(
    told_by: str, pinned: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = tmp_path / "snapshots" / COMMIT if told_by == "snapshot" else tmp_path / "copy"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"text": ["a row"] * 300}), folder / "0.parquet")
    if told_by == "notes":  # as `hf download --local-dir` writes them
        notes = folder / ".cache" / "huggingface" / "download" / "0.parquet.metadata"
        notes.parent.mkdir(parents=True)
        notes.write_text(f"{COMMIT}\netag\n0.0\n")
    config = config_of("--data.source", f"parquet:{folder}", rules=pinned)
    if not words:
        require_data(config)
        return
    with pytest.raises(ConfigError, match=words) as error:
        require_data(config)
    assert exit_status_of(error.value) == ExitStatus.BAD_CONFIGURATION
    assert "\n" not in str(error.value)


def test_a_source_that_is_away_is_no_other_data_and_holds_up_no_start(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributed_training.data.sources.HUB", "http://127.0.0.1:1")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"a start waits {seconds} s"))
    require_data(config_of(rules={"data.source": "hub", "data.rows": 5}))
    assert "Could not check yet" in caplog.text


def named(folder: Path, *flags: str) -> Config:
    return config_of("--neuron.run_folder", str(folder), *flags)


def test_no_run_folder_is_made_in_the_place_of_a_mount_that_is_late(tmp_path: Path) -> None:
    """After a reboot, the disk with a checkpoint of 64 GB may be mounted a minute later."""
    config = named(tmp_path / "data" / "miner")
    with pytest.raises(ConfigError, match=f"since {tmp_path}/data does not exist.*mkdir -p"):
        make_run_folder(config)
    assert not (tmp_path / "data").exists()
    (tmp_path / "data").mkdir()  # the disk is mounted now, and empty
    assert make_run_folder(config) == tmp_path / "data" / "miner"
    curves = named(tmp_path / "run", "--neuron.tensorboard_dir", str(tmp_path / "cache" / "curves"))
    with pytest.raises(ConfigError, match=r"--neuron\.tensorboard_dir"):
        make_run_folder(curves)


def test_a_relative_run_folder_is_made_with_its_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is below the folder in which the miner starts; only a link can lead to a late disk."""
    monkeypatch.chdir(tmp_path)
    assert make_run_folder(config_of()) == tmp_path / "runs" / "miner-default"
    Path("disk").symlink_to(tmp_path / "not" / "mounted")
    with pytest.raises(ConfigError, match=r"since disk does not exist.*mount its disk"):
        make_run_folder(named(Path("disk/node0")))
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize("name", ["disk", "disk/miner", "disk/deep/miner", "link/miner"])
def test_a_mount_point_that_is_empty_is_no_run_folder(name: str, tmp_path: Path) -> None:
    disk, fstab = tmp_path / "my disk" / "of data", tmp_path / "fstab"
    (disk / "deep").mkdir(parents=True)
    (tmp_path / "disk").symlink_to(disk)
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    escaped = str(disk).replace(" ", "\\040")
    fstab.write_text(f"# <what> <where>\n\nUUID=ab / ext4\nUUID=cd {escaped} xfs nofail 0 2\nsw\n")
    if name == "disk":
        (disk / "deep").rmdir()
    folder = tmp_path / name
    with pytest.raises(ConfigError, match=r"of data of .*fstab, which is not mounted.*mount "):
        make_run_folder(named(folder), fstab=fstab)
    assert not list(disk.rglob("*miner*"))
    # A folder with a miner's files is not an empty mount point: the line in fstab is outdated.
    folder.mkdir(exist_ok=True)
    (folder / "instance.json").touch()
    assert make_run_folder(named(folder), fstab=fstab) == folder
    fstab.write_text("proc /proc proc\nUUID=ab / ext4\n")
    assert make_run_folder(named(tmp_path / "other"), fstab=fstab) == tmp_path / "other"


def test_in_a_chroot_the_root_is_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, the table of mounts has no row for the root."""
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_kind: [])
    fstab = tmp_path / "fstab"
    fstab.write_text("UUID=ab / ext4 defaults 0 1\n")
    assert make_run_folder(named(tmp_path / "new"), fstab=fstab) == tmp_path / "new"


def test_a_run_folder_whose_variable_is_not_set_is_refused(tmp_path: Path) -> None:
    """``--neuron.run_folder $UNSET`` would begin again in the default folder."""
    for flags in (["--neuron.run_folder", ""], ["--neuron.run_folder="]):
        config = config_of(*flags)
        (line,) = [line for line in problems(config) if "run_folder" in line]
        assert "--neuron.run_folder is empty" in line and "runs/miner-default" in line
    assert not [line for line in problems(named(tmp_path)) if "run_folder" in line]


def test_a_hotkey_has_one_sender_in_each_network(tmp_path: Path) -> None:
    """The second program's folder does not matter; a hotkey that cannot be locked is no error."""
    wallet = ("--wallet.path", str(tmp_path / "wallets"), "--wallet.name", "lab")
    first = load_config("miner", wallet, environ={}, dotenv=None, check=False)
    with sole_sender(first):  # without a wallet there is nothing to lock
        assert not (tmp_path / "wallets").exists()
    create_wallet(tmp_path / "wallets", "lab")
    create_wallet(tmp_path / "wallets", "two")
    with sole_sender(first):
        with pytest.raises(ConfigError, match="only one upload of the two") as refused:
            sole_sender(first).__enter__()
        assert "--wallet.name two" in str(refused.value) and "\n" not in str(refused.value)
        other = load_config(
            "miner", [*wallet, "--network", "local"], environ={}, dotenv=None, check=False
        )
        two = load_config("miner", [*wallet[:3], "two"], environ={}, dotenv=None, check=False)
        with sole_sender(other), sole_sender(two):
            pass
    for name in ("node0", "node1"):
        (tmp_path / name).mkdir()
    # Another node of the same miner may share the disk of the wallet.
    with occupied(other, tmp_path / "node0"), occupied(other, tmp_path / "node1", sends=False):
        pass
    with sole_sender(first):
        pass
