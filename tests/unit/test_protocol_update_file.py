"""Test that uploads and updates that we write are read, and that all other files are refused."""

from __future__ import annotations

import hashlib
import json
import os
import random
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bittensor.sp_core import Keypair
from bittensor_core import verify
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from distributed_training.common.files import sha256_of
from distributed_training.protocol.codecs import CODECS, GROUP
from distributed_training.protocol.types import OWN_CODECS
from distributed_training.protocol.update_file import (
    Header,
    UpdateFile,
    UpdateLayout,
    digest_rows,
    digest_weights,
    finish,
    largest_file,
    rows_and_columns,
    write_rows,
)
from tests.tools import update_file_decoder
from tests.tools.measured import open_below

pytestmark = pytest.mark.timeout(120)

VECTORS = Path(__file__).parents[1] / "vectors"
GOLDEN = json.loads((VECTORS / "update_file.json").read_text())
TINY, MAX = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
#: Whole groups, shorter ones, a row of many groups, a vector, a scalar, more dimensions.
SCHEMA = [("a", (3, 300)), ("b.weight", (2, 512)), ("c", (257,)), ("d", ()), ("é", (2, 1, 3))]
ALICE = Keypair.create_from_uri("//Alice")
Schema = list[tuple[str, tuple[int, ...]]]


def header(**given: Any) -> Header:
    known: dict[str, Any] = {
        **{"kind": "upload", "run_id": "0123456789ab", "outer_step": 7, "serial": 3},
        **{"hotkey": ALICE.ss58_address, "start": "ab" * 32, "codec": "4-bit", "inner_steps": 30},
        **{"tokens": 9000, "pages": (11, 12)},
    }
    return Header(**{**known, **given})


def drawn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Return values that are equal on all processors: cubes of whole numbers, from 1e-9 to 1."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-1000, 1001, (1, *shape), generator=generator)[0]
    return numbers.float().pow(3) / 1e9


def rows_of(values: Tensor) -> Tensor:
    return values.reshape(rows_and_columns(values.shape))


def write(path: Path, schema: Schema, head: Header, values: dict[str, Tensor]) -> str:
    layout = UpdateLayout.of(schema, head)
    for index, (name, _) in enumerate(schema):
        write_rows(path, layout, index, 0, rows_of(values[name]))
    finish(path, layout, ALICE.sign)
    return sha256_of(path)


def opened(path: Path, schema: Schema = SCHEMA, **given: Any) -> UpdateFile:
    known: dict[str, Any] = {
        **{"run_id": "0123456789ab", "kind": "upload", "hotkey": ALICE.ss58_address},
        "verify": verify,
    }
    return UpdateFile.open(path, schema, **{**known, **given})


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "upload.safetensors"
    write(path, SCHEMA, header(codec="3-bit"), {name: drawn(shape) for name, shape in SCHEMA})
    return path


@pytest.mark.parametrize("r", [8, 16])
def test_adapters_cost_half_a_byte_for_each_value(r: int, tmp_path: Path) -> None:
    """The same holds for a file with only B, since its narrow rows do not each have a scale."""
    both = [("lora_A", (r, 512)), ("lora_B", (1376, r))]
    for schema in (both, both[1:]):
        path, values = tmp_path / str(len(schema)), {name: drawn(shape) for name, shape in schema}
        write(path, schema, header(), values)
        layout = UpdateLayout.of(schema, header())
        assert layout.body_bytes <= 0.6 * sum(each.numel() for each in values.values())
        agree(file := opened(path, schema), schema, path.read_bytes())
        for name, shape in schema:
            lost = file.decode(name, shape) - values[name]
            assert float(lost.abs().max()) <= 1.0001 * float(values[name].abs().max()) / 14


# --- vectors and the second decoder ---------------------------------------------------------------


