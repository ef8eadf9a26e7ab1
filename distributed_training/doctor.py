"""Check the machine, the configuration, the keys, the chain and the data before training.

    dt-doctor [--json] [--model SIZE|config.json] [--uid N] [--offline] [--script]
              [flags of dt-miner]...
    dt-doctor --probe HOST[:PORT]
    dt-doctor --notify
    dt-doctor --bundle FILE.tar.gz [--log FILE]

    dt-doctor                                  the network that miner.toml names
    dt-doctor --network local --offline        only this machine
    dt-doctor --model 1b --nproc_per_node 4    another model, four ranks
    dt-doctor --script                         for a script of yours that reads its own text
    dt-doctor --probe 203.0.113.7              check that this DHT peer's port is open from here
    dt-doctor --probe 203.0.113.7:48009        the same for a rented container's public port
    dt-doctor --bundle help.tar.gz             pack findings, log, settings, events and versions for
                                               a helper, with secrets masked (--log: without pm2)
    dt-doctor --notify                         send a test message to the service at DT_NOTIFY_URL

It takes every flag of dt-miner, and reads .env and the environment, so its result is valid for a
miner that is started in the same way. That miner checks its machine in the same way. The doctor
changes and trains nothing, and deletes again what it writes to a bucket. `python -m
distributed_training doctor` and scripts/diagnose.py do the same. Exit status: 0 nothing failed
(warnings are allowed), 1 something failed, 2 a flag is wrong, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distributed_training import NO_HELP
from distributed_training.common.llama import read_config
from distributed_training.common.memory import ModelShape
from distributed_training.common.processes import members, sessions_of
from distributed_training.common.webhook import NotSent, service_of
from distributed_training.config import (
    OPERATORS_FILE,
    Config,
    ConfigError,
    exit_with,
    load_config,
)
from distributed_training.config.installed import require
from distributed_training.config.loader import Parser, argument, ranged
from distributed_training.config.model import extras_of_network
from distributed_training.config.settings import SwarmSettings
from distributed_training.config.types import File, is_ip
from distributed_training.health import machine
from distributed_training.health.bundle import find_log, write_bundle
from distributed_training.health.machine import Examination
from distributed_training.miner.launcher import ranks_of
from distributed_training.miner.run_folder import launcher_of, listening_ranks
from distributed_training.protocol.lines import counted
from distributed_training.protocol.types import Check, ExitStatus
from distributed_training.telemetry.notify import deliver
from distributed_training.telemetry.run_state import observe
from distributed_training.telemetry.verdict import judge

_MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red"), "skip": ("-", "dim")}
_WIDTH = 160  # width without a terminal


def examine(examination: Examination) -> list[Check]:
    """Run all checks. No error needs to be caught, because each check reports its own."""
    checks = [check_verdict, *machine.CHECKS]
    if not examination.config.leads:
        why_not = "only node 0 contacts the chain, the bucket and peers"
    elif examination.offline:
        why_not = "--offline: the chain, the bucket and the data were not checked"
    else:
        # Import this here, so that --help and a refusal do not wait for the chain's client.
        from distributed_training.health import outside

        checks += outside.CHECKS
        why_not = ""
    for check in checks:
        examination.found += check(examination)  # later checks look up what failed before them
    if why_not:
        examination.found.append(Check("network", "skip", why_not))
    return examination.found


def read_model(wanted: str) -> tuple[dict[str, Any], str]:
    """Return the ``config.json`` that ``--model`` names, and the flag. Raises ConfigError."""
    try:
        content = read_config(wanted)
        ModelShape.from_config(content)
    except ValueError as error:
        raise ConfigError(
            f"--model {wanted}: {error}, so nothing was checked: choose a known size or the "
            "config.json of a Llama-like model"
        ) from None
    return content, f"--model {wanted}"


def build_parser() -> Parser:
    parser = Parser(add_help=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", type=argument(str))
    parser.add_argument("--uid", type=ranged(0, 65535))
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--script", action="store_true")
    parser.add_argument("--probe", type=argument(str))
    parser.add_argument("--notify", action="store_true")
    parser.add_argument("--bundle", type=argument(File))
    parser.add_argument("--log", type=argument(File))
    parser.add_argument("-h", "--help", action="store_true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options, flags = build_parser().parse_known_args(argv)
    if options.help:
        print(__doc__ or NO_HELP)
        return 0
    logging.disable(logging.CRITICAL)  # libraries log their retries; the findings show the result
    try:
        if options.probe:
            return report([probe(*probed(options.probe))], as_json=options.json)
        config = load_config("miner", flags, file=OPERATORS_FILE, check=False)
        config = dataclasses.replace(config, of_script=options.script)
        require(**extras_of_network(config))
        if options.bundle and os.path.lexists(options.bundle):
            raise ConfigError(
                f"--bundle {options.bundle} exists already, so nothing was written: choose another "
                "name"
            )
        if options.notify:
            return report([try_webhook(config)], as_json=options.json)
        ranks, ports = listening_ranks(config.run_folder).values(), set()
        processes = members(sessions_of(ranks))
        # Ask all processes of a running miner, because its ports belong to different processes. The
        # DHT peer's port, for example, belongs to p2pd.
        for process in processes:
            with contextlib.suppress(psutil.Error):
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr:
                        ports.add(connection.laddr.port)
        examination = Examination(
            config=config,
            ranks=ranks_of(config),
            model=read_model(options.model) if options.model else None,
            offline=options.offline,
            uid=options.uid,
            running=bool(processes),
            own_ports=frozenset(ports),
        )
        status = report(examine(examination), as_json=options.json)
        if options.bundle:
            launcher = launcher_of(config.run_folder)
            log = options.log or find_log(launcher.pid if processes and launcher else None)
            lines = write_bundle(options.bundle, config, examination.found, log=log)
            print(f"{options.bundle} holds, secrets masked:", *lines, sep="\n", file=sys.stderr)
            if log is None:
                print("No log was found: name it with --log FILE", file=sys.stderr)
        return status
    except ConfigError as error:
        return exit_with(error)
    except KeyboardInterrupt:
        print("interrupted, so there is no result: run the same command again", file=sys.stderr)
        return ExitStatus.INTERRUPTED
    finally:
        logging.disable(logging.NOTSET)


def try_webhook(config: Config) -> Check:
    """Send a message to the operator's webhook."""
    url, name = config.telemetry.notify_url, "notify"
    if url is None:
        return Check(name, "fail", "DT_NOTIFY_URL is not set", "put DT_NOTIFY_URL=... into .env")
    service = service_of(url)
    text = "this is a test by dt-doctor --notify: this miner's messages will arrive here"
    try:
        deliver(url, config.miner.name, text)
    except NotSent as error:
        remedy = "check DT_NOTIFY_URL in .env, and this machine's network"
        return Check(name, "fail", f"{service} did not accept the message: {error}", remedy)
    return Check(name, "ok", f"{service} accepted a test message: check that it arrived")


