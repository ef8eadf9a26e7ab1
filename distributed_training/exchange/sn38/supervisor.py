"""Start the swarm process, notice when it ends, and start it again.

hivemind's network daemon, DHT node and averager run in a process of their own
(:mod:`.averager_process`), so that rank 0 can kill it when it hangs and training continues.
Rank 0 sees that process as a process group and one socket (:class:`HostProcess`); a thread of
:class:`HostKeeper` replaces it when it ends.

Messages travel over a socket pair as one JSON object a line, in both directions. Tensors are not
sent: both processes map one memory file (:class:`SharedTensors`), whose descriptor goes over the
socket with the first byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from distributed_training.common.backoff import Backoff
from distributed_training.common.kinds import plugin_environment
from distributed_training.common.processes import (
    describe_end,
    process_folder,
    remove_process_folder,
    wait_or_kill,
    without_secrets,
)
from distributed_training.config.settings import SwarmSettings
from distributed_training.protocol import keys
from distributed_training.protocol.synapses import LARGEST_GROUP
from distributed_training.protocol.types import AllReduceError, AllReduceFault

log = logging.getLogger(__name__)

_START_ATTEMPTS, _START_AGAIN = 3, timedelta(seconds=2)
_LOOK = 0.5  # seconds between two checks of the swarm process
_PROBE_TIMEOUT = timedelta(seconds=3)
_AGAIN_FIRST, _AGAIN_LONGEST = timedelta(seconds=2), timedelta(minutes=2)
LOG = "hivemind.log"
_LOG_BYTES = 8 * 1024 * 1024
#: Memory that a swarm process may take beyond its start: this, parts in flight, and averages for
#: peers that average nothing themselves, which take their averages at their end. Of n peers n - 1
#: may be such, and a share has at most 2/n of the values.
_MEMORY_MARGIN = 512 * 1024 * 1024
_PARTS_IN_FLIGHT = 8 * LARGEST_GROUP
_SHARES_HELD = 2  # times the values


class SwarmUnavailable(RuntimeError):
    """The swarm process could not be started; the message gives the reason and the fix."""


# --- messages between the two processes ----------------------------------------------------------


@dataclass(frozen=True)
class HostConfig:
    """The first line to a swarm process: all that it needs for its life. Durations are seconds."""

    parent: int  # process id of rank 0; the swarm process ends when it is gone
    tensors: int  # descriptor of the memory file that rank 0 and the swarm process map
    shapes: list[list[int]]  # of the tensors in it, float32, one after the other
    sockets: str  # folder of p2pd's Unix sockets
    initial_peers: list[str]
    listen: list[str]
    announce: list[str]  # empty: the addresses that p2pd finds out
    identity: str  # file of the key that makes the peer id; written if it is missing
    start_timeout: float
    prefix: str  # of the group's name in the DHT and of the calls between peers
    part_size: int  # bytes of an uncompressed part
    compression: str
    round_timeout: float  # nothing in the DHT is kept for longer


@dataclass(frozen=True)
class RoundOrder:
    """Take part in a round. Durations are seconds."""

    number: int
    weight: float
    timeout: float  # from now to the answer
    min_group_size: int
    min_matchmaking_time: float
    request_timeout: float
    allreduce_timeout: float
    next_chunk_timeout: float
    bandwidth: float | None  # Mbit/s as measured; None: not yet
    peers: Sequence[str] = ()  # ids of the peers to average with; empty: any peer
    usual_norm: float = 0.0  # of past averages; 0: too few are known
    addresses: Sequence[str] = ()  # full ones, of some of ``peers``


@dataclass(frozen=True)
class Cancel:
    """Round ``number`` and those before it are not wanted. It may come before the round itself."""

    number: int


@dataclass(frozen=True)
class Close:
    """End: leave the DHT, and end p2pd."""


@dataclass(frozen=True)
class Joined:
    """The swarm was joined or left. ``obstacle``: why it is not joined; empty: it is."""

    obstacle: str


@dataclass(frozen=True)
class Ready:
    """The DHT node runs: it joined the swarm, or has no peer."""

    peer_id: str
    maddrs: list[str]


@dataclass(frozen=True)
class Beat:
    """The event loop turns, and p2pd answers. ``peers``: others that the DHT node has met."""

    peers: int


@dataclass(frozen=True)
class Found:
    """A group was found: from here on the tensors change."""


@dataclass(frozen=True)
class Average:
    """The round's answer when it went well. Peers are peer ids, durations seconds."""

    peers: list[str]
    causes: dict[str, str]  # why peers were left out, as senders or as reducers
    kept_local: float  # share of the values that nobody else has averaged with us
    usual_norm: float | None  # of the contributions that others sent us; None: they sent nothing
    matchmaking: float
    transfer: float


