"""The validator's rounds and what it publishes, with a real small Llama and twins in memory."""

from __future__ import annotations

import io
import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from distributed_training.chain.base import ChainUnavailable
from distributed_training.chain.server import ROUND_BOUNDS
from distributed_training.node.start import Stopped
from distributed_training.protocol import keys, synapses
from distributed_training.protocol.metadata import Metadata, RoundNotes, parse_config
from distributed_training.protocol.network_report import NetworkReport, judge_network
from distributed_training.protocol.types import AllReduceError, AllReduceFault, Revision
from distributed_training.store.errors import StoreError
from distributed_training.telemetry.metrics import read_metrics
from distributed_training.validator import reporter, rounds
from distributed_training.validator.global_state import GlobalStateError
from distributed_training.validator.rounds import _AT_ONCE, WEIGHT_OF_NOTHING, Attendance, each
from distributed_training.validator.suspects import Suspects
from tests.tools.validator_world import (  # noqa: F401
    MODEL_CONFIG,
    PEER,
    RUN,
    TwinMiner,
    World,
    one_thread,
    settings,
    trained,
)
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return trained(tmp_path)


def _notes(world: World) -> Mapping[int, str]:
    return RoundNotes.parse(world.bucket.objects[keys.ROUND][0]).miners


def _root(world: World) -> Metadata:
    return Metadata.parse(world.bucket.objects[keys.ROOT_METADATA][0])


# --- start ---


def test_an_empty_bucket_gets_the_initial_model_with_the_metadata_last(world: World) -> None:
    data, metadata = world.bucket.writes[:3], world.bucket.writes[3:]
    assert set(data) == {keys.epoch_key(0, name) for name in keys.GLOBAL_DATA_FILES}
    assert metadata == ["epoch-0/metadata.json", "metadata.json"]
    assert _root(world) == Metadata(RUN, 0, 0, world.swarm.peer_id)
    content = io.BytesIO(world.bucket.objects["epoch-0/outer_optimizer.pt"][0])
    parameters = [torch.nn.Parameter(weights.clone()) for weights in world.validator.state.weights]
    public = torch.load(content, weights_only=True)["optimizer_state_dict"]  # as its miner loads it
    torch.optim.SGD(parameters, lr=0.1, momentum=0.5, nesterov=True).load_state_dict(public)
    assert world.kinds() == ["publication", "start", "held_out"]
    start = world.events.of("start")[0]
    assert start["resumed"] is False and start["uid"] == 200


def test_a_restart_continues_from_the_bucket_and_changes_only_the_peer_id(world: World) -> None:
    assert world.validator.round()
    world.validator.score()
    state, standings = world.validator.state, world.validator.standings
    objects = dict(world.bucket.objects)
    world.restart()
    world.swarm.peer_id = "12D3KooWNew"
    world.start()
    again = world.validator.state
    assert again.outer_step == 1 and again.last_allreduce_block == state.last_allreduce_block
    assert all(map(torch.equal, again.weights, state.weights))
    assert all(map(torch.equal, again.momentum or [], state.momentum or []))
    assert _root(world) == Metadata(RUN, 1, 0, "12D3KooWNew")
    changed = {k for k in objects if world.bucket.objects[k] != objects[k]}
    assert changed == {keys.ROOT_METADATA}
    assert world.events.of("start")[0]["resumed"] is True
    kept = world.validator.standings  # read from its ledger
    assert kept.successful_rounds == 1 and kept.entries == standings.entries
    assert kept.board.state() == standings.board.state()
    assert kept.weights() == standings.weights() != {}


