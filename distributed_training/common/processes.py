"""Manage our own processes: exit statuses, environments, children and stack traces.

Every child is a plain program in its own process group, with one socket to its parent. It exits
when that socket closes, and the kernel ends it if its parent dies (:func:`die_with_parent`); the
same is true of its own children. A rank leads a *session*, and everything that it starts stays in
that session: :func:`members` finds these processes, even if their parents are gone.
:class:`ChildProcess` restarts a child whenever it ends, :class:`Program` any other program.

A process's environment stays readable in ``/proc/PID/environ`` for its whole life, even after a
variable was deleted from ``os.environ``. So a child is started with :func:`without_secrets`, and
receives the secrets that it needs through its socket. A process that hangs cannot answer a request,
so each process writes its stacks from a signal handler (:func:`write_stacks_on_signal`,
:func:`collect_stacks`).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, NoReturn, Self

import psutil
from pydantic import Field

from .backoff import Backoff
from .kinds import PLUGINS, import_plugins, plugin_environment

log = logging.getLogger(__name__)

_PREFIXES = ("R2_", "AWS_", "BT_PW_")  # whole families; bittensor keeps wallet passwords in BT_PW_
_WORDS = frozenset(
    {"SECRET", "SECRETS", "TOKEN", "TOKENS", "KEY", "KEYS", "PASSWORD", "PASSWD", "PASS"}
    | {"PW", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS", "MNEMONIC", "APIKEY", "AUTH"}
    | {"INVITATION", "NOTIFY"}
)


def is_secret(name: str) -> bool:
    """Return whether a variable with this name is a secret: ``HF_TOKEN``, ``WANDB_API_KEY``.

    It compares whole words, so neither ``TOKENIZERS_PARALLELISM`` nor ``PYTHONHASHSEED`` is a
    secret.
    """
    upper = name.upper()
    if upper == "AWS_CA_BUNDLE":  # a path that children need to trust a store's certificate
        return False
    return upper.startswith(_PREFIXES) or not _WORDS.isdisjoint(upper.split("_"))


def without_secrets(
    environ: Mapping[str, str] = os.environ, *, keep: Collection[str] = ()
) -> dict[str, str]:
    """Copy an environment for a child's ``env=``. ``keep``: secrets that the child may have."""
    return {name: value for name, value in environ.items() if name in keep or not is_secret(name)}


_POLL_SECONDS = 0.05
_KILL_SECONDS = 5.0  # seconds that the kernel gets to end a killed process
SETTLE = timedelta(seconds=2)  # how long a leader's processes, such as p2pd, may outlive it
#: Exit status of a child for which a restart would not help.
SETTINGS_REFUSED = 2
# Shortest and longest pause before a restart.
_FIRST_WAIT, _LONGEST_WAIT = timedelta(seconds=1), timedelta(minutes=1)
_END_SECONDS = 5.0  # seconds that a child gets to exit after it has closed its socket
_LONGEST_LINE = 65536  # bytes; a program's longer lines are cut
_STEADY_SECONDS = 600.0  # a child that lived this long ended for a new reason
_PR_SET_PDEATHSIG = 1
_MOST_FILES = 1 << 20  # the most files that Linux gives a process by default


@dataclass(frozen=True)
class ProcessId:
    """A process as recorded in files: its pid, and its start time, since pids are reused."""

    pid: Annotated[int, Field(gt=0)]  # 0 and negative numbers would address groups of processes
    began: float = 0.0  # seconds since the epoch

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the identity of a process. If the process is gone, it matches no process."""
        with contextlib.suppress(psutil.Error):
            return cls(pid, psutil.Process(pid).create_time())
        return cls(pid)

    def find(self) -> psutil.Process | None:
        """Return the process, which may be a zombie; None if it is gone."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            # Compare with a margin: the kernel counts from the boot time, which shifts when the
            # clock is set.
            if abs(process.create_time() - self.began) < 1.0:
                return process
        return None


