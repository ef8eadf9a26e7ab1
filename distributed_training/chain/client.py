"""The validator's side: signed calls to miners, one by one or as a parallel sweep."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import httpx

from distributed_training.common import http
from distributed_training.common.addresses import Reach, reach
from distributed_training.common.backoff import Throttle
from distributed_training.common.transports import AsyncTransport
from distributed_training.protocol import synapses
from distributed_training.protocol.synapses import IsAliveReply, SynapseError
from distributed_training.protocol.types import RoundRequest

from . import auth
from .base import Neuron
from .identity import Wallet

log = logging.getLogger(__name__)

MAX_REPLY_BYTES = 64 * 1024
_WARN_AGAIN = 600.0  # seconds
PARALLEL = synapses.MOST_CALLED  # calls at a time: a silent miner takes a call's whole time
# The acknowledgement of an AllReduce call; its timeout field speaks of the round.
ACKNOWLEDGE_TIMEOUT = timedelta(seconds=12)


class SignedClient:
    """Calls miners with the hotkey of ``wallet``.

    ``narrowest``: least reach of an endpoint that is called. On a public network anybody can
    announce any address, also one inside the caller's own network.

    Each method blocks; call it from a thread without a running event loop. Nothing is raised for a
    miner that does not answer or answers nonsense.
    """

    def __init__(self, *, wallet: Wallet, narrowest: Reach = Reach.MACHINE) -> None:
        self._narrowest = narrowest
        self._may_warn = Throttle(_WARN_AGAIN)
        self._wallet = wallet

    def sweep_is_alive(
        self,
        neurons: Sequence[Neuron],
        timeout: timedelta,
        *,
        epoch: int | None = None,
        model: bool = False,
    ) -> dict[int, IsAliveReply | None]:
        """Call all neurons; return replies by uid, None: no valid one.

        ``timeout`` covers each call, not the sweep. ``epoch``: our outer step, which
        the call carries. ``model``: their next uploads are to have the model too.
        """
        fields = synapses.build_is_alive(epoch, model=model)
        replies = self._sweep(neurons, synapses.IS_ALIVE, fields, timeout)
        alive: dict[int, IsAliveReply | None] = dict.fromkeys(replies)
        for uid, reply in replies.items():
            if reply is not None:
                with contextlib.suppress(SynapseError):
                    alive[uid] = synapses.parse_is_alive_reply(reply)
        return alive

    def sweep_all_reduce(
        self, neurons: Sequence[Neuron], request: RoundRequest
    ) -> dict[int, str | None]:
        """Call all of a round at once.

        By uid: the miner's word on the round it is already in, empty when it took the call; None
        when it did not acknowledge it.
        """
        fields = synapses.build_all_reduce(request)
        replies = self._sweep(neurons, synapses.ALL_REDUCE, fields, ACKNOWLEDGE_TIMEOUT)
        words: dict[int, str | None] = dict.fromkeys(replies)
        for uid, reply in replies.items():
            if reply is not None:
                answer = reply.get("answer")
                words[uid] = answer if isinstance(answer, str) else ""
        return words

    def _sweep(
        self,
        neurons: Sequence[Neuron],
        name: str,
        fields: Mapping[str, Any],
        timeout: timedelta,
    ) -> dict[int, dict[str, Any] | None]:
        """Call all ``neurons``; return the fields of their replies by uid."""
        body = json.dumps(fields).encode()
        gate = asyncio.Semaphore(PARALLEL)

        async def one(client: httpx.AsyncClient, neuron: Neuron) -> dict[str, Any] | None:
            async with gate:
                if neuron.port is None:
                    return None
                try:
                    reachable = reach(neuron.ip) <= self._narrowest
                except ValueError:
                    reachable = False
                if not reachable:
                    if self._may_warn():
                        log.warning(
                            "uid %d is not called: it announces %s, which others cannot reach; on "
                            "a private network give this validator's own address with --dht.ip",
                            neuron.uid,
                            neuron.ip,
                        )
                    return None
                # When it is its turn: a nonce that waited for the others would be stale.
                headers = auth.sign_btauth(
                    self._wallet, path=f"/{name}", body=body, receiver=neuron.hotkey
                )
                return await _post(client, neuron, name, body, headers, timeout)

        async def sweep() -> list[dict[str, Any] | None]:
            # Without redirects and TLS: endpoints are chain addresses.
            async with httpx.AsyncClient(transport=AsyncTransport(verify=False)) as client:
                return await asyncio.gather(*(one(client, neuron) for neuron in neurons))

        uids = (neuron.uid for neuron in neurons)
        return dict(zip(uids, http.run_to_end(sweep()), strict=True))


async def _post(
    client: httpx.AsyncClient,
    neuron: Neuron,
    name: str,
    body: bytes,
    headers: Mapping[str, str],
    timeout: timedelta,
) -> dict[str, Any] | None:
    """Return the fields of the miner's reply; None if it did not take the call."""
    host = f"[{neuron.ip}]" if ":" in neuron.ip else neuron.ip
    url = f"http://{host}:{neuron.port}/{name}"
    headers = {**headers, "content-type": "application/json"}
    try:
        reply, raw = await http.ask(
            client,
            "POST",
            url,
            most=MAX_REPLY_BYTES,
            seconds=timeout.total_seconds(),
            content=body,
            headers=headers,
        )
        content = json.loads(raw)
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError, RecursionError) as error:
        log.debug("%s of uid %d: %s", name, neuron.uid, type(error).__name__)
        return None
    if reply.status_code != 200:
        log.debug("%s of uid %d: status %d", name, neuron.uid, reply.status_code)
        return None
    return content if isinstance(content, dict) else None
