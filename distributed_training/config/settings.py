"""All settings, one class for each package.

Defaults are the public network's; presets (``model.py``) replace them as a group. A ``rule`` is a
value that all peers share: a network's file gives it and nothing else. The class
docstrings say what each group is for; the text below a field is its help.
"""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field
from pydantic.dataclasses import dataclass

from distributed_training.common.addresses import Reach, reach
from distributed_training.protocol.page_permutation import HELD_OUT_PAGES
from distributed_training.protocol.synapses import LARGEST_GROUP

from .types import (
    DAY,
    HOUR,
    MINUTE,
    SECOND,
    SETTINGS,
    Age,
    ConfigError,
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
    IpAddress,
    Ipv4Address,
    Key,
    MemberUid,
    NodeUrl,
    OuterPort,
    Patience,
    PeerAddress,
    Port,
    RepositoryFolder,
    Secret,
    Span,
    Subtensor,
    Text,
    Wait,
    Webhook,
    WebUrl,
    Words,
    flag,
    load_optional,
    rule,
)

Exchange = Literal["hivemind", "store"]


@dataclass(frozen=True, config=SETTINGS)
class GeneralSettings:
    """Settings that name the origin of defaults."""

    network: str | None = flag("network", None, env="DT_NETWORK")
    """the network to join, without which nothing starts: its file, the https:// URL of it, or a
    name: sn38 (the public one), local (a subnet on this machine)"""
    preset: Literal[
        "public", "public-12gb", "public-16gb", "public-24gb", "public-40gb", "public-48gb",
        "public-80gb", "public-141gb", "local",
    ] = flag("preset", "public", env="DT_PRESET")  # fmt: skip
    """what fits GPUs of so much memory (by the memory model); local: a neuron of a subnet on this
    machine, with --network local unless another is given"""
    config: File | None = flag("config", None)
    """TOML file of flags, e.g. [neuron] upload_steps = 60, in place of miner.toml; flags win over
    it"""
    plugins: Words[str] = flag("plugins", (), env="DT_PLUGINS")
    """modules of your own, imported before anything else, that register an optimizer, a data source
    or another kind"""


@dataclass(frozen=True, config=SETTINGS)
class ChainSettings:
    """Identity, chain and signed server. Defaults are those of the public network.

    Which chain: that of ``kind``, one of ``chain/kinds.py``. A registry is at ``registry_url``, a
    Subtensor at ``chain_endpoint``, or where ``network`` has its nodes.
    """

    # identity
    netuid: int = flag("netuid", network="chain.netuid", fixed=True, ge=0, le=65535)
    """number of the subnet (38 on the public network)"""
    wallet_name: FileName = flag("wallet.name", "default", env="BT_WALLET_NAME")
    """folder of the wallet (its coldkey is not read)"""
    wallet_hotkey: FileName = flag("wallet.hotkey", "default", env="BT_WALLET_HOTKEY")
    """name of the hotkey in the wallet"""
    wallet_path: str = flag("wallet.path", "~/.bittensor/wallets/", env="BT_WALLET_PATH")
    """folder of all wallets"""

    # chain
    kind: str = rule("chain.kind")
    """bittensor, registry, or a kind of --plugins"""
    network: Subtensor = rule("chain.endpoint")
    """chain to use: finney, test, local, or a ws:// or wss:// URL"""
    chain_endpoint: NodeUrl | None = flag("subtensor.chain_endpoint", None)
    """URL of the chain node; wins over chain.endpoint"""
    fallback_endpoints: tuple[str, ...] = ()  # tried after the first; of the SDK if empty
    private: bool = rule("private", False)
    """true: all machines are in one private network (LAN, VPN, cluster), so private addresses are
    right, and a registry may be asked over http://"""
    registry_url: WebUrl | None = rule("chain.url")
    """https:// URL of a registry, the chain of a network without a public one; it is then used
    instead of a Subtensor"""
    invitation: Secret | None = flag("chain.invitation", None, env="DT_INVITATION")
    """invitation of the network's founder, with which a registry gives this hotkey a uid"""
    seconds_per_block: float = rule("round.seconds_per_block", ge=0.01, le=3600)
    """seconds from one block of the chain to the next"""
    poll_interval: timedelta = 6 * SECOND  # between two looks at the current block
    neurons_interval: timedelta = 120 * SECOND  # between two reads of neurons and commitments
    call_timeout: timedelta = 45 * SECOND  # of connecting, and of one read
    write_timeout: timedelta = 120 * SECOND  # of one write, inclusion in a block included
    start_timeout: Duration = flag("chain.start_timeout", 120 * SECOND, ge=SECOND / 10, le=DAY)
    """how long the start waits for a first answer of the chain"""

    @property
    def narrowest(self) -> Reach:
        """The narrowest reach that an address of this network may have.

        In a private network it is that of its machines, or of the one machine that its registry
        is on.
        """
        if not self.private:
            return Reach.EVERYWHERE
        try:
            found = reach(urlsplit(self.registry_url or "").hostname or "")
        except ValueError:  # a name
            return Reach.NETWORK
        return Reach.MACHINE if found is Reach.MACHINE else Reach.NETWORK

    # signed server
    axon_port: Port = flag("axon.port", 8091)
    """port of the signed HTTP server; 0 takes a free one"""
    # Both versions of IP: the chain may have an address of either.
    axon_ip: IpAddress = flag("axon.ip", "[::]")
    """address the signed HTTP server listens on"""
    external_ip: Found[IpAddress] = flag("axon.external_ip", None)
    """address others reach this machine at: written to the chain, and announced to the swarm unless
    --dht.ip gives another (default, or auto: --dht.ip, else asked from public services)"""
    external_port: OuterPort | None = flag("axon.external_port", None)
    """port validators reach this server at, where a router or a container maps another one to
    --axon.port (default: --axon.port)"""
    max_connections: int = 256  # open ones of the signed server, all addresses together
    max_connections_per_address: int = 16
    requests_per_address: float = 50.0  # a second (burst: 6 times)
    read_timeout: timedelta = 5 * SECOND  # that a client has to send a whole request
    requests_per_hotkey: float = 5.0  # verified calls a second (burst: 6 times)
    # Of an unsigned timeout header, which widens the age at which a legacy call is accepted.
    legacy_timeout_cap: timedelta = 12 * SECOND
    clock_skew: timedelta = 4 * SECOND  # that a caller's clock may be in the future


