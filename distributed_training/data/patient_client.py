"""Ask a server of data: bounded replies, growing waits, and one pause for all ranks of a machine.

A server that is asked too often answers 429. Its limit is on the address, so a rank that kept
asking would only lengthen the wait of the others: the pause lies in a file that all processes with
the same cache read, and each keeps to it.

``huggingface_hub`` has a client and a file system for the same requests. Neither bounds a reply in
bytes or in time, nor tells other processes of a refusal, so they are not used here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import httpx
from urllib3.exceptions import InvalidHeader
from urllib3.util import Retry

from distributed_training.common.addresses import is_inside
from distributed_training.common.backoff import Backoff, Throttle
from distributed_training.common.proxies import proxy_for
from distributed_training.common.transports import Transport
from distributed_training.config.settings import DataSettings

from .page_source import Counts, NothingToRead, PageUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_REPLY = 64 * 2**20  # bytes
_FIRST_WAIT, _MAX_WAIT = timedelta(seconds=0.5), timedelta(seconds=30)
_LONGEST_HOLD = 900.0  # seconds, whatever a server asks for
_MOST_REDIRECTS = 5
_LEAST_RATE = 250_000  # bytes a second, of a reply larger than the timeout was made for
#: A RecursionError: of a reply that is nested too deeply.
_UNUSABLE = (httpx.HTTPError, httpx.InvalidURL, ValueError, TimeoutError, RecursionError)
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 522, 524})
_LONGEST_ERROR = 2**16  # bytes, of which the server's own sentence is shown
_LONGEST_SENTENCE = 200  # characters


class Hold:
    """The pause that one server asked for. ``path``: what processes share of it, or None."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._until = 0.0  # time.time()

    def seconds(self) -> float:
        """Return how much of the pause is left, 0 without one."""
        ends = [self._until]
        if self._path is not None:
            with suppress(OSError):
                ends.append(self._path.stat().st_mtime)
        now = time.time()
        # More was written while a clock was ahead.
        return max((end - now for end in ends if 0.0 < end - now <= _LONGEST_HOLD), default=0.0)

    def extend(self, seconds: float) -> bool:
        """Pause for ``seconds``, or for as long as before; return whether nobody paused yet."""
        begins = not self.seconds()
        self._until = time.time() + max(min(seconds, _LONGEST_HOLD), self.seconds())
        if self._path is not None:
            with suppress(OSError):  # a disk that is full: only this process pauses
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.open("ab").close()
                os.utime(self._path, (self._until, self._until))
        return begins


class _Refusal(Exception):
    """The server answered with an error: its status, its own sentence, and when to ask again."""

    def __init__(self, reply: httpx.Response, body: bytes) -> None:
        self.status = reply.status_code
        self.wait = retry_after(reply.headers.get("Retry-After"))
        # Hugging Face's: RateLimit: "resolvers";r=0;t=55
        limits = reply.headers.get("RateLimit", "")
        if self.wait is None and (left := re.search(r"\bt=(\d{1,6})\b", limits)):
            self.wait = float(left[1])
        try:
            answer = json.loads(body)
            sentence = answer["error"] if isinstance(answer["error"], str) else ""
        except (ValueError, LookupError, TypeError, RecursionError):
            sentence = ""  # a page of a proxy
        # Foreign text in a log line: no control characters, one line, and not long.
        shown = "".join(c if c.isprintable() else " " for c in sentence)
        self.sentence = " ".join(shown.split())[:_LONGEST_SENTENCE]
        super().__init__(f"HTTP {self.status}" + (f" ({self.sentence})" if self.sentence else ""))


