"""Miner, validator and registry for decentralized training.

``docs/architecture.md`` describes its packages and their layers.
"""

import importlib as _importlib
import os as _os
from typing import Any as _Any

__version__ = "0.2.0"
#: Shown instead of a program's help text, which is its docstring.
NO_HELP = "python -OO removes the help: start without it"

# Set HOME before anything imports the chain's client, which fails without it. The account of a
# container (docker run --user 12345) may have no home. The current folder, which contains .env and
# the run folder, then becomes its home.
if _os.path.expanduser("~") == "~":
    _os.environ["HOME"] = _os.path.abspath(_os.curdir)


def __getattr__(name: str) -> _Any:
    # Import the module on first use, because it is large and most programs that import this package
    # do not join a network. Import it by name, because it belongs to the highest layer.
    if name in ("Net", "join"):
        return getattr(_importlib.import_module(f"{__name__}.member"), name)
    if name in ("lora_config", "model_config", "tokenizer"):
        return getattr(_importlib.import_module(f"{__name__}.script_model"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
