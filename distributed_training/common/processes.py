"""Processes of ours: their exit statuses, environments, children, trees and stack traces.

A miner is a tree of processes, and a local subnet a tree of miners. Several members start sessions
of their own and some outlive their parents, so neither a process group nor a parent id finds them
all. What they share is the environment they were started with: a :class:`Mark` is one variable of
it, with a value that nothing else has. Finding by mark needs ``/proc``.

That environment stays readable in ``/proc/PID/environ`` for the life of the process, also after
``os.environ`` has lost a variable. So a process that talks to untrusted peers, or is forked from,
is started with :func:`without_secrets`; ranks get their secrets through a pipe.

A child started here is a plain program with one socket to its parent, and it ends when that socket
closes. (``multiprocessing``'s spawn would import the parent's main module, torch included.)
:class:`ChildProcess` starts one again whenever it ends, :class:`Program` any other program. A
process that hangs cannot answer a request, so each writes its stacks from a signal handler
(:func:`write_stacks_on_signal`, :func:`collect_stacks`).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import logging
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NoReturn, Self

import psutil

from .backoff import Backoff
from .kinds import import_inherited_plugins, plugin_environment

log = logging.getLogger(__name__)

_PREFIXES = ("R2_", "AWS_", "BT_PW_")  # whole families; bittensor keeps wallet passwords in BT_PW_
_WORDS = frozenset(
    {"SECRET", "SECRETS", "TOKEN", "TOKENS", "KEY", "KEYS", "PASSWORD", "PASSWD", "PASS"}
    | {"PW", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS", "MNEMONIC", "APIKEY", "AUTH"}
    | {"INVITATION", "NOTIFY"}
)


def is_secret(name: str) -> bool:
    """Return whether a variable of this name is a secret: ``HF_TOKEN``, ``WANDB_API_KEY``.

    By whole words, so ``TOKENIZERS_PARALLELISM`` is none; ``PYTHONHASHSEED`` neither.
    """
    upper = name.upper()
    if upper == "AWS_CA_BUNDLE":  # a path, without which no child trusts a store's own certificate
        return False
    return upper.startswith(_PREFIXES) or not _WORDS.isdisjoint(upper.split("_"))


def without_secrets(
    environ: Mapping[str, str] = os.environ, *, keep: Collection[str] = ()
) -> dict[str, str]:
    """Copy an environment for a child's ``env=``. ``keep``: secrets that the child shall have."""
    return {name: value for name, value in environ.items() if name in keep or not is_secret(name)}


_POLL_SECONDS = 0.05
_KILL_SECONDS = 5.0  # that the kernel has to end a process that was killed
#: Exit status of a child that another start could not help.
SETTINGS_REFUSED = 2
_FIRST_WAIT, _LONGEST_WAIT = timedelta(seconds=1), timedelta(minutes=1)  # before another start
_END_SECONDS = 5.0  # for the end of one that hung up
_LONGEST_LINE = 65536  # bytes that a program prints at once
_STEADY_SECONDS = 600.0  # a child that lived this long ended for another reason
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MOST_FILES = 1 << 20  # what Linux gives a process at most, by default
_OWNER = "owner"  # in a folder of one process
_owned: dict[str, IO[str]] = {}  # by folder: locked until it is removed or this process ends
_awaited: set[int] = set()  # pids of children whose status wait_or_kill reads


