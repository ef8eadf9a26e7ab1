"""Settings of the swarm room: the DHT, the averager and the timeouts of a round."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from distributed_training.protocol import names

from .flags import HOUR, MINUTE, SECOND, SETTINGS, flag
from .values import Duration, Found, Ipv4Address, PeerAddress, Words

#: Bytes of an uncompressed part. All peers of a group cut tensors into parts of as many values: one
#: that cuts otherwise fails the round for everybody.
PUBLIC_PART_SIZE = 512 * 1024


@dataclass(frozen=True, config=SETTINGS)
class SwarmSettings:
    """Timeouts form one hierarchy: chunk < all-reduce < round < reload (checked at start)."""

    dht_port: int = flag("dht.port", 8009, ge=0, le=65535)
    """TCP port of the swarm; must be reachable from outside; 0 takes a free one"""
    dht_ip: Found[Ipv4Address] = flag("dht.ip", None)
    """IPv4 address other peers reach this machine at; it is announced to the swarm (default, or
    auto: what hivemind finds out itself)"""
    dht_listen_ip: Ipv4Address = flag("dht.listen_ip", "0.0.0.0")
    """IPv4 address the swarm listens on"""
    initial_peers: Words[PeerAddress] = flag("neuron.initial_peers", names.BOOTSTRAP_PEERS)
    """peers through which the swarm is joined, as /ip4/<ip>/tcp/<port>/p2p/<peer id>"""
    run_id: str = flag("neuron.run_id", names.RUN_ID)
    """names the swarm; all peers of a run must agree"""
    min_group_size: int = flag("neuron.min_group_size", 32, ge=2, le=4096)
    """fewest peers a round may take place with"""
    min_matchmaking_time: Duration = flag(
        "neuron.min_matchmaking_time", 30 * SECOND, ge=SECOND / 10, le=HOUR
    )
    """how long a round gathers peers before the averaging begins"""
    request_timeout: Duration = flag(
        "neuron.request_timeout", 10 * SECOND, ge=SECOND / 10, le=10 * MINUTE
    )
    """matchmaking: how long one answer of a group's leader is waited for; raise it when groups
    split on slow networks"""
    next_chunk_timeout: Duration = flag(
        "neuron.next_chunk_timeout", 45 * SECOND, ge=SECOND / 10, le=HOUR
    )
    """averaging: a peer that sends nothing for this long is left out (as a reducer: twice it)"""
    allreduce_timeout: Duration = flag(
        "neuron.allreduce_timeout", 795 * SECOND, ge=SECOND / 10, le=6 * HOUR
    )
    """averaging, after the group is found, from the first to the last part"""
    round_timeout: Duration = flag(
        "neuron.round_timeout", 840 * SECOND, ge=SECOND / 10, le=6 * HOUR
    )
    """a whole round: matchmaking, retries and averaging; then it has failed"""
    start_timeout: Duration = flag("dht.start_timeout", 60 * SECOND, ge=SECOND, le=HOUR)
    """start of the DHT, one attempt; it is repeated with back-off"""
    part_size: int = flag("neuron.part_size_bytes", PUBLIC_PART_SIZE, ge=1024, le=2**26)
    """bytes of the uncompressed parts in which tensors travel; all peers of a group must agree"""
    compression: Literal["none", "float16"] = flag("neuron.all_reduce_compression", "none")
    """how this peer sends tensors in a round: 'none' as the public network does; 'float16' halves
    the bytes and rounds the values, which every peer understands"""
    max_norm_ratio: float = flag("neuron.max_average_norm_ratio", 20.0, ge=0, le=1e9)
    """an average whose norm is more than this times the median of the last rounds' (the local
    pseudo-gradient's, until three are known) is refused; 0 accepts any"""
    allow_failed_peers: bool = flag("neuron.allow_failed_peers", True)
    """take the outer step although a peer of the group failed in mid-transfer, as the public
    network does (its parts keep local values); 'no' refuses such a round"""