@dataclasses.dataclass(frozen=True)
class SourceSpec:
    """One source of a mixture, of a kind that ``data/sources.py`` registers.

    ``weight`` is its share of the sequences, all shares sum to 1.
    """

    name: str
    kind: str
    folder: Path | None
    weight: float = 1.0

    @property
    def text(self) -> str:
        return f"{self.kind}:{self.folder}" if self.folder else self.kind


def parse_source(name: str, text: str) -> SourceSpec:
    """Read one source (``jsonl:DIR``) of the name ``name``. Raises ConfigError."""
    kind, _, folder = text.partition(":")
    try:
        return SourceSpec(name, kind, Path(folder).expanduser() if folder else None)
    except RuntimeError:
        raise ConfigError(
            f"--data.source {text}: no user has this name, so there is nothing to train on: give "
            "the whole path"
        ) from None


def parse_sources(source: str, mix: str) -> tuple[SourceSpec, ...]:
    """Parse ``--data.source`` and ``--data.mix`` to specifications.

    ``source`` is one source (``jsonl:DIR``) or named ones (``web=hf,code=jsonl:DIR``), ``mix`` the
    weights of the named ones (``web=0.7,code=0.3``). Raises ConfigError.
    """
    entries = [entry.strip() for entry in source.split(",") if entry.strip()]
    if not entries:
        raise ConfigError("--data.source is empty, so there is nothing to train on: give e.g. hf")
    if len(entries) == 1 and "=" not in entries[0].partition(":")[0]:
        if mix:
            raise ConfigError(
                f"--data.mix {mix} weighs several sources but --data.source names one, so the mix "
                "is not defined: give --data.source name=SOURCE,other=SOURCE"
            )
        return (parse_source("", entries[0]),)
    named: tuple[SourceSpec, ...] = load_optional(
        "mixture", wanted_by=f"--data.source {source}"
    ).parse_named(source, mix)
    return named


