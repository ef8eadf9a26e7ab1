"""Share among the store's tests: a server, buckets, snapshots."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import SecretStr
from safetensors.torch import save, save_file

from distributed_training.config.settings import StoreSettings
from distributed_training.localnet.services import ObjectStoreServer
from distributed_training.protocol import keys
from distributed_training.protocol.gradients import GradientMetadata, encode
from distributed_training.protocol.metadata import ConfigExtras, Metadata
from distributed_training.protocol.types import PublicationReport, Revision
from distributed_training.store.journal import Journal, Submission
from distributed_training.store.s3 import S3ObjectStore
from distributed_training.store.transfer import Retry
from distributed_training.store.uploader import Close, Start
from distributed_training.store.uploader_process import Publication, UploadLoop
from tests.tools.gradient_file import build_payload
from tests.tools.waiting import wait_for

PEER_ID = "12D3KooWHDMAeP3zKHrALtREoc2vfYQL7HhsMN7WBvft7hgBCRhK"
RUN = 5


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStoreServer]:
    with ObjectStoreServer(folder=tmp_path_factory.mktemp("object-store")) as running:
        yield running


def access_to(server: ObjectStoreServer) -> dict[str, Any]:
    """Return the settings by which a neuron reaches its buckets there."""
    values = {name.removeprefix("R2_").lower(): value for name, value in server.keys.items()}
    return {n: SecretStr(v) if n.startswith(("read", "write")) else v for n, v in values.items()}


def settings_for(server: ObjectStoreServer, **changes: Any) -> StoreSettings:
    values: dict[str, Any] = {
        **access_to(server),
        "part_size": 5 * 1024 * 1024,
        "concurrency": 3,
        "write_interval": timedelta(0),
        "minimum_valid_inner_step": 5,
        "age_limit": timedelta(seconds=30),
        "snapshot_timeout": timedelta(seconds=10),
        "connect_timeout": timedelta(seconds=3),
        "read_timeout": timedelta(seconds=5),
    }
    return StoreSettings(**values | changes)


def new_bucket(server: ObjectStoreServer, settings: StoreSettings) -> S3ObjectStore:
    name = f"llama-test-{uuid.uuid4().hex[:10]}"
    store = S3ObjectStore.from_settings(settings, bucket=name, write=True)
    store.create_bucket()
    return store


@contextlib.contextmanager
def uploading(
    settings: StoreSettings, store: Any, folder: Path, snapshots: Path | None = None
) -> Iterator[tuple[UploadLoop, list[object]]]:
    """Run an upload loop with a journal in ``folder``; what it sends to rank 0."""
    messages: list[object] = []
    began = None if snapshots is None else time.time()
    start = Start(settings, "bucket", folder, snapshots, miner_began=began)
    loop = UploadLoop(start, store, messages.append)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    try:
        yield loop, messages
    finally:
        loop.receive(Close())
        thread.join(30)
    assert not thread.is_alive()
    wait_for(
        lambda: not {"_renew_claim", "_clean_up"} & {t.name for t in threading.enumerate()},
        what="the threads next to it to end",
    )


def write_snapshot(
    folder: Path,
    revision: Revision,
    *,
    world_size: int = 2,
    rows: int = 256,
    blocks: tuple[int, ...] = (1000, 1003),
    weights: torch.Tensor | None = None,
    late: frozenset[int] = frozenset(),
) -> dict[str, Path]:
    """A whole snapshot folder as training leaves it; ranks in ``late`` have not finished."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(hash(revision) % 2**31)
    model = {
        "layer.weight": torch.randn(rows, 2048, generator=generator),
        "norm.weight": torch.randn(64, generator=generator),
    }
    if weights is not None:
        model["norm.weight"] = weights
    save_file(model, folder / keys.MODEL, metadata=keys.SAFETENSORS_METADATA)
    place = GradientMetadata(
        block=max(blocks, default=0),
        inner_step=revision.inner_step,
        outer_step=revision.outer_step,
        loss=3.5,
    )
    codes = {
        name: encode(torch.randn(value.shape, generator=generator)) for name, value in model.items()
    }
    torch.save(build_payload(codes, place), folder / keys.GRADIENTS)
    extras = ConfigExtras(blocks, revision.inner_step)
    (folder / keys.CONFIG).write_bytes(extras.merge_into({"model_type": "llama"}))
    files = {0: [keys.CONFIG, keys.MODEL, keys.GRADIENTS]}
    for rank in range(world_size):
        name = keys.inner_optimizer(rank, world_size)
        state = {"state": {"layer.weight": {"exp_avg": torch.rand(16, 64, generator=generator)}}}
        torch.save({"optimizer_state_dict": state, "epoch": revision.outer_step}, folder / name)
        files.setdefault(rank, []).append(name)
    for rank in range(world_size):
        if rank not in late:
            finish_rank(folder, rank, world_size, files[rank])
    return {name: folder / name for names in files.values() for name in names}


