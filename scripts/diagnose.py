#!/usr/bin/env python
"""Checks machine, configuration, keys and data before training, and measures the step time.

    python scripts/diagnose.py [--json] [--model SIZE|config.json] [--uid N] [--offline] [flags]...

    python scripts/diagnose.py                                 the public network
    python scripts/diagnose.py --preset local --offline        this machine alone
    python scripts/diagnose.py --model 1b --nproc_per_node 4   another model, four ranks
    python scripts/diagnose.py --diagnostics.measure 0         without the 10-second measurement

Takes every flag of neurons/miner.py, .env and the environment, so what it says holds for the miner
started the same way. Exit status: 0 nothing failed (warnings are allowed), 1 something failed, 2 a
flag is wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from distributed_training.common.files import read_json_object
from distributed_training.common.memory import (
    Arrangement,
    ModelShape,
    device_memory,
    disk_space,
    host_memory,
)
from distributed_training.common.ports import free_ports
from distributed_training.config import Config, ConfigError, exit_with, load_config, problems
from distributed_training.config.arguments import Parser, argument, ranged
from distributed_training.diagnostics import Check, failed
from distributed_training.diagnostics.checks import check_disk
from distributed_training.diagnostics.doctor import (
    ProbeError,
    StepEstimate,
    check_batch,
    check_memory,
    check_python,
    check_speed,
    check_torch,
    run_probe,
    start_checks,
)
from distributed_training.diagnostics.nvml import NvmlSampler
from distributed_training.miner.launcher import default_ranks
from distributed_training.miner.rank_group import rank_environment_defaults, rank_variables

MEASURE = Path(__file__).with_name("measure_step.py")
# Loading torch and the model on every rank, before the measured time begins.
MEASURE_START = timedelta(minutes=3)
_MARKS = {"ok": "✓", "warn": "!", "fail": "✗"}


def build_parser() -> Parser:
    parser = Parser(add_help=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", type=argument(str))
    parser.add_argument("--uid", type=ranged(0, 65535))
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    return parser


def main(argv: Sequence[str]) -> int:
    options, flags = build_parser().parse_known_args(argv)
    if options.help:
        print(__doc__)
        return 0
    try:
        config = load_config("miner", flags, check=False)
        model = model_config(config, options.model)
    except ConfigError as error:
        return exit_with(error)

    logging.disable(logging.CRITICAL)  # libraries that retry; the findings say what came of it
    report = Report(quiet=options.json)
    ranks = config.miner.nproc_per_node or default_ranks(config)
    doctor = Doctor(config, flags, ranks, model, options.offline, options.uid, report.note)
    for check in doctor.run():
        report.add(check)
    report.finish()
    return 1 if failed(report.checks) else 0


class Report:
    """Prints each finding as it comes, or all of them as JSON at the end."""

    def __init__(self, *, quiet: bool) -> None:
        self.checks: list[Check] = []
        self._quiet = quiet

    def note(self, text: str) -> None:
        if not self._quiet:
            print(f"  … {text}", flush=True)

    def add(self, check: Check) -> None:
        self.checks.append(check)
        if self._quiet:
            return
        print(f"{_MARKS[check.status]} {check.status:<5}{check.name:<18} {check.finding}")
        if check.status != "ok" and check.remedy:
            print(f"{'':25}→ {check.remedy}")
        sys.stdout.flush()

    def finish(self) -> None:
        count = {s: sum(c.status == s for c in self.checks) for s in _MARKS}
        if self._quiet:
            print(json.dumps([dataclasses.asdict(check) for check in self.checks], indent=2))
        else:
            print(f"{count['ok']} ok, {count['warn']} warnings, {count['fail']} failed")


@dataclasses.dataclass
class Doctor:
    """All checks, in an order in which the first failure explains the later ones."""

    config: Config
    flags: Sequence[str]
    ranks: int
    model: tuple[dict[str, Any], str]
    offline: bool
    uid: int | None
    tell: Callable[[str], None]

    def run(self) -> list[Check]:
        config, training = self.config, self.config.training
        checks = [_configuration(line) for line in problems(config)] or [
            Check("configuration", "ok", f"preset {config.preset}, {self.ranks} rank(s)")
        ]
        checks += [check_python(), check_torch()]
        checks += start_checks(config, folder=config.run_folder, ranks=self.ranks)
        micro = training.local_batch_size_train
        known = micro if isinstance(micro, int) else None
        effective = training.local_batch_size_train_effective
        batch = check_batch(micro_batch=known, effective=effective, world_size=self.ranks)
        checks += [batch, *self._size(known or 1)]
        if not self.offline:
            checks += self._network()
        if config.diagnostics.measure > timedelta(0) and not failed([batch]):
            checks += self._measure()
        return checks

    def _size(self, micro_batch: int) -> list[Check]:
        content, origin = self.model
        try:
            shape = ModelShape.from_config(content)
        except ValueError as error:
            remedy = "give --model with the config.json of a Llama-like model"
            return [Check("model", "warn", f"{origin}: {error}: size not known", remedy)]
        training, miner = self.config.training, self.config.miner
        gpu = gpu_bytes() if miner.device != "cpu" else None
        how = Arrangement(
            world_size=self.ranks,
            micro_batch=micro_batch,
            sequence_length=training.sequence_length,
            checkpointing=training.activation_checkpointing,  # type: ignore[arg-type]
            keep_unsharded=training.keep_unsharded == "on",
            reduce_at_last=training.gradient_sync == "last",
            offload_optimizer=training.offload_optimizer == "on",
            cuda=gpu is not None,
        )
        size = Check("model", "ok", f"{shape.parameters / 1e6:.1f} M parameters ({origin})")
        memory = check_memory(
            device_memory(shape, how),
            host_memory(shape, how),
            device_bytes=gpu,
            host_bytes=host_bytes(),
        )
        disk = disk_space(shape, keep_checkpoints=miner.keep_checkpoints).total
        folder = self.config.run_folder
        room = check_disk(folder, needed_bytes=max(0, disk - bytes_under(folder)))
        return [size, *memory, dataclasses.replace(room, name="disk for it")]

    def _network(self) -> list[Check]:
        self.tell("asking for bucket, tokenizer and data")
        if self.uid is None:
            remedy = "give --uid N, the miner's uid on the subnet"
            bucket = Check("bucket", "warn", "not looked at: its name ends in the uid", remedy)
        else:
            uid = self.uid
            bucket = run_probe(
                "bucket", lambda: probe_bucket(self.config, uid), remedy=_KEYS_REMEDY
            )
        return [
            bucket,
            run_probe("tokenizer", lambda: probe_tokenizer(self.config), remedy=_TOKENIZER_REMEDY),
            run_probe("data", lambda: probe_data(self.config), remedy=_DATA_REMEDY),
        ]

    def _measure(self) -> list[Check]:
        seconds = self.config.diagnostics.measure.total_seconds()
        self.tell(f"measuring for {seconds:.0f} s, after the model was built")
        try:
            measured = measure(self.flags, ranks=self.ranks, model=self.model[0], seconds=seconds)
        except ProbeError as error:
            remedy = "mend what failed above; --diagnostics.measure 0 leaves the measurement out"
            return [Check("step time", "fail", str(error), remedy)]
        estimate = StepEstimate(
            micro_batch_seconds=measured["micro_batch_seconds"],
            micro_batches=measured["micro_batches"],
            upload_steps=self.config.get("neuron.upload_steps"),
            minimum_inner_step=self.config.get("neuron.minimum_valid_inner_step"),
        )
        return check_speed(estimate, slow_step=self.config.diagnostics.slow_step)


_KEYS_REMEDY = "check the R2_ variables in .env, and bucket and tokens in the R2 dashboard"
_DATA_REMEDY = "check the network, --data.source and --data.rows_url"
_TOKENIZER_REMEDY = "check the network and --neuron.global_tokenizer_name"


def _configuration(line: str) -> Check:
    cause, _, remedy = line.rpartition(": ")
    return Check("configuration", "fail", cause or line, remedy if cause else "")


def model_config(config: Config, wanted: str | None) -> tuple[dict[str, Any], str]:
    """The model's ``config.json`` and where it comes from: ``--model``, else what the run folder
    holds of the global state, else an assumption that is named. Raises ConfigError."""
    from distributed_training.training.sizes import named_config

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
    found = sorted(config.run_folder.glob("**/config.json"), key=lambda p: p.stat().st_mtime)
    for path in reversed(found):
        with contextlib.suppress(OSError, ValueError):
            return json.loads(path.read_bytes()), str(path)
    name = "tiny" if config.preset == "local" else "4b"
    return named_config(name), f"assumed: {name}; --model tells otherwise"


def probe_bucket(config: Config, uid: int) -> str:
    """Write, read back and delete a small object; the reading key must not be able to write, since
    it is published on the chain. Raises ProbeError."""
    from distributed_training.protocol.names import miner_bucket
    from distributed_training.store.errors import AccessDeniedError, StoreError
    from distributed_training.store.s3 import S3ObjectStore

    bucket = miner_bucket(config.miner.global_model_name, uid)
    key, content = f"diagnose-{secrets.token_hex(8)}", b"diagnose"
    try:
        writer = S3ObjectStore.from_settings(config.store, bucket=bucket, write=True)
        reader = S3ObjectStore.from_settings(config.store, bucket=bucket, write=False)
        writer.put(key, content)
        try:
            if reader.get(key, limit=64) != content:
                raise ProbeError(f"{bucket}: R2_READ does not see what R2_WRITE wrote")
            with contextlib.suppress(AccessDeniedError):
                reader.put(key, content)
                raise ProbeError(
                    f"{bucket}: the key R2_READ may also write, and everybody reads it on the chain"
                )
        finally:
            writer.delete([key])
    except (StoreError, ValueError) as error:
        raise ProbeError(str(error)) from None
    return f"{bucket}: R2_WRITE writes, R2_READ only reads"


def probe_tokenizer(config: Config) -> str:
    """Fetch the tokenizer and encode a sentence. Raises ProbeError, OSError."""
    from distributed_training.data import TextTokenizer, build_tokenizer

    name = config.miner.global_tokenizer_name
    with tempfile.TemporaryDirectory() as folder:
        try:
            path, eos_id = build_tokenizer(name, Path(folder))
            tokens = TextTokenizer(path, eos_id=eos_id).encode_rows(["one two"], max_length=16)
        except ValueError as error:
            raise ProbeError(str(error)) from None
    return f"{name}, EOS is {eos_id}, {len(tokens)} tokens for two words"


def probe_data(config: Config) -> str:
    """Ask for the table of rows and for one page. Raises ProbeError."""
    from distributed_training.data import PageUnavailable, open_source

    source = open_source(dataclasses.replace(config.data, request_attempts=2))
    try:
        table = source.num_rows()
        start = time.monotonic()
        texts = source.rows(min(table), 0, split="train", limit=config.data.rows_per_page)
    except PageUnavailable as error:
        raise ProbeError(f"{config.data.source}: {error}") from None
    seconds = time.monotonic() - start
    rows = sum(table.values())
    return f"{len(table)} configs, {rows} rows; a page of {len(texts)} rows in {seconds:.1f} s"


def gpu_bytes() -> int | None:
    """Memory of the smallest question: the first visible GPU."""
    sampler = NvmlSampler.open(0)
    if sampler is None:
        return None
    with sampler:
        sample = sampler.sample()
    return round(sample.memory_total_gb * 1e9) if sample else None


def bytes_under(folder: Path) -> int:
    """What this miner has there already: it needs no further room."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # a miner that runs deletes files meanwhile
            total += path.lstat().st_size
    return total


