"""Test tokenizers that are damaged, of an unknown class, or have their own code."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from distributed_training.config import ConfigError
from distributed_training.data import tokenizer
from distributed_training.data.page_source import Counts
from distributed_training.data.tokenizer import TextTokenizer, build_tokenizer
from distributed_training.node.start import fetch_tokenizer
from tests.tools.miner_parts import config_of
from tests.tools.mutations import mutated

pytestmark = pytest.mark.timeout(60)


def a_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*letters, "he", "ll"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e"), ("l", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return folder


def test_damaged_files_are_refused_in_one_line_or_work(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], cases: int = 80
) -> None:
    """A damaged tokenizer never asks a question, prints a traceback or ends a worker."""
    draw, refused = random.Random(3), 0
    good = {path.name: path.read_bytes() for path in a_folder(tmp_path / "good").iterdir()}
    for i in range(cases):
        folder = tmp_path / str(i)
        folder.mkdir()
        which = draw.choice(list(good))
        for name, data in good.items():
            (folder / name).write_bytes(mutated(draw, name, data) if name == which else data)
        try:
            path, eos = build_tokenizer(str(folder), tmp_path / "made")
        except ValueError as error:
            refused += 1
            line = str(error)
            assert str(folder) in line and len(line) < 700 and "\n" not in line
            continue
        made, counts = TextTokenizer(path, eos_id=eos), Counts()
        made.encode_rows(["hello", "é\x00 <eos>", "x" * 3000], max_length=4, counts=counts)
        assert sum(counts.drain().values()) == 3
    assert cases // 5 < refused < cases
    said = "".join(capfd.readouterr())
    assert "y/N" not in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"auto_map": {"AutoTokenizer": ["tok.Mine", None]}, "tokenizer_class": "Mine"},
            "without auto_map",
        ),
        ({"tokenizer_class": "LlamaTokenizerOfTomorrow"}, ""),
        ({"eos_token": None}, "no EOS token"),
    ],
)
def test_tokenizer_with_own_code_is_refused_and_its_needs_are_named(
    config: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: object) -> str:
        raise AssertionError("nobody is asked")

    monkeypatch.setattr("builtins.input", asked)
    folder = a_folder(tmp_path / "it", **config)
    (folder / "tok.py").write_text("raise SystemExit('it was run')")
    settings = config_of(rules={"tokenizer.name": str(folder)})
    if not words:
        fetch_tokenizer(settings, tmp_path)
        return
    with pytest.raises(ConfigError, match=words) as refusal:
        fetch_tokenizer(settings, tmp_path)
    assert "tokenizer.name" in str(refusal.value)


def test_a_row_at_which_the_tokenizer_fails_costs_itself(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel(vocab={"a": 0, "b": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    made, counts = TextTokenizer(tmp_path / "tokenizer.json", eos_id=2), Counts()
    ids = made.encode_rows(
        ["a b", "never seen", "b" * 3 + " c" * 99, "b"], max_length=2, counts=counts
    )
    assert ids.tolist() == [0, 1, 2, 1, 2]
    assert counts.drain() == {"rows": 2, "rows_not_tokenized": 2}


@pytest.mark.parametrize("character", ["a", " ", "é", "中"])
def test_of_a_long_row_64_characters_for_each_wanted_token_are_tokenized(
    character: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "LONGEST", 5000)
    path, eos = build_tokenizer(str(a_folder(tmp_path / "it")), tmp_path / "made")
    made, read = TextTokenizer(path, eos_id=eos), list[str]()
    encode = made._ids_of
    monkeypatch.setattr(made, "_ids_of", lambda rows: read.extend(rows) or encode(rows))
    whole = made.encode_rows([character * 640], max_length=10)
    cut = made.encode_rows([character * 30_000], max_length=10)
    assert cut.tolist() == whole.tolist() and len(cut) == 11
    made.encode_rows([character * 30_000], max_length=10**9)
    assert [len(row) for row in read] == [640, 640, 5000], "and 2 million at most"
