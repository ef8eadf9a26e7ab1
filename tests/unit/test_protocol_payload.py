"""gradients.pt: others can read our files, and outsiders' files are checked."""

from __future__ import annotations

import io
import itertools
import pickle
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed_training.protocol import gradients as codec
from distributed_training.protocol.gradients import (
    GradientMetadata,
    PayloadError,
    load_payload,
    max_payload_bytes,
)
from distributed_training.protocol.pt_file import PtFileError, read_pt, refuse_calls
from tests.tools.gradient_file import build_payload
from tests.tools.hostile_files import global_of, pickle_of, storage, tensor, with_pickle

pytestmark = pytest.mark.timeout(60)
SCHEMA = [("model.a.weight", (64, 96)), ("model.norm.weight", (128,))]
META = GradientMetadata(block=7, inner_step=50, outer_step=3, loss=2.5)


def _codes() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return {n: codec.encode(torch.randn(s, generator=generator)) for n, s in SCHEMA}


def _bytes(payload: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(payload, buffer)
    return buffer.getvalue()


def test_round_trip(tmp_path: Path) -> None:
    codes = _codes()
    torch.save(build_payload(codes, META), tmp_path / "gradients.pt")
    loaded = load_payload(tmp_path / "gradients.pt", SCHEMA)
    assert loaded.metadata == META
    for name, shape in SCHEMA:
        assert torch.equal(loaded.decode(name, shape), codec.decode(*codes[name], shape))
    raw = torch.load(tmp_path / "gradients.pt", weights_only=True)
    assert raw["metadata"] == {"block": 7, "inner_step": 50, "outer_step": 3, "loss": 2.5}
    assert set(raw) == {"metadata"} | {n + s for n, _ in SCHEMA for s in ("idxs", "vals")}
    assert (tmp_path / "gradients.pt").stat().st_size <= max_payload_bytes(SCHEMA)


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda p: p.pop("metadata"), "no metadata"),
        (lambda p: p.update(metadata={"block": 1}), "inner_step"),
        (lambda p: p["metadata"].update(block=-1), "block"),
        (lambda p: p["metadata"].update(loss="low"), "loss"),
        (lambda p: p["metadata"].update(loss=10**400), "loss"),
        (lambda p: p.pop("model.a.weightvals"), "not all dense"),
        (lambda p: p["model.a.weightvals"].fill_(float("nan")), "NaN"),
        (lambda p: p["model.a.weightvals"].view(-1)[5].fill_(float("inf")), "NaN or Inf"),
        (lambda p: p["model.a.weightidxs"].fill_(96), "outside"),
        (lambda p: p.update({"model.a.weightvals": torch.zeros(1, 64, 33)}), "shape"),
        (lambda p: p.update({"model.a.weightvals": [1.0]}), "not all dense"),
    ],
)
def test_bad_payloads_name_their_fault(change: Any, reason: str) -> None:
    payload = build_payload(_codes(), META)
    change(payload)
    with pytest.raises(PayloadError, match=reason):
        load_payload(_bytes(payload), SCHEMA)


def test_missing_parameters_and_unknown_entries_are_tolerated() -> None:
    payload = build_payload({SCHEMA[0][0]: _codes()[SCHEMA[0][0]]}, META)
    payload["other"] = torch.zeros(3)
    loaded = load_payload(_bytes(payload), SCHEMA)
    assert loaded.decode("model.norm.weight", (128,)) is None
    assert list(loaded.codes) == ["model.a.weight"]


def test_a_parameter_in_place_of_a_tensor_is_a_tensor() -> None:
    """Autograd would record each use of it, and a validator's memory grow with each pass."""
    payload = build_payload(_codes(), META)
    name = SCHEMA[0][0]
    payload[f"{name}vals"] = torch.nn.Parameter(payload[f"{name}vals"])
    decoded = load_payload(_bytes(payload), SCHEMA).decode(*SCHEMA[0])
    assert decoded is not None and not decoded.requires_grad


def test_a_file_is_read_without_torch() -> None:
    content = {"a": [1, 2, "b", [3]], "c": {"d": None, 5: (1.5, True)}, "e": []}
    assert read_pt(io.BytesIO(_bytes(content))).content == content


def test_tensors_that_share_bytes_of_the_file_are_refused() -> None:
    """A small file could hold any number of them."""
    data = bytearray(_bytes({"a": torch.zeros(64), "b": torch.ones(64)}))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        first, second = (archive.getinfo(f"archive/data/{n}") for n in "01")
    place = data.rindex(second.filename.encode()) - 4  # of its offset, in the table of contents
    data[place : place + 4] = struct.pack("<I", first.header_offset)
    with pytest.raises(PtFileError, match="lie apart"):
        read_pt(io.BytesIO(data))