@dataclass(frozen=True, config=SETTINGS)
class DataSettings:
    """Settings of the text's origin, and of how far ahead it is prepared."""

    # An operator may read a mirror. Pinned revision and rows keep it the same data.
    source: str = flag("data.source", network="data.source")
    """'hf' (the Hugging Face rows API, as public validators assign it), 'hub' (Parquet files
    there), 'stdlib' (this machine's Python sources, for trials), 'parquet:DIR', 'jsonl:DIR',
    'text:DIR', 'shards:DIR' (packed tokens), or several: 'web=hf,code=jsonl:DIR'"""
    mix: Text = flag("data.mix", "")
    """shares of several sources in the sequences: 'web=0.7,code=0.3'"""
    dataset: str = rule("data.dataset")
    """dataset of --data.source hub and hf"""
    folder: RepositoryFolder = rule("data.folder", "")
    """with --data.source hub: folder of the dataset that is read; empty: all of it"""
    revision: str | None = rule("data.revision")
    """commit of the dataset that the network pins; a source that serves another one is refused"""
    rows: int | None = rule("data.rows", ge=1, le=10**13)
    """rows of all its configs that the network pins; a source that has others is refused"""
    rows_url: WebUrl = rule("data.rows_url")
    """server of the rows API"""
    text_column: str = rule("data.text_column")
    """column or key that holds a row's text"""
    pages_per_block: int = rule("data.pages_per_block", ge=1, le=1000)
    """pages of each block; validators look at the first two"""
    rows_per_page: int = rule("data.rows_per_page", ge=1, le=100_000)
    """rows of a page"""
    max_length: int = rule("data.max_length", ge=1, le=10_000_000)
    """tokens of a row; the rest of it is dropped"""
    selection: int = rule("data.selection", 1, ge=1, le=2)
    """the rule by which pages are drawn. 1: that of the public network, by which neighbours share
    pages; 2: different pages for everybody, of pinned data"""
    held_out: HeldOutText | None = rule("data.held_out")
    """the text that each outer step is judged on: pages (with data.selection 2, its default), a
    text or .parquet file as PATH#SHA256 or https://...#SHA256, several as NAME=FILE or
    NAME*WEIGHT=FILE, or python, the validator's Python library (default with data.selection 1)"""
    held_out_pages: int = rule("data.held_out_pages", HELD_OUT_PAGES, ge=1, le=100_000)
    """with data.selection 2: pages that nobody trains on"""
    own: bool = rule("data.own", False)
    """true: each member trains on text of his own, --data.own_text, which is never uploaded;
    uploads are judged only on data.held_out"""
    own_text: Words[str] = flag("data.own_text", ())
    """files, or folders of files, of your own text, in a network whose file says data.own: Parquet,
    JSON lines (.jsonl), or text in UTF-8"""
    prefetch_blocks: int = flag("data.prefetch_blocks", 2, ge=1, le=1000)
    """blocks prepared ahead of the one in training"""
    max_prefetch_blocks: int = flag("data.max_prefetch_blocks", 8, ge=1, le=1000)
    """the most blocks ahead while the source is slow"""
    workers: Annotated[int, Field(ge=1, le=256)] | Literal["auto"] = flag("data.workers", "auto")
    """processes of each rank that fetch and tokenize; 'auto': one, and up to four where data is
    prepared about as slowly as it is trained on"""
    request_timeout: timedelta = 20 * SECOND  # of one HTTP request for rows, body included
    request_attempts: int = 6  # for a page, with growing waits, before it is left out
    page_deadline: timedelta = 120 * SECOND  # of all attempts for a page, waits included
    connections: int = 4  # pages of a block that are fetched at once
    cache_dir: File | None = flag("data.cache_dir", None)
    """folder for what is fetched, which several miners may share; default: data/ in the run
    folder"""
    cache_gb: float = flag("data.cache_gb", 2.0, ge=0, le=1_000_000)
    """size bound of what is fetched, GB; 0: no cache"""
    table_age: timedelta = 6 * HOUR  # at which the dataset's table of configs is asked for again

    @property
    def sources(self) -> tuple[SourceSpec, ...]:
        """The sources with their shares of the sequences. Raises ConfigError."""
        if self.own:
            return (SourceSpec("", "own", None),)
        return parse_sources(self.source, self.mix)


@dataclass(frozen=True, config=SETTINGS)
class DiagnosticsSettings:
    """Settings of the doctor and of the checks at a start."""

    minimum_disk_gb: float = flag("diagnostics.minimum_disk_gb", 10.0, ge=0, le=1e9)
    """free disk in the run folder that the doctor wants beyond the checkpoints it computes; at
    least the 1 GB that always stays free"""
    measure: Duration = flag("diagnostics.measure", 10 * SECOND, ge=0 * SECOND, le=HOUR)
    """how long the doctor trains to estimate the step time; 0 leaves it out"""
    start_check: bool = flag("diagnostics.start_check", True)
    """run the doctor's quick checks (no network) at start and refuse to start on a failure"""


