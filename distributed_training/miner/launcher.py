"""Start a miner's ranks, restart them if they fail, forward a stop, and clean up after them.

    launch(config)
      trouble outside (disk, port, store, chain)     -> a log line, a new try after a growing pause
      ranks of a launcher that was killed            -> wait until they end on their own
      the dashboard                                  -> a process of its own, until the end
      each rank                                      -> data workers; rank 0: peer process -> p2pd
      SIGINT, SIGTERM, SIGHUP                        -> SIGTERM only to rank 0, which decides
      --neuron.stop_timeout is over                  -> SIGTERM, then SIGKILL to the ranks' sessions
      a rank fails                                   -> the others end, and all start again
      ranks hang (run_folder.py)                     -> stacks to a file, SIGKILL, all start again
      at the end, always                             -> end all processes that the ranks left behind

Failed ranks are restarted here, up to :data:`RESTARTS` consecutive times; pm2 is the safety net
behind that. Trouble outside is no failure of this program: the start is tried again here for as
long as it takes. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import re
import signal
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

from distributed_training.chain.identity import require_hotkey
from distributed_training.common.backoff import Backoff, Throttle
from distributed_training.common.files import write_bytes
from distributed_training.common.processes import (
    SETTLE,
    end_sessions,
    limit_resources,
    members,
    sessions_of,
)
from distributed_training.config import Config, ConfigError
from distributed_training.health.gpus import visible_gpu_count
from distributed_training.health.machine import refuse_model, refuse_unknown_kinds, start_checks
from distributed_training.miner.rank_group import PROGRAM, RankGroup
from distributed_training.miner.run_folder import (
    Ending,
    Watchdog,
    forget_ranks,
    launcher_of,
    listening_ranks,
    read_exit_status,
    remembered_gpus,
    stop_seconds,
    write_instance,
)
from distributed_training.network_place import save_copy
from distributed_training.node.start import (
    StopSignals,
    dashboard,
    log_settings,
    make_run_folder,
    sole_sender,
    sole_user,
    start_log,
    write_settings,
)
from distributed_training.protocol.lines import counted
from distributed_training.protocol.types import ExitStatus
from distributed_training.telemetry.facts import SETTINGS
from distributed_training.telemetry.metrics import MetricsRegistry
from distributed_training.telemetry.notify import Notifier
from distributed_training.telemetry.run_state import (
    FAILURES,
    LOCK_FILE,
    LauncherFile,
    LauncherState,
    read_launcher,
    report_stage,
)

log = logging.getLogger(__name__)

#: Time from SIGTERM to SIGKILL, and then for the kernel to finish. pm2's kill_timeout covers both.
TERMINATE_GRACE = timedelta(seconds=5)
#: Time that the other ranks have to end after rank 0. After that they hang in a collective.
LINGER = timedelta(seconds=15)
#: Consecutive restarts before giving up; ranks that ran for STEADY count as healthy again.
RESTARTS = 5
STEADY = timedelta(minutes=10)
FIRST_WAIT, LONGEST_WAIT = timedelta(seconds=1), timedelta(seconds=60)
LONGEST_PAUSE = timedelta(minutes=5)  # between two tries while there is trouble outside

#: Log level of the last line, by status. With any other status an operator must act, because
#: nothing starts the miner again.
_LEVELS = {
    ExitStatus.STOPPED: logging.INFO,
    ExitStatus.FINISHED: logging.INFO,
    ExitStatus.FAULT: logging.WARNING,
    ExitStatus.AGAIN: logging.INFO,
}

#: Words in ``launcher.json`` for the cause of an end, unless it was a signal.
_STOPPED_BY = {
    ExitStatus.FINISHED: "finished",
    ExitStatus.DEREGISTERED: "deregistered",
    ExitStatus.BAD_CONFIGURATION: SETTINGS,
}

STACKS_FILE = "stacks.txt"  # in the run folder
METRICS_FILE = "launcher.prom"

_POLL = timedelta(milliseconds=200)
_SHORT = 200  # characters kept of a cause that the log already has in full
_LOOK = 20.0  # seconds between two checks of how long the last checkpoint took


def launch(config: Config, *, program: str = PROGRAM) -> ExitStatus:
    """Run a miner to its end. ``program``: see :class:`RankGroup`.

    Call it in the main thread: it handles SIGINT, SIGTERM and SIGHUP. Raises ConfigError for an
    unknown kind of chain or data source, and for a model that does not fit on the ranks.
    """
    file, telemetry = LauncherFile(config.run_folder), config.telemetry
    with contextlib.ExitStack() as stack:
        if (url := telemetry.notify_url) is not None:
            stack.enter_context(Notifier(config.run_folder, config.miner.name, url, file))
        # Check this only once, because no disk or network that comes back makes the model fit.
        try:
            refuse_unknown_kinds(config)
            refuse_model(config, ranks=ranks_of(config))
        except ConfigError as error:
            file.stopped(SETTINGS, str(error))
            raise
        start_log(config)
        log_settings(config)
        limit_resources()
        # Open the dashboard before the part that is retried, since it shows why a start fails.
        with StopSignals() as signals, dashboard(config, config.run_folder.absolute()):
            outages, status = Outages(config.run_folder, signals.stop, file), ExitStatus.FAULT
            try:
                status = outages.outlast(lambda: _prepare(config, program, signals, outages))
                return status
            finally:
                signalled = f"signal {signals.name}" if signals.name else ""
                by = signalled or _STOPPED_BY.get(status, FAILURES)
                file.stopped(by, outages.reason)


class Outages:
    """Retries, with growing pauses, a start that fails because of trouble outside.

    The cause may be a disk, a mount, a port, a driver, the chain or the store. A later start may
    succeed without anybody's help, so none of this ends the miner. Each attempt is logged, the
    1st, 2nd, 4th, 8th ... one in full, and ``launcher.prom`` counts the attempts for an alert.
    ``reason``: how the ranks last ended.
    """

    def __init__(self, folder: Path, stop: threading.Event, file: LauncherFile) -> None:
        self._stop = stop
        self.file = file
        self.reason = ""
        self._refused_for = ""
        self._backoff = Backoff(first=FIRST_WAIT, longest=LONGEST_PAUSE)
        self._metrics = MetricsRegistry()
        self._folder = folder

    def outlast(self, attempt: Callable[[], ExitStatus]) -> ExitStatus:
        """Return what ``attempt`` returns, once it no longer raises ConfigError or OSError."""
        while True:
            try:
                return attempt()
            except (ConfigError, OSError) as error:
                if self.wait(str(error)):
                    return ExitStatus.STOPPED

    def wait(self, reason: str) -> bool:
        """Report ``reason`` and wait before the next try. Return whether a stop was requested."""
        seconds, failures = self._backoff.failed().total_seconds(), self._backoff.failures
        cause = re.sub(r"\d+", "#", reason)  # ignore numbers, which may differ each time
        if cause != self._refused_for or failures & (failures - 1) == 0:
            log.warning(
                "Cannot train: %s. Trying again in %.1f s (attempt %d)",
                reason,
                seconds,
                failures + 1,
            )
        else:
            short = textwrap.shorten(reason, _SHORT, placeholder=" ...")
            log.warning("Cannot train, still: %s (attempt %d)", short, failures + 1)
        self._refused_for = cause
        self.report()
        self.file.refused(reason, attempt=failures, wait=seconds)
        return self._stop.wait(seconds)

    def ended(self) -> None:
        """Note that the ranks are training, so that the next outage begins with short pauses."""
        if self._backoff.failures:
            self._backoff.succeeded()
            self.report()

    def report(self) -> None:
        """Write the number of tries for the alert, replacing an earlier launcher's number."""
        if not self._folder.is_dir():
            return  # the mount is missing, so create nothing in its place
        self._metrics.set("starts_refused_in_a_row", self._backoff.failures)
        with contextlib.suppress(OSError):
            write_bytes(self._folder / METRICS_FILE, self._metrics.text().encode(), durable=False)


