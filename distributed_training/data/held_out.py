"""Read the held-out text, on which the global model is judged and no member trains.

``data.held_out`` names the text: pages of the network's data that no member draws, or files that
the founder has chosen and pinned by their SHA-256. If it names neither, the text is the Python
standard library of the validator's machine. If there are several files, each is a *domain*, and
the loss that counts is the weighted mean of their losses.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distributed_training.common.files import open_at_once, write_bytes
from distributed_training.common.http import TooLong, run_to_end
from distributed_training.config import Config, ConfigError
from distributed_training.config.types import Domain
from distributed_training.network import HELD_OUT, NetworkAway, NetworkFileError
from distributed_training.network_place import download

from .page_source import Counts, PageUnavailable, StdlibSource, usable_texts
from .sources import Source
from .tokenizer import TextTokenizer

if TYPE_CHECKING:
    import torch

LARGEST_FILE = 64 * 2**20  # bytes
_SECONDS = 300.0  # time limit for fetching a file
_WHOLE = 10**9  # more tokens than any row has, so that no row is cut


def held_out_batches(
    config: Config, tokenizer_path: Path, eos_id: int, *, sequences: int
) -> dict[str, torch.Tensor]:
    """Return ``sequences`` sequences of each domain, keyed by its name.

    Of a small domain, all sequences are returned. Each value is int64 (n, sequence_length). Raises
    ConfigError for a file that is not the pinned one, or for a text shorter than one sequence, and
    PageUnavailable if a text cannot be read now.
    """
    import torch  # imported here, since dt-network reads such files without torch

    length, found = config.training.sequence_length, {}
    for name, tokens in domain_tokens(config, tokenizer_path, eos_id).items():
        # Take sequences from the whole text, not only from the first file.
        count = min(sequences, len(tokens) // length)
        starts = np.linspace(0, len(tokens) - length, count).astype(np.int64)
        picked = np.stack([tokens[s : s + length] for s in starts])
        found[name] = torch.from_numpy(picked.astype(np.int64))
    return found


def domain_tokens(
    config: Config, tokenizer_path: Path, eos_id: int
) -> dict[str, np.ndarray[Any, Any]]:
    """Return all tokens of each domain, keyed by its name.

    Each value is int32 (tokens,) and has at least one sequence. Raises the same errors as
    :func:`held_out_batches`.
    """
    tokenizer = TextTokenizer(tokenizer_path, eos_id=eos_id)
    found, length = {}, config.training.sequence_length
    for domain in config.domains:
        rows, longest = _rows(config, domain)
        found[domain.name] = tokens = tokenizer.encode_rows(rows, max_length=longest)
        if len(tokens) < length:
            raise ConfigError(
                f"the held-out text ({domain.name}) has {len(tokens)} tokens, and a sequence has "
                f"{length}, so no outer step could be judged: see data.held_out in the network's "
                "file"
            )
    return found


def mean_loss(losses: Mapping[str, float], domains: Sequence[Domain]) -> float:
    """Return the loss that counts: the weighted mean of ``losses``, which are keyed by domain."""
    return sum(domain.weight * losses[domain.name] for domain in domains)


def _rows(config: Config, domain: Domain) -> tuple[list[str], int]:
    """Return the rows of a domain, and the number of tokens to which each row is cut."""
    if domain.place == "python":
        return StdlibSource().held_out(), _WHOLE
    if domain.digest is not None:
        content = _read_pinned(domain.place, domain.digest, config)
        return file_rows(domain.place, content, config.data.text_column), _WHOLE
    source, draw = Source(config.data, cache=config.data_cache), config.draw_pages
    rows: list[str] = []
    try:
        pages = draw.held_out(source.num_rows())
    except ValueError as error:
        raise PageUnavailable(str(error)) from None
    for page, row, split in pages:
        rows += source.rows(page, row, split=split, limit=config.data.rows_per_page)
    return rows, config.data.max_length


def _read_pinned(place: str, digest: str, config: Config) -> bytes:
    """Return the content as :func:`read_file` does, but prefer the copies on this machine.

    A copy is kept in the run folder, so that outer steps can still be judged when the server or the
    founder's own file is gone. There may also be a copy next to the network's file.
    """
    copy = config.run_folder / HELD_OUT / digest
    beside = Path(config.network.place).parent / HELD_OUT / place
    content = None
    for path in (copy, beside):
        with suppress(OSError, ValueError), open_at_once(path) as file:
            found = file.read(LARGEST_FILE) or b""
            if hashlib.sha256(found).hexdigest() == digest:
                if path is copy:
                    return found
                content = found
    if content is None and "/" not in place and not Path(place).exists():
        raise ConfigError(
            f"the held-out text {place} is neither {copy} nor {beside}, so nothing can be judged "
            "here: copy it there from the founder's machine, where dt-network init put it in "
            f"{HELD_OUT}/"
        )
    content = content or read_file(place, digest)
    if config.run_folder.is_dir():
        with suppress(OSError):
            copy.parent.mkdir(exist_ok=True)
            write_bytes(copy, content)
    return content


def read_file(place: str, digest: str | None = None) -> bytes:
    """Return the content of a path or https URL.

    Raises ConfigError for a file that cannot be read or does not have the SHA-256 ``digest``, and
    PageUnavailable for a URL that does not answer.
    """
    remedy = "correct data.held_out in the network's file, or restore the file that it names"
    try:
        if "://" in place:
            import httpx

            try:
                content = run_to_end(download(place, most=LARGEST_FILE, seconds=_SECONDS))
            except (NetworkAway, TooLong, httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
                why = str(error) or type(error).__name__
                raise PageUnavailable(f"the held-out text {place}: {why:.300}") from None
        else:
            with open_at_once(Path(place).expanduser()) as file:
                # If the file is a pipe to which nobody writes, read() returns None.
                content = file.read(LARGEST_FILE + 1) or b""
    except (OSError, NetworkFileError) as error:
        raise ConfigError(
            f"the held-out text {place} cannot be read ({error}), so no outer step could be "
            f"judged: {remedy}"
        ) from None
    if not content:
        raise ConfigError(
            f"the held-out text {place} is empty, so no outer step could be judged: {remedy}"
        )
    if len(content) > LARGEST_FILE:
        raise ConfigError(
            f"the held-out text {place} has more than {LARGEST_FILE} bytes, so it is not read: "
            "use a part of it"
        )
    found = hashlib.sha256(content).hexdigest()
    if digest not in (None, found):
        raise ConfigError(
            f"the held-out text {place} has the SHA-256 {found} and the network's file pins "
            f"{digest}, so nobody else would get its losses: {remedy}"
        )
    return content


def file_rows(place: str, content: bytes, column: str) -> list[str]:
    """Return the rows of a Parquet file's ``column``; any other file is a single row.

    Raises ConfigError.
    """
    try:
        if not place.endswith(".parquet"):
            return [content.decode()]
        import pyarrow.parquet as pq

        values = pq.read_table(io.BytesIO(content), columns=[column]).column(0).to_pylist()
        return usable_texts(values, Counts())
    except (OSError, ValueError, LookupError) as error:  # Arrow's errors have these types too
        why = " ".join(str(error).split())
        raise ConfigError(
            f"the held-out text {place} cannot be used ({why:.200}), so no outer step could be "
            f"judged: give UTF-8 text, or a .parquet file with the column {column!r}"
        ) from None
