"""What must be equal on all nodes of a miner: versions, model, all settings of the training."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, cast

from distributed_training import __version__
from distributed_training.config import Config
from distributed_training.config.values import show
from distributed_training.diagnostics.nvml import visible_gpu_count

#: Settings that may differ between nodes: where things lie, and how much of the machine is used.
_OF_ONE_NODE = frozenset(
    {"data.cache_dir", "data.workers", "data.connections", "profile.steps", "profile.start"}
)


def facts_of(config: Config, *, ranks: int, remembered: int = 0) -> dict[str, str]:
    """What must be equal on all nodes, as an operator would write it. ``remembered``: GPUs that
    earlier ranks ran on, for a driver that does not answer just after a reboot."""
    on_gpu = config.miner.device != "cpu" and (visible_gpu_count() or remembered) > 0
    facts = {
        "version": __version__,
        "torch": version("torch"),
        "--nproc_per_node": str(ranks),
        "--neuron.device": "cuda" if on_gpu else "cpu",
        "--nnodes": config.nodes.nnodes,
        "--neuron.global_model_name": config.miner.global_model_name,
        "--neuron.global_tokenizer_name": config.miner.global_tokenizer_name,
    }
    shared = [
        field.json_schema_extra["name"]
        for room in (config.training, config.data)
        for field in cast(Any, type(room)).__pydantic_fields__.values()
    ]
    values = {f"--{n}": show(config.get(n)) for n in shared if n not in _OF_ONE_NODE}
    return facts | values


def difference(mine: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """What is wrong on the ``other`` node in a line; None if nothing is."""
    for name in [*mine, *other]:
        here, there = mine.get(name), other.get(name)
        if here != there:
            return (
                f"{name} is {there} on this node and {here} on node 0, so the nodes cannot train "
                "one model together: give all nodes the same flags and versions"
            )
    return None
