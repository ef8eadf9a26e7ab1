"""The first steps of every process of a node: its run folder, its log, its tokenizer."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pydantic import SecretStr

from distributed_training.config import Config, ConfigError
from distributed_training.node.failures import NetworkFailure
from distributed_training.telemetry import setup_logging


def make_run_folder(config: Config) -> Path:
    """The folder of everything this node must not lose, absolute; the others that flags name are
    made too. Raises ConfigError for one that cannot be written."""
    folder = config.run_folder
    _make(folder, "--neuron.run_folder", "nothing could be saved")
    _make(config.data.cache_dir, "--data.cache_dir", "every page would be fetched anew")
    _make(config.telemetry.logging_dir, "--logging.logging_dir", "no log would be kept")
    _make(config.telemetry.tensorboard_dir, "--neuron.tensorboard_dir", "no curve would be drawn")
    return folder.absolute()


def _make(folder: Path | None, flag: str, consequence: str) -> None:
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # a file system may be read-only
            pass
    except OSError as error:
        raise ConfigError(
            f"{flag} {folder} cannot be written ({error.strerror}), so {consequence}: give a "
            "folder of yours"
        ) from None


def start_log(config: Config, folder: Path, *, name: str, rank: int = 0) -> None:
    """Log to the terminal and the run folder; every secret of the configuration is masked."""
    secrets = [value for value in config.values.values() if isinstance(value, SecretStr)]
    setup_logging(config.telemetry, rank=rank, name=name, folder=folder, secrets=secrets)


def fetch_tokenizer(config: Config, folder: Path) -> tuple[Path, int]:
    """The tokenizer's file below ``folder`` and its end-of-sequence token. Raises ConfigError;
    NetworkFailure when the hub does not answer, for nobody need change anything then."""
    from distributed_training.data.tokenizer import build_tokenizer

    name = config.miner.global_tokenizer_name
    try:
        return build_tokenizer(name, folder / "tokenizer")
    except (ValueError, OSError) as error:
        if _hub_is_away(error):
            raise NetworkFailure(
                f"the tokenizer {name} is not on this machine and the Hugging Face hub does not "
                "answer, so no text could be read: check the network, or give a folder with "
                "--neuron.global_tokenizer_name"
            ) from None
        raise ConfigError(
            f"the tokenizer {name} cannot be loaded ({error}), so no text could be read: check the "
            "network or --neuron.global_tokenizer_name"
        ) from None


def _hub_is_away(error: BaseException | None) -> bool:
    """Whether what transformers made of it began with a hub that did not answer."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    while error is not None:
        if isinstance(error, LocalEntryNotFoundError):  # neither the hub nor its cache has it
            return True
        if isinstance(error, HfHubHTTPError):
            return error.response.status_code == 429 or error.response.status_code >= 500
        error = error.__cause__
    return False
