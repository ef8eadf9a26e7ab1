"""Two machines under torchrun, one of them killed: the baseline of ``bench.node_deaths``.

    python -m bench.torchrun_nodes        up to 10 minutes; Linux, as root

Each machine runs torch's elastic agent with what its documents give for jobs that survive a node: a
c10d rendezvous and restarts. Its worker trains the local subnet's model by data parallelism over
gloo. It writes a checkpoint after each step and loads the newest one at its start.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import psutil

from distributed_training.common.ports import free_ports
from distributed_training.localnet.processes import Child
from tests.tools.namespaces import machines

LONGEST = timedelta(minutes=5)  # after this it is given up
_SEQUENCES, _TOKENS = 8, 128  # of a step on each rank


def train(folder: Path) -> None:
    """Run one rank: train until it is ended; each step adds its time to ``folder``/steps."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from transformers import LlamaConfig, LlamaForCausalLM

    from distributed_training.training.memory_plan import local_llama_config

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    model = DistributedDataParallel(LlamaForCausalLM(LlamaConfig(**local_llama_config())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    newest = folder / "checkpoint.pt"
    if newest.exists():
        model.load_state_dict(torch.load(newest))
    while True:
        ids = torch.randint(0, 256, (_SEQUENCES, _TOKENS))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.save(model.state_dict(), written := folder / "checkpoint.tmp")
        written.replace(newest)
        if dist.get_rank() == 0:
            with (folder / "steps").open("a") as steps:
                steps.write(f"{time.time()}\n")


def last_step(folder: Path) -> float:
    """Return the time of the last step of the node of ``folder``, 0 before its first."""
    path = folder / "steps"
    lines = path.read_text().split() if path.exists() else []
    return float(lines[-1]) if lines else 0.0


def step_after_death(folder: Path) -> float | None:
    """Return the seconds from node 1's death and new start to the next step; None: it stays down.

    Raises TimeoutError if the two do not train in the first place.
    """
    network = f"10.{free_ports(1)[0] % 200 + 20}.8"
    with machines(1, network=network, here=True) as (machine,):
        here = f"{network}.254"
        endpoint = f"{here}:{free_ports(1, here)[0]}"

        def node(number: int, address: str, interface: str, prefix: list[str]) -> Child:
            words = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=100"]
            words += ["--rdzv-backend=c10d"]
            words += [f"--rdzv-endpoint={endpoint}", "--rdzv-id=bench", f"--local-addr={address}"]
            # Else an agent that does not know the address for its own waits for another's store.
            words.append(f"--rdzv-conf=is_host={str(number == 0).lower()}")
            own = folder / f"node-{number}"
            command = [*prefix, sys.executable, "-m", "torch.distributed.run", *words]
            return Child(
                name=own.name,
                command=[*command, "-m", "bench.torchrun_nodes", str(own)],
                environment={
                    **os.environ,
                    "PYTHONPATH": str(Path(__file__).parent.parent),
                    # Else gloo announces what the hostname leads to: loopback.
                    "GLOO_SOCKET_IFNAME": interface,
                },
                folder=own,
            )

        bridge = next(
            n for n, of in psutil.net_if_addrs().items() if here in (a.address for a in of)
        )
        nodes = [node(0, here, bridge, []), node(1, machine.address, "eth0", machine.prefix)]
        try:
            for child in nodes:
                child.start()

            def trained(since: float) -> bool:
                return max(last_step(child.folder) for child in nodes) > since

            if not within(LONGEST, lambda: trained(0.0)):
                raise TimeoutError(f"torchrun does not train: {nodes[0].log}")
            nodes[1].kill_tree()
            # A step in which the dead one took part may end a moment later.
            time.sleep(1)
            killed = time.time()
            nodes[1].start()
            if not within(LONGEST, lambda: trained(killed)):
                return None
            return max(last_step(child.folder) for child in nodes) - killed
        finally:
            for child in nodes:
                child.kill_tree()


def within(longest: timedelta, true: Callable[[], bool]) -> bool:
    """Return whether it became true in time."""
    deadline = time.monotonic() + longest.total_seconds()
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.1)
    return False


def main() -> None:
    if len(sys.argv) > 1:
        return train(Path(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        seconds = step_after_death(Path(folder))
    print(
        "torchrun stays down" if seconds is None else f"torchrun trains again after {seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
