"""A network in memory for the validator's tests: real model, real training, real files."""

from __future__ import annotations

import hashlib
import io
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from distributed_training.chain.base import Neuron
from distributed_training.config import Config
from distributed_training.config.settings import ValidatorSettings
from distributed_training.node.buckets import NoBucket
from distributed_training.node.identity import Member
from distributed_training.protocol import gradients as codec
from distributed_training.protocol import keys
from distributed_training.protocol.gradients import GradientMetadata, Schema
from distributed_training.protocol.metadata import (
    BucketCredentials,
    CommitmentError,
    ConfigExtras,
    Metadata,
    build_commitment,
    parse_commitment,
)
from distributed_training.protocol.synapses import IsAliveReply
from distributed_training.protocol.types import (
    AllReduceError,
    AllReduceFault,
    AllReduceResult,
    Revision,
    RoundRequest,
)
from distributed_training.scoring.evaluator import EvaluationModel
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.errors import StoreError
from distributed_training.telemetry import read_events
from distributed_training.training.outer_rule import nesterov_sgd
from distributed_training.training.outer_step import GlobalState
from distributed_training.validator.hivemind import HivemindValidator
from distributed_training.validator.program import Parts, build
from tests.tools.chain_memory import MemoryChain, MemoryLedger
from tests.tools.gradient_file import build_payload
from tests.tools.memory_store import MemoryObjectStore
from tests.tools.network import network_file
from tests.tools.settings import load_config

RUN = 5
VOCABULARY, LENGTH = 64, 24
RULES = {"training.sequence_length": LENGTH, "round.round_timeout": "10s"}
MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}
PEER = "12D3KooWHDMAeP3zKHrALtREoc2vfYQL7HhsMN7WBvft7hgBCR"


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """The model is too small to share out, and on a busy machine threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sequences(seed: int, count: int = 8) -> Tensor:
    """Text with a rule that can be learned (the next word follows from the last), and some noise
    of its own for each seed."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    noise = torch.rand(count, LENGTH, generator=generator) < 0.1
    for t in range(1, LENGTH):
        ruled = (words[:, t - 1] * 5 + 3) % VOCABULARY
        words[:, t] = torch.where(noise[:, t], words[:, t], ruled)
    return words


def pages(uid: int, block: int) -> Tensor:
    return sequences(uid * 1_000_003 + block)


class MemoryBucket(MemoryObjectStore):
    """A bucket with the faults tests need: ``fail`` names keys whose writes fail, once each."""

    def __init__(self, name: str = "bucket") -> None:
        super().__init__(name, before=self._before_each)
        self.writes: list[str] = []
        self.fail: list[str] = []
        self.down = False

    @property
    def objects(self) -> dict[str, tuple[bytes, str, float]]:
        """Key -> content, etag, when it was written."""
        return self._objects

    def age(self, seconds: float) -> None:
        """Make everything in it older."""
        for key, (data, etag, written) in list(self._objects.items()):
            self._objects[key] = (data, etag, written - seconds)

    def _before_each(self, operation: str, key: str) -> None:
        if self.down:
            raise StoreError("the bucket does not answer")
        if operation != "put":
            return
        if key in self.fail:
            self.fail.remove(key)
            raise StoreError(f"{key}: refused")
        self.writes.append(key)


#: Weights after a training: see :meth:`TwinMiner.train`.
_TRAINED: dict[tuple[Any, ...], list[Tensor]] = {}


