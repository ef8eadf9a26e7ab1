"""Simulate the network around one member: the time, a store with faults, and a validator."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bittensor.sp_core import Keypair
from bittensor_core import verify

from distributed_training.common.backoff import Clocks
from distributed_training.exchange.base import Close, CloseReached, UpdateReady, upload_path
from distributed_training.exchange.own_uploads import OwnUploads
from distributed_training.exchange.store_rounds import StoreRounds
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Manifest, Master, Merged, Refused
from distributed_training.store.base import ObjectInfo
from tests.tools.outer_steps import RUN_ID, manifest_after, state_of

MASTER = Keypair.create_from_uri("//Alice")
MEMBER = Keypair.create_from_uri("//Bob").ss58_address
UID = 7
PERIOD, GRACE = 600.0, 60.0
UPDATE_BYTES = 1000


class Time:
    """A time that tests set. ``off``: seconds by which our clock is ahead of the store's."""

    def __init__(self, off: float = 0.0) -> None:
        self.passed = 0.0
        self.off = off

    def steady(self) -> float:
        return 50.0 + self.passed

    def store(self) -> float:
        return 1.8e9 + self.passed

    def unix(self) -> float:
        return self.store() + self.off


class FaultyStore:
    """A store whose clock is ``time``, and whose answers a test may change.

    ``faults``: functions by operation and prefix of the key; each gets the answer, and returns
    another answer or raises.
    """

    def __init__(self, store: Any, time: Time) -> None:
        self._store = store
        self._time = time
        self.faults: dict[tuple[str, str], Callable[[Any], Any]] = {}
        self.asked: Counter[tuple[str, str]] = Counter()

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)
        if name not in ("head", "get", "get_range", "put", "put_new"):
            return real

        def call(key: str, *args: Any, **kwargs: Any) -> Any:
            self.asked[name, key] += 1
            fault = next(
                (f for (op, at), f in self.faults.items() if op == name and key.startswith(at)),
                None,
            )
            if fault is not None and getattr(fault, "first", False):
                fault(None)
            answer = real(key, *args, **kwargs)
            if isinstance(answer, ObjectInfo):
                age = self._time.store() - answer.modified
                answer = dataclasses.replace(answer, age_seconds=age)
            return answer if fault is None else fault(answer)

        return call


