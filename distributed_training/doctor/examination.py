"""All checks, in an order in which the first failure explains the later ones."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from distributed_training.common.files import read_json_object
from distributed_training.common.memory import ModelShape
from distributed_training.config import Config, ConfigError, problems
from distributed_training.diagnostics.checks import Check, ProbeError, check_gpus
from distributed_training.doctor import machine
from distributed_training.doctor.measure import measure
from distributed_training.doctor.nodes import check_nodes
from distributed_training.doctor.speed import StepEstimate, check_batch, check_speed


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
