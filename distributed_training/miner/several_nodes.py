"""How the launchers of several machines agree on which ranks run.

Node 0's launcher listens at ``--rdzv_endpoint``; every other launcher keeps one connection to it.
Lines of JSON go both ways, at least one a second, so that silence tells that a machine is gone:

    node -> 0   hello (its number, what must be equal), ready (no rank runs), leave (to stop)
    0 -> node   refused (why), start (a :class:`Plan`), end (stop the ranks), over (exit status)

Node 0 refuses a node whose versions, model or settings of the training differ from its own.
Everything between nodes goes through the interface of ``--rdzv_endpoint``, unless gloo's or NCCL's
own environment variable has gradients go through another.

All ranks start and end together. Ranks that lost one of theirs cannot train; each launcher ends its
own, says ``ready``, and node 0 begins anew from the last checkpoint with whom it has: all, or after
``--node_wait`` the least of ``--nnodes MIN:MAX``. A node that comes later is taken in after the
next checkpoint. Node 0 cannot be replaced, since it has the wallet: the others wait for it. What
keeps the ranks apart although the launchers meet, as a firewall, the doctor finds.

torch's elastic agent gives node 0's part to anybody, and starts workers by a whole import each. So
launchers meet here, without torch; ranks then meet in c10d's TCPStore as on one machine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from typing import Any, cast

from distributed_training import __version__
from distributed_training.common.backoff import Throttle
from distributed_training.common.exits import ExitStatus
from distributed_training.common.ports import free_ports, listen
from distributed_training.config import Config, ConfigError
from distributed_training.config.settings import NodesSettings
from distributed_training.config.types import show
from distributed_training.health.nvml import visible_gpu_count
from distributed_training.health.reach import VARIABLES, address_of, interface_of

_BEAT = 1.0  # seconds
_LONGEST = 65536  # bytes of a message


class Line:
    """JSON lines over one connection. ``got`` is called with each message, ``ended`` once with
    why there are no more; both in a thread of this connection."""

    def __init__(self, connection: socket.socket, silence: timedelta) -> None:
        self._socket = connection
        self._file = connection.makefile("rb")
        self._writing = threading.Lock()
        self._closed = threading.Event()
        self.expect(silence)

    def expect(self, silence: timedelta) -> None:
        """From here on ``silence`` ends it."""
        self._silence = silence
        self._socket.settimeout(silence.total_seconds())

    def run(self, got: Callable[[dict[str, Any]], None], ended: Callable[[str], None]) -> None:
        threading.Thread(target=self._beat, name="node-beat", daemon=True).start()
        threading.Thread(
            target=self._follow, args=(got, ended), name="node-line", daemon=True
        ).start()

    def _follow(self, got: Callable[[dict[str, Any]], None], ended: Callable[[str], None]) -> None:
        why = "its launcher closed the connection"
        try:
            while message := self.read():
                if len(message) > 1:  # more than a beat
                    got(message)
        except TimeoutError:
            why = f"nothing was heard of it for {self._silence.total_seconds():.0f} s"
        except (OSError, ValueError, LookupError, TypeError) as error:  # or no launcher's words
            why = f"the connection broke: {error}"
        self.close()
        ended(why)

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT):
            self.send()

    def read(self) -> dict[str, Any] | None:
        """The next message; None at the end. Raises OSError, ValueError for anything else."""
        text = self._file.readline(_LONGEST)
        if not text:
            return None
        message = json.loads(text)
        if not isinstance(message, dict) or not text.endswith(b"\n"):
            raise ValueError("what arrived is no message of a launcher")
        return message

    def send(self, **message: Any) -> None:
        data = json.dumps(message | {"time": time.time()}).encode() + b"\n"
        with self._writing:
            try:
                self._socket.sendall(data)
            except OSError:
                self.close()

    def finish(self) -> None:
        """Nothing more is said. The other side reads the last word and closes; closed here at once,
        with a beat of theirs unread, the kernel would take that word back."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


#: Settings that may differ between nodes: where things lie, and how much of the machine is used.
_OF_ONE_NODE = frozenset(
    {"data.cache_dir", "data.workers", "data.connections", "profile.steps", "profile.start"}
)


