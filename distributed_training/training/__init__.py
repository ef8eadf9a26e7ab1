"""Model, FSDP2, inner step, outer step, snapshot, checkpoint, throughput. Needs torch only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import Checkpointer as Checkpointer
    from .model import parameter_schema as parameter_schema
    from .outer import nesterov_sgd as nesterov_sgd
    from .sizes import local_llama_config as local_llama_config
    from .sizes import named_config as named_config
    from .snapshot import SnapshotHandle as SnapshotHandle
    from .trainer import Trainer as Trainer

_WHERE = {
    "Checkpointer": "checkpoint",
    "SnapshotHandle": "snapshot",
    "Trainer": "trainer",
    "local_llama_config": "sizes",
    "named_config": "sizes",
    "nesterov_sgd": "outer",
    "parameter_schema": "model",
}
__all__ = [
    "Checkpointer",
    "SnapshotHandle",
    "Trainer",
    "local_llama_config",
    "named_config",
    "nesterov_sgd",
    "parameter_schema",
]


def __getattr__(name: str) -> Any:
    # Lazy: whoever needs only sizes or the outer arithmetic does not import FSDP.
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
