"""The resolved configuration: a settings object for each package, and the checks across them."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import SecretStr

from distributed_training.common.addresses import keeps_secrets, reach
from distributed_training.network import Network
from distributed_training.protocol.keys import FROZEN
from distributed_training.protocol.pages import PageDraw

from .installed import missing
from .settings import AllSettings
from .types import Domain, parse_domains, show

Kind = Literal["miner", "validator"]


#: The file of the operator's settings, next to ``.env`` in the folder in which a miner is started.
#: The tools for that miner read it too.
OPERATORS_FILE = Path("miner.toml")

#: Package of settings -> title of its group in the help.
TITLES: Mapping[str, str] = {
    "general": "Network and plug-ins",
    "miner": "Ranks, checkpoints and restarts",
    "training": "Training",
    "data": "Data",
    "store": "Object store",
    "swarm": "Peers over hivemind",
    "chain": "Chain and wallet",
    "telemetry": "Logs and dashboard",
    "validator": "Validator",
    "network": "Set by the network's file",
}


@dataclass(frozen=True)
class Config(AllSettings):
    """The resolved configuration. Secrets inside are SecretStr, so ``repr`` is safe to log."""

    kind: Kind
    values: Mapping[str, Any] = field(repr=False)  # flag name -> value
    sources: Mapping[str, str] = field(repr=False)  # flag name -> where it was given, if anywhere
    network: Network
    warnings: tuple[str, ...] = ()  # found while the files were read
    node: int = 0  # number of this machine, if torchrun runs one miner on several machines
    of_script: bool = False  # a script trains, and may read its text itself

    def get(self, name: str) -> Any:
        """Return a flag's value by its name (``neuron.upload_steps``), or None if unknown."""
        return self.values.get(name)

    @property
    def leads(self) -> bool:
        """True on a miner's only machine, or on its node 0, which has the wallet and the bucket."""
        return self.node == 0

    @property
    def reads_text(self) -> bool:
        """False if a script reads the text that it trains on itself."""
        return not (self.of_script and self.data.own and not self.data.own_text)

    @property
    def has_bucket(self) -> bool:
        """True if each member has its own bucket, False if a registry gives access."""
        return self.store.access == "own"

    @property
    def in_folder(self) -> bool:
        """True for a validator that writes to the folder that the registry serves as the bucket."""
        folder = (self.store.endpoint_url or "").startswith("folder://")
        return folder and self.kind == "validator" and not self.has_bucket

    @property
    def key_variables(self) -> tuple[str, ...]:
        """The variables for the store's keys that this neuron needs."""
        if not self.has_bucket:
            return KEY_VARIABLES[3:] if self.kind == "validator" and not self.in_folder else ()
        return KEY_VARIABLES[1:] if self.any_key else KEY_VARIABLES

    @property
    def any_key(self) -> bool:
        """True if the store's keys may have any length, and no account is needed.

        That is so if all peers know the store, and the commitment is not on a public chain.
        """
        return self.store.endpoint_url is not None and self.chain.kind != "bittensor"

    @property
    def tokenizer_revision(self) -> str | None:
        """The tokenizer commit that the network's file pins, or None for the newest."""
        return self.network.head.tokenizer_revision

    @property
    def published(self) -> dict[str, Path]:
        """The local folders for the network's published files: model, tokenizer and data.

        The data folder is left out if the operator reads the data from another source.
        """
        head = self.network.head
        named = {"model": head.frozen, "tokenizer": head.tokenizer_files}
        if self.get("data.source") == self.network.values["data.source"]:
            named["data"] = head.data_files
        folder = self.run_folder.absolute() / "published"
        return {what: folder / digest for what, digest in named.items() if digest}

    @property
    def frozen_weights(self) -> Path | None:
        """The file of the tensors that nobody trains, or None if the network trains all."""
        folder = self.published.get("model")
        return None if folder is None else folder / FROZEN

    @property
    def data_cache(self) -> Path | None:
        """The folder of fetched data, or None before the first start has created it."""
        return self.run_folder / "data" / "pages" if self.run_folder.is_dir() else None

    @property
    def draw_pages(self) -> PageDraw:
        """The rule that draws this network's pages."""
        return PageDraw(
            run_id=self.swarm.run_id,
            key=f"{self.network.head.name} {self.miner.master_ss58_address}",
            rows_per_page=self.data.rows_per_page,
            held_out_pages=self.data.held_out_pages if self.data.selection == 2 else 0,
        )

    @property
    def domains(self) -> tuple[Domain, ...]:
        """The texts that outer steps are judged on, with weights that sum to 1."""
        named = self.data.held_out or ("pages" if self.data.selection == 2 else "python")
        if named == "pages":
            return (Domain(f"{self.data.held_out_pages} pages of the data", named),)
        if named == "python":
            return (Domain("Python's own library", named),)
        found = parse_domains(named)
        total = sum(domain.weight for domain in found)
        return tuple(replace(domain, weight=domain.weight / total) for domain in found)

    @property
    def held_out_name(self) -> str:
        """The held-out text in a few words, as a label for each loss on it."""
        if len(self.domains) == 1:
            return self.domains[0].name
        return ", ".join(f"{domain.name} {domain.weight:.2f}" for domain in self.domains)

    def loss_limit(self, before: float) -> float:
        """Return the held-out loss above which an outer step is refused."""
        return before + self.rounds.held_out_rise

    @property
    def averages(self) -> bool:
        """True if members also average over hivemind at each close."""
        return self.rounds.exchange == "hivemind"

    @property
    def takes_ports(self) -> bool:
        """True if the members of this network connect to each other's machines."""
        return self.averages

    @property
    def tokens_of_step(self) -> int:
        """The number of tokens in one miner's inner step."""
        training = self.training
        return training.local_batch_size_train_effective * training.sequence_length

    def finished(self, *, outer_step: int, tokens: int, loss: float) -> str:
        """Return which [stop] of the network's file is reached, in words; empty if none is."""
        wanted = self.rounds
        if wanted.stop_outer_steps is not None and outer_step >= wanted.stop_outer_steps:
            return f"outer step {outer_step} of stop.outer_steps {wanted.stop_outer_steps}"
        if wanted.stop_tokens is not None and tokens >= wanted.stop_tokens:
            return f"{tokens} tokens of stop.tokens {wanted.stop_tokens}"
        if wanted.stop_loss is not None and loss <= wanted.stop_loss:
            return f"held-out loss {loss:.4f} of stop.loss {wanted.stop_loss}"
        return ""


