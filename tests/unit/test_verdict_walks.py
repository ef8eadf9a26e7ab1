"""Walks of a validator and a miner, in which the verdict says what the manifests say.

A walk draws starts, rounds, uploads and what becomes of them, outages and steps of the clock. The
miner knows what has reached it. Where the verdict leaves open whether an upload counts, both may be
true.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from distributed_training.chain.base import Neuron
from distributed_training.common.backoff import Clocks
from distributed_training.exchange.base import Close
from distributed_training.exchange.own_uploads import OwnUploads
from distributed_training.miner import events as ev
from distributed_training.miner.events import MinerState, Mode
from distributed_training.miner.network_watch import chain_facts
from distributed_training.protocol.manifest import Manifest, Merged, Refused
from distributed_training.protocol.types import Update
from distributed_training.store.base import Uplink
from distributed_training.telemetry.facts import Facts
from distributed_training.telemetry.verdict import Verdict, judge
from tests.tools.memory_store import MemoryObjectStore
from tests.tools.miner_parts import watched

ME, LOOK = "me", 15.0
START = 1e9  # Unix seconds


class Said(Counter[str]):
    """Counts of each verdict, and of whether uploads were said to count."""

    def judge(self, facts: Facts, now: float) -> bool | None:
        found = judge(facts, now)
        self[found.verdict.value] += 1
        self[f"counts: {found.counts}"] += 1
        return found.counts


class Chain:
    """The chain as the miner sees it; it moves while the link is up."""

    def __init__(self) -> None:
        self.at = self.now = self.paid = 0.0
        self.trouble = ""

    def neurons(self) -> tuple[Neuron, ...]:
        return Neuron(0, "master"), Neuron(1, ME, incentive=self.paid)

    def age(self) -> timedelta:
        return timedelta(seconds=self.now - self.at)


class Walk:
    """A walk: time, clocks, the link, the miner, and a validator that takes uploads at closes."""

    PERIOD, GRACE = 600.0, 60.0
    applied: Manifest | None = None  # the last one that says something of an upload of ours

    def __init__(self, seed: int, folder: Path, said: Said) -> None:
        self.rng, self.said, self.folder = random.Random(seed), said, folder
        self.now = self.offset = 0.0
        self.chain = Chain()
        self.chain_up = self.store_up = True
        self.store_silent: float | None = None
        self.due: list[tuple[float, Callable[[], None]]] = []
        self.mode, self.outer_step = Mode.TRAINING, 0
        self.alive = True
        self.gate_seen = 0  # closes in a row of whose uploads no half passed, as the state says
        self.network: int | None = None  # its outer step, as far as the miner knows
        self.uploads = OwnUploads(MemoryObjectStore(), folder / "uploads", 1)
        self.closes_at, self.serial, self.head = self.PERIOD, 1, 0
        self.manifests: dict[int, Manifest] = {}
        self.gate, self.pays = 0, seed % 4 != 0
        self.follows = 0.005 if seed % 10 == 0 else 0.5  # how often it looks for updates
        self.begin()

    # --- the miner

    def begin(self) -> None:
        """Begin a process of the miner."""
        clocks = Clocks(lambda: self.now, lambda: self.unix(self.now))
        chain: Any = self.chain
        self.facts, self.reporter = watched(
            self.folder,
            Facts(
                pays=self.pays,
                round_seconds=self.PERIOD,
                mode=self.mode.value,
                outer_step=self.outer_step,
            ),
            lambda: {
                **chain_facts(chain, ME, self.unix(self.now)),
                "store_silent_since": self.store_silent and self.unix(self.store_silent),
                "gate": self.gate_seen,
                "network_step": self.network,
            },
            clocks,
        )

    def unix(self, moment: float) -> float:
        return START + moment + self.offset

    def tell(self, event: ev.Event, **state: Any) -> None:
        if self.alive:
            self.reporter.on_event(event, MinerState(self.mode, self.outer_step, **state))

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
        self.chain.trouble = "" if self.chain_up else "connection refused"
        self.chain.paid = self.rng.choice((0.0, 1e-6, 0.2))
        facts = self.facts.gather()
        told = self.applied  # until now: more may come before the verdict
        if self.rng.random() < 0.4:
            self.advance(self.rng.uniform(0, LOOK))
        if self.rng.random() < 0.1:  # between the look and its reader
            self.offset += self.rng.choice((-1, 1)) * self.rng.choice((3, 30, 3000))
        now = self.unix(self.now)
        self.compare(self.said.judge(facts, now), told)

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
                mode = self.mode
                self.mode = self.rng.choice(list(Mode))
                self.advance(self.rng.uniform(0, 600))
                self.mode = mode
            elif what < 0.25:
                self.advance(self.rng.uniform(0, 3000))
            self.advance(self.rng.uniform(0, 300))
            self.look()

    def restart(self) -> None:
        self.alive, self.applied = False, None

        def again() -> None:
            self.alive, self.mode = True, Mode.TRAINING
            self.begin()

        self.later(self.rng.uniform(10, 120), again)

    # --- the validator

    def turn(self) -> None:
        if self.chain_up:
            self.chain.at = self.now
        self.store_silent = None if self.store_up else self.store_silent or self.now
        if self.alive and self.mode is Mode.TRAINING:
            self.facts.record("step", inner_step=1, seconds=LOOK)
        self.tell(ev.Tick(self.now))
        if self.now >= self.closes_at:
            self.close()
        if self.store_up:
            self.gate_seen = self.gate
        if self.alive and self.store_up and self.rng.random() < self.follows:
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
            close = Close(step, serial, self.closes_at, self.GRACE)
            path = self.uploads.path(close)
            path.write_bytes(rng.randbytes(16))
            sent = self.uploads.send(close, 60.0, Uplink())
            self.tell(ev.UploadEnded(close, sent.cause))
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            match rng.choice(("merged", "merged", "merged", "not judged in time", *CAUSES)):
                case "merged":
                    merged.append(Merged(1, ADDRESS, digest, 1.0, 1.0, 0.1, 5, 9))
                case "late":  # a file that was not read has no digest
                    refused.append(Refused(1, ADDRESS, "", "late", "it came 3 s after the grace"))
                case cause if cause in CAUSES:
                    refused.append(Refused(1, ADDRESS, digest, cause, "drawn"))
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
            self.network = self.head
        if self.rng.random() < 0.005:
            self.tell(ev.NetworkDiffers("two manifests", forked=True))

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

    def compare(self, said: bool | None, told: Manifest | None) -> None:
        """Compare the upload that the last manifest that reached the miner names."""
        if said is not None:
            assert told is not None
            assert said == any(each.uid == 1 for each in told.merged), told


ADDRESS = "5" + "F" * 47
CAUSES = ("late", "damaged", "worse", "copy", "not-judged")  # of refusals
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
        try:
            Walk(seed, folder / str(seed), said).walk(moves)
        except AssertionError as error:
            raise AssertionError(f"walk {seed}: {error}") from None
    return said


def check(count: int, folder: Path, first: int = 0, moves: int = 12) -> None:
    logging.disable()  # a line for each upload would take most of the time
    try:
        said = walks(count, folder, first, moves)
    finally:
        logging.disable(logging.NOTSET)
    total = sum(said[verdict.value] for verdict in Verdict)
    print(f"{count} walks, {total} verdicts, 0 false")
    for name, times in sorted(said.items()):
        print(f"  {name:24} {100 * times / total:5.1f} %")
    assert all(said[f"counts: {known}"] > total / 20 for known in (True, False)), said


@pytest.fixture
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # nothing here outlives a walk


@pytest.mark.timeout(60)
def test_a_verdict_says_what_the_manifests_say(tmp_path: Path, no_syncs: None) -> None:
    check(200, tmp_path, moves=8)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_verdict_is_false_in_10000_walks(tmp_path: Path, no_syncs: None) -> None:
    check(10_000, tmp_path, 1000)
