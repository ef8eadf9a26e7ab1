"""Read a network's file from a path or an https URL, with the last good copy as a fallback.

The bytes, the seconds and the redirects of a download are limited before its content is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from distributed_training.common.addresses import is_inside
from distributed_training.common.files import write_bytes
from distributed_training.common.http import TooLong, ask, run_to_end
from distributed_training.common.proxies import proxy_for
from distributed_training.network import (
    BUILT_IN,
    FILE,
    KEPT,
    LARGEST_FILE,
    VERSIONS,
    Network,
    NetworkAway,
    NetworkFileError,
    decode_text,
    parse,
    read_text,
    tree_of,
)

if TYPE_CHECKING:
    import ssl

    import httpx

_ATTEMPTS, _FIRST_WAIT, _TIMEOUT = 3, 1.0, 10.0  # seconds
_LONGEST = 30.0  # seconds for a whole reply with its redirects
_MOST_REDIRECTS = 5
_MOST_VERSIONS = 100  # most versions between the invitation's version and the newest one


def read_network(
    place: str, *, keys: Collection[str], kept: Path, tell: Callable[[str], None]
) -> Network:
    """Return the network of the file at ``place``: a path, an https URL, or a built-in's name.

    A URL may end with ``#`` and the digest that the file must have. With such a digest, or with a
    copy that says whose file it is, http is allowed too.

    Args:
        place: The path, URL or name.
        keys: See :func:`parse`.
        kept: Run folder, which may hold the copy from an earlier start with the same URL.
        tell: Called with a line that says so if the copy is used.

    A file by another founder than that of the copy counts as no answer. Somebody who can write to
    the web site must not be able to move miners to a network of their own.

    Raises:
        NetworkFileError: The file is refused, or cannot be read.
        NetworkAway: The URL does not answer, or answers with something else, and there is no copy.
    """
    if "://" not in place:
        path = BUILT_IN.get(place) or Path(os.path.expanduser(place))
        return parse(read_text(path), place=place, keys=keys)
    place, _, pinned = place.partition("#")
    try:
        url = urlsplit(place)
    except ValueError:  # "[" without "]"
        url = urlsplit("")
    if pinned and not re.fullmatch(r"[0-9a-f]{64}", pinned):
        raise NetworkFileError(
            "the part after # is not a digest of 64 letters and digits", "copy the line again"
        )
    copy = kept / KEPT
    # Read the copy before asking the URL, because only a file by the same founder is an answer.
    known = None
    # A copy that is missing or damaged is no error here (NetworkFileError is a ValueError).
    with contextlib.suppress(OSError, ValueError):
        if (copy / "url").read_text(encoding="utf-8") == place:
            known = parse(read_text(copy / FILE), place=place, keys=keys)
    if known is not None and pinned not in ("", known.digest):
        known = None
    # Anybody on the network path can change a file that is sent over http, so a digest or a copy
    # must say whose file it is.
    safe = ("https", "http") if pinned or known is not None else ("https",)
    if url.scheme not in safe or "@" in url.netloc:
        raise NetworkFileError(
            "it is not an https:// URL without user and password",
            "use a path or such a URL"
            if url.scheme != "http"
            else "use the whole invitation, whose part after # is missing here, or a path",
        )
    try:
        text = _fetch(place)
        try:
            is_one = "format" in tree_of(text)
        except NetworkFileError:
            is_one = False
        if not is_one:  # it may be a maintenance page, or a proxy's page
            raise NetworkAway(f"the answer of {place} is not a network's file")
        found = parse(text, place=place, keys=keys)
        if pinned not in ("", found.digest) and not _descends(found, pinned, place, keys):
            raise NetworkFileError(
                f"version {found.head.version} of {found.head.name}, from {place}, has the digest "
                f"{found.digest[:12]}... instead of the expected {pinned[:12]}...: its rules "
                "are not those of the invitation",
                "ask the founder for a new invitation",
            )
        founder = found.values["chain.master_hotkey"]
        followed = founder if known is None else known.values["chain.master_hotkey"]
        if founder != followed:
            raise NetworkAway(
                f"the network's file at {place} is from another founder ({founder}) than the one "
                f"of earlier starts ({followed}); to join that network, delete {copy}"
            )
        return found
    except NetworkAway as away:
        if known is None:
            raise
        tell(f"{away}: the copy of an earlier start in {copy} is used")
        return known


def _descends(found: Network, pinned: str, place: str, keys: Collection[str]) -> bool:
    """Return whether ``found`` is a later version of the file with the digest ``pinned``.

    The versions between the two are published next to the newest one, and each version names the
    digest of the previous one. Raises NetworkAway.
    """
    version = found
    for _ in range(_MOST_VERSIONS):
        before = version.head.previous
        if before is None:
            return False
        url = urljoin(place, f"{VERSIONS}/{version.head.version - 1}.toml")
        try:
            text = _fetch(url)
            version = parse(text, place=url, keys=keys)
        except NetworkFileError:
            return False
        # Another founder's file could name any version as its previous one, even the expected one.
        same = version.values["run_id"] == found.values["run_id"]
        if not same or f"sha256:{version.digest}" != before:
            return False
        if version.digest == pinned:
            return True
    return False


def save_copy(network: Network, folder: Path) -> None:
    """Keep a copy in the run folder, for a later start at which the URL does not answer."""
    if "://" not in network.place:
        return
    copy = folder / KEPT
    copy.mkdir(exist_ok=True)
    # Write the URL last, because without it the copy is not used.
    for name, text in {FILE: network.text, "url": network.place}.items():
        write_bytes(copy / name, text.encode())


def _fetch(url: str) -> str:
    """Return the text at ``url``, in up to three tries. Raises NetworkAway, NetworkFileError."""
    import httpx  # imported here, since few starts fetch anything

    why = ""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_FIRST_WAIT * 2 ** (attempt - 1))
        try:
            data = run_to_end(download(url))
            break
        except TooLong as error:  # the answer is some other page
            raise NetworkAway(f"the answer of {url} is not a network's file: {error}") from None
        except httpx.HTTPStatusError as error:
            why = f"HTTP {error.response.status_code}"
        except TimeoutError:
            why = f"not complete within {_LONGEST:.0f} s"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            why = str(error) or type(error).__name__
    else:
        raise NetworkAway(f"the network's file at {url} does not answer ({why})")
    try:
        return decode_text(data)
    except NetworkFileError as error:  # the answer is some other page
        raise NetworkAway(f"the answer of {url} is not a network's file: {error}") from None


async def download(url: str, *, most: int = LARGEST_FILE, seconds: float | None = None) -> bytes:
    """Return the content of ``url``. Raises NetworkAway, TooLong, TimeoutError, httpx's errors."""
    place, seconds = url, seconds or _LONGEST
    async with asyncio.timeout(seconds):
        for _ in range(1 + _MOST_REDIRECTS):
            async with _client(place) as client:
                reply, data = await ask(client, "GET", place, most=most, seconds=seconds)
            if not reply.has_redirect_location:
                reply.raise_for_status()
                return data
            location = reply.headers["location"]
            try:
                place = urljoin(place, location)
                parts = urlsplit(place)
            except ValueError:  # httpx would take some invalid URLs for host names
                raise NetworkAway(f"{url} leads to {location!r:.200}, which is no URL") from None
            shown = repr(place)[1:201]
            # Demand https, because a signature does not prove that the file is the newest version.
            if parts.scheme != "https" or "@" in parts.netloc or not parts.hostname:
                raise NetworkAway(f"{url} leads to {shown}, which anybody on the way can change")
            # Check this before the next request, because a redirect by the founder's web site could
            # make this machine send requests to its neighbours. The URL that an operator gives may
            # be inside their network. Requests through a proxy reach no private address.
            if proxy_for(place) is None and is_inside(place) and not is_inside(url):
                raise NetworkAway(
                    f"{url} leads to {shown}, an internal address, so it was not fetched"
                )
    raise NetworkAway(f"{url} redirects more than {_MOST_REDIRECTS} times")


def _client(url: str) -> httpx.AsyncClient:
    import httpx  # imported here, since few starts fetch anything

    how: dict[str, Any] = {"verify": certificates(), "timeout": _TIMEOUT}
    return httpx.AsyncClient(proxy=proxy_for(url), trust_env=False, **how)


def certificates() -> ssl.SSLContext:
    """Return a context with the authorities by which the certificates of servers are checked.

    They are httpx's own unless SSL_CERT_FILE or SSL_CERT_DIR names others. Raises NetworkFileError.
    """
    import httpx

    try:
        return httpx.create_ssl_context()
    except OSError as error:  # ssl's errors are OSErrors too
        raise NetworkFileError(
            f"the certificates of SSL_CERT_FILE or SSL_CERT_DIR cannot be read ({error.strerror})",
            "correct that variable, or unset it",
        ) from None
