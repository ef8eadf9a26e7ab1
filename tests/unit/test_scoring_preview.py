"""The preview equals the reference validator, and no bucket spoils another's row."""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distributed_training.chain.base import Neuron
from distributed_training.common.memory import ModelShape, disk_space
from distributed_training.config import ConfigError
from distributed_training.node.identity import miners_of
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import ConfigExtras, Metadata, RoundNotes
from distributed_training.scoring import command, score_preview
from distributed_training.scoring.evaluator import (
    Comparison,
    EvaluationModel,
    Evaluator,
    Judgement,
    t_quantile,
)
from distributed_training.scoring.score_preview import (
    NotJudgeable,
    Preview,
    Previewer,
    PublishedState,
    Row,
    choose_miners,
    read_judged,
    read_round_notes,
)
from distributed_training.scoring.upload import Cause, DataUnavailable, folder_reader, inspect
from distributed_training.store.bucket_reader import BucketReader
from tests.tools.validator_world import (  # noqa: F401
    MODEL_CONFIG,
    VOCABULARY,
    MemoryBucket,
    TwinMiner,
    World,
    one_thread,
    pages,
    trained,
)

pytestmark = pytest.mark.timeout(200)

BLOCKS = (123456,)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return trained(tmp_path, uids=(3, 17, 42))


def judged_of(world: World, **changes: Any) -> PublishedState:
    options: dict[str, Any] = {"block": world.chain.block(), **changes}
    return read_judged(BucketReader(world.bucket), world.folder / "score", world.config, **options)


def previewer(
    judged: PublishedState, open_bucket: Any, text: Any = pages, **more: Any
) -> Previewer:
    model = EvaluationModel(model_config=MODEL_CONFIG, device=torch.device("cpu"))
    evaluator = Evaluator(model=model, pages=text)
    return Previewer(judged, open_bucket, evaluator, timedelta(seconds=4800), **more)


def preview(
    world: World, *, blocks: Sequence[int] = BLOCKS, timeout: float = 20.0, text: Any = pages
) -> Preview:
    made = previewer(judged_of(world), world.open_bucket, text, timeout=timedelta(seconds=timeout))
    neurons = miners_of(world.chain.neurons(), max_uids=256)
    return made.run(neurons, random_blocks=blocks)


def rows_of(found: Preview) -> dict[int, Row]:
    return {row.neuron.uid: row for row in found.rows}


def _ok(row: Row) -> bool:
    return row.judgement is not None and row.judgement.ok


@pytest.mark.slow
def test_its_figures_are_the_validators_for_the_same_blocks(world: World) -> None:
    """Also after a round, when outer step and period differ, and with one upload that is reset."""
    for advance in (0, 40):
        if advance:
            assert world.validator.round()
            world.chain_ledger.advance(advance)
            world.train_and_publish()
            world.miners[17].bucket.put("epoch-1/gradients.pt", b"garbage")
        world.validator.score()
        scored = {e["uid"]: e for e in world.events.of("upload_scored")[-3:]}
        found = preview(world, blocks=(scored[3]["random_block"],))
        assert found.outer_step == scored[3]["outer_step"]
        shown = {fields["uid"]: fields for fields in command.to_json(found)["miners"]}
        for uid, row in rows_of(found).items():
            event, fields = scored[uid], shown[uid]
            assert event["ok"] == _ok(row) and event["reason"] == row.reason
            assert row.repository.tag == event["revision"]
            for name in ("random", "assigned"):
                assert fields[f"{name}_blocks"] == ([event[f"{name}_block"]] if event["ok"] else [])
                for figure in ("before", "after", "relative"):
                    expected = event.get(f"{name}_{figure}")
                    assert fields[f"{name}_{figure}"] == pytest.approx(expected, abs=1e-6)


# --- bad input ------------------------------------------------------------------------------------


def _put(name: str, data: bytes) -> Callable[[World, TwinMiner], object]:
    return lambda world, miner: miner.bucket.put(name, data)


SPOILED: dict[str, tuple[Callable[[World, TwinMiner], Any], Cause]] = {
    "no commitment": (
        lambda world, miner: world.uncommit(miner.uid),
        Cause.NO_COMMITMENT,
    ),
    "down": (lambda world, miner: setattr(miner.bucket, "down", True), Cause.UNREACHABLE),
    "empty": (lambda world, miner: miner.bucket.objects.clear(), Cause.NOTHING_PUBLISHED),
    "stale": (lambda world, miner: miner.bucket.age(5000), Cause.STALE),
    "no root": (
        lambda world, miner: miner.bucket.objects.pop(keys.ROOT_METADATA),
        Cause.NO_METADATA,
    ),
    "inner step 0": (
        _put(keys.ROOT_METADATA, Metadata(5, 0, 0, "").to_json()),
        Cause.INNER_STEP_ZERO,
    ),
    "no blocks": (
        _put("epoch-0/config.json", ConfigExtras((), 5).merge_into(MODEL_CONFIG)),
        Cause.NO_BLOCKS,
    ),
    "old blocks": (
        _put("epoch-0/config.json", ConfigExtras((900,), 5).merge_into(MODEL_CONFIG)),
        Cause.OLD_BLOCKS,
    ),
    "oversized": (_put("epoch-0/gradients.pt", bytes(10**7)), Cause.BAD_GRADIENT),
    "oversized root": (_put(keys.ROOT_METADATA, bytes(10**7)), Cause.UNREACHABLE),
    "no names of ours": (
        lambda world, miner: miner.change_payload(
            lambda p: [p.pop(k) for k in list(p) if k != "metadata"]
        ),
        Cause.MAKES_IT_WORSE,  # it changes nothing
    ),
    "huge norm": (
        lambda world, miner: miner.change_payload(lambda p: p["lm_head.weightvals"].fill_(3e38)),
        Cause.NOT_FINITE,
    ),
    "harmful": (lambda world, miner: miner.publish(factor=-30.0), Cause.MAKES_IT_WORSE),
}


