"""The inner optimizer in the global bucket: joining as the public miner does; hostile donors."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from distributed_training.protocol import keys
from distributed_training.protocol.metadata import Metadata
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.training.collectives import row_range
from distributed_training.training.inner_state import MOMENTS, InnerState
from distributed_training.training.model import parameter_schema
from distributed_training.validator import global_state
from tests.tools import torch_2_5
from tests.tools.validator_world import (  # noqa: F401
    MODEL_CONFIG,
    TwinMiner,
    World,
    one_thread,
    settings,
    trained,
)

pytestmark = pytest.mark.timeout(60)
SHARDS = [keys.inner_optimizer(rank, 4) for rank in range(4)]
State = dict[str, dict[str, Tensor]]


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Late in outer step 0: the period has 60 blocks."""
    world = World(tmp_path / "validator", settings(), uids=(3, 17, 42))
    world.start()
    world.chain_ledger.advance(45)
    world.train_and_publish()
    return world


def moments(miner: TwinMiner) -> State:
    """As an AdamW of gradients clipped to 1 could have them: |m| at most sqrt(v)."""
    dice = torch.Generator().manual_seed(miner.uid)
    state = {}
    for name, shape in parameter_schema(MODEL_CONFIG):
        first = torch.randn(shape, generator=dice) * 1e-3
        steps = torch.tensor(20.0)
        state[name] = {"step": steps, "exp_avg": first, "exp_avg_sq": 2 * first**2}
    return state


def publish(
    miner: TwinMiner,
    folder: Path,
    *,
    place: int = 400,
    ranks: int = 1,
    spoil: Callable[[State], None] = lambda state: None,
    shards: int | None = None,
) -> State:
    """The miner's inner optimizer of ``ranks`` ranks, beside what it published before."""
    state = moments(miner)
    spoil(state)
    for rank in range(ranks if shards is None else shards):
        rows = {
            name: {
                kind: value[slice(*row_range(len(value), ranks, rank))].clone()
                if kind in MOMENTS
                else value
                for kind, value in entry.items()
            }
            for name, entry in state.items()
        }
        path = folder / f"miner-{miner.uid}-{rank}.pt"
        torch.save(
            {
                "optimizer_state_dict": {"state": rows, "param_groups": []},
                "scheduler_state": {"last_epoch": place},
            },
            path,
        )
        name = keys.inner_optimizer(rank, ranks)
        miner.bucket.put(keys.epoch_key(miner.outer_step, name), path.read_bytes())
    return state


def look(world: World) -> None:
    """A scoring pass, and all that it began."""
    world.validator.score()
    world.validator._inner_optimizer.join()


def prefer(world: World, uid: int) -> None:
    world.validator._miners()
    world.validator.standings.entries[uid].published = 9.0


def there(world: World, outer_step: int) -> list[str]:
    return [name for name in SHARDS if keys.epoch_key(outer_step, name) in world.bucket.objects]


def told(world: World) -> list[tuple[int, int, int]]:
    return [
        (event["outer_step"], event["uid"], event["finished_steps"])
        for event in world.events.of("inner_optimizer")
    ]


def join(bucket: dict[str, Any], folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """As a public miner of four ranks does (protocol page, section 3): the root's outer step; that
    step's metadata, which must be its revision; configuration and model; each rank's file, by the
    allow-list of torch 2.5.1; at last the outer optimizer. Missing anything, it cannot join."""
    outer_step = Metadata.parse(bucket[keys.ROOT_METADATA][0]).outer_step
    found = Metadata.parse(bucket[keys.epoch_key(outer_step, keys.METADATA)][0])
    assert found.revision.tag == f"5.{outer_step}.0"
    folder.mkdir(exist_ok=True)
    for name in (keys.CONFIG, keys.MODEL, *SHARDS, keys.OUTER_OPTIMIZER):
        (folder / name).write_bytes(bucket[keys.epoch_key(outer_step, name)][0])
    weights = load_file(folder / keys.MODEL)
    shards = [torch_2_5.load(folder / name) for name in SHARDS]
    torch.load(folder / keys.OUTER_OPTIMIZER, weights_only=True)
    return weights, shards


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_a_public_miner_joins_after_a_round(world: World, ranks: int, tmp_path: Path) -> None:
    best = publish(world.miners[17], tmp_path, place=410, ranks=ranks)
    prefer(world, 17)
    publish(world.miners[3], tmp_path, place=400)
    look(world)
    assert told(world) == [(0, 17, 400), (1, 17, 400)]
    assert world.validator.round()

    weights, shards = join(world.bucket.objects, tmp_path / "public")
    parameters = {name: torch.nn.Parameter(value) for name, value in weights.items()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=2.5e-4, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 1000))
    whole: dict[str, State] = {}
    for name, shape in parameter_schema(MODEL_CONFIG):
        for rank, shard in enumerate(shards):
            entry = shard["optimizer_state_dict"]["state"][name]
            for kind in MOMENTS:
                rows = row_range(shape[0], 4, rank)
                assert torch.equal(entry[kind]._local_tensor, best[name][kind][slice(*rows)])
                mesh = entry[kind]._spec.mesh
                assert (mesh.mesh.tolist(), mesh._coordinate_on_dim) == ([0, 1, 2, 3], [rank])
        whole[name] = {kind: best[name][kind] for kind in ("step", *MOMENTS)}
    (group,) = shards[0]["optimizer_state_dict"]["param_groups"]
    assert group.pop("params") == list(whole)
    optimizer.load_state_dict(
        {
            "state": {i: whole[name] for i, name in enumerate(weights)},
            "param_groups": [group | {"params": list(range(len(weights)))}],
        }
    )
    schedule.load_state_dict(shards[0]["scheduler_state"])
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 1e-3)
    before = next(iter(parameters.values())).detach().clone()
    optimizer.step()
    schedule.step()
    assert schedule.last_epoch == 401
    assert not torch.equal(before, next(iter(parameters.values())))


