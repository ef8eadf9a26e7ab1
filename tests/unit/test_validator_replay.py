"""Test how outer steps are computed again from a bucket, and how an audit names faults."""

from __future__ import annotations

import dataclasses
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Manifest, Master
from distributed_training.training.outer_rule import OUTER_RULES, OuterRule, nesterov_sgd
from distributed_training.validator.merge import OuterState, Rule
from distributed_training.validator.replay import ChainBroken
from tests.tools.outer_steps import (
    MASTER,
    RUN_ID,
    SCHEMA,
    header,
    hotkey_of,
    open_chain,
    publish_chain,
    sign,
    state_of,
    verify,
    write_file,
)
from tests.toys.merges import MERGES, Merge

pytestmark = pytest.mark.timeout(300)

STEPS = 10  # sets at 4 and 8


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[OuterState]]:
    bucket = tmp_path_factory.mktemp("bucket")
    return bucket, publish_chain(bucket, STEPS, keep_uploads=8)


@pytest.fixture
def bucket(published: tuple[Path, list[OuterState]], tmp_path: Path) -> Path:
    """Return a copy of the bucket, which a test may damage."""
    return shutil.copytree(published[0], tmp_path / "bucket")


def assert_same(one: OuterState, two: OuterState) -> None:
    for name in ("weights", "momentum", "residual"):
        for ours, theirs in zip(getattr(one, name), getattr(two, name), strict=True):
            assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("to", [*range(4, STEPS + 1), None])
