"""Settings that say where other settings come from, and flags that do nothing here."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from .flags import SETTINGS, flag
from .values import File, Secret, Text


@dataclass(frozen=True, config=SETTINGS)
class GeneralSettings:
    """Where defaults come from."""

    preset: Literal[
        "public", "public-12gb", "public-16gb", "public-24gb", "public-40gb", "public-80gb",
        "public-141gb", "local",
    ] = flag("preset", "public", env="DT_PRESET")  # fmt: skip
    """defaults for the public network, with or without what fits GPUs of so much memory (estimated,
    not yet measured), or for a subnet on this machine"""
    config: File | None = flag("config", None)
    """TOML file of flags, e.g. [neuron] upload_steps = 60; flags win over it"""


@dataclass(frozen=True, config=SETTINGS)
class NoEffectSettings:
    """Flags that operators of the public network have in their start scripts and that do nothing
    here: accepted, and the printed configuration says why."""

    global_batch_size_train: int = flag("neuron.global_batch_size_train", 35200, ge=0, le=2**31)
    """no peer reads it; the batch of a step is --neuron.local_batch_size_train_effective"""
    quantization_bins: int = flag("neuron.quantization_bins", 256, ge=0, le=2**31)
    """gradients travel as float32 values and int16 indices; nothing is quantized"""
    quantization_range: int = flag("neuron.quantization_range", 6, ge=0, le=2**31)
    """gradients travel as float32 values and int16 indices; nothing is quantized"""
    dont_wandb_log: bool = flag("neuron.dont_wandb_log", False)
    """nothing is sent to Weights & Biases unless --neuron.wandb asks for it"""
    influxdb_url: Text = flag("neuron.influxdb_url", "")
    """this miner does not send anything to InfluxDB"""
    influxdb_org: Text = flag("neuron.influxdb_org", "distributed-training")
    """this miner does not send anything to InfluxDB"""
    influxdb_bucket: Text = flag("neuron.influxdb_bucket", "distributed-training-metrics")
    """this miner does not send anything to InfluxDB"""
    influxdb_token: Secret | None = flag("neuron.influxdb_token", None, env="INFLUXDB_TOKEN")
    """this miner does not send anything to InfluxDB"""
    no_prompt: bool = flag("no_prompt", False)
    """this miner never asks questions"""
    strict: bool = flag("strict", False)
    """unknown flags are always errors"""
