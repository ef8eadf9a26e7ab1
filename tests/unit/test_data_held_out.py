"""Test which held-out texts can be used to judge outer steps, and which are refused."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from distributed_training.config import Config, ConfigError
from distributed_training.config.types import parse_domains
from distributed_training.data import held_out
from distributed_training.data.held_out import held_out_batches, mean_loss
from distributed_training.data.page_source import PageUnavailable
from distributed_training.data.tokenizer import BYTE_VOCABULARY, TextTokenizer
from distributed_training.network import NetworkAway
from tests.tools import validator_world
from tests.tools.network import network_file
from tests.tools.settings import load_config
from tests.tools.store_world import StoreWorld
from tests.tools.validator_world import one_thread  # noqa: F401

pytestmark = pytest.mark.timeout(120)

LENGTH = 64
Tokenizer = tuple[Path, int]


TEXTS = {"dna": "ACGT", "sensors": "0123456789,.\n", "han": "的一是不了人我在有他"}


def text_of(name: str, draw: random.Random) -> str:
    return "".join(draw.choices(TEXTS[name], k=120))


def config_of(folder: Path, *, source: str = "stdlib", **rules: object) -> Config:
    values = {f"data.{name}": value for name, value in rules.items() if "__" not in name}
    values |= {n.replace("__", "."): value for n, value in rules.items() if "__" in n}
    base = {"exchange": "store", "training.sequence_length": LENGTH,
            "data.source": source}  # fmt: skip
    file = network_file(folder, base | values)
    argv = ["--network", file, "--neuron.device", "cpu"]
    return load_config("validator", argv, environ={}, dotenv=None, check=False)


def test_without_a_text_of_its_own_a_network_has_the_python_library(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    config = config_of(tmp_path)
    ((name, batches),) = held_out_batches(config, *tokenizer, sequences=8).items()
    assert name == config.held_out_name
    assert batches.shape == (8, LENGTH) and batches.dtype == torch.int64
    assert int(batches.max()) < BYTE_VOCABULARY
    assert config.held_out_name == "Python's own library"


def test_pages_are_held_out_that_nobody_is_assigned(tmp_path: Path, tokenizer: Tokenizer) -> None:
    data, draw = tmp_path / "data", random.Random(5)
    data.mkdir()
    made = pa.table({"text": [text_of("dna", draw) for _ in range(1200)]})
    pq.write_table(made, data / "0.parquet")
    of_data = {"selection": 2, "rows": 1200, "rows_per_page": 10, "held_out_pages": 8}
    config = config_of(tmp_path, source=f"parquet:{data}", **of_data)
    assert config.held_out_name == "8 pages of the data"
    (batches,) = held_out_batches(config, *tokenizer, sequences=32).values()
    assert batches.shape == (32, LENGTH)
    rows = pq.read_table(tmp_path / "data" / "0.parquet").column(0).to_pylist()
    at = sorted(row for _, row, _ in config.draw_pages.held_out({"root": 1200}))  # type: ignore[attr-defined]
    made = TextTokenizer(tokenizer[0], eos_id=tokenizer[1])
    kept = made.encode_rows([t for row in at for t in rows[row : row + 10]], max_length=10**9)
    every = made.encode_rows(rows, max_length=10**9)
    windows = [{bytes(np.array(of[i : i + 24], np.int32)) for i in range(len(of) - 24)}
               for of in (kept, every)]  # fmt: skip
    middles = {bytes(np.array(s[20:44], np.int32)) for s in batches.tolist()}
    assert middles <= windows[1] and len(middles & windows[0]) >= 30, "a page's seam may be cut"


@pytest.mark.parametrize("name", ["held.txt", "held.parquet"])
def test_a_file_is_pinned_by_its_digest(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    path, text = tmp_path / name, "ACGT" * 400
    if name.endswith(".txt"):
        path.write_text(text)
    else:
        pq.write_table(pa.table({"text": [text[:800], None, text[800:]]}), path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    config = config_of(tmp_path / "lab", held_out=f"{path}#{digest}")
    (batches,) = held_out_batches(config, *tokenizer, sequences=32).values()
    assert len(batches) == 25, "all of a small text"
    made = TextTokenizer(tokenizer[0], eos_id=tokenizer[1])
    assert set(batches.flatten().tolist()) <= {*made.encode_rows(["ACGT"], max_length=9).tolist()}
    assert config.held_out_name == name
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ConfigError, match=r"has the SHA-256 .* and the network's file pins"):
        held_out_batches(config, *tokenizer, sequences=32)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("away.txt", None, "No such file"),
        ("bad.txt", b"\xff\xfe", "cannot be used"),
        ("bad.parquet", b"PAR1 no", "cannot be used"),
        ("column.parquet", {"body": ["a" * 200]}, "with the column 'text'"),
        ("short.txt", b"ACGT", "has 5 tokens, and a sequence has 64"),
        ("long.txt", b"A" * 5000, "has more than 4000 bytes"),
    ],
)
def test_a_text_that_nobody_could_judge_on_is_one_line(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch,
    name: str, content: bytes | dict | None, words: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(held_out, "LARGEST_FILE", 4000)
    path = tmp_path / name
    if isinstance(content, dict):
        pq.write_table(pa.table(content), path)
    elif content is not None:
        path.write_bytes(content)
    digest = hashlib.sha256(path.read_bytes() if path.exists() else b"").hexdigest()
    config = config_of(tmp_path / "lab", held_out=f"{path}#{digest}")
    with pytest.raises(ConfigError, match=words) as refused:
        held_out_batches(config, *tokenizer, sequences=32)
    assert "\n" not in str(refused.value)


def test_held_out_source_that_is_away_may_come_back(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = config_of(tmp_path, held_out=f"https://127.0.0.1:1/held.txt#{'0' * 64}")
    with pytest.raises(PageUnavailable, match=r"held\.txt"):
        held_out_batches(config, *tokenizer, sequences=32)


def test_the_gate_is_in_nats(tmp_path: Path) -> None:
    assert config_of(tmp_path / "a").loss_limit(2.0) == 2.25
    assert config_of(tmp_path / "b", round__held_out_rise=0.5).loss_limit(2.0) == 2.5


def domains_of(folder: Path, *weights: str) -> list[str]:
    """Write the three texts to files, and return them as values of data.held_out."""
    found = []
    for name, weight in zip(TEXTS, weights, strict=True):
        path = folder / f"{name}.txt"
        path.write_text(text_of(name, random.Random(8)) * 20)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        found.append(f"{name}{weight}={path}#{digest}")
    return found


def test_several_domains_are_judged_by_their_weighted_mean(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    config = config_of(tmp_path / "lab", held_out=domains_of(tmp_path, "*2", "", "*0.5"))
    assert config.held_out_name == "dna 0.57, sensors 0.29, han 0.14"
    batches = held_out_batches(config, *tokenizer, sequences=8)
    assert {name: batch.shape for name, batch in batches.items()} == dict.fromkeys(
        ("dna", "sensors", "han"), (8, LENGTH)
    )
    losses = {"dna": 1.0, "sensors": 2.0, "han": 5.0}
    assert mean_loss(losses, config.domains) == pytest.approx((2 * 1.0 + 2.0 + 0.5 * 5.0) / 3.5)


@pytest.mark.timeout(60)
@given(
    some.lists(
        some.tuples(
            some.from_regex(r"[a-z0-9][a-z0-9-]{0,31}", fullmatch=True),
            some.none() | some.integers(1, 999_999),
            some.sampled_from(["", "https://a.example/", "/a b/*2=", "~/c,d/"]),
            some.text(some.characters(codec="ascii", categories=["L", "N", "P", "Zs"],
                                      exclude_characters="#\\"), min_size=1, max_size=40),
        ),
        min_size=1, max_size=16, unique_by=lambda domain: domain[0],
    )
)  # fmt: skip
def test_drawn_domains_are_read_as_they_were_written(drawn: list) -> None:
    digest = "0123456789abcdef" * 4
    written = [
        f"{name}{'' if weight is None else f'*{weight}'}={start}{rest}#{digest}"
        for name, weight, start, rest in drawn
    ]
    found = parse_domains(" ".join(written))
    wanted = [(name, f"{start}{rest}", weight or 1) for name, weight, start, rest in drawn]
    assert [(d.name, d.place, d.weight) for d in found] == wanted
    assert {d.digest for d in found} == {digest}


def test_each_domain_stands_next_to_the_judged_loss(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """Look for the losses in the event, the log, the report to the registry and the manifest."""
    caplog.set_level("INFO")
    rules = config_of(
        tmp_path / "lab",
        held_out=domains_of(tmp_path, "", "", "*2"),
        model__config=validator_world.MODEL_CONFIG,
        model__parameters=validator_world.RULES["model.parameters"],
    )
    held = {name: validator_world.sequences(seed, 8) for seed, name in enumerate(
        ("dna", "sensors", "han"))}  # fmt: skip
    world = StoreWorld(
        tmp_path / "run",
        held_out=held,
        held_out_rise=0.0,
        change=lambda config: replace(config, network=rules.network, data=rules.data),
    )
    first = world.events.of("held_out")[-1]
    losses = first["domains"]
    assert set(losses) == {*held} and len({*losses.values()}) == 3
    mean = losses["dna"] / 4 + losses["sensors"] / 4 + losses["han"] / 2
    assert first["before"] == first["after"] == pytest.approx(mean)
    each = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
    line = f"held-out loss {mean:.4f} on dna 0.25, sensors 0.25, han 0.50 ({each})"
    assert line in caplog.text
    reported = world.ledger.view.report
    assert reported is not None and reported[1].losses == losses
    manifest = world.round()
    after = world.events.of("held_out")[-1]["domains"]
    assert manifest.losses_before == losses and manifest.losses_after == after


def test_a_url_that_is_gone_costs_no_start_after_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, asked = b"held out\n" * 99, list[str]()
    digest, place = hashlib.sha256(text).hexdigest(), "https://example.org/held.txt"

    async def download(place: str, **limits: object) -> bytes:
        asked.append(place)
        if len(asked) in (3, 5):
            raise NetworkAway("503")
        return text

    monkeypatch.setattr(held_out, "download", download)

    def read(place: str, digest: str, run_folder: Path) -> bytes:
        config = config_of(tmp_path.with_name("lab"))
        general = replace(config.miner, run_folder=run_folder)
        return held_out._read_pinned(place, digest, replace(config, miner=general))

    assert read(place, digest, tmp_path / "none") == text and not list(tmp_path.iterdir())
    assert read(place, digest, tmp_path) == read(place, digest, tmp_path) == text
    assert len(asked) == 2
    (tmp_path / "held-out" / digest).write_bytes(text[:-1])  # damaged, so it is fetched again
    with pytest.raises(PageUnavailable, match="503"):
        read(place, digest, tmp_path)
    assert read(place, digest, tmp_path) == text == (tmp_path / "held-out" / digest).read_bytes()
    with pytest.raises(PageUnavailable):
        read(place, "0" * 64, tmp_path)
