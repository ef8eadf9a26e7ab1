"""Check that durable files are written completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import shutil
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import Field

from distributed_training.common.files import (
    LARGEST_JSON,
    LARGEST_STATE,
    atomic_file,
    free_bytes,
    is_full,
    late_mount,
    read_json_object,
    read_state,
    sha256_of,
    write_bytes,
    write_json,
    write_state,
)
from distributed_training.health import machine
from distributed_training.health.machine import Examination, check_shared_memory
from distributed_training.store.errors import NoRoomError
from distributed_training.store.transfer import describe_full_disk, require_room
from tests.tools.miner_parts import config_of


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


@pytest.mark.parametrize("covered", [False, True])
def test_an_error_of_the_disk_names_the_file(tmp_path: Path, covered: bool) -> None:
    """torch.save raises a RuntimeError if the disk becomes full while it writes."""
    path, writes = tmp_path / "kept", itertools.count()

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            if covered and not next(writes):
                return len(data)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError) as caught, atomic_file(path):
        torch.save(torch.zeros(1000), Full())
    assert caught.value.filename == str(path) and is_full(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b"nul", b"[" * 200_000, b'{"a": 1', b"\xff\xfe{}", b" " * 4096]
)
def test_a_damaged_file_reads_as_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "damaged.json"
    path.write_bytes(content)
    assert read_json_object(path) is None
    assert read_json_object(tmp_path / "missing.json") is None


def test_a_file_larger_than_allowed_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    for more in (0, 1):
        write_bytes(path, b'{"a": 5}'.ljust(LARGEST_JSON + more))
        assert read_json_object(path) == (None if more else {"a": 5})
    assert sha256_of(path) != sha256_of(Path(__file__))


@dataclass(frozen=True)
class Part:
    key: str
    size: Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Remembered:
    parts: dict[str, Part]
    places: tuple[int, ...]
    whole: bool
    rate: float | None = None


states = st.builds(
    Remembered,
    st.dictionaries(st.text(), st.builds(Part, st.text(), st.integers(0, 2**60)), max_size=3),
    st.lists(st.integers(-(2**70), 2**70), max_size=3).map(tuple),
    st.booleans(),
    st.none() | st.floats(allow_nan=False),
)
many = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))


@many
@given(state=states)
def test_a_state_is_read_as_it_was_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, state: Remembered
) -> None:
    path = tmp_path / "state.json"
    assert write_state(path, state)
    write_json(path, {**asdict(state), "of a later version": 1})
    assert read_state(path, Remembered, lost="all") == state
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"] and not caplog.messages


@many
@given(state=states, content=st.binary(max_size=99), at=st.integers(0, 400))
@example(state=Remembered({}, (), True), content=b"[" * 300_000, at=0)
@example(state=Remembered({}, (), True), content=b" " * (LARGEST_STATE + 1), at=0)
def test_state_file_of_any_content_is_read_or_set_aside_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, state: Remembered, content: bytes, at: int
) -> None:
    path, aside = tmp_path / "state.json", tmp_path / "state.json.damaged"
    aside.unlink(missing_ok=True)
    write_state(path, state)
    honest = path.read_bytes()
    damaged = honest[:at] + content + honest[at + len(content) :]
    path.write_bytes(damaged)
    caplog.clear()
    found = read_state(path, Remembered, lost="all is begun again")
    if found is None:
        assert aside.read_bytes() == damaged and not path.exists()
        (line,) = caplog.messages
        assert str(path) in line and line.endswith("all is begun again") and "\n" not in line
    else:
        assert path.read_bytes() == damaged and not aside.exists() and not caplog.messages
    assert read_state(path, Remembered, lost="all") == found


def test_a_state_that_cannot_be_read_or_written_is_a_line_and_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "state.json"):
        assert read_state(path, Part, lost="it is counted again") is None
        assert not write_state(path, Part("a", 1), lost="it is counted again")
    assert [line.endswith(": it is counted again") for line in caplog.messages] == [True] * 4
    with pytest.raises(OSError):
        write_state(tmp_path / "file" / "state.json", Part("a", 1))
    assert tmp_path.is_dir()
    assert read_state(tmp_path / "none.json", Part, lost="all") is None
    assert len(caplog.messages) == 4


def test_a_mount_that_does_not_answer_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resolving the path of an unrelated network disk that does not answer would hang."""
    fstab, late = tmp_path / "fstab", tmp_path / "late"
    fstab.write_text(f"nas:/a /dead nfs hard 0 0\nUUID=cd {tmp_path}/link ext4 nofail 0 2\n")
    late.mkdir()
    (tmp_path / "link").symlink_to(late)
    asked: list[str] = []
    real = os.path.realpath
    monkeypatch.setattr(
        os.path, "realpath", lambda path, **o: asked.append(path) or real(path, **o)
    )
    monkeypatch.setattr(
        psutil, "disk_partitions", lambda all: [SimpleNamespace(mountpoint="/dead")]
    )
    assert late_mount(late, fstab) == str(late)
    assert "/dead" not in asked


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_folder_that_cannot_be_synced_is_no_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    sync = os.fsync

    def refuses(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(code, os.strerror(code))
        sync(handle)

    monkeypatch.setattr(os, "fsync", refuses)
    with pytest.raises(OSError) if code == errno.EIO else contextlib.nullcontext():
        write_bytes(tmp_path / "f", b"x")
    assert (tmp_path / "f").read_bytes() == b"x"


@pytest.mark.parametrize(("total", "free"), [(0, 0), (10**12, 0), (10**12, 10**11)])
def test_unknown_free_space_does_not_count_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int, free: int
) -> None:
    """A caller that asks for room continues on such a disk."""
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: SimpleNamespace(total=total, used=0, free=free)
    )
    monkeypatch.setattr(machine, "gpu_bytes", lambda _: 1)
    refused = total and not free
    examination = Examination(config_of("--neuron.run_folder", str(tmp_path)), ranks=2)
    assert free_bytes(tmp_path) == (free if total else None)
    assert bool(describe_full_disk(tmp_path / "snapshots", 1000)) == bool(refused)
    with pytest.raises(NoRoomError) if refused else contextlib.nullcontext():
        require_room(tmp_path, 1000, what="it")
    (room,) = machine.check_room(examination)
    assert room.status == ("fail" if refused else "ok" if total else "warn")
    shared = [check.status for check in check_shared_memory(examination)]
    assert shared == (["warn"] if refused else [])
