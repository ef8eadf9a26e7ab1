"""Names that follow from what a network's file says (protocol page, section 1), and peers' ids."""

from __future__ import annotations

import re

import base58

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


LONGEST_PEER_ID = 53  # characters, of a secp256k1 key; Ed25519 has 52, a hash of a longer key 46
_PEER_ID = re.compile(rf"[1-9A-HJ-NP-Za-km-z]{{40,{LONGEST_PEER_ID}}}")
_SHA2_256, _IDENTITY = 0x12, 0x00  # multihash codes of the two kinds of peer id


def is_peer_id(value: object) -> bool:
    """Return whether ``value`` is a libp2p peer id: a multihash of a public key, in base58.

    The format: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
    """
    # First: base58 takes the square of the length, which others choose.
    if not isinstance(value, str) or not _PEER_ID.fullmatch(value):
        return False
    data = base58.b58decode(value)
    return data[0] in (_SHA2_256, _IDENTITY) and data[1] == len(data) - 2


def averager_prefix(run_id: str) -> str:
    """Return the prefix of the averager's DHT keys and RPC names: ``v1_2_7_r5_grad_averager``."""
    return f"{run_id}_grad_averager"
