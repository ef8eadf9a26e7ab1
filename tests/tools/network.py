"""Write a network's file for a test: a built-in file with other values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bittensor_core import Keypair

from distributed_training.network import built_in_rules, of_exchange, signed, to_toml

ALICE = Keypair.create_from_uri("//Alice")


def network_file(folder: Path, rules: Mapping[str, Any], *, signer: Any = ALICE) -> str:
    """Write ``network.toml`` into ``folder``; return its path.

    ``rules``: values by key (``training.sequence_length``). Keys of the base that do not fit
    ``exchange`` are left out. ``signer`` is the master.
    """
    tables = built_in_rules()
    tables.pop("run_id")
    if rules.get("exchange") == "store":
        tables = of_exchange(tables, "store")
        rules = {"round.grace": "10s", "store.endpoint": "https://s3.example.org", **rules}
    if "chain.url" in rules:
        tables["chain"] = {"kind": "registry"}
    for key, value in {"chain.master_hotkey": signer.ss58_address, **rules}.items():
        table, _, name = key.rpartition(".")
        (tables.setdefault(table, {}) if table else tables)[name] = value
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "network.toml"
    path.write_text(signed(to_toml(tables), signer))
    return str(path)
