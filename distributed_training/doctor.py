"""Check machine, configuration, keys, chain and data before training; measure the step time.

    python -m distributed_training doctor [--json] [--model SIZE|config.json] [--uid N]
                                          [--offline] [flags of neurons/miner.py]...
    python -m distributed_training doctor --probe HOST[:PORT]
    python -m distributed_training doctor --notify
    python -m distributed_training doctor --bundle FILE.tar.gz [--log FILE]

    ... doctor --probe 203.0.113.7         is that DHT peer's port open from here?
    ... doctor --probe 203.0.113.7:48009   the same, at a rented container's outside port

    ... doctor                                 the network that miner.toml names
    ... doctor --network local --offline       only this machine
    ... doctor --model 1b --nproc_per_node 4   another model, four ranks
    ... doctor --diagnostics.measure 0         without the 10-second measurement
    ... doctor --bundle help.tar.gz            rows, log, settings, events, versions for a helper,
                                               with secrets masked; --log: where pm2 is not used
    ... doctor --notify                        send a message to the webhook of DT_NOTIFY_URL

Takes every flag of neurons/miner.py, .env and the environment, so its result holds for the miner
started the same way. The checks are the lists of ``distributed_training.health``; nothing is
changed, and what is written to disk or bucket is deleted again. For the step time ranks train
random tokens on random weights for some seconds. While a miner runs, nothing is trained: its
own events show the step time. scripts/diagnose.py is the same. Exit status:
0 nothing failed (warnings are allowed), 1 something failed, 2 a flag is wrong, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distributed_training import NO_HELP
from distributed_training.common.files import read_json_object
from distributed_training.common.llama import named_config
from distributed_training.common.memory import ModelShape
from distributed_training.common.ports import free_ports, is_port
from distributed_training.common.processes import (
    die_with_parent,
    members,
    sessions_of,
    without_secrets,
)
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
from distributed_training.health.machine import Entry, Examination
from distributed_training.miner.launcher import ranks_of
from distributed_training.miner.rank_group import rank_environment_defaults, rank_variables
from distributed_training.miner.run_folder import launcher_of, listening_ranks, rank_environment
from distributed_training.protocol.lines import SLOW_STEP, counted
from distributed_training.protocol.types import Check, ExitStatus
from distributed_training.telemetry.events import EventFollower
from distributed_training.telemetry.notify import Message, deliver
from distributed_training.telemetry.run_state import observe
from distributed_training.telemetry.verdict import judge

_MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red"), "skip": ("-", "dim")}
_WIDTH = 160  # where there is no terminal

#: Environment variable of a rank that is measured: model and seconds, as JSON.
_MEASURE = "DT_MEASURE"
# Loading torch and the model on every rank, before the measured time begins.
_START = timedelta(minutes=3)
WARM_UP_STEPS = 2  # micro-batches: the first ones compile kernels and fill caches

# Of a running miner: inner steps that count, and the events that hold them.
_RECENT_STEPS, _RECENT_BYTES = 50, 1 << 20
_MEASURED = 10.0  # seconds of training
_TINY = 50_000_000  # parameters of a model for trials, at most
#: With one of these failed, no training can be measured.
_DECISIVE = ("torch", "gpu", "gpu memory", "host memory", "batch")


def examine(
    examination: Examination, flags: Sequence[str], *, seconds: float = _MEASURED
) -> list[Check]:
    """Make all checks. Each reports what went wrong itself, so there is nothing to catch.

    ``flags``: as the miner is started. ``seconds``: of the measured training. A line on stderr
    says what takes long.
    """
    entries = [Entry(check_verdict), *machine.CHECKS]
    why_not = ""
    if not examination.config.leads:
        why_not = "only node 0 asks chain, bucket and peers"
    elif examination.offline:
        why_not = "--offline: chain, bucket, data are not asked"
    if why_not:
        entries.append(Entry(lambda e: Check("network", "skip", why_not)))
    else:
        # Here: --help and a refusal are not to wait for torch and the chain's client.
        from distributed_training.health import outside

        entries += outside.CHECKS
    # Last: it takes seconds, and is left out where torch or memory failed above.
    entries.append(Entry(lambda e: check_step_time(e, flags, seconds)))
    # Daemons: an interrupted doctor waits for none.
    apart = {entry: _begin(entry, examination) for entry in entries if entry.alone}
    for entry in entries:
        if entry.note and entry.exchange in ("", examination.config.exchange):
            _show(entry.note)
        # At once: later checks ask what failed before them.
        begun = apart.get(entry)
        examination.found += entry.check(examination) if begun is None else begun.result()
    return examination.found


def _begin(entry: Entry, examination: Examination) -> Future[list[Check]]:
    """Make a check in a thread of its own."""
    found: Future[list[Check]] = Future()

    def check() -> None:
        try:
            found.set_result(entry.check(examination))
        except Exception as error:  # noqa: BLE001  # raised where the result is asked for
            found.set_exception(error)

    threading.Thread(target=check, name="check", daemon=True).start()
    return found


def model_config(config: Config, wanted: str | None) -> tuple[dict[str, Any], str]:
    """Return the model's ``config.json`` and its origin.

    Raises ConfigError.

    The origin is ``--model``, else the network's file, else the global state in the run folder,
    else an assumption that is named.
    """
    if wanted and not wanted.endswith(".json"):
        try:
            return named_config(wanted), f"--model {wanted}"
        except ValueError as error:
            raise ConfigError(
                f"--model: {error}, so nothing was checked: give one of them or a config.json"
            ) from None
    if wanted:
        try:
            content = read_json_object(Path(wanted))
            ModelShape.from_config(content or {})
        except ValueError as error:
            raise ConfigError(
                f"--model {wanted} is not the readable config.json of a Llama-like model ({error}),"
                " so its size is not known: correct the path"
            ) from None
        return content or {}, wanted
    if config.network is not None and config.network.model is not None:
        return dict(config.network.model), f"--network {config.network.place}"
    found = {}
    for path in machine.files_under(config.run_folder):
        with contextlib.suppress(OSError):  # a miner that runs deletes files meanwhile
            if path.name == "config.json":
                found[path] = path.stat().st_mtime
    # The newest: earlier global states stay in the run folder.
    for path in sorted(found, key=lambda path: found[path], reverse=True):
        if content := read_json_object(path):
            return content, str(path)
    named = config.network.head.parameters if config.network is not None else None
    name = "tiny" if named is not None and named < _TINY else "4b"
    return named_config(name), f"assumed: {name}; --model tells otherwise"


MEASURE = "--diagnostics.measure"  # seconds


def build_parser() -> Parser:
    parser = Parser(add_help=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", type=argument(str))
    parser.add_argument("--uid", type=ranged(0, 65535))
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--probe", type=argument(str))
    parser.add_argument("--notify", action="store_true")
    parser.add_argument("--bundle", type=argument(File))
    parser.add_argument("--log", type=argument(File))
    parser.add_argument(MEASURE, type=ranged(0.0, 3600.0), default=_MEASURED)
    parser.add_argument("-h", "--help", action="store_true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options, flags = build_parser().parse_known_args(argv)
    if options.help:
        print(__doc__ or NO_HELP)
        return 0
    logging.disable(logging.CRITICAL)  # libraries that retry; the findings give the result
    try:
        if options.probe:
            return report([probe(*probed(options.probe))], as_json=options.json)
        config = load_config("miner", flags, file=OPERATORS_FILE, check=False)
        require(**extras_of_network(config))
        if options.bundle and os.path.lexists(options.bundle):
            raise ConfigError(
                f"--bundle {options.bundle} is there already, so nothing was written: give another "
                "name"
            )
        if options.notify:
            return report([try_webhook(config)], as_json=options.json)
        ranks, ports = listening_ranks(config.run_folder).values(), set()
        processes = members(sessions_of(ranks))
        # Of a running miner, all: another process has each port; p2pd has the DHT peer's.
        for process in processes:
            with contextlib.suppress(psutil.Error):
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr:
                        ports.add(connection.laddr.port)
        examination = Examination(
            config=config,
            ranks=ranks_of(config),
            model=model_config(config, options.model),
            offline=options.offline,
            uid=options.uid,
            running=bool(processes),
            step=recent_step(config.run_folder) if processes else None,
            own_ports=frozenset(ports),
        )
        seconds = vars(options)["diagnostics.measure"]
        found = examine(examination, flags, seconds=seconds)
        status = report(found, as_json=options.json)
        if options.bundle:
            launcher = launcher_of(config.run_folder)
            log = options.log or find_log(launcher.pid if processes and launcher else None)
            lines = write_bundle(options.bundle, config, examination.found, log=log)
            print(f"{options.bundle} has, with secrets masked:", *lines, sep="\n", file=sys.stderr)
            if log is None:
                print("No log was found: give it with --log FILE", file=sys.stderr)
        return status
    except ConfigError as error:
        return exit_with(error)
    except KeyboardInterrupt:
        print("interrupted, so nothing is known: run the same command again", file=sys.stderr)
        return ExitStatus.INTERRUPTED
    finally:
        logging.disable(logging.NOTSET)


def try_webhook(config: Config) -> Check:
    """Send a message to the operator's webhook."""
    url, name = config.telemetry.notify_url, "notify"
    if url is None:
        return Check(name, "fail", "DT_NOTIFY_URL is not set", "put DT_NOTIFY_URL=... into .env")
    service = service_of(url)
    text = "this is a test, by dt-doctor --notify: messages of this miner come here"
    try:
        deliver(url, Message(config.miner.name, text))
    except NotSent as error:
        remedy = "check DT_NOTIFY_URL in .env, and the network of this machine"
        return Check(name, "fail", f"{service} has not taken a message: {error}", remedy)
    return Check(name, "ok", f"{service} has taken a test message: see that it came")


