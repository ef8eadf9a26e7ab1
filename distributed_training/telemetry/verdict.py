"""Judge a miner in one verdict: does it earn, and what is in the way if it does not.

Log, dashboard, metric, alert, ``dt-status`` and webhook all ask :func:`judge`, which is pure: from
:class:`Facts` and the time to a :class:`Judgement`. The miner writes its own facts to
``facts.json``; whoever reads them adds what it sees itself.

A fact is true of one moment, and the network goes on. So a fact counts only during its life, and
what may have changed since then is left open: an upload is said to count, or not to, where the
validator's code must find the same. Limits are those of the network's file, never learned ones.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

FACTS_FILE = "facts.json"  # in the run folder

# --- lives, in seconds ----------------------------------------------------------------------------

#: The miner's own facts: it writes them every 15 s, and between two micro-batches.
LOOK_LIFE = 300.0
BLOCK_LIFE = 600.0  # the chain's newest block
STANDING_LIFE = 7200.0  # the chain's figures of this miner
MACHINE_LIFE = 120.0  # disk, processes
FATE_ROUNDS = 3  # round periods: what a manifest says of an upload
#: Chain and store are silent for longer: offline.
OFFLINE_AFTER = 60.0
_CLOCK_STEP = 5.0  # a fact of the future by more was written by another clock
_SLACK = 20.0  # seconds by which an upload may be older than it looks
_PACE = 1.5  # blocks may come so much faster than the network's file says


class Verdict(StrEnum):
    """All verdicts, as an operator reads them."""

    # --- the process and its machine
    STARTING = "starting"
    CANNOT_START = "cannot start"
    STOPPED = "stopped"
    STUCK = "stuck"
    DISK_FULL = "disk full"
    OFFLINE = "offline"
    UNKNOWN = "unknown"
    # --- the network
    NOT_REGISTERED = "not registered"
    OUTDATED = "network's file outdated"
    OTHER_VERSION = "other version"
    BEHIND = "behind"
    NOT_CALLED = "not called"
    # --- the uploads
    NOTHING_UPLOADED = "nothing uploaded"
    TOO_OLD = "upload too old"
    OLDER_STEP = "of an older outer step"
    REFUSED = "refused"
    NOT_MERGED = "not merged"
    JOINING = "joining"
    NOT_JUDGED_YET = "not judged yet"
    # --- the pay
    NOT_YET_PAID = "not yet paid"
    HARDLY_EARNING = "hardly earning"
    EARNING = "earning"


_T = TypeVar("_T")


@dataclass(frozen=True)
class Fact(Generic[_T]):
    """A value and the Unix seconds at which it was true."""

    value: _T
    at: float


@dataclass(frozen=True)
class Standing:
    """The chain's figures of one miner among the others.

    ``rank`` is 1 for the highest incentive of ``miners`` neurons without a validator's permit;
    equal ones share it. ``emission`` is per tempo, in the subnet's token. ``weights_block``: at
    which a validator last set weights, 0 for never.
    """

    incentive: float
    emission: float
    rank: int
    miners: int
    weights_block: int

    @property
    def words(self) -> str:
        # Four digits of nothing, and a rank among those who have nothing, say nothing.
        if self.incentive <= 0:
            return "incentive 0"
        amount = f"{self.incentive:.4f}" if self.incentive >= 0.00005 else f"{self.incentive:.1e}"
        words = f"incentive {amount}, rank {self.rank} of {self.miners} miners"
        # None by a registry.
        return words + (f", emission {self.emission:.4g} per tempo" if self.emission else "")


@dataclass(frozen=True)
class Place:
    """The network's outer step and, hivemind, the block of the round that led to it."""

    outer_step: int
    last_allreduce_block: int | None = None


@dataclass(frozen=True)
class Upload:
    """One complete upload of this miner.

    ``at``: Unix seconds, of its gradients. ``block``: the newest of its list; None: not known.
    ``fate``: store network: ``merged``, ``refused`` or ``kept``, once a manifest says so, at
    ``fate_at`` and for ``cause``.
    """

    outer_step: int
    at: float
    tag: str = ""
    block: int | None = None
    fate: str = ""
    fate_at: float = 0.0
    cause: str = ""


