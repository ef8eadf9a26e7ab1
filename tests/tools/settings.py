"""Load configurations for tests that need some network, but no particular one."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from bittensor_core import Keypair

from distributed_training import config
from distributed_training.config import Config
from distributed_training.config.model import Kind
from distributed_training.config.types import NoNetworkNamed
from distributed_training.network import USUAL, signed, to_toml

#: Flags of a miner with a tiny model, which shares the machine with other programs.
LOCAL = (
    "--neuron.device",
    "cpu",
    "--neuron.page_port",
    "off",
    "--neuron.local_batch_size_train",
    "2",
)


@cache
def usual_network() -> str:
    """Return the file of a network on Bittensor's chain, in which each member has a bucket."""
    alice = Keypair.create_from_uri("//Alice")
    rules: dict[str, Any] = {"format": 3, "exchange": "store", "name": "usual", "version": 1}
    of_it = {
        "chain.kind": "bittensor",
        "chain.endpoint": "finney",
        "chain.netuid": 38,
        "chain.master_hotkey": alice.ss58_address,
        "model.parameters": 4_000_000_000,
        "tokenizer.name": "bytes",
        "round.grace": "600s",
        "store.global_bucket": "usual",
        "store.access": "own",
    }
    for key, value in {**USUAL, **of_it}.items():
        table, _, name = key.partition(".")
        rules.setdefault(table, {})[name] = value
    path = Path(tempfile.mkdtemp(prefix="dt-usual-")) / "network.toml"
    path.write_text(signed(to_toml(rules), alice))
    return str(path)


def load_config(kind: Kind, argv: Sequence[str], **how: Any) -> Config:
    """Load it as the programs do, but use :func:`usual_network` if no network is named."""
    try:
        return config.load_config(kind, argv, **how)
    except NoNetworkNamed:
        # An operator may name the store only in the network that comes with the program.
        of_program = any(word.startswith("--r2.endpoint_url") for word in argv)
        place = "local" if of_program else usual_network()
        return config.load_config(kind, ["--network", place, *argv], **how)
