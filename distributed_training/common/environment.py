"""Environment variables without secrets, for processes that do not need them.

What a process was started with stands in ``/proc/PID/environ`` for as long as it lives, also after
``os.environ`` has lost it, and a fork inherits that memory. So there are two ways to keep a secret
from a process that talks to strangers: start it with :func:`without_secrets`, or, where it is
forked, let the parent :func:`forget_secrets` once it has read its configuration.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Mapping
from pathlib import Path

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


def forget_secrets(*, keep: Collection[str] = ()) -> None:
    """Take them out of this process's environment, and out of what its forks will show.

    Hazard: changes the environment, which C code in other threads may be reading. Call it before
    threads are started. Where the kernel does not tell where the environment lies (not Linux, or
    not dumpable), only ``os.environ`` is cleaned.
    """
    for name in [name for name in os.environ if is_secret(name) and name not in keep]:
        del os.environ[name]
    start, end = _initial_environment()
    at = start
    for entry in ctypes.string_at(start, end - start).split(b"\0") if start else ():
        label, equals, value = entry.partition(b"=")
        name = os.fsdecode(label)
        if equals and is_secret(name) and name not in keep:
            # Not with zeros: readers of /proc/PID/environ stop at an empty entry.
            ctypes.memset(at + len(label) + 1, ord("x"), len(value))
        at += len(entry) + 1


def _initial_environment() -> tuple[int, int]:
    """Where the kernel put it: first address and the one after the last; zeros if not known."""
    try:
        # Fields 50 and 51 (proc(5)); the second field, the name, may hold spaces and brackets.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[47]), int(fields[48])
    except (OSError, ValueError, IndexError):
        return 0, 0
    return (start, end) if 0 < start < end else (0, 0)
