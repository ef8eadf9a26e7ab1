"""Settings of the data room."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from .flags import flag


@dataclass(frozen=True)
class DataSettings:
    """Where text comes from and how far ahead it is prepared."""

    source: str = flag(
        "data.source",
        "hf",
        "'hf' (fineweb-edu over the Hugging Face rows API, as validators assign it) or 'stdlib' "
        "(this machine's Python sources, for the local subnet)",
        choices=("hf", "stdlib"),
    )
    dataset: str = flag("data.dataset", "HuggingFaceFW/fineweb-edu", "dataset of --data.source hf")
    rows_url: str = flag(
        "data.rows_url", "https://datasets-server.huggingface.co", "server of the rows API"
    )
    pages_per_block: int = flag(
        "data.pages_per_block", 5, "pages of each block; validators look at the first two"
    )
    rows_per_page: int = flag("data.rows_per_page", 100, "rows of a page")
    max_length: int = flag("data.max_length", 1024, "tokens of a row; the rest of it is dropped")
    prefetch_blocks: int = flag(
        "data.prefetch_blocks", 2, "blocks prepared ahead of the one in training"
    )
    request_timeout: timedelta = flag(
        "data.request_timeout", timedelta(seconds=20), "one HTTP request for rows"
    )
    request_attempts: int = flag(
        "data.request_attempts", 6, "attempts for a page, with growing waits, before it is left out"
    )
    connections: int = flag("data.connections", 4, "pages of a block fetched at once")
