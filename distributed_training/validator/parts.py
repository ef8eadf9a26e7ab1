"""What a validator is built from, out of the configuration: hotkey, buckets, text, swarm.

Everything here may take long or fail; it happens before a model is built, so that a missing key or
an unregistered hotkey is told at once. Tests hand over parts of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from distributed_training.chain.client import SignedClient
from distributed_training.config import Config
from distributed_training.data.pipeline import held_out_batches
from distributed_training.data.source import open_source
from distributed_training.data.tokenizer import TextTokenizer
from distributed_training.node.announce import commit
from distributed_training.node.buckets import check_own, open_own, own_commitment
from distributed_training.node.chain import Member, join_subnet
from distributed_training.node.peers import PeerBuckets
from distributed_training.node.start import fetch_tokenizer
from distributed_training.protocol.payload import Schema
from distributed_training.scoring.evaluator import Pages
from distributed_training.scoring.pages import PageReader
from distributed_training.scoring.repository import OpenBucket
from distributed_training.store.s3 import S3ObjectStore
from distributed_training.swarm import HivemindSwarm


@dataclass(frozen=True)
class Parts:
    """``store``: the global bucket, to write. ``swarm`` is called once the model's schema is known.
    ``vocabulary``: words a new model needs."""

    member: Member
    client: SignedClient
    store: S3ObjectStore
    open_bucket: OpenBucket
    pages: Pages
    held_out: Tensor
    swarm: Callable[[Schema], HivemindSwarm]
    vocabulary: int
    eos_id: int


def connect(config: Config, folder: Path, stack: ExitStack) -> Parts:
    """What must be closed is left to ``stack``. Raises ConfigError, NetworkFailure."""
    member = join_subnet(config, stack)
    store = open_own(config.store, config.store.global_model_name)
    check_own(store)
    commit(member, own_commitment(config.store, store.bucket))
    tokenizer_path, eos_id = fetch_tokenizer(config, folder)
    held_out = held_out_batches(
        tokenizer_path=tokenizer_path,
        eos_id=eos_id,
        sequences=config.validator.held_out_sequences,
        sequence_length=config.training.sequence_length,
    )
    return Parts(
        member=member,
        client=SignedClient(wallet=member.wallet, scheme=config.chain.client_scheme),
        store=store,
        open_bucket=PeerBuckets(config.store, member.chain).of_miner,
        pages=PageReader.from_settings(
            config, open_source(config.data), TextTokenizer(tokenizer_path, eos_id=eos_id)
        ),
        held_out=held_out,
        swarm=lambda schema: HivemindSwarm(settings=config.swarm, schema=schema, run_folder=folder),
        vocabulary=_vocabulary(tokenizer_path),
        eos_id=eos_id,
    )


def _vocabulary(tokenizer_path: Path) -> int:
    """Words of the tokenizer, rounded up to a multiple of 8."""
    from tokenizers import Tokenizer

    return -(-Tokenizer.from_file(str(tokenizer_path)).get_vocab_size() // 8) * 8
