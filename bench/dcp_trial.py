"""Try torch.distributed.checkpoint (DCP) in the place of our checkpoints, at the shapes of a 1B.

    python -m bench.dcp_trial                          1, 2 and 3 ranks, about 10 minutes
    python -m bench.dcp_trial --layers 1 --ranks 1,2   a quick look

The model has the matrices of a 1B, in fewer layers so that two copies fit this machine. Both ways
write weights and AdamW's state in float32. DCP writes by ``async_save`` into a temporary folder;
then rank 0 reads all back for their SHA-256, writes the digests and renames the folder. Ours is
:class:`~distributed_training.training.checkpoint.Checkpointer`. Each measurement is a process group
of its own; ways alternate, and the table has medians. Then every file of both is damaged by one
byte, one at a time, and DCP is killed at moments spread over its save.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.common import folder_or_temporary, parser, table
from bench.inner_step import our_step, set_weights, tokens
from distributed_training.common.llama import named_config
from distributed_training.config.settings import TrainingSettings
from distributed_training.protocol.types import Progress
from distributed_training.training.checkpoint import Checkpointer
from distributed_training.training.collectives import Layout
from distributed_training.training.model import build_meta_model
from distributed_training.training.trainer import Trainer

_LENGTH = 16


class Ours:
    def __init__(self, config: dict[str, Any], rank: int, ranks: int, folder: Path) -> None:
        settings = TrainingSettings(
            sequence_length=_LENGTH,
            compile="off",
            warmup_steps=4,
            local_batch_size_train=1,
            local_batch_size_train_effective=ranks,
            precision="fp32",
        )
        self.trainer = Trainer(
            settings=settings,
            model_config=config,
            device=torch.device("cpu"),
            layout=Layout(rank, ranks),
            say=lambda line: None,
        )
        set_weights([item.local for item in self.trainer.sharded.shards])
        plan = self.trainer.batch_plan
        our_step(self.trainer, tokens(config["vocab_size"], 1, plan, _LENGTH, rank, ranks))
        self.checkpointer = Checkpointer(trainer=self.trainer, folder=folder, keep=1)

    def start(self) -> None:
        self.checkpointer.save({}, Progress(0, 1, 1))

    def finish(self) -> None:
        self.checkpointer.wait()
        if self.checkpointer.last_error:
            raise RuntimeError(self.checkpointer.last_error)

    def restore(self) -> bool:
        return self.checkpointer.restore() is not None

    def values(self) -> list[torch.Tensor]:
        return [shard.local for shard in self.trainer.sharded.shards]


class Dcp:
    def __init__(self, config: dict[str, Any], rank: int, ranks: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        made: Any = build_meta_model(config)
        buffers = {name: buffer.clone() for name, buffer in made.named_buffers()}
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in made.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(made, mesh=mesh)
        self.model: Any = made
        self.model.to_empty(device="cpu")
        for name, buffer in buffers.items():
            self.model.get_buffer(name).copy_(buffer)
        set_weights([p.data.to_local() for p in self.model.parameters()])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        ids = torch.randint(config["vocab_size"], (1, _LENGTH))
        self.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.group = dist.new_group(backend="gloo")

    def start(self) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        self.temporary = self.folder.with_name(self.folder.name + ".tmp")
        self.future: Any = dcp.async_save(
            state, checkpoint_id=str(self.temporary), process_group=self.group
        )

    def finish(self) -> None:
        self.future.result()
        if self.rank == 0:
            digests = {path.name: _digest(path) for path in self.temporary.iterdir()}
            manifest = self.temporary / "manifest.json"
            manifest.write_text(json.dumps(digests))
            for path in [*self.temporary.iterdir(), self.temporary]:
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
            shutil.rmtree(self.folder, ignore_errors=True)
            self.temporary.rename(self.folder)
        dist.barrier()

    def restore(self, *, digests: bool = True) -> bool:
        try:
            expected = json.loads((self.folder / "manifest.json").read_text())
            if digests and any(_digest(self.folder / n) != d for n, d in expected.items()):
                return False
            model, optimizer = get_state_dict(self.model, self.optimizer)
            state = {"model": model, "optimizer": optimizer}
            dcp.load(state, checkpoint_id=str(self.folder))
            set_state_dict(
                self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
            )
        except (OSError, RuntimeError, ValueError, KeyError, dcp.api.CheckpointException):
            return False
        return True

    def values(self) -> list[torch.Tensor]:
        return [parameter.data.to_local() for parameter in self.model.parameters()]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Peak:
    """The most memory of this process beyond what it had."""

    def __enter__(self) -> Peak:
        self._own, self._over, self.most = psutil.Process(), threading.Event(), 0
        self._before = self._own.memory_full_info().uss
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.05):
            self.most = max(self.most, self._own.memory_full_info().uss - self._before)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def rank_of(rank: int, work: Callable[..., Any], ranks: int, store: str, *given: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    work(rank, ranks, *given)
    dist.barrier()
    os._exit(0)


def group(ranks: int, work: Callable[..., Any], *given: Any) -> None:
    """Run ``work`` in ``ranks`` processes. Raises what torch raises when one fails."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        torch.multiprocessing.spawn(rank_of, args=(work, ranks, store, *given), nprocs=ranks)