@dataclass(frozen=True, config=SETTINGS)
class RoundSettings:
    """The rules of a round: the validator keeps them, and a miner plans its uploads with them."""

    exchange: Exchange = rule("exchange", "hivemind")
    """how pseudo-gradients are exchanged: 'hivemind', among peers, as the public network does, or
    'store', through the store, where the validator merges what it has judged"""
    grace: Duration = rule("round.grace", 10 * MINUTE, ge=SECOND, le=DAY)
    """with exchange 'store': how long after a close uploads are still taken, at most a third of
    the period"""
    least: Count = rule("round.least", 1)
    """with exchange 'store': fewest accepted uploads of an outer step; with fewer the close moves
    by a period"""
    bits: int = rule("round.bits", 4, ge=2, le=4)
    """with exchange 'store': bits of each value of an upload"""
    weights_every: int = rule("publish.weights_every", 8, ge=1, le=1000)
    """with exchange 'store': outer steps between two sets of weights that are published"""
    keep_uploads: int = rule("store.keep_uploads", 8, ge=1, le=1000)
    """with exchange 'store': outer steps whose merged uploads are kept"""
    blocks_per_allreduce: Count = rule("round.blocks_per_allreduce")
    """blocks between two all-reduce rounds until the first successful one (1 block = 12 s); the
    miner plans with at least round.blocks_per_allreduce_later after that, as validators do"""
    blocks_per_allreduce_later: CountFrom0 = rule("round.blocks_per_allreduce_later")
    """blocks between two rounds after the first successful one; 0: no change"""
    epoch_length: Count = rule("round.epoch_length")
    """read by the validator only: blocks between two times it writes its weights to the chain"""
    held_out_rise: float = rule("round.held_out_rise", 0.25, ge=0, le=1000)
    """in a network of format 2 an outer step is refused when it makes the held-out loss worse by
    more than this, in nats per token"""
    stop_outer_steps: int | None = rule("stop.outer_steps", ge=1, le=10**9)
    """outer step with which the network is finished: no round is called after it"""
    stop_tokens: int | None = rule("stop.tokens", ge=1, le=10**18)
    """tokens, of all miners in all outer steps, with which it is finished"""
    stop_loss: float | None = rule("stop.loss", ge=0, le=1000)
    """held-out loss, in nats per token, with which it is finished"""
    max_uids: int = rule("limits.max_uids", ge=2, le=4096)
    """uids of the network, from 0 on: a registry gives no other, validators call no other"""


@dataclass(frozen=True, config=SETTINGS)
class MinerSettings(RoundSettings):
    """Settings of the loop and the launcher that no package owns."""

    name: FileName = flag("neuron.name", "miner")
    """name of this neuron: in the default run folder, in TensorBoard and W&B"""
    # None by default, since it is made of two other settings: Config.run_folder.
    run_folder: File | None = flag("neuron.run_folder", None, env="DT_RUN_FOLDER")
    """everything this neuron must not lose: checkpoints, journals, logs; one per neuron (default
    ./runs/<neuron.name>-<wallet.hotkey>)"""
    nproc_per_node: int | None = flag("nproc_per_node", None, ge=1, le=64)
    """ranks to start, usually one per GPU (default: one per visible GPU, or 1 without a GPU)"""
    device: Literal["auto", "cuda", "cpu"] = flag("neuron.device", "auto")
    """what the ranks train on: auto takes the GPU if there is one"""
    stop_timeout: Patience = flag("neuron.stop_timeout", 60 * SECOND)
    """how long a stop may take (finish the micro-batch, checkpoint, close) before the ranks are
    ended by force; at least twice what the last checkpoint took, and 20 s. What stops the miner
    (pm2's kill_timeout, systemd's TimeoutStopSec) must wait 25 s longer"""
    hang_timeout: Patience = flag("neuron.hang_timeout", 1200 * SECOND)
    """ranks that come to no micro-batch boundary for this long, or no further in their start, hang:
    the stacks of all processes are written to stacks.txt in the run folder, and the ranks start
    again from their last checkpoint. Waiting for data, a round or an upload does not count;
    compiling, loading weights and waiting until a checkpoint is written do"""
    deregistered_wait: Duration = flag("neuron.deregistered_wait", DAY, ge=SECOND, le=365 * DAY)
    """a hotkey that lost its uid ends training and uploads at once; weights and run folder are kept
    and the miner waits this long to be registered again (`btcli subnet register`), then ends with
    status 3. Metric dt_registered is 0 while it waits, 1 while it runs"""
    global_tokenizer_name: str = rule("tokenizer.name")
    """tokenizer, by its Hugging Face name or as a folder"""
    master_ss58_address: Hotkey = rule("chain.master_hotkey")
    """hotkey of the validator that owns the global bucket and calls the rounds"""
    round_reload_timeout: Patience = rule("round.reload_timeout")
    """after the start of a round: how long to wait for the validator's new global state before this
    miner compares epochs and loads what the bucket holds"""
    train_in_rounds: bool | None = flag("neuron.train_in_rounds", None)
    """inner steps continue while the swarm averages, and the outer step keeps what they trained.
    Takes 4 bytes of host memory a parameter more in a round (default: in a network of format 2,
    where the host memory is there)"""
    epoch_check_blocks: Count = 25  # between two looks at the global bucket while training
    checkpoint_steps: Count = flag("neuron.checkpoint_steps", 25)
    """inner steps between two local checkpoints, at least; one is also written after each outer
    step and at each stop"""
    checkpoint_interval: Span = flag("neuron.checkpoint_interval", 600 * SECOND)
    """time trained between two local checkpoints, at least. A checkpoint of 4 billion parameters is
    64 GB: on fast hardware checkpoint_steps by itself would write one each minute"""
    keep_checkpoints: int = flag("neuron.keep_checkpoints", 2, ge=1, le=1000)
    """local checkpoints to keep; older ones are deleted"""