@dataclass(frozen=True)
class Mark:
    """The environment variable ``name=value`` that every process of one tree carries."""

    name: str
    value: str

    @property
    def environment(self) -> dict[str, str]:
        return {self.name: self.value}

    def processes(self, *, spare: Collection[int] = ()) -> list[psutil.Process]:
        """List the running processes of the tree, without this one and those of pids ``spare``."""
        found = []
        for process in psutil.process_iter():
            if process.pid == os.getpid() or process.pid in spare:
                continue
            try:
                if process.environ().get(self.name) == self.value and is_running(process):
                    found.append(process)
            except (psutil.Error, OSError):
                continue  # gone meanwhile, or another user's
        return found

    def end(
        self,
        *,
        settle: timedelta,
        grace: timedelta,
        spare: Collection[int] = (),
        reap: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """End the tree. Returns pid and command of each process that did not end by itself.

        ``settle``: how long processes have that are ending on their own; SIGTERM follows.
        ``grace``: from there to SIGKILL, and the most that the kernel then has to end them; zero
        leaves SIGTERM out. ``reap`` is called while waiting.
        """
        self._wait(settle, spare, reap)
        left = self.processes(spare=spare)
        # Named before they are ended: afterwards there is no command line to read.
        commands = [f"{process.pid} {command_of(process)}" for process in left]
        steps = [(signal.SIGTERM, grace)] if grace else []
        # Listed again before each signal: one that was ending may have started another.
        for number, wait in (*steps, (signal.SIGKILL, grace or timedelta(seconds=5))):
            for process in self.processes(spare=spare):
                send(process, number)
            if self._wait(wait, spare, reap):
                break
        return commands

    def _wait(self, longest: timedelta, spare: Collection[int], reap: Callable[[], None]) -> bool:
        """Return whether none is left.

        It takes two empty lists: execve leaves a process without an environment for a moment.
        """
        deadline = time.monotonic() + longest.total_seconds()
        empty = 0
        while True:
            reap()
            empty = 0 if self.processes(spare=spare) else empty + 1
            if empty == 2:
                return True
            if not empty and time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)


def is_running(process: psutil.Process) -> bool:
    """Return False for a process that is gone, a zombie, or a later one with the same pid."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
    except OSError:
        return True  # no descriptor to look with: raised here it would end whoever only looks


def command_of(process: psutil.Process) -> str:
    """Return the start of the command line, for messages."""
    try:
        return " ".join(process.cmdline())[:160] or str(process.name())
    except psutil.Error:
        return "(gone)"


def send(process: psutil.Process, number: signal.Signals) -> bool:
    """Signal exactly this process; False if it is gone, or not ours to signal."""
    try:
        # psutil compares the time of the start first: the pid may be another process's by now.
        process.send_signal(number)
    except psutil.Error:
        return False
    return True


def kill_tree(pid: int) -> None:
    """Send SIGKILL to a process and all its descendants, as a crash of the machine would."""
    try:
        root = psutil.Process(pid)
        # Before the first signal: an orphan is no descendant any more.
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in tree:
        send(process, signal.SIGKILL)


def become_subreaper() -> bool:
    """Make orphaned descendants our children, so that they can be waited for."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans(*, spare: Collection[int]) -> None:
    """Wait for the children that have ended.

    ``spare``: pids that somebody else waits for, in addition to those of :func:`start_child`.
    """
    if not hasattr(os, "waitid"):
        return
    with contextlib.suppress(ChildProcessError):  # none left
        # WNOWAIT looks and takes nothing: whoever waits for such a pid must still find its status.
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in spare or ended.si_pid in _awaited:
                return  # it hides those behind it until it was waited for
            os.waitpid(ended.si_pid, 0)


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process ``number`` when the thread that started it ends.

    Call it in the main thread. Not inherited by children. Does nothing where there is no prctl.
    """
    parent = os.getppid()
    if _prctl(_PR_SET_PDEATHSIG, int(number)) and os.getppid() != parent:
        os.kill(os.getpid(), number)  # it ended before the kernel knew


def end_with_starter() -> None:
    """Do as :func:`die_with_parent` for a process that a fork server started.

    Its parent is not the process that asked for it. Starts a thread.
    """
    starter = parent_process()
    # Started by hand or by a test: nobody to follow.
    if starter is None:
        return

    def watch() -> None:
        starter.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="starter-watch", daemon=True).start()


def process_folder(prefix: str, base: str | None = None) -> str:
    """Make a temporary folder of this process, and remove those of processes that were killed.

    ``base``: where; None: where temporary files are.

    Other containers, and other machines on a network disk, may use the same place, and their
    processes are not seen from here. So each folder holds a lock that lives as long as its process,
    and the kernel's boot id: only a folder of this kernel whose lock is free is removed.
    """
    try:  # what tells this kernel, since its start, from every other
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        kernel = ""
    base = base or tempfile.gettempdir()
    for old in Path(base).glob(f"{prefix}*"):
        with contextlib.suppress(OSError), (old / _OWNER).open("r+") as owner:
            if kernel and owner.read() == kernel:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if the process lives
                shutil.rmtree(old, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=base)
    owner = (Path(folder) / _OWNER).open("w")
    with contextlib.suppress(OSError):  # a disk without locks: then nothing is removed there
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Only now that it is locked: by the boot id others take a folder for a dead process's.
        owner.write(kernel)
        owner.flush()
    _owned[folder] = owner
    return folder


def limit_resources() -> int:
    """Allow this process and its children no core dumps, and the most open files."""
    with contextlib.suppress(ValueError, OSError):
        # 1 byte, not 0: for a core that is piped to a program (systemd-coredump, apport) the kernel
        # ignores every other limit. Neither is written then.
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


def _prctl(option: int, value: int) -> bool:
    if sys.platform != "linux":
        return False
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def start_child(
    module: str, *arguments: str, keep: Collection[str] = (), **options: Any
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Run ``python -m module arguments... FD``; FD is the child's end of the socket.

    ``keep``: secrets that it is meant to have in its environment; ``options``: of Popen. Raises
    OSError.
    """
    ours, theirs = socket.socketpair()
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # The cores belong to the ranks: a library with a thread for each would slow training.
            env=without_secrets(keep=keep) | path | _ONE_THREAD | plugin_environment(),
            **options,
        )
    _awaited.add(process.pid)
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
        # In the kernel, on a mount that does not answer, for days: a stop cannot wait for that.
        log.warning(
            "Process %d is left behind: %.0f s after SIGKILL it still waits for a disk or a "
            "network mount that does not answer. It ends once that answers; nothing waits for it",
            process.pid,
            _KILL_SECONDS,
        )
    _awaited.discard(process.pid)


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

    ``name``: of the child in log lines, as "The uploader"; ``effect``: of its end, for the
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
            # With the lock: a start is over by now, or finds this and starts nothing.
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
            with self.lock:  # not in the middle of a message
                self._connection.close()
            # Not without limit: it may be ending in the kernel, on a disk that does not answer.
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

    ``command`` and ``environment``: of the program, which gets a session of its own. If this
    process is killed the kernel sends it SIGTERM, where util-linux is installed. ``log_line`` gets
    what it prints as lines of its log. ``final``: statuses after which no start would help.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        effect: str,
        log_line: Callable[[ChildLog], None],
        final: Collection[int],
    ) -> None:
        super().__init__(name, "", effect=effect, log_line=log_line)
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
    _awaited.add(process.pid)
    return process, _Printed(process)


