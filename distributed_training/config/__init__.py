"""Every setting once: declared by the rooms' dataclasses here, loaded and checked at start."""

from .arguments import exit_with
from .checks import notices, problems
from .flags import ConfigError
from .help import describe, markdown
from .loader import load_config
from .model import Config

__all__ = [
    "Config",
    "ConfigError",
    "describe",
    "exit_with",
    "load_config",
    "markdown",
    "notices",
    "problems",
]
