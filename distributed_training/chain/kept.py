"""What the signed server's next start must know, in one small file of the run folder.

Which calls were accepted (:mod:`.replay`) and where validators called from (:mod:`.trust`). The
file says whether the end was clean: that mark is taken off before the first call is answered, so
that a kill at any moment leaves a file that says "not clean".
"""

from __future__ import annotations

import ipaddress
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distributed_training.common.files import read_json_object, remove_leftovers, write_json

log = logging.getLogger(__name__)

MOST_VALIDATORS = 1024
_LARGEST_FILE = 256 * 1024  # bytes


@dataclass(frozen=True)
class Kept:
    """``highest``: nonce of any accepted call (ns), -1 without one. ``clean``: whether no call
    can be missing in it. ``validators``: keys of :func:`.trust.normalize`, the latest last."""

    highest: int = -1
    clean: bool = True
    validators: tuple[str, ...] = ()


class KeptFile:
    """For one thread at a time. ``path`` None: nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._saved: Kept | None = None

    def load(self) -> Kept:
        """A file that is missing was never there; one that is damaged is told, and not clean."""
        if self._path is None:
            return Kept()
        remove_leftovers(self._path)
        if not self._path.exists():
            return Kept()
        found = _parse(read_json_object(self._path, at_most=_LARGEST_FILE) or {})
        if found is None:
            log.warning(
                "%s is damaged, so calls signed before this start are refused for its first "
                "seconds and validators count as strangers until they call; nothing needs to be "
                "done, the file is written anew",
                self._path,
            )
        return found or Kept(clean=False)

    def save(self, kept: Kept) -> None:
        """Write the file if it would change. A failure is logged, not raised."""
        if self._path is None or kept == self._saved:
            return
        try:
            write_json(self._path, asdict(kept))
            self._saved = kept
        except OSError as error:
            log.warning(
                "Cannot write %s (%s): after a restart, calls of the last seconds could be "
                "replayed and validators kept out by a flood; free disk space or correct its "
                "permissions",
                self._path,
                error.strerror,
            )


def _parse(content: dict[str, Any]) -> Kept | None:
    highest, clean, validators = map(content.get, ("highest", "clean", "validators"))
    if (
        type(highest) is int
        and -1 <= highest < 1 << 63
        and type(clean) is bool
        and isinstance(validators, list)
        and len(validators) <= MOST_VALIDATORS
        and all(map(_is_key, validators))
    ):
        return Kept(highest, clean, tuple(validators))
    return None


def _is_key(address: object) -> bool:
    """Whether :func:`.trust.normalize` may have made it."""
    if not isinstance(address, str):
        return False
    try:
        if address.endswith("/64"):
            return str(ipaddress.IPv6Network(address)) == address
        return str(ipaddress.IPv4Address(address)) == address
    except ValueError:
        return False
