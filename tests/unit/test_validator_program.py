"""The validator put together from a configuration, with twins for what lies outside of it."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from validator_world import (
    LENGTH,
    MODEL_CONFIG,
    VOCABULARY,
    MemoryBucket,
    TwinClient,
    TwinMiner,
    TwinSwarm,
    World,
    sequences,
    settings,
)

from distributed_training.config import Config, ConfigError, load_config
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import Metadata
from distributed_training.telemetry import read_events
from distributed_training.validator import program
from distributed_training.validator.buckets import BucketError

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def root_logger() -> Any:
    """The program sets up logging for its process; here the process is pytest's."""
    root, hooks = logging.getLogger(), (sys.excepthook, threading.excepthook)
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level
    sys.excepthook, threading.excepthook = hooks


class Words:
    """A tokenizer and a page source: each row is a line of the learnable text."""

    def encode_rows(self, rows: list[str], *, max_length: int) -> np.ndarray:
        return np.array([int(word) for row in rows for word in row.split()], dtype=np.int32)

    def num_rows(self) -> dict[str, int]:
        return {"text": 100_000}

    def rows(self, config: str, row: int, *, split: str, limit: int) -> list[str]:
        return [" ".join(map(str, line.tolist())) for line in sequences(row, 4)]


class ClosingSwarm(TwinSwarm):
    closed = False

    def close(self) -> None:
        self.closed = True


class Outside:
    def __init__(self, tmp_path: Path) -> None:
        self.world = World(tmp_path / "unused", settings())
        self.world.chain_ledger.register("validator", uid=200, stake=1e5, validator_permit=True)
        self.miners: dict[int, TwinMiner] = self.world.miners
        self.bucket = MemoryBucket()
        self.swarm: ClosingSwarm | None = None

    def connect(self, config: Config, folder: Path, stack: ExitStack) -> program.Outside:
        client = TwinClient(self.miners, None)  # type: ignore[arg-type]

        def swarm(schema: Any) -> ClosingSwarm:
            self.swarm = client.swarm = ClosingSwarm(schema)
            return self.swarm

        def open_bucket(uid: int, credentials: Any) -> MemoryBucket:
            assert credentials.account_id == f"{uid:032d}"
            if uid not in self.miners:
                raise BucketError("403")
            return self.miners[uid].bucket

        return program.Outside(
            hotkey="validator",
            chain=self.world.chain,
            client=client,
            bucket=self.bucket,
            open_bucket=open_bucket,
            tokenizer=Words(),
            vocabulary=VOCABULARY,
            eos_id=0,
            source=Words(),
            unavailable=(OSError,),
            held_out=sequences(5, 8),
            swarm=swarm,
        )


def _config(tmp_path: Path, *flags: str) -> Config:
    model = tmp_path / "model.json"
    model.write_text(json.dumps(MODEL_CONFIG))
    words = {
        "preset": "local",
        "neuron.run_folder": str(tmp_path / "run"),
        "neuron.sequence_length": str(LENGTH),
        "validator.model_config": str(model),
        "validator.tick": "0.01",
        "validator.score_blocks": "5",
        "validator.evaluation_ranks": "1",
        "validator.alive_least": "1",
        "wallet.name": "w",
    }
    argv = [word for name, value in words.items() for word in (f"--{name}", value)]
    return load_config("validator", [*argv, *flags], environ={}, dotenv=None, check=False)


