"""Read from and write to the public chain through bittensor 11's own client.

The chain shows who is registered, who may lead, where a member's own bucket is (its commitment) and
where its DHT peer is (its axon, with the peer's id as the axon's certificate). One endpoint is
asked every few minutes, over a new connection each time. If a read fails, the last known state
stays.

The client has no deadlines: a node that accepts the connection and stays silent would block it for
minutes. So its callers wait for a limited time, and only until the chain is closed.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any

from distributed_training.common.backoff import Backoff
from distributed_training.common.proxies import share, via
from distributed_training.config.settings import ChainSettings

from .base import Chain, ChainError, Neuron
from .identity import Wallet

log = logging.getLogger(__name__)

FIRST_PAUSE = timedelta(seconds=1)  # pause after a failure; each further failure doubles it
# Seconds that an abandoned call gets to end; seconds between two checks for a close of the chain.
_ENDING, _LOOK = 1.0, 0.2
_COMMITMENTS = ("Commitments", "CommitmentOf")  # pallet and storage map
_CERTIFICATES = ("SubtensorModule", "NeuronCertificates")
_LONGEST_COMMITMENT = 128  # bytes of the field Raw128
_PEER_ID = re.compile(r"[1-9A-HJ-NP-Za-km-z]{32,64}")  # base58; a certificate takes 64 bytes


def chain_endpoint(settings: ChainSettings) -> str:
    """Return the URL of the node that the settings name."""
    from bittensor.settings import resolve_endpoint

    return str(resolve_endpoint(settings.chain_endpoint or settings.network)[1])


class BittensorChain(Chain):
    """A :class:`~.base.Chain` on top of a Subtensor.

    ``settings.call_timeout`` covers a whole read or write, including the connection.
    ``substrate``: the SDK's access to the chain, which tests replace; None: a websocket.
    """

    def __init__(
        self,
        *,
        settings: ChainSettings,
        wallet: Wallet | None,
        master: str | None = None,
        substrate: Any = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        own = wallet.ss58 if wallet is not None else ""
        super().__init__(own=own, master=master, monotonic=monotonic)
        self._settings, self._wallet, self._substrate = settings, wallet, substrate
        self._netuid, self._endpoint = settings.netuid, chain_endpoint(settings)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="chain", daemon=True)
        self._thread.start()

    # writes

    def commit(self, text: str) -> None:
        import bittensor

        raw = text.encode()
        call = bittensor.calls.Commitments.set_commitment(
            netuid=self._netuid, info={"fields": [{f"Raw{len(raw)}": raw}]}
        )
        # Name the signer, because the default is the coldkey.
        self._write("commit", lambda c, keys: c.submit_call(call, keys, signer="hotkey"))

    def serve(self, ip: str, port: int, peer: str = "") -> None:
        import bittensor

        place: dict[str, Any] = {"netuid": self._netuid, "ip": ip, "port": port}
        intent = bittensor.ServeAxon(**place)
        if peer:  # preceded by a byte for the kind of key: 0, which is none of the chain's kinds
            intent = bittensor.ServeAxonTls(**place, certificate="0x00" + peer.encode().hex())
        self._write("serve", lambda c, keys: c.execute(intent, keys))

    def set_weights(self, weights: Mapping[int, float]) -> None:
        import bittensor

        values = [float(weight) for weight in weights.values()]
        intent = bittensor.SetWeights(netuid=self._netuid, uids=list(weights), weights=values)
        self._write("weights", lambda c, keys: c.execute(intent, keys))

    def _write(self, kind: str, submit: Callable[[Any, Any], Awaitable[Any]]) -> None:
        async def write() -> None:
            if self._wallet is None:
                raise ChainError("no wallet was given, so nothing can be signed")
            async with self._client() as client:
                result = await submit(client, self._wallet.of_sdk())
                if not result.success:
                    raise ChainError(f"refused by the chain: {_describe(result.error)}")
                with suppress(Exception):  # the write is seen at the next read
                    await self._read(client)

        # Use a thread: in a notebook the caller's thread already runs an event loop, and cannot run
        # a second one.
        with self._writing(), ThreadPoolExecutor(1) as thread:
            thread.submit(self._call, write(), f"{kind}: ").result()

    # calls

    def _call(self, work: Coroutine[Any, Any, None], kind: str = "") -> None:
        """Do ``work`` in this thread. Raises ChainError if it fails or does not end in time."""
        seconds, loop = self._settings.call_timeout.total_seconds(), asyncio.new_event_loop()
        # Ignore errors of abandoned calls, since the failure of the call itself was logged.
        loop.set_exception_handler(lambda _, context: log.debug("%s", context))
        task, until = loop.create_task(work), time.monotonic() + seconds
        while not (task.done() or self._closed.is_set() or time.monotonic() >= until):
            left = max(0.0, until - time.monotonic())
            loop.run_until_complete(asyncio.wait({task}, timeout=min(_LOOK, left)))
        why = ""
        if not task.done():
            late = f"no answer from the chain within {seconds:.0f} s"
            why = "the chain was closed" if self._closed.is_set() else late
            task.cancel()  # a peer that is gone never answers the closing handshake
            loop.run_until_complete(asyncio.wait({task}, timeout=_ENDING))
        loop.close()
        if why:
            raise ChainError(kind + why)
        # Check the task's error here, because a panic in the compiled part of the SDK is not an
        # Exception.
        if (error := task.exception()) is not None:
            raise ChainError(kind + _describe(error)) from error

    def _follow(self) -> None:
        every = self._settings.neurons_interval
        backoff = Backoff(first=min(FIRST_PAUSE, every), longest=every)

        async def look() -> None:
            async with self._client() as client:
                await self._read(client)

        while not self._closed.is_set():
            wait = every
            try:
                self._call(look())
                if self.trouble:
                    log.info("The chain at %s answers again", self._endpoint)
                self.trouble = ""
                backoff.succeeded()
            except ChainError as error:
                self._counts["failures"] += 1
                if not self.trouble and not self._closed.is_set():  # one line per outage
                    log.warning(
                        "The chain at %s cannot be read (%s): training continues with what was "
                        "last known, and more tries follow; if this lasts, choose another node "
                        "with --subtensor.chain_endpoint",
                        self._endpoint + via(self._endpoint),
                        error,
                    )
                self.trouble, wait = str(error), backoff.failed()
            self._closed.wait(wait.total_seconds())

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[Any]:
        import bittensor

        share(self._endpoint)  # its websockets read the environment
        client = bittensor.Client(
            self._endpoint, fallback_endpoints=[], archive_endpoints=[], substrate=self._substrate
        )
        try:
            # The SDK also reads the token symbols of all subnets, which their owners may choose
            # freely, so ignore its errors about them.
            with suppress(ValueError, TypeError, LookupError):
                await client.connect()
            yield client
        finally:
            await client.close()

    async def _read(self, client: Any) -> None:
        graph = await client.subnets.metagraph(self._netuid, commitments=False)
        if graph is None:
            raise ChainError(f"there is no subnet {self._netuid}: check chain.netuid of the file")
        if not graph.neurons:  # the SDK returns an empty list for a field that an answer lacks
            raise ChainError(f"it shows no members at all on subnet {self._netuid}")
        peers = await self._texts(client, _CERTIFICATES, _peer_id)
        texts = await self._texts(client, _COMMITMENTS, _committed)
        neurons = []
        for found in graph.neurons:
            host, _, port = (found.axon or "0.0.0.0:0").rpartition(":")
            neuron = Neuron(
                uid=found.uid,
                hotkey=found.hotkey,
                ip=host.strip("[]"),
                port=int(port) or None,
                peer=(peers or {}).get(found.hotkey, ""),
                validator_permit=found.validator_permit,
                incentive=found.incentive,
            )
            neurons.append(neuron)
        self._saw(tuple(neurons), texts)

    async def _texts(
        self, client: Any, item: tuple[str, str], text_of: Callable[[Any], str]
    ) -> dict[str, str] | None:
        """Return the texts in a storage map, by hotkey; None if it cannot be read."""
        try:
            entries = await client.query_map(item, [self._netuid])
        except Exception as error:  # noqa: BLE001 - foreign bytes must not hide the members
            log.debug("%s cannot be read: %s", item[1], _describe(error))
            return None
        texts: dict[str, str] = {}
        for hotkey, entry in entries:
            with suppress(ValueError):  # entries of another form are not ours
                texts[str(hotkey)] = text_of(entry)
        return texts

    def close(self) -> None:
        self._closed.set()
        self._thread.join(2 * _ENDING)


def _peer_id(entry: Any) -> str:
    """Return the id of a DHT peer from the SDK's decoded certificate. Raises ValueError."""
    match entry:
        case {"public_key": str() as text} if _PEER_ID.fullmatch(text):
            return text
    raise ValueError("another certificate")


def _committed(entry: Any) -> str:
    """Return the text of one commitment from the SDK's decoded entry.

    The entry has one field ``Raw<n>`` of n bytes, in hexadecimal digits. Raises ValueError for any
    other content: hashes, timelocked or larger fields, several fields, or bytes that are not text.
    """
    match entry:
        case {"info": {"fields": [{**field}]}} if len(field) == 1:
            ((kind, digits),) = field.items()
            raw = bytes.fromhex(str(digits).removeprefix("0x"))
            if kind == f"Raw{len(raw)}" and len(raw) <= _LONGEST_COMMITMENT:
                return raw.decode()
    raise ValueError("not one field of bytes")


def _describe(error: object) -> str:
    """Describe an error in one line; the SDK's texts may have several lines."""
    text = " ".join(str(error).split())[:200]
    if isinstance(error, ChainError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