@pytest.mark.slow
def test_ours_takes_over_from_it(world: World, tmp_path: Path) -> None:
    best = publish(world.miners[3], tmp_path, place=700)
    look(world)
    folder = BucketReader(world.bucket).fetch_inner_optimizer(0, tmp_path / "ours")
    assert folder is not None
    schema = parameter_schema(MODEL_CONFIG)
    state = InnerState(folder, schema)
    assert (state.facts.steps, state.facts.finished_steps) == (20, 700)
    assert state.facts.peak == world.config.training.learning_rate
    for index, (name, _) in enumerate(schema):
        assert all(torch.equal(state.moment(kind, index), best[name][kind]) for kind in MOMENTS)


def not_finite(state: State) -> None:
    next(iter(state.values()))["exp_avg"][0] = math.nan


def impossible(state: State) -> None:
    next(iter(state.values()))["exp_avg"][0] = 1e-3
    next(iter(state.values()))["exp_avg_sq"][0] = 1e-9


def too_large(state: State) -> None:
    next(iter(state.values()))["exp_avg_sq"].fill_(1.0)


def of_another_model(state: State) -> None:
    next(iter(state.values()))["exp_avg"] = torch.zeros(1000, 1000)


@pytest.mark.slow
def test_what_is_hostile_is_not_handed_on(world: World, tmp_path: Path, caplog: Any) -> None:
    hostile: list[tuple[dict[str, Any], str]] = [
        ({"spoil": not_finite}, "NaN or Inf"),
        ({"spoil": impossible}, "none of AdamW"),
        ({"spoil": too_large}, "clipped to 1 cannot"),
        ({"spoil": of_another_model}, "more than the"),
        ({"ranks": 4, "shards": 2}, "is missing"),
        ({"place": 80_000}, "beyond what the network"),
    ]
    for changes, says in hostile:
        caplog.clear()
        for key in [key for key in world.miners[3].bucket.objects if "inner_optimizer" in key]:
            del world.miners[3].bucket.objects[key]
        publish(world.miners[3], tmp_path, **changes)
        look(world)
        assert not there(world, 0) and not told(world)
        lines = [r.getMessage() for r in caplog.records if "is not handed on" in r.getMessage()]
        assert lines and all(says in line for line in lines), (says, lines)
    publish(world.miners[42], tmp_path)
    look(world)
    assert told(world)[0][:2] == (0, 42)


def test_a_full_disk_is_one_line_and_the_next_pass_tries_again(
    world: World, tmp_path: Path, caplog: Any
) -> None:
    publish(world.miners[3], tmp_path)
    full = RuntimeError("PytorchStreamWriter failed writing file")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(global_state, "write_shard", Mock(side_effect=full))
        look(world)
    assert "is not published yet (PytorchStreamWriter" in caplog.text and not there(world, 0)
    look(world)
    assert there(world, 0) == SHARDS


def test_a_stop_waits_for_one_donors_answer_at_most(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def stopped_meanwhile(publisher: global_state.InnerPublisher, *_: Any) -> None:
        asked.append(1)
        publisher._uplink.stop()

    monkeypatch.setattr(global_state.InnerPublisher, "_place_of", stopped_meanwhile)
    look(world)
    assert len(asked) == 1


@pytest.mark.slow
def test_the_schedule_is_the_networks(world: World, tmp_path: Path) -> None:
    """Neither a beginner's place nor a liar's; it never goes back."""
    for uid, place in ((3, 5), (17, 600), (42, 690)):
        publish(world.miners[uid], tmp_path, place=place)
    prefer(world, 3)  # a beginner of great promise
    look(world)
    assert [(uid, place) for _, uid, place in told(world)] == [(17, 600)] * 2
    assert world.validator.round()
    world.chain_ledger.advance(45)
    world.train_and_publish()
    for miner in world.miners.values():
        publish(miner, tmp_path, place=7)
    look(world)
    assert told(world)[-1][0] == 2 and told(world)[-1][2] == 600


def test_early_in_a_period_the_next_ones_files_wait(tmp_path: Path) -> None:
    world = trained(tmp_path / "validator", uids=(3, 17, 42))
    publish(world.miners[3], tmp_path)
    look(world)
    assert there(world, 0) == SHARDS and not there(world, 1)


def test_a_killed_validator_goes_on_without_the_donor(world: World, tmp_path: Path) -> None:
    """Killed between two files of the set: the same set is completed, not mixed with another."""
    publish(world.miners[3], tmp_path)
    world.bucket.fail.append(keys.epoch_key(0, SHARDS[2]))
    look(world)
    before = {name: world.bucket.objects[keys.epoch_key(0, name)][1] for name in there(world, 0)}
    assert 0 < len(before) < 4 and not told(world)
    publish(world.miners[3], tmp_path, place=500)  # what another start would take
    world.restart()
    world.start()
    look(world)
    assert there(world, 0) == SHARDS and told(world)[0] == (0, 3, 400)
    for name, etag in before.items():
        assert world.bucket.objects[keys.epoch_key(0, name)][1] == etag
    assert not list((world.folder / "inner-optimizer").glob("*.pt"))


def test_it_can_be_left_out(tmp_path: Path) -> None:
    world = trained(tmp_path / "validator", uids=(3,), inner_optimizer_budget=timedelta(0))
    publish(world.miners[3], tmp_path)
    look(world)
    assert not there(world, 0)
