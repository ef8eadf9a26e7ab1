"""Small typed objects that packages hand to each other.

Packages of one layer do not import each other; the objects that they exchange are defined here, in
the lowest layer. Nothing in this module does I/O or imports torch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

#: Name and shape of each parameter, in the order of the state dict.
Schema = Sequence[tuple[str, tuple[int, ...]]]
#: Returns the signature of a message by one's own hotkey.
Sign = Callable[[bytes], bytes]
#: Returns whether this is the signature of a message by a hotkey: message, signature, hotkey.
Verify = Callable[[bytes, bytes, str], bool]
#: Bits per value, by the name of a codec of the product, without the scales (:mod:`~.codecs`).
OWN_CODECS = {"4-bit": 4, "3-bit": 3, "2-bit": 2}
UPDATE_CODEC = "4-bit"  # the codec of the validator's update, whatever codec the uploads have
SMALLEST = "2-bit"


class ExitStatus(enum.IntEnum):
    """The exit statuses of all programs here; pm2, systemd and the launcher act on a neuron's.

    pm2 starts the process again after STOPPED and FAULT (``stop_exit_codes`` in app.config.js): it
    calls a process that a signal killed 0 as well. So the end of a network has a status of its own.
    """

    STOPPED = 0  # it stopped as asked
    FAULT = 1  # something outside failed, so another start may help
    # The command line or the settings are refused, or node 0 has refused them for minutes.
    BAD_CONFIGURATION = 2
    DEREGISTERED = 3  # the founder has expelled the hotkey
    FINISHED = 4  # the network has reached its [stop]; a start would find the same
    # Another version of the network's file holds, or the uid is another: start again at once.
    AGAIN = 5
    INTERRUPTED = 130  # a command ended by Ctrl-C; a neuron ends with STOPPED then


#: After these statuses another start would not help, so pm2, systemd, Slurm and the container do
#: not try one.
FINAL = (ExitStatus.BAD_CONFIGURATION, ExitStatus.DEREGISTERED, ExitStatus.FINISHED)


class Event:
    """One thing that happened: a dataclass of :mod:`..miner.events`, derived from no other."""


class Base(enum.Enum):
    """The fate of our upload for an outer step, and so from where its update is applied.

    With theta(n) the weights after the update, and "moved" what was trained since: after MERGED it
    counts from the upload, and the next residual is what encoding lost; after KEPT from the
    epoch start, without what lies along the update, with the residual as it was; after REFUSED from
    the upload, with no residual.
    """

    MERGED = "merged"
    KEPT = "kept"  # late, void, not judged or not sent: its movement goes into the next upload
    REFUSED = "refused"  # refused for its content, so its movement is dropped


@dataclass(frozen=True)
class Update:
    """The next outer step of a store network: files on the disk with the digests of its manifest.

    With whole weights, ``base``, ``own_upload`` and ``cause`` are those of the outer step that was
    held: it may have merged our upload.
    """

    outer_step: int  # number n of the weights to which it leads
    path: Path  # file of the update, or ``model.safetensors`` next to its ``config.json``
    base: Base  # the weights to which it is applied
    own_upload: Path | None  # our upload of n - 1, if that very file was merged or refused
    weights: str  # digest of theta(n), hex
    inner_steps: int = 0  # inner steps of the network before outer step n
    cause: str = ""  # why our upload was not merged; empty if it was, or if none was sent
    whole: str = ""  # why these are whole weights, for a log line; empty if it is an update


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
    inner_step: int  # counted after this step, so the first step of an outer step reports 1
    loss: float  # mean cross-entropy in nats over all tokens of the step, all ranks
    learning_rate: float
    tokens: int  # tokens of all ranks
    samples: int  # sequences of all ranks
    seconds: float  # wall time of the step, data wait included
    data_wait_seconds: float
    micro_batches: int  # per rank
    grad_norm: float | None = None  # before clipping
    gpu_memory_gb: float | None = None  # peak since the step before, in GB of 1e9 bytes
    gpu_utilization: float | None = None  # percent, 0..100
    mfu: float | None = None  # 0..1
    skipped: bool = False  # loss or norm was NaN or Inf, so the optimizer took no step
    note: str = ""
    total_inner_steps: int = 0  # counted over all outer steps until now
    learning_rate_share: float | None = None  # as a part of the highest rate, 0..1

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks per second; 0 if no time passed."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def samples_per_second(self) -> float:
        """Sequences of all ranks per second; 0 if no time passed."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0


class OuterStepError(RuntimeError):
    """An update that cannot be applied. It is raised on all ranks, and nothing has changed."""


class RankFailedError(RuntimeError):
    """A common step failed on one rank, for example out of memory. It is raised on all ranks."""


@dataclass
class Progress:
    """The point of training at which a checkpoint was taken.

    Args:
        outer_step: The outer step under way.
        inner_step: Inner steps done in this outer step.
        total_inner_steps: Inner steps of all outer steps; the schedule counts it.

    Examples:
        >>> Progress(outer_step=3, inner_step=25, total_inner_steps=385).inner_step
        25
    """

    outer_step: int = 0
    inner_step: int = 0  # inner steps done in this outer step
    total_inner_steps: int = 0  # never reset, since the schedule follows it


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
