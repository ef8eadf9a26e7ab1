"""Stands between pm2 and torchrun: checks, starts, passes on the stop, leaves nothing behind.

    launch(argv)
      bad configuration, folder or port in use       -> one line, status 2, nothing started
      strays of an earlier launcher of this folder   -> ended first
      torchrun (own session) -> ranks -> swarm host -> p2pd ...
      SIGINT, SIGTERM, SIGHUP                        -> SIGTERM to rank 0 alone, which decides
      --neuron.stop_timeout over                     -> SIGTERM, then SIGKILL to the whole tree
      at the end, always                             -> strays ended and reaped

torchrun by itself turns every failure into status 1 with a traceback, gives the ranks 30 s and
leaves grandchildren behind when it is killed. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from distributed_training.chain.wallet import require_hotkey
from distributed_training.config import Config, ConfigError, describe, exit_with, load_config
from distributed_training.diagnostics.doctor import start_checks
from distributed_training.diagnostics.nvml import visible_gpu_count
from distributed_training.miner.process import (
    MARK,
    ProcessId,
    become_subreaper,
    command_of,
    forget_ranks,
    marked,
    read_exit_status,
    read_json,
    read_pid_file,
    start_time,
    write_durably,
)
from distributed_training.node.signals import StopSignals
from distributed_training.node.start import make_run_folder, start_log

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
MINER_SCRIPT = ROOT / "neurons" / "miner.py"

STOPPED, FAULT, BAD_CONFIGURATION, DEREGISTERED = 0, 1, 2, 3

# After the stop timeout: how long SIGTERM has before SIGKILL. pm2's kill_timeout covers this too.
TERMINATE_GRACE = timedelta(seconds=5)
# How long p2pd and data workers have to notice that their parent ended.
SETTLE = timedelta(seconds=2)
# Rank 0 has ended but other ranks run on: they hang in a collective nobody will complete.
LINGER = timedelta(seconds=15)
_POLL_SECONDS = 0.1


def launch(argv: Sequence[str], *, script: Path = MINER_SCRIPT) -> int:
    """Run a miner to its end; its exit status: 0 stopped as asked, 1 a fault, 2 bad
    configuration, 3 deregistered.

    Call it in the main thread: it handles SIGINT, SIGTERM and SIGHUP.
    """
    try:
        config = load_config("miner", argv)
        print("\n".join(describe(config)), flush=True)
        require_hotkey(config.chain)
        folder = make_run_folder(config)
        start_log(config, folder, name="launcher")
        with _lock(folder), StopSignals() as signals:
            return _launch_locked(config, argv, script=script, folder=folder, signals=signals)
    except ConfigError as error:
        return exit_with(error)


def _launch_locked(
    config: Config, argv: Sequence[str], *, script: Path, folder: Path, signals: StopSignals
) -> int:
    become_subreaper()
    _end_earlier_instance(folder, patience=config.miner.stop_timeout)
    ranks = config.miner.nproc_per_node or default_ranks(config)
    _check_machine(config, folder, ranks=ranks)
    stop_timeout = config.miner.stop_timeout
    instance = secrets.token_hex(16)
    write_durably(
        folder / "instance.json",
        {"instance": instance, "pid": os.getpid(), "started": start_time(os.getpid())},
    )
    forget_ranks(folder)
    command = torchrun_command(script, argv, ranks=ranks)
    log.info("Starting %d rank%s, run folder %s", ranks, "" if ranks == 1 else "s", folder)
    agent = subprocess.Popen(
        command,
        env=torchrun_environment(instance, ranks=ranks, stop_timeout=stop_timeout),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    tree = _Tree(instance=instance, folder=folder, agent=agent)
    try:
        asked = _wait(tree, signals, stop_timeout=stop_timeout)
    finally:
        tree.sweep()
    return _exit_status(tree, asked=asked)


# --- before the start ---------------------------------------------------------------------------


def default_ranks(config: Config) -> int:
    """One rank per visible GPU; one without GPU or with ``--neuron.device cpu``."""
    if config.miner.device == "cpu":
        return 1
    return max(1, visible_gpu_count())


def torchrun_command(script: Path, argv: Sequence[str], *, ranks: int) -> list[str]:
    """torchrun takes a free port by itself, so several miners fit on one machine."""
    module = "distributed_training.miner.torchrun"
    options = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]
    return [sys.executable, "-u", "-m", module, *options, str(script), *argv]


def torchrun_environment(instance: str, *, ranks: int, stop_timeout: timedelta) -> dict[str, str]:
    """This process's environment with what torchrun and the ranks need besides."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    env[MARK] = instance
    env["PYTHONUNBUFFERED"] = "1"
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    env["PET_SHUTDOWN_TIMEOUT"] = str(max(1, round(stop_timeout.total_seconds())))
    # Large tensors in huge pages where the kernel gives them on request: copies of the whole model
    # (checkpoints, snapshots, the outer step) spend most of their time on first touches of pages.
    env.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    env.setdefault("OMP_NUM_THREADS", str(max(1, _usable_cores() // ranks)))
    if sys.platform == "linux":  # all ranks are on this machine; its name may resolve to nothing
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return env


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One launcher per run folder. The kernel lets go of the lock however this process ends."""
    with (folder / "launcher.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = read_json(folder / "instance.json").get("pid", "?")
            raise ConfigError(
                f"a miner (pid {owner}) is running in {folder}, so a second one would overwrite "
                "its checkpoints: stop it, or give --neuron.run_folder (or --neuron.name) another"
            ) from None
        yield


def _end_earlier_instance(folder: Path, *, patience: timedelta) -> None:
    """What a SIGKILLed launcher of this folder left. We hold the lock, so that launcher is gone;
    what bears its mark is provably ours. Ranks that are saving their state get ``patience``."""
    instance = str(read_json(folder / "instance.json").get("instance") or "")
    if not instance:
        return
    strays = marked(instance)
    if not strays:
        return
    log.warning("Ending %d processes an earlier miner of this run folder left behind", len(strays))
    ranks = _rank_processes(folder, instance)
    for process in ranks:
        process.send(signal.SIGTERM)
    deadline = time.monotonic() + patience.total_seconds()
    while any(process.alive for process in ranks) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    _end_marked(instance)


def _rank_processes(folder: Path, instance: str) -> list[ProcessId]:
    ranks = (int(p.stem.partition("-")[2]) for p in folder.glob("pids/rank-*.json"))
    found = (read_pid_file(folder, rank, instance=instance) for rank in ranks)
    return [process for process in found if process is not None]


def _check_machine(config: Config, folder: Path, *, ranks: int) -> None:
    """What a look at the machine can refuse before anything is started. Raises ConfigError."""
    for check in start_checks(config, folder=folder, ranks=ranks):
        if check.status == "fail" and config.diagnostics.start_check:
            raise ConfigError(check.line)
        if check.status != "ok":
            log.warning("%s", check.line)


# --- while it runs ------------------------------------------------------------------------------


@dataclass
class _Tree:
    """torchrun and whatever descends from it."""

    instance: str
    folder: Path
    agent: subprocess.Popen[bytes]
    status: int | None = None  # of torchrun: exit status, or minus the signal
    forced: bool = False

    def reap(self) -> None:
        """Wait for every child that has ended, adopted orphans included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                if self.status is None:
                    self.status = self.agent.returncode = FAULT
                return
            if pid == 0:
                return
            if pid == self.agent.pid:
                # waitpid took the status away from Popen; tell it, or it would wait again.
                self.status = self.agent.returncode = os.waitstatus_to_exitcode(status)

    @property
    def running(self) -> bool:
        self.reap()
        return self.status is None

    def rank_zero(self) -> ProcessId | None:
        return read_pid_file(self.folder, 0, instance=self.instance)

    def ask_to_stop(self) -> None:
        """Rank 0 decides for all. Before it listens there is nothing to save: torchrun stops."""
        rank_zero = self.rank_zero()
        if rank_zero is None or not rank_zero.send(signal.SIGTERM):
            self.agent.send_signal(signal.SIGTERM)

    def sweep(self) -> None:
        """End and reap everything that bears our mark; called however the wait ended."""
        if not self.forced:
            _wait_until_gone(self.instance, SETTLE, reap=self.reap)
        ended = _end_marked(self.instance, reap=self.reap)
        if ended and not self.forced:
            log.warning("Ended what the ranks left behind: %s", "; ".join(ended))
        self.reap()


def _wait(tree: _Tree, signals: StopSignals, *, stop_timeout: timedelta) -> bool:
    """Until torchrun has ended, by itself or by force. True if a stop was asked for."""
    told = False
    seen_rank_zero = False
    rank_zero_ended: float | None = None
    while tree.running:
        now = time.monotonic()
        if signals.asked_at is not None and not told:
            told = True
            log.info(
                "%s received: stopping (at most %.0f s)",
                signals.name,
                stop_timeout.total_seconds(),
            )
            tree.ask_to_stop()
        if signals.asked_at is not None:
            late = now - signals.asked_at > stop_timeout.total_seconds()
            if late or signals.hurry:
                why = "asked again" if signals.hurry else f"not stopped after {stop_timeout}"
                return _force(tree, f"{why}; ending the ranks by force", asked=True)
        rank_zero = tree.rank_zero()
        seen_rank_zero = seen_rank_zero or rank_zero is not None
        if seen_rank_zero and (rank_zero is None or not rank_zero.alive):
            rank_zero_ended = rank_zero_ended or now
            if now - rank_zero_ended > LINGER.total_seconds():
                why = f"rank 0 ended {LINGER.total_seconds():.0f} s ago but other ranks hang"
                return _force(tree, f"{why}; ending them", asked=told)
        time.sleep(_POLL_SECONDS)
    return told


def _force(tree: _Tree, why: str, *, asked: bool) -> bool:
    log.warning("%s", why[0].upper() + why[1:])
    tree.forced = True
    _end_marked(tree.instance, reap=tree.reap)
    deadline = time.monotonic() + TERMINATE_GRACE.total_seconds()
    while tree.running and time.monotonic() < deadline:  # what the kernel cannot end, we leave
        time.sleep(_POLL_SECONDS)
    return asked


def _exit_status(tree: _Tree, *, asked: bool) -> int:
    written = read_exit_status(tree.folder, instance=tree.instance)
    if written is None:
        if asked and not tree.forced and tree.rank_zero() is None:
            return STOPPED  # before rank 0 had started
        log.error("The miner ended without a word of rank 0 (torchrun: %s)", tree.status)
        return FAULT
    status, reason = written
    if status == STOPPED and not asked and tree.status != 0:
        log.error("A rank failed (torchrun: %s)", tree.status)
        return FAULT
    log.info("Stopped with status %d%s", status, f": {reason}" if reason else "")
    return status


# --- ending processes ---------------------------------------------------------------------------


def _nothing() -> None:
    return None


def _end_marked(instance: str, *, reap: Callable[[], None] = _nothing) -> list[str]:
    """SIGTERM, then SIGKILL to what bears the mark; returns what it was. Rank processes may treat
    SIGTERM as a request: that is why SIGKILL follows."""
    found: Mapping[int, str] = {p.pid: command_of(p.pid) for p in marked(instance)}
    if not found:
        return []
    for number, wait in ((signal.SIGTERM, TERMINATE_GRACE), (signal.SIGKILL, TERMINATE_GRACE)):
        for process in marked(instance):
            process.send(number)
        if _wait_until_gone(instance, wait, reap=reap):
            break
    return [f"{pid} {command}" for pid, command in found.items()]


def _wait_until_gone(
    instance: str, wait: timedelta, *, reap: Callable[[], None] = _nothing
) -> bool:
    deadline = time.monotonic() + wait.total_seconds()
    while True:
        reap()
        if not marked(instance):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS / 2)
