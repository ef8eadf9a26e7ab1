"""Name the readers of files that an outsider, a crash or a bad disk may have damaged.

:data:`READERS` names every reader of a file that others write or that a kill may damage. Each is
called with a path; it may raise what it promises (``refuses``) and nothing else.

    python -m tests.tools.hostile_files FOLDER BYTES SECONDS     # see `bounded`

calls them for the files of a folder under limits and prints what came of each.
"""

from __future__ import annotations

import io
import json
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from distributed_training.chain import registry
from distributed_training.chain.base import ChainState
from distributed_training.data.page_source import Counts
from distributed_training.data.parquet import FolderSource, ParquetSource
from distributed_training.miner import run_folder
from distributed_training.network import Shown
from distributed_training.protocol.metadata import parse_commitment
from distributed_training.protocol.update_file import (
    Header,
    UpdateFile,
    UpdateLayout,
    finish,
    rows_and_columns,
    write_rows,
)
from distributed_training.store.transfer import deadline_in, download
from distributed_training.telemetry.events import EventFollower, read_events
from distributed_training.validator.standings import Standings
from examples.line_files import JsonLinesSource
from tests.tools.memory_store import MemoryObjectStore

MEBI = 1024 * 1024
SHAPES = {"layer.weight": (64, 64), "norm.weight": (64,)}
SCHEMA = list(SHAPES.items())
CHAIN = "finney, netuid 38"


@dataclass(frozen=True)
class Reader:
    """``name``: of the file. ``honest``: a whole one's bytes. ``refuses``: names of what it may
    raise; nothing where damage is set aside, skipped or taken for absence."""

    name: str
    read: Callable[[Path], Any]
    honest: Callable[[], bytes]
    refuses: tuple[str, ...] = ()


# --- readers --------------------------------------------------------------------------------------


def _lines(path: Path) -> Any:
    follower = EventFollower(path)
    history = list(follower.history(at_most=MEBI))
    follower.close()
    assert all(isinstance(event, dict) for event in history)
    return [dict(line) for line in read_events(path)]


def _instance(path: Path) -> Any:
    launcher = run_folder.launcher_of(path.parent)
    assert launcher is None or launcher.pid > 0
    return launcher, run_folder.read_exit_status(path.parent)


def _honest_chain_state() -> bytes:
    neuron = {"uid": 3, "hotkey": "5F", "ip": "1.2.3.4", "port": 8091}
    state = {"chain": CHAIN, "at": time.time(), "block": 5, "neurons": [neuron]}
    return json.dumps({**state, "commitments": {"5F": "x"}}).encode()


def _download_notes(path: Path) -> Any:
    store = MemoryObjectStore()
    store.put("a", b"content")
    target = path.parent / "a"
    target.with_name(".a.part").touch()
    download(store, "a", target, limit=99, deadline=deadline_in(timedelta(seconds=240)))
    assert target.stat().st_size == 7


def _pages(source: FolderSource) -> Any:
    return [source.rows(name, 0, split="", limit=100) for name in source.all_rows()]


def _registry_state(path: Path) -> Any:
    with registry._reading(200):
        return registry._STATE.validate_json(path.read_bytes())


# --- whole files ----------------------------------------------------------------------------------


_UPDATE_HEADER = Header(
    kind="upload", run_id="run", outer_step=3, serial=1, hotkey="5F", start="0" * 64, codec="4-bit",
    inner_steps=9, tokens=900, pages=(5, 6),
)  # fmt: skip


def _update(path: Path) -> Any:
    """Return all values in a member's upload, without checking who signed it."""
    who: Any = {"run_id": "run", "kind": "upload", "hotkey": "5F", "verify": lambda *_: True}
    file = UpdateFile.open(path, SCHEMA, **who)
    return [file.decode(name, shape) for name, shape in SCHEMA]


def honest_update() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path, layout = Path(folder, "a"), UpdateLayout.of(SCHEMA, _UPDATE_HEADER)
        for index, (_, shape) in enumerate(SCHEMA):
            write_rows(path, layout, index, 0, torch.ones(rows_and_columns(shape)))
        finish(path, layout, lambda message: bytes(64))
        return path.read_bytes()


def honest_parquet() -> bytes:
    import pyarrow
    import pyarrow.parquet

    buffer = io.BytesIO()
    table = pyarrow.table({"text": [f"row {i}" * 9 for i in range(30)]})
    pyarrow.parquet.write_table(table, buffer, row_group_size=8)
    return buffer.getvalue()


def _json(content: Any) -> Callable[[], bytes]:
    return lambda: json.dumps(content).encode()


_LINE = b'{"kind": "x", "at": 1.5}\n'
_NOTES = {"etag": "9a0364b9e99bb480dd25e1f0284c8555", "size": 7, "done": []}
_STATUS = {"status": 3, "reason": "deregistered", "instance": "x", "pid": 77}
_STANDINGS = {
    **{"entries": {}, "board": {}, "failed_rounds": 0, "successful_rounds": 1},
}

_REGISTRY = {
    **{"registry": f"net/{'0' * 8}/{'5' * 48}", "start": "ab", "version": 3},
    **{"time": 1.5},
    "rows": [[3, {"uid": 3, "hotkey": "5F", "ip": "1.2.3.4", "port": 8091}, "x"]],
}

