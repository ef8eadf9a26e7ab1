"""Where a network's file comes from: a path, or an https URL with the last good copy behind it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from urllib.parse import urljoin, urlsplit

from distributed_training.common.files import write_bytes

from .file import LARGEST_FILE, Network, NetworkFileError, parse

KEPT = "network"  # folder of the last good copy, in the run folder
_FILE = "network.toml"
_ATTEMPTS, _FIRST_WAIT, _TIMEOUT = 3, 1.0, 10.0  # seconds


class NetworkAway(RuntimeError):
    """The URL of a network's file does not answer, and there is no copy. It may pass by itself."""


def read_network(
    place: str, *, keys: Collection[str], kept: Path, tell: Callable[[str], None]
) -> Network:
    """Return the network of the file at ``place``, a path or an https URL.

    Args:
        keys: See :func:`parse`.
        kept: Run folder, which may hold the copy of an earlier start from the same URL.
        tell: Gets the one line that says that the copy is used.

    Raises:
        NetworkFileError: The file is refused, or cannot be read.
        NetworkAway: The URL does not answer and there is no copy.
    """
    if "://" not in place:
        path = Path(os.path.expanduser(place))
        return parse(
            _read(path), place=place, keys=keys, beside=lambda name: _read(path.with_name(name))
        )
    if urlsplit(place).scheme != "https" or "@" in urlsplit(place).netloc:
        raise NetworkFileError(
            "it is no https:// URL without user and password", "give a path or such a URL"
        )
    copy = kept / KEPT
    try:
        text = _fetch(place)
        return parse(text, place=place, keys=keys, beside=lambda name: _fetch(urljoin(place, name)))
    except NetworkAway as away:
        try:
            if (copy / "url").read_text(encoding="utf-8") != place:
                raise away
            text = (copy / _FILE).read_text(encoding="utf-8")
        except OSError:
            raise away from None
        tell(f"{away}: the copy of an earlier start in {copy} is used")
        return parse(text, place=place, keys=keys, beside=lambda name: _read(copy / name))


def keep(network: Network, folder: Path) -> None:
    """Write the copy for a start while the URL does not answer. ``folder``: the run folder."""
    if "://" not in network.place:
        return
    copy = folder / KEPT
    copy.mkdir(exist_ok=True)
    for name, text in {**network.files, "url": network.place}.items():
        write_bytes(copy / name, text.encode())


def _read(path: Path) -> str:
    try:
        # A pipe without a writer would be waited for, for ever.
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            data = file.read(LARGEST_FILE + 1) or b""
    except OSError as error:
        raise NetworkFileError(
            f"{path.name} cannot be read ({error.strerror})", "correct the path or its permissions"
        ) from None
    return _text(data)


def _text(data: bytes) -> str:
    if len(data) > LARGEST_FILE:
        raise NetworkFileError(f"it has more than {LARGEST_FILE} bytes", "correct the path")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise NetworkFileError("it is not UTF-8 text", "save it as UTF-8") from None


def _fetch(url: str) -> str:
    """Return the text at ``url``, asked for three times. Raises NetworkAway, NetworkFileError."""
    import httpx  # here, since few starts fetch anything

    why = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_FIRST_WAIT * 2 ** (attempt - 1))
        try:
            with httpx.stream("GET", url, timeout=_TIMEOUT, follow_redirects=True) as reply:
                reply.raise_for_status()
                data = b""
                for part in reply.iter_bytes():
                    data += part
                    if len(data) > LARGEST_FILE:
                        break
                return _text(data)
        except httpx.HTTPStatusError as error:
            why = f"HTTP {error.response.status_code}"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
    raise NetworkAway(f"the network's file at {url} does not answer ({why})")
