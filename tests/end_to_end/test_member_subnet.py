"""Both kinds of member in one network: the daemon, and a plain loop that joined by ten lines."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import GUEST, LocalSubnet
from distributed_training.telemetry import read_events
from distributed_training.telemetry.run_state import observe
from distributed_training.telemetry.verdict import judge
from tests.tools.subnet_tools import paced

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]
OUTER_STEPS = 10
LOOP = """
import json, sys, time
import torch
from transformers import AutoConfig, AutoModelForCausalLM
import distributed_training

config = json.load(open(sys.argv[1]))
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if __name__ == "__main__":
    with distributed_training.join(None, model, optimizer) as net:
        for ids in net.batches():
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            net.step(loss=loss)
            time.sleep(0.5)  # the cores are the others' too
"""


@contextlib.contextmanager
def running(
    folder: Path, config: Path, environ: dict[str, str], log: Any
) -> Iterator[subprocess.Popen[bytes]]:
    words = [sys.executable, "loop.py", str(config)]
    process = subprocess.Popen(words, cwd=folder, env=environ, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def starts_of(folder: Path) -> dict[int, dict[str, torch.Tensor]]:
    """Return the epoch-start weights of each outer step that a checkpoint is left of."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for path in (folder / "checkpoints").glob("checkpoint-*/rank-0.json"):
        content = json.loads(path.read_text())
        epoch = f"epoch-{content['state']['epoch_id']}-of-1"
        with safe_open(folder / "checkpoints" / epoch / "rank-0.safetensors", "pt") as file:
            names = [name for name in file.keys() if name.startswith("epoch_start/")]  # noqa: SIM118
            found[content["progress"]["outer_step"]] = {n: file.get_tensor(n) for n in names}
    return found


def test_daemon_and_script_begin_ten_outer_steps_with_equal_weights(tmp_path: Path) -> None:
    options = SubnetOptions(
        folder=tmp_path / "subnet",
        exchange="store",
        ranks=(1,),
        outer_steps=OUTER_STEPS,
        period=30,
        least_miners=1,
        rules={"round.grace": "10s"},
        miner_flags=("--neuron.stop_timeout", "60"),
    )
    longest = timedelta(seconds=1000)
    with LocalSubnet(options=paced(options, samples=4)) as subnet:
        subnet.invite()
        daemon, folder = subnet.miners[0].plan.folder, subnet.folder / GUEST
        place = daemon / "exchange" / "weights"
        subnet.wait_until(lambda: any(place.glob("*/config.json")), longest, "the first weights")
        (config,) = place.glob("*/config.json")
        (folder / "loop.py").write_text(LOOP)
        assert subnet.services is not None
        environ = subnet.services.environment(subnet.miners[0].plan)
        with (folder / "log.txt").open("w") as log, running(folder, config, environ, log) as loop:
            subnet.wait_for_outer_steps(OUTER_STEPS, longest)
            run = folder / "run"

            def reached() -> bool:
                assert loop.poll() is None, (folder / "log.txt").read_text()[-3000:]
                steps = [e["outer_step"] for e in read_events(run / "events.jsonl", "outer_step")]
                return max(steps, default=0) >= OUTER_STEPS

            subnet.wait_until(reached, timedelta(seconds=120), "the script's outer steps")
            found = judge(observe(run, time.time()), time.time())
            loop.send_signal(signal.SIGINT)
            assert loop.wait(60) in (-2, 130, 1), (folder / "log.txt").read_text()[-3000:]
        ours, theirs = starts_of(run), starts_of(daemon)
    both = sorted(ours.keys() & theirs.keys())
    assert both and both[-1] >= OUTER_STEPS - 1, (both, found)
    for outer_step in both:
        assert ours[outer_step].keys() == theirs[outer_step].keys()
        for name, weights in ours[outer_step].items():
            assert torch.equal(weights, theirs[outer_step][name]), (outer_step, name)
    merged = [e for e in read_events(run / "events.jsonl", "round") if e["base"] == "merged"]
    print(f"{len(both)} outer steps equal to the bit, {len(merged)} uploads of the script merged")
    assert len(merged) >= OUTER_STEPS // 2
