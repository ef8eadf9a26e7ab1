"""Test JSON lines, text, shards and mixtures as sources, with bad input of each kind."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distributed_training.common.kinds import import_plugins
from distributed_training.config import ConfigError
from distributed_training.config.settings import parse_source
from distributed_training.data.block_builder import BlockMaker, read_block
from distributed_training.data.page_source import Counts, PageUnavailable
from distributed_training.data.sources import kind_of
from distributed_training.data.tokenizer import TextTokenizer
from examples.line_files import JsonLinesSource, TextSource
from examples.mixture import interleave
from examples.shards import write_shard
from tests.tools.support_data import worker_spec as spec
from tests.tools.support_data import write_jsonl

pytestmark = pytest.mark.timeout(60)
import_plugins(["examples.shard_source"])

ROWS = [f"row {i} " + "x" * (i % 17) for i in range(500)]


def tokens(maker: BlockMaker, block: int) -> np.ndarray:
    return np.array(read_block(maker.prepare(block).path)[0])


@pytest.mark.parametrize("source", ["fineweb", "jsonl", "hub:dir", "", "hub,stdlib"])
def test_sources_that_are_none(source: str) -> None:
    with pytest.raises(ConfigError, match=r"--data\.source") as caught:
        kind_of(parse_source(source))
    assert "\n" not in str(caught.value) and re.search(": (choose|give)", str(caught.value))


def test_jsonl_rows_across_files_and_configs(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a" / "1.jsonl", ROWS[:130])
    write_jsonl(tmp_path / "a" / "2.jsonl", ROWS[130:200])
    write_jsonl(tmp_path / "top.jsonl", ROWS[200:])
    write_jsonl(tmp_path / "b" / "small.jsonl", ROWS[:5])
    counts = Counts()
    made = JsonLinesSource(tmp_path, text_key="text", index=tmp_path / ".index", counts=counts)
    assert made.num_rows() == {"a": 200, "root": 300}
    assert made.num_rows() and counts.drain() == {"configs_too_small": 1}
    assert made.rows("a", 120, split="train", limit=100) == ROWS[120:200]
    assert made.rows("root", 10, split="train", limit=3) == ROWS[210:213]
    with pytest.raises(PageUnavailable, match="no row 200"):
        made.rows("a", 200, split="train", limit=1)
    # The index is used again, but not for a file that has changed.
    (index,) = [p for p in (tmp_path / ".index").iterdir() if np.load(p)[-1] < 1500][:1] or [None]
    assert index is not None
    for damage in (
        b"",
        b"PK\3\4",
        index.read_bytes()[:-8] + bytes(8),
    ):  # a power loss may leave such files
        index.write_bytes(damage)
        mended = JsonLinesSource(
            tmp_path, text_key="text", index=tmp_path / ".index", counts=counts
        )
        assert mended.all_rows() == {"a": 200, "root": 300, "b": 5}
    write_jsonl(tmp_path / "top.jsonl", ROWS[:150])
    again = JsonLinesSource(tmp_path, text_key="text", index=tmp_path / ".index", counts=counts)
    assert again.num_rows()["root"] == 150
    assert again.rows("root", 149, split="train", limit=5) == ROWS[149:150]


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
    assert f"contains no .{kind if kind != 'text' else 'txt'}" in prepared.missing[0]


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


def test_every_sequence_of_the_shards_is_used_once_before_any_twice(
    tmp_path: Path, tokenizer: tuple[Path, int]
) -> None:
    data = np.concatenate(make_shards(tmp_path / "shards", tokenizer))
    maker = BlockMaker(
        spec(tokenizer, tmp_path, f"shards:{tmp_path / 'shards'}", pages_per_block=3)
    )  # there are nine pages of 20 sequences
    blocks = [tokens(maker, block) for block in (5, 6, 7)]
    used = np.concatenate(blocks)
    assert sorted(map(bytes, used.astype("<i4"))) == sorted(map(bytes, data.astype("<i4")))
    other = BlockMaker(
        spec(tokenizer, tmp_path, f"shards:{tmp_path / 'shards'}", pages_per_block=3, rank=1)
    )
    assert not np.array_equal(tokens(other, 5), blocks[0])


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


def mix_of(folder: Path, content: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "mix.toml").write_text(content)
    return f"mix:{folder}"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "does not give each source a share above 0"),
        ("stdlib = 0", "does not give each source"),
        ("stdlib = nan", "does not give each source"),
        ("stdlib = true", "does not give each source"),
        ("stdlib", "cannot be read"),
        ("fineweb = 1", "--data.source fineweb"),
        ('"parquet:/nowhere" = 1', "is not a folder"),
    ],
)
def test_a_mix_that_is_none_is_one_line(
    content: str, said: str, tmp_path: Path, tokenizer: tuple[Path, int]
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        BlockMaker(spec(tokenizer, tmp_path, mix_of(tmp_path / "mix", content)))
    assert "\n" not in str(caught.value)


shares_and_counts = st.integers(1, 5).flatmap(
    lambda n: st.tuples(
        st.lists(st.floats(0.01, 1.0), min_size=n, max_size=n),
        st.lists(st.integers(0, 60), min_size=n, max_size=n),
    )
)


@given(shares_and_counts)
def test_a_mixture_keeps_its_shares(case: tuple[list[float], list[int]]) -> None:
    shares, counts = case
    order = interleave(shares, counts)
    assert bool(order) is any(counts)
    for source, count in enumerate(counts):
        own = [number for of, number in order if of == source]
        assert own == list(range(len(own))) and len(own) <= count  # each once, in their order
    if all(counts):
        share = np.array(shares) / sum(shares)
        for k in range(1, len(order) + 1):
            had = np.bincount([source for source, _ in order[:k]], minlength=len(shares))
            assert np.abs(had - share * k).max() <= len(shares) - 1


def test_a_mixture_trains_on_both_and_continues_without_a_source_that_is_down(
    tmp_path: Path, tokenizer: tuple[Path, int]
) -> None:
    for name in ("a", "b"):
        write_jsonl(tmp_path / name / "x.jsonl", [f"{name * 40} {row}" for row in range(300)])
    content = f'"jsonl:{tmp_path / "a"}" = 0.75\n"jsonl:{tmp_path / "b"}" = 0.25\n'
    source = mix_of(tmp_path / "mix", content)
    mixed = tokens(BlockMaker(spec(tokenizer, tmp_path / "1", source)), 3)
    letters = [[(sequence == tokenizer_id).sum() > 8 for sequence in mixed]
               for tokenizer_id in (64, 65)]  # fmt: skip
    assert 0.6 < np.mean(letters[0]) < 0.9 and 0.1 < np.mean(letters[1]) < 0.4
    (tmp_path / "b" / "x.jsonl").unlink()
    prepared = BlockMaker(spec(tokenizer, tmp_path / "2", source)).prepare(3)
    assert prepared.sequences > 0 and any("contains no .jsonl" in line for line in prepared.missing)
