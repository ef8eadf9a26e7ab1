"""scripts/score.py against a real object store and chain: its figures are the validator's own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from distributed_training.chain.base import Neuron
from distributed_training.chain.identity import create_wallet
from distributed_training.chain.registry import RegistryChain
from distributed_training.common.ports import free_ports
from distributed_training.config import Config, ConfigError, load_config
from distributed_training.data.tokenizer import build_tokenizer
from distributed_training.localnet.services import ObjectStoreServer
from distributed_training.node import start
from distributed_training.node.buckets import PeerBuckets
from distributed_training.protocol import gradients, keys
from distributed_training.protocol.gradients import GradientMetadata
from distributed_training.protocol.metadata import (
    BucketCredentials,
    ConfigExtras,
    Metadata,
    build_commitment,
)
from distributed_training.protocol.types import Revision
from distributed_training.scoring import command as score
from distributed_training.scoring import evaluator, score_preview, upload
from distributed_training.scoring.evaluator import EvaluationModel, Evaluator
from distributed_training.scoring.upload import PageReader
from distributed_training.store.s3 import S3ObjectStore
from distributed_training.telemetry import EventLog
from distributed_training.telemetry.neuron_state import NeuronState
from distributed_training.training.outer_step import GlobalState
from distributed_training.validator import program
from distributed_training.validator.global_state import GlobalPublisher
from distributed_training.validator.scorer import Scorer, Standings
from tests.tools import forked
from tests.tools.chain_program import chain_program
from tests.tools.gradient_file import build_payload
from tests.tools.network import network_file
from tests.tools.support_store import access_to
from tests.tools.waiting import wait_for

GLOBAL_BUCKET = "local"

pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "score.py"
UIDS = (5, 16)


@dataclass
class Subnet:
    """Chain and store as processes, a published global state, two miners' uploads."""

    folder: Path
    config: Config
    chain: RegistryChain
    state: GlobalState
    publisher: GlobalPublisher
    pages: PageReader

    def store(self, bucket: str) -> S3ObjectStore:
        return S3ObjectStore.from_settings(self.config.store, bucket=bucket, write=True)

    def miners(self) -> list[Neuron]:
        return [n for n in self.chain.neurons() if n.uid in UIDS]

    def publish(self, uid: int, block: int, steps: int) -> None:
        """Train on the block's own pages and upload, as a miner does."""
        model = EvaluationModel(model_config=self.state.model_config, device=torch.device("cpu"))
        model.load(self.state.weights)
        parameters = [p.requires_grad_(True) for p in model._parameters.values()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        text = self.pages(uid, block)
        for step in range(steps):
            optimizer.zero_grad()
            batch = text[2 * step % len(text) :][:2]
            (model._loss(batch) / batch.numel()).backward()
            optimizer.step()
        codes = {
            name: gradients.encode(0.8 * (start - reached))
            for (name, _), start, reached in zip(
                self.state.schema, self.state.weights, model.state(), strict=True
            )
        }
        file = io.BytesIO()
        torch.save(build_payload(codes, GradientMetadata(block, steps, 0, 1.0)), file)
        store = self.store(keys.miner_bucket(GLOBAL_BUCKET, uid))
        store.put("epoch-0/gradients.pt", file.getvalue())
        extras = ConfigExtras((block,), steps)
        store.put("epoch-0/config.json", extras.merge_into(self.state.model_config))
        metadata = Metadata.of(Revision(5, 0, steps), "")
        store.put(keys.ROOT_METADATA, metadata.to_json())


@pytest.fixture(scope="module")
def subnet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subnet]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine threads wait for each other
    folder = tmp_path_factory.mktemp("subnet")
    master = create_wallet(folder / "wallets", "uid-200")
    try:
        with (
            ObjectStoreServer(folder=folder / "store") as server,
            chain_program("--seconds-per-block", "3600", master=master.ss58) as (url, _),
        ):
            addresses = {"chain": url, "store": server.endpoint, "pid": os.getpid()}
            (folder / "localnet.json").write_text(json.dumps(addresses))
            rules = {"chain.url": url, "store.endpoint": server.endpoint}
            network_file(folder, rules, signer=master.hotkey)
            made = _publish_all(folder, url, server)
            with closing(made.chain):
                yield made
    finally:
        torch.set_num_threads(threads)