WAYS: dict[str, Any] = {"ours": Ours, "DCP": Dcp}


def config_of(layers: int) -> dict[str, Any]:
    return named_config("1b") | {"num_hidden_layers": layers}


def measure(rank: int, ranks: int, way: str, layers: int, folder: str, out: str) -> None:
    made = WAYS[way](config_of(layers), rank, ranks, Path(folder))
    dist.barrier()
    with Peak() as peak:
        began = time.monotonic()
        made.start()
        held = time.monotonic() - began
        made.finish()
        dist.barrier()
        total = time.monotonic() - began
    before = [each.clone() for each in made.values()]
    for each in made.values():
        each.zero_()
    began = time.monotonic()
    assert made.restore()
    back = time.monotonic() - began
    equal = all(torch.equal(a, b) for a, b in zip(before, made.values(), strict=True))
    mine = torch.tensor([held, total, peak.most / 1e9, back, float(not equal)], dtype=torch.float64)
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    if rank == 0:
        size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()) / 1e9
        Path(out).write_text(json.dumps([*mine.tolist(), size]))


def damage(rank: int, ranks: int, way: str, layers: int, folder: str, out: str) -> None:
    """Change a byte of each file, one at a time, and count what is loaded all the same."""
    made = WAYS[way](config_of(layers), rank, ranks, Path(folder))
    made.start()
    made.finish()
    right = [each.clone() for each in made.values()]
    refused = wrong = unchecked = 0
    files = [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]
    files = [path for path in files if path.name != "last.json"]  # of the launcher
    for path in files:
        content = path.read_bytes()
        place = len(content) // 2
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        if not made.restore():
            refused += 1
        elif not all(torch.equal(a, b) for a, b in zip(right, made.values(), strict=True)):
            wrong += 1
        if way == "DCP" and made.restore(digests=False):
            unchecked += 1
        path.write_bytes(content)
        assert made.restore()
    Path(out).write_text(json.dumps([len(files), refused, wrong, unchecked]))


def save_forever(rank: int, ranks: int, layers: int, folder: str, out: str) -> None:
    made = Dcp(config_of(layers), rank, ranks, Path(folder))
    while True:
        began = time.monotonic()
        made.start()
        made.finish()
        if rank == 0:
            Path(out).write_text(str(time.monotonic() - began))


def load_once(rank: int, ranks: int, layers: int, folder: str, out: str) -> None:
    made = Dcp(config_of(layers), rank, ranks, Path(folder))
    if rank == 0:
        Path(out).write_text(json.dumps(made.restore()))
    else:
        made.restore()


def kills(layers: int, count: int, folder: Path) -> int:
    """Return how many of ``count`` kills left a checkpoint that loads."""
    good = 0
    for number in range(count):
        out, place = folder / f"seconds-{number}", folder / "killed"
        process = torch.multiprocessing.get_context("spawn").Process(
            target=group, args=(2, save_forever, layers, str(place), str(out))
        )
        process.start()
        while not out.exists():
            time.sleep(0.05)
        time.sleep(random.random() * float(out.read_text() or 1))
        for child in psutil.Process(process.pid).children(recursive=True):
            child.send_signal(signal.SIGKILL)
        process.kill()
        process.join()
        group(2, load_once, layers, str(place), str(folder / "loaded"))
        good += json.loads((folder / "loaded").read_text())
    return good


def main(argv: list[str] | None = None) -> int:
    words = parser(__doc__)
    words.add_argument("--layers", type=int, default=3, help="[3]")
    words.add_argument("--ranks", default="1,2,3", help="[1,2,3]")
    words.add_argument("--times", type=int, default=3, help="[3]")
    words.add_argument("--kills", type=int, default=8, help="[8]")
    words.add_argument("--folder", type=Path)
    options: argparse.Namespace = words.parse_args(argv)
    rows = []
    with folder_or_temporary(options.folder) as folder:
        out = folder / "out.json"
        for ranks in map(int, options.ranks.split(",")):
            found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
            for _ in range(options.times):
                for way in WAYS:
                    place = folder / f"{way}-{ranks}"
                    shutil.rmtree(place, ignore_errors=True)
                    group(ranks, measure, way, options.layers, str(place), str(out))
                    found[way].append(json.loads(out.read_text()))
                    print(ranks, way, found[way][-1], flush=True)
                    shutil.rmtree(place, ignore_errors=True)
            for way, each in found.items():
                medians = [statistics.median(column) for column in zip(*each, strict=True)]
                rows.append((f"{way}, {ranks} ranks", *(f"{value:.2f}" for value in medians)))
        titles = ("", "held s", "complete s", "GB more, most", "restored s", "wrong", "GB on disk")
        table(titles, rows)
        for way in WAYS:
            group(1, damage, way, 1, str(folder / f"damaged-{way}"), str(out))
            files, refused, wrong, unchecked = json.loads(out.read_text())
            print(
                f"{way}: {files} files damaged, {refused} refused, {wrong} loaded with wrong values"
                + (f"; without our digests {unchecked} are loaded" if way == "DCP" else "")
            )
        good = kills(1, options.kills, folder)
        print(f"DCP: {good} of {options.kills} kills left a checkpoint that loads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
