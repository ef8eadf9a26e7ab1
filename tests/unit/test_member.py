"""Test a script that joins a store network: its uploads, updates, restarts and refusals."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import distributed_training
from distributed_training import member
from distributed_training.common.files import sha256_of
from distributed_training.config.versions import Versions
from distributed_training.data.tokenizer import BYTE_VOCABULARY
from distributed_training.member import Net
from distributed_training.miner import build, rounds
from distributed_training.miner import events as ev
from distributed_training.miner.loop import Controller, RankLoop
from distributed_training.miner.reporter import Reporter
from distributed_training.network import signed
from distributed_training.node.start import sole_user
from distributed_training.protocol.update_file import UpdateFile
from distributed_training.store.folder import FolderStore
from distributed_training.telemetry import read_events
from distributed_training.telemetry.run_state import LOCK_FILE, observe
from distributed_training.telemetry.verdict import Verdict, judge
from distributed_training.training.outer_step import OuterStep
from distributed_training.training.script_weights import ScriptWeights, Steps
from tests.tools.member_world import UID, MemberWorld, played, script_model, train_step
from tests.tools.network import ALICE
from tests.tools.store_leader import Leader
from tests.tools.training_world import tiny
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(120)


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def adam_w(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=2e-3)


class Script:
    """Run a training script. Like a SIGKILL, ``kill`` leaves only its files."""

    def __init__(
        self, world: MemberWorld, *, seed: int = 3, make: Make = adam_w, **settings: Any
    ) -> None:
        self.world, self.number = world, 1000 * seed
        self.model = script_model(world.model, seed)
        self.optimizer = make(list(self.model.parameters()))
        self.net: Net = distributed_training.join(
            world.network, self.model, self.optimizer, **world.settings(**settings)
        )

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.number += 1
            loss = train_step(self.model, self.optimizer, self.number)
            self.net.step(loss=loss, tokens=64)

    def train_until(self, condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
        def trained() -> bool:
            self.train()
            return condition()

        wait_for(trained, what, seconds)

    def upload(self) -> Path:
        """Open a close, and train until the upload for it is in the store."""
        leader = self.world.leader
        leader.open_close()
        path = self.world.bucket / f"uploads/{UID}/{leader.outer_step}.{leader.serial}.safetensors"
        self.train_until(path.exists, f"{path} in the store")
        return path

    def take_outer_step(self) -> None:
        self.upload()
        self.world.leader.take_outer_step(UID)
        self.follow()

    def follow(self) -> None:
        reached = self.world.leader.outer_step
        self.train_until(lambda: self.net.outer_step == reached, f"outer step {reached}")
        assert self.starts_as_the_leader()

    def starts_as_the_leader(self) -> bool:
        held, theirs = self.net._weights.outer.epoch_start, self.world.leader.state.weights
        return all(torch.equal(a, b) for a, b in zip(held or [], theirs, strict=True))

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def kill(self) -> None:
        self.net._checkpointer.wait()  # it runs in a thread of this process
        self.net._leave()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return list(read_events(self.world.folder / "run" / "events.jsonl", kind))


def refusal_elsewhere(world: MemberWorld) -> str:
    """Return the refusal that another process gets when it wants to use the run folder."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            with sole_user(world.folder / "run", LOCK_FILE, "miner"):
                pass
        except ValueError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os.close(writer)
    with open(reader) as said:
        return said.read()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[MemberWorld]:
    made = MemberWorld(tmp_path)
    with played(made.bucket):
        yield made


@pytest.fixture
def script(world: MemberWorld) -> Iterator[Script]:
    made = Script(world)
    yield made
    made.net._leave()


