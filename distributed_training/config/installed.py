"""Name the packages that a program needs and a plain ``pip install`` of the wheel lacks.

A plain install has what a member of a store network with a registry needs. The rest comes with the
wheel's extras; ``make setup`` installs ``production``. Programs check this before they write files.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from itertools import chain

from .types import ConfigError

DISTRIBUTION = "distributed-training-miner"

#: Extra -> the modules that it installs, as far as a program needs them.
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "bittensor": ("bittensor",),
    "hivemind": ("hivemind", "cryptography"),
    "validator": ("openskill",),
    "lora": ("peft",),
    "wandb": ("wandb",),
    "tensorboard": ("tensorboard",),
}


def install(*extras: str) -> str:
    """Return the command that adds ``extras`` to an installed wheel."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'"


def missing(wanted: Mapping[str, str]) -> str | None:
    """Return a line that names the missing extras; ``wanted``: extra -> what needs it."""
    absent = {
        extra: without
        for extra in wanted
        if (without := [module for module in EXTRAS[extra] if find_spec(module) is None])
    }
    if not absent:
        return None
    libraries = ", ".join(dict.fromkeys(chain.from_iterable(absent.values())))
    needed_by = " and ".join(wanted[extra] for extra in absent)
    return (
        f"{libraries} not installed, which {needed_by} cannot do without, so nothing was started: "
        f"{install(*absent)}"
    )


def require(**wanted: str) -> None:
    """Raise ConfigError if an extra is not installed; a value says what needs it."""
    if line := missing(wanted):
        raise ConfigError(line)
