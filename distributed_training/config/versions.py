"""The versions of a network's file, and the rules that each outer step is trained by.

The versions of a file form a chain: each is signed by the master, names the digest of
the one before and the outer step from which it holds. All peers that know the same chain have the
same rules at the same outer step. The validator takes a new version from the folder ``versions``
next to its file, into which ``dt-network sign`` writes it, and publishes it in the global bucket.
Miners look for it there. No program changes its rules while it runs: at that outer step miners and
validator end and start again by themselves. Only a script continues (:func:`for_script`).
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from distributed_training.common.files import write_bytes
from distributed_training.network import (
    KEPT,
    VERSIONS,
    Network,
    NetworkFileError,
    parse,
    read_text,
)

from .loader import at_published, rules_of
from .model import Config
from .schema import schema

log = logging.getLogger(__name__)

#: Keys of the exchange, with which a script continues: it uploads by them, the signed state names
#: the close, and all other keys concern the validator.
_OF_EXCHANGE = ("round.", "stop.", "training.outer_")
_MOST = 1000  # versions looked for at once


def changed_keys(before: Network, after: Network) -> list[str]:
    """Return the keys of settings whose values differ."""
    keys = before.values.keys() | after.values.keys()
    return sorted(key for key in keys if before.values.get(key) != after.values.get(key))


def parse_version(text: str, known: Network) -> Network:
    """Return the network of ``text``, another version of a known one. Raises NetworkFileError."""
    keys = {setting.network for setting in schema("validator") if setting.network}
    return parse(text, place=known.place, keys=keys)


def under(config: Config, network: Network) -> Config:
    """Return ``config`` with the rules of ``network`` in place of its own. Raises ConfigError.

    If the file only gives a default, a value that the operator has set is kept.
    """
    if network.digest == config.network.digest:
        return config
    known, shared = schema(config.kind), rules_of(config, network)
    packages = {name: copy.copy(getattr(config, name)) for name in known.classes}
    values = dict(config.values)
    for setting in known:
        source = config.sources.get(setting.name)
        of_file = source in (None, f"{setting.network} in {config.general.network}")
        if setting.network and (setting.is_rule or of_file):
            if setting.name in shared.values:
                values[setting.name] = shared.get(setting.name)
            package, field = setting.place
            value = getattr(getattr(shared, package), field)
            object.__setattr__(packages[package], field, value)
    packages["general"] = config.general
    return at_published(replace(config, values=values, network=network, **packages))


class Versions:
    """The versions of one network's file that this program knows, oldest first.

    ``network``: the file that it was started with. ``folder``: the run folder, which keeps them.
    Versions are added by one thread, and read by all.
    """

    def __init__(self, network: Network, folder: Path) -> None:
        self.known: tuple[Network, ...] = (network,)
        self.in_force = network  # the version at the start
        self._folder = folder / KEPT / VERSIONS
        self._keep(network)
        self.look(lambda number: self._read(self._folder, number), quiet=True)

    @property
    def newest(self) -> Network:
        return self.known[-1]

    def at(self, outer_step: int) -> Network:
        """Return the newest version that holds at ``outer_step``; the oldest known if none does."""
        holds = [n for n in self.known if n.head.from_outer_step <= outer_step]
        return holds[-1] if holds else self.known[0]

    def knows(self, outer_step: int) -> bool:
        """Return whether the version that holds at ``outer_step`` is among those known."""
        oldest = self.known[0].head
        return oldest.version == 1 or oldest.from_outer_step <= outer_step

    def add(self, text: str) -> Network:
        """Take the version after the newest, or the one before the oldest.

        Raises NetworkFileError for one that does not follow: another run, or another digest.
        """
        found = parse_version(text, self.newest)
        first, last, number = self.known[0], self.known[-1], found.head.version
        if found.values["run_id"] != last.values["run_id"]:
            raise NetworkFileError("it is of another run", "get it from the founder again")
        before, after = (last, found) if number > last.head.version else (found, first)
        follows = after.head.version == before.head.version + 1
        if not follows or after.head.previous != f"sha256:{before.digest}":
            raise NetworkFileError(
                f"version {after.head.version} names another one before it",
                "get it from the founder again",
            )
        self.known = (*self.known, found) if after is found else (found, *self.known)
        self._keep(found)
        return found

    def look(self, read: Callable[[int], str | None], *, quiet: bool = False) -> str:
        """Add the versions around the known ones that ``read`` finds. Return the refused ones.

        ``read``: the text of a version by its number, None if there is none.
        """
        refused = ""
        # Look backwards first, so that a damaged new version cannot hide the one that holds today.
        for number, step in ((self.known[0].head.version, -1), (self.newest.head.version, 1)):
            for other in range(number + step, number + step * _MOST, step):
                if other < 1 or (text := read(other)) is None:
                    break
                before = self.newest
                try:
                    found = self.add(text)
                except NetworkFileError as error:
                    refused = f"version {other} of the network's file is refused ({error})"
                    break
                if step > 0 and not quiet:
                    log.info("%s", describe(before, found))
        return refused

    def look_beside(self, place: str) -> str:
        """Add the versions that ``dt-network sign`` wrote next to the file, if ``place`` is a path.

        Returns what was refused.
        """
        folder = Path(place).expanduser().parent / VERSIONS
        return "" if "://" in place else self.look(lambda number: self._read(folder, number))

    def _keep(self, network: Network) -> None:
        path = self._folder / f"{network.head.version}.toml"
        # There is no room, but the global bucket has the file too.
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_bytes(path, network.text.encode())

    @staticmethod
    def _read(folder: Path, number: int) -> str | None:
        path = folder / f"{number}.toml"
        try:
            return read_text(path) if path.exists() else None
        except NetworkFileError:
            return None


def describe(before: Network, after: Network) -> str:
    """Return the line that announces a version: what changes, and when."""
    changed = ", ".join(changed_keys(before, after)) or "-"
    return (
        f"Version {after.head.version} of the network's file holds from outer step "
        f"{after.head.from_outer_step}: it changes {changed}; "
        "programs start again by themselves then, and a script says what takes its restart"
    )


def for_script(before: Network, after: Network) -> str:
    """Return the line for a script: what it follows, what is its own, and what takes a restart."""
    changed = changed_keys(before, after)
    followed = [key for key in changed if key.startswith(_OF_EXCHANGE)]
    own = [key for key in changed if key.startswith("training.") and key not in followed]
    restart = [key for key in changed if key not in (*followed, *own)]
    line = f"Version {after.head.version} of the network's file holds from here on"
    for keys, words in (
        (followed, "this script follows it in {}"),
        (own, "yours to change in the script: {}"),
        (restart, "start the script again for {}"),
    ):
        line += "; " + words.format(", ".join(keys)) if keys else ""
    return line
