"""Test ``scripts/pretokenize.py`` as an operator runs it: to its end, to a kill, with bad input."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest

from distributed_training.common.kinds import import_plugins
from distributed_training.data.pipeline import DataPipeline
from distributed_training.data.tokenizer import TextTokenizer
from examples.shards import open_shard
from tests.tools import forked
from tests.tools.support_data import wait_ready, worker_spec
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "pretokenize.py"


def command(source: str, out: Path, *more: str) -> list[str]:
    return [
        sys.executable, str(SCRIPT), source, str(out), "--tokenizer", "bytes",
        "--sequence-length", "64", "--rows-per-shard", "50", *more,
    ]  # fmt: skip


def run(source: str, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return forked.run(SCRIPT, *command(source, out, *more)[2:], environ={}, folder=out)


def text_of(row: int) -> str:
    return f"row {row} " + "abcdefghij " * (row % 37)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create two configs, of which one is smaller than a page. Some rows cannot be trained on."""
    folder = tmp_path_factory.mktemp("jsonl")
    (folder / "small").mkdir()
    for name, rows in (("a.jsonl", 620), ("small/b.jsonl", 30)):
        lines = [json.dumps({"text": text_of(i)}) for i in range(rows)]
        lines[3], lines[5], lines[7] = '{"text": ""}', '{"other": 1}', "no json"
        (folder / name).write_text("\n".join(lines) + "\n")
        with (folder / name).open("ab") as file:
            file.write(b'{"text": "caf\xe9"}\n')
    return folder


def tokens_of(out: Path) -> dict[str, list[int]]:
    return {p.name: open_shard(p)[1].reshape(-1).tolist() for p in sorted(out.glob("*.tokens"))}


def digests(out: Path) -> dict[str, str]:
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(out.glob("*.tokens"))
    }


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("shards")
    result = run(f"jsonl:{source}", out, "--processes", "2")
    assert result.returncode == 0, result.stderr
    return out, result.stdout


def test_every_usable_row_is_in_the_shards_in_order(made: tuple[Path, str], source: Path) -> None:
    out, said = made
    tokenizer = TextTokenizer(out / "tokenizer.json", eos_id=256)
    usable = [text_of(i) for i in range(50) if i not in (3, 5, 7)]
    expected = tokenizer.encode_rows(usable, max_length=1024)
    first = tokens_of(out)["root-000000000000.tokens"]
    assert first == expected[: len(expected) // 64 * 64].tolist()
    assert len(tokens_of(out)) == 13 + 1, "620 + 1 and 30 + 1 rows in units of 50"
    for line in ("rows: 644", "rows empty: 2", "rows without text: 4", "rows not utf8: 2"):
        assert line in said, said
    assert "new tokens/s" in said and "% of 2 cores" in said
    assert "--data.source shards:" in said


def test_the_miner_trains_from_them(made: tuple[Path, str], tmp_path: Path) -> None:
    import_plugins(["examples.shard_source"])
    out, _ = made
    tokenizer, pages = (out / "tokenizer.json", 256), {"pages_per_block": 1, "rows_per_page": 8}
    spec = worker_spec(tokenizer, tmp_path, f"shards:{out}", sequence_length=64, **pages)
    with closing(DataPipeline(spec, micro_batch_size=2)) as pipeline:
        pipeline.request(5)
        assert wait_ready(pipeline, 5) == 8
        pipeline.begin(5, 8)
        batch = pipeline.next()
        assert batch is not None
        every = np.concatenate([np.array(t).reshape(-1, 64) for t in tokens_of(out).values()])
        assert (every == batch[0].numpy()).all(axis=1).any()


def test_a_killed_pretokenize_continues_and_ends_with_the_same_bytes(
    made: tuple[Path, str], source: Path, tmp_path: Path
) -> None:
    whole, _ = made
    process = subprocess.Popen(
        command(f"jsonl:{source}", tmp_path, "--processes", "1"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    children: list[psutil.Process] = []

    def begun() -> bool:
        nonlocal children
        assert process.poll() is None
        children = psutil.Process(process.pid).children(recursive=True) or children
        return len(list(tmp_path.glob("*.tokens"))) >= 3

    wait_for(begun, "three files", seconds=60, every=0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive, "its processes ended with it"
    kept = len(list(tmp_path.glob("*.tokens")))
    (tmp_path / ".root-000000000000.tokens.1.tmp").write_bytes(b"half")
    result = run(f"jsonl:{source}", tmp_path)
    assert result.returncode == 0, result.stderr
    assert f"14 shards ({kept} existed already)" in result.stdout
    assert digests(tmp_path) == digests(whole)
    assert not list(tmp_path.glob(".*.tmp"))
