"""Test Parquet folders, files of tokens and tokenizers, with bad input of each kind."""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distributed_training.common.kinds import import_plugins
from distributed_training.config import ConfigError
from distributed_training.config.settings import DataSettings
from distributed_training.data.block_builder import BlockMaker
from distributed_training.data.page_source import Counts, PageUnavailable
from distributed_training.data.parquet import ParquetSource
from distributed_training.data.pipeline import DataPipeline
from distributed_training.data.sources import Source
from distributed_training.data.tokenizer import TextTokenizer, build_tokenizer
from distributed_training.miner.launcher import launch
from examples.shards import ShardError, open_shard, write_shard
from tests.tools.r2_keys import KEYS
from tests.tools.settings import load_config
from tests.tools.support_data import wait_ready
from tests.tools.support_data import worker_spec as spec

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).parents[2]

ROWS = [f"row {i} " + "x" * (i % 17) for i in range(500)]


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        Source(DataSettings(source=f"parquet:{tmp_path / 'nowhere'}"))
    late = Source(DataSettings(source=f"parquet:{tmp_path}"))  # as if its disk were not mounted yet
    with pytest.raises(PageUnavailable, match=r"contains no \.parquet files"):
        late.num_rows()
    pq.write_table(pa.table({"text": ROWS}), tmp_path / "0.parquet")
    assert late.num_rows() == {"root": 500}


def test_a_folder_of_links_has_the_same_rows_as_the_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Links to folders are followed, except to those above, and broken links are named."""
    plain, linked = tmp_path / "plain", tmp_path / "linked"
    for config in ("", "en", "en/old", "de"):
        (plain / config).mkdir(exist_ok=True)
        pq.write_table(
            pa.table({"text": [config + row for row in ROWS]}), plain / config / "0.parquet"
        )
    linked.mkdir()
    for path in plain.iterdir():
        (linked / path.name).symlink_to(path)
    (tmp_path / "all").symlink_to(linked)
    (plain / "en" / "again").symlink_to(plain)
    want = dict.fromkeys(("root", "en", "en/old", "de"), 500)
    for folder in (plain, linked, tmp_path / "all"):
        made = ParquetSource(folder, text_column="text", counts=Counts())
        # The link back leads to the two configs next to it, but not to itself.
        assert {c: n for c, n in made.num_rows().items() if "again" not in c} == want
        assert len(made.num_rows()) <= 6
        assert made.rows("en/old", 7, split="train", limit=1) == ["en/old" + ROWS[7]]
    (linked / "1.parquet").symlink_to(tmp_path / "nowhere")
    with caplog.at_level(logging.WARNING):
        assert ParquetSource(linked, text_column="text", counts=Counts()).num_rows()["root"] == 500
    assert "1.parquet is left out" in caplog.text


def test_row_groups_that_do_not_add_up_to_the_rows_are_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("0", "1"):
        pq.write_table(pa.table({"text": ROWS}), tmp_path / f"{name}.parquet")
    counts = Counts()
    made = ParquetSource(tmp_path, text_column="text", counts=counts)
    with caplog.at_level(logging.WARNING), monkeypatch.context() as damaged:
        damaged.setattr(made, "_metadata", _with_a_row_too_many("1.parquet", made._metadata))
        assert made.num_rows() == {"root": 500}
    assert counts.drain()["files_unreadable"] == 1
    assert "1.parquet is left out: its row groups do not add up to its 501 rows" in caplog.text


def _with_a_row_too_many(name: str, read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Return a reader of metadata that finds one row too many in the row count of a file."""

    def read_metadata(path: Path) -> Any:
        meta = read(path)
        if path.name != name:
            return meta
        return SimpleNamespace(
            **{n: getattr(meta, n) for n in ("schema", "num_row_groups", "row_group")},
            num_rows=meta.num_rows + 1,
        )

    return read_metadata


