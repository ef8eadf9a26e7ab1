"""A miner runs for weeks: what it leaves behind is counted after a few rounds and after many."""

from __future__ import annotations

import dataclasses
import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from distributed_training.config.settings import StoreSettings
from distributed_training.protocol import keys
from distributed_training.protocol.types import PublicationReport, Revision
from distributed_training.store import cleanup
from distributed_training.store.journal import Submission
from distributed_training.store.uploader import PeerId
from tests.tools.memory_store import MemoryObjectStore
from tests.tools.support_store import PEER_ID, uploading, write_snapshot
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(240)
SETTINGS = StoreSettings(
    age_limit=timedelta(seconds=60),
    snapshot_timeout=timedelta(seconds=60),
    write_interval=timedelta(0),
    keep_epochs=2,
)


@dataclasses.dataclass(frozen=True)
class Left:
    descriptors: int
    threads: int
    files: tuple[str, ...]
    bytes: int

    @classmethod
    def of(cls, folder: Path) -> Left:
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return cls(
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=threading.active_count(),
            files=tuple(str(path.relative_to(folder)) for path in files),
            bytes=sum(path.stat().st_size for path in files),
        )


def test_many_publications_leave_no_more_than_a_few(tmp_path: Path) -> None:
    """Rounds, failed publications and restarts: the same files, threads and bytes are left."""
    store = MemoryObjectStore()
    left: list[Left] = []

    def live(outer_steps: range) -> None:
        with uploading(SETTINGS, store, tmp_path, tmp_path / "snapshots") as (loop, messages):
            for outer_step in outer_steps:
                loop.receive(PeerId(PEER_ID))
                for inner_step in (5, 10):
                    revision = Revision(5, outer_step, inner_step)
                    # The second of each third round is one that cannot be published.
                    blocks = () if outer_step % 3 == 0 and inner_step == 10 else (7,)
                    name = f"{outer_step}.{inner_step}.{100 * outer_step + inner_step}"
                    folder = tmp_path / "snapshots" / name
                    write_snapshot(folder, revision, world_size=1, rows=2, blocks=blocks)
                    ended = sum(isinstance(m, PublicationReport) for m in messages)
                    loop.receive(Submission(folder, revision, 1, PEER_ID))
                    wait_for(
                        lambda ended=ended: (
                            sum(isinstance(m, PublicationReport) for m in messages) > ended
                        ),
                        what="the end of the publication",
                    )
            newest = outer_steps[-1]
            wait_for(lambda: not store.list_objects(f"epoch-{newest - 2}/"), what="old steps to go")
        left.append(Left.of(tmp_path))
        assert not store.list_multiparts()
        names = {info.key for info in store.list_objects()}
        assert len(names) <= 2 * (len(keys.data_files(1)) + 1) + 2, names

    live(range(1, 4))
    for first in range(4, 28, 6):
        live(range(first, first + 6))
    few, *_, many = left
    # A thread of a test before this one may have ended in between.
    assert many.descriptors <= few.descriptors and many.threads <= few.threads
    assert len(many.files) <= len(few.files) and many.bytes <= few.bytes + 200, (few, many)
    assert {name for name in many.files if not name.startswith("snapshots/")} == {
        "instance",
        "uploads.json",
    }


def test_two_machines_with_one_copied_run_folder_are_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has the same path on both, as with one image for many machines."""
    here = cleanup.instance_of(tmp_path)
    assert cleanup.instance_of(tmp_path) == here
    monkeypatch.setattr(cleanup, "machine", lambda: "another:host")
    there = cleanup.instance_of(tmp_path)
    assert there != here
    store = MemoryObjectStore()
    cleanup.claim_bucket(store, here)
    with pytest.raises(cleanup.ForeignBucketError, match="take_bucket"):
        cleanup.claim_bucket(store, there)
    cleanup.claim_bucket(store, here)
