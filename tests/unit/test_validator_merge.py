"""The merge of a close: its bits on each processor, what it clips, what it loses, who spoils it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distributed_training.protocol.update_file import UpdateFile, UpdateLayout, rows_and_columns
from distributed_training.training.outer_rule import (
    OUTER_RULES,
    OuterRule,
    UploadFacts,
    nesterov_sgd,
)
from distributed_training.validator import merge as module
from distributed_training.validator.merge import (
    OuterState,
    Rule,
    clip_factors,
    digest_of,
    find_spoilers,
    merge,
    norm_of,
    subtract,
)
from tests.tools.outer_steps import SCHEMA, drawn, header, hotkey_of, sign, write_file
from tests.toys.merges import MERGES, Merge

pytestmark = pytest.mark.timeout(300)

RULE = Rule("nesterov", 0.7, 0.9)
FACTORS = [1.0, float(np.float32(0.3)), 1.0]


def uploads_in(
    folder: Path, outer_step: int, bits: int = 4, size: float = 1e-3
) -> list[UpdateFile]:
    return [
        write_file(
            folder / f"{outer_step}.{uid}",
            drawn(10 * outer_step + uid, 1e-3),
            header("upload", outer_step, hotkey=hotkey_of(uid)),
        )
        for uid in range(len(FACTORS))
    ]


def merge_steps(folder: Path, steps: int = 3, rule: Rule = RULE) -> list[OuterState]:
    """Return the states before, between and after some outer steps."""
    states = [OuterState(drawn(99))]
    for outer_step in range(steps):
        layout = UpdateLayout.of(SCHEMA, header("update", outer_step))
        uploads = uploads_in(folder, outer_step)
        path = folder / f"{outer_step}.update"
        _, after = merge(uploads, FACTORS, states[-1], rule, path=path, layout=layout, sign=sign)
        states.append(after)
    return states


def open_update(folder: Path, outer_step: int) -> UpdateFile:
    return UpdateFile.reopen(folder / f"{outer_step}.update", SCHEMA)


def test_merge_is_that_of_plain_numpy(tmp_path: Path) -> None:
    """float32, an operation after the other: numpy has no fused ones."""
    states = merge_steps(tmp_path)
    lr, mu, n = np.float32(RULE.learning_rate), np.float32(RULE.mu), np.float32(len(FACTORS))
    for index, (name, shape) in enumerate(SCHEMA):
        weight = states[0].weights[index].numpy()
        momentum, residual = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        for outer_step, after in enumerate(states[1:]):
            total = np.zeros(shape, np.float32)
            for uid, factor in enumerate(FACTORS):
                upload = UpdateFile.reopen(tmp_path / f"{outer_step}.{uid}", SCHEMA)
                total = total + upload.decode(name, shape).numpy() * np.float32(factor)
            mean = total / n
            momentum = momentum * mu + mean
            wanted = (momentum * mu + mean) * lr + residual
            update = open_update(tmp_path, outer_step).decode(name, shape).numpy()
            residual, weight = wanted - update, weight - update
            assert after.momentum is not None
            assert after.residual is not None
            for ours, theirs in (
                (after.weights[index], weight),
                (after.momentum[index], momentum),
                (after.residual[index], residual),
            ):
                assert np.array_equal(ours.numpy(), theirs), (name, outer_step)


def digests(folder: Path) -> str:
    return " ".join(map(str, (state.digests for state in merge_steps(folder))))


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_the_bits_do_not_depend_on_the_processor(capability: str, tmp_path: Path) -> None:
    """Each is what torch would choose on another machine; here it takes the best there is."""
    (tmp_path / "here").mkdir()
    found = subprocess.run(
        [sys.executable, "-m", "tests.unit.test_validator_merge", str(tmp_path)],
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    )
    assert found.stdout.split(" ", 1)[1].strip() == digests(tmp_path / "here")
    if capability == "default":
        assert found.stdout.startswith("DEFAULT ")


def test_chunks_do_not_change_the_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = digests(tmp_path)
    monkeypatch.setattr(module, "_CHUNK", 300)
    (tmp_path / "again").mkdir()
    assert digests(tmp_path / "again") == whole


def test_the_validators_weights_equal_the_members(tmp_path: Path) -> None:
    states = merge_steps(tmp_path)
    weights = list(states[0].weights)
    for outer_step, after in enumerate(states[1:]):
        weights = subtract(weights, open_update(tmp_path, outer_step))
        assert digest_of(weights) == after.digests[0]
    # Nothing was changed in place.
    assert digest_of(states[0].weights) == digest_of(drawn(99))


@settings(max_examples=12)
@given(st.sampled_from([4, 3, 2]), st.integers(1, 4), st.floats(1e-6, 1e3), st.integers(0, 10**6))
def test_nothing_is_lost_by_quantization(bits: int, steps: int, size: float, seed: int) -> None:
    """The updates and the last residual add up to what the outer rule asked for."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        state = OuterState(drawn(seed))
        asked = [torch.zeros(shape, dtype=torch.float64) for _, shape in SCHEMA]
        momentum = [torch.zeros(shape, dtype=torch.float64) for _, shape in SCHEMA]
        sent = [torch.zeros(shape, dtype=torch.float64) for _, shape in SCHEMA]
        for step in range(steps):
            upload = write_file(
                folder / f"{step}.0", drawn(seed + step, size), header("upload", step)
            )
            layout = UpdateLayout.of(SCHEMA, header("update", step, bits=bits))
            path = folder / f"{step}.update"
            _, state = merge([upload], [1.0], state, RULE, path=path, layout=layout, sign=sign)
            update = open_update(folder, step)
            for i, (parameter, shape) in enumerate(SCHEMA):
                mean = upload.decode(parameter, shape).double()
                momentum[i] = RULE.mu * momentum[i] + mean
                asked[i] += RULE.learning_rate * (RULE.mu * momentum[i] + mean)
                sent[i] += update.decode(parameter, shape).double()
        assert state.residual is not None
        for i in range(len(SCHEMA)):
            lost = asked[i] - sent[i] - state.residual[i].double()
            # The roundings of float32, relative to the largest value.
            assert float(lost.abs().max()) <= 1e-5 * steps * size


