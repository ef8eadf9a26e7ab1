"""Kill a member of a store network at each step of sending and fetching, and start it again."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed_training.config.settings import StoreSettings
from distributed_training.exchange import chain_copy, own_uploads, store_rounds
from distributed_training.exchange.base import Close, UploadEnded
from distributed_training.exchange.own_uploads import OwnUploads
from distributed_training.protocol import keys
from distributed_training.protocol.types import Base, Update
from distributed_training.store import transfer
from distributed_training.store.base import Uplink
from distributed_training.store.opening import open_store
from tests.tools.memory_store import MemoryObjectStore
from tests.tools.store_network import GRACE, PERIOD, UID, Leader, Miner, Time, merged, sha256

pytestmark = pytest.mark.timeout(120)
CLOSE = Close(3, 5, 0.0, GRACE)
KEY = keys.upload_key(UID, 3, 5)


class Killed(BaseException):
    """Stands for the end of the process, so nothing catches it."""


class Life:
    """Counts steps that reach the store or the disk, and ends the process at step ``ends_at``."""

    def __init__(self) -> None:
        self.ends_at = -1
        self.steps = 0
        self._counting = threading.Lock()  # several threads take steps

    def begin(self, ends_at: int = -1) -> None:
        self.ends_at, self.steps = ends_at, 0

    def step(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._counting:
            before = self.steps
            self.steps += 2
        if self.ends_at in (before, -2):
            self.ends_at = -2  # its other threads end too
            raise Killed
        found = real(*args, **kwargs)
        if self.ends_at in (before + 1, -2):
            self.ends_at = -2
            raise Killed
        return found


class MortalStore:
    """Passes each call of a process to a store until the process is killed."""

    def __init__(self, store: Any, life: Life) -> None:
        self._store = store
        self._life = life

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)
        if not callable(real) or name == "close":
            return real
        if name == "multipart":
            return lambda: None if real() is None else self
        return lambda *args, **kwargs: self._life.step(real, *args, **kwargs)


@pytest.fixture(scope="module")
def life() -> Any:
    """Return a life that also counts everything that a process writes to its disk."""
    life = Life()
    with pytest.MonkeyPatch.context() as patch:
        for module, names in (
            (chain_copy, ["write_bytes"]),
            (own_uploads, ["write_state"]),
            (store_rounds, ["sync_folder"]),
            (transfer, ["write_state", "write_at", "sync_folder"]),
        ):
            for name in names:
                real = getattr(module, name)
                patch.setattr(module, name, lambda *a, real=real, **k: life.step(real, *a, **k))
        yield life


def folder_store(place: Path) -> Any:
    (place / "bucket").mkdir()
    return open_store(StoreSettings(endpoint_url=f"folder://{place}"), "bucket", write=True)


PART = 1000  # bytes of a part
#: Lives of a process: the step at which it ends, and whether it writes another file than before.
LIVES = st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=5)


@pytest.mark.parametrize("kind", ["folder", "twin", "twin in parts"])
def test_after_a_kill_one_close_has_one_file_and_its_note(
    kind: str, life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts = kind == "twin in parts"
    if in_parts:
        monkeypatch.setattr(transfer, "PART", PART)

    @settings(max_examples=60)
    @given(lives=LIVES)
    def check(lives: list[tuple[int, bool]]) -> None:
        with tempfile.TemporaryDirectory() as name:
            place = Path(name)
            real = folder_store(place) if kind == "folder" else MemoryObjectStore()
            folder, held, written = place / "uploads", None, b""
            for number, (ends_at, another) in enumerate([*lives, (-1, False)]):
                life.begin()
                uploads = OwnUploads(MortalStore(real, life), folder, UID)
                begun = uploads.begun(CLOSE)
                new = b"%d" % number * (PART + 7 if in_parts else 5)
                # A process whose checkpoint is older than the upload writes another file.
                data = new if another or not begun else written
                uploads.path(CLOSE).write_bytes(data)
                if not begun:
                    written = data
                life.begin(ends_at)
                try:
                    found = uploads.send(CLOSE, GRACE, Uplink())
                except Killed:
                    found = None
                life.begin()
                # The first claim decides, once it is on the disk.
                if not uploads.begun(CLOSE):
                    written = b""
                seen = real.get(KEY, limit=10**8)
                assert held in (None, seen)
                held = seen
                assert seen in (None, written)
                if found is not None and not found.cause:
                    assert seen == data == written
                if another and begun:
                    assert found is None or found.cause
            again = uploads.send(CLOSE, GRACE, Uplink())
            noted = uploads._note(CLOSE)
            assert noted is not None and noted.digest == sha256(written)
            if not again.cause:
                assert held == written

    check()


def test_a_sending_that_a_kill_ended_is_gone_on_with(tmp_path: Path, life: Life) -> None:
    life.begin()
    time = Time()
    store = MemoryObjectStore(clock=time.store)
    leader = Leader(store, time)
    miner = Miner(store, tmp_path / "rounds", time)
    [*_, close] = miner.pass_time(PERIOD)
    assert isinstance(close, Close)
    digest = miner.write_upload(close)
    uploads = OwnUploads(MortalStore(store, life), tmp_path / "rounds" / "uploads", UID)
    life.begin(2)
    with pytest.raises(Killed):
        uploads.send(close, GRACE, Uplink())
    life.begin()
    again = Miner(store, tmp_path / "rounds", time)
    posted = again.pass_time(5)
    assert [type(fact) for fact in posted] == [UploadEnded]
    assert store.get(keys.upload_key(UID, 0, close.serial), limit=99) == b"our upload"
    # A third process sees that the upload was sent, so it neither sends it nor asks for another.
    third = Miner(store, tmp_path / "rounds", time)
    assert not [fact for fact in third.pass_time(5) if isinstance(fact, (Close, UploadEnded))]
    third.send(close)
    third.turn()
    [sent] = third.take_facts()
    assert isinstance(sent, UploadEnded) and not sent.cause and sent.seconds == 0
    leader.take_outer_step(merged=(merged(UID, digest),))
    update = third.pass_time(10)[-1]
    assert isinstance(update, Update) and update.base is Base.MERGED


@pytest.mark.parametrize("whole", [False, True])
def test_a_fetch_that_is_killed_anywhere_continues(tmp_path: Path, life: Life, whole: bool) -> None:
    """An incomplete file must never be used as a complete one."""
    ends_at, killed = 0, True
    while killed:
        life.begin()
        place, time = tmp_path / str(ends_at), Time()
        store = MemoryObjectStore(clock=time.store)
        leader = Leader(store, time)
        for outer_step in range(1, 3):
            leader.take_outer_step(whole=outer_step == 2)
        if whole:
            store.delete(keys.outer_key(1, keys.UPDATE))
        mortal = MortalStore(store, life)
        life.begin(ends_at)
        try:
            Miner(mortal, place, time).turn()
            killed = False
        except Killed:
            killed = True
        steps = life.steps
        life.begin()
        again = Miner(mortal, place, time)
        again.turn()
        fact = again.take_facts()[-1]
        if whole:
            assert isinstance(fact, Update) and fact.whole and fact.outer_step == 2
            model = fact.path.read_bytes()
            assert sha256(model) == leader.chain[2].files[keys.MODEL]
        else:
            assert isinstance(fact, Update) and not fact.whole
            assert sha256(fact.path.read_bytes()) == leader.chain[1].update
        ends_at += 1
    assert ends_at > 20, steps
