"""Test a start without a global state to load."""

from __future__ import annotations

import errno
import itertools
import logging
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from distributed_training.chain.registration import RegistrationRecord
from distributed_training.config import ConfigError
from distributed_training.config.settings import StoreSettings
from distributed_training.miner import device, global_state, registration, run_folder, start
from distributed_training.miner import events as ev
from distributed_training.miner import resume as resume_module
from distributed_training.miner.events import MinerState, Mode, Rules
from distributed_training.miner.global_state import (
    GlobalBucket,
    GlobalEmptyError,
    GlobalUnavailableError,
)
from distributed_training.miner.resume import StartupInfo, resume_training
from distributed_training.miner.round import end_rounds_of
from distributed_training.miner.run_folder import INSTANCE
from distributed_training.miner.state_machine import decide
from distributed_training.node import identity as node_chain
from distributed_training.node.start import Deregistered, NetworkFailure
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import Metadata
from distributed_training.protocol.types import (
    ExitStatus,
    Progress,
    RankFailedError,
    Revision,
    RoundRequest,
)
from distributed_training.store.bucket_reader import BucketReader, refusal
from distributed_training.store.errors import (
    AccessDeniedError,
    DeadlineError,
    StoreError,
    TransientError,
)
from distributed_training.store.s3 import S3ObjectStore
from distributed_training.training.local_evaluation import WeightsWorseThanGuess
from distributed_training.training.model import hf_config
from tests.tools.chain_memory import MemoryChain, MemoryLedger
from tests.tools.chain_world import MINER, VALIDATOR
from tests.tools.memory_store import MemoryObjectStore
from tests.tools.miner_parts import config_of
from tests.tools.support_store import publish_state

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(("name", "told"), [("cuda:0", True), ("cpu", False)])
def test_a_gpu_without_measured_utilization_is_logged_once(
    name: str, told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device.NvmlSampler, "open", lambda index: None)
    assert device.utilization_of(torch.device(name)) is None
    assert caplog.text.count("GPU utilization is not reported: NVML is not usable") == told


class Waits:
    """A start that waits: time passes only in its pauses."""

    now = 0.0

    def pause(self, wanted: Callable[[], bool]) -> None:
        self.now += 1.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    waits = Waits()
    monkeypatch.setattr(global_state, "pause_start", waits.pause)
    monkeypatch.setattr(global_state, "time", waits)
    return waits