def _prepare(config: Config, program: str, signals: StopSignals, outages: Outages) -> ExitStatus:
    """Lock the run folder, then train. Raises ConfigError, OSError."""
    folder = make_run_folder(config)  # first, since it holds the file that says why a start fails
    require_hotkey(config.chain)
    with occupied(config, folder):
        outages.file.owned = True
        outages.file.start()
        outages.report()
        # We have the lock, so the earlier launcher is gone and the kernel has told its ranks to
        # end: those that are left are still saving, or hang.
        left = sessions_of(listening_ranks(folder).values())
        if there := members(left):
            found = counted(len(there), "process", "processes")
            log.warning("Ending %s an earlier miner of this run folder left behind", found)
            patience = stop_limit(folder, config.miner.stop_timeout)  # they may still be saving
            end_sessions(left, settle=patience, grace=TERMINATE_GRACE)
        return outages.outlast(_Supervisor(config, program, folder, signals, outages).train)


# --- before the start ---------------------------------------------------------------------------


def stop_limit(folder: Path, wanted: timedelta) -> timedelta:
    """Return ``--neuron.stop_timeout``, or longer if the last checkpoint shows the need.

    A stop that is cut short loses every inner step since the last checkpoint.
    """
    needed = stop_seconds(folder)
    return wanted if needed is None else max(wanted, timedelta(seconds=needed))


