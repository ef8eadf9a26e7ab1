"""Stand between pm2 and the ranks: check, start, pass on the stop, leave nothing behind.

    launch(config)
      the outside refuses (disk, port, store, chain) -> a line, tried again with growing pauses
      ranks of a launcher that was killed            -> they end by themselves, and are waited for
      the page                                       -> a process of its own, until the end
      ranks                                          -> data workers, peer process -> p2pd
      SIGINT, SIGTERM, SIGHUP                        -> SIGTERM only to rank 0, which decides
      --neuron.stop_timeout over                     -> SIGTERM, then SIGKILL to the ranks' sessions
      a rank fails                                   -> the others end, and all start again
      ranks hang (run_folder.py)                     -> stacks to a file, SIGKILL, the same
      at the end, always                             -> what ranks left behind is ended

Ranks that failed are started again here, up to :data:`RESTARTS` times in a row; pm2 is the net
around that. What the outside refuses is not a failure of this program: it is tried again here for
as long as it takes. Nothing here imports torch.
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

#: Time from SIGTERM to SIGKILL, and then for the kernel. pm2's kill_timeout covers both.
TERMINATE_GRACE = timedelta(seconds=5)
#: Time for the other ranks after rank 0 has ended: then they hang in a collective without an end.
LINGER = timedelta(seconds=15)
#: Failures in a row before giving up; ranks that ran for STEADY count as healthy again.
RESTARTS = 5
STEADY = timedelta(minutes=10)
FIRST_WAIT, LONGEST_WAIT = timedelta(seconds=1), timedelta(seconds=60)
LONGEST_PAUSE = timedelta(minutes=5)  # between two tries while the outside refuses

#: Level of the last line, by status. With any other status an operator must act, because nothing
#: starts the miner again.
_LEVELS = {
    ExitStatus.STOPPED: logging.INFO,
    ExitStatus.FINISHED: logging.INFO,
    ExitStatus.FAULT: logging.WARNING,
    ExitStatus.AGAIN: logging.INFO,
}

#: Words of ``launcher.json`` for the cause of an end, if it was no signal.
_STOPPED_BY = {
    ExitStatus.FINISHED: "finished",
    ExitStatus.DEREGISTERED: "deregistered",
    ExitStatus.BAD_CONFIGURATION: SETTINGS,
}

STACKS_FILE = "stacks.txt"  # in the run folder
METRICS_FILE = "launcher.prom"

_POLL = timedelta(milliseconds=200)
_SHORT = 200  # characters of a cause that the log holds in full already
_LOOK = 20.0  # seconds between two looks at what the last checkpoint took


def launch(config: Config, *, program: str = PROGRAM) -> ExitStatus:
    """Run a miner to its end. ``program``: see :class:`RankGroup`.

    Call it in the main thread: it handles SIGINT, SIGTERM and SIGHUP. Raises ConfigError for a
    model that fits no rank.
    """
    file, telemetry = LauncherFile(config.run_folder), config.telemetry
    with contextlib.ExitStack() as stack:
        if (url := telemetry.notify_url) is not None:
            stack.enter_context(Notifier(config.run_folder, config.miner.name, url, file))
        # Check this once: no disk or network that comes back makes the model fit.
        try:
            refuse_unknown_kinds(config)
            refuse_model(config, ranks=ranks_of(config))
        except ConfigError as error:
            file.stopped(SETTINGS, str(error))
            raise
        start_log(config)
        log_settings(config)
        limit_resources()
        # Open the dashboard before what is tried again, because it shows why a start is refused.
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
    """Retry, with growing pauses, a start that the outside refuses.

    The cause may be a disk, a mount, a port, a driver, the chain or the store. A start may help
    then and needs nobody, so none of this ends the miner. Each try is a line of the log, in full
    after 1, 2, 4, 8 ... of them, and ``launcher.prom`` counts them for an alert. ``reason``: how
    ranks ended last.
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
        """Report ``reason`` and wait before the next try. Return whether a stop was asked for."""
        seconds, failures = self._backoff.failed().total_seconds(), self._backoff.failures
        cause = re.sub(r"\d+", "#", reason)  # ignore figures, which may differ each time
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
        """Note that ranks train: the next outage begins with short pauses."""
        if self._backoff.failures:
            self._backoff.succeeded()
            self.report()

    def report(self) -> None:
        """Write the count of tries for the alert, over what an earlier launcher left there."""
        if not self._folder.is_dir():
            return  # a mount that is away: nothing may be made in its place
        self._metrics.set("starts_refused_in_a_row", self._backoff.failures)
        with contextlib.suppress(OSError):
            write_bytes(self._folder / METRICS_FILE, self._metrics.text().encode(), durable=False)


