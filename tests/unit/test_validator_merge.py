"""Test the merge of a close: equal bits on each processor, clipping, weights and spoilers."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distributed_training.protocol import update_file
from distributed_training.protocol.update_file import UpdateFile, UpdateLayout, rows_and_columns
from distributed_training.training.outer_rule import (
    OUTER_RULES,
    OuterRule,
    UploadFacts,
    nesterov_sgd,
)
from distributed_training.validator.merge import (
    Measured,
    OuterState,
    Rule,
    count_steps,
    find_spoilers,
    helpful,
    longest_norm,
    merge,
    merge_factors,
    norm_of,
    whole_uploads,
)
from tests.tools.outer_steps import SCHEMA, drawn, header, hotkey_of, sign, write_file
from tests.toys.merges import MERGES, Merge
from tests.unit.test_protocol_update_file import GOLDEN, golden_digests

pytestmark = pytest.mark.timeout(300)

RULE = Rule("nesterov", 0.7, 0.9)
FACTORS = [1.0, float(np.float32(0.3)), 1.0]


def uploads_in(folder: Path, outer_step: int) -> list[UpdateFile]:
    return [
        write_file(
            folder / f"{outer_step}.{uid}",
            drawn(10 * outer_step + uid, 1e-3),
            header("upload", outer_step, hotkey=hotkey_of(uid)),
        )
        for uid in range(len(FACTORS))
    ]


def merge_steps(
    folder: Path, steps: int = 3, rule: Rule = RULE, divisor: float | None = None
) -> list[OuterState]:
    """Return the states before, between and after some outer steps."""
    states = [OuterState(drawn(99))]
    for outer_step in range(steps):
        layout = UpdateLayout.of(SCHEMA, header("update", outer_step))
        uploads = uploads_in(folder, outer_step)
        path = folder / f"{outer_step}.update"
        _, after = merge(
            uploads, FACTORS, states[-1], rule,
            path=path, layout=layout, sign=sign, divisor=divisor,
        )  # fmt: skip
        states.append(after)
    return states


def open_update(folder: Path, outer_step: int) -> UpdateFile:
    return UpdateFile.reopen(folder / f"{outer_step}.update", SCHEMA)


@pytest.mark.parametrize("divisor", [None, 2.7])
def test_merge_is_that_of_plain_numpy(divisor: float | None, tmp_path: Path) -> None:
    """Each operation is rounded to float32 separately, because numpy has no fused operations."""
    states = merge_steps(tmp_path, divisor=divisor)
    lr, mu = np.float32(RULE.learning_rate), np.float32(RULE.mu)
    n = np.float32(divisor or len(FACTORS))
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
    """Test the bits of a merge and of a file: torch chooses its kernels by the processor."""
    (tmp_path / "here").mkdir()
    found = subprocess.run(
        [sys.executable, "-m", "tests.unit.test_validator_merge", str(tmp_path)],
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    )
    of_merge, of_files = found.stdout.split(" ", 1)[1].splitlines()
    assert of_merge == digests(tmp_path / "here")
    assert of_files == str({bits: GOLDEN[bits]["body"] for bits in ("4", "3", "2")})
    if capability == "default":
        assert found.stdout.startswith("DEFAULT ")


def test_chunks_do_not_change_the_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = digests(tmp_path)
    monkeypatch.setattr(update_file, "_VALUES", 300)
    (tmp_path / "again").mkdir()
    assert digests(tmp_path / "again") == whole


@pytest.mark.parametrize("own", [True, False], ids=["same function", "another function"])
def test_a_rule_of_a_plug_in_is_followed(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merge computes its own step without fused additions; a plug-in's may differ slightly."""
    step = nesterov_sgd if own else partial(nesterov_sgd)
    monkeypatch.setitem(OUTER_RULES._made, "alike", OuterRule(step, feedback=0.5))
    other = merge_steps(tmp_path, rule=Rule("alike", RULE.learning_rate, RULE.mu))[-1]
    (tmp_path / "own").mkdir()
    ours = merge_steps(tmp_path / "own")[-1]
    assert other.digests == ours.digests or not own
    for some, others, limit in (
        (other.weights, ours.weights, 1e-3),
        (other.momentum or [], ours.momentum or [], 1e-6),
    ):
        for one, two in zip(some, others, strict=True):
            assert torch.allclose(one, two, atol=limit)


