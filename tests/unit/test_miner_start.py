"""Test how a rank starts: device, weights, checkpoint, registration, and how a start ends."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from distributed_training.config import ConfigError
from distributed_training.miner import build, network_watch, run_folder, start
from distributed_training.miner.build import RankParts, StartupInfo, refuse_old_checkpoints
from distributed_training.miner.ranks import RankChannel
from distributed_training.miner.run_folder import RankEnvironment
from distributed_training.node import identity as node_chain
from distributed_training.node.identity import Member
from distributed_training.node.start import Deregistered, NetworkFailure, StopNow
from distributed_training.protocol.types import ExitStatus, Progress
from distributed_training.store.errors import StoreError
from distributed_training.training.model import hf_config
from tests.tools.chain_memory import MemoryChain, MemoryLedger
from tests.tools.chain_world import MINER, VALIDATOR
from tests.tools.miner_parts import config_of
from tests.tools.training_world import sequences, tiny, trainer, whole_weights

pytestmark = pytest.mark.timeout(30)


def test_a_start_with_a_checkpoint_does_not_wait_for_the_network(tmp_path: Path) -> None:
    rounds: Any = SimpleNamespace(
        fetch_newest=lambda: pytest.fail("it asks the network"),
        held_weights=lambda: tmp_path / "4",
        manifest=lambda step: SimpleNamespace(total_inner_steps=200),
    )
    assert build.first_weights(rounds, resumes=True) == (4, tmp_path / "4", 200)


class _Dropped:
    """Send a SIGTERM from a finalizer, where Python discards what the signal handler raises."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("dropped", [False, True])
