"""Settings of log lines, events and metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from .flags import SETTINGS, flag
from .values import Bytes, File, Secret, Text


@dataclass(frozen=True, config=SETTINGS)
class TelemetrySettings:
    """What is said, how loudly, and where it is kept."""

    debug: bool = flag("logging.debug", False)
    """log debug lines (never secrets)"""
    trace: bool = flag("logging.trace", False)
    """log debug lines of hivemind, bittensor and boto3 too"""
    info: bool = flag("logging.info", True)
    """log information lines; off: warnings and errors only"""
    record_log: bool = flag("logging.record_log", False)
    """also write the log to a file in --logging.logging_dir"""
    logging_dir: File | None = flag("logging.logging_dir", None)
    """folder for the log file (default: the run folder)"""
    show_all_rank_logs: bool = flag(
        "neuron.show_all_rank_logs", False, aliases=("show_all_rank_logs",)
    )
    """information lines of every rank instead of rank 0 only"""
    dont_save_events: bool = flag("neuron.dont_save_events", False)
    """do not write events.jsonl into the run folder"""
    events_retention_size: Bytes = flag(
        "neuron.events_retention_size", Bytes(2 * 1024**3), ge=Bytes(1024), le=Bytes(2**50)
    )
    """bytes of events.jsonl to keep (half is the current file, half the one before), e.g. 2GiB"""
    page_port: Annotated[int, Field(ge=0, le=65535)] | Literal["off"] = flag(
        "neuron.page_port", 8010
    )
    """port of the page that shows this miner in a browser; 0: any free one"""
    page_host: Text = flag("neuron.page_host", "127.0.0.1")
    """address of the page; any other than this machine's own needs DT_PAGE_TOKEN"""
    page_token: Secret | None = flag("neuron.page_token", None, env="DT_PAGE_TOKEN")
    """16 characters or more that whoever opens the page must know"""
    tensorboard_dir: File | None = flag("neuron.tensorboard_dir", None)
    """write every step's figures for `tensorboard --logdir` into a folder of this miner there"""
    wandb: Literal["off", "online", "offline"] = flag("neuron.wandb", "off")
    """send every step's figures to Weights & Biases; offline: keep them in the run folder for
    `wandb sync`"""
    wandb_project: Text = flag("neuron.wandb_project", "distributed_training")
    """project of W&B"""
    wandb_entity: Text = flag("neuron.wandb_entity", "")
    """team of W&B (default: that of the key)"""
    wandb_api_key: Secret | None = flag("neuron.wandb_api_key", None, env="WANDB_API_KEY")
    """key of W&B (default: that of `wandb login`)"""