def golden_digests() -> dict[str, str]:
    """Encode the vectors' values, and return the digest of each body by bits."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for bits in OWN_CODECS.values():
            path = Path(folder) / str(bits)
            write(
                path, SCHEMA, header(codec=f"{bits}-bit"), {n: drawn(s, len(n)) for n, s in SCHEMA}
            )
            layout = UpdateLayout.of(SCHEMA, header(codec=f"{bits}-bit"))
            found[str(bits)] = hashlib.sha256(path.read_bytes()[layout.body :]).hexdigest()
    return found


@pytest.mark.parametrize("bits", OWN_CODECS.values())
def test_golden_files_are_read_to_the_bit(bits: int) -> None:
    path = VECTORS / f"update-{bits}bit.safetensors"
    file, golden = opened(path, codec=f"{bits}-bit"), GOLDEN[str(bits)]
    assert file.digest == golden["digest"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert file.header == header(codec=f"{bits}-bit")
    for name, shape in SCHEMA:
        values = file.decode(name, shape)
        assert values.shape == shape
        assert hashlib.sha256(values.numpy().tobytes()).hexdigest() == golden["values"][name], name
    assert golden_digests()[str(bits)] == golden["body"]
    agree(file, SCHEMA, path.read_bytes())


@pytest.mark.parametrize("bits", [3, 2])
def test_scales_are_rounded_once_at_each_operation(bits: int) -> None:
    """On a CPU with MKL, torch's own root may be wrong in its last bit, but not on a GPU."""
    # Halves of equal values: the first addition rounds, those after it double.
    halves = drawn((5000, 2), seed=3)
    scales, _ = CODECS[f"{bits}-bit"].encode_rows(halves.repeat_interleave(128, 1))
    root = np.sqrt(np.square(halves.numpy()).sum(1, keepdims=True) / 2)
    assert np.array_equal(scales.numpy(), root * np.float32({3: 0.31, 2: 0.52}[bits]))


def agree(file: UpdateFile, schema: Schema, data: bytes) -> None:
    columns = {name: rows_and_columns(shape)[1] for name, shape in schema}
    second = update_file_decoder.decode(data, columns)
    assert second.digest == file.digest
    assert verify(second.message, second.signature, second.header["hotkey"])
    for name, shape in schema:
        ours = rows_of(file.decode(name, shape)).numpy()
        assert np.array_equal(ours.view(np.uint32), second.values[name].view(np.uint32)), name


# --- what is written is read ----------------------------------------------------------------------

shapes = st.one_of(
    st.just(()),
    st.tuples(st.integers(1, 700)),
    st.tuples(st.integers(1, 9), st.integers(1, 600)),
    st.tuples(st.integers(1, 4), st.integers(1, 20), st.integers(1, 20)),
)
schemas = st.lists(shapes, min_size=1, max_size=4).map(
    lambda s: [(f"{i}", x) for i, x in enumerate(s)]
)


@given(
    schemas,
    st.sampled_from([*OWN_CODECS.values()]),
    st.integers(1, 5),
    st.integers(0, 2**32),
    st.data(),
)
def test_several_ranks_write_the_file_of_one(
    schema: Schema, bits: int, ranks: int, seed: int, data: st.DataObject
) -> None:
    values = {name: drawn(shape, seed + n) for n, (name, shape) in enumerate(schema)}
    head = header(codec=f"{bits}-bit", pages=tuple(range(data.draw(st.integers(0, 30)))))
    layout = UpdateLayout.of(schema, head)
    parts: list[tuple[int, int, Tensor]] = []
    for index, (name, _) in enumerate(schema):
        whole = rows_of(values[name])
        cuts = sorted(data.draw(st.integers(0, len(whole))) for _ in range(ranks - 1))
        for first, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            parts.append((index, first, whole[first:stop]))
    random.Random(seed).shuffle(parts)
    with tempfile.TemporaryDirectory() as folder:
        one, several = Path(folder, "one"), Path(folder, "several")
        digest = write(one, schema, head, values)
        # The bytes of an earlier file at this path are replaced.
        several.write_bytes(b"x" * data.draw(st.integers(0, 2 * layout.size)))
        with ThreadPoolExecutor(ranks) as pool:
            list(pool.map(lambda part: write_rows(several, layout, *part), parts))
        finish(several, layout, ALICE.sign)
        file = opened(several, schema)
        agree(file, schema, several.read_bytes())
        # The files differ in their signatures, since sr25519 signatures have a random part.
        assert one.read_bytes()[layout.body :] == several.read_bytes()[layout.body :]
        assert one.stat().st_size == several.stat().st_size == layout.size
        assert layout.size <= largest_file(schema, f"{bits}-bit")
        assert opened(one, schema).digest == digest
        for index, (name, shape) in enumerate(schema):
            whole = file.decode(name, shape)
            for which, at, rows in parts:
                if which == index:
                    read = file.rows(index, at, at + len(rows))
                    assert torch.equal(read, rows_of(whole)[at : at + len(rows)])


