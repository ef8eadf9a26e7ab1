"""Build and parse the bodies of ``IsAlive`` and ``AllReduce`` calls (protocol page, section 1).

Two ways of signing carry the same bodies: the network's older calls (bittensor <= 10, "legacy") and
bittensor 11's signed HTTP. Identity never comes from a body: these functions read only the fields
of the synapse itself. A legacy signature does not cover the body, so every number from it is
clamped.
"""

from __future__ import annotations

import hashlib
import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from .keys import LONGEST_ADDRESS, LONGEST_PEER_ID, addressed_peer, distance, is_peer_id
from .types import RoundRequest

IS_ALIVE = "IsAlive"
ALL_REDUCE = "AllReduce"
IS_ALIVE_ROUTE = f"/{IS_ALIVE}"
ALL_REDUCE_ROUTE = f"/{ALL_REDUCE}"
ROUTES = (IS_ALIVE_ROUTE, ALL_REDUCE_ROUTE)
PROBE_HOST = "dt-doctor-probe"  # the Host header by which a miner knows `doctor --probe`

ALL_REDUCE_TIMEOUT = timedelta(seconds=840)  # of the round, sent as the call's timeout
MOST_CALLED = 64  # miners, to one round
LARGEST_GROUP = MOST_CALLED + 1  # the validator too
ADDRESSES_EACH = 2  # of one peer, in a call or an answer: a public one, and one in its own network
# Real dendrites (8.5.2 to 10.5.0) and btauth callers send at most 1 KB, always with a length; ids
# and addresses of a round's peers come on top, each with quotes, comma and blank. Half as much
# again: a body that is too large by one byte ends all rounds of a full network.
_OF_EACH = LONGEST_PEER_ID + 4 + ADDRESSES_EACH * (LONGEST_ADDRESS + 4)
MAX_BODY_BYTES = 3 * (1024 + LARGEST_GROUP * _OF_EACH) // 2
_RUN_ID = r"[!-~]{1,64}"  # it is logged

# Legacy freshness: a nonce is nanoseconds since the epoch; the first nonce of a (hotkey, uuid) must
# be newer than now - LEGACY_ALLOWANCE - timeout. The timeout header is not signed, so it is capped.
LEGACY_ALLOWANCE = timedelta(seconds=4)
# These synapses name no fields to hash: each call has the hash of nothing.
LEGACY_BODY_HASH = hashlib.sha3_256(b"").hexdigest()


class SynapseError(ValueError):
    """A body that is not of the synapse. Answer 400."""


def legacy_signed_text(
    *, nonce: int, sender: str, receiver: str, uuid: str, body_hash: str = LEGACY_BODY_HASH
) -> str:
    """Return the text that the sender's hotkey signs with sr25519.

    ``sender`` and ``receiver`` are ss58 hotkeys of dendrite and axon. The signature travels as
    ``0x`` and hexadecimal digits.
    """
    return f"{nonce}.{sender}.{receiver}.{uuid}.{body_hash}"


# --- IsAlive ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class IsAliveReply:
    """``epoch``: the miner's outer step; ``peer_id``: its averager's. None: it did not say.

    ``addresses``: where that peer is reached. ``run_id``: of the miner's network.
    """

    alive: bool
    epoch: int | None
    peer_id: str | None = None
    addresses: tuple[str, ...] = ()
    run_id: str | None = None


def build_is_alive(epoch: int | None = None, *, model: bool = False) -> dict[str, Any]:
    """Build the body of a call. ``epoch``: the caller's own outer step.

    ``model``: the next upload is to have the model too. Only the master's is obeyed.
    """
    asked: dict[str, Any] = dict.fromkeys(("peer_id", "addresses", "run_id"))
    if model:  # otherwise the body is the same as in earlier versions
        asked["model"] = True
    return {"answer": None, "completion": "", "epoch": epoch, **asked}


def asks_for_model(body: Mapping[str, Any]) -> bool:
    """Return whether the caller of IsAlive wants the model in the next upload."""
    return body.get("model") is True


def caller_epoch(body: Mapping[str, Any]) -> int | None:
    """Return the outer step that the caller of IsAlive states; None: it states none."""
    epoch = body.get("epoch")
    return epoch if _is_epoch(epoch) else None


def answer_is_alive(
    body: Mapping[str, Any],
    *,
    epoch: int,
    peer_id: str = "",
    addresses: Sequence[str] = (),
    run_id: str = "",
) -> dict[str, Any]:
    """Reply to ``body``: the same fields with completion "True" and the local outer step.

    The public network's callers do not ask for peer id, addresses and run id, and get none.
    """
    answer = body.get("answer")
    text = answer if isinstance(answer, str) else None
    reply = {"answer": text, "completion": "True", "epoch": epoch}
    known = {
        "peer_id": peer_id or None,
        "addresses": list(_addresses_of(peer_id, addresses)),
        "run_id": run_id or None,
    }
    return reply | {name: value for name, value in known.items() if name in body}


