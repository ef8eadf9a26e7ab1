"""Find the verdict that a validator would reach now on an upload, its cause, and its one fix.

    python scripts/score.py [--uid N... | --all] [--watch [SECONDS]] [--json] [options] [flags]...

    python scripts/score.py                          the miner of this wallet, by miner.toml
    python scripts/score.py --network FILE --uid 227 31         two miners, anywhere
    python scripts/score.py --all --json             everybody, for programs
    python scripts/score.py --subnet runs/localnet --all        a local subnet that runs

    --uid N...           whose upload (default: of the hotkey that the wallet flags name)
    --all                every miner's
    --random-block N...  text of these blocks; without it one is drawn as validators do
    --sequences N        at most N sequences a block; 0: all, as validators do
    --timeout SECONDS    for all that is read from one miner (60)
    --watch [SECONDS]    look again and again (every 300)
    --json               one JSON object a look
    --subnet FOLDER      the local subnet whose run folder this is
    --bucket NAME        read the one --uid from this bucket of yours, with the R2_READ keys
    --folder FOLDER      read the one --uid from a folder: a snapshot, or a bucket's copy
    --background         at the lowest priority (nice 19), one thread, no GPU, 32 sequences a block
    --cache FOLDER       keeps the global weights (default ~/.cache/distributed-training/score)

In a network that exchanges through the store the verdicts are those that its validator has signed,
of the newest outer step, and nothing is judged again: --uid, --all, --watch and --json apply.

A GPU that another process uses is not used: without a free one this runs as with --background.
``--neuron.device cuda`` takes the first GPU all the same.
Standard error shows its progress, miner by miner.
Takes every flag of neurons/validator.py, .env and the environment. Reads only what is public.
Exit status: 0 looked, 1 the chain or the global state could not be read or memory ran out, 2 a flag
is wrong. (--passes changes nothing: up to 0.2.0 ranks and shares were simulated.)
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from distributed_training import NO_HELP
from distributed_training.common.files import read_json_object, write_json
from distributed_training.config import OPERATORS_FILE, Config, ConfigError, exit_with, load_config
from distributed_training.config.installed import require
from distributed_training.config.loader import Parser, argument, ranged
from distributed_training.config.model import extras_of_network
from distributed_training.config.types import File
from distributed_training.health.gpus import unused_gpu
from distributed_training.telemetry.neuron_state import SCORE_FILE

if TYPE_CHECKING:
    from distributed_training.scoring.evaluator import Comparison, EvaluationModel
    from distributed_training.scoring.score_preview import Preview, Sources
    from distributed_training.store.bucket_reader import BucketReader


def run() -> int:
    """Run the command. Ctrl-C is the ordinary end of ``--watch``."""
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    return main(sys.argv[1:])


def main(argv: Sequence[str]) -> int:
    # Two parsers: what this one does not know is a flag of the validator, or refused by its loader.
    options, flags = build_parser().parse_known_args(argv)
    if options.help:
        print(__doc__ or NO_HELP)
        return 0
    try:
        given = [*subnet_flags(options.subnet), *flags]
        if options.background:
            given += ["--neuron.device", "cpu"]
        config = load_config("validator", given, file=OPERATORS_FILE, check=False)
        require(**extras_of_network(config))
        # Before the imports below, which take seconds, and many while a miner runs.
        tell("reading chain and buckets, of which nothing is changed")
        if config.exchange == "store":  # whose validator has signed the verdicts
            from distributed_training.scoring import verdicts

            return verdicts.show(config, options)
        # Only --neuron.device takes a GPU that is in use: it would be a training miner's, which
        # runs out of memory then and continues with a smaller micro-batch.
        if config.miner.device == "auto":
            gpu, why = unused_gpu()
            if gpu is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before torch counts them
                return score(config, options)
            if not why.startswith("no GPU"):
                print(
                    f"{why}, so this takes one CPU thread at low priority and "
                    f"{BACKGROUND_SEQUENCES} sequences a block: run it on another machine, or give "
                    "--neuron.device cuda",
                    file=sys.stderr,
                    flush=True,
                )
                options.background = True
            config = replace(config, miner=replace(config.miner, device="cpu"))
        return score(config, options)
    except ConfigError as error:
        return exit_with(error)


def tell(text: str) -> None:
    """Say what is done now, on standard error, where no program reads it for the result."""
    print(f"… {text}", file=sys.stderr, flush=True)


BACKGROUND_SEQUENCES = 32  # of each block, unless --sequences says otherwise


def build_parser() -> Parser:
    parser = Parser(add_help=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--uid", type=ranged(0, 65535), nargs="+")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--random-block", type=ranged(1, 10**12), nargs="+", default=[])
    parser.add_argument("--sequences", type=ranged(0, 10**6))
    parser.add_argument("--passes", type=ranged(1, 1000))
    parser.add_argument("--timeout", type=ranged(1.0, 3600.0), default=60.0)
    parser.add_argument("--watch", type=ranged(1.0, 86400.0), nargs="?", const=300.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--subnet", type=argument(File))
    parser.add_argument("--bucket", type=argument(str))
    parser.add_argument("--folder", type=argument(File))
    parser.add_argument("--background", action="store_true")
    parser.add_argument("--cache", type=argument(File))
    return parser


def subnet_flags(folder: Path | None) -> list[str]:
    """Return the flags with the addresses of a running local subnet. Raises ConfigError."""
    if folder is None:
        return []
    state = read_json_object(folder / "localnet.json") or {}
    # The file outlives a subnet that was killed: its ports may be another's now.
    runs = isinstance(state.get("pid"), int) and psutil.pid_exists(state["pid"])
    if not (runs and state.get("chain") and state.get("store")):
        raise ConfigError(
            f"--subnet {folder} is no run folder of a local subnet that runs, so nothing was "
            "scored: start one with `make run`, or correct the path"
        )
    return [
        *("--preset", "local", "--network", str(folder / "network.toml")),
        *("--neuron.run_folder", str(folder)),
        # Only members read a network that exchanges through the store.
        *("--wallet.path", str(folder / "wallets"), "--wallet.name", "validator"),
    ]


def score(config: Config, options: argparse.Namespace) -> int:
    """Look once, or until Ctrl-C."""
    # The heavy imports, once the flags are known to be right.
    import torch

    from distributed_training.chain.base import ChainError
    from distributed_training.node.start import NetworkFailure, fetch_tokenizer
    from distributed_training.protocol.scoring import random_block_range
    from distributed_training.scoring.evaluator import EvaluationModel, Evaluator, evaluation_device
    from distributed_training.scoring.score_preview import (
        NotJudgeable,
        Previewer,
        choose_miners,
        read_judged,
        read_round_notes,
    )
    from distributed_training.scoring.upload import pages_of
    from distributed_training.store.errors import StoreError

    if options.background:
        # Every cycle and every byte is left to a miner that trains on this machine. Before torch
        # starts threads: on Linux each inherits the niceness of the one that starts it.
        os.nice(19)
        torch.set_num_threads(1)
        tell(
            "next to the miner of this machine this runs at nice 19 and with one thread, so it "
            "may take minutes for each upload"
        )
        # Where the machine's memory runs out, the kernel ends this process and not a rank.
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
    with ExitStack() as stack:
        # The error that ends the look reports once what failed while it tried again.
        chain_log = logging.getLogger("distributed_training.chain")
        stack.callback(chain_log.setLevel, chain_log.level)
        chain_log.setLevel(logging.ERROR)
        try:
            sources, uids = find_sources(config, options, stack)
            # For tokenizer and global weights; never a miner's run folder.
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            folder = cache / "distributed-training" / "score"
            if options.cache or options.subnet:
                folder = Path(options.cache or options.subnet / "score")
            # Once for all looks: tokenizer and model take longer to load than most looks.
            limit = BACKGROUND_SEQUENCES if options.background else 0
            limit = limit if options.sequences is None else options.sequences
            tell("reading the tokenizer")
            tokenizer = fetch_tokenizer(config, folder)
            pages = pages_of(config, *tokenizer, limit=limit)
        except NetworkFailure as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        model: EvaluationModel | None = None
        # Unseeded, as a validator's: text that is known before could be trained on.
        generator = random.Random()
        looked = False
        while True:
            try:
                # Once: the chain moves on while buckets are read, and all are judged alike.
                block = sources.block()
                try:
                    bucket = sources.global_bucket()
                except StoreError as error:
                    raise NotJudgeable(
                        f"the global bucket cannot be found ({error}): check chain.master_hotkey"
                    ) from None
                miners = None if options.subnet else config.run_folder.parent
                tell("reading the global state that uploads are judged against")
                judged = read_judged(bucket, folder / "global", config, block=block, miners=miners)
                if model is None or list(model.schema) != list(judged.schema):
                    device = evaluation_device(config.miner.device)
                    model = EvaluationModel(model_config=judged.model_config, device=device)
                previewer = Previewer(
                    judged=judged,
                    open_bucket=sources.open_bucket,
                    evaluator=Evaluator(model=model, pages=pages),
                    age_limit=config.validator.upload_age_limit,
                    timeout=timedelta(seconds=options.timeout),
                    tell=tell,
                )
                drawn = generator.randrange(*random_block_range(block))
                preview = previewer.run(
                    choose_miners(sources.miners(), uids),
                    random_blocks=options.random_block or [drawn],
                    notes=read_round_notes(bucket),
                )
                looked = True
                report_preview(preview, config.run_folder, as_json=options.json)
            # torch has a plain RuntimeError for a lack of memory; reason() raises all others again.
            except (NotJudgeable, ChainError, ConfigError, MemoryError, RuntimeError) as error:
                # A uid that nobody has any more may come back; at once it is a wrong flag.
                if isinstance(error, ConfigError) and not looked:
                    raise
                # With --watch it continues: whatever was in the way may pass.
                print(f"error: {reason(error)}", file=sys.stderr, flush=True)
                if options.watch is None:
                    return 1
            if options.watch is None:
                return 0
            time.sleep(options.watch)


def find_sources(
    config: Config, options: argparse.Namespace, stack: ExitStack
) -> tuple[Sources, list[int] | None]:
    """Return the sources and the uids to score, None for all.

    Raises ConfigError, NetworkFailure.
    """
    from distributed_training.chain.identity import load_wallet
    from distributed_training.node.buckets import open_own
    from distributed_training.scoring.score_preview import on_chain
    from distributed_training.scoring.upload import folder_reader
    from distributed_training.store.bucket_reader import BucketReader

    uids: list[int] = options.uid or []
    instead: dict[int, BucketReader] = {}
    if options.bucket or options.folder:
        if len(uids) != 1:
            raise ConfigError(
                "--folder and --bucket hold one miner's upload, and its uid decides on which text "
                "it is judged, so nothing was scored: give one --uid"
            )
        if options.folder:
            instead[uids[0]] = folder_reader(options.folder, run=config.store.run)
        else:
            instead[uids[0]] = BucketReader(open_own(config.store, options.bucket, write=False))
    hotkey = None if options.all or uids else load_wallet(config.chain).ss58  # before any waiting
    tell("asking the chain for its miners")
    timeout = timedelta(seconds=options.timeout)
    master = None if options.subnet else config.miner.master_ss58_address
    sources = on_chain(config, stack, master=master, timeout=timeout, instead=instead)
    if hotkey is None:
        return sources, None if options.all else uids
    mine = [neuron.uid for neuron in sources.miners() if neuron.hotkey == hotkey]
    if not mine:
        raise ConfigError(
            f"hotkey {hotkey} is no miner with an endpoint on subnet {config.chain.netuid}, so it "
            "is not scored: start the miner, or give --uid N or --all"
        )
    return sources, mine


def reason(error: BaseException) -> str:
    """Return in one line why a look failed. Raises what is a fault of this program."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        first = str(error).partition(". ")[0]
        return (
            f"the GPU's memory is not enough ({first}), so nothing was scored: give "
            "--neuron.device cpu, or run this on another machine"
        )
    # torch has no type for it on the CPU.
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return (
            "this machine's memory is not enough for two copies of the weights, so nothing was "
            "scored: run this on another machine"
        )
    if type(error) is RuntimeError:
        raise error
    return str(error)