def test_a_stop_ends_the_wait_for_weights(dropped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    looks = 0

    def fetch() -> None:
        nonlocal looks
        looks += 1
        if looks == 2 and dropped:
            _Dropped()
        elif looks == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        assert looks < 3, "it waits on"
        raise StoreError("away")

    rounds: Any = SimpleNamespace(fetch_newest=fetch)
    monkeypatch.setattr(build, "_LOOK_AGAIN", 0.0)
    try:
        stop = start.RankStop()
        with pytest.raises(StopNow), stop.interrupting():
            build.first_weights(rounds, lambda: stop.wanted, resumes=False)
        assert stop.wanted and not stop.events.empty()
    finally:
        for each, handler in kept.items():
            signal.signal(each, handler)


def resume(made: Any, info: StartupInfo, folder: Path = Path()) -> RankParts:
    context: Any = SimpleNamespace(folder=folder, config=config_of())
    return build.resume(context, info, made, None, None)


def test_weights_that_do_not_fit_end_a_first_start_and_are_not_asked_of_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, checkpointer = Mock(), Mock()
    monkeypatch.setattr(build, "Checkpointer", lambda **_: checkpointer)
    made.load_global.side_effect = ValueError("layer.weight is not in it")
    checkpointer.restore.return_value = None
    info = StartupInfo(global_outer_step=7, inner_steps=90)
    with pytest.raises(NetworkFailure, match=r"do not fit this program \(layer\.weight"):
        resume(made, info)
    checkpointer.restore.return_value = Progress(3, 5, 5), {"kept": 1}
    assert resume(made, info).kept == {"kept": 1}
    made.follow_schedule.assert_called_once_with(7, 90)


@pytest.mark.usefixtures("process_group")
def test_a_member_goes_to_the_networks_place_and_behind_it_by_its_own_steps(tmp_path: Path) -> None:
    member, info = trainer(), StartupInfo(global_outer_step=4, inner_steps=200)
    member.load_weights = Mock()  # the file's content does not matter here
    resume(member, info, tmp_path)
    assert member.total_inner_steps == 200
    # As after a roll-back to an older checkpoint.
    member.inner_step, member.total_inner_steps = 2, 77
    for outer_step, steps, place in ((7, 300, 77), (4, 0, 77), (4, 300, 302)):
        member.follow_schedule(outer_step, steps)
        assert member.total_inner_steps == place


# Written by the code of commit 10170bb9, the last edition with two kinds of networks.
OLD = Path(__file__).parents[1] / "vectors" / "checkpoints"


@pytest.mark.usefixtures("process_group")
def test_a_checkpoint_of_the_last_edition_is_taken_over_to_the_bit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was written in the middle of an inner step, after an upload of serial 4."""
    shutil.copytree(OLD / "store", tmp_path / "checkpoints")
    refuse_old_checkpoints(tmp_path / "checkpoints")
    made = trainer(model=tiny(hidden=8, layers=1, intermediate=8, vocab=11, heads=2), seed=7)
    with caplog.at_level(logging.INFO):
        found = resume(made, StartupInfo(), tmp_path)
    assert found.kept["data"]["offset"] == 4 and found.checkpointer.exact
    assert "holds epoch_starts, which this version does not know: left out" in caplog.text
    assert (made.outer_step, made.inner_step, made.outer.serial) == (0, 2, 4)
    weights = load_file(OLD / "store" / "weights.safetensors")
    pairs = zip(made.schema, whole_weights(made) or [], strict=True)
    assert all(torch.equal(weights[name], rows) for (name, _), rows in pairs)
    for part in sequences(5, vocab=11).split(2)[2:]:
        report = made.add_micro_batch(part)
    assert report is not None and report.inner_step == 3


def test_a_checkpoint_of_the_old_hivemind_kind_is_refused_with_the_remedy(
    tmp_path: Path, rank_ends: Callable[..., Any]
) -> None:
    refuse_old_checkpoints(tmp_path / "checkpoints")  # a first start has none
    shutil.copytree(OLD / "hivemind", tmp_path / "checkpoints")
    nothing: Any = None
    status, (told, reason, outside) = rank_ends(
        lambda config, me, place, *_: build.open_connections(config, place, nothing, nothing)
    )
    assert status == told == ExitStatus.BAD_CONFIGURATION and not outside
    assert "to a new folder; the weights come from the network" in reason and "\n" not in reason


def test_a_rank_that_stops_as_ordered_has_not_failed() -> None:
    """With another status, the launcher would end rank 0 while it is still closing its parts."""
    other: Any = SimpleNamespace(rank_zero=None, loop=SimpleNamespace(run=lambda: 3))
    assert start.Rank.run(other) == (0, "")


@pytest.mark.parametrize(("local", "wanted"), [(1, False), (2, False), (1, True)])
@pytest.mark.parametrize(
    "error", [ConfigError("403"), NetworkFailure("silent"), RuntimeError("a bug"), StopNow()]
)
def test_whatever_ends_rank_0s_start_ends_the_others_at_once(
    local: int,
    wanted: bool,
    error: BaseException,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With status 0, another node's torchrun would wait 300 s.

    ``wanted``: whether the rank itself was asked to stop.
    """
    store, config = dist.HashStore(), config_of("--neuron.device", "cpu")
    zero, one = (
        RankChannel(rank=rank, world_size=2, group=None, store=store, local_world_size=local)
        for rank in (0, 1)
    )
    with pytest.raises(type(error)):
        build.share_start(config, zero, Mock(side_effect=error))
    monkeypatch.setattr(start, "join_ranks", lambda *_, **named: one)
    me = RankEnvironment(1, 1 % local, 2, local)
    with ExitStack() as stack:
        status, reason = start.train(config, me, tmp_path, Mock(wanted=wanted), stack)
    failed = local == 1 and not wanted
    assert (status, reason) == ((1, str(error) or "StopNow") if failed else (0, ""))


class Ended(NamedTuple):
    status: int
    reason: str
    outside: bool


@pytest.fixture
def rank_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[..., Any]], tuple[int, Ended | None]]:
    """Run ``run_rank`` of rank 0 with another function in place of ``train``."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(run_folder.RANK_STORE, "")  # set as in the launcher's ranks
    for name in ("die_with_parent", "write_stacks_on_signal", "start_log", "RankStop"):
        monkeypatch.setattr(start, name, lambda *_, **named: None)
    config = config_of()
    monkeypatch.setattr(start, "make_run_folder", lambda _: tmp_path)

    def run(played: Callable[..., Any]) -> tuple[int, Ended | None]:
        monkeypatch.setattr(start, "train", played)
        status, told = start.run_rank(config), run_folder.read_exit_status(tmp_path)
        ended = Ended(told.status, told.reason, told.outside) if told else None
        return status, ended

    return run


def test_problem_found_after_the_settings_may_pass(
    rank_ends: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Status 2 would keep the miner down until somebody acts, so the launcher tries again."""

    def raises(error: Exception) -> Callable[..., Any]:
        def run(*_: object) -> None:
            raise error

        return run

    for model in ({}, {"model_type": "nonsense"}):  # the validator may correct the global state
        status, told = rank_ends(lambda *_, model=model: hf_config(model))
        assert status == told.status == ExitStatus.FAULT and told.outside
        assert "no model can be built" in told.reason
    for error in (ConfigError("the store answers 403"), NetworkFailure("the chain is silent")):
        assert rank_ends(raises(error)) == (1, (ExitStatus.FAULT, str(error), True))
    assert not caplog.records, "the launcher reports it"
    lost = Deregistered("no uid any more")
    assert rank_ends(raises(lost)) == (3, (ExitStatus.DEREGISTERED, str(lost), False))
    status, told = rank_ends(raises(RuntimeError("a bug")))
    assert (status, told.outside) == (1, False), "trying again without end does not help"
    assert "a bug" in caplog.text