def parse_is_alive_reply(body: Mapping[str, Any]) -> IsAliveReply:
    """Read a reply to IsAlive.

    Raises SynapseError if ``epoch`` is neither absent nor an integer of an outer step. Whatever
    else is not of its form counts as not said.
    """
    epoch = body.get("epoch")
    if epoch is not None and not _is_epoch(epoch):
        raise SynapseError(f"IsAlive: epoch {reprlib.repr(epoch)} is no outer step")
    peer_id, addresses, run_id = (body.get(name) for name in ("peer_id", "addresses", "run_id"))
    peer_id = peer_id if is_peer_id(peer_id) else None
    known = isinstance(run_id, str) and re.fullmatch(_RUN_ID, run_id)
    return IsAliveReply(
        alive=body.get("completion") == "True",
        epoch=epoch,
        peer_id=peer_id,
        addresses=_addresses_of(peer_id, addresses) if isinstance(addresses, list) else (),
        run_id=run_id if known else None,
    )


def _is_epoch(value: Any) -> bool:
    # Bounded as in the keys of buckets: it is logged, and has as many digits as its sender likes.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**15


def _addresses_of(peer_id: str | None, addresses: Iterable[Any]) -> tuple[str, ...]:
    """Return the best of ``addresses`` that are of ``peer_id``: who is far needs the public one."""
    own = [a for a in addresses if peer_id and addressed_peer(a) == peer_id]
    return tuple(sorted(own, key=distance)[:ADDRESSES_EACH])


# --- AllReduce ----------------------------------------------------------------------------------

_SECONDS = ("request_timeout", "allreduce_timeout", "next_chunk_timeout", "min_matchmaking_time")


def build_all_reduce(request: RoundRequest) -> dict[str, Any]:
    """Build the body of a call; ``timeout`` is in every synapse and also goes into a header."""
    body: dict[str, Any] = {"answer": None, "completion": False}
    body["min_group_size"] = request.min_group_size
    for name in _SECONDS:
        value: timedelta | None = getattr(request, name)
        body[name] = None if value is None else value.total_seconds()
    body["timeout"] = (request.timeout or ALL_REDUCE_TIMEOUT).total_seconds()
    if request.peers:
        body["peers"] = list(request.peers)
    if request.addresses:
        body["addresses"] = list(request.addresses)
    return body


def round_timeout(request: RoundRequest, configured: timedelta) -> timedelta:
    """Return how long the round of ``request`` may take.

    A call that does not say so gets the ``configured`` time, at most the network's: its other peers
    have left the round by then.
    """
    return request.timeout or min(configured, ALL_REDUCE_TIMEOUT)


def answer_all_reduce(body: Mapping[str, Any]) -> dict[str, Any]:
    """Reply with the fields as they came. Callers reject a ``completion`` that is no boolean."""
    fields = ("answer", "completion", "min_group_size", *_SECONDS)
    reply = {name: body.get(name) for name in fields}
    reply["completion"] = bool(reply["completion"])
    return reply


def parse_all_reduce(
    body: Mapping[str, Any],
    *,
    caller: str,
    timeout: float | None = None,
    bounds: Mapping[str, tuple[float, float]],
) -> RoundRequest:
    """Return the round that a verified ``caller`` requests, every value clamped to ``bounds``.

    ``bounds``: least and most of each field by name, durations in seconds. ``timeout``: seconds,
    from the call's header if there is one; else the body's field is used. Absent or null fields
    become None (use the configured value). Raises SynapseError for a value that is not a finite
    number, for ``peers`` that are no peer ids, and for ``addresses`` that are not of ``peers``.
    """
    header = None if timeout is None else _number("timeout", timeout)
    from_body = _optional_number(body, "timeout")
    size = _optional_number(body, "min_group_size")
    if size is not None and size != int(size):
        raise SynapseError(f"AllReduce: min_group_size {size!r} is not an integer")
    durations = {name: _clamp(_optional_number(body, name), bounds[name]) for name in _SECONDS}
    peers = body.get("peers") or []
    if not isinstance(peers, list) or not all(map(is_peer_id, peers)):
        raise SynapseError(f"AllReduce: peers {reprlib.repr(peers)} are not peer ids")
    addresses = body.get("addresses") or []
    many = not isinstance(addresses, list) or len(addresses) > ADDRESSES_EACH * LARGEST_GROUP
    if many or not {addressed_peer(a) for a in addresses} <= set(peers):
        raise SynapseError(f"AllReduce: addresses {reprlib.repr(addresses)} are not of its peers")
    low, high = map(int, bounds["min_group_size"])
    return RoundRequest(
        caller=caller,
        timeout=_clamp(header if header is not None else from_body, bounds["timeout"]),
        min_group_size=None if size is None else min(max(int(size), low), high),
        peers=tuple(peers),
        addresses=tuple(addresses),
        **durations,
    )


def _clamp(seconds: float | None, between: tuple[float, float]) -> timedelta | None:
    if seconds is None:
        return None
    low, high = between
    return timedelta(seconds=min(max(seconds, low), high))


def _optional_number(body: Mapping[str, Any], name: str) -> float | None:
    value = body.get(name)
    return None if value is None else _number(name, value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SynapseError(f"{name} {reprlib.repr(value)} is not a number")
    try:
        number = float(value)
    except OverflowError:
        raise SynapseError(f"{name} is not a number anybody means") from None
    if not math.isfinite(number):
        raise SynapseError(f"{name} {number} is not finite")
    return number
