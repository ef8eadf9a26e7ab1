"""What lies outside of the validator's room, built from the configuration: wallet, chain, signed
client, buckets, text and swarm."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import SecretStr

from distributed_training.chain.base import ChainError, wait_ready
from distributed_training.chain.client import SignedClient
from distributed_training.chain.local import LocalChain
from distributed_training.chain.wallet import Wallet, load_wallet
from distributed_training.config import Config, ConfigError
from distributed_training.data import (
    PageUnavailable,
    TextTokenizer,
    build_tokenizer,
    held_out_batches,
    open_source,
)
from distributed_training.protocol import names
from distributed_training.protocol.commitment import (
    BucketCredentials,
    CommitmentError,
    build_commitment,
)
from distributed_training.protocol.payload import Schema
from distributed_training.store.s3 import S3ObjectStore
from distributed_training.swarm import HivemindSwarm
from distributed_training.validator.buckets import BucketError, ReadBucket
from distributed_training.validator.program import Outside, Swarm
from distributed_training.validator.storage import StoreBucket

if TYPE_CHECKING:
    from distributed_training.chain.base import Chain

log = logging.getLogger(__name__)

COMMIT_ATTEMPTS = 3
COMMIT_RETRY = timedelta(seconds=5)
# With 256 miners to look at, one whose bucket does not answer must not hold up the others.
PEER_PATIENCE = timedelta(seconds=10)


def connect(config: Config, folder: Path, stack: ExitStack) -> Outside:
    """Everything that must be there before a model is built. What must be closed is left to
    ``stack``. Raises ConfigError, ChainError."""
    wallet = load_wallet(config.chain)
    chain = open_chain(config, wallet)
    stack.callback(chain.close)
    wait_ready(chain, config.chain.start_timeout)
    if chain.uid(wallet.ss58) is None:
        raise ConfigError(
            f"hotkey {wallet.ss58} is not registered on subnet {config.chain.netuid}, so it can "
            "neither call miners nor set weights: register it with `btcli subnet register`"
        )
    buckets = Buckets(config)
    commit_credentials(chain, wallet.ss58, buckets.own_credentials())
    tokenizer_path, eos_id = build_tokenizer(
        config.miner.global_tokenizer_name, folder / "tokenizer"
    )
    held_out = held_out_batches(
        tokenizer_path=tokenizer_path,
        eos_id=eos_id,
        sequences=config.validator.held_out_sequences,
        sequence_length=config.training.sequence_length,
    )

    def swarm(schema: Schema) -> Swarm:
        return HivemindSwarm(settings=config.swarm, schema=schema, run_folder=folder)

    return Outside(
        hotkey=wallet.ss58,
        chain=chain,
        client=SignedClient(
            wallet=wallet,
            scheme="legacy" if config.chain.client_scheme == "legacy" else "btauth",
        ),
        bucket=buckets.own(),
        open_bucket=buckets.of_miner,
        tokenizer=TextTokenizer(tokenizer_path, eos_id=eos_id),
        vocabulary=_vocabulary(tokenizer_path),
        eos_id=eos_id,
        source=open_source(config.data),
        unavailable=(PageUnavailable,),
        held_out=held_out,
        swarm=swarm,
    )


def open_chain(config: Config, wallet: Wallet) -> Chain:
    """The local subnet's chain, or a Subtensor."""
    if config.chain.local_url is not None:
        return LocalChain(url=config.chain.local_url, wallet=wallet)
    from distributed_training.chain.subtensor import BittensorChain

    return BittensorChain(settings=config.chain, wallet=wallet)


def commit_credentials(chain: Chain, hotkey: str, credentials: BucketCredentials) -> None:
    """Write the global bucket's read credentials to the chain unless they are there already.

    Miners find the global state through them. Raises ConfigError for keys that do not fit into a
    commitment, ChainError if the chain refuses it again and again.
    """
    try:
        text = build_commitment(credentials)
    except CommitmentError as error:
        raise ConfigError(
            f"the read keys do not fit into a commitment ({error}), so miners could not read the "
            "global bucket: correct R2_ACCOUNT_ID, R2_READ_ACCESS_KEY_ID, R2_READ_SECRET_ACCESS_KEY"
        ) from None
    for attempt in range(COMMIT_ATTEMPTS):
        if chain.commitment(hotkey) == text:
            return
        try:
            chain.commit(text)
            log.info("Metadata Dict Succesfully Logged To Chain.")
            return
        except ChainError as error:
            if attempt + 1 == COMMIT_ATTEMPTS:
                raise
            log.warning("The commitment was not written (%s). Trying again.", error)
            time.sleep(COMMIT_RETRY.total_seconds())


class Buckets:
    """Opens the global bucket with the write keys and a miner's with its committed read keys."""

    def __init__(self, config: Config) -> None:
        self._settings = config.store
        self._name = config.miner.global_model_name
        self._peers: dict[tuple[int, BucketCredentials], ReadBucket] = {}

    def own(self) -> StoreBucket:
        """Raises ConfigError."""
        try:
            return StoreBucket(
                S3ObjectStore.from_settings(self._settings, bucket=self._name, write=True)
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def own_credentials(self) -> BucketCredentials:
        settings = self._settings
        return BucketCredentials(
            settings.account_id or "",
            _text(settings.read_access_key_id),
            _text(settings.read_secret_access_key),
        )

    def of_miner(self, uid: int, credentials: BucketCredentials) -> ReadBucket:
        """Kept for as long as the credentials stay the same: a client is slow to make.

        Raises BucketError for an account that cannot be one.
        """
        found = self._peers.get((uid, credentials))
        if found is None:
            try:
                store = S3ObjectStore.of_peer(
                    self._settings,
                    bucket=names.miner_bucket(self._name, uid),
                    account_id=credentials.account_id,
                    access_key_id=credentials.access_key_id,
                    secret_access_key=credentials.secret_access_key,
                )
            except ValueError as error:
                raise BucketError(f"uid {uid}: {error}") from None
            self._peers = {key: b for key, b in self._peers.items() if key[0] != uid}
            found = self._peers[uid, credentials] = StoreBucket(store, small=PEER_PATIENCE)
        return found


def _text(value: SecretStr | None) -> str:
    return value.get_secret_value() if value is not None else ""


def _vocabulary(tokenizer_path: Path) -> int:
    """Words of the tokenizer, rounded up to a multiple of 8."""
    from tokenizers import Tokenizer

    return -(-Tokenizer.from_file(str(tokenizer_path)).get_vocab_size() // 8) * 8