def test_a_rule_with_the_network_s_own_step_gives_its_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OUTER_RULES, "_made", {"alike": OuterRule(nesterov_sgd, feedback=0.5)})
    other = merge_steps(tmp_path, rule=Rule("alike", RULE.learning_rate, RULE.mu))[-1]
    monkeypatch.undo()
    (tmp_path / "own").mkdir()
    assert other.digests == merge_steps(tmp_path / "own")[-1].digests


def test_an_outer_rule_of_a_plug_in_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plug-in is the hivemind kind's step in another function: only the last bits differ."""
    monkeypatch.setitem(OUTER_RULES._made, "of-test-merge", OuterRule(partial(nesterov_sgd)))
    other = merge_steps(tmp_path, rule=Rule("of-test-merge", RULE.learning_rate, RULE.mu))[-1]
    (tmp_path / "own").mkdir()
    own = merge_steps(tmp_path / "own")[-1]
    for one, two in zip(other.weights, own.weights, strict=True):
        assert torch.allclose(one, two, atol=1e-3)
    assert own.momentum is not None
    assert other.momentum is not None
    for one, two in zip(other.momentum, own.momentum, strict=True):
        assert torch.allclose(one, two, atol=1e-6)


FACTS = [UploadFacts(10 + n, 1.0 + n, n / 7 - 0.1) for n in range(len(FACTORS))]


