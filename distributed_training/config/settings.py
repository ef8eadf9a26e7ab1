"""All settings, one class for each package.

An operator sets a ``flag``. A ``rule`` is a value that all members share, and only a network's file
sets it. A plain field is a constant, which only tests replace. The class docstrings say what each
group is for; the text below a field is its help.
"""

from __future__ import annotations

import dataclasses
import os
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field
from pydantic.dataclasses import dataclass

from distributed_training.common.addresses import Reach, reach
from distributed_training.protocol.pages import HELD_OUT_PAGES

from .types import (
    DAY,
    MINUTE,
    SECOND,
    SETTINGS,
    Count,
    CountFrom0,
    Duration,
    EndpointUrl,
    File,
    FileName,
    Found,
    GlobalBucket,
    HeldOutText,
    HostPort,
    Hotkey,
    Ipv4Address,
    Key,
    NodeUrl,
    OuterPort,
    Patience,
    Port,
    RepositoryFolder,
    Secret,
    Subtensor,
    Text,
    Webhook,
    WebUrl,
    Words,
    flag,
    rule,
)

Exchange = Literal["hivemind", "store"]
#: A development account, the master only of the trial network that comes with the program.
_NOBODY = "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY"


@dataclass(frozen=True, config=SETTINGS)
class GeneralSettings:
    """Settings that say where the other settings come from."""

    network: str | None = flag("network", None, env="DT_NETWORK")
    """The network to join: its file, its https:// URL, or local. Nothing starts without this."""
    config: File | None = flag("config", None)
    """TOML file of flags, read instead of miner.toml."""
    plugins: Words[str] = flag("plugins", (), env="DT_PLUGINS")
    """Your own modules, imported first, which register optimizers, data sources and the like."""


@dataclass(frozen=True, config=SETTINGS)
class ChainSettings:
    """Identity and chain.

    ``kind`` names one of the chains in ``chain/kinds.py``. A registry is at ``registry_url``. A
    Subtensor is at ``chain_endpoint``, or else at the nodes of ``network``.
    """

    # identity
    wallet_name: FileName = flag("wallet.name", "default", env="BT_WALLET_NAME")
    """Folder of the wallet. Its coldkey is not read."""
    wallet_hotkey: FileName = flag("wallet.hotkey", "default", env="BT_WALLET_HOTKEY")
    """Name of the hotkey in the wallet."""
    wallet_path: str = flag("wallet.path", "~/.bittensor/wallets/", env="BT_WALLET_PATH")
    """Folder that contains all wallets."""

    # chain
    netuid: int = rule("chain.netuid", 0, ge=0, le=65535)
    """number of the subnet on a Bittensor chain"""
    kind: str = rule("chain.kind", "bittensor")
    """bittensor, registry, or a kind of --plugins"""
    network: Subtensor = rule("chain.endpoint", "finney")
    """chain to use: finney, test, local, or a ws:// or wss:// URL"""
    chain_endpoint: NodeUrl | None = flag("subtensor.chain_endpoint", None)
    """URL of the chain node, used instead of the file's chain.endpoint."""
    private: bool = rule("private", False)
    """true: all machines are in one private network (LAN, VPN, cluster), so private addresses are
    allowed, and the registry may be reached over http://"""
    registry_url: WebUrl | None = rule("chain.url")
    """https:// URL of a registry, which a network without a public chain uses instead of a
    Subtensor"""
    invitation: Secret | None = flag("chain.invitation", None, env="DT_INVITATION")
    """The founder's invitation, with which the registry gives this hotkey a uid."""
    poll_interval: timedelta = 6 * SECOND  # time between two reads of a registry
    neurons_interval: timedelta = 60 * SECOND  # time between two reads of a Bittensor chain
    call_timeout: timedelta = 120 * SECOND  # for one read or write there, including the connection
    start_timeout: timedelta = 120 * SECOND  # how long a start waits for the chain's first answer

    @property
    def narrowest(self) -> Reach:
        """The narrowest reach that an address in this network may have.

        In a private network, it is that network, or one machine if the registry's URL has a
        loopback address.
        """
        if not self.private:
            return Reach.EVERYWHERE
        try:
            found = reach(urlsplit(self.registry_url or "").hostname or "")
        except ValueError:  # a name
            return Reach.NETWORK
        return Reach.MACHINE if found is Reach.MACHINE else Reach.NETWORK