@dataclass(frozen=True, config=SETTINGS)
class StoreSettings:
    """Settings of the bucket and its uploads.

    Keys come from the environment or ``.env`` only; they are made in the R2 dashboard, Manage API
    tokens.
    """

    # Keys are of type Secret, which no command line may hold; the account's id is none.
    account_id: str | None = flag("r2.account_id", None, env="R2_ACCOUNT_ID")
    """Cloudflare account id, 32 hexadecimal digits"""
    read_access_key_id: Key = flag("r2.read_access_key_id", env="R2_READ_ACCESS_KEY_ID")
    """key that may only read, published on the chain; from the R2 dashboard, Manage API tokens"""
    read_secret_access_key: Key = flag("r2.read_secret_access_key", env="R2_READ_SECRET_ACCESS_KEY")
    """secret of the reading key, published on the chain; from the R2 dashboard, Manage API
    tokens"""
    write_access_key_id: Key = flag("r2.write_access_key_id", env="R2_WRITE_ACCESS_KEY_ID")
    """key that may read and write, never published; from the R2 dashboard, Manage API tokens"""
    write_secret_access_key: Key = flag(
        "r2.write_secret_access_key", env="R2_WRITE_SECRET_ACCESS_KEY"
    )
    """secret of the writing key, never published; from the R2 dashboard, Manage API tokens"""
    endpoint_url: EndpointUrl | None = flag(
        "r2.endpoint_url", network="store.endpoint", fixed=True, env="R2_ENDPOINT_URL"
    )
    """object store to use instead of R2, e.g. http://127.0.0.1:9000, or a folder: folder:///PLACE"""
    jurisdiction: Literal["default", "eu", "fedramp", "us"] = flag("r2.jurisdiction", "default")
    """R2 jurisdiction the buckets were made in"""
    region: str = flag("r2.region", "auto", network="store.region")
    """region name that requests are signed for"""
    addressing: Literal["path", "virtual"] = rule("store.addressing", "path")
    """where the bucket's name stands: after the store's host, or in it, before the rest"""
    access: Literal["registry", "own"] = rule("store.access", "registry")
    """with exchange 'store': the registry hands out URLs of the global bucket, or each member has a
    bucket of its own, as over hivemind, whose read key it commits to the chain"""
    hosts: Words[HostPort] = rule("store.hosts", ())
    """with exchange 'store': hosts, or HOST:PORT, that the registry may send members to, in
    addition to those of store.endpoint and store.public_url"""
    public_url: WebUrl | None = rule("store.public_url")
    """with exchange 'store': URL where anybody reads the global bucket without the registry"""
    write_interval: timedelta = 1.1 * SECOND  # between two writes of a key: R2 allows one a second
    connect_timeout: timedelta = 10 * SECOND
    read_timeout: timedelta = 60 * SECOND  # between two pieces of the store's answer
    global_model_name: GlobalBucket = rule("store.global_bucket")
    """bucket of the global model; a miner's own bucket is this name and its uid"""
    run: Count = rule("run")
    """number of the run in the metadata of each upload"""
    content: Literal["scored", "all"] = rule("upload.content", "all")
    """what a miner uploads: 'scored', the compressed pseudo-gradient that validators score, or
    'all', the model and the inner optimizer too, as the public network does"""
    upload_steps: Count = flag("neuron.upload_steps", 60)
    """inner steps between two uploads, at least"""
    minimum_valid_inner_step: CountFrom0 = rule("round.minimum_valid_inner_step")
    """first inner step of an outer step to upload; lowered, with a warning, if that is too late"""
    age_limit: Age = rule("round.upload_age_limit")
    """age of gradients.pt from which validators count the bucket as stale"""
    keep_epochs: int = flag("neuron.keep_epochs", 3, ge=1, le=1000)
    """outer steps kept in the bucket; of local snapshots only the newest uploaded one stays"""
    part_size: int = 0  # bytes of a multipart upload's parts; 0: by the file's size
    concurrency: int = 6  # parts sent or fetched at the same time
    snapshot_timeout: timedelta = 600 * SECOND  # until all ranks have written their files of one
    take_bucket: bool = flag("r2.take_bucket", False)
    """upload even though another miner claimed this bucket within the last minutes"""

    @property
    def longest_transfer(self) -> timedelta:
        """The time that an upload, or the download of a state, may take, without pauses.

        An upload counts until the age limit, so none is given up before that.
        """
        return min(self.age_limit, DAY)