def first_daily(first: str, *rest: str) -> list[Any]:
    return [first, *(pytest.param(each, marks=pytest.mark.long) for each in rest)]


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_script_takes_outer_steps_and_logs_the_same_lines_as_a_miner(script: Script) -> None:
    world, net = script.world, script.net
    assert script.starts_as_the_leader()
    assert same(script.weights(), world.leader.state.weights)
    script.train(4)
    assert (net.outer_step, net.inner_step) == (0, 4)
    upload = script.upload()
    header = UpdateFile.reopen(upload, world.leader.schema).header
    assert header.inner_steps >= 4 and header.tokens == 64 * header.inner_steps
    world.leader.take_outer_step(UID)
    script.follow()
    # The inner steps in the upload belong to the previous outer step.
    assert net.inner_step == script.number - 3000 - header.inner_steps
    script.take_outer_step()
    net.close()
    folder = world.folder / "run"
    kinds = {event["kind"] for event in read_events(folder / "events.jsonl")}
    assert kinds >= {"start", "step", "close", "upload", "checkpoint", "publication", "outer_step"}
    assert [event["base"] for event in script.events("round")] == ["merged", "merged"]
    facts = observe(folder, time.time())
    assert facts.launch is not None and facts.launch.asked
    found = judge(facts, time.time())
    assert (found.verdict, found.bad) == (Verdict.STOPPED, False), found


def test_a_step_prints_nothing_of_ours(script: Script, caplog: pytest.LogCaptureFixture) -> None:
    """A step is logged only at DEBUG, but events.jsonl has every step."""
    for level, shown in ((logging.INFO, False), (logging.DEBUG, True)):
        caplog.clear()
        with caplog.at_level(level, "distributed_training"):
            script.train(3)
        lines = [record.getMessage() for record in caplog.records]
        assert any(line.startswith("Outer Step: ") for line in lines) == shown
        assert any(line.startswith("Throughput: ") for line in lines) == shown
    assert len(script.events("step")) == 6


KILLS = {
    "trained": lambda event: isinstance(event, ev.InnerStepDone),
    "taken": lambda event: isinstance(event, ev.UploadBegun),
    "saved": lambda event: isinstance(event, ev.CheckpointBegun),
    "written": lambda event: isinstance(event, ev.UploadWritten),
    "sent": lambda event: isinstance(event, ev.UploadEnded),
    "committed": lambda event: isinstance(event, ev.OuterStepEnded),
}


@pytest.mark.parametrize("moment", first_daily("taken", *(m for m in KILLS if m != "taken")))
def test_a_script_killed_at_any_moment_sends_one_file_and_applies_all(
    script: Script, moment: str
) -> None:
    world, controller = script.world, script.net._controller
    script.train(3)
    dead, files = threading.Event(), dict[str, str]()

    class Killed(BaseException):
        """Stands for a kill: after it, no code of the product runs."""

    def kill(event: ev.Event, state: object) -> None:
        if KILLS[moment](event):
            dead.set()
            raise Killed

    controller.subscribe(kill)
    with contextlib.suppress(Killed):
        script.upload()
        if not dead.is_set():
            world.leader.take_outer_step(UID)
            script.follow()
    assert dead.is_set()
    script.kill()
    files = {path.name: sha256_of(path) for path in (world.bucket / "uploads").rglob("*.*")}
    again = Script(world, seed=5)
    if world.leader.outer_step == 0:
        if not files:
            again.upload()
        world.leader.take_outer_step(UID)
    again.follow()
    now = {path.name: sha256_of(path) for path in (world.bucket / "uploads").rglob("*.*")}
    assert files.items() <= now.items()
    assert again.events("round")[-1]["base"] == "merged"
    again.take_outer_step()
    again.net.close()


class Stuck(FolderStore):
    """A store that does not answer while ``away`` is set, and records which threads ask."""

    away = threading.Event()
    asked_by: set[int] = set()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("head", "get", "get_range", "put", "put_new"):
            return found

        def call(*given: Any, **more: Any) -> Any:
            Stuck.asked_by.add(threading.get_ident())
            while Stuck.away.is_set():
                time.sleep(0.01)
            return found(*given, **more)

        return call


def test_training_waits_for_no_network(world: MemberWorld) -> None:
    with mock.patch("tests.tools.member_world.FolderStore", Stuck):
        script = Script(world)
        Stuck.asked_by.clear()
        script.take_outer_step()
        world.leader.open_close()
        Stuck.away.set()
        try:
            before, longest = script.net.inner_step, 0.0
            for _ in range(20):
                began = time.perf_counter()
                script.net.step()
                longest = max(longest, time.perf_counter() - began)
                script.train()
            assert script.net.inner_step - before == 20 and longest < 2.0
        finally:
            Stuck.away.clear()
        script.take_outer_step()
        script.net.close()
    assert Stuck.asked_by and threading.get_ident() not in Stuck.asked_by


