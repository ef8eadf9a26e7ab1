"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# Machines are shared: how long one example takes says nothing. Each test has its own time limit.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
