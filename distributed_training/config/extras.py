"""The one place where the product loads the package ``extras``, its optional functions.

The product does not import ``extras`` anywhere else, so whoever does not use these functions
neither reads nor loads their code.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from .types import ConfigError


def extra(module: str, *, wanted_by: str) -> ModuleType:
    """Import ``extras.<module>``.

    Raises ConfigError, which names the flag ``wanted_by``, where the package is not installed.
    """
    name = f"extras.{module}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A library that the module itself needs: the remedy below would be false.
        if error.name not in ("extras", name):
            raise
        raise ConfigError(
            f"{wanted_by} needs the package 'extras' of the miner's repository, which is not "
            "installed, so the miner does not start: install the whole repository (make setup), "
            "or leave the flag out"
        ) from None
