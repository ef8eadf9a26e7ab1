"""Test uploads that are cut, refused, delayed or damaged: the object is complete, or a line
says why not. A proxy in front of the real server enforces R2's rules."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from distributed_training.localnet.services import ObjectStoreServer
from distributed_training.store import transfer
from distributed_training.store.s3 import S3ObjectStore
from distributed_training.store.transfer import stuck_uploads, sweep_uploads, upload
from tests.tools.store_shim import DROP, STALL, Call, Shim, make_certificate
from tests.tools.support_store import LARGE, Upload, new_bucket, settings_for

pytestmark = pytest.mark.timeout(300)
MIB = 1024 * 1024


class FirstPartLast:
    """The store answers the first part only when three others have come after it."""

    def __init__(self) -> None:
        self._others = threading.Event()

    def __call__(self, call: Call) -> None:
        if call.what == "part" and call.count == 0:
            assert self._others.wait(100)
        elif call.what == "part" and call.count == 3:
            self._others.set()


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            lambda call: DROP if call.what == "part" and call.count < 3 else None,
            id="connection dropped",
        ),
        pytest.param(
            lambda call: STALL if call.what == "part" and call.count < 3 else None,
            id="connection stalled",
        ),
        pytest.param(
            lambda call: (
                (500, 503, 429)[call.count] if call.count < 3 and call.what != "abort" else None
            ),
            id="500, 503 and 429",
        ),
        pytest.param(FirstPartLast(), id="the first part last"),
    ],
)
def test_passing_store_faults_are_survived(
    server: ObjectStoreServer, tmp_path: Path, fault: Callable[[Call], int | None]
) -> None:
    upload = Upload(server, tmp_path)
    with Shim(server.endpoint, fault) as shim:
        upload.assert_whole(upload.send(shim.endpoint))


def test_an_outage_longer_than_the_deadline_is_a_report_and_the_next_try_resumes(
    server: ObjectStoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = Upload(server, tmp_path, within=timedelta(minutes=10))
    direct = upload.bucket
    away: list[Call] = []  # each try takes five minutes
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 300 * len(away))
    monkeypatch.setattr(transfer, "time", clock)

    def outage(call: Call) -> int | None:
        if call.what != "part" or call.count < 3:
            return None
        away.append(call)
        return 503

    with Shim(server.endpoint, outage) as shim:
        assert "503" in upload.send(shim.endpoint)
        assert 2 <= len(away) < 10
        assert direct.head(LARGE) is None
        sent = len(direct.list_parts(*_only_upload(direct)))
        assert sent >= 1
        shim.fault = lambda call: None
        before = shim.count("part")
        upload.assert_whole(upload.send(shim.endpoint))
        assert shim.count("part") - before <= 4 + 1 - sent + 1


def _only_upload(store: S3ObjectStore) -> tuple[str, str]:
    (upload,) = store.list_multiparts()
    return upload.key, upload.upload_id


def test_a_part_at_the_store_with_other_bytes_is_not_kept(
    server: ObjectStoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(server)
    store = new_bucket(server, settings)
    size, part = 12 * MIB, 5 * MIB
    content = os.urandom(size)
    path = tmp_path / "model"
    path.write_bytes(content)
    for _ in range(2):  # an answer was lost: one is continued, and the other aborted
        upload_id = store.create_multipart("model")
        store.upload_part("model", upload_id, 1, os.urandom(part))
        store.upload_part("model", upload_id, 2, content[part : 2 * part])
    monkeypatch.setattr(transfer, "PART", part)
    assert upload(store, "model", path, until=time.monotonic() + 100) == size - part
    assert store.get("model", limit=size) == content and not store.list_multiparts()
    assert upload(store, "model", path, until=time.monotonic() + 100) == 0, "it is there"


def test_an_upload_aborted_by_someone_else_is_not_success(
    server: ObjectStoreServer, tmp_path: Path
) -> None:
    upload = Upload(server, tmp_path, rows=1600)
    direct = upload.bucket

    def abort(call: Call) -> None:
        if call.what == "complete":
            for stuck in direct.list_multiparts():
                direct.abort_multipart(stuck.key, stuck.upload_id)

    with Shim(server.endpoint, abort) as shim:
        assert "lost the multipart upload" in upload.send(shim.endpoint)
        assert direct.head(LARGE) is None
        shim.fault = lambda call: None
        upload.assert_whole(upload.send(shim.endpoint))


def test_over_tls_no_trailers_are_sent(
    server: ObjectStoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """botocore's default checksums are trailers, and only over TLS; R2 refuses them."""
    upload = Upload(server, tmp_path, rows=1600)
    certificate = make_certificate(tmp_path)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    with Shim(server.endpoint, certificate=certificate, write_interval=1.0) as shim:
        upload.assert_whole(upload.send(shim.endpoint))
        assert not any("401" in r for r in shim.refusals)


def test_cleanup_aborts_stuck_uploads_of_ours_only(server: ObjectStoreServer) -> None:
    store = new_bucket(server, settings_for(server))
    other, stuck = store.create_multipart("uploads/70/a"), store.create_multipart("uploads/7/b")
    store.upload_part("uploads/7/b", stuck, 1, b"x" * 1000)
    sweep_uploads(store, prefix="uploads/7/")  # no upload is an hour old
    assert len(store.list_multiparts()) == 2
    sweep_uploads(store, prefix="uploads/7/", is_stuck=lambda one: True)
    assert [u.upload_id for u in store.list_multiparts()] == [other]
    store.abort_multipart("uploads/70/a", other)
    assert stuck_uploads(store, prefix="", is_stuck=lambda one: True) == []