# Values whose magnitudes are far apart within a group, zeros of both signs and subnormals.
numbers = st.one_of(
    st.sampled_from([0.0, -0.0, 1e-45, -TINY, 7 * TINY, 1.0, -7.0, 0.5, 1e17, -1e17]),
    st.floats(-(2.0**60), 2.0**60, width=32),
)


@given(st.lists(numbers, min_size=1, max_size=600), st.sampled_from([*OWN_CODECS.values()]))
def test_a_value_is_off_by_at_most_a_scale_or_beyond_the_largest_number(
    some: list[float], bits: int
) -> None:
    rows = torch.tensor([some, some[::-1]])
    codec = CODECS[f"{bits}-bit"]
    scales, codes = codec.encode_rows(rows)
    out = torch.empty_like(rows)
    codec.decode_rows(scales, codes, out)
    assert not scales.signbit().any()  # no -0.0, so that one movement gives one file
    for group, scale, found in zip(
        rows[0].split(GROUP), scales[0].tolist(), out[0].split(GROUP), strict=True
    ):
        if not scale:
            assert not found.any()
            continue
        largest = {4: 7, 3: 7, 2: 3}[bits] * scale
        inside = group.double().clamp(-largest * (1 + 1e-6), largest * (1 + 1e-6))
        off = (found.double() - inside).abs().max()
        assert float(off) <= (0.500001 if bits == 4 else 1.00001) * scale


@pytest.mark.parametrize(("bits", "most"), [(4, 0.017), (3, 0.041), (2, 0.121)])
def test_error_of_quantized_normal_values(bits: int, most: float) -> None:
    """The best scale for normal values loses 0.118 with 2 bits, and 0.037 with 3."""
    rows = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1))
    out = torch.empty_like(rows)
    codec = CODECS[f"{bits}-bit"]
    codec.decode_rows(*codec.encode_rows(rows), out)
    assert float((out - rows).square().mean() / rows.square().mean()) < most


def test_safetensors_opens_the_file(sound: Path) -> None:
    with safe_open(sound, "pt") as file:
        assert set(file.keys()) == {f"{n}.{e}" for n, _ in SCHEMA for e in ("scales", "codes")}
        assert json.loads(file.metadata()["header"])["kind"] == "upload"
        assert file.get_tensor("a.scales").shape == (3, 2)
        assert file.get_tensor("a.codes").dtype == torch.uint8


def test_an_open_file_holds_no_descriptor(sound: Path) -> None:
    files = [opened(sound), UpdateFile.reopen(sound, SCHEMA)]
    assert not open_below(sound.parent)
    assert files[0].digest == files[1].digest


def test_a_file_takes_the_bytes_that_its_bits_promise() -> None:
    schema = [("w", (4096, 2048))]
    values = 4096 * 2048
    for bits, most in ((4, 0.516), (3, 0.391), (2, 0.266)):
        size = largest_file(schema, f"{bits}-bit") - 256 * 1024  # of a header with 10,000 blocks
        assert size < UpdateLayout.of(schema, header(codec=f"{bits}-bit")).size < most * values


@given(st.integers(1, 40), st.integers(1, 20), st.integers(0, 40))
def test_ranks_digest_their_own_rows(rows: int, columns: int, cut: int) -> None:
    weights = drawn((rows, columns))
    joined = digest_rows(weights[:cut]) + digest_rows(weights[cut:])
    assert joined == digest_rows(weights) and len(joined) == 32 * rows
    by_hand = b"".join(hashlib.sha256(row.numpy().tobytes()).digest() for row in weights)
    assert digest_weights([joined, b""]) == hashlib.sha256(by_hand).hexdigest()


