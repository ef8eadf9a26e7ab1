"""The inner optimizer of others: any number of files, float32 or bf16; what does not fit.

And our own, as validators load it under torch 2.5.1.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from distributed_training.miner import global_state
from distributed_training.protocol import keys
from distributed_training.protocol.types import Progress
from distributed_training.training.collectives import row_range
from distributed_training.training.trainer import Trainer, take_over
from tests.tools import torch_2_5
from tests.tools.training_world import take_snapshot, train, trainer

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("process_group")]


@pytest.fixture(scope="module")
def donor(process_group: None) -> Trainer:
    """Three steps of a world of one."""
    made = trainer()
    train(made, 0, 3)
    made.total_inner_steps = 4000  # of the network
    return made


def write(
    donor: Trainer,
    folder: Path,
    count: int,
    dtype: torch.dtype = torch.float32,
    *,
    spoil: Callable[[dict[str, Any]], None] = lambda content: None,
) -> Path:
    """The donor's state as ``count`` ranks would write it; ``spoil``: the first file."""
    folder.mkdir(exist_ok=True)
    moments = zip(donor.schema, donor.optimizer.exp_avg, donor.optimizer.exp_avg_sq, strict=True)
    whole = {name: (first.to(dtype), second.to(dtype)) for (name, _), first, second in moments}
    for rank in range(count):
        state = {}
        for name, pair in whole.items():
            low, high = row_range(len(pair[0]), count, rank)
            rows = [moment[low:high].clone() for moment in pair]
            state[name] = {"step": torch.tensor(3.0), "exp_avg": rows[0], "exp_avg_sq": rows[1]}
        content = {
            "optimizer_state_dict": {"state": state, "param_groups": []},
            "scheduler_state": donor.schedule.published_state(4000),
        }
        if rank == 0:
            spoil(content)
        torch.save(content, folder / keys.inner_optimizer(rank, count))
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 4, 7])
def test_moments_and_schedule_are_those_of_the_files(
    donor: Trainer, count: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    made = trainer()
    facts = take_over(made, write(donor, tmp_path / "shards", count, dtype))
    assert facts is not None and (facts.steps, facts.finished_steps) == (3, 4000)
    assert facts.peak == donor.schedule.peak
    assert (made.optimizer.step_count, made.total_inner_steps) == (3, 4000)
    for kind in ("exp_avg", "exp_avg_sq"):
        for ours, theirs in zip(
            getattr(made.optimizer, kind), getattr(donor.optimizer, kind), strict=True
        ):
            assert torch.equal(ours, theirs.to(dtype).float())
    assert made.schedule.published_state(made.total_inner_steps)["last_epoch"] == 4000


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("exp_avg", lambda moment: moment * float("nan")),
        ("exp_avg_sq", lambda moment: moment - 1.0),
        ("exp_avg", torch.t),
        ("exp_avg", lambda moment: moment[:-1]),  # of another model
        ("last_epoch", lambda _: -5),
    ],
)
def test_what_does_not_fit_changes_nothing_and_the_start_says_so(
    donor: Trainer,
    kind: str,
    change: Callable[[Any], Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def spoil(content: dict[str, Any]) -> None:
        first, *_ = content["optimizer_state_dict"]["state"].values()
        there = first if kind in first else content["scheduler_state"]
        there[kind] = change(there[kind])

    made = trainer(warmup_steps=10)
    global_state.begin_fresh(made, write(donor, tmp_path / "shards", 2, spoil=spoil))
    assert (made.optimizer.step_count, made.total_inner_steps) == (0, 0)
    assert not any(moment.any() for moment in made.optimizer.exp_avg)
    (line,) = [r.getMessage() for r in caplog.records if r.name.endswith("global_state")]
    assert "the learning rate rises for 10 inner steps; --neuron.begin_at_peak" in line


def test_a_storage_said_to_lie_at_the_very_end_is_refused(donor: Trainer, tmp_path: Path) -> None:
    """A hostile table of contents: there is not even a header at the place that it names."""
    path = write(donor, tmp_path, 1) / keys.inner_optimizer(0, 1)
    with zipfile.ZipFile(path) as archive:
        name = next(m.filename for m in archive.infolist() if m.file_size == 4)  # of a step
    data = bytearray(path.read_bytes())
    entry = data.rindex(name.encode()) - 46  # PKWARE's APPNOTE.TXT, 4.3.12
    data[entry + 42 : entry + 46] = (len(data) - 5).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ValueError, match="became shorter"):
        take_over(trainer(), tmp_path)


def test_without_any_the_flag_begins_at_the_peak() -> None:
    made = trainer(warmup_steps=10, begin_at_peak=True)
    global_state.begin_fresh(made, None)
    assert made.schedule.rate(made.total_inner_steps) == made.schedule.peak


def test_a_shard_is_what_torch_2_5_writes_and_loads(tmp_path: Path) -> None:
    made = trainer()
    train(made, 0, 2)
    take_snapshot(made, tmp_path, Progress(3, 2, 2, [1]))
    content = torch_2_5.load(tmp_path / "inner_optimizer.rank0001-of-1.pt")
    assert (content["epoch"], content["learning_rate"]) == (3, made.schedule.rate(2))
    assert content["scheduler_state"]["last_epoch"] == 2
    (group,) = content["optimizer_state_dict"]["param_groups"]
    assert group["params"] == [name for name, _ in made.schema]
    states = content["optimizer_state_dict"]["state"]
    for (name, shape), first, second in zip(
        made.schema, made.optimizer.exp_avg, made.optimizer.exp_avg_sq, strict=True
    ):
        assert float(states[name]["step"]) == 2.0
        for moment, rows in (
            (states[name]["exp_avg"], first),
            (states[name]["exp_avg_sq"], second),
        ):
            assert torch.equal(moment._local_tensor, rows)
            assert vars(moment._spec).keys() == {"mesh", "placements", "tensor_meta", "_hash"}
            assert tuple(moment._spec.tensor_meta.shape) == shape
            assert [vars(p) for p in moment._spec.placements] == [{"dim": 0}]
            mesh = dict(vars(moment._spec.mesh))
            assert mesh.pop("mesh").tolist() == [0]
            assert mesh == {
                "device_type": "cuda",  # validators compare it with their own
                "mesh_dim_names": None,
                "_flatten_mesh_list": (0,),
                "_thread_id": None,
                "_dim_group_infos": [("ptd:0", [0], "0")],
                "_coordinate_on_dim": [0],
            }


def test_the_reader_refuses_what_torch_2_5_does(tmp_path: Path) -> None:
    """The control: torch's own form of a mesh holds classes that it does not know."""
    torch.save({"mesh": init_device_mesh("cpu", (1,))}, tmp_path / "mesh.pt")
    with pytest.raises(AssertionError):
        torch_2_5.load(tmp_path / "mesh.pt")
