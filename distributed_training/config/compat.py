"""Flags operators of the public network have in their start scripts that do nothing here.

They are accepted, and the resolved configuration says why they have no effect. A room that starts
to use one declares it in its settings; the entry here is then ignored and should be deleted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NoEffect:
    name: str
    hint: Any
    default: Any
    why: str
    secret_env: str | None = None  # set: a secret, so it is refused on the command line


_NO_WANDB = "this miner does not send anything to Weights & Biases"
_NO_INFLUX = "this miner does not send anything to InfluxDB"

NO_EFFECT: tuple[NoEffect, ...] = (
    NoEffect(
        "neuron.global_batch_size_train",
        int,
        35200,
        "no peer reads it; the batch of a step is --neuron.local_batch_size_train_effective",
    ),
    NoEffect(
        "neuron.quantization_bins",
        int,
        256,
        "gradients travel as float32 values and int16 indices; nothing is quantized",
    ),
    NoEffect(
        "neuron.quantization_range",
        int,
        6,
        "gradients travel as float32 values and int16 indices; nothing is quantized",
    ),
    NoEffect("neuron.dont_wandb_log", bool, False, _NO_WANDB),
    NoEffect("neuron.wandb_project", str, "distributed_training", _NO_WANDB),
    NoEffect("neuron.wandb_entity", str, "kmfoda", _NO_WANDB),
    NoEffect("neuron.influxdb_url", str, "", _NO_INFLUX),
    NoEffect("neuron.influxdb_org", str, "distributed-training", _NO_INFLUX),
    NoEffect("neuron.influxdb_bucket", str, "distributed-training-metrics", _NO_INFLUX),
    NoEffect("neuron.influxdb_token", str, "", _NO_INFLUX, secret_env="INFLUXDB_TOKEN"),
    NoEffect("no_prompt", bool, False, "this miner never asks questions"),
    NoEffect("strict", bool, False, "unknown flags are always errors"),
)
