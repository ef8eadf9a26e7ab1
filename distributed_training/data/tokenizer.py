"""Text to token ids: a byte-level tokenizer that needs no download, or one of Hugging Face's."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from distributed_training.common.files import write_bytes, write_json
from distributed_training.common.proxies import HUB, share

from .page_source import Counts

log = logging.getLogger(__name__)

#: The most characters of a row that are tokenized: for each wanted token, and in all. Otherwise a
#: tokenizer would read the whole row, and 2 million characters take 3 s and 280 MB.
_PER_TOKEN, LONGEST = 64, 2**21
_BATCH = 2**20
EOS = "<eos>"
#: The next multiple of 8 above 256 bytes and EOS.
BYTE_VOCABULARY = 264


def byte_tokenizer() -> Tokenizer:
    """Make a tokenizer of one token per byte of UTF-8 and EOS (256).

    Ids 0..255 are in the byte-level alphabet's order.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    return tokenizer


class TextTokenizer:
    """A tokenizer by its ``tokenizer.json`` and its EOS id, as worker processes load it.

    Shards carry ``hash``, by which tokenizers are told apart. ``vocabulary`` counts all ids, with
    those that were added.
    """

    def __init__(self, path: Path, *, eos_id: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))
        self._truncated_at: int | None = None
        self.eos_id = eos_id
        self.hash = tokenizer_hash(path)
        largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.vocabulary = 1 + max(largest, eos_id)

    def encode_rows(
        self,
        rows: Sequence[str],
        *,
        max_length: int,
        vocabulary: int | None = None,
        counts: Counts | None = None,
    ) -> np.ndarray[Any, Any]:
        """Cut each row to ``max_length`` tokens, add EOS, join all: int32 (tokens,).

        A row is left out if it has an id of ``vocabulary`` or more, which the model does not have,
        or if the tokenizer fails at it. ``counts`` counts each kind of row. Do not call it from
        several threads at once.
        """
        counts = counts or Counts()
        if self._truncated_at != max_length:
            # As in transformers, special tokens that the tokenizer adds count and stay.
            self._tokenizer.enable_truncation(max_length)
            self._truncated_at = max_length
        longest = min(LONGEST, _PER_TOKEN * max_length)
        pieces = []
        for batch in _batches(row[:longest] for row in rows):
            for ids in self._ids_of(batch):
                if ids is None:
                    counts.add("rows_not_tokenized")
                    continue
                # EOS comes after the cut to max_length, as at the validator.
                ids.append(self.eos_id)
                if vocabulary is not None and max(ids) >= vocabulary:
                    counts.add("rows_beyond_vocabulary")
                    continue
                counts.add("rows")
                pieces.append(np.array(ids, dtype=np.int32))
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)

    def _ids_of(self, rows: list[str]) -> list[list[int] | None]:
        """Return the ids of each row, cut; None for one at which the tokenizer fails."""
        with contextlib.suppress(ValueError), _foreign("of the data"):
            encodings = self._tokenizer.encode_batch_fast(rows, add_special_tokens=True)
            return [encoding.ids for encoding in encodings]
        return [None] if len(rows) == 1 else [ids for row in rows for ids in self._ids_of([row])]


@functools.cache
def text_tokenizer(path: Path, eos_id: int) -> TextTokenizer:
    """Return this process's one tokenizer of a file: a large one takes 100 MB."""
    return TextTokenizer(path, eos_id=eos_id)


def _batches(rows: Iterable[str]) -> Iterator[list[str]]:
    """Yield the rows in runs of about ``_BATCH`` characters.

    A tokenizer takes 135 bytes of memory per byte of text, until all of a batch is done.
    """
    batch: list[str] = []
    left = _BATCH
    for row in rows:
        batch.append(row)
        left -= len(row)
        if left <= 0:
            yield batch
            batch, left = [], _BATCH
    if batch:
        yield batch


def tokenizer_hash(path: Path) -> str:
    """Return the SHA-256 of what a ``tokenizer.json`` says, whatever its layout.

    Raises OSError, ValueError.
    """
    content = json.loads(path.read_bytes())
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def build_tokenizer(name: str, folder: Path, *, revision: str | None = None) -> tuple[Path, int]:
    """Write ``tokenizer.json`` of ``name`` into ``folder``; return its path and EOS id.

    ``bytes`` names the byte-level tokenizer; anything else is a name or folder for transformers'
    AutoTokenizer, which can also load the folder that is written here. ``revision``: the commit of
    a name at the hub; None is the newest. Raises ValueError if the tokenizer has no EOS or no fast
    form, is damaged or cannot be fetched, and OSError if it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    if name == "bytes":
        tokenizer: Tokenizer | None = byte_tokenizer()
        eos_id = byte_tokenizer().token_to_id(EOS)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS,
            "pad_token": EOS,
            "clean_up_tokenization_spaces": False,
        }
        write_json(folder / "tokenizer_config.json", settings, durable=False)
    else:
        loaded = load_pretrained(name, revision=revision)
        with _foreign(name):
            tokenizer = getattr(loaded, "backend_tokenizer", None)
            eos_id = loaded.eos_token_id
        if tokenizer is None or eos_id is None:
            raise ValueError(
                f"the tokenizer {name} has no {'EOS token' if tokenizer else 'fast form'}, so rows "
                "cannot be told apart: give another one as tokenizer.name of the network's file"
            )
        # A tokenizer.json may bring limits of its own; only data.max_length cuts rows.
        tokenizer.no_truncation()
        tokenizer.no_padding()
    assert tokenizer is not None and eos_id is not None
    with _foreign(name):
        text, eos_id = tokenizer.to_str(), int(eos_id)
    write_bytes(path, text.encode(), durable=False)
    with _foreign(name):
        TextTokenizer(path, eos_id=eos_id)
        tokenizer.encode("one two")  # some faults show at the first row
    return path, eos_id


def name_of_folder(folder: Path) -> str:
    """Return the name of a folder's tokenizer: its path, or ``bytes`` if it is that one."""
    # Ignore a damaged file, since the program that loads it says what is wrong.
    with contextlib.suppress(OSError, ValueError):
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        if content == json.loads(byte_tokenizer().to_str()):
            return "bytes"
    return str(folder)


def load_pretrained(name: str, *, revision: str | None = None) -> Any:
    """Load a tokenizer of transformers, by name or folder; code of its own is never run.

    Raises ValueError; its cause is what transformers raised.
    """
    from transformers import AutoTokenizer

    share(HUB)  # set first, since the client of the hub reads the environment
    how: dict[str, Any] = {"use_fast": True, "trust_remote_code": False, "revision": revision}
    if revision is None:
        del how["revision"]
    with _foreign(name):
        return AutoTokenizer.from_pretrained(name, **how)


@contextlib.contextmanager
def _foreign(name: str) -> Iterator[None]:
    """Raise ValueError, in one line, for whatever reading the tokenizer ``name`` raises."""
    try:
        yield
    # Damaged files make transformers raise errors of any kind, and a panic of its library is not
    # even an Exception.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, (ValueError, OSError)):
            why = f"{type(error).__name__}: {why}"
        if "trust_remote_code" in why:
            why = (
                "it needs code of its own, which is never run: make a folder of its "
                "tokenizer.json and of a tokenizer_config.json without auto_map"
            )
        raise ValueError(
            f"the tokenizer {name} cannot be read ({why:.300}), so there is no text to train on: "
            "correct tokenizer.name of the network's file, or the files of its folder"
        ) from error
