"""Settings of the chain room: wallet, chain connection, the signed server and who may call it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from .flags import ConfigError, flag


def parse_range(text: str) -> tuple[float, float]:
    """``LOW:HIGH`` as two finite numbers, LOW <= HIGH. Raises ConfigError."""
    low_text, separator, high_text = text.partition(":")
    try:
        low, high = float(low_text), float(high_text)
    except ValueError:
        low, high = 1.0, 0.0
    if not separator or not 0 <= low <= high < float("inf"):
        raise ConfigError(
            f"{text!r} is not a range, so values of a call cannot be bounded: give LOW:HIGH"
        )
    return low, high


@dataclass(frozen=True)
class ChainSettings:
    """Identity, chain and signed server. Defaults are those of the public network.

    Which chain: ``local_url`` (a chain server of the local subnet, HTTP) when it is set, else the
    Subtensor named by ``network`` / ``chain_endpoint``.
    """

    # identity
    netuid: int = flag("netuid", 38, "number of the subnet (38 on the public network)")
    wallet_name: str = flag(
        "wallet.name",
        "default",
        "folder of the wallet (its coldkey is not read)",
        env="BT_WALLET_NAME",
    )
    wallet_hotkey: str = flag(
        "wallet.hotkey", "default", "name of the hotkey in the wallet", env="BT_WALLET_HOTKEY"
    )
    wallet_path: str = flag(
        "wallet.path", "~/.bittensor/wallets/", "folder of all wallets", env="BT_WALLET_PATH"
    )

    # chain
    network: str = flag(
        "subtensor.network", "finney", "chain to use: finney, test, local, or a ws:// or wss:// URL"
    )
    chain_endpoint: str | None = flag(
        "subtensor.chain_endpoint",
        None,
        "URL of the chain node; wins over --subtensor.network",
    )
    fallback_endpoints: tuple[str, ...] = flag(
        "subtensor.fallback_endpoints",
        (),
        "further URLs to try when the first one fails (default: the SDK's list for the network)",
    )
    local_url: str | None = flag(
        "chain.local_url",
        None,
        "http:// URL of a local subnet's chain server; it is then used instead of a Subtensor",
    )
    poll_interval: timedelta = flag(
        "chain.poll_interval",
        timedelta(seconds=6),
        "time between two looks at the current block",
    )
    neurons_interval: timedelta = flag(
        "chain.neurons_interval",
        timedelta(seconds=120),
        "time between two reads of all neurons and commitments of the subnet",
    )
    call_timeout: timedelta = flag(
        "chain.call_timeout",
        timedelta(seconds=45),
        "deadline of one read from the chain; lower it when a silent node holds things up",
    )
    write_timeout: timedelta = flag(
        "chain.write_timeout",
        timedelta(seconds=120),
        "deadline of one write to the chain, inclusion in a block included",
    )
    start_timeout: timedelta = flag(
        "chain.start_timeout",
        timedelta(seconds=120),
        "how long the start waits for a first answer of the chain",
    )

    # signed server
    axon_port: int = flag("axon.port", 8091, "port of the signed HTTP server; 0 takes a free one")
    axon_ip: str = flag("axon.ip", "[::]", "address the signed HTTP server listens on")
    external_ip: str | None = flag(
        "axon.external_ip",
        None,
        "address validators reach this server at, as it is written to the chain (default: asked "
        "from a public service)",
    )
    external_port: int | None = flag(
        "axon.external_port", None, "port validators reach this server at (default: --axon.port)"
    )
    max_workers: int = flag(
        "axon.max_workers",
        10,
        "without effect: the signed server answers on one event loop; see --axon.max_connections",
    )
    auth_schemes: tuple[str, ...] = flag(
        "axon.auth",
        ("btauth", "legacy"),
        "how callers may prove who they are: btauth (bittensor 11) and legacy (dendrite headers of "
        "bittensor 10 and older)",
    )
    client_scheme: str = flag(
        "axon.client_auth",
        "btauth",
        "how this neuron signs its own calls to others",
        choices=("btauth", "legacy"),
    )
    max_connections: int = flag(
        "axon.max_connections", 256, "open connections of the signed server, all addresses together"
    )
    max_connections_per_address: int = flag(
        "axon.max_connections_per_address", 16, "open connections from one address"
    )
    read_timeout: timedelta = flag(
        "axon.read_timeout",
        timedelta(seconds=5),
        "time a client has to send a whole request; slower ones are cut off",
    )
    requests_per_hotkey: float = flag(
        "axon.requests_per_hotkey", 5.0, "verified calls per second of one hotkey (burst: 6 times)"
    )
    requests_per_address: float = flag(
        "axon.requests_per_address", 50.0, "requests per second from one address (burst: 6 times)"
    )
    legacy_timeout_cap: timedelta = flag(
        "axon.legacy_timeout_cap",
        timedelta(seconds=12),
        "largest unsigned timeout header that widens the age at which a legacy call is accepted "
        "(4 s plus the timeout)",
    )
    clock_skew: timedelta = flag(
        "axon.clock_skew",
        timedelta(seconds=4),
        "how far in the future a caller's clock may be",
    )

    # who may call
    force_validator_permit: bool = flag(
        "blacklist.force_validator_permit", False, "answer IsAlive only to validators with a permit"
    )
    allow_non_registered: bool = flag(
        "blacklist.allow_non_registered", False, "answer IsAlive to hotkeys that are not registered"
    )
    min_stake: float = flag(
        "blacklist.min_stake",
        40960.0,
        "stake a validator with a permit needs to call AllReduce; the master hotkey needs none",
    )

    # bounds of what a call may ask for (the legacy signature does not cover the body)
    clamp_round_timeout: tuple[float, float] = flag(
        "clamp.timeout", (30.0, 1200.0), "LOW:HIGH seconds of a round", parse=parse_range
    )
    clamp_min_group_size: tuple[float, float] = flag(
        "clamp.min_group_size", (2.0, 128.0), "LOW:HIGH peers", parse=parse_range
    )
    clamp_request_timeout: tuple[float, float] = flag(
        "clamp.request_timeout", (1.0, 60.0), "LOW:HIGH seconds", parse=parse_range
    )
    clamp_allreduce_timeout: tuple[float, float] = flag(
        "clamp.allreduce_timeout", (10.0, 1200.0), "LOW:HIGH seconds", parse=parse_range
    )
    clamp_next_chunk_timeout: tuple[float, float] = flag(
        "clamp.next_chunk_timeout", (1.0, 120.0), "LOW:HIGH seconds", parse=parse_range
    )
    clamp_min_matchmaking_time: tuple[float, float] = flag(
        "clamp.min_matchmaking_time", (1.0, 120.0), "LOW:HIGH seconds", parse=parse_range
    )
