"""What holds for every test."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# Machines are shared: how long one example takes says nothing. Each test has its own time limit.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the longest time limits first: none of them is left to one worker at the end."""
    limits: dict[Path, float] = {}
    for item in items:
        marker = item.get_closest_marker("timeout")
        limit = float(marker.args[0]) if marker is not None else 0.0
        limits[item.path] = max(limit, limits.get(item.path, 0.0))
    items.sort(key=lambda item: -limits[item.path])
