from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from distributed_training import doctor
from distributed_training.common.files import write_state
from distributed_training.common.llama import named_config
from distributed_training.common.memory import ModelShape
from distributed_training.common.ports import free_ports
from distributed_training.common.processes import ProcessId
from distributed_training.common.proxies import VARIABLES
from distributed_training.config import Config, ConfigError
from distributed_training.health import bundle, gpus, machine, outside
from distributed_training.health.machine import Examination, bytes_under
from distributed_training.node import identity
from distributed_training.node.buckets import NoBucket
from distributed_training.protocol.growth import file_bytes
from distributed_training.protocol.types import Check
from distributed_training.status_command import describe
from distributed_training.store.base import ObjectInfo, Section
from distributed_training.store.errors import StoreError
from distributed_training.telemetry.neuron_state import NeuronState
from tests.tools.chain_memory import MemoryChain, MemoryLedger
from tests.tools.memory_store import MemoryObjectStore
from tests.tools.miner_parts import config_of
from tests.tools.miner_states import make_miner
from tests.tools.network import network_file
from tests.tools.settings import load_config
from tests.tools.waiting import wait_for

pytestmark = pytest.mark.timeout(60)


def status(checks: Iterable[Check]) -> dict[str, str]:
    return {check.name: check.status for check in checks}


