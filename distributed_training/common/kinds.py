"""Registries of kinds (optimizers, stores, data sources and others) that one file can add to.

A package that has several kinds of something keeps them in a :class:`Kinds`. Each kind is
registered in the file that implements it. A plug-in is a module that registers more kinds in the
same way. Operators name it with ``--plugins``, and it is imported before anything is built. So a
network's file, which may come from anywhere, can choose among kinds but cannot import anything.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Made = TypeVar("Made")


class UnknownKindError(ValueError):
    """No kind has this name; the message lists the names of the known kinds."""


class Kinds(Generic[Made]):
    """Kinds chosen by name. ``what``: what errors call one of them, such as ``inner optimizer``."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._made: dict[str, Made] = {}

    def register(self, name: str, made: Made) -> None:
        """Add a kind. Raises ValueError if the name is already taken."""
        if name in self._made:
            raise ValueError(f"there are two kinds of {self._what} called {name!r}")
        self._made[name] = made

    def __getitem__(self, name: str) -> Made:
        """Return the kind called ``name``. Raises UnknownKindError."""
        try:
            return self._made[name]
        except KeyError:
            raise UnknownKindError(
                f"there is no {self._what} called {name!r}: there are {', '.join(sorted(self))}, "
                "and any that a module named by --plugins registers"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)


#: Environment variable with the names of the operator's modules, also for child processes.
PLUGINS = "DT_PLUGINS"

_imported: list[str] = []


class PluginError(ValueError):
    """A module of ``--plugins`` is missing or raised an exception; the message is one line."""


def import_plugins(modules: Iterable[str]) -> None:
    """Import the operator's modules, which register more kinds. Idempotent.

    They are searched for where Python finds other modules, and in the working folder. Raises
    PluginError.
    """
    for module in modules:
        if module in _imported:
            continue
        # Put the folder last, so that no file in it can shadow a library. Child processes get this
        # path too.
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            importlib.import_module(module)
        except Exception as error:  # any error in the module ends the start with one line
            text = "".join(filter(str.isprintable, str(error).partition("\n")[0]))
            raise PluginError(
                f"the module {module} cannot be imported ({type(error).__name__}: {text:.300}), so "
                "what it registers is missing and nothing was started: correct the module, or "
                "its name (my_plugin for the file my_plugin.py in this folder)"
            ) from error
        _imported.append(module)


def plugin_environment() -> dict[str, str]:
    """Return variables that make a child process import the same modules from the same path."""
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return path | ({PLUGINS: " ".join(_imported)} if _imported else {})
