"""The uploader process against the real server."""

from __future__ import annotations

import subprocess
from contextlib import closing
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import SecretStr

from distributed_training.common import processes
from distributed_training.common.backoff import Backoff
from distributed_training.common.processes import start_child
from distributed_training.config.settings import StoreSettings
from distributed_training.localnet.services import ObjectStoreServer
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import Metadata
from distributed_training.protocol.types import PublicationReport, Revision
from distributed_training.store.uploader import Uploader
from tests.tools.support_store import (
    assert_published,
    finish_rank,
    new_bucket,
    server,
    settings_for,
    write_snapshot,
)
from tests.tools.waiting import wait_for

__all__ = ["server"]
pytestmark = pytest.mark.timeout(200)


def wait_report(publisher: Uploader) -> PublicationReport:
    return wait_for(publisher.reports, what="a report")[0]


def test_publishes_a_snapshot_once_the_last_rank_is_done(
    server: ObjectStoreServer, tmp_path: Path
) -> None:
    settings = settings_for(server)
    store = new_bucket(server, settings)
    publisher = Uploader(settings=settings, bucket=store.bucket, folder=tmp_path / "store")
    with closing(publisher):
        revision = Revision(5, 3, 10)
        files = write_snapshot(
            tmp_path / "3.10", revision, world_size=2, rows=1600, late=frozenset({1})
        )
        publisher.submit(tmp_path / "3.10", revision, 2)
        wait_for(lambda: publisher.busy)
        assert store.get(keys.ROOT_METADATA, limit=10_000) is None
        assert publisher.describe().startswith("5.3.10, nothing sent after ")
        finish_rank(tmp_path / "3.10", 1, 2)
        report = wait_report(publisher)
        assert report.ok, report.reason
        assert report.revision == revision
        assert report.bytes_sent >= sum(p.stat().st_size for p in files.values())
        assert publisher._moved is not None and publisher._moved.there == publisher._moved.size
        assert_published(store, revision, files)
        assert store.list_multiparts() == []
        wait_for(lambda: not publisher.busy)
        publisher.publish_peer_id("12D3KooWother")
        wait_for(
            lambda: (
                Metadata.parse(store.get(keys.ROOT_METADATA, limit=9999) or b"").peer_id
                == "12D3KooWother"
            )
        )
        assert psutil.Process(publisher.pid).nice() == min(19, psutil.Process().nice() + 15)
        assert psutil.Process(publisher.pid).ionice() == (psutil.IOPRIO_CLASS_BE, 7)
        status = Path(f"/proc/{publisher.pid}/status").read_text()
        peak_kb = int(status.split("VmHWM:")[1].split()[0])
        assert peak_kb < 300_000, "torch must stay out of the uploader"
    assert not psutil.pid_exists(publisher.pid or 0)


GARBAGE = """
from multiprocessing import connection
import sys, time
connection.Connection(int(sys.argv[1])).send_bytes(b"no message")
time.sleep(600)
"""