@dataclasses.dataclass(frozen=True)
class SourceSpec:
    """A source of text, whose kind is registered in ``data/sources.py``."""

    kind: str
    folder: Path | None

    @property
    def text(self) -> str:
        return f"{self.kind}:{self.folder}" if self.folder else self.kind


def parse_source(text: str) -> SourceSpec:
    """Read one source (``parquet:DIR``)."""
    kind, _, folder = text.partition(":")
    return SourceSpec(kind, Path(os.path.expanduser(folder)) if folder else None)


@dataclass(frozen=True, config=SETTINGS)
class DataSettings:
    """Where the text comes from, and how far ahead it is prepared."""

    # An operator may read a mirror. The pinned revision and rows ensure that it is the same data.
    source: str = flag("data.source", network="data.source")
    """Where text is read from: hub (Parquet files at Hugging Face), parquet:DIR, stdlib (Python
    sources, for trials), or a kind that a module of --plugins registers."""
    dataset: str = rule("data.dataset")
    """dataset of --data.source hub"""
    folder: RepositoryFolder = rule("data.folder", "")
    """with --data.source hub: folder of the dataset to read; empty: the whole dataset"""
    revision: str | None = rule("data.revision")
    """commit of the dataset that the network pins; a source with another commit is refused"""
    rows: int | None = rule("data.rows", ge=1, le=10**13)
    """number of rows in all its configs, which the network pins; any other number is refused"""
    text_column: str = rule("data.text_column")
    """column or key that contains a row's text"""
    pages_per_block: int = rule("data.pages_per_block", ge=1, le=1000)
    """pages that a rank prepares and trains on at once"""
    rows_per_page: int = rule("data.rows_per_page", ge=1, le=100_000)
    """rows per page"""
    max_length: int = rule("data.max_length", ge=1, le=10_000_000)
    """most tokens of a row; the rest of the row is dropped"""
    selection: int = rule("data.selection", 1, ge=1, le=2)
    """2: the data is pinned, and data.held_out_pages of its pages are held out; 1: neither"""
    held_out: HeldOutText | None = rule("data.held_out")
    """the text that each outer step is judged on: pages (with data.selection 2, its default), a
    text or .parquet file as PATH#SHA256 or https://...#SHA256, several as NAME=FILE or
    NAME*WEIGHT=FILE, or python, the validator's Python library (default with data.selection 1)"""
    held_out_pages: int = rule("data.held_out_pages", HELD_OUT_PAGES, ge=1, le=100_000)
    """with data.selection 2: pages that nobody trains on"""
    own: bool = rule("data.own", False)
    """true: each member trains on its own text, --data.own_text, which is never uploaded; uploads
    are judged only on data.held_out"""
    own_text: Words[str] = flag("data.own_text", ())
    """Files or folders of your own text (Parquet, .jsonl, UTF-8), if the network's file sets
    data.own."""
    prefetch_blocks: Annotated[int, Field(ge=1, le=1000)] | Literal["auto"] = flag(
        "data.prefetch_blocks", "auto"
    )
    """Data blocks prepared ahead of the current one. 'auto' prepares two, and up to eight while the
    source is slow."""
    workers: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = flag("data.workers", "auto")
    """Processes per rank that fetch and tokenize. 'auto' starts one, and up to four if training has
    to wait."""

    @property
    def spec(self) -> SourceSpec:
        """The source."""
        return SourceSpec("own", None) if self.own else parse_source(self.source)


