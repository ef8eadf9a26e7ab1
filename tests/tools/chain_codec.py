"""The SDK's own decoder of storage, with the metadata of a real runtime (Subtensor, spec 461).

``tests/vectors/subtensor_metadata.xz`` is what a node answered to ``Metadata_metadata_at_version``;
it lies with the tests of bittensor 11.3.0 (its sdist on PyPI, Apache-2.0), without the option byte
and packed again.
"""

from __future__ import annotations

import lzma
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from bittensor._transport.codec import RuntimeCodec
from bittensor._transport.storage import decode_map_pairs, decode_storage_value

from tests.tools.chain_substrate import LedgerSubstrate, commitment_entry

METADATA = Path(__file__).parents[1] / "vectors" / "subtensor_metadata.xz"


@cache
def codec() -> RuntimeCodec:
    return RuntimeCodec(
        lzma.decompress(METADATA.read_bytes()), spec_version=461, transaction_version=1
    )


def encode(fields: list[Any]) -> bytes:
    """Return the bytes that the chain stores for a commitment of ``fields``."""
    entry = {"deposit": 0, "block": 5, "info": {"fields": fields}}
    return codec().encode(codec().storage_entry("Commitments", "CommitmentOf").value_type, entry)


class EncodedSubstrate(LedgerSubstrate):
    """``stored``: bytes of the map of commitments, by hotkey. They are decoded as the SDK does, a
    page at a time; what timelocked commitments revealed is text that is no hexadecimal number."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stored: Mapping[str, bytes] = {}
        self.maps_read = 0

    def _bytes(self) -> dict[str, bytes]:
        texts = self.ledger.commitments.items()
        ours = {h: encode(commitment_entry(t.encode())["info"]["fields"]) for h, t in texts}
        return {**self.stored, **ours}

    async def query(self, module: str, item: str, params: Any = None, **_: Any) -> Any:
        if item != "CommitmentOf":
            return await super().query(module, item, params)
        entry = codec().storage_entry(module, item)
        return decode_storage_value(codec(), entry, self._bytes().get(params[1]))

    async def query_map(self, module: str, item: str, params: Any = None, **_: Any) -> Any:
        if item == "RevealedCommitments":
            self.asked.add(item)
            return [(hotkey, [("0xzz", 7)]) for hotkey in self.stored]
        if item != "CommitmentOf":
            return await super().query_map(module, item, params)
        self.maps_read += 1
        entry = codec().storage_entry(module, item)
        changes: list[tuple[str, str | None]] = [
            ("0x" + codec().storage_key(entry, [*params, hotkey]).hex(), "0x" + raw.hex())
            for hotkey, raw in self._bytes().items()
        ]
        return decode_map_pairs(codec(), entry, params, changes)
