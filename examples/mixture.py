"""Train on several sources: ``--plugins examples.mixture --data.source mix:DIR``.

``mix.toml`` in DIR has a line for each source, with the value that ``--data.source`` would have and
its share of the sequences::

    hub = 0.7
    "parquet:/data/code" = 0.3
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from distributed_training.config.settings import SourceSpec, parse_source
from distributed_training.config.types import ConfigError
from distributed_training.data.block_builder import WorkerSpec, open_tokens
from distributed_training.data.page_source import Counts, SourceTokens
from distributed_training.data.sources import SOURCES, SourceKind, check_folder, kind_of

FILE = "mix.toml"


def read_shares(folder: Path) -> dict[str, float]:
    """Return the shares of the sources, which sum to 1. Raises ConfigError."""
    path = folder / FILE
    try:
        shares = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}), so the mix is not defined: fix that file"
        ) from None
    good = all(type(share) in (int, float) and 0 < share < math.inf for share in shares.values())
    if not shares or not good:
        raise ConfigError(
            f"{path} does not give each source a share above 0, so the mix is not defined: write "
            "lines such as hub = 0.7"
        )
    for text in shares:
        kind_of(parse_source(text))
        check_folder(parse_source(text))
    total = sum(shares.values())
    return {text: share / total for text, share in shares.items()}


def interleave(shares: Sequence[float], counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the source of each sequence in a block, and the sequence's number in its source.

    After k sequences, every source has contributed its share of k, give or take one. The block ends
    when the source whose turn it is has no more, so the shares stay exact. An empty source is left
    out.
    """
    here = [share if count else 0.0 for share, count in zip(shares, counts, strict=True)]
    credit, used = np.zeros(len(here)), [0] * len(here)
    order: list[tuple[int, int]] = []
    while any(here):
        credit += np.asarray(here) / sum(here)
        # Round the credits, since ties may differ in their last bits.
        chosen = int(np.argmax(credit.round(9)))
        if used[chosen] == counts[chosen]:
            break
        order.append((chosen, used[chosen]))
        credit[chosen] -= 1.0
        used[chosen] += 1
    return order


class MixedTokens:
    """The tokens of several sources, interleaved sequence by sequence according to their shares."""

    def __init__(self, worker: WorkerSpec, spec: SourceSpec, counts: Counts) -> None:
        assert spec.folder is not None
        shares = read_shares(spec.folder)
        self._length = worker.sequence_length
        self._shares = list(shares.values())
        self._tokens = [
            open_tokens(replace(worker, settings=replace(worker.settings, source=text)), counts)
            for text in shares
        ]

    def block(self, block: int, pages: int) -> SourceTokens:
        parts: list[np.ndarray[Any, Any]] = []
        missing: list[str] = []
        for share, tokens in zip(self._shares, self._tokens, strict=True):
            # 0.07 * 100 is 7.000000000000001, which must not be rounded up to 8 pages.
            had = tokens.block(block, max(1, math.ceil(share * pages - 1e-9)))
            count = len(had.tokens) // self._length
            parts.append(had.tokens[: count * self._length].reshape(count, self._length))
            missing += had.missing
        order = interleave(self._shares, [len(part) for part in parts])
        mixed = [np.zeros(0, dtype=np.int32), *(parts[source][number] for source, number in order)]
        return SourceTokens(np.concatenate(mixed), missing)


SOURCES.register("mix", SourceKind(in_folder=True, tokens=MixedTokens))