def sessions_of(leaders: Iterable[ProcessId]) -> list[int]:
    """Return the pids of the leaders, without those that now belong to another process."""
    return [each.pid for each in leaders if each.find() or not psutil.pid_exists(each.pid)]


def members(leaders: Collection[int]) -> list[psutil.Process]:
    """List the running processes of the sessions that ``leaders`` (pids) lead or led.

    The kernel does not reuse a pid while a session has the same number.
    """
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):  # it has ended meanwhile
            if os.getsid(pid) in leaders and is_running(process := psutil.Process(pid)):
                found.append(process)
    return found


def end_sessions(leaders: Collection[int], *, settle: timedelta, grace: timedelta) -> list[str]:
    """End the sessions. Return the pid and command of each process that did not exit on its own.

    ``settle``: how long to wait for leaders that are exiting on their own, and then, up to two
    seconds, for what they started; SIGTERM follows. ``grace``: time from SIGTERM to SIGKILL, and
    the longest wait for the kernel after that. If it is zero, no SIGTERM is sent.
    """
    _wait_for_end(leaders, settle, lambda process: process.pid in leaders)
    # A process that does not notice its leader's end would delay the next start by a minute.
    _wait_for_end(leaders, min(settle, SETTLE))
    # Read the command lines now, since they disappear with the processes.
    commands = [f"{process.pid} {command_of(process)}" for process in members(leaders)]
    steps = [(signal.SIGTERM, grace)] if grace else []
    # List them again before each signal, since a process that was ending may have started another.
    for number, wait in (*steps, (signal.SIGKILL, grace or timedelta(seconds=_KILL_SECONDS))):
        for process in members(leaders):
            send(process, number)
        if _wait_for_end(leaders, wait):
            break
    return commands


def _wait_for_end(
    leaders: Collection[int],
    longest: timedelta,
    awaited: Callable[[psutil.Process], bool] = lambda process: True,
) -> bool:
    deadline = time.monotonic() + longest.total_seconds()
    while any(map(awaited, members(leaders))):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def is_running(process: psutil.Process) -> bool:
    """Return False for a process that is gone, a zombie, or a later one with the same pid."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
    except OSError:
        # No file descriptor is left for the check. An exception would end a caller that only asks.
        return True


def command_of(process: psutil.Process) -> str:
    """Return the start of the command line, for messages."""
    try:
        return " ".join(process.cmdline())[:160] or str(process.name())
    except psutil.Error:
        return "(gone)"


def send(process: psutil.Process, number: signal.Signals) -> bool:
    """Signal exactly this process; False if it is gone, or not ours to signal."""
    try:
        # psutil first compares the start time, since the pid may belong to another process by now.
        process.send_signal(number)
    except psutil.Error:
        return False
    return True


def tree_of(pid: int) -> list[psutil.Process]:
    """List a process and all its descendants; return an empty list if it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def kill_tree(pid: int) -> None:
    """Send SIGKILL to a process and all its descendants, as if the machine had crashed."""
    for process in tree_of(pid):
        send(process, signal.SIGKILL)


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Let the kernel signal ``number`` to this process when the thread that started it ends.

    Call this in the main thread. Children do not inherit the setting. It does nothing where prctl
    is not available.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)  # the parent ended before the kernel was told


def limit_resources() -> int:
    """Disable core dumps, allow as many open files as possible and return how many.

    Children inherit both limits.
    """
    with contextlib.suppress(ValueError, OSError):
        # The limit is 1 byte, not 0: for a core that is piped to a program (systemd-coredump,
        # apport) the kernel ignores every other limit. With 1 no core is written.
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            return most
    return _MOST_FILES if soft == resource.RLIM_INFINITY else soft


