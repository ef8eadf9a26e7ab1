"""The resolved configuration: one settings object for each package, and the presets under it.

A preset is a named set of flag values between a flag's default and what the operator gives.
``public`` holds nothing: the network's file says it all. ``public-24gb`` and its like are what fits
GPUs of so much memory. ``local`` is a subnet on one machine without a GPU; the local network's
launcher gives addresses, ports and keys as flags and environment variables on top of it.
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from distributed_training.network import Network

from .settings import (
    ChainSettings,
    DataSettings,
    DiagnosticsSettings,
    GeneralSettings,
    MinerSettings,
    NodesSettings,
    StoreSettings,
    SwarmSettings,
    TelemetrySettings,
    TrainingSettings,
    ValidatorSettings,
)

Kind = Literal["miner", "validator"]


def frozen(values: Mapping[str, Any]) -> MappingProxyType[str, Any]:
    """Return ``values`` as nobody can change them."""
    return MappingProxyType(dict(values))


# A Config is pickled on its way to the ranks, and pickle does not find mappingproxy by its name.
copyreg.pickle(MappingProxyType, lambda view: (frozen, (dict(view),)))


@dataclass(frozen=True)
class AllSettings:
    """The settings of all packages, in the order of the help."""

    general: GeneralSettings
    miner: MinerSettings
    nodes: NodesSettings
    training: TrainingSettings
    data: DataSettings
    store: StoreSettings
    swarm: SwarmSettings
    chain: ChainSettings
    diagnostics: DiagnosticsSettings
    telemetry: TelemetrySettings
    validator: ValidatorSettings


#: The operator's settings, in the folder a miner is started in, beside ``.env``. The tools for that
#: miner read it too.
OPERATORS_FILE = Path("miner.toml")

#: What an operator commonly gives, by task: ``--help`` shows these, ``--help-all`` the rest too.
TASKS: Mapping[str, tuple[str, ...]] = {
    "Network and wallet": (
        "network",
        "wallet.name",
        "wallet.hotkey",
        "wallet.path",
        "subtensor.chain_endpoint",
    ),
    "Where others reach this machine": (
        "axon.port",
        "axon.external_ip",
        "axon.external_port",
        "dht.port",
        "dht.external_port",
    ),
    "This machine": (
        "preset",
        "nproc_per_node",
        "neuron.device",
        "neuron.local_batch_size_train",
        "neuron.activation_checkpointing",
        "neuron.name",
        "neuron.run_folder",
        "config",
    ),
    "Data": ("data.source", "data.workers", "data.cache_dir"),
    "Uploads": ("r2.account_id", "neuron.upload_steps"),
    "Watching and stopping": ("neuron.page_port", "neuron.stop_timeout"),
}
USUAL = frozenset(name for names in TASKS.values() for name in names)

TITLES: Mapping[str, str] = {
    "usual": "Usual",
    "general": "General",
    "miner": "Loop and launcher",
    "nodes": "More than one machine",
    "training": "Training",
    "data": "Data",
    "store": "Object store",
    "swarm": "Swarm",
    "chain": "Chain and wallet",
    "diagnostics": "Diagnostics",
    "telemetry": "Log and events",
    "validator": "Validator",
    "network": "Set by the network's file",
}


# Memory of one GPU in GB -> activation checkpointing, sequences per micro-batch, and how many such
# GPUs the public network's model of 4 billion parameters takes then. Estimates of common.memory,
# not yet measured. Where the optimizer's state lies and when gradients are reduced stays 'auto':
# that depends on the number of GPUs, and the start works it out from the memory there is.
CARDS: Mapping[int, tuple[str, int, int]] = {
    12: ("full", 4, 8),
    16: ("full", 4, 4),
    24: ("full", 4, 2),
    40: ("budget", 4, 2),
    48: ("budget", 4, 1),
    80: ("none", 4, 1),
    141: ("none", 8, 1),
}

PRESETS: Mapping[str, Mapping[str, str]] = {
    "public": {},
    **{
        f"public-{size}gb": {
            "neuron.activation_checkpointing": checkpointing,
            "neuron.local_batch_size_train": str(micro_batch),
        }
        for size, (checkpointing, micro_batch, _) in CARDS.items()
    },
    "local": {
        "neuron.device": "cpu",
        "chain.seconds_per_block": "1",
        "neuron.page_port": "off",  # the whole subnet has one
        "neuron.global_tokenizer_name": "bytes",
        "data.source": "stdlib",
        # A block lasts seconds, as it lasts minutes on the public network: validators refuse an
        # upload whose newest block is older than half the blocks between two rounds.
        "data.pages_per_block": "1",
        "data.rows_per_page": "2",
        "neuron.sequence_length": "256",
        "neuron.local_batch_size_train": "2",
        "neuron.preview_sequences": "4",  # a local block has few
        "neuron.local_batch_size_train_effective": "16",
        # A public warm-up of 1000 steps would be longer than the whole local run.
        "neuron.learning_rate": "0.001",
        "neuron.warmup_steps": "20",
        "neuron.total_steps": "2000",
        "neuron.upload_steps": "10",
        "neuron.upload_slack": "2",
        "neuron.minimum_valid_inner_step": "5",
        "neuron.min_group_size": "2",
        "neuron.blocks_per_allreduce": "60",
        "neuron.epoch_length": "10",
        "neuron.epoch_check_blocks": "2",
        "neuron.checkpoint_steps": "10",
        "neuron.checkpoint_interval": "0",
        "neuron.stop_timeout": "30",
        "neuron.round_reload_timeout": "60",
        # The public bootstrap peer has no place here; the local network hands its own over.
        "neuron.initial_peers": "none",
        "neuron.min_matchmaking_time": "3",
        "neuron.request_timeout": "2",
        "neuron.next_chunk_timeout": "10",
        "neuron.allreduce_timeout": "25",
        "neuron.round_timeout": "40",
        "dht.ip": "127.0.0.1",
        "dht.listen_ip": "127.0.0.1",
        "axon.ip": "127.0.0.1",
        "axon.external_ip": "127.0.0.1",
        "diagnostics.minimum_disk_gb": "0.5",
        "validator.blocks_per_allreduce_later": "0",
        "validator.sweep_interval": "1",
        "validator.minimum_peers": "2",
        "validator.score_blocks": "10",
        "validator.evaluation_pages": "1",
        "validator.evaluation_sequences": "8",
    },
}


@dataclass(frozen=True)
class Config(AllSettings):
    """The resolved configuration. Secrets inside are SecretStr, so ``repr`` is safe to log."""

    kind: Kind
    values: Mapping[str, Any] = field(repr=False)  # flag name -> value
    sources: Mapping[str, str] = field(repr=False)  # flag name -> where it was given, if anywhere
    warnings: tuple[str, ...] = ()  # what was noticed while the files were read
    network: Network | None = None  # that --network names; None: the public one, or a preset's

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a flag by its name (``neuron.upload_steps``)."""
        return self.values.get(name, default)

    @property
    def preset(self) -> str:
        return self.general.preset

    @property
    def is_public(self) -> bool:
        """True on the internet: any preset but that of a subnet on this machine."""
        return self.preset.startswith("public")

    @property
    def run_folder(self) -> Path:
        """The folder for what must not be lost; the default names wallet and neuron."""
        return (
            self.miner.run_folder or Path("runs") / f"{self.miner.name}-{self.chain.wallet_hotkey}"
        )