@dataclass(frozen=True, config=SETTINGS)
class SwarmSettings:
    """Timeouts form one hierarchy: chunk < all-reduce < round < reload (checked at start)."""

    dht_port: Port = flag("dht.port", 8009)
    """TCP port of the swarm; must be reachable from outside; 0 takes a free one"""
    dht_ip: Found[Ipv4Address] = flag("dht.ip", None)
    """IPv4 address other peers reach this machine at; it is announced to the swarm (default, or
    auto: --axon.external_ip, or what is found for it)"""
    dht_external_port: OuterPort | None = flag("dht.external_port", None)
    """port other peers reach the swarm at, where a router or a container maps another one to
    --dht.port (default: --dht.port)"""
    dht_listen_ip: Ipv4Address = flag("dht.listen_ip", "0.0.0.0")
    """IPv4 address the swarm listens on"""
    initial_peers: Words[PeerAddress] = flag("neuron.initial_peers", network="swarm.initial_peers")
    """peers through which the swarm is joined, as /ip4/<ip>/tcp/<port>/p2p/<peer id>"""
    run_id: str = rule("run_id")
    """names the swarm; all peers of a run must agree"""
    min_group_size: int = rule("round.min_group_size", ge=2, le=LARGEST_GROUP)
    """fewest peers a round may take place with"""
    min_matchmaking_time: Wait = rule("round.min_matchmaking_time")
    """how long a round gathers peers before the averaging begins"""
    request_timeout: Duration = rule("round.request_timeout", ge=SECOND / 10, le=10 * MINUTE)
    """matchmaking: how long one answer of a group's leader is waited for; raise it when groups
    split on slow networks"""
    next_chunk_timeout: Wait = rule("round.next_chunk_timeout")
    """averaging: a peer that sends nothing for this long is left out (as a reducer: twice it)"""
    allreduce_timeout: Duration = rule("round.allreduce_timeout", ge=SECOND / 10, le=6 * HOUR)
    """averaging, after the group is found, from the first to the last part"""
    round_timeout: Duration = rule("round.round_timeout", ge=SECOND / 10, le=6 * HOUR)
    """a whole round: matchmaking, retries and averaging; then it has failed"""
    start_timeout: timedelta = 60 * SECOND  # of one attempt; repeated with back-off
    part_size: int = rule("swarm.part_size", ge=1024, le=2**26)
    """bytes of the uncompressed parts in which tensors travel; all peers of a group must agree"""
    compression: Literal["none", "float16", "4bit"] = rule("round.compression", "none")
    """how peers send tensors in a round: 'none' as the public network does; 'float16' halves the
    bytes; '4bit' sends an eighth of them, and all peers have the same average to the bit"""


@dataclass(frozen=True, config=SETTINGS)
class TelemetrySettings:
    """Settings of logs, metrics and events, and of their places."""

    debug: bool = flag("logging.debug", False)
    """log debug lines (never secrets)"""
    trace: bool = flag("logging.trace", False)
    """log debug lines of hivemind, bittensor and boto3 too"""
    page_port: Port | Literal["off"] = flag("neuron.page_port", 8010)
    """port of the page that shows this neuron in a browser; 0: any free one. A validator's is 8011
    where none is given"""
    page_host: Text = flag("neuron.page_host", "127.0.0.1")
    """address of the page; any other than this machine's own needs DT_PAGE_TOKEN"""
    page_token: Secret | None = flag("neuron.page_token", None, env="DT_PAGE_TOKEN")
    """16 characters or more that whoever opens the page must know"""
    notify_url: Webhook | None = flag("notify.url", None, env="DT_NOTIFY_URL")
    """webhook of ntfy, Slack, Discord, Telegram (.../sendMessage?chat_id=ID) or your own, which
    gets a message when a miner needs somebody, when that is over, and once a day how it was"""
    price_per_hour: float | None = flag("cost.price_per_hour", None, ge=0, le=1e6)
    """what this machine costs in an hour, in any currency: the page sets it against the income"""
    tensorboard_dir: File | None = flag("neuron.tensorboard_dir", None)
    """write every step's figures for `tensorboard --logdir` into a folder of this miner there"""
    wandb: Literal["off", "online", "offline"] = flag("neuron.wandb", "off")
    """send every step's figures to Weights & Biases; offline: keep them in the run folder for
    `wandb sync`"""
    wandb_project: Text = flag("neuron.wandb_project", "distributed_training")
    """project of W&B; its team is the key's, or WANDB_ENTITY in the environment"""
    wandb_api_key: Secret | None = flag("neuron.wandb_api_key", None, env="WANDB_API_KEY")
    """key of W&B (default: that of `wandb login`)"""


MicroBatch = Annotated[int, Field(ge=1, le=65536)]


