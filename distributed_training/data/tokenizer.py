"""Turn text into token ids, with a byte-level tokenizer or with one from Hugging Face."""

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

#: The most characters of a row that are tokenized, per wanted token and in total. Without limits, a
#: tokenizer would read the whole row, and 2 million characters already take 3 s and 280 MB.
_PER_TOKEN, LONGEST = 64, 2**21
_BATCH = 2**20
EOS = "<eos>"
#: The 257 ids (256 bytes and EOS), rounded up to a multiple of 8.
BYTE_VOCABULARY = 264


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per UTF-8 byte, and with EOS as id 256.

    Ids 0 to 255 follow the order of the byte-level alphabet.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    return tokenizer


class TextTokenizer:
    """A tokenizer loaded from its ``tokenizer.json``, with its EOS id, as data workers use it.

    ``hash`` identifies the tokenizer. ``vocabulary`` is the number of ids, including those of added
    tokens.
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
        """Cut each row to ``max_length`` tokens, add EOS, and join all rows: int32 (tokens,).

        A row is left out if the tokenizer fails on it, or if it has an id of ``vocabulary`` or
        above, which the model does not have. ``counts`` counts each kind of row. This method is not
        thread-safe.
        """
        counts = counts or Counts()
        if self._truncated_at != max_length:
            # As in transformers, the special tokens that the tokenizer adds are kept, and count.
            self._tokenizer.enable_truncation(max_length)
            self._truncated_at = max_length
        longest = min(LONGEST, _PER_TOKEN * max_length)
        pieces = []
        for batch in _batches(row[:longest] for row in rows):
            for ids in self._ids_of(batch):
                if ids is None:
                    counts.add("rows_not_tokenized")
                    continue
                # Append EOS after the cut to max_length, as the validator does.
                ids.append(self.eos_id)
                if vocabulary is not None and max(ids) >= vocabulary:
                    counts.add("rows_beyond_vocabulary")
                    continue
                counts.add("rows")
                pieces.append(np.array(ids, dtype=np.int32))
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)

    def _ids_of(self, rows: list[str]) -> list[list[int] | None]:
        """Return the ids of each row after truncation; None if the tokenizer fails on the row."""
        with contextlib.suppress(ValueError), _foreign("of the data"):
            encodings = self._tokenizer.encode_batch_fast(rows, add_special_tokens=True)
            return [encoding.ids for encoding in encodings]
        return [None] if len(rows) == 1 else [ids for row in rows for ids in self._ids_of([row])]


@functools.cache
def text_tokenizer(path: Path, eos_id: int) -> TextTokenizer:
    """Return the tokenizer in a file, and load it only once, since a large one takes 100 MB."""
    return TextTokenizer(path, eos_id=eos_id)


def _batches(rows: Iterable[str]) -> Iterator[list[str]]:
    """Yield the rows in batches of about ``_BATCH`` characters.

    Until a batch is done, a tokenizer needs 135 bytes of memory for each byte of its text.
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
    """Return the SHA-256 of the content of a ``tokenizer.json``, independent of its layout.

    Raises OSError, ValueError.
    """
    content = json.loads(path.read_bytes())
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def build_tokenizer(name: str, folder: Path, *, revision: str | None = None) -> tuple[Path, int]:
    """Write the ``tokenizer.json`` of ``name`` into ``folder``; return its path and EOS id.

    ``bytes`` names the byte-level tokenizer. Any other name is that of a folder or a repository
    for transformers' AutoTokenizer, which can also load the folder that is written here.
    ``revision`` is the commit at the hub, or None for the newest. Raises ValueError if the
    tokenizer has no EOS or no fast form, is damaged or cannot be fetched, and OSError if it cannot
    be written.
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
                "cannot be told apart: set another tokenizer.name in the network's file"
            )
        # Remove limits that a tokenizer.json may set; only data.max_length may cut rows.
        tokenizer.no_truncation()
        tokenizer.no_padding()
    assert tokenizer is not None and eos_id is not None
    with _foreign(name):
        text, eos_id = tokenizer.to_str(), int(eos_id)
    write_bytes(path, text.encode(), durable=False)
    with _foreign(name):
        TextTokenizer(path, eos_id=eos_id)
        tokenizer.encode("one two")  # some faults show only when text is encoded
    return path, eos_id


def name_of_folder(folder: Path) -> str:
    """Return ``bytes`` if a folder has the byte-level tokenizer, otherwise the folder's path."""
    # Ignore a damaged file here, because the program that loads it says what is wrong.
    with contextlib.suppress(OSError, ValueError):
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        if content == json.loads(byte_tokenizer().to_str()):
            return "bytes"
    return str(folder)


def load_pretrained(name: str, *, revision: str | None = None) -> Any:
    """Load a tokenizer with transformers by its name or folder, and run no code that it brings.

    Raises ValueError, whose cause is the error that transformers raised.
    """
    from transformers import AutoTokenizer

    share(HUB)  # do this first, because the hub's client reads the environment
    how: dict[str, Any] = {"use_fast": True, "trust_remote_code": False, "revision": revision}
    if revision is None:
        del how["revision"]
    with _foreign(name):
        return AutoTokenizer.from_pretrained(name, **how)


@contextlib.contextmanager
def _foreign(name: str) -> Iterator[None]:
    """Raise ValueError with a one-line message for any error while reading tokenizer ``name``."""
    try:
        yield
    # With damaged files, transformers may raise any error, and a panic in its Rust library is not
    # even an Exception.
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, (ValueError, OSError)):
            why = f"{type(error).__name__}: {why}"
        if "trust_remote_code" in why:
            why = (
                "it needs its own code, which is never run: make a folder with its "
                "tokenizer.json and a tokenizer_config.json without auto_map"
            )
        raise ValueError(
            f"the tokenizer {name} cannot be read ({why:.300}), so there is no text to train on: "
            "correct tokenizer.name in the network's file, or the files in its folder"
        ) from error