@pytest.mark.slow
def test_a_bad_bucket_costs_its_own_row_a_reason(tmp_path: Path) -> None:
    """Each bucket is bad in another way, and two are good."""
    uids = range(1, len(SPOILED) + 3)
    world = trained(tmp_path, uids=uids)
    before = rows_of(preview(world))
    spoiled = dict(zip(uids, SPOILED.items(), strict=False))
    for uid, (_, (spoil, _)) in spoiled.items():
        spoil(world, world.miners[uid])
    found = preview(world)
    rows = rows_of(found)
    told = {row["uid"]: row for row in command.to_json(found)["miners"]}
    for uid, (name, (_, cause)) in spoiled.items():
        row = rows[uid]
        assert row.cause is cause, name
        assert row.reason or _ok(row) or cause is Cause.INNER_STEP_ZERO, name
        assert (told[uid]["cause"], told[uid]["remedy"]) == (cause.name, cause.remedy)
    for uid in uids[-2:]:
        assert rows[uid].judgement == before[uid].judgement


@pytest.mark.slow
def test_buckets_that_hang_cost_one_named_timeout(world: World) -> None:
    """Not an error, no end: a store that accepts the connection and says nothing."""
    before, hang = rows_of(preview(world)), threading.Event()
    for uid, operation in ((17, "head"), (42, "get_range")):

        def forever(called: str, key: str, operation: str = operation) -> None:
            if called == operation:
                hang.wait(30)

        world.miners[uid].bucket._before = forever
    began = time.monotonic()
    rows = rows_of(preview(world, timeout=3.0))
    assert time.monotonic() - began < 25
    hang.set()
    for uid in (17, 42):
        assert rows[uid].cause is Cause.TOO_SLOW
        # Of three seconds, what the requests before it have left.
        assert re.search(r"\b[1-3](\.\d)? s", rows[uid].reason), rows[uid].reason
    assert rows[3].judgement == before[3].judgement


def test_text_that_cannot_be_had_is_nobodys_fault(world: World) -> None:
    def flaky(uid: int, block: int) -> torch.Tensor:
        if uid == 3:
            raise DataUnavailable("no rows")
        return pages(uid, block) + (VOCABULARY if uid == 17 else 0)  # of another tokenizer

    found = preview(world, text=flaky)
    for uid in (3, 17):
        row = rows_of(found)[uid]
        assert row.cause is Cause.NO_DATA and row.judgement is None
    assert "and the model has 64 words" in row.reason and "tokenizer.name" in row.reason


# --- what is judged -------------------------------------------------------------------------------


def test_weights_are_fetched_once_an_outer_step(world: World) -> None:
    fetched: list[str] = []
    original = world.bucket.get_range

    def counted(key: str, start: int, length: int, *, etag: str = "") -> bytes:
        fetched.append(key)
        return original(key, start, length, etag=etag)

    world.bucket.get_range = counted  # type: ignore[method-assign]
    first, again = judged_of(world), judged_of(world)
    assert fetched.count("epoch-0/model.safetensors") == 1
    assert all(map(torch.equal, first.weights, again.weights))
    assert world.validator.round()
    judged_of(world, block=world.chain.block() + 40)
    assert [path.name for path in (world.folder / "score").iterdir()] == ["epoch-1"]
    shutil.rmtree(world.folder / "score")
    (world.folder / "score").touch()  # in the way, as a disk that may only be read
    with pytest.raises(NotJudgeable, match=r"cannot be read: .*File exists"):
        judged_of(world)


