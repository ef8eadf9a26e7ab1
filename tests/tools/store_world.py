"""Run a store network in memory: the real validator, and miners that train in its process."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from bittensor.sp_core import Keypair, verify
from torch import Tensor

from distributed_training.chain.identity import Wallet
from distributed_training.config import Config
from distributed_training.node.identity import Member
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Manifest, Master, State
from distributed_training.protocol.pages import JUDGED_PAGES, block_at
from distributed_training.protocol.update_file import (
    Header,
    UpdateFile,
    UpdateLayout,
    finish,
    rows_and_columns,
    write_rows,
)
from distributed_training.scoring.evaluator import EvaluationModel
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.errors import StoreError
from distributed_training.validator import closes
from distributed_training.validator.merge import digest_of
from distributed_training.validator.program import ValidatorParts, build
from tests.tools.chain_memory import MemoryChain, MemoryLedger
from tests.tools.memory_store import MemoryObjectStore
from tests.tools.validator_world import (
    LENGTH,
    MODEL_CONFIG,
    Events,
    config_of,
    pages,
    sequences,
)

PERIOD, GRACE = 600.0, 120.0  # seconds
_PATIENCE = timedelta(seconds=1)
_ANSWERS = 20.0  # seconds; on a busy machine each request may have to wait for a processor


@cache
def keypair(name: str) -> Keypair:
    return Keypair.create_from_seed(hashlib.sha256(name.encode()).digest())


class Clock:
    """The store's clock, which a test moves."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


class StoreBucket(MemoryObjectStore):
    """The global bucket. ``before_put`` is called with each key that is written, and may raise."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__("global", before=self._before_each, clock=clock)
        self.before_put: Callable[[str], None] = lambda key: None
        self.down = self.unreadable = False

    @property
    def objects(self) -> dict[str, tuple[bytes, str, float]]:
        return self._objects

    def _before_each(self, operation: str, key: str) -> None:
        if self.down or (self.unreadable and operation.startswith("get")):
            raise StoreError("the bucket does not answer")
        if operation == "put":
            self.before_put(key)

    def put_new(self, key: str, data: Any) -> str:
        with self._lock:
            if key in self._objects:
                from distributed_training.store.errors import PreconditionError

                raise PreconditionError(key)
            return self.put(key, data)


class StoreMiner:
    """A miner that trains the real model on its own pages, and uploads as members do."""

    def __init__(self, world: StoreWorld, uid: int) -> None:
        self.world, self.uid = world, uid
        self.pair = keypair(f"miner-{uid}")
        self.outer_step = 0
        self.model = EvaluationModel(model_config=MODEL_CONFIG, device=torch.device("cpu"))
        self.start = [w.clone() for w in world.validator.state.weights]
        self.moved: list[Tensor] = []
        self.pages: tuple[int, ...] = ()

    def train(self, steps: int = 4, learning_rate: float = 3e-3) -> None:
        self.model.load(self.start)
        parameters = self.model._parameters
        block = block_at(self.outer_step, 0)
        for p in parameters.values():
            p.requires_grad_(True)
        optimizer = torch.optim.AdamW(parameters.values(), lr=learning_rate)
        for step in range(steps):
            batch = torch.cat(
                [pages(self.uid, block), sequences(self.uid * 7919 + 100 * self.outer_step + step)]
            )
            loss = self.model._loss(batch)[0] / (batch.shape[0] * (LENGTH - 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for p in parameters.values():
            p.requires_grad_(False)
        self.moved = [a - b for a, b in zip(self.start, self.weights(), strict=True)]
        self.pages = (0, JUDGED_PAGES - 1)  # so that the judge draws the same block

    def weights(self) -> list[Tensor]:
        """Return copies of the model's weights."""
        return [self.model._parameters[name].detach().clone() for name, _ in self.model.schema]

    def header(self, **changes: Any) -> Header:
        state = self.world.state
        header = Header(
            kind="upload",
            run_id=self.world.run_id,
            outer_step=state.outer_step,
            serial=state.serial,
            hotkey=self.pair.ss58_address,
            start=digest_of(self.start),
            codec=self.world.config.rounds.codec,
            inner_steps=4,
            tokens=4 * 16 * LENGTH,
            pages=self.pages,
        )
        return replace(header, **changes)

    def encode(
        self, *, moved: Sequence[Tensor] | None = None, pair: Keypair | None = None, **changes: Any
    ) -> bytes:
        """Return an upload of what was trained, or of ``moved``, as bytes."""
        layout = UpdateLayout.of(self.world.schema, self.header(**changes))
        path = self.world.folder / f"of-miner-{self.uid}.safetensors"
        path.unlink(missing_ok=True)
        for index, tensor in enumerate(moved if moved is not None else self.moved):
            rows = tensor.reshape(rows_and_columns(tensor.shape)).contiguous()
            write_rows(path, layout, index, 0, rows)
        finish(path, layout, (pair or self.pair).sign)
        return path.read_bytes()

    @property
    def key(self) -> str:
        state = self.world.state
        return keys.upload_key(self.uid, state.outer_step, state.serial)

    def upload(self, data: bytes | None = None, **changes: Any) -> None:
        bucket = self.world.own.get(self.uid, self.world.bucket)
        bucket.put(self.key, self.encode(**changes) if data is None else data)

    def apply(self) -> None:
        """Apply all updates up to the head, and check each one as members do."""
        world = self.world
        while self.outer_step < world.state.outer_step:
            n = self.outer_step + 1
            path = world.folder / f"update-{self.uid}.safetensors"
            path.write_bytes(world.bucket.objects[keys.outer_key(n, keys.UPDATE)][0])
            update = UpdateFile.open(
                path,
                world.schema,
                run_id=world.run_id,
                kind="update",
                hotkey=world.master.ss58_address,
                verify=verify,
            )
            manifest = world.manifest(n)
            assert update.digest == manifest.update
            decoded = [update.decode(name, shape) for name, shape in world.schema]
            self.start = [w - d for w, d in zip(self.start, decoded, strict=True)]
            assert digest_of(self.start) == manifest.weights
            self.outer_step = n


