"""The public chain through bittensor 11. The only module that uses the SDK's client.

One thread with its own event loop holds one connection, reads the block every few seconds and
neurons with commitments every few minutes. Each call has a deadline of ours: an endpoint that
accepts the connection and stays silent would hold the SDK for minutes. When a call fails the
connection is dropped and the next endpoint of the list is tried, with growing pauses; meanwhile
readers get the last known state.

An endpoint that synchronizes, or that lost its peers, answers with blocks of hours ago and without
hotkeys that were registered since. Blocks carry the time they were made at, so the wall clock shows
such an endpoint, as long as there is another one to ask. When all endpoints are behind, the clock
of this machine may be wrong, and the newest endpoint is used.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

from distributed_training.common.backoff import Throttle, doubling
from distributed_training.common.proxies import share, via
from distributed_training.config.settings import ChainSettings

from .base import Chain, ChainError, Neuron
from .identity import Wallet

log = logging.getLogger(__name__)

LATE = timedelta(minutes=10)  # since the newest block; one is made every 12 s
ASK_AGAIN = timedelta(minutes=10)  # the other nodes, while one is believed that is behind
_ALIKE = 60.0  # seconds between the newest blocks of two nodes that are as good as each other


class NewestBlocks:
    """The times at which the newest block of each endpoint was made.

    ``clock``: the wall clock, in seconds since the epoch; ``monotonic``: the clock of
    :data:`ASK_AGAIN`.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._made: dict[str, float] = {}  # by endpoint, for each that was asked
        self._believed_at: float | None = None  # when a node that is behind was believed

    def asking(self, endpoint: str) -> None:
        """Record that ``endpoint`` was asked.

        While it is silent it does not count as possibly newer.
        """
        self._made[endpoint] = -math.inf

    def check(self, endpoint: str, made: float, others: Iterable[str]) -> None:
        """Raise ChainError if ``endpoint`` is behind the clock and another one may be newer.

        Its newest block was made at ``made``. One of ``others`` may be newer if its block is, or if
        it was not asked yet.
        """
        self._made[endpoint] = made
        behind = self._clock() - made
        if behind <= LATE.total_seconds():
            self._made, self._believed_at = {}, None  # the others' times are soon too old
            return
        now = self._monotonic()
        if self._believed_at is not None and now - self._believed_at > ASK_AGAIN.total_seconds():
            self._made, self._believed_at = {endpoint: made}, None
        newest = max((self._made.get(other, math.inf) for other in others), default=-math.inf)
        if newest > made + _ALIKE:
            raise ChainError(
                f"its newest block is {behind / 60:.0f} minutes behind this machine's clock"
            )
        if self._believed_at is None:
            self._believed_at = now
            log.warning(
                "No chain node that answers is newer than %s, which is %.0f minutes behind this "
                "machine's clock, so what it shows may be old, and it is used; see whether "
                "timedatectl says 'synchronized: yes', or name another node with "
                "--subtensor.chain_endpoint",
                endpoint,
                behind / 60,
            )


def minutes_behind(chain: Chain) -> float | None:
    """Return the chain's delay behind this machine's clock; None if it is not late."""
    now = chain.clock()
    behind = 0.0 if now is None else time.time() - now
    return behind / 60 if behind > LATE.total_seconds() else None


T = TypeVar("T")

FIRST_PAUSE = timedelta(seconds=1)  # after a failure; doubled when all endpoints have failed
LONGEST_PAUSE = timedelta(minutes=1)
FURTHEST_BEHIND = 30  # blocks
STANDSTILL = 180.0  # seconds without a new block; then the other endpoints are asked
_CLOSE_TIMEOUT = 5.0
_LOG_INTERVAL = 300.0  # seconds between two lines about a chain that stays away
_COMMITMENTS = ("Commitments", "CommitmentOf")  # pallet and storage map
_LONGEST_COMMITMENT = 128  # bytes, of the field Raw128
_AT_A_TIME = 32  # entries that are asked for one by one


class _PartlyRead(ChainError):
    """Blocks could be read, neurons or commitments could not."""