def _publish_all(folder: Path, url: str, server: ObjectStoreServer) -> Subnet:
    config = load_config("validator", ["--preset", "local"], environ={}, dotenv=None, check=False)
    config = replace(config, store=replace(config.store, **access_to(server)))
    parts = ("ACCOUNT_ID", "READ_ACCESS_KEY_ID", "READ_SECRET_ACCESS_KEY")
    commitment = build_commitment(BucketCredentials(*(server.keys[f"R2_{p}"] for p in parts)))
    founder = RegistryChain(url=url, wallet=create_wallet(folder / "wallets", "uid-200"))
    for uid in (200, *UIDS):
        wallet = create_wallet(folder / "wallets", f"uid-{uid}")
        chain = RegistryChain(url=url, wallet=wallet)
        founder.enroll(wallet.ss58, uid=uid, validator_permit=uid == 200)
        chain.commit(commitment)
        if uid != 200:
            chain.serve("127.0.0.1", 1)
        name = GLOBAL_BUCKET
        bucket = name if uid == 200 else keys.miner_bucket(name, uid)
        S3ObjectStore.from_settings(config.store, bucket=bucket, write=True).create_bucket()
        if uid != UIDS[-1]:
            chain.close()
    founder.close()
    wait_for(
        lambda: len(chain.neurons()) == 3 and chain.commitment(wallet.ss58),
        "all are registered and have committed",
    )
    path, eos = build_tokenizer("bytes", folder / "tokenizer")
    state = program.initial_state(config, vocabulary=2048, eos_token=eos)
    state = replace(state, last_allreduce_block=chain.block())
    store = S3ObjectStore.from_settings(config.store, bucket=GLOBAL_BUCKET, write=True)
    publisher = GlobalPublisher(store=store, folder=folder / "global", run=5)
    assert publisher.publish(state, "").ok
    pages = PageReader.from_settings(config, path, eos)
    subnet = Subnet(folder, config, chain, state, publisher, pages)
    for uid, steps in zip(UIDS, (4, 6), strict=True):
        subnet.publish(uid, chain.block(), steps)
    return subnet


def _score(subnet: Subnet, *flags: str, reads: bool = True) -> subprocess.CompletedProcess[str]:
    """``reads`` False: nobody reads its output, since the reader has gone."""
    words = ("--subnet", str(subnet.folder), *flags)
    return forked.run(SCRIPT, *words, environ={}, folder=subnet.folder, reads=reads)


def test_its_figures_are_the_validators_own(subnet: Subnet) -> None:
    """The validator's scorer and the script, on the same buckets, to the sixth digit."""
    events: list[dict[str, Any]] = []
    standings, miners = Standings(), subnet.miners()
    scorer = Scorer(
        settings=subnet.config.validator,
        open_bucket=PeerBuckets(subnet.config.store, subnet.chain).of_miner,
        publisher=subnet.publisher,
        evaluator=Evaluator(
            model=EvaluationModel(
                model_config=subnet.state.model_config, device=torch.device("cpu")
            ),
            pages=subnet.pages,
        ),
        standings=standings,
        rng=random.Random(1),
        record=lambda kind, **fields: events.append({"kind": kind, **fields}),
        stop=threading.Event(),
    )
    standings.sync(miners)
    scorer.score(
        miners,
        subnet.state,
        block=subnet.chain.block(),
        bpa=subnet.config.validator.blocks_per_allreduce,
        interrupted=lambda: False,
    )
    scored = {e["uid"]: e for e in events if e["kind"] == "upload_scored"}
    assert all(e["ok"] for e in scored.values()) and set(scored) == set(UIDS)
    block = str(scored[UIDS[0]]["random_block"])

    done = _score(subnet, "--all", "--json", "--random-block", block)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["uid"] for row in found["miners"]] == list(UIDS)
    for row in found["miners"]:
        event = scored[row["uid"]]
        for name in ("random", "assigned"):
            for figure in ("before", "after", "relative"):
                assert row[f"{name}_{figure}"] == pytest.approx(event[f"{name}_{figure}"], abs=1e-6)
            assert row[f"{name}_low"] < row[f"{name}_relative"] < row[f"{name}_high"]


