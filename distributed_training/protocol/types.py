"""Small typed objects that packages hand to each other.

Packages of one layer do not import each other; the objects that they exchange are defined here, in
the lowest layer. Nothing in this module does I/O or imports torch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

#: Returns the signature of a message by one's own hotkey.
Sign = Callable[[bytes], bytes]
#: Returns whether this is the signature of a message by a hotkey: message, signature, hotkey.
Verify = Callable[[bytes, bytes, str], bool]


class ExitStatus(enum.IntEnum):
    """The exit statuses of all programs here; pm2, systemd and the launcher act on a neuron's.

    pm2 starts the process again after STOPPED and FAULT (``stop_exit_codes`` in app.config.js): it
    calls a process that a signal killed 0 as well. So the end of a network has a status of its own.
    """

    STOPPED = 0  # as asked
    FAULT = 1  # a start may help
    BAD_CONFIGURATION = 2  # parsing, the settings themselves, or for minutes node 0 refuse them
    DEREGISTERED = 3  # the hotkey had no uid for long
    FINISHED = 4  # the network has reached its [stop]; a start would find the same
    INTERRUPTED = 130  # commands: by Ctrl-C, after which a neuron ends with STOPPED


#: After these no start would help: pm2, systemd, Slurm and the container leave the miner ended.
FINAL = (ExitStatus.BAD_CONFIGURATION, ExitStatus.DEREGISTERED, ExitStatus.FINISHED)


class Event:
    """One thing that happened: a dataclass of :mod:`..miner.events`, derived from no other."""


class Base(enum.Enum):
    """The fate of our upload for an outer step, and so from where its update is applied.

    With theta(n) the weights after the update, and "moved" what was trained since: after MERGED it
    counts from the snapshot, and the next residual is what encoding lost; after KEPT from the
    epoch start, without what lies along the update, with the residual as it was; after REFUSED from
    the snapshot, with no residual.
    """

    MERGED = "merged"
    KEPT = "kept"  # late, void, not judged, or none was sent: it goes into the next one
    REFUSED = "refused"  # for its content: its movement is dropped


@dataclass(frozen=True)
class Update:
    """The next outer step of a store network, on the disk, of digests that its manifest names.

    ``whole``: ``path`` is a ``model.safetensors``, next to its ``config.json``, in place of the
    updates that were missed. ``base``, ``own_upload`` and ``cause`` are then those of the outer
    step that was held: it may have merged our upload.
    """

    outer_step: int  # n: of the weights that it leads to
    path: Path
    base: Base  # from where it is applied
    own_upload: Path | None  # ours of n - 1, where that very file was merged or refused
    weights: str  # digest of theta(n), hex
    inner_steps: int = 0  # of the network before outer step n
    cause: str = ""  # why our upload was not merged; empty: it was, or none was sent
    whole: str = ""  # why whole weights and not updates, for a log line; empty: it is an update


@dataclass(frozen=True, order=True)
class Revision:
    """A point of training: ``{run}.{outer_step}.{inner_step}`` (protocol page, section 1).

    The global model is always ``{run}.{E}.0``. Revisions compare in the order of their fields.

    Args:
        run: Number of the network's run.
        outer_step: Outer steps before it.
        inner_step: Inner steps since the last outer step.

    Examples:
        >>> Revision.parse("5.12.0") < Revision(run=5, outer_step=12, inner_step=50)
        True
        >>> Revision(5, 12, 50).tag
        '5.12.50'
    """

    # In the order by which revisions compare.
    run: int
    outer_step: int
    inner_step: int

    @property
    def tag(self) -> str:
        """The revision as metadata and logs have it, such as ``5.12.0``."""
        return f"{self.run}.{self.outer_step}.{self.inner_step}"

    @classmethod
    def parse(cls, tag: str) -> Revision:
        """Read a revision from its tag.

        Args:
            tag: Three non-negative integers with dots between them, such as ``5.12.0``.

        Raises:
            ValueError: If ``tag`` is anything else.
        """
        parts = tag.split(".")
        # isdigit and int take the digits of every script.
        if len(parts) != 3 or not all(p.isascii() and p.isdigit() for p in parts):
            raise ValueError(f"revision {tag!r} is not of the form run.outer_step.inner_step")
        return cls(*(int(p) for p in parts))


@dataclass(frozen=True)
class StepReport:
    """The result of one inner step. A figure that could not be measured is None, never invented.

    Args:
        outer_step: The outer step in which it was trained.
        inner_step: Its number after the step: the first step of an outer step reports 1.
        loss: Mean cross-entropy in nats over all tokens of the step, all ranks.
        learning_rate: The rate of this step.
        tokens: Tokens of all ranks.
        samples: Sequences of all ranks.
        seconds: Wall time of the step, data wait included.
        data_wait_seconds: The part of ``seconds`` in which there was no data.
        micro_batches: Micro-batches of each rank.
        grad_norm: Norm of the gradient before clipping.
        gpu_memory_gb: Peak allocated since the previous step, in units of 1e9 bytes.
        gpu_utilization: Percent, 0..100.
        mfu: Model FLOPs utilization, 0..1.
        skipped: Whether loss or gradient was NaN or Inf, so the optimizer was not stepped.
        note: What the trainer changed in this step, in words; else empty.
        total_inner_steps: Inner steps since the first outer step, this one included.
        learning_rate_share: ``learning_rate`` as a part of the highest rate, 0..1.

    Examples:
        >>> report = StepReport(outer_step=3, inner_step=1, loss=2.5, learning_rate=4e-4,
        ...                     tokens=8192, samples=8, seconds=2.0, data_wait_seconds=0.0,
        ...                     micro_batches=4)
        >>> report.tokens_per_second
        4096.0
    """

    outer_step: int
    inner_step: int  # after this step: the first step of an epoch reports 1
    loss: float  # mean cross-entropy in nats over all tokens of the step, all ranks
    learning_rate: float
    tokens: int  # over all ranks
    samples: int  # sequences, over all ranks
    seconds: float  # wall time of the step, data wait included
    data_wait_seconds: float
    micro_batches: int  # per rank
    grad_norm: float | None = None  # before clipping
    gpu_memory_gb: float | None = None  # peak allocated since the previous step, GB = 1e9 bytes
    gpu_utilization: float | None = None  # percent, 0..100
    mfu: float | None = None  # 0..1
    skipped: bool = False  # NaN/Inf: the optimizer was not stepped
    note: str = ""
    total_inner_steps: int = 0  # since the first epoch, this one included
    learning_rate_share: float | None = None  # of the highest rate, 0..1

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks per second; 0 if no time passed."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def samples_per_second(self) -> float:
        """Sequences of all ranks per second; 0 if no time passed."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class RoundRequest:
    """An accepted AllReduce call. ``None`` means: use the configured value."""

    caller: str  # hotkey, ss58; verified by the server
    timeout: timedelta | None = None  # of the whole round
    min_group_size: int | None = None
    request_timeout: timedelta | None = None
    allreduce_timeout: timedelta | None = None
    next_chunk_timeout: timedelta | None = None
    min_matchmaking_time: timedelta | None = None
    peers: tuple[str, ...] = ()  # peer ids that may be averaged with; empty: any peer
    # Where some of ``peers`` are reached: multiaddrs, each with /p2p/ and the peer id at its end.
    addresses: tuple[str, ...] = ()


