"""What watching a miner costs it, and how soon the page shows a week.

    python -m bench.telemetry                    # about two minutes
    python -m bench.telemetry --step-seconds 2   # steps nearer to a real one's length

overhead: steps with everything on (log file, events.jsonl, metrics with all gauges, TensorBoard,
the page's process with three readers of its stream) against the same steps with nothing of it.
Blocks of both alternate, and the page's processes are stopped in the blocks without; the ratio is
the median of those of neighbouring blocks' median steps. Goal: <= 1.01. A step is a fixed piece of
torch work on one thread, ended by what the miner does at the end of one. A real step takes about 15
seconds and pays the same once, so this is the hard case. "By CPU" is the ratio that follows from
the CPU time of the page's process and of telemetry in this one, as if all of it held training up:
on a machine that other work keeps busy it says more than wall times.

page: Chromium opens the page of a week (a step every 15 s) with rounds and publications. Seconds
from navigation to the first drawing, median of five. Goal: <= 1.
"""

from __future__ import annotations

import argparse
import logging
import logging.handlers
import multiprocessing as mp
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from pathlib import Path

import httpx
import psutil
import torch

from distributed_training.common.processes import die_with_parent
from distributed_training.config.settings import TelemetrySettings
from distributed_training.miner import state_machine as ev
from distributed_training.miner.reporter import MachineGauges, Metrics, Reporter, limits
from distributed_training.miner.state_machine import MinerState, Mode
from distributed_training.protocol.types import StepReport
from distributed_training.store.upload_schedule import UploadSchedule
from distributed_training.telemetry import EventLog, MetricsFile
from distributed_training.telemetry.page.process import PageProcess
from distributed_training.telemetry.trackers import open_trackers

TRAINING = MinerState(mode=Mode.TRAINING, outer_step=3)
WEEK_STEPS = 7 * 24 * 240  # one every 15 seconds


def report(number: int, seconds: float) -> StepReport:
    return StepReport(
        3, number, 4.0 - number % 997 / 500, 2.5e-4, 524288, 512, seconds, 0.1, 64,
        grad_norm=0.8, gpu_memory_gb=68.5, gpu_utilization=97.0, mfu=0.52, total_inner_steps=number,
    )  # fmt: skip


# --- overhead -----------------------------------------------------------------------------------


def training_step(seconds: float) -> Callable[[], None]:
    """About so many seconds of work on one thread."""
    torch.set_num_threads(1)
    a, b = torch.randn(512, 512), torch.randn(512, 512)

    def work(count: int) -> None:
        for _ in range(count):
            torch.mm(a, b)

    work(20)
    began = time.perf_counter()
    work(100)
    count = max(1, round(100 * seconds / (time.perf_counter() - began)))
    return lambda: work(count)


def make_reporter(folder: Path, stack: ExitStack) -> Reporter:
    """As ``miner/start.py`` builds it, without a network."""
    schedule = UploadSchedule(
        upload_steps=60,
        minimum_inner_step=50,
        age_limit=timedelta(seconds=4800),
        slack=timedelta(0),
        published_at=time.monotonic(),
    )
    machine = stack.enter_context(closing(MachineGauges(folder, needed=10**9, gpus=0)))
    events = stack.enter_context(EventLog(folder / "events.jsonl"))
    settings = TelemetrySettings(tensorboard_dir=folder / "board")
    trackers = open_trackers(settings, folder, name="miner", first_step=1)
    made = limits(schedule, newest=lambda: 990, chain_block=lambda: 1000, most_blocks=lambda: 200)
    return Reporter(
        record=events.write,
        metrics=Metrics(
            file=MetricsFile(folder / "metrics.prom"),
            counts={},
            gauges={**made, **machine.single()},
            by_rank=machine.by_rank,
            trackers=[stack.enter_context(closing(tracker)) for tracker in trackers],
        ),
        schedule=schedule,
        warnings=lambda _: [],
        bucket="bucket",
        reload_timeout=timedelta(seconds=60),
    )


def read_stream(url: str) -> None:
    """A tab: the history, then what comes."""
    die_with_parent(signal.SIGKILL)
    httpx.get(url + "history", timeout=60)
    with httpx.stream("GET", url + "stream", timeout=None) as answer:
        for _ in answer.iter_lines():
            pass


