"""The validator's side: signed calls to miners, one by one or as a parallel sweep."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, TypeVar

import httpx

from distributed_training.protocol import synapses
from distributed_training.protocol.synapses import IsAliveReply, SynapseError
from distributed_training.protocol.types import RoundRequest

from . import auth
from .base import Neuron
from .wallet import Wallet

log = logging.getLogger(__name__)

MAX_REPLY_BYTES = 64 * 1024
PARALLEL = 25  # calls at a time, as the public validator's sweeps
# The acknowledgement of an AllReduce call; its timeout field speaks of the round.
ACKNOWLEDGE_TIMEOUT = timedelta(seconds=12)

T = TypeVar("T")


@dataclass(frozen=True)
class AllReduceReply:
    """``running``: the miner's word on the round it is already in; None when it took the call."""

    running: str | None


class SignedClient:
    """Calls miners with the hotkey of ``wallet``. Each method blocks; call it from a thread without
    a running event loop. Nothing is raised for a miner that does not answer or answers nonsense."""

    def __init__(self, *, wallet: Wallet, scheme: Literal["btauth", "legacy"] = "btauth") -> None:
        if scheme not in (auth.BTAUTH, auth.LEGACY):
            raise ValueError(f"unknown scheme {scheme!r}")
        self._wallet = wallet
        self._scheme = scheme

    def is_alive(self, neuron: Neuron, timeout: timedelta) -> IsAliveReply | None:
        """``timeout`` covers the whole call. None: no valid reply in time."""
        return self.sweep_is_alive([neuron], timeout)[neuron.uid]

    def sweep_is_alive(
        self, neurons: Sequence[Neuron], timeout: timedelta, *, parallel: int = PARALLEL
    ) -> dict[int, IsAliveReply | None]:
        """Replies by uid. ``timeout`` covers each call, not the sweep."""

        async def one(client: httpx.AsyncClient, neuron: Neuron) -> IsAliveReply | None:
            body = synapses.build_is_alive()
            reply = await self._call(client, neuron, synapses.IS_ALIVE, body, timeout, timeout)
            if reply is None:
                return None
            try:
                return synapses.parse_is_alive_reply(reply)
            except SynapseError:
                return None

        return asyncio.run(self._sweep(neurons, one, parallel))

    def all_reduce(
        self,
        neuron: Neuron,
        request: RoundRequest,
        timeout: timedelta = ACKNOWLEDGE_TIMEOUT,
    ) -> bool:
        """Whether the miner acknowledged. ``timeout`` covers the call, not the round."""
        return self.sweep_all_reduce([neuron], request, timeout)[neuron.uid] is not None

    def sweep_all_reduce(
        self,
        neurons: Sequence[Neuron],
        request: RoundRequest,
        timeout: timedelta = ACKNOWLEDGE_TIMEOUT,
        *,
        parallel: int = 64,
    ) -> dict[int, AllReduceReply | None]:
        """Call all of a round at once. Replies by uid; None: not acknowledged."""
        body = synapses.build_all_reduce(request)
        of_round = request.timeout or synapses.ALL_REDUCE_TIMEOUT

        async def one(client: httpx.AsyncClient, neuron: Neuron) -> AllReduceReply | None:
            reply = await self._call(client, neuron, synapses.ALL_REDUCE, body, timeout, of_round)
            if reply is None:
                return None
            answer = reply.get("answer")
            return AllReduceReply(answer if isinstance(answer, str) else None)

        return asyncio.run(self._sweep(neurons, one, parallel))

    def answers_for_us(self, neuron: Neuron, timeout: timedelta) -> bool:
        """Whether a miner with *our own* hotkey is running at ``neuron``'s endpoint.

        Asked at the start with the endpoint the chain shows for our hotkey: a server of this kind
        refuses a call signed by its own key with a word only it has reason to say, the public miner
        just answers. ``timeout`` covers the call.
        """

        async def one(client: httpx.AsyncClient, asked: Neuron) -> bool:
            reply = await self._exchange(
                client, asked, synapses.IS_ALIVE, synapses.build_is_alive(), timeout, timeout
            )
            if reply is None:
                return False
            status, content = reply
            if status == auth.Refusal.OWN_HOTKEY.status:
                return content.get("message") == auth.Refusal.OWN_HOTKEY.message
            return status == 200 and content.get("completion") == "True"

        asked = replace(neuron, hotkey=self._wallet.ss58)
        return bool(asyncio.run(self._sweep([asked], one, 1))[asked.uid])

    async def _sweep(
        self,
        neurons: Sequence[Neuron],
        one: Callable[[httpx.AsyncClient, Neuron], Awaitable[T | None]],
        parallel: int,
    ) -> dict[int, T | None]:
        gate = asyncio.Semaphore(parallel)
        # No proxies, no redirects, no TLS: endpoints are addresses read from the chain.
        async with httpx.AsyncClient(trust_env=False, verify=False) as client:

            async def gated(neuron: Neuron) -> T | None:
                async with gate:
                    return await one(client, neuron)

            results = await asyncio.gather(*(gated(n) for n in neurons))
        return {neuron.uid: result for neuron, result in zip(neurons, results, strict=True)}

    async def _call(
        self,
        client: httpx.AsyncClient,
        neuron: Neuron,
        name: str,
        fields: Mapping[str, Any],
        timeout: timedelta,
        announced: timedelta,
    ) -> dict[str, Any] | None:
        """The fields of a reply with status 200, or None."""
        reply = await self._exchange(client, neuron, name, fields, timeout, announced)
        if reply is None:
            return None
        status, content = reply
        if status != 200:
            log.debug("%s of uid %d: status %d", name, neuron.uid, status)
            return None
        return content

    async def _exchange(
        self,
        client: httpx.AsyncClient,
        neuron: Neuron,
        name: str,
        fields: Mapping[str, Any],
        timeout: timedelta,
        announced: timedelta,
    ) -> tuple[int, dict[str, Any]] | None:
        """Status and fields, or None. ``announced`` goes into the legacy timeout header."""
        if neuron.port is None:
            return None
        path = f"/{name}"
        body = json.dumps(fields).encode()
        host = f"[{neuron.ip}]" if ":" in neuron.ip else neuron.ip
        if self._scheme == auth.BTAUTH:
            headers = auth.sign_btauth(self._wallet, path=path, body=body, receiver=neuron.hotkey)
        else:
            headers = auth.sign_legacy(
                self._wallet,
                route=name,
                receiver=neuron.hotkey,
                ip=neuron.ip,
                port=neuron.port,
                timeout=announced.total_seconds(),
            )
        headers["content-type"] = "application/json"
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                async with client.stream(
                    "POST", f"http://{host}:{neuron.port}{path}", content=body, headers=headers
                ) as reply:
                    raw = bytearray()
                    async for chunk in reply.aiter_raw():
                        raw += chunk
                        if len(raw) > MAX_REPLY_BYTES:
                            return None
            content = json.loads(bytes(raw))
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, ValueError, RecursionError) as err:
            log.debug("%s of uid %d: %s", name, neuron.uid, type(err).__name__)
            return None
        if not isinstance(content, dict):
            return None
        return reply.status_code, content