def report_preview(preview: Preview, run_folder: Path, *, as_json: bool) -> None:
    """Print the preview, and leave it for the dashboard of the miner whose run folder it is."""
    found = to_json(preview)
    # Nowhere else: with a score file any folder would look like a miner's.
    if (run_folder / "events.jsonl").exists():
        with suppress(OSError):  # a full disk is the miner's to report
            file = run_folder / SCORE_FILE
            write_json(file, {"time": time.time(), **found}, durable=False)
    try:
        print(json.dumps(found) if as_json else "\n".join(lines_of(preview)), flush=True)
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


# --- the output: two lines for each miner, or JSON ------------------------------------------------


def lines_of(preview: Preview) -> list[str]:
    """Say of each miner what was found, and below it the cause and its one fix."""
    blocks = ", ".join(map(str, preview.random_blocks))
    lines = [
        f"block {preview.block}, outer step {preview.outer_step} is judged, random block {blocks}; "
        f"{preview.seconds:.1f} s"
    ]
    for row in preview.rows:
        repository, judgement, cause = row.repository, row.judgement, row.cause
        found = [repository.tag or "no upload"]
        if repository.age is not None:
            age, limit = repository.age.total_seconds(), row.age_limit.total_seconds()
            found.append(f"{age:.0f} s old of {limit:.0f} s")
        if judgement is not None and judgement.random:
            found.append(f"random {_percent(judgement.random)}")
        if judgement is not None and judgement.assigned:
            found.append(f"assigned {_percent(judgement.assigned)}")
            chance = "" if judgement.chance is None else f" ({100 * judgement.chance:.0f} %)"
            wins = "yes" if judgement.assigned_wins else "no"
            found.append(f"assigned gains more: {wins}{chance}")
        lines.append(f"uid {row.neuron.uid:03d}: {', '.join(found)}")
        verdict = "nothing stands in its way"
        if cause is not None:
            why = f" ({row.reason})" if row.reason else ""
            verdict = f"{cause.costs}{why}. Fix: {cause.remedy}"
        lines.append("         " + "; ".join(filter(None, (verdict, row.of_round))))
    return lines