def ranks_of(config: Config, remembered: int = 0) -> int:
    """Return ``--nproc_per_node``, else one rank per visible GPU.

    Without a GPU, or with ``--neuron.device cpu``, the default is one rank. ``remembered``: the
    number of GPUs that an earlier launcher saw, in case the driver is late after a reboot.
    """
    if config.miner.nproc_per_node or config.miner.device == "cpu":
        return config.miner.nproc_per_node or 1
    return visible_gpu_count() or max(1, remembered)


@contextlib.contextmanager
def occupied(config: Config, folder: Path, *, sends: bool = True) -> Iterator[None]:
    """Lock the run folder, and write this start's settings into it. Raises ConfigError.

    ``sends``: whether this machine sends the uploads; if so, its hotkey is locked too.
    """
    write_settings(config, folder)
    save_copy(config.network, folder)

    def owner() -> int | None:
        found = launcher_of(folder)
        return found.pid if found else None

    hotkey = sole_sender(config) if sends else contextlib.nullcontext()
    with sole_user(folder, LOCK_FILE, "miner", owner=owner), hotkey:
        yield


# --- while it runs ------------------------------------------------------------------------------


class Phase(enum.Enum):
    """The phases of ranks that are ending; one start may enter several, each once.

    ============= ========================== ============================== ====================
    phase         entered when               does                           ended by force after
    ============= ========================== ============================== ====================
    ``STOPPING``  SIGINT, SIGTERM, SIGHUP    SIGTERM to rank 0, which       the stop limit, or a
                                             decides for all                second Ctrl-C
    ``FAILED``    a rank failed, and no      reports it, SIGTERM to the     ``TERMINATE_GRACE``,
                  stop was asked for         others, which cannot train.    unless ``STOPPING``
    ``CLOSING``   a rank has ended                                          the stop limit
    ``LINGERING`` rank 0 has ended                                          ``LINGER``
    ============= ========================== ============================== ====================

    The stop limit is the result of :func:`stop_limit`, read again each time: a checkpoint that
    ends meanwhile may show that a stop takes longer.
    """

    STOPPING = enum.auto()
    FAILED = enum.auto()
    CLOSING = enum.auto()
    LINGERING = enum.auto()