def _show(note: str) -> None:
    print(f"… {note}", file=sys.stderr, flush=True)


def report(checks: Sequence[Check], *, as_json: bool) -> int:
    """Print them; the exit status."""
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
    # In a pipe rich would cut the findings at 80 columns.
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
# No machine can find out by itself whether its port is open to others: a router may turn its own
# address back inside. So a second machine, a peer's or a rented one, dials.

_TIMEOUT = timedelta(seconds=5)  # of the connection, and of an answer
_P2PD = b"/multistream/1.0.0"  # libp2p's first words, said by whoever is dialled


def probed(text: str) -> tuple[str, int]:
    """Return host and port of what ``--probe`` names: HOST or HOST:PORT. Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or is_ip(text, versions=(6,)):
        host, port = text, str(SwarmSettings().dht_port)
    host = host.strip("[]")
    if not host or text.isdigit() or not is_port(port):
        raise ConfigError(
            f"--probe {text!r} is not HOST or HOST:PORT, so nothing was dialled: give e.g. "
            "203.0.113.7:8009"
        )
    return host, int(port)


def probe(host: str, port: int, *, timeout: timedelta = _TIMEOUT) -> Check:
    """Dial a DHT peer's port. ``timeout`` covers the connection, and the wait for its words."""
    name, place = f"probe {host}:{port}", f"{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=timeout.total_seconds()) as connection:
            said = _read(connection)  # a libp2p daemon speaks first
    # Before OSError, which it is: a firewall that drops keeps silent, a closed port refuses.
    except TimeoutError:
        finding = (
            f"{place} does not answer: a firewall drops what is sent there, or no such machine"
        )
        remedy = f"open TCP port {port} in the machine's firewall and at its provider, forward it"
    except ConnectionRefusedError:
        finding = f"{place} is reached, but nothing listens there"
        remedy = (
            "start the miner there; --dht.port names its port, --dht.external_port what a router "
            "makes of it"
        )
    except (OSError, UnicodeError) as error:
        finding = f"{place} cannot be dialled ({error})"
        remedy = "check the address, and the network of this machine"
    else:
        if _P2PD in said:
            return Check(name, "ok", "open; a libp2p peer answers, as behind --dht.port")
        return Check(
            name,
            "warn",
            "open, but no libp2p peer answers",
            "check that the port is forwarded to the miner and not to something else",
        )
    return Check(name, "fail", finding, remedy)