@dataclass(frozen=True, config=SETTINGS)
class RoundSettings:
    """The rules of a round: the validator applies them, and miners plan their uploads by them."""

    exchange: Exchange = rule("exchange", "store")
    """where an outer step's update comes from: 'store', the merge of the accepted uploads, or
    'hivemind', the members' all-reduce if it passes the checks"""
    grace: Duration = rule("round.grace", 10 * MINUTE, ge=SECOND, le=DAY)
    """how long uploads are accepted after a close; at most a third of the period"""
    average_after: Duration = rule("round.average_after", 60 * SECOND, ge=0 * SECOND, le=DAY)
    """with exchange 'hivemind': how long after a close the members begin to average; all must have
    written their uploads by then, and the average must end within round.grace"""
    sample: CountFrom0 = rule("round.sample", 0)
    """with exchange 'hivemind': uploads per close that the validator fetches and judges, drawn at
    random; 0: all"""
    least: Count = rule("round.least", 1)
    """fewest accepted uploads that make an outer step; with fewer, the close moves by a period"""
    codec: str = rule("round.codec", "4-bit")
    """how uploads write values: '4-bit', '3-bit' or '2-bit' for each value, or a codec that a
    module of --plugins registers"""
    weights_every: int = rule("publish.weights_every", 8, ge=1, le=1000)
    """outer steps between two publications of the weights"""
    keep_uploads: int = rule("store.keep_uploads", 8, ge=1, le=1000)
    """number of outer steps whose merged uploads are kept"""
    period: Duration = rule("round.period", ge=SECOND, le=7 * DAY)
    """time from one close to the next, such as "30m"; at least three times round.grace"""
    held_out_rise: float = rule("round.held_out_rise", 0.25, ge=0, le=1000)
    """an outer step is refused if it raises the held-out loss by more than this, in nats per
    token"""
    stop_outer_steps: int | None = rule("stop.outer_steps", ge=1, le=10**9)
    """the network's last outer step: no close follows it"""
    stop_tokens: int | None = rule("stop.tokens", ge=1, le=10**18)
    """total tokens of all miners and outer steps at which the network ends"""
    stop_loss: float | None = rule("stop.loss", ge=0, le=1000)
    """held-out loss, in nats per token, at which the network ends"""
    max_uids: int = rule("limits.max_uids", ge=2, le=4096)
    """number of uids, counted from 0: a registry gives out no others"""


@dataclass(frozen=True, config=SETTINGS)
class MinerSettings:
    """Settings of the training loop and the launcher that belong to no other group."""

    name: FileName = flag("neuron.name", "miner")
    """Name of this neuron in its run folder, TensorBoard and W&B."""
    # None by default, since Config.run_folder derives it from two other settings.
    run_folder: File | None = flag("neuron.run_folder", None, env="DT_RUN_FOLDER")
    """Folder for checkpoints, uploads and logs; each neuron needs its own. By default
    ./runs/NAME-HOTKEY."""
    nproc_per_node: int | None = flag("nproc_per_node", None, ge=1, le=64)
    """Ranks to start. By default one for each visible GPU, or one without a GPU."""
    device: Literal["auto", "cuda", "cpu"] = flag("neuron.device", "auto")
    """Device of the ranks. 'auto' takes the GPU if there is one."""
    stop_timeout: Patience = flag("neuron.stop_timeout", 60 * SECOND)
    """How long a stop may take before the ranks are killed. Let pm2 or systemd wait 25 s longer."""
    hang_timeout: Patience = flag("neuron.hang_timeout", 1200 * SECOND)
    """After this time without progress, the ranks write stacks.txt and restart from their
    checkpoint."""
    global_tokenizer_name: str = rule("tokenizer.name", "bytes")
    """tokenizer: its Hugging Face name or a folder"""
    master_ss58_address: Hotkey = rule("chain.master_hotkey", _NOBODY)
    """hotkey of the validator, which owns the global bucket and signs what it publishes"""
    checkpoint_steps: Count | Literal["auto"] = flag("neuron.checkpoint_steps", "auto")
    """Inner steps between two checkpoints. 'auto': at least 25, and ten minutes. Outer steps and
    stops write a checkpoint too."""
    keep_checkpoints: int = 2