@pytest.mark.parametrize("dies", ["at once", "after bytes that are no message"])
def test_an_uploader_that_keeps_dying_is_started_more_and_more_seldom(
    dies: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "keyword"  # ends
    if dies != "at once":
        module = "no_uploader"
        (tmp_path / f"{module}.py").write_text(GARBAGE)
        monkeypatch.syspath_prepend(tmp_path)
    failures: list[int] = []
    starts: list[int] = []  # each with the failures that were counted until then

    def start(_: str, **options: Any) -> tuple[subprocess.Popen[bytes], Connection]:
        starts.append(len(failures))
        return start_child(module)

    class AtOnce(Backoff):
        def failed(self) -> timedelta:
            super().failed()
            failures.append(self.failures)
            return timedelta(0)

    monkeypatch.setattr(processes, "Backoff", AtOnce)
    monkeypatch.setattr(processes, "start_child", start)
    key = SecretStr("key")
    settings = StoreSettings(write_access_key_id=key, write_secret_access_key=key)
    with closing(Uploader(settings=settings, bucket="bucket", folder=tmp_path)):
        wait_for(lambda: len(starts) >= 4, what="the fourth start")
    assert starts[:4] == [0, 1, 2, 3], "each end is one failure"
    assert failures[:3] == [1, 2, 3]


def test_an_uploader_that_hangs_is_killed_at_the_end(
    server: ObjectStoreServer, tmp_path: Path
) -> None:
    publisher = Uploader(settings=settings_for(server), bucket="bucket", folder=tmp_path)
    assert publisher.pid
    hangs = psutil.Process(publisher.pid)
    hangs.suspend()
    try:
        publisher.close(timedelta(seconds=0.1))
        assert not psutil.pid_exists(hangs.pid)
    finally:
        if psutil.pid_exists(hangs.pid):
            hangs.kill()


def test_an_outage_does_not_fill_the_disk_with_snapshots(
    server: ObjectStoreServer, tmp_path: Path
) -> None:
    """Snapshots not uploaded are not kept, or the disk check would block every later one."""
    settings = settings_for(server)
    store = new_bucket(server, settings)
    store._client.delete_bucket(Bucket=store.bucket)
    snapshots = tmp_path / "snapshots"
    with closing(
        Uploader(
            settings=settings, bucket=store.bucket, folder=tmp_path / "store", snapshots=snapshots
        )
    ) as publisher:
        for inner_step in (5, 10):
            revision = Revision(5, 3, inner_step)
            write_snapshot(snapshots / f"3.{inner_step}.7", revision, world_size=1)
            publisher.submit(snapshots / f"3.{inner_step}.7", revision, 1)
            report = wait_report(publisher)
            assert not report.ok and "does not exist" in report.reason
            assert list(snapshots.iterdir()) == []
        store.create_bucket()
        revision = Revision(5, 3, 15)
        files = write_snapshot(snapshots / "3.15.7", revision, world_size=1)
        publisher.submit(snapshots / "3.15.7", revision, 1)
        report = wait_report(publisher)
        assert report.ok, report.reason
        assert_published(store, revision, files)


def test_pause_frees_the_line_and_resume_finishes(
    server: ObjectStoreServer, tmp_path: Path
) -> None:
    settings = settings_for(server)
    store = new_bucket(server, settings)
    revision = Revision(5, 4, 10)
    write_snapshot(tmp_path / "4.10", revision, world_size=1, rows=2000)
    publisher = Uploader(settings=settings, bucket=store.bucket, folder=tmp_path / "store")
    with closing(publisher):
        publisher.pause()
        publisher.submit(tmp_path / "4.10", revision, 1)
        newer = Revision(5, 4, 15)
        publisher.submit(tmp_path / "4.15", newer, 1)
        newest = Revision(5, 4, 20)
        publisher.submit(tmp_path / "4.20", newest, 1)
        # The first waits before its upload or is under way; the second is superseded in any case.
        reports = list(wait_for(publisher.reports, what="a report"))
        wait_for(
            lambda: newer in {r.revision for r in reports} or reports.extend(publisher.reports())
        )
        assert not any(r.ok for r in reports)
        assert all("superseded" in r.reason for r in reports)
        assert store.list_objects("epoch-") == []
        write_snapshot(tmp_path / "4.20", newest, world_size=1, rows=2000)
        publisher.resume()
        wait_for(lambda: reports.extend(publisher.reports()) or len(reports) == 3, what="reports")
        assert {r.revision for r in reports} == {revision, newer, newest}
        assert reports[-1].revision == newest
        assert reports[-1].ok, reports[-1].reason


def test_publishing_a_step_again_does_not_touch_the_running_upload(
    server: ObjectStoreServer, tmp_path: Path
) -> None:
    """A miner that went back to a checkpoint reaches a step whose upload still reads its files."""
    settings = settings_for(server)
    store = new_bucket(server, settings)
    revision = Revision(5, 4, 10)
    snapshots = tmp_path / "snapshots"
    write_snapshot(snapshots / "4.5.6", Revision(5, 4, 5), world_size=1)
    with closing(
        Uploader(
            settings=settings, bucket=store.bucket, folder=tmp_path / "store", snapshots=snapshots
        )
    ) as publisher:
        wait_for(
            lambda: list(snapshots.iterdir()) == [], what="the end of what a killed miner left"
        )
        files = write_snapshot(snapshots / "4.10.7", revision, world_size=1, rows=2000)
        publisher.submit(snapshots / "4.10.7", revision, 1)
        wait_for(store.list_multiparts, what="the start of the upload")
        publisher.pause()
        write_snapshot(snapshots / "4.10.9", revision, world_size=1, rows=3)
        publisher.submit(snapshots / "4.10.9", revision, 1)
        wait_for(lambda: not (snapshots / "4.10.9").exists(), what="the end of the second snapshot")
        publisher.resume()
        report = wait_report(publisher)
        assert report.ok, report.reason
        assert_published(store, revision, files)
        assert publisher.reports() == []
        wait_for(lambda: not publisher.busy)