def _read(connection: socket.socket) -> bytes:
    try:
        # The first words tell. Whoever is dialled may send without an end.
        return connection.recv(256)
    except OSError:  # nothing was said in time, or it hung up
        return b""


# --- the step time ------------------------------------------------------------------------------


def check_verdict(examination: Examination) -> list[Check]:
    """Repeat the verdict of dashboard and dt-status, where a miner has run.

    It fails nothing: the new version's doctor looks at the old one's miner before an update.
    """
    now = time.time()
    facts = observe(examination.config.run_folder, now)
    if facts.launch is None and facts.looked is None:
        return []
    found = judge(facts, now)
    status: Literal["warn", "skip", "ok"] = (
        "warn" if found.bad else "skip" if found.level == "idle" else "ok"
    )
    return [Check("miner", status, f"{found.verdict}: {found.cause}", found.remedy)]


def check_step_time(examination: Examination, flags: Sequence[str], seconds: float) -> list[Check]:
    """Measure an inner step; compare it with the warning threshold and the period's length."""
    config = examination.config
    if examination.running and examination.step is None:
        finding = "not known: the running miner has made no inner step since its start"
        return [Check("step time", "skip", finding)]
    if (taken := examination.step) is not None:
        text = f"about {taken.total_seconds():.1f} s per inner step of the running miner"
        return _judge_step(config, taken, f"{text}, the median of its last {_RECENT_STEPS}")
    if seconds <= 0:
        return [Check("step time", "skip", "not measured: --diagnostics.measure 0")]
    if obstacle := examination.failed(*_DECISIVE):
        return [Check("step time", "skip", f"not measured: {obstacle} failed above")]
    _show(f"measuring for {seconds:.0f} s, after the model was built")
    model = examination.model[0] if examination.model else {}
    try:
        measured = measure(flags, ranks=examination.ranks, model=model, seconds=seconds)
    except (RuntimeError, OSError) as error:
        remedy = "fix what failed above; --diagnostics.measure 0 leaves the measurement out"
        return [Check("step time", "fail", str(error), remedy)]
    micro_batches = measured["micro_batches"]  # of each rank, in an inner step
    step = timedelta(seconds=measured["micro_batch_seconds"] * micro_batches)
    text = f"about {step.total_seconds():.1f} s per inner step ({micro_batches} x "
    text += f"{1000 * measured['micro_batch_seconds']:.0f} ms)"
    return _judge_step(config, step, text)


