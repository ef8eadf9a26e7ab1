"""A chain behind the SDK's own seam: an in-memory ``Substrate`` that applies the calls it is given.

The SDK's client, its intents and call builders and its decoding of neurons and commitments run as
in production; only the node and its SCALE encoding are missing. State is a :class:`MemoryLedger`.
"""

from __future__ import annotations

import asyncio
import ipaddress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from bittensor import RpcConnectionError
from bittensor.balance import Balance
from bittensor.result import ExtrinsicResult

from distributed_training.chain.base import ChainError
from distributed_training.config.settings import ChainSettings
from tests.tools.chain_memory import MemoryChain, MemoryLedger

QUICK = timedelta(milliseconds=20)
#: An endpoint that is read again and again.
QUICK_READS = replace(
    ChainSettings(), chain_endpoint="ws://127.0.0.1:1", poll_interval=QUICK, neurons_interval=QUICK
)


class LedgerSubstrate:
    """``silent``: accepts calls and never answers them, as a hung node does. ``committed`` and
    ``certified``: more entries of the maps of commitments and certificates, by hotkey, as the SDK's
    decoder returns them. ``broken``: what reading a storage item or calling a runtime API raises,
    by name.
    """

    def __init__(self, ledger: MemoryLedger, netuid: int) -> None:
        self.ledger = ledger
        self.netuid = netuid
        self.silent = False
        self.connections = self.closed = 0
        self.committed: dict[str, Any] = {}
        self.certified: dict[str, Any] = {}
        self.broken: dict[str, BaseException] = {}

    async def _answer(self, name: str = "") -> None:
        if name in self.broken:
            raise self.broken[name]
        if self.silent:
            await asyncio.Event().wait()
        if not self.ledger.up:
            raise RpcConnectionError("connection refused")

    async def connect(self) -> None:
        await self._answer()
        self.connections += 1

    async def close(self) -> None:
        self.closed += 1

    async def block_number(self) -> int:
        await self._answer()
        return 1000

    async def block_hash(self, block: int | None = None) -> str:
        return f"0x{1000 if block is None else block:064x}"

    async def query(self, module: str, item: str, params: Any = None, **_: Any) -> Any:
        await self._answer(item)
        if item == "Uids":
            return next((n.uid for n in self._neurons() if n.hotkey == params[1]), None)
        defaults = {
            "ValidatorPermit": [n.validator_permit for n in self._neurons()],
            "MaxWeightsLimit": 65535,
        }
        return defaults.get(item, 0)

    def _neurons(self) -> tuple[Any, ...]:
        return self.ledger.neurons

    async def query_map(self, module: str, item: str, params: Any = None, **_: Any) -> Any:
        await self._answer(item)
        if item == "CommitmentOf":
            texts = self.ledger.commitments.items()
            ours = {hotkey: commitment_entry(text.encode()) for hotkey, text in texts}
            return list({**ours, **self.committed}.items())
        if item == "NeuronCertificates":
            peers = {n.hotkey: {"public_key": n.peer, "algorithm": 0} for n in self._neurons()}
            return list({**peers, **self.certified}.items())
        return []

    async def runtime_call(self, api: str, method: str, params: list[Any], **_: Any) -> Any:
        await self._answer(method)
        if method != "get_metagraph" or params != [self.netuid]:
            return None
        neurons = self._neurons()
        assert [n.uid for n in neurons] == list(range(len(neurons))), "a chain has no gaps"
        return {
            "netuid": self.netuid,
            "block": 1000,
            "tempo": 360,
            "last_step": 0,
            "blocks_since_last_step": 0,
            "owner_hotkey": neurons[0].hotkey if neurons else "5Owner",
            "owner_coldkey": neurons[0].hotkey if neurons else "5Owner",
            "network_registered_at": 0,
            "hotkeys": [n.hotkey for n in neurons],
            "coldkeys": [n.hotkey for n in neurons],
            "validator_permit": [n.validator_permit for n in neurons],
            "last_update": [0 for _ in neurons],
            "incentives": [round(n.incentive * 65535) for n in neurons],
            "total_stake": [0 for _ in neurons],
            "axons": [
                {
                    "ip": int(ipaddress.ip_address(n.ip)),
                    "port": n.port or 0,
                    "ip_type": ipaddress.ip_address(n.ip).version,
                }
                for n in neurons
            ],
        }

    async def compose(self, call: Any) -> Any:
        return _Composed(*call) if not isinstance(call, _Composed) else call

    async def estimate_fee(self, call: Any, keypair: Any) -> Balance:
        return Balance.from_rao(0)

    async def submit(self, call: Any, keypair: Any, **_: Any) -> ExtrinsicResult:
        """Applies the call as the pallet does and answers as the SDK: failures are returned."""
        await self._answer()
        pallet = MemoryChain(hotkey=keypair.ss58_address, ledger=self.ledger)
        try:
            if call.function == "set_commitment":
                ((kind, raw),) = call.params["info"]["fields"][0].items()
                assert kind == f"Raw{len(raw)}"
                if len(raw) > 128:  # there is no such kind of key
                    raise ChainError("commit: more than 128 bytes")
                pallet.commit(bytes(raw).decode())
            elif call.function in ("serve_axon", "serve_axon_tls"):
                assert call.params["netuid"] == self.netuid
                peer = bytes(call.params.get("certificate", b""))[1:].decode()
                ip = str(ipaddress.ip_address(call.params["ip"]))
                pallet.serve(ip, call.params["port"], peer)
            elif call.function == "set_mechanism_weights":
                pallet.set_weights(
                    dict(zip(call.params["dests"], call.params["weights"], strict=True))
                )
            else:
                raise AssertionError(call.function)
        except ChainError as error:
            return ExtrinsicResult(success=False, message=str(error), error=error)
        return ExtrinsicResult(success=True, message="Success")


def commitment_entry(raw: bytes) -> dict[str, Any]:
    """Return the entry of one field of raw bytes as the SDK's decoder does."""
    fields = [{f"Raw{len(raw)}": "0x" + raw.hex()}]
    return {"block": 5, "deposit": 0, "info": {"fields": fields}}


class _Composed:
    def __init__(self, module: str, function: str, params: dict[str, Any]) -> None:
        self.module, self.function, self.params = module, function, params
        self.data = b""
        self.call_hash = bytes(32)
