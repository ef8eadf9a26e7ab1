"""Text to token ids: a byte-level tokenizer that needs no download, or one of Hugging Face's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EOS = "<eos>"
#: A multiple of 8 above 256 bytes and EOS.
BYTE_VOCABULARY = 264


def byte_tokenizer() -> Tokenizer:
    """One token per byte of UTF-8 (ids 0..255 in the byte-level alphabet's order) and EOS (256)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    return tokenizer


class TextTokenizer:
    """A ``tokenizer.json`` and its EOS id; what worker processes load."""

    def __init__(self, path: Path, *, eos_id: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))
        self.eos_id = eos_id

    def encode_rows(self, rows: Sequence[str], *, max_length: int) -> np.ndarray[Any, Any]:
        """Each row cut to ``max_length`` tokens, then EOS; all in a row. int32 (tokens,)."""
        if not rows:
            return np.zeros(0, dtype=np.int32)
        pieces: list[np.ndarray[Any, Any]] = []
        eos = np.array([self.eos_id], dtype=np.int32)
        for encoding in self._tokenizer.encode_batch(list(rows), add_special_tokens=True):
            pieces += [np.asarray(encoding.ids[:max_length], dtype=np.int32), eos]
        return np.concatenate(pieces)


def build_tokenizer(name: str, folder: Path) -> tuple[Path, int]:
    """``tokenizer.json`` of ``name`` in ``folder``, and its EOS id.

    ``bytes`` is the byte-level tokenizer; anything else is a name or folder that transformers'
    AutoTokenizer knows. Raises ValueError when it has no EOS or no fast form.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    if name == "bytes":
        tokenizer: Tokenizer | None = byte_tokenizer()
        eos_id = byte_tokenizer().token_to_id(EOS)
    else:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(name, use_fast=True)
        tokenizer = getattr(loaded, "backend_tokenizer", None)
        eos_id = loaded.eos_token_id
        if tokenizer is None or eos_id is None:
            raise ValueError(
                f"the tokenizer {name} has no {'EOS token' if tokenizer else 'fast form'}, so rows "
                "cannot be told apart: give another one with --neuron.global_tokenizer_name"
            )
        tokenizer.no_truncation()
        tokenizer.no_padding()
    assert tokenizer is not None and eos_id is not None
    temporary = path.with_suffix(".tmp")
    tokenizer.save(str(temporary))
    temporary.replace(path)
    return path, int(eos_id)