def _prepare(config: Config, program: str, signals: StopSignals, outages: Outages) -> ExitStatus:
    """Take the run folder, then train. Raises ConfigError, OSError."""
    folder = make_run_folder(config)  # first, for the file that says why a start is refused
    require_hotkey(config.chain)
    with occupied(config, folder):
        outages.file.owned = True
        outages.file.start()
        outages.report()
        # The lock is ours, so the earlier launcher is gone, and the kernel has told its ranks to
        # end: those that are left still save, or hang.
        left = sessions_of(listening_ranks(folder).values())
        if there := members(left):
            found = counted(len(there), "process", "processes")
            log.warning("Ending %s an earlier miner of this run folder left behind", found)
            patience = stop_limit(folder, config.miner.stop_timeout)  # they save their state
            end_sessions(left, settle=patience, grace=TERMINATE_GRACE)
        return outages.outlast(_Supervisor(config, program, folder, signals, outages).train)


# --- before the start ---------------------------------------------------------------------------


def stop_limit(folder: Path, wanted: timedelta) -> timedelta:
    """Return ``--neuron.stop_timeout``, or the longer time of a stop by the last checkpoint.

    A stop that is cut short loses every inner step since the last checkpoint.
    """
    needed = stop_seconds(folder)
    return wanted if needed is None else max(wanted, timedelta(seconds=needed))


def ranks_of(config: Config, remembered: int = 0) -> int:
    """Return ``--nproc_per_node``, else one rank per visible GPU.

    It is one without GPU or with ``--neuron.device cpu``.
    ``remembered``: GPUs that an earlier launcher saw, for a driver that is late after a reboot.
    """
    if config.miner.nproc_per_node or config.miner.device == "cpu":
        return config.miner.nproc_per_node or 1
    return visible_gpu_count() or max(1, remembered)


