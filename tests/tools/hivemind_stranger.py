"""Try to join a group, to aggregate and to download as a peer that is no member.

    python -m tests.tools.hivemind_stranger ADDRESS PREFIX

Print one JSON object with the code of the answer to each call, or "nothing".
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import serialize_torch_tensor
from hivemind.p2p import P2P, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import get_dht_time


class Averager(DecentralizedAverager):
    """Has hivemind's calls; the class name is part of the names of its RPCs."""


async def _first(stream: Any) -> str:
    try:
        async for message in stream:
            code = getattr(message, "code", None)
            return "data" if code is None else str(averaging_pb2.MessageCode.Name(code))
    except Exception as error:  # noqa: BLE001 - the peer may raise anything
        return type(error).__name__
    return "nothing"


async def visit(address: str, prefix: str) -> dict[str, str]:
    p2p = await P2P.create(initial_peers=[address])
    peer = PeerID.from_base58(address.rpartition("/")[2])
    stub = Averager.get_stub(p2p, peer, namespace=prefix)
    join = averaging_pb2.JoinRequest(
        schema_hash=b"x",
        expiration=get_dht_time() + 60,
        client_mode=False,
        gather=b"",
        group_key="x",
    )

    async def parts() -> Any:
        part = serialize_torch_tensor(torch.ones(10))
        yield averaging_pb2.AveragingData(group_id=b"x", tensor_part=part, weight=1.0)

    found = {
        "join": await _first(await stub.rpc_join_group(join)),
        "aggregate": await _first(await stub.rpc_aggregate_part(parts())),
        "download": await _first(await stub.rpc_download_state(averaging_pb2.DownloadRequest())),
    }
    await p2p.shutdown()
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(visit(*sys.argv[1:]))))