def report(checks: Sequence[Check], *, as_json: bool) -> int:
    """Print the checks; return the exit status."""
    status = int(any(check.status == "fail" for check in checks))
    if as_json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
        return status
    table = Table("", "check", "finding", box=None, pad_edge=False)
    for check in checks:
        mark, style = _MARKS[check.status]
        finding = Text(check.finding)
        if check.remedy and check.status != "ok":
            finding.append(f"\n→ {check.remedy}", style="bold" if check.status == "fail" else "")
        table.add_row(Text(f"{mark} {check.status}", style), Text(check.name), finding)
    # Without a width, rich would cut the findings at 80 columns in a pipe.
    width = shutil.get_terminal_size((_WIDTH, 0)).columns
    console = Console(width=width, highlight=False)
    console.print(table)
    count = {kind: sum(c.status == kind for c in checks) for kind in _MARKS}
    console.print(
        f"{count['ok']} ok, {counted(count['warn'], 'warning')}, {count['skip']} skipped, "
        f"{count['fail']} failed"
    )
    return status


# --- the port of another machine -----------------------------------------------------------------
# No machine can find out by itself whether its port is open to others, because its router may send
# a connection to its public address straight back inside. So another machine, such as a peer's or a
# rented one, has to connect to it.

_TIMEOUT = timedelta(seconds=5)  # time limit for the connection, and again for the first bytes
_P2PD = b"/multistream/1.0.0"  # a libp2p peer sends this first when somebody connects


def probed(text: str) -> tuple[str, int]:
    """Return the host and port that ``--probe`` names: HOST or HOST:PORT. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or is_ip(text, versions=(6,)):
        host, port = text, str(SwarmSettings().dht_port)
    host = host.strip("[]")
    is_port = re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65536
    if not host or text.isdigit() or not is_port:
        raise ConfigError(
            f"--probe {text!r} is not HOST or HOST:PORT, so nothing was dialled: write, e.g., "
            "203.0.113.7:8009"
        )
    return host, int(port)


def probe(host: str, port: int, *, timeout: timedelta = _TIMEOUT) -> Check:
    """Connect to a DHT peer's port. ``timeout`` limits the connection, then the first answer."""
    name, place = f"probe {host}:{port}", f"{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=timeout.total_seconds()) as connection:
            said = b""
            # A libp2p daemon sends first. Another program may send nothing in time, or disconnect.
            with contextlib.suppress(OSError):
                # Read only the first bytes, since the other side may send endlessly.
                said = connection.recv(256)
    # Catch this before its base class OSError. There is no answer if a firewall drops packets,
    # whereas a closed port refuses the connection.
    except TimeoutError:
        finding = f"{place} does not answer: a firewall drops packets, or there is no such machine"
        remedy = f"open TCP port {port} in the machine's firewall and at its provider; forward it"
    except ConnectionRefusedError:
        finding = f"{place} was reached, but nothing listens there"
        remedy = (
            "start the miner there; --dht.port sets its port, --dht.external_port the port that a "
            "router forwards to it"
        )
    except (OSError, UnicodeError) as error:
        finding = f"{place} cannot be dialled ({error})"
        remedy = "check the address, and this machine's network"
    else:
        if _P2PD in said:
            return Check(name, "ok", "open; a libp2p peer answers, as it should at --dht.port")
        return Check(
            name,
            "warn",
            "open, but no libp2p peer answers",
            "check that the port is forwarded to the miner and not to something else",
        )
    return Check(name, "fail", finding, remedy)


# --- the running miner ---------------------------------------------------------------------------


def check_verdict(examination: Examination) -> Iterator[Check]:
    """Repeat the verdict of the dashboard and dt-status, if a miner has run.

    Its row never fails, because the doctor of a new version also looks at the miner of the old
    version before an update.
    """
    now = time.time()
    facts = observe(examination.config.run_folder, now)
    if facts.launch is not None or facts.looked is not None:
        found = judge(facts, now)
        status: Literal["warn", "skip", "ok"] = (
            "warn" if found.bad else "skip" if found.level == "idle" else "ok"
        )
        yield Check("miner", status, f"{found.verdict}: {found.cause}", found.remedy)


if __name__ == "__main__":
    sys.exit(main())
