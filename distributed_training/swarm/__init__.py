"""The swarm: hivemind's DHT and averager in a process of their own, a round with its deadline.

hivemind forks. Forking a process that holds CUDA, gloo threads or an HTTP server is how deadlocks
are made, so the swarm lives in a *host* process (:mod:`.host`) that may fork as it likes. Rank 0
holds a :class:`HivemindSwarm`: orders go through a pipe, tensors through one shared-memory file,
and a hivemind that hangs is killed, with its daemon, and started again while training goes on.
"""

from __future__ import annotations

from .client import HivemindSwarm
from .memory import MemoryMeetingPoint, MemorySwarm
from .room import Swarm, SwarmUnavailable

__all__ = ["HivemindSwarm", "MemoryMeetingPoint", "MemorySwarm", "Swarm", "SwarmUnavailable"]
