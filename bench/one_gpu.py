"""Run a network of two members on one GPU: four outer steps, a kill, an audit.

    python -m bench.one_gpu                              30 M parameters, about 9 minutes on a GPU
    python -m bench.one_gpu --device cpu --quick         every part at toy size; no figure counts
    python -m bench.one_gpu --json build/one-gpu.json    also writes the figures as they come

Registry, store, validator and both members are processes of this machine. After the first outer
step one member gets ``kill -9`` and starts again. Needs what ``make dev`` installs. The baseline of
utilization is a member that takes its median inner step again and again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from bittensor_core import verify

from bench.common import folder_or_temporary, parser, table
from bench.start import proportional_bytes
from distributed_training.common.llama import llama_config
from distributed_training.common.memory import ModelShape
from distributed_training.common.processes import tree_of
from distributed_training.config import load_config
from distributed_training.localnet.services import SubnetOptions
from distributed_training.localnet.subnet import LocalNeuron, LocalSubnet
from distributed_training.protocol.manifest import Master
from distributed_training.store.bucket_reader import BucketReader
from distributed_training.telemetry import read_events
from distributed_training.training.model import parameter_schema
from distributed_training.validator.replay import ManifestChain

#: Of 30 million parameters, and of a toy.
MODEL = llama_config(
    hidden=512, layers=8, heads=8, kv_heads=8, intermediate=1408, vocab=4096, max_positions=512
)
TOY = llama_config(
    hidden=64, layers=2, heads=2, kv_heads=2, intermediate=128, vocab=264, max_positions=64
)
KILLED = 0  # the first member
_LONGEST = timedelta(minutes=9)
_LOOK = 2.0  # seconds between two looks at memory


def judged_seconds(validator: LocalNeuron) -> list[float]:
    """Return how long the validator judged each upload, without its transfer."""
    began: dict[tuple[int, str], float] = {}
    found = []
    for event in read_events(validator.folder / "events.jsonl"):
        key = (event.get("uid", -1), event.get("revision", ""))
        if event["kind"] == "upload_seen":
            began[key] = event["time"]
        elif event["kind"] == "upload_scored" and key in began:
            found.append(event["time"] - began.pop(key))
    return found


def gpu_bytes(neuron: LocalNeuron) -> int:
    """Return the GPU memory of all processes of ``neuron``, as nvidia-smi says; 0: it has none."""
    ask = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    own = {process.pid for process in tree_of(neuron.pid or 0)}
    used = [line.split(",") for line in listed.splitlines() if "," in line]
    return sum(int(size) << 20 for pid, size in used if int(pid) in own)


def member_row(miner: LocalNeuron) -> tuple[str, str, str, str]:
    """Return name, inner step, utilization and seconds held of one member."""
    steps = list(miner.state.steps)
    first, last = miner.state.outer_steps[0][1], miner.state.outer_steps[-1][1]
    counted = [step for step in steps if first < step.time <= last]
    median = statistics.median(step.seconds for step in counted)
    taken = miner.state.outer_steps[-1][0] - miner.state.outer_steps[0][0]
    held = sum(step.between_seconds or 0.0 for step in counted)
    share = len(counted) * median / (last - first)
    return (
        miner.name,
        f"{median:.2f} s",
        f"{share:.1%} of a lone member's steps",
        f"held {held / max(1, taken):.1f} s per outer step",
    )


def audit(subnet: LocalSubnet, folder: Path) -> str:
    """Compute every outer step again from the bucket, as ``dt-network audit`` does.

    Raises RuntimeError if something does not fit.
    """
    words = ["--network", str(subnet.network)]
    config = load_config("validator", words, check=False, dotenv=None)
    master = Master(config.swarm.run_id, config.miner.master_ss58_address, verify)
    with contextlib.closing(subnet.open_bucket()) as bucket:
        schema = parameter_schema(subnet.options.rules["model.config"])
        began = time.monotonic()
        found = ManifestChain(BucketReader(bucket), schema, folder, master).audit()
    if found.problems:
        raise RuntimeError(f"the audit found what does not fit: {'; '.join(found.problems)}")
    seconds = time.monotonic() - began
    return f"{found.outer_step} outer steps fit, in {seconds:.1f} s"


def measure(subnet: LocalSubnet, folder: Path, outer_steps: int) -> Iterator[tuple[str, ...]]:
    """Start ``subnet``, kill a member, and yield rows as they are known."""
    subnet.wait_for_outer_steps(1, _LONGEST)
    subnet.kill_miner(KILLED)
    subnet.restart_miner(KILLED)
    memory: dict[str, list[tuple[int, int]]] = {}
    looked = 0.0

    def reached() -> bool:
        nonlocal looked
        if time.monotonic() >= looked + _LOOK:
            looked = time.monotonic()
            for neuron in subnet.neurons:
                used = proportional_bytes(neuron), gpu_bytes(neuron)
                memory.setdefault(neuron.name, []).append(used)
        return all(
            miner.state.outer_steps and miner.state.outer_steps[-1][0] >= outer_steps
            for miner in subnet.miners
        )

    subnet.wait_until(reached, _LONGEST, f"outer step {outer_steps}")
    for miner in subnet.miners:
        yield member_row(miner)
    seconds = judged_seconds(subnet.validator)
    yield (
        "judge, per upload",
        f"{statistics.median(seconds):.2f} s",
        f"{len(seconds)} uploads",
        "",
    )
    for name, found in memory.items():
        host, device = (max(each) / 1e9 for each in zip(*found, strict=True))
        yield (
            f"{name}, most memory",
            f"{host:.2f} GB of the host",
            f"{device:.2f} GB of the GPU",
            "",
        )
    yield ("audit", audit(subnet, folder / "audit"), "", "")


def options_of(arguments: argparse.Namespace, folder: Path) -> SubnetOptions:
    """Return the network: both members and the validator at the same device."""
    config = TOY if arguments.quick else MODEL
    count = ModelShape.from_config(config).parameters
    length = config["max_position_embeddings"]
    device = ("--neuron.device", arguments.device)
    return SubnetOptions(
        folder=folder / "network",
        ranks=(1, 1),
        outer_steps=arguments.outer_steps,
        period=arguments.period,
        least_miners=1,  # the other may be starting again
        miner_flags=device,
        validator_flags=device,
        rules={
            "private": True,
            "model.config": {key: value for key, value in config.items() if value is not None},
            "model.parameters": count,
            "training.sequence_length": length,
            "training.effective_batch": 4 if arguments.quick else 64,
            "data.max_length": 2 * length,
        },
    )


def main(argv: list[str] | None = None) -> int:
    words = parser(__doc__)
    words.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    words.add_argument("--quick", action="store_true", help="a toy model")
    words.add_argument("--outer-steps", type=int, default=4, help="[4]")
    words.add_argument("--period", type=float, default=75, help="seconds from close to close [75]")
    words.add_argument("--folder", type=Path, help="keep the logs there")
    words.add_argument("--json", type=Path, help="write the rows there as they come")
    arguments = words.parse_args(argv)
    rows = []
    with folder_or_temporary(arguments.folder) as folder:
        subnet = LocalSubnet(
            options=options_of(arguments, folder), tell=lambda line: print(line, flush=True)
        )
        with subnet:
            for row in measure(subnet, folder, arguments.outer_steps):
                rows.append(row)
                if arguments.json:
                    arguments.json.write_text(json.dumps(rows, indent=1))
    table(("", "", "", ""), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
