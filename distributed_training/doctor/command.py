"""Check machine, configuration, keys, chain and data before training; measure the step time.

    python -m distributed_training doctor [--json] [--model SIZE|config.json] [--uid N]
                                          [--offline] [flags of neurons/miner.py]...
    python -m distributed_training doctor --probe HOST:PORT    is that miner's port open from here?

    ... doctor                                 the public network
    ... doctor --preset local --offline        this machine alone
    ... doctor --model 1b --nproc_per_node 4   another model, four ranks
    ... doctor --diagnostics.measure 0         without the 10-second measurement

Takes every flag of neurons/miner.py, .env and the environment, so its result holds for the miner
started the same way. scripts/diagnose.py is the same. Exit status: 0 nothing failed (warnings are
allowed), 1 something failed, 2 a flag is wrong, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from distributed_training.common.exits import ExitStatus
from distributed_training.common.files import read_json_object
from distributed_training.common.memory import ModelShape
from distributed_training.config import Config, ConfigError, exit_with, load_config, problems
from distributed_training.config.loader import Parser, argument, ranged
from distributed_training.diagnostics.checks import Check, ProbeError, check_gpus, failed
from distributed_training.doctor import machine
from distributed_training.doctor.measure import measure
from distributed_training.doctor.reach import check_nodes, host_and_port, probe
from distributed_training.doctor.speed import StepEstimate, check_batch, check_speed
from distributed_training.miner.launcher import default_ranks

_MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red"), "skip": ("-", "dim")}
_WIDTH = 160  # where there is no terminal


@dataclass(frozen=True)
class Examination:
    """``flags``: as the miner is started. ``model``: a ``config.json`` and where it comes from.
    ``offline``: nothing is asked of the network. ``tell``: called before what takes long."""

    config: Config
    flags: Sequence[str]
    ranks: int
    model: tuple[dict[str, Any], str]
    offline: bool
    uid: int | None
    tell: Callable[[str], None]

    def run(self) -> list[Check]:
        """Not the callers' to catch: every check says what went wrong itself."""
        config, training = self.config, self.config.training
        checks = [_configuration(line) for line in problems(config)] or [
            Check("configuration", "ok", f"preset {config.preset}, {self.ranks} rank(s)")
        ]
        checks += [machine.check_python(), machine.check_torch()]
        checks += check_gpus(wanted=self.ranks, device=config.miner.device)
        micro = training.local_batch_size_train
        known = micro if isinstance(micro, int) else None
        effective = training.local_batch_size_train_effective
        checks.append(check_batch(micro_batch=known, effective=effective, world_size=self.ranks))
        shape, size = self._size()
        checks.append(size)
        if shape is not None:
            checks += machine.memory_checks(config, shape, ranks=self.ranks, micro_batch=known or 1)
        checks += machine.disk_checks(config, shape)
        on_gpu = config.miner.device != "cpu" and machine.gpu_bytes() is not None
        checks += [
            machine.check_descriptors(config.chain.max_connections),
            machine.check_shared_memory(ranks=self.ranks, gpu=on_gpu),
            *machine.check_ports(config),
            *check_nodes(config, offline=self.offline),
        ]
        if not config.nodes.leads:
            checks.append(Check("network", "skip", "node 0 alone asks chain, bucket and peers"))
        elif self.offline:
            checks.append(Check("network", "skip", "--offline: chain, bucket, data are not asked"))
        else:
            # Here: --help and a refusal are not to wait for torch and the chain's client.
            from distributed_training.doctor.network_checks import outside_checks

            checks += outside_checks(config, uid=self.uid, shape=shape, tell=self.tell)
        return checks + self._measure(machine.cannot_train(checks))

    def _size(self) -> tuple[ModelShape | None, Check]:
        content, origin = self.model
        try:
            shape = ModelShape.from_config(content)
        except ValueError as error:
            remedy = "give --model with the config.json of a Llama-like model"
            return None, Check("model", "warn", f"{origin}: {error}: size not known", remedy)
        return shape, Check("model", "ok", f"{shape.parameters / 1e6:.1f} M parameters ({origin})")

    def _measure(self, obstacle: str) -> list[Check]:
        settings = self.config.diagnostics
        if settings.measure <= timedelta(0):
            return [Check("step time", "skip", "not measured: --diagnostics.measure 0")]
        if obstacle:
            return [Check("step time", "skip", f"not measured: {obstacle} failed above")]
        seconds = settings.measure.total_seconds()
        self.tell(f"measuring for {seconds:.0f} s, after the model was built")
        try:
            measured = measure(self.flags, ranks=self.ranks, model=self.model[0], seconds=seconds)
        except (ProbeError, OSError) as error:
            remedy = "mend what failed above; --diagnostics.measure 0 leaves the measurement out"
            return [Check("step time", "fail", str(error), remedy)]
        estimate = StepEstimate(
            micro_batch_seconds=measured["micro_batch_seconds"],
            micro_batches=measured["micro_batches"],
            upload_steps=self.config.get("neuron.upload_steps"),
            minimum_inner_step=self.config.get("neuron.minimum_valid_inner_step"),
        )
        return check_speed(estimate, slow_step=settings.slow_step)