def publish_state(
    store: Any, outer_step: int, *, rows: int = 256, text: str = ""
) -> dict[str, bytes]:
    """A state of ``outer_step`` as its owner publishes it: 4 KiB a row in each large file."""
    tensors = {"w": torch.full((rows, 1024), outer_step + len(text) / 8)}
    torch.save({"momentum": tensors["w"]}, buffer := io.BytesIO())
    files = {
        keys.CONFIG: ConfigExtras((), 0).merge_into({"model_type": "llama", "text": text}),
        keys.MODEL: save(tensors, metadata=keys.SAFETENSORS_METADATA),
        keys.OUTER_OPTIMIZER: buffer.getvalue(),
    }
    for name, data in files.items():
        store.put(keys.epoch_key(outer_step, name), data)
    metadata = Metadata.of(Revision(RUN, outer_step, 0), PEER_ID).to_json()
    store.put(keys.epoch_key(outer_step, keys.METADATA), metadata)
    return files


def publish(
    store: S3ObjectStore,
    folder: Path,
    *,
    settings: StoreSettings,
    journal: Path,
    revision: Revision = Revision(RUN, 4, 10),
) -> PublicationReport:
    """Upload ``folder`` as ``revision``, by the instance "me" from a journal at ``journal``."""
    publication = Publication(store, Journal(journal), settings, "me")
    return publication.run(Submission(folder, revision, 1, PEER_ID))


class Upload:
    """A new bucket of ``server`` and a snapshot of one rank, which :meth:`send` uploads to it."""

    revision = Revision(RUN, 4, 10)

    def __init__(
        self, server: ObjectStoreServer, folder: Path, *, rows: int = 2000, **changes: Any
    ) -> None:
        self.settings = settings_for(server, **changes)
        self.bucket = new_bucket(server, self.settings)
        self.folder, self.journal = folder / "s", folder / "j.json"
        self.files = write_snapshot(self.folder, self.revision, world_size=1, rows=rows)
        size = self.settings.part_size
        sizes = [path.stat().st_size for path in self.files.values()]
        self.parts = sum(-(-s // size) for s in sizes if s > size)

    def send(self, endpoint: str) -> PublicationReport:
        """Upload it by way of ``endpoint``, continuing where the journal stands."""
        settings = dataclasses.replace(self.settings, endpoint_url=endpoint)
        store = S3ObjectStore.from_settings(settings, bucket=self.bucket.bucket, write=True)
        return publish(store, self.folder, settings=settings, journal=self.journal)

    def assert_whole(self, report: PublicationReport) -> None:
        assert report.ok, report.reason
        assert_published(self.bucket, self.revision, self.files)
        assert self.bucket.list_multiparts() == []


def finish_rank(folder: Path, rank: int, world_size: int, names: list[str] | None = None) -> None:
    names = [keys.inner_optimizer(rank, world_size)] if names is None else names
    done = {
        "rank": rank,
        "world_size": world_size,
        "files": [
            {"name": n, "size": (folder / n).stat().st_size, "not_finite": None} for n in names
        ],
    }
    (folder / f"rank-{rank}.done.json").write_text(json.dumps(done))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def object_digest(store: S3ObjectStore, key: str) -> str:
    data = store.get(key, limit=1 << 30)
    assert data is not None, f"{key} is not there"
    return hashlib.sha256(data).hexdigest()


def assert_published(store: S3ObjectStore, revision: Revision, files: dict[str, Path]) -> None:
    """Every object is the snapshot's, and both metadata documents name it."""
    retry = Retry(each=timedelta(seconds=30))  # a busy machine's answers slowly
    for name, path in files.items():
        assert retry(object_digest, store, keys.epoch_key(revision.outer_step, name)) == digest(
            path
        ), name
    for key in (keys.epoch_key(revision.outer_step, keys.METADATA), keys.ROOT_METADATA):
        data = retry(store.get, key, limit=10_000)
        assert data is not None
        assert Metadata.parse(data).revision == revision
