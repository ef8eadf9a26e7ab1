"""Plan a local subnet's neurons, and start what is around them: object store, chain, wallets."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from distributed_training.common.files import write_bytes
from distributed_training.common.ports import free_ports
from distributed_training.common.processes import Mark
from distributed_training.common.swarm_identity import make_identity
from distributed_training.config.model import PRESETS
from distributed_training.config.settings import StoreSettings
from distributed_training.config.types import ConfigError
from distributed_training.localnet.object_store import ObjectStoreServer
from distributed_training.localnet.processes import Child, stop_together
from distributed_training.protocol.keys import miner_bucket

if TYPE_CHECKING:
    from distributed_training.chain.identity import Wallet
    from distributed_training.chain.registry import RegistryChain
    from distributed_training.store.s3 import S3ObjectStore

#: Where this package is imported from: a checkout, or site-packages.
PACKAGES = Path(__file__).resolve().parents[2]
GLOBAL_BUCKET = StoreSettings().global_model_name  # as on the public network
# An operator's own keys and settings must not reach a subnet that is only for experiments.
FOREIGN_PREFIXES = ("R2_", "BT_", "DT_", "WANDB_", "LOKI_", "AWS_", "HF_", "INFLUXDB_")
# uid u's rank 1 reads the same pages as uid u + 1's rank 0 (protocol: seed = uid + local rank), so
# uids are spaced wider than any world size that makes sense on one machine.
UID_SPACING = 11
VALIDATOR_UID = 200


@dataclass(frozen=True)
class SubnetOptions:
    """The options of a run of the local subnet. ``ranks``: world size of each miner, in order."""

    folder: Path
    ranks: tuple[int, ...] = (2, 1)
    outer_steps: int = 2
    seconds_per_block: float = 1.0
    blocks_per_allreduce: int | None = None  # None: as the preset says
    # Miners without which no round is called, and peers of a group less one. None: all of them, so
    # that a slow start on a busy machine does not leave one out. Lower it to kill miners.
    least_miners: int | None = None
    restart_miners: bool = False  # one that ended with a fault is started again, as pm2 would
    miner_flags: tuple[str, ...] = ()
    validator_flags: tuple[str, ...] = ()
    miner_script: Path | None = None  # None: the project's neurons
    validator_script: Path | None = None

    @property
    def longest(self) -> timedelta:
        """The longest time of a run: two minutes, and half as long again as its round periods."""
        blocks = self.blocks_per_allreduce or int(PRESETS["local"]["neuron.blocks_per_allreduce"])
        return timedelta(seconds=120 + 1.5 * self.outer_steps * blocks * self.seconds_per_block)


@dataclass(frozen=True)
class NeuronPlan:
    """One neuron of a local subnet, before its start."""

    name: str
    kind: Literal["miner", "validator"]
    uid: int
    world_size: int
    folder: Path
    axon_port: int
    dht_port: int

    @property
    def events(self) -> Path:
        """The path of the neuron's events."""
        return self.folder / "events.jsonl"


def parse_ranks(text: str | None, miners: int | None) -> tuple[int, ...]:
    """Parse world sizes of the miners from ``--ranks 2,1`` and ``--miners N``.

    Without ranks the first miner has 2 and the others 1, so that world sizes differ; a shorter list
    is filled with 1. Raises ConfigError.
    """
    try:
        given = [int(word) for word in text.split(",")] if text else [2]
    except ValueError:
        raise ConfigError(
            f"--ranks {text!r} is not a list of numbers, so nothing was started: "
            "give one per miner, e.g. --ranks 2,1"
        ) from None
    if miners is None:
        miners = len(given) if text else 2
    if miners < 1:
        raise ConfigError(
            f"--miners {miners} leaves nobody to train, so nothing was started: give 1 or more"
        )
    if len(given) > miners and text:
        raise ConfigError(
            f"--ranks names {len(given)} miners but --miners {miners} are wanted, so nothing was "
            "started: make them agree"
        )
    ranks = (given + [1] * miners)[:miners]
    if any(not 1 <= rank < UID_SPACING for rank in ranks):
        raise ConfigError(
            f"--ranks {text}: a miner on this machine has 1 to {UID_SPACING - 1} ranks, so nothing "
            "was started: correct --ranks"
        )
    if miners * UID_SPACING > VALIDATOR_UID:
        raise ConfigError(
            f"--miners {miners} is more than the {VALIDATOR_UID // UID_SPACING} that fit here, so "
            "nothing was started: ask for fewer"
        )
    return tuple(ranks)


