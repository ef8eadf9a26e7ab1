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
from distributed_training.swarm import HivemindSwarm
from distributed_training.validator.buckets import BucketError, ReadBucket
from distributed_training.validator.program import Outside, Swarm
from distributed_training.validator.s3 import S3Bucket

if TYPE_CHECKING:
    from distributed_training.chain.base import Chain

log = logging.getLogger(__name__)

COMMIT_ATTEMPTS = 3
COMMIT_RETRY = timedelta(seconds=5)


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
        self._store = config.store
        self._name = config.miner.global_model_name

    def own(self) -> S3Bucket:
        store = self._store
        return S3Bucket(
            endpoint=self._endpoint(_text(store.account_id)),
            bucket=self._name,
            access_key_id=_text(store.write_access_key_id),
            secret_access_key=SecretStr(_text(store.write_secret_access_key)),
        )

    def own_credentials(self) -> BucketCredentials:
        store = self._store
        return BucketCredentials(
            _text(store.account_id),
            _text(store.read_access_key_id),
            _text(store.read_secret_access_key),
        )

    def of_miner(self, uid: int, credentials: BucketCredentials) -> ReadBucket:
        """Raises BucketError for an account that cannot be one."""
        try:
            endpoint = self._endpoint(credentials.account_id)
        except ValueError as error:
            raise BucketError(f"uid {uid}: {error}") from None
        return S3Bucket(
            endpoint=endpoint,
            bucket=names.miner_bucket(self._name, uid),
            access_key_id=credentials.access_key_id,
            secret_access_key=SecretStr(credentials.secret_access_key),
        )

    def _endpoint(self, account_id: str) -> str:
        """R2's, unless another object store is configured (the local subnet's)."""
        return self._store.endpoint_url or names.r2_endpoint(account_id)


def _text(value: SecretStr | str | None) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else value or ""


def _vocabulary(tokenizer_path: Path) -> int:
    """Words of the tokenizer, rounded up to a multiple of 8."""
    from tokenizers import Tokenizer

    return -(-Tokenizer.from_file(str(tokenizer_path)).get_vocab_size() // 8) * 8