def recent_step(folder: Path) -> timedelta | None:
    """Return the time of an inner step of the miner in ``folder``; None before its first."""
    seconds: list[float] = []
    with (
        contextlib.closing(EventFollower(folder / "events.jsonl")) as events,
        contextlib.suppress(OSError),
    ):
        for event in events.history(at_most=_RECENT_BYTES):
            took = event.get("seconds")
            if event.get("kind") == "start":
                seconds = []
            elif event.get("kind") == "step" and isinstance(took, int | float) and took > 0:
                seconds.append(took)
    if not seconds:
        return None
    return timedelta(seconds=min(statistics.median(seconds[-_RECENT_STEPS:]), 86400.0))


def _judge_step(config: Config, step: timedelta, text: str) -> list[Check]:
    """Compare an inner step with the limits; ``text``: how long it takes, and who says so."""
    minimum = max(1, config.store.minimum_valid_inner_step)
    faster = "use a GPU, or lower --neuron.local_batch_size_train"
    slow = step.total_seconds() > SLOW_STEP
    time = Check("step time", "warn" if slow else "ok", text, faster if slow else "")
    period = config.round_period
    count = int(period / step)
    text = f"about {count} in a period of {_minutes(period)}; uploaded is from {minimum} on"
    enough = count >= minimum
    return [time, Check("inner steps", "ok" if enough else "fail", text, faster)]


