"""Members of a store network behind a wall: nothing comes in, and only store and registry go out.

Founder and two members have a machine (a network namespace) each, an empty home and two commands.
What each member sends and receives from one outer step to the next is counted at its network
interface. A quarter of an hour on two cores. Run with ``-s`` to see the figures.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import time
from datetime import timedelta
from pathlib import Path

import pytest

from distributed_training.common.llama import llama_config
from distributed_training.common.memory import ModelShape
from distributed_training.telemetry import read_events
from testbed.namespaces import Machine, machines
from tests.end_to_end.test_founder_run import PATIENCE, TREE, call, start
from tests.end_to_end.test_store_join import RULES
from tests.tools.founded import outer_steps
from tests.tools.settings import LOCAL
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
REGISTRY, STORE = 8100, 9000  # ports of the founder
MODEL = llama_config(
    hidden=640, layers=2, heads=10, kv_heads=10, intermediate=1728, vocab=264, max_positions=128
)
PARAMETERS = ModelShape.from_config(MODEL).parameters
FIRST, LAST = 2, 6  # outer steps between which bytes are counted
JOINED = 600.0  # seconds from an empty home to an upload that is merged
#: By bits of an upload's value: most bytes per parameter in an outer step that a member sends and
#: receives, with all polls. An update always has 4 bits per value.
GOALS = {4: {"sent": 0.55, "received": 0.55}, 2: {"sent": 0.3, "received": 0.55}}
LONGEST = 2400.0  # seconds to the last outer step, on a busy machine
WALL = f"""
table inet wall {{
    chain input {{
        type filter hook input priority 0; policy drop;
        ct state established,related accept
        iifname "lo" accept
    }}
    chain output {{
        type filter hook output priority 0; policy drop;
        ct state established,related accept
        oifname "lo" accept
        ip daddr FOUNDER tcp dport {{ {REGISTRY}, {STORE} }} accept
    }}
}}
"""


def traffic(machine: Machine) -> tuple[int, int]:
    """Return the bytes that a machine has sent and received by its only interface."""
    command = [*machine.prefix, "cat", "/proc/net/dev"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    (line,) = (line for line in lines if line.strip().startswith("eth0:"))
    fields = line.partition(":")[2].split()
    return int(fields[8]), int(fields[0])


def found(home: Path, host: str, bits: int) -> str:
    """Create the network and print how to run it; return the command's words."""
    home.mkdir()
    (home / "config.json").write_text(json.dumps(MODEL))
    own = ("training.sequence_length=128", "training.effective_batch=4")
    own += ("round.period=100", "round.grace=30s", f"round.codec={bits}-bit")
    words = ["init", "lab", "--name", "lab", "--registry", f"http://{host}:{REGISTRY}"]
    words += ["--miners", "2", "--model", "config.json", "--data-source", "stdlib"]
    words += ["--store", "embedded", *RULES]
    words += [w for rule in own for w in ("--set", rule)]
    printed = call(home, "dt-network", *words)
    with (home / "lab" / "run.toml").open("a") as file:
        file.write('"neuron.page_port" = "off"\n')
    (line,) = re.findall(r"^  dt-network (run lab)$", printed, re.M)
    return line


@pytest.mark.parametrize("bits", GOALS)
def test_a_member_needs_two_commands_and_sends_only_its_upload(tmp_path: Path, bits: int) -> None:
    founder = tmp_path / "founder"
    with machines(3) as (host, *others):
        members = {tmp_path / f"member-{n}": machine for n, machine in enumerate(others)}
        for machine in others:
            rules = WALL.replace("FOUNDER", host.address)
            subprocess.run([*machine.prefix, "nft", "-f", "-"], input=rules, text=True, check=True)
        running = []
        try:
            line = found(founder, host.address, bits)
            with host.inside():
                running.append(start(founder, "dt-network", *line.split()))
            invitation = founder / "lab" / "invitation.txt"
            log = running[0][1]
            wait_for(
                lambda: "Outer step 0, held-out loss" in log.read_text(),
                "a model",
                PATIENCE,
                every=0.5,
            )
            token = re.search(r"^dt-join (\S+)$", invitation.read_text(), re.M)
            assert token is not None
            began = time.time()
            for home, machine in members.items():
                home.mkdir()
                with machine.inside():
                    call(home, "dt-join", token[1], *LOCAL, status=(0, 1))
                    running.append(start(home, "dt-miner", *LOCAL))
            counted: dict[tuple[Path, int], tuple[int, int]] = {}

            def last() -> bool:
                for process, its_log in running:
                    assert process.poll() is None, its_log.read_text()[-3000:]
                for home, machine in members.items():
                    for step in outer_steps(home / "runs" / "miner-default"):
                        if (home, step) not in counted:
                            counted[home, step] = traffic(machine)
                return all((home, LAST) in counted for home in members)

            wait_for(last, f"outer step {LAST} of both", LONGEST, every=0.2)
            events = list(read_events(founder / "lab" / "validator" / "events.jsonl"))
        except BaseException:
            for path in tmp_path.glob("*/*.log"):
                print(f"===== {path}\n{path.read_text()[-4000:]}")
            raise
        finally:
            for process, _ in running[::-1]:
                process.terminate()
            for process, _ in running:
                try:
                    process.wait(120)
                except subprocess.TimeoutExpired:
                    process.kill()
            TREE.end(timedelta(seconds=5))
    taken = [e for e in events if e["kind"] == "outer_step"]
    joined = next(e["time"] for e in taken if len(e["participants"]) == 2) - began
    whole = [e["outer_step"] for e in taken if len(e["participants"]) == 2]
    size = f"{PARAMETERS / 1e6:.1f} M parameters, {bits} bits a value up"
    print(f"\n{size}, two members, outer steps {FIRST} to {LAST}, bytes a parameter in each")
    means = {}
    for name, column in (("sent", 0), ("received", 1)):
        each = [
            (counted[home, step + 1][column] - counted[home, step][column]) / PARAMETERS
            for home in members
            for step in range(FIRST, LAST)
        ]
        means[name] = statistics.mean(each)
        print(f"{name} {means[name]:.3f} (least {min(each):.3f}, most {max(each):.3f})")
    print(f"from two empty homes to an update of both uploads: {joined:.0f} s; {len(whole)} such")
    assert joined <= JOINED
    assert all(mean <= GOALS[bits][name] for name, mean in means.items()), means
