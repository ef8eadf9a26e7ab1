"""Stand for the validator of a store network: merge the uploads and publish the update.

The merge is that of the product (``validator/merge.py``). Tests decide when a close comes.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from bittensor_core import verify
from safetensors.torch import save_file

from distributed_training.common.files import sha256_of
from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Manifest, Merged
from distributed_training.protocol.update_file import UpdateFile, UpdateLayout
from distributed_training.training.model import parameter_schema
from distributed_training.validator.merge import (
    Measured,
    OuterState,
    Rule,
    merge_factors,
    merge_named,
    norm_of,
)
from tests.tools.network import ALICE
from tests.tools.outer_steps import header, manifest_after, state_of
from tests.tools.waiting import wait_for

RULE = Rule("nesterov", 0.7, 0.9)
_FAR = 1e6  # seconds until a close that no test has opened


class Leader:
    """Lead a network.

    ``bucket``: the folder of the global bucket. ``model``: content of the model's ``config.json``.
    ``members``: hotkeys by uid.
    """

    def __init__(
        self, bucket: Path, model: dict[str, Any], *, run_id: str, members: dict[int, str]
    ) -> None:
        self.bucket, self.model, self.run_id, self.members = bucket, model, run_id, members
        self.schema = parameter_schema(model)
        generator = torch.Generator().manual_seed(1)
        weights = [0.05 * torch.randn(shape, generator=generator) for _, shape in self.schema]
        self.state, self.chain, self.serial = OuterState(weights), list[Manifest](), 1
        self._publish(update="", merged=(), whole=True)

    @property
    def outer_step(self) -> int:
        return len(self.chain) - 1

    def open_close(self) -> None:
        """Move the close to now, which makes uploads for an earlier close void."""
        self.serial += 1
        self._write_state(time.time())

    def take_outer_step(self, *uids: int) -> None:
        """Wait for the uploads of ``uids`` for the close, merge them, and publish the update."""
        outer, serial = self.outer_step, self.serial
        paths = [self.bucket / keys.upload_key(uid, outer, serial) for uid in uids]
        wait_for(lambda: all(path.exists() for path in paths), f"uploads of {outer}.{serial}", 60)
        files = [
            UpdateFile.open(
                path,
                self.schema,
                run_id=self.run_id,
                kind="upload",
                hotkey=self.members[uid],
                verify=verify,
            )
            for uid, path in zip(uids, paths, strict=True)
        ]
        norms = [norm_of(file) for file in files]
        factors = merge_factors([Measured(norm, 0.1, 0.0) for norm in norms], self.chain)
        named = {"run_id": self.run_id, "hotkey": ALICE.ss58_address}
        head = header("update", outer, start=self.chain[-1].weights, **named)
        place = self.bucket / keys.outer_key(outer + 1, keys.UPDATE)
        aside = self.bucket.parent / "update"
        merged = tuple(
            Merged(uid, file.header.hotkey, file.digest, norm, factor, 0.1, 1, 1)
            for uid, file, norm, factor in zip(uids, files, norms, factors, strict=True)
        )
        layout = UpdateLayout.of(self.schema, head)
        digest, self.state = merge_named(
            merged, files, self.state, RULE, path=aside, layout=layout, sign=ALICE.sign
        )
        place.parent.mkdir(parents=True)
        shutil.move(aside, place)
        self._publish(update=digest, merged=merged)

    def _publish(self, *, update: str, merged: tuple[Merged, ...], whole: bool = False) -> None:
        outer = len(self.chain)
        folder = self.bucket / "outer" / str(outer)
        folder.mkdir(parents=True, exist_ok=True)
        if whole:
            (folder / keys.CONFIG).write_text(json.dumps(self.model))
            names = (name for name, _ in self.schema)
            tensors = dict(zip(names, self.state.weights, strict=True))
            save_file(tensors, folder / keys.MODEL, metadata={"format": "pt"})
        files = {name: sha256_of(folder / name) for name in (keys.CONFIG, keys.MODEL) if whole}
        weights, momentum, residual = self.state.digests
        now = time.time()
        manifest = manifest_after(
            self.chain,
            run_id=self.run_id,
            update=update,
            weights=weights,
            momentum=momentum,
            residual=residual,
            merged=merged,
            closed_at=now,
            serial=self.serial,
            made_at=now,
            files=files,
        )
        write(folder / keys.MANIFEST, manifest.to_bytes(ALICE.sign))
        self.chain.append(manifest)
        self.serial += 1
        self._write_state(now + _FAR)

    def _write_state(self, closes_at: float) -> None:
        now = time.time()
        state = state_of(
            self.chain,
            (0,),
            run_id=self.run_id,
            serial=self.serial,
            closes_at=closes_at,
            grace=600.0,
            written_at=now,
            expires=now + _FAR,
        )
        write(self.bucket / keys.STATE, state.to_bytes(ALICE.sign))


def write(path: Path, data: bytes) -> None:
    aside = path.with_name(f".{path.name}")
    aside.write_bytes(data)
    aside.rename(path)