class _Supervisor:
    """Runs the ranks until a stop, or until they have failed too often.

    ``--neuron.stop_timeout`` covers a stop up to the moment when the ranks are ended by force; see
    :func:`stop_limit`.
    """

    _group: RankGroup

    def __init__(
        self,
        config: Config,
        program: str,
        folder: Path,
        signals: StopSignals,
        outages: Outages,
    ) -> None:
        self._config, self._settings, self._program = config, config.miner, program
        self._folder, self._signals, self._outages = folder, signals, outages
        # Phase entered since the ranks were started -> when it began.
        self._entered: dict[Phase, float] = {}
        self._failures: list[str] = []  # how the ranks ended that this launcher did not end
        self._looks = Throttle(_LOOK)
        self._warned = False  # whether the log has said that a stop takes longer than the setting

    def train(self) -> ExitStatus:
        """Run the ranks until the miner ends. Raises ConfigError if this machine fails a check."""
        config, folder = self._config, self._folder
        gpus = remembered_gpus(folder)
        if config.miner.device != "cpu":
            gpus = visible_gpu_count() or gpus
        ranks = ranks_of(config, gpus)
        write_instance(folder, gpus=gpus)
        for check in start_checks(config, ranks=ranks):
            if check.status == "fail":
                raise ConfigError(check.line)
            # Warnings about the settings are already in the log.
            if check.status != "ok" and check.name != "configuration":
                log.warning("%s", check.line)
        self._group = RankGroup(
            config=config, world_size=ranks, stacks=folder / STACKS_FILE, program=self._program
        )
        log.info("Starting %s, run folder %s", counted(ranks, "rank"), folder)
        return self._run()

    def _run(self) -> ExitStatus:
        """Run the ranks, and restart them for as long as needed."""
        backoff, again = Backoff(first=FIRST_WAIT, longest=LONGEST_WAIT), False
        try:
            while True:
                began, again_before = time.monotonic(), again
                ending = self._run_once()
                self._outages.reason = ending.reason
                again = ending.status is ExitStatus.AGAIN
                if steady := self._steady(began):
                    backoff.succeeded()
                if self._signals.stop.is_set():
                    # A stop that came after the ranks had failed only cancels the restart.
                    late = not self._is(Phase.STOPPING) and ending.status is ExitStatus.FAULT
                    stopped = ending.outside or late or again
                    return ExitStatus.STOPPED if stopped else ending.status
                if ending.outside:
                    if self._outages.wait(ending.reason):
                        return ExitStatus.STOPPED
                    continue
                if again and (steady or not again_before):
                    continue  # start again with another version of the network's file
                # A second AGAIN soon after counts as a failure, so that a start that cannot adopt
                # the version does not loop without end.
                if ending.status is not ExitStatus.FAULT and not again:
                    return ending.status
                if backoff.failures >= RESTARTS:
                    log.error("The ranks failed %d times in a row: giving up", 1 + RESTARTS)
                    return ExitStatus.FAULT
                told = "; ".join(self._failures or self._group.endings)
                self._outages.file.crashed(told or ending.reason)
                self._outages.file.start()
                seconds = backoff.failed().total_seconds()
                count = backoff.failures
                log.warning(
                    "Starting the ranks again in %.1f s (%d of %d)", seconds, count, RESTARTS
                )
                if self._signals.stop.wait(seconds):
                    return ExitStatus.STOPPED
        finally:
            # Do this whatever was raised, because nobody could stop the ranks without a launcher.
            self._group.end(settle=timedelta(0), grace=TERMINATE_GRACE)

    def _steady(self, began: float) -> bool:
        """Return whether the ranks that were started at ``began`` have run for ``STEADY``."""
        steady = time.monotonic() - began > STEADY.total_seconds()
        if steady:
            self._outages.ended()
        return steady

    def _run_once(self) -> Ending:
        """Start the ranks, follow them to their end, and return how they ended."""
        # Otherwise the last status that rank 0 wrote would count if rank 0 is killed this time.
        forget_ranks(self._folder)
        self._entered, self._failures = {}, []
        if self._signals.asked_at is not None:
            return Ending(ExitStatus.STOPPED)
        self._outages.file.start()
        report_stage(self._folder, 1, "importing")
        try:
            self._group.start()
        except OSError as error:  # no memory, processes or file descriptors left
            log.warning("The ranks cannot be started (%s)", error)
            # Some ranks may already be running, and they would hold the GPUs that the next start
            # needs.
            self._group.end(settle=timedelta(0), grace=TERMINATE_GRACE)
            return Ending(ExitStatus.FAULT)
        forced, hung = self._follow()
        ended = self._group.end(settle=timedelta(0) if forced else SETTLE, grace=TERMINATE_GRACE)
        if ended and not forced:
            log.warning("Ended what the ranks left behind: %s", "; ".join(ended))
        # A hang is a fault whatever rank 0 wrote before, because rank 0 was killed.
        if hung:
            return Ending(ExitStatus.FAULT)
        written, stopping = self._written, self._is(Phase.STOPPING)
        if written is None:
            # If rank 0 had not started yet, or if the disk was too full for the file, the ranks may
            # have ended in order.
            if stopping and not forced and not (self._listening and self._group.endings):
                return Ending(ExitStatus.STOPPED)
            if stopping:
                log.warning("Rank 0 was ended before it had saved: the last checkpoint counts")
            elif not self._failures:
                log.warning("Rank 0 left no exit status, so it counts as failed")
            return Ending(ExitStatus.FAULT)
        # Rank 0 obeyed the SIGTERM that it got because another rank failed.
        if written.status is ExitStatus.STOPPED and not stopping and self._group.endings:
            return Ending(ExitStatus.FAULT)
        if not written.outside:
            reason = f": {written.reason}" if written.reason else ""
            level = _LEVELS.get(written.status, logging.ERROR)
            log.log(level, "Stopped with status %d%s", written.status, reason)
        return written

    def _follow(self) -> tuple[bool, bool]:
        """Take the ranks through the phases of :class:`Phase` until all have ended.

        Returns whether they must be ended by force, and whether they hang.
        """
        limit, began, file = self._settings.hang_timeout, time.monotonic(), self._outages.file
        watchdog = Watchdog(self._folder, ranks=range(self._group.world_size), limit=limit)
        while running := self._group.running:
            self._steady(began)
            if file.state.state == LauncherState.STARTING:
                there = read_launcher(self._folder)
                if there is not None and there.state == LauncherState.RUNNING:
                    file.enter(LauncherState.RUNNING)
            if self._signals.asked_at is not None and self._enter(Phase.STOPPING):
                seconds = stop_limit(self._folder, self._settings.stop_timeout).total_seconds()
                log.info("%s received: stopping (at most %.0f s)", self._signals.name, seconds)
                file.enter(LauncherState.STOPPING, stopped_by=f"signal {self._signals.name}")
                # Until rank 0 listens there is nothing to save, so all ranks get the signal.
                # Afterwards only rank 0 gets it, and decides for all.
                self._group.signal(signal.SIGTERM, [0] if self._listening else None)
            elif not self._is(Phase.STOPPING) and self._group.endings and self._enter(Phase.FAILED):
                self._report_failures()
                self._group.signal(signal.SIGTERM)
            if len(running) < self._group.world_size:
                self._enter(Phase.CLOSING)
            if 0 not in running:
                self._enter(Phase.LINGERING)
            if not self._is(Phase.STOPPING) and watchdog.hangs():
                log.warning(
                    "The ranks hang: they reached no micro-batch boundary within "
                    "--neuron.hang_timeout, or got no further in their start; "
                    "ending them. The stacks of all processes are in %s",
                    self._folder / STACKS_FILE,
                )
                # Send no SIGTERM, because no handler runs while a driver call does not return.
                self._group.kill()
                return True, True
            if self._entered and (why := self._overdue()):
                log.warning("%s", why)
                return True, False
            self._check_stop_time()
            self._group.wait(_POLL)
        # The last ranks may have ended between two checks.
        if not self._is(Phase.STOPPING):
            self._report_failures()
        return False, False

    def _is(self, phase: Phase) -> bool:
        return phase in self._entered

    def _enter(self, phase: Phase) -> bool:
        """Enter ``phase``. Return whether it begins now."""
        begins = phase not in self._entered
        if begins:
            self._entered[phase] = time.monotonic()
        return begins

    def _overdue(self) -> str:
        """Return why the ranks must be ended by force: a second signal, or an overdue phase."""
        if self._signals.hurry:
            return "Asked to stop again; ending the ranks by force"
        stop = stop_limit(self._folder, self._settings.stop_timeout)
        limits = {
            Phase.STOPPING: stop,
            Phase.FAILED: TERMINATE_GRACE,
            Phase.CLOSING: stop,
            Phase.LINGERING: LINGER,
        }
        if self._is(Phase.STOPPING):
            del limits[Phase.FAILED]  # a stop has its own limit
        now = time.monotonic()
        for phase, limit in limits.items():  # if several are overdue, the first is named
            seconds = limit.total_seconds()
            if now - self._entered.get(phase, now) > seconds:
                if phase is Phase.STOPPING:
                    return f"Not stopped after {seconds:.0f} s; ending the ranks by force"
                return f"A rank ended {seconds:.0f} s ago but other ranks hang; ending them"
        return ""

    def _report_failures(self) -> None:
        """Report failed ranks once per start, before this launcher ends any rank."""
        # This launcher itself causes any later endings.
        if self._failures:
            return
        # If rank 0 has written its reason to the file, that is reported instead.
        own = () if self._written is None else ("rank 0 ",)
        self._failures = [line for line in self._group.endings if not line.startswith(own)]
        for line in self._failures:
            log.warning("%s", line[0].upper() + line[1:])

    def _check_stop_time(self) -> None:
        """Warn once if a stop may take longer than --neuron.stop_timeout allows."""
        if self._warned or not self._looks():
            return
        asked = self._settings.stop_timeout.total_seconds()
        needed = stop_seconds(self._folder)
        if needed is not None and needed > asked:
            self._warned = True
            longer = math.ceil(needed / 10) * 10
            log.warning(
                "A stop may take %.0f s (twice the last checkpoint plus 20 s), more than "
                "--neuron.stop_timeout (%.0f s). The miner takes that time, but what stops it may "
                "kill it sooner, which loses the inner steps since the last checkpoint: set "
                "--neuron.stop_timeout to %d (pm2 reads app.config.js and miner.toml), and %d s in "
                "systemd (TimeoutStopSec), Docker (docker stop -t) or Slurm (GraceTime)",
                needed,
                asked,
                longer,
                longer + 25,  # 25 s to end the ranks by force
            )

    @property
    def _listening(self) -> bool:
        rank_zero = listening_ranks(self._folder).get(0)
        return rank_zero is not None and rank_zero.pid == self._group.pids[0]

    @property
    def _written(self) -> Ending | None:
        return read_exit_status(self._folder, pid=self._group.pids[0])
