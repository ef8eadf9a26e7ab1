"""A member of a store network reports its rounds: lines, events, metrics, its verdict."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from distributed_training.common.backoff import Clocks
from distributed_training.exchange.base import Close
from distributed_training.miner import events as ev
from distributed_training.miner.events import MinerState, Mode
from distributed_training.miner.network_watch import chain_facts
from distributed_training.miner.reporter import Metrics, Reporter
from distributed_training.protocol.types import Base, Progress, Update
from distributed_training.telemetry import MetricsFile
from distributed_training.telemetry.facts import Facts
from distributed_training.telemetry.own_facts import OwnFacts
from distributed_training.telemetry.verdict import judge
from tests.tools.chain_memory import MemoryChain, MemoryLedger
from tests.tools.chain_world import MINER

CLOSE = Close(12, 3, 1000.0, 60.0)
TRAINING = MinerState(mode=Mode.TRAINING, outer_step=12)
APPLIED = ev.OuterStepEnded(True, 13, "", 0.25)


def state(base: Base, cause: str = "") -> MinerState:
    update = Update(13, Path("u"), base, None, "ab", 500, cause)
    return replace(TRAINING, update=update)


class Told:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.reporter = Reporter(
            record=lambda kind, **fields: self.events.append((kind, fields)),
            expect_gpu=False,
            bucket="lab",
            clock=lambda: 5.0,
        )

    def fields(self, kind: str) -> dict[str, Any]:
        (found,) = [fields for name, fields in self.events if name == kind]
        return found


def test_a_round_is_logged_in_the_promised_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    told, handle = Told(), Mock(hold_seconds=0.5)
    for event in (
        ev.CloseReached(CLOSE),
        ev.UploadBegun(CLOSE, handle, Progress(12, 30)),
        ev.CheckpointBegun(12, lambda: True, 0.125),
        ev.UploadWritten(CLOSE),
        ev.UploadEnded(12, 3, size=2_500_000, seconds=3.0),
    ):
        told.reporter.on_event(event, TRAINING)
    told.reporter.on_event(APPLIED, state(Base.MERGED))
    assert [record.getMessage() for record in caplog.records] == [
        "💾 Saving model state locally for epoch 12",
        "Full State",
        "Extracted Optimizer & Model State Dict: training was held for 0.50 s",
        "Upload Model Start",
        "🔼 Uploading model and optimizer states to r2 bucket: lab",
        "Successfully pushed new model state with tag 12.3 to bucket: lab (2.5 MB in 3.0 s)",
        "AllReduce Operation Finished Succesfully: outer step 13 applied; training was held for "
        "0.25 s; our upload was merged",
    ]
    assert told.fields("close") == {"outer_step": 12, "serial": 3}
    assert (told.fields("upload")["seconds"], told.fields("checkpoint")["seconds"]) == (0.5, 0.125)
    publication = told.fields("publication")
    assert (publication["ok"], publication["bytes_sent"]) == (True, 2_500_000)
    assert told.fields("outer_step") == {"outer_step": 13}
    found = told.fields("round")
    assert (found["ok"], found["outer_step"], found["base"]) == (True, 12, "merged")


@pytest.mark.parametrize(
    ("base", "cause", "level", "line"),
    [
        (Base.KEPT, "late: by 3 s", "INFO", "late: by 3 s"),
        (Base.KEPT, "", "INFO", "no upload of ours"),
        (Base.REFUSED, "copy: of uid 4", "WARNING", "copy: of uid 4"),
    ],
)
def test_an_upload_that_was_not_merged_is_logged_with_its_cause(
    base: Base, cause: str, level: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    Told().reporter.on_event(APPLIED, state(base, cause))
    (record,) = caplog.records
    assert record.levelname.startswith(level[:4]) and record.getMessage().endswith(f"; {line}")


def test_failed_or_dropped_upload_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    told.reporter.on_event(ev.UploadEnded(12, 3, "the store is away"), TRAINING)
    failed = ev.OuterStepEnded(False, 12, "another digest")
    told.reporter.on_event(failed, state(Base.KEPT))
    told.reporter.on_event(replace(APPLIED, dropped="the 30 inner steps"), state(Base.REFUSED))
    told.reporter.on_event(ev.NetworkDiffers("two manifests", forked=True), TRAINING)
    for line in (
        "Model state upload failed: the store is away",
        "All Reduce Failed At Checkpoint 3 (another digest)",
        "Dropped: the 30 inner steps",
    ):
        assert line in caplog.text
    assert told.fields("fork") == {"cause": "two manifests"}
    assert [fields["ok"] for kind, fields in told.events if kind == "round"] == [False, True]


class Judged:
    """A miner's facts, fed by what its reporter records."""

    def __init__(self, folder: Path) -> None:
        self.now, ledger = 0.0, MemoryLedger()
        ledger.register(MINER.ss58)
        clocks = Clocks(lambda: self.now, lambda: 1e9 + self.now)
        chain = MemoryChain(hotkey=MINER.ss58, ledger=ledger)
        self.network = 12
        self.found: list[dict[str, Any]] = []
        self.facts = OwnFacts(
            rules=Facts(round_seconds=600.0, outer_step=12),
            measured=lambda: {
                **chain_facts(chain, MINER.ss58, 1e9 + self.now),
                "network_step": self.network,
            },
            write=lambda kind, **fields: kind == "verdict" and self.found.append(fields),
            folder=folder,
            clocks=clocks,
        )
        self.reporter = Reporter(
            record=self.facts.record,
            expect_gpu=False,
            bucket="",
            clock=lambda: self.now,
            joined=lambda: self.facts.joined,
        )

    def after(self, event: ev.Event, before: MinerState, seconds: float = 20.0) -> tuple[str, bool]:
        self.reporter.on_event(event, before)
        self.now += seconds
        self.facts.look()
        return self.found[-1]["verdict"], self.found[-1]["bad"]