@contextmanager
def page(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Its address and process."""
    said: list[str] = []
    with PageProcess([folder], told=said.append) as process:
        while not said:
            time.sleep(0.05)
        if not said[0].startswith("page: "):
            sys.exit(said[0])
        yield said[0].removeprefix("page: "), psutil.Process(process.pid)


def cpu(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)


def overhead(folder: Path, *, step_seconds: float, steps: int, pairs: int) -> None:
    log = logging.getLogger("distributed_training")
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(logging.handlers.RotatingFileHandler(folder / "log.txt"))
    step, number = training_step(step_seconds), 0
    ratios, telemetry_cpu, trained = [], 0.0, 0.0
    with ExitStack() as stack:
        reporter = make_reporter(folder, stack)
        url, server = stack.enter_context(page(folder))
        context = mp.get_context("spawn")
        tabs = [context.Process(target=read_stream, args=(url,), daemon=True) for _ in "abc"]
        for tab in tabs:
            tab.start()
        others = [server, *(psutil.Process(tab.pid) for tab in tabs)]
        time.sleep(5)  # for their imports; not part of what is measured

        def block(watched: bool) -> float:
            """Median seconds of a step."""
            nonlocal number, telemetry_cpu, trained
            for process in others:
                process.send_signal(signal.SIGCONT if watched else signal.SIGSTOP)
            before, taken = cpu(server), []
            for _ in range(steps):
                number += 1
                began = time.perf_counter()
                step()
                if watched:
                    own = time.process_time()
                    reporter.see(ev.InnerStepDone(report(number, step_seconds)), TRAINING)
                    telemetry_cpu += time.process_time() - own
                taken.append(time.perf_counter() - began)
            if watched:
                telemetry_cpu += cpu(server) - before
                trained += sum(taken)
            return statistics.median(taken)

        block(watched=True)  # to warm up
        telemetry_cpu = trained = 0.0
        for pair in range(pairs):
            first = pair % 2 == 0  # neither is always the first
            one, other = block(watched=first), block(watched=not first)
            ratios.append(one / other if first else other / one)
        for process in others:
            process.send_signal(signal.SIGCONT)
        resident = server.memory_info().rss / 1e6
        for tab in tabs:
            tab.kill()
    ratio, share = statistics.median(ratios), telemetry_cpu / trained
    print(
        f"overhead: {pairs} pairs of blocks of {steps} steps of {step_seconds:g} s; "
        f"step time with everything on : off = {ratio:.4f} "
        f"(goal <= 1.01: {'met' if ratio <= 1.01 else 'MISSED'}), "
        f"pairs {min(ratios):.3f} to {max(ratios):.3f}\n"
        f"          by CPU {1 + share:.4f} ({'met' if share <= 0.01 else 'MISSED'}), "
        f"{1e3 * telemetry_cpu / (pairs * steps):.1f} ms a step; page's process {resident:.0f} MB"
    )


# --- page ---------------------------------------------------------------------------------------


def write_week(folder: Path) -> None:
    with EventLog(folder / "events.jsonl") as events:
        for number in range(1, WEEK_STEPS + 1):
            done = report(number, 15.0)
            fields = {name: getattr(done, name) for name in done.__dataclass_fields__}
            events.write("step", **fields, tokens_per_second=done.tokens_per_second)
            if number % 60 == 0:
                events.write(
                    "publication", revision=f"5.3.{number}", ok=True, seconds=60.0,
                    bytes_sent=5e8, reason="",
                )  # fmt: skip
            if number % 320 == 0:
                events.write("outer_step", outer_step=number // 320)
                events.write(
                    "round", outer_step=number // 320, ok=True, fault="", detail="",
                    peers=[f"peer-{i}" for i in range(12)], failed_peers=[], seconds=90.0,
                )  # fmt: skip


def open_week(folder: Path) -> None:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        print("page: not measured, chromium and chromedriver are not installed")
        return
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    write_week(folder)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"):
        options.add_argument(argument)
    browser = webdriver.Chrome(service=Service(driver), options=options)
    try:
        with page(folder) as (url, server):
            seconds = [drawn_after(browser, url) for _ in range(6)][1:]  # the first starts Chromium
            resident = server.memory_info().rss / 1e6
    finally:
        browser.quit()
    median = statistics.median(seconds)
    print(
        f"page: {WEEK_STEPS} steps drawn {median:.2f} s after it is opened, {min(seconds):.2f} to "
        f"{max(seconds):.2f} (goal <= 1: {'met' if median <= 1 else 'MISSED'}; ratio to the goal "
        f"{median:.2f}); page's process {resident:.0f} MB"
    )


def drawn_after(browser: object, url: str) -> float:
    browser.get(url)  # type: ignore[attr-defined]
    script = "return (performance.getEntriesByName('drawn')[0] || {}).startTime"
    while (found := browser.execute_script(script)) is None:  # type: ignore[attr-defined]
        time.sleep(0.02)
    return float(found) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--step-seconds", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=8, help="in a block")
    parser.add_argument("--pairs", type=int, default=10, help="of blocks")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-telemetry-") as name:
        for part in ("overhead", "week"):
            (Path(name) / part).mkdir()
        overhead(
            Path(name) / "overhead",
            step_seconds=given.step_seconds,
            steps=given.steps,
            pairs=given.pairs,
        )
        open_week(Path(name) / "week")


if __name__ == "__main__":
    main()
