"""Test the page that a miner's launcher starts: it is small, restarted, and no burden."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from tests.multiprocess.test_launcher_tree import Launched, launch_fakes  # noqa: F401
from tests.tools.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
ADDRESS = re.compile(r"page: (http://127\.0\.0\.1:\d+/)")
PORT = ("--neuron.page_port", "0")
LARGEST_BYTES = 80e6  # limit for the page's process


def address(launcher: Launched) -> str:
    found = wait_for(lambda: ADDRESS.search(launcher.output), "the page's address")
    return str(found[1])


def page_of(launcher: Launched) -> psutil.Process:
    children = psutil.Process(launcher.process.pid).children()
    (page,) = [c for c in children if "distributed_training.telemetry.page" in c.cmdline()]
    return page


def test_the_page_is_served_while_the_miner_runs(launched: Callable[..., Launched]) -> None:
    miner = launched("wait", flags=PORT)
    miner.wait_ready()
    url = address(miner)
    assert httpx.get(url + "history", timeout=60).json()["neurons"][0]["name"] == "run"
    page = page_of(miner)
    assert page.nice() >= 10
    assert page.memory_info().rss < LARGEST_BYTES, page.memory_info()
    assert "libtorch" not in Path(f"/proc/{page.pid}/maps").read_text()
    miner.send(signal.SIGINT)
    assert miner.wait() == 0, miner.output
    assert not page.is_running() and "The page ended" not in miner.output


def test_a_page_that_is_killed_costs_a_line_and_it_ends_with_a_killed_launcher(
    launched: Callable[..., Launched],
) -> None:
    miner = launched("wait", flags=PORT)
    miner.wait_ready()
    address(miner)
    killed = page_of(miner)
    killed.kill()
    wait_for(
        lambda: "The page ended (it was killed by SIGKILL): starting it again" in miner.output,
        "the line",
    )
    wait_for(lambda: miner.output.count("page: http") == 2, "another page")
    page = page_of(miner)
    assert page != killed
    assert miner.listening and miner.process.poll() is None
    miner.process.kill()
    wait_for(lambda: not page.is_running(), "the page's end")
