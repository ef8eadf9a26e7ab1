"""Run one rank of a scenario: ``training_ranks.py SCENARIO FOLDER STORE``."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from distributed_training.common.kinds import import_plugins
from distributed_training.common.processes import leave
from distributed_training.protocol.metadata import with_rules
from distributed_training.protocol.types import (
    Base,
    OuterStepError,
    Progress,
    RankFailedError,
    Update,
)
from distributed_training.training import inner_optimizer, outer_step
from distributed_training.training import muon as muon_module
from distributed_training.training import trainer as trainer_module
from distributed_training.training.checkpoint import Checkpointer
from distributed_training.training.collectives import COLLECTIVE_TIMEOUT
from distributed_training.training.frozen import FrozenTensorError
from distributed_training.training.inner_optimizer import InnerOptimizer
from distributed_training.training.model import initial_weights
from distributed_training.training.outer_step import UploadHandle
from distributed_training.training.pretrained import write_frozen
from distributed_training.training.trainer import Trainer
from distributed_training.validator.merge import digest_of
from tests.tools.outer_steps import header, sign
from tests.tools.store_member import (
    decoded,
    drawn,
    move,
    write_update,
)
from tests.tools.training_world import (
    evaluate,
    finished,
    memory_ends,
    same,
    save_checkpoint,
    sequences,
    tiny,
    train,
    trainer,
    whole_weights,
)

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def losses(folder: Path, name: str = "losses", **place: int) -> Trainer:
    made = trainer(rank=RANK, world_size=WORLD, **place)
    reports = train(made, 0, 20)
    evaluated = evaluate(made, sequences(99, count=3))
    if RANK == 0:
        content = {"losses": [r.loss for r in reports], "evaluated": evaluated}
        (folder / f"{name}-{WORLD}.json").write_text(json.dumps(content))
    return made


#: A model with float32 adapters and a bf16 base, which are in the same FSDP groups.
ADAPTERS = with_rules(
    tiny(),
    "lora",
    None,
    {"r": 8, "alpha": 16, "targets": ["q_proj", "up_proj"], "dtype": "bfloat16"},
)


def adapters(folder: Path, name: str = "adapters", **place: int) -> None:
    """Freeze the base of all ranks to rank 0's file; a change on one rank must stop the upload."""
    file = folder / f"{name}-{WORLD}.safetensors"
    if RANK == 0:
        write_frozen(file, ADAPTERS, None)
    path = file if RANK == 0 else None
    made = trainer(rank=RANK, world_size=WORLD, model=ADAPTERS, frozen=path, wrap="block", **place)
    reports = train(made, 0, 5)
    held = made.sharded.frozen[0]
    assert made.frozen.find_changed() == ""
    whole, *_ = initial_weights(ADAPTERS, seed=0, frozen=True)
    assert torch.equal(held.local, whole[held.start : held.stop])
    if RANK == 0:
        content = {"losses": [r.loss for r in reports]}
        (folder / f"{name}-{WORLD}.json").write_text(json.dumps(content))
    if RANK == WORLD - 1:
        held.local[0] += 1
    with pytest.raises(FrozenTensorError, match=r"model\.embed_tokens\.weight is not trained"):
        made.write_upload(folder / "upload", header("upload", 0), sign=sign)


def adapters_of_nodes(folder: Path) -> None:
    adapters(folder, "adapters-nodes", local_ranks=1)


def losses_of_nodes(folder: Path) -> None:
    """Train on WORLD nodes with one rank each, which all have a copy of the model."""
    made = losses(folder, "nodes", local_ranks=1)
    state: Any = made.sharded.modules[-1]._get_fsdp_state()  # type: ignore[operator]
    for group in state._fsdp_param_group.mesh_info.mesh.get_all_groups():
        backend: Any = group._get_backend(torch.device("cpu"))
        assert backend.options._timeout == COLLECTIVE_TIMEOUT


