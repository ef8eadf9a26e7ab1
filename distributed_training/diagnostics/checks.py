"""One finding of the doctor, and the checks that need neither torch nor network."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Check:
    """What was looked at, what was found (or why it was not looked at), and the command or flag
    that mends it."""

    name: str
    status: Status
    finding: str
    remedy: str = ""

    @property
    def line(self) -> str:
        """As one error line."""
        return f"{self.finding}: {self.remedy}" if self.remedy else self.finding


def failed(checks: Sequence[Check]) -> bool:
    return any(check.status == "fail" for check in checks)


def check_port(flag: str, port: int, *, udp: bool = False) -> Check:
    """Whether ``port`` can be listened on, at all addresses of this machine."""
    name = f"port {flag}"
    if port == 0:
        return Check(name, "ok", "a free one is taken")
    kinds = [socket.SOCK_STREAM] + ([socket.SOCK_DGRAM] if udp else [])
    for kind in kinds:
        with socket.socket(socket.AF_INET, kind) as probe:
            if kind == socket.SOCK_STREAM:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # skip TIME_WAIT
            try:
                probe.bind(("0.0.0.0", port))
                if kind == socket.SOCK_STREAM:
                    probe.listen(1)
            except OSError as error:
                in_use = error.errno == errno.EADDRINUSE
                why = "in use" if in_use else (error.strerror or "not usable")
                return Check(
                    name,
                    "fail",
                    f"port {port} (--{flag}) is {why}, so peers could not reach this miner",
                    f"stop what listens there (ss -ltnup 'sport = :{port}') or give --{flag} "
                    "another port",
                )
    return Check(name, "ok", f"{port} is free")


def check_disk(folder: Path, *, needed_bytes: int) -> Check:
    """Whether ``folder``'s file system has ``needed_bytes`` free and can be written."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    finding = f"{free / 1e9:.1f} GB free in {folder}, {needed_bytes / 1e9:.1f} GB needed"
    if not os.access(place, os.W_OK):
        return Check(
            "disk",
            "fail",
            f"{place} cannot be written by this user, so nothing could be saved",
            "give --neuron.run_folder a folder of yours",
        )
    if free < needed_bytes:
        return Check(
            "disk",
            "fail",
            f"{finding}, so checkpoints and uploads would fail",
            "free space, lower --neuron.keep_checkpoints, or give --neuron.run_folder elsewhere",
        )
    if free < 2 * needed_bytes:
        return Check("disk", "warn", finding, "free space soon: less than twice the need is left")
    return Check("disk", "ok", finding)