def test_a_global_state_that_is_refused_is_downloaded_more_and_more_seldom(
    waits: Waits, tmp_path: Path
) -> None:
    fetched: dict[int, list[float]] = {7: [], 8: []}

    class Bucket:
        def outer_step(self) -> int:
            if waits.now < 2:
                raise GlobalUnavailableError("nothing there yet")
            return 7 if waits.now < 1000 else 8

        def fetch(self, outer_step: int) -> Path:
            fetched[outer_step].append(waits.now)
            if outer_step == 7 or len(fetched[8]) < 3:
                raise GlobalUnavailableError("NaN")
            return tmp_path

    bucket: Any = Bucket()
    assert global_state.first_global_state(bucket, lambda: True) == (8, tmp_path, True)
    waits = [b - a for a, b in itertools.pairwise(fetched[7])]
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]
    assert fetched[8] == [1000, 1001, 1003], "another epoch is not held back"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError, r"does not fit this program \(layer"),
        (WeightsWorseThanGuess, r"state of uid 3 is not taken over: layer.* see --data\.source"),
    ],
)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_state_that_cannot_be_loaded_is_not_downloaded_by_the_next_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: bool,
    error: type[ValueError],
    line: str,
    caplog: Any,
) -> None:
    """Each start is a new process with the folder of the one before. One without a checkpoint
    waits for another state; one with a checkpoint trains from that."""
    downloads: list[str] = []

    def before(operation: str, key: str) -> None:
        if operation == "get_range":
            downloads.append(key)

    store = MemoryObjectStore("global", before=before)
    files = publish_state(store, 7)
    store.put(keys.ROOT_METADATA, Metadata.of(Revision(5, 7, 0), "").to_json())

    def restart() -> tuple[int, Path]:
        reader = BucketReader(store, large=timedelta(seconds=60))
        bucket = GlobalBucket(open_bucket=lambda: reader, folder=tmp_path, run=5)
        return global_state.first_global_state(bucket, lambda: True, resumes=checkpoint)[:2]

    outer_step, folder = restart()
    assert len(downloads) == 3

    trainer, checkpointer = Mock(), Mock()
    trainer.load_global.side_effect = error("layer.weight is not in it")
    checkpointer.restore.return_value = (Progress(3, 5, 5), {"kept": 1}) if checkpoint else None
    info = StartupInfo(global_outer_step=outer_step, global_uid=3)
    if checkpoint:
        assert resume_training(trainer, checkpointer, info, folder) == {"kept": 1}
        assert error is ValueError or re.search(line, caplog.text)
        assert restart() == (7, folder)
    else:
        with pytest.raises(NetworkFailure, match=line):
            resume_training(trainer, checkpointer, info, folder)

    def pause(wanted: Callable[[], bool]) -> None:
        """While the start waits, the owner of the bucket publishes a good state."""
        assert "Waiting for the global state: epoch-7 of the global bucket was refused: layer" in (
            caplog.text
        )
        assert len(downloads) == 3
        files.update(publish_state(store, 7, text="good"))

    monkeypatch.setattr(global_state, "pause_start", pause)
    monkeypatch.setattr(global_state, "_FETCH_AGAIN", timedelta(0))
    if checkpoint:
        files.update(publish_state(store, 7, text="good"))
    assert restart() == (7, folder)
    assert (folder / keys.MODEL).read_bytes() == files[keys.MODEL]
    assert len(downloads) == 6


def test_a_start_continues_from_its_checkpoint_if_a_rank_has_no_memory_to_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop tries the global state again: it may be sound."""
    trainer, checkpointer = Mock(), Mock()
    trainer.load_global.side_effect = RankFailedError("rank 1: none")
    checkpointer.restore.return_value = Progress(3, 5, 5), {"kept": 1}
    info = StartupInfo(global_outer_step=7)
    assert resume_training(trainer, checkpointer, info, tmp_path) == {"kept": 1}
    assert "rank 1: none" in caplog.text
    assert refusal(tmp_path) is None
    checkpointer.restore.return_value = None
    with pytest.raises(RankFailedError):
        resume_training(trainer, checkpointer, info, tmp_path)


@pytest.mark.parametrize(
    ("stored", "comes", "found"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_a_start_waits_a_while_for_text_to_measure_the_global_state(
    stored: bool, comes: bool, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held-out data of an earlier run, else the first block."""
    now, text = [0.0], torch.ones(4, 8, dtype=torch.int64)

    class Data:
        requested: list[int] = []
        request = requested.append

        def ready(self, block: int) -> int | None:
            return 4 if comes and now[0] > 20 else None

        def sample(self, count: int) -> torch.Tensor | None:
            return text if stored or self.ready(9) else None

    def sleep(seconds: float) -> None:
        now[0] += seconds

    beats: list[int] = []
    data: Any = Data()
    monkeypatch.setattr(
        resume_module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    )
    sample = resume_module.first_sample(data, 9, 4, lambda: beats.append(1))
    assert (sample is text) == found and data.requested == ([] if stored else [9])
    assert now[0] < 61 and bool(beats) != stored  # no hang, to the launcher


class Silent(RuntimeError):
    """The start would have waited."""


