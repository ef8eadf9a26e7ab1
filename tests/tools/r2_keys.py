"""Well-formed R2 keys that open nothing, in the variables of an operator's environment."""

from __future__ import annotations

KEYS = {
    "R2_ACCOUNT_ID": "a" * 32,
    "R2_READ_ACCESS_KEY_ID": "b" * 32,
    "R2_READ_SECRET_ACCESS_KEY": "c" * 64,
    "R2_WRITE_ACCESS_KEY_ID": "d" * 32,
    "R2_WRITE_SECRET_ACCESS_KEY": "e" * 64,
}