# --- checks across settings ---------------------------------------------------------------------
# Each problem is one line: cause, consequence, remedy. These checks need neither network nor GPU;
# ``health`` checks the machine.

# Fields of StoreSettings, and how many characters each has at R2. A commitment on a public chain
# has no separators: validators drop a commitment whose parts are longer or shorter.
_KEYS = {
    "account_id": 32,
    "read_access_key_id": 32,
    "read_secret_access_key": 64,
    "write_access_key_id": 32,
    "write_secret_access_key": 64,
}
#: The variables that contain these values.
KEY_VARIABLES = tuple(f"R2_{name.upper()}" for name in _KEYS)


def problems(config: Config) -> list[str]:
    """Return the problems that keep this configuration from running, one line each."""
    lacking = list(check_installed(config))
    return lacking or [line for check in CHECKS for line in check(config)]


def extras_of_network(config: Config) -> dict[str, str]:
    """Return the wheel's extras that this network's members need, and what needs each."""
    wanted = {}
    if config.chain.kind == "bittensor":
        wanted["bittensor"] = "a network on a Bittensor chain"
    if config.averages and not config.of_script:
        wanted["hivemind"] = "a network over hivemind"
    if config.network.head.kind == "lora":
        wanted["lora"] = "a network that trains adapters"
    return wanted


