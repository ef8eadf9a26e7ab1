"""Find a network's file: at a path, or an https URL with the last good copy behind it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

from distributed_training.common.files import write_bytes
from distributed_training.common.http import TooLong, ask

if TYPE_CHECKING:
    import ssl

    import httpx

from .file import LARGEST_FILE, Network, NetworkFileError, parse, tree_of

KEPT = "network"  # folder of the last good copy, in the run folder
_FILE = "network.toml"
_ATTEMPTS, _FIRST_WAIT, _TIMEOUT = 3, 1.0, 10.0  # seconds
_LONGEST = 30.0  # seconds, of a whole reply


class NetworkAway(RuntimeError):
    """The URL of a network's file does not give that file. It may pass by itself."""


def read_network(
    place: str, *, keys: Collection[str], kept: Path, tell: Callable[[str], None]
) -> Network:
    """Return the network of the file at ``place``, a path or an https URL.

    Args:
        keys: See :func:`parse`.
        kept: Run folder, which may hold the copy of an earlier start from the same URL.
        tell: Gets the one line that says that the copy is used.

    A file of another founder than the copy's counts as no answer: whoever can write to that web
    site must not move miners to a network of their own.

    Raises:
        NetworkFileError: The file is refused, or cannot be read.
        NetworkAway: The URL does not answer, or not with such a file, and there is no copy.
    """
    if "://" not in place:
        path = Path(os.path.expanduser(place))
        return parse(
            read_text(path),
            place=place,
            keys=keys,
            beside=lambda name: read_text(path.with_name(name)),
        )
    try:
        url = urlsplit(place)
    except ValueError:  # "[" without "]"
        url = urlsplit("")
    if url.scheme != "https" or "@" in url.netloc:
        raise NetworkFileError(
            "it is no https:// URL without user and password", "give a path or such a URL"
        )
    copy = kept / KEPT
    # Read before the URL is asked: its founder decides what counts as an answer.
    known = _kept_copy(copy, place, keys)
    try:
        text = _fetch(place)
        if not _is_one(text):  # a page for maintenance, or of a proxy
            raise NetworkAway(f"what {place} answers is no network's file")
        found = parse(
            text, place=place, keys=keys, beside=lambda name: _fetch(urljoin(place, name))
        )
        if known is not None and _founder(found) != _founder(known):
            raise NetworkAway(
                f"the network's file at {place} is another founder's ({_founder(found)}) than that "
                f"of earlier starts ({_founder(known)}); to join that network, delete {copy}"
            )
        return found
    except NetworkAway as away:
        if known is None:
            raise
        tell(f"{away}: the copy of an earlier start in {copy} is used")
        return known


def _kept_copy(copy: Path, place: str, keys: Collection[str]) -> Network | None:
    """Return the network of the last good start from ``place``.

    None if there is none, or what is left of it is damaged.
    """
    try:
        if (copy / "url").read_text(encoding="utf-8") != place:
            return None
        return parse(
            read_text(copy / _FILE),
            place=place,
            keys=keys,
            beside=lambda name: read_text(copy / name),
        )
    except (OSError, ValueError):  # NetworkFileError too
        return None


def _is_one(text: str) -> bool:
    try:
        return "format" in tree_of(text)
    except NetworkFileError:
        return False


def _founder(network: Network) -> str:
    return str(network.values["chain.master_hotkey"])


def keep(network: Network, folder: Path) -> None:
    """Write the copy for a start while the URL does not answer. ``folder``: the run folder."""
    if "://" not in network.place:
        return
    copy = folder / KEPT
    copy.mkdir(exist_ok=True)
    # The URL last: until it is there, the rest counts for no copy.
    for name, text in {**network.files, "url": network.place}.items():
        write_bytes(copy / name, text.encode())


def read_text(path: Path) -> str:
    """Return the text of a file that belongs to a network. Raises NetworkFileError."""
    try:
        # A pipe without a writer would be waited for, for ever.
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
            # None comes from a pipe that nobody writes to.
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
            data = asyncio.run(_download(url))
            break
        except httpx.HTTPStatusError as error:
            why = f"HTTP {error.response.status_code}"
        except TimeoutError:
            why = f"no end of it within {_LONGEST:.0f} s"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
    else:
        raise NetworkAway(f"the network's file at {url} does not answer ({why})")
    try:
        return _text(data)
    except NetworkFileError as error:  # a page of something else
        raise NetworkAway(f"what {url} answers is no network's file: {error}") from None


async def _download(url: str) -> bytes:
    """Return what is at ``url``. Raises NetworkAway, TimeoutError, httpx's errors."""
    async with _client() as client:
        try:
            reply, data = await ask(client, "GET", url, most=LARGEST_FILE, seconds=_LONGEST)
        except TooLong as error:  # a page of something else
            raise NetworkAway(f"what {url} answers is no network's file: {error}") from None
    reply.raise_for_status()
    # After redirects: the signature tells who wrote the file, not that it is today's.
    if reply.url.scheme != "https":
        raise NetworkAway(f"{url} leads to {reply.url}, which anybody on the way writes")
    return data


def _client() -> httpx.AsyncClient:
    import httpx  # here, since few starts fetch anything

    return httpx.AsyncClient(verify=certificates(), timeout=_TIMEOUT, follow_redirects=True)


def certificates() -> ssl.SSLContext:
    """Return the authorities that https servers are checked against. Raises NetworkFileError.

    They are httpx's own, or those that SSL_CERT_FILE or SSL_CERT_DIR name.
    """
    import httpx

    try:
        return httpx.create_ssl_context()
    except OSError as error:  # ssl's errors too
        raise NetworkFileError(
            f"the certificates of SSL_CERT_FILE or SSL_CERT_DIR cannot be read ({error.strerror})",
            "correct that variable, or unset it",
        ) from None