@pytest.mark.parametrize(
    ("problem", "checkpoint", "starts"),
    [
        (TransientError("503"), True, True),
        (DeadlineError("no answer within 60 s"), True, True),
        (TransientError("503"), False, False),  # with nothing of its own to continue from
        (AccessDeniedError("403"), True, False),  # perhaps for good
    ],
)
def test_a_start_goes_by_the_disk_while_the_global_bucket_does_not_answer(
    problem: StoreError,
    checkpoint: bool,
    starts: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    away = False

    def before(operation: str, key: str) -> None:
        if away:
            raise problem

    def pause(wanted: Callable[[], bool]) -> None:
        raise Silent

    def begin() -> tuple[int, Path, bool]:
        reader = BucketReader(store, large=timedelta(seconds=1 if away else 60))
        bucket = GlobalBucket(open_bucket=lambda: reader, folder=tmp_path, run=5)
        return global_state.first_global_state(bucket, lambda: True, resumes=checkpoint)

    monkeypatch.setattr(global_state, "pause_start", pause)
    store = MemoryObjectStore("global", before=before)
    for outer_step in (9, 10):
        publish_state(store, outer_step)
        store.put(keys.ROOT_METADATA, Metadata.of(Revision(5, outer_step, 0), "").to_json())
        assert begin() == (outer_step, tmp_path / f"epoch-{outer_step}", True)
    away = True
    if not starts:
        with pytest.raises(Silent):
            begin()
        return
    assert begin() == (10, tmp_path / "epoch-10", False)
    assert "starting from the disk with outer step 10, fetched 0 minutes ago" in caplog.text


@pytest.mark.parametrize(("reached", "kept"), [(9, False), (10, True)])
def test_from_the_disk_the_checkpoint_is_taken_unless_the_global_state_is_later(
    reached: int, kept: bool, tmp_path: Path
) -> None:
    trainer, checkpointer = Mock(), Mock()
    checkpointer.restore.return_value = Progress(reached, 5, 5), {"kept": 1}
    info = StartupInfo(global_outer_step=10, global_seen=False)
    assert bool(resume_training(trainer, checkpointer, info, tmp_path)) == kept
    assert trainer.load_global.called != kept


def test_a_start_that_waits_says_so_every_five_minutes(
    waits: Waits,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Bucket:
        def outer_step(self) -> int:
            if waits.now < 10:
                raise GlobalEmptyError("the global bucket is empty so far")
            if waits.now < 1000:
                raise GlobalUnavailableError("of run 6, this miner of run 5: upgrade the miner")
            return 7

        def fetch(self, outer_step: int) -> Path:
            return tmp_path

    bucket: Any = Bucket()
    assert global_state.first_global_state(bucket, lambda: True) == (7, tmp_path, True)
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 4 and not any("empty" in line for line in said)
    assert "upgrade the miner. Training cannot begin without it" in said[-1]

    caplog.clear()
    waits.now = 0.0
    chain: Any = SimpleNamespace(
        commitment=lambda hotkey: "a" * 128 if waits.now > 310 else "no commitment"
    )
    miner = SimpleNamespace(master_ss58_address="5Master")
    config: Any = SimpleNamespace(miner=miner, store=StoreSettings())
    monkeypatch.setattr(S3ObjectStore, "of_peer", lambda *given, **named: MemoryObjectStore())
    global_state.open_global_bucket(config, chain, tmp_path, lambda: True)
    assert caplog.text.count("Waiting for the commitment of the master hotkey 5Master") == 2


def test_a_stop_ends_the_wait_of_a_start() -> None:
    wanted = iter([True, False])
    with pytest.raises(global_state.StopBeforeStart):
        global_state.pause_start(lambda: next(wanted))


def test_a_rank_that_stops_as_ordered_has_not_failed() -> None:
    """Each status of the miner counts so: else the launcher would end rank 0 while it closes."""
    other: Any = SimpleNamespace(rank_zero=None, loop=SimpleNamespace(run=lambda: 3))
    assert start.Rank.run(other) == (0, "")


@pytest.fixture
def rank_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[..., Any]], tuple[int, run_folder.Ending | None]]:
    """``run_rank`` of rank 0 with a played continuation after its first steps."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", INSTANCE: "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for name in ("die_with_parent", "write_stacks_on_signal", "start_log", "RankStop"):
        monkeypatch.setattr(start, name, lambda *_, **named: None)
    config = config_of()
    monkeypatch.setattr(start, "make_run_folder", lambda _: tmp_path)

    def run(played: Callable[..., Any]) -> tuple[int, run_folder.Ending | None]:
        monkeypatch.setattr(start, "train", played)
        return start.run_rank(config), run_folder.read_exit_status(tmp_path, instance="x")

    return run


def test_problem_found_after_the_settings_may_pass(
    rank_ends: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Status 2 would leave the miner down until a person comes; the launcher tries again."""

    def raises(error: Exception) -> Callable[..., Any]:
        def run(*_: object) -> None:
            raise error

        return run

    for model in ({}, {"model_type": "nonsense"}):  # the validator corrects the global state
        status, told = rank_ends(lambda *_, model=model: hf_config(model))
        assert status == told.status == ExitStatus.FAULT and told.outside
        assert "no model can be built" in told.reason
    for error in (ConfigError("the store answers 403"), NetworkFailure("the chain is silent")):
        assert rank_ends(raises(error)) == (1, (ExitStatus.FAULT, str(error), True))
    assert not caplog.records, "the launcher reports it"
    lost = Deregistered("no uid any more")
    assert rank_ends(raises(lost)) == (3, (ExitStatus.DEREGISTERED, str(lost), False))
    status, told = rank_ends(raises(RuntimeError("a bug")))
    assert (status, told.outside) == (1, False), "trying for ever does not help"
    assert "a bug" in caplog.text


