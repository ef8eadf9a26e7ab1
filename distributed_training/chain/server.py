"""The signed HTTP server validators call: ``IsAlive`` and ``AllReduce``.

It runs on its own thread and event loop beside the training, answers at once and never waits for
the chain, the loop or a disk. Checks run cheapest first: size, route, headers, known hotkey, rate,
freshness, replay; only then the body is taken and the signature verified, and only a proven
caller's permit and stake are looked at. An accepted AllReduce becomes one event; while its round
runs, further calls are told so and cause nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from distributed_training.config.chain import ChainSettings
from distributed_training.config.flags import ConfigError
from distributed_training.protocol import lines, synapses
from distributed_training.protocol.synapses import RoundBounds, SynapseError
from distributed_training.protocol.types import RoundRequest

from . import auth
from .admission import Admission, Buckets
from .auth import Refusal, Refused
from .base import Chain, ChainUnavailable, Neuron
from .http import Head, HttpThread, bind, parse_fields
from .replay import NonceMemory
from .wallet import Wallet

log = logging.getLogger(__name__)

# A round that nobody ends is over after the call's timeout and this.
ROUND_MARGIN = 30.0
_SAVE_INTERVAL = 2.0
_LOG_INTERVAL = 60.0
_LOG_LINES = 20  # per interval, all callers together
# The refusals of somebody who has proven who they are, or who is merely early: no strikes.
_NO_STRIKE = frozenset({Refusal.NO_PERMIT, Refusal.LOW_STAKE, Refusal.RATE})


@dataclass(frozen=True)
class RoundState:
    """The running round, as told to whoever calls AllReduce meanwhile."""

    phase: str
    caller: str
    started_at: float  # time.time()


class SignedServer:
    """See the module. Binds in the constructor (ConfigError), answers from :meth:`start` on.

    ``epoch``: local outer step, asked for each IsAlive from the server's thread; must not block.
    ``on_all_reduce``: gets each accepted call, in the server's thread; must not block (put it into
    a queue). ``round_phase``: a word for the running round, or None. ``nonce_file``: where the
    replay memory keeps its floor over restarts. ``clock``: wall clock in ns.
    """

    def __init__(
        self,
        *,
        settings: ChainSettings,
        wallet: Wallet,
        chain: Chain,
        master_hotkey: str,
        epoch: Callable[[], int],
        on_all_reduce: Callable[[RoundRequest], None],
        round_phase: Callable[[], str | None] = lambda: None,
        nonce_file: Path | None = None,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        unknown = set(settings.auth_schemes) - {auth.BTAUTH, auth.LEGACY}
        if unknown or not settings.auth_schemes:
            raise ConfigError(
                f"--axon.auth {' '.join(sorted(unknown)) or '(empty)'} is no scheme, so no call "
                "could be verified: give btauth, legacy or both"
            )
        self._settings = settings
        self._own = wallet.ss58
        self._chain = chain
        self._master = master_hotkey
        self._epoch = epoch
        self._on_all_reduce = on_all_reduce
        self._round_phase = round_phase
        self._clock = clock
        self._skew = settings.clock_skew.total_seconds()
        self._timeout_cap = settings.legacy_timeout_cap.total_seconds()
        self._neurons: Sequence[Neuron] = ()
        self._by_hotkey: dict[str, Neuron] = {}
        self._round: RoundRequest | None = None
        self._round_lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._logged: OrderedDict[str, float] = OrderedDict()
        self._log_window = (0.0, 0)
        self._hotkeys = Buckets(rate=settings.requests_per_hotkey)
        self._bounds = round_bounds(settings)
        longest = max(
            synapses.LEGACY_ALLOWANCE.total_seconds() + self._timeout_cap, auth.BTAUTH_MAX_AGE
        )
        self._nonces = NonceMemory(window=timedelta(seconds=longest + self._skew), file=nonce_file)
        self._admission = Admission(
            max_connections=settings.max_connections,
            max_connections_per_address=settings.max_connections_per_address,
            requests_per_address=settings.requests_per_address,
        )
        sock = bind(ip=settings.axon_ip, port=settings.axon_port)
        self.port: int = sock.getsockname()[1]
        self._http = HttpThread(
            application=self,
            sock=sock,
            admission=self._admission,
            read_timeout=settings.read_timeout,
            name="signed-server",
        )
        self._stopping = False
        self._save_now = threading.Event()
        self._saver = threading.Thread(target=self._save, name="nonce-floor", daemon=True)

    # life

    def start(self) -> None:
        self._http.start()
        self._saver.start()

    def close(self) -> None:
        """Idempotent; ends the thread and writes the replay floor."""
        self._http.stop()
        self._stopping = True
        self._save_now.set()
        if self._saver.is_alive():
            self._saver.join(5)
        self._nonces.save()

    def __enter__(self) -> SignedServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _save(self) -> None:
        # Off the event loop: an fsync on a disk that an upload keeps busy takes long.
        while not self._stopping:
            self._save_now.wait(_SAVE_INTERVAL)
            self._save_now.clear()
            self._nonces.save()

    # what the loop asks and tells

    def round_ended(self) -> None:
        """The loop is done with the round (committed or not): the next call is a new event."""
        with self._round_lock:
            self._round = None

    def round_state(self) -> RoundState | None:
        with self._round_lock:
            running = self._running(self._clock() / 1e9)
        if running is None:
            return None
        return RoundState(self._round_phase() or "accepted", running.caller, running.received_at)

    def counters(self) -> Mapping[str, int]:
        """``accepted.IsAlive``, ``accepted.AllReduce``, ``repeated.AllReduce`` and
        ``refused.<reason>`` only grow, as do ``dropped_packets`` (by the kernel, for us);
        ``connections`` are the open ones."""
        counts = dict(self._counts)
        for reason, count in dict(self._admission.refused).items():
            counts[f"refused.{reason}"] = counts.get(f"refused.{reason}", 0) + count
        counts["dropped_packets"] = self._http.dropped()
        counts["connections"] = self._admission.connections
        return counts

    def _running(self, now: float) -> RoundRequest | None:
        running = self._round
        if running is not None:
            timeout = (
                running.timeout or synapses.ALL_REDUCE_TIMEOUT
            ).total_seconds() + ROUND_MARGIN
            if now - running.received_at > timeout:
                self._round = running = None
        return running

    # one request

    def check_head(self, head: Head) -> auth.Claim:
        """What can be decided without the body. Raises Refused."""
        if head.path not in synapses.ROUTES:
            raise Refused(Refusal.ROUTE)
        if head.method != "POST":
            raise Refused(Refusal.METHOD)
        claim = auth.claim(head.headers, self._settings.auth_schemes)
        self._check_claim(claim)
        return claim

    async def answer(self, head: Head, claim: auth.Claim, body: bytes) -> dict[str, Any]:
        """The effect of a whole request and the fields of its reply. Raises Refused."""
        auth.proven(claim, head.headers, body, method="POST", path=head.target, own=self._own)
        if not self._nonces.use(claim.hotkey, claim.nonce, claim.salt):
            raise Refused(Refusal.REPLAY)
        self._hotkeys.take(claim.hotkey)
        return self._act(head, claim, body)

    def _check_claim(self, claim: auth.Claim) -> None:
        """Nothing is proven yet, so nothing is recorded."""
        if claim.hotkey == self._own:
            # Nobody else may hold this key; a second miner does, or a request is reflected.
            raise Refused(Refusal.OWN_HOTKEY)
        if claim.receiver != self._own:
            raise Refused(Refusal.RECEIVER)
        known = claim.hotkey == self._master or self._known(claim.hotkey) is not None
        if not known and not self._settings.allow_non_registered:
            raise Refused(Refusal.UNKNOWN_HOTKEY)
        if self._hotkeys.empty(claim.hotkey):
            raise Refused(Refusal.RATE)
        age = (self._clock() - claim.nonce) / 1e9
        if age > auth.max_age(claim, legacy_timeout_cap=self._timeout_cap):
            raise Refused(Refusal.STALE)
        if -age > self._skew:
            raise Refused(Refusal.FUTURE)
        if self._nonces.used(claim.hotkey, claim.nonce, claim.salt):
            raise Refused(Refusal.REPLAY)

    def _known(self, hotkey: str) -> Neuron | None:
        try:
            neurons = self._chain.neurons()
        except ChainUnavailable:
            return None
        if neurons is not self._neurons:
            self._by_hotkey = {n.hotkey: n for n in neurons}
            self._neurons = neurons
        return self._by_hotkey.get(hotkey)

    def _act(self, head: Head, claim: auth.Claim, body: bytes) -> dict[str, Any]:
        """The effect of a proven call and its reply. Raises Refused."""
        neuron = self._known(claim.hotkey)
        master = claim.hotkey == self._master
        permit = master or (neuron is not None and neuron.validator_permit)
        stake = neuron.stake if neuron is not None else 0.0
        fields = parse_fields(body)
        if head.path == synapses.IS_ALIVE_ROUTE:
            if self._settings.force_validator_permit and not permit:
                raise Refused(Refusal.NO_PERMIT)
            reply = synapses.answer_is_alive(fields, epoch=self._epoch())
            self._counts["accepted.IsAlive"] += 1
            log.info("%s", lines.RESPONDED_ACTIVE)
        else:
            if not permit:
                raise Refused(Refusal.NO_PERMIT)
            if not master and stake < self._settings.min_stake:
                raise Refused(Refusal.LOW_STAKE)
            reply = synapses.answer_all_reduce(fields)
            repeated = self._all_reduce(claim, fields)
            if repeated is not None:
                reply["answer"] = repeated
        if permit:
            self._admission.trust(head.address)
        return reply

    def _all_reduce(self, claim: auth.Claim, fields: Mapping[str, Any]) -> str | None:
        now = self._clock() / 1e9
        try:
            request = synapses.parse_all_reduce(
                fields,
                caller=claim.hotkey,
                received_at=now,
                timeout=claim.header_timeout,
                bounds=self._bounds,
            )
        except SynapseError:
            raise Refused(Refusal.MALFORMED) from None
        with self._round_lock:
            running = self._running(now)
            if running is None:
                self._round = request
        if running is not None:
            self._counts["repeated.AllReduce"] += 1
            phase = self._round_phase() or "accepted"
            return (
                f"round running for {max(0.0, now - running.received_at):.0f} s, "
                f"called by {running.caller}: {phase}"
            )
        self._counts["accepted.AllReduce"] += 1
        self._save_now.set()
        self._on_all_reduce(request)
        return None

    # refusals

    def refused(self, refusal: Refusal, head: Head | None, address: str) -> None:
        """Count, remember and (rarely) log a refused request."""
        self._counts[f"refused.{refusal.reason}"] += 1
        if refusal not in _NO_STRIKE:
            self._admission.strike(address)
        claimed = auth.claimed_hotkey(head.headers) if head is not None else None
        self._log_refusal(refusal.reason, claimed or address)

    def _log_refusal(self, reason: str, caller: str) -> None:
        """At most one line a minute for each caller, and few for all of them together."""
        now = time.monotonic()
        if now - self._logged.get(caller, -_LOG_INTERVAL) < _LOG_INTERVAL:
            return
        start, lines = self._log_window
        if now - start > _LOG_INTERVAL:
            start, lines = now, 0
        if lines >= _LOG_LINES:
            return
        self._log_window = (start, lines + 1)
        self._logged[caller] = now
        self._logged.move_to_end(caller)
        if len(self._logged) > 1024:
            self._logged.popitem(last=False)
        log.warning("Refused a call of %s: %s", caller, reason)


def round_bounds(settings: ChainSettings) -> RoundBounds:
    """The bounds of the settings (seconds) as the synapses' parser takes them."""

    def seconds(bounds: tuple[float, float]) -> tuple[timedelta, timedelta]:
        return timedelta(seconds=bounds[0]), timedelta(seconds=bounds[1])

    low, high = settings.clamp_min_group_size
    return RoundBounds(
        timeout=seconds(settings.clamp_round_timeout),
        group_size=(int(low), int(high)),
        request_timeout=seconds(settings.clamp_request_timeout),
        allreduce_timeout=seconds(settings.clamp_allreduce_timeout),
        next_chunk_timeout=seconds(settings.clamp_next_chunk_timeout),
        min_matchmaking_time=seconds(settings.clamp_min_matchmaking_time),
    )