@pytest.mark.parametrize("place", first_daily("update", "upload", "decision", "subscriber"))
def test_an_error_of_our_own_is_a_warning_and_tried_again(
    script: Script, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    places: dict[str, tuple[Any, str]] = {
        "update": (ScriptWeights, "prepare_update"),
        "upload": (ScriptWeights, "write_upload"),
        "decision": (Controller, "next_command"),
        "subscriber": (Reporter, "_report_round"),
    }
    owner, name = places[place]
    real, failed = getattr(owner, name), threading.Event()

    def once(*given: Any, **more: Any) -> Any:
        if not failed.is_set():
            failed.set()
            raise KeyError("a defect")
        return real(*given, **more)

    script.train(2)
    with (
        mock.patch.object(owner, name, once),
        mock.patch.object(rounds, "_AGAIN", rounds._AGAIN / 600),
        caplog.at_level(logging.WARNING),
    ):
        if place == "upload":  # there is no upload for this close, but there is one for the next
            script.world.leader.open_close()
            script.train_until(failed.is_set, "the defect")
        script.take_outer_step()
    assert failed.is_set() and "a defect" in caplog.text
    script.take_outer_step()


def wrong(model: nn.Module, what: str) -> tuple[nn.Module, Any]:
    """Return a model with one fault, and an optimizer for it."""
    first = next(iter(model.parameters()))
    parameters: Any = model.parameters()
    match what:
        case "frozen":
            first.requires_grad_(False)
        case "no group":
            parameters = list(model.parameters())[1:]
        case "wrapper":
            inner = nn.ModuleDict({"inner": model})
            model = nn.ModuleDict({"net": inner, "other": nn.Linear(2, 2)})
        case "adapters":
            linear: Any = model.get_submodule("model.layers.0.self_attn.q_proj")
            linear.lora_A, linear.base_layer = nn.Linear(2, 2), nn.Linear(2, 2)
            del linear.weight
        case "another class":
            model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
            parameters = model.parameters()
        case "tied":
            model.lm_head.weight = model.model.embed_tokens.weight  # type: ignore[union-attr]
    return model, torch.optim.SGD(parameters, lr=0.1)


def test_a_model_that_is_not_the_networks_is_refused_in_one_line(world: MemberWorld) -> None:
    lines = {
        "frozen": "is frozen",
        "no group": "is in no group of the optimizer",
        "wrapper": r"pass model\.net\.inner, which is the network's model",
        "adapters": r"join with the model without adapters \(LoRA, PEFT\)",
        "another class": r"no parameter model\.embed_tokens\.weight.*model_config\(\)",
        "tied": "lm_head.weight is tied to model.embed_tokens.weight",
        "wider": "has the shape",
        "no optimizer": "not a torch.optim.Optimizer",
    }
    for what, line in lines.items():
        model = tiny(vocab=67, hidden=64) if what == "wider" else world.model
        made, optimizer = wrong(script_model(model), what)
        if what == "no optimizer":
            optimizer = object()
        before = [parameter.detach().clone() for parameter in made.parameters()]
        with pytest.raises(ValueError, match=line) as refused:
            distributed_training.join(world.network, made, optimizer, **world.settings())
        assert "\n" not in str(refused.value) and "nothing was joined" in str(refused.value)
        assert same(before, [parameter.detach() for parameter in made.parameters()]), what
        assert logging.getLogger("distributed_training").handlers == []
    Script(world).net.close()  # the refusals have left the run folder free


@pytest.mark.long
def test_tied_weights_of_the_network_are_tied_in_the_script(tmp_path: Path) -> None:
    world = MemberWorld(tmp_path, {**tiny(vocab=67), "tie_word_embeddings": True})
    with played(world.bucket):
        script = Script(world)
        script.take_outer_step()
        tied: Any = script.model
        assert tied.lm_head.weight is tied.model.embed_tokens.weight
        script.net.close()
        untied = script_model({**world.model, "tie_word_embeddings": False})
        optimizer = torch.optim.SGD(untied.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="to which it is tied"):
            distributed_training.join(world.network, untied, optimizer, **world.settings())


def test_a_step_that_is_called_twice_or_never_is_named(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    script.train(2)
    with caplog.at_level(logging.WARNING):
        script.net.step()
    assert script.net.inner_step == 2 and "no optimizer has stepped" in caplog.text
    train_step(script.model, script.optimizer, 1)
    train_step(script.model, script.optimizer, 2)
    script.net.step()
    assert script.net.inner_step == 4
    script.net.close()
    assert [event["inner_step"] for event in script.events("step")] == [1, 2, 4]
    for optimizer_steps in range(2):
        caplog.clear()
        never = Script(script.world)
        for seed in range(optimizer_steps):
            train_step(never.model, never.optimizer, seed)
        with caplog.at_level(logging.WARNING):
            never.net.close()
        assert "net.step() was never called" in caplog.text


def test_a_step_that_calls_that_of_its_base_counts_once() -> None:
    class Derived(torch.optim.SGD):
        broken = False

        def step(self, closure: Any = None) -> Any:
            if self.broken:
                raise ArithmeticError
            return super().step(closure)

    parameters = [nn.Parameter(torch.ones(2))]
    torch.optim.SGD(
        parameters
    )  # torch adds the hooks to step() when a class gets its first instance
    optimizer = Derived(parameters)
    steps = Steps([optimizer])
    optimizer.step()
    assert (steps.step_count, steps.under_way) == (1, False)
    optimizer.broken = True
    with pytest.raises(ArithmeticError):
        optimizer.step()
    assert (steps.step_count, steps.under_way) == (1, True)
    optimizer.broken = False
    optimizer.step()
    assert (steps.step_count, steps.under_way) == (2, False)


@pytest.mark.long
def test_what_a_script_has_made_the_default_of_tensors_is_not_ours(script: Script) -> None:
    step = script.net.step

    def elsewhere(**given: Any) -> None:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.bfloat16)
        try:
            step(**given)
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)

    with mock.patch.object(script.net, "step", elsewhere):
        script.take_outer_step()
    assert script.events("round")[-1]["base"] == "merged"


