"""Processes of ours: their exit statuses, environments, children and stack traces.

Every child is a plain program in a process group of its own, with one socket to its parent. It ends
when that socket closes, and the kernel ends it with its parent (:func:`die_with_parent`); so do its
own children in turn. A rank leads a *session*, which all that it starts stays in:
:func:`members` finds them, also those whose parents are gone. :class:`ChildProcess` starts a child
again whenever it ends, :class:`Program` any other program.

A process's environment stays readable in ``/proc/PID/environ`` for its life, also after
``os.environ`` has lost a variable. So a child is started with :func:`without_secrets`, and gets
what it needs of them through its socket. A process that hangs cannot answer a request, so each
writes its stacks from a signal handler (:func:`write_stacks_on_signal`, :func:`collect_stacks`).
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
    """Return whether a variable of this name is a secret: ``HF_TOKEN``, ``WANDB_API_KEY``.

    It compares whole words, so neither ``TOKENIZERS_PARALLELISM`` nor ``PYTHONHASHSEED`` is a
    secret.
    """
    upper = name.upper()
    if upper == "AWS_CA_BUNDLE":  # a path, without which no child trusts a store's own certificate
        return False
    return upper.startswith(_PREFIXES) or not _WORDS.isdisjoint(upper.split("_"))


def without_secrets(
    environ: Mapping[str, str] = os.environ, *, keep: Collection[str] = ()
) -> dict[str, str]:
    """Copy an environment for a child's ``env=``. ``keep``: secrets that the child gets."""
    return {name: value for name, value in environ.items() if name in keep or not is_secret(name)}


_POLL_SECONDS = 0.05
_KILL_SECONDS = 5.0  # seconds that the kernel gets to end a killed process
SETTLE = timedelta(seconds=2)  # time that processes of a leader, such as p2pd, get to end after it
#: Exit status of a child that another start could not help.
SETTINGS_REFUSED = 2
# Pause before another start.
_FIRST_WAIT, _LONGEST_WAIT = timedelta(seconds=1), timedelta(minutes=1)
_END_SECONDS = 5.0  # seconds for a child to end after it hung up
_LONGEST_LINE = 65536  # bytes that a program prints at once
_STEADY_SECONDS = 600.0  # a child that lived this long ended for another reason
_PR_SET_PDEATHSIG = 1
_MOST_FILES = 1 << 20  # the most files that Linux gives a process by default


@dataclass(frozen=True)
class ProcessId:
    """A process as files remember it: its pid, and when it began, since pids are used again."""

    pid: Annotated[int, Field(gt=0)]  # 0 and negative numbers would address groups of processes
    began: float = 0.0  # seconds since the epoch

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the identity of a process; one that is gone matches none."""
        with contextlib.suppress(psutil.Error):
            return cls(pid, psutil.Process(pid).create_time())
        return cls(pid)

    def find(self) -> psutil.Process | None:
        """Return the process, which may be a zombie; None if it is gone."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            # Compare with a margin: the kernel counts from the boot, whose time moves when the
            # clock is set.
            if abs(process.create_time() - self.began) < 1.0:
                return process
        return None


def sessions_of(leaders: Iterable[ProcessId]) -> list[int]:
    """Return the pids of the leaders, without those that are another process's by now."""
    return [each.pid for each in leaders if each.find() or not psutil.pid_exists(each.pid)]


def members(leaders: Collection[int]) -> list[psutil.Process]:
    """List the running processes of the sessions that ``leaders`` (pids) lead or led.

    The kernel gives a pid to nobody else while a session has its number.
    """
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):  # it has ended meanwhile
            if os.getsid(pid) in leaders and is_running(process := psutil.Process(pid)):
                found.append(process)
    return found


def end_sessions(leaders: Collection[int], *, settle: timedelta, grace: timedelta) -> list[str]:
    """End the sessions. Returns the pid and the command of each process that did not end by itself.

    ``settle``: time for leaders that are ending by themselves, and then at most two seconds of it
    for what they started; SIGTERM follows. ``grace``: time from SIGTERM to SIGKILL, and the longest
    wait for the kernel after that. With a grace of zero there is no SIGTERM.
    """
    _wait_for_end(leaders, settle, lambda process: process.pid in leaders)
    # A process that does not notice its leader's end would delay the next start by a minute.
    _wait_for_end(leaders, min(settle, SETTLE))
    # Read the command lines now, since there are none after the processes have ended.
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
        # There is no descriptor left to look with, and an error would end a caller that only looks.
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
        # psutil first compares the time of the start, since the pid may belong to another process
        # by now.
        process.send_signal(number)
    except psutil.Error:
        return False
    return True


