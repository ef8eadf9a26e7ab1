"""What earlier ranks of this run folder proved: settings that are right, and GPUs that are there.

Status 2 says that only the operator can help, and pm2 leaves the miner down. But a store that
answers 403 for an hour, a disk that is full, or a mount that comes late after a reboot look like a
bad setting. What tells them apart is that the same settings worked before. So the launcher writes
``proven.json`` once its ranks have run for long and come to a checkpoint. While it matches, a
refusal is said and tried again later. A changed setting, or another version of the program, does
not match: then an operator is there to read the line.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

from pydantic import SecretStr

import distributed_training
from distributed_training.common.files import atomic_file, read_json_object
from distributed_training.config import Config
from distributed_training.diagnostics.nvml import visible_gpu_count

log = logging.getLogger(__name__)

_SOURCES = Path(distributed_training.__file__).parent

FILE = "proven.json"  # in the run folder
#: Settings that a batch system chooses anew for each job.
_OF_ONE_JOB = frozenset({"rdzv_endpoint", "node_rank"})


class Proof:
    """``holds``: ranks ran for long with exactly these settings. ``gpus``: on how many GPUs ranks
    of this folder ran, whatever the other settings were; 0 where ``CUDA_VISIBLE_DEVICES`` hides
    all of them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._path = config.run_folder.absolute() / FILE
        self._settings = _digest(config)
        self._written = False  # by this process
        content = read_json_object(self._path) or {}
        gpus = content.get("gpus")
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        self.holds = content.get("settings") == self._settings
        self.gpus = gpus if type(gpus) is int and gpus > 0 and not hidden else 0

    def give(self, *, ranks: int) -> None:
        """``ranks`` of this machine have run for long. Writes at the first call only."""
        if self._written:
            return
        self._written = self.holds = True
        if self._config.miner.device != "cpu" and visible_gpu_count():
            self.gpus = ranks
        content = {"settings": self._settings, "gpus": self.gpus}
        try:
            with atomic_file(self._path, private=True) as file:
                file.write(json.dumps(content).encode())
        except OSError as error:
            log.warning(
                "%s was not written (%s), so a launcher after this one ends with status 2 where "
                "this one would try again: free the disk of --neuron.run_folder",
                self._path,
                error.strerror,
            )


def _digest(config: Config) -> str:
    """Of the program's sources and all settings, the secrets too: new keys may be wrong."""
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.rglob("*.py")):
        digest.update(source.read_bytes())
    values = {
        name: value.get_secret_value() if isinstance(value, SecretStr) else str(value)
        for name, value in config.values.items()
        if name not in _OF_ONE_JOB
    }
    digest.update(json.dumps(values, sort_keys=True).encode())
    return digest.hexdigest()
