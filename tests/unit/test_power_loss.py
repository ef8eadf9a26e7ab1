"""Test that durable files survive a power loss at any moment."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from distributed_training.common.files import write_bytes
from distributed_training.protocol.types import Progress
from distributed_training.store import transfer
from distributed_training.training.checkpoint import Checkpointer
from tests.tools.forgetful_disk import Tree, come_back, forgetful_disk
from tests.tools.memory_store import MemoryObjectStore
from tests.tools.training_world import save_checkpoint, train, trainer

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def disk_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def whole(tree: Tree | bytes) -> dict[str, bytes]:
    assert isinstance(tree, dict)
    return {name: data for name, data in tree.items() if isinstance(data, bytes)}


def test_the_disk_forgets_writes_that_were_not_synced(
    disk_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This checks the test's disk: without both syncs, a new file is empty or missing."""
    with forgetful_disk(disk_folder, monkeypatch) as disk:
        (disk_folder / "new").write_bytes(b"content")
        (disk_folder / "new").replace(disk_folder / "file")
    assert {} in disk.losses and {"file": b""} in disk.losses
    assert {"file": b"content"} not in disk.losses


def test_a_durable_file_is_the_old_one_or_the_new_one(
    disk_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = disk_folder / "state.json"
    write_bytes(path, b"old")
    with forgetful_disk(disk_folder, monkeypatch) as disk:
        write_bytes(path, b"new")
    assert {whole(tree).get("state.json") for tree in disk.losses} == {b"old", b"new"}
    assert disk.at_end == 4 * [{"state.json": b"new"}]


def test_an_interrupted_download_continues_with_the_ranges_on_the_disk(
    disk_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "RANGE", 1000)
    monkeypatch.setattr(transfer, "CONCURRENT", 1)
    content = bytes(range(1, 226)) * 20
    store = MemoryObjectStore()
    store.put("model", content)

    def fetch(folder: Path) -> bytes:
        path, until = folder / "model", time.monotonic() + 60
        transfer.download(store, "model", path, limit=9999, deadline=until)
        return path.read_bytes()

    with forgetful_disk(disk_folder, monkeypatch) as disk:
        fetch(disk_folder)
    assert len(disk.losses) > 5
    for number, tree in enumerate(disk.losses):
        assert whole(tree).get("model", content) == content, "whole or not there"
        assert fetch(come_back(tree, tmp_path / str(number))) == content
    assert disk.at_end == 4 * [{"model": content}]


@pytest.mark.usefixtures("process_group")
def test_a_checkpoint_is_the_one_before_or_the_new_one(
    disk_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer()
    keeper = Checkpointer(trainer=made, folder=disk_folder, keep=1)

    def save(step: int) -> None:
        train(made, step - 1, step)
        save_checkpoint(keeper, Progress(0, step, step), {"at": step})
        assert keeper.last_error is None

    save(1)
    with forgetful_disk(disk_folder, monkeypatch) as disk:
        save(2)

    def step_after(loss: Tree) -> int:
        back = come_back(loss, tmp_path / str(next(numbers)))
        restored = Checkpointer(trainer=trainer(seed=5), folder=back).restore()
        assert restored is not None, "no checkpoint is left"
        assert restored[1] == {"at": restored[0].total_inner_steps}
        return restored[0].total_inner_steps

    numbers = itertools.count()
    assert {step_after(loss) for loss in disk.losses} == {1, 2}
    assert {step_after(loss) for loss in disk.at_end} == {2}