def plan_neurons(options: SubnetOptions, folder: Path) -> list[NeuronPlan]:
    """Plan the validator first, which uploads the initial model the miners load."""
    ports = iter(free_ports(2 * (len(options.ranks) + 1)))
    plans = [
        NeuronPlan(
            name="validator",
            kind="validator",
            uid=VALIDATOR_UID,
            world_size=1,
            folder=folder / "validator",
            axon_port=next(ports),
            dht_port=next(ports),
        )
    ]
    for i, ranks in enumerate(options.ranks):
        uid = i * UID_SPACING
        plans.append(
            NeuronPlan(
                name=f"miner-{uid:03d}",
                kind="miner",
                uid=uid,
                world_size=ranks,
                folder=folder / f"miner-{uid:03d}",
                axon_port=next(ports),
                dht_port=next(ports),
            )
        )
    return plans


class Services:
    """Object store and chain as processes, one wallet per neuron, one bucket per miner.

    ``mark``: carried by every process of the subnet.
    """

    def __init__(
        self,
        *,
        folder: Path,
        options: SubnetOptions,
        plans: Sequence[NeuronPlan],
        mark: Mark,
    ) -> None:
        self.options = options
        self.plans = plans
        self._mark = mark
        self._wallet_folder = folder / "wallets"
        self._wallets: dict[str, Wallet] = {}
        self._initial_peer = ""
        self._store = ObjectStoreServer(
            folder=folder / "store", environment=self._clean_environment()
        )
        self.store_endpoint = self._store.endpoint
        (self._chain_port,) = free_ports(1)
        self.chain_endpoint = f"http://127.0.0.1:{self._chain_port}"
        self._chain_folder = folder / "chain"
        self._chain: Child | None = None

    def bucket(self, plan: NeuronPlan) -> str:
        """Name a neuron's bucket: the validator has the global one, a miner its uid's."""
        if plan.kind == "validator":
            return GLOBAL_BUCKET
        return miner_bucket(GLOBAL_BUCKET, plan.uid)

    def open_bucket(self, plan: NeuronPlan, *, write: bool = False) -> S3ObjectStore:
        """Open a neuron's bucket, by default with the keys that may only read. Close it."""
        from pydantic import SecretStr

        from distributed_training.config.settings import StoreSettings
        from distributed_training.store.s3 import AccessKeys, S3ObjectStore

        found, kind = self._keys(), "WRITE" if write else "READ"
        key, secret = (found[f"R2_{kind}_{n}"] for n in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
        return S3ObjectStore(
            bucket=self.bucket(plan),
            endpoint_url=self.store_endpoint,
            keys=AccessKeys(SecretStr(key), SecretStr(secret)),
            settings=StoreSettings(),
        )

    def _make_bucket(self, plan: NeuronPlan) -> None:
        with contextlib.closing(self.open_bucket(plan, write=True)) as bucket:
            bucket.create_bucket()

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Store and chain up, buckets made, hotkeys registered, the validator's address known.

        Raises ChildFailure.
        """
        self._store.child.start()  # it imports for a second; meanwhile:
        from distributed_training.chain.identity import create_wallet

        validator = self._validator
        for plan in self.plans:
            self._wallets[plan.name] = create_wallet(self._wallet_folder, plan.name)
        self._chain = self._found_chain(self.wallet(validator).ss58)
        self._chain.start()
        # Before the validator runs: the miners' flags name its address.
        peer_id = make_identity(validator.folder)
        self._initial_peer = f"/ip4/127.0.0.1/tcp/{validator.dht_port}/p2p/{peer_id}"
        self._chain.wait_ready()
        self._register()
        self._store.child.wait_ready()
        for plan in self.plans:
            self._make_bucket(plan)

    def stop(self) -> list[str]:
        """Stop the chain, then the store; return the problems of that."""
        problems = stop_together([self._chain] if self._chain else [], timedelta(seconds=3))
        self._store.stop()
        return problems

    def dead(self) -> list[str]:
        """Return a line for each service that ended by itself."""
        services = [child for child in (self._chain, self._store.child) if child is not None]
        return [s.obituary for s in services if not s.running and not s.stopping]

    def bulk_folders(self) -> list[Path]:
        """List what a good run may delete: buckets, checkpoints, snapshots; not logs and events."""
        bulk = [self._store.folder]
        for plan in self.plans:
            # Logs, events and metrics are files beside these folders.
            bulk += [path for path in plan.folder.iterdir() if path.is_dir()]
        return bulk

    def _found_chain(self, master: str) -> Child:
        """Make the process of a registry whose founder is ``master``."""
        flags = {
            "folder": str(self._chain_folder.absolute()),
            "name": "local",
            "master": master,
            "seconds-per-block": str(self.options.seconds_per_block),
            "admission": "open",
            "port": str(self._chain_port),
            "requests-per-address": "10000",  # all come from one
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        return Child(
            name="chain",
            command=[sys.executable, "-m", "distributed_training.registry", "serve", *words],
            environment=self._clean_environment(),
            folder=self._chain_folder,
        )

    def _register(self) -> None:
        with contextlib.closing(self.founders_chain()) as chain:
            for plan in self.plans:
                # By uid: the first free ones would lie side by side, and ranks would share pages.
                chain.enroll(self._wallets[plan.name].ss58, uid=plan.uid)

    def founders_chain(self) -> RegistryChain:
        """Open the chain as the validator sees it, which founded it. Close it."""
        from distributed_training.chain.registry import RegistryChain

        return RegistryChain(url=self.chain_endpoint, wallet=self.wallet(self._validator))

    @property
    def _validator(self) -> NeuronPlan:
        return next(plan for plan in self.plans if plan.kind == "validator")

    def invite(self, folder: Path) -> Path:
        """Make wallet, uid, bucket and settings of one more miner in ``folder``; return it.

        ``.env`` holds the keys, ``miner.toml`` the flags: the miner runs from there.
        """
        from distributed_training.chain.identity import create_wallet

        axon, dht = free_ports(2)
        uid = len(self.options.ranks) * UID_SPACING
        plan = NeuronPlan(folder.name, "miner", uid, 1, folder / "run", axon, dht)
        # Private at once: .env gets its own mode only after it was written.
        folder.mkdir(mode=0o700)
        self._wallets[plan.name] = create_wallet(self._wallet_folder, plan.name)
        with contextlib.closing(self.founders_chain()) as chain:
            chain.enroll(self.wallet(plan).ss58, uid=uid)
        self._make_bucket(plan)
        flags = self._settings(plan).items()
        toml = "".join(f'"{name}" = {json.dumps(value)}\n' for name, value in flags)
        write_bytes(folder / "miner.toml", toml.encode(), durable=False)
        lines = "".join(f"{name}={value}\n" for name, value in self._keys().items())
        write_bytes(folder / ".env", lines.encode(), durable=False)
        (folder / ".env").chmod(0o600)
        return folder

    # --- what a neuron is started with ------------------------------------------------------------

    def wallet(self, plan: NeuronPlan) -> Wallet:
        return self._wallets[plan.name]

    def arguments(self, plan: NeuronPlan) -> list[str]:
        """Return program and flags for a Python interpreter. No secret is among them."""
        miner = plan.kind == "miner"
        script = self.options.miner_script if miner else self.options.validator_script
        program = [str(script)] if script else ["-m", f"distributed_training.{plan.kind}"]
        return [*program, *self.flags(plan)]

    def flags(self, plan: NeuronPlan) -> list[str]:
        """Return the neuron's flags, those that the options add at the end."""
        miner, options = plan.kind == "miner", self.options
        settings = self._settings(plan)
        words = [word for name, value in settings.items() for word in (f"--{name}", value)]
        return [*words, *(options.miner_flags if miner else options.validator_flags)]

    def _settings(self, plan: NeuronPlan) -> dict[str, str]:
        """Return the neuron's settings by flag."""
        options = self.options
        least = options.least_miners or len(options.ranks)
        flags = {
            "preset": "local",
            "neuron.name": plan.name,
            "neuron.run_folder": str(plan.folder),
            "neuron.global_model_name": GLOBAL_BUCKET,
            "neuron.master_ss58_address": self.wallet(self._validator).ss58,
            "neuron.min_group_size": str(least + 1),  # the validator is one of the group
            "wallet.path": str(self._wallet_folder),
            "wallet.name": plan.name,
            "wallet.hotkey": "default",
            "chain.registry_url": self.chain_endpoint,
            "axon.port": str(plan.axon_port),
            "dht.port": str(plan.dht_port),
        }
        if options.blocks_per_allreduce is not None:
            flags["neuron.blocks_per_allreduce"] = str(options.blocks_per_allreduce)
        if plan.kind == "miner":
            # Of the validator alone: it is there first, and through it miners find each other.
            flags["neuron.initial_peers"] = self._initial_peer
            flags["nproc_per_node"] = str(plan.world_size)
        else:
            flags["validator.alive_wanted"] = str(len(options.ranks))
            flags["validator.alive_least"] = str(least)
            flags["validator.minimum_peers"] = str(least + 1)
        return flags

    def environment(self, plan: NeuronPlan) -> dict[str, str]:
        """Return the neuron's environment, with the keys of the object store."""
        return self._clean_environment() | self._keys()

    def _keys(self) -> dict[str, str]:
        """Return the keys of the one account: the same two for all, one of which may only read."""
        credentials = self._store.credentials
        return {
            "R2_ENDPOINT_URL": self.store_endpoint,
            "R2_ACCOUNT_ID": credentials.account_id,
            "R2_READ_ACCESS_KEY_ID": credentials.read_key,
            "R2_READ_SECRET_ACCESS_KEY": credentials.read_secret,
            "R2_WRITE_ACCESS_KEY_ID": credentials.write_key,
            "R2_WRITE_SECRET_ACCESS_KEY": credentials.write_secret,
        }

    def _clean_environment(self) -> dict[str, str]:
        # By prefix: a miner here must not write into the bucket of its operator's real one.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN_PREFIXES)}
        path = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))
        return inherited | {
            **self._mark.environment,
            # Neurons share this machine: a thread for each core would slow all of them.
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            # Nothing here needs the hub, and a look-up without a network waits for its time-out.
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
