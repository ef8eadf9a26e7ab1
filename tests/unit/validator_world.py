"""A network in memory for the validator's tests: real model, real training, real files."""

from __future__ import annotations

import io
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from distributed_training.chain.base import Neuron
from distributed_training.config.validator import ValidatorSettings
from distributed_training.protocol import gradients as codec
from distributed_training.protocol import keys
from distributed_training.protocol.commitment import BucketCredentials, build_commitment
from distributed_training.protocol.metadata import ConfigExtras, Metadata
from distributed_training.protocol.payload import GradientMetadata, build_payload
from distributed_training.protocol.synapses import IsAliveReply
from distributed_training.protocol.types import (
    AllReduceError,
    AllReduceFault,
    AllReduceResult,
    Revision,
    RoundRequest,
)
from distributed_training.training.outer import nesterov_sgd
from distributed_training.validator.buckets import BucketError, ObjectInfo
from distributed_training.validator.evaluator import Evaluator
from distributed_training.validator.events import MemoryEvents
from distributed_training.validator.initial import initial_weights
from distributed_training.validator.model import EvaluationModel
from distributed_training.validator.publisher import GlobalPublisher, GlobalState
from distributed_training.validator.rounds import RoundCaller, RoundRules
from distributed_training.validator.scorer import Scorer
from distributed_training.validator.validator import Identity, Validator
from tests.chain_memory import MemoryChain, MemoryLedger

RUN = 5
VOCABULARY, LENGTH = 64, 24
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