def endpoints_of(settings: ChainSettings) -> list[str]:
    """Return the URLs of the nodes that are asked, the first one first."""
    from bittensor.settings import default_fallback_endpoints, resolve_endpoint

    network, first = resolve_endpoint(settings.chain_endpoint or settings.network)
    more = settings.fallback_endpoints or tuple(default_fallback_endpoints(network))
    return [first, *(url for url in more if url != first)]


class BittensorChain(Chain):
    """A :class:`~.base.Chain` over a Subtensor.

    ``settings.call_timeout`` covers connecting and each read, ``settings.write_timeout`` a write
    from the call to its finalized block, waiting for a connection included. ``substrate`` makes the
    SDK's chain access for an endpoint (the SDK's own seam, for tests); None: a websocket.
    ``monotonic`` and ``sleep`` are the clock of ages, pauses and intervals (not of deadlines).
    """

    def __init__(
        self,
        *,
        settings: ChainSettings,
        wallet: Wallet | None,
        substrate: Callable[[str], Any] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__(monotonic=monotonic)
        self._settings = settings
        self._wallet = wallet
        self._substrate = substrate
        self._netuid = settings.netuid
        self._sleep = sleep
        self._newest = NewestBlocks(monotonic=monotonic)
        self._looked_at = float("-inf")  # the last whole look
        self._failure_lines = Throttle(_LOG_INTERVAL, most_keys=1, clock=monotonic)
        self._endpoint = ""  # of the connection
        self._asked_another = threading.Event()
        self._client: Any = None
        self._connected = asyncio.Event()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._main())
        self._thread = threading.Thread(target=self._run, name="subtensor", daemon=True)
        self._thread.start()

    # writes

    def commit(self, text: str) -> None:
        import bittensor

        raw = text.encode()
        call = bittensor.calls.Commitments.set_commitment(
            netuid=self._netuid, info={"fields": [{f"Raw{len(raw)}": raw}]}
        )
        # The default signer would be the coldkey.
        self._write("commit", lambda c: c.submit_call(call, self._keys(), signer="hotkey"))

    def serve(self, ip: str, port: int, peer: str = "") -> None:
        import bittensor

        if peer:
            raise ChainError("a Bittensor chain has no place for the id of a DHT peer")

        intent = bittensor.ServeAxon(netuid=self._netuid, ip=ip, port=port)
        self._write("serve", lambda c: c.execute(intent, self._keys()))

    def set_weights(self, weights: Mapping[int, float]) -> None:
        import bittensor

        class Weights(bittensor.SetWeights):  # plain, or sealed where the subnet wants it
            async def build(self, substrate: Any, wallet: Any) -> Any:
                return await super().build(_OfThisRuntime(substrate), wallet)

        intent = Weights(
            netuid=self._netuid, uids=list(weights), weights=[float(w) for w in weights.values()]
        )
        self._write("weights", lambda c: c.execute(intent, self._keys()))

    def _keys(self) -> Any:
        if self._wallet is None:
            raise ChainError("no wallet was given, so nothing can be signed")
        return self._wallet.of_sdk()

    def _write(self, kind: str, submit: Callable[[Any], Awaitable[Any]]) -> None:
        if self._closed:
            raise ChainError(f"{kind}: the chain was closed")
        seconds = self._settings.write_timeout.total_seconds()
        with self._writing():
            written = self._submit(kind, submit, seconds)
            future = asyncio.run_coroutine_threadsafe(written, self._loop)
            try:
                # Later than the write's own deadline, whose error says more: for a loop that hangs.
                future.result(seconds + _CLOSE_TIMEOUT)
            except FutureTimeout:
                future.cancel()
                raise ChainError(f"{kind}: no answer of the chain within {seconds:.0f} s") from None
            except CancelledError:
                raise ChainError(f"{kind}: the chain was closed") from None

    async def _submit(
        self, kind: str, submit: Callable[[Any], Awaitable[Any]], seconds: float
    ) -> None:
        try:
            async with asyncio.timeout(seconds):
                # Inside the deadline: a write waits for a connection no longer than for its block.
                await self._connected.wait()
                with _sdk_errors():
                    result = await submit(self._client)
        except ChainError as error:
            raise ChainError(f"{kind}: {error}") from error
        except TimeoutError:
            raise ChainError(
                f"{kind}: no answer of the chain within {seconds:.0f} s; whether it was written "
                "is seen at the next read"
            ) from None
        if not result.success:
            raise ChainError(f"{kind}: refused by the chain: {_describe(result.error)}")
        # Make our own write visible; that this read fails is the poller's business.
        with suppress(Exception):
            await self._read(self._client)

    # the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(_stray)
        try:
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._task)
            # Writes that wait for a connection end with the chain.
            writes = asyncio.all_tasks(self._loop)
            for write in writes:
                write.cancel()
            self._loop.run_until_complete(asyncio.gather(*writes, return_exceptions=True))
        finally:
            self._loop.close()

    async def _main(self) -> None:
        rounds = 0  # of all endpoints, in a row, without a whole look
        turn = 0
        while True:
            endpoints = endpoints_of(self._settings)
            endpoint = endpoints[turn % len(endpoints)]
            # Before it is tried: the one that fails must not be the next one again.
            turn += 1
            before = self._looked_at
            try:
                with _sdk_errors():
                    others = set(endpoints) - {endpoint}
                    await self._follow(endpoint, others=others, tried_all=rounds > 0)
            except (ChainError, TimeoutError) as error:  # training continues
                self._failed(endpoint, error)
            # Pauses grow only while no endpoint can be read whole.
            if self._looked_at != before:
                rounds = 0
            pause = doubling(rounds + 1, first=FIRST_PAUSE, longest=LONGEST_PAUSE)
            # Also after an endpoint that was left without an error, or this could spin.
            await self._sleep(pause.total_seconds())
            rounds += turn % len(endpoints) == 0

    def _failed(self, endpoint: str, error: Exception) -> None:
        """Count a failure. Log it if the last look was whole, or none for a while."""
        self._counts["failures"] += 1
        if not self._failure_lines(self._looked_at):
            return
        known = (
            f"continues with the state of {self._monotonic() - self._looked_at:.0f} s ago"
            if self._looked_at > float("-inf")
            else "nothing is known yet"
        )
        log.warning(
            "The chain at %s failed (%s): %s; trying again, also at other endpoints. If it lasts, "
            "name a node with --subtensor.chain_endpoint",
            endpoint + via(endpoint),
            _describe(error),
            known,
        )

    def endpoints(self) -> int:
        return len(endpoints_of(self._settings))

    def ask_another(self) -> None:
        # From any thread: the loop looks at it after each block.
        self._asked_another.set()

    @asynccontextmanager
    async def _client_at(self, endpoint: str) -> AsyncIterator[Any]:
        """Connect; inside, writes may go through that client once ``_connected`` is set."""
        import bittensor

        share(endpoint)  # its websockets read the environment
        client = bittensor.Client(
            endpoint,
            # We go through the endpoints ourselves, with our deadlines.
            fallback_endpoints=[],
            substrate=self._substrate(endpoint) if self._substrate is not None else None,
        )
        try:
            # The SDK's connect also reads the token symbols of all subnets, for display.
            with suppress(*_DECODING):
                await self._timed(client.connect())
            self._counts["connections"] += 1
            yield client
        finally:
            self._connected.clear()
            self._client = None
            # A connection that failed may fail to close; it is dropped either way.
            with suppress(Exception):
                # A peer that is gone never answers the closing handshake.
                await asyncio.wait_for(client.close(), _CLOSE_TIMEOUT)

    async def _follow(self, endpoint: str, *, others: Iterable[str], tried_all: bool) -> None:
        """Connect and read until something fails, another endpoint is due, or the chain is closed.

        ``tried_all``: no endpoint could be read whole. Then this one is kept as long as it has
        blocks, until neurons or commitments have failed once more.
        """
        self._newest.asking(endpoint)  # before a call that may raise
        self._endpoint = endpoint
        self._asked_another.clear()
        read_every = self._settings.neurons_interval.total_seconds()
        read_at = float("-inf")
        partly = False  # neurons or commitments failed at this endpoint
        reported = self._ready.is_set()
        newest, moved_at = -1, self._monotonic()
        async with self._client_at(endpoint) as client:
            while True:
                block = int(await self._timed(client.block()))
                behind = self._block - block
                if behind > FURTHEST_BEHIND:
                    # An endpoint that stopped long ago has neither our registration nor our writes:
                    # its state would end the miner, even if no better one answers. Reorganizations
                    # go back a few blocks only. A chain that was itself set back further makes new
                    # blocks all the same, and they are younger than those seen before.
                    made = (await self._timed(client.timestamp())).timestamp()
                    ahead, seen_at = self._ahead_of_monotonic, self._read_at
                    if ahead is not None and seen_at is not None and made < ahead + seen_at:
                        raise ChainError(f"the node is {behind} blocks behind what was seen before")
                if known := self._ready.is_set():
                    # Before all else that may fail: rounds, uploads and block lists go by it.
                    self._saw_block(block)
                if block > newest:
                    newest, moved_at = block, self._monotonic()
                elif self._monotonic() - moved_at > STANDSTILL:
                    # An endpoint that lost its peers answers as if nothing were wrong.
                    raise ChainError(f"the node's block stands still at {block}")
                if self._monotonic() - read_at >= read_every:
                    try:
                        # Before its neurons are believed: a node behind lacks newer
                        # registrations.
                        made = (await self._timed(client.timestamp())).timestamp()
                        self._newest.check(endpoint, made, others)
                        self._saw_time(made)
                        await self._read(client)
                        partly = False
                    except _PartlyRead as error:
                        if partly or not tried_all:
                            raise
                        partly = True
                        self._failed(endpoint, error)
                    read_at = self._monotonic()
                # Only now writes go here: an endpoint that is behind would show none of them.
                self._client = client
                self._connected.set()
                if not partly and (reported or not known):
                    reported = False
                    log.info("Chain at %s: block %d", endpoint, max(block, self._block))
                if not known:
                    self._saw_block(block)
                if not partly:
                    self._looked_at = self._monotonic()
                if self._asked_another.is_set():
                    return
                await self._sleep(self._settings.poll_interval.total_seconds())

    async def _timed(self, call: Awaitable[T]) -> T:
        seconds = self._settings.call_timeout.total_seconds()
        try:
            # wait_for of Python 3.11 may lose a cancellation that comes with the answer.
            async with asyncio.timeout(seconds):
                return await call
        except TimeoutError:
            raise ChainError(f"no answer within {seconds:.0f} s") from None

    async def _read(self, client: Any) -> None:
        """Read neurons and commitments.

        Neither can hold up the other, and the one that fails keeps its last known value. Raises
        _PartlyRead, naming it.
        """
        parts = {"neurons": self._read_neurons, "commitments": self._read_commitments}
        failed = []
        for part, read in parts.items():
            try:
                with _sdk_errors():
                    await read(client)
            except ChainError as error:
                self._counts[f"{part}_failed"] += 1
                failed.append(f"{part}: {_describe(error)}")
        if failed:
            raise _PartlyRead("; ".join(failed))

    async def _read_neurons(self, client: Any) -> None:
        graph = await self._timed(client.subnets.metagraph(self._netuid, commitments=False))
        if graph is None:
            raise ChainError(f"there is no subnet {self._netuid}: check --netuid")
        if not graph.neurons:
            # The SDK makes an empty list of a field that an answer lacks, and of a broken state.
            raise ChainError(f"the node shows no neuron at all on subnet {self._netuid}")
        self._answered_by = self._endpoint
        neurons = []
        for found in graph.neurons:
            ip, port = "0.0.0.0", None
            if found.axon:
                host, _, port_text = found.axon.rpartition(":")
                ip, port = host.strip("[]"), int(port_text)
            neuron = Neuron(
                uid=found.uid,
                hotkey=found.hotkey,
                ip=ip,
                port=port or None,
                stake=float(found.total_stake.amount),
                validator_permit=found.validator_permit,
                incentive=found.incentive,
                trust=found.trust,
                consensus=found.consensus,
                emission=float(found.emission.amount),
                last_update=found.last_update,
            )
            neurons.append(neuron)
        self._saw_neurons(tuple(neurons))

    async def _read_commitments(self, client: Any) -> None:
        """Read the map of commitments, and nothing else of that pallet.

        The SDK's own read of all commitments also reads the revealed timelocked ones: any uid
        chooses their bytes, and one bad entry fails that read for the whole subnet.
        """
        try:
            entries = await self._timed(client.query_map(_COMMITMENTS, [self._netuid]))
        except _DECODING as error:
            # The SDK decodes a page of entries at once: one that it cannot decode costs all.
            entries = await self._timed(self._one_by_one(client, error))
        texts: dict[str, str] = {}
        for hotkey, entry in entries:
            try:
                texts[str(hotkey)] = _committed(entry)
            except ValueError:
                self._counts["commitments_skipped"] += 1
        self._saw_commitments(texts)

    async def _one_by_one(self, client: Any, reason: Exception) -> list[tuple[str, Any]]:
        """Return the entries of all known neurons, None for one that cannot be decoded.

        Raises ``reason`` if none can be decoded.
        """
        gate = asyncio.Semaphore(_AT_A_TIME)

        async def one(hotkey: str) -> Any:
            async with gate:
                try:
                    entry = await client.query(_COMMITMENTS, [self._netuid, hotkey])
                    return _NOTHING if entry is None else entry
                except _DECODING:
                    return None

        hotkeys = [neuron.hotkey for neuron in self._neurons]
        entries = await asyncio.gather(*map(one, hotkeys))
        if all(entry is None for entry in entries):
            raise reason
        found = zip(hotkeys, entries, strict=True)
        return [(hotkey, entry) for hotkey, entry in found if entry is not _NOTHING]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + _CLOSE_TIMEOUT + 1
        while self._thread.is_alive() and time.monotonic() < deadline:
            with suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._task.cancel)
            # The SDK's own cleaning up may have taken the cancellation for its own.
            self._thread.join(1.0)