def _errors(stderr: str) -> list[str]:
    """Return its errors, without the lines of its progress."""
    return [line for line in stderr.splitlines() if not line.startswith("… ")]


def test_score_prints_readable_lines_and_one_line_for_each_error(subnet: Subnet) -> None:
    with EventLog(subnet.folder / "events.jsonl") as events:  # as a miner's run folder
        events.write("start", uid=UIDS[0])
    # One of 600 blocks has too little text to be judged on: this one has enough.
    done = _score(subnet, "--uid", str(UIDS[0]), "--random-block", "7")
    assert done.returncode == 0, done.stderr
    kept = NeuronState(subnet.folder).catch_up().measured()["previewed"]
    assert kept["uid"] == UIDS[0] and kept["random_relative"] is not None
    _, found, verdict = done.stdout.splitlines()
    assert found.startswith(f"uid {UIDS[0]:03d}: 5.0.4, ") and "assigned gains more: " in found
    assert "nothing stands in its way" in verdict or ". Fix: " in verdict
    # Its progress, also where standard error is no terminal, by miner and phase.
    told = done.stderr.splitlines()
    assert told[0].startswith("… reading chain and buckets") and not _errors(done.stderr)
    who = f"… uid {UIDS[0]:03d}, miner 1 of 1: "
    phases = [line.removeprefix(who) for line in told if line.startswith(who)]
    assert phases[:2] == ["looking into its bucket", "reading its upload 5.0.4"]
    assert phases[2].startswith("judging it on 1 random")
    for flags, words in (
        (("--uid", "9"), "uid 9 is no miner"),
        (("--folder", str(subnet.folder)), "give one --uid"),
        (("--uid", "5", "--bucket", "some-bucket"), "R2_READ_ACCESS_KEY_ID"),
        (("--wallet.path", str(subnet.folder / "none")), "no hotkey at"),
        (("--no_such_flag",), "no_such_flag"),
    ):
        done = _score(subnet, *flags)
        assert done.returncode == 2, done.stdout + done.stderr
        (line,) = _errors(done.stderr)
        assert words in line


@pytest.mark.parametrize("more", [(), pytest.param(("--json",), marks=pytest.mark.long)])
def test_a_reader_that_has_read_enough_is_no_fault(subnet: Subnet, more: tuple[str, ...]) -> None:
    one = ("--uid", str(UIDS[0]), "--sequences", "2")
    done = _score(subnet, *one, *more, reads=False)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def test_a_chain_that_does_not_answer_is_one_line(subnet: Subnet) -> None:
    (port,) = free_ports(1)
    rules = {"chain.url": f"http://127.0.0.1:{port}"}
    done = _score(
        subnet,
        *("--uid", "5", "--network", network_file(subnet.folder / "away", rules)),
        *("--chain.start_timeout", "1"),
    )
    assert done.returncode == 1 and "did not answer within 1 s" in done.stderr
    assert "the miner" not in done.stderr, "it was no miner who asked"
    assert len(_errors(done.stderr)) == 1


#: nvidia-ml-py on a machine whose only GPU a miner fills.
FULL_GPU = """
class NVMLError(Exception): pass
class Process: pid = 4711
class Memory: total, used = 24 * 10**9, 23 * 10**9
nvmlMemory_v2 = 2
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetComputeRunningProcesses(handle): return [Process]
def nvmlDeviceGetMemoryInfo(handle, version=1): return Memory
"""