class StoreWorld:
    """Everything around the validator of a store network; ``restart`` makes a new validator.

    ``own``: whether each member has a bucket of its own. ``begun``: whether to start a validator.
    ``change`` gets the configuration, and returns the one to use.
    """

    def __init__(
        self,
        folder: Path,
        *,
        uids: Sequence[int] = (3, 5, 17),
        own: bool = False,
        begun: bool = True,
        held_out: Mapping[str, Tensor] | None = None,
        change: Callable[[Config], Config] = lambda config: config,
        **changes: Any,
    ) -> None:
        self.folder, self.uids = folder, tuple(uids)
        base = config_of(folder)
        self.master = keypair("master")
        rules = {"exchange": "store", "period": timedelta(seconds=PERIOD)} | changes
        config = replace(
            base,
            rounds=replace(base.rounds, **rules),
            miner=replace(base.miner, master_ss58_address=self.master.ss58_address),
            store=replace(base.store, access="own" if own else "registry"),
        )
        self.config = change(config)
        self.held_out = held_out or {self.config.domains[0].name: sequences(999_999_999, 16)}
        self.run_id = self.config.swarm.run_id
        self.clock = Clock()
        self.bucket = StoreBucket(self.clock)
        self.own = {uid: StoreBucket(self.clock) for uid in self.uids if own}
        self.ledger = MemoryLedger()
        self.ledger.register(self.master.ss58_address, uid=200, validator_permit=True)
        self.chain = MemoryChain(hotkey=self.master.ss58_address, ledger=self.ledger)
        for uid in self.uids:
            self.ledger.register(keypair(f"miner-{uid}").ss58_address, uid=uid)
        self.events = Events(folder / "validator" / "events.jsonl")
        self.pages: Callable[[int, int], Tensor] = pages
        self.closing = ExitStack()
        if not begun:
            return
        self.restart()
        self.validator.start()
        self.schema = self.validator.state.schema
        self.miners = {uid: StoreMiner(self, uid) for uid in self.uids}

    def parts(self) -> ValidatorParts:
        wallet = Wallet(self.master, None)
        return ValidatorParts(
            member=Member(wallet, self.chain, 200),
            store=self.bucket,
            open_bucket=lambda neuron: BucketReader(self.own[neuron.uid], small=_PATIENCE),
            pages=lambda uid, block: self.pages(uid, block),
            held_out=self.held_out,
        )

    def restart(self, *, folder: Path | None = None) -> None:
        """Replace the validator by another one, as after a restart; ``folder``: its empty disk."""
        self.closing.close()
        place = folder or self.folder / "validator"
        place.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            self.validator = build(
                self.config, self.parts(), folder=place, stop=threading.Event(), stack=stack
            )
            self.closing = stack.pop_all()
        self.validator._look = _ANSWERS

    def restarted(self, *, folder: Path | None = None) -> None:
        self.restart(folder=folder)
        self.validator.start()

    # --- what the store shows -------------------------------------------------------------------

    @property
    def state(self) -> State:
        data = self.bucket.objects[keys.STATE][0]
        return State.parse(data, Master(self.run_id, self.master.ss58_address, verify))

    def manifest(self, outer_step: int) -> Manifest:
        data = self.bucket.objects[keys.outer_key(outer_step, keys.MANIFEST)][0]
        return Manifest.parse(data, Master(self.run_id, self.master.ss58_address, verify))

    # --- a round --------------------------------------------------------------------------------

    def until_close(self) -> None:
        self.clock.ahead += max(0.0, self.state.closes_at + 1 - self.clock())

    def until_late(self) -> None:
        self.clock.ahead += max(0.0, self.state.closes_at + self.state.grace + 1 - self.clock())

    def train(self, *uids: int) -> None:
        for uid in uids or self.uids:
            self.miners[uid].apply()
            self.miners[uid].train()

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.validator._looked = -closes.LOOK  # so that it reads the store again at once
            self.validator.tick()

    def send(self, *uids: int) -> None:
        """Let all miners train, wait for the close, and let ``uids`` upload; None: all."""
        self.train()
        self.until_close()
        for uid in uids or self.miners:
            self.miners[uid].upload()

    def end(self, ticks: int = 1) -> None:
        """Let the validator end the round, once no upload can arrive any more."""
        self.until_late()
        self.tick(ticks)

    def round(self) -> Manifest:
        """Let all miners train and upload, end the round, and return the head's manifest."""
        self.send()
        self.end()
        return self.manifest(self.state.outer_step)

    def fates(self, outer_step: int) -> dict[int, str]:
        """Return for each upload of an outer step, by uid, the cause of its refusal or "merged"."""
        manifest = self.manifest(outer_step)
        merged = {one.uid: "merged" if one.factor else "carried" for one in manifest.merged}
        return merged | {one.uid: one.cause for one in manifest.refused}
