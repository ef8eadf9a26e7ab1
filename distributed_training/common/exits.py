"""The exit statuses of all programs here; pm2, systemd and the launcher act on a neuron's."""

from __future__ import annotations

import enum


class ExitStatus(enum.IntEnum):
    """The exit statuses of a neuron.

    pm2 starts the process again after STOPPED and FAULT (``stop_exit_codes`` in app.config.js): it
    calls a process that a signal killed 0 as well.
    """

    STOPPED = 0  # as asked
    FAULT = 1  # a start may help
    BAD_CONFIGURATION = 2  # parsing, the settings themselves, or for minutes node 0 refuse them
    DEREGISTERED = 3  # the hotkey had no uid for long, or another miner runs with it
    INTERRUPTED = 130  # commands: by Ctrl-C, after which a neuron ends with STOPPED