@pytest.mark.parametrize(("shown", "remembered"), [(8, 0), (0, 8)])
def test_ranks_do_not_train_on_the_cpu_while_the_gpus_are_away(
    shown: int,
    remembered: int,
    monkeypatch: pytest.MonkeyPatch,
    rank_ends: Callable[..., Any],
) -> None:
    """After a reboot the driver or the fabric manager may not be ready yet."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for module in (build, start):
        monkeypatch.setattr(module, "visible_gpu_count", lambda: shown)
    rank_device, cpu = start.rank_device, torch.device("cpu")
    status, (told, reason, outside) = rank_ends(
        lambda *_: rank_device("auto", 0, remembered=remembered)
    )
    assert status == told == ExitStatus.FAULT and outside
    assert "cannot use the 8 GPUs" in reason and "--neuron.device cpu" in reason
    assert rank_device("cpu", 0, remembered=remembered) == cpu
    with pytest.raises(ConfigError, match=r"--neuron\.device cuda"):
        rank_device("cuda", 0, remembered=remembered)
    for wanted in ("auto", "cuda", "cpu"):
        config = config_of("--neuron.device", wanted)
        assert build.expects_gpu(config, cpu) == (shown > 0 and wanted != "cpu"), wanted
    monkeypatch.setattr(start, "visible_gpu_count", lambda: 0)
    assert rank_device("auto", 0) == cpu, "a machine without GPUs"


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: unspecified launch failure\nCUDA kernel errors ..."),
        RuntimeError("NCCL error in: x.cpp, unhandled cuda error\nCUDA error"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    ],
)
def test_a_gpu_lost_in_mid_step_is_named_with_the_consequence(
    error: Exception,
    shown: bool,
    rank_ends: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    card = "NVIDIA H200, GPU-abc" if shown else ""
    monkeypatch.setattr(start, "describe_gpu", lambda index: card)

    def train(*_: object) -> None:
        try:
            raise error
        finally:  # closing the parts meets the failed GPU too
            raise ValueError("closing failed")

    status, (told, reason, outside) = rank_ends(train)
    assert status == told == ExitStatus.FAULT and not outside, "the launcher starts again"
    assert "Training Loop Failed with error" in caplog.text
    first = str(error).splitlines()[0]
    if "CUDA error" not in first:
        assert reason == "ValueError: closing failed"
        return
    card = card or "which the driver does not show any more"
    assert reason.startswith(f"GPU 0 ({card}) failed: {first}. All ranks start again from the last")
    assert reason in caplog.text and "dmesg | grep Xid" in reason


class Lost:
    """Start a miner on a chain that may not show its hotkey."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.ledger = folder, MemoryLedger()
        self.ledger.register(VALIDATOR.ss58)
        self.uid = self.ledger.register(MINER.ss58)
        self.chain = MemoryChain(hotkey=MINER.ss58, ledger=self.ledger, master=VALIDATOR.ss58)
        config = config_of()
        miner = replace(config.miner, master_ss58_address=VALIDATOR.ss58)
        self.config = replace(config, miner=miner)
        monkeypatch.setattr(node_chain, "load_wallet", lambda _: MINER)
        monkeypatch.setattr(node_chain, "follow_chain", lambda *_, **named: self.chain)

    def join(self, *_: object) -> tuple[int, str]:
        with ExitStack() as stack:
            member = network_watch.join_network(self.config, self.folder, stack)
            return ExitStatus.STOPPED, f"uid {member.uid}"


