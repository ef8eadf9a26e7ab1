"""What a start does when the global state cannot be had."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distributed_training.common.exits import ExitStatus
from distributed_training.config import ConfigError, load_config
from distributed_training.miner import device as device_module
from distributed_training.miner import events as ev
from distributed_training.miner import global_bucket, network, process, start
from distributed_training.miner.decide import MinerState, Mode, Rules, decide
from distributed_training.miner.global_bucket import GlobalUnavailableError
from distributed_training.miner.process import INSTANCE
from distributed_training.miner.round_clock import RoundClock
from distributed_training.node.failures import NotRegistered
from distributed_training.protocol.types import RoundRequest
from distributed_training.training.model import hf_config

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(("device", "told"), [("cuda:0", True), ("cpu", False)])
def test_a_gpu_whose_utilization_nobody_measures_is_told_once(
    device: str, told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_module.NvmlSampler, "open", lambda index: None)
    utilization = device_module.utilization_of(torch.device(device))
    assert utilization() is None and utilization() is None
    assert caplog.text.count("GPU utilization is not reported: NVML is not usable") == told


def test_a_global_state_that_is_refused_is_downloaded_more_and_more_seldom(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now = 0.0
    fetched: dict[int, list[float]] = {7: [], 8: []}

    def pause(wanted: Callable[[], bool]) -> None:
        nonlocal now
        now += 1.0

    class Bucket:
        def outer_step(self) -> int:
            if now < 2:
                raise GlobalUnavailableError("nothing there yet")
            return 7 if now < 1000 else 8

        def fetch(self, outer_step: int) -> Path:
            fetched[outer_step].append(now)
            if outer_step == 7 or len(fetched[8]) < 3:
                raise GlobalUnavailableError("NaN")
            return tmp_path

    monkeypatch.setattr(global_bucket, "pause", pause)
    monkeypatch.setattr(global_bucket, "time", SimpleNamespace(monotonic=lambda: now))
    bucket: Any = Bucket()
    assert global_bucket.first_global_state(bucket, lambda: True) == (8, tmp_path)
    waits = [b - a for a, b in itertools.pairwise(fetched[7])]
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]
    assert fetched[8] == [1000, 1001, 1003], "another epoch is not held back"


def test_a_start_that_waits_says_so_every_five_minutes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0

    def pause(wanted: Callable[[], bool]) -> None:
        nonlocal now
        now += 1.0

    class Bucket:
        def outer_step(self) -> int:
            if now < 10:
                raise GlobalUnavailableError("the global bucket is empty so far")
            if now < 1000:
                raise GlobalUnavailableError("of run 6, this miner of run 5: upgrade the miner")
            return 7

        def fetch(self, outer_step: int) -> Path:
            return tmp_path

    monkeypatch.setattr(global_bucket, "pause", pause)
    monkeypatch.setattr(global_bucket, "time", SimpleNamespace(monotonic=lambda: now))
    bucket: Any = Bucket()
    assert global_bucket.first_global_state(bucket, lambda: True) == (7, tmp_path)
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert ["empty" in line for line in said] == [True, False, False, False, False]
    assert "upgrade the miner. Training cannot begin before" in said[-1]

    caplog.clear()
    now, committed = 0.0, "no commitment"
    chain: Any = SimpleNamespace(commitment=lambda hotkey: "a" * 128 if now > 310 else committed)
    config: Any = SimpleNamespace(miner=SimpleNamespace(master_ss58_address="5Master"))
    monkeypatch.setattr(global_bucket, "_remote_state", lambda *given: None)
    global_bucket.open_global_bucket(config, chain, tmp_path, lambda: True)
    assert caplog.text.count("Waiting for the commitment of the master hotkey 5Master") == 2


def test_a_rank_that_stops_as_ordered_has_not_failed() -> None:
    """Whatever the miner's status is: the launcher would end rank 0 while it closes."""
    other: Any = SimpleNamespace(rank_zero=None, loop=SimpleNamespace(run=lambda: 3))
    assert start.Miner.run(other) == (0, "")


def test_a_recent_block_is_one_of_half_a_round_as_rounds_are_called() -> None:
    """The public validator's period is 750 blocks from the first round on, whatever is set."""
    clock = RoundClock(chain_block=lambda: 9, blocks_per_allreduce=750, last_allreduce_block=1)
    assert clock.half() == 375