def host_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def measure(
    flags: Sequence[str], *, ranks: int, model: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """Train random tokens for ``seconds`` on all ranks. ProbeError: with the last line it said."""
    environment = os.environ | rank_environment_defaults(ranks=ranks)
    environment["DT_MEASURE"] = json.dumps({"model": model, "seconds": seconds})
    limit = MEASURE_START.total_seconds() + 3 * seconds
    port = free_ports(1)[0]
    with tempfile.TemporaryFile("w+") as output, contextlib.ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            process = subprocess.Popen(
                [sys.executable, str(MEASURE), *flags],
                env=environment | rank_variables(rank, world_size=ranks, port=port),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        deadline = time.monotonic() + limit
        # A rank that failed leaves the others waiting for it.
        while None in [p.poll() for p in processes] and not any(p.poll() for p in processes):
            if time.monotonic() > deadline:
                raise ProbeError(f"no inner step in {limit:.0f} s")
            time.sleep(0.1)
        output.seek(0)
        lines = [line for line in output.read().splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith('{"micro_batch_seconds"'):
            found: dict[str, Any] = json.loads(line)
            return found
    errors = [line for line in lines if "Error" in line or line.startswith("error:")] or lines
    raise ProbeError(f"training failed: {errors[-1].strip() if errors else 'no output'}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