def _minutes(time: timedelta) -> str:
    seconds = time.total_seconds()
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def measure(
    flags: Sequence[str], *, ranks: int, model: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """Return ``micro_batch_seconds`` and ``micro_batches``.

    Raises RuntimeError with the ranks' last line.
    """
    # Random tokens need no key, and what the ranks print is shown.
    environment = without_secrets() | rank_environment_defaults(ranks=ranks)
    environment[_MEASURE] = json.dumps({"model": model, "seconds": seconds})
    limit = _START.total_seconds() + 3 * seconds
    port = free_ports(1)[0]
    # A file: ranks that print more than a pipe holds would stand still.
    with tempfile.TemporaryFile("w+") as output, contextlib.ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            process = subprocess.Popen(
                [sys.executable, "-m", "distributed_training.doctor", *flags],
                env=environment | rank_variables(rank, world_size=ranks, port=port),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            # The stack unwinds in reverse: killed first, then waited for.
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        deadline = time.monotonic() + limit
        # A rank that failed leaves the others waiting for it.
        while None in [p.poll() for p in processes] and not any(p.poll() for p in processes):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no inner step in {limit:.0f} s")
            time.sleep(0.1)
        output.seek(0)
        lines = [line for line in output.read().splitlines() if line.strip()]
    for line in reversed(lines):
        # Among what libraries print: nothing else begins so.
        if line.startswith('{"micro_batch_seconds"'):
            found: dict[str, Any] = json.loads(line)
            return found
    errors = [line for line in lines if "Error" in line or line.startswith("error:")] or lines
    raise RuntimeError(f"training failed: {errors[-1].strip() if errors else 'no output'}")


def measured_rank(argv: list[str]) -> int:
    """Run as one rank; rank 0 prints the speed."""
    die_with_parent(signal.SIGKILL)
    order = json.loads(os.environ[_MEASURE])
    config = load_config("miner", argv, file=OPERATORS_FILE, check=False)
    me = rank_environment()

    import torch
    import torch.distributed as dist

    from distributed_training.training.collectives import Layout
    from distributed_training.training.trainer import Trainer

    cuda = config.miner.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda", me.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    trainer = Trainer(
        settings=config.training,
        model_config=order["model"],
        device=device,
        layout=Layout(me.rank, me.world_size),
    )
    trainer.load_weights(None)
    trainer.begin_epoch(0)
    shape = (trainer.micro_batch_size, config.training.sequence_length)
    batch = torch.randint(0, int(order["model"]["vocab_size"]), shape, dtype=torch.int64)

    def run() -> None:
        trainer.add_micro_batch(batch, data_wait_seconds=0.0)
        if cuda:
            # Else the launches of the kernels would be measured, not their work.
            torch.cuda.synchronize()

    for _ in range(WARM_UP_STEPS):
        run()
    done, start, ours = 0, time.perf_counter(), torch.zeros(1)
    while not ours.item():
        run()
        done += 1
        ours[0] = float(time.perf_counter() - start > order["seconds"])
        dist.broadcast(ours, 0, group=dist.group.WORLD)  # all ranks stop at the same micro-batch
    seconds = (time.perf_counter() - start) / done
    if me.rank == 0:
        found = {"micro_batch_seconds": seconds, "micro_batches": trainer.batch_plan.micro_batches}
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    if _MEASURE not in os.environ:
        sys.exit(main())
    try:
        status = measured_rank(sys.argv[1:])
    except ConfigError as error:
        status = exit_with(error)
    sys.exit(status)
