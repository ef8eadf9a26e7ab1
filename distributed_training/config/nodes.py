"""Settings of a miner that is more than one machine, and how Slurm's variables are read."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass

from .flags import DAY, HOUR, SECOND, SETTINGS, flag
from .values import Duration

DEFAULT_PORT = 29400  # torchrun's
MOST_NODES = 1024

_HOST = re.compile(
    r"(?:[\w.-]+|\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\])(?::(?P<port>[0-9]{1,5}))?", re.ASCII
)
_SLURM_LIST = re.compile(r"(?P<stem>[\w.-]+)\[(?P<first>[0-9]+)[-,\]][0-9,\]\w\[.-]*", re.ASCII)


def parse_nodes(text: str) -> str:
    """``N`` or ``MIN:MAX``, as torchrun reads it. Raises ValueError."""
    least, _, most = str(text).partition(":")
    numbers = [int(n) for n in (least, most or least) if n.isdecimal() and n.isascii()]
    if len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1] <= MOST_NODES:
        raise ValueError(f"a number of nodes, or MIN:MAX, from 1 to {MOST_NODES}")
    return str(text)


def parse_endpoint(text: str) -> str:
    """``HOST:PORT`` of ``HOST:PORT``, ``HOST``, or a list of nodes as Slurm writes it, whose first
    is node 0: ``gpu[03-07,12]``, ``a1,b[1-2]``. Raises ValueError."""
    text = text.strip()
    if listed := _SLURM_LIST.match(text.partition(",")[0] if "[" not in text else text):
        text = listed["stem"] + listed["first"]
    elif not text.startswith("["):  # an IPv6 address
        text = text.partition(",")[0]
    found = _HOST.fullmatch(text)
    if found is None or int(found["port"] or DEFAULT_PORT) > 65535:
        raise ValueError("HOST:PORT of node 0, such as 10.0.0.1:29400")
    return text if found["port"] else f"{text}:{DEFAULT_PORT}"


@dataclass(frozen=True, config=SETTINGS)
class NodesSettings:
    """Node 0 has wallet, chain, swarm, uploads and page; the others obey its ranks."""

    nnodes: Annotated[str, BeforeValidator(parse_nodes)] = flag("nnodes", "1", env="SLURM_NNODES")
    """machines of this miner; MIN:MAX: training goes on with fewer while some are away"""
    node_rank: int = flag("node_rank", 0, ge=0, le=MOST_NODES - 1, env="SLURM_NODEID")
    """number of this machine, from 0"""
    rdzv_endpoint: Annotated[str, BeforeValidator(parse_endpoint)] | None = flag(
        "rdzv_endpoint", None, env="SLURM_JOB_NODELIST"
    )
    """HOST:PORT at which node 0 listens for the others; what nodes say to each other goes through
    the network interface with that address and nothing else"""
    rdzv_timeout: Duration = flag("rdzv_timeout", 600 * SECOND, ge=SECOND, le=DAY)
    """how long a node tries to reach node 0 for the first time; afterwards it tries without end"""
    node_timeout: Duration = flag("node_timeout", 15 * SECOND, ge=3 * SECOND, le=HOUR)
    """a node not heard of for so long is gone: the others go back to the last checkpoint"""
    node_wait: Duration = flag("node_wait", 30 * SECOND, ge=0 * SECOND, le=DAY)
    """with --nnodes MIN:MAX: how long a start waits for all before it goes on with fewer"""

    @property
    def least(self) -> int:
        """Nodes without which there is no training."""
        return int(self.nnodes.partition(":")[0])

    @property
    def most(self) -> int:
        return int(self.nnodes.rpartition(":")[2])

    @property
    def several(self) -> bool:
        return self.most > 1

    @property
    def leads(self) -> bool:
        """Node 0, or the only one."""
        return self.node_rank == 0 or not self.several