#: Files as unknown senders, a crash or a bad disk may leave them.
READERS: dict[str, Reader] = {
    "update": Reader("a.safetensors", _update, honest_update, ("ValueError",)),
    "lines": Reader("events.jsonl", _lines, lambda: _LINE * 9),
    "instance": Reader("instance.json", _instance, _json(_STATUS)),
    "exit": Reader("exit_status.json", _instance, _json(_STATUS)),
    "chain": Reader(
        "chain.json",
        lambda path: ChainState.load(path, chain=CHAIN, hotkey="5F"),
        _honest_chain_state,
    ),
    "notes": Reader(".a.part.json", _download_notes, _json(_NOTES)),
    "commitment": Reader(
        "commitment.txt",
        lambda path: parse_commitment(path.read_text("utf-8", "replace")),
        lambda: b"a" * 128,
        ("CommitmentError",),
    ),
    "registry": Reader(
        "state.json",
        _registry_state,
        _json(_REGISTRY),
        ("Unusable",),
    ),
    "parquet": Reader(
        "rows.parquet",
        lambda path: _pages(ParquetSource(path.parent, text_column="text", counts=Counts())),
        honest_parquet,
        ("PageUnavailable",),
    ),
    "rows": Reader(
        "rows.jsonl",
        lambda path: _pages(
            JsonLinesSource(path.parent, text_key="text", index=None, counts=Counts())
        ),
        lambda: b'{"text": "some words", "n": [1, 2.5]}\n' * 20,
        ("PageUnavailable",),
    ),
    "network": Reader(
        "network.json",
        lambda path: Shown.parse(path.read_bytes()),
        _json({"name": "n", "version": 3, "master": "5F", "run_id": "r"}),
        ("ValueError",),
    ),
    "standings": Reader("standings.json", Standings.load, _json(_STANDINGS), ("GlobalStateError",)),
}

# --- bombs: small files that ask for much work ----------------------------------------------------


def bombs(reader: str) -> Iterator[tuple[str, bytes]]:
    kind = READERS[reader].name
    if kind.endswith(".safetensors"):
        yield from _safetensors_bombs()
    else:
        yield from _json_bombs()


def _json_bombs() -> Iterator[tuple[str, bytes]]:
    yield "deep lists", b"[" * 200_000
    yield "deep objects", b'{"a":' * 500_000
    yield "many lists", b'{"a": [' + b"[]," * 1_000_000 + b"[]]}"
    yield "long numbers", b'{"a": [' + b",".join([b"9" * 4300] * 900) + b"]}"
    yield "too long a number", b'{"size": ' + b"9" * 1_000_000 + b"}"
    yield "infinite", b'{"size": 1e999, "pid": Infinity, "highest": NaN}'
    yield "no end", b"x" * (17 * MEBI)


def _safetensors_bombs() -> Iterator[tuple[str, bytes]]:
    for name, header in (
        ("deep", b'{"a":' * 200_000),
        ("many lists", b'{"a": [' + b"[]," * 1_300_000 + b"[]]}"),
        ("wide numbers", _table(shape="[" + ",".join(["9" * 4300] * 700) + "]")),
        ("many dimensions", _table(shape="[" + ",".join(["1"] * 1_500_000) + "]")),
        ("large", _table(shape=f"[{2**52}, {2**52}]", place=f"0, {2**53 - 1}")),
        ("one name", b"{" + b",".join([_table()[1:-1]] * 40_000) + b"}"),
        ("one place", b"{" + b",".join(_table(f"n{i}")[1:-1] for i in range(40_000)) + b"}"),
        ("no text", b'{"a": "' + b"\xff" * MEBI + b'"}'),
    ):
        yield name, struct.pack("<Q", len(header)) + header + bytes(4)
    for length in (2**64 - 1, 2**63, 2**40, 5 * MEBI, 0):
        yield f"length {length}", struct.pack("<Q", length) + b"{}" + bytes(6 * MEBI)


def _table(name: str = "a", shape: str = "[1]", place: str = "0, 4") -> bytes:
    text = f'{{"{name}": {{"dtype": "F32", "shape": {shape}, "data_offsets": [{place}]}}}}'
    return text.encode()


# --- one start after another ----------------------------------------------------------------------


def outcome(reader: Reader, path: Path) -> str:
    """Return what the start makes of it: "read", or the text of a refusal. Raises what no reader
    may raise."""
    try:
        reader.read(path)
    except Exception as error:
        if not any(kind.__name__ in reader.refuses for kind in type(error).__mro__):
            raise
        text = str(error)
        assert "\n" not in text and 0 < len(text) <= 600, text[:2000]
        return text
    return "read"


def bounded(folder: Path, *, memory: int, cpu_seconds: int) -> list[dict[str, Any]]:
    """Calls the readers for ``folder``/READER/NAME/FILE in a child that may take that much more
    address space and CPU time than its imports did. What came of each; the last has "error" if the
    child died."""
    command = [sys.executable, "-m", "tests.tools.hostile_files", str(folder), str(memory)]
    done = subprocess.run(
        [*command, str(cpu_seconds)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        told.append({"error": f"rc {done.returncode}: {done.stderr[-2000:]}"})
    return told


def main() -> None:
    folder, memory, cpu_seconds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    names = sorted(path.name for path in folder.iterdir())
    for name in names:  # import everything before the limits apply
        warm = folder / name / "honest" / READERS[name].name
        warm.parent.mkdir(exist_ok=True)
        warm.write_bytes(READERS[name].honest())
        outcome(READERS[name], warm)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    used = int(time.process_time()) + cpu_seconds
    resource.setrlimit(resource.RLIMIT_CPU, (used, used + 1))
    for name in names:
        for path in sorted((folder / name).glob(f"*/{READERS[name].name}")):
            before = time.process_time()
            told = {"reader": name, "bomb": path.parent.name, "size": path.stat().st_size}
            print(json.dumps({**told, "began": True}), flush=True)
            told["outcome"] = outcome(READERS[name], path)
            told["outcome"] = outcome(READERS[name], path)  # the next start
            print(json.dumps({**told, "cpu": time.process_time() - before}), flush=True)


if __name__ == "__main__":
    main()
