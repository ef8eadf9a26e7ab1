"""Provide a store network for scripts to join: a folder as its store, a leader, a fake chain."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from bittensor.sp_core import Keypair
from torch import nn
from transformers import AutoModelForCausalLM

from distributed_training import member
from distributed_training.chain.identity import Wallet
from distributed_training.common.files import sha256_of
from distributed_training.config import Config
from distributed_training.data.tokenizer import build_tokenizer
from distributed_training.exchange import store_rounds
from distributed_training.exchange.opening import open_exchange
from distributed_training.miner import build, loop, start
from distributed_training.miner import events as ev
from distributed_training.miner.build import StartupInfo
from distributed_training.miner.ranks import RankChannel
from distributed_training.node.identity import Member
from distributed_training.store.folder import FolderStore
from distributed_training.training.model import hf_config
from distributed_training.training.script_weights import ScriptWeights
from distributed_training.training.trainer import Trainer
from distributed_training.training.weights import read_model_config
from tests.tools.chain_memory import MemoryChain, MemoryLedger
from tests.tools.network import ALICE, network_file
from tests.tools.small_miner import RULES
from tests.tools.store_leader import Leader
from tests.tools.training_world import tiny

VOCABULARY = 67
UID, MINER = 7, Keypair.create_from_uri("//Bob")
STORE_RULES = RULES | {
    "exchange": "store",
    "chain.url": "https://registry.example.org",
    "round.period": "1000s",
    "round.minimum_valid_inner_step": 1,
}


class Chain(MemoryChain):
    """A chain that knows the master and the miner."""

    def __init__(self) -> None:
        ledger = MemoryLedger()
        ledger.register(ALICE.ss58_address, uid=0, validator_permit=True)
        ledger.register(MINER.ss58_address, uid=UID)
        super().__init__(hotkey=MINER.ss58_address, ledger=ledger)


def open_played(
    bucket: Path,
    config: Config,
    folder: Path,
    stack: ExitStack,
    post: Callable[[ev.Event], None],
) -> tuple[build.Connections, StartupInfo]:
    """Replace ``build.open_connections``. Only the chain is a fake."""
    store = FolderStore(bucket, writes=True)
    member = Member(Wallet(MINER, None), Chain(), UID)
    rounds = open_exchange(config, member, folder, store=store, uploads=store, at_head=lambda: None)
    stack.callback(rounds.stop)
    resumes = any((folder / "checkpoints").glob("checkpoint-*"))
    outer_step, place, steps = build.first_weights(rounds, resumes=resumes)
    tokenizer, eos = build_tokenizer("bytes", folder / "tokenizer")
    info = StartupInfo(
        UID,
        read_model_config(place),
        str(tokenizer),
        eos,
        global_outer_step=outer_step,
        inner_steps=steps,
        hotkey=MINER.ss58_address,
    )
    return build.Connections(member, rounds, place), info


def build_played(
    bucket: Path,
    config: Config,
    folder: Path,
    ranks: RankChannel,
    events: SimpleQueue[ev.Event],
    stack: ExitStack,
) -> start.Rank:
    """Build the product's rank of a miner. Only rank 0 opens the network."""
    connections = None
    if ranks.rank == 0:
        connections, info = open_played(bucket, config, folder, stack, events.put)
        ranks.share("info", asdict(info))
    else:
        info = StartupInfo(**ranks.share("info", None))
    loop.TICK = 0.001
    given = (config, folder, torch.device("cpu"), ranks, events, stack)
    return start.build_rank(build.RankContext(*given), info, connections)


def save_starts(made: Trainer | ScriptWeights, folder: Path) -> None:
    """Save the whole weights with which the outer step began. Collective."""
    whole = made.stream.whole(made.outer.epoch_start or [])
    if dist.get_rank() == 0:
        torch.save(whole, folder / "epoch-start.pt")


class MemberWorld:
    """A network of one script. ``model`` is the content of a ``config.json``."""

    def __init__(
        self,
        folder: Path,
        model: dict[str, Any] | None = None,
        *,
        own: bool = True,
        rules: dict[str, Any] | None = None,
    ) -> None:
        self.folder, self.bucket = folder, folder / "bucket"
        self.model = model or tiny(vocab=VOCABULARY)
        folder.mkdir(exist_ok=True)
        held_out = folder / "held-out.txt"
        held_out.write_text("words\n" * 100)
        # Members train on text of their own.
        of_text = {"data.own": True, "data.held_out": f"{held_out}#{sha256_of(held_out)}"}
        whole = STORE_RULES | (of_text if own else {}) | (rules or {})
        self.network = network_file(folder, whole, signer=ALICE)
        self.run_id = member._config_of(self.network, {}).swarm.run_id
        members = {UID: MINER.ss58_address}
        self.leader = Leader(self.bucket, self.model, run_id=self.run_id, members=members)

    def settings(self, **more: Any) -> dict[str, Any]:
        return settings_in(self.folder) | more


def settings_in(folder: Path) -> dict[str, Any]:
    return {
        "neuron_run_folder": str(folder / "run"),
        "neuron_checkpoint_steps": "5",
    }


@contextlib.contextmanager
def played(bucket: Path) -> Iterator[None]:
    """Within this context, a join uses a folder as the store, and a fake chain."""
    opened = mock.patch.object(
        build, "open_connections", lambda *given: open_played(bucket, *given)
    )
    soon = mock.patch.multiple(store_rounds, _INTERVAL=0.1, _SOON=0.05)
    with opened, soon:
        yield


def script_model(model: dict[str, Any], seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    made: nn.Module = AutoModelForCausalLM.from_config(hf_config(model))
    return made


def batch(step: int, count: int = 4, length: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, VOCABULARY, (count, 1), generator=generator)
    return (start + torch.arange(length)) % VOCABULARY


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    ids = batch(step)
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