# --- what cannot be written -----------------------------------------------------------------------


@pytest.mark.parametrize("bits", OWN_CODECS.values())
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), MAX])
def test_values_that_are_not_finite_are_not_written(
    tmp_path: Path, bits: int, value: float
) -> None:
    rows = drawn((3, 300))
    rows[1, 299] = value
    with pytest.raises(ValueError, match="a: values that are not finite"):
        write_rows(tmp_path / "x", UpdateLayout.of(SCHEMA, header(codec=f"{bits}-bit")), 0, 0, rows)
    assert not (tmp_path / "x").exists()


def test_a_file_without_its_rows_or_its_head_is_refused(tmp_path: Path) -> None:
    layout, path = UpdateLayout.of(SCHEMA, header()), tmp_path / "x"
    for index, (_, shape) in enumerate(SCHEMA[:-1]):
        write_rows(path, layout, index, 0, rows_of(drawn(shape)))
    with pytest.raises(ValueError, match="rows are missing"):
        finish(path, layout, ALICE.sign)
    write_rows(path, layout, len(SCHEMA) - 1, 0, rows_of(drawn(SCHEMA[-1][1])))
    with pytest.raises(ValueError, match="length of its header is impossible"):
        opened(path)
    with pytest.raises(ValueError, match="signature of 3 bytes"):
        finish(path, layout, lambda message: b"abc")
    with pytest.raises(ValueError, match="none of a"):
        write_rows(path, layout, 0, 1, drawn((3, 300)))
    with pytest.raises(ValueError, match="none of a"):
        write_rows(path, layout, 0, 0, drawn((3, 299)))
    finish(path, layout, ALICE.sign)
    with pytest.raises(ValueError, match="has 3 rows, not 2 to 4"):
        opened(path).rows(0, 2, 4)