def tree_of(pid: int) -> list[psutil.Process]:
    """List a process and all its descendants; none if it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def kill_tree(pid: int) -> None:
    """Send SIGKILL to a process and all its descendants, as a crash of the machine would."""
    for process in tree_of(pid):
        send(process, signal.SIGKILL)


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process ``number`` when the thread that started it ends.

    Call it in the main thread. Children do not inherit it. It does nothing if there is no prctl.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)  # the parent ended before the kernel knew


def limit_resources() -> int:
    """Allow this process and its children no core dumps, and the most open files."""
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
    """End this process at once, after it has trained and closed everything that it opened.

    It ends at once, without the interpreter's shutdown. Threads of gloo outlive their group and may
    hold the last reference to a tensor, and dropping that one during the shutdown aborts the
    process.
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

    It leads a process group, so a Ctrl-C in the terminal is ours to handle.

    ``keep``: names of secrets that its environment has. ``variables``: what else its environment
    has. ``options``: Popen's. Raises OSError.
    """
    ours, theirs = socket.socketpair()
    # Python would set both, and a session's leader cannot lead another group.
    group = None if options.get("start_new_session") else 0
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, str(theirs.fileno())],
            pass_fds=[theirs.fileno(), *options.pop("pass_fds", ())],
            stdin=subprocess.DEVNULL,
            # The cores are for the ranks: a library with a thread for each core would slow
            # training.
            env={**without_secrets(keep=keep), **variables, **plugin_environment()},
            process_group=group,
            **options,
        )
    return process, Connection(ours.detach())


def wait_or_kill(process: subprocess.Popen[Any], seconds: float) -> None:
    """Wait for the end of a process; kill it after ``seconds``, and then wait no longer."""
    try:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_KILL_SECONDS)
    except subprocess.TimeoutExpired:
        # The process may be in the kernel for days, on a mount that does not answer, and a stop
        # cannot wait for that.
        log.warning(
            "Process %d is left behind: %.0f s after SIGKILL it still waits for a disk or a "
            "network mount that does not answer. It ends once that answers; nothing waits for it",
            process.pid,
            _KILL_SECONDS,
        )


def describe_end(status: int) -> str:
    """Describe the end of a process by its return code: ``was killed by SIGKILL``."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


@dataclass(frozen=True)
class ChildLog:
    """A line of a child's log, at a level of :mod:`logging`."""

    level: int
    text: str


def _log_line(line: ChildLog) -> None:
    log.log(line.level, "%s", line.text)


class ChildProcess:
    """A child that, from :meth:`start` to :meth:`close`, is started again whenever it ends.

    ``name``: the child's in log lines, as "The uploader"; ``effect``: what its end means for the
    operator. ``module``, ``arguments``, ``options``: see :func:`start_child`.

    ``begin`` is called after each start and sends what the child must know first. It has the lock,
    as :meth:`send` has, so no other message comes between. ``receive`` gets the child's messages in
    a thread, ``log_line`` the lines of its log. A child that ends with :data:`SETTINGS_REFUSED` has
    logged why, and is not started again.
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
        """Start it for the first time. Raises OSError."""
        with self.lock:
            self._start()
        self._thread.start()

    @property
    def pid(self) -> int:
        """Id of the process that runs, or ran last."""
        return self._process.pid

    def send(self, message: Any) -> None:
        """Send a message, from any thread. A child that has ended gets what ``begin`` sends."""
        with self.lock, contextlib.suppress(OSError):
            self._connection.send(message)

    def close(self, last: Any = None, *, timeout: timedelta = timedelta(seconds=5)) -> None:
        """End the child by the message ``last``, else by SIGTERM; kill it after ``timeout``.

        Idempotent.
        """
        with self.lock:
            # Set this with the lock: a start is over by now, or sees it and starts nothing.
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
        """The status with which it ended for good, by itself; None: it runs, or will again."""
        over = self.starts > 0 and not self._thread.is_alive() and not self._closing.is_set()
        return self._process.returncode if over else None

    def _start(self) -> None:
        """Start the process, with the lock held. Raises OSError."""
        self._process, self._connection = self._start_process()
        self.starts += 1
        self._begin()

    def _supervise(self) -> None:
        """Pass on the child's messages; when it hangs up, start it again."""
        while True:
            began = time.monotonic()
            try:
                while True:
                    message = self._connection.recv()
                    if isinstance(message, ChildLog):
                        self._log_line(message)
                    else:
                        self._receive(message)
            except (EOFError, OSError):  # it hung up
                pass
            except Exception:  # an update put other files under a running miner
                self._process.kill()
                log.exception("%s sent what is no message", self._name)
            with self.lock:  # wait for the end of a message
                self._connection.close()
            # Wait with a limit, since it may hang in the kernel on a disk that does not answer.
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
                    except OSError as error:  # no memory, no process or no descriptor left
                        problem = f"{self._name} could not be started ({error})"