class _Evil:
    def __reduce__(self) -> Any:
        return print, ("executed",)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04 no archive",
        pickle.dumps({"metadata": 1}),
        _bytes({"metadata": asdict(META)})[:-100],
        _bytes([1, 2]),
        _bytes({"metadata": _Evil()}),
    ],
    ids=["empty", "garbage", "pickle", "cut", "list", "code"],
)
def test_unreadable_files(data: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PayloadError):
        load_payload(data, SCHEMA)
    assert "executed" not in capsys.readouterr().out


def _archive(pickles: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in {**pickles, "a/version": b"3\n", "a/byteorder": b"little"}.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def _older(content: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


UNSEEN = pickle.dumps({"metadata": asdict(META)}, protocol=2)
LOOKED_AT = pickle.dumps({}, protocol=2).ljust(len(UNSEEN), b".")


@pytest.mark.parametrize(
    "data",
    [
        _older({"metadata": asdict(META)}) + _archive({"a/data.pkl": LOOKED_AT}),
        _archive({"a/DATA.PKL": UNSEEN, "a/b/data.pkl": LOOKED_AT}),
        _archive({"a/data.pkl": UNSEEN}) + _archive({"a/data.pkl": LOOKED_AT}),
    ],
    ids=["older format before it", "name in capitals", "another table of contents"],
)
def test_torch_loads_no_other_pickle_than_was_looked_at(data: bytes) -> None:
    """Such a pickle of a hundred bytes could ask for all memory."""
    with pytest.raises(PayloadError, match="cannot be read"):
        load_payload(data, SCHEMA)


_VALUES = {
    "nothing": b"N",
    "text": b"X\3\0\0\0cpu",
    "number": b"K\0",
    "below zero": b"J\xff\xff\xff\xff",
    "truth": b"\x88",
    "list": b"]",
    "dictionary": b"}",
    "tuple": b")",
    "sizes": b"K\1K\1\x86",
    "texts": b"X\1\0\0\0x\x85",
    "hooks": global_of("collections OrderedDict") + b")R",
    "function": global_of("torch device"),
    "storage": storage(),
    "tensor": tensor(),
}
_AS_WRITTEN = {
    "collections OrderedDict": [],
    "torch Size": ["sizes"],
    "torch device": ["text"],
    "torch._utils _rebuild_parameter": ["tensor", "truth", "hooks"],
    "torch._utils _rebuild_tensor_v2": ["storage", "number", "sizes", "sizes", "truth", "hooks"],
}


def _calls() -> Iterator[tuple[str, list[str]]]:
    """Yield each call as torch.save writes it, and with arguments less, more, or other ones."""
    for call, written in _AS_WRITTEN.items():
        for place, value in itertools.product(range(len(written) + 1), _VALUES):
            yield call, [*written[:place], value, *written[place:]]
            yield call, [*written[:place], value, *written[place + 1 :]]
            yield call, written[:place]


def test_torch_loads_every_call_that_is_read() -> None:
    """Other arguments give errors of any type, or features, of torch."""
    read = set()
    for call, values in _calls():
        body = global_of(call) + b"(" + b"".join(_VALUES[value] for value in values) + b"tR"
        data = pickle_of(b"}X\1\0\0\0a" + body + b"s")
        try:
            refuse_calls(read_pt(io.BytesIO(data)))
        except PtFileError:
            continue
        torch.load(io.BytesIO(data), weights_only=True)
        read.add((call, len(values)))
    counts = {(call, len(written)) for call, written in _AS_WRITTEN.items()}
    assert read == counts | {("torch device", 2)}  # with an index


@pytest.mark.parametrize(
    "body",
    [
        global_of("torch Size") + b"K\1\x85\x85\x81",
        tensor() + storage() + b"K\0K\1\x85K\1\x85tb",
        tensor() + b"}b",
        global_of("collections OrderedDict") + b")RK\1b",
        tensor() + b"K\0K\1s",
        tensor() + b"K\1a",
    ],
    ids=["made again", "set to a storage", "attributes", "attribute 1", "an item", "one more"],
)
def test_nothing_is_done_to_a_tensor_that_torch_does_not_write(body: bytes) -> None:
    with pytest.raises(PtFileError):
        read_pt(io.BytesIO(pickle_of(b"}X\1\0\0\0a" + body + b"s")))


@pytest.mark.parametrize(
    "error",
    [
        *(AssertionError(), MemoryError(), RecursionError("depth"), OverflowError("large")),
        *(struct.error("short"), zipfile.BadZipFile("bad"), NotImplementedError("packed")),
        *(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "start"), OSError(22, "odd"), KeyError(5)),
        *(pickle.UnpicklingError("no"), RuntimeError("two\nlines"), SystemError("NULL")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_of_any_library_is_reported_as_the_files_fault(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(torch, "load", failing)
    with pytest.raises(PayloadError, match=r"^gradients\.pt cannot be read: .*$") as found:
        load_payload(_bytes(build_payload(_codes(), META)), SCHEMA)
    assert "\n" not in str(found.value)


def test_only_torch_saves_own_protocol_is_read() -> None:
    data = with_pickle(_bytes({"a": 1}), lambda body: b"\x80\4" + body[2:])
    with pytest.raises(PtFileError, match="protocol 2"):
        read_pt(io.BytesIO(data))


_SHAPE = codec.encoded_shape(SCHEMA[0][1])
_OTHER_KINDS: dict[str, tuple[str, Callable[[], Any]]] = {
    "sparse": ("vals", lambda: torch.zeros(_SHAPE).to_sparse()),
    "compressed rows": ("vals", lambda: torch.zeros(64, 64).to_sparse_csr()),
    "quantized": (
        "vals",
        lambda: torch.quantize_per_tensor(torch.zeros(_SHAPE), 1.0, 0, torch.qint8),
    ),
    "complex": ("vals", lambda: torch.zeros(_SHAPE, dtype=torch.complex64)),
    "half": ("vals", lambda: torch.zeros(_SHAPE, dtype=torch.bfloat16)),
    "double": ("vals", lambda: torch.zeros(_SHAPE, dtype=torch.float64)),
    "eight bits": ("vals", lambda: torch.zeros(_SHAPE).to(torch.float8_e4m3fn)),
    "truths": ("idxs", lambda: torch.zeros(_SHAPE, dtype=torch.bool)),
    "floats": ("idxs", lambda: torch.zeros(_SHAPE)),
    "negative": ("idxs", lambda: torch.full(_SHAPE, -1, dtype=torch.int16)),
    "beyond": ("idxs", lambda: torch.full(_SHAPE, 2**62, dtype=torch.int64)),
    "conjugate": ("vals", lambda: torch.zeros(_SHAPE, dtype=torch.complex64).conj()),
    "imaginary": ("vals", lambda: torch.ones(_SHAPE, dtype=torch.complex64).conj().imag),
    "meta": ("vals", lambda: torch.empty(_SHAPE, device="meta")),
    "nested": ("vals", lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])),
    "one element, many times": ("vals", lambda: torch.zeros(1).expand(2**40)),
    "a number": ("vals", lambda: 5.0),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", _OTHER_KINDS)
def test_tensors_of_another_kind_are_refused(kind: str) -> None:
    which, made = _OTHER_KINDS[kind]
    payload = build_payload(_codes(), META)
    payload[SCHEMA[0][0] + which] = made()
    with pytest.raises(PayloadError):
        load_payload(_bytes(payload), SCHEMA)


def test_tensors_that_overlap_and_many_that_are_tiny_cost_little() -> None:
    payload = build_payload(_codes(), META)
    name, shape = SCHEMA[0]
    payload[f"{name}vals"] = torch.ones(1).expand(_SHAPE)
    payload[f"{name}idxs"] = torch.zeros(1, dtype=torch.int16).expand(_SHAPE)
    tiny = torch.zeros(1)
    payload["more"] = [tiny[:1] for _ in range(300)]  # each is a call, all of one storage
    began = time.process_time()
    decoded = load_payload(_bytes(payload), SCHEMA).decode(name, shape)
    assert decoded is not None and bool(torch.isfinite(decoded).all())
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("at", "bit", "said"),
    [(8, 1, "encrypted"), (38, 0x10, "a folder")],  # of its flags, of its attributes
)
def test_a_member_of_which_torch_reads_other_bytes_is_refused(at: int, bit: int, said: str) -> None:
    """torch reads none of a folder: the tensor would be the memory's earlier content."""
    data = bytearray(_bytes(build_payload(_codes(), META)))
    entry = data.rindex(b"PK\1\2", 0, data.rindex(b"/data/0"))
    data[entry + at] |= bit
    with pytest.raises(PayloadError, match=said):
        load_payload(bytes(data), SCHEMA)


def test_a_store_that_fails_is_no_damaged_file() -> None:
    class Stopping(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() == 0 and size != 4:  # the first member's head
                raise RuntimeError("stopped on request")
            return super().read(size)

    with pytest.raises(RuntimeError, match=r"^stopped on request"):
        read_pt(Stopping(_archive({"a/data.pkl": LOOKED_AT})))


def test_size_is_bounded_packed_and_unpacked(tmp_path: Path) -> None:
    payload = build_payload(_codes(), META)
    payload["filler"] = torch.zeros(max_payload_bytes(SCHEMA))
    data = _bytes(payload)
    with pytest.raises(PayloadError, match="bytes"):
        load_payload(data, SCHEMA)
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as source,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    assert len(packed.getvalue()) < max_payload_bytes(SCHEMA)
    with pytest.raises(PayloadError, match="unpacks"):
        load_payload(packed.getvalue(), SCHEMA)
