"""A global state that was lost comes back with the model of a member that was asked for it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest
import torch

from distributed_training.config import ConfigError
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import ConfigExtras
from distributed_training.training.outer_step import GlobalState
from distributed_training.validator import recovery
from distributed_training.validator.global_state import GlobalStateError
from distributed_training.validator.recovery import ask_member_for_state
from tests.tools.validator_world import MODEL_CONFIG, World, one_thread, trained  # noqa: F401

pytestmark = pytest.mark.timeout(120)
MODEL = "epoch-0/model.safetensors"


Then = Callable[[int], None]  # what a member does when it is asked


class Lost:
    """A network without global state. Members uploaded only the scored files."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.models: dict[int, bytes] = {}
        for uid, miner in world.miners.items():
            self.put_config(uid, total_inner_steps=700)
            self.models[uid] = miner.bucket.objects.pop(MODEL)[0]
        world.bucket.objects.clear()

    def put_config(self, uid: int, *, total_inner_steps: int | None) -> None:
        miner = self.world.miners[uid]
        extras = ConfigExtras(
            tuple(miner.blocks), miner.inner_step, total_inner_steps=total_inner_steps
        )
        miner.bucket.put("epoch-0/config.json", extras.merge_into(MODEL_CONFIG))

    def put_model(self, uid: int, *, size: int | None = None) -> None:
        self.world.miners[uid].bucket.put(MODEL, self.models[uid][:size])

    def ask(
        self,
        uid: int,
        then: Then,
        *,
        content: Literal["scored", "all"] = "scored",
        within: float = 60,
    ) -> GlobalState:
        world, parts = self.world, self.world.parts()
        world.client.on_model_asked = then
        age = timedelta(seconds=within)
        store = replace(world.config.store, content=content, age_limit=age)
        return ask_member_for_state(
            replace(world.config, store=store),
            uid,
            chain=parts.member.chain,
            client=parts.client,
            open_bucket=parts.open_bucket,
            folder=world.folder / "scratch",
            stop=threading.Event(),
        )


@pytest.fixture
def lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lost:
    monkeypatch.setattr(recovery, "_ASK_EVERY", timedelta(seconds=0.01))
    return Lost(trained(tmp_path))


def test_the_network_continues_with_the_model_of_the_named_member(lost: Lost) -> None:
    world = lost.world

    def uploaded(uid: int) -> None:
        if len(world.client.models_asked) == 3:  # its next upload takes a while
            lost.put_model(uid)

    moved = world.miners[17].pseudo_gradient()
    expected = [a - g for a, g in zip(world.state.weights, moved, strict=True)]
    state = lost.ask(17, uploaded)
    assert world.client.models_asked == [17, 17, 17]
    assert (state.outer_step, state.total_inner_steps, state.momentum) == (1, 700, None)
    for a, b in zip(state.weights, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    assert not list((world.folder / "scratch").iterdir())
    world.validator.start(state, found=False)
    assert {keys.epoch_key(1, name) for name in keys.GLOBAL_DATA_FILES} <= {*world.bucket.objects}


def without_a_place(lost: Lost, uid: int) -> None:
    lost.put_model(uid)
    lost.put_config(uid, total_inner_steps=None)


@pytest.mark.parametrize(
    ("uid", "then", "why"),
    [
        (17, lambda lost, uid: None, "no such object"),
        (17, lambda lost, uid: lost.put_model(uid, size=-4), "safetensors"),
        (17, without_a_place, "does not say how many inner steps"),
        (5, lambda lost, uid: None, "no member"),
    ],
)
def test_a_member_that_has_no_model_to_go_on_with_is_refused_in_one_line(
    lost: Lost, uid: int, then: Callable[[Lost, int], None], why: str
) -> None:
    with pytest.raises(GlobalStateError, match=rf"uid {uid} \(.*{why}.*nothing was published"):
        lost.ask(uid, lambda uid: then(lost, uid), within=1)
    assert not lost.world.bucket.objects


def test_where_members_upload_all_nobody_is_asked(lost: Lost) -> None:
    with pytest.raises(ConfigError, match=r"upload\.content = all"):
        lost.ask(17, lost.put_model, content="all")
    assert lost.world.client.models_asked == []


def test_an_empty_bucket_begins_no_new_run_over_the_members_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = trained(tmp_path)
    assert world.validator.round()
    reached, model = world.validator.state, world.miners[3].start
    give_model_from(world, "none")
    assert world.found and "none stands there still" in caplog.text
    give_model_from(world, None)
    world.bucket.objects.clear()
    both = "a copy of outer step 1 and uid 3 is at outer step 1, so nothing was published"
    with pytest.raises(GlobalStateError, match=both):
        world.restart()
    assert world.client.epochs == [0] and not world.bucket.objects

    give_model_from(world, "own")
    world.start()
    state = world.validator.state
    assert (state.outer_step, state.total_inner_steps) == (1, reached.total_inner_steps)
    for tensors in zip(state.weights, reached.weights, model, strict=True):
        assert all(torch.allclose(tensors[0], each, atol=1e-6) for each in tensors)
    assert state.momentum is not None

    shutil.rmtree(tmp_path / "global")
    world.bucket.objects.clear()
    with pytest.raises(GlobalStateError, match=r"no copy .*there is none.*nothing was published"):
        world.restart()
    give_model_from(world, None, fails="is empty and uid 3 is at outer step 1, so nothing")
    world.miners[3].answers = world.miners[17].answers = False
    give_model_from(world, None)
    assert not world.found and world.state.outer_step == 0
    world.miners[3].answers = True
    give_model_from(world, "none")
    assert not world.found and world.state.outer_step == 0


def give_model_from(
    world: World, wanted: Literal["own", "none"] | None, *, fails: str = ""
) -> None:
    validator = replace(world.config.validator, model_from=wanted)
    world.config = replace(world.config, validator=validator)
    with pytest.raises(GlobalStateError, match=fails) if fails else nullcontext():
        world.restart()


def test_a_copy_that_is_not_whole_is_not_gone_on_from(tmp_path: Path) -> None:
    world = trained(tmp_path)
    assert world.validator.round()
    copies = tmp_path / "global"
    (copies / "epoch-1" / keys.MODEL).write_bytes(b"half")
    assert recovery.read_own_copy(copies).outer_step == 0
    (copies / "epoch-0" / keys.OUTER_OPTIMIZER).unlink()
    with pytest.raises(GlobalStateError, match=r"outer step 0: .*nothing was published"):
        recovery.read_own_copy(copies)
