"""The configuration of a test that needs a network, and none in particular."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distributed_training import config
from distributed_training.config import Config
from distributed_training.config.model import Kind
from distributed_training.config.types import NoNetworkNamed


def load_config(kind: Kind, argv: Sequence[str], **how: Any) -> Config:
    """Load it as the programs do, but by the public network's rules where no network is named."""
    try:
        return config.load_config(kind, argv, **how)
    except NoNetworkNamed:
        return config.load_config(kind, ["--network", "sn38", *argv], **how)
