"""Send a short message to the operator with apprise, which supports many services."""

from __future__ import annotations

import logging
import threading
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from .proxies import share

_SECONDS = 20.0  # seconds for a whole message
_LONGEST_TEXT = 1000  # characters; every service accepts this as one message


class NotSent(RuntimeError):
    """The service did not accept a message; the text says why."""


def open_service(url: str) -> Any:
    """Return apprise's object for a service. Raises ValueError, which says what URL is expected."""
    logging.getLogger("apprise").propagate = False  # apprise logs URLs, which are secrets
    import apprise  # imported here: it takes half a second, and is often not needed

    asset = apprise.AppriseAsset(
        app_id="distributed-training", async_mode=False, http_redirects=False
    )
    if (service := apprise.Apprise.instantiate(url, asset=asset)) is None:
        raise ValueError(
            "a URL of apprise (appriseit.com), such as ntfys://HOST/TOPIC, tgram://TOKEN/CHAT_ID "
            "or, for a service of your own, jsons://HOST/PATH"
        )
    return service


def service_of(url: SecretStr) -> str:
    """Return the name of the service that a URL belongs to."""
    return str(open_service(url.get_secret_value()).service_name)


def send(url: SecretStr, title: str, text: str, *, bad: bool, seconds: float = _SECONDS) -> None:
    """Send a message within ``seconds``; ``bad``: an operator should look. Raises NotSent."""
    service = open_service(url.get_secret_value())
    import apprise

    host = urlsplit(url.get_secret_value()).hostname or ""
    if "." in host:  # otherwise it is a service's token, which other programs would inherit
        share(f"https://{host}")
    problem = [f"it did not answer within {seconds:.0f} s"]

    def deliver() -> None:
        kind = apprise.NotifyType.WARNING if bad else apprise.NotifyType.INFO
        with apprise.LogCapture(level=logging.WARNING, fmt="%(message)s") as lines:
            sent = service.notify(text[:_LONGEST_TEXT], title, kind, body_format="text")
            said = lines.getvalue().strip().rpartition("\n")[2].rstrip(".")
        problem[0] = "" if sent else said or "it gave no reason"

    # The thread is a daemon, since a silent name server, or an answer that comes byte by byte, may
    # block it for any length of time.
    thread = threading.Thread(target=deliver, name="message", daemon=True)
    thread.start()
    thread.join(seconds)
    if problem[0]:
        raise NotSent(problem[0])