def test_the_verdict_follows_from_the_manifests(tmp_path: Path) -> None:
    judged = Judged(tmp_path)
    assert judged.facts.verdict == "unknown", "before the first look"
    assert judged.after(ev.CloseReached(CLOSE), TRAINING) == ("waiting", False)
    assert judged.facts.verdict.startswith("waiting: nothing was uploaded in the 20 s since")
    assert judged.after(APPLIED, state(Base.KEPT)) == ("waiting", False), "none was sent"
    late = judged.after(ev.CloseReached(CLOSE), TRAINING, 1800.0)
    assert late == ("missed a close", True) and judged.facts.counts() is None
    assert judged.after(ev.UploadEnded(12, 3), TRAINING) == ("waiting", False), "for the update"
    assert judged.after(APPLIED, state(Base.MERGED)) == ("counts", False)
    assert judged.facts.counts() == 1.0
    assert judged.after(APPLIED, state(Base.KEPT)) == ("missed a close", True), "none was sent"
    assert judged.after(ev.UploadEnded(13, 4), TRAINING) == ("counts", False)
    assert judged.after(APPLIED, state(Base.KEPT, "late: by 3 s")) == ("refused", True)
    assert judged.after(APPLIED, state(Base.REFUSED, "copy: of uid 4")) == ("refused", True)
    assert judged.facts.counts() == 0.0
    assert judged.after(APPLIED, state(Base.MERGED)) == ("counts", False)
    judged.network = 14
    assert judged.after(ev.CloseReached(CLOSE), TRAINING) == ("counts", False)
    assert judged.after(ev.CloseReached(CLOSE), TRAINING, 620.0) == ("behind", True)
    assert judged.after(ev.NetworkDiffers("two", forked=True), TRAINING) == ("other version", True)


