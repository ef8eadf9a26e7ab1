"""What every part of one run of the program shares."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """``folder`` keeps what must not be lost; ``record(kind, **fields)`` writes an event (see
    ``events``); ``stop`` is set when the program should end."""

    folder: Path
    record: Callable[..., None]
    stop: threading.Event
