"""Files of this project as an outsider, a crash or a bad disk leaves them, and who reads them.

:data:`READERS` names every reader of a file that others write or that a kill may damage. Each is
called with a path; it may raise what it promises (``refuses``) and nothing else.

    python -m tests.tools.hostile_files FOLDER BYTES SECONDS     # see `bounded`

calls them for the files of a folder under limits and prints what came of each.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hivemind.p2p import PeerID
from safetensors.torch import save

from distributed_training.chain import registry
from distributed_training.chain.auth import KeptFile
from distributed_training.chain.base import ChainState
from distributed_training.chain.identity import identity_file, make_identity
from distributed_training.chain.registration import RegistrationRecord
from distributed_training.config.settings import StoreSettings
from distributed_training.data.page_source import Counts
from distributed_training.data.parquet import FolderSource, ParquetSource
from distributed_training.data.shards import HeldOut
from distributed_training.exchange.sn38 import wire
from distributed_training.exchange.sn38.address_book import AddressBook
from distributed_training.exchange.sn38.averager_process import set_aside_damaged
from distributed_training.exchange.sn38.swarm import Judge
from distributed_training.exchange.sn38.wire import StreamError
from distributed_training.miner import run_folder
from distributed_training.miner.global_state import drift
from distributed_training.network import Shown
from distributed_training.protocol.gradients import GradientMetadata, encode, load_payload
from distributed_training.protocol.metadata import Metadata, parse_commitment
from distributed_training.protocol.synapses import parse_all_reduce, parse_is_alive_reply
from distributed_training.protocol.update_file import (
    Header,
    UpdateFile,
    UpdateLayout,
    finish,
    rows_and_columns,
    write_rows,
)
from distributed_training.store.bucket_reader import check_file
from distributed_training.store.cleanup import OWNER_KEY, check_claim, instance_of
from distributed_training.store.snapshot_folder import read_config, wait_complete
from distributed_training.store.transfer import deadline_in, download
from distributed_training.store.uplink import Uplink
from distributed_training.store.uploader import Start
from distributed_training.store.uploader_process import UploadLoop
from distributed_training.telemetry.events import EventFollower, read_events
from distributed_training.training.outer_step import Rows, load_outer_optimizer, load_weights
from distributed_training.validator.scorer import Standings
from extras.line_files import JsonLinesSource
from tests.tools.gradient_file import build_payload
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


def _drift(path: Path) -> Any:
    data = path.read_bytes()
    rows = [Rows(name, 0, torch.ones(shape)) for name, shape in SCHEMA]
    return drift(rows, lambda first, n: data[first : first + n], size=len(data), seed=1)


def _payload(path: Path) -> Any:
    # As if the model were larger: then its size refuses none of what is tried here.
    return load_payload(path, [*SCHEMA, ("more", (4096, 4096))])


def _done(path: Path) -> Any:
    return wait_complete(path.parent, 1, timeout=timedelta(0), uplink=Uplink())


def _journal(path: Path) -> Any:
    """Return what a start of the uploader does with it."""
    start = Start(StoreSettings(), "bucket", path.parent, path.parent / "snapshots")
    return UploadLoop(start, MemoryObjectStore(), lambda message: None)


def _lines(path: Path) -> Any:
    follower = EventFollower(path)
    history = list(follower.history(at_most=MEBI))
    follower.close()
    assert all(isinstance(event, dict) for event in history)
    return [dict(line) for line in read_events(path)]


def _instance(path: Path) -> Any:
    pid = run_folder.launcher_pid(path.parent)
    assert pid is None or pid > 0
    return run_folder.mark_of(path.parent), run_folder.read_exit_status(path.parent, instance="x")


def _registration(path: Path) -> Any:
    record = RegistrationRecord.load(path)
    assert record.waited >= 0
    return record


def _honest_chain_state() -> bytes:
    neuron = {"uid": 3, "hotkey": "5F", "ip": "1.2.3.4", "port": 8091}
    state = {"chain": CHAIN, "at": time.time(), "block": 5, "neurons": [neuron]}
    return json.dumps({**state, "commitments": {"5F": "x"}}).encode()


def _claim(path: Path) -> Any:
    store = MemoryObjectStore()
    store.put(OWNER_KEY, path.read_bytes()[:4096])
    try:
        check_claim(store, "me")
    finally:
        found = instance_of(path.parent)
    return found


def _download_notes(path: Path) -> Any:
    store = MemoryObjectStore()
    store.put("a", b"content")
    target = path.parent / "a"
    target.with_name(".a.part").touch()
    download(store, "a", target, limit=99, deadline=deadline_in(timedelta(seconds=240)))
    assert target.stat().st_size == 7


def _identity(path: Path) -> Any:
    set_aside_damaged(path)  # after which hivemind can read it, or make another
    return PeerID.from_identity(path.read_bytes()) if path.exists() else None


def _object(path: Path) -> Any:
    """Return the object of JSON that a caller has read before; an empty one if there is none."""
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class _Received:
    """A stream on which a peer has sent a file, and hung up."""

    def __init__(self, content: bytes) -> None:
        self._left = io.BytesIO(content)

    async def receive(self, count: int) -> bytes:
        data = self._left.read(count)
        if len(data) < count:
            raise StreamError("the peer hung up")
        return data

    async def receive_into(self, view: memoryview) -> None:
        view[:] = await self.receive(len(view))


def _frames(path: Path) -> Any:
    async def receive() -> None:
        stream: Any = _Received(path.read_bytes())
        while (arriving := await wire.begin(stream, part_bytes=4 * 4096)) is not None:
            await wire.finish(stream, arriving, torch.empty(1024))

    with contextlib.suppress(StopIteration):
        receive().send(None)  # it never waits


def _pages(source: FolderSource) -> Any:
    return [source.rows(name, 0, split="", limit=100) for name in source.all_rows()]


def _registry_state(path: Path) -> Any:
    with registry._reading(200):
        return registry._STATE.validate_json(path.read_bytes())


# --- whole files ----------------------------------------------------------------------------------


def honest_safetensors() -> bytes:
    return save({name: torch.ones(shape) for name, shape in SCHEMA}, metadata={"format": "pt"})


_UPDATE_HEADER = Header(
    kind="upload", run_id="run", outer_step=3, serial=1, hotkey="5F", start="0" * 64, bits=4,
    inner_steps=9, tokens=900, blocks=(5, 6),
)  # fmt: skip


def _update(path: Path) -> Any:
    """Return all that is in a member's upload; whoever wrote it signed it."""
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


