"""Reading a request and answering it over ASGI, with every limit on size and form."""

from __future__ import annotations

import json
from typing import Any

from distributed_training.protocol.synapses import MAX_BODY_BYTES

from .auth import Refusal, Refused
from .http import MAX_HEADER_BYTES


def read_headers(scope: Any) -> dict[str, str]:
    """Raises Refused for what is too large, repeated or not ASCII."""
    headers: dict[str, str] = {}
    size = 0
    for name, value in scope["headers"]:
        size += len(name) + len(value) + 4
        if size > MAX_HEADER_BYTES:
            raise Refused(Refusal.HEADERS)
        try:
            key = name.decode("ascii")
            # Two values of one header: whoever reads the other one is deceived.
            if key in headers and key.startswith(_SINGLE):
                raise Refused(Refusal.MALFORMED)
            headers[key] = value.decode("ascii")
        except UnicodeDecodeError:
            raise Refused(Refusal.MALFORMED) from None
    return headers


_SINGLE = ("x-bittensor-", "bt_header_", "computed_body_hash", "timeout", "content-length")


def target(scope: Any) -> str:
    """The request target as sent, for the signed text."""
    path: str = scope["raw_path"].decode("ascii")
    query = scope["query_string"].decode("ascii")
    return f"{path}?{query}" if query else path


async def read_body(receive: Any) -> bytes | None:
    """The whole body; None when the client left. The protocol's timer bounds the time."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise Refused(Refusal.TOO_LARGE)
        if not message.get("more_body", False):
            return bytes(body)


def parse_fields(body: bytes) -> dict[str, Any]:
    def refuse(_: str) -> float:
        raise ValueError("not finite")

    try:
        fields = json.loads(body or b"{}", parse_constant=refuse)
    except (ValueError, RecursionError):
        raise Refused(Refusal.MALFORMED) from None
    if not isinstance(fields, dict):
        raise Refused(Refusal.MALFORMED)
    return fields


async def respond(send: Any, status: int, content: dict[str, Any], *, close: bool = False) -> None:
    headers = [
        (b"content-type", b"application/json"),
        # What a legacy caller takes for success.
        (b"bt_header_axon_status_code", str(status).encode()),
    ]
    if close:
        headers.append((b"connection", b"close"))
    body = json.dumps(content).encode()
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