class TwinMiner:
    """Trains the real model on its own data and publishes as the protocol page says."""

    def __init__(self, uid: int, state: GlobalState) -> None:
        self.uid = uid
        self.hotkey = f"miner-{uid}"
        self.peer_id = f"{PEER}{uid:02d}".replace("0", "1")
        self.bucket = MemoryBucket()
        self.answers = True
        self.addresses: tuple[str, ...] = ()
        self.run_id: str | None = None
        self.outer_step = state.outer_step
        self.inner_step = 0
        self.blocks: list[int] = []
        self.start = [w.clone() for w in state.weights]
        self.momentum = state.momentum
        self._state = state
        self._model = EvaluationModel(model_config=MODEL_CONFIG, device=torch.device("cpu"))
        self._model.load(self.start)

    def train(self, block: int, steps: int = 30, learning_rate: float = 1e-2) -> None:
        """The same training from the same weights, which most tests begin with, is done once."""
        weights = hashlib.sha256(save({str(i): w for i, w in enumerate(self._model.state())}))
        key = (self.uid, block, steps, learning_rate, weights.digest())
        if key not in _TRAINED:
            self._descend(block, steps, learning_rate)
            _TRAINED[key] = [w.clone() for w in self._model.state()]
        self._model.load(_TRAINED[key])
        self.inner_step += steps
        self.blocks.append(block)

    def _descend(self, block: int, steps: int, learning_rate: float) -> None:
        parameters = self._model._parameters
        for p in parameters.values():
            p.requires_grad_(True)
        optimizer = torch.optim.AdamW(parameters.values(), lr=learning_rate)
        generator = torch.Generator().manual_seed(self.uid * 7919 + block)
        for _ in range(steps):
            seed = int(torch.randint(2**31, (1,), generator=generator))
            batch = torch.cat([pages(self.uid, block), sequences(seed)])
            loss = self._model._loss(batch) / (batch.shape[0] * (LENGTH - 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for p in parameters.values():
            p.requires_grad_(False)

    def pseudo_gradient(self) -> list[Tensor]:
        return [a - b for a, b in zip(self.start, self._model.state(), strict=True)]

    def publish(self, *, factor: float = 1.0, inner_step: int | None = None) -> None:
        """``factor`` scales the gradient sent (-1: harmful)."""
        inner_step = self.inner_step if inner_step is None else inner_step
        schema = self._state.schema
        codes = {
            name: codec.encode(0.8 * factor * g)
            for (name, _), g in zip(schema, self.pseudo_gradient(), strict=True)
        }
        meta = GradientMetadata(max(self.blocks, default=0), inner_step, self.outer_step, 1.0)
        buffer = io.BytesIO()
        torch.save(build_payload(codes, meta), buffer)
        tensors = dict(zip((n for n, _ in schema), self._model.state(), strict=True))
        revision = Revision(RUN, self.outer_step, inner_step)
        metadata = Metadata.of(revision, self.peer_id).to_json()
        for name, data in {
            keys.CONFIG: ConfigExtras(tuple(self.blocks), inner_step).merge_into(MODEL_CONFIG),
            keys.MODEL: save(tensors, metadata=keys.SAFETENSORS_METADATA),
            keys.GRADIENTS: buffer.getvalue(),
            keys.METADATA: metadata,
        }.items():
            self.bucket.put(keys.epoch_key(self.outer_step, name), data)
        self.bucket.put(keys.ROOT_METADATA, metadata)

    def change_payload(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Publish its ``gradients.pt`` again with another content."""
        data = self.bucket.objects["epoch-0/gradients.pt"][0]
        raw = torch.load(io.BytesIO(data), weights_only=True)
        change(raw)
        buffer = io.BytesIO()
        torch.save(raw, buffer)
        self.bucket.put("epoch-0/gradients.pt", buffer.getvalue())

    def outer(self, averaged: Sequence[Tensor]) -> None:
        """The outer step of a miner, against its own epoch-start weights."""
        old = self.momentum or [None] * len(self.start)
        pairs = [nesterov_sgd(s, g, m) for s, g, m in zip(self.start, averaged, old, strict=True)]
        self.start = [p[0] for p in pairs]
        self.momentum = [p[1] for p in pairs]
        self._model.load(self.start)
        self.outer_step += 1
        self.inner_step = 0
        self.blocks = []


class TwinSwarm:
    """Averages the validator's buffers with those of the miners that were called. ``fault`` makes
    the next round fail; ``distort`` changes the average; ``absent`` and ``failing`` are uids."""

    def __init__(self, schema: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        self.peer_id = f"{PEER}VV"
        self.visible_maddrs: list[str] = []
        self.closed = False
        self.buffers = [torch.zeros(shape) for _, shape in schema]
        self.called: list[TwinMiner] = []
        self.requests: list[tuple[RoundRequest, float]] = []
        self.contributions: list[list[Tensor]] = []
        self.fault: AllReduceFault | None = None
        self.distort: Callable[[Tensor], Tensor] = lambda t: t
        self.absent: set[int] = set()
        self.failing: set[int] = set()
        self.hang = False
        self.dead = self.broken = False
        self.arrived = threading.Event()  # the miners were called
        self.cancelled = threading.Event()

    def average(self, request: RoundRequest, *, weight: float = 1.0) -> AllReduceResult:
        self.requests.append((request, weight))
        if self.hang:
            self.cancelled.wait(20)
            raise AllReduceError(AllReduceFault.CANCELLED)
        while not self.arrived.wait(0.01):
            if self.cancelled.is_set():
                raise AllReduceError(AllReduceFault.CANCELLED)
        self.arrived.clear()
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise AllReduceError(fault, "as the test wants")
        group = [m for m in self.called if m.uid not in self.absent]
        self.contributions.append([b.clone() for b in self.buffers])
        averaged = []
        for i, own in enumerate(self.buffers):
            total = own * weight
            for miner in group:
                total = total + miner.pseudo_gradient()[i]
            averaged.append(self.distort(total / (weight + len(group))))
        for buffer, average in zip(self.buffers, averaged, strict=True):
            buffer.copy_(average)
        for miner in group:
            if miner.uid not in self.failing:
                miner.outer(averaged)
        return AllReduceResult(
            peers=(self.peer_id, *(m.peer_id for m in group)),
            failed_peers=tuple(m.peer_id for m in group if m.uid in self.failing),
            matchmaking_seconds=0.1,
            transfer_seconds=0.2,
            total_seconds=0.3,
        )

    def cancel(self) -> None:
        self.cancelled.set()

    def close(self) -> None:
        self.closed = True

    def alive(self) -> bool:
        return not self.dead

    def restart(self) -> None:
        if self.broken:
            raise RuntimeError("p2pd does not start")
        self.dead = False
        self.peer_id = f"{PEER}WW"


class TwinClient:
    def __init__(self, miners: Mapping[int, TwinMiner]) -> None:
        self.miners = miners
        self.swarm: Any = None
        self.deaf: set[int] = set()  # do not acknowledge AllReduce
        self.called: list[list[int]] = []
        self.asked: list[list[int]] = []
        self.epochs: list[int | None] = []  # what they were told of ours
        self.models_asked: list[int] = []
        self.on_model_asked: Callable[[int], None] = lambda uid: None

    def sweep_is_alive(
        self,
        neurons: Sequence[Neuron],
        timeout: timedelta,
        *,
        epoch: int | None = None,
        model: bool = False,
    ) -> dict[int, IsAliveReply | None]:
        for neuron in neurons if model else ():
            self.models_asked.append(neuron.uid)
            self.on_model_asked(neuron.uid)
        self.asked.append([n.uid for n in neurons])
        self.epochs.append(epoch)
        found = {n.uid: self.miners.get(n.uid) for n in neurons}
        return {
            uid: IsAliveReply(True, m.outer_step, m.peer_id, m.addresses, m.run_id)
            if m and m.answers
            else None
            for uid, m in found.items()
        }

    def sweep_all_reduce(
        self, neurons: Sequence[Neuron], request: RoundRequest
    ) -> dict[int, object | None]:
        self.called.append([n.uid for n in neurons])
        hearing = [n.uid for n in neurons if n.uid not in self.deaf]
        self.swarm.called = [self.miners[uid] for uid in hearing]
        if hearing:
            self.swarm.arrived.set()
        return {n.uid: (object() if n.uid in hearing else None) for n in neurons}


class Events:
    """Hold what the validator wrote to its events file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def all(self) -> list[dict[str, Any]]:
        return list(read_events(self.path)) if self.path.exists() else []

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.all if e["kind"] == kind]


class World:
    """Everything around one validator, and the validator as the program builds it. ``restart``
    makes a new one."""

    def __init__(
        self,
        folder: Path,
        settings: ValidatorSettings,
        *,
        uids: Sequence[int] = (3, 17),
        config: Config | None = None,
        held_out: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.folder, self.uids = folder, tuple(uids)
        self.config: Config = config if config is not None else config_of(folder, settings)
        (domain, *_) = self.config.domains
        self.held_out = held_out or {domain.name: sequences(999_999_999, 16)}
        self.events = Events(folder / "events.jsonl")
        self.bucket = MemoryBucket("global")
        self.miners: dict[int, TwinMiner] = {}
        self.chain_ledger = MemoryLedger()
        self.hotkeys = {200: "validator", **{uid: f"miner-{uid}" for uid in uids}}
        self.register()
        self.restart()

    def register(self) -> None:
        """The neurons on the chain, with endpoints and commitments."""
        ledger = self.chain_ledger
        ledger.register(self.hotkeys[200], uid=200, stake=1e5, validator_permit=True)
        self.chain = MemoryChain(hotkey=self.hotkeys[200], ledger=ledger)
        for uid in self.uids:
            ledger.register(self.hotkeys[uid], uid=uid)
            ledger.serve(self.hotkeys[uid], "127.0.0.1", 1)
            credentials = BucketCredentials(f"{uid:032d}", "k" * 32, "s" * 64)
            ledger.commit(self.hotkeys[uid], build_commitment(credentials))

    def uncommit(self, uid: int) -> None:
        """Take a miner's commitment from the chain."""
        ledger = self.chain_ledger
        with ledger.change():
            ledger._db.execute("UPDATE neurons SET commitment = NULL WHERE uid = ?", (uid,))

    def parts(self) -> Parts:
        wallet: Any = SimpleNamespace(ss58=self.hotkeys[200])
        client: Any = TwinClient(self.miners)
        self.client: TwinClient = client
        return Parts(
            member=Member(wallet, self.chain, 200),
            client=client,
            store=self.bucket,
            open_bucket=self.open_bucket,
            pages=lambda uid, block: self.pages(uid, block),
            held_out=self.held_out,
            swarm=self.make_swarm,
            vocabulary=VOCABULARY,
            eos_id=0,
        )

    def make_swarm(self, schema: Schema) -> Any:
        self.swarm = self.client.swarm = TwinSwarm(schema)
        return self.swarm

    def restart(self) -> None:
        self.stop = threading.Event()
        self.events.path.unlink(missing_ok=True)
        self.pages: Callable[[int, int], Tensor] = pages
        with ExitStack() as stack:
            validator, self.state, self.found = build(
                self.config, self.parts(), folder=self.folder, stop=self.stop, stack=stack
            )
            assert isinstance(validator, HivemindValidator)
            self.validator = validator
            self.closing = stack.pop_all()
        self.client.asked.clear()  # of an empty bucket, where the members are
        self.client.epochs.clear()
        self.publisher = self.validator._publisher
        self.model = self.validator._scorer.evaluator.model

    def open_bucket(self, neuron: Neuron) -> BucketReader:
        """By its commitment, as :class:`PeerBuckets` does."""
        try:
            parse_commitment(self.chain.commitment(neuron.hotkey) or "")
        except CommitmentError as error:
            raise NoBucket(str(error)) from None
        if neuron.uid not in self.miners:
            raise StoreError("403")
        return BucketReader(self.miners[neuron.uid].bucket)

    def start(self) -> None:
        """The validator, then the miners as they load its state."""
        self.validator.start(self.state, found=self.found)
        for uid in self.uids:
            self.miners.setdefault(uid, TwinMiner(uid, self.validator.state))

    def train_and_publish(self) -> None:
        block = self.chain.block()
        for miner in self.miners.values():
            miner.train(block)
            miner.publish()

    def kinds(self) -> list[str]:
        """Of the events in their order, without those that say how the network does."""
        return [e["kind"] for e in self.events.all if e["kind"] != "network"]


def trained(folder: Path, *, uids: Sequence[int] = (3, 17), **changes: Any) -> World:
    """A validator that has started, and miners that trained and published."""
    world = World(folder, settings(**changes), uids=uids)
    world.start()
    world.train_and_publish()
    return world


def config_of(folder: Path, settings: ValidatorSettings, *flags: str) -> Config:
    """A validator's, for the small model above."""
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model.json"
    model.write_text(json.dumps(MODEL_CONFIG))
    words = {
        "preset": "local",
        "neuron.run_folder": str(folder),
        "network": network_file(folder, RULES),
        "wallet.name": "w",
    }
    argv = [word for name, value in words.items() for word in (f"--{name}", value)]
    config = load_config("validator", [*argv, *flags], environ={}, dotenv=None, check=False)
    return replace(config, validator=replace(settings, model_config=model))


def settings(**changes: Any) -> ValidatorSettings:
    small = ValidatorSettings(
        blocks_per_allreduce=60,
        blocks_per_allreduce_later=0,
        epoch_length=10,
        tick=timedelta(milliseconds=10),
        sweep_interval=timedelta(milliseconds=5),
        sweep_patience=timedelta(milliseconds=50),
        minimum_peers=2,
        score_blocks=5,
        publication_budget=timedelta(seconds=0),
        seed=1,
    )
    return replace(small, **changes)