def torch_bytes(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def honest_gradients() -> bytes:
    codes = {name: encode(torch.randn(shape)) for name, shape in SCHEMA}
    return torch_bytes(build_payload(codes, GradientMetadata(9, 5, 3, 2.5)))


def honest_outer() -> bytes:
    state = {i: {"momentum_buffer": torch.ones(s)} for i, (_, s) in enumerate(SCHEMA)}
    optimizer = {"state": state, "param_groups": [{"lr": 0.8, "momentum": 0.9}]}
    return torch_bytes({"optimizer_state_dict": optimizer, "learning_rate": 0.8, "epoch": 3})


def honest_frames() -> bytes:
    values = torch.arange(1024, dtype=torch.float32)
    whole = wire.encode(values, compression=wire.NONE, code=1, group_id=b"g" * 20, weight=1.0)
    return 2 * b"".join(bytes(part) for part in whole) + b"\1" + bytes(8)


def honest_parquet() -> bytes:
    import pyarrow
    import pyarrow.parquet

    buffer = io.BytesIO()
    table = pyarrow.table({"text": [f"row {i}" * 9 for i in range(30)]})
    pyarrow.parquet.write_table(table, buffer, row_group_size=8)
    return buffer.getvalue()


def honest_held_out() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "held-back")
        HeldOut(path).store(np.ones((4, 8), dtype=np.uint16))
        return path.read_bytes()


def honest_identity() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        make_identity(Path(folder))
        return identity_file(Path(folder)).read_bytes()