@pytest.mark.parametrize("own", MERGES, ids=lambda each: each.__name__)
def test_a_rule_merges_the_members_rows(
    own: Merge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets each upload's clipped rows and facts, in blocks that hold bounded memory."""
    largest = 0

    def watched(rows: Tensor, facts: Sequence[UploadFacts]) -> Tensor:
        nonlocal largest
        largest = max(largest, rows.numel())
        assert list(facts) == FACTS
        return own(rows, facts)

    def once(folder: Path) -> OuterState:
        folder.mkdir()
        layout = UpdateLayout.of(SCHEMA, header("update", 0))
        uploads = uploads_in(folder, 0)
        path = folder / "update"
        rule = Rule("own", 1.0, 0.0)
        return merge(
            uploads, FACTORS, OuterState(drawn(99)), rule,
            path=path, layout=layout, sign=sign, facts=FACTS,
        )[1]  # fmt: skip

    monkeypatch.setitem(OUTER_RULES._made, "own", OuterRule(nesterov_sgd, merge=watched))
    found = once(tmp_path / "whole")
    assert found.momentum is not None
    for index, (name, shape) in enumerate(SCHEMA):
        rows = torch.stack(
            [
                upload.decode(name, shape).view(rows_and_columns(shape)) * factor
                for upload, factor in zip(uploads_in(tmp_path / "a", 0), FACTORS, strict=True)
            ]
        )
        assert torch.equal(found.momentum[index], own(rows, FACTS).view(shape)), name
    monkeypatch.setattr(module, "_CHUNK", 900)
    largest = 0
    assert once(tmp_path / "blocks").digests == found.digests
    assert largest <= 900


def test_a_rule_does_not_get_an_upload_of_factor_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two(rows: Tensor, facts: Sequence[UploadFacts]) -> Tensor:
        assert list(facts) == [FACTS[0], FACTS[2]]
        return rows[0] + rows[1]

    monkeypatch.setitem(OUTER_RULES._made, "own", OuterRule(nesterov_sgd, merge=two))
    layout = UpdateLayout.of(SCHEMA, header("update", 0))
    merge(
        uploads_in(tmp_path, 0), [1.0, 0.0, 1.0], OuterState(drawn(99)), Rule("own", 1.0, 0.0),
        path=tmp_path / "update", layout=layout, sign=sign, facts=FACTS,
    )  # fmt: skip


def test_norm_is_that_of_all_values(tmp_path: Path) -> None:
    upload = uploads_in(tmp_path, 0)[0]
    values = torch.cat([upload.decode(name, shape).flatten() for name, shape in SCHEMA])
    assert norm_of(upload) == pytest.approx(float(values.double().norm()), rel=1e-12)


@pytest.mark.parametrize(
    "norms, history, factors",
    [
        ([1.0], [], [1.0]),
        ([1.0, 8.0], [], [1.0, 0.25]),
        ([1.0, 2.0, 3.0], [], [1.0, 1.0, 1.0]),
        ([1.0, 2.0, 16.0], [], [1.0, 1.0, 0.25]),
        ([4.0, 4.0, 4.0], [1.0, 1.0, 9.0], [0.5, 0.5, 0.5]),
        ([1.0, 1.0, 100.0], [50.0], [1.0, 1.0, float(np.float32(0.02))]),
    ],
)
def test_clip_rule(norms: list[float], history: list[float], factors: list[float]) -> None:
    assert clip_factors(norms, history) == factors


@given(
    st.lists(st.floats(1e-6, 1e6), min_size=3, max_size=20),
    st.lists(st.floats(1e-6, 1e6), max_size=30),
    st.floats(1e-6, 1e12),
)
def test_one_hostile_norm_is_bounded_by_the_others(
    honest: list[float], history: list[float], hostile: float
) -> None:
    factors = clip_factors([*honest, hostile], history)
    assert all(0 < factor <= 1 for factor in factors)
    most = 2 * max(honest) * (1 + 1e-6)
    assert hostile * factors[-1] <= most
    # No honest one is lost either: what is clipped is longer than twice the shortest.
    usual = min([*honest, *history])
    for norm, factor in zip(honest, factors, strict=False):
        assert factor == 1 or norm > 2 * usual * (1 - 1e-6)


def ask(spoilers: set[int]) -> tuple[list[Sequence[int]], object]:
    asked: list[Sequence[int]] = []

    def passes(some: Sequence[int]) -> bool:
        asked.append(list(some))
        assert some and len(asked) < 1000
        return not spoilers.intersection(some)

    return asked, passes


@given(st.integers(2, 1024).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))))
def test_one_spoiler_is_always_found(case: tuple[int, int]) -> None:
    n, spoiler = case
    asked, passes = ask({spoiler})
    assert find_spoilers(n, passes) == (spoiler,)  # type: ignore[arg-type]
    assert len(asked) <= math.ceil(math.log2(n)) + 1 <= 2 * math.log2(n) + 2


@given(
    st.integers(1, 256).flatmap(
        lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))
    )
)
def test_no_honest_upload_is_blamed_for_a_spoiler(case: tuple[int, set[int]]) -> None:
    n, spoilers = case
    asked, passes = ask(spoilers)
    found = find_spoilers(n, passes)  # type: ignore[arg-type]
    assert len(asked) <= 2 * math.log2(n) + 2
    assert found is None or set(found) == spoilers
    if len(spoilers) == n:
        assert found is None


def test_two_spoilers_are_found_where_the_bound_allows() -> None:
    found = 0
    for one, two in ((a, b) for b in range(16) for a in range(b)):
        _, passes = ask({one, two})
        found += find_spoilers(16, passes) == (one, two)  # type: ignore[arg-type]
    assert found == 120


@given(st.integers(1, 64), st.lists(st.booleans(), min_size=200, max_size=200))
def test_a_gate_that_answers_at_random_is_not_asked_for_ever(n: int, answers: list[bool]) -> None:
    """The merge without the found uploads did pass."""
    given, passed = iter(answers), list[Sequence[int]]()
    asked = count()

    def passes(some: Sequence[int]) -> bool:
        next(asked)
        if next(given):
            passed.append(list(some))
        return list(some) in passed

    found = find_spoilers(n, passes)
    assert next(asked) <= 2 * math.log2(n) + 2
    assert found is None or [i for i in range(n) if i not in found] in passed


if __name__ == "__main__":
    print(torch.backends.cpu.get_cpu_capability(), digests(Path(sys.argv[1])))
