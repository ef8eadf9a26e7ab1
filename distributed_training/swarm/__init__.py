"""The swarm: peers that find each other through a DHT and average their pseudo-gradients.

A round is :meth:`HivemindSwarm.average`: a group is found, the values are averaged with it, the
average is judged. hivemind's network daemon, DHT and averager live in a *swarm host*
(:mod:`.host`), a process of its own, so that whatever hangs or dies there is killed and started
again (:mod:`.keeper`) while training goes on. Orders go through a socket (:mod:`.messages`),
tensors through memory that both map.
"""

from __future__ import annotations

from .host_process import HostLaunch
from .keeper import SwarmUnavailable
from .peer import HivemindSwarm, launch_host

__all__ = ["HivemindSwarm", "HostLaunch", "SwarmUnavailable", "launch_host"]
