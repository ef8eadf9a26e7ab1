"""Comparisons with the global bucket, and a first start's download from it."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save

from distributed_training.config.settings import StoreSettings
from distributed_training.miner import events as ev
from distributed_training.miner import global_state
from distributed_training.miner.global_state import (
    TOLERANCE,
    GlobalBucket,
    GlobalEpoch,
    GlobalUnavailableError,
    NotComparable,
    drift,
)
from distributed_training.protocol import keys
from distributed_training.protocol.keys import r2_endpoint
from distributed_training.protocol.metadata import BucketCredentials, Metadata, build_commitment
from distributed_training.protocol.types import Revision
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.errors import AccessDeniedError, TransientError
from distributed_training.store.s3 import S3ObjectStore
from distributed_training.training.outer_step import Rows
from tests.tools.memory_store import MemoryObjectStore

pytestmark = pytest.mark.timeout(60)


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"a.weight": (700, 300), "b.weight": (64, 900), "norm": (300,)}
    return {n: torch.randn(s, generator=generator) for n, s in shapes.items()}


def rows_of(state: dict[str, torch.Tensor], rank: int = 0, world: int = 2) -> list[Rows]:
    """The row blocks of one rank, as FSDP cuts them."""
    found = []
    for name, value in state.items():
        size = -(-len(value) // world)
        found.append(Rows(name, rank * size, value[rank * size : (rank + 1) * size].clone()))
    return found


class File:
    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.data = save(state, metadata={"format": "pt"})
        self.read_bytes = 0

    def __call__(self, first: int, count: int) -> bytes:
        self.read_bytes += count
        return self.data[first : first + count]


def drift_of(rows: Sequence[Rows], file: File, seed: int) -> float:
    return drift(rows, file, size=len(file.data), seed=seed)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_same_weights_do_not_differ(rank: int) -> None:
    file = File(weights())
    assert drift_of(rows_of(weights(), rank), file, seed=1) == 0.0
    near = {n: v * (1 + 2e-6) for n, v in weights().items()}
    assert drift_of(rows_of(near, rank), file, seed=1) < TOLERANCE


@pytest.mark.parametrize("seed", range(5))
def test_a_tenth_of_other_values_is_found(seed: int) -> None:
    other = weights()
    other["a.weight"][:70] += 1e-3
    assert drift_of(rows_of(other), File(weights()), seed=seed) > TOLERANCE


@pytest.mark.parametrize("name", ["a.weight", "b.weight"])
def test_nan_is_a_difference_for_all_later_values(name: str) -> None:
    broken = weights()
    broken[name].fill_(float("nan"))
    found = [drift_of(rows_of(weights()), File(broken), seed=seed) for seed in range(5)]
    assert all(map(math.isnan, found))


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a.weight": torch.zeros(700, 300)}, "no float32"),
        ({n: v.half() for n, v in weights().items()}, "no float32"),
        ({n: v[:30] for n, v in weights().items()}, "another shape"),
    ],
)
def test_weights_of_unknown_outer_steps_are_not_compared(
    state: dict[str, torch.Tensor], said: str
) -> None:
    with pytest.raises(NotComparable, match=said):
        drift_of(rows_of(weights()), File(state), seed=1)


def test_malformed_safetensors_file_is_refused() -> None:
    with pytest.raises(NotComparable, match="impossible"):
        drift(rows_of(weights()), lambda first, count: b"\xff" * count, size=999, seed=1)


class Unread(GlobalBucket):
    """A bucket whose answers the test chooses."""

    def __init__(self) -> None: ...

    def stop(self) -> None: ...


def bucket(state: dict[str, torch.Tensor], folder: Path) -> GlobalBucket:
    store = MemoryObjectStore("global")
    store.put(keys.epoch_key(4, keys.MODEL), save(state, metadata={"format": "pt"}))
    store.put(keys.ROOT_METADATA, Metadata.of(Revision(5, 4, 0), "").to_json())
    reader = BucketReader(store, large=timedelta(seconds=2))
    return GlobalBucket(open_bucket=lambda: reader, folder=folder, run=5)


def test_the_bucket_compares_by_ranges(tmp_path: Path) -> None:
    reader = bucket(weights(), tmp_path)
    assert reader.drift(4, rows_of(weights())) == 0.0
    with pytest.raises(GlobalUnavailableError, match="missing"):
        reader.drift(5, rows_of(weights()))


def test_a_global_bucket_that_moved_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also while the old one still answers, was deleted, or refuses its keys; what is no commitment
    is not."""
    stores = {}
    for account, outer in (("a", 4), ("b", 6), ("c", 8)):
        stores[account] = MemoryObjectStore("global")
        stores[account].put(keys.ROOT_METADATA, Metadata.of(Revision(5, outer, 0), "").to_json())
    opened: list[str] = []

    def of_peer(*given: object, credentials: BucketCredentials, **named: object) -> Any:
        assert r2_endpoint(credentials.account_id)  # raises ValueError, as opening does
        opened.append(credentials.account_id[0])
        return stores[opened[-1]]

    def commit(account: str) -> None:
        nonlocal committed
        committed = build_commitment(BucketCredentials(account * 32, account * 32, account * 64))

    committed: str | None = None
    chain: Any = SimpleNamespace(commitment=lambda hotkey: committed)
    miner, settings = SimpleNamespace(master_ss58_address="5Master"), StoreSettings()
    config: Any = SimpleNamespace(miner=miner, store=settings)
    monkeypatch.setattr(S3ObjectStore, "of_peer", of_peer)
    commit("a")
    reader = global_state.open_global_bucket(config, chain, tmp_path, lambda: True)
    assert reader.outer_step() == 4
    caplog.set_level(logging.INFO)
    commit("b")
    assert [reader.outer_step(), reader.outer_step()] == [6, 6]
    stores["b"].delete_bucket()
    with pytest.raises(GlobalUnavailableError, match="does not exist"):
        reader.outer_step()
    refused = []

    def before(operation: str, key: str) -> None:
        refused.append(key)
        raise AccessDeniedError("403: these keys may not read")

    stores["b"]._before = before
    with pytest.raises(GlobalUnavailableError, match="may not read"):
        reader.outer_step()
    assert len(refused) == 1, "asked once: another try would be refused as well"
    commit("c")
    assert reader.outer_step() == 8
    for useless in (None, "no commitment", "z" * 128):
        committed = useless
        assert reader.outer_step() == 8
    assert opened == ["a", "b", "c"]
    assert caplog.text.count("The master hotkey committed other read keys") == 2


