"""Kinds of a thing that somebody may add in one file: optimizers, stores, data sources and others.

A package that has several of a thing keeps a :class:`Kinds` of them, in which its own are
registered beside their code. A plug-in is a module that registers more in the same way. Operators
name it with ``--plugins``, and it is imported before anything is built. So a network's file, which
may come from anywhere, can choose among kinds and can import nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

Made = TypeVar("Made")


class UnknownKindError(ValueError):
    """No kind has this name; the message names those that there are."""


class Kinds(Generic[Made]):
    """Things chosen by name. ``what``: how an error calls one, such as ``inner optimizer``."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._made: dict[str, Made] = {}

    def register(self, name: str, made: Made) -> None:
        """Add a kind. Raises ValueError if there is one of this name."""
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
                "and others where --plugins names the module that registers them"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)