def test_an_empty_disk_continues_bit_for_bit(
    published: tuple[Path, list[OuterState]], tmp_path: Path, to: int | None
) -> None:
    bucket, states = published
    chain = open_chain(bucket, tmp_path)
    left = tmp_path / keys.outer_key(
        3, ".model.safetensors.part"
    )  # left by a start that was killed
    left.parent.mkdir(parents=True)
    left.touch()
    found = chain.replay(chain.state(), to)
    assert_same(found, states[STEPS if to is None else to])
    # All downloaded files are deleted.
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("own", MERGES, ids=lambda each: each.__name__)
def test_an_audit_repeats_the_merge_of_a_rule(
    own: Merge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The facts come from the manifests. If the rule was changed since, the audit notices it."""
    monkeypatch.setitem(OUTER_RULES._made, "own", OuterRule(nesterov_sgd, merge=own))
    publish_chain(tmp_path / "bucket", 5, rule=Rule("own", 0.7, 0.9))
    found = open_chain(tmp_path / "bucket", tmp_path / "audit").audit()
    assert not found.problems
    assert found.replayed_from == 0
    changed = OuterRule(nesterov_sgd, merge=lambda rows, facts: own(rows, facts) * 2)
    monkeypatch.setitem(OUTER_RULES._made, "own", changed)
    found = open_chain(tmp_path / "bucket", tmp_path / "again").audit()
    assert len(found.problems) >= 1
    assert "that its manifest does not name" in found.problems[0]


@pytest.mark.parametrize("to", [0, 3])
def test_deleted_outer_step_cannot_be_replayed(
    published: tuple[Path, list[OuterState]], tmp_path: Path, to: int
) -> None:
    chain = open_chain(published[0], tmp_path)
    with pytest.raises(ChainBroken, match=r"state.json names no set of weights up to outer step"):
        chain.replay(chain.state(), to)


def test_a_missing_upload_ends_a_replay_and_is_named(bucket: Path, tmp_path: Path) -> None:
    (bucket / keys.merged_key(9, 5)).unlink()
    chain = open_chain(bucket, tmp_path)
    with pytest.raises(ChainBroken, match=r"^outer/9/uploads/5.safetensors is missing$"):
        chain.replay(chain.state())


def test_an_audit_of_sound_publications_finds_no_problem(
    published: tuple[Path, list[OuterState]], tmp_path: Path
) -> None:
    found = open_chain(published[0], tmp_path).audit(keep_uploads=8, versions=FILE_VERSIONS)
    assert found.problems == []
    assert (found.outer_step, found.weights_from, found.replayed_from) == (STEPS, 4, 4)
    assert found.head == open_chain(published[0], tmp_path).state().head


def test_fewer_uploads_replay_less_and_are_no_problem(tmp_path: Path) -> None:
    publish_chain(tmp_path / "bucket", STEPS, keep_uploads=4)
    found = open_chain(tmp_path / "bucket", tmp_path).audit()
    # Outer steps 5 and 6 have only updates; 8 has a set.
    assert found.problems == [] and (found.weights_from, found.replayed_from) == (4, 8)


def manifest_of(bucket: Path, step: int) -> Manifest:
    data = (bucket / keys.outer_key(step, keys.MANIFEST)).read_bytes()
    return Manifest.parse(data, Master(RUN_ID, MASTER, verify))


def objects(bucket: Path) -> list[str]:
    return sorted(str(p.relative_to(bucket)) for p in bucket.rglob("*") if p.is_file())


def flip(path: Path, place: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("place", [0, 8, -1, "drawn"])
def test_a_flipped_byte_of_each_object_is_found_and_named(
    bucket: Path, tmp_path: Path, place: int | str
) -> None:
    """A byte is flipped in all files of the outer steps at once, and the audit names each file."""
    drawn = random.Random(45)
    flipped = [key for key in objects(bucket) if not key.endswith(".json")] + [
        keys.outer_key(step, keys.CONFIG) for step in (4, 8)
    ]
    for key in flipped:
        size = (bucket / key).stat().st_size
        flip(bucket / key, drawn.randrange(size) if isinstance(place, str) else place)
    found = open_chain(bucket, tmp_path / "downloads").audit()
    # Of a set of whole weights, only the first wrong file is named.
    sets = {key for key in flipped if key.startswith(("outer/4/", "outer/8/")) and "up" not in key}
    named = [problem.split(" ")[0] for problem in found.problems]
    assert len(named) == len({*named}) and {*flipped} - sets <= {*named} <= {*flipped}
    assert [len([key for key in named if key in sets and key[6] == n]) for n in "48"] == [1, 1]
    assert all("\n" not in problem for problem in found.problems)
    assert (found.weights_from, found.replayed_from) == (None, None)


NEEDED = [
    keys.STATE,
    *(keys.outer_key(step, keys.MANIFEST) for step in (0, 3, 10)),
    *(keys.outer_key(step, keys.UPDATE) for step in (5, 10)),
    *(keys.outer_key(8, name) for name in (keys.MODEL, keys.OUTER_STATE, keys.CONFIG)),
    keys.merged_key(9, 5),
]


@pytest.mark.parametrize("key", NEEDED)
def test_a_missing_object_is_named(bucket: Path, tmp_path: Path, key: str) -> None:
    (bucket / key).unlink()
    found = open_chain(bucket, tmp_path).audit(keep_uploads=8)
    assert found.problems[0].partition(", so")[0] == f"{key} is missing"


@pytest.mark.parametrize(
    "key, weights_from, replayed_from",
    [
        (keys.outer_key(5, keys.UPDATE), 8, 8),
        (keys.merged_key(6, 2), 4, 8),
        (keys.merged_key(10, 2), 4, None),
        (keys.outer_key(4, keys.MODEL), 8, 8),
        (keys.outer_key(8, keys.MODEL), 4, 4),
        (keys.outer_key(8, keys.CONFIG), 4, 4),
        (keys.outer_key(10, keys.UPDATE), None, None),
    ],
)
def test_an_audit_says_from_where_it_can_replay(
    bucket: Path, tmp_path: Path, key: str, weights_from: int | None, replayed_from: int | None
) -> None:
    flip(bucket / key, -1)
    found = open_chain(bucket, tmp_path).audit()
    assert len(found.problems) == 1
    assert (found.weights_from, found.replayed_from) == (weights_from, replayed_from)


def resign(bucket: Path, step: int, change: Callable[[Manifest], dict[str, Any]]) -> None:
    """Change a manifest and sign it and all later ones again, as a deceitful master would."""
    chain = [manifest_of(bucket, n) for n in range(STEPS + 1)]
    for n in range(step, STEPS + 1):
        changes = change(chain[n]) if n == step else {}
        if n:
            changes["previous"] = chain[n - 1].digest
        chain[n] = dataclasses.replace(chain[n], **changes)
        (bucket / keys.outer_key(n, keys.MANIFEST)).write_bytes(chain[n].to_bytes(sign))
    (bucket / keys.STATE).write_bytes(state_of(chain, [4, 8]).to_bytes(sign))


def other_upload(bucket: Path, manifest: Manifest) -> dict[str, Any]:
    """Replace a merged upload by another valid one, and return the manifest's changes for it."""
    path = bucket / keys.merged_key(manifest.outer_step, 5)
    path.unlink()
    start = manifest_of(bucket, manifest.outer_step - 1).weights
    head = header("upload", manifest.outer_step - 1, hotkey=hotkey_of(5), start=start)
    tensors = [torch.full(shape, 1e-3) for _, shape in SCHEMA]
    file = write_file(path, tensors, head)
    return {
        "merged": tuple(
            dataclasses.replace(each, digest=file.digest) if each.uid == 5 else each
            for each in manifest.merged
        )
    }


def with_first(manifest: Manifest, **changes: Any) -> tuple[Any, ...]:
    return (dataclasses.replace(manifest.merged[0], **changes), *manifest.merged[1:])


def test_another_history_is_named(bucket: Path, tmp_path: Path) -> None:
    """One manifest belongs to a second history that the same master has signed."""
    manifest = manifest_of(bucket, 5)
    other = dataclasses.replace(manifest, made_at=manifest.made_at + 1)
    (bucket / keys.outer_key(5, keys.MANIFEST)).write_bytes(other.to_bytes(sign))
    found = open_chain(bucket, tmp_path).audit()
    assert found.problems == [
        f"outer/6/manifest.json is refused: manifest.json of outer step 6 follows "
        f"{manifest.digest}, and the one of outer step 5 is "
        f"{other.digest}: another history"
    ]
    assert found.replayed_from is None


#: Changes of one field by the master or a thief of its key, who signs later manifests again.
RESIGNED: dict[str, Callable[[Manifest], dict[str, Any]]] = {
    "steps go back": lambda m: {"total_inner_steps": m.total_inner_steps - 31},
    "tokens go back": lambda m: {"total_tokens": 10**9},
    "close goes back": lambda m: {"closed_at": m.closed_at - 1400, "made_at": m.made_at - 1400},
    "made before its close": lambda m: {"made_at": 1.0},
    "serial goes back": lambda m: {"serial": 10**6},
    "other rules": lambda m: {"rules_id": "other"},
    "older rules": lambda m: {"rules_id": "before"},
    "rules to come": lambda m: {"rules_id": "later"},
    "rate": lambda m: {"learning_rate": 0.8},
    "momentum": lambda m: {"mu": 0.95},
    "rule": lambda m: {"rule": "other"},
    "norm": lambda m: {"merged": with_first(m, norm=1.01 * m.merged[0].norm)},
    "factor": lambda m: {"merged": with_first(m, factor=0.5)},
    "tokens of an upload": lambda m: {"merged": with_first(m, tokens=1)},
    "weights": lambda m: {"weights": "a" * 64},
    "momentum's digest": lambda m: {"momentum": "a" * 64},
    "residual's digest": lambda m: {"residual": "a" * 64},
    "rewind": lambda m: {"rewound_to": 3, "update": "", "merged": ()},
}
RULE = Rule("nesterov", 0.7, 0.9)
FILE_VERSIONS = {"before": (1, 0, RULE), "rules": (2, 0, RULE), "later": (3, 99, RULE)}


@pytest.mark.parametrize("name", [*RESIGNED, "another upload"])
def test_what_was_signed_again_is_named(bucket: Path, tmp_path: Path, name: str) -> None:
    change = RESIGNED.get(name, partial(other_upload, bucket))
    resign(bucket, 9, change)
    [line, *_] = open_chain(bucket, tmp_path).audit(versions=FILE_VERSIONS).problems
    assert line.startswith(("outer/9/", "outer/10/")), line


def test_an_audit_names_a_state_that_was_put_back(bucket: Path, tmp_path: Path) -> None:
    path = bucket / keys.STATE
    now = path.read_bytes()
    before = [manifest_of(bucket, n) for n in range(9)]
    path.write_bytes(state_of(before, [4, 8]).to_bytes(sign))
    [line] = open_chain(bucket, tmp_path).audit().problems
    assert line.startswith("state.json is of outer step 8, but outer/10/manifest.json is signed")
    path.write_bytes(now)
    assert open_chain(bucket, tmp_path).audit().problems == []