def _json(content: Any) -> Callable[[], bytes]:
    return lambda: json.dumps(content).encode()


def _honest_journal() -> bytes:
    record = {"bucket": "b", "key": "k", "upload_id": "u", "size": 9, "identity": "i"}
    pending = {"folder": "/nowhere", "run": 5, "outer_step": 3, "inner_step": 5, "world_size": 1}
    uploads = {"k": {**record, "part_size": 5, "etag": ""}}
    extra = {"peer_id": "12D3", "preview_delta": 0.5}
    return json.dumps({"uploads": uploads, "pending": pending | extra}).encode()


_NAMES = ("config.json", "model.safetensors", "gradients.pt", "inner_optimizer.rank0001-of-1.pt")
_DONE = {
    **{"rank": 0, "world_size": 1},
    "files": [{"name": name, "size": 1, "not_finite": None} for name in _NAMES],
}
_KEPT = {"highest": 5, "clean": True, "validators": ["1.2.3.4"]}
_PEER = "12D3KooWHDMAeP3zKHrALtREoc2vfYQL7HhsMN7WBvft7hgBCRhK"
_METADATA = {"run": 5, "outer_step": 3, "inner_step": 5, "peer_id": "12D3"}
_CONFIG = {"block_list": [7, 8], "inner_step": 5, "hidden_size": 64}
_LINE = b'{"kind": "x", "at": 1.5}\n'
_NOTES = {"etag": "9a0364b9e99bb480dd25e1f0284c8555", "size": 7, "done": []}
_STATUS = {"status": 3, "reason": "deregistered", "instance": "x", "pid": 77}
_STANDINGS = {
    **{"entries": {}, "board": {}, "failed_rounds": 0, "successful_rounds": 1},
    "last_round_block": 5,
}

_ALIVE = {"peer_id": _PEER, "addresses": [f"/ip4/203.0.113.7/tcp/8009/p2p/{_PEER}"], "run_id": "r"}
_BOUNDS = {
    **{"timeout": (5.0, 1800.0), "min_group_size": (2.0, 256.0), "request_timeout": (1.0, 120.0)},
    **{"allreduce_timeout": (5.0, 1800.0), "next_chunk_timeout": (1.0, 300.0)},
    "min_matchmaking_time": (0.5, 300.0),
}
_REGISTRY = {
    **{"registry": f"net/{'0' * 8}/{'5' * 48}", "start": "ab", "version": 3, "block": 9},
    **{"time": 1.5, "seconds_per_block": 12.0, "full": True},
    "rows": [[3, {"uid": 3, "hotkey": "5F", "ip": "1.2.3.4", "port": 8091}, "x"], [4, None, None]],
}