@dataclass(frozen=True, config=SETTINGS)
class TrainingSettings:
    """One inner step is ``local_batch_size_train_effective`` sequences over all ranks."""

    local_batch_size_train: MicroBatch | Literal["auto"] = flag(
        "neuron.local_batch_size_train", "auto"
    )
    """sequences per micro-batch and rank; 'auto' measures at the first start which size that fits
    is the fastest, up to 32 and on a CPU up to 16. When memory runs out it is lowered by itself"""
    local_batch_size_train_effective: Count = flag(
        "neuron.local_batch_size_train_effective", network="training.effective_batch", fixed=True
    )
    """sequences per inner step over all ranks; rounded up to a multiple of micro-batch x ranks"""
    sequence_length: int = rule("training.sequence_length", ge=2, le=1_000_000)
    """tokens per sequence, as the validators evaluate"""
    learning_rate: float = rule("training.learning_rate", ge=0, le=10)
    """highest learning rate of AdamW, reached after the warm-up"""
    warmup_steps: int = rule("training.warmup_steps", ge=0, le=10**9)
    """inner steps of linear warm-up of the learning rate"""
    total_steps: int = rule("training.total_steps", ge=1, le=10**9)
    """inner steps in total at which the cosine schedule of the learning rate ends; where the cosine
    falls below a tenth of the highest rate, the rate stays at a tenth"""
    schedule: Literal["cosine", "constant"] = rule("training.schedule", "cosine")
    """the learning rate after the warm-up: a cosine, or the highest until the decay begins"""
    decay_from: int | None = rule("training.decay_from", ge=0, le=10**9)
    """inner steps of the network after which the constant learning rate decays to zero"""
    decay_steps: int | None = rule("training.decay_steps", ge=1, le=10**9)
    """inner steps of that decay"""
    optimizer: str = rule("training.optimizer", "adamw")
    """the inner optimizer: 'adamw', 'muon' (of matrices of decoder layers; AdamW for the rest), or
    the name that a plug-in registers"""
    weight_decay: float = rule("training.weight_decay", ge=0, le=10)
    """weight decay of AdamW"""
    weight_decay_on: Literal["all", "matrices"] = rule("training.weight_decay_on", "all")
    """'matrices': no weight decay of embeddings and of parameters of one dimension"""
    adam_beta1: float = rule("training.adam_beta1", ge=0, le=0.9999)
    """first moment decay of AdamW"""
    adam_beta2: float = rule("training.adam_beta2", ge=0, le=0.9999)
    """second moment decay of AdamW"""
    gradient_clip: float = rule("training.gradient_clip", ge=0, le=1e9)
    """largest norm of the gradient of an inner step; 0 is off"""
    outer_learning_rate: float = rule("training.outer_learning_rate", ge=0, le=10)
    """learning rate of the outer step; the one in outer_optimizer.pt of the global bucket wins"""
    outer_momentum: float = rule("training.outer_momentum", ge=0, le=1)
    """Nesterov momentum of the outer step; all peers must agree"""
    late_overlap: Literal["kept", "dropped"] = rule("training.late_overlap", "kept")
    """with exchange 'store': the part, along the update, of what a miner trained while the update
    was on its way"""
    outer_rule: str = rule("training.outer_rule", "nesterov")
    """the outer rule, by the name that it is registered with"""
    compression: str = rule("compression.kind", "top-k")
    """how uploads are encoded, see *Homes* in docs/architecture.md"""
    topk_compression: int = rule("compression.top_k", ge=1, le=4096)
    """values kept per row of the uploaded pseudo-gradient"""
    target_chunk: int = rule("compression.chunk", ge=1, le=4096)
    """largest chunk side of the uploaded pseudo-gradient's format"""
    use_dct: bool = flag("neuron.use_dct", network="compression.dct", fixed=True)
    """upload DCT coefficients; the validators of the public network cannot read them"""
    momentum_decay: float = rule("compression.momentum_decay", ge=0, le=1)
    """decay of the error feedback of the uploaded gradient"""
    # What is uploaded (training/error_feedback.py); the benches train by 'upload' too.
    error_feedback: Literal["best", "upload", "off"] = "best"
    step_length: Literal["search", "plain"] = flag("neuron.step_length", "search")
    """'search': multiply the uploaded values by the factor that lowers the loss on held-out
    sequences most, as validators apply them; 'plain': upload them as they are, as the public
    miner does. 'search' needs --neuron.preview_sequences"""
    preview_sequences: int = flag("neuron.preview_sequences", 32, ge=0, le=10_000)
    """sequences of the miner, over all ranks, that are left out of training, others after each
    outer step: each gradient to be uploaded is tried on them as validators do; 0: no preview"""
    precision: Literal["auto", "bf16", "fp32"] = flag("neuron.precision", "auto")
    """of the computation; weights and optimizer are always float32. 'auto': bf16 where the hardware
    has it, else float32"""
    activation_checkpointing: Literal["none", "budget", "selective", "full"] = flag(
        "neuron.activation_checkpointing", "none"
    )
    """recompute activations instead of keeping them: 'budget' the cheaper half of each block, as
    torch.compile chooses it; 'selective' every second block; 'full' every block. Saves memory,
    costs up to a third of the speed"""
    compile: Literal["auto", "on", "off"] = flag("neuron.compile", "auto")
    """torch.compile of each block; 'auto': on with a GPU, off without"""
    deterministic: bool = flag("neuron.deterministic", False)
    """on a GPU: the same start trains to the same bits, as on a CPU; slower"""
    # When ranks reduce their gradients: at the last micro-batch of a step (fastest; holds the whole
    # gradient on each GPU) or at every one. auto: by memory, as the next one.
    gradient_sync: Literal["auto", "last", "every"] = "auto"
    keep_unsharded: Literal["auto", "on", "off"] = "auto"  # the gathered weights, through a step
    wrap: Literal["auto", "block", "root"] = "auto"  # what FSDP gathers at once; auto: by size
    offload_optimizer: Literal["auto", "on", "off"] = flag("neuron.offload_optimizer", "auto")
    """keep AdamW's state in host memory: 'on', 'off', or 'auto': where it would not fit the GPU"""
    seed: int = flag("neuron.seed", 42, ge=0, le=2**63 - 1)
    """seed of initial weights where none are loaded"""
    profile_steps: int = flag("profile.steps", 0, ge=0, le=10_000)
    """write a torch profiler trace of this many inner steps, without stopping the miner"""


