"""What holds for every test."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Machines are shared: how long one example takes says nothing. Each test has its own time limit.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")

# Tests run beside each other: torch's threads, here and in what a test starts, would wait for each
# other's cores. Read when torch is imported, which no test is before this.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without the garbage collector, which finds nothing here and looks at millions of objects: a
    quarter of the time, in each worker. They stay until the end and are not looked at again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the longest time limits first: none of them is left to one worker at the end.

    A subnet trains on all cores for as long as it runs, so two others, which mostly wait, come
    between two files that start one.
    """
    limits: dict[Path, float] = {}
    subnets: set[Path] = set()
    for item in items:
        marker = item.get_closest_marker("timeout")
        limit = float(marker.args[0]) if marker is not None else 0.0
        limits[item.path] = max(limit, limits.get(item.path, 0.0))
        if isinstance(item, pytest.Function) and hasattr(item.module, "LocalSubnet"):
            subnets.add(item.path)
    files = sorted(limits, key=lambda path: -limits[path])
    busy, others = [p for p in files if p in subnets], [p for p in files if p not in subnets]
    order: list[Path] = []
    while busy or others:
        order += [*busy[:1], *others[:2]]
        del busy[:1], others[:2]
    items.sort(key=lambda item: order.index(item.path))


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """Of this process alone. Here, since the trainers of the tests run where pytest is not."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def forked_hosts() -> Iterator[None]:
    """Swarm hosts of this module's peers are forked, not started as programs."""
    from distributed_training.swarm import keeper
    from tests.forked import ForkedHostLaunch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keeper, "HostLaunch", ForkedHostLaunch)
        yield
