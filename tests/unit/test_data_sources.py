"""Local folders, shards and mixtures; bad input of each kind."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_training.config import ConfigError
from distributed_training.config.data import DataSettings, parse_sources
from distributed_training.data.folders import JsonLinesSource, ParquetSource, TextSource
from distributed_training.data.mixture import interleave, pages_of, schedule
from distributed_training.data.shards import ShardError, open_shard, token_digest, write_shard
from distributed_training.data.source import Counts, PageUnavailable, open_source
from distributed_training.data.spec import WorkerSpec
from distributed_training.data.tokenizer import TextTokenizer, build_tokenizer
from distributed_training.data.work import BlockMaker

pytestmark = pytest.mark.timeout(60)

ROWS = [f"row {i} " + "x" * (i % 17) for i in range(500)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    return build_tokenizer("bytes", tmp_path_factory.mktemp("tokenizer"))


def spec(tokenizer: tuple[Path, int], folder: Path, source: str, **changes: Any) -> WorkerSpec:
    own = {k: changes.pop(k) for k in ("uid", "rank", "vocabulary") if k in changes}
    values: dict[str, Any] = {"pages_per_block": 4, "rows_per_page": 20, **changes}
    return WorkerSpec(
        **{"uid": 3, "rank": 0, "world_size": 4, **own},
        settings=DataSettings(source=source, **values),
        sequence_length=32,
        tokenizer_path=tokenizer[0],
        eos_id=tokenizer[1],
        folder=folder,
    )


def tokens(maker: BlockMaker, block: int) -> np.ndarray:
    return np.array(open_shard(maker.prepare(block).path)[1])


# --- which sources ------------------------------------------------------------------------------


def test_sources_and_weights() -> None:
    web, code = parse_sources("web=hf,code=jsonl:/some/dir", "web=3,code=1")
    assert (web.name, web.kind, web.folder, web.weight) == ("web", "hf", None, 0.75)
    assert (code.text, code.weight) == ("jsonl:/some/dir", 0.25)
    assert [s.name for s in parse_sources("a=hf,b=stdlib", "a=1,b=0")] == ["a"]
    assert [s.weight for s in parse_sources("a=hf,b=stdlib", "")] == [0.5, 0.5]
    assert parse_sources("text:/with=sign", "")[0].folder == Path("/with=sign")


@pytest.mark.parametrize(
    ("source", "mix"),
    [
        ("fineweb", ""),
        ("jsonl", ""),
        ("hf:dir", ""),
        ("", ""),
        ("hf", "a=1"),
        ("a=hf,b=stdlib", "a=1"),
        ("a=hf,b=stdlib", "a=1,b=x"),
        ("a=hf,b=stdlib", "a=0,b=0"),
        ("a=hf,b=stdlib", "a=nan,b=1"),
        ("a=hf,b=stdlib", "a=-1,b=1"),
        ("a=hf,a=stdlib", ""),
        ("hf,stdlib", ""),
    ],
)
def test_sources_that_are_none(source: str, mix: str) -> None:
    with pytest.raises(ConfigError, match=r"--data\.(source|mix)") as caught:
        parse_sources(source, mix)
    assert "\n" not in str(caught.value) and ": give" in str(caught.value)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        open_source(DataSettings(source=f"text:{tmp_path / 'nowhere'}"))


# --- folders ------------------------------------------------------------------------------------


def write_jsonl(path: Path, rows: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))


def test_jsonl_rows_across_files_and_configs(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a" / "1.jsonl", ROWS[:130])
    write_jsonl(tmp_path / "a" / "2.jsonl", ROWS[130:200])
    write_jsonl(tmp_path / "top.jsonl", ROWS[200:])
    write_jsonl(tmp_path / "b" / "small.jsonl", ROWS[:5])
    counts = Counts()
    made = JsonLinesSource(tmp_path, text_key="text", index=tmp_path / ".index", counts=counts)
    assert made.num_rows() == {"a": 200, "root": 300}
    assert made.num_rows() and counts.take() == {"configs_too_small": 1}
    assert made.rows("a", 120, split="train", limit=100) == ROWS[120:200]
    assert made.rows("root", 10, split="train", limit=3) == ROWS[210:213]
    with pytest.raises(PageUnavailable, match="none at 200"):
        made.rows("a", 200, split="train", limit=1)
    # The index is found again, and not used for a file that changed.
    (index,) = [p for p in (tmp_path / ".index").iterdir() if np.load(p)[-1] < 1500][:1] or [None]
    assert index is not None
    write_jsonl(tmp_path / "top.jsonl", ROWS[:150])
    again = JsonLinesSource(tmp_path, text_key="text", index=tmp_path / ".index", counts=counts)
    assert again.num_rows()["root"] == 150
    assert again.rows("root", 149, split="train", limit=5) == ROWS[149:150]


def test_jsonl_rows_that_are_no_text(tmp_path: Path) -> None:
    good = [json.dumps({"text": row}).encode() for row in ROWS[:200]]
    bad = [b"{", b"[]", b'{"other": 1}', b'{"text": ""}', b'{"text": "\xff\xfe"}', b"7"]
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(good[:3] + bad + good[3:]))  # no last newline
    counts = Counts()
    made = JsonLinesSource(tmp_path, text_key="text", index=None, counts=counts)
    assert made.num_rows() == {"root": 206}
    assert made.rows("root", 0, split="train", limit=12) == ROWS[:6]
    assert made.rows("root", 205, split="train", limit=12) == ROWS[199:200]
    found = counts.take()
    assert (found["rows_without_text"], found["rows_empty"], found["rows_not_utf8"]) == (4, 1, 1)


def test_parquet_row_groups_files_and_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for i, part in enumerate((ROWS[:220], ROWS[220:])):
        table = pa.table({"id": range(len(part)), "text": part})
        pq.write_table(table, tmp_path / f"{i}.parquet", row_group_size=50)
    (tmp_path / "2.parquet").write_bytes(b"PAR1 not really PAR1")
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "3.parquet")
    counts = Counts()
    made = ParquetSource(tmp_path, text_column="text", counts=counts)
    with caplog.at_level(logging.WARNING):
        assert made.num_rows() == {"root": 500}
    assert counts.take()["files_unreadable"] == 2
    assert "2.parquet is left out" in caplog.text and "no column 'text'" in caplog.text
    for first in (0, 49, 50, 199, 215, 219, 220, 260, 450):
        assert made.rows("root", first, split="train", limit=60) == ROWS[first : first + 60]


def test_parquet_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    values = [b"good", b"\xff\xfe", None, b"", "né".encode()]
    column = pa.array(values * 30, type=pa.binary())
    text = pa.StringArray.from_buffers(len(column), *column.buffers()[1:], column.buffers()[0])
    pq.write_table(pa.table({"text": text}), tmp_path / "x.parquet")
    counts = Counts()
    made = ParquetSource(tmp_path, text_column="text", counts=counts)
    assert made.num_rows() == {"root": 150}
    assert made.rows("root", 0, split="train", limit=5) == ["good", "né"]
    assert counts.take() == {"rows_not_utf8": 1, "rows_without_text": 1, "rows_empty": 1}


def test_text_is_cut_at_line_ends_and_nothing_is_lost(tmp_path: Path) -> None:
    lines = [f"line {i} " + "ä" * (i % 90) + "\n" for i in range(3000)]
    text = "".join(lines) + "y" * 5000 + "\nend"
    (tmp_path / "book.txt").write_text(text)
    (tmp_path / "empty.txt").touch()
    made = TextSource(tmp_path, counts=Counts())
    count = made.num_rows()["root"]
    rows = made.rows("root", 0, split="train", limit=count)
    assert "".join(rows) == text
    assert all(row.endswith("\n") for row in rows[:-1])
    assert sum(500 < len(row.encode()) < 1500 for row in rows) > 0.9 * count


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "text"])
def test_a_folder_without_rows_leaves_the_block_empty_and_says_why(
    kind: str, tmp_path: Path, tokenizer: tuple[Path, int]
) -> None:
    (tmp_path / "data").mkdir()
    prepared = BlockMaker(spec(tokenizer, tmp_path, f"{kind}:{tmp_path / 'data'}")).prepare(1)
    assert prepared.sequences == 0
    assert f"holds no .{kind if kind != 'text' else 'txt'}" in prepared.missing[0]


def test_a_folder_that_is_filled_later_is_used_then(
    tmp_path: Path, tokenizer: tuple[Path, int]
) -> None:
    (tmp_path / "data").mkdir()
    maker = BlockMaker(spec(tokenizer, tmp_path, f"jsonl:{tmp_path / 'data'}"))
    assert maker.prepare(1).sequences == 0
    write_jsonl(tmp_path / "data" / "x.jsonl", ROWS)
    assert maker.prepare(2).sequences > 0


def test_too_little_text_is_named(tmp_path: Path, tokenizer: tuple[Path, int]) -> None:
    write_jsonl(tmp_path / "data" / "x.jsonl", ROWS[:50])
    prepared = BlockMaker(spec(tokenizer, tmp_path, f"jsonl:{tmp_path / 'data'}")).prepare(1)
    assert prepared.sequences == 0 and "has 50 rows" in prepared.missing[0]


# --- tokens -------------------------------------------------------------------------------------


def test_rows_beyond_the_models_vocabulary_are_left_out(
    tmp_path: Path, tokenizer: tuple[Path, int]
) -> None:
    write_jsonl(tmp_path / "data" / "x.jsonl", ["plain text"] * 200)
    maker = BlockMaker(spec(tokenizer, tmp_path, f"jsonl:{tmp_path / 'data'}", vocabulary=200))
    prepared = maker.prepare(1)  # EOS is 256, so every row holds an id the model does not know
    assert prepared.sequences == 0
    assert prepared.counts["rows_beyond_vocabulary"] == 80
    assert prepared.counts["pages_empty"] == 4


def test_special_tokens_and_truncation_as_transformers(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {w: i for i, w in enumerate(["<s>", "</s>", "<unk>", *"abcdefgh"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    theirs = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", bos_token="<s>")
    theirs.save_pretrained(tmp_path / "saved")
    path, eos = build_tokenizer(str(tmp_path / "saved"), tmp_path / "built")
    ours = TextTokenizer(path, eos_id=eos)
    for text in ("a b c", "a b c d e f g h", "", "z z"):
        expected = [*theirs.encode(text, truncation=True, max_length=5), theirs.eos_token_id]
        assert ours.encode_rows([text], max_length=5).tolist() == expected
    assert ours.vocabulary == 11


def test_the_byte_tokenizers_folder_loads_in_transformers(tokenizer: tuple[Path, int]) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer[0].parent)
    assert loaded.eos_token_id == loaded.pad_token_id == tokenizer[1]
    text = "def f():\n\treturn 'ß'  "
    assert loaded.decode(loaded.encode(text)) == text


def test_a_tokenizer_without_eos_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"no EOS token.*--neuron\.global_tokenizer_name"):
        build_tokenizer(str(tmp_path / "saved"), tmp_path / "built")


# --- shards -------------------------------------------------------------------------------------


def make_shards(folder: Path, tokenizer: tuple[Path, int], count: int = 3) -> list[np.ndarray]:
    folder.mkdir(exist_ok=True)
    made = TextTokenizer(tokenizer[0], eos_id=tokenizer[1])
    data = []
    for i in range(count):
        data.append(np.random.default_rng(i).integers(0, 256, (60, 32), dtype=np.int32))
        write_shard(
            folder / f"{i}.tokens",
            data[-1],
            tokenizer=made.hash,
            eos_id=made.eos_id,
            vocabulary=made.vocabulary,
        )
    return data


@pytest.mark.parametrize(("vocabulary", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_a_shard_holds_what_was_written(tmp_path: Path, vocabulary: int, dtype: str) -> None:
    data = np.arange(12).reshape(3, 4) + vocabulary - 12
    header = write_shard(tmp_path / "x", data, tokenizer="t", eos_id=0, vocabulary=vocabulary)
    again, read = open_shard(tmp_path / "x")
    assert again == header and header.dtype == dtype
    assert np.array_equal(read, data) and token_digest(read) == token_digest(data.astype(np.int64))
    assert (tmp_path / "x").stat().st_size % 64 == data.size * (4 if dtype == "uint32" else 2) % 64


@pytest.mark.parametrize("damage", ["token", "cut", "magic", "header", "empty", "count"])
def test_damaged_shards(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x"
    write_shard(path, np.ones((8, 8)), tokenizer="t", eos_id=0, vocabulary=300)
    data = bytearray(path.read_bytes())
    if damage == "token":
        data[-1] ^= 1
    elif damage == "cut":
        del data[-7:]
    elif damage == "magic":
        data[0] ^= 1
    elif damage == "header":
        data[14] ^= 0xFF
    elif damage == "count":
        data = bytearray(data.replace(b'"sequences": 8', b'"sequences": 9'))
    else:
        data.clear()
    path.write_bytes(data)
    with pytest.raises(ShardError, match=str(path)):
        open_shard(path)


def test_every_sequence_of_the_shards_is_used_once_before_any_twice(
    tmp_path: Path, tokenizer: tuple[Path, int]
) -> None:
    data = np.concatenate(make_shards(tmp_path / "shards", tokenizer))
    maker = BlockMaker(
        spec(tokenizer, tmp_path, f"shards:{tmp_path / 'shards'}", pages_per_block=3)
    )  # nine pages of 20 sequences
    blocks = [tokens(maker, block) for block in (5, 6, 7)]
    used = np.concatenate(blocks)
    assert sorted(map(bytes, used.astype("<i4"))) == sorted(map(bytes, data.astype("<i4")))
    other = BlockMaker(
        spec(tokenizer, tmp_path, f"shards:{tmp_path / 'shards'}", pages_per_block=3, rank=1)
    )
    assert not np.array_equal(tokens(other, 5), blocks[0])


def test_shards_are_cut_anew_for_another_sequence_length(
    tmp_path: Path, tokenizer: tuple[Path, int]
) -> None:
    rows = np.arange(10 * 48).reshape(10, 48) % 250
    made = TextTokenizer(tokenizer[0], eos_id=tokenizer[1])
    (tmp_path / "s").mkdir()
    write_shard(tmp_path / "s" / "0.tokens", rows, tokenizer=made.hash, eos_id=256, vocabulary=257)
    maker = BlockMaker(spec(tokenizer, tmp_path, f"shards:{tmp_path / 's'}"))
    assert np.array_equal(tokens(maker, 1), rows.reshape(-1, 32))


def test_bad_shards_are_named_and_the_others_used(
    tmp_path: Path, tokenizer: tuple[Path, int], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "shards"
    make_shards(folder, tokenizer)
    other = np.zeros((60, 32))
    write_shard(folder / "8.tokens", other, tokenizer="another", eos_id=1, vocabulary=300)
    (folder / "9.tokens").write_bytes(b"nothing")
    damaged = bytearray((folder / "1.tokens").read_bytes())
    damaged[-1] ^= 1
    (folder / "1.tokens").write_bytes(damaged)
    with caplog.at_level(logging.WARNING):
        maker = BlockMaker(spec(tokenizer, tmp_path, f"shards:{folder}", pages_per_block=9))
        prepared = maker.prepare(4)
    assert prepared.sequences == 120
    assert prepared.counts["shards_left_out"] == 3 and prepared.counts["pages_missing"] == 3
    assert "8.tokens was made with another tokenizer" in caplog.text
    assert "9.tokens is not a file of tokens" in caplog.text
    assert "1.tokens is corrupted" in caplog.text


def test_no_usable_shards(tmp_path: Path, tokenizer: tuple[Path, int]) -> None:
    (tmp_path / "s").mkdir()
    prepared = BlockMaker(spec(tokenizer, tmp_path, f"shards:{tmp_path / 's'}")).prepare(1)
    assert prepared.sequences == 0 and "holds no usable shards" in prepared.missing[0]


# --- mixtures -----------------------------------------------------------------------------------

weights_and_lengths = st.integers(2, 5).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(0.01, 1.0), min_size=n, max_size=n),
        st.lists(st.integers(0, 60), min_size=n, max_size=n),
        st.integers(1, 4),
    )
)


@given(weights_and_lengths)
def test_a_mixture_keeps_its_shares(case: tuple[list[float], list[int], int]) -> None:
    weights, lengths, size = case
    order, sources = interleave(weights, lengths, size)
    assert len(order) == len(sources) * size
    assert len(set(order.tolist())) == len(order)  # no sequence twice
    starts = np.concatenate([[0], np.cumsum(lengths)])
    for begin, end in itertools.pairwise(starts.tolist()):
        own = [x for x in order.tolist() if begin <= x < end]
        assert own == list(range(begin, begin + len(own)))  # in their order
    if all(count >= size for count in lengths):
        share = np.array(weights) / sum(weights)
        for k in range(1, len(sources) + 1):
            counts = np.bincount(sources[:k], minlength=len(weights))
            assert np.abs(counts - share * k).max() <= len(weights) - 1


@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=5), st.integers(0, 80))
def test_the_schedule_depends_on_the_weights_alone(weights: list[float], length: int) -> None:
    # So ranks whose pages hold different amounts train on the same source at the same time.
    long = schedule(weights, 200)
    assert schedule(weights, length) == long[:length]
    assert all(n >= 1 for n in pages_of(weights, 5))


def test_a_mixture_goes_on_without_a_source_that_is_down(
    tmp_path: Path, tokenizer: tuple[Path, int]
) -> None:
    write_jsonl(tmp_path / "a" / "x.jsonl", ROWS)
    (tmp_path / "b").mkdir()
    mixed = f"up=jsonl:{tmp_path / 'a'},down=jsonl:{tmp_path / 'b'}"
    prepared = BlockMaker(spec(tokenizer, tmp_path, mixed, mix="up=0.5,down=0.5")).prepare(3)
    header, _ = open_shard(prepared.path)
    up, down = header.extra["sources"]
    assert up > 0 and down == 0 and prepared.missing[0].startswith("down: ")
    order, sources = interleave([0.5, 0.5], [up, down], 2)
    assert len(order) == up // 2 * 2 and set(sources) == {0, 1}


def test_a_mixture_has_each_sources_pages(tmp_path: Path, tokenizer: tuple[Path, int]) -> None:
    write_jsonl(tmp_path / "a" / "x.jsonl", ["a" * 40] * 200)
    write_jsonl(tmp_path / "b" / "x.jsonl", ["b" * 40] * 200)
    mixed = f"a=jsonl:{tmp_path / 'a'},b=jsonl:{tmp_path / 'b'}"
    prepared = BlockMaker(spec(tokenizer, tmp_path, mixed, mix="a=0.75,b=0.25")).prepare(3)
    header, _ = open_shard(prepared.path)
    assert [page[0] for page in header.extra["pages"]] == ["a", "a", "a", "b"]
    order, sources = interleave([0.75, 0.25], header.extra["sources"], 2)
    first_of_b = header.extra["sources"][0]
    assert [int(i >= first_of_b) for i in order[::2]] == sources
    assert 0.2 < sources.count(1) / len(sources) < 0.3
