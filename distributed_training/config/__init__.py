"""Every setting, declared once in a dataclass for its package, and loaded and checked at start."""

from .loader import exit_with, load_config, rules_at, run_folder_of
from .model import OPERATORS_FILE, Config, problems
from .schema import SETTINGS_FILE, WARNING, all_settings, describe
from .types import ConfigError

__all__ = [
    "OPERATORS_FILE",
    "SETTINGS_FILE",
    "WARNING",
    "Config",
    "ConfigError",
    "all_settings",
    "describe",
    "exit_with",
    "load_config",
    "problems",
    "rules_at",
    "run_folder_of",
]
