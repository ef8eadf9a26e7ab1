"""Check that a damaged or hostile file is refused in one line or set aside.

This takes bounded time and memory, and the next start does the same.
"""

from __future__ import annotations

import json
import random
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from tests.tools.hostile_files import MEBI, READERS, bombs, bounded, outcome
from tests.tools.mutations import mutated

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("name", READERS)
def test_a_whole_file_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / READERS[name].name
    path.write_bytes(READERS[name].honest())
    assert outcome(READERS[name], path) == "read"


def mutate(name: str, folder: Path, *, seed: int, cases: int) -> None:
    """Check that each mutation is soon read, or refused with its reader's error.

    The next start must do the same.
    """
    reader, path = READERS[name], folder / "case" / READERS[name].name
    honest = reader.honest()
    path.parent.mkdir(exist_ok=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in range(seed, seed + cases):
        content = mutated(random.Random(case), reader.name, honest)
        path.write_bytes(content)
        began = time.process_time()
        try:
            first = outcome(reader, path)
            if path.exists() and path.read_bytes() == content:
                assert outcome(reader, path) == first
        except BaseException as error:
            raise AssertionError(f"mutation {case} of {name}: {error!r}") from error
        assert time.process_time() - began < 5, f"mutation {case} of {name}"
        for other in path.parent.iterdir():
            if other != path:
                other.unlink()  # a file that was set aside
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 400 * 1024, f"{(after - before) // 1024} MiB more"


#: Mutations per reader, 10,000 in all; slow readers get fewer.
_CASES = dict.fromkeys(READERS, 340) | {
    **dict.fromkeys(("update", "network", "registry"), 2500),
    **dict.fromkeys(("notes", "standings"), 150),
    "parquet": 200,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_mutated_file_ends_no_reader(name: str, tmp_path: Path) -> None:
    mutate(name, tmp_path, seed=0, cases=_CASES[name])


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_a_hundred_thousand_mutations_end_no_reader(name: str, tmp_path: Path) -> None:
    mutate(name, tmp_path, seed=1_000_000, cases=10 * _CASES[name])


@pytest.mark.parametrize("row", [[4], [4, {"uid": 4}, "x"], ["a", None, None], None, {"uid": 4}])
def test_a_damaged_row_of_the_registry_costs_its_answer(row: Any, tmp_path: Path) -> None:
    """Skipping the row would drop a member, so the last known list is kept instead."""
    reader, path = READERS["registry"], tmp_path / "state.json"
    whole = json.loads(reader.honest())
    path.write_text(json.dumps(whole | {"rows": [whole["rows"][0], row]}))
    with pytest.raises(ValueError):
        reader.read(path)


@pytest.mark.long
@pytest.mark.timeout(600)  # 80 s of CPU
def test_time_and_memory_are_bounded(tmp_path: Path) -> None:
    expected = 0
    for name, reader in READERS.items():
        for bomb, content in bombs(name):
            folder = tmp_path / name / bomb
            folder.mkdir(parents=True)
            (folder / reader.name).write_bytes(content)
            expected += 1
    told = bounded(tmp_path, memory=700 * MEBI, cpu_seconds=240)
    ends = [line for line in told if "outcome" in line]
    assert not told[-1].get("error"), told[-2:]
    assert len(ends) >= expected
    for line in ends:
        assert line["cpu"] < 20, line
