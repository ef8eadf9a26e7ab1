"""A miner for decentralized training subnets: inner steps, uploads, averaging, outer steps.

``docs/architecture.md`` describes its packages and their layers.
"""

__version__ = "0.2.0"
