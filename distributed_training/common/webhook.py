"""Send a short message to an operator's webhook, in the form that its service reads.

The URL is a secret: whoever has it can write there, or read along. So no error of this module has
a part of it, and nothing but a service's own answer says where a message went. The service is
known by host and path:

========  ================================================  ====================================
ntfy      ntfy.sh, or a host that begins with ``ntfy.``     the text; title, priority as headers
Slack     hooks.slack.com/services/...                      ``{"text"}``
Discord   discord.com/api/webhooks/...                      ``{"content"}``
Telegram  api.telegram.org/bot.../sendMessage?chat_id=...   ``{"chat_id", "text"}``
JSON      any other                                         ``{"title", "text", "bad", "time"}``
========  ================================================  ====================================

Nothing here waits longer than a time limit, also for a name server, follows a redirect or raises
another error than :class:`NotSent`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import threading
import time
from dataclasses import dataclass
from email.header import Header
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pydantic import SecretStr

from .addresses import Reach, reach
from .http import run_to_end

_SECONDS = 10.0  # for all of one request
_MOST_BYTES = 64 * 1024  # of an answer
_LONGEST_WAIT = 86400.0  # that a service may ask for
# Characters of a text: of four bytes each they stay below ntfy's 4,096 bytes, Discord's 2,000
# characters and Telegram's 4,096.
_LONGEST_TEXT = 1000
_JSON = {"content-type": "application/json"}


class NotSent(RuntimeError):
    """The service did not take a message; the text says why, without its URL.

    ``wait``: seconds that it asked to wait before the next one, or None. ``silent``: it was reached
    and has not answered, so it may have taken it.
    """

    def __init__(self, why: str, wait: float | None = None, *, silent: bool = False) -> None:
        super().__init__(why)
        self.wait, self.silent = wait, silent


@dataclass(frozen=True)
class Message:
    """``title``: whose miner; ``bad``: an operator should look."""

    title: str
    text: str
    bad: bool = False


def service_of(url: str) -> str:
    """Return the name of the service that a URL belongs to."""
    parts = urlsplit(url)
    host, path = parts.hostname or "", parts.path
    if host == "ntfy.sh" or host.startswith("ntfy."):
        return "ntfy"
    if host == "hooks.slack.com" and path.startswith("/services/"):
        return "Slack"
    # Its clients of other builds copy URLs of ptb.discord.com and canary.discord.com.
    if f".{host}".endswith((".discord.com", ".discordapp.com")) and path.startswith("/api/"):
        return "Discord"
    if host == "api.telegram.org" and path.startswith("/bot"):
        return "Telegram"
    return "JSON"


def check_url(text: str) -> None:
    """Raise ValueError, with what is wanted, for a URL that no message could be sent to."""
    wanted = "an https:// URL of a webhook (http:// only with a private address)"
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname or "", parts.port  # .port raises ValueError if it is none
    except ValueError:
        host = ""
    inside = host == "localhost"
    with contextlib.suppress(ValueError):  # a name
        inside |= Reach.EVERYWHERE < reach(host) < Reach.NOWHERE
    schemes = ("http", "https") if inside else ("https",)
    if not host or "@" in parts.netloc or parts.scheme not in schemes:
        raise ValueError(wanted)
    service = service_of(text)
    if service == "ntfy" and not parts.path.strip("/"):
        raise ValueError("an ntfy URL that ends in a topic, https://ntfy.sh/TOPIC")
    chat = parse_qs(parts.query).get("chat_id")
    if service == "Telegram" and not (chat and parts.path.endswith("/sendMessage")):
        raise ValueError(
            "https://api.telegram.org/bot<TOKEN>/sendMessage?chat_id=<ID>, which Telegram needs"
        )


def build_request(url: str, message: Message) -> tuple[str, bytes, dict[str, str]]:
    """Return the URL to post to, the body and the headers, as the service of ``url`` reads them."""
    service, text = service_of(url), message.text
    if len(text) > _LONGEST_TEXT:
        text = text[: _LONGEST_TEXT - 3] + "..."
    line = f"{message.title}: {text}"
    if service == "ntfy":
        title = "".join(filter(str.isprintable, message.title))
        if not title.isascii():
            title = Header(title, "utf-8", maxlinelen=10**6).encode()
        headers = {"title": title, "priority": "high" if message.bad else "default"}
        return url, text.encode(errors="replace"), headers
    body: dict[str, Any]
    if service == "Slack":
        # The three characters by which its markup begins a link or a mention.
        for character, name in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
            line = line.replace(character, name)
        body = {"text": line, "mrkdwn": False}
    elif service == "Discord":
        body = {"content": line, "allowed_mentions": {"parse": []}}
    elif service == "Telegram":
        # All of its query, as of a forum's topic: in the body it is in no proxy's log.
        given = {name: value for name, (value, *_) in parse_qs(urlsplit(url).query).items()}
        url = urlsplit(url)._replace(query="").geturl()
        body = {**given, "text": line, "disable_web_page_preview": True}
    else:
        body = {"title": message.title, "text": text, "bad": message.bad, "time": time.time()}
    return url, json.dumps(body).encode(), _JSON


def send(url: SecretStr, message: Message, *, seconds: float = _SECONDS) -> None:
    """Post ``message`` within ``seconds``. Raises NotSent."""
    place, body, headers = build_request(url.get_secret_value(), message)
    try:
        with asyncio.Runner(loop_factory=_Loop) as runner:
            status, wait = run_to_end(_post(place, body, headers, seconds), runner)
    except TimeoutError:
        raise NotSent(f"it has not answered within {seconds:.0f} s", silent=True) from None
    except Exception as error:  # noqa: BLE001  # whatever a client raises may have the URL in it
        raise NotSent(f"it is not reached ({type(error).__name__})") from None
    if 200 <= status < 300:
        return
    if 300 <= status < 400:
        raise NotSent(f"it leads elsewhere (status {status}), which is not followed")
    raise NotSent(f"it answers with status {status}", wait)


class _Loop(asyncio.SelectorEventLoop):
    """One that nobody waits for when a name server is silent.

    The threads in which a loop usually asks for addresses are waited for at its end, and at that of
    the program: a stop would take as long as the resolver's patience.
    """

    async def getaddrinfo(self, *place: Any, **options: Any) -> Any:
        """Do what :func:`socket.getaddrinfo` does, in a daemon."""
        found: asyncio.Future[Any] = self.create_future()

        def settle(error: Exception | None, addresses: Any) -> None:
            if found.done():  # out of time
                return
            if error is None:
                found.set_result(addresses)
            else:
                found.set_exception(error)

        def resolve() -> None:
            error, addresses = None, None
            try:
                addresses = socket.getaddrinfo(*place, **options)
            except Exception as raised:  # noqa: BLE001  # it is the caller's
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: out of time
                self.call_soon_threadsafe(settle, error, addresses)

        threading.Thread(target=resolve, name="resolve", daemon=True).start()
        return await found


async def _post(
    url: str, body: bytes, headers: dict[str, str], seconds: float
) -> tuple[int, float | None]:
    """Return the status, and for how many seconds the service wants no further message."""
    import httpx

    from .transports import AsyncTransport

    headers = {**headers, "accept-encoding": "identity"}
    content = b""
    async with (
        # httpx bounds only each read: an answer that trickles in would never end.
        asyncio.timeout(seconds),
        httpx.AsyncClient(
            transport=AsyncTransport(), timeout=httpx.Timeout(None, connect=seconds / 2)
        ) as client,
        client.stream("POST", url, content=body, headers=headers) as reply,
    ):
        # Else it has the message: an answer without an end would make it come again and again.
        if not reply.is_success:
            async for part in reply.aiter_raw():
                content += part
                if len(content) > _MOST_BYTES:
                    break
        return reply.status_code, _wait(reply.headers.get("retry-after"), content)


def _wait(header: str | None, content: bytes) -> float | None:
    """Return the seconds of Retry-After, or those of Discord's or Telegram's answer."""
    wanted: Any = header
    try:
        if header is None:
            answer = json.loads(content)
            wanted = {**answer, **answer.get("parameters", {})}.get("retry_after")
        seconds = float(wanted)
    except (ArithmeticError, AttributeError, RecursionError, TypeError, ValueError):
        # None, a date, no JSON, a number of hundreds of digits.
        return None
    return min(max(0.0, seconds), _LONGEST_WAIT) if math.isfinite(seconds) else None