@dataclass(frozen=True, config=SETTINGS)
class StoreSettings:
    """Settings of the bucket and its uploads.

    Keys come only from the environment or ``.env``. They are created in the R2 dashboard, Manage
    API tokens.
    """

    # Keys have the type Secret, which is refused on a command line. The account's id is not secret.
    account_id: str | None = flag("r2.account_id", None, env="R2_ACCOUNT_ID")
    """Cloudflare account id of a bucket at R2, 32 hexadecimal digits."""
    read_access_key_id: Key = flag("r2.read_access_key_id", env="R2_READ_ACCESS_KEY_ID")
    """Id of the read-only key. It is published on the chain."""
    read_secret_access_key: Key = flag("r2.read_secret_access_key", env="R2_READ_SECRET_ACCESS_KEY")
    """Secret of the read-only key. It is published on the chain."""
    write_access_key_id: Key = flag("r2.write_access_key_id", env="R2_WRITE_ACCESS_KEY_ID")
    """Id of the key that may write. It is never published."""
    write_secret_access_key: Key = flag(
        "r2.write_secret_access_key", env="R2_WRITE_SECRET_ACCESS_KEY"
    )
    """Secret of the key that may write. It is never published."""
    bucket_name: str | None = flag("r2.bucket_name", None, env="R2_BUCKET_NAME")
    """Name of your own bucket, for your own scripts. The miner uses the bucket NETWORK-UID, and
    warns if this name differs."""
    endpoint_url: EndpointUrl | None = flag(
        "r2.endpoint_url", network="store.endpoint", env="R2_ENDPOINT_URL"
    )
    """Object store to use instead of R2, such as https://s3.example.org or folder:///PLACE."""
    region: str = rule("store.region", "auto")
    """region for which requests are signed"""
    addressing: Literal["path", "virtual"] = rule("store.addressing", "path")
    """where URLs have the bucket's name: in the path after the host, or at the start of the host"""
    access: Literal["registry", "own"] = rule("store.access", "registry")
    """'registry': the registry hands out URLs to the global bucket; 'own': each member has its own
    bucket, whose read key it commits to the chain"""
    hosts: Words[HostPort] = rule("store.hosts", ())
    """hosts, or HOST:PORT, that the registry may send members to, in addition to those of
    store.endpoint and store.public_url"""
    public_url: WebUrl | None = rule("store.public_url")
    """URL at which anybody can read the global bucket without the registry"""
    connect_timeout: timedelta = 10 * SECOND
    read_timeout: timedelta = 60 * SECOND  # time between two pieces of the store's answer
    global_model_name: GlobalBucket = rule("store.global_bucket", "global")
    """bucket of the global model; a miner's own bucket has this name followed by its uid"""
    upload_steps: Count = flag("neuron.upload_steps", 60)
    """With a bucket of your own: inner steps between two progress uploads, which show that you are
    training. It does not affect the uploads for closes."""
    minimum_valid_inner_step: CountFrom0 = rule("round.minimum_valid_inner_step")
    """inner step of an outer step from which miners upload; lowered, with a warning, if too late"""


@dataclass(frozen=True, config=SETTINGS)
class SwarmSettings:
    """The DHT peer in a network over hivemind: where it listens, and where others find it."""

    dht_port: Port = flag("dht.port", 8009)
    """Over hivemind: TCP port for peers, open to the internet. 0 takes any free port."""
    dht_ip: Found[Ipv4Address] = flag("dht.ip", None)
    """Over hivemind: IPv4 address at which peers reach this machine. By default it is found with
    the help of public services."""
    dht_external_port: OuterPort | None = flag("dht.external_port", None)
    """Over hivemind: port at which peers reach --dht.port, if a router maps another port to it."""
    run_id: str = rule("run_id", "local")
    """names the run in signed files and among DHT peers; derived from the network's file"""

    @property
    def dht_listen_ip(self) -> str:
        """The address on which the DHT peer listens: all addresses, unless ``dht_ip`` is local."""
        return "127.0.0.1" if (self.dht_ip or "").startswith("127.") else "0.0.0.0"


