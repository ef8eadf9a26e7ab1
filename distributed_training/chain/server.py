"""The signed HTTP server validators call: ``IsAlive`` and ``AllReduce``.

It runs on its own thread and event loop during training, answers at once and never waits for
the chain, the loop or a disk. Checks run cheapest first: size, route, headers, known hotkey, rate,
freshness, replay; only then the body is taken and the signature verified, and only a proven
caller's permit and stake are looked at. An accepted AllReduce becomes one event; while its round
runs, further calls get that answer and cause nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from distributed_training.common.backoff import Throttle
from distributed_training.config.settings import ChainSettings
from distributed_training.protocol import lines, synapses
from distributed_training.protocol.synapses import SynapseError
from distributed_training.protocol.types import RoundRequest

from . import auth
from .auth import Kept, KeptFile, NonceMemory, Refusal, Refused
from .base import Chain, ChainUnavailable, Neuron
from .http_server import (
    LOG_INTERVAL,
    Admission,
    BoundedServer,
    Buckets,
    Head,
    TrustedAddresses,
    bind,
    parse_fields,
)
from .identity import Wallet

log = logging.getLogger(__name__)

# A round that nobody ends is over after the call's timeout and this.
ROUND_MARGIN = 30.0

#: Stake that a validator with a permit needs to call rounds; the master hotkey needs none.
LEAST_STAKE = 40960.0
#: Bounds of a call's values, in peers or seconds: the legacy signature does not cover the body.
ROUND_BOUNDS = {
    "timeout": (5.0, 1200.0),
    "min_group_size": (2.0, 128.0),
    "request_timeout": (1.0, 60.0),
    "allreduce_timeout": (10.0, 1200.0),
    "next_chunk_timeout": (1.0, 120.0),
    "min_matchmaking_time": (1.0, 120.0),
}


@dataclass(frozen=True)
class MinerCallbacks:
    """The functions by which the server reaches its miner, in its own thread: none may block.

    ``epoch``: the local outer step. ``on_all_reduce``: gets each accepted call (put it into a
    queue). ``round_phase``: a word for the running round, or None. ``round_due``: whether the
    validator may call a round now; None if that is not known. ``peer_id`` and ``addresses``: in the
    swarm. ``run_id``: the run id of the rules that the miner holds for an outer step, by default
    its own. ``on_validator_epoch``: gets the master's outer step, from each IsAlive.
    ``on_model_asked``: the master asks for the model by its next upload.
    """

    epoch: Callable[[], int]
    on_all_reduce: Callable[[RoundRequest], None]
    round_phase: Callable[[], str | None] = lambda: None
    round_due: Callable[[], bool | None] = lambda: None
    peer_id: Callable[[], str] = lambda: ""
    addresses: Callable[[], Sequence[str]] = lambda: ()
    run_id: Callable[[int | None], str] = lambda outer_step: ""
    on_validator_epoch: Callable[[int], None] = lambda epoch: None
    on_model_asked: Callable[[], None] = lambda: None


class SignedServer(BoundedServer):
    """See the module. Binds in the constructor (ConfigError), answers from :meth:`start` on.

    ``folder`` holds ``callers.json``, which survives a restart (:mod:`.auth`); None: nothing is
    kept.
    ``clock``: wall clock in ns, for the freshness of calls; ``monotonic`` in seconds, for all else.
    """

    # The caller has proven who it is, or is merely early.
    NO_STRIKE = frozenset(
        {Refusal.NO_PERMIT, Refusal.LOW_STAKE, Refusal.RATE, Refusal.NOT_DUE, Refusal.OWN_HOTKEY}
    )

    def __init__(
        self,
        *,
        settings: ChainSettings,
        wallet: Wallet,
        chain: Chain,
        master_hotkey: str,
        miner: MinerCallbacks,
        folder: Path | None = None,
        clock: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._own = wallet.ss58
        self._chain = chain
        self._master = master_hotkey
        self._miner = miner
        self._clock = clock
        self._monotonic = monotonic
        self._round: tuple[RoundRequest, float] | None = None  # accepted at (monotonic)
        self._round_lock = threading.Lock()
        self._called_at: float | None = None
        self._alive_lines = Throttle(LOG_INTERVAL, clock=monotonic)
        self._alive_calls: Counter[int | None] = Counter()  # since the last line
        self._hotkeys = Buckets(rate=settings.requests_per_hotkey)
        self._file = KeptFile(folder / "callers.json" if folder is not None else None)
        kept = self._file.load()
        # The age at which no call of any scheme is accepted any more.
        oldest = max(
            synapses.LEGACY_ALLOWANCE + settings.legacy_timeout_cap,
            timedelta(seconds=auth.BTAUTH_MAX_AGE),
        )
        self._nonces = NonceMemory(
            window=oldest + settings.clock_skew,
            skew=settings.clock_skew,
            kept=kept,
            clock=clock,
            monotonic=monotonic,
        )
        self._trusted = TrustedAddresses(kept.validators)
        super().__init__(
            sock=bind(ip=settings.axon_ip, port=settings.axon_port),
            admission=Admission(
                trusted=self._trusted,
                max_connections=settings.max_connections,
                max_connections_per_address=settings.max_connections_per_address,
                requests_per_address=settings.requests_per_address,
            ),
            read_timeout=settings.read_timeout,
        )

    # life

    def start(self) -> None:
        self._save(clean=False)  # before the first call: see the module auth
        self._trust_endpoints()
        super().start()

    def close(self) -> None:
        """End the threads and write the file for the next start. Idempotent."""
        # First: a call accepted after the last save would be missing in a file that says clean.
        super().close()
        if self._keeper.ident is not None and not self._keeper.is_alive():  # else a disk hangs
            self._save(clean=True)

    def write_files(self) -> None:
        self._trust_endpoints()
        self._save(clean=False)

    def _save(self, *, clean: bool) -> None:
        self._file.save(Kept(self._nonces.highest, clean, self._trusted.callers()))

    def _trust_endpoints(self) -> None:
        try:
            neurons = self._chain.neurons()
        except ChainUnavailable:
            return
        self._trusted.set_endpoints(
            n.ip for n in neurons if n.port is not None and self._may_call_rounds(n.hotkey, n)
        )

    # called by the loop

    def round_ended(self) -> None:
        """Mark the round as finished (committed or not): the next call is a new event."""
        with self._round_lock:
            self._round = None

    def counters(self) -> dict[str, int]:
        """Return ``accepted.*``, ``repeated.AllReduce`` and ``refused.<reason>``, which only grow.

        ``connections`` are the open ones.
        """
        return {**super().counters(), "connections": self._admission.connections}

    def called_at(self) -> float | None:
        """Return when a caller with a validator's permit was last answered; None before."""
        return self._called_at

    # one request

    def check_head(self, head: Head) -> auth.Claim:
        """Check the claims of the head, which are not proven yet; record nothing.

        Raises Refused.
        """
        if head.path not in synapses.ROUTES:
            raise Refused(Refusal.ROUTE)
        if head.method != "POST":
            raise Refused(Refusal.METHOD)
        claim = auth.read_claim(head.headers)
        if claim.receiver != self._own:
            raise Refused(Refusal.RECEIVER)
        ours = claim.hotkey in (self._own, self._master)
        if not ours and self._known(claim.hotkey) is None:
            raise Refused(Refusal.UNKNOWN_HOTKEY)
        # Only checked. A token is taken once the signature is proven, or anybody could use up a
        # validator's rate under its name.
        if self._hotkeys.empty(claim.hotkey):
            raise Refused(Refusal.RATE)
        auth.check_fresh(
            claim,
            self._clock(),
            skew=self._settings.clock_skew.total_seconds(),
            legacy_timeout_cap=self._settings.legacy_timeout_cap.total_seconds(),
        )
        if self._nonces.used(claim.hotkey, claim.nonce, claim.salt):
            raise Refused(Refusal.REPLAY)
        return claim

    def answer(self, head: Head, claim: auth.Claim, body: bytes) -> dict[str, Any]:
        """Check and carry out a whole request; return the fields of its reply. Raises Refused."""
        auth.proven(claim, head.headers, body, path=head.target, own=self._own)
        if claim.hotkey == self._own:
            raise Refused(Refusal.OWN_HOTKEY)
        # After the proof: an unproven call must not spend a validator's nonce.
        if not self._nonces.use(claim.hotkey, claim.nonce, claim.salt):
            raise Refused(Refusal.REPLAY)
        self._hotkeys.draw(claim.hotkey)
        neuron = self._known(claim.hotkey)
        permit = claim.hotkey == self._master or (neuron is not None and neuron.validator_permit)
        fields = parse_fields(body)
        if head.path == synapses.IS_ALIVE_ROUTE:
            said = synapses.caller_epoch(fields)
            reply = synapses.answer_is_alive(
                fields,
                epoch=self._miner.epoch(),
                peer_id=self._miner.peer_id(),
                addresses=self._miner.addresses(),
                run_id=self._miner.run_id(said),
            )
            # The older signature does not cover the body.
            if claim.hotkey == self._master and claim.scheme == auth.BTAUTH:
                if said is not None:
                    self._miner.on_validator_epoch(said)
                if synapses.asks_for_model(fields):
                    self._miner.on_model_asked()
            self._counts["accepted.IsAlive"] += 1
            uid = neuron.uid if neuron is not None else None
            self._alive_calls[uid] += 1
            # One line a minute for each uid, which may ask many times a second.
            if self._alive_lines(uid):
                caller = "no uid" if uid is None else f"uid {uid}"
                log.info(
                    "%s: %s asked whether this miner runs (%s since the last such line)",
                    lines.RESPONDED_ACTIVE,
                    caller,
                    lines.counted(self._alive_calls.pop(uid), "time"),
                )
        else:
            if not self._may_call_rounds(claim.hotkey, neuron):
                raise Refused(Refusal.LOW_STAKE if permit else Refusal.NO_PERMIT)
            reply = synapses.answer_all_reduce(fields)
            reply["answer"] = self._all_reduce(claim, fields) or reply["answer"]
        if permit:
            # After all refusals: only an accepted call makes an address trusted.
            self._trusted.add(head.address)
            self._called_at = self._monotonic()
        return reply

    def _known(self, hotkey: str) -> Neuron | None:
        try:
            return self._chain.neuron(hotkey)
        except ChainUnavailable:
            return None

    def _may_call_rounds(self, hotkey: str, neuron: Neuron | None) -> bool:
        if hotkey == self._master:
            return True
        return neuron is not None and neuron.validator_permit and neuron.stake >= LEAST_STAKE

    def _all_reduce(self, claim: auth.Claim, fields: Mapping[str, Any]) -> str | None:
        """Start a round, or return the answer about the running one. Raises Refused."""
        try:
            request = synapses.parse_all_reduce(
                fields,
                caller=claim.hotkey,
                timeout=claim.header_timeout,
                bounds=ROUND_BOUNDS,
            )
        except SynapseError:
            raise Refused(Refusal.MALFORMED) from None
        with self._round_lock:
            # One lock for check and record: two calls at once must not both start a round.
            running, now = self._round, self._monotonic()
            if running is not None:
                timeout = (running[0].timeout or synapses.ALL_REDUCE_TIMEOUT).total_seconds()
                # A round that the loop forgot to end must not keep later rounds out for ever.
                if now - running[1] > timeout + ROUND_MARGIN:
                    running = self._round = None
            if running is None:
                due = self._miner.round_due()
                # Training pauses for a round, and on this network only the master calls one. Any
                # other validator could keep a miner from training by calling again and again. A
                # legacy signature covers neither route nor body: a client that can read and hold
                # back traffic can turn the master's IsAlive into an AllReduce, between rounds too.
                masters = claim.hotkey == self._master
                may_be_early = masters and (claim.scheme == auth.BTAUTH or due is None)
                if not (due or may_be_early):
                    raise Refused(Refusal.NOT_DUE)
                self._round = (request, now)
        if running is not None:
            self._counts["repeated.AllReduce"] += 1
            phase = self._miner.round_phase() or "accepted"
            first, accepted_at = running
            lasted = now - accepted_at
            return f"round running for {lasted:.0f} s, called by {first.caller}: {phase}"
        self._counts["accepted.AllReduce"] += 1
        self._miner.on_all_reduce(request)
        return None
