"""Long rows: the same tokens as of the whole row, in bounded time and memory."""

from __future__ import annotations

import functools
import itertools
import logging
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from distributed_training.data import long_rows
from distributed_training.data.long_rows import Fronts
from distributed_training.data.page_source import Counts
from distributed_training.data.tokenizer import TextTokenizer, byte_tokenizer

pytestmark = pytest.mark.timeout(60)

ADDED = ["<eos>", "<|a_very_long_special_token_with_many_words_in_it|>"]
PIECES = [
    *("a", "Ab", "the", "HELLO", "wörld", "don't", "'s", "’s", "I'LL", "Straße", "naïve", "İ"),
    *("1", "42", "2024", "3.14", "1,000,000", "\u0663\u0664", "Ⅷ", "½"),
    *(
        " ",
        "  ",
        "        ",
        "\n",
        "\r\n",
        "\n\n\n",
        "\t",
        "\u00a0",
        "\u3000",
        "\u2028",
        " \n ",
        "\x00",
    ),
    *(
        "...",
        "--",
        "==",
        "{}();",
        '"',
        "``",
        "`",
        "\\",
        "/",
        "#",
        "_",
        "▁",
        "Ġ",
        "<",
        "<|a_very",
        "<eo",
    ),
    *(
        "中文文本",
        "的",
        "かな",
        "カ\u3099",
        "ｶﾞ",
        "한국어",
        "\u1112\u1161\u11ab",
        "ไทย",
        "हिन्दी",
        "עברית",
        "ﬁ",
    ),
    *(
        "e\u0301",
        "\u0301",
        "\u0327\u0301",
        "a" + "\u0301\u0323" * 9,
        "\u09c7\u09be",
        "\u200d",
        "\ufe0f",
    ),
    *("🙂", "👩\u200d👩\u200d👧", "🇩🇪", "🇫", "\U0001f3fd", "\ufffd", *ADDED),
]


def texts(draw: random.Random, count: int) -> Iterator[str]:
    """Yield texts of a few thousand characters, each of some kinds of pieces, in runs."""
    for _ in range(count):
        some = draw.sample(PIECES, draw.choice((1, 2, 3, 6, 20, len(PIECES))))
        length, row = draw.choice((300, 1200, 3000)), ""
        while len(row) < length:
            row += draw.choice(some) * draw.choice((1, 1, 1, 2, 5, 40))
            row += draw.choice(("", "", " ", "\n"))
        yield row


@functools.cache
def corpus() -> list[str]:
    return [*texts(random.Random(1), 20), Path(random.__file__).read_text()[:10_000]]


def trained(
    model: object, trainer: object, pre: object, normalizer: object = None, template: bool = False
) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(ADDED[0], lstrip=True, rstrip=True), ADDED[1]])
    if template:
        eos = tokenizer.token_to_id("<eos>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<eos> $A <eos>", special_tokens=[("<eos>", eos)]
        )
    return tokenizer


def bpe(pre: object, normalizer: object = None, *, template: bool = False) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    return trained(models.BPE(), trainer, pre, normalizer, template)


def split(pattern: str, behavior: str = "isolated") -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior)


def by_pattern(*patterns: str) -> pre_tokenizers.PreTokenizer:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*map(split, patterns), level])


def word_piece() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["[UNK]"], show_progress=False
    )
    return trained(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        pre_tokenizers.BertPreTokenizer(),
        normalizers.BertNormalizer(),
        template=True,
    )


def unigram() -> Tokenizer:
    trainer = trainers.UnigramTrainer(
        vocab_size=200,
        unk_token="<unk>",
        special_tokens=["<unk>"],
        show_progress=False,
        max_piece_length=5,
    )
    spaces = normalizers.Sequence(
        [
            normalizers.Replace("``", '"'),
            normalizers.NFKC(),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )
    return trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(), spaces)


def without_words(pre: object, normalizer: object) -> Tokenizer:
    """A tokenizer of Llama 2's kind: it was made of words, and splits none."""
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>"], show_progress=False)
    tokenizer = trained(
        models.BPE(unk_token="<unk>", fuse_unk=True), trainer, pre_tokenizers.Metaspace()
    )
    tokenizer.pre_tokenizer = pre
    tokenizer.normalizer = normalizer
    return tokenizer


