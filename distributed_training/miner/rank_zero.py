"""What only rank 0 does around the loop: reports, publishes, keeps the block list.

Implements :class:`~.loop.RankZero` out of the leader (decisions), the block feed (data), the
publisher, the swarm and the log. Called on the training thread: nothing here waits for a network.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch

from distributed_training.miner import state as st
from distributed_training.miner.blocks import BlockFeed
from distributed_training.miner.leader import Leader, SwarmLike
from distributed_training.miner.loop import SnapshotLike
from distributed_training.miner.orders import Order
from distributed_training.miner.round_clock import RoundClock
from distributed_training.protocol import lines
from distributed_training.protocol.types import (
    AllReduceError,
    AllReduceFault,
    Progress,
    PublicationReport,
    Revision,
    StepReport,
)
from distributed_training.store.gate import upload_gate
from distributed_training.store.upload_schedule import UploadSchedule
from distributed_training.telemetry import MetricsFile, record_step

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cadence:
    """How often things happen, in inner steps of an outer step."""

    checkpoint_steps: int
    nan_limit: int  # steps in a row without a finite loss that lead to a roll-back


class Submit(Protocol):
    """Hand a snapshot folder to the publisher. Returns at once."""

    def __call__(self, folder: Path, revision: Revision, preview_delta: float | None) -> None: ...


class RankZeroSide:
    """See the module. ``record`` writes an event; ``warnings`` are the step's (diagnostics);
    ``counts``: what other rooms count, by the name of the room; ``gauges``: what they measure."""

    def __init__(
        self,
        *,
        leader: Leader,
        blocks: BlockFeed,
        swarm: SwarmLike,
        schedule: UploadSchedule,
        round_clock: RoundClock,
        disk_problem: Callable[[], str | None],
        submit: Submit,
        run: int,
        bucket: str,
        cadence: Cadence,
        record: Callable[..., None],
        warnings: Callable[[StepReport], list[str]],
        round_over: Callable[[], None],
        reload_timeout: timedelta,
        metrics: MetricsFile,
        counts: Mapping[str, Callable[[], Mapping[str, float]]],
        gauges: Mapping[str, Callable[[], float]],
    ) -> None:
        self.leader = leader
        self._blocks = blocks
        self._swarm = swarm
        self._schedule = schedule
        self._round_clock = round_clock
        self._disk_problem = disk_problem
        self._submit = submit
        self._run = run
        self._bucket = bucket
        self._cadence = cadence
        self._record = record
        self._warnings = warnings
        self._round_over = round_over
        self._reload_timeout = reload_timeout
        self._metrics = metrics
        self._counts = counts
        self._gauges = gauges
        self._skipped = 0
        self._round_started = 0.0
        self._snapshot: tuple[SnapshotLike, Path, Revision] | None = None
        self._stale_list_said = -math.inf

    # --- decisions -----------------------------------------------------------------------------

    def next_order(self) -> Order:
        return self.leader.next_order()

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        return self._swarm.buffers

    @property
    def global_folder(self) -> Path:
        assert self.leader.fetched is not None
        return self.leader.fetched

    def blocks(self) -> list[int]:
        return self._blocks.blocks()

    def extra(self) -> dict[str, Any]:
        return {"blocks": self._blocks.state()}

    # --- inner steps ---------------------------------------------------------------------------

    def micro_batch_done(self) -> None:
        self._blocks.micro_batch_done()

    def block_used_up(self) -> None:
        self._blocks.block_used_up()

    def step_done(self, report: StepReport) -> None:
        self._blocks.step_done(skipped=report.skipped)
        log.info("%s", lines.step_line(report))
        now = time.monotonic()
        log.info("%s | %s", lines.throughput_line(report), self._schedule.repo_age_line(now))
        for line in self._warnings(report):
            log.warning("%s", line)
        self._record("step", **_fields(report))
        record_step(self._metrics.registry, report)
        self._metrics.write(time.monotonic(), self._collect)
        self._skipped = self._skipped + 1 if report.skipped else 0
        self.leader.post(
            st.InnerStepEnded(
                report.inner_step,
                preview_due=self._snapshot_complete(),
                snapshot_due=self._snapshot_due(report, now),
                checkpoint_due=not report.skipped
                and report.inner_step % self._cadence.checkpoint_steps == 0,
                roll_back=self._skipped >= self._cadence.nan_limit,
            )
        )

    def _collect(self) -> None:
        registry = self._metrics.registry
        registry.gauge("repo_age_seconds", "since the newest gradient was published").set(
            self._schedule.repo_age(time.monotonic())
        )
        for name, value in self._gauges.items():
            registry.gauge(name, name.replace("_", " ")).set(value())
        for room, counts in self._counts.items():
            registry.totals(room, counts())

    def _snapshot_due(self, report: StepReport, now: float) -> bool:
        self._schedule.expect_round(self._round_clock.next_at())
        decision = self._schedule.step(report, now)
        for level, text in decision.lines:
            log.log(logging.WARNING if level == "warning" else logging.INFO, "%s", text)
        if not decision.snapshot:
            return False
        problem = self._disk_problem()
        if problem is None and not self._blocks.blocks():
            problem = upload_gate(inner_step=report.inner_step, minimum=0, blocks=())
        if problem is not None:
            self.snapshot_failed(problem)
            return False
        if not self._blocks.list_is_recent():
            # Trained on earlier blocks alone since the last publication.
            if now - self._stale_list_said > 60:
                self._stale_list_said = now
                log.info("%s", lines.STALE_LIST)
            self._schedule.cancelled(again=True)
            return False
        return True

    def _snapshot_complete(self) -> bool:
        """Whether a snapshot waits for its preview; one that could not be written is given up."""
        if self._snapshot is None:
            return False
        handle, folder, revision = self._snapshot
        if not handle.done():
            return False
        if handle.error is None:
            return True
        self._snapshot = None
        shutil.rmtree(folder, ignore_errors=True)  # a full disk needs the room
        self._blocks.publication_ended(revision, ok=False)
        self.snapshot_failed(
            f"The snapshot could not be written, so this revision is not published: {handle.error}"
        )
        return False

    # --- the round -----------------------------------------------------------------------------

    def pseudo_gradient_written(self, norm: float) -> None:
        self._round_started = time.monotonic()
        log.info("%s", lines.PAUSING)
        log.info("%s", lines.AVERAGING_START)
        log.info("%s (pseudo-gradient norm %.4f)", lines.ALL_REDUCE_START, norm)
        self.leader.post(st.PseudoGradientWritten(norm))

    def pseudo_gradient_failed(self, error: AllReduceError) -> None:
        log.warning("%s", lines.all_reduce_failed(1))
        self.leader.post(st.AveragingEnded(None, error.fault, error.detail))

    def outer_step_done(self, *, committed: bool, outer_step: int, detail: str) -> None:
        result = self.leader.averaged
        if committed:
            self._blocks.step_dropped()
            log.info("%s", lines.ALL_REDUCE_FINISH)
            log.info(
                "%s: outer step %d with %d peers",
                lines.ALL_REDUCE_DONE,
                outer_step,
                result.group_size if result else 0,
            )
            self._record("outer_step", outer_step=outer_step)
        else:
            log.warning("%s (%s)", lines.all_reduce_failed(3), detail)
        log.info("%s", lines.RESUMING)
        log.info("%s", lines.waiting_for_validator(self._reload_timeout))
        partial = result is not None and result.partial
        if committed and partial:
            log.warning(
                "Parts of the average failed: the global state is taken as the epoch's start once "
                "the validator has published it; what is trained until then is kept"
            )
        self.leader.post(
            st.OuterStepEnded(committed, outer_step, time.monotonic(), detail, partial)
        )
        self._round_ended(ok=committed, detail=detail)

    def round_failed(self, fault: AllReduceFault, detail: str) -> None:
        """There is no average; training goes on with what it had."""
        if fault is AllReduceFault.NO_GROUP:
            log.warning("%s", lines.all_reduce_failed(1))
        elif fault not in (AllReduceFault.LOCAL, AllReduceFault.CANCELLED):
            log.warning("%s", lines.all_reduce_failed(2))
        log.info("%s", lines.RESUMING)
        log.info("%s", lines.waiting_for_validator(self._reload_timeout))
        self._round_ended(ok=False, detail=detail, fault=fault.name)

    def _round_ended(self, *, ok: bool, detail: str, fault: str = "") -> None:
        result = self.leader.averaged
        request_epoch = self.leader.state.outer_step
        self._record(
            "round",
            outer_step=request_epoch,
            ok=ok,
            fault=fault or ("" if ok else "LOCAL"),
            detail=detail,
            peers=list(result.peers) if result else [],
            failed_peers=list(result.failed_peers) if result else [],
            seconds=time.monotonic() - self._round_started if self._round_started else 0.0,
            matchmaking_seconds=result.matchmaking_seconds if result else None,
            transfer_seconds=result.transfer_seconds if result else None,
        )
        registry = self._metrics.registry
        registry.counter("rounds_total", "all-reduce rounds, well or badly").add()
        registry.counter("rounds_failed_total", "of them, without an outer step").add(not ok)
        self._round_started = 0.0
        self._round_clock.round_ended(averaged=ok)
        self._round_over()

    # --- state in and out ----------------------------------------------------------------------

    def snapshot_dropped(self) -> None:
        """A round or a load came between the step and its snapshot."""
        self._schedule.cancelled()

    def snapshot_failed(self, problem: str) -> None:
        log.warning("%s", problem)
        self._schedule.cancelled()

    def snapshot_taken(self, folder: Path, progress: Progress, handle: SnapshotLike) -> None:
        revision = progress.revision(self._run)
        self._snapshot = (handle, folder, revision)
        log.info("%s", lines.saving_state(progress.outer_step))
        log.info("%s", lines.FULL_STATE)
        log.info("%s: training was held for %.2f s", lines.EXTRACTED_STATE, handle.hold_seconds)
        self._blocks.snapshot_taken(revision)

    def previewed(self, delta: float | None, seconds: float) -> None:
        """The snapshot's gradient was tried (None: that was not possible): publish."""
        assert self._snapshot is not None
        _, folder, revision = self._snapshot
        self._snapshot = None
        if delta is not None:
            log.info("%s (%.2f s)", lines.preview(delta), seconds)
            self._record("preview", revision=revision.tag, delta=delta, seconds=seconds)
        log.info("%s", lines.UPLOAD_MODEL_START)
        log.info("%s", lines.uploading(self._bucket))
        self._submit(folder, revision, delta)

    def publication(self, report: PublicationReport) -> None:
        """The publisher's answer, collected by the leader."""
        self._blocks.publication_ended(report.revision, ok=report.ok)
        # The schedule counts on our clock; the report's is the wall's.
        self._schedule.published(replace(report, finished_at=time.monotonic()))
        registry = self._metrics.registry
        registry.counter("publications_total", "well or badly").add()
        registry.counter("publications_failed_total", "of them, not published").add(not report.ok)
        registry.counter("uploaded_bytes_total", "to the bucket").add(report.bytes_sent)
        if report.ok:
            log.info(
                "%s (%.1f MB in %.1f s)",
                lines.pushed(report.revision, self._bucket),
                report.bytes_sent / 1e6,
                report.seconds,
            )
        else:
            log.warning("%s", lines.upload_failed(report.reason))
        self._record("publication", **_fields(report))

    def loaded(self, outer_step: int) -> None:
        self._blocks.step_dropped()
        log.info("Loaded the global state of outer step %d", outer_step)
        self._record("load", outer_step=outer_step)
        self.leader.post(st.LoadEnded(outer_step))

    def load_failed(self, problem: str) -> None:
        """The global state is none that this model can take; weights are as they were."""
        self._record("load_failed", problem=problem)
        shutil.rmtree(self.global_folder, ignore_errors=True)  # what comes next is fetched anew
        self.leader.post(st.GlobalFetchFailed(problem, time.monotonic()))

    def rolled_back(self, restored: tuple[Progress, dict[str, Any]] | None) -> None:
        """None: there was no checkpoint, training goes on more slowly."""
        self._skipped = 0
        if restored is None:
            return
        progress, extra = restored
        self._blocks.roll_back(extra.get("rank_zero", {}).get("blocks", {}))
        log.warning(
            "Training goes on at outer step %d, inner step %d",
            progress.outer_step,
            progress.inner_step,
        )
        self._record("roll_back", outer_step=progress.outer_step, inner_step=progress.inner_step)
        self.leader.post(st.RolledBack(progress.outer_step))

    def stopped(self, exit_status: int) -> None:
        reason = self.leader.state.stop_reason
        log.info("Stopped (%s)", reason)
        self._record("stop", reason=reason, exit_status=exit_status)


def _fields(report: StepReport | PublicationReport) -> dict[str, Any]:
    from dataclasses import asdict

    fields = asdict(report)
    if isinstance(report, StepReport):
        fields["tokens_per_second"] = report.tokens_per_second
    else:
        fields["revision"] = report.revision.tag
    return fields