@dataclass(frozen=True)
class Launch:
    """The launcher's state, as ``launcher.json`` has it. Times are Unix seconds."""

    state: str  # starting, running, refused, stopping, stopped
    stage: str = ""
    stage_at: float | None = None
    eta_seconds: float | None = None  # of the stage, at ``stage_at``
    text: str = ""  # why a start is refused, or it stopped
    attempt: int = 0
    next_try_at: float | None = None
    stopped_by: str = ""
    asked: bool = True  # somebody wanted the stop


@dataclass(frozen=True)
class Disk:
    """Bytes of the run folder's disk. ``needed``: for a snapshot and a checkpoint."""

    free: float
    total: float
    needed: float = 0.0


@dataclass(frozen=True)
class Facts:
    """All that a verdict is made of, of both kinds of network. None, empty: not known.

    Times are Unix seconds.
    """

    # --- the network's file
    kind: str = ""  # hivemind, store
    blocks_per_round: int | None = None  # before the network's first outer step
    blocks_per_round_later: int = 0  # after it; 0: the same
    seconds_per_block: float | None = None
    round_seconds: float | None = None  # from one round to the next
    age_limit: float | None = None  # seconds, of an upload
    patience: float = 600.0  # seconds that a load of the global state may take
    # --- the miner, as it sees itself
    name: str = ""
    uid: int | None = None
    looked: float | None = None  # when it wrote these
    started: float | None = None  # when its ranks began to train
    mode: str = ""
    outer_step: int | None = None
    step: Fact[int] | None = None  # the last inner step
    step_seconds: float | None = None
    uploads: tuple[Upload, ...] = ()  # the newest of each outer step, oldest first
    uploads_known: bool = False  # also those of before this start
    sending: str = ""  # tag of the upload under way
    called_at: float | None = None  # by a validator
    # --- the network, as the miner sees it
    block: Fact[int] | None = None  # the chain's; ``at``: its last answer
    registered: Fact[bool] | None = None
    standing: Fact[Standing] | None = None
    place: Fact[Place] | None = None
    behind_since: float | None = None  # since when the network is at a later outer step
    store_silent_since: float | None = None  # None: it answers
    other_version: Fact[str] | None = None  # how the network's file differs from ours
    forked: str = ""  # store network: there are two histories
    next_round: float | None = None  # is expected
    # --- what others see of the miner
    launch: Fact[Launch] | None = None
    gone: Fact[bool] | None = None  # no process of it runs
    disk: Fact[Disk] | None = None

    def to_json(self) -> str:
        """Return one JSON object. What is not finite is left out."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(_finite(known), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Facts:
        """Read :meth:`to_json`'s text; what is unknown, or of another type, is left out."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return cls()
        known = {}
        for name, adapter in _adapters().items() if isinstance(found, Mapping) else ():
            if name in found:
                try:
                    known[name] = adapter.validate_json(
                        json.dumps(found[name], allow_nan=False), strict=True
                    )
                except (ValidationError, ValueError):
                    continue
        return cls(**known)


@dataclass(frozen=True)
class Judgement:
    """The verdict, why, and what to do.

    Attributes:
        cause: One sentence.
        remedy: Empty, or one command or setting.
        bad: Whether an operator must act.
        earns: Whether it earns now; None: not known.
        counts: Whether validators count the newest upload known to be complete; None: not known.
    """

    verdict: Verdict
    cause: str
    remedy: str = ""
    bad: bool = False
    earns: bool | None = False
    counts: bool | None = None

    @property
    def words(self) -> str:
        """Cause and remedy in one line."""
        return f"{self.cause}; {self.remedy}" if self.remedy else self.cause

    @property
    def level(self) -> str:
        """``good`` (green), ``wait`` (orange), ``bad`` (red) or ``idle`` (grey)."""
        if self.bad:
            return "bad"
        if self.verdict in (Verdict.STOPPED, Verdict.UNKNOWN):
            return "idle"
        return "good" if self.earns else "wait"


def judge(facts: Facts, now: float) -> Judgement:
    """Return the verdict at ``now``, in Unix seconds: the first thing in the way decides."""
    return Judgement(Verdict.UNKNOWN, "not known", earns=None)


@functools.cache
def _adapters() -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(Facts)
    return {field.name: TypeAdapter(hints[field.name]) for field in fields(Facts)}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
