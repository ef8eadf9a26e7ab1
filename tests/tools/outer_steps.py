"""Make uploads, updates and whole chains of a small schema from random values."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distributed_training.protocol import keys
from distributed_training.protocol.manifest import Manifest, Master, Merged, State
from distributed_training.protocol.update_file import (
    Header,
    UpdateFile,
    UpdateLayout,
    finish,
    rows_and_columns,
    write_rows,
)
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.store.folder import FolderStore
from distributed_training.validator.merge import (
    Measured,
    OuterState,
    Rule,
    merge_factors,
    merge_named,
    norm_of,
)
from distributed_training.validator.replay import ManifestChain, write_set

RUN_ID = "0123456789ab"
MASTER = "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY"
#: The (uid, outer step) of the upload that :func:`publish_chain` carries over.
CARRIED = (2, 5)
Schema = list[tuple[str, tuple[int, ...]]]
#: The shapes have whole and short groups of values, a vector longer than a group, and a scalar.
SCHEMA: Schema = [("a", (3, 300)), ("b", (257,)), ("c", (2, 2, 130)), ("d", ())]


def drawn(seed: int, scale: float = 1.0) -> list[Tensor]:
    """Return tensors of the schema, with the same bits on each processor."""
    # Draw whole numbers, because the values of randn depend on the processor.
    generator = torch.Generator().manual_seed(seed)
    limit = 2**20
    return [
        torch.randint(-limit, limit, shape, generator=generator) * (scale / limit)
        for _, shape in SCHEMA
    ]


def hotkey_of(uid: int) -> str:
    return f"5{'uid':z<44}{uid:03d}".replace("0", "z")


def sign(message: bytes) -> bytes:
    return message[-64:]  # the digest in the message, which changes with each bit


def verify(message: bytes, signature: bytes, hotkey: str) -> bool:
    return signature == message[-64:]


def header(kind: str, outer_step: int, *, hotkey: str = MASTER, **changes: object) -> Header:
    values: dict[str, object] = {
        "kind": kind,
        "run_id": RUN_ID,
        "outer_step": outer_step,
        "serial": 0,
        "hotkey": hotkey,
        "start": "0" * 64,
        "codec": "4-bit",
        "inner_steps": 30,
        "tokens": 61440,
    }
    return Header(**values | changes)  # type: ignore[arg-type]


def write_file(
    path: Path, tensors: Sequence[Tensor], head: Header, schema: Schema = SCHEMA
) -> UpdateFile:
    """Write tensors of the schema as an upload or an update, and open it."""
    layout = UpdateLayout.of(schema, head)
    path.parent.mkdir(parents=True, exist_ok=True)
    for index, tensor in enumerate(tensors):
        write_rows(path, layout, index, 0, tensor.view(rows_and_columns(tensor.shape)))
    finish(path, layout, sign)
    return UpdateFile.open(
        path, schema, run_id=RUN_ID, kind=head.kind, hotkey=head.hotkey, verify=verify
    )


def manifest_after(chain: Sequence[Manifest], **changes: Any) -> Manifest:
    """Return the manifest that follows ``chain``; it merges nothing unless ``changes`` say so."""
    values: dict[str, Any] = {
        "run_id": RUN_ID,
        "rules_id": "rules",
        "outer_step": len(chain),
        "previous": chain[-1].digest if chain else "",
        **dict.fromkeys(("update", "weights", "momentum", "residual"), ""),
        "learning_rate": 0.7,
        "mu": 0.9,
        "rule": "nesterov",
        "merged": (),
        "refused": (),
        **{name: {} for name in ("losses_before", "losses_after", "scores", "files")},
        "serial": 0,
        "total_inner_steps": 30 * len(chain),
        "total_tokens": 0,
    }
    return Manifest(**values | changes)


def publish_chain(
    bucket: Path,
    steps: int,
    *,
    weights_every: int = 4,
    keep_uploads: int = 100,
    uids: tuple[int, ...] = (2, 5, 10),
    rule: Rule = Rule("nesterov", 0.7, 0.9),
) -> list[OuterState]:
    """Write a bucket as a validator would; return the state of each outer step."""
    states = [OuterState(drawn(1000))]
    chain: list[Manifest] = []
    at: list[int] = []
    for step in range(steps + 1):
        folder, merged, update = bucket / "outer" / str(step), [], ""
        files = []
        head = header("update", step - 1, start=chain[-1].weights) if step else None
        if head is not None:
            for uid in uids:
                named = {"hotkey": hotkey_of(uid), "start": head.start, "tokens": 61440 + uid}
                upload = header("upload", step - 1, **named)
                size = 1e-3 * (8 if uid == 10 and step == 2 else 1)
                path = folder / f"uploads/{uid}.safetensors"
                files.append(write_file(path, drawn(100 * step + uid, size), upload))
            norms = [norm_of(file) for file in files]
            # One upload is carried over, so nobody can read it.
            gains = [0.0 if (uid, step) == CARRIED else uid / 9 for uid in uids]
            found = [Measured(n, gain, 0.0) for n, gain in zip(norms, gains, strict=True)]
            factors = merge_factors(found, chain)
            merged = [
                Merged(uid, hotkey_of(uid), file.digest, norm, factor, gain, 30, 61440 + uid, 0.0)
                for uid, file, norm, factor, gain in zip(
                    uids, files, norms, factors, gains, strict=True
                )
            ]
            update, after = merge_named(
                merged,
                [file for file, factor in zip(files, factors, strict=True) if factor],
                states[-1],
                rule,
                path=folder / keys.UPDATE,
                layout=UpdateLayout.of(SCHEMA, head),
                sign=sign,
            )
            states.append(after)
            for uid, factor in zip(uids, factors, strict=True):
                if not factor:
                    (folder / f"uploads/{uid}.safetensors").unlink()
        whole = step % weights_every == 0
        folder.mkdir(parents=True, exist_ok=True)
        at += [step] if whole else []
        weights, momentum, residual = states[-1].digests
        manifest = manifest_after(
            chain,
            update=update,
            weights=weights,
            momentum=momentum,
            residual=residual,
            learning_rate=rule.learning_rate,
            mu=rule.mu,
            rule=rule.name,
            merged=tuple(merged),
            losses_before={"held-out": 5.0},
            losses_after={"held-out": 4.9},
            scores=dict.fromkeys(uids, 1.0),
            closed_at=1000.0 * step,
            made_at=1000.0 * step + 10,
            files=write_set(folder, SCHEMA, states[-1], b"{}") if whole else {},
        )
        (folder / keys.MANIFEST).write_bytes(manifest.to_bytes(sign))
        chain.append(manifest)
    # Delete what a validator deletes. Two sets of whole weights stay, the updates since the older
    # set, and the last uploads.
    for step in range(steps + 1):
        folder = bucket / "outer" / str(step)
        old = step < at[-2] if len(at) > 1 else False
        for name in (keys.MODEL, keys.OUTER_STATE, keys.CONFIG) if old else ():
            (folder / name).unlink(missing_ok=True)
        if old or step == at[-2 if len(at) > 1 else 0]:
            (folder / keys.UPDATE).unlink(missing_ok=True)
        if step <= steps - keep_uploads:
            shutil.rmtree(folder / "uploads", ignore_errors=True)
    (bucket / keys.STATE).write_bytes(state_of(chain, at[-2:]).to_bytes(sign))
    return states


def state_of(chain: Sequence[Manifest], at: Sequence[int], **changes: Any) -> State:
    """Return the state whose head is the last manifest."""
    values: dict[str, Any] = {
        "run_id": RUN_ID,
        "outer_step": chain[-1].outer_step,
        "serial": chain[-1].outer_step,
        "closes_at": 1000.0 * len(chain),
        "grace": 100.0,
        "head": chain[-1].digest,
        "weights_at": tuple(at),
        "written_at": 1000.0 * len(chain) - 500,
        "expires": 1000.0 * len(chain) + 1500,
    }
    return State(**values | changes)


def open_chain(bucket: Path, folder: Path) -> ManifestChain:
    """Open the chain in ``bucket``, with ``folder`` for downloads."""
    reader = BucketReader(FolderStore(bucket))
    return ManifestChain(reader, SCHEMA, folder, Master(RUN_ID, MASTER, verify))