class AllReduceFault(enum.Enum):
    """The reasons why a round fails, one value for each row of the fault tests."""

    NO_GROUP = "no group of the minimum size was found before the deadline"
    TIMEOUT = "the round passed its deadline"
    PEER_FAILED = "a peer of the group failed or sent nothing"
    NOT_FINITE = "the average holds NaN or Inf"
    OUT_OF_BOUNDS = "the norm of the average is out of proportion"
    SCHEMA = "peers disagree on the tensors"
    SWARM_DOWN = "the DHT or averager process is not running"
    CANCELLED = "the round was cancelled"
    LOCAL = "this miner could not build or apply its pseudo-gradient"


class AllReduceError(RuntimeError):
    """A round that did not succeed. Tensors and weights are as they were before it.

    ``causes``: the known faults of peers of the group, by peer id.
    """

    def __init__(
        self, fault: AllReduceFault, detail: str = "", causes: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(f"{fault.value}{': ' + detail if detail else ''}")
        self.fault = fault
        self.detail = detail
        self.causes: Mapping[str, str] = causes or {}


class RankFailedError(RuntimeError):
    """A common step failed on one rank, out of memory for one; raised on all alike."""


@dataclass(frozen=True)
class AllReduceResult:
    """A successful average, before it is committed."""

    peers: tuple[str, ...]  # peer ids of the group, ours included
    failed_peers: tuple[str, ...]  # left out, as senders or as reducers
    matchmaking_seconds: float | None
    transfer_seconds: float | None
    total_seconds: float
    average_norm: float | None = None
    local_norm: float | None = None
    kept_local: float = 0.0  # part of all values that no other peer has averaged with us
    causes: Mapping[str, str] = field(default_factory=dict)  # peer id: why it was left out

    @property
    def partial(self) -> bool:
        """Others of the group may hold other averages than we do."""
        return bool(self.failed_peers) or self.kept_local > 0

    @property
    def group_size(self) -> int:
        return len(self.peers)


@dataclass(frozen=True)
class PublicationReport:
    """The result of an upload, or the reason why it did not start."""

    revision: Revision
    ok: bool
    seconds: float
    bytes_sent: int
    reason: str = ""  # why not, or empty
    finished_at: float = 0.0  # time.time()
    age_seconds: float | None = None  # of gradients.pt then, by the store's clock
    checked: bool = False  # its gradient, before it was sent
    model: bool = False  # it had the model too
    newest_block: int | None = None  # of its block list


@dataclass
class Progress:
    """The point of training at which a snapshot or a checkpoint was taken.

    Args:
        outer_step: The outer step under way.
        inner_step: Inner steps done in this outer step.
        total_inner_steps: Inner steps of all outer steps; the schedule counts it.
        blocks: Chain blocks trained on since the last upload.

    Examples:
        >>> Progress(outer_step=3, inner_step=40).revision(run=5).tag
        '5.3.40'
    """

    outer_step: int = 0
    inner_step: int = 0  # inner steps done in this outer step
    total_inner_steps: int = 0  # never reset; the schedule counts it
    blocks: list[int] = field(default_factory=list)  # trained since the last upload

    def revision(self, run: int) -> Revision:
        """Return the revision of this progress.

        Args:
            run: Number of the network's run.
        """
        return Revision(run, self.outer_step, self.inner_step)


@dataclass(frozen=True)
class Check:
    """One check: its subject, its finding, and the command or flag that fixes it.

    A check that could not be made gives the reason as its finding.
    """

    name: str
    status: Literal["ok", "warn", "fail", "skip"]
    finding: str
    remedy: str = ""

    @property
    def line(self) -> str:
        """The check as one error line."""
        return f"{self.finding}: {self.remedy}" if self.remedy else self.finding