class MemoryBucket:
    """A bucket with the faults tests need: ``fail`` names keys whose writes fail, once each."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.writes: list[str] = []
        self.fail: list[str] = []
        self.down = False

    def head(self, key: str) -> ObjectInfo | None:
        self._check()
        found = self.objects.get(key)
        return None if found is None else ObjectInfo(len(found[0]), found[1])

    def get(self, key: str, *, limit: int) -> bytes | None:
        self._check()
        found = self.objects.get(key)
        if found is not None and len(found[0]) > limit:
            raise BucketError(f"{key} has {len(found[0])} bytes, more than {limit}")
        return None if found is None else found[0]

    def download(self, key: str, path: Path, *, limit: int) -> None:
        data = self.get(key, limit=limit)
        if data is None:
            raise BucketError(f"{key} does not exist")
        path.write_bytes(data)

    def put(self, key: str, data: bytes) -> None:
        self._check()
        if key in self.fail:
            self.fail.remove(key)
            raise BucketError(f"{key}: 503")
        self.writes.append(key)
        self.objects[key] = (data, time.time())

    def upload(self, key: str, path: Path) -> None:
        self.put(key, path.read_bytes())

    def prune(self, *, newest: int, keep: int) -> None:
        self._check()
        for key in list(self.objects):
            found = keys.parse_epoch_key(key)
            if found is not None and found[0] <= newest - keep:
                del self.objects[key]

    def _check(self) -> None:
        if self.down:
            raise BucketError("the bucket does not answer")


class TwinMiner:
    """Trains the real model on its own data and publishes as the protocol page says."""

    def __init__(self, uid: int, state: GlobalState) -> None:
        self.uid = uid
        self.hotkey = f"miner-{uid}"
        self.peer_id = f"{PEER}{uid:02d}".replace("0", "1")
        self.bucket = MemoryBucket()
        self.answers = True
        self.outer_step = state.outer_step
        self.inner_step = 0
        self.blocks: list[int] = []
        self.start = [w.clone() for w in state.weights]
        self.momentum = state.momentum
        self._state = state
        self._model = EvaluationModel(model_config=MODEL_CONFIG, device=torch.device("cpu"))
        self._model.load(self.start)

    def train(self, block: int, steps: int = 30, learning_rate: float = 1e-2) -> None:
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
            self.inner_step += 1
        for p in parameters.values():
            p.requires_grad_(False)
        self.blocks.append(block)

    def pseudo_gradient(self) -> list[Tensor]:
        return [a - b for a, b in zip(self.start, self._model.state(), strict=True)]

    def publish(self, *, factor: float = 1.0, **changes: Any) -> None:
        """``factor`` scales the gradient sent (-1: harmful). ``changes``: inner_step, blocks."""
        inner_step = changes.get("inner_step", self.inner_step)
        blocks = changes.get("blocks", self.blocks)
        schema = self._state.schema
        codes = {
            name: codec.encode(0.8 * factor * g)
            for (name, _), g in zip(schema, self.pseudo_gradient(), strict=True)
        }
        meta = GradientMetadata(max(blocks, default=0), inner_step, self.outer_step, 1.0)
        buffer = io.BytesIO()
        torch.save(build_payload(codes, meta), buffer)
        tensors = dict(zip((n for n, _ in schema), self._model.state(), strict=True))
        revision = Revision(RUN, self.outer_step, inner_step)
        metadata = Metadata.of(revision, self.peer_id).to_json()
        for name, data in {
            keys.CONFIG: ConfigExtras(tuple(blocks), inner_step).merge_into(MODEL_CONFIG),
            keys.MODEL: save(tensors, metadata=keys.SAFETENSORS_METADATA),
            keys.GRADIENTS: buffer.getvalue(),
            keys.METADATA: metadata,
        }.items():
            self.bucket.put(keys.epoch_key(self.outer_step, name), data)
        self.bucket.put(keys.ROOT_METADATA, metadata)

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

    def alive(self) -> bool:
        return not self.dead

    def restart(self) -> None:
        if self.broken:
            raise RuntimeError("p2pd does not start")
        self.dead = False
        self.peer_id = f"{PEER}WW"


class TwinClient:
    def __init__(self, miners: Mapping[int, TwinMiner], swarm: TwinSwarm) -> None:
        self.miners = miners
        self.swarm = swarm
        self.deaf: set[int] = set()  # do not acknowledge AllReduce
        self.called: list[list[int]] = []

    def sweep_is_alive(
        self, neurons: Sequence[Neuron], timeout: timedelta
    ) -> dict[int, IsAliveReply | None]:
        found = {n.uid: self.miners.get(n.uid) for n in neurons}
        return {
            uid: IsAliveReply(True, m.outer_step) if m is not None and m.answers else None
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


@dataclass
class World:
    """Everything around one validator, and the validator. ``restart`` makes a new one."""

    folder: Path
    settings: ValidatorSettings
    uids: tuple[int, ...] = (3, 17)
    bucket: MemoryBucket = field(default_factory=MemoryBucket)
    chain_ledger: MemoryLedger = field(default_factory=MemoryLedger)
    miners: dict[int, TwinMiner] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chain = MemoryChain(hotkey="validator", ledger=self.chain_ledger)
        self.chain_ledger.register("validator", uid=200, stake=1e5, validator_permit=True)
        for uid in self.uids:
            hotkey = f"miner-{uid}"
            self.chain_ledger.register(hotkey, uid=uid)
            entry = self.chain_ledger.entries[uid]
            self.chain_ledger.entries[uid] = replace(entry, ip="127.0.0.1", port=1)
            credentials = BucketCredentials(f"{uid:032d}", "k" * 32, "s" * 64)
            self.chain_ledger.commitments[hotkey] = build_commitment(credentials)
        self.restart()

    def restart(self) -> None:
        self.stop = threading.Event()
        self.events = MemoryEvents()
        self.model = EvaluationModel(
            model_config=MODEL_CONFIG, device=torch.device("cpu"), stop=self.stop
        )
        self.swarm = TwinSwarm(self.model.schema)
        self.client = TwinClient(self.miners, self.swarm)
        self.publisher = GlobalPublisher(
            bucket=self.bucket,
            folder=self.folder / "global",
            run=RUN,
            peer_id=lambda: self.swarm.peer_id,
        )
        settings = self.settings
        self.rounds = RoundCaller(
            client=self.client,
            swarm=self.swarm,
            bucket_of=lambda neuron: self.open_bucket(neuron.uid, None),
            rules=RoundRules(
                alive_wanted=settings.alive_wanted,
                alive_least=settings.alive_least,
                alive_timeout=settings.alive_timeout,
                sweep_interval=settings.sweep_interval,
                sweep_patience=settings.sweep_patience,
                minimum_peers=settings.minimum_peers,
                top_candidates=settings.top_candidates,
                round_timeout=timedelta(seconds=10),
                min_group_size=2,
            ),
            caller="validator",
            run=RUN,
            scratch=self.folder / "scratch",
            stop=self.stop,
        )
        self.evaluator = Evaluator(model=self.model, pages=pages, rng=random.Random(1))
        self.validator = Validator(
            settings=settings,
            identity=Identity("validator", lambda: self.swarm.peer_id, RUN),
            epoch_length=10,
            chain=self.chain,
            rounds=self.rounds,
            publisher=self.publisher,
            scorer=Scorer(
                commitment=self.chain.commitment,
                open_bucket=self.open_bucket,
                publisher=self.publisher,
                evaluator=self.evaluator,
                events=self.events,
                age_limit=settings.upload_age_limit,
                uids_per_pass=settings.score_uids,
            ),
            model=self.model,
            held_out=sequences(999_999_999, 16),
            events=self.events,
            folder=self.folder,
            stop=self.stop,
        )

    def open_bucket(self, uid: int, credentials: BucketCredentials | None) -> MemoryBucket:
        if uid not in self.miners:
            raise BucketError("403")
        return self.miners[uid].bucket

    def initial(self) -> GlobalState:
        return GlobalState(
            model_config=MODEL_CONFIG,
            schema=self.model.schema,
            outer_step=0,
            weights=initial_weights(MODEL_CONFIG, seed=42),
            momentum=None,
            learning_rate=0.8,
            mu=0.9,
            last_allreduce_block=0,
        )

    def start(self) -> None:
        """The validator, then the miners as they load its state."""
        self.validator.start(self.initial)
        for uid in self.uids:
            self.miners.setdefault(uid, TwinMiner(uid, self.validator.state))

    def train_and_publish(self) -> None:
        block = self.chain.block()
        for miner in self.miners.values():
            miner.train(block)
            miner.publish()

    def kinds(self) -> list[str]:
        return [e["kind"] for e in self.events.events]


def settings(**changes: Any) -> ValidatorSettings:
    small = ValidatorSettings(
        blocks_per_allreduce=60,
        blocks_per_allreduce_later=0,
        tick=timedelta(milliseconds=10),
        alive_least=1,
        sweep_interval=timedelta(milliseconds=5),
        sweep_patience=timedelta(milliseconds=50),
        minimum_peers=2,
        score_blocks=5,
        publication_budget=timedelta(seconds=0),
    )
    return replace(small, **changes)
