"""What surrounds the neurons of a local subnet: object store, chain, wallets, credentials."""

from __future__ import annotations

import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed_training.common.ports import free_ports
from distributed_training.config.miner import MinerSettings
from distributed_training.localnet.plan import NeuronPlan, SubnetOptions
from distributed_training.localnet.processes import MARK, Child, stop_together

if TYPE_CHECKING:
    from distributed_training.chain.wallet import Wallet
    from distributed_training.localnet.object_store import ObjectStoreServer

REPOSITORY = Path(__file__).resolve().parents[2]
VALIDATOR_STAKE = 100_000.0
# An operator's own keys and settings must not reach a subnet that is only for experiments.
FOREIGN_PREFIXES = ("R2_", "BT_", "DT_", "WANDB_", "LOKI_", "AWS_", "HF_", "INFLUXDB_")


class ServiceFailure(RuntimeError):
    """A service did not come up. The text is for the operator."""


class Services:
    """Object store and chain as processes, one wallet per neuron, one bucket per miner.

    ``start_timeout`` covers the time until the chain answers.
    """

    def __init__(
        self,
        *,
        folder: Path,
        options: SubnetOptions,
        plans: Sequence[NeuronPlan],
        start_timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        self.folder = folder
        self.options = options
        self.plans = plans
        self.global_bucket = str(MinerSettings().global_model_name)
        self._start_timeout = start_timeout
        self._store: ObjectStoreServer | None = None
        self._chain: Child | None = None
        self._wallets: dict[str, Wallet] = {}
        self.store_endpoint = ""
        self.chain_endpoint = ""

    def bucket(self, plan: NeuronPlan) -> str:
        """The validator owns the global bucket; a miner's is named after its uid."""
        if plan.kind == "validator":
            return self.global_bucket
        return f"{self.global_bucket}-{plan.uid:03d}"

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Store and chain up, buckets made, hotkeys registered. Raises ServiceFailure."""
        self._start_store()
        self._start_chain()
        self._register()

    def stop(self) -> list[str]:
        """Chain, then store; what went wrong in it."""
        problems = []
        if self._chain is not None:
            problems += stop_together([self._chain], timedelta(seconds=3))
        if self._store is not None:
            self._store.stop()
        return problems

    def dead(self) -> list[str]:
        """A line for each service that ended by itself."""
        lines = []
        if self._chain is not None and not self._chain.running and not self._chain.stopping:
            lines.append(_ended("the chain", self._chain))
        if self._store is not None and not self._store.running:
            lines.append(f"the object store ended by itself; its log is in {self._store_folder}")
        return lines

    def bulk_folders(self) -> list[Path]:
        """What a good run may throw away: buckets, checkpoints, snapshots; not logs and events."""
        bulk = [self._store_folder]
        for plan in self.plans:
            bulk += [path for path in plan.folder.iterdir() if path.is_dir()]
        return bulk

    @property
    def _store_folder(self) -> Path:
        return self.folder / "store"

    def _start_store(self) -> None:
        from distributed_training.localnet.object_store import ObjectStoreServer

        self._store = ObjectStoreServer(folder=self._store_folder)
        try:
            self._store.start()
        except RuntimeError as error:
            raise ServiceFailure(str(error)) from error
        self.store_endpoint = self._store.endpoint
        client = s3_client(self.store_endpoint, self._keys(), write=True)
        there = {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}  # when resuming
        for plan in self.plans:
            if self.bucket(plan) not in there:
                client.create_bucket(Bucket=self.bucket(plan))

    def _start_chain(self) -> None:
        (port,) = free_ports(1)
        folder = self.folder / "chain"
        self._chain = Child(
            name="chain",
            command=[
                sys.executable,
                "-m",
                "distributed_training.localnet.chain_server",
                *("--folder", str(folder)),
                *("--port", str(port)),
                *("--seconds-per-block", str(self.options.seconds_per_block)),
            ],
            environment=self._clean_environment(),
            folder=folder,
            log=folder / "log.txt",
        )
        self._chain.start()
        self.chain_endpoint = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + self._start_timeout.total_seconds()
        while not _answers(f"{self.chain_endpoint}/state"):
            if not self._chain.running or time.monotonic() > deadline:
                raise ServiceFailure(_ended("the chain", self._chain))
            time.sleep(0.05)

    def _register(self) -> None:
        from distributed_training.chain.local import LocalChain
        from distributed_training.chain.wallet import create_wallet

        for plan in self.plans:
            wallet = create_wallet(self._wallet_folder, plan.name)
            self._wallets[plan.name] = wallet
            chain = LocalChain(url=self.chain_endpoint, wallet=wallet)
            try:
                validator = plan.kind == "validator"
                chain.register(
                    uid=plan.uid,
                    stake=VALIDATOR_STAKE if validator else 0.0,
                    validator_permit=validator,
                )
            finally:
                chain.close()

    @property
    def _wallet_folder(self) -> Path:
        return self.folder / "wallets"

    # --- what a neuron is started with ------------------------------------------------------------

    def arguments(self, plan: NeuronPlan, *, initial_peers: Sequence[str] = ()) -> list[str]:
        """Script and flags. No secret is among them. ``initial_peers``: of the swarm, if any."""
        options = self.options
        validator = next(p for p in self.plans if p.kind == "validator")
        flags = {
            "preset": "local",
            "neuron.name": plan.name,
            "neuron.run_folder": str(plan.folder),
            "neuron.global_model_name": self.global_bucket,
            "neuron.master_ss58_address": self._wallets[validator.name].ss58,
            "wallet.path": str(self._wallet_folder),
            "wallet.name": plan.name,
            "wallet.hotkey": "default",
            "chain.local_url": self.chain_endpoint,
            "axon.port": str(plan.axon_port),
            "dht.port": str(plan.dht_port),
        }
        if initial_peers:
            flags["neuron.initial_peers"] = ",".join(initial_peers)
        least = options.least_miners or len(options.ranks)
        flags["neuron.min_group_size"] = str(least + 1)  # the validator is one of the group
        if options.blocks_per_allreduce is not None:
            flags["neuron.blocks_per_allreduce"] = str(options.blocks_per_allreduce)
        if plan.kind == "miner":
            flags["nproc_per_node"] = str(plan.world_size)
            script = options.miner_script or REPOSITORY / "neurons" / "miner.py"
            more = options.miner_flags
        else:
            flags["validator.alive_wanted"] = str(len(options.ranks))
            flags["validator.alive_least"] = str(least)
            flags["validator.minimum_peers"] = str(least + 1)
            script = options.validator_script or REPOSITORY / "neurons" / "validator.py"
            more = options.validator_flags
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        return [str(script), *words, *more]

    def environment(self, plan: NeuronPlan) -> dict[str, str]:
        """The neuron's environment, with the keys of the object store."""
        return self._clean_environment() | self._keys()

    def _keys(self) -> dict[str, str]:
        """One account: the same two keys for all, one of which may only read."""
        assert self._store is not None
        credentials = self._store.credentials
        return {
            "R2_ENDPOINT_URL": self._store.endpoint,
            "R2_ACCOUNT_ID": credentials.account_id,
            "R2_READ_ACCESS_KEY_ID": credentials.read_key,
            "R2_READ_SECRET_ACCESS_KEY": credentials.read_secret,
            "R2_WRITE_ACCESS_KEY_ID": credentials.write_key,
            "R2_WRITE_SECRET_ACCESS_KEY": credentials.write_secret,
        }

    def _clean_environment(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN_PREFIXES)}
        return inherited | {
            MARK: os.environ.get(MARK, ""),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])
            ),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }


def s3_client(endpoint: str, keys: Mapping[str, str], *, write: bool = False) -> Any:
    """A boto3 client for a store of ``keys`` (the ``R2_`` variables), by default to read only."""
    import boto3
    from botocore.config import Config

    kind = "WRITE" if write else "READ"
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=keys[f"R2_{kind}_ACCESS_KEY_ID"],
        aws_secret_access_key=keys[f"R2_{kind}_SECRET_ACCESS_KEY"],
        region_name="auto",
        config=Config(
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _ended(what: str, child: Child) -> str:
    lines = "\n".join(f"    {line}" for line in child.last_lines())
    return f"{what} did not come up or ended; its log {child.log} ends:\n{lines}"