class Leader:
    """Stands for a validator: publishes manifests, updates, weights and the state."""

    def __init__(self, store: Any, time: Time, master: Keypair = MASTER) -> None:
        self.store, self.time, self.master = store, time, master
        self.serial, self.weights_at = 1, (0,)
        self.chain: list[Manifest] = []
        self.publish_manifest()
        self.closes_at = time.store() + PERIOD
        self.put_state()

    @property
    def close(self) -> Close:
        return Close(len(self.chain) - 1, self.serial, self.closes_at, GRACE)

    def put_state(self, by: Keypair | None = None, **changes: Any) -> bytes:
        """Write the state, signed by the master or by another key."""
        now = self.time.store()
        state = state_of(
            self.chain,
            self.weights_at,
            run_id=RUN_ID,
            serial=self.serial,
            closes_at=self.closes_at,
            grace=GRACE,
            written_at=now,
            expires=now + 2 * PERIOD,
        )
        data = dataclasses.replace(state, **changes).to_bytes((by or self.master).sign)
        self.store.put(keys.STATE, data)
        return data

    def move_close(self) -> None:
        self.serial += 1
        self.closes_at = self.time.store() + PERIOD
        self.put_state()

    def build_manifest(self, data: bytes, files: dict[str, bytes], **changes: Any) -> Manifest:
        now, merges = self.time.store(), (merged(0, "f" * 64),)
        values: dict[str, Any] = {
            "run_id": RUN_ID,
            "update": sha256(data) if data else "",
            "weights": sha256(b"weights %d" % len(self.chain)),
            "merged": merges if data else (),
            "closed_at": now,
            "serial": self.serial,
            "made_at": now,
            "files": {name: sha256(data) for name, data in files.items()},
            "recovered": self.chain[-1].recovered if self.chain else 0,
        }
        return manifest_after(self.chain, **values | changes)

    def publish_manifest(self, *, whole: bool = False, **changes: Any) -> Manifest:
        """Publish an outer step, but not the state. ``whole``: publish whole weights too."""
        outer_step = len(self.chain)
        update = b"update %06d " % outer_step * (UPDATE_BYTES // 14) if outer_step else b""
        files: dict[str, bytes] = {}
        if whole or not outer_step:
            model = b"model %06d " % outer_step * (8 * UPDATE_BYTES // 13)
            files = {keys.CONFIG: b'{"outer_step": %d}' % outer_step, keys.MODEL: model}
            self.weights_at = (*self.weights_at, outer_step) if outer_step else (0,)
        if update and "update" not in changes:
            self.store.put(keys.outer_key(outer_step, keys.UPDATE), update)
        return self._put(files, self.build_manifest(update, files, **changes))

    def _put(self, files: dict[str, bytes], manifest: Manifest) -> Manifest:
        outer_step = len(self.chain)
        for name, data in {**files, keys.MANIFEST: manifest.to_bytes(self.master.sign)}.items():
            self.store.put(keys.outer_key(outer_step, name), data)
        self.chain.append(manifest)
        return manifest

    def take_outer_step(self, *, whole: bool = False, **changes: Any) -> Manifest:
        """Publish the next outer step and a state that names its close."""
        manifest = self.publish_manifest(whole=whole, **changes)
        self.move_close()
        return manifest

    def go_back(self, to: int) -> None:
        """Go back to an outer step, and open the next close."""
        outer_step, files = len(self.chain), {keys.CONFIG: b"{}", keys.MODEL: b"old"}
        self._put(files, self.build_manifest(b"", files, rewound_to=to))
        self.weights_at = (*self.weights_at, outer_step)[-2:]
        self.move_close()

    def recover(self, above: int, to: int) -> None:
        """Begin the chain again above an outer step, with the weights of outer step ``to``."""
        self.chain += self.chain[-1:] * (above + 1 - len(self.chain))  # these are not in the store
        outer_step = above + 1
        files = {keys.CONFIG: b"{}", keys.MODEL: b"recovered"}
        root = {"previous": "", "rewound_to": to, "recovered": outer_step}
        self._put(files, self.build_manifest(b"", files, **root))
        self.weights_at = (outer_step,)
        self.serial += 1000
        self.move_close()


def merged(uid: int, digest: str) -> Merged:
    return Merged(uid, MEMBER, digest, 1.0, 1.0, 0.01, 30, 3000)


def refused(cause: str, digest: str, uid: int = UID) -> Refused:
    return Refused(uid, MEMBER, digest, cause, "a reason")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Miner:
    """Stand for the loop of a miner, and drive the real StoreRounds from the test's own thread."""

    def __init__(self, store: Any, folder: Path, time: Time, held: int = 0) -> None:
        #: The posted events; for CloseReached and UpdateReady the close and the update.
        self.facts: list[Any] = []
        self.time, self.folder = time, folder
        self.rounds = StoreRounds(
            store,
            folder,
            master=Master(RUN_ID, MASTER.ss58_address, verify),
            uploads=OwnUploads(store, folder / "uploads", UID),
            clocks=Clocks(time.steady, time.unix),
        )
        # Do what start() does except for the thread, because the test takes the turns.
        self.rounds._post = self.on_event
        self.rounds._held, self.rounds._largest_update = held, 2 * UPDATE_BYTES

    def turn(self) -> float:
        """Take a turn, wait until an upload is sent, and return the seconds to the next turn."""
        wait = self.rounds.turn()
        if (sending := self.rounds._sending) is not None:
            sending[2].join(30)
            assert not sending[2].is_alive()
        return wait

    def on_event(self, event: Any) -> None:
        match event:
            case CloseReached(close=close, until=until):
                left = until - self.time.steady()
                assert abs(left - (close.ends_at - self.rounds.now())) < 1.0
                event = close
            case UpdateReady(update=update):
                event = update
        self.facts.append(event)

    def upload(self, close: Close, data: bytes = b"our upload") -> str:
        """Write an upload, send it in one turn, and return its digest."""
        digest = self.write_upload(close, data)
        self.send(close)
        self.turn()
        return digest

    def apply(self, outer_step: int, **how: bool) -> list[Any]:
        """Report an outer step as the loop does; return what is posted in the turn after it."""
        self.rounds.applied(outer_step, **how)
        self.turn()
        return self.take_facts()

    def send(self, close: Close) -> None:
        self.rounds.send(close)

    def upload_path(self, close: Close) -> Path:
        return upload_path(self.folder / "uploads", close)

    #: The network's outer step, according to the accepted state.
    head = property(lambda self: getattr(self.rounds.next_close, "outer_step", None))

    def take_facts(self) -> list[Any]:
        found = list(self.facts)
        self.facts.clear()
        return found

    def pass_time(self, seconds: float) -> list[Any]:
        """Let that time pass, with a turn whenever one is due, and return what is posted."""
        until = self.time.passed + seconds
        while (due := self.time.passed + self.turn()) <= until:
            self.time.passed = due
        self.time.passed = until
        return self.take_facts()

    def write_upload(self, close: Close, data: bytes = b"our upload") -> str:
        self.upload_path(close).write_bytes(data)
        return sha256(data)