@dataclass(frozen=True)
class Failed:
    """The round's answer when it did not: the name of an ``AllReduceFault``, and why."""

    fault: str
    detail: str = ""
    causes: dict[str, str] = field(default_factory=dict)  # as far as they are known


@dataclass(frozen=True)
class Ended:
    """The last line of a swarm process that cannot continue, or could not start."""

    detail: str


Message = (
    HostConfig
    | RoundOrder
    | Cancel
    | Close
    | Joined
    | Ready
    | Beat
    | Found
    | Average
    | Failed
    | Ended
)
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in Message.__args__}


def to_line(message: Message) -> bytes:
    return json.dumps([type(message).__name__, asdict(message)]).encode() + b"\n"


def from_line(line: bytes) -> Message:
    # Our own process sent it, over a socket that nobody else has: not checked further.
    name, fields = json.loads(line)
    message: Message = _KINDS[name](**fields)
    return message


class SharedTensors:
    """float32 tensors of ``shapes`` in one memory file that several processes map."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.shapes = [tuple(shape) for shape in shapes]
        # Memory, not a file on a disk: the kernel would write each round's values to it. And not
        # in /dev/shm, which is small in containers.
        self.descriptor = os.memfd_create("swarm-tensors")
        os.truncate(self.descriptor, 4 * self.values)
        self.tensors = map_tensors(self.descriptor, self.shapes)

    @property
    def values(self) -> int:
        return sum(map(math.prod, self.shapes))

    @property
    def path(self) -> str:
        """The path under which other processes of this user can map it, while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def close(self) -> None:
        """Close the descriptor; the tensors stay valid as long as they are referred to."""
        os.close(self.descriptor)


