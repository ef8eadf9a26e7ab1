"""Serves the page of one or several run folders.

    python -m distributed_training.telemetry.page runs/miner
    python -m distributed_training.telemetry.page --port 8010 runs/localnet/{miner,validator}*

To be reached from other machines: ``--host 0.0.0.0`` and a token in ``DT_PAGE_TOKEN``.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import sys
from pathlib import Path

import uvicorn

from distributed_training.common.exits import ExitStatus
from distributed_training.common.ports import listen
from distributed_training.common.processes import die_with_parent
from distributed_training.telemetry.neuron_state import NeuronState

from .server import application

_NICENESS = 10  # training goes first
_CONNECTIONS = 256  # more get 503; fewer than the usual limit of open files, 1024


def main(argv: list[str] | None = None) -> int:
    """Serve the dashboard; return 2 for arguments that cannot work, with one line."""
    parser = argparse.ArgumentParser(prog="python -m distributed_training.telemetry.page")
    parser.add_argument("folders", nargs="+", type=Path, help="run folders")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8010, help="0: any free port")
    parser.add_argument("--with-parent", action="store_true", help="end with whoever started it")
    given = parser.parse_args(argv)
    if given.with_parent:
        # At once: a launcher that is killed while this starts would leave a page behind.
        die_with_parent()
    token = os.environ.get("DT_PAGE_TOKEN", "")
    flags = "--neuron.page_" if given.with_parent else "--"  # as the operator knows them
    host = f"[{given.host}]" if ":" in given.host else given.host
    problem = _problem(given, token, flags)
    if problem is None:
        try:
            listener = listen(given.host, given.port)
        except OSError as error:
            problem = (
                f"the page cannot be served at {host}:{given.port} ({error.strerror}), so there is "
                f"none; training is not affected: give another {flags}port"
            )
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
        return ExitStatus.BAD_CONFIGURATION
    os.nice(_NICENESS)
    # After the port is ours: reading takes seconds, and a port in use is told before.
    neurons = [NeuronState(folder).catch_up() for folder in given.folders]
    print(f"page: http://{host}:{listener.getsockname()[1]}/", flush=True)
    config = uvicorn.Config(
        application(neurons, token=token),
        log_level="critical",  # its warnings are one for each malformed request of anybody
        access_log=False,
        ws="none",
        limit_concurrency=_CONNECTIONS,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[listener])
    return ExitStatus.STOPPED


def _problem(given: argparse.Namespace, token: str, flags: str) -> str | None:
    host, port = given.host, given.port
    for folder in given.folders:
        if not folder.exists() and not given.with_parent:  # who starts both makes it in a moment
            return f"{folder} does not exist, so nothing is served: give run folders"
        if folder.exists() and not folder.is_dir():
            return f"{folder} is no folder, so nothing is served: give run folders"
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        return f"{flags}host {host} is not an IP address, so nothing is served: give e.g. 127.0.0.1"
    if not 0 <= port <= 65535:
        return f"{flags}port {port} is not within 0..65535, so nothing is served: give e.g. 8010"
    if not loopback and len(token) < 16:
        return (
            f"{flags}host {host} is reached from other machines, so nothing is served without a "
            f"token: set DT_PAGE_TOKEN to 16 characters or more, or leave {flags}host at 127.0.0.1"
        )
    return None


if __name__ == "__main__":
    sys.exit(main())