def facts_of(config: Config, *, ranks: int, remembered: int = 0) -> dict[str, str]:
    """What must be equal on all nodes, as an operator would write it. ``remembered``: GPUs that
    earlier ranks ran on, for a driver that does not answer just after a reboot."""
    on_gpu = config.miner.device != "cpu" and (visible_gpu_count() or remembered) > 0
    facts = {
        "version": __version__,
        "torch": version("torch"),
        "--nproc_per_node": str(ranks),
        "--neuron.device": "cuda" if on_gpu else "cpu",
        "--nnodes": config.nodes.nnodes,
        "--neuron.global_model_name": config.miner.global_model_name,
        "--neuron.global_tokenizer_name": config.miner.global_tokenizer_name,
    }
    shared = [
        field.json_schema_extra["name"]
        for room in (config.training, config.data)
        for field in cast(Any, type(room)).__pydantic_fields__.values()
    ]
    values = {f"--{n}": show(config.get(n)) for n in shared if n not in _OF_ONE_NODE}
    return facts | values


def difference(mine: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """What is wrong on the ``other`` node in a line; None if nothing is."""
    for name in [*mine, *other]:
        here, there = mine.get(name), other.get(name)
        if here != there:
            return (
                f"{name} is {there} on this node and {here} on node 0, so the nodes cannot train "
                "one model together: give all nodes the same flags and versions"
            )
    return None


log = logging.getLogger(__name__)

#: Clocks further apart than this: log lines and events of nodes could not be put in order.
CLOCKS_APART = timedelta(seconds=60)

_HELLO_TIMEOUT = 10.0
_GOODBYE = 3.0
_LAG = 1.0
_SAY_AGAIN = 60.0


@dataclass(frozen=True)
class Plan:
    """One start of the ranks of all nodes, as one node carries it out. The ranks' store is on
    ``address``, ``port``; everything between nodes goes through ``interface``."""

    nodes: tuple[int, ...]  # that take part, ascending
    node: int  # this one
    local_world_size: int
    address: str
    port: int
    interface: str

    @property
    def first_rank(self) -> int:
        return self.nodes.index(self.node) * self.local_world_size

    @property
    def world_size(self) -> int:
        return len(self.nodes) * self.local_world_size

    def variables(self, number: int) -> dict[str, str]:
        """What torch.distributed reads, and the interface, for this node's rank ``number``."""
        found = {
            "RANK": str(self.first_rank + number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }
        for name in VARIABLES:
            found[name] = os.environ.get(name) or self.interface
        return found


@dataclass
class _Guest:
    line: Line
    ready: bool = False


class Host:
    """Node 0's side. Raises ConfigError if it cannot listen."""

    def __init__(self, settings: NodesSettings, facts: Mapping[str, str], *, ranks: int) -> None:
        assert settings.rdzv_endpoint is not None
        self._settings = settings
        self._facts = facts
        self._ranks = ranks
        self._guests: dict[int, _Guest] = {}
        self._plan: Plan | None = None
        self._trouble: str | None = None  # why the ranks of the plan must end
        self._lost = False  # a node of the plan is gone
        self._leaving = False
        self._changed = threading.Condition()
        self._address, self._port = address_of(settings.rdzv_endpoint)
        self._interface = interface_of(self._address)
        try:
            self._listener = listen(self._address, self._port)
        except OSError as error:
            raise ConfigError(
                f"--rdzv_endpoint {settings.rdzv_endpoint} cannot be listened at "
                f"({error.strerror}), so no other node could join: give it a free port"
            ) from None
        threading.Thread(target=self._accept, name="nodes", daemon=True).start()

    # --- what the launcher asks ----------------------------------------------------------------

    def meet(self, stop: threading.Event) -> Plan | ExitStatus:
        """Wait for the other nodes; the ranks of all are to be started when this returns."""
        settings, began, line_due = self._settings, time.monotonic(), Throttle(_SAY_AGAIN)
        wanted = set(range(1, settings.most))
        while not stop.is_set():
            with self._changed:
                ready = {node: guest for node, guest in self._guests.items() if guest.ready}
                waited = time.monotonic() - began
                enough = 1 + len(ready) >= settings.least
                late = waited >= settings.node_wait.total_seconds()
                begins = ready.keys() == wanted or (enough and late)
                if not begins:
                    self._changed.wait(0.2)
            if begins:
                if plan := self._begin(dict(sorted(ready.items()))):
                    return plan
            elif line_due():
                missing = ", ".join(map(str, sorted(wanted - ready.keys())))
                log.info("Waiting for node %s at %s", missing, settings.rdzv_endpoint)
        return ExitStatus.STOPPED

    def _begin(self, guests: Mapping[int, _Guest]) -> Plan | None:
        """None if one of ``guests`` is gone."""
        with self._changed:
            if any(self._guests.get(node) is not guest for node, guest in guests.items()):
                return None
            self._trouble, self._leaving, self._lost = None, False, False
            self._plan = plan = Plan(
                nodes=(0, *guests),
                node=0,
                local_world_size=self._ranks,
                address=self._address,
                port=free_ports(1, self._address)[0],
                interface=self._interface,
            )
            for guest in guests.values():
                guest.ready = False
                guest.line.send(start={"nodes": plan.nodes, "port": plan.port})
        log.info("Nodes %s: %d ranks", ", ".join(map(str, plan.nodes)), plan.world_size)
        return plan

    def trouble(self) -> str | None:
        """Why the ranks that run must end now; None while all is well."""
        return self._trouble

    @property
    def leaving(self) -> bool:
        """A node was asked to stop: the ranks save and end, and the others go on."""
        return self._leaving

    @property
    def joining(self) -> bool:
        """A node waits to take part: after the next checkpoint all start again with it."""
        with self._changed:
            plan = self._plan
            return plan is not None and any(
                guest.ready and node not in plan.nodes for node, guest in self._guests.items()
            )

    def leave(self) -> None:
        """This node was asked to stop: its rank 0 decides for all."""

    def ended(self, status: ExitStatus) -> bool:
        """No rank of this node runs any more, so none shall elsewhere. Whether a node was lost,
        so that it was no fault of this one."""
        with self._changed:
            failed = status is ExitStatus.FAULT
            if failed:  # its ranks' connections may have broken before its launcher's
                self._changed.wait_for(lambda: self._trouble is not None, _LAG)
            plan, self._plan = self._plan, None
            for node in plan.nodes[1:] if plan else ():
                if guest := self._guests.get(node):
                    guest.line.send(end=True)
            return failed and self._lost

    def close(self, status: int) -> None:
        """Tell the others how this miner ended: they end alike."""
        self._listener.close()
        with self._changed:
            for guest in self._guests.values():
                guest.line.send(over=int(status))
                guest.line.finish()
            self._changed.wait_for(lambda: not self._guests, _GOODBYE)

    # --- threads -------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._welcome, args=(connection,), daemon=True).start()

    def _welcome(self, connection: socket.socket) -> None:
        line = Line(connection, timedelta(seconds=_HELLO_TIMEOUT))
        try:
            message = line.read() or {}
            node, problem = int(message["node"]), self._problem(message)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            line.close()  # a port scanner, or another program
            return
        line.expect(self._settings.node_timeout)
        if problem is not None:
            log.warning("Node %d is refused: %s", node, problem)
            line.send(refused=problem)
            line.finish()
            with contextlib.suppress(OSError, ValueError):
                while line.read():
                    pass
            line.close()
            return
        with self._changed:
            before = self._guests.get(node)
            self._guests[node] = guest = _Guest(line)
            if before is not None:  # it started again before its end was noticed
                before.line.close()
                self._lose(node, "its launcher started again")
            self._changed.notify_all()
        line.send(welcome=True)
        line.run(
            lambda message: self._got(node, guest, message),
            lambda why: self._gone(node, guest, why),
        )

    def _problem(self, message: Mapping[str, Any]) -> str | None:
        node, apart = int(message["node"]), float(message["time"]) - time.time()
        if not 0 < node < self._settings.most:
            return (
                f"--node_rank {node} is node 0's or beyond --nnodes {self._settings.nnodes}, so it "
                "has no part: give each node a number of its own"
            )
        if abs(apart) > CLOCKS_APART.total_seconds():
            return (
                f"the clock of this node is {apart:+.0f} s from node 0's, so logs and events could "
                "not be put in order: set it (timedatectl set-ntp true)"
            )
        return difference(self._facts, dict(message["facts"].items()))

    def _got(self, node: int, guest: _Guest, message: Mapping[str, Any]) -> None:
        with self._changed:
            if message.get("ready"):
                guest.ready = True
                if message.get("failed") and self._plan and node in self._plan.nodes:
                    self._trouble = self._trouble or f"node {node}: its ranks failed"
            if message.get("leave") and self._plan is not None:
                self._leaving = self._leaving or node in self._plan.nodes
            self._changed.notify_all()

    def _gone(self, node: int, guest: _Guest, why: str) -> None:
        with self._changed:
            if self._guests.get(node) is guest:
                del self._guests[node]
                log.warning("Node %d is gone: %s", node, why)
                self._lose(node, why)
            self._changed.notify_all()

    def _lose(self, node: int, why: str) -> None:
        if self._plan is not None and node in self._plan.nodes and self._trouble is None:
            self._trouble = f"node {node}: {why}"
            self._lost = True


class Guest:
    """Every other node's side. Reaches node 0 when it first meets."""

    leaving = joining = False

    def __init__(self, settings: NodesSettings, facts: Mapping[str, str], *, ranks: int) -> None:
        assert settings.rdzv_endpoint is not None
        self._settings = settings
        self._facts = facts
        self._ranks = ranks
        self._address, self._port = address_of(settings.rdzv_endpoint)
        self._line: Line | None = None
        self._interface = ""
        self._known = False  # node 0 took us in before
        self._start: dict[str, Any] | None = None
        self._failed = False  # our ranks, when they ran last
        self._over: ExitStatus | None = None
        self._refused: str | None = None
        self._trouble: str | None = None
        self._changed = threading.Condition()

    def meet(self, stop: threading.Event) -> Plan | ExitStatus:
        """Wait for node 0's word. Raises ConfigError if it refuses, or cannot be reached; called
        again it asks anew."""
        self._trouble = self._start = self._refused = None
        told: Line | None = None
        while not stop.is_set():
            with self._changed:
                if self._refused is not None:
                    self.close(ExitStatus.FAULT)
                    self._line = None
                    raise ConfigError(self._refused)
                if self._over is not None:
                    return self._over
                if self._start is not None:
                    return Plan(
                        nodes=tuple(self._start["nodes"]),
                        node=self._settings.node_rank,
                        local_world_size=self._ranks,
                        address=self._address,
                        port=int(self._start["port"]),
                        interface=self._interface,
                    )
                line = self._line
            if line is None:
                self._connect(stop)
            elif line is not told:
                told = line
                line.send(ready=True, failed=self._failed)
            else:
                with self._changed:
                    self._changed.wait(0.2)
        return ExitStatus.STOPPED

    def trouble(self) -> str | None:
        return self._trouble

    def leave(self) -> None:
        if self._line is not None:
            self._line.send(leave=True)

    def ended(self, status: ExitStatus) -> bool:
        """The next :meth:`meet` says so; node 0 counts faults."""
        self._failed = status is ExitStatus.FAULT
        return True

    def close(self, status: int) -> None:
        if self._line is not None:
            self._line.close()

    def _connect(self, stop: threading.Event) -> None:
        endpoint, began = self._settings.rdzv_endpoint, time.monotonic()
        line_due = Throttle(_SAY_AGAIN)
        while not stop.is_set():
            try:
                connection = socket.create_connection((self._address, self._port), timeout=5)
                break
            except OSError as error:
                waited = time.monotonic() - began
                if not self._known and waited > self._settings.rdzv_timeout.total_seconds():
                    raise ConfigError(
                        f"--rdzv_endpoint {endpoint} was not reached within --rdzv_timeout "
                        f"({error.strerror or error}), so this node has nobody to train with: "
                        "start node 0, and open the port between the nodes in its firewall"
                    ) from None
                if line_due():
                    log.info("Waiting for node 0 at %s (%s)", endpoint, error)
                stop.wait(1.0)
        else:
            return
        self._interface = interface_of(connection.getsockname()[0].partition("%")[0])
        line = Line(connection, self._settings.node_timeout)
        line.send(node=self._settings.node_rank, facts=dict(self._facts))
        self._line = line
        line.run(self._got, lambda why: self._gone(line, why))

    def _got(self, message: Mapping[str, Any]) -> None:
        with self._changed:
            self._known = self._known or "welcome" in message
            self._refused = message.get("refused", self._refused)
            if "over" in message:
                self._over = ExitStatus(message["over"])
            if "start" in message:
                self._start, self._trouble = message["start"], None
            if "end" in message:
                self._trouble = "node 0 ended its ranks"
            self._changed.notify_all()

    def _gone(self, line: Line, why: str) -> None:
        with self._changed:
            if self._line is not line:
                return  # it refused us, and we ask anew
            self._line = None
            self._trouble, self._start = f"node 0: {why}", None
            self._changed.notify_all()


def join_nodes(config: Config, *, ranks: int, remembered: int) -> Host | Guest | None:
    """This launcher's side; None for a miner of one machine. ``remembered``: as in
    :func:`facts_of`. Raises ConfigError."""
    settings = config.nodes
    if not settings.several:
        return None
    kind = Host if settings.leads else Guest
    return kind(settings, facts_of(config, ranks=ranks, remembered=remembered), ranks=ranks)