class Program(ChildProcess):
    """A program that knows of no parent, kept running in the same way; each line it prints is one.

    ``command`` and ``environment`` are the program's, which gets a session of its own. If this
    process is killed the kernel sends it SIGTERM, if util-linux is installed. ``log_line`` gets
    what it prints as lines of its log. ``final``: statuses after which no start would help.
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
    """Return the words before a command that end it when the thread that started it is gone.

    It avoids ``preexec_fn``, which runs Python between fork and exec while our threads run.
    """
    words = ("setpriv", "--pdeathsig", "TERM")  # util-linux
    return words if shutil.which(words[0]) else ()


class _Printed:
    """The lines that a program prints, read as messages of a connection."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._process = process
        self._pipe = process.stdout
        self._rest = b""

    def recv(self) -> ChildLog:
        """Return the next line. Raises EOFError once it has ended."""
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
        """Do nothing: it reads no messages."""

    def close(self) -> None:
        self._pipe.close()


class ParentConnection:
    """The child's end, of the socket that its command line ends with. Make it in the main thread.

    ``plugins``: whether the operator's modules are imported here too. ``ends``: the signal that it
    gets when its parent ends; None: only the socket tells it.
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

        Nothing happens if nobody listens: :meth:`receive` raises.
        """
        # Messages of two threads would mix on the socket.
        with self._lock, contextlib.suppress(OSError):
            self._connection.send(message)

    def forward_log(self) -> None:
        """Send the parent a :class:`ChildLog` for each line of information and above from now on.

        Its log, which masks and formats them, goes where the operator looks.
        """
        logging.getLogger().addHandler(_Forward(self))

    def end_with_parent(self) -> None:
        """Send SIGTERM to this process when the parent hangs up. Starts a thread."""

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
        # A bad format, such as "%d" for a text, must not end the caller.
        except (TypeError, ValueError, KeyError):
            self.handleError(record)
            return
        if record.exc_info and record.exc_info[1] is not None:
            # Show only type and place, since the text of a foreign exception may quote a request.
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
_PATIENCE = timedelta(seconds=1)  # time for one process


def write_stacks_on_signal() -> None:
    """Make SIGUSR1 append the stacks of all threads to the file that STACKS names.

    A library that aborts the process (NCCL, when a collective is never joined) writes them to
    stderr.
    """
    faulthandler.enable(all_threads=True)
    if path := os.environ.get(STACKS):
        with contextlib.suppress(OSError):  # no such folder any more
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            faulthandler.register(_SIGNAL, file=file, all_threads=True)


def collect_stacks(path: Path, processes: Iterable[psutil.Process]) -> None:
    """Replace ``path`` by a list of the processes, with the stacks that each gives.

    Only for processes that are to be ended: SIGUSR1 ends those that do not handle it, and one that
    was stopped continues. Raises OSError if the file cannot be written.
    """
    path.write_text(time.strftime("%Y-%m-%d %H:%M:%S\n"))
    for process in processes:
        with contextlib.suppress(psutil.Error):
            head = f"\n=== {process.pid} ({process.status()}) {command_of(process)}\n"
            with path.open("a") as file:  # append as the others do, so that nobody overwrites
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
