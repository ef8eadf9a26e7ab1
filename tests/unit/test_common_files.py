"""Durable files: whole or not at all."""

from __future__ import annotations

import errno
import os
from datetime import timedelta
from pathlib import Path

import pytest

from distributed_training.common.backoff import Backoff, doubling
from distributed_training.common.files import (
    atomic_file,
    is_full,
    read_json_object,
    remove_leftovers,
    sha256_of,
    write_bytes,
    write_json,
)


def test_a_write_that_fails_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a" / "kept.json"
    write_json(path, {"step": 1})
    with pytest.raises(TypeError):
        write_json(path, {"step": object()})
    with pytest.raises(RuntimeError), atomic_file(path) as handle:
        handle.write(b"half")
        raise RuntimeError("killed in the middle")
    assert read_json_object(path) == {"step": 1}
    assert [p.name for p in path.parent.iterdir()] == ["kept.json"]


def test_an_error_of_the_disk_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    with pytest.raises(OSError) as caught, atomic_file(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.filename == str(path) and is_full(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b"nul", b"[" * 200_000, b'{"a": 1', b"\xff\xfe{}", b" " * 4096]
)
def test_a_damaged_file_reads_as_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "damaged.json"
    path.write_bytes(content)
    assert read_json_object(path, at_most=300_000) is None
    assert read_json_object(tmp_path / "missing.json") is None


def test_a_file_larger_than_allowed_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    write_bytes(path, b'{"a": "' + b"x" * 1000 + b'"}')
    assert read_json_object(path, at_most=500) is None
    assert read_json_object(path) is not None
    assert sha256_of(path) != sha256_of(Path(__file__))


def test_waits_double_up_to_the_longest() -> None:
    first, longest = timedelta(seconds=1), timedelta(seconds=10)
    waits = [doubling(n, first=first, longest=longest).total_seconds() for n in (1, 2, 3, 4, 5, 99)]
    assert waits == [1, 2, 4, 8, 10, 10]
    backoff = Backoff(first=first, longest=longest)
    for wanted in waits[:5]:
        assert wanted / 2 <= backoff.failed().total_seconds() <= wanted
    backoff.succeeded()
    assert backoff.failures == 0 and backoff.failed() <= first


def test_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "state[1].json"
    kept = [path, tmp_path / ".state.json.1.2.tmp", tmp_path / ".other.tmp"]
    for file in [*kept, tmp_path / ".state[1].json.77.88.tmp"]:
        file.write_text("x")
    remove_leftovers(path)
    assert sorted(tmp_path.iterdir()) == sorted(kept)
    remove_leftovers(tmp_path / "no folder" / "file")