#: Of strangers, of a crash, of a bad disk.
READERS: dict[str, Reader] = {
    "model": Reader("a.safetensors", check_file, honest_safetensors, ("IntegrityError",)),
    "drift": Reader("a.safetensors", _drift, honest_safetensors, ("NotComparable",)),
    "gradients": Reader("gradients.pt", check_file, honest_gradients, ("IntegrityError",)),
    "payload": Reader("gradients.pt", _payload, honest_gradients, ("PayloadError",)),
    "outer": Reader(
        "outer_optimizer.pt",
        lambda path: load_outer_optimizer(path, SCHEMA),
        honest_outer,
        ("ValueError",),
    ),
    "update": Reader("a.safetensors", _update, honest_update, ("ValueError",)),
    "config": Reader("config.json", read_config, _json(_CONFIG), ("IntegrityError",)),
    "metadata": Reader(
        "metadata.json",
        lambda path: Metadata.parse(path.read_bytes()),
        _json(_METADATA),
        ("MetadataError",),
    ),
    "done": Reader("rank-0.done.json", _done, _json(_DONE), ("IntegrityError",)),
    "journal": Reader("uploads.json", _journal, _honest_journal),
    "kept": Reader("kept.json", lambda path: KeptFile(path).load(), _json(_KEPT)),
    "lines": Reader("events.jsonl", _lines, lambda: _LINE * 9),
    "norms": Reader(
        "norms.json",
        lambda path: Judge(path, run_id="run").norms,
        _json({"run_id": "run", "norms": [1.5, 2]}),
    ),
    "peers": Reader(
        "peers.json",
        lambda path: AddressBook(path, "run").addresses(),
        _json({"prefix": "run", "addresses": [f"/ip4/1.2.3.4/tcp/8009/p2p/{_PEER}"]}),
    ),
    "instance": Reader("instance.json", _instance, _json(_STATUS)),
    "exit": Reader("exit_status.json", _instance, _json(_STATUS)),
    "registration": Reader(
        "registration.json", _registration, _json({"hotkey": "5F", "uid": 3, "waited": 9.5})
    ),
    "chain": Reader(
        "chain.json",
        lambda path: ChainState.load(path, chain=CHAIN, hotkey="5F"),
        _honest_chain_state,
    ),
    "claim": Reader("instance", _claim, _json({"instance": "me"}), ("ForeignBucketError",)),
    "notes": Reader(".a.part.json", _download_notes, _json(_NOTES)),
    "identity": Reader("identity.key", _identity, honest_identity),
    "held-back": Reader("held-back", lambda path: HeldOut(path).load(2), honest_held_out),
    "weights": Reader(
        "a.safetensors",
        lambda path: load_weights(path, SCHEMA),
        honest_safetensors,
        ("ValueError",),
    ),
    "commitment": Reader(
        "commitment.txt",
        lambda path: parse_commitment(path.read_text("utf-8", "replace")),
        lambda: b"a" * 128,
        ("CommitmentError",),
    ),
    "alive": Reader(
        "is_alive.json",
        lambda path: parse_is_alive_reply(_object(path)),
        _json({"completion": "True", "epoch": 3, **_ALIVE}),
        ("SynapseError",),
    ),
    "call": Reader(
        "all_reduce.json",
        lambda path: parse_all_reduce(_object(path), caller="5F", bounds=_BOUNDS),
        _json({**dict.fromkeys(_BOUNDS, 5.0), "peers": [_PEER], "addresses": _ALIVE["addresses"]}),
        ("SynapseError",),
    ),
    "registry": Reader(
        "state.json",
        _registry_state,
        _json(_REGISTRY),
        ("Unusable",),
    ),
    "frames": Reader("frames.bin", _frames, honest_frames, ("OSError",)),
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
    "standings": Reader("standings.json", Standings.load, _json(_STANDINGS), ("ValueError",)),
}

# --- bombs: small files that ask for much work ----------------------------------------------------


def bombs(reader: str) -> Iterator[tuple[str, bytes]]:
    kind = READERS[reader].name
    if kind.endswith(".safetensors"):
        yield from _safetensors_bombs()
    elif kind.endswith(".pt"):
        yield from _pt_bombs(READERS[reader].honest())
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


@functools.cache  # of three readers
def pickle_of(body: bytes, *, kind: int = zipfile.ZIP_STORED, copies: int = 1) -> bytes:
    """A ``.pt`` file with that pickle; ``copies`` of a storage of four bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + body + b".")
        archive.writestr("a/byteorder", "little")
        archive.writestr("a/version", "3\n")  # without it torch.load does not begin
        for number in range(copies):
            archive.writestr(f"a/data/{number}", bytes(4))
    return buffer.getvalue()


def with_pickle(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """Return the same ``.pt`` file with another pickle in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
        for member in old.infolist():
            content = old.read(member)
            pickled = member.filename.endswith("/data.pkl")
            new.writestr(member.filename, change(content) if pickled else content)
    return buffer.getvalue()


def global_of(name: str) -> bytes:
    return b"c" + name.replace(" ", "\n").encode() + b"\n"


def _int(value: int) -> bytes:
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)


def storage(count: int = 1) -> bytes:
    """Instructions that refer to a float32 storage."""
    where = b"(X\7\0\0\0storage" + global_of("torch FloatStorage") + b"X\1\0\0\x000X\3\0\0\0cpu"
    return where + _int(count) + b"tQ"


