"""Name buckets and their objects (protocol page, sections 1 and 5).

The global bucket contains ``state.json``, a folder ``outer/N/`` for each outer step, and the
members' ``uploads/``, unless each member has its own bucket for its uploads. A run folder has a
folder ``epoch-N/`` for each outer step.
"""

from __future__ import annotations

import re

NETWORK = "network.json"  # says which network owns the global bucket
VERSION = "network/{}.toml"  # each version of the network's file
CONFIG = "config.json"
MODEL = "model.safetensors"
ADAPTERS = "adapter_model.safetensors"  # the weights in a folder that PEFT reads
# The tensors that nobody trains, in the folder that model.frozen names.
FROZEN = "frozen.safetensors"
OUTER = "outer/"  # objects below this key never change
STATE = "state.json"
MANIFEST = "manifest.json"
UPDATE = "update.safetensors"
OUTER_STATE = "state.safetensors"  # outer momentum and residual
AVERAGE = "average.safetensors"  # the members' average, if the update was computed from it
SAFETENSORS_METADATA = {"format": "pt"}

# A number has no leading zero, since outer/07 would be a second folder for outer step 7. It has at
# most 15 digits, since other peers choose it and readers may count up to it.
_NUMBER = "(0|[1-9][0-9]{0,14})"
_OUTER_KEY = re.compile(rf"outer/{_NUMBER}/(.+)")
_UPLOAD_KEY = re.compile(rf"uploads/{_NUMBER}/{_NUMBER}\.{_NUMBER}\.safetensors")
_ACCOUNT_ID = re.compile(r"[0-9a-f]{32}")


def miner_bucket(global_bucket: str, uid: int) -> str:
    """Return the name of a miner's bucket: ``llama-4b-ws-4-007`` for uid 7."""
    # Pad the uid to three digits, as in the names of existing buckets.
    return f"{global_bucket}-{uid:03d}"


def r2_endpoint(account_id: str) -> str:
    """Return the R2 endpoint of an account.

    Raises ValueError unless the id is 32 hexadecimal digits: it comes from other peers' commitments
    and becomes part of a host name.
    """
    if not _ACCOUNT_ID.fullmatch(account_id.lower()):
        raise ValueError("an R2 account id is 32 hexadecimal digits")
    return f"https://{account_id.lower()}.r2.cloudflarestorage.com"


def epoch_folder(outer_step: int) -> str:
    """Return ``epoch-N``, without a slash."""
    return f"epoch-{outer_step}"


def outer_key(outer_step: int, name: str) -> str:
    """Return ``outer/N/name``, the key of a file for the epoch-start weights of outer step N."""
    return f"outer/{outer_step}/{name}"


def parse_outer_key(key: str) -> tuple[int, str] | None:
    """Return ``(N, name)`` of a key in an ``outer/N`` folder, or None for any other key."""
    match = _OUTER_KEY.fullmatch(key)
    return (int(match[1]), match[2]) if match else None


def merged_key(outer_step: int, uid: int) -> str:
    """Return the key of the copy of a member's upload that was merged into outer step N."""
    return outer_key(outer_step, f"uploads/{uid}.safetensors")


def upload_key(uid: int, outer_step: int, serial: int) -> str:
    """Return the key of a member's upload for the close of ``outer_step`` with ``serial``."""
    return f"uploads/{uid}/{outer_step}.{serial}.safetensors"


def progress_key(uid: int) -> str:
    """Return the key of a member's newest progress upload, which belongs to no close."""
    return f"uploads/{uid}/progress.safetensors"


def parse_upload_key(key: str) -> tuple[int, int, int] | None:
    """Return uid, outer step and serial of an :func:`upload_key`, or None for any other key."""
    match = _UPLOAD_KEY.fullmatch(key)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None
