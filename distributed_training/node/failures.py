"""Why a node does not start, where it is not simply a setting (ConfigError)."""

from __future__ import annotations

from distributed_training.common.exits import ExitStatus
from distributed_training.config import ConfigError


class NetworkFailure(RuntimeError):
    """The outside cannot be reached; the line says why and what mends it. Exit status 1, so pm2
    tries again. What an operator must change is a ConfigError instead (exit status 2)."""


class NotRegistered(ConfigError):
    """The hotkey has no uid on the subnet."""


class Deregistered(NotRegistered):
    """And it had one when this node ran before. Exit status 3."""


class HotkeyInUse(ConfigError):
    """Another miner runs with it. Exit status 3, as when one comes while this one runs."""


def exit_status_of(error: ConfigError) -> ExitStatus:
    lost = isinstance(error, Deregistered | HotkeyInUse)
    return ExitStatus.DEREGISTERED if lost else ExitStatus.BAD_CONFIGURATION