def leave(status: int) -> NoReturn:
    """Exit this process at once; call this after it has closed everything that it opened.

    The interpreter's shutdown is skipped. Gloo's threads outlive their group and may hold the last
    reference to a tensor, and dropping it during the shutdown would abort the process.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def start_child(
    module: str,
    *arguments: str,
    keep: Collection[str] = (),
    variables: Mapping[str, str] = _ONE_THREAD,
    **options: Any,
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Run ``python -m module arguments... FD``; FD is the child's end of the socket.

    The child leads its own process group, so a Ctrl-C in the terminal reaches only us.

    ``keep``: names of the secrets that its environment keeps. ``variables``: more variables for its
    environment. ``options``: passed to Popen. Raises OSError.
    """
    ours, theirs = socket.socketpair()
    # Do not ask Python for both: the leader of a session cannot lead another group.
    group = None if options.get("start_new_session") else 0
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, str(theirs.fileno())],
            pass_fds=[theirs.fileno(), *options.pop("pass_fds", ())],
            stdin=subprocess.DEVNULL,
            # The cores are for the ranks: a library with one thread per core would slow training
            # down.
            env={**without_secrets(keep=keep), **variables, **plugin_environment()},
            process_group=group,
            **options,
        )
    return process, Connection(ours.detach())


def wait_or_kill(process: subprocess.Popen[Any], seconds: float) -> None:
    """Wait for a process to end; kill it after ``seconds``, and give up soon after that."""
    try:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_KILL_SECONDS)
    except subprocess.TimeoutExpired:
        # The process may hang in the kernel for days, on a mount that does not answer, and a stop
        # cannot wait for that.
        log.warning(
            "Process %d is left behind: %.0f s after SIGKILL it still waits for a disk or a "
            "network mount that does not answer. It ends once that answers; nothing waits for it",
            process.pid,
            _KILL_SECONDS,
        )


def describe_end(status: int) -> str:
    """Describe how a process ended, from its return code: ``was killed by SIGKILL``."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


@dataclass(frozen=True)
class ChildLog:
    """A line of a child's log, with its level from :mod:`logging`."""

    level: int
    text: str


def _log_line(line: ChildLog) -> None:
    log.log(line.level, "%s", line.text)


class ChildProcess:
    """A child that is restarted whenever it ends, from :meth:`start` to :meth:`close`.

    ``name``: what log lines call the child, such as "The uploader"; ``effect``: what its end means
    for the operator. ``module``, ``arguments``, ``options``: see :func:`start_child`.

    ``begin`` is called after each start and sends what the child must know first. It holds the
    lock, as :meth:`send` does, so no other message can come first. ``receive`` gets the child's
    messages in a thread, ``log_line`` the lines of its log. A child that exits with
    :data:`SETTINGS_REFUSED` has logged why, and is not restarted.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *arguments: str,
        effect: str,
        begin: Callable[[], None] = lambda: None,
        receive: Callable[[Any], None] = lambda message: None,
        log_line: Callable[[ChildLog], None] = _log_line,
        **options: Any,
    ) -> None:
        self.lock = threading.RLock()
        self.starts = 0
        self._name = name
        self._effect = effect
        self._begin = begin
        self._receive = receive
        self._log_line = log_line
        self._start_process = partial(start_child, module, *arguments, **options)
        self._backoff = Backoff(first=_FIRST_WAIT, longest=_LONGEST_WAIT)
        self._final: Collection[int] = (SETTINGS_REFUSED,)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name=name, daemon=True)

    def start(self) -> None:
        """Start the child for the first time. Raises OSError."""
        with self.lock:
            self._start()
        self._thread.start()

    @property
    def pid(self) -> int:
        """The pid of the current process, or of the last one."""
        return self._process.pid

    def send(self, message: Any) -> None:
        """Send a message, from any thread. It is lost if the child has ended: see ``begin``."""
        with self.lock, contextlib.suppress(OSError):
            self._connection.send(message)

    def close(self, last: Any = None, *, timeout: timedelta = timedelta(seconds=5)) -> None:
        """End the child with the message ``last``, or with SIGTERM; kill it after ``timeout``.

        Idempotent.
        """
        with self.lock:
            # Set this under the lock: any start has either finished, or will see it and do nothing.
            self._closing.set()
            if last is None:
                self._process.terminate()
            else:
                self.send(last)
        wait_or_kill(self._process, timeout.total_seconds())
        self._thread.join(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def refused(self) -> int | None:
        """The exit status if the child ended for good on its own; None if it runs or will run."""
        over = self.starts > 0 and not self._thread.is_alive() and not self._closing.is_set()
        return self._process.returncode if over else None

    def _start(self) -> None:
        """Start the process; the caller holds the lock. Raises OSError."""
        self._process, self._connection = self._start_process()
        self.starts += 1
        self._begin()

    def _supervise(self) -> None:
        """Pass on the child's messages; restart it when it closes its socket."""
        while True:
            began = time.monotonic()
            try:
                while True:
                    message = self._connection.recv()
                    if isinstance(message, ChildLog):
                        self._log_line(message)
                    else:
                        self._receive(message)
            except (EOFError, OSError):  # the child closed its socket
                pass
            except Exception:  # a new version was installed under a running miner
                self._process.kill()
                log.exception("%s sent an invalid message", self._name)
            with self.lock:  # wait until no message is being sent
                self._connection.close()
            # Limit the wait, since the child may hang in the kernel on a disk that does not answer.
            wait_or_kill(self._process, _END_SECONDS)
            status = self._process.returncode
            if self._closing.is_set() or status in self._final:
                return
            if time.monotonic() - began > _STEADY_SECONDS:
                self._backoff.succeeded()
            how = "hangs" if status is None else describe_end(status)
            problem = f"{self._name} ended (it {how})"
            while True:
                wait = self._backoff.failed().total_seconds()
                line = f"{problem}: starting it again in {wait:.0f} s; {self._effect}"
                self._log_line(ChildLog(logging.WARNING, line))
                if self._closing.wait(wait):
                    return
                with self.lock:
                    if self._closing.is_set():
                        return
                    try:
                        self._start()
                        break
                    except OSError as error:  # no memory, process or descriptor left
                        problem = f"{self._name} could not be started ({error})"