def test_what_a_script_does_wrong_or_the_end_raises_is_a_line(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    net = script.net
    train_step(script.model, script.optimizer, 1)
    wrong: Any = "many"
    net.step(tokens=wrong)
    assert "net.step() failed" in caplog.text and net.inner_step == 0
    caplog.clear()
    with warnings.catch_warnings(action="error"):
        net.step(loss=torch.ones((), requires_grad=True))
    assert net.inner_step == 1 and "failed" not in caplog.text
    net._stack.callback(mock.Mock(side_effect=OSError("away")))
    net.close()
    assert "net.close() failed" in caplog.text


def test_a_script_continues_by_another_version_of_the_file(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    """It uploads with the new codec, and one log line names the rules that need a restart."""
    network = member._config_of(script.world.network, {}).network
    text = Path(script.world.network).read_text()
    for table, more in (("round", 'codec = "2-bit"'), ("stop", "outer_steps = 90")):
        there = f"[{table}]\n"
        text = text.replace(there, there + more + "\n") if there in text else text + there + more
    text = text.replace("rows_per_page = ", "rows_per_page = 1")
    head = {"version": 2, "previous": f"sha256:{network.digest}", "from_outer_step": 1}
    versions = Versions(network, script.world.folder / "run")
    versions.add(signed(text, ALICE, head=head))
    script.net._controller._versions = versions

    def codec(path: Path) -> str:
        return UpdateFile.reopen(path, script.world.leader.schema).header.codec

    assert codec(script.upload()) == "4-bit"
    script.world.leader.take_outer_step(UID)
    script.follow()
    assert codec(script.upload()) == "2-bit"
    (line,) = [m for m in caplog.messages if m.startswith("Version 2 of the network's file")]
    assert "this script follows it in round.codec, stop.outer_steps" in line
    assert line.endswith("start the script again for data.rows_per_page")


def test_a_fork_of_a_script_leaves_its_membership(script: Script) -> None:
    script.train(3)
    checkpoints = script.world.folder / "run" / "checkpoints"
    before = sorted(checkpoints.glob("*"))
    if (child := os.fork()) == 0:
        try:
            script.optimizer.step()  # changes nothing, since there are no gradients
            script.net.step()
            script.net.close()
        finally:
            os._exit(int(script.net.inner_step != 3))
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(checkpoints.glob("*")) == before
    assert "is running in" in refusal_elsewhere(script.world)
    script.train()
    assert script.net.inner_step == 4


@pytest.mark.long
def test_weights_that_are_not_finite_are_not_saved(script: Script) -> None:
    script.train(5)
    script.net._checkpointer.wait()
    good = sorted((script.world.folder / "run" / "checkpoints").glob("checkpoint-*"))
    with torch.no_grad():
        next(iter(script.model.parameters())).fill_(float("nan"))
    script.train(8)
    script.net.close()
    assert sorted((script.world.folder / "run" / "checkpoints").glob("checkpoint-*")) == good
    again = Script(script.world)
    assert all(weights.isfinite().all() for weights in again.weights())
    again.take_outer_step()
    again.net.close()


@pytest.mark.long
def test_an_interrupt_is_saved_and_an_error_is_not(world: MemberWorld) -> None:
    for error, saved in ((KeyboardInterrupt, 2), (RuntimeError, 2), (SystemExit, 4)):
        running = Script(world, neuron_checkpoint_steps=1000)
        with pytest.raises(error), running.net:
            running.train(2)
            raise error
        progress = json.loads(
            max((world.folder / "run" / "checkpoints").glob("checkpoint-*/rank-0.json")).read_text()
        )["progress"]
        assert progress["inner_step"] == saved


@pytest.mark.parametrize("end", ["none", "interrupt", "error", "half", "half in close"])
def test_join_in_one_process_a_second_time_continues(
    script: Script, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A notebook cell runs again with the same optimizer, after an interrupt or an error too."""
    caplog.set_level(logging.INFO)
    world, first = script.world, script.net
    script.train(7)
    first._checkpointer.wait()
    if end == "interrupt":
        with (
            pytest.raises(KeyboardInterrupt),
            mock.patch.object(first, "step", side_effect=KeyboardInterrupt),
        ):
            script.train()  # the optimizer has stepped, but the step was not counted
    elif end == "error":
        with pytest.raises(ZeroDivisionError):
            script.train(1 // 0)
    elif "half" in end:
        with (
            pytest.raises(KeyboardInterrupt),
            mock.patch.object(RankLoop, "_carry_out", side_effect=KeyboardInterrupt),
        ):
            first.close() if "close" in end else script.train()
        with pytest.raises(RuntimeError, match=r"half changed .* call join\(\) again"):
            script.train()
    if "close" in end:
        first.close()
    script.net = distributed_training.join(
        world.network, script.model, script.optimizer, **world.settings()
    )
    ended = "no checkpoint is written" if "close" in end else "join() was called again: the prev"
    assert ended in caplog.text
    assert script.net is not first and first._closed
    # Half-changed weights are not saved, so it continues from the checkpoint of step 5.
    assert script.net.inner_step == (5 if "half" in end else 7)
    script.take_outer_step()
    assert script.net.outer_step == 1
    assert list(member._members.values()) == [script.net]
    script.net.close()
    assert not member._members


def test_a_join_that_fails_or_is_interrupted_leaves_nothing_behind(world: MemberWorld) -> None:
    for error in (KeyboardInterrupt, RuntimeError):
        with pytest.raises(error), mock.patch.object(build, "Checkpointer", side_effect=error):
            Script(world)
        assert not member._members
    made = Script(world)
    made.train(2)
    made.net.close()


class Lookahead(torch.optim.Optimizer):
    """Take k steps forward and one back, with slow weights in a copy (arXiv 1907.08610)."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        self.inner = torch.optim.AdamW(params, lr=lr)
        super().__init__(self.inner.param_groups, {})
        self.steps = 0
        self.slow = [p.detach().clone() for p in self.parameters()]

    def parameters(self) -> Iterable[nn.Parameter]:
        return (p for group in self.param_groups for p in group["params"])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.steps += 1
        if self.steps % 5 == 0:
            for slow, p in zip(self.slow, self.parameters(), strict=True):
                p.data.copy_(slow.lerp_(p.detach(), 0.5))


class Master(Lookahead):
    """Take the steps on a copy of the weights, as mixed precision does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for slow, p in zip(self.slow, self.parameters(), strict=True):
            p.data.copy_(slow)
        self.inner.step()
        for slow, p in zip(self.slow, self.parameters(), strict=True):
            slow.copy_(p.detach())


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9), False),
        (lambda params: torch.optim.AdamW(params, lr=3e-4), False),
        (lambda params: Lookahead(params, lr=3e-4), True),
        (lambda params: Master(params, lr=3e-4), True),
    ],
    ids=["SGD", "AdamW", "Lookahead", "Master"],
)
def test_an_optimizer_that_puts_old_weights_back_is_named_at_the_first_update(
    make: Make, named: bool, world: MemberWorld, caplog: pytest.LogCaptureFixture
) -> None:
    running = Script(world, make=make)
    for _ in range(1 if named else 2):
        running.train(25)
        running.take_outer_step()
        running.train(15)
    name = type(running.optimizer).__name__
    line = f"{name} has restored weights from before the update of outer step 1"
    assert caplog.text.count("has restored weights from") == caplog.text.count(line) == named
    running.net.close()


@pytest.mark.long
def test_the_text_that_a_network_assigns_is_given_out_and_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = MemberWorld(tmp_path, tiny(vocab=BYTE_VOCABULARY), own=False)

    def train(steps: int, leader: Leader | None = None) -> Net:
        model = script_model(world.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        more = {"data_source": "stdlib", "neuron_local_batch_size_train": 2}
        given = 0
        with (
            played(world.bucket),
            distributed_training.join(
                world.network, model, optimizer, **world.settings(**more)
            ) as net,
        ):
            for ids in net.batches():
                assert ids.shape == (2, 32) and ids.dtype == torch.int64
                given += 1
                model(input_ids=ids, labels=ids).loss.backward()
                if given % 2:
                    continue  # a step uses the gradients of two micro-batches
                optimizer.step()
                optimizer.zero_grad()
                net.step(loss=1.0)
                if leader is not None and given == 40:  # by then it has text of several pages
                    leader.open_close()
                if given >= 2 * steps and (leader is None or any(world.bucket.glob("uploads/*/*"))):
                    break
        return net

    assert train(3, world.leader).inner_step >= 3
    (upload,) = world.bucket.glob("uploads/*/*.safetensors")
    header = UpdateFile.reopen(upload, world.leader.schema).header
    first, last = header.pages  # a page has more sequences than an inner step uses
    assert first == 0 <= last < header.inner_steps and header.tokens == header.inner_steps * 4 * 32
    before = caplog.text
    net = train(2)
    assert net.inner_step >= 5
    assert "Data continues in the text from page" in caplog.text.removeprefix(before)
    assert "No text from net.batches()" not in caplog.text


@pytest.mark.long
def test_an_interrupt_amid_an_outer_step_saves_no_half_of_it(script: Script) -> None:
    world = script.world
    script.upload()
    world.leader.take_outer_step(UID)

    def half(step: OuterStep) -> tuple[int, int]:
        step._shards[0].local.fill_(7.0)
        raise KeyboardInterrupt

    with (
        mock.patch.object(OuterStep, "commit", half),
        pytest.raises(KeyboardInterrupt),
        script.net,
    ):
        script.follow()
    again = Script(world, seed=6)
    again.follow()
    assert max(float(each.abs().max()) for each in again.weights()) < 5
    again.net.close()


def test_settings_are_those_of_miner_toml(world: MemberWorld) -> None:
    model = script_model(world.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"did you mean --neuron\.run_folder"):
        distributed_training.join(world.network, model, optimizer, neuron_run_foldr="x")
    with pytest.raises(ValueError, match="averages over hivemind"):
        distributed_training.join("local", model, optimizer)
    with pytest.raises(ValueError, match="text of their own"):
        next(Script(world).net.batches())
