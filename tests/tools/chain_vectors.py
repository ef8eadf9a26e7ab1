"""Signed requests of both schemes as bytes on disk, each with what must become of it.

    python -m tests.tools.chain_vectors        # sign them again (signatures are randomized)

``now`` is the server's clock. Whatever the code that signs or verifies turns into, these requests
were signed by bittensor 11.3 (btauth) and from the facts page (legacy), and their fate is the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from distributed_training.chain.identity import Wallet
from tests.tools.chain_world import MINER, PEER, POOR, SECOND, STRANGER, VALIDATOR, sign

FILE = Path(__file__).parents[1] / "vectors" / "signed_requests.json"
NOW = 1_790_000_000_000_000_000  # ns
SECOND_NS = 10**9
BODY = b'{"min_group_size": 32, "allreduce_timeout": 795.0}'
TAMPERED = b'{"min_group_size": 33, "allreduce_timeout": 795.0}'


def record() -> list[dict[str, Any]]:
    requests = []
    for scheme in ("btauth", "legacy"):
        legacy = scheme == "legacy"

        def add(
            name: str,
            status: int,
            reason: str,
            *,
            caller: Wallet = VALIDATOR,
            path: str = "/AllReduce",
            body: bytes = BODY,
            signed: bytes = BODY,
            nonce: int = NOW,
            receiver: str = MINER.ss58,
            scheme: str = scheme,
            **changes: str,
        ) -> None:
            headers = sign(scheme, caller, path, signed, receiver=receiver, nonce=nonce)
            requests.append(
                {
                    "scheme": scheme,
                    "name": name,
                    "path": path,
                    "headers": {**headers, **changes},
                    "body": body.decode(),
                    "now": NOW,
                    "status": status,
                    "reason": reason,
                }
            )

        hotkey = "bt_header_dendrite_hotkey" if legacy else "X-Bittensor-Hotkey"
        to = "bt_header_axon_hotkey" if legacy else "X-Bittensor-Receiver"
        add("valid", 200, "")
        add("valid: not the master", 200, "", caller=SECOND)
        add("valid: IsAlive of any neuron", 200, "", caller=PEER, path="/IsAlive")
        # The legacy signature does not cover the body; its values are clamped instead.
        add("tampered body", *((200, "") if legacy else (401, "signature")), body=TAMPERED)
        add("another receiver", 401, "receiver", receiver=PEER.ss58)
        add("receiver exchanged", 401, "signature", receiver=PEER.ss58, **{to: MINER.ss58})
        add("somebody else's name", 401, "signature", caller=STRANGER, **{hotkey: VALIDATOR.ss58})
        add("too old", 401, "stale", nonce=NOW - 20 * SECOND_NS)
        add("from the future", 401, "future", nonce=NOW + 20 * SECOND_NS)
        add("unknown hotkey", 403, "unknown_hotkey", caller=STRANGER)
        add("no permit", 403, "no_permit", caller=PEER)
        add("too little stake", 403, "low_stake", caller=POOR)
        add("our own hotkey", 403, "own_hotkey", caller=MINER)
    return requests


if __name__ == "__main__":
    FILE.write_text(json.dumps(record(), indent=1) + "\n")
