"""The global state as miner, score preview and validator read it: one reader, the same answers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from distributed_training.config import load_config
from distributed_training.miner.global_state import GlobalBucket, GlobalUnavailableError
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import Metadata
from distributed_training.protocol.types import Revision
from distributed_training.scoring.score_preview import NotJudgeable, read_judged
from distributed_training.store import transfer
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.errors import StoreError
from distributed_training.training.model import parameter_schema
from distributed_training.training.outer_step import GlobalState
from distributed_training.validator.global_state import (
    GlobalPublisher,
    GlobalStateError,
    initial_weights,
)
from tests.tools.memory_store import MemoryObjectStore
from tests.tools.validator_world import MODEL_CONFIG, PEER

pytestmark = pytest.mark.timeout(60)
STEP = 3
CONFIG = load_config("validator", ["--preset", "local"], environ={}, dotenv=None, check=False)


def by_miner(store: Any, folder: Path) -> object:
    reader = BucketReader(store, large=timedelta(seconds=30), concurrency=1)
    bucket = GlobalBucket(open_bucket=lambda: reader, folder=folder, run=5)
    return bucket.fetch(bucket.outer_step())


def by_preview(store: Any, folder: Path) -> object:
    reader = BucketReader(store, large=timedelta(seconds=30), concurrency=1)
    return read_judged(reader, folder, CONFIG, block=10**6)


def by_validator(store: Any, folder: Path) -> object:
    return GlobalPublisher(store=store, folder=folder, run=5).load()


Read = Callable[[Any, Path], object]
READERS = pytest.mark.parametrize(
    ("read", "refuses"),
    [
        (by_miner, GlobalUnavailableError),
        (by_preview, NotJudgeable),
        (by_validator, (GlobalStateError, StoreError)),
    ],
)


@pytest.fixture
def store(tmp_path: Path) -> MemoryObjectStore:
    """A global bucket of outer step 3, published as a validator does."""
    store: Any = MemoryObjectStore("global")
    state = GlobalState(
        model_config=MODEL_CONFIG,
        schema=parameter_schema(MODEL_CONFIG),
        outer_step=STEP,
        weights=initial_weights(MODEL_CONFIG, seed=1),
        momentum=None,
        learning_rate=0.8,
        mu=0.9,
        last_allreduce_block=100,
    )
    publisher = GlobalPublisher(store=store, folder=tmp_path / "publisher", run=5)
    assert publisher.publish(state, PEER).ok
    return store


def metadata(run: int = 5, outer_step: int = STEP) -> bytes:
    return Metadata.of(Revision(run, outer_step, 0), PEER).to_json()


@pytest.mark.parametrize(
    ("key", "data", "words"),
    [
        (keys.ROOT_METADATA, b"{", "metadata.json is not JSON"),
        (keys.ROOT_METADATA, metadata(run=4), "of run 4, this network of run 5"),
        (keys.ROOT_METADATA, metadata(outer_step=9), "outer step 9|epoch-9"),
        (keys.epoch_key(STEP, keys.METADATA), None, "no whole outer step 3"),
        (keys.epoch_key(STEP, keys.METADATA), metadata(outer_step=2), "but 5.2.0"),
        (keys.epoch_key(STEP, keys.CONFIG), b"[]", "config.json is not a JSON object"),
        (keys.epoch_key(STEP, keys.MODEL), b"short", "model.safetensors"),
        (keys.epoch_key(STEP, keys.MODEL), None, "model.safetensors is missing"),
        (keys.epoch_key(STEP, keys.OUTER_OPTIMIZER), b"short", "outer_optimizer.pt"),
    ],
)
@READERS
def test_a_damaged_state_is_one_line_and_nothing_is_written(
    read: Read,
    refuses: Any,
    key: str,
    data: bytes | None,
    words: str,
    store: MemoryObjectStore,
    tmp_path: Path,
) -> None:
    if data is None:
        store.delete(key)
    else:
        store.put(key, data)
    before = dict(store._objects)
    if read is by_preview and key.endswith(keys.OUTER_OPTIMIZER):
        assert read(store, tmp_path / "read"), "a preview needs only its learning rate"
        return
    with pytest.raises(refuses, match=words) as caught:
        read(store, tmp_path / "read")
    assert "\n" not in str(caught.value)
    assert store._objects == before
    assert not list((tmp_path / "read").glob("epoch-*")), "no half of a state"


@READERS
def test_an_interrupted_fetch_continues_and_a_whole_one_is_not_repeated(
    read: Read,
    refuses: Any,
    store: MemoryObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "RANGE", 2**13)
    ranges: list[int] = []

    def before(operation: str, key: str) -> None:
        if operation == "get_range" and key.endswith(keys.MODEL):
            ranges.append(1)
            if len(ranges) == 4:
                raise StoreError("the connection is gone")

    store._before = before
    with pytest.raises(refuses, match="connection is gone"):
        read(store, tmp_path / "read")
    assert read(store, tmp_path / "read")
    whole = -(-len(store._objects[keys.epoch_key(STEP, keys.MODEL)][0]) // 2**13)
    assert len(ranges) < whole + 4 <= 2 * whole, "what came is kept"
    came = len(ranges)
    assert read(store, tmp_path / "read"), "as after a restart"
    assert len(ranges) == came