def _wait(condition: Any, seconds: float = 80.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not reached in time"
        time.sleep(0.01)


def test_it_starts_trains_a_round_scores_and_stops(tmp_path: Path) -> None:
    outside = Outside(tmp_path)
    config = _config(tmp_path)
    result: list[int] = []
    stop = threading.Event()

    def run() -> None:
        with ExitStack() as stack:
            parts = outside.connect(config, tmp_path / "run", stack)
            validator, initial = program.build(
                config, parts, folder=tmp_path / "run", stop=stop, stack=stack
            )
            validator.start(initial)
            for uid in outside.world.uids:
                outside.miners[uid] = TwinMiner(uid, validator.state)
            outside.world.train_and_publish()
            validator.run()
            result.append(validator.state.outer_step)

    (tmp_path / "run").mkdir()
    runner = threading.Thread(target=run)
    runner.start()
    events = tmp_path / "run" / "events.jsonl"

    def seen(kind: str) -> list[dict[str, Any]]:
        return list(read_events(events, kind)) if events.exists() else []

    try:
        _wait(lambda: len(outside.miners) == 2 and seen("scores"))
        outside.world.chain_ledger.advance(60)
        _wait(lambda: seen("outer_step"))
    finally:
        stop.set()
        runner.join(10)
    assert not runner.is_alive() and result == [1]
    assert outside.swarm is not None and outside.swarm.closed
    scored = {e["uid"]: e for e in seen("upload_scored")}
    assert scored[3]["ok"] and scored[3]["random_after"] < scored[3]["random_before"]
    assert seen("round")[0]["ok"] and seen("stop")
    held_out = seen("held_out")
    assert held_out[-1]["after"] < held_out[-1]["before"]
    root = Metadata.parse(outside.bucket.objects[keys.ROOT_METADATA][0])
    assert (root.outer_step, root.inner_step) == (1, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_status_0(tmp_path: Path, number: int) -> None:
    outside = Outside(tmp_path)
    config = _config(tmp_path)
    before = signal.getsignal(number)

    def shoot() -> None:
        events = tmp_path / "run" / "events.jsonl"
        _wait(lambda: events.exists() and list(read_events(events, "held_out")))
        os.kill(os.getpid(), number)

    shooter = threading.Thread(target=shoot)
    shooter.start()
    assert program.run_validator(config, connect=outside.connect) == 0
    shooter.join(10)
    assert signal.getsignal(number) == before
    assert outside.swarm is not None and outside.swarm.closed


def test_a_signal_while_it_still_starts(tmp_path: Path) -> None:
    def connect(config: Config, folder: Path, stack: ExitStack) -> program.Outside:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)  # a DHT that does not answer
        raise AssertionError("not interrupted")

    began = time.monotonic()
    assert program.run_validator(_config(tmp_path), connect=connect) == 0
    assert time.monotonic() - began < 5


def test_faults_and_bad_configuration_have_their_statuses(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outside = Outside(tmp_path)
    outside.bucket.down = True
    assert program.run_validator(_config(tmp_path), connect=outside.connect) == 1
    bad = tmp_path / "bad.json"
    bad.write_text('{"model_type": "llama", "vocab_size": 3}')
    outside.bucket.down = False
    config = _config(tmp_path, "--validator.model_config", str(bad))
    assert program.run_validator(config, connect=outside.connect) == 2
    shown = capfd.readouterr()
    assert "fewer words" in shown.err and "Traceback" not in shown.out + shown.err


def test_the_default_model_fits_the_tokenizer(tmp_path: Path) -> None:
    import dataclasses

    config = _config(tmp_path)
    plain = dataclasses.replace(
        config, validator=dataclasses.replace(config.validator, model_config=None)
    )
    with ExitStack() as stack:
        parts = Outside(tmp_path).connect(config, tmp_path, stack)
    model = program._new_model(plain, parts)
    assert model["vocab_size"] == VOCABULARY and model["max_position_embeddings"] == LENGTH
    assert model["eos_token_id"] == 0


def test_cuda_without_a_gpu_is_said_plainly() -> None:
    if torch.cuda.is_available():
        assert program._device("cuda").type == "cuda"
        return
    with pytest.raises(ConfigError, match=r"--neuron\.device cpu"):
        program._device("cuda")
    assert program._device("auto").type == "cpu"


def test_a_neuron_without_a_commitment_has_no_bucket(tmp_path: Path) -> None:
    outside = Outside(tmp_path)
    with ExitStack() as stack:
        parts = outside.connect(_config(tmp_path), tmp_path, stack)
    with pytest.raises(BucketError, match="uid 9"):
        program.bucket_by_commitment(parts, 9, "nobody")