def out_of_memory(folder: Path) -> None:
    """Let the last rank's GPU hold one sequence at once, while micro-batches have two.

    The first start ends because of that, and the next one knows the size that fits.
    """
    made = trainer(rank=RANK, world_size=WORLD, run_folder=folder)
    real, sizes = made.sharded.root.forward, []

    def forward(ids: torch.Tensor) -> Any:
        sizes.append(len(ids))
        if RANK == WORLD - 1 and len(ids) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(ids)

    made.sharded.root.forward = forward  # type: ignore[method-assign]
    try:
        reports = train(made, 0, 20)
    except torch.OutOfMemoryError as error:
        (folder / "error.txt").write_text(str(error))
        leave(1)
    assert set(sizes) == {1}
    if RANK == 0:
        content = {"losses": [r.loss for r in reports]}
        (folder / "again.json").write_text(json.dumps(content))


def no_memory(folder: Path) -> None:
    """Let host memory end on one rank: no rank writes that checkpoint, and all train on."""
    made = trainer(rank=RANK, world_size=WORLD)
    keeper = Checkpointer(trainer=made, folder=folder / "checkpoints")
    for step, who in enumerate((0, WORLD - 1)):
        train(made, step, step + 1)
        with memory_ends(made.copier, "copy_boundary", when=who == RANK):
            save_checkpoint(keeper, Progress(0, 1, 1))
        assert keeper.last_error is not None and f"rank {who}: MemoryError" in keeper.last_error
        dist.barrier()
        assert not list((folder / "checkpoints").glob("checkpoint-*"))
        save_checkpoint(keeper, Progress(0, 1, 1))
        assert keeper.last_error is None
        dist.barrier()
        if RANK == 0:
            shutil.rmtree(folder / "checkpoints")
        dist.barrier()


