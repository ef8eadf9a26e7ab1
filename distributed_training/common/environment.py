"""Environment variables without secrets, for processes that do not need them.

What a process was started with stands in ``/proc/PID/environ`` for as long as it lives, also after
``os.environ`` has lost it, and a fork inherits that memory. So a process that talks to strangers,
or is forked from, is started with :func:`without_secrets`; ranks get theirs by a pipe.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

_PREFIXES = ("R2_", "AWS_", "BT_PW_")  # whole families; bittensor keeps wallet passwords in BT_PW_
_WORDS = frozenset(
    {"SECRET", "SECRETS", "TOKEN", "TOKENS", "KEY", "KEYS", "PASSWORD", "PASSWD", "PASS", "PW"}
    | {"PASSPHRASE", "CREDENTIAL", "CREDENTIALS", "MNEMONIC", "APIKEY", "AUTH"}
)


def is_secret(name: str) -> bool:
    """Whether a variable of this name is taken for a secret: ``HF_TOKEN``, ``WANDB_API_KEY``.

    By whole words, so ``TOKENIZERS_PARALLELISM`` is none; ``PYTHONHASHSEED`` neither.
    """
    upper = name.upper()
    return upper.startswith(_PREFIXES) or not _WORDS.isdisjoint(upper.split("_"))


def without_secrets(
    environ: Mapping[str, str] = os.environ, *, keep: Collection[str] = ()
) -> dict[str, str]:
    """A copy for a child's ``env=``. ``keep``: secrets that this child is meant to have."""
    return {name: value for name, value in environ.items() if name in keep or not is_secret(name)}
