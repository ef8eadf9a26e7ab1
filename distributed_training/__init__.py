"""A miner for decentralized training subnets: inner steps, uploads, averaging, outer steps.

``docs/architecture.md`` describes its packages and their layers.
"""

import importlib as _importlib
import os as _os
from typing import Any as _Any

__version__ = "0.2.0"
#: Shown instead of a program's help text, which is its docstring.
NO_HELP = "python -OO removes the help: start without it"

# Set HOME before anything imports the chain's client, which fails without it: an account that a
# container makes up (docker run --user 12345) has no home. Its home is then the current folder,
# where .env and the run folder are.
if _os.path.expanduser("~") == "~":
    _os.environ["HOME"] = _os.path.abspath(_os.curdir)


def __getattr__(name: str) -> _Any:
    # Import the module on first use, since it is heavy and most programs that import this package
    # do not join a network. Import it by name, since it is in the highest layer.
    if name in ("Net", "join"):
        return getattr(_importlib.import_module(f"{__name__}.member"), name)
    if name in ("lora_config", "model_config", "tokenizer"):
        return getattr(_importlib.import_module(f"{__name__}.script_model"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