# --- hostile files --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"run_id": "ba9876543210"}, "its run is 0123456789ab, not ba9876543210"),
        ({"kind": "update"}, "its kind is upload, not update"),
        ({"hotkey": Keypair.create_from_uri("//Bob").ss58_address}, "its hotkey is 5Grwva.*, not"),
        ({"codec": "4-bit"}, "its codec is 3-bit, not 4-bit"),
        ({"verify": lambda *_: False}, "its signature is not by 5Grwva"),
    ],
)
def test_a_file_of_another_is_refused(sound: Path, given: dict[str, Any], cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        opened(sound, **given)


@pytest.mark.parametrize(
    "schema",
    [
        SCHEMA[:-1],
        [*SCHEMA, ("f", (1,))],
        [("a", (3, 305)), *SCHEMA[1:]],
        [("A", (3, 300)), *SCHEMA[1:]],
        [SCHEMA[1], SCHEMA[0], *SCHEMA[2:]],
        [("a", (300, 3)), *SCHEMA[1:]],
    ],
)
def test_a_file_of_another_model_is_refused(sound: Path, schema: Schema) -> None:
    with pytest.raises(ValueError, match="not that of this model's tensors in canonical JSON"):
        opened(sound, schema)


def altered(sound: Path, path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Write the file with another table, signed again by its owner, and the same body."""
    data = sound.read_bytes()
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    change(table)
    metadata = table.get("__metadata__")

    def head() -> bytes:
        text = json.dumps(table, sort_keys=True, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    before = json.loads(data[8 : 8 + length])["__metadata__"]
    if isinstance(metadata, dict) and metadata.get("signature") == before["signature"]:
        metadata["signature"] = "0" * 128
        digest = hashlib.sha256(head()).hexdigest().encode()
        metadata["signature"] = ALICE.sign(b"update-file 1 " + digest).hex()
    path.write_bytes(head() + data[8 + length :])
    return path


def test_a_table_that_is_signed_again_is_read(sound: Path, tmp_path: Path) -> None:
    assert opened(altered(sound, tmp_path / "x", lambda table: None)).header == header(
        codec="3-bit"
    )


FIELDS: list[tuple[str, list[Any], str]] = [
    ("kind", ["average", "", None, 1, ["upload"]], "kind"),
    ("run_id", ["", "a b", "x" * 65, 'a"b', "é", None, 5], "run_id"),
    ("outer_step", [-1, 2**53, 1.0, True, "7", None, 1e300], "number"),
    ("serial", [-1, 2**53, 3.0, False, [], None], "number"),
    ("hotkey", ["", "x" * 65, None, {}, "a\n"], "hotkey"),
    ("start", ["", "AB" * 32, "ab" * 31, "ab" * 33, None, 0], "start"),
    ("bits", [0, 1, 5, 8, -4, 3.0, True, None, [3]], "codec"),
    ("bits", [2, "3"], "canonical"),
    ("codec", ["3-bit", "toy", None, []], "canonical"),
    ("inner_steps", [-1, 2**53, 0.5, None], "number"),
    ("tokens", [-1, 2**64, 0.5, "x"], "number"),
    ("blocks", [[-1], [2**53], [1.0], [None], [[]], list(range(10_001))], "number|pages"),
    ("blocks", [None, 5, {}, "12"], "cannot be read"),
]


@pytest.mark.parametrize(
    ("name", "value", "cause"), [(name, v, cause) for name, values, cause in FIELDS for v in values]
)
def test_each_field_of_a_header_is_checked(
    sound: Path, tmp_path: Path, name: str, value: Any, cause: str
) -> None:
    def change(table: dict[str, Any]) -> None:
        said = json.loads(table["__metadata__"]["header"])
        said[name] = value
        table["__metadata__"]["header"] = json.dumps(said, sort_keys=True, separators=(",", ":"))

    with pytest.raises(ValueError, match=cause) as refused:
        opened(altered(sound, tmp_path / "x", change))
    assert len(str(refused.value)) < 200 and "\n" not in str(refused.value)


def said(text: str) -> Callable[[dict[str, Any]], None]:
    return lambda table: table["__metadata__"].update(header=text)


# The product's codecs are written as a number of bits, as in files of earlier editions.
FIELDS_WRITTEN = {"bits": 3, **header().__dict__}
del FIELDS_WRITTEN["codec"]
PLAIN = json.dumps(FIELDS_WRITTEN, sort_keys=True, separators=(",", ":"))
TABLES: dict[str, Callable[[dict[str, Any]], None]] = {
    "no metadata": lambda table: table.pop("__metadata__") and None,
    "metadata of another type": lambda table: table.update(__metadata__=[]),
    "no body": lambda table: table["__metadata__"].pop("body") and None,
    "a short digest": lambda table: table["__metadata__"].update(body="ab"),
    "an odd digest": lambda table: table["__metadata__"].update(body="AB" * 32),
    "a short signature": lambda table: table["__metadata__"].update(signature="00"),
    "an odd signature": lambda table: table["__metadata__"].update(signature="0x" + "0" * 126),
    "more metadata": lambda table: table["__metadata__"].update(more="x"),
    "one more tensor": lambda table: table.update(
        more={"data_offsets": [0, 4], "dtype": "F32", "shape": [1]}
    ),
    "one tensor less": lambda table: table.pop("d.codes") and None,
    "terabytes": lambda table: table["a.codes"].update(shape=[2**40, 2**10]),
    "another place": lambda table: table["a.scales"].update(data_offsets=[4, 28]),
    "a header that is no JSON": said("{"),
    "a header of one word": said("null"),
    "a header that is deep": said("[" * 5000),
    "a header with white space": said(PLAIN.replace(",", ", ")),
    "a header with a name twice": said('{"bits":4,' + PLAIN[1:]),
    "a header with one more name": said('{"a":1,' + PLAIN[1:]),
    "a header with one name less": said(PLAIN.replace('"serial":3,', "")),
    "a header in another order": said(json.dumps(FIELDS_WRITTEN, separators=(",", ":"))),
    "another number of the same value": said(PLAIN.replace('"tokens":9000', '"tokens":9e3')),
}


@pytest.mark.parametrize("change", TABLES.values(), ids=TABLES)
def test_another_table_is_refused(
    sound: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    with pytest.raises(ValueError, match="header") as refused:
        opened(altered(sound, tmp_path / "x", change))
    assert len(str(refused.value)) < 200 and "\n" not in str(refused.value)


def test_json_that_is_not_canonical_is_refused(sound: Path, tmp_path: Path) -> None:
    data = sound.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text, body, path = data[8 : 8 + length].rstrip(), data[8 + length :], tmp_path / "x"
    for other in (
        json.dumps(json.loads(text), sort_keys=True).encode(),
        json.dumps(json.loads(text), separators=(",", ":"))[::-1].encode()[::-1] + b" " * 8,
        b" " + text,
        text + b"\n",
        text + b" " * 1024,
        text.replace(b"\\u00e9", "é".encode()),
        text[:-1] + b',"d.codes":' + json.dumps(json.loads(text)["d.codes"]).encode() + b"}",
    ):
        other += b" " * (-len(other) % 8)
        path.write_bytes(len(other).to_bytes(8, "little") + other + body)
        with pytest.raises(ValueError, match="header"):
            opened(path)


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_an_impossible_length_is_refused(sound: Path, tmp_path: Path, length: int) -> None:
    path = tmp_path / "x"
    path.write_bytes(length.to_bytes(8, "little") + sound.read_bytes()[8:])
    with pytest.raises(ValueError, match="length of its header"):
        opened(path)


def test_a_cut_or_longer_file_is_refused(sound: Path, tmp_path: Path) -> None:
    data, path = sound.read_bytes(), tmp_path / "x"
    for size in (*range(0, len(data), 7), len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"header|bytes instead of"):
            opened(path)
    for more in (1, 8, 4096):
        path.write_bytes(data + bytes(more))
        with pytest.raises(ValueError, match="bytes instead of"):
            opened(path)
    os.truncate(path, 2**42)  # a sparse file of terabytes behind a header costs nothing
    with pytest.raises(ValueError, match="bytes instead of"):
        opened(path)


def test_each_flipped_byte_is_found(sound: Path, tmp_path: Path) -> None:
    data, path = bytearray(sound.read_bytes()), tmp_path / "x"
    flips = random.Random(0)
    for place in range(len(data)):
        bit = 1 << flips.randrange(8)
        data[place] ^= bit
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"^[a-z]"):
            opened(path)
        data[place] ^= bit


@pytest.mark.parametrize("bits", OWN_CODECS.values())
@pytest.mark.parametrize(
    "scale", [float("nan"), float("inf"), -1.0, -TINY, 1e-45, TINY / 2, -1e-45, MAX, MAX / 7]
)
def test_a_crafted_scale_is_refused(tmp_path: Path, bits: int, scale: float) -> None:
    layout, path = UpdateLayout.of(SCHEMA, header(codec=f"{bits}-bit")), tmp_path / "x"
    write(path, SCHEMA, header(codec=f"{bits}-bit"), {name: drawn(shape) for name, shape in SCHEMA})
    with path.open("r+b") as file:
        file.seek(layout.body + layout.parts[1].scales + 12)  # the last of two rows
        file.write(torch.tensor([scale]).numpy().tobytes())
    finish(path, layout, ALICE.sign)  # signed by its owner, so the signature is valid
    with pytest.raises(ValueError, match=r"b\.weight: a scale that is negative"):
        opened(path)


if __name__ == "__main__":  # writes the vectors
    record: dict[str, Any] = {}
    for bits in OWN_CODECS.values():
        path = VECTORS / f"update-{bits}bit.safetensors"
        write(path, SCHEMA, header(codec=f"{bits}-bit"), {n: drawn(s, len(n)) for n, s in SCHEMA})
        file = opened(path)
        record[str(bits)] = {
            "digest": file.digest,
            "body": golden_digests()[str(bits)],
            "values": {
                n: hashlib.sha256(file.decode(n, s).numpy().tobytes()).hexdigest()
                for n, s in SCHEMA
            },
        }
    (VECTORS / "update_file.json").write_text(json.dumps(record, indent=1) + "\n")
