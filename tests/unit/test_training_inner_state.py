"""The place in the schedule, and the inner optimizer as validators load it under torch 2.5.1."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from distributed_training.protocol.types import Progress
from tests.tools import torch_2_5
from tests.tools.training_world import take_snapshot, train, trainer

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("process_group")]


@pytest.mark.parametrize(
    ("outer_step", "network", "begins"),
    [
        (0, 0, 0),  # a new network's random weights warm up
        (7, 0, 9),  # an older state does not say: at the peak
        (7, 4000, 4000),
        (1, 5, 9),
    ],
)
def test_a_first_start_begins_at_the_network_s_place(
    outer_step: int, network: int, begins: int
) -> None:
    made = trainer(warmup_steps=10)
    made.begin_epoch(outer_step)
    made.begin_schedule(network)
    assert made.total_inner_steps == begins
    if begins == 9:
        assert made.schedule.rate(begins) == made.schedule.peak


def test_a_shard_is_written_and_loaded_as_by_torch_2_5(tmp_path: Path) -> None:
    made = trainer()
    train(made, 0, 2)
    take_snapshot(made, tmp_path, Progress(3, 2, 2, [1]))
    content = torch_2_5.load(tmp_path / "inner_optimizer.rank0001-of-1.pt")
    assert (content["epoch"], content["learning_rate"]) == (3, made.schedule.rate(2))
    real = torch.optim.lr_scheduler.LambdaLR(
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), lambda _: 1.0
    ).state_dict()
    assert content["scheduler_state"].keys() == real.keys() - {"_is_initial"}
    assert content["scheduler_state"]["last_epoch"] == 2
    (group,) = content["optimizer_state_dict"]["param_groups"]
    assert group["params"] == [name for name, _ in made.schema]
    states = content["optimizer_state_dict"]["state"]
    for (name, shape), first, second in zip(
        made.schema,
        made.optimizer.state["exp_avg"],
        made.optimizer.state["exp_avg_sq"],
        strict=True,
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


def test_the_reader_refuses_the_same_files_as_torch_2_5(tmp_path: Path) -> None:
    """The control: torch's own form of a mesh holds classes that it does not know."""
    torch.save({"mesh": init_device_mesh("cpu", (1,))}, tmp_path / "mesh.pt")
    with pytest.raises(AssertionError):
        torch_2_5.load(tmp_path / "mesh.pt")