def map_tensors(descriptor: int, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return the tensors in that memory file; the descriptor may be closed afterwards."""
    sizes = [math.prod(shape) for shape in shapes]
    path = f"/proc/self/fd/{descriptor}"
    # shared: values that one process writes are there for the other, without a copy.
    flat = torch.from_file(path, shared=True, size=sum(sizes), dtype=torch.float32)
    return [part.view(tuple(s)) for part, s in zip(flat.split(sizes), shapes, strict=True)]


# --- the keeper -----------------------------------------------------------------------------------


class HostKeeper:
    """Start a swarm process in ``folder`` and keep it running until :meth:`close`.

    ``folder`` holds the identity (so that the peer id stays), and hivemind's log. Raises
    SwarmUnavailable when the DHT node does not start in ``settings.start_timeout``, tried three
    times: the port is taken, or p2pd is missing.

    A peer that cannot join the swarm starts without it, and training continues. It joins as soon as
    an initial peer, or one that it has met before, can be met.
    """

    def __init__(
        self,
        settings: SwarmSettings,
        tensors: SharedTensors,
        folder: Path,
        launch: HostLaunch | None = None,
    ) -> None:
        self.peer_id = ""
        self.visible_maddrs: list[str] = []
        self._settings = settings
        self._tensors = tensors
        self._folder = folder
        self._log = folder / LOG
        self._launch = launch  # for the first start
        self._port = settings.dht_port  # 0: any, kept from the first start on
        self._in_use = threading.Lock()  # held by a round, and by a start of the process
        self._closing = threading.Event()
        self._wake = threading.Event()  # a round waits for the process: start it now
        self._problem: RuntimeError | None = None  # of the last start that failed
        self.host: HostProcess | None = None
        self._starting: HostProcess | None = None  # not ready yet
        self._start()
        self._thread = threading.Thread(target=self._supervise, name="swarm-keeper", daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        host = self.host
        return host is not None and host.alive()

    @contextlib.contextmanager
    def use(self, timeout: float, cancelled: threading.Event) -> Iterator[HostProcess]:
        """Yield the swarm process for a round; it is not started again inside.

        A process that ended is started again first, by the keeper's thread: a start that hangs
        holds no round beyond ``timeout`` seconds. Raises AllReduceError when there is none in time,
        or it cannot be started.
        """
        deadline, before = time.monotonic() + timeout, self._problem
        while True:
            # In short turns: a round that is cancelled must not wait for a start that hangs.
            if self._in_use.acquire(timeout=0.2):
                if self.alive() or self._closing.is_set():
                    break
                self._in_use.release()
                # The keeper's thread starts it: a start that hangs must hold up no round.
                self._wake.set()
            if cancelled.is_set():
                raise AllReduceError(AllReduceFault.CANCELLED)
            if (problem := self._problem) is not before:
                raise AllReduceError(AllReduceFault.SWARM_DOWN, str(problem))
            if time.monotonic() >= deadline:
                detail = f"the swarm process could not be started within {timeout:.0f} s"
                raise AllReduceError(AllReduceFault.SWARM_DOWN, detail)
        try:
            host = self.host
            if self._closing.is_set() or host is None:
                raise AllReduceError(AllReduceFault.CANCELLED)
            yield host
        finally:
            self._in_use.release()

    def restart(self) -> None:
        """Start the swarm process again, after it and all its children have ended.

        Raises SwarmUnavailable.
        """
        with self._in_use:
            self._start()

    def announce(self, ip: str) -> None:
        """Announce another address: start the swarm process again, after a round that runs.

        Raises SwarmUnavailable; the keeper's thread then tries again.
        """
        self._settings = replace(self._settings, dht_ip=ip)
        self.restart()

    def close(self) -> None:
        """End the swarm process and everything it started, within a few seconds. Idempotent."""
        self._closing.set()
        self._wake.set()
        host, starting = self.host, self._starting
        # A start holds the lock for minutes: ended first, it lets go of it.
        if starting is not None:
            starting.end("the swarm is being closed")
        if host is not None and host.alive():
            host.close()
        with self._in_use:
            self._end()
        self._thread.join(_PROBE_TIMEOUT.total_seconds())  # a look at the initial peers is harmless

    # --- the keeper's thread -------------------------------------------------------------------

    def _supervise(self) -> None:
        backoff = Backoff(first=_AGAIN_FIRST, longest=_AGAIN_LONGEST)
        wait = _LOOK
        while True:
            self._wake.wait(wait)
            # Cleared before the work: a wake-up in the middle of it leads to another turn.
            self._wake.clear()
            if self._closing.is_set():
                return
            wait = _LOOK
            bound_log(self._log)
            # A round uses the process, and would lose its group. The next check is soon enough.
            if self.alive() or not self._in_use.acquire(blocking=False):
                continue
            try:
                if self._closing.is_set() or self.alive():
                    continue
                why = self.host.why if self.host is not None else "it was not started"
                log.warning("The swarm process ended (%s): starting it again", why)
                self._start()
                backoff.succeeded()
            except RuntimeError as error:  # SwarmUnavailable; or no thread could be started
                if not self._closing.is_set():
                    log.warning("%s", error)
                    self._problem = error.with_traceback(None)
                wait = backoff.failed().total_seconds()
            finally:
                self._in_use.release()

    # --- start and end -------------------------------------------------------------------------

    def _end(self) -> None:
        host, self.host = self.host, None
        if host is not None:
            host.end()

    def _start(self) -> None:
        """Start a new swarm process in the place of the old one. Raises SwarmUnavailable."""
        self._end()
        problem, backoff = "", Backoff(first=_START_AGAIN, longest=2 * _START_AGAIN)
        for attempt in range(_START_ATTEMPTS):
            if attempt:
                self._closing.wait(backoff.failed().total_seconds())
            problem = self._start_once()
            if not problem:
                return
            log.warning("The swarm process did not start (attempt %d): %s", attempt + 1, problem)
        raise SwarmUnavailable(
            f"the swarm process could not be started ({problem}), so this miner joins no round: "
            f"check that port {self._settings.dht_port} (--dht.port) is free"
        )

    def _start_once(self) -> str:
        """Return empty when the process is ready, else the reason.

        Raises SwarmUnavailable when closing.
        """
        try:
            config = self._config()
        except OSError as error:  # no room, or no descriptor
            return str(error)
        try:
            launch, self._launch = self._launch or HostLaunch(self._folder), None
            host = HostProcess(config, launch)
        except (OSError, RuntimeError) as error:  # no room, memory, process, descriptor or thread
            remove_process_folder(config.sockets)  # nobody else would: it is tried for ever
            return str(error)
        self._starting = host  # from here on close() ends it
        # close() may have looked before `_starting` was set, so this looks once more. hivemind
        # itself gives up after its start_timeout, with a reason; 30 s more are for meeting peers,
        # and for one that hangs.
        ready = None if self._closing.is_set() else host.wait_ready(config.start_timeout + 30)
        self._starting = None
        if self._closing.is_set():
            host.end()
            raise SwarmUnavailable("the swarm is being closed")
        listening = [place for place in map(address_of, ready.maddrs if ready else ()) if place]
        if ready is None or not listening:
            host.end("it listens on no TCP port" if ready else "")
            return f"{host.why}; see {self._log}"
        self.host = host
        with contextlib.suppress(OSError):
            # The private key of the peer; hivemind leaves its mode to the umask.
            Path(config.identity).chmod(0o600)
        self.peer_id, self.visible_maddrs = ready.peer_id, ready.maddrs
        # Others know us by this address: a process that is started again must come back to it.
        self._port = self._port or listening[0][1]
        log.info(
            "Swarm peer %s, announced as %s. Not checked from outside: run `python -m "
            "distributed_training doctor --probe <its address>:%d` on another machine",
            self.peer_id,
            ", ".join(self.visible_maddrs),
            self._settings.dht_external_port or self._port,
        )
        return ""

    def _config(self) -> HostConfig:
        settings = self._settings
        # Port 0, at a first start: the bound port is not known yet, so p2pd announces it itself.
        port = self._port and (settings.dht_external_port or self._port)
        announce = [f"/ip4/{settings.dht_ip}/tcp/{port}"] if settings.dht_ip and port else []
        return HostConfig(
            parent=os.getpid(),
            tensors=self._tensors.descriptor,
            shapes=[list(shape) for shape in self._tensors.shapes],
            sockets=process_folder("swarm-sockets-"),  # short: a socket's path has 107 bytes
            initial_peers=list(settings.initial_peers),
            listen=[f"/ip4/{settings.dht_listen_ip}/tcp/{self._port}"],
            announce=announce,
            identity=str(self._folder / "identity.key"),
            start_timeout=settings.start_timeout.total_seconds(),
            prefix=keys.averager_prefix(settings.run_id),
            part_size=settings.part_size,
            compression=settings.compression,
            round_timeout=settings.round_timeout.total_seconds(),
        )


def bound_log(path: Path, most: int = _LOG_BYTES) -> None:
    """Move a log of more than ``most`` bytes to ``<name>.1`` and empty it.

    The swarm process holds it open for appending, so it is copied and emptied, not renamed.
    """
    with contextlib.suppress(OSError):
        if path.stat().st_size > most:
            shutil.copyfile(path, path.with_name(f"{path.name}.1"))
            os.truncate(path, 0)


#: Without a sign of life for this time (they come every 2 s) the process counts as hung.
HANG = 20.0
PROGRAM = "distributed_training.exchange.sn38.averager_process"
_CLOSE = 6.0  # seconds to leave the swarm
_TENSORS = b"T"  # the first byte to the process: with it comes the descriptor of the tensors


class HostLaunch:
    """A swarm process that has no task yet and imports meanwhile.

    A start saves those seconds. ``folder``: gets hivemind's output. Raises OSError.
    """

    def __init__(self, folder: Path) -> None:
        self._ended = False
        folder.mkdir(parents=True, exist_ok=True)
        self.connection, theirs = socket.socketpair()
        # `theirs` is closed here at last: held open, the stream would never end with the process.
        with theirs, (folder / LOG).open("ab") as log_file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                pass_fds=(theirs.fileno(),),
                # A group of its own: p2pd, which it starts, is killed with it.
                start_new_session=True,
                cwd=Path(__file__).resolve().parents[2],
                # It talks to anybody in the swarm: no secret in its memory.
                env=without_secrets()
                | {"HIVEMIND_COLORS": "false", "CUDA_VISIBLE_DEVICES": ""}
                | plugin_environment(),
            )

    def end(self) -> None:
        """Kill the process and its children. Idempotent."""
        if not self._ended:
            self._ended = True
            # It leads its session: p2pd is in this group, and nobody else.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            wait_or_kill(self.process, 0)


class HostProcess:
    """A swarm process that follows ``config``. Always :meth:`end` it.

    ``ended`` is set once it is gone or has to be ended; ``why`` says why then.
    """

    def __init__(self, config: HostConfig, launch: HostLaunch) -> None:
        self.ended = threading.Event()
        self.why = ""
        self._sockets = config.sockets
        self.found_group = False  # in the round that was begun last
        self.peers: int | None = None  # others that the DHT node knows
        self.obstacle = ""  # to joining the swarm
        self._ready: queue.SimpleQueue[Ready | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Average | Failed | None] = queue.SimpleQueue()
        # Several threads send, and no line may be cut by another.
        self._sending = threading.Lock()
        self._launch, self._process = launch, launch.process
        held = _SHARES_HELD * 4 * sum(map(math.prod, config.shapes))
        self._may_grow = _MEMORY_MARGIN + _PARTS_IN_FLIGHT * config.part_size + held
        self._most_memory: int | None = None  # bytes; from the first sign of life on
        self._connection = launch.connection
        threading.Thread(target=self._read, name="swarm-answers", daemon=True).start()
        with contextlib.suppress(OSError):  # it is gone: `ended` tells
            socket.send_fds(self._connection, [_TENSORS], [config.tensors])
        self.send(config)

    def alive(self) -> bool:
        return not self.ended.is_set()

    def send(self, message: Message) -> None:
        """Send a message; nothing happens if the process is gone, which ``ended`` shows."""
        with self._sending, contextlib.suppress(OSError):
            self._connection.sendall(to_line(message))

    def wait_ready(self, timeout: float) -> Ready | None:
        """Wait until it is ready; None if it failed, with the reason in ``why``."""
        with contextlib.suppress(queue.Empty):
            return self._ready.get(timeout=timeout)
        self.why = self.why or "no answer in time"
        return None

    def order(self, order: RoundOrder) -> None:
        self.found_group = False
        self.send(order)

    def answer(self, timeout: float) -> Average | Failed | None:
        """Return the answer to the round that was begun; None: the process ended.

        Raises queue.Empty.
        """
        return self._answers.get(timeout=timeout)

    def _read(self) -> None:
        """Read until the process is gone, or is silent for longer than :data:`HANG`."""
        try:
            with self._connection.makefile("rb") as lines:
                for line in lines:
                    self._handle(from_line(line))
                    if self.why:  # it cannot continue; its own end may take seconds
                        break
        except TimeoutError:
            self.why = f"it hung: no sign of life for {HANG:.0f} s"
        except OSError as error:
            self.why = self.why or str(error)
        except (ValueError, LookupError, TypeError) as error:
            # Its program was updated on the disk meanwhile. Without this it would count as alive.
            self.why = self.why or f"it sent what cannot be read: {error!r}"
        if not self.why:
            why = "it closed its socket"
            with contextlib.suppress(subprocess.TimeoutExpired):
                why = f"it {describe_end(self._process.wait(2))}"
            self.why = self.why or why  # end() may have said more meanwhile
        # `why` is set before: the thread that wakes up reads it. None wakes the thread that waits
        # for an answer.
        self.ended.set()
        self._ready.put(None)
        self._answers.put(None)

    def _handle(self, message: Message) -> None:
        match message:
            case Beat(peers):
                self.peers = peers
                # No RLIMIT_AS: that counts the tensors, which the ranks have too. And the kernel,
                # once the machine has none left, might choose a rank.
                held = anonymous_memory(self._process.pid)
                if self._most_memory is None:
                    self._most_memory = held + self._may_grow
                elif held > self._most_memory:
                    self.why = (
                        f"its memory grew to {held // 10**6} MB, of at most "
                        f"{self._most_memory // 10**6} MB: a defect, or peers that fill it"
                    )
            case Joined(obstacle):
                self.obstacle = obstacle
                if obstacle:
                    log.warning(
                        "%s; so this peer joins no round yet. Training continues, and it is tried "
                        "again",
                        obstacle,
                    )
                else:
                    log.info("The swarm is joined")
            case Ready():
                self._connection.settimeout(HANG)  # its life begins; the start has its own timeout
                self._ready.put(message)
            case Found():
                self.found_group = True
            case Average() | Failed():
                self._answers.put(message)
            case Ended(detail):
                self.why = detail

    def close(self) -> None:
        """Leave the swarm within seconds, then :meth:`end`."""
        self.send(Close())
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE)
        self.end()

    def end(self, why: str = "") -> None:
        """Kill the swarm process and p2pd. Idempotent."""
        self.why = self.why or why
        # First: no round may begin with a process that is killed now.
        self.ended.set()
        self._launch.end()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # ends the thread that reads
        # With its lock: a descriptor for each start would run out where no start helps for days.
        remove_process_folder(self._sockets)


def anonymous_memory(pid: int) -> int:
    """Return the bytes that a process and those it started hold for themselves; 0 if it is gone.

    Memory that they share with others, such as the tensors of a round, does not count.
    """
    total = 0
    with contextlib.suppress(OSError):
        # The main thread's children: asyncio starts processes there.
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for each in (pid, *map(int, children)):
            status = Path(f"/proc/{each}/status").read_text()
            if found := re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE):
                total += 1024 * int(found[1])
    return total


def address_of(maddr: str) -> tuple[str, int] | None:
    """Return host and TCP port of ``/ip4|ip6|dns4|dns6|dns/<host>/tcp/<port>/...``, else None."""
    parts = maddr.split("/")
    if len(parts) < 5 or parts[1] not in {"ip4", "ip6", "dns", "dns4", "dns6"}:
        return None
    if parts[3] != "tcp" or not parts[4].isdigit():
        return None
    return parts[2], int(parts[4])


async def any_reachable(maddrs: Sequence[str], *, timeout: float) -> bool:
    """Return whether a TCP connection to at least one address opens; all are tried at once.

    ``timeout``: seconds for each. Addresses without a TCP port (QUIC) cannot be probed and count as
    reachable: only joining shows it.
    """
    places = [address_of(maddr) for maddr in maddrs]

    async def opens(host: str, port: int) -> bool:
        with contextlib.suppress(OSError, ValueError):  # ValueError: a name as "a..b"
            async with asyncio.timeout(timeout):
                _, writer = await asyncio.open_connection(host, port)
                writer.close()
                return True
        return False

    # At once: each that drops packets costs the whole timeout.
    return None in places or any(await asyncio.gather(*(opens(*p) for p in places if p)))
