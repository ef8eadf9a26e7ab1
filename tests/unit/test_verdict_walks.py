"""Walks of a validator and a miner, in which the verdict says what the validator's code finds.

A walk draws starts, rounds, uploads, outages and steps of the clock. The miner knows what has
reached it; the validator's own code decides whether an upload counts, at the same moment. Where the
verdict leaves open whether it does, both may be true.
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distributed_training.chain.base import Neuron
from distributed_training.common.backoff import Clocks
from distributed_training.exchange.base import Close
from distributed_training.exchange.own_uploads import OwnUploads
from distributed_training.miner import events as ev
from distributed_training.miner.events import MinerState, Mode
from distributed_training.miner.income import Income
from distributed_training.miner.own_bucket import read_newest
from distributed_training.protocol import keys
from distributed_training.protocol.gradients import GradientMetadata, encode
from distributed_training.protocol.manifest import Manifest, Merged, Refused
from distributed_training.protocol.metadata import ConfigExtras, Metadata
from distributed_training.protocol.scoring import round_due, scored_epoch, upload_age_limit
from distributed_training.protocol.types import PublicationReport, Revision, Update
from distributed_training.protocol.update_file import Header, UpdateLayout, finish, write_rows
from distributed_training.scoring.evaluator import Comparison, Judgement
from distributed_training.scoring.upload import InvalidUpload, Judged, _read, inspect
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.uplink import Uplink
from distributed_training.telemetry.verdict import (
    Disk,
    Fact,
    Facts,
    Launch,
    Upload,
    Verdict,
    judge,
)
from distributed_training.validator.hivemind import HivemindValidator
from distributed_training.validator.judging import RefusedError, UploadJudge, refusal
from distributed_training.validator.scorer import Reached, Standings
from tests.tools.gradient_file import build_payload
from tests.tools.memory_store import MemoryObjectStore

ME, PACE, LOOK = "me", 12.0, 15.0
SCHEMA = [("w", (8, 8))]
START = 1e9  # Unix seconds


def payload() -> bytes:
    raw, (code,) = io.BytesIO(), [encode(torch.ones(8, 8))]
    torch.save(build_payload({"w": code}, GradientMetadata(1, 7, 60, 4.0)), raw)
    return raw.getvalue()


class Said(Counter[str]):
    """Counts of each verdict, and of whether uploads were said to count."""

    def judge(self, facts: Facts, now: float) -> bool | None:
        found = judge(facts, now)
        self[found.verdict.value] += 1
        self[f"counts: {found.counts}"] += 1
        return found.counts


def around(facts: Facts, rng: random.Random, now: float) -> Facts:
    """Add, now and then, what others see of the process and its machine."""
    states = ("starting", "refused", "stopped", "running")
    added: list[dict[str, Any]] = [
        {"launch": Launch(rng.choice(states))},
        {"gone": Fact(True, now)},
        {"disk": Fact(Disk(1e9, 1e12, 1e10), now)},
        {"registered": Fact(False, now)},
        {"other_version": Fact("at version 2", now), "outdated": rng.random() < 0.5},
        {"looked": now - 400},
    ]
    return replace(facts, **rng.choice(added)) if rng.random() < 0.1 else facts


class Chain:
    """The chain as the miner sees it; it moves while the link is up."""

    def __init__(self) -> None:
        self.seen, self.at, self.now = 1000, 0.0, 0.0
        self.paid = 0.0

    def neurons(self) -> tuple[Neuron, ...]:
        master = Neuron(0, "master", validator_permit=True, last_update=self.seen - 5)
        return master, Neuron(1, ME, incentive=self.paid), Neuron(2, "other", incentive=0.5)

    def age(self) -> timedelta:
        return timedelta(seconds=self.now - self.at)

    def block(self) -> int:
        return self.seen


class Walk:
    """A walk of either kind: time, clocks, the link, the miner's state and its follower."""

    kind = ""

    def __init__(self, seed: int, folder: Path, said: Said) -> None:
        self.rng, self.said, self.folder = random.Random(seed), said, folder
        self.now = self.offset = 0.0
        self.chain = Chain()
        self.chain_up = self.store_up = True
        self.store_silent: float | None = None
        self.due: list[tuple[float, Callable[[], None]]] = []
        self.mode, self.outer_step, self.called = Mode.TRAINING, 0, 0.0
        self.alive = True
        self.gate_seen = 0  # closes in a row of whose uploads no half passed, as the state says
        self.income = self.follower()

    # --- the miner

    def rules(self) -> Facts:
        raise NotImplementedError

    def follower(self) -> Income:
        return Income(
            hotkey=ME,
            chain=self.chain,  # type: ignore[arg-type]
            rules=self.rules(),
            measured=lambda: {
                "called_at": self.unix(self.called),
                "store_silent_since": self.store_silent and self.unix(self.store_silent),
                "gate": self.gate_seen,
                "chain_trouble": "" if self.chain_up else "connection refused",
            },
            record=lambda *_, **__: None,
            folder=self.folder,
            clocks=Clocks(lambda: self.now, lambda: self.unix(self.now)),
        )

    def unix(self, moment: float) -> float:
        return START + moment + self.offset

    def tell(self, event: ev.Event, **state: Any) -> None:
        if self.alive:
            self.income.on_event(event, MinerState(self.mode, self.outer_step, **state))

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        self.due.append((self.now + seconds, act))

    # --- time

    def advance(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.passed = min(LOOK, until - self.now)
            self.now = until if self.passed < LOOK else self.now + LOOK
            ready = [act for at, act in self.due if at <= self.now]
            self.due = [(at, act) for at, act in self.due if at > self.now]
            for act in ready:
                act()
            self.turn()

    def turn(self) -> None:
        raise NotImplementedError

    def outage(self) -> None:
        chain, store = self.rng.choice([(False, True), (True, False), (False, False)])
        self.chain_up, self.store_up = chain, store

        def over() -> None:
            self.chain_up = self.store_up = True

        self.later(self.rng.uniform(20, 1500), over)

    def look(self) -> None:
        """Compare the verdict at a look, and a little later, with the validator."""
        if not self.alive:
            return
        self.chain.now = self.now
        self.chain.paid = self.rng.choice((0.0, 1e-6, 0.2))
        facts = self.income.gather(MinerState(self.mode, self.outer_step))
        told = self.what_was_told()  # until now: more may come before the verdict
        if self.rng.random() < 0.4:
            self.advance(self.rng.uniform(0, LOOK))
        if self.rng.random() < 0.1:  # between the look and its reader
            self.offset += self.rng.choice((-1, 1)) * self.rng.choice((3, 30, 3000))
        now = self.unix(self.now)
        self.compare(self.said.judge(around(facts, self.rng, now), now), told)

    def what_was_told(self) -> Any:
        raise NotImplementedError

    def compare(self, said: bool | None, told: Any) -> None:
        raise NotImplementedError

    def walk(self, moves: int) -> None:
        for _ in range(moves):
            what = self.rng.random()
            if what < 0.08:
                self.outage()
            elif what < 0.12:
                self.offset += self.rng.uniform(-4000, 4000)
            elif what < 0.17:
                self.restart()
            elif what < 0.2:
                mode, self.mode = self.mode, self.rng.choice(list(Mode))
                self.advance(self.rng.uniform(0, 600))
                self.mode = mode
            elif what < 0.25:
                self.advance(self.rng.uniform(0, 3000))
            self.advance(self.rng.uniform(0, 300))
            self.look()

    def restart(self) -> None:
        self.alive = False

        def again() -> None:
            self.alive, self.mode = True, Mode.TRAINING
            self.income = self.follower()

        self.later(self.rng.uniform(10, 120), again)


# --- hivemind -------------------------------------------------------------------------------------


class Hivemind(Walk):
    """A validator that leads rounds, and one miner that may take part in them."""

    kind = "hivemind"
    GRADIENTS = payload()

    def __init__(self, seed: int, folder: Path, said: Said) -> None:
        rng = random.Random(seed + 1)
        self.first, self.pays_later = rng.choice([(40, 0), (40, 80), (60, 0)])
        self.age_limit = rng.choice((500.0, 1200.0, 4800.0))
        self.pace, self.height = rng.uniform(0.75, 1.4) * PACE, 1000.0
        self.place = self.published = (rng.choice((0, 3)), 990)
        self.standings = Standings(successful_rounds=int(self.place[0] > 0))
        self.standings.last_round_block = 1000
        self.in_round = self.sending = self.leads_none = False
        self.inner_step, self.next_upload, self.stale = 0, 0.0, 0
        self.landed_at, self.newest = 0.0, 0
        # All objects of the bucket, and all revisions that the miner knows.
        self.store = MemoryObjectStore(clock=lambda: self.now)
        self.told: dict[str, Any] = {}
        super().__init__(seed, folder, said)
        self.outer_step = self.place[0]

    def rules(self) -> Facts:
        found = read_newest(BucketReader(self.store, large=timedelta(seconds=5)))
        uploads: tuple[Upload, ...] = ()
        if found.published_at is not None and found.outer_step is not None:
            age = time.monotonic() - found.published_at
            at = self.unix(self.now - age)
            uploads = (Upload(found.outer_step, at, block=found.newest_block),)
        self.told = dict(self.store._objects)
        blocks = max(self.first, self.pays_later)
        return Facts(
            kind="hivemind",
            blocks_per_round=self.first,
            blocks_per_round_later=self.pays_later,
            seconds_per_block=PACE,
            round_seconds=blocks * PACE,
            age_limit=self.age_limit,
            patience=120.0,
            uploads=uploads,
            uploads_known=True,
        )

    @property
    def bpa(self) -> int:
        settings = SimpleNamespace(
            blocks_per_allreduce=self.first, blocks_per_allreduce_later=self.pays_later
        )
        rules = SimpleNamespace(settings=settings)
        as_it_is: Any = SimpleNamespace(_rules=rules, standings=self.standings)
        return HivemindValidator.blocks_per_allreduce.fget(as_it_is)  # type: ignore[attr-defined]

    def turn(self) -> None:
        self.height += self.passed / self.pace
        rng, block = self.rng, int(self.height)
        if self.chain_up:
            age = rng.uniform(0, PACE)
            self.chain.seen = max(self.chain.seen, int(self.height - age / self.pace))
            self.chain.at = self.now - age
        # --- the global bucket
        if rng.random() < 0.25:
            if not self.store_up:
                self.store_silent = self.store_silent or self.now
            else:
                self.store_silent = None
                step, last = self.published
                self.tell(ev.GlobalEpochSeen(step, self.now))
                self.tell(ev.PlaceSeen(step, 0, last))
                if step != self.outer_step and rng.random() < 0.5:
                    self.tell(ev.Loaded(step))
                    self.outer_step = step
        # --- the miner
        if self.alive and self.mode is Mode.TRAINING:
            self.inner_step += 1
            report = SimpleNamespace(inner_step=self.inner_step, seconds=LOOK)
            if rng.random() < 0.98:
                self.tell(ev.InnerStepDone(report))  # type: ignore[arg-type]
            if not self.sending and self.now >= self.next_upload:
                self.upload()
        # --- the validator
        if rng.random() < 0.01:
            self.leads_none = not self.leads_none
        last = max(self.place[1], self.standings.last_round_block or 0)
        due = round_due(block=block, last_allreduce_block=last, bpa=self.bpa)
        if due and not self.in_round and not self.leads_none:
            self.in_round = True
            self.later(rng.uniform(20, 200), self.end_round)

    def upload(self) -> None:
        rng, revision = self.rng, Revision(5, self.outer_step, self.inner_step)
        # At times data are of old blocks, and uploads rare.
        self.stale = rng.choice((0, 0, 0, 15, 30)) if rng.random() < 0.3 else self.stale
        # A list is never older than the one before it (BlockList.list_is_recent).
        newest = self.newest = max(self.newest, self.chain.seen - rng.randint(0, 3) - self.stale)
        self.sending = True
        self.next_upload = self.now + rng.choice((100.0, 200.0, 400.0, 3000.0))
        self.tell(ev.SnapshotSubmitted(revision, ev.GradientChecked(None, 0.0)))

        def lands() -> None:
            if not self.store_up:
                return self.later(30.0, lands)
            self.put(self.store, revision, newest)
            self.landed_at = self.now
            self.later(rng.uniform(0, 20), reported)
            return None

        def reported() -> None:
            self.sending = False
            if not self.alive:
                return
            self.told = dict(self.store._objects)
            at = self.unix(self.landed_at)
            report = PublicationReport(revision, True, 9.0, 10, finished_at=at, newest_block=newest)
            self.tell(ev.PublicationEnded(report))

        self.later(rng.uniform(10, 200), lands)

    def put(self, store: MemoryObjectStore, revision: Revision, newest: int) -> None:
        at = revision.outer_step
        extras = ConfigExtras((newest - 2, newest), revision.inner_step)
        store.put(keys.epoch_key(at, keys.CONFIG), extras.merge_into({}))
        store.put(keys.epoch_key(at, keys.GRADIENTS), self.GRADIENTS)
        store.put(keys.ROOT_METADATA, Metadata.of(revision, "").to_json())

    def end_round(self) -> None:
        self.called, step = self.now, self.place[0]
        took_part = self.alive and self.outer_step == step and self.rng.random() < 0.8
        if self.rng.random() < 0.25:
            self.standings.failed_rounds += 1
            self.standings.last_round_block = int(self.height)
            self.in_round = False
            return
        following = step + 1, int(self.height)
        if took_part:
            self.tell(ev.OuterStepEnded(True, step + 1))
            self.outer_step = step + 1

        def published() -> None:
            self.standings.reached = Reached(following[0], [], [])
            self.standings.published(following[0])
            self.standings.last_round_block = following[1]
            self.place = self.published = following
            self.in_round = False

        self.later(self.rng.uniform(1, 60), published)

    def counts(self, store: MemoryObjectStore) -> bool:
        """Return whether the validator's code counts what ``store`` holds now."""
        block, (outer_step, last) = int(self.height), self.place
        step = scored_epoch(
            outer_step=outer_step, block=block, last_allreduce_block=last, bpa=self.bpa
        )
        limit = upload_age_limit(
            failed_rounds=self.standings.failed_rounds, base=timedelta(seconds=self.age_limit)
        )
        reader = BucketReader(store, large=timedelta(seconds=5))
        neuron = Neuron(1, ME)
        found = inspect(neuron, lambda _: reader, outer_step=step, age_limit=limit)
        judged = Judged(block, self.bpa, step, SCHEMA, (), 0.7)
        try:
            _read(found, judged)
        except InvalidUpload:
            return False
        return found.valid and found.trained

    def what_was_told(self) -> MemoryObjectStore:
        told = MemoryObjectStore(clock=lambda: self.now)
        told._objects = dict(self.told)
        return told

    def compare(self, said: bool | None, told: MemoryObjectStore) -> None:
        if said is True:
            assert self.counts(self.store) and self.counts(told), "said to count"
        if said is False:  # an upload may be there that the miner was not told of
            assert not self.counts(told), "said not to count"


# --- a store network ------------------------------------------------------------------------------


class Store(Walk):
    """A validator that takes uploads at closes, judges and merges them."""

    kind = "store"
    PERIOD, GRACE = 600.0, 60.0

    def __init__(self, seed: int, folder: Path, said: Said) -> None:
        self.uploads = OwnUploads(MemoryObjectStore(), folder / "uploads", 1)
        self.closes_at, self.serial, self.head = self.PERIOD, 1, 0
        self.manifests: dict[int, Manifest] = {}
        self.forked, self.gate = False, 0
        super().__init__(seed, folder, said)

    def rules(self) -> Facts:
        return Facts(
            kind="store",
            pays=False,
            seconds_per_block=PACE,
            round_seconds=self.PERIOD,
            patience=60.0,
        )

    def turn(self) -> None:
        if self.chain_up:
            self.chain.seen, self.chain.at = 1000 + int(self.now / PACE), self.now
        self.store_silent = None if self.store_up else self.store_silent or self.now
        if self.alive and self.mode is Mode.TRAINING:
            report = SimpleNamespace(inner_step=1, seconds=LOOK)
            self.tell(ev.InnerStepDone(report))  # type: ignore[arg-type]
        if self.now >= self.closes_at:
            self.close()
        if self.store_up:
            self.gate_seen = self.gate
        if self.alive and self.store_up and self.rng.random() < 0.5:
            self.follow()

    def close(self) -> None:
        """Take one outer step: the miner's upload is sent, judged, and named in a manifest."""
        rng, step, serial = self.rng, self.head, self.serial
        merged, refused = list[Merged](), list[Refused]()
        self.gate = self.gate + 1 if rng.random() < 0.1 else 0
        if self.gate:  # no outer step: this close moves
            self.serial += 1
            self.closes_at += self.PERIOD
            return
        if self.alive and self.store_up and self.outer_step == step and rng.random() < 0.8:
            path = self.uploads.path(step, serial)
            fault = rng.choice(("", "", "", "late", "close", "start", "empty", "worse"))
            self.write(path, step + (fault == "close"), serial, fault)
            close = Close(step, serial, self.closes_at, self.GRACE)
            sent = self.uploads.send(close, 60.0, Uplink())
            self.tell(ev.UploadEnded(step, serial, sent.cause))
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            if fault == "late":
                refused.append(refusal(1, ADDRESS, "", "late", "it came 3 s after the grace"))
            elif rng.random() < 0.9:  # else it is not judged in time
                try:
                    self.judge_upload(path, step, serial, fault)
                    merged.append(Merged(1, ADDRESS, digest, 1.0, 1.0, 0.1, 5, 9))
                except RefusedError as error:
                    refused.append(refusal(1, ADDRESS, digest, error.cause, str(error)))
        self.head += 1
        self.serial += 1
        self.closes_at += self.PERIOD
        self.manifests[self.head] = replace(
            BLANK,
            outer_step=self.head,
            serial=serial,
            merged=(*merged, OTHER),
            refused=tuple(refused),
        )
        self.later(rng.uniform(0, 60), self.show_head)

    def show_head(self) -> None:
        if self.store_up:
            self.tell(ev.GlobalEpochSeen(self.head, self.now))
        if self.rng.random() < 0.005:
            self.tell(ev.ChainForked("two manifests"))

    def follow(self) -> None:
        """Apply the manifest after ours, if there is one."""
        manifest = self.manifests.get(self.outer_step + 1)
        if manifest is None:
            return
        fate = self.uploads.find_fate(manifest)
        update = Update(
            outer_step=manifest.outer_step,
            path=Path("update"),
            base=fate.base,
            own_upload=fate.path,
            weights="",
            inner_steps=0,
            cause=fate.cause,
        )
        self.tell(ev.OuterStepEnded(True, manifest.outer_step), update=update)
        self.applied = manifest if (fate.cause or fate.path) else self.applied
        self.outer_step = manifest.outer_step

    applied: Manifest | None = None  # the last one that says something of an upload of ours

    def restart(self) -> None:
        self.applied = None
        super().restart()

    def write(self, path: Path, outer_step: int, serial: int, fault: str) -> None:
        start = "b" * 64 if fault == "start" else "a" * 64
        header = Header(
            kind="upload",
            run_id="run",
            outer_step=outer_step,
            serial=serial,
            hotkey=ADDRESS,
            start=start,
            bits=4,
            inner_steps=5,
            tokens=9,
            blocks=(7,),
        )
        layout = UpdateLayout.of(SCHEMA, header)
        path.unlink(missing_ok=True)
        write_rows(path, layout, 0, 0, torch.full((8, 8), 0.0 if fault == "empty" else 1.0))
        finish(path, layout, lambda _: bytes(64))

    def judge_upload(self, path: Path, step: int, serial: int, fault: str) -> None:
        after = 6.0 if fault == "worse" else 4.9
        found = Comparison((1,), (9, 9, 9), (5.0, 5.0, 5.0), (after, after, after + 0.01))
        answer = Judgement(1, step, random=found, assigned=found)
        evaluator: Any = SimpleNamespace(judge=lambda *_, **__: answer)
        judge_it = UploadJudge(evaluator, SCHEMA, "run", 4, lambda *_: True, secret=1)
        judge_it.judge(
            1,
            ADDRESS,
            path,
            Judged(1000, 60, step, SCHEMA, (), 0.7),
            serial=serial,
            start="a" * 64,
            modified=0.0,
            random_blocks=[3],
        )

    def what_was_told(self) -> Manifest | None:
        return self.applied

    def compare(self, said: bool | None, told: Manifest | None) -> None:
        """Compare the upload that the last manifest that reached the miner names."""
        if said is not None:
            assert told is not None
            assert said == any(each.uid == 1 for each in told.merged), told


ADDRESS = "5" + "F" * 47
OTHER = Merged(2, "5" + "G" * 47, "c" * 64, 1.0, 1.0, 0.1, 5, 9)
BLANK = Manifest(
    run_id="run",
    rules_id="rules",
    outer_step=1,
    previous="a" * 64,
    update="a" * 64,
    weights="a" * 64,
    momentum="",
    residual="",
    learning_rate=0.7,
    mu=0.9,
    rule="nesterov",
    merged=(OTHER,),
    refused=(),
    losses_before={},
    losses_after={},
    scores={},
    closed_at=0.0,
    serial=1,
    total_inner_steps=1,
    total_tokens=0,
    made_at=0.0,
)


def walks(count: int, folder: Path, first: int = 0, moves: int = 12) -> Said:
    said = Said()
    for seed in range(first, first + count):
        kind = Store if seed % 4 == 0 else Hivemind
        try:
            kind(seed, folder / str(seed) if kind is Store else folder, said).walk(moves)
        except AssertionError as error:
            raise AssertionError(f"walk {seed} ({kind.kind}): {error}") from None
    return said


def check(count: int, folder: Path, first: int = 0, moves: int = 12) -> None:
    said = walks(count, folder, first, moves)
    total = sum(said[verdict.value] for verdict in Verdict)
    print(f"{count} walks, {total} verdicts, 0 false")
    for name, times in sorted(said.items()):
        print(f"  {name:24} {100 * times / total:5.1f} %")
    assert not (never := {v.value for v in Verdict if not said[v.value]}), never
    assert all(said[f"counts: {known}"] > total / 20 for known in (True, False)), said


@pytest.fixture
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # nothing here outlives a walk


@pytest.mark.timeout(60)
def test_a_verdict_is_the_one_that_the_validators_code_finds(
    tmp_path: Path, no_syncs: None
) -> None:
    check(200, tmp_path, moves=8)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_verdict_is_false_in_10000_walks(tmp_path: Path, no_syncs: None) -> None:
    check(10_000, tmp_path, 1000)
