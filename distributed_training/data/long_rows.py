"""Find how much of a long row its first tokens depend on, so that no more of it is tokenized.

A tokenizer reads a row to its end before it cuts it: a book of 20 MB costs half a minute and 2.7 GB
to keep 1,024 tokens. Most tokenizers split a text into words first, and a word's tokens depend on
that word only. So the tokens of the front of a row are those of the whole row up to its last few
words, where the words are found by runs of characters: the patterns below look no further than the
run that they are in. A front ends behind a character that is no blank and before one that joins
nothing before it, so that no run of blanks and no composed character is cut.

Llama 2's kind splits nothing and writes a blank as ``▁``. Where no token has that behind another
character, no merge reaches over the begin of a word, and a front that ends there has the row's own
tokens. For other tokenizers nothing is promised, and all of a row is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Encoding, Tokenizer

_PER_TOKEN = 16  # characters of the first front, for each token that is wanted
_GROWTH = 4
_WORDS = 4  # at the end of a front that may be others in the whole row: a run of blanks has three
_CHARACTERS = 64  # the same

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST = r"[^\r\n\p{L}\p{N}]?"


def _cased(contraction: str, digits: str) -> str:
    return (
        rf"{_FIRST}{_UPPER}*{_LOWER}+{contraction}|{_FIRST}{_UPPER}+{_LOWER}*{contraction}|"
        rf"{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
    )


#: Patterns of words that look no further than a run of one kind of characters.
_PATTERNS = {
    # GPT-2, RoBERTa, OPT
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # Llama 3, GPT-4; Qwen 2 and 3 with single digits
    *(
        rf"{_CONTRACTION}|{_FIRST}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
        for digits in (r"\p{N}{1,3}", r"\p{N}")
    ),
    rf"{_CONTRACTION}|{_FIRST}[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}",
    # GPT-4o and gpt-oss; Mistral's
    _cased(f"{_CONTRACTION}?", r"\p{N}{1,3}"),
    _cased("", r"\p{N}"),
    # DeepSeek, StarCoder: of one class of characters
    *("[\r\n]", r"[\r\n]", r"\p{N}", r"\p{N}{1,3}", r"\p{N}+", r"\d", r"\s+", "[一-龥぀-ゟ゠-ヿ]+"),
}
_WORD_SPLITTERS = {
    "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Punctuation", "CharDelimiterSplit",
}  # fmt: skip
_LOCAL_NORMALIZERS = {
    "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "StripAccents", "BertNormalizer", "Nmt",
    "Strip", "ByteLevel",
}  # fmt: skip
#: ASCII, the ideographs and the syllables of Hangul: none of them joins what stands before it.
_BLANK = "▁"
_END_OF_WORD = re.compile(rf"(?<=[^\s{_BLANK}])(?= )")
_END = re.compile(r"(?<=\S)(?=[ -~\n\u3400-\u9fff\uac00-\ud7a3])")


class Fronts:
    """Find the front of a row that its first tokens depend on, for one tokenizer.

    ``known``: whether that is less than all of the row. The tokenizer must cut at ``max_length``
    tokens when :meth:`of` is called.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        content = json.loads(tokenizer.to_str())
        model = content["model"]
        # Without merges each character is a word.
        self._single = model["type"] == "BPE" and not (model["merges"] or model["ignore_merges"])
        added = [entry["content"] for entry in content["added_tokens"]]
        normalizers = _parts(content["normalizer"], "normalizers")
        self._margin = _CHARACTERS + 2 * max(map(len, added), default=0)
        self._margin += sum(len(part.get("pattern", {}).get("String", "")) for part in normalizers)
        splitters = _parts(content["pre_tokenizer"], "pretokenizers")
        by_words = any(map(_splits, splitters)) and not any(map(_is_blank, normalizers))
        self._joined = (
            not by_words
            and model["type"] == "BPE"
            and not model["ignore_merges"]
            and any(map(_is_blank, (*normalizers, *splitters)))
            and not any(re.search(f"[^{_BLANK}]{_BLANK}", token) for token in model["vocab"])
        )
        self.known = (
            not model.get("dropout")
            and all(map(_is_local, normalizers))
            and all(
                _splits(part) or part["type"] in ("ByteLevel", "Metaspace", "Digits")
                for part in splitters
            )
            and (self._single or self._joined or by_words)
        )

    def of(self, row: str, *, max_length: int, most: int) -> str | None:
        """Return the front of ``row`` whose tokens, cut, are those of the row; or the row.

        None: more than ``most`` characters would have to be read.
        """
        size = _PER_TOKEN * max_length
        # The front is read twice, so that of a row which may be read whole must be half of it.
        longest = most if len(row) > most else len(row) // 2
        while self.known and size < longest:
            end = (_END_OF_WORD if self._joined else _END).search(row, size, _GROWTH * size)
            if end is not None:
                front = row[: end.start()]
                if self._is_settled(self._tokenizer.encode(front), front):
                    return front
            size *= _GROWTH
        return row if len(row) <= most else None

    def _is_settled(self, cut: Encoding, front: str) -> bool:
        """Return whether more text behind ``front`` leaves the tokens as they are."""
        kept = [(i, word) for i, word in enumerate(cut.word_ids) if word is not None]
        if not kept or not cut.overflowing:
            return False
        last, word = kept[-1]
        # Blanks are not enough: an added token that begins behind them may take them all.
        behind = front[cut.offsets[last][1] : max(0, len(front) - self._margin)]
        if not behind.strip():
            return False
        left = max((w for w in cut.overflowing[-1].word_ids if w is not None), default=0) - word
        return self._single or self._joined or left >= _WORDS


def _parts(part: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """Return the parts of a normalizer or pre-tokenizer, those of sequences too."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [piece for one in part[inner] for piece in _parts(one, inner)]


def _is_local(normalizer: Mapping[str, Any]) -> bool:
    """Return whether a normalized character depends only on its neighbours."""
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"]
        return "String" in pattern or pattern["Regex"] in (" {2,}", r"\s{2,}", " +", r"\s+")
    return normalizer["type"] in _LOCAL_NORMALIZERS


def _is_blank(part: Mapping[str, Any]) -> bool:
    """Return whether a part writes blanks as ``_BLANK``, and splits nothing."""
    match part["type"]:
        case "Replace":
            return part["pattern"] == {"String": " "} and part["content"] == _BLANK
        case "Metaspace":
            return part["replacement"] == _BLANK and not _splits(part)
    return False


def _splits(splitter: Mapping[str, Any]) -> bool:
    """Return whether words end with runs of characters, or at given ones."""
    match splitter["type"]:
        case "ByteLevel":
            return bool(splitter["use_regex"])
        case "Metaspace":
            return bool(splitter.get("split", True))
        case "Split":
            pattern = splitter["pattern"]
            return bool(pattern.get("String")) or pattern.get("Regex") in _PATTERNS
        case kind:
            return kind in _WORD_SPLITTERS