@dataclass(frozen=True, config=SETTINGS)
class ValidatorSettings(RoundSettings):
    """Settings of the validator's rounds, scores and global state."""

    tick: timedelta = SECOND  # between two looks at the block clock

    # the round
    alive_timeout: timedelta = 2.3 * SECOND  # that a miner has to answer one IsAlive call
    sweep_interval: timedelta = 5 * SECOND  # between two IsAlive sweeps of one round
    # While fewer miners are alive than a round needs; then it has failed.
    sweep_patience: timedelta = 120 * SECOND
    minimum_peers: int = flag("validator.minimum_peers", 3, ge=1, le=LARGEST_GROUP)
    """fewest peers (this validator included, failed ones not) of a round and of its average"""
    loss_tolerance: float = flag("validator.loss_tolerance", 0.25, ge=0, le=1000)
    """in a network of format 1 an outer step is refused when it makes the held-out loss worse by
    more than this fraction"""
    top_candidates: int = 3  # miners, best first, whose checkpoint is tried as our contribution
    upload_content: Literal["scored", "all"] = rule("upload.content", "all")
    """what a miner uploads: 'scored', the compressed pseudo-gradient that validators score, or
    'all', the model and the inner optimizer too, as the public network does"""

    publication_budget: timedelta = 1800 * SECOND  # to upload a global state; then it is given up

    # the initial model, only when the global bucket is empty
    model_config: File | None = flag("validator.model_config", None)
    """config.json of the model to publish when the global bucket is empty (default: a Llama of
    about 2 million parameters)"""
    weights: File | None = flag("validator.weights", None)
    """folder as transformers writes it: the weights of outer step 0, when the global bucket is
    empty"""
    model_from: MemberUid | Literal["own", "none"] | None = flag("validator.model_from", None)
    """what the network continues with when the global bucket is empty since it was lost: 'own', the
    copy in the run folder; a member's uid, its model; 'none', nothing: outer step 0"""

    # the founder's look at the model
    export_every: CountFrom0 = flag("validator.export_every", 0)
    """outer steps between two exports of the model into exports/ of the run folder; 0: never"""
    keep_exports: int = flag("validator.keep_exports", 3, ge=1, le=10_000)
    """exports to keep, the newest"""
    export_command: Text = flag("validator.export_command", "")
    """command that is run with each export: its folder and outer step are the last two arguments,
    and its last line, a number or a JSON object of numbers, goes to events, page and W&B"""

    # scoring
    score_blocks: Count = flag("validator.score_blocks", 25)
    """blocks between two scoring passes over the miners' uploads"""
    score_uids: int = 25  # scored in one pass
    upload_age_limit: Age = rule("round.upload_age_limit")
    """age of gradients.pt from which validators count the bucket as stale"""
    evaluation_ranks: int = 4  # of a miner whose pages are evaluated, as the public validators do
    held_out_sequences: int = 32  # on which each outer step is judged
    seed: int = 0  # of the random blocks; 0: from the system


@dataclasses.dataclass(frozen=True)
class AllSettings:
    """The settings of all packages, in the order of the help."""

    general: GeneralSettings
    miner: MinerSettings
    training: TrainingSettings
    data: DataSettings
    store: StoreSettings
    swarm: SwarmSettings
    chain: ChainSettings
    diagnostics: DiagnosticsSettings
    telemetry: TelemetrySettings
    validator: ValidatorSettings
