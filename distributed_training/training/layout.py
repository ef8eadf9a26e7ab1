"""Where a rank stands when a miner is more than one machine.

Ranks are numbered node by node: with L ranks on each node, rank r is on node r // L. By default
each node holds one whole copy of the model, sharded over its own ranks (HSDP): weights are gathered
inside a node, and between nodes travel only gradients, each rank's with its peers of the same
shard. All copies go through the same steps, so a snapshot or a checkpoint of one node is one of
all. A model too large for one node is sharded across all of them instead
(``--neuron.shard_across_nodes``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """``local_world_size``: ranks of each node; 0: all ranks are on one."""

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 0
    across_nodes: bool = False  # one copy over all nodes

    @property
    def local(self) -> int:
        """Ranks of each node."""
        return self.local_world_size or self.world_size

    @property
    def nodes(self) -> int:
        return self.world_size // self.local

    @property
    def on_node_0(self) -> bool:
        return self.rank < self.local

    @property
    def shards(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.world_size if self.across_nodes else self.local

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return self.world_size // self.shards

    @property
    def shard(self) -> int:
        """This rank's part of its copy."""
        return self.rank % self.shards

    @property
    def shards_here(self) -> range:
        """The parts of a copy that this rank's node holds."""
        first = self.shard // self.local * self.local
        return range(first, first + self.local)