@pytest.mark.parametrize(("shown", "remembered"), [(8, 0), (0, 8)])
def test_ranks_do_not_train_on_the_cpu_while_the_gpus_are_away(
    shown: int,
    remembered: int,
    monkeypatch: pytest.MonkeyPatch,
    rank_ends: Callable[..., Any],
) -> None:
    """The driver, or the fabric manager, is not ready after a reboot."""
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device, "visible_gpu_count", lambda: shown)
    rank_device, cpu = device.rank_device, torch.device("cpu")
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
        assert device.expects_gpu(config, cpu) == (shown > 0 and wanted != "cpu"), wanted
    monkeypatch.setattr(device, "visible_gpu_count", lambda: 0)
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
    card = SimpleNamespace(describe=lambda: "NVIDIA H200, GPU-abc", close=lambda: None)
    sampler = SimpleNamespace(open=lambda index: card if shown else None)
    monkeypatch.setattr(device, "NvmlSampler", sampler)

    def train(*_: object) -> None:
        try:
            raise error
        finally:  # what is closed meanwhile meets the dead GPU too
            raise ValueError("closing failed")

    status, (told, reason, outside) = rank_ends(train)
    assert status == told == ExitStatus.FAULT and not outside, "the launcher starts again"
    assert "Training Loop Failed with error" in caplog.text
    first = str(error).splitlines()[0]
    if "CUDA error" not in first:
        assert reason == "ValueError: closing failed"
        return
    name = "NVIDIA H200, GPU-abc" if shown else "which the driver does not show any more"
    assert reason.startswith(f"GPU 0 ({name}) failed: {first}. All ranks start again from the last")
    assert reason in caplog.text and "dmesg | grep Xid" in reason


