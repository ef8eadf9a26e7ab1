"""A miner of two machines in a local subnet, and either machine dies at each point of its work.

    python -m bench.node_deaths                          the whole table, half an hour
    python -m bench.node_deaths --ways "node 1 killed" --phases upload     a quick look
    python -m bench.node_deaths --nnodes 1:2             node 0 goes on alone meanwhile

Node 1 is a network namespace of its own, joined by a bridge to the machine of everything else: node
0, a miner of one machine, the validator, the chain, the object store. (Linux, as root.)

    node 1 killed       launcher and ranks at once with ``kill -9``; started again at once
    node 1 unplugged    its cable, until node 0 has noticed
    node 0 killed       with all it has, swarm and uploader too; started again at once

With ``--nnodes 1:2`` node 1 comes back only once node 0 trains alone, and is then taken in.

The phases are those of ``bench.kills``, as seen on node 0. The table has for each cell the seconds
until the first inner step of ranks that were started after it. They count from the death, for
node 0 from its new start. It also has how many rounds later everybody took one. After it
the two nodes must have equal weights, to the bit, both miners those that the validator published,
and the next publication must succeed.

The baseline is the subnet's own start in the same run, until the first inner step of this miner.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from bench import kills
from bench.common import folder_or_temporary, parser, some_of, table
from bench.kills import BLOCKS, PHASES, TIMEOUTS, TOLERANCE, Watch
from distributed_training.common.ports import free_ports
from distributed_training.localnet.services import Child, NeuronPlan, Services, SubnetOptions
from distributed_training.localnet.subnet import LocalSubnet, Neuron, SubnetFailure
from tests.tools.namespaces import Machine, machines

KILLED, UNPLUGGED, NODE_0_KILLED = "node 1 killed", "node 1 unplugged", "node 0 killed"
AGAIN = timedelta(seconds=60)  # the goal, at rest
_TIMEOUT = 5  # --node_timeout, seconds
_LONGEST = timedelta(minutes=5)  # until a broken run is given up


@dataclass
class Death:
    way: str
    phase: str
    step_after: float  # seconds; see above
    rounds: int


class TwoNodes(LocalSubnet):
    """A local subnet whose first miner has a second node, on ``machine``. ``here``: the address at
    which that reaches this one."""

    other: Child  # the launcher of node 1

    def __init__(self, *, machine: Machine, here: str, nnodes: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.machine = machine
        self._flags = {
            "nnodes": nnodes,
            "rdzv_endpoint": f"{here}:{free_ports(1, here)[0]}",
            "node_timeout": str(_TIMEOUT),
            "node_wait": "5",
        }
        self.goes_on_alone = ":" in nnodes

    def start(self) -> None:
        super().start()
        self.other.start()

    def _prepare(self, plan: NeuronPlan, services: Services) -> Neuron:
        neuron = super()._prepare(plan, services)
        if plan.kind == "miner" and plan.uid == 0:
            folder = plan.folder.with_name("node-1")
            more = [word for name, value in self._flags.items() for word in (f"--{name}", value)]
            own = [str(folder) if w == str(plan.folder) else w for w in neuron.child.command]
            self.other = Child(
                name="node-1",
                command=[*self.machine.prefix, *own, *more, "--node_rank", "1"],
                environment={n: v for n, v in neuron.child.environment.items() if n[:3] != "R2_"},
                folder=folder,
            )
            neuron.child.command += [*more, "--node_rank", "0"]
        return neuron


#: What strikes, and what brings the node back.
WAYS: dict[str, tuple[Callable[[TwoNodes], object], Callable[[TwoNodes], object]]] = {
    KILLED: (lambda subnet: subnet.other.kill_tree(), lambda subnet: subnet.other.start()),
    UNPLUGGED: (lambda subnet: subnet.machine.unplug(), lambda subnet: subnet.machine.plug()),
    NODE_0_KILLED: (lambda subnet: subnet.kill_miner(0), lambda subnet: subnet.restart_miner(0)),
}


def die(subnet: TwoNodes, way: str, phase: str) -> Death:
    """Wait for the phase, let the node die, and follow the miner until all is well."""
    miner = subnet.miners[0]
    if not kills.in_phase(subnet, [Watch(miner, phase)]):
        raise SubnetFailure(f"{phase} did not come")
    published, began = len(miner.state.uploads), subnet.validator.state.outer_step
    log, since = miner.child.log, time.time()
    before = len(log.read_text(errors="replace"))
    strike, bring_back = WAYS[way]

    def trains() -> float | None:
        return kills.first_step(miner, since, restarted=True)

    def said(line: str) -> bool:
        return line in log.read_text(errors="replace")[before:]

    strike(subnet)
    if subnet.goes_on_alone and way != NODE_0_KILLED:
        subnet.wait_until(lambda: bool(trains()), _LONGEST, f"training alone in {phase}")
    elif way == UNPLUGGED:
        subnet.wait_until(lambda: said("Node 1 is gone"), _LONGEST, "that node 0 notices")
    if way == NODE_0_KILLED:
        since = time.time()
    bring_back(subnet)
    subnet.wait_until(lambda: bool(trains()), _LONGEST, f"training after {way} in {phase}")
    step_after = (trains() or since) - since
    subnet.wait_until(lambda: said("Nodes 0, 1: 2 ranks"), _LONGEST, "both nodes")
    rounds = kills.clean_round(subnet) - began
    subnet.wait_until(
        lambda: len(miner.state.uploads) > published, kills.ROUND, "a publication after it"
    )
    return Death(way, phase, step_after, rounds)


def problems_with_weights(subnet: TwoNodes) -> list[str]:
    """After a round that everybody took. Raises AssertionError, OSError if it came in between."""
    found: list[str] = []
    here, there = (f / "checkpoints" for f in (subnet.miners[0].plan.folder, subnet.other.folder))
    outer_steps = [m.state.outer_step for m in subnet.miners]
    newest = min(outer_steps)
    published = kills.global_weights(subnet, newest)
    own = kills.epoch_start(here, newest)
    if any(not torch.equal(w, kills.epoch_start(there, newest)[n]) for n, w in own.items()):
        found.append(f"outer step {newest}: the nodes began it with different weights")
    for folder in (here, subnet.miners[1].plan.folder / "checkpoints"):
        distance = kills.farthest(kills.epoch_start(folder, newest), published)
        if not distance <= TOLERANCE:
            found.append(f"{folder}: {distance} from the published weights of {newest}")
    names = {p.parent.name for p in here.glob("checkpoint-*/rank-0.json")}
    names &= {p.parent.name for p in there.glob("checkpoint-*/rank-0.json")}
    for name in names:
        one, two = (load_file(f / name / "rank-0.safetensors") for f in (here, there))
        # What a publication left out is known where it is made, and what a rank reads is its own.
        shared = [n for n in one if not n.startswith(("residual/", "pending"))]
        if any(not torch.equal(one[n], two[n]) for n in shared):
            found.append(f"{name} differs between the nodes")
    return found if names else [*found, "the nodes have no checkpoint in common"]


def settled(subnet: TwoNodes) -> list[str]:
    """Checkpoints come and go while they are read, and the next round may come: tried again."""
    deadline = time.monotonic() + kills.ROUND.total_seconds()
    while True:
        subnet.poll()
        try:
            return problems_with_weights(subnet)
        except (OSError, AssertionError, json.JSONDecodeError):
            if time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def run(
    folder: Path,
    cells: Sequence[tuple[str, str]],
    *,
    nnodes: str = "2",
) -> tuple[list[Death], list[str]]:
    """Let a node die for each of ``cells`` (way and phase); print and return what came of it.

    Returns the deaths and what was not well.
    """
    deaths: list[Death] = []
    problems: list[str] = []
    network = f"10.{free_ports(1)[0] % 200 + 20}.7"
    with machines(1, network=network, here=True) as (machine,), contextlib.ExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="nd-"))
        # Short: sockets are made there.
        stack.enter_context(mock.patch.dict(os.environ, TMPDIR=temporary))
        options = SubnetOptions(
            folder=folder / "subnet",
            ranks=(1, 1),
            least_miners=1,
            restart_miners=True,
            blocks_per_allreduce=BLOCKS,
            rules=TIMEOUTS,
        )
        subnet = TwoNodes(
            machine=machine,
            here=f"{network}.254",
            nnodes=nnodes,
            options=options,
            stop_grace=timedelta(seconds=40),
        )
        with subnet:
            kills.clean_round(subnet)
            baseline = subnet.miners[0].state.steps[0].time - subnet.started_at
            for way, phase in cells:
                deaths.append(death := die(subnet, way, phase))
                wrong = settled(subnet)
                problems += [f"{way} in {phase}: {line}" for line in wrong]
                print(f"{way} in {phase}: {death.step_after:.1f} s", *wrong, flush=True)
            assert subnet.services is not None
            with contextlib.closing(subnet.services.open_bucket(subnet.miners[0].plan)) as bucket:
                subnet.wait_until(
                    lambda: not bucket.list_multiparts(), kills.ROUND, "no upload that is stuck"
                )
        problems += subnet.problems
    for death in deaths:
        if death.step_after > AGAIN.total_seconds():
            problems.append(f"{death.way} in {death.phase}: training after {death.step_after} s")
    show(deaths, baseline)
    return deaths, problems


def show(deaths: Sequence[Death], baseline: float) -> None:
    """Print the table; ``baseline``: seconds from a start to the first inner step."""
    titles = ("died", "phase", "next step s", "of a start", "rounds")
    rows = [
        (d.way, d.phase, f"{d.step_after:.1f}", f"{d.step_after / baseline:.2f}x", d.rounds)
        for d in deaths
    ]
    table(titles, rows)
    ratio = statistics.median(death.step_after for death in deaths) / baseline
    print(f"a start takes {baseline:.1f} s, the median death {ratio:.2f}x of it")


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--ways", type=some_of(list(WAYS)), default=list(WAYS))
    arguments.add_argument("--phases", type=some_of(PHASES), default=list(PHASES))
    arguments.add_argument("--nnodes", default="2", help="2, or 1:2")
    arguments.add_argument("--folder", type=Path, help="keep the logs there")
    options = arguments.parse_args()
    cells = list(itertools.product(options.ways, options.phases))
    with folder_or_temporary(options.folder) as folder:
        _, problems = run(folder, cells, nnodes=options.nnodes)
    for problem in problems:
        print(f"PROBLEM: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
