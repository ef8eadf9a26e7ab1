"""Settings of the chain room: wallet, chain connection, the signed server and who may call it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from distributed_training.protocol.names import NETUID

from .flags import DAY, HOUR, MINUTE, SECOND, SETTINGS, flag
from .values import Duration, FileName, Found, IpAddress, NodeUrl, Range, Subtensor, WebUrl, Words

Seconds = Annotated[float, Field(ge=0.1, le=3600)]
Peers = Annotated[float, Field(ge=2, le=4096)]


@dataclass(frozen=True, config=SETTINGS)
class ChainSettings:
    """Identity, chain and signed server. Defaults are those of the public network.

    Which chain: ``local_url`` (a chain server of the local subnet, HTTP) when it is set, else the
    Subtensor named by ``network`` / ``chain_endpoint``.
    """

    # identity
    netuid: int = flag("netuid", NETUID, ge=0, le=65535)
    """number of the subnet (38 on the public network)"""
    wallet_name: FileName = flag("wallet.name", "default", env="BT_WALLET_NAME")
    """folder of the wallet (its coldkey is not read)"""
    wallet_hotkey: FileName = flag("wallet.hotkey", "default", env="BT_WALLET_HOTKEY")
    """name of the hotkey in the wallet"""
    wallet_path: str = flag("wallet.path", "~/.bittensor/wallets/", env="BT_WALLET_PATH")
    """folder of all wallets"""

    # chain
    network: Subtensor = flag("subtensor.network", "finney")
    """chain to use: finney, test, local, or a ws:// or wss:// URL"""
    chain_endpoint: NodeUrl | None = flag("subtensor.chain_endpoint", None)
    """URL of the chain node; wins over --subtensor.network"""
    fallback_endpoints: Words[NodeUrl] = flag("subtensor.fallback_endpoints", ())
    """further URLs to try when the first one fails (default: the SDK's list for the network)"""
    local_url: WebUrl | None = flag("chain.local_url", None)
    """http:// URL of a local subnet's chain server; it is then used instead of a Subtensor"""
    poll_interval: Duration = flag("chain.poll_interval", 6 * SECOND, ge=SECOND / 100, le=MINUTE)
    """time between two looks at the current block"""
    neurons_interval: Duration = flag(
        "chain.neurons_interval", 120 * SECOND, ge=SECOND / 100, le=HOUR
    )
    """time between two reads of all neurons and commitments of the subnet"""
    call_timeout: Duration = flag("chain.call_timeout", 45 * SECOND, ge=SECOND / 10, le=HOUR)
    """deadline of one read from the chain; lower it when a silent node holds things up"""
    write_timeout: Duration = flag("chain.write_timeout", 120 * SECOND, ge=SECOND / 10, le=HOUR)
    """deadline of one write to the chain, inclusion in a block included"""
    start_timeout: Duration = flag("chain.start_timeout", 120 * SECOND, ge=SECOND / 10, le=DAY)
    """how long the start waits for a first answer of the chain"""

    # signed server
    axon_port: int = flag("axon.port", 8091, ge=0, le=65535)
    """port of the signed HTTP server; 0 takes a free one"""
    axon_ip: IpAddress = flag("axon.ip", "[::]")
    """address the signed HTTP server listens on"""
    external_ip: Found[IpAddress] = flag("axon.external_ip", None)
    """address validators reach this server at, as it is written to the chain (default, or auto:
    asked from a public service)"""
    external_port: int | None = flag("axon.external_port", None, ge=1, le=65535)
    """port validators reach this server at (default: --axon.port)"""
    max_workers: int = flag("axon.max_workers", 10, ge=1, le=4096)
    """without effect: the signed server answers on one event loop; see --axon.max_connections"""
    auth_schemes: Annotated[Words[Literal["btauth", "legacy"]], Field(min_length=1)] = flag(
        "axon.auth", ("btauth", "legacy")
    )
    """how callers may prove who they are: btauth (bittensor 11) and legacy (dendrite headers of
    bittensor 10 and older)"""
    client_scheme: Literal["btauth", "legacy"] = flag("axon.client_auth", "btauth")
    """how this neuron signs its own calls to others"""
    max_connections: int = flag("axon.max_connections", 256, ge=1, le=65535)
    """open connections of the signed server, all addresses together"""
    max_connections_per_address: int = flag("axon.max_connections_per_address", 16, ge=1, le=65535)
    """open connections from one address"""
    read_timeout: Duration = flag("axon.read_timeout", 5 * SECOND, ge=SECOND / 10, le=MINUTE)
    """time a client has to send a whole request; slower ones are cut off"""
    requests_per_hotkey: float = flag("axon.requests_per_hotkey", 5.0, ge=0.1, le=1e6)
    """verified calls per second of one hotkey (burst: 6 times)"""
    requests_per_address: float = flag("axon.requests_per_address", 50.0, ge=0.1, le=1e6)
    """requests per second from one address (burst: 6 times)"""
    legacy_timeout_cap: Duration = flag(
        "axon.legacy_timeout_cap", 12 * SECOND, ge=0 * SECOND, le=MINUTE
    )
    """largest unsigned timeout header that widens the age at which a legacy call is accepted (4 s
    plus the timeout)"""
    clock_skew: Duration = flag("axon.clock_skew", 4 * SECOND, ge=0 * SECOND, le=MINUTE)
    """how far in the future a caller's clock may be"""

    # who may call
    force_validator_permit: bool = flag("blacklist.force_validator_permit", False)
    """answer IsAlive only to validators with a permit"""
    allow_non_registered: bool = flag("blacklist.allow_non_registered", False)
    """answer IsAlive to hotkeys that are not registered"""
    min_stake: float = flag("blacklist.min_stake", 40960.0, ge=0, le=1e12)
    """stake a validator with a permit needs to call AllReduce; the master hotkey needs none"""

    # bounds of what a call may ask for (the legacy signature does not cover the body)
    clamp_round_timeout: Range[Seconds] = flag("clamp.timeout", (30.0, 1200.0))
    """LOW:HIGH seconds of a round"""
    clamp_min_group_size: Range[Peers] = flag("clamp.min_group_size", (2.0, 128.0))
    """LOW:HIGH peers"""
    clamp_request_timeout: Range[Seconds] = flag("clamp.request_timeout", (1.0, 60.0))
    """LOW:HIGH seconds"""
    clamp_allreduce_timeout: Range[Seconds] = flag("clamp.allreduce_timeout", (10.0, 1200.0))
    """LOW:HIGH seconds"""
    clamp_next_chunk_timeout: Range[Seconds] = flag("clamp.next_chunk_timeout", (1.0, 120.0))
    """LOW:HIGH seconds"""
    clamp_min_matchmaking_time: Range[Seconds] = flag("clamp.min_matchmaking_time", (1.0, 120.0))
    """LOW:HIGH seconds"""
