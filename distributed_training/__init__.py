"""A miner for decentralized training subnets: inner steps, publication, averaging, outer steps.

The rooms and the floors they stand on are described in ``docs/architecture.md``.
"""

__version__ = "0.1.0"
