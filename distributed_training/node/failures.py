"""Why a node does not start although its configuration is right."""

from __future__ import annotations


class NetworkFailure(RuntimeError):
    """The outside cannot be reached; the line says why and what mends it. Exit status 1, so pm2
    tries again. What an operator must change is a ConfigError instead (exit status 2)."""
