"""What lies outside of the validator's room, built from the configuration: wallet, chain, signed
client, buckets, text and swarm."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

from distributed_training.chain.client import SignedClient
from distributed_training.config import Config
from distributed_training.config.store import StoreSettings
from distributed_training.data import (
    PageUnavailable,
    TextTokenizer,
    held_out_batches,
    open_source,
)
from distributed_training.node.announce import commit
from distributed_training.node.buckets import check_own, open_own, own_commitment
from distributed_training.node.chain import join_subnet
from distributed_training.node.start import fetch_tokenizer
from distributed_training.protocol import names
from distributed_training.protocol.commitment import BucketCredentials
from distributed_training.protocol.payload import Schema
from distributed_training.store.journal import Journal
from distributed_training.store.s3 import S3ObjectStore
from distributed_training.swarm import HivemindSwarm
from distributed_training.validator.buckets import BucketError, ReadBucket
from distributed_training.validator.program import Outside
from distributed_training.validator.storage import StoreBucket

# With 256 miners to look at, one whose bucket does not answer must not hold up the others.
PEER_PATIENCE = timedelta(seconds=10)


def connect(config: Config, folder: Path, stack: ExitStack) -> Outside:
    """Everything that must be there before a model is built. What must be closed is left to
    ``stack``. Raises ConfigError, NetworkFailure."""
    member = join_subnet(config, stack)
    bucket = open_own(config.store, config.store.global_model_name)
    check_own(bucket)
    commit(member, own_commitment(config.store, bucket.bucket))
    tokenizer_path, eos_id = fetch_tokenizer(config, folder)
    held_out = held_out_batches(
        tokenizer_path=tokenizer_path,
        eos_id=eos_id,
        sequences=config.validator.held_out_sequences,
        sequence_length=config.training.sequence_length,
    )

    def swarm(schema: Schema) -> HivemindSwarm:
        return HivemindSwarm(settings=config.swarm, schema=schema, run_folder=folder)

    return Outside(
        hotkey=member.hotkey,
        chain=member.chain,
        client=SignedClient(
            wallet=member.wallet,
            scheme="legacy" if config.chain.client_scheme == "legacy" else "btauth",
        ),
        bucket=StoreBucket(bucket, journal=Journal(folder / "uploads.json")),
        open_bucket=PeerBuckets(config.store).of_miner,
        tokenizer=TextTokenizer(tokenizer_path, eos_id=eos_id),
        vocabulary=_vocabulary(tokenizer_path),
        eos_id=eos_id,
        source=open_source(config.data),
        unavailable=(PageUnavailable,),
        held_out=held_out,
        swarm=swarm,
    )


class PeerBuckets:
    """Opens miners' buckets with the read keys of their commitments."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._peers: dict[tuple[int, BucketCredentials], ReadBucket] = {}

    def of_miner(self, uid: int, credentials: BucketCredentials) -> ReadBucket:
        """Kept for as long as the credentials stay the same: a client is slow to make.

        Raises BucketError for an account that cannot be one.
        """
        found = self._peers.get((uid, credentials))
        if found is None:
            try:
                store = S3ObjectStore.of_peer(
                    self._settings,
                    bucket=names.miner_bucket(self._settings.global_model_name, uid),
                    account_id=credentials.account_id,
                    access_key_id=credentials.access_key_id,
                    secret_access_key=credentials.secret_access_key,
                )
            except ValueError as error:
                raise BucketError(f"uid {uid}: {error}") from None
            self._peers = {key: b for key, b in self._peers.items() if key[0] != uid}
            found = self._peers[uid, credentials] = StoreBucket(store, small=PEER_PATIENCE)
        return found


def _vocabulary(tokenizer_path: Path) -> int:
    """Words of the tokenizer, rounded up to a multiple of 8."""
    from tokenizers import Tokenizer

    return -(-Tokenizer.from_file(str(tokenizer_path)).get_vocab_size() // 8) * 8