LONG = sorted(p for p in long_rows._PATTERNS if len(p) > 20)
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_tokenizer,
    "gpt2": lambda: bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    **{
        f"pattern {i}": lambda p=p, i=i: bpe(
            by_pattern(p), normalizers.NFC() if i % 2 else None, template=i < 3
        )
        for i, p in enumerate(LONG)
    },
    "deepseek": lambda: bpe(
        by_pattern(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", LONG[0]), normalizers.NFD()
    ),
    "starcoder": lambda: bpe(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel()]
        ),
        normalizers.Lowercase(),
    ),
    "newlines": lambda: bpe(by_pattern(r"[\r\n]", r"\s+")),
    "words": lambda: bpe(pre_tokenizers.WhitespaceSplit(), normalizers.StripAccents()),
    "llama2": lambda: without_words(
        None,
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    ),
    "gemma": lambda: without_words(
        pre_tokenizers.Split(" ", "merged_with_previous"), normalizers.Replace(" ", "▁")
    ),
    "mistral": lambda: without_words(pre_tokenizers.Metaspace(split=False), None),
    "bert": word_piece,
    "unigram": unigram,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_long_row_has_the_tokens_of_all_its_text(name: str, cases: int = 40) -> None:
    """Random rows of many scripts; the front is cut wherever a row of real length could be."""
    tokenizer = TOKENIZERS[name]()
    fronts = Fronts(tokenizer)
    assert fronts.known
    draw, shorter = random.Random(name), 0
    for row in texts(draw, cases):
        most = draw.choice((4, 9, 24))
        tokenizer.enable_truncation(most)
        front = fronts.of(row, max_length=most, most=10**6)
        assert front is not None and row.startswith(front)
        shorter += front != row
        assert tokenizer.encode(front).ids == tokenizer.encode(row).ids, (row, front)
    assert shorter > cases // 8


@pytest.mark.parametrize("name", ["gpt2", "pattern 0", "llama2", "newlines"])
def test_a_token_that_takes_the_blanks_before_it_is_not_cut(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    tokenizer.add_tokens([AddedToken("<a mask of many words and more>", lstrip=True)])
    tokenizer.enable_truncation(4)
    fronts = Fronts(tokenizer)
    for back, blank in itertools.product((9, 21), " \t"):
        row = f"1{blank * (1024 - back)}<a mask of many words and more>{' a' * 5000}"
        front = fronts.of(row, max_length=4, most=10**6)
        assert front is not None and len(front) < len(row)
        assert tokenizer.encode(front).ids == tokenizer.encode(row).ids, (back, blank)


@pytest.mark.parametrize(
    ("pre", "normalizer"),
    [
        (split(r"foo(?=.*bar)|\s+"), None),
        (split(r"\d{1,3}(?=(\d{3})*\b)"), None),
        (by_pattern(LONG[0], ".+"), None),
        (pre_tokenizers.ByteLevel(), normalizers.Replace(Regex("a.*b"), "x")),
        (pre_tokenizers.Metaspace(split=False), None),
    ],
)
def test_of_a_tokenizer_that_may_look_far_all_of_a_row_is_read(
    pre: object, normalizer: object
) -> None:
    fronts = Fronts(bpe(pre, normalizer))
    assert not fronts.known
    assert fronts.of("a b " * 999, max_length=3, most=4000) == "a b " * 999
    assert fronts.of("a b " * 999, max_length=3, most=3000) is None


def test_rows_of_any_length_take_bounded_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row whose first tokens cannot be known is counted and named once; the others stay."""
    bpe(pre_tokenizers.ByteLevel()).save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(tmp_path / "tokenizer.json", eos_id=0)
    read = 0
    whole = tokenizer._tokenizer

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(whole, name)

        def encode(self, row: str) -> object:
            nonlocal read
            read += len(row)
            return whole.encode(row)

        def encode_batch_fast(self, rows: list[str], **how: bool) -> object:
            nonlocal read
            read += sum(map(len, rows))
            assert sum(map(len, rows[:-1])) <= 2**20
            return whole.encode_batch_fast(rows, **how)

    monkeypatch.setattr(tokenizer, "_tokenizer", Counting())
    monkeypatch.setattr(tokenizer._fronts, "_tokenizer", Counting())
    monkeypatch.setattr("distributed_training.data.tokenizer.LONGEST", 2**17)
    prose, word, blank = "The quick fox. " * 400_000, "a" * 500_000, " " * 500_000
    counts = Counts()
    with caplog.at_level(logging.WARNING):
        ids = tokenizer.encode_rows(["short", prose, word, blank], max_length=1024, counts=counts)
        again = tokenizer.encode_rows([word], max_length=1024, counts=counts)
    assert counts.drain() == {"rows": 2, "rows_too_long": 3} and not len(again)
    assert len(re.findall("is left out, as all such rows", caplog.text)) == 1
    assert len(ids) == 1025 + len(whole.encode("short").ids) + 1 and read < 4 * 2**17