@dataclass(frozen=True, config=SETTINGS)
class TelemetrySettings:
    """Settings of logs, metrics and events."""

    debug: bool = flag("logging.debug", False)
    """Log debug lines, including those of hivemind, bittensor and boto3. They hold no secrets."""
    page_port: Port | Literal["off"] = flag("neuron.page_port", 8010)
    """Port of this neuron's dashboard. 0 takes any free port. A validator's default is 8011."""
    page_host: Text = flag("neuron.page_host", "127.0.0.1")
    """Address of the dashboard. Any address but loopback needs DT_PAGE_TOKEN."""
    page_token: Secret | None = flag("neuron.page_token", None, env="DT_PAGE_TOKEN")
    """Token of at least 16 characters that the dashboard asks for."""
    notify_url: Webhook | None = flag("notify.url", None, env="DT_NOTIFY_URL")
    """URL for alerts, in the form of apprise (appriseit.com): ntfy, Slack, Discord, Telegram or
    another service."""
    tensorboard_dir: File | None = flag("neuron.tensorboard_dir", None)
    """Folder to which each step's figures are written for TensorBoard."""
    wandb: Literal["off", "online", "offline"] = flag("neuron.wandb", "off")
    """Send each step's figures to Weights & Biases, which reads WANDB_PROJECT and WANDB_ENTITY.
    'offline' keeps them for wandb sync."""
    wandb_api_key: Secret | None = flag("neuron.wandb_api_key", None, env="WANDB_API_KEY")
    """W&B API key. By default the key of wandb login."""


MicroBatch = Annotated[int, Field(ge=1, le=65536)]