def test_a_disk_that_is_away_for_a_moment_leaves_no_file_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(2):
        pq.write_table(pa.table({"text": ROWS}), tmp_path / f"{i}.parquet")
    made = ParquetSource(tmp_path, text_column="text", counts=Counts())
    with monkeypatch.context() as away:
        away.setattr(pq, "read_metadata", _stale)
        for _ in range(2):
            with pytest.raises(PageUnavailable, match="cannot be read now"):
                made.num_rows()
    assert made.num_rows() == {"root": 1000}


def _stale(file: Any) -> None:
    raise OSError(errno.ESTALE, "Stale file handle")


def test_parquet_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    values = [b"good", b"\xff\xfe", None, b"", "né".encode()]
    column = pa.array(values * 30, type=pa.binary())
    text = pa.StringArray.from_buffers(len(column), *column.buffers()[1:], column.buffers()[0])
    pq.write_table(pa.table({"text": text}), tmp_path / "x.parquet")
    counts = Counts()
    made = ParquetSource(tmp_path, text_column="text", counts=counts)
    assert made.num_rows() == {"root": 150}
    assert made.rows("root", 0, split="train", limit=5) == ["good", "né"]
    assert counts.drain() == {"rows_not_utf8": 1, "rows_without_text": 1, "rows_empty": 1}


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


def test_rows_beyond_the_models_vocabulary_are_left_out(
    tmp_path: Path, tokenizer: tuple[Path, int]
) -> None:
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"text": ["plain text"] * 200}), tmp_path / "data" / "0.parquet")
    maker = BlockMaker(spec(tokenizer, tmp_path, f"parquet:{tmp_path / 'data'}", vocabulary=200))
    prepared = maker.prepare(1)  # EOS is 256, so every row has an id beyond the vocabulary
    assert prepared.sequences == 0
    assert prepared.counts["rows_beyond_vocabulary"] == 80
    assert prepared.counts["pages_empty"] == 4


@pytest.mark.parametrize(("vocabulary", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_a_shard_holds_the_written_sequences(tmp_path: Path, vocabulary: int, dtype: str) -> None:
    data = np.arange(12).reshape(3, 4) + vocabulary - 12
    header = write_shard(tmp_path / "x", data, tokenizer="t", eos_id=0, vocabulary=vocabulary)
    again, read = open_shard(tmp_path / "x")
    assert again == header and header.dtype == dtype
    assert np.array_equal(read, data)
    assert (tmp_path / "x").stat().st_size % 64 == data.size * (4 if dtype == "uint32" else 2) % 64


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "token": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "cut": lambda data: data[:-7],
    "magic": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "header": lambda data: data[:14] + bytes([data[14] ^ 0xFF]) + data[15:],
    "empty": lambda data: b"",
    "count": lambda data: data.replace(b'"sequences": 8', b'"sequences": 9'),
    "object": lambda data: data.replace(b"uint16", b"object"),
    "i4,,": lambda data: data.replace(b"uint16", b"i4,,"),
    "1.5": lambda data: data.replace(b'"sequences": 8', b'"sequences": 8.0'),
    "deep": lambda data: data[:8] + (100_000).to_bytes(4, "little") + b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_shards(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "x"
    write_shard(path, np.ones((8, 8)), tokenizer="t", eos_id=0, vocabulary=300)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ShardError, match=str(path)):
        open_shard(path)


def test_a_kind_that_nobody_registered_ends_the_start_before_it_begins() -> None:
    config = load_config(
        "miner", ["--data.source", "fineweb"], environ=KEYS, dotenv=None, check=False
    )
    with pytest.raises(ConfigError) as refused:
        launch(config)
    line = str(refused.value)
    assert line.startswith("--data.source fineweb: there is no data source called 'fineweb'")
    assert "--plugins" in line and "\n" not in line and refused.value.status == 2


def test_a_source_from_outside_of_the_package(
    tokenizer: tuple[Path, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker, which is a separate process, imports the plug-in too."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    import_plugins(["tests.toys.source"])
    made = DataPipeline(
        spec(tokenizer, tmp_path, "counter", sequence_length=32, pages_per_block=1),
        micro_batch_size=2,
    )
    with closing(made):
        made.request(7)
        made.begin(7, wait_ready(made, 7))
        batch = made.next()
    assert batch is not None and batch.shape == (2, 32)