def through_store_of_nodes(folder: Path) -> None:
    """Take outer steps on two machines with a copy of the model; only the first has the files."""
    through_store(folder, local_ranks=WORLD // 2)


def through_store(folder: Path, *, local_ranks: int = 0) -> None:
    """Take outer steps, and check that a failure of any kind changes nothing."""
    made = trainer(rank=RANK, world_size=WORLD, local_ranks=local_ranks)
    place = folder / f"store-{WORLD}-{local_ranks}"
    step, last = made.outer, made.stream.layout.shards - 1
    keeper = Checkpointer(trainer=made, folder=place / f"node{RANK // (last + 1)}")
    for seed in (1, 2):
        move(made, drawn(seed))
    _uploads_fail(made, place, last)
    assert step.serial is None
    handle = _upload(made, place, 1)
    move(made, drawn(3))  # while the upload is written
    finished(handle)
    dist.barrier()
    assert (step.serial, handle.header.inner_steps) == (1, 2)
    save_checkpoint(keeper, Progress(0, 3, 3))
    found = [_applied(made, place, 1, last)]
    assert (made.outer_step, made.inner_step, step.serial, step.dropped) == (1, 1, None, "")
    # Take the same outer step again from the checkpoint, as after a kill.
    made = trainer(rank=RANK, world_size=WORLD, local_ranks=local_ranks, seed=7)
    keeper = Checkpointer(trainer=made, folder=keeper._folder)
    assert keeper.restore() is not None
    assert made.outer.serial == 1
    assert _applied(made, place, 1, last) == found[0]
    finished(_upload(made, place, 2))
    found.append(_applied(made, place, 2, last))
    if RANK == 0:
        # Compare only its values: the header has the tokens of a batch, which three ranks round up.
        sent = digest_of(decoded(place / "1.safetensors", made.schema))
        content = {"steps": found, "upload": sent}
        (folder / f"store-{WORLD}-{local_ranks}.json").write_text(json.dumps(content))
    _drops_overlap(made, place, last)


def _drops_overlap(made: Trainer, place: Path, last: int) -> None:
    """Check that the component along the update is dropped, by sums over all ranks' rows."""
    step = made.outer
    step._drop_overlap = True
    finished(_upload(made, place, 3))
    start, written = _gathered(made, step.epoch_start), _gathered(made, step.current())
    move(made, drawn(4))
    now = _gathered(made, step.current())
    _applied(made, place, 3, last)
    new, found = _gathered(made, step.epoch_start), _gathered(made, step.current())
    shares = []
    for n, w, to, of, result in zip(now, written, new, start, found, strict=True):
        late, update = (n - w).flatten(), (to - of).flatten()
        shares.append(float(late @ update / update.square().sum()))
        expected = late - max(0.0, shares[-1]) * update + to.flatten()
        torch.testing.assert_close(result.flatten(), expected, rtol=0, atol=1e-6)
    assert max(shares) > 0


def through_store_resumed(folder: Path) -> None:
    """Continue on one rank from the checkpoint and the upload of three ranks."""
    made = trainer(rank=RANK, world_size=WORLD, seed=7)
    place = folder / "store-3-0"
    assert Checkpointer(trainer=made, folder=place / "node0").restore() is not None
    found = _applied(made, place, 1, 0)
    (folder / "store-resumed.json").write_text(json.dumps(found))


def _upload(made: Trainer, place: Path, serial: int) -> UploadHandle:
    if RANK != 0:
        return made.write_upload()
    path = place / f"{serial}.safetensors"
    return made.write_upload(path, header("upload", 0, serial=serial), sign=sign)


def _uploads_fail(made: Trainer, place: Path, last: int) -> None:
    """Check that each failure costs only its own upload."""
    before = whole_weights(made)
    for who in (0, WORLD - 1):
        with (
            memory_ends(made.copier, "copy_boundary", when=who == RANK),
            pytest.raises(RankFailedError, match="MemoryError: no memory"),
        ):
            _upload(made, place, 1)

    # Create the error each time, since its traceback would keep the copies alive.
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def no_memory(*_: Any) -> None:
        raise MemoryError("no memory is left")

    with (
        mock.patch.object(os, "posix_fallocate", full),
        pytest.raises(OSError, match=r"cannot be written: .*No space left"),
    ):
        _upload(made, place, 1)
    assert not list(place.glob("*.parts")) and made.outer.serial is None
    for fail, cause in ((full, "No space left"), (no_memory, "no memory is left")):
        fails = mock.patch.object(outer_step, "write_rows", fail)
        with fails if last == RANK else nullcontext():
            handle = _upload(made, place, 1)
            handle.join()
        assert (handle.error is not None) == (RANK in (0, last))
        assert RANK != 0 or cause in str(handle.error)
        dist.barrier()
    assert same(before, whole_weights(made))
    made.outer.serial = None  # as in the previous checkpoint


def _applied(made: Trainer, place: Path, serial: int, last: int) -> dict[str, str]:
    """Merge our upload of ``serial`` and apply the update; return digests of the results."""
    own, path = place / f"{serial}.safetensors", place / f"{serial}.update"
    step, given = made.outer, None
    start = made.stream.all_gather([rows.clone() for rows in step.epoch_start or []])
    whole = [torch.cat(rows) for rows in zip(*start[: last + 1], strict=True)]
    if RANK == 0:
        if not path.exists():
            write_update(path, made.schema, [0.7 * t for t in decoded(own, made.schema)])
        after = [t - d for t, d in zip(whole, decoded(path, made.schema), strict=True)]
        given = Update(serial, path, Base.MERGED, own, digest_of(after))
    _updates_fail(made, given, last)
    made.prepare_update(given)
    made.roll_back_outer_step()
    made.prepare_update(given)
    made.commit_outer_step()
    assert made.outer_step == serial
    assert step.start == digest_of(_gathered(made, step.epoch_start))
    residual, weights = _gathered(made, step.residual), _gathered(made, step.current())
    rows = made.stream.all_gather([digest_of(step.current()), digest_of(step.residual or [])])
    assert all(rows[rank] == rows[rank % (last + 1)] for rank in range(WORLD)), "copies differ"
    if RANK != 0:
        return {}
    return {"start": step.start, "residual": digest_of(residual), "weights": digest_of(weights)}


def _updates_fail(made: Trainer, given: Update | None, last: int) -> None:
    """Check that all ranks refuse a wrong outer step, and that nothing has changed."""
    before, step = whole_weights(made), made.outer
    kept = step.state_dict()

    def refused(**other: Any) -> None:
        wrong = None if given is None else replace(given, **other)
        with pytest.raises(OuterStepError):
            made.prepare_update(wrong)

    refused(weights="0" * 64)
    refused(path=Path(__file__))
    for name in ("_next_start", "_rest"):
        with memory_ends(step, name, when=last == RANK):
            refused()
    for item in step.epoch_start or []:  # of one rank only, by one bit
        if last == RANK and item.numel():
            item.view(torch.int32).view(-1)[-1] ^= 1
    refused()
    for item in step.epoch_start or []:
        if last == RANK and item.numel():
            item.view(torch.int32).view(-1)[-1] ^= 1
    made.roll_back_outer_step()
    assert step.state_dict() == kept
    assert same(before, whole_weights(made))


def _gathered(made: Trainer, rows: list[torch.Tensor] | None) -> list[torch.Tensor]:
    return made.stream.whole(rows or [])


#: Optimizers, each with the name of a tensor that it keeps.
OPTIMIZERS = {
    "adamw": "exp_avg_sq",
    "lion": "exp_avg",
    "sgd": "momentum_buffer",
    "muon": "momentum_buffer",
}
#: With six sequences, one, two and three ranks take the same step.
SIX = {"local_batch_size_train": 1, "local_batch_size_train_effective": 6}


def toy_optimizer(folder: Path) -> None:
    """Check that optimizers, also plug-ins', continue from a checkpoint to the bit."""
    import_plugins(["tests.toys.optimizer"])
    for name, state in OPTIMIZERS.items():
        place = folder / name
        made = trainer(rank=RANK, world_size=WORLD, optimizer=name, **SIX)
        train(made, 0, 3)
        keeper = Checkpointer(trainer=made, folder=place / "checkpoints", keep=2)
        save_checkpoint(keeper, Progress(0, 3, 3), {"rank": RANK})
        again = trainer(rank=RANK, world_size=WORLD, optimizer=name, seed=7, **SIX)
        assert Checkpointer(trainer=again, folder=place / "checkpoints").restore() is not None
        losses = [[r.loss for r in train(each, 3, 6)] for each in (made, again)]
        assert losses[0] == losses[1]
        assert same(whole_weights(made), whole_weights(again))
        assert same(made.optimizer.state[state], again.optimizer.state[state])
        if RANK == 0:
            (place / "losses.json").write_text(json.dumps(losses[0]))
    _muon_steps_whole_matrices(made)


def other_number_of_ranks(folder: Path) -> None:
    """Continue with another number of ranks from the checkpoints of :func:`toy_optimizer`."""
    import_plugins(["tests.toys.optimizer"])
    for name in OPTIMIZERS:
        made = trainer(rank=RANK, world_size=WORLD, optimizer=name, seed=7, **SIX)
        place = folder / name
        assert Checkpointer(trainer=made, folder=place / "checkpoints").restore() is not None
        expected = json.loads((place / "losses.json").read_text())
        assert [r.loss for r in train(made, 3, 6)] == pytest.approx(expected, abs=2e-5), name


def muon(folder: Path) -> None:
    """Step with Muon on three ranks, of which the last has no row of some matrices."""
    made = trainer(rank=RANK, world_size=WORLD, optimizer="muon", model=tiny(heads=16))
    _muon_steps_whole_matrices(made)


def muon_of_nodes(folder: Path) -> None:
    """Step with Muon on two nodes, of which the second would compute other values."""
    made = trainer(rank=RANK, world_size=WORLD, local_ranks=2, optimizer="muon")
    _muon_steps_whole_matrices(made, other_card=RANK >= 2)


def _muon_steps_whole_matrices(made: Trainer, *, other_card: bool = False) -> None:
    """Compare steps to the bit with those of one rank that has all rows, also if offloaded."""
    shards, generator = made.sharded.shards, torch.Generator().manual_seed(1)
    whole = whole_weights(made)
    names = made.sharded.matrices
    matrices = [i for i, shard in enumerate(shards) if shard.name in names]
    alone = [muon_module.MatrixRows.of(whole[i], shards[i].shape) for i in matrices]
    expected = muon_module.Muon(alone, made.settings.weight_decay)
    expected.param_groups[0]["lr"] = 1e-2
    with mock.patch.object(inner_optimizer, "OFFLOAD_BUCKET", 1500):  # a few matrices per bucket
        offloaded = InnerOptimizer(shards, made.settings, offload=True, matrices=names)
    for optimizer in (made.optimizer, offloaded):
        optimizer.reset()
        for mine in alone:
            expected.state.pop(mine, None)
        for _ in range(2):
            gradients = [torch.randn(shard.shape, generator=generator) for shard in shards]
            for mine, i in zip(alone, matrices, strict=True):
                mine.grad = gradients[i]
            expected.step()
            rows = [g[s.start : s.stop] for g, s in zip(gradients, shards, strict=True)]
            wrong = mock.patch.object(muon_module, "orthogonal", torch.zeros_like)
            with wrong if other_card else nullcontext():
                optimizer.step(rows, 1e-2)
        for mine, i in zip(alone, matrices, strict=True):
            assert torch.equal(mine[shards[i].start : shards[i].stop], shards[i].local)


def unlike_gpus(folder: Path) -> None:
    """Let the machine's file of sizes apply to rank 0's GPU but not to rank 1's."""
    real = trainer_module.facts_of
    with mock.patch.object(
        trainer_module, "facts_of", lambda *which: real(*which) | {"device": f"card {RANK}"}
    ):
        for _ in range(2):
            made = trainer(
                rank=RANK, world_size=WORLD, run_folder=folder, local_batch_size_train="auto"
            )
            sizes = made.stream.all_gather(made.micro_batch_size)
            assert len(set(sizes)) == 1, sizes
    assert json.loads((folder / "micro-batch.json").read_text())["fastest"] == sizes[0]


def disk_of_a_copy(folder: Path) -> None:
    """Let the second of two nodes lose its newest checkpoint, then all of its checkpoints."""
    own = folder / f"node{RANK}"
    made = trainer(rank=RANK, world_size=WORLD, local_ranks=1)
    keeper = Checkpointer(trainer=made, folder=own)
    whole = []
    for step in (0, 1):
        train(made, step, step + 1)
        whole.append(whole_weights(made))
        if step == 1:  # in the middle of an inner step
            made.add_micro_batch(sequences(RANK, count=made.micro_batch_size))
        save_checkpoint(keeper, Progress(0, step + 1, step + 1), {"rank": RANK})
        dist.barrier()
    for left, pending in ((2, 1), (1, 0), (0, 0)):
        made = trainer(rank=RANK, world_size=WORLD, local_ranks=1, seed=7)
        keeper = Checkpointer(trainer=made, folder=own)
        assert (keeper.restore() is None) == (left == 0)
        assert len(made.step.batches) == pending, "on all nodes alike"
        if left:
            assert same(whole[left - 1], whole_weights(made))
        if RANK == 1 and left:
            shutil.rmtree(max(own.glob("checkpoint-*")))
        dist.barrier()


if __name__ == "__main__":
    name, where, store = sys.argv[1:]
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=RANK,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    for scenario in name.split("+"):
        globals()[scenario](Path(where))
    dist.destroy_process_group()
    leave(0)
