"""Define the small typed objects that packages pass to each other.

Packages in the same layer do not import each other; the objects that they exchange are defined
here, in the lowest layer. Nothing in this module does I/O or imports torch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

#: Name and shape of each parameter, in the order of the state dict.
Schema = Sequence[tuple[str, tuple[int, ...]]]
#: Signs a message with our own hotkey and returns the signature.
Sign = Callable[[bytes], bytes]
#: (message, signature, hotkey) -> whether the hotkey has signed the message.
Verify = Callable[[bytes, bytes, str], bool]
#: The product's codecs: name -> bits per value, without the scales (:mod:`~.codecs`).
OWN_CODECS = {"4-bit": 4, "3-bit": 3, "2-bit": 2}
UPDATE_CODEC = "4-bit"  # the codec of the validator's update, whatever codec the uploads have
SMALLEST = "2-bit"


class ExitStatus(enum.IntEnum):
    """The exit statuses of all programs here; pm2, systemd and the launcher act on a neuron's.

    pm2 restarts the process after STOPPED and FAULT (``stop_exit_codes`` in app.config.js), since
    it also reports 0 for a process that a signal killed. So the end of a network has its own
    status.
    """

    STOPPED = 0  # it stopped as asked
    FAULT = 1  # something outside failed, so another start may help
    # The command line or the settings are refused, or node 0 has refused them for minutes.
    BAD_CONFIGURATION = 2
    DEREGISTERED = 3  # the founder has expelled the hotkey
    FINISHED = 4  # the network has reached its [stop]; a start would find the same
    # Another version of the network's file is in force, or the uid has changed: restart at once.
    AGAIN = 5
    INTERRUPTED = 130  # a command ended by Ctrl-C; a neuron exits with STOPPED instead


#: After these statuses a restart would not help, so pm2, systemd, Slurm and the container do not
#: try one.
FINAL = (ExitStatus.BAD_CONFIGURATION, ExitStatus.DEREGISTERED, ExitStatus.FINISHED)


class Event:
    """Something that happened. Each event in :mod:`..miner.events` derives directly from it."""


class Base(enum.Enum):
    """What happened to our upload for an outer step, and so from where our training now counts.

    After MERGED, training counts from the upload, and the next residual is what encoding lost.
    After KEPT, it counts from the epoch start, without the part along the update, and the residual
    is unchanged. After REFUSED, it counts from the upload, without a residual.
    """

    MERGED = "merged"
    KEPT = "kept"  # late, void, not judged or not sent: its movement goes into the next upload
    REFUSED = "refused"  # refused for its content, so its movement is dropped


@dataclass(frozen=True)
class Update:
    """A store network's next outer step: files on the disk that match the manifest's digests.

    With whole weights, ``base``, ``own_upload`` and ``cause`` describe the outer step that we were
    at, which may have merged our upload.
    """

    outer_step: int  # number n of the weights that it leads to
    path: Path  # file of the update, or ``model.safetensors`` next to its ``config.json``
    base: Base  # the weights to which it is applied
    own_upload: Path | None  # our upload for n - 1, if exactly that file was merged or refused
    weights: str  # digest of theta(n), hex
    inner_steps: int = 0  # inner steps of the network before outer step n
    cause: str = ""  # why our upload was not merged; empty if it was, or if none was sent
    whole: str = ""  # why these are whole weights, for a log line; empty if it is an update


@dataclass(frozen=True)
class StepReport:
    """The result of one inner step. A figure that could not be measured is None, never a guess.

    Args:
        outer_step: The outer step that it belongs to.
        inner_step: Its number; the first step of an outer step reports 1.
        loss: Mean cross-entropy in nats over all tokens of the step, all ranks.
        learning_rate: The rate of this step.
        tokens: Tokens over all ranks.
        samples: Sequences over all ranks.
        seconds: Wall time of the step, including the wait for data.
        data_wait_seconds: The part of ``seconds`` spent waiting for data.
        micro_batches: Micro-batches per rank.
        grad_norm: Norm of the gradient before clipping.
        gpu_memory_gb: Peak memory allocated since the previous step, in units of 1e9 bytes.
        gpu_utilization: Percent, 0..100.
        mfu: Model FLOPs utilization, 0..1.
        skipped: Whether loss or gradient norm was NaN or Inf, so the optimizer took no step.
        note: What the trainer changed in this step, in words; empty if nothing.
        total_inner_steps: Inner steps since the first outer step, including this one.
        learning_rate_share: ``learning_rate`` as a fraction of the highest rate, 0..1.

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
    seconds: float  # wall time of the step, including the wait for data
    data_wait_seconds: float
    micro_batches: int  # per rank
    grad_norm: float | None = None  # before clipping
    gpu_memory_gb: float | None = None  # peak since the previous step, in GB of 1e9 bytes
    gpu_utilization: float | None = None  # percent, 0..100
    mfu: float | None = None  # 0..1
    skipped: bool = False  # loss or norm was NaN or Inf, so the optimizer took no step
    note: str = ""
    total_inner_steps: int = 0  # counted over all outer steps so far
    learning_rate_share: float | None = None  # as a fraction of the highest rate, 0..1

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks per second; 0 if no time passed."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def samples_per_second(self) -> float:
        """Sequences of all ranks per second; 0 if no time passed."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0


class OuterStepError(RuntimeError):
    """An update cannot be applied. Raised on all ranks; nothing has changed."""


class RankFailedError(RuntimeError):
    """A collective step failed on one rank, for example out of memory. Raised on all ranks."""


@dataclass
class Progress:
    """The point of training at which a checkpoint was taken.

    Args:
        outer_step: The outer step in progress.
        inner_step: Inner steps done in this outer step.
        total_inner_steps: Inner steps over all outer steps; the schedule depends on it.

    Examples:
        >>> Progress(outer_step=3, inner_step=25, total_inner_steps=385).inner_step
        25
    """

    outer_step: int = 0
    inner_step: int = 0  # inner steps done in this outer step
    total_inner_steps: int = 0  # never reset, since the schedule follows it


@dataclass(frozen=True)
class Check:
    """One check: its subject, its finding, and the command or flag that fixes the problem.

    If a check could not be made, its finding is the reason.
    """

    name: str
    status: Literal["ok", "warn", "fail", "skip"]
    finding: str
    remedy: str = ""

    @property
    def line(self) -> str:
        """The check as one error line."""
        return f"{self.finding}: {self.remedy}" if self.remedy else self.finding