@pytest.mark.parametrize(("share", "verdict"), [(0.1, "fail"), (1, "warn"), (2, "ok")])
def test_memory_verdicts(share: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Examination(config_of(), ranks=1, shape=ModelShape.from_config(named_config("4b")))
    for kind in ("gpu_bytes", "host_bytes"):
        monkeypatch.setattr(machine, "gpu_bytes", lambda *_: None)
        monkeypatch.setattr(machine, "host_bytes", lambda: None)
        monkeypatch.setattr(machine, kind, lambda *_: 10**12)
        (check,) = machine.check_memory(asked)
        needed = round(float(check.finding.split()[2]) * 1e9)
        monkeypatch.setattr(machine, kind, lambda *_, there=round(share * needed): there)
        (check,) = machine.check_memory(asked)
        assert check.status == verdict and bool(check.remedy) == (verdict != "ok")


def of_adapters(folder: Path, **more: Any) -> Config:
    """Return a miner's configuration of a network that trains adapters on 3.6 billion in bf16."""
    model = named_config("4b") | more
    rules = {
        "exchange": "store",
        "chain.url": "https://registry.example.org",
        "model.config": {key: value for key, value in model.items() if value is not None},
        "model.parameters": ModelShape.from_config(named_config("4b")).parameters,
        "model.frozen": "0" * 64,
        "model.trainable_parameters": 15_000_000,
        "model.kind": "lora",
        "model.settings": {"r": 8, "alpha": 16, "targets": ["q_proj"], "dtype": "bfloat16"},
    }
    words = ["--network", network_file(folder, rules), "--neuron.run_folder", str(folder / "run")]
    return load_config("miner", [*words, "--neuron.device", "cpu"], check=False)


def test_memory_and_disk_hold_a_frozen_base_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = of_adapters(tmp_path)
    base = 2 * config.network.head.parameters  # type: ignore[union-attr]
    monkeypatch.setattr(machine, "host_bytes", lambda: base // 2)
    with pytest.raises(ConfigError, match="host memory: at least"):
        machine.refuse_model(config, ranks=1)
    monkeypatch.setattr(machine, "host_bytes", lambda: 2 * base)  # adapters need little more
    machine.refuse_model(config, ranks=1)
    asked = Examination(config, ranks=1)
    assert [check.status for check in machine.check_model(asked)] == ["ok"]
    monkeypatch.setattr(machine, "free_bytes", lambda _: base - 1)
    (check,) = machine.check_room(asked)
    assert check.status == "fail"


def test_a_network_whose_models_size_is_not_known_is_a_warning(tmp_path: Path) -> None:
    config = of_adapters(tmp_path, intermediate_size=0)
    (check,) = machine.check_model(Examination(config, ranks=1))
    assert check.status == "warn" and f"--network {tmp_path}/network.toml: inter" in check.finding


@pytest.mark.parametrize("there", [False, True])
def test_the_network_is_asked_first_and_without_a_wallet(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config("miner", [], environ={}, dotenv=None, check=False)
    ledger = MemoryLedger()
    ledger.register("5Another")
    if there:
        ledger.register(config.miner.master_ss58_address, validator_permit=True)

    def no_wallet(_: object) -> None:
        raise ConfigError("no hotkey at x, so the miner has no identity: create it")

    monkeypatch.setattr(outside, "load_wallet", no_wallet)
    chain = MemoryChain(hotkey="", ledger=ledger)
    monkeypatch.setattr(outside, "follow_chain", lambda *_: chain)
    examination = Examination(config, ranks=1)
    checks = outside.check_chain(examination)
    found = [(check.name, check.status) for check in checks]
    first = [("network", "ok"), ("global state", "warn")]
    assert found[:2] == (first if there else [("network", "fail"), ("global state", "skip")])
    assert examination.uid is None and ("hotkey", "fail") in found
    assert not any("btcli" in check.line for check in checks)


@pytest.mark.parametrize(
    ("held", "status", "words"),
    [
        (ObjectInfo("k", 1, "", 0.0, age_seconds=3600.0), "ok", "1.0 h old"),
        (ObjectInfo("k", 1, "", 0.0, age_seconds=90_000.0), "warn", "rounds have stopped"),
        (None, "warn", "no global state yet"),
        (StoreError("no answer"), "skip", "does not answer"),
        (NoBucket("hotkey 5x: empty"), "warn", "committed no bucket"),
    ],
)
def test_the_newest_global_state_is_of_today(
    held: Any, status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def head(key: str) -> Any:
        if isinstance(held, Exception):
            raise held
        return held

    buckets = SimpleNamespace(of_master=lambda _: SimpleNamespace(head=head))
    monkeypatch.setattr(identity, "PeerBuckets", lambda *_: buckets)
    config = load_config("miner", [], environ={}, dotenv=None, check=False)
    check = identity.check_global_state(config, MemoryChain(hotkey=""))
    assert check.status == status and words in check.finding


def test_port() -> None:
    (port,) = free_ports(
        1
    )  # another program might take a port of the ephemeral range once it is free
    config = config_of("--dht.port", str(port), rules={"exchange": "hivemind"})
    with socket.create_server(("127.0.0.1", port)):
        (taken,) = machine.check_ports(Examination(config, ranks=1))
        assert taken.status == "fail" and f"port {port} (--dht.port) is in use" in taken.line
        own = Examination(config, ranks=1, own_ports=frozenset({port}))
        assert status(machine.check_ports(own)) == {"port dht.port": "ok"}
    assert status(machine.check_ports(Examination(config, ranks=1))) == {"port dht.port": "ok"}


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_room(folder: Path) -> Check:
        monkeypatch.setattr(machine, "_MOST_SPARE", needed)
        config = config_of("--neuron.run_folder", str(folder))
        (check,) = machine.check_room(Examination(config, ranks=1))
        return check

    monkeypatch.setattr(machine, "DISK_RESERVE", 1)
    monkeypatch.setattr(machine, "_SPARE_BYTES", 10**9)
    needed = 1
    missing = tmp_path / "not" / "yet"
    assert check_room(missing).status == "ok"
    assert not missing.exists()
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        assert "is not a folder" in check_room(folder).finding
    assert check_room(tmp_path / ("long" * 99)).finding  # a check, and no exception
    needed = 10**18
    check = check_room(missing)
    assert check.status == "fail" and "--neuron.run_folder" in check.remedy


def test_disk_reserve_is_part_of_the_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, a start with 0.6 GB would pass, and then wait forever for space to download."""
    config = load_config("miner", ["--network", "local"], environ={}, check=False)
    for free, status in ((6 * 10**8, "fail"), (3 * 10**9, "ok")):
        usage = SimpleNamespace(total=10**12, free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        (check,) = machine.check_room(Examination(config, ranks=1))
        assert check.status == status and "1.0 GB needed" in check.line


def test_a_disk_that_does_not_answer_fails_its_checks_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(path: object) -> NoReturn:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(shutil, "disk_usage", stale)
    flags = ["--neuron.run_folder", str(tmp_path), "--network", "local"]
    asked = Examination(load_config("miner", flags, check=False), 1)
    (check,) = machine.check_room(asked)
    assert check.status == "fail" and "(Stale file handle)" in check.finding


def test_the_doctor_of_a_miner_that_deletes_folders_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "snapshot" / "deep").mkdir(parents=True)
    (tmp_path / "kept").write_bytes(b"four")
    (tmp_path / "config.json").write_text("[]")  # not the config.json of a model
    scandir = os.scandir

    def delete(path: Any) -> Any:
        found = scandir(path)
        with contextlib.suppress(OSError):
            os.rmdir(tmp_path / "snapshot" / "deep")
        return found

    monkeypatch.setattr(os, "scandir", delete)
    assert bytes_under(tmp_path) == 4 + 2


@pytest.mark.parametrize(
    ("seconds", "verdict", "said"),
    [(5, "ok", "an upload takes about 5 s"), (11, "warn", "and has 20 s after a close")],
)
def test_a_line_is_judged_by_the_time_an_upload_really_has(
    seconds: float, verdict: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload of the model takes ``seconds``. The grace is 20 s."""
    shape = ModelShape.from_config(named_config("tiny"))
    now = 0.0

    class SlowStore(MemoryObjectStore):
        def put(self, key: str, data: bytes | Section) -> str:
            nonlocal now
            now += seconds * len(data) / file_bytes(shape.parameters)
            return super().put(key, data)

    clock = SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr(outside, "time", clock)
    check = outside.check_line(SlowStore(), config_of("--network", "local"), shape)
    assert check.status == verdict and said in check.finding


def test_torch_build_against_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for count, verdict in ((0, "ok"), (2, "ok" if torch.cuda.is_available() else "fail")):
        monkeypatch.setattr(machine, "visible_gpu_count", lambda count=count: count)
        (check,) = machine.check_torch(Examination(config_of(), ranks=1))
        assert check.status == verdict and bool(check.remedy) == (verdict == "fail")


def check_gpus(ranks: int, device: str) -> list[Check]:
    return [*machine.check_gpus(Examination(config_of("--neuron.device", device), ranks))]


def test_no_gpu_is_a_failure_only_if_one_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for device, verdict in (("auto", "warn"), ("cuda", "fail"), ("cpu", "ok")):
        assert status(check_gpus(1, device)) == {"gpu": verdict}


class FakeNvml:
    """Has nvidia-ml-py's functions for invented cards, since a test has no driver."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        self.open = 0
        self.hangs = False
        self.lost: set[int] = set()

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1
        if self.hangs:
            raise self.NVMLError("Unknown Error")

    def nvmlDeviceGetCount(self) -> int:
        if self.hangs:
            raise self.NVMLError("Unknown Error")
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= 3 or index in self.lost:
            raise self.NVMLError
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in (known := [self.nvmlDeviceGetUUID(handle) for handle in range(3)]):
            raise self.NVMLError
        return known.index(uuid)

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{'abc'[handle]}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=80 * 10**9, used=(handle * 20 + 1) * 10**9)

    def nvmlDeviceGetName(self, handle: int) -> str:
        return f"Card {handle}"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:
        return 60

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        raise self.NVMLError("not supported")


@pytest.fixture
def fake_nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()

    def start() -> FakeNvml:
        fake.nvmlInit()
        return fake

    monkeypatch.setattr(gpus, "_start", start)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_sampler(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = gpus.sample_gpu(1)
    assert sample is not None and sample.name == "Card 1" and sample.memory_used_gb == 21
    assert sample.utilization == 97 and sample.power_watts is None
    assert gpus.sample_gpu(3) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-b,7,0")
    assert gpus.visible_gpu_count() == 2  # as in CUDA, the list ends at the first bad entry
    assert gpus.sample_gpu(1) == sample
    assert fake_nvml.open == 0


@pytest.mark.parametrize(
    ("form", "cards"),
    [("", 0), ("-1", 0), ("0", 1), ("1,0", 2), ("0,-1,1", 1), (" 0 , 1 ", 2), ("7", 0),
     ("GPU-a", 1), ("GPU-c,GPU-a", 2), ("none", 0), ("GPU-x", 0), ("MIG-x", 0), ("2,GPU-a", 2)],
)  # fmt: skip
def test_the_forms_that_cuda_takes(
    form: str, cards: int, fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", form)
    assert gpus.visible_gpu_count() == cards


def test_a_driver_that_never_answers_costs_one_wait_and_one_line(
    fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    assert gpus.gpu_utilization(0) == 97
    stuck = threading.Event()

    def hang(handle: int) -> SimpleNamespace:
        stuck.set()
        release.wait(30)
        return SimpleNamespace(gpu=5)

    monkeypatch.setattr(fake_nvml, "nvmlDeviceGetUtilizationRates", hang)
    monkeypatch.setattr(gpus, "SAMPLE_PATIENCE", 0.2)
    assert gpus.gpu_utilization(0) is None and stuck.is_set()
    began = time.monotonic()
    assert gpus.visible_gpu_count() == 0
    assert gpus.sample_gpu() is None and gpus.describe_gpu(0) == ""
    assert time.monotonic() - began < 1.0, "nobody else waits for it"
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith("The NVIDIA driver has not answered for 0 s") and "reboot" in line
    release.set()
    wait_for(lambda: gpus.visible_gpu_count() == 3, "the driver's answer")
    monkeypatch.setattr(fake_nvml, "nvmlDeviceGetUtilizationRates", lambda handle: None)
    with pytest.raises(AttributeError):  # raised in the thread that has called it
        gpus.gpu_utilization(0)


def test_gpus_in_use_are_named(fake_nvml: FakeNvml) -> None:
    assert status(check_gpus(2, "auto")) == {"gpu 0": "ok", "gpu 1": "warn"}
    (check,) = check_gpus(4, "auto")
    assert check.status == "fail" and "--nproc_per_node 3" in check.remedy
    fake_nvml.lost = {1}  # the driver still counts it, but gives no handle
    (check,) = check_gpus(3, "auto")
    assert check.status == "fail" and "--nproc_per_node 2" in check.remedy
    assert [c.finding[:6] for c in check_gpus(2, "auto")] == ["Card 0", "Card 2"]
    fake_nvml.hangs = True
    (check,) = check_gpus(1, "cuda")
    assert check.status == "fail" and "check nvidia-smi" in check.remedy
    assert gpus.sample_gpu() is None
    assert fake_nvml.open == 0


def test_the_doctor_names_a_proxy_that_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    asked = Examination(config_of(), ranks=1)
    monkeypatch.setenv("HTTP_PROXY", "http://me:secret@proxy.lab:3128")
    assert outside.check_proxies(asked) == []
    monkeypatch.setenv("all_proxy", "socks5://me:secret@127.0.0.1:1080")
    (check,) = outside.check_proxies(asked)
    assert check.status == "warn" and "all_proxy names no HTTP proxy" in check.finding
    assert "secret" not in check.finding


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    """Yield a run folder whose rank is running."""
    words = [sys.executable, "-c", "input()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True) as process:
        write_state(tmp_path / "pids" / "rank-0.json", ProcessId.of(process.pid))
        try:
            yield tmp_path
        finally:
            process.kill()


@pytest.mark.parametrize("state", ["counts", "store-silent", "stopped"])
def test_the_verdict_is_a_row_that_fails_nothing(state: str, tmp_path: Path) -> None:
    folder = make_miner(tmp_path, state)
    config = config_of("--neuron.run_folder", str(folder))
    (row,) = doctor.check_verdict(Examination(config, ranks=1))
    shown = describe(NeuronState(folder), time.time())
    assert row.finding.startswith(f"{shown['verdict']}: ") and row.remedy == shown["remedy"]
    assert row.status == {"counts": "ok", "store-silent": "warn", "stopped": "skip"}[state]


def test_a_bundle_has_the_rows_and_the_log_of_the_running_miner(
    running: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bundle, "distributions", lambda: [])
    monkeypatch.chdir(running)
    (running / "out.log").write_text("two lines\nof the miner\n")
    flags = ["--network", "local", "--offline", "--neuron.run_folder", str(running)]
    for more in ([], ["--log", "out.log"]):
        doctor.main([*flags, "--bundle", f"help{len(more)}.tar.gz", *more])
        said = capsys.readouterr()
        assert "holds, secrets masked:\ndoctor.json" in said.err
        assert not more or "log.txt" in said.err
    with tarfile.open(running / "help2.tar.gz") as archive:
        log, rows = (archive.extractfile(f"bundle/{name}") for name in ("log.txt", "doctor.json"))
        assert log is not None and log.read() == b"two lines\nof the miner\n"
        assert rows is not None
        (torch,) = (row for row in json.load(rows) if row["name"] == "torch")
        assert "the running miner" in torch["finding"]
    assert doctor.main([*flags, "--bundle", "help2.tar.gz"]) == 2