class Program(ChildProcess):
    """Any other program, kept running in the same way; each line that it prints is a message.

    ``command`` and ``environment`` start the program, which gets its own session. If this process
    is killed, the kernel sends the program SIGTERM, provided that util-linux is installed.
    ``log_line`` gets what the program prints, as lines of its log. ``final``: exit statuses after
    which a restart would not help.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        effect: str,
        begin: Callable[[], None] = lambda: None,
        log_line: Callable[[ChildLog], None],
        final: Collection[int],
    ) -> None:
        super().__init__(name, "", effect=effect, begin=begin, log_line=log_line)
        self._final = final
        self._start_process = partial(_start_program, command, environment)


def _start_program(
    command: Sequence[str], environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], Any]:
    process = subprocess.Popen(
        [*with_starter(), *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return process, _Printed(process)


def with_starter() -> tuple[str, ...]:
    """Return a prefix for a command that ends it when the thread that started it is gone.

    This avoids ``preexec_fn``, which runs Python between fork and exec while our threads run.
    """
    words = ("setpriv", "--pdeathsig", "TERM")  # util-linux
    return words if shutil.which(words[0]) else ()


class _Printed:
    """The lines that a program prints, read like messages from a connection."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._process = process
        self._pipe = process.stdout
        self._rest = b""

    def recv(self) -> ChildLog:
        """Return the next line. Raises EOFError once the program has ended."""
        while b"\n" not in self._rest and len(self._rest) < _LONGEST_LINE:
            ready, _, _ = select.select([self._pipe], [], [], _END_SECONDS)
            data = os.read(self._pipe.fileno(), _LONGEST_LINE) if ready else b""
            # Descendants may hold the pipe open after the child has ended.
            if not data and (ready or self._process.poll() is not None):
                if not self._rest:
                    raise EOFError
                break
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return ChildLog(logging.INFO, line.decode("utf-8", "replace"))

    def send(self, message: Any) -> None:
        """Do nothing: the program reads no messages."""

    def close(self) -> None:
        self._pipe.close()