class _OfThisRuntime:
    """A chain access on which storage that the runtime does not have is empty.

    Before it sets weights, bittensor reads storage that only later runtimes have, and raises if it
    is missing: a node with an earlier runtime would get no weights at all.
    """

    def __init__(self, substrate: Any) -> None:
        self._substrate = substrate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._substrate, name)

    async def query(self, *item: Any, **options: Any) -> Any:
        try:
            return await self._substrate.query(*item, **options)
        except ValueError as error:
            if type(error).__name__ != "StorageFunctionNotFound":  # not public in the SDK
                raise
            return None


_NOTHING = object()  # a hotkey without a commitment
# Raised by the SDK for bytes that are not of the type which the runtime's metadata names.
_DECODING = (ValueError, TypeError, LookupError)


def _committed(entry: Any) -> str:
    """Return the text of one commitment from the SDK's decoded entry.

    The entry has one field ``Raw<n>`` of n bytes, in hexadecimal digits. Raises ValueError for
    every other content of an entry: hashes, timelocked and larger fields, several fields, bytes
    that are no text.
    """
    match entry:
        case {"info": {"fields": [{**field}]}} if len(field) == 1:
            ((kind, digits),) = field.items()
        case _:
            raise ValueError("not one field")
    if not (isinstance(digits, str) and digits.startswith("0x")):
        raise ValueError("not the bytes of a field")
    if len(digits) > 2 + 2 * _LONGEST_COMMITMENT:
        raise ValueError("too long")
    raw = bytes.fromhex(digits[2:])
    if kind != f"Raw{len(raw)}":
        raise ValueError("not a field of that many bytes")
    return raw.decode()


@contextmanager
def _sdk_errors() -> Iterator[None]:
    """Raise each error of the SDK as a ChainError, so that none ends the thread.

    Its own errors, its transport's errors and its decoder's errors have no base class in common. A
    TimeoutError stays a TimeoutError.
    """
    try:
        yield
    except (ChainError, TimeoutError):
        raise
    except BaseException as error:
        # A panic in the SDK's compiled half is no Exception, and would end the thread.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ChainError(_describe(error)) from error


def _stray(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log errors of the SDK's abandoned tasks at a low level.

    The call's own failure was logged, and asyncio would add a traceback for each attempt.
    """
    message = str(context.get("message"))
    level = logging.DEBUG if "never retrieved" in message else logging.WARNING
    error = context.get("exception")
    log.log(level, "%s (%s)", message, "no error" if error is None else _describe(error))


def _describe(error: object) -> str:
    """Word an error in one line; the SDK's texts may have several."""
    text = " ".join(str(error).split())[:200]
    if isinstance(error, ChainError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
