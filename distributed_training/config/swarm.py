"""Settings of the swarm room: the DHT, the averager and the timeouts of a round."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from .flags import flag

PUBLIC_BOOTSTRAP = (
    "/ip4/161.97.156.125/tcp/8000/p2p/12D3KooWHDMAeP3zKHrALtREoc2vfYQL7HhsMN7WBvft7hgBCRhK"
)
#: Bytes of an uncompressed part. All peers of a group cut tensors into parts of as many values: one
#: that cuts otherwise fails the round for everybody.
PUBLIC_PART_SIZE = 512 * 1024


@dataclass(frozen=True)
class SwarmSettings:
    """Timeouts form one hierarchy: chunk < all-reduce < round < reload (checked at start)."""

    dht_port: int = flag("dht.port", 8009, "TCP port of the swarm; must be reachable from outside")
    dht_ip: str | None = flag(
        "dht.ip",
        None,
        "address other peers reach this machine at; it is announced to the swarm (default: what "
        "hivemind finds out itself)",
    )
    dht_listen_ip: str = flag("dht.listen_ip", "0.0.0.0", "address the swarm listens on")
    initial_peers: tuple[str, ...] = flag(
        "neuron.initial_peers",
        (PUBLIC_BOOTSTRAP,),
        "peers through which the swarm is joined, as /ip4/<ip>/tcp/<port>/p2p/<peer id>",
    )
    run_id: str = flag(
        "neuron.run_id", "v1_2_7_r5", "names the swarm; all peers of a run must agree"
    )
    min_group_size: int = flag(
        "neuron.min_group_size", 32, "fewest peers a round may take place with"
    )
    min_matchmaking_time: timedelta = flag(
        "neuron.min_matchmaking_time",
        timedelta(seconds=30),
        "how long a round gathers peers before the averaging begins",
    )
    request_timeout: timedelta = flag(
        "neuron.request_timeout",
        timedelta(seconds=10),
        "matchmaking: how long one answer of a group's leader is waited for; raise it when groups "
        "split on slow networks",
    )
    next_chunk_timeout: timedelta = flag(
        "neuron.next_chunk_timeout",
        timedelta(seconds=45),
        "averaging: a peer that sends nothing for this long is left out (as a reducer: twice it)",
    )
    allreduce_timeout: timedelta = flag(
        "neuron.allreduce_timeout",
        timedelta(seconds=795),
        "averaging, after the group is found, from the first to the last part",
    )
    round_timeout: timedelta = flag(
        "neuron.round_timeout",
        timedelta(seconds=840),
        "a whole round: matchmaking, retries and averaging; then it has failed",
    )
    start_timeout: timedelta = flag(
        "dht.start_timeout",
        timedelta(seconds=60),
        "start of the DHT, one attempt; it is repeated with back-off",
    )
    part_size: int = flag(
        "neuron.part_size_bytes",
        PUBLIC_PART_SIZE,
        "bytes of the uncompressed parts in which tensors travel; all peers of a group must agree",
    )
    compression: str = flag(
        "neuron.all_reduce_compression",
        "none",
        "how this peer sends tensors in a round: 'none' as the public network does; 'float16' "
        "halves the bytes and rounds the values, which every peer understands",
        choices=("none", "float16"),
    )
    max_norm_ratio: float = flag(
        "neuron.max_average_norm_ratio",
        20.0,
        "an average whose norm is more than this times the median of the last rounds' (the local "
        "pseudo-gradient's, until three are known) is refused; 0 accepts any",
    )
    allow_failed_peers: bool = flag(
        "neuron.allow_failed_peers",
        True,
        "take the outer step although a peer of the group failed in mid-transfer, as the public "
        "network does (its parts keep local values); 'no' refuses such a round",
    )