def test_a_change_is_logged_at_once_and_the_rest_once_an_hour(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    judged = Judged(tmp_path)
    judged.after(ev.UploadEnded(12, 3), TRAINING)
    caplog.set_level(logging.INFO)
    caplog.clear()
    judged.found.clear()
    judged.network = 13
    judged.after(APPLIED, state(Base.MERGED))
    for _ in range(2 * 3600 // 20):  # without another manifest
        judged.after(ev.Tick(judged.now), TRAINING)
    # By number: hivemind, once imported, gives levels other names.
    lines = [(r.levelno, r.message) for r in caplog.records if r.message.startswith("Verdict: ")]
    assert lines[0] == (logging.INFO, "Verdict: counts: the upload of outer step 12 was merged")
    levels = [level for level, _ in lines[1:]]
    assert levels == [logging.INFO, *[logging.WARNING] * 3], "at a change, and hourly"
    assert len(judged.found) == pytest.approx(7200 / 300 + 1, abs=2)
    facts = Facts.read(tmp_path)
    assert judge(facts, 1e9 + judged.now).words == judged.found[-1]["words"]


def test_metrics_count_rounds_by_the_share_that_this_miner_had(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.prom")
    metrics = Metrics(file=file, counts={}, gauges={})
    metrics.on_event(APPLIED, state(Base.MERGED))
    metrics.on_event(APPLIED, state(Base.KEPT, "late"))
    whole = Update(20, Path("w"), Base.KEPT, None, "cd", 900, whole="fewer bytes")
    metrics.on_event(ev.OuterStepEnded(True, 20), replace(TRAINING, update=whole))
    metrics.on_event(ev.UploadEnded(12, 3, size=7), TRAINING)
    metrics.on_event(ev.UploadEnded(13, 4, "late"), TRAINING)
    values = file.registry.values()
    wanted = {
        "rounds_total": 3,
        "rounds_failed_total": 2,
        "rounds_missed_total": 7,  # outer steps 13 to 19 of others, in those weights
        "publications_total": 2,
        "publications_failed_total": 1,
        "uploaded_bytes_total": 7,
    }
    assert {name: values[name] for name in wanted} == wanted
    assert values["last_publication_timestamp_seconds"] > 0


def test_a_newcomer_misses_no_close_before_its_first_upload(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    joined, told = [False], Told()
    told.reporter._joined = lambda: joined[0]
    file = MetricsFile(tmp_path / "metrics.prom")
    metrics = Metrics(file=file, counts={}, gauges={}, joined=lambda: joined[0])
    early = ev.UploadSkipped("blocked: 3 inner steps", "steps")
    for joined[0] in (False, True):
        for follow in (told.reporter.on_event, metrics.on_event):
            follow(early, TRAINING)
            follow(APPLIED, state(Base.KEPT))
        warned = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert len(warned) == joined[0] and file.registry.values()["rounds_total"] == joined[0]
    fates = [fields["fate"] for kind, fields in told.events if kind == "round"]
    assert fates == ["too early", "missed"]


def test_missed_closes_and_uploads_are_remembered_by_the_next_process(tmp_path: Path) -> None:
    judged = Judged(tmp_path)
    assert not judged.facts.joined
    judged.after(ev.UploadEnded(12, 3), TRAINING)
    judged.after(APPLIED, state(Base.MERGED))
    for step, cause in ((13, "late: by the clock"), (14, "write lab/u: 403")):
        judged.after(ev.UploadEnded(step, step, cause), replace(TRAINING, outer_step=step))
        # Once for a close, though the manifest shows it again.
        nothing = replace(state(Base.KEPT), outer_step=step)
        judged.after(replace(APPLIED, outer_step=step + 1), nothing)
    known = Facts.read(tmp_path)
    assert (known.missed, known.missed_cause) == (2, "not sent: write lab/u: 403")
    assert [upload.fate for upload in known.uploads] == ["merged"]
    again = Judged(tmp_path)
    found = again.after(ev.CloseReached(CLOSE), TRAINING)
    assert again.facts.joined and found == ("missed a close", True), "it is no newcomer"
