"""Every setting once: declared by the rooms' dataclasses here, loaded and checked at start.

Names are imported on first use, so that ``config.training`` can be imported where neither pydantic
nor python-dotenv is installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .flags import ConfigError, flag

if TYPE_CHECKING:
    from .checks import notices, problems
    from .help import describe, help_text, markdown
    from .loader import Config, exit_with, load_config

_WHERE = {
    "Config": "loader",
    "load_config": "loader",
    "exit_with": "loader",
    "problems": "checks",
    "notices": "checks",
    "describe": "help",
    "help_text": "help",
    "markdown": "help",
}

__all__ = [
    "Config",
    "ConfigError",
    "describe",
    "exit_with",
    "flag",
    "help_text",
    "load_config",
    "markdown",
    "notices",
    "problems",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
