"""Define the errors that end a neuron's start although its settings passed their checks.

Exit status 2 is for what parsing and the settings themselves can refuse (``load_config``), and for
a subnet that is another network's. All else was learnt from outside (disk, mount, driver, wallet,
chain, store, other machines) and may pass: a ConfigError that is raised later counts as a
NetworkFailure, exit status 1, and is tried again.
"""

from __future__ import annotations

from distributed_training.common.exits import ExitStatus
from distributed_training.config import ConfigError


class NetworkFailure(RuntimeError):
    """The outside cannot be reached; the line says why and what helps."""


class NotRegistered(ConfigError):
    """The hotkey has no uid on the subnet."""


class WrongNetwork(ConfigError):
    """The subnet is another network's.

    Exit status 2: a start cannot help, and none may register there.
    """


class WrongData(ConfigError):
    """``--data.source`` serves other data than the network's file pins. Exit status 2."""


class Deregistered(NotRegistered):
    """The hotkey was registered on an earlier run; it was waited for in vain. Exit status 3."""


class HotkeyInUse(ConfigError):
    """Another miner uses this hotkey. Exit status 3, also if it appears later."""


def exit_status_of(error: Exception) -> ExitStatus:
    """Return the exit status of a start that ``error`` ended after the settings were checked."""
    if isinstance(error, WrongNetwork | WrongData):
        return ExitStatus.BAD_CONFIGURATION
    # The rest may pass. After 2 or 3 pm2 and systemd leave a miner down for good.
    lost = isinstance(error, Deregistered | HotkeyInUse)
    return ExitStatus.DEREGISTERED if lost else ExitStatus.FAULT