def test_a_rank_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver counts a card that torch does not see any more."""
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device.torch.cuda, "device_count", lambda: 7)
    with pytest.raises(NetworkFailure, match=r"rank 7 has no GPU, since torch sees 7: .* Xid"):
        device.rank_device("auto", 7)


class Lost:
    """A miner's start on a chain that does not show its hotkey; time passes only in ``pause``."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.folder = 0.0, folder
        self.at: dict[float, Callable[[], object]] = {}  # what happens when
        self.ledger = MemoryLedger()
        self.ledger.register(VALIDATOR.ss58)
        self.uid = self.ledger.register(MINER.ss58)
        self.chain = MemoryChain(hotkey=MINER.ss58, ledger=self.ledger)
        config = config_of("--neuron.deregistered_wait", "6h")
        miner = replace(config.miner, master_ss58_address=VALIDATOR.ss58)
        self.config = replace(config, miner=miner)
        monkeypatch.setattr(node_chain, "load_wallet", lambda _: MINER)
        monkeypatch.setattr(node_chain, "follow_chain", lambda *_, **named: self.chain)
        monkeypatch.setattr(registration, "pause_start", self.pause)
        monkeypatch.setattr(registration, "time", SimpleNamespace(monotonic=lambda: self.now))

    def pause(self, wanted: Callable[[], bool]) -> None:
        if not wanted():
            raise global_state.StopBeforeStart
        self.now += 60.0
        for moment in [m for m in self.at if m <= self.now]:
            self.at.pop(moment)()

    def join(self, *_: object, wanted: Callable[[], bool] = lambda: True) -> tuple[int, str]:
        with ExitStack() as stack:
            member = registration.join_network(self.config, self.folder, stack, wanted)
            return ExitStatus.STOPPED, f"uid {member.uid}"

    @property
    def metrics(self) -> str:
        return (self.folder / "metrics.prom").read_text()


@pytest.fixture
def lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lost:
    return Lost(tmp_path, monkeypatch)


@pytest.mark.parametrize("uid", [1, 41])
def test_a_miner_that_lost_its_uid_continues_when_it_is_registered_again(
    uid: int, lost: Lost, caplog: pytest.LogCaptureFixture
) -> None:
    assert lost.join() == (ExitStatus.STOPPED, f"uid {lost.uid}")
    lost.ledger.deregister(MINER.ss58)
    lost.at[7200.0] = lambda: lost.ledger.register(MINER.ss58, uid=uid)
    lost.at[3600.0] = lambda: seen.append(lost.metrics)
    seen: list[str] = []
    assert lost.join() == (ExitStatus.STOPPED, f"uid {uid}")
    assert lost.now == 7200.0
    assert "dt_registered 0" in seen[0] and "dt_metrics_written" in seen[0]
    told = [m for m in caplog.messages if "neuron.deregistered_wait" in m]
    assert len(told) == 4 and "btcli subnet register --netuid 38" in told[0]
    assert "status 3 in 4.5 h" in told[-1]
    # The next time it waits as long again.
    lost.ledger.deregister(MINER.ss58)
    lost.at[7200.0 + 5 * 3600] = lambda: lost.ledger.register(MINER.ss58, uid=3)
    assert lost.join() == (ExitStatus.STOPPED, "uid 3")


