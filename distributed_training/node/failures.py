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


def exit_status_of(error: ConfigError) -> ExitStatus:
    deregistered = isinstance(error, Deregistered)
    return ExitStatus.DEREGISTERED if deregistered else ExitStatus.BAD_CONFIGURATION