class ParentConnection:
    """The child's end of the socket, whose number is the last word of the child's command line.

    Create it in the main thread. ``plugins``: whether to import the operator's modules here too.
    ``ends``: the signal that the child gets when its parent ends; None: only the socket closes.
    """

    def __init__(
        self, *, plugins: bool = True, ends: signal.Signals | None = signal.SIGKILL
    ) -> None:
        if ends is not None:
            die_with_parent(ends)  # this also ends a child that is stopped or hangs
        if plugins:
            import_plugins(os.environ.get(PLUGINS, "").split())
        self._connection = Connection(int(sys.argv[-1]))
        self._lock = threading.Lock()

    def receive(self) -> Any:
        """Receive a message. Raises EOFError, OSError when the parent is gone."""
        return self._connection.recv()

    def send(self, message: Any) -> None:
        """Send a message, from any thread.

        Nothing happens if the parent is gone: :meth:`receive` will raise.
        """
        # Without the lock, messages of two threads would mix on the socket.
        with self._lock, contextlib.suppress(OSError):
            self._connection.send(message)

    def forward_log(self) -> None:
        """Send the parent a :class:`ChildLog` for each log line from level INFO on, from now on.

        The parent masks and formats these lines and writes them to the log that the operator reads.
        """
        logging.getLogger().addHandler(_Forward(self))

    def end_with_parent(self) -> None:
        """Start a thread that sends SIGTERM to this process when the parent closes the socket."""

        def watch() -> None:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self.receive()
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class _Forward(logging.Handler):
    def __init__(self, parent: ParentConnection) -> None:
        super().__init__(logging.INFO)
        self._parent = parent

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        # A bad format, such as "%d" for a text, must not raise in the caller.
        except (TypeError, ValueError, KeyError):
            self.handleError(record)
            return
        if record.exc_info and record.exc_info[1] is not None:
            # Show only type and place, since the text of a library's exception may quote a request.
            error = record.exc_info[1]
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            place = (
                f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""
            )
            text = f"{text}: {type(error).__name__} at {place}"
        self._parent.send(ChildLog(record.levelno, text))


STACKS = "DT_STACKS"  # environment variable with the path of the file
_SIGNAL = signal.SIGUSR1
_PATIENCE = timedelta(seconds=1)  # how long one process may take to write its stacks


def write_stacks_on_signal() -> None:
    """Make SIGUSR1 append the stacks of all threads to the file that STACKS names.

    If a library aborts the process (NCCL, when a collective is never joined), the stacks are
    written to stderr.
    """
    faulthandler.enable(all_threads=True)
    if path := os.environ.get(STACKS):
        with contextlib.suppress(OSError):  # the folder no longer exists
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            faulthandler.register(_SIGNAL, file=file, all_threads=True)


def collect_stacks(path: Path, processes: Iterable[psutil.Process]) -> None:
    """Write a list of the processes to ``path``, with the stacks that each process writes.

    Use this only for processes that will be ended: SIGUSR1 ends those that do not handle it, and a
    stopped process continues. Raises OSError if the file cannot be written.
    """
    path.write_text(time.strftime("%Y-%m-%d %H:%M:%S\n"))
    for process in processes:
        with contextlib.suppress(psutil.Error):
            head = f"\n=== {process.pid} ({process.status()}) {command_of(process)}\n"
            with path.open("a") as file:  # append, as the processes do, to overwrite nothing
                size = file.write(head) and file.tell()
            # A stopped process (SIGSTOP) runs no handler until it continues.
            if not (send(process, _SIGNAL) and send(process, signal.SIGCONT)):
                continue
            # Wait until the file has grown and no longer grows.
            deadline, before = time.monotonic() + _PATIENCE.total_seconds(), size
            while time.monotonic() < deadline:
                time.sleep(0.05)
                now = path.stat().st_size
                if now == before > size:
                    break
                before = now
