"""How many sequences a GPU holds at once, remembered over restarts.

Running out of memory is no reason to lose a day. One rank alone runs the step again in pieces of
half the size. With several ranks the others wait in a collective that the failed one left, so all
end and start again, from the last checkpoint; :class:`KnownSize` is how they then know better. Both
train on the same micro-batches as before, each in pieces, so nothing else changes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from distributed_training.common.files import read_json_object, write_json
from distributed_training.config.training import TrainingSettings

from .sharding import ShardedModel
from .shards import RowStream

log = logging.getLogger(__name__)

OUT_OF_MEMORY_ADVICE = (
    "lower --neuron.local_batch_size_train (or give auto), add --neuron.activation_checkpointing "
    "full or --neuron.offload_optimizer on; --neuron.local_batch_size_train_effective does not "
    "change memory"
)


class KnownSize:
    """What was found out about this model on this GPU, in a file of the run folder.

    ``path`` None: nothing is remembered. ``facts``: what it depends on; of another model, length or
    GPU nothing is known. ``most``: sequences at once that fit, None while it never ran out.
    ``fastest``: what ``auto`` found.
    """

    def __init__(self, path: Path | None, facts: Mapping[str, Any]) -> None:
        self._path = path
        self._facts = dict(facts)
        content = {} if path is None else read_json_object(path) or {}
        same = content.get("facts") == self._facts
        self.most = _positive(content.get("most")) if same else None
        self.fastest = _positive(content.get("fastest")) if same else None

    def agree(self, stream: RowStream) -> None:
        """Nodes have files of their own: the smallest of what they say. All ranks call this."""
        answers = stream.answers((self.most, self.fastest))
        most, fastest = ([n for n in each if n] for each in zip(*answers, strict=True))
        self.most = min(most, default=None)
        # One node that found nothing out: all measure.
        self.fastest = min(fastest) if len(fastest) == len(answers) else None

    def ran_out(self, sequences: int) -> int:
        """``sequences`` at once did not fit; how many are to be tried. Any rank may call it."""
        self.most = max(1, sequences // 2)
        self.fastest = None if self.fastest is None else min(self.fastest, self.most)
        self._write()
        return self.most

    def measured(self, fastest: int) -> None:
        self.fastest = fastest
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        content = {"facts": self._facts, "most": self.most, "fastest": self.fastest}
        try:
            write_json(self._path, content)
        except OSError as error:
            log.warning("%s cannot be written (%s): a restart finds out again", self._path, error)


def facts_of(sharded: ShardedModel, settings: TrainingSettings) -> dict[str, Any]:
    """What the size that fits depends on."""
    device, hardware, size = sharded.device, "cpu", 0
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
        size = torch.cuda.get_device_properties(device).total_memory
    return {
        "device": hardware,
        "device_bytes": size,
        "model": [[name, list(shape)] for name, shape in sharded.schema[:12]]
        + [len(sharded.schema)],
        "ranks": sharded.mesh.size(),
        "sequence_length": settings.sequence_length,
        "activation_checkpointing": settings.activation_checkpointing,
        "offload_optimizer": sharded.plan.offload_optimizer,
        "keep_unsharded": sharded.plan.keep_unsharded,
        "reduces_each": sharded.plan.sync_every,
        "precision": str(sharded.compute_dtype),
        "compiled": sharded.compiled,
        "torch": torch.__version__,
    }


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
