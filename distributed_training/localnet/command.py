"""The command line of the local subnet: ``make run``, ``scripts/localnet.py``."""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from distributed_training.config.loader import Parser, argument, exit_with, ranged
from distributed_training.config.types import ConfigError, File, Text
from distributed_training.localnet.services import SubnetOptions, find_weed, parse_ranks
from distributed_training.localnet.subnet import STORE_FOLDER, LocalSubnet, SubnetFailure
from distributed_training.localnet.summary import View
from distributed_training.node.start import StopNow, StopSignals
from distributed_training.protocol.types import ExitStatus
from distributed_training.store.errors import StoreError
from distributed_training.telemetry.page import PageProcess

# After Ctrl-C, the miners get this long to stop, and then the founder's programs; with everything
# else, the stop takes less than 15 s.
INTERRUPT_GRACE = timedelta(seconds=6)
_ROUND = 1.15  # time between two outer steps, in periods, including the round itself


def build_parser() -> Parser:
    parser = Parser(
        prog="dt-localnet",
        description="Run a whole subnet on this machine: object store, chain, validator, miners.",
        epilog="Exit status: 0 all rounds worked and uploads were scored; 1 something failed; "
        "2 bad arguments; 130 interrupted.",
    )
    add = parser.add_argument
    path, text, count = argument(File), argument(str), ranged(1, 1_000_000)
    add("--miners", type=ranged(1, 100), help="how many miners (default 2)")
    add("--ranks", type=text, help="ranks per miner, e.g. 2,1 (default: 2 for the first, then 1)")
    add("--exchange", choices=("hivemind", "store"), default="hivemind", help="(hivemind)")
    about = "rule that turns uploads into an update: a name, or a plug-in's FILE.py (nesterov)"
    add("--outer-rule", type=text, help=about)
    how_long = parser.add_mutually_exclusive_group()
    about = "stop after this many outer steps (default 2)"
    how_long.add_argument("--outer-steps", type=count, default=2, help=about)
    about = "run as many outer steps as fit into this many minutes"
    how_long.add_argument("--minutes", type=ranged(1.0, 1e5), help=about)
    add("--folder", type=path, default=Path("runs/localnet"), help="where everything is written")
    about = "seconds between rounds (default 60, or more on a busy or slow machine)"
    add("--period", type=ranged(1.0, 1e5), help=about)
    add("--timeout", type=ranged(1.0, 1e6), help="limit in seconds (default: depends on rounds)")
    add("--keep", action="store_true", help="keep buckets and checkpoints after a good run")
    add("--stay", action="store_true", help="run until Ctrl-C, and print how another miner joins")
    add("--page-port", type=ranged(0, 65535), default=0, help="the dashboard's port (default: any)")
    about = "additional flags for every miner, in quotes"
    add("--miner-flags", type=_split_flags, default=(), help=about)
    about = "additional flags for the validator, in quotes"
    add("--validator-flags", type=_split_flags, default=(), help=about)
    add("--miner-script", type=path, help="program of the miners (default: this package's)")
    add("--validator-script", type=path, help="program of the validator (default: this package's)")
    return parser


def _split_flags(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(argument(Text)(text)))
    except ValueError as error:  # a quotation mark is not closed
        raise argparse.ArgumentTypeError(f"{text!r:.100}: {error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    view = View()
    try:
        find_weed()
        rules = {}
        if arguments.outer_rule:
            from distributed_training.config.settings import TrainingSettings
            from distributed_training.training.outer_rule import find_rule, outer_rule_of

            rules["training.outer_rule"] = name = find_rule(arguments.outer_rule)
            outer_rule_of(TrainingSettings(outer_rule=name), arguments.exchange)
        options = SubnetOptions(
            folder=arguments.folder,
            ranks=parse_ranks(arguments.ranks, arguments.miners),
            exchange=arguments.exchange,
            outer_steps=arguments.outer_steps,
            period=arguments.period,
            miner_flags=arguments.miner_flags,
            validator_flags=arguments.validator_flags,
            rules=rules,
            miner_script=arguments.miner_script and arguments.miner_script.absolute(),
            validator_script=arguments.validator_script and arguments.validator_script.absolute(),
        )
        subnet = LocalSubnet(
            options=options,
            tell=view.report,
            refresh=lambda s: view.update([n.state for n in s.neurons]),
        )
        with StopSignals(interrupts=True) as signals:
            failure = _run(subnet, view, signals, arguments)
    except ConfigError as error:
        return exit_with(error)
    interrupted = signals.stop.is_set()
    done = bool(subnet.neurons) and (
        subnet.validator.state.outer_step >= subnet.options.outer_steps
    )
    failures = [failure.splitlines()[0]] if failure else []
    if not subnet.neurons:
        for line in [*failures, *subnet.problems]:
            print(f"PROBLEM: {line}")
        return ExitStatus.INTERRUPTED if interrupted else ExitStatus.FAULT
    summary = subnet.summary(failures)
    if interrupted:  # then goals that were not reached are no problems
        summary = replace(summary, problems=(*failures, *subnet.problems))
    summary.write(subnet.folder)
    print(summary.text(), end="")
    print(f"logs: {subnet.folder}/*/log.txt")
    if summary.ok and not arguments.keep and (not interrupted or (arguments.stay and done)):
        # Delete buckets, checkpoints and uploads; logs, events and metrics are next to them.
        folders = [path for n in subnet.neurons for path in n.folder.iterdir() if path.is_dir()]
        for folder in [subnet.folder / STORE_FOLDER, *folders]:
            shutil.rmtree(folder, ignore_errors=True)
    print("interrupted" if interrupted else summary.verdict)
    return ExitStatus.INTERRUPTED if interrupted else int(not summary.ok)


def _run(
    subnet: LocalSubnet,
    view: View,
    signals: StopSignals,
    arguments: argparse.Namespace,
) -> str:
    """Start, follow and stop the subnet; return what failed, or "". Raises ConfigError."""
    try:
        subnet.start()
        if arguments.minutes:
            steps = int(60 * arguments.minutes / (_ROUND * subnet.options.seconds))
            subnet.options = replace(subnet.options, outer_steps=max(1, steps))
        options = subnet.options
        limit = timedelta(seconds=arguments.timeout) if arguments.timeout else options.longest
        with PageProcess(
            [neuron.folder for neuron in [*subnet.miners, subnet.validator]],
            port=arguments.page_port,
            told=view.report,
        ):
            joining = subnet.invite() if arguments.stay else ""
            if joining:
                view.report(joining)
            subnet.wait_for_outer_steps(options.outer_steps, limit)
            # Scores come after the last step; without them, the run would look like a failure.
            subnet.wait_for_figures(timedelta(seconds=20))
            if arguments.stay:
                view.report(f"the subnet runs until Ctrl-C; {joining}")
                subnet.wait_until(lambda: False, timedelta(days=365))
        view.report("done; stopping")
    except (SubnetFailure, StoreError) as failure:
        view.report(str(failure))
        return str(failure)
    except StopNow:
        view.report("interrupted; stopping")
    finally:
        signals.interrupts = False  # do not interrupt the stop: its time is limited
        # Stop the subnet also if an unexpected exception is on its way to the caller. With --stay,
        # Ctrl-C is the normal end, so the programs get the normal time to stop.
        hurried = signals.stop.is_set() and not arguments.stay
        subnet.stop(INTERRUPT_GRACE if hurried else None)
    return ""