@pytest.fixture
def rank_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[..., Any]], tuple[int, tuple[ExitStatus, str] | None]]:
    """``run_rank`` of rank 0 where what comes after its first steps is played."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", INSTANCE: "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for name in ("die_with_parent", "write_stacks_on_signal", "start_log", "RankStop"):
        monkeypatch.setattr(start, name, lambda *_, **named: SimpleNamespace(install=lambda: None))
    config = load_config("miner", [], environ={}, dotenv=None, check=False)
    monkeypatch.setattr(start, "load_config", lambda *_: config)
    monkeypatch.setattr(start, "make_run_folder", lambda _: tmp_path)

    def run(played: Callable[..., Any]) -> tuple[int, tuple[ExitStatus, str] | None]:
        monkeypatch.setattr(start, "_run", played)
        return start.run_rank([]), process.read_exit_status(tmp_path, instance="x")

    return run


@pytest.mark.parametrize("model", [{}, {"model_type": "nonsense"}])
def test_a_global_state_without_a_model_is_no_fault_of_the_configuration(
    model: dict[str, Any], rank_ends: Callable[..., Any]
) -> None:
    """Status 2 would leave each miner down that starts before the validator mends it."""
    status, (told, reason) = rank_ends(lambda *_: hf_config(model))
    assert status == told == ExitStatus.FAULT and "no model can be built" in reason

    def bad(*_: object) -> None:
        raise ConfigError("--data.cache_dir cannot be written")

    status, (told, reason) = rank_ends(bad)
    assert status == told == ExitStatus.BAD_CONFIGURATION and "--data.cache_dir" in reason


@pytest.mark.parametrize(("shown", "remembered"), [(8, 0), (0, 8)])
def test_ranks_do_not_train_on_the_cpu_while_the_gpus_are_away(
    shown: int,
    remembered: int,
    monkeypatch: pytest.MonkeyPatch,
    rank_ends: Callable[..., Any],
) -> None:
    """The driver, or the fabric manager, is not ready after a reboot."""
    monkeypatch.setattr(device_module.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device_module, "visible_gpu_count", lambda: shown)
    rank_device, cpu = device_module.rank_device, torch.device("cpu")
    status, (told, reason) = rank_ends(lambda *_: rank_device("auto", 0, remembered=remembered))
    assert status == told == ExitStatus.FAULT
    assert "cannot use the 8 GPUs" in reason and "--neuron.device cpu" in reason
    assert rank_device("cpu", 0, remembered=remembered) == cpu
    with pytest.raises(ConfigError, match=r"--neuron\.device cuda"):
        rank_device("cuda", 0, remembered=remembered)
    step: Any = SimpleNamespace(seconds=1.0, gpu_memory_gb=None)
    for wanted in ("auto", "cuda", "cpu"):
        argv = ["--neuron.device", wanted]
        config = load_config("miner", argv, environ={}, dotenv=None, check=False)
        warned = "LOW GPU MEMORY" in str(device_module.warnings_of(config, cpu)(step))
        assert warned == (shown > 0 and wanted != "cpu"), wanted
    monkeypatch.setattr(device_module, "visible_gpu_count", lambda: 0)
    assert rank_device("auto", 0) == cpu, "a machine without GPUs"


@pytest.mark.parametrize("proven", [False, True])
@pytest.mark.parametrize("hidden", [60, 269, 10_000])
def test_a_hotkey_is_given_up_when_the_chain_has_not_shown_it_for_minutes(
    proven: bool,
    hidden: int,
    rank_ends: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, opened, closed = 0.0, 0, 0
    config: Any = None

    def close() -> None:
        nonlocal closed
        closed += 1

    def join_subnet(_: object, stack: ExitStack) -> str:
        nonlocal now, opened
        opened += 1
        stack.callback(close)
        if now < hidden:
            now += 30
            raise NotRegistered("hotkey 5F is not registered on subnet 38")
        return "member"

    def connect(*_: object) -> tuple[int, str]:
        with ExitStack() as stack:
            member = network._join(config, stack, lambda: True)
            assert opened == closed + 1, "of those that failed none is open"
            return ExitStatus.STOPPED, str(member)

    monkeypatch.setattr(network, "join_subnet", join_subnet)
    monkeypatch.setattr(network, "pause", lambda wanted: None)
    monkeypatch.setattr(network, "Proof", lambda _: SimpleNamespace(holds=proven))
    monkeypatch.setattr(network, "time", SimpleNamespace(monotonic=lambda: now))
    status, (told, reason) = rank_ends(connect)
    assert opened == closed and status == told
    if not proven:
        assert status == ExitStatus.BAD_CONFIGURATION and now == 30
    elif hidden < 300:
        assert (status, reason) == (ExitStatus.STOPPED, "member")
    else:
        assert status == ExitStatus.DEREGISTERED and now == 300
        assert "is not registered on subnet 38; it was registered" in reason


def test_no_room_for_a_ranks_first_file_is_a_line(
    rank_ends: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "rank-0.json")

    monkeypatch.setattr(process, "write_json", full)
    assert rank_ends(lambda *_: pytest.fail("it has begun")) == (ExitStatus.FAULT, None)
    assert "No space left on device: 'rank-0.json'" in caplog.text


class Server:
    calls_over = 0

    def round_ended(self) -> None:
        self.calls_over += 1


@pytest.mark.parametrize("mode", list(Mode))
def test_the_server_is_told_of_a_call_that_leads_to_nothing(mode: Mode) -> None:
    """Else it answers the validator that a round is running, until a restart."""
    server = Server()
    rank_zero: Any = SimpleNamespace(server=server)
    call = ev.AllReduceCalled(RoundRequest(caller="5V"), 1000.0)
    state = MinerState(mode=mode, outer_step=4)
    start.RankZero._tell_server(rank_zero, call, state)
    after, _ = decide(state, call, Rules(reload_seconds=60, checkpoint_steps=10))
    starts_a_round = after.mode is Mode.AVERAGING
    assert server.calls_over == (0 if starts_a_round else 1)
    start.RankZero._tell_server(
        rank_zero, ev.ModeChanged(Mode.AVERAGING, Mode.AWAITING_GLOBAL), after
    )
    assert server.calls_over == (1 if starts_a_round else 2)
