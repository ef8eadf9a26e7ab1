"""Bytes that a miner sends from one outer step to the next, counted at its network interface.

Founder and two miners have a machine (a network namespace) each. The first network uploads all and
averages in float32, as the public one does; the second is what ``dt-network init`` writes. A
quarter of an hour on two cores. Run with ``-s`` to see the figures.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.common import table
from distributed_training.common.memory import ModelShape
from distributed_training.common.ports import free_ports
from distributed_training.protocol import keys
from distributed_training.telemetry import read_events
from tests.tools.founded import Founded, founded, outer_steps
from tests.tools.namespaces import Machine, machines
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
GOAL = 3.0  # bytes a parameter in an outer step
UPLOADS = 7  # of an outer step of 80 minutes, at 60 inner steps of 10 s each
FIRST, LAST = 1, 3  # outer steps between which bytes are counted
LONGEST = 1500.0  # seconds to the last one, on a busy machine
MODEL: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 264,
    "hidden_size": 640,
    "intermediate_size": 1728,
    "num_hidden_layers": 2,
    "num_attention_heads": 10,
    "num_key_value_heads": 10,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 256,
    "pad_token_id": 256,
}
PARAMETERS = ModelShape.from_config(MODEL).parameters
RULES = (
    "training.sequence_length=128",
    "training.effective_batch=4",
    "round.blocks_per_allreduce=100",
    "round.allreduce_timeout=80s",
    "round.round_timeout=100s",
    "round.reload_timeout=150s",
)
MINERS = ("first", "second")


def bytes_sent(machine: Machine) -> int:
    """The bytes that the machine has sent by its only interface."""
    command = [*machine.prefix, "cat", "/proc/net/dev"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    (line,) = (line for line in lines if line.strip().startswith("eth0:"))
    return int(line.partition(":")[2].split()[8])


def addresses(machine: Machine) -> list[str]:
    flags = ["--preset", "local", "--axon.ip", "0.0.0.0", "--dht.listen_ip", "0.0.0.0"]
    return [*flags, "--axon.external_ip", machine.address, "--dht.ip", machine.address]


def start(network: Founded, *rules: str) -> None:
    """Create a network with these rules, and let the miners join it."""
    model, founder = network.folder / "config.json", network.machines["founder"]
    model.write_text(json.dumps(MODEL))
    (port,) = free_ports(1)
    url, _ = network.open_front(port)
    network.found(
        *("--model", str(model)),
        *(word for rule in (*RULES, *rules) for word in ("--set", rule)),
        host=founder.address,
        url=url,
        port=port,
        flags=addresses(founder),
    )
    for who in MINERS:
        flags = [*addresses(network.machines[who]), "--neuron.upload_steps", "5"]
        network.join(who, *flags)


def measure(network: Founded, rules: tuple[str, ...]) -> tuple[float, int, float]:
    """The bytes a parameter that a miner sent in an outer step; its uploads; bytes of them."""
    start(network, *rules)
    sent: dict[tuple[str, int], tuple[float, int]] = {}  # by outer step: its time, bytes until then

    def counted() -> bool:
        assert all(program.status is None for program in network.running), network.logs()
        for who in MINERS:
            for step, event in outer_steps(network.run_folder(who)).items():
                at = float(str(event["time"]))
                # Again where the validator did not publish the first one.
                if sent.get((who, step), (0.0, 0))[0] != at:
                    sent[who, step] = at, bytes_sent(network.machines[who])
        return all((who, LAST) in sent for who in MINERS)

    wait_for(counted, f"outer step {LAST} of both", LONGEST, every=0.2)
    network.stop()
    found = []
    for who in MINERS:
        kept = {path.name for path in (network.run_folder(who) / "snapshots").rglob("*")}
        assert keys.GRADIENTS in kept and (keys.MODEL in kept) == bool(rules), kept
        assert any(name.startswith("inner_optimizer") for name in kept) == bool(rules), kept
    for who in MINERS:
        events = list(read_events(network.run_folder(who) / "events.jsonl"))
        for step in range(FIRST, LAST):
            (since, before), (until, after) = sent[who, step], sent[who, step + 1]
            sizes = [
                e["bytes_sent"]
                for e in events
                if e["kind"] == "publication" and since < e["time"] <= until
            ]
            found.append((after - before, len(sizes), sum(sizes)))
    # Not the most: on a busy machine an outer step may take two rounds.
    of_step, uploads, uploaded = statistics.median_low(found)
    return of_step / PARAMETERS, uploads, uploaded / PARAMETERS


def test_a_miner_sends_no_more_than_needed(tmp_path: Path) -> None:
    kinds = {
        "all, float32": ("upload.content=all", "round.compression=none"),
        "what init writes": (),
    }
    rows, sevenfold = [], {}
    for number, (name, rules) in enumerate(kinds.items()):
        with ExitStack() as stack:
            three = stack.enter_context(machines(3))
            places = dict(zip(("founder", *MINERS), three, strict=True))
            (folder := tmp_path / str(number)).mkdir()
            network = stack.enter_context(founded(folder, places))
            sent, uploads, uploaded = measure(network, rules)
        each = uploaded / uploads
        sevenfold[name] = sent - uploaded + UPLOADS * each
        rows.append(
            (name, f"{sent:.2f}", str(uploads), f"{each:.2f}", f"{sent - uploaded:.2f}",
             f"{sevenfold[name]:.2f}")
        )  # fmt: skip
    print(f"\n{PARAMETERS / 1e6:.1f} M parameters, two miners and a validator; bytes a parameter")
    table(("network", "outer step", "uploads", "each", "the rest", f"{UPLOADS} uploads"), rows)
    print(f"goal: at most {GOAL:.0f} with {UPLOADS} uploads")
    assert PARAMETERS >= 10_000_000 and sevenfold["what init writes"] <= GOAL