@pytest.mark.parametrize("published", [True, False])
def test_a_kill_around_the_publication_loses_no_standing(
    world: World, published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round counts if, and only if, the world has seen its outer step."""
    target, name = (world.validator, "_succeeded") if published else (world.publisher, "publish")

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(target, name, killed)
    with pytest.raises(KeyboardInterrupt):
        world.validator.round()
    for _ in range(2):  # and not twice, whenever the next kill comes
        world.restart()
        world.start()
        standings = world.validator.standings
        assert standings.successful_rounds == int(published)
        assert {e.all_reduce for e in standings.entries.values()} == {int(published)}


def test_a_bucket_that_does_not_answer_is_not_an_empty_one(world: World) -> None:
    world.bucket.down = True
    with pytest.raises(StoreError):
        world.restart()


# --- a good round ---


def test_rounds_end_with_the_same_weights_everywhere_and_a_lower_loss(world: World) -> None:
    before = world.validator.state
    assert world.validator.round()
    state = world.validator.state
    assert state.outer_step == 1
    for miner in world.miners.values():
        assert miner.outer_step == 1
        assert all(map(torch.equal, miner.start, state.weights))
    assert not torch.equal(before.weights[0], state.weights[0])  # and the old are still the old
    told = world.events.of("held_out")[-1]
    assert told["outer_step"] == 1 and told["after"] < told["before"] - 0.1
    round_event, outer = world.events.of("round")[0], world.events.of("outer_step")[0]
    assert round_event["ok"] and round_event["participants"] == [3, 17]
    assert round_event["outer_step"] == 0 and outer["outer_step"] == 1
    assert world.swarm.peer_id in round_event["peers"]
    order = world.kinds()[world.kinds().index("sweep") :]
    assert order == ["sweep", "held_out", "round", "publication", "outer_step"]
    assert _root(world).revision == Revision(RUN, 1, 0)
    config, extras = parse_config(world.bucket.objects["epoch-1/config.json"][0])
    assert extras.last_allreduce_block == world.chain.block()
    assert config["model_type"] == "llama"
    entries = world.validator.standings.entries
    assert entries[3].all_reduce == entries[17].all_reduce == 1

    world.train_and_publish()  # the second carries the momentum
    assert world.validator.round() and world.validator.state.outer_step == 2
    for miner in world.miners.values():
        assert all(map(torch.equal, miner.start, world.validator.state.weights))
        assert all(map(torch.equal, miner.momentum, world.validator.state.momentum))
    losses = world.events.of("held_out")
    assert losses[-1]["after"] < losses[0]["after"]
    reported = {step: loss for step, (loss, _) in world.chain_ledger.view.losses.items()}
    assert reported == {told["outer_step"]: told["after"] for told in losses}


def report_of(world: World) -> NetworkReport:
    """The report that the registry has of it."""
    found = world.chain_ledger.view.report
    assert found is not None
    return found[1]


def verdict_of(world: World) -> str:
    verdict = judge_network(report_of(world), time.time())
    event = world.events.of("network")[-1]
    assert (event["verdict"], event["level"]) == (verdict.word, verdict.kind)
    trains = read_metrics(world.folder / "metrics.prom").get("dt_network_training")
    assert trains == (None if verdict.kind == "idle" else verdict.kind == "good")
    return verdict.word


def test_the_registry_gets_the_networks_report(world: World) -> None:
    assert verdict_of(world) == "starting"
    world.validator.score()
    assert verdict_of(world) == "first round to come"
    world.chain_ledger.advance(5)
    assert world.validator.round()
    assert verdict_of(world) == "training"
    world.validator.score()
    report = report_of(world)
    assert [m.uid for m in report.members] == [3, 17] and report.least == 1
    assert report.rounds[0].participants == (3, 17) and report.rounds[0].fault == ""
    assert report.tokens == report.rounds[0].tokens == 60 * world.config.tokens_of_step
    assert list(report.losses.items()) == [(world.config.held_out_name, report.loss)]
    for miner in world.miners.values():
        miner.answers = False
    world.validator.score()
    assert verdict_of(world) == "waiting for members"
    for miner in world.miners.values():
        miner.answers = True
    world.validator.score()
    for fault, word in ((AllReduceFault.TIMEOUT, "last round failed"), (None, "training")):
        world.train_and_publish()
        world.swarm.fault = fault
        assert world.validator.round() == (fault is None)
        assert verdict_of(world) == word
    world.train_and_publish()
    world.swarm.distort = lambda t: -30 * t
    assert not world.validator.round()
    assert verdict_of(world) == "outer steps refused"
    world.bucket.down = True
    world.validator.score()
    assert verdict_of(world) == "held up"
    world.bucket.down = False
    world.restart()  # what it knew is in its ledger
    world.start()
    assert verdict_of(world) == "starting"
    world.validator.score()  # the miners took the step that was refused
    assert verdict_of(world) == "waiting for members"
    event = world.events.of("network")[-1]
    assert "at another outer step: uid 3, 17" in event["words"]
    assert "the last round failed: the average made the held-out loss worse" in event["words"]
    assert len(report_of(world).rounds) == 4
    world.stop.set()
    world.validator.run()
    assert verdict_of(world) == "stopped"


def test_a_member_without_a_score_reads_the_cause(world: World) -> None:
    def causes() -> dict[int, str]:
        world.validator.score()
        return {m.uid: m.cause for m in report_of(world).members}

    world.miners[3].change_payload(lambda raw: raw.clear())
    world.miners[17].bucket.age(1e6)
    found = causes()
    assert "gradients.pt" in found[3] and "upload is 100000" in found[17], found
    world.miners[17].run_id = "another"
    assert causes()[17] == "its network's file is another version"


def test_a_chain_that_is_away_keeps_no_stop_and_no_metrics_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.validator.score()

    def away() -> int:
        raise ChainUnavailable("it does not answer")

    monkeypatch.setattr(world.chain, "block", away)
    world.stop.set()
    world.validator.run()
    assert world.events.of("stop") and world.events.of("network")[-1]["verdict"] == "stopped"
    figures = read_metrics(world.folder / "metrics.prom")
    assert "dt_chain_block" not in figures and figures["dt_network_members"] == 2


def test_a_registry_that_hangs_costs_a_round_seconds(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def hang(report: object) -> None:
        asked.set()
        world.stop.wait(60)

    monkeypatch.setattr(world.chain, "report", hang)
    monkeypatch.setattr(reporter, "_PATIENCE", 0.05)
    began = time.monotonic()
    world.validator.score()
    assert asked.wait(5) and time.monotonic() - began < 30
    assert world.validator.round()
    world.stop.set()


def test_the_validator_contributes_the_checkpoint_of_the_furthest_miner(world: World) -> None:
    ahead = world.miners[17]
    ahead.train(world.chain.block(), steps=5)
    ahead.publish()
    expected = ahead.pseudo_gradient()
    assert world.validator.round()
    assert world.client.called == [[17, 3]]
    assert world.events.of("round")[0]["top_uid"] == 17
    assert all(map(torch.equal, world.swarm.contributions[0], expected))
    assert world.swarm.requests[0][1] == 1.0
    request = world.swarm.requests[0][0]
    assert request.min_group_size == 2
    # Nobody else may be averaged with.
    assert request.peers == (world.swarm.peer_id, ahead.peer_id, world.miners[3].peer_id)


def test_miner_without_an_upload_is_called_by_the_peer_id_of_its_answer(world: World) -> None:
    world.miners[3].bucket.objects.clear()
    assert world.validator.round()
    assert world.client.called == [[17, 3]]
    assert world.miners[3].peer_id in world.swarm.requests[0][0].peers


def test_published_text_in_place_of_a_peer_id_does_not_spoil_the_call(world: World) -> None:
    world.miners[17].peer_id = ""  # it tells none itself
    world.miners[17].bucket.put(keys.ROOT_METADATA, Metadata(RUN, 0, 99, "abc").to_json())
    world.validator.round()
    body = synapses.build_all_reduce(world.swarm.requests[0][0])
    taken = synapses.parse_all_reduce(body, caller="", bounds=ROUND_BOUNDS)
    assert taken.peers == (world.swarm.peer_id, world.miners[3].peer_id)


def test_the_next_best_is_taken_when_the_top_checkpoint_does_not_fit(world: World) -> None:
    top = world.miners[3]
    top.train(world.chain.block(), steps=1)
    top.publish()
    other_run = Metadata(RUN + 1, 0, 31, top.peer_id).to_json()
    top.bucket.put("epoch-0/metadata.json", other_run)
    assert world.validator.round()
    assert world.events.of("round")[0]["top_uid"] == 17


def test_claims_of_a_miner_do_not_put_it_before_a_scored_one(world: World) -> None:
    liar, honest = world.miners[17], world.miners[3]
    liar.publish(inner_step=2**53 - 1)
    world.validator.standings.sync(world.validator._miners())
    world.validator.standings.entries[3].published = 0.1
    assert world.validator.round()
    assert world.client.called == [[3, 17]] and world.events.of("round")[0]["top_uid"] == 3
    assert honest.peer_id in world.swarm.requests[0][0].peers


def test_copied_peer_id_keeps_nobody_out_of_the_round(world: World) -> None:
    copies, honest = world.miners[17], world.miners[3]
    copies.peer_id = honest.peer_id
    world.validator.standings.sync(world.validator._miners())
    world.validator.standings.entries[17].published = 0.1
    world.swarm.absent = {17}  # there is one peer of that id
    assert world.validator.round()
    assert world.client.called == [[17, 3]] and honest.outer_step == 1
    assert world.swarm.requests[0][0].peers == (world.swarm.peer_id, honest.peer_id)
    assert world.events.of("round")[0]["participants"] == [17]  # and answers for what it does


def test_more_miners_than_a_call_holds_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "MOST_CALLED", 2)
    world = trained(tmp_path, uids=(3, 17, 42), held_out_rise=1000)
    for _ in range(3):
        assert world.validator.round()
        _go_back(world)
    first, second, third = map(set, world.client.called)
    assert first | second == second | third == {3, 17, 42}


@pytest.mark.parametrize("moment", ["no metadata", "newer than the root", "begun again"])
def test_an_upload_under_way_is_no_reason_to_contribute_nothing(world: World, moment: str) -> None:
    for miner in world.miners.values():
        earlier = miner.inner_step
        miner.train(world.chain.block(), steps=2)
        miner.publish()
        miner.bucket.put(keys.ROOT_METADATA, Metadata(RUN, 0, earlier, miner.peer_id).to_json())
        if moment != "newer than the root":
            del miner.bucket.objects["epoch-0/metadata.json"]
        if moment == "begun again":  # of the outer step before, and the folder's is not there yet
            miner.bucket.put(keys.ROOT_METADATA, Metadata(RUN, 3, 9, miner.peer_id).to_json())
    expected = {uid: miner.pseudo_gradient() for uid, miner in world.miners.items()}
    assert world.validator.round()
    event, weight = world.events.of("round")[0], world.swarm.requests[0][1]
    if moment == "begun again":
        assert event["top_uid"] is None and weight == WEIGHT_OF_NOTHING
    else:
        assert event["top_uid"] is not None and weight == 1.0
        assert all(map(torch.equal, world.swarm.contributions[0], expected[event["top_uid"]]))


def test_nothing_is_contributed_if_members_upload_only_scored_files(
    tmp_path: Path,
) -> None:
    world = trained(tmp_path, upload_content="scored")
    for miner in world.miners.values():
        del miner.bucket.objects["epoch-0/model.safetensors"]
    assert world.validator.round()
    event = world.events.of("round")[0]
    assert event["ok"] and event["top_uid"] is None
    assert world.swarm.requests[0][1] == WEIGHT_OF_NOTHING
    assert all(float(b.abs().max()) == 0 for b in world.swarm.contributions[0])


@pytest.mark.parametrize("damage", ["nan", "awful", "garbage"])
def test_a_bad_checkpoint_is_never_contributed(
    world: World, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import load, save

    for miner in world.miners.values():
        tensors = load(miner.bucket.objects["epoch-0/model.safetensors"][0])
        if damage == "nan":
            next(iter(tensors.values())).view(-1)[0] = float("nan")
        elif damage == "awful":
            tensors = {key: 50 * value for key, value in tensors.items()}
        data = b"garbage" if damage == "garbage" else save(tensors)
        miner.bucket.put("epoch-0/model.safetensors", data)
    caplog.set_level(logging.INFO)
    assert world.validator.round()  # the miners' own gradients are good
    line = r"uid 17 cannot be the top uid: loss \d+\.\d+ on held-out data, limit \d+\.\d+"
    assert bool(re.search(line, caplog.text)) == (damage == "awful")
    event = world.events.of("round")[0]
    assert event["top_uid"] is None and event["ok"]
    assert all(float(b.abs().max()) == 0 for b in world.swarm.contributions[0])
    assert world.swarm.requests[0][1] == WEIGHT_OF_NOTHING


def test_absent_miner_is_not_punished_and_a_failing_one_is(tmp_path: Path) -> None:
    world = trained(tmp_path, uids=(3, 17, 42, 99))
    world.swarm.absent = {17}
    world.swarm.failing = {42}
    world.miners[99].answers = False
    assert world.validator.round()
    entries = world.validator.standings.entries
    assert {uid: e.all_reduce for uid, e in entries.items()} == {3: 1, 17: 1, 42: 0, 99: 0}
    event = world.events.of("round")[0]
    assert event["participants"] == [3, 42] and set(event["called"]) == {3, 17, 42}
    assert entries[99].missed_sweeps > 0 and entries[3].missed_sweeps == 0
    assert event["causes"] == {"42": "it failed in the average"} and not event["left_out"]
    assert _notes(world) == {42: "it is not in the average: it failed in the average"}


def test_miners_of_another_outer_step_are_not_called(world: World) -> None:
    world.miners[17].outer_step = 4
    assert world.validator.round()
    assert world.client.called == [[3]]


def test_validators_and_neurons_without_an_endpoint_are_not_asked(world: World) -> None:
    world.chain_ledger.register("other-validator", uid=7, stake=1e6, validator_permit=True)
    world.chain_ledger.register("silent", uid=8)
    world.chain_ledger.most_uids = 1000
    world.chain_ledger.register("beyond limits.max_uids", uid=256)
    world.chain_ledger.serve("beyond limits.max_uids", "127.0.0.1", 1)
    assert {n.uid for n in world.validator._miners()} == {3, 17}


def test_rounds_come_by_the_block_clock_and_the_period_grows_after_the_first(
    tmp_path: Path,
) -> None:
    world = trained(tmp_path, blocks_per_allreduce_later=100, score_blocks=10**6)
    for period, reached in ((60, 1), (100, 2)):
        assert world.validator.blocks_per_allreduce == period
        world.train_and_publish()
        for blocks, outer_step in ((period - 1, reached - 1), (1, reached)):
            world.chain_ledger.advance(blocks)
            world.validator.tick()
            assert world.validator.state.outer_step == outer_step


@pytest.mark.parametrize(
    ("blocks", "uploaded", "place"),
    [(60, (30, 45), 30), (60, (30, 10**12), 30), (2, (30, 45), 24), (60, (10**12, 10**12), 720)],
)
def test_the_place_in_the_schedule_is_bounded_by_the_networks_pace(
    world: World, blocks: int, uploaded: Sequence[int], place: int
) -> None:
    """No single peer's claim moves it; a network of liars does by at most 12 steps a block."""
    world.chain_ledger.advance(blocks)
    for miner, inner_step in zip(world.miners.values(), uploaded, strict=True):
        miner.publish(inner_step=inner_step)
    assert world.validator.round()
    _, extras = parse_config(world.bucket.objects["epoch-1/config.json"][0])
    assert extras.total_inner_steps == world.validator.state.total_inner_steps == place
    world.restart()
    world.start()
    assert world.validator.state.total_inner_steps == place


# --- rounds that fail ---


def _assert_kept(world: World, objects: dict, fault: str) -> None:
    assert world.validator.state.outer_step == 0
    event = world.events.of("round")[-1]
    assert event["ok"] is False and event["fault"] == fault
    assert not world.events.of("outer_step")
    kept = {key: found for key, found in world.bucket.objects.items() if key != keys.ROUND}
    assert kept == objects
    assert world.validator.standings.failed_rounds == 1
    assert world.validator.last_allreduce_block == world.chain.block()  # the period starts again


def _silence(world: World) -> None:
    for miner in world.miners.values():
        miner.answers = False


def _distort(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[World], None]:
    return lambda world: setattr(world.swarm, "distort", change)


FAILURES: dict[str, tuple[Callable[[World], None], str]] = {
    **{
        fault.name: (lambda world, fault=fault: setattr(world.swarm, "fault", fault), fault.name)
        for fault in (AllReduceFault.TIMEOUT, AllReduceFault.SWARM_DOWN)
    },
    "nan": (_distort(lambda t: t + math.nan), "NOT_FINITE"),
    "infinity": (_distort(lambda t: t + math.inf), "NOT_FINITE"),
    "too few good peers": (lambda world: world.swarm.failing.update({3, 17}), "PEER_FAILED"),
    "nobody alive": (_silence, "NO_GROUP"),
    "nobody acknowledges": (lambda world: world.client.deaf.update({3, 17}), "CANCELLED"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_round_keeps_the_epoch(world: World, name: str) -> None:
    fail, fault = FAILURES[name]
    objects = dict(world.bucket.objects)
    world.chain_ledger.advance(70)
    fail(world)
    assert not world.validator.round()
    _assert_kept(world, objects, fault)
    assert len(world.swarm.requests) == (name != "nobody alive")
    if world.swarm.fault is None and fault in ("TIMEOUT", "SWARM_DOWN"):
        assert world.validator.round()  # the next one works
        assert world.validator.standings.failed_rounds == 0


def test_a_wrong_clock_is_the_cause_of_a_round_without_a_group(world: World) -> None:
    world.chain_ledger.advance(70)
    _silence(world)
    world.validator._clock_fault = lambda: "this machine's clock is 5.0 s ahead of the store's"
    assert not world.validator.round()
    assert "5.0 s ahead of the store's" in world.events.of("round")[-1]["detail"]


def test_an_average_that_raises_the_loss_is_refused(world: World) -> None:
    objects = dict(world.bucket.objects)
    world.swarm.distort = lambda t: -30 * t
    assert not world.validator.round()
    _assert_kept(world, objects, "WORSE")
    told = world.events.of("held_out")[-1]
    assert told["outer_step"] == 1 and told["after"] > told["before"] * 1.25
    world.swarm.distort = lambda t: t
    _go_back(world, steps=30)
    assert world.validator.round()


def _spoil(miner: TwinMiner) -> None:
    honest = miner.pseudo_gradient
    miner.pseudo_gradient = lambda: [g + math.nan for g in honest()]  # type: ignore[method-assign]


def _go_back(world: World, *, steps: int = 2) -> None:
    """Load the global state again, after a round that failed only here, and train on."""
    state = world.validator.state
    for miner in world.miners.values():
        miner.outer_step, miner.start, miner.momentum = state.outer_step, state.weights, None
        miner._model.load(miner.start)
        miner.train(world.chain.block(), steps=steps)
        miner.publish()


def test_a_miner_that_spoils_rounds_is_not_called_for_long_nor_after_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = trained(tmp_path, uids=(3, 17, 42, 99), held_out_rise=1000)
    _spoil(world.miners[42])
    results = []
    while 42 not in world.validator.standings.suspects.sentences:
        results.append(world.validator.round())
        _go_back(world)
    assert results.count(False) <= 3
    world.restart()
    world.start()
    world.validator.round()
    event = world.events.of("round")[-1]
    assert event["ok"] and sorted(event["called"]) == event["participants"] == [3, 17, 99]
    assert "rounds with it failed" in event["left_out"]["42"]
    assert _notes(world)[42].startswith("it was not called: rounds with it failed")
    assert "uid 42 is not called for 1 good round (rounds with it failed" in caplog.text


def test_the_checkpoint_of_one_that_is_not_called_is_not_contributed(tmp_path: Path) -> None:
    world = trained(tmp_path, uids=(3, 17, 42))
    world.validator.standings.sync(world.validator._miners())
    world.validator.standings.entries[42].published = 1.0
    world.validator.standings.suspects.ended([42], causes={42: "it sent NaN"})
    assert world.validator.round()
    event = world.events.of("round")[0]
    assert sorted(event["called"]) == [3, 17] and event["top_uid"] in (3, 17)


def test_miner_in_a_group_too_small_is_not_blamed(tmp_path: Path) -> None:
    world = trained(tmp_path, uids=(3, 17, 42), minimum_peers=3)
    world.swarm.absent = {17, 42}
    assert not world.validator.round()
    assert world.events.of("round")[-1]["fault"] == "PEER_FAILED"
    assert world.validator.standings.suspects == Suspects()


def test_reports_about_a_miner_do_not_outlast_the_next_round(tmp_path: Path) -> None:
    world = trained(tmp_path, held_out_rise=1000)
    world.miners[17].run_id = "0123456789abcdef"
    assert world.validator.round() and 17 in _notes(world)
    world.restart()
    world.start()
    world.miners[17].run_id = None
    _go_back(world)
    assert world.validator.round() and not _notes(world)


def test_a_stop_during_the_calls_to_miners_loses_no_good_round(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never_ends(notes: RoundNotes) -> None:
        world.stop.set()
        time.sleep(2)

    monkeypatch.setattr(world.publisher, "write_notes", never_ends)
    world.miners[17].run_id = "0123456789abcdef"
    with pytest.raises(Stopped):
        world.validator.round()
    assert _root(world).outer_step == world.validator.state.outer_step == 1


def test_two_miners_of_which_one_spoils_all_leave_no_choice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = trained(tmp_path, minimum_peers=3)
    _spoil(world.miners[17])
    for _ in range(3):
        assert not world.validator.round()
        assert set(world.client.called[-1]) == {3, 17}
        _go_back(world)
    assert "no choice is left: of 2 that are alive 2 are needed, so uids 3, 17" in caplog.text


@pytest.mark.parametrize("fault", [AllReduceFault.SWARM_DOWN, AllReduceFault.NO_GROUP])
def test_a_round_that_failed_only_here_blames_nobody(world: World, fault: AllReduceFault) -> None:
    world.swarm.fault = fault
    assert not world.validator.round()
    assert world.validator.standings.suspects == Suspects()


def test_two_sweeps_that_find_the_same_end_the_search_and_the_silent_are_asked_rarely(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, settings(sweep_patience=timedelta(seconds=60)), uids=range(1, 13))
    world.start()
    for uid, miner in world.miners.items():
        miner.answers = uid <= 3
    attendance = world.validator._rounds._gather(world.validator._miners, 0, lambda _: None)[1]
    assert world.client.asked == [[*range(1, 13)]] * 2
    assert attendance.alive == (1, 2, 3) and len(attendance.asked) == 12
    # One that comes back later is found after the tenth sweep.
    world.client.asked.clear()
    world.validator._rounds._settings = replace(world.validator._rounds._settings, minimum_peers=5)

    def comes_back(attendance: Attendance) -> None:
        world.miners[9].answers = len(world.client.asked) >= 3

    attendance = world.validator._rounds._gather(world.validator._miners, 0, comes_back)[1]
    assert attendance.alive == (1, 2, 3, 9)
    assert [len(asked) for asked in world.client.asked] == [12, 12, *[3] * 8, 12, 12]


def test_a_miner_that_misses_one_call_is_in_the_round(tmp_path: Path) -> None:
    world = trained(tmp_path, uids=(3, 17, 42), sweep_patience=timedelta(seconds=60))
    world.miners[17].answers = False
    sweep = world.validator._on_sweep

    def answers_again(attendance: Attendance) -> None:
        sweep(attendance)
        world.miners[17].answers = True

    world.validator._on_sweep = answers_again  # type: ignore[method-assign]
    assert world.validator.round()
    assert sorted(world.client.called[0]) == [3, 17, 42]


def test_a_call_tells_where_its_peers_are_reached_by_others(world: World) -> None:
    def address(host: str, peer_id: str) -> str:
        return f"/{host}/tcp/8009/p2p/{peer_id}"

    world.swarm.peer_id = f"{PEER}hK"
    world.swarm.visible_maddrs = [
        address(host, world.swarm.peer_id)
        for host in ("ip4/127.0.0.1", "ip4/10.0.0.1", "ip4/8.8.8.8")
    ]
    for miner, host in zip(world.miners.values(), ("dns4/a.b", "ip4/10.0.0.2"), strict=True):
        miner.addresses = (address(host, miner.peer_id),)
    assert world.validator.round()
    first = world.miners[3]
    assert world.swarm.requests[0][0].addresses == (
        address("ip4/8.8.8.8", world.swarm.peer_id),
        address("ip4/10.0.0.1", world.swarm.peer_id),
        *first.addresses,  # and none of the other's private network
    )


def test_a_round_that_failed_only_here_costs_no_miner_its_weight(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    average = world.swarm.average

    def dies(*arguments: Any, **options: Any) -> Any:
        average(*arguments, **options)
        raise AllReduceError(AllReduceFault.SWARM_DOWN, "p2pd was killed")

    world.validator.tick()
    world.validator.score()
    weights = world.validator.standings.weights().keys()
    assert weights
    with monkeypatch.context() as patch:
        patch.setattr(world.swarm, "average", dies)
        assert not world.validator.round()
    assert {m.outer_step for m in world.miners.values()} == {1}
    world.client.epochs.clear()
    for _ in range(2):  # at once, with the weights: a miner that hears it looks into the bucket
        world.validator.tick()
    assert world.client.epochs == [0]
    for _ in range(11):
        attendance = world.validator._rounds.sweep(world.validator._miners(), 0)
        world.validator._attended(attendance)
    world.validator.score()
    assert world.validator.standings.weights().keys() == weights
    assert world.events.of("sweep")[-1]["elsewhere"] == {"3": 1, "17": 1}
    assert caplog.text.count("not called until they are back: uid 3 at 1, uid 17 at 1") == 1
    assert not world.validator.round()
    assert "outer step 0, 2 miners at another" in world.events.of("round")[-1]["detail"]


def test_miner_with_another_version_is_neither_called_nor_scored_and_named_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    ours = world.config.rules_id
    world.miners[3].run_id, world.miners[17].run_id = ours, "0123456789abcdef"
    world.validator.score()
    assert world.validator.round()
    assert world.client.called == [[3]]
    world.validator.score()
    assert world.validator.standings.weights().keys() == {3}
    named = "uid 17 runs with another version of the network's file (run 0123456789abcdef)"
    assert caplog.text.count(named) == 1
    assert world.events.of("sweep")[-1]["other_runs"] == {"17": "0123456789abcdef"}
    assert "it runs 0123456789abcdef" in _notes(world)[17]


def test_miners_that_register_while_a_round_gathers_are_taken_in(tmp_path: Path) -> None:
    world = trained(tmp_path, sweep_patience=timedelta(seconds=20))
    ledger = world.chain_ledger
    everybody = ledger.save()
    for uid in (3, 17):
        ledger.deregister(world.hotkeys[uid])
    on_sweep = world.validator._on_sweep

    def registering(attendance: Any) -> None:
        on_sweep(attendance)
        if len(world.events.of("sweep")) == 3:
            ledger.restore(everybody)

    world.validator._on_sweep = registering  # type: ignore[method-assign]
    assert world.validator.round()
    assert world.events.of("round")[0]["participants"] == [3, 17]


def test_a_client_that_breaks_does_not_leave_the_averager_waiting(world: World) -> None:

    def broken(*arguments: Any) -> Any:
        raise OSError("no sockets left")

    world.client.sweep_all_reduce = broken  # type: ignore[method-assign]
    began = time.monotonic()
    with pytest.raises(OSError, match="sockets"):
        world.validator.round()
    assert world.swarm.cancelled.is_set() and time.monotonic() - began < 15  # it waits for ever


def test_a_damaged_ledger_is_said_and_nothing_is_overwritten(world: World) -> None:
    path = world.folder / "ledger.json"
    for text in ("", "{", "[]", "{}", '{"entries": {"1": {"x": 1}}}'):
        path.write_text(text)
        with pytest.raises(GlobalStateError, match="remove it"):
            world.restart()
        assert path.read_text() == text


def test_a_dead_swarm_is_started_again_before_the_round(world: World) -> None:
    objects = dict(world.bucket.objects)
    world.swarm.dead = world.swarm.broken = True
    assert not world.validator.round()
    _assert_kept(world, objects, "SWARM_DOWN")
    assert "p2pd" in world.events.of("round")[0]["detail"]
    world.swarm.broken = False
    assert world.validator.round()
    assert _root(world).peer_id == world.swarm.peer_id != world.events.of("start")[0]["peer_id"]


def test_a_stop_ends_a_round_soon_and_counts_it_for_nothing(world: World) -> None:
    world.swarm.hang = True
    world.chain_ledger.advance(60)
    runner = threading.Thread(target=world.validator.run)
    runner.start()
    wait_for(lambda: world.swarm.requests, "the round")
    world.stop.set()
    runner.join(15)  # the swarm hangs for 20 s
    assert not runner.is_alive()
    assert world.kinds()[-1] == "stop" and not world.events.of("round")
    assert world.validator.standings.failed_rounds == 0
    with pytest.raises(Stopped):
        world.model.loss(torch.zeros(2, 4, dtype=torch.long))


# --- publication ---


@pytest.mark.parametrize(
    "key", ["epoch-1/model.safetensors", "epoch-1/metadata.json", "metadata.json"]
)
def test_a_publication_that_fails_shows_readers_the_old_state(world: World, key: str) -> None:
    world.bucket.fail = [key]
    assert not world.validator.round()
    assert _root(world).revision == Revision(RUN, 0, 0)
    assert world.validator.state.outer_step == 0
    assert world.events.of("publication")[-1]["ok"] is False
    assert not world.events.of("outer_step")


def test_a_store_and_a_disk_that_fail_for_a_moment_do_not_lose_the_outer_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The miners have made the step; a validator that ended would take it back for all."""
    from distributed_training.validator import global_state
    from distributed_training.validator import hivemind as module

    monkeypatch.setattr(module, "PUBLICATION_RETRY", timedelta(milliseconds=5))
    world = trained(tmp_path, publication_budget=timedelta(seconds=30))
    world.bucket.fail = ["epoch-1/model.safetensors", "metadata.json"]
    full: list[tuple[str, Exception]] = [
        ("write_bytes", OSError(28, "No space left on device")),
        ("save_file", SafetensorError("No space left on device")),
        ("save_outer_optimizer", RuntimeError("PytorchStreamWriter failed writing file")),
        ("Journal", OSError(28, "No space left on device")),
    ]

    def fails_once(name: str, error: Exception) -> None:
        write = getattr(global_state, name)
        left = [error]

        def failing(*arguments: Any, **fields: Any) -> Any:
            if left:
                raise left.pop()
            return write(*arguments, **fields)

        monkeypatch.setattr(global_state, name, failing)

    for name, error in full:
        fails_once(name, error)
    assert world.validator.round()
    told = world.events.of("publication")
    assert [e["ok"] for e in told] == [True, *[False] * 6, True]
    reasons = [e["reason"] for e in told]
    assert sum("space" in why or "failed writing" in why for why in reasons) == 4
    assert _root(world).revision == Revision(RUN, 1, 0)


def test_a_publication_whose_answer_was_lost_is_gone_on_from(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = world.bucket.put

    def silent(key: str, *content: Any, **options: Any) -> Any:
        answer = put(key, *content, **options)
        if key == keys.ROOT_METADATA:
            raise StoreError("no answer")
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(world.bucket, "put", silent)
        assert not world.validator.round()
    assert _root(world).outer_step == 1 and world.validator.state.outer_step == 0
    world.bucket.down = True
    world.validator.tick()  # it may say so later
    world.bucket.down = False
    with pytest.raises(GlobalStateError, match="1 was published after all"):
        world.validator.tick()
    world.restart()
    world.start()
    assert world.validator.state.outer_step == 1
    standings = world.validator.standings
    assert standings.successful_rounds == 1 and standings.failed_rounds == 0
    assert {e.all_reduce for e in standings.entries.values()} == {1}


@pytest.mark.slow
def test_old_epochs_are_removed(world: World) -> None:
    for _ in range(3):
        world.train_and_publish()
        assert world.validator.round()
    folders = sorted(p.name for p in (world.folder / "global").glob("epoch-*"))
    assert folders == ["epoch-2", "epoch-3"]
    in_bucket = {k.split("/")[0] for k in world.bucket.objects}
    assert in_bucket == {"metadata.json", "epoch-1", "epoch-2", "epoch-3"}


def test_the_initial_model_is_the_same_for_one_seed_and_the_config_is_plain() -> None:
    from distributed_training.training.model import parameter_schema
    from distributed_training.validator.global_state import initial_weights, small_llama

    first, again = (initial_weights(MODEL_CONFIG, seed=7) for _ in range(2))
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], initial_weights(MODEL_CONFIG, seed=8)[0])
    config = small_llama(vocabulary=2048, sequence_length=256, eos_token=0)
    count = sum(torch.Size(shape).numel() for _, shape in parameter_schema(config))
    assert 1_000_000 <= count <= 2_000_000
    assert json.loads(json.dumps(config)) == config


def test_few_threads_ask_many_miners() -> None:
    threads: set[int] = set()
    together = threading.Barrier(_AT_ONCE, timeout=30)

    def ask(_: int) -> None:
        together.wait()  # so that no thread can do the work of two
        threads.add(threading.get_ident())

    each(ask, range(4 * _AT_ONCE), stop=threading.Event())
    assert len(threads) == _AT_ONCE
