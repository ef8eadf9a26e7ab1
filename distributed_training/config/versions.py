"""The versions of a network's file, and the rules that apply to each outer step.

The versions form a chain: each is signed by the master, and names the digest of the previous
version and the outer step from which it is in force. All peers that know the same chain have the
same rules at the same outer step. The validator takes a new version from the folder ``versions``
next to its file, where ``dt-network sign`` writes it, and publishes it in the global bucket. Miners
look for it there. No program changes its rules while it runs: at that outer step, miners and the
validator exit and restart on their own. Only a script continues (:func:`for_script`).
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

#: Keys of the exchange, which a script follows without a restart: its uploads depend on some, the
#: signed state names the close, and the others concern only the validator.
_OF_EXCHANGE = ("round.", "stop.", "training.outer_")
_MOST = 1000  # versions that one call looks for


def changed_keys(before: Network, after: Network) -> list[str]:
    """Return the keys of the settings whose values differ."""
    keys = before.values.keys() | after.values.keys()
    return sorted(key for key in keys if before.values.get(key) != after.values.get(key))


def parse_version(text: str, known: Network) -> Network:
    """Parse ``text`` as another version of the network ``known``. Raises NetworkFileError."""
    keys = {setting.network for setting in schema("validator") if setting.network}
    return parse(text, place=known.place, keys=keys)


def under(config: Config, network: Network) -> Config:
    """Return ``config`` with the rules of ``network`` instead of its own. Raises ConfigError.

    If the file gives only a default, a value that the operator has set is kept.
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

    ``network``: the version that the program was started with. ``folder``: the run folder, in which
    the versions are kept. One thread adds versions, and all threads may read them.
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
        """Return the version in force at ``outer_step``, or the oldest known if none is."""
        holds = [n for n in self.known if n.head.from_outer_step <= outer_step]
        return holds[-1] if holds else self.known[0]

    def knows(self, outer_step: int) -> bool:
        """Return whether the version in force at ``outer_step`` is known."""
        oldest = self.known[0].head
        return oldest.version == 1 or oldest.from_outer_step <= outer_step

    def add(self, text: str) -> Network:
        """Add the version after the newest, or the version before the oldest.

        Raises NetworkFileError if it is not in the chain: it has another run, or another digest.
        """
        found = parse_version(text, self.newest)
        first, last, number = self.known[0], self.known[-1], found.head.version
        if found.values["run_id"] != last.values["run_id"]:
            raise NetworkFileError("it belongs to another run", "get it from the founder again")
        before, after = (last, found) if number > last.head.version else (found, first)
        follows = after.head.version == before.head.version + 1
        if not follows or after.head.previous != f"sha256:{before.digest}":
            raise NetworkFileError(
                f"version {after.head.version} names another previous version",
                "get it from the founder again",
            )
        self.known = (*self.known, found) if after is found else (found, *self.known)
        self._keep(found)
        return found

    def look(self, read: Callable[[int], str | None], *, quiet: bool = False) -> str:
        """Add the versions before and after the known ones that ``read`` finds.

        ``read``: returns the text of a version by its number, or None if there is none. Returns a
        line about the last version that was refused, or an empty string.
        """
        refused = ""
        # Look backwards first, so that a damaged new version cannot hide the one now in force.
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

        Returns a line about a refused version, as :meth:`look` does.
        """
        folder = Path(place).expanduser().parent / VERSIONS
        return "" if "://" in place else self.look(lambda number: self._read(folder, number))

    def _keep(self, network: Network) -> None:
        path = self._folder / f"{network.head.version}.toml"
        # The disk may be full, but the global bucket has the file too.
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
    """Return the line that announces a version and says what changes and when."""
    changed = ", ".join(changed_keys(before, after)) or "-"
    return (
        f"Version {after.head.version} of the network's file is in force from outer step "
        f"{after.head.from_outer_step}: it changes {changed}; "
        "programs then restart on their own, and a script says which changes need its restart"
    )


def for_script(before: Network, after: Network) -> str:
    """Return the line for a script: what it follows, what it decides, and what needs a restart."""
    changed = changed_keys(before, after)
    followed = [key for key in changed if key.startswith(_OF_EXCHANGE)]
    own = [key for key in changed if key.startswith("training.") and key not in followed]
    restart = [key for key in changed if key not in (*followed, *own)]
    line = f"Version {after.head.version} of the network's file is in force now"
    for keys, words in (
        (followed, "this script follows it in {}"),
        (own, "yours to change in the script: {}"),
        (restart, "start the script again for {}"),
    ):
        line += "; " + words.format(", ".join(keys)) if keys else ""
    return line