@contextlib.contextmanager
def watching(
    bucket: Any,
    *,
    interval: timedelta = timedelta(hours=1),
    rows: Sequence[Rows] = (),
) -> Iterator[tuple[GlobalEpoch, queue.Queue[ev.Event]]]:
    """A watch that runs inside, ours at outer step 4 with ``rows``, and the events it posts."""
    events: queue.Queue[ev.Event] = queue.Queue()
    watch = GlobalEpoch(
        bucket=bucket,
        post=events.put,
        interval=interval,
        epoch_start=lambda: (4, rows),
    )
    watch.start()
    try:
        yield watch, events
    finally:
        watch.close()


@pytest.mark.parametrize("same", [True, False])
def test_the_watch_answers_with_an_event(same: bool, tmp_path: Path) -> None:
    ours = weights() if same else {n: v + 0.01 for n, v in weights().items()}
    with watching(bucket(weights(), tmp_path), rows=rows_of(ours)) as (watch, events):
        watch.compare_weights(4)
        came = [events.get(timeout=25)]
        while not isinstance(came[-1], ev.WeightsCompared):
            came.append(events.get(timeout=25))
    came += [events.get() for _ in range(events.qsize())]
    assert ev.WeightsCompared(4, same) in came
    assert any(isinstance(event, ev.GlobalEpochSeen) for event in came)


def test_a_fetch_that_fails_in_an_unforeseen_way_is_answered_and_the_watch_continues(
    tmp_path: Path,
) -> None:
    class Reader(Unread):
        def outer_step(self) -> int:
            return 4

        def fetch(self, outer_step: int) -> Path:
            if outer_step == 5:
                raise RuntimeError("nobody thought of this")
            return tmp_path

    with watching(Reader()) as (watch, events):
        watch.fetch(5)
        failed = events.get(timeout=60)
        assert isinstance(failed, ev.GlobalFetchFailed) and "nobody thought" in failed.detail
        watch.fetch(6)
        assert events.get(timeout=60) == ev.GlobalFetched(tmp_path)


def test_a_comparison_that_could_not_be_made_is_made_at_the_next_look() -> None:
    class Reader(Unread):
        looks = 0

        def outer_step(self) -> int:
            return 4

        def drift(self, outer_step: int, rows: Sequence[Rows]) -> float:
            Reader.looks += 1
            if Reader.looks < 3:
                raise GlobalUnavailableError("503")
            return 1.0

    often, rows = timedelta(milliseconds=10), rows_of(weights())
    with watching(Reader(), interval=often, rows=rows) as (watch, events):
        watch.compare_weights(4)
        while not isinstance(event := events.get(timeout=60), ev.WeightsCompared):
            assert isinstance(event, ev.GlobalEpochSeen | ev.PlaceSeen)
        assert event == ev.WeightsCompared(4, False) and Reader.looks == 3


@pytest.mark.parametrize("what", ["epochs", "weights", "fetch"])
def test_a_stop_while_the_bucket_is_read_is_no_warning(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The bucket does not answer, so the request is tried again until the watch is closed."""
    reached, silent = threading.Event(), {"epochs": "get", "weights": "get_range", "fetch": "head"}

    def before(operation: str, key: str) -> None:
        if operation == silent[what]:
            reached.set()
            raise TransientError("503 ServiceUnavailable")

    reader = bucket(weights(), tmp_path)
    store: Any = reader.follow().store
    store.put(keys.epoch_key(4, keys.METADATA), Metadata.of(Revision(5, 4, 0), "").to_json())
    store._before = before
    with watching(reader, rows=rows_of(weights())) as (watch, events):
        watch.compare_soon()
        {"weights": watch.compare_weights, "fetch": watch.fetch}.get(what, lambda _: None)(4)
        assert reached.wait(20)
        watch.close()
        assert not watch._thread.is_alive()
    assert caplog.text == ""
    assert all(isinstance(event, ev.GlobalEpochSeen) for event in events.queue)


@pytest.mark.parametrize(("short", "attempts"), [(30.0, 3), (-1.0, 1)])
def test_a_fetch_that_used_its_time_is_not_tried_again_at_once(
    short: float, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads and rounds wait for its end."""
    monkeypatch.setattr(global_state, "_SHORT", short)
    monkeypatch.setattr(global_state, "_FIRST_WAIT", timedelta(0))
    fetched: list[int] = []

    class Reader(Unread):
        def fetch(self, outer_step: int) -> Path:
            fetched.append(outer_step)
            raise GlobalUnavailableError("500")

    with watching(Reader()) as (watch, events):
        watch.fetch(5)
        assert isinstance(events.get(timeout=60), ev.GlobalFetchFailed)
    assert fetched == [5] * attempts