class PatientClient:
    """Requests to the server at ``url``, over a few connections that are kept open.

    Of the settings, ``request_timeout`` covers one request with its body. ``request_attempts`` are
    made for each within ``page_deadline``, with waits of 0.5, 1, 2, ... 30 s (jittered), or as long
    as the server asks. A pause after a 429 counts separately, up to ``longest_pause`` in all.
    ``token``: of Hugging Face; it goes only to this server. ``shared``: a folder that all
    processes of this machine use, for the pause after a 429.
    """

    def __init__(
        self,
        url: str,
        *,
        settings: DataSettings,
        token: str | None,
        counts: Counts,
        shared: Path | None,
    ) -> None:
        self.url = url.rstrip("/")
        self._settings = settings
        self._token = _usable(token)
        self._counts = counts
        parts = urlsplit(self.url)
        self._scheme, self._places = parts.scheme, {parts.hostname}
        name = hashlib.sha256(parts.netloc.encode()).hexdigest()[:16]
        self._hold = Hold(None if shared is None else shared / f"pause-{name}")
        self._hold_due = Throttle(600.0)
        self._client = httpx.Client(
            timeout=settings.request_timeout.total_seconds(),
            # Also for what a redirect leads to, before anything is asked there.
            event_hooks={"request": [self._refuse_place]},
            transport=Transport(limits=httpx.Limits(max_connections=settings.connections)),
        )

    def get(
        self,
        path: str,
        read: Callable[[httpx.Response, Callable[[], bytes]], T],
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        most: int | None = None,
        what: str,
    ) -> T:
        """Return what ``read`` makes of a reply and of a function that reads its body.

        A ValueError of ``read`` is a reply that is asked for again. ``most``: bytes of a
        body, for which there is more time then. ``what``: named in errors.

        Raises PageUnavailable when attempts or deadline are used up, NothingToRead where asking
        again gives the same answer.
        """
        ask = partial(self._request, path, query or {}, headers or {}, read, most)
        problem, waits = "not asked", Backoff(first=_FIRST_WAIT, longest=_MAX_WAIT)
        kind = PageUnavailable
        deadline = time.monotonic() + self._settings.page_deadline.total_seconds()
        attempts = self._settings.request_attempts
        longest = left = self._settings.longest_pause.total_seconds()
        for attempt in range(attempts):
            # While the server refuses requests. No other page could be had meanwhile.
            while hold := self._hold.seconds():
                if hold > left:
                    break
                hold += random.uniform(0, 0.2)  # not all connections at one instant
                time.sleep(hold)
                deadline, left = deadline + hold, left - hold
            if hold:
                problem = (
                    f"the server asked for a pause of {hold:.0f} s more (HTTP 429), and a "
                    f"page waits {longest:.0f} s at most, so it is left out"
                )
                break
            pause, asked = waits.failed().total_seconds(), None
            try:
                return self._answer(ask)
            except _Refusal as refusal:
                problem, status, asked = str(refusal), refusal.status, refusal.wait
                self._counts.add(f"http_{status}")
                if status not in _AGAIN:
                    kind = NothingToRead
                    break
                if status == 429:
                    self._pause(asked or pause)
                    asked = None  # the pause holds this page too
            except _UNUSABLE as error:
                problem = f"{type(error).__name__}: {error}"
                self._counts.add("http_failures")
            if attempt + 1 == attempts:
                break
            # A wait that would end after the deadline is not begun: other pages need the thread.
            pause = max(pause, asked or 0.0)
            if time.monotonic() + pause >= deadline:
                break
            time.sleep(pause)
        raise kind(f"{what}: {problem}")

    def _pause(self, seconds: float) -> None:
        if self._hold.extend(seconds) and self._hold_due():
            remedy = "give" if self._token is None else "use a plan with more requests for"
            log.warning(
                "%s answers 429: this machine asks more often than it may, so all its ranks wait "
                "%.0f s. More --data.workers do not help: %s HF_TOKEN, or read local files "
                "(--data.source parquet:DIR)",
                self.url,
                self._hold.seconds(),
                remedy,
            )

    def _refuse_place(self, request: httpx.Request) -> None:
        """Raise NothingToRead for a redirect to what others write, or only this machine reaches."""
        url, host = str(request.url), request.url.host
        place = f"{request.url.scheme}://{host}"  # the rest may be a signature, which is a secret
        if request.url.scheme != "https" and self._scheme == "https":
            raise NothingToRead(f"{self.url} leads to {place}, which anybody on the way writes")
        if host in self._places:
            return
        if proxy_for(url) is None and is_inside(url) and not is_inside(self.url):
            raise NothingToRead(
                f"{self.url} leads to {place}, an internal address, so it was not asked"
            )
        self._places.add(host)

    def _answer(self, ask: Callable[[str | None], T]) -> T:
        """Return what ``ask`` does with the token, or without where the server refuses that.

        Raises _Refusal and what :meth:`_request` does.
        """
        token = self._token
        try:
            return ask(token)
        except _Refusal as refusal:
            if refusal.status != 401 or not token:
                raise
            # A public data set needs none.
            try:
                answer = ask(None)
            except _Refusal as without:
                without.args = (f"{without}; the token in HF_TOKEN is refused too ({refusal})",)
                raise without from None
            self._token = None
            log.warning(
                "%s refuses the token in HF_TOKEN (%s), so the data are read without it: "
                "renew it, or unset it",
                self.url,
                refusal,
            )
            return answer

    def _request(
        self,
        path: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        read: Callable[[httpx.Response, Callable[[], bytes]], T],
        most: int | None,
        token: str | None,
    ) -> T:
        sent = {**headers, **({"Authorization": f"Bearer {token}"} if token else {})}
        # httpx bounds each read; a body that trickles in is bounded here.
        timeout = self._settings.request_timeout.total_seconds()
        if most is None:
            most = MAX_REPLY
        else:
            timeout += most / _LEAST_RATE
        end = time.monotonic() + timeout
        url = f"{self.url}/{path}"
        request = self._client.build_request("GET", url, params=dict(query) or None, headers=sent)
        with ExitStack() as opened:
            history: list[httpx.Response] = []
            while True:
                reply = self._client.send(request, stream=True)
                opened.callback(reply.close)
                if reply.next_request is None or len(history) == _MOST_REDIRECTS:
                    break
                # httpx would read all of it, however long. A short one leaves its connection open.
                _begin_of(reply, end)
                reply.close()  # at once: the next request may need that connection
                history.append(reply)
                request = reply.next_request
            reply.history = history
            if not reply.is_success:
                raise _Refusal(reply, _begin_of(reply, end))

            def read_body() -> bytes:
                body = bytearray()
                for chunk in reply.iter_bytes():
                    body += chunk
                    if len(body) > most:
                        raise ValueError(f"the reply is larger than {most} bytes")
                    if time.monotonic() > end:
                        raise TimeoutError(f"the reply took longer than {timeout:g} s")
                return bytes(body)

            return read(reply, read_body)


def _begin_of(reply: httpx.Response, end: float) -> bytes:
    """Return what a body begins with, until ``end`` (time.monotonic()) at the latest."""
    body = bytearray()
    for chunk in reply.iter_bytes():
        body += chunk
        if len(body) > _LONGEST_ERROR or time.monotonic() > end:
            break
    return bytes(body)


def _usable(token: str | None) -> str | None:
    """Return a token that a header may hold; else None, with a warning."""
    token = (token or "").strip()  # the newline of a file that it was kept in
    if token.isascii() and token.isprintable():
        return token or None
    # h11 refuses it by an error that shows it.
    log.warning(
        "HF_TOKEN has characters that no token has, so data are read without it: set it again"
    )
    return None


def retry_after(value: str | None) -> float | None:
    """Return the seconds that a ``Retry-After`` header asks for: seconds or a date (RFC 9110)."""
    try:
        return float(Retry().parse_retry_after(value)) if value else None
    except (InvalidHeader, ValueError, OverflowError):
        return None