def test_a_folder_stands_for_a_bucket(world: World, tmp_path: Path) -> None:
    """A snapshot that is not published yet."""
    upload, bucket = tmp_path / "upload", world.miners[17].bucket
    upload.mkdir()
    for name in (keys.CONFIG, keys.GRADIENTS):
        (upload / name).write_bytes(bucket.objects[f"epoch-0/{name}"][0])
        os.utime(upload / name, (0, 0))  # a copy that has lain here for long
    (neuron,) = (n for n in world.chain.neurons() if n.uid == 17)
    made = previewer(judged_of(world), lambda _: folder_reader(upload, run=5))
    (row,) = made.run([neuron], random_blocks=BLOCKS).rows
    assert row.judgement == rows_of(preview(world))[17].judgement
    assert row.repository.tag == "5.0.30" and row.repository.valid
    (upload / keys.METADATA).write_text("{")
    reader = folder_reader(upload)
    damaged = inspect(Neuron(17, ""), lambda _: reader, outer_step=0, age_limit=timedelta(1))
    assert not damaged.valid and "metadata.json is not JSON" in damaged.reason


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, {}),
        (b"{", {}),
        (b'{"outer_step": 3, "miners": []}', {}),
        (b'{"outer_step": -3, "miners": {}}', {}),
        (b"[" * 100_000, {}),
        (
            RoundNotes(
                3, {17: "it was not called: it sent NaN", 4: "a\nb", 10**6: "no uid"}
            ).to_json(),
            {17: "in the round of outer step 3 it was not called: it sent NaN"},
        ),
    ],
)
def test_validators_report_of_its_last_round_is_shown(
    content: bytes | None, found: dict[int, str]
) -> None:
    bucket = MemoryBucket()
    if content is not None:
        bucket.put(keys.ROUND, content)
    notes = read_round_notes(BucketReader(bucket))
    assert notes == found
    repository = SimpleNamespace(tag="", valid=True, age=None)
    row = Row(Neuron(17, "m"), repository, timedelta(1), None, None, "", of_round=notes.get(17, ""))
    shown = Preview(1, 3, 3, (7,), (row,), 1.0)
    assert ("it sent NaN" in "\n".join(command.lines_of(shown))) == bool(found)
    assert bool(command.to_json(shown)["miners"][0]["of_round"]) == bool(found)


def test_score_preview_chooses_the_uid() -> None:
    miners = [Neuron(uid, f"m{uid}", port=1) for uid in (1, 2, 3, 4)]
    assert choose_miners(miners, None) == miners
    assert [n.uid for n in choose_miners(miners, [4, 2, 4])] == [4, 2]
    with pytest.raises(ConfigError, match="uid 9"):
        choose_miners(miners, [9])


def test_the_guide_lists_every_cause_as_the_script_tells_it() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "scoring.md").read_text(encoding="utf-8")
    rows = [f"| `{c.name}` | {c.remedy} |" for c in Cause]
    found = [line for line in guide.splitlines() if line.startswith("| `")]
    assert found == rows


def test_a_disk_that_a_miner_needs_is_left_to_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are fetched only if they leave room for the miner's own writes."""
    runs = world.folder / "runs"
    (runs / "miner-h" / "checkpoints").mkdir(parents=True)
    most = disk_space(ModelShape.from_config(MODEL_CONFIG), keep_checkpoints=2)
    disk = SimpleNamespace(total=10**15, free=most + 1000)
    monkeypatch.setattr(score_preview.shutil, "disk_usage", lambda folder: disk)
    with pytest.raises(NotJudgeable, match=r"miner on this disk may take .* --cache"):
        judged_of(world, miners=runs)
    assert not list((world.folder / "score").glob("epoch-*"))
    with (runs / "miner-h" / "checkpoints" / "model").open("wb") as file:
        file.truncate(most)  # it has what it will ever take
    disk.free += 10**10  # as a download keeps some in reserve
    assert judged_of(world, miners=runs).weights


def comparison(before: list[float], after: list[float]) -> Comparison:
    return Comparison((7,), (100,) * len(before), tuple(before), tuple(after))


def judgement(uid: int, gain: float, *, assigned: float, spread: float = 0.0) -> Judgement:
    before = [5.0, 5.0]
    pair = [comparison(before, [5.0 - g - spread, 5.0 - g + spread]) for g in (gain, assigned)]
    return Judgement(uid, 0, *pair)


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (7, 2.365), (15, 2.131), (100, 1.984)],
)
def test_students_t(freedom: int, expected: float) -> None:
    assert t_quantile(freedom) == pytest.approx(expected, rel=0.005)


def test_an_interval_holds_the_truth_19_times_out_of_20() -> None:
    generator = random.Random(1)
    held = []
    for _ in range(2000):
        gains = [generator.gauss(0.3, 0.1) for _ in range(6)]
        found = comparison([4.0] * 6, [4.0 - g for g in gains])
        assert found.relative == pytest.approx(statistics.mean(gains) / 4)
        low, high = found.interval
        held.append(low <= 0.3 / 4 <= high)
    assert 0.93 < statistics.mean(held) < 0.97


def test_one_micro_batch_gives_no_interval() -> None:
    found = comparison([4.0], [3.0])
    assert found.relative == 0.25 and found.interval == (-math.inf, math.inf)
    assert Judgement(1, 0, found, found).chance is None


def test_the_chance_that_assigned_wins() -> None:
    assert judgement(1, 0.1, assigned=0.2).chance == 1.0
    assert judgement(1, 0.2, assigned=0.1).chance == 0.0
    unsure = judgement(1, 0.1, assigned=0.1, spread=0.05).chance
    assert unsure == pytest.approx(0.5)
    assert Judgement.reset(1, 0, Cause.STALE, "old").chance is None