@contextlib.contextmanager
def occupied(config: Config, folder: Path, *, sends: bool = True) -> Iterator[None]:
    """Lock the run folder, with the settings of this start in it. Raises ConfigError.

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
    """The phases of running ranks; one start may enter several, each once.

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

    The stop limit is :func:`stop_limit`'s, read again each time: a checkpoint that ends
    meanwhile may show that a stop needs longer.
    """

    STOPPING = enum.auto()
    FAILED = enum.auto()
    CLOSING = enum.auto()
    LINGERING = enum.auto()


class _Supervisor:
    """Run the ranks until a stop, or until they failed too often.

    ``--neuron.stop_timeout`` covers a stop up to the point where the ranks are ended by force; see
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
        self._entered: dict[Phase, float] = {}  # phases since the start of the ranks, and when
        self._failures: list[str] = []  # how ranks ended that did so by themselves
        self._looks = Throttle(_LOOK)
        self._warned = False  # whether the log has said that a stop takes longer than asked for

    def train(self) -> ExitStatus:
        """Run ranks to the miner's end. Raises ConfigError of this machine; no rank runs then."""
        config, folder = self._config, self._folder
        gpus = remembered_gpus(folder)
        if config.miner.device != "cpu":
            gpus = visible_gpu_count() or gpus
        ranks = ranks_of(config, gpus)
        write_instance(folder, gpus=gpus)
        for check in start_checks(config, ranks=ranks):
            if check.status == "fail":
                raise ConfigError(check.line)
            # Warnings of the settings are in the log already.
            if check.status != "ok" and check.name != "configuration":
                log.warning("%s", check.line)
        self._group = RankGroup(
            config=config, world_size=ranks, stacks=folder / STACKS_FILE, program=self._program
        )
        log.info("Starting %s, run folder %s", counted(ranks, "rank"), folder)
        return self._run()

    def _run(self) -> ExitStatus:
        """Run until no start is to follow."""
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
                    # A stop that came when no rank ran any more ends the wait below.
                    late = not self._is(Phase.STOPPING) and ending.status is ExitStatus.FAULT
                    stopped = ending.outside or late or again
                    return ExitStatus.STOPPED if stopped else ending.status
                if ending.outside:
                    if self._outages.wait(ending.reason):
                        return ExitStatus.STOPPED
                    continue
                if again and (steady or not again_before):
                    continue  # with another version of the network's file
                # A second time soon after counts as a failure: a start that cannot keep the version
                # must not spin.
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
            # Do this whatever was raised, because nobody could stop ranks without a launcher.
            self._group.end(settle=timedelta(0), grace=TERMINATE_GRACE)

    def _steady(self, began: float) -> bool:
        """Return whether the ranks that were started at ``began`` have run for long."""
        steady = time.monotonic() - began > STEADY.total_seconds()
        if steady:
            self._outages.ended()
        return steady

    def _run_once(self) -> Ending:
        """Start the ranks, follow them to their end, and return how that was."""
        # Otherwise the status that rank 0 wrote last would count for a rank that was killed.
        forget_ranks(self._folder)
        self._entered, self._failures = {}, []
        if self._signals.asked_at is not None:
            return Ending(ExitStatus.STOPPED)
        self._outages.file.start()
        report_stage(self._folder, 1, "importing")
        try:
            self._group.start()
        except OSError as error:  # no memory, no process or no descriptor left
            log.warning("The ranks cannot be started (%s)", error)
            # Some ranks may run, and would hold the GPUs that the next start needs.
            self._group.end(settle=timedelta(0), grace=TERMINATE_GRACE)
            return Ending(ExitStatus.FAULT)
        forced, hung = self._follow()
        ended = self._group.end(settle=timedelta(0) if forced else SETTLE, grace=TERMINATE_GRACE)
        if ended and not forced:
            log.warning("Ended what the ranks left behind: %s", "; ".join(ended))
        # This counts whatever rank 0 wrote before, because it was killed.
        if hung:
            return Ending(ExitStatus.FAULT)
        written, stopping = self._written, self._is(Phase.STOPPING)
        if written is None:
            # Rank 0 had not started, or the disk had no room for the file, and then all may have
            # ended as they should.
            if stopping and not forced and not (self._listening and self._group.endings):
                return Ending(ExitStatus.STOPPED)
            if stopping:
                log.warning("Rank 0 was ended before it had saved: the last checkpoint counts")
            elif not self._failures:
                log.warning("Rank 0 left no exit status, so it counts as failed")
            return Ending(ExitStatus.FAULT)
        # Rank 0 obeyed a SIGTERM that another rank's failure sent it.
        if written.status is ExitStatus.STOPPED and not stopping and self._group.endings:
            return Ending(ExitStatus.FAULT)
        if not written.outside:
            reason = f": {written.reason}" if written.reason else ""
            level = _LEVELS.get(written.status, logging.ERROR)
            log.log(level, "Stopped with status %d%s", written.status, reason)
        return written

    def _follow(self) -> tuple[bool, bool]:
        """Take the ranks through the phases of the table above, until all have ended.

        Returns whether they are to be ended by force, and whether they hang.
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
                # Afterwards rank 0 gets it and decides for all.
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
                    "The ranks hang: they came to no micro-batch boundary within "
                    "--neuron.hang_timeout, or no further in their start; "
                    "ending them. Where each process stood: %s",
                    self._folder / STACKS_FILE,
                )
                # Send no SIGTERM, because no handler runs in a driver that does not return.
                self._group.kill()
                return True, True
            if self._entered and (why := self._overdue()):
                log.warning("%s", why)
                return True, False
            self._check_stop_time()
            self._group.wait(_POLL)
        # The last ranks may have ended between two looks.
        if not self._is(Phase.STOPPING):
            self._report_failures()
        return False, False

    def _is(self, phase: Phase) -> bool:
        return phase in self._entered

    def _enter(self, phase: Phase) -> bool:
        """Return whether ``phase`` begins now."""
        begins = phase not in self._entered
        if begins:
            self._entered[phase] = time.monotonic()
        return begins

    def _overdue(self) -> str:
        """Return why the ranks must be ended by force: a second signal, or too long a phase."""
        if self._signals.hurry:
            return "Asked again; ending the ranks by force"
        stop = stop_limit(self._folder, self._settings.stop_timeout)
        limits = {
            Phase.STOPPING: stop,
            Phase.FAILED: TERMINATE_GRACE,
            Phase.CLOSING: stop,
            Phase.LINGERING: LINGER,
        }
        if self._is(Phase.STOPPING):
            del limits[Phase.FAILED]  # a stop has its own time
        now = time.monotonic()
        for phase, limit in limits.items():  # the first of several is named
            seconds = limit.total_seconds()
            if now - self._entered.get(phase, now) > seconds:
                if phase is Phase.STOPPING:
                    return f"Not stopped after {seconds:.0f} s; ending the ranks by force"
                return f"A rank ended {seconds:.0f} s ago but other ranks hang; ending them"
        return ""

    def _report_failures(self) -> None:
        """Report failed ranks once for each start, before this launcher ends any."""
        # Later endings are this launcher's own doing.
        if self._failures:
            return
        # If rank 0 has written its reason down, that reports it.
        own = () if self._written is None else ("rank 0 ",)
        self._failures = [line for line in self._group.endings if not line.startswith(own)]
        for line in self._failures:
            log.warning("%s", line[0].upper() + line[1:])

    def _check_stop_time(self) -> None:
        """Warn once if whoever stops this process may not wait as long as a stop takes."""
        if self._warned or not self._looks():
            return
        asked = self._settings.stop_timeout.total_seconds()
        needed = stop_seconds(self._folder)
        if needed is not None and needed > asked:
            self._warned = True
            longer = math.ceil(needed / 10) * 10
            log.warning(
                "A stop may take %.0f s (twice the last checkpoint and 20 s), more than "
                "--neuron.stop_timeout (%.0f s). The miner takes that time, but what stops it may "
                "kill it before, and the inner steps since the last checkpoint are lost: give "
                "--neuron.stop_timeout %d (pm2 follows app.config.js and miner.toml), and %d s to "
                "systemd (TimeoutStopSec), Docker (docker stop -t) or Slurm (GraceTime)",
                needed,
                asked,
                longer,
                longer + 25,  # to end the ranks by force
            )

    @property
    def _listening(self) -> bool:
        rank_zero = listening_ranks(self._folder).get(0)
        return rank_zero is not None and rank_zero.pid == self._group.pids[0]

    @property
    def _written(self) -> Ending | None:
        return read_exit_status(self._folder, pid=self._group.pids[0])
