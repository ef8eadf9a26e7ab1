"""The loop every rank runs: take the next order, carry it out, report.

One iteration is one micro-batch boundary. Rank 0 owns a :class:`~.leader.Leader`, which decides;
the other ranks pass None and obey. No network call happens here: what takes long (averaging,
uploads, downloads) runs in threads and processes of rank 0, and comes back as events.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from distributed_training.miner.orders import ControlChannel, Order, OrderKind

if TYPE_CHECKING:
    from distributed_training.miner.leader import Leader
    from distributed_training.miner.work import Work

log = logging.getLogger(__name__)
