"""Train on several sources: ``--plugins examples.mixture --data.source mix:DIR``.

``mix.toml`` in DIR has a line for each source: what ``--data.source`` would say, and its share of
the sequences::

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
            f"{path} cannot be read ({error}), so the mix is not defined: correct it"
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
    """Return source and number of each sequence of a block.

    After k of them every source has had its share of k to within one. It ends with the first that
    its source does not have, so that shares hold. A source with nothing at all is left out.
    """
    here = [share if count else 0.0 for share, count in zip(shares, counts, strict=True)]
    credit, used = np.zeros(len(here)), [0] * len(here)
    order: list[tuple[int, int]] = []
    while any(here):
        credit += np.asarray(here) / sum(here)
        # Rounded: ties differ in their last bits.
        chosen = int(np.argmax(credit.round(9)))
        if used[chosen] == counts[chosen]:
            break
        order.append((chosen, used[chosen]))
        credit[chosen] -= 1.0
        used[chosen] += 1
    return order


class MixedTokens:
    """The tokens of several sources, sequence by sequence, by their shares."""

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
            # 0.07 * 100 is 7.000000000000001, which must not become one page more.
            had = tokens.block(block, max(1, math.ceil(share * pages - 1e-9)))
            count = len(had.tokens) // self._length
            parts.append(had.tokens[: count * self._length].reshape(count, self._length))
            missing += had.missing
        order = interleave(self._shares, [len(part) for part in parts])
        mixed = [np.zeros(0, dtype=np.int32), *(parts[source][number] for source, number in order)]
        return SourceTokens(np.concatenate(mixed), missing)


SOURCES.register("mix", SourceKind(in_folder=True, tokens=MixedTokens))