def check_installed(config: Config) -> Iterator[str]:
    validator = {"validator": "a validator"} if config.kind == "validator" else {}
    if line := missing(extras_of_network(config) | validator):
        yield line


def check_values(config: Config) -> Iterator[str]:
    source = config.sources.get("neuron.run_folder")
    if source is not None and config.miner.run_folder is None:  # an unset shell variable
        yield (
            f"{source} is empty, so the miner would begin again in {config.run_folder} without "
            "its checkpoints: name a folder, or remove this setting"
        )
    url, bucket = config.store.endpoint_url or "", config.store.global_model_name
    name = urlsplit(url).path.rstrip("/").rpartition("/")[2]
    if name == bucket or re.fullmatch(rf"{re.escape(bucket)}-\d{{3,}}", name):
        yield (
            f"--r2.endpoint_url {url} ends with a bucket's name, which is added later, so uploads "
            f"would go where no validator looks: leave out /{name}"
        )


def check_exports(config: Config) -> Iterator[str]:
    command = config.validator.export_command
    if not command:
        return
    if not config.validator.export_every:
        yield (
            "--validator.export_command is given but --validator.export_every is 0, so it would "
            "never run: set --validator.export_every 10"
        )
    try:
        program = (shlex.split(command) or [""])[0]
    except ValueError as error:
        yield (
            f"--validator.export_command cannot be split into words ({error}), so it could not be "
            "run: close its quotation marks"
        )
    else:
        if shutil.which(program) is None:
            yield (
                f"--validator.export_command names {program!r:.100}, which is not a program here, "
                "so it could not be run: give the full path, and chmod +x"
            )


def check_own_text(config: Config) -> Iterator[str]:
    data, own = config.data, config.data.own
    if own and config.kind == "miner" and not data.own_text and config.reads_text:
        yield (
            "data.own of the network's file is true and --data.own_text names no text, so there is "
            "nothing to train on: give your files, or a folder of them"
        )
    if own and config.sources.get("data.source") == "--data.source":
        yield (
            "data.own of the network's file is true, so --data.source would not be read: leave it "
            "out, and give --data.own_text"
        )
    if data.own_text and not own:
        yield (
            f"--data.own_text {' '.join(data.own_text)} is given, but the network's file does not "
            "set data.own, so it would not be read: leave it out; --data.source names a copy of "
            "the network's data"
        )


def check_schedule(config: Config) -> Iterator[str]:
    training, remedy = config.training, "correct the network's file"
    begins, lasts = training.decay_from, training.decay_steps
    if training.learning_rate <= 0:
        yield f"training.learning_rate is 0, so nothing would be learned: {remedy}"
    if training.warmup_steps >= training.total_steps:
        yield (
            f"training.warmup_steps {training.warmup_steps} is not below training.total_steps "
            f"{training.total_steps}, so the learning rate would never fall: {remedy}"
        )
    if (begins is None) != (lasts is None):
        yield (
            "training.decay_from and training.decay_steps describe one decay together, but only "
            f"one of them is set, so no decay would begin: {remedy}"
        )
    elif begins is not None and training.schedule != "constant":
        yield (
            "training.decay_from belongs to training.schedule constant, but the schedule is "
            f"{training.schedule}, so the learning rate would not follow it: {remedy}"
        )
    elif begins is not None and begins < training.warmup_steps:
        yield (
            f"training.decay_from {begins} is below training.warmup_steps "
            f"{training.warmup_steps}, so the decay would begin in the warm-up: {remedy}"
        )


