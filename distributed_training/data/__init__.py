"""Rows -> tokens -> batches: the pages that uid and block assign, always ready.

Names are imported on first use: worker processes need neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .corpus import StdlibSource
    from .pipeline import DataPipeline, held_out_batches
    from .rows_api import RowsApiSource
    from .source import PageSource, PageUnavailable, open_source
    from .spec import WorkerSpec
    from .tokenizer import TextTokenizer, build_tokenizer, byte_tokenizer

__all__ = [
    "DataPipeline",
    "PageSource",
    "PageUnavailable",
    "RowsApiSource",
    "StdlibSource",
    "TextTokenizer",
    "WorkerSpec",
    "build_tokenizer",
    "byte_tokenizer",
    "held_out_batches",
    "open_source",
]

_HOMES = {
    "DataPipeline": "pipeline",
    "held_out_batches": "pipeline",
    "PageSource": "source",
    "PageUnavailable": "source",
    "open_source": "source",
    "RowsApiSource": "rows_api",
    "StdlibSource": "corpus",
    "WorkerSpec": "spec",
    "TextTokenizer": "tokenizer",
    "build_tokenizer": "tokenizer",
    "byte_tokenizer": "tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