#: The script on that machine; it ends when it was looked at.
LOOKED_AT = """
import os, runpy, sys, time
sys.modules.pop("pynvml", None)
sys.path.insert(0, "{folder}")
try:
    runpy.run_path("{script}", run_name="__main__")
finally:
    while not os.path.exists("{folder}/looked"):
        time.sleep(0.02)
"""


def test_a_gpu_that_a_miner_fills_is_left_to_it(subnet: Subnet, tmp_path: Path) -> None:
    """It goes to the CPU, says so in one line, and stays at the lowest priority there."""
    (tmp_path / "pynvml.py").write_text(FULL_GPU)
    (tmp_path / "score.py").write_text(LOOKED_AT.format(folder=tmp_path, script=SCRIPT))
    words = ("--subnet", str(subnet.folder), "--uid", str(UIDS[0]), "--json")
    words += ("--passes", "1", "--sequences", "2", "--random-block", "7", "--neuron.device", "auto")
    out, errors = tmp_path / "out", tmp_path / "errors"
    program = forked.Program(
        tmp_path / "score.py", *words, environ={}, log=out, errors=errors, folder=tmp_path
    )
    try:
        wait_for(lambda: errors.exists() and errors.read_text().endswith("\n"), "what it says")
        lowest = (19, "1000")
        wait_for(lambda: _status(program.pid) == lowest, "low priority", 60)
        (tmp_path / "looked").touch()
        with contextlib.suppress(PermissionError):  # at low priority it would hardly advance
            os.setpriority(os.PRIO_PROCESS, program.pid, 0)
        assert program.wait(150) == 0, errors.read_text()
    finally:
        program.kill()
    (line,) = _errors(errors.read_text())
    assert "this runs at nice 19 and with one thread" in errors.read_text()
    assert line.startswith("GPU 0 is in use by process 4711 (23.0 GB), so this takes one CPU")
    assert json.loads(out.read_text())["miners"][0]["random_relative"] is not None


def _status(pid: int) -> tuple[int, str]:
    """Priority, and how soon the kernel ends it where memory runs out."""
    return os.getpriority(os.PRIO_PROCESS, pid), Path(
        f"/proc/{pid}/oom_score_adj"
    ).read_text().strip()


ONE = ("--network", "sn38", "--uid", "5", "--neuron.device", "cpu")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stand in for a look at the subnet, from the present block on."""
    found = Mock()
    monkeypatch.setattr(score, "find_sources", lambda *_: (Mock(block=found), [5]))
    monkeypatch.setattr(start, "fetch_tokenizer", lambda *_: (None, None))
    monkeypatch.setattr(upload.PageReader, "from_settings", Mock())
    monkeypatch.setattr(evaluator, "EvaluationModel", Mock())
    for name in ("read_judged", "read_round_notes", "choose_miners", "Previewer"):
        monkeypatch.setattr(score_preview, name, Mock())
    monkeypatch.setattr(score, "report_preview", Mock())
    monkeypatch.setattr(score.time, "sleep", Mock())
    return found


@pytest.mark.parametrize(
    ("look", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0"), "the GPU's"),
        (MemoryError(), "this machine's"),
        (lambda: torch.empty(1 << 60, dtype=torch.uint8), "this machine's"),  # torch's own
    ],
)
def test_too_little_memory_is_one_line(
    look: Any, words: str, looks: Mock, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    looks.side_effect = look
    assert score.main([*ONE, "--cache", str(tmp_path)]) == 1
    (line,) = _errors(capfd.readouterr().err)
    assert line.startswith(f"error: {words} memory is not enough") and "another machine" in line


def test_a_watch_outlives_a_miner_that_loses_its_uid(
    looks: Mock, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    looks.side_effect = [1000, ConfigError("uid 5 is no miner"), SystemExit]
    with pytest.raises(SystemExit):
        score.main([*ONE, "--watch", "--cache", str(tmp_path)])
    assert looks.call_count == 3 and "error: uid 5 is no miner" in capfd.readouterr().err