def with_starter() -> tuple[str, ...]:
    """Return the words before a command that end it when the thread that started it is gone.

    Not by ``preexec_fn``, which runs Python between fork and exec while our threads run.
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
            # Descendants may hold the pipe for longer than it lives.
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
    """The child's end, of the socket that its command line ends with.

    ``plugins``: whether the operator's modules are imported here too.
    """

    def __init__(self, *, plugins: bool = True) -> None:
        if plugins:
            import_inherited_plugins()
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
        except (TypeError, ValueError, KeyError):  # "%d" of a text: it must not end its caller
            self.handleError(record)
            return
        if record.exc_info and record.exc_info[1] is not None:
            # The type and place only: texts of foreign exceptions may quote a request.
            error = record.exc_info[1]
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            place = (
                f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace else ""
            )
            text = f"{text}: {type(error).__name__} at {place}"
        self._parent.send(ChildLog(record.levelno, text))


STACKS = "DT_STACKS"  # environment variable: the file
_SIGNAL = signal.SIGUSR1
_PATIENCE = timedelta(seconds=1)  # for one process


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
            with path.open("a") as file:  # as the others do: nobody overwrites
                size = file.write(head) and file.tell()
            # A process that is stopped (SIGSTOP) runs no handler before it continues.
            if not (send(process, _SIGNAL) and send(process, signal.SIGCONT)):
                continue
            # Until the file has grown and then grows no more.
            deadline, before = time.monotonic() + _PATIENCE.total_seconds(), size
            while time.monotonic() < deadline:
                time.sleep(0.05)
                now = path.stat().st_size
                if now == before > size:
                    break
                before = now
