"""An uploader killed at each point of a publication: the next continues, readers see it whole."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from distributed_training.localnet.services import ObjectStoreServer
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import Metadata
from distributed_training.protocol.types import Revision
from distributed_training.store.s3 import S3ObjectStore
from distributed_training.store.uploader import Uploader
from tests.tools.store_shim import DROP, Call, Shim, through
from tests.tools.support_store import (
    assert_published,
    digest,
    new_bucket,
    publish,
    server,
    settings_for,
    write_snapshot,
)
from tests.tools.waiting import wait_for

__all__ = ["server"]
pytestmark = pytest.mark.timeout(240)
REVISION = Revision(5, 4, 10)


class Reader(threading.Thread):
    """Polls as validators do and notes every contradiction it sees."""

    def __init__(self, store: S3ObjectStore, digests: dict[Revision, dict[str, str]]) -> None:
        super().__init__(daemon=True)
        self.store, self.digests = store, digests
        self.problems: list[str] = []
        self.looks = 0
        self.done = threading.Event()

    def run(self) -> None:
        newest = (0, 0, 0)
        while not self.done.is_set():
            self.looks += 1
            data = self.store.get(keys.ROOT_METADATA, limit=9999)
            if data is not None:
                root = Metadata.parse(data).revision
                now = (root.run, root.outer_step, root.inner_step)
                if now < newest:
                    self.problems.append(f"root went back from {newest} to {now}")
                newest = now
                for name in self.digests[root]:
                    if self.store.head(keys.epoch_key(root.outer_step, name)) is None:
                        self.problems.append(f"{root.tag} names {name}, which is missing")
            self._look_at_epoch()
            self.done.wait(0.05)  # the store has two cores for itself and the uploads, or less

    def _look_at_epoch(self) -> None:
        import hashlib

        key = keys.epoch_key(4, keys.METADATA)
        before = self.store.get(key, limit=9999)
        files = {}
        for name in (keys.GRADIENTS, keys.CONFIG):
            content = self.store.get(keys.epoch_key(4, name), limit=1 << 26)
            files[name] = hashlib.sha256(content or b"").hexdigest()
        if before is None or self.store.get(key, limit=9999) != before:
            return
        revision = Metadata.parse(before).revision
        for name, found in files.items():
            if found != self.digests[revision][name]:
                self.problems.append(f"{revision.tag} vouches for a foreign {name}")


POINTS = {
    "at the first part": lambda call: call.what == "part" and call.count == 0,
    "in the middle of the parts": lambda call: call.what == "part" and call.count == 9,
    "at the first complete": lambda call: call.what == "complete" and call.count == 0,
    "while verifying": lambda call: call.what == "head" and call.key.endswith(keys.CONFIG),
    "at the root metadata": lambda call: (call.what, call.key) == ("put", keys.ROOT_METADATA),
}

EACH_DAY = ("in the middle of the parts", "at the root metadata")

#: An uploader does not handle SIGTERM, so it is a kill like any other: in the long tests.
HOW = [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "point",
    [
        # Each day the two that show most: an upload without its record is a unit test.
        point if point in EACH_DAY else pytest.param(point, marks=pytest.mark.long)
        for point in POINTS
    ],
)
def test_after_a_kill_at_any_point_the_next_process_continues(
    server: ObjectStoreServer, tmp_path: Path, point: str, how: signal.Signals
) -> None:
    base = settings_for(server, age_limit=timedelta(seconds=90))
    direct = new_bucket(server, base)
    older = Revision(5, 4, 5)
    digests = {}
    # In the middle: enough parts that the test notices when all are sent again.
    for revision, rows in ((older, 400), (REVISION, 8000 if "middle" in point else 2000)):
        files = write_snapshot(tmp_path / revision.tag, revision, world_size=1, rows=rows)
        digests[revision] = {name: digest(path) for name, path in files.items()}
    journal = tmp_path / "store" / "uploads.json"
    journal.parent.mkdir()
    assert publish(direct, tmp_path / older.tag, settings=base, journal=journal, revision=older).ok
    killed = threading.Event()
    pids: list[int] = []

    def fault(call: Call) -> int | None:
        if not killed.is_set() and POINTS[point](call):
            killed.set()
            os.kill(pids[0], how)
            return DROP
        return None

    reader = Reader(direct, digests)
    with Shim(server.endpoint, fault) as shim:
        settings, _ = through(shim, base, direct.bucket)
        publisher = Uploader(settings=settings, bucket=direct.bucket, folder=tmp_path / "store")
        try:
            assert publisher.pid
            pids.append(publisher.pid)
            reader.start()
            publisher.submit(tmp_path / REVISION.tag, REVISION, 1)
            (report,) = wait_for(publisher.reports, seconds=150, what="the report")
            assert killed.is_set()
            assert publisher.pid != pids[0]
            assert report.ok, report.reason
            assert_published(direct, REVISION, files)
            assert direct.list_multiparts() == []
            sizes = [path.stat().st_size for path in files.values()]
            parts = sum(-(-s // settings.part_size) for s in sizes if s > settings.part_size)
            assert shim.count("part") <= parts + settings.concurrency
        finally:
            publisher.close()
            reader.done.set()
            reader.join(10)
    assert reader.problems == []
    assert reader.looks > 2
