"""Names every peer of the network agrees on (protocol page, section 1). All of them are facts of
the public network; the settings that carry them as defaults may be changed for a network of one's
own.
"""

from __future__ import annotations

import re

NETUID = 38
RUN = 5
RUN_ID = "v1_2_7_r5"
GLOBAL_MODEL_NAME = "llama-4b-ws-4"
TOKENIZER_NAME = "dstrbtd/llama-1b"
DATASET = "HuggingFaceFW/fineweb-edu"
MASTER_HOTKEY = "5EnC86fRRRoaXUZvkrDFYpAihuyEAp3wGkY5r3Gak1kPTDVP"
BOOTSTRAP_PEERS = (
    "/ip4/161.97.156.125/tcp/8000/p2p/12D3KooWHDMAeP3zKHrALtREoc2vfYQL7HhsMN7WBvft7hgBCRhK",
)
MAX_UIDS = 256

_ACCOUNT_ID = re.compile(r"[0-9a-f]{32}")


def miner_bucket(global_bucket: str, uid: int) -> str:
    """Bucket of a miner: ``llama-4b-ws-4-007`` for uid 7. Raises ValueError for a negative uid."""
    if uid < 0:
        raise ValueError(f"uid {uid} is negative")
    return f"{global_bucket}-{uid:03d}"


def r2_endpoint(account_id: str) -> str:
    """The R2 endpoint of an account. Raises ValueError unless it is 32 hexadecimal digits, since
    an account id comes from other peers' commitments and becomes part of a host name.
    """
    if not _ACCOUNT_ID.fullmatch(account_id.lower()):
        raise ValueError("an R2 account id is 32 hexadecimal digits")
    return f"https://{account_id.lower()}.r2.cloudflarestorage.com"


def averager_prefix(run_id: str = RUN_ID) -> str:
    """Prefix of the averager's DHT keys and RPC names: ``v1_2_7_r5_grad_averager``."""
    return f"{run_id}_grad_averager"
