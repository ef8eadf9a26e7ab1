"""Set up logging, processes and fixtures for every test."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis.core
import pytest
from hypothesis import settings

if TYPE_CHECKING:  # each worker imports this file
    from distributed_training.localnet.services import ObjectStoreServer

# Machines are shared: how long one example takes says nothing. Each test has its own time limit.
# The examples are the same in each run, so that a change is what fails. New ones are for a run of
# their own: DT_HYPOTHESIS=random, or the seed that such a run printed.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
if seed := os.environ.get("DT_HYPOTHESIS", ""):
    seed = str(random.getrandbits(32)) if seed == "random" else seed
    os.environ["DT_HYPOTHESIS"] = seed  # for xdist's workers
    hypothesis.core.global_force_seed = int(seed)
settings.load_profile("random" if seed else "same")


def pytest_report_header() -> str:
    if seed:
        return f"hypothesis: random examples; for the same ones again give DT_HYPOTHESIS={seed}"
    return "hypothesis: the examples of every run; for others give DT_HYPOTHESIS=random"


# Tests run at the same time: torch's threads, here and in a test's processes, would wait for each
# other's cores. Read when torch is imported, which no test is before this.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without the garbage collector, which finds nothing here and looks at millions of objects: a
    quarter of the time, in each worker. They stay until the end and are not looked at again.

    All loggers pass on to the root's: for each test pytest gives a handler to each that does not,
    and torch has 44 of those.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        for logger in logging.root.manager.loggerDict.values():
            if isinstance(logger, logging.Logger):
                logger.propagate = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the longest time limits first: none of them is left to one worker at the end.

    A subnet trains on all cores for as long as it runs, so two others, which mostly wait, come
    between two files that start one. Without workers the order stays that of the command line.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
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


#: Tools whose tests must run: a test that is skipped for want of one fails (``.ci/run`` sets it).
REQUIRED = [tool.lower() for tool in os.environ.get("DT_REQUIRE", "").split(",") if tool]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if wanted := [tool for tool in REQUIRED if tool in reason.lower()]:
            report.outcome = "failed"
            report.longrepr = f"DT_REQUIRE names {', '.join(wanted)}, and this was {reason}"
    return report


@pytest.fixture(autouse=True)
def garbage_is_collected() -> Iterator[None]:
    """A loop that ran in this process has switched the collector off."""
    yield
    if not gc.isenabled():
        gc.unfreeze()
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def no_group_stays() -> Iterator[None]:
    """A trainer makes a process group if there is none, and the next module could not make its own.

    46 tests of other files failed for one that had not asked for ``process_group``.
    """
    yield  # ``process_group`` has ended by then
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("a test of this file leaves a process group: ask for process_group")


@pytest.fixture(autouse=True)
def loggers_as_they_were() -> Iterator[None]:
    """A program run in this process may quieten a logger: not for the tests after it."""
    ours = "distributed_training"
    yield
    # Each change of a level empties the caches of all loggers there are: a millisecond.
    if logging.root.manager.disable:
        logging.disable(logging.NOTSET)
    for name in [ours, *(n for n in logging.root.manager.loggerDict if n.startswith(f"{ours}."))]:
        logger = logging.getLogger(name)
        if logger.level:
            logger.setLevel(logging.NOTSET)
        logger.disabled, logger.propagate = False, True


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Undo the logging of a program that sets it up for its process, which is pytest's here."""
    root, hooks = logging.getLogger(), (sys.excepthook, threading.excepthook)
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level
    sys.excepthook, threading.excepthook = hooks


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The tokenizer of bytes: the path of its file, and EOS."""
    from distributed_training.data.tokenizer import build_tokenizer

    return build_tokenizer("bytes", tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStoreServer]:
    """A real object store."""
    from distributed_training.localnet.services import ObjectStoreServer

    with ObjectStoreServer(tmp_path_factory.mktemp("object-store")) as running:
        yield running


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    """A group of only this process. Here, since tests' trainers run where pytest is not."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