def _configuration(line: str) -> Check:
    cause, _, remedy = line.rpartition(": ")
    return Check("configuration", "fail", cause or line, remedy if cause else "")


def model_config(config: Config, wanted: str | None) -> tuple[dict[str, Any], str]:
    """The model's ``config.json`` and where it comes from: ``--model``, else the network's file,
    else what the run folder holds of the global state, else an assumption that is named.
    Raises ConfigError."""
    from distributed_training.training.memory_plan import named_config

    if wanted and not wanted.endswith(".json"):
        try:
            return named_config(wanted), f"--model {wanted}"
        except ValueError as error:
            raise ConfigError(f"--model: {error}: give one of them or a config.json") from None
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
    for path in config.run_folder.glob("**/config.json"):
        with contextlib.suppress(OSError):  # a miner that runs deletes files meanwhile
            found[path] = path.stat().st_mtime
    for path in sorted(found, key=lambda path: found[path], reverse=True):
        with contextlib.suppress(OSError, ValueError):
            return json.loads(path.read_bytes()), str(path)
    name = "tiny" if config.preset == "local" else "4b"
    return named_config(name), f"assumed: {name}; --model tells otherwise"


def build_parser() -> Parser:
    parser = Parser(add_help=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", type=argument(str))
    parser.add_argument("--uid", type=ranged(0, 65535))
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--probe", type=argument(str))
    parser.add_argument("-h", "--help", action="store_true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options, flags = build_parser().parse_known_args(argv)
    if options.help:
        print(__doc__)
        return 0
    logging.disable(logging.CRITICAL)  # libraries that retry; the findings say what came of it
    try:
        if options.probe:
            return report([probe(*host_and_port(options.probe))], as_json=options.json)
        config = load_config("miner", flags, check=False)
        examination = Examination(
            config=config,
            flags=flags,
            ranks=config.miner.nproc_per_node or default_ranks(config),
            model=model_config(config, options.model),
            offline=options.offline,
            uid=options.uid,
            tell=lambda text: print(f"… {text}", file=sys.stderr, flush=True),
        )
        return report(examination.run(), as_json=options.json)
    except ConfigError as error:
        return exit_with(error)
    except KeyboardInterrupt:
        print("interrupted, so nothing is known: run the same command again", file=sys.stderr)
        return ExitStatus.INTERRUPTED
    finally:
        logging.disable(logging.NOTSET)


def report(checks: Sequence[Check], *, as_json: bool) -> int:
    """Print them; the exit status."""
    if as_json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
        return int(failed(checks))
    table = Table("", "check", "finding", box=None, pad_edge=False)
    for check in checks:
        mark, style = _MARKS[check.status]
        finding = Text(check.finding)
        if check.remedy and check.status != "ok":
            finding.append(f"\n→ {check.remedy}", style="bold" if check.status == "fail" else "")
        table.add_row(Text(f"{mark} {check.status}", style), Text(check.name), finding)
    width = shutil.get_terminal_size((_WIDTH, 0)).columns
    console = Console(width=width, highlight=False)
    console.print(table)
    count = {status: sum(c.status == status for c in checks) for status in _MARKS}
    console.print(
        f"{count['ok']} ok, {count['warn']} warnings, {count['skip']} skipped, "
        f"{count['fail']} failed"
    )
    return int(failed(checks))