def check_exchange(config: Config) -> Iterator[str]:
    if config.of_script and config.averages:
        yield (
            f"{config.general.network} averages over hivemind, which needs ports and a bucket of "
            "its own, so a script cannot join it: run dt-miner instead"
        )
    grace, period = config.rounds.grace, config.rounds.period
    if grace > period / 3:
        yield (
            f"round.grace ({show(grace)}) is above a third of the period ({show(period)}), so "
            "miners would train too long on outdated weights: in the network's file lower "
            f"round.grace, or raise round.period to {show(3 * grace)} or more"
        )
    if config.averages and config.rounds.average_after >= grace:
        yield (
            f"round.average_after ({show(config.rounds.average_after)}) is not below round.grace "
            f"({show(grace)}), so no all-reduce would end in time: lower it or raise round.grace"
        )
    url, private = config.store.endpoint_url, config.chain.private
    readers = url and not config.has_bucket and not config.in_folder
    if url and readers and not keeps_secrets(url, private=private):
        yield (
            f"store.endpoint is {url}, and the URLs that the registry hands out are secrets, "
            "so no member would use them: in the network's file set an https:// URL, or http:// "
            "and private = true if all machines are in one private network"
        )


def check_addresses(config: Config) -> Iterator[str]:
    if not config.averages:
        return  # nobody connects to its members
    address, chain = (config.swarm.dht_ip or "").strip("[]"), config.chain
    if address and reach(address) > chain.narrowest:
        whose = "its address in the private network" if chain.private else "its public address"
        yield (
            f"--dht.ip {address} cannot be reached from other machines, so no peer of the network "
            f"could connect to it: give {whose}, or remove the flag"
        )
    port = config.swarm.dht_external_port
    if config.kind == "validator" and port is not None and config.swarm.dht_ip is None:
        yield (
            f"--dht.external_port {port} is given without --dht.ip, so the validator would "
            "announce neither: give its public address with --dht.ip"
        )


def check_keys(config: Config) -> Iterator[str]:
    if not config.leads or not config.key_variables:
        return  # it publishes nothing, or through the registry's URLs
    own_store = config.store.endpoint_url is not None
    where = "one key of the store" if own_store else "R2 dashboard, Manage API tokens; one token"
    wanted = "one to read and write"
    if not config.has_bucket:
        where, wanted = "a key of the store", "write and delete"
    keys = {}
    for variable in config.key_variables:
        value = getattr(config.store, variable.removeprefix("R2_").lower())
        keys[variable] = value.get_secret_value() if isinstance(value, SecretStr) else value or ""
    # Report only the missing keys, since they cannot be compared.
    if missing := [variable for variable, text in keys.items() if not text]:
        yield (
            f"{', '.join(missing)} not set, so nothing could be uploaded: put them into .env "
            f"({where} to read, {wanted})"
        )
        return
    if not config.has_bucket:
        return  # no key is published
    for part in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        if "" != keys[f"R2_READ_{part}"] == keys[f"R2_WRITE_{part}"]:
            yield (
                f"R2_READ_{part} and R2_WRITE_{part} are equal, and the read key is published on "
                "the chain for ever, so anybody could overwrite this bucket: create a second token "
                "that can only read (at R2: dashboard, Manage API tokens) and put it into .env"
            )
    if config.any_key:
        return
    for variable, text in keys.items():
        published, length = "_WRITE_" not in variable, _KEYS[variable.removeprefix("R2_").lower()]
        if not text or len(text) == length or (own_store and not published):
            continue
        consequence = "the store would refuse every upload"
        if published:
            consequence = "validators would drop this miner's commitment"
        remedy = "copy it again from the R2 dashboard into .env"
        if own_store:
            remedy = "a public chain needs a store whose keys are as long as R2's"
        yield (
            f"{variable} has {len(text)} characters instead of {length}, so {consequence}: {remedy}"
        )


# A start shows only the first problem, so problems that make others irrelevant come first.
CHECKS: tuple[Callable[[Config], Iterator[str]], ...] = (
    check_exchange,
    check_values,
    check_own_text,
    check_schedule,
    check_exports,
    check_addresses,
    check_keys,
)
