"""Names that follow from what a network's file says (protocol page, section 1)."""

from __future__ import annotations

import re

_ACCOUNT_ID = re.compile(r"[0-9a-f]{32}")


def miner_bucket(global_bucket: str, uid: int) -> str:
    """Name a miner's bucket: ``llama-4b-ws-4-007`` for uid 7.

    Raises ValueError for a negative uid.
    """
    if uid < 0:
        raise ValueError(f"uid {uid} is negative")
    return f"{global_bucket}-{uid:03d}"


def r2_endpoint(account_id: str) -> str:
    """Return the R2 endpoint of an account.

    Raises ValueError unless the id is 32 hexadecimal digits: it comes from other peers' commitments
    and becomes part of a host name.
    """
    if not _ACCOUNT_ID.fullmatch(account_id.lower()):
        raise ValueError("an R2 account id is 32 hexadecimal digits")
    return f"https://{account_id.lower()}.r2.cloudflarestorage.com"


def averager_prefix(run_id: str) -> str:
    """Return the prefix of the averager's DHT keys and RPC names: ``v1_2_7_r5_grad_averager``."""
    return f"{run_id}_grad_averager"