def tensor(count: int = 1, shape: tuple[int, ...] = (1,), stride: tuple[int, ...] = (1,)) -> bytes:
    """Instructions that make a float32 tensor over a storage of ``count`` elements."""
    rebuild = global_of("torch._utils _rebuild_tensor_v2") + b"(" + storage(count)
    sizes = b"".join(b"(" + b"".join(map(_int, numbers)) + b"t" for numbers in (shape, stride))
    return rebuild + _int(0) + sizes + b"\x89" + global_of("collections OrderedDict") + b")RtR"


def _pt_bombs(honest: bytes) -> Iterator[tuple[str, bytes]]:
    laughs = b"]q\0" + b"".join(
        b"](" + b"h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) for i in range(60)
    )
    for name, body in (
        ("far memo", b"}r\xff\xff\xff\x7f"),
        ("nested", b"(" * 400_000 + b"t" * 400_000),
        ("laughs", b"}X\x08\0\0\0metadata}X\5\0\0\0block" + laughs + b"ss"),
        ("one long shape", b"(" + b"K\1" * 150_000 + b"tq\1" + (b"h\1") * 300_000),
        ("colliding keys", b"}(" + b"".join(_int(i << 40) + b"N" for i in range(220_000)) + b"u"),
        ("keys that are tuples", b"}(" + b"K\1K\2\x86N" * 100_000 + b"u"),
        ("pairs again and again", b"](K\1K\2\x86" * 1000 + b"e" * 1000),
        ("many instructions", b"N0" * 2_000_000),
        ("one more mark", b"(" * 4_000_000),
        ("bytearray", global_of("builtins bytearray") + _int(10**12) + b"\x85R"),
        ("tensor of 400 GB", global_of("torch FloatTensor") + _int(10**11) + b"\x85R"),
        ("storage of 4 PB", b"}X\1\0\0\0a" + tensor(10**15, (10**15,)) + b"s"),
        ("beyond its storage", b"}X\1\0\0\0a" + tensor(1, (2**40, 2), (0, 1)) + b"s"),
        ("wide strides", b"}X\1\0\0\0a" + tensor(1, (2,), (2**60,)) + b"s"),
        ("many dimensions", b"}X\1\0\0\0a" + tensor(1, (1,) * 20_000, (1,) * 20_000) + b"s"),
        ("one element 4 TB wide", b"}X\1\0\0\0a" + tensor(1, (2**40,), (0,)) + b"s"),
        (
            "one tuple for many calls",
            global_of("collections OrderedDict")
            + b"q\2("
            + b"N" * 400_000
            + b"tq\1"
            + b"h\2h\1R0" * 80_000,
        ),
        ("code", global_of("os system") + b"X\4\0\0\0true\x85R"),
        ("long bytes", b"\x8e" + b"\xff" * 7 + b"\x7f"),
    ):
        yield name, pickle_of(body)
    yield "deflated", pickle_of(b"N" + b"0N" * 10_000_000, kind=zipfile.ZIP_DEFLATED)
    yield "many members", pickle_of(b"N", copies=90_000)
    plain = pickle_of(b"}X\1\0\0\0a" + tensor() + b"s")
    end = len(plain) - 22
    (place,) = struct.unpack("<I", plain[end + 16 : end + 20])
    yield "one member a thousand times", _with_table(plain[:place], plain[place:end] * 1000, place)
    for size in (2**32 - 2, 2**31, 8 * MEBI):
        yield f"table of {size}", plain[: end + 12] + struct.pack("<I", size) + plain[end + 16 :]
    for size in (2**62, 16 * MEBI):
        record = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, size, place)
        locator = struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
        yield f"large table of {size}", plain[:end] + record + locator + plain[end:]
    yield "two in one", honest + plain
    yield "nothing but an end", plain[end:]


def _with_table(data: bytes, table: bytes, place: int) -> bytes:
    count = min(65535, table.count(b"PK\1\2"))
    return (
        data + table + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, len(table), place, 0)
    )


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
    for name in names:  # all imports come before the limits
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
