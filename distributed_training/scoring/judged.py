"""What uploads are judged against now: the outer step, its global weights, the outer learning rate.

A validator knows these, having published them. Everybody else reads them from the global bucket,
whose credentials the master hotkey committed to the chain.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from distributed_training.node.peers import Reader
from distributed_training.protocol import keys, names, schedule
from distributed_training.protocol.metadata import (
    MAX_CONFIG_BYTES,
    MAX_METADATA_BYTES,
    Metadata,
    MetadataError,
    parse_config,
)
from distributed_training.protocol.payload import Schema
from distributed_training.scoring.model import load_weights, model_bytes
from distributed_training.store.contents import PtFile
from distributed_training.store.errors import StoreError
from distributed_training.training.model import CONFIG_EXTRAS, parameter_schema
from distributed_training.training.outer import OUTER_LEARNING_RATE

log = logging.getLogger(__name__)


class NotJudgeable(RuntimeError):
    """The global state cannot be had, so nothing can be scored; the text says why."""


@dataclass(frozen=True)
class Judged:
    """``outer_step``: X, the folder of a miner's bucket that is judged now; after a round it is the
    one before for half a period. ``weights``: global, of X, in schema order."""

    block: int
    bpa: int
    global_outer_step: int
    outer_step: int
    model_config: Mapping[str, Any]
    schema: Schema
    weights: list[Tensor]
    learning_rate: float


def read_judged(
    bucket: Reader,
    folder: Path,
    *,
    block: int,
    bpa: int,
    bpa_later: int,
    outer_step: int | None = None,
) -> Judged:
    """``bpa``: blocks between two rounds, ``bpa_later`` after the first successful one (0: the
    same). ``outer_step``: to judge, where ``block`` should not decide. ``folder`` keeps the
    weights, so that they are fetched once an outer step.

    Raises NotJudgeable.
    """
    try:
        root = _root(bucket)
        if bpa_later and root.outer_step > 0:
            bpa = bpa_later
        raw = bucket.get(keys.epoch_key(root.outer_step, keys.CONFIG), limit=MAX_CONFIG_BYTES)
        if raw is None:
            raise NotJudgeable(f"{bucket.name} has no config.json of outer step {root.outer_step}")
        config, extras = parse_config(raw)
        if outer_step is None:
            outer_step = schedule.scored_epoch(
                outer_step=root.outer_step,
                block=block,
                last_allreduce_block=extras.last_allreduce_block or 0,
                bpa=bpa,
            )
        model_config = {k: v for k, v in config.items() if k not in CONFIG_EXTRAS}
        schema = parameter_schema(model_config)
        return Judged(
            block=block,
            bpa=bpa,
            global_outer_step=root.outer_step,
            outer_step=outer_step,
            model_config=model_config,
            schema=schema,
            weights=_weights(bucket, folder, outer_step, schema),
            learning_rate=_learning_rate(bucket, root.outer_step),
        )
    except (StoreError, MetadataError, ValueError) as error:
        raise NotJudgeable(f"the global state cannot be read: {error}") from None


def _root(bucket: Reader) -> Metadata:
    data = bucket.get(keys.ROOT_METADATA, limit=MAX_METADATA_BYTES)
    if data is None:
        raise NotJudgeable(f"{bucket.name} is empty: nothing was published yet")
    root = Metadata.parse(data)
    if root.run != names.RUN:
        raise NotJudgeable(f"{bucket.name} is of run {root.run}, this program of {names.RUN}")
    return root


def _weights(bucket: Reader, folder: Path, outer_step: int, schema: Schema) -> list[Tensor]:
    key = keys.epoch_key(outer_step, keys.MODEL)
    info = bucket.head(key)
    if info is None:
        raise NotJudgeable(f"{bucket.name}/{key} is missing")
    # By what identifies the object: a state may be published anew under the same number.
    path = folder / f"{keys.epoch_folder(outer_step)}-{info.etag or int(info.modified)}.safetensors"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("epoch-*.safetensors"):
            old.unlink(missing_ok=True)
        bucket.download(key, path, limit=model_bytes(schema))
    return load_weights(path, schema)


def _learning_rate(bucket: Reader, outer_step: int) -> float:
    """From the global outer optimizer's file, without its momentum, which is as large as the
    model."""
    key = keys.epoch_key(outer_step, keys.OUTER_OPTIMIZER)
    try:
        content = PtFile(bucket.open(key)).content
        found = float(content["optimizer_state_dict"]["param_groups"][0]["lr"])
    except (StoreError, KeyError, IndexError, TypeError, ValueError) as error:
        log.warning(
            "%s/%s cannot be read (%s): scored with outer learning rate %g",
            bucket.name,
            key,
            error,
            OUTER_LEARNING_RATE,
        )
        return OUTER_LEARNING_RATE
    return found