@pytest.fixture
def lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lost:
    return Lost(tmp_path, monkeypatch)


def test_a_start_without_a_uid_is_tried_again_until_the_hotkey_is_registered(
    lost: Lost, rank_ends: Callable[..., Any]
) -> None:
    lost.ledger.deregister(MINER.ss58)
    status, (told, reason, outside) = rank_ends(lost.join)
    assert status == told == ExitStatus.FAULT and outside
    assert "is not registered on subnet 38" in reason and "btcli" in reason
    assert "dt_registered 0" in (lost.folder / "metrics.prom").read_text()
    lost.ledger.register(MINER.ss58, uid=41)
    assert lost.join() == (ExitStatus.STOPPED, "uid 41")


def test_an_expelled_miner_ends_for_good(
    lost: Lost, rank_ends: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost.ledger.deregister(MINER.ss58)
    monkeypatch.setattr(lost.chain, "expelled", lambda hotkey: hotkey == MINER.ss58)
    status, (told, reason, outside) = rank_ends(lost.join)
    assert status == told == ExitStatus.DEREGISTERED and not outside
    assert "the founder expelled hotkey" in reason and "--again" in reason


@pytest.mark.parametrize(
    ("change", "words", "status"),
    [
        (lambda lost: lost.ledger.register(MINER.ss58, uid=41), "is uid 41 now, no longer 1", 5),
        (lambda lost: lost.ledger.deregister(MINER.ss58), "`btcli subnet register --netuid 38`", 1),
        (None, "the founder expelled hotkey", 3),
    ],
)
def test_a_changed_registration_ends_this_run_once(
    change: Callable[[Lost], object] | None,
    words: str,
    status: int,
    lost: Lost,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    member, ended = Member(MINER, lost.chain, lost.uid), list[Any]()
    network_watch.follow_registration(lost.config, lost.folder, member, ended.append)
    lost.chain.wait_ready(timedelta(0))
    kept = lost.folder / node_chain.STATE_FILE
    assert ended == [] and MINER.ss58 in kept.read_text()
    if change is None:
        lost.ledger.deregister(MINER.ss58)
        monkeypatch.setattr(lost.chain, "expelled", lambda hotkey: hotkey == MINER.ss58)
    else:
        change(lost)
    for _ in range(3):
        lost.chain.wait_ready(timedelta(0))
    (stop,) = ended
    assert words in stop.reason and MINER.ss58 in stop.reason and stop.exit_status == status


def test_no_room_for_a_ranks_first_file_is_a_line(
    rank_ends: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "rank-0.json")

    monkeypatch.setattr(run_folder, "write_state", full)
    assert rank_ends(lambda *_: pytest.fail("it has begun")) == (ExitStatus.FAULT, None)
    assert "No space left on device: 'rank-0.json'" in caplog.text