@dataclass(frozen=True, config=SETTINGS)
class TrainingSettings:
    """One inner step is ``local_batch_size_train_effective`` sequences over all ranks."""

    local_batch_size_train: MicroBatch | Literal["auto"] = flag(
        "neuron.local_batch_size_train", "auto"
    )
    """Sequences in each rank's micro-batch. 'auto' measures which size is the fastest, and takes
    half if memory runs out."""
    local_batch_size_train_effective: Count = rule("training.effective_batch")
    """sequences in an inner step over all ranks, rounded up to whole micro-batches"""
    sequence_length: int = rule("training.sequence_length", ge=2, le=1_000_000)
    """tokens per sequence, in training and in the validator's evaluation"""
    learning_rate: float = rule("training.learning_rate", ge=0, le=10)
    """highest learning rate of AdamW, reached after the warm-up"""
    warmup_steps: int = rule("training.warmup_steps", ge=0, le=10**9)
    """inner steps of the learning rate's linear warm-up"""
    total_steps: int = rule("training.total_steps", ge=1, le=10**9)
    """total inner steps at which the learning rate's cosine schedule ends; when the cosine falls
    below a tenth of the highest rate, the rate stays at a tenth"""
    schedule: Literal["cosine", "constant"] = rule("training.schedule", "cosine")
    """the learning rate after the warm-up: a cosine, or the highest rate until the decay begins"""
    decay_from: int | None = rule("training.decay_from", ge=0, le=10**9)
    """the network's inner step after which a constant learning rate decays to zero"""
    decay_steps: int | None = rule("training.decay_steps", ge=1, le=10**9)
    """inner steps that the decay takes"""
    optimizer: str = rule("training.optimizer", "adamw")
    """the inner optimizer: 'adamw', 'muon' (for matrices in decoder layers; AdamW for the rest), or
    a name that a plug-in registers"""
    weight_decay: float = rule("training.weight_decay", ge=0, le=10)
    """weight decay of AdamW"""
    weight_decay_on: Literal["all", "matrices"] = rule("training.weight_decay_on", "all")
    """'matrices': no weight decay for embeddings and one-dimensional parameters"""
    adam_beta1: float = rule("training.adam_beta1", ge=0, le=0.9999)
    """AdamW's decay rate for the first moment"""
    adam_beta2: float = rule("training.adam_beta2", ge=0, le=0.9999)
    """AdamW's decay rate for the second moment"""
    gradient_clip: float = rule("training.gradient_clip", ge=0, le=1e9)
    """largest norm of an inner step's gradient; 0 turns clipping off"""
    outer_learning_rate: float = rule("training.outer_learning_rate", ge=0, le=10)
    """learning rate of the outer step"""
    outer_momentum: float = rule("training.outer_momentum", ge=0, le=1)
    """Nesterov momentum of the outer step; all peers must agree"""
    late_overlap: Literal["kept", "dropped"] = rule("training.late_overlap", "kept")
    """what happens to training done while the update was on its way: the part of it along the
    update's direction is kept or dropped"""
    outer_rule: str = rule("training.outer_rule", "nesterov")
    """registered name of the outer rule"""
    # Precision of the computation. The weights are float32.
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    activation_checkpointing: Literal["auto", "none", "budget", "selective", "full"] = flag(
        "neuron.activation_checkpointing", "auto"
    )
    """Recompute activations to save memory, at most a third slower: 'budget' half of each layer,
    'selective' every second layer, 'full' all. 'auto' recomputes as little as memory allows."""
    compile: Literal["auto", "on", "off"] = "auto"  # decoder layers; auto: on a GPU
    # When ranks reduce their gradients: at the last micro-batch of a step (fastest, but keeps the
    # whole gradient on each GPU) or at every micro-batch. auto: depends on memory.
    gradient_sync: Literal["auto", "last", "every"] = "auto"
    keep_unsharded: Literal["auto", "on", "off"] = "auto"  # keep gathered weights for a whole step
    wrap: Literal["auto", "block", "root"] = "auto"  # what FSDP gathers at once; auto: by size
    # Keep the optimizer's state in host memory. auto: if it does not fit on the GPU.
    offload_optimizer: Literal["auto", "on", "off"] = "auto"
    seed: int = 42  # seed of random initial weights
    profile_steps: int = flag("profile.steps", 0, ge=0, le=10_000)
    """Write a torch profiler trace of this many inner steps."""


@dataclass(frozen=True, config=SETTINGS)
class ValidatorSettings:
    """Settings of the validator's global state and its exports."""

    tick: timedelta = SECOND  # time between two checks of the clock

    # the initial weights, used only if the global bucket is empty
    model: File | None = flag("validator.model", None)
    """Folder of a transformers model whose weights are published as outer step 0 to an empty
    bucket. By default the weights are random."""

    take_over: bool = flag("take_over", False)
    """Lead the network at once, even if another validator leads it. That validator then stops."""

    # exports, with which the founder examines the model
    export_every: CountFrom0 = flag("validator.export_every", 0)
    """Outer steps between two exports to exports/ in the run folder. 0 turns exports off."""
    keep_exports: int = 3  # the newest
    export_command: Text = flag("validator.export_command", "")
    """Command to run with each export's folder and outer step. The numbers in the last line of its
    output are recorded."""

    held_out_sequences: int = 32  # sequences on which each outer step is judged
    seed: int = 0  # for drawing random pages; 0 takes a seed from the system


@dataclasses.dataclass(frozen=True)
class AllSettings:
    """The settings of all packages, in the order of the help."""

    general: GeneralSettings
    rounds: RoundSettings
    miner: MinerSettings
    training: TrainingSettings
    data: DataSettings
    store: StoreSettings
    swarm: SwarmSettings
    chain: ChainSettings
    telemetry: TelemetrySettings
    validator: ValidatorSettings

    @property
    def run_folder(self) -> Path:
        """The folder for data that must not be lost; its default name has the neuron and hotkey."""
        return (
            self.miner.run_folder or Path("runs") / f"{self.miner.name}-{self.chain.wallet_hotkey}"
        )