def _percent(found: Comparison) -> str:
    reach = 100 * (found.interval[1] - found.relative)
    return f"{100 * found.relative:+.2f}" + (f" ± {reach:.2f} %" if math.isfinite(reach) else " %")


def to_json(preview: Preview) -> dict[str, Any]:
    """Return the preview as JSON: losses in nats per token, relative improvements, ages in seconds.

    What is not known is null.
    """
    miners = []
    for row in preview.rows:
        age, judgement, cause = row.repository.age, row.judgement, row.cause
        fields: dict[str, Any] = {
            "uid": row.neuron.uid,
            "hotkey": row.neuron.hotkey,
            "revision": row.repository.tag,
            "repo_valid": row.repository.valid,
            "age_seconds": age.total_seconds() if age is not None else None,
            "age_limit_seconds": row.age_limit.total_seconds(),
            "cause": cause.name if cause else None,
            "reason": row.reason,
            "costs": cause.costs if cause else "",
            "remedy": cause.remedy if cause else "",
            "of_round": row.of_round,
            "assigned_wins": judgement.assigned_wins if judgement else None,
            "assigned_wins_chance": judgement.chance if judgement else None,
        }
        for name in ("random", "assigned"):
            found: Comparison | None = getattr(judgement, name, None)
            before, after = found.losses if found else (None, None)
            fields[f"{name}_blocks"] = list(found.blocks) if found else []
            fields[f"{name}_before"], fields[f"{name}_after"] = before, after
            fields[f"{name}_relative"] = found.relative if found else None
            # An interval of one micro-batch has no end, and JSON has no infinity.
            bounds = found.interval if found else (math.inf, math.inf)
            for bound, value in zip(("low", "high"), bounds, strict=True):
                fields[f"{name}_{bound}"] = value if math.isfinite(value) else None
        miners.append(fields)
    return {
        "block": preview.block,
        "global_outer_step": preview.global_outer_step,
        "outer_step": preview.outer_step,
        "random_blocks": list(preview.random_blocks),
        "seconds": round(preview.seconds, 3),
        "miners": miners,
    }