def test_a_miner_that_was_expelled_waits_for_the_founder(
    lost: Lost, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost.join()
    lost.ledger.deregister(MINER.ss58)
    monkeypatch.setattr(lost.chain, "expelled", lambda hotkey: hotkey == MINER.ss58)
    lost.at[3600.0] = lambda: lost.ledger.register(MINER.ss58)
    caplog.clear()
    assert lost.join() == (ExitStatus.STOPPED, "uid 1")
    told = [m for m in caplog.messages if "neuron.deregistered_wait" in m]
    assert told and all("The founder expelled hotkey" in m and "--again" in m for m in told)


def test_the_wait_for_a_registration_ends_with_status_3_also_over_restarts(
    lost: Lost, rank_ends: Callable[..., Any]
) -> None:
    """Each start counts on; a chain that does not answer, or shows nobody, says nothing of us."""
    lost.join()
    lost.ledger.deregister(MINER.ss58)
    for _ in range(2):  # stopped by hand, or killed, after two hours
        begun = lost.now
        with pytest.raises(global_state.StopBeforeStart):
            lost.join(wanted=lambda begun=begun: lost.now < begun + 7200)
    shown = lost.ledger.save()
    lost.at[14_460.0] = lost.ledger.clear
    lost.at[20_000.0] = lambda: lost.ledger.restore(shown)
    lost.at[21_000.0] = lambda: setattr(lost.ledger, "up", False)
    lost.at[25_000.0] = lambda: setattr(lost.ledger, "up", True)
    status, (told, reason, outside) = rank_ends(lost.join)
    assert status == told == ExitStatus.DEREGISTERED and not outside
    assert "--neuron.deregistered_wait (6.0 h)" in reason and "weights are kept" in reason
    assert lost.now == pytest.approx(21_600 + 5_540 + 4_000 - 720, abs=300)
    # Whoever starts it by hand may register it afterwards.
    lost.at[lost.now + 20_000] = lambda: lost.ledger.register(MINER.ss58)
    assert lost.join() == (ExitStatus.STOPPED, "uid 1")


@pytest.mark.parametrize("before", ["nobody", "another hotkey"])
def test_a_hotkey_that_never_ran_here_is_refused_and_tried_again(
    before: str, lost: Lost, rank_ends: Callable[..., Any]
) -> None:
    if before != "nobody":
        RegistrationRecord("5Another", 3).save(lost.folder / registration.REGISTRATION_FILE)
    lost.ledger.deregister(MINER.ss58)
    status, (told, reason, outside) = rank_ends(lost.join)
    assert status == told == ExitStatus.FAULT and outside and lost.now == 0
    assert "is not registered on subnet 38" in reason and "btcli" in reason


@pytest.mark.parametrize("permit", [False, True])
def test_a_subnet_of_another_network_ends_a_start_with_status_2(
    permit: bool, lost: Lost, rank_ends: Callable[..., Any]
) -> None:
    """It would wait there for ever; a registration there is paid for and earns nothing."""
    lost.join()
    lost.ledger.deregister(VALIDATOR.ss58)
    if permit:  # of another network's validator
        lost.ledger.register("5Another")
    status, (told, reason, outside) = rank_ends(lost.join)
    assert status == told == ExitStatus.BAD_CONFIGURATION and not outside
    assert "this is not the network dstrbtd-sn38" in reason and "on subnet 38" in reason
    assert "register no hotkey and pay nothing" in reason and "btcli" not in reason


@pytest.mark.parametrize("shown", ["nobody", "one endpoint of two", "old blocks"])
def test_an_outage_is_no_other_network(
    shown: str, lost: Lost, monkeypatch: pytest.MonkeyPatch, rank_ends: Callable[..., Any]
) -> None:
    now = time.time()
    config = config_of()
    quick = replace(
        config.chain,
        neurons_interval=timedelta(milliseconds=10),
        call_timeout=timedelta(seconds=0.1),
    )
    lost.config = replace(config, chain=quick)
    assert lost.chain.wait_ready(timedelta(0))
    if shown == "nobody":
        lost.ledger.clear()
    elif shown == "old blocks":
        monkeypatch.setattr(lost.chain, "clock", lambda: now - 7200)
    else:
        monkeypatch.setattr(lost.chain, "endpoints", lambda: 2)
    status, (told, reason, outside) = rank_ends(lost.join)
    assert status == told == ExitStatus.FAULT and outside
    assert "not known whether this is the network" in reason


def test_no_room_for_a_ranks_first_file_is_a_line(
    rank_ends: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "rank-0.json")

    monkeypatch.setattr(run_folder, "write_state", full)
    assert rank_ends(lambda *_: pytest.fail("it has begun")) == (ExitStatus.FAULT, None)
    assert "No space left on device: 'rank-0.json'" in caplog.text


@pytest.mark.parametrize("mode", list(Mode))
def test_a_call_that_leads_to_nothing_ends_its_round_at_the_server(mode: Mode) -> None:
    """Else it answers the validator that a round is running, until a restart."""
    server = Mock()
    see = end_rounds_of(server)
    call = ev.AllReduceCalled(RoundRequest(caller="5V"), 1000.0)
    state = MinerState(mode=mode, outer_step=4)
    see(call, state)
    after, _ = decide(state, call, Rules(reload_seconds=60, checkpoint_steps=10))
    over = after.mode is not Mode.AVERAGING
    assert server.round_ended.call_count == over
    see(ev.ModeChanged(Mode.AVERAGING, Mode.AWAITING_GLOBAL), after)
    assert server.round_ended.call_count == over + 1
