"""A miner for decentralized training subnets: inner steps, uploads, averaging, outer steps.

``docs/architecture.md`` describes its packages and their layers.
"""

import os as _os

__version__ = "0.2.0"

# Before anything imports the chain's client, which fails without a home: an account that a
# container makes up (docker run --user 12345) has none. There it is where .env and run folder are.
if _os.path.expanduser("~") == "~":
    _os.environ["HOME"] = _os.path.abspath(_os.curdir)
