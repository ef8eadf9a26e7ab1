"""The resolved configuration: one settings object for each package."""

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