FACTS = [UploadFacts(10 + n, 1.0 + n, n / 7 - 0.1) for n in range(len(FACTORS))]


@pytest.mark.parametrize("own", MERGES, ids=lambda each: each.__name__)
def test_a_rule_merges_the_members_rows(
    own: Merge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule gets each upload's clipped rows and facts, in blocks that need little memory."""
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
    monkeypatch.setattr(update_file, "_VALUES", 900)
    largest = 0
    assert once(tmp_path / "blocks").digests == found.digests
    assert largest <= 900


def test_norm_is_that_of_all_values(tmp_path: Path) -> None:
    upload = uploads_in(tmp_path, 0)[0]
    values = torch.cat([upload.decode(name, shape).flatten() for name, shape in SCHEMA])
    assert norm_of(upload) == pytest.approx(float(values.double().norm()), rel=1e-12)


def closes(*chain: Sequence[tuple[float, float]]) -> list[Any]:
    """Return the manifests of outer steps, each given by the (norm, gain) of its uploads."""
    return [
        SimpleNamespace(
            merged=[
                SimpleNamespace(norm=norm, improvement=gain, chance=0.01, factor=1.0, share=1.0)
                for norm, gain in uploads
            ]
        )
        for uploads in chain
    ]


def found(*uploads: tuple[float, float], chance: float = 0.01) -> list[Measured]:
    """Return the judge's measurements of uploads, each given by its (norm, gain)."""
    return [Measured(norm, gain, chance) for norm, gain in uploads]


@pytest.mark.parametrize(
    "uploads, history, factors",
    [
        (found((1, 1)), [], [1.0]),
        (found((1, 1), (8, 1)), [], [1.0, 0.25]),
        (found((1, 1), (2, 1), (3, 1)), [], [1.0, 1.0, 1.0]),
        (found((1, 1), (2, 1), (16, 1)), [], [1.0, 1.0, 0.25]),
        # The norms of uploads that helped before limit them.
        (found((8, 1), (8, 1)), [[(1, 1), (1, 1)]] * 2, [0.25, 0.25]),
        # Noise does not change the usual norm, and is carried over, as are very short uploads.
        (found((1, 1), (1, 1), (50, 0.009), (50, -1)), [], [1.0, 1.0, 0.0, 0.0]),
        (found((1, 1), (1, 1), (1e-3, 1e-3), chance=1e-6), [], [1.0, 1.0, 0.0]),
        (found((1, 1), (1e-3, 1e-3), chance=1e-6), [], [1.0, 0.0]),
        # Fewer than half help: the judge cannot tell, so all are merged.
        (found((1, 1), (1, 0), (1, 0)), [], [1.0, 1.0, 1.0]),
        (found((1, 0), (8, 0)), [], [1.0, 0.25]),
        (found((1, 0), (8, 0)), [[(9, 1)]], [1.0, 1.0]),
    ],
)
def test_which_uploads_are_merged_and_how_they_are_clipped(
    uploads: list[Measured], history: list[Any], factors: list[float]
) -> None:
    assert merge_factors(uploads, closes(*history)) == factors


@pytest.mark.parametrize(
    "uploads, divisor",
    [
        (found((1, 1)), 1.0),
        (found((1, 1), (1, 0.5)), 1.5),
        (found((1, 1), (1, 3)), 4 / 3),
        # Uploads under noise gain two fifths as much, and the outer step keeps its length.
        (found(*[(1, 1)] * 4, *[(2, 0.4)] * 3), 5.2),
        # Two fifths of an upload gain more than two fifths as much, but count as two fifths.
        (found(*[(1, 1)] * 4, *[(0.4, 0.5)] * 3), 5.2),
        # Uploads that are far too long are clipped, and do not make the others count less.
        (found((1, 1), (1, 1), (1000, 1), (1000, 1)), 4.0),
        # An upload that is carried over does not count, and one that gains more counts once.
        (found(*[(1, 1)] * 4, (1, 0.1), (1, -1), (1, 9)), 5.0),
        # Too few uploads help, so all of them are merged.
        (found((1, 1), (1, 0), (1, 0)), 3.0),
    ],
)
def test_the_sum_is_divided_by_what_uploads_gain(uploads: list[Measured], divisor: float) -> None:
    certain = [each._replace(chance=1e-9) for each in uploads]
    assert whole_uploads(certain) == pytest.approx(divisor, rel=1e-6)


def test_an_upload_that_gains_less_by_chance_counts_whole() -> None:
    assert whole_uploads(found((1, 1), (1, 0.6), (1, 1), chance=0.4)) == 3.0
    assert whole_uploads(found((1, 1), (1, 0.6), (1, 1), chance=0.2)) == pytest.approx(2.8)


@pytest.mark.parametrize("clones", [1, 2, 3, 6])
@pytest.mark.parametrize("few", [False, True], ids=["they help", "too few help"])
def test_uploads_that_are_alike_share_the_weight_of_one(clones: int, few: bool) -> None:
    """One of four members is imitated. It and its imitators together count as one upload."""
    honest = found((1, 1), (1, 1), (0.9, 1), (1, 1), chance=2.0 if few else 0.01)
    alike = [honest[0]._replace(share=1 / (clones + 1))] * (clones + 1)
    alone, factors = merge_factors(honest, []), merge_factors([*alike, *honest[1:]], [])
    whole, divided = whole_uploads(honest), whole_uploads([*alike, *honest[1:]])
    assert divided == pytest.approx(whole) and all(factors)
    assert sum(factors[: clones + 1]) == pytest.approx(alone[0])
    assert factors[clones + 1 :] == pytest.approx(alone[1:])


GAINS = st.floats(
    0.3, 1.0
)  # gains of honest members at a close, which often differ by a factor of 2


@given(
    st.lists(st.tuples(st.floats(0.5, 2.0), GAINS), min_size=2, max_size=8),
    st.integers(0, 7),
    st.tuples(st.floats(1e-12, 1e12), st.floats(-1e3, 0.01)),
    st.lists(st.lists(st.tuples(st.floats(0.5, 2.0), GAINS), max_size=6), max_size=12),
)
def test_uploads_that_do_not_help_change_nothing_for_the_others(
    honest: list[tuple[float, float]],
    hostile: int,
    bad: tuple[float, float],
    history: list[list[tuple[float, float]]],
) -> None:
    hostile = min(hostile, len(honest))
    alone = merge_factors(found(*honest), closes(*history))
    with_them = merge_factors(
        found(*honest, *[bad] * hostile), closes(*([*each, bad] for each in history))
    )
    helping = helpful(found(*honest))
    if 2 * sum(helping) >= len(honest) + hostile:
        assert with_them == [*alone, *[0.0] * hostile]
    for (norm, _), factor in zip(honest, with_them, strict=False):
        assert factor in (0.0, 1.0) or norm * factor >= 2 * 0.5 * (1 - 1e-6)


@given(
    st.lists(st.tuples(st.floats(1e-6, 1e6), st.floats(-1, 1)), min_size=1, max_size=20),
    st.lists(st.lists(st.tuples(st.floats(1e-6, 1e6), st.floats(-1, 1)), max_size=5), max_size=12),
)
def test_factors_are_bounded_and_somebody_is_always_merged(
    uploads: list[tuple[float, float]], history: list[list[tuple[float, float]]]
) -> None:
    measured, chain = found(*uploads), closes(*history)
    factors, helps = merge_factors(measured, chain), helpful(measured)
    assert all(0 <= factor <= 1 for factor in factors) and any(factors)
    whole = whole_uploads(measured)
    assert 0 < whole <= sum(map(bool, factors))
    assert np.float32(whole) == whole
    assert all(np.float32(factor) == factor for factor in factors)
    longest = longest_norm(measured, chain)
    assert all(m.norm * f <= longest * (1 + 1e-6) for m, f in zip(measured, factors, strict=True))
    if 2 * sum(helps) >= len(uploads):
        assert [bool(factor) for factor in factors] == helps
    else:
        assert all(factors)


@pytest.mark.parametrize("members", range(1, 9))
@pytest.mark.parametrize("norm", [0.1, 0.01, 0.001, 1e-6, 1e-11])
@pytest.mark.parametrize("share", [0.3, 0.5, 1.0])
def test_short_uploads_at_the_first_close_are_forgotten(
    members: int, norm: float, share: float
) -> None:
    short = max(1, round(share * members))
    chain: list[Any] = []
    for n in range(4):
        norms = [norm] * short + [1.0] * (members - short) if n == 0 else [1.0] * members
        # The gain grows with the norm, and chance explains almost none of it.
        uploads = [Measured(each, 0.1 * each, min(0.01 * each, 1e-7)) for each in norms]
        factors = merge_factors(uploads, chain)
        if n:
            assert factors == [1.0] * members
        chain.append(
            SimpleNamespace(
                merged=[
                    SimpleNamespace(
                        norm=u.norm, improvement=u.gain, chance=u.chance, factor=f, share=1.0
                    )
                    for u, f in zip(uploads, factors, strict=True)
                ]
            )
        )


# --- the schedule ---


def steps_of(closed_at: float, total: int) -> Any:
    return SimpleNamespace(closed_at=closed_at, total_inner_steps=total, update="u", merged=[])


@pytest.mark.parametrize(
    "claims, steps",
    [
        ([100, 0], 100),
        ([100, 2**53 - 1], 100),
        ([100, 100, 0, 0], 100),
        ([100, 100, *[2**53 - 1] * 3], 100),
        ([0, 0], 0),
    ],
)
def test_claims_that_are_impossible_do_not_move_the_schedule(claims: list[int], steps: int) -> None:
    uploads = [(Measured(1.0, 0.1, 0.01), claim) for claim in claims]
    assert count_steps(uploads, [steps_of(0.0, 0)], 600.0, 720) == steps


@given(
    st.lists(st.integers(0, 2**53 - 1), min_size=1, max_size=9),
    st.lists(st.integers(1, 500), min_size=2, max_size=12),
    st.floats(1.0, 5000.0),
)
def test_the_schedule_moves_by_what_the_last_rates_allow(
    claims: list[int], past: list[int], seconds: float
) -> None:
    chain = [steps_of(1e9 + 600 * n, total) for n, total in enumerate(itertools.accumulate(past))]
    uploads = [(Measured(1.0, 0.1, 0.01), claim) for claim in claims]
    steps = count_steps(uploads, chain, chain[-1].closed_at + seconds, 10**6)
    rates = [each / 600 for each in past[1:]][-10:]
    assert round(min(rates) * seconds / 4) - 1 <= steps <= round(max(rates) * seconds * 4) + 1
    # The claims of members whose uploads do not help have no effect.
    liars = [(Measured(1.0, 0.0, 0.01), claim) for claim in claims]
    honest = [(Measured(1.0, 0.1, 0.01), past[-1])] * len(claims)
    at = chain[-1].closed_at + 600
    assert count_steps([*honest, *liars], chain, at, 10**6) == count_steps(honest, chain, at, 10**6)


def ask(spoilers: set[int]) -> tuple[list[Sequence[int]], object]:
    asked: list[Sequence[int]] = []

    def passes(some: Sequence[int]) -> bool:
        asked.append(list(some))
        assert some and len(asked) < 1000
        return not spoilers.intersection(some)

    return asked, passes


@given(
    st.integers(1, 1024).flatmap(
        lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))
    )
)
def test_spoilers_are_found_and_no_honest_upload_is_blamed(case: tuple[int, set[int]]) -> None:
    n, spoilers = case
    asked, passes = ask(spoilers)
    found = find_spoilers(n, passes)  # type: ignore[arg-type]
    assert len(asked) <= 2 * math.log2(n) + 2
    assert found is None or set(found) == spoilers
    if len(spoilers) == n or len(spoilers) == 1:
        assert (found is None) == (len(spoilers) == n)


def test_two_spoilers_are_found_where_the_bound_allows() -> None:
    found = 0
    for one, two in ((a, b) for b in range(16) for a in range(b)):
        _, passes = ask({one, two})
        found += find_spoilers(16, passes) == (one, two)  # type: ignore[arg-type]
    assert found == 120


if __name__ == "__main__":
    print(torch.backends.cpu.get_cpu_capability(), digests(Path(sys.argv[1])))
    print(golden_digests())
