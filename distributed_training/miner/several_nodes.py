"""Let the launchers of several machines agree on which ranks run.

Node 0's launcher listens at ``--rdzv_endpoint``; every other launcher keeps one connection to it.
It says hello, with its number, its clock and what must be equal; node 0 refuses a node whose
versions, model or settings of the training differ from its own; :data:`PATIENCE` is how long that
node asks again. Then, five times a second, node 0 tells all nodes the same, and each answers how it
is, in a line of JSON:

    0 -> node   nodes, port (of the :class:`Plan` that runs; nothing: no rank is to run),
                over (exit status), refused (why), kind (of what is wrong)
    node -> 0   ready (no rank runs), failed (port of the plan whose ranks did), leaving (to stop)

A line tells a state, not an event: no word can come too late or twice, and nobody waits for one.
Silence, or the connection's end, tells that a machine is gone. Everything between nodes goes
through the interface of ``--rdzv_endpoint``, unless gloo's or NCCL's own environment variable has
gradients go through another.

All ranks start and end together. Ranks that lost one of theirs cannot train; each launcher ends its
own and is ready. Then node 0 begins again from the last checkpoint with the nodes it has: all, or
after ``--node_wait`` the least of ``--nnodes MIN:MAX``. A node that comes later is taken in after
the next checkpoint. Node 0 cannot be replaced, since it has the wallet: the others wait for it.
What keeps the ranks apart although the launchers meet, as a firewall, the doctor finds.

Why not torch's elastic agent: docs/architecture.md. Launchers meet here, without torch; ranks then
meet in c10d's TCPStore.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from typing import Any

from distributed_training import __version__
from distributed_training.common.backoff import Throttle
from distributed_training.common.files import json_line
from distributed_training.common.ports import free_ports, listen
from distributed_training.config import Config, ConfigError
from distributed_training.config.schema import schema
from distributed_training.config.settings import NodesSettings
from distributed_training.config.types import show
from distributed_training.health.gpus import visible_gpu_count
from distributed_training.health.machine import INTERFACE_VARIABLES, address_of, interface_of
from distributed_training.protocol.types import ExitStatus

log = logging.getLogger(__name__)

#: By kind of what is wrong on a node: how long node 0 may refuse it before it ends with status 2.
#: Until then a restart of all nodes with other flags is over, in whatever order they are
#: restarted; and so is an update that fails after half an hour and goes back. What is of no kind
#: here was learnt from outside, such as a clock, and may be right again at any time.
PATIENCE = {"flags": timedelta(minutes=3), "version": timedelta(hours=1)}
#: Clocks further apart than this: log lines and events of nodes could not be put in order.
CLOCKS_APART = timedelta(seconds=60)

_BEAT = 0.2  # seconds
_LONGEST = 65536  # bytes of a message
_GOODBYE = 3.0
_LAG = 1.0
_SAY_AGAIN = 60.0

#: Settings outside of the packages training and data that must be equal on all nodes.
_OF_ALL = {"nnodes", "store.global_bucket", "tokenizer.name"}
#: Settings inside that need not be: where things lie, and how much of the machine is used.
_OF_ONE_NODE = frozenset({"data.cache_dir", "data.workers", "profile.steps"})

_OF_NETWORK = " of the network's file"
#: What the driver shows decides them where no flag does.
_OF_MACHINE = ("--nproc_per_node", "--neuron.device")


class WrongNode(ConfigError):
    """Node 0 has other flags or another version. ``patience``: how long that may last."""

    def __init__(self, line: str, patience: timedelta) -> None:
        super().__init__(line)
        self.patience = patience


@dataclass(frozen=True)
class Refusal:
    """The line that names why a node is not taken in; ``kind``: see :data:`PATIENCE`."""

    line: str
    kind: str = "machine"

    @property
    def error(self) -> ConfigError:
        """The error that this raises on the node."""
        patience = PATIENCE.get(self.kind)
        return ConfigError(self.line) if patience is None else WrongNode(self.line, patience)


def facts_of(config: Config, *, ranks: int, remembered: int = 0) -> dict[str, str]:
    """Return what must be equal on all nodes, as an operator would write it.

    ``remembered``: GPUs that earlier ranks ran on, for a driver that does not answer just after a
    reboot.
    """
    on_gpu = config.miner.device != "cpu" and (visible_gpu_count() or remembered) > 0
    settings = [
        setting
        for setting in schema("miner")
        if (setting.name in _OF_ALL or setting.places[0][0] in ("training", "data"))
        and setting.name not in _OF_ONE_NODE
    ]
    # Between two releases the number stays. Another default is then no flag that somebody gave.
    defaults = zlib.crc32(repr([(s.name, s.default) for s in settings]).encode())
    network = config.network
    facts = {
        "version": f"{__version__}+{defaults:08x}",
        "the launchers' language": "2",  # the words above; others are not understood
        "torch": version("torch"),
        "--nproc_per_node": str(ranks),
        "--neuron.device": "cuda" if on_gpu else "cpu",
        "--network": "the public one" if network is None else network.head.name,
    }
    for setting in settings:
        # A node that started later may have read a newer file.
        of_network = _OF_NETWORK if network is not None and setting.fixed else ""
        facts[f"--{setting.name}{of_network}"] = show(config.get(setting.name))
    return facts


def difference(mine: Mapping[str, str], other: Mapping[str, str], node: int) -> Refusal | None:
    """Return what is wrong on the other ``node``; None if nothing is. ``mine``: node 0's."""
    for name in [*mine, *other]:
        here, there = mine.get(name), other.get(name)
        if here != there:
            return Refusal(
                f"{name} is {there} on node {node} and {here} on node 0, so the nodes cannot train "
                "one model together: give all nodes the same flags and versions",
                _kind(name, of_both=here is not None and there is not None),
            )
    return None


def _kind(name: str, *, of_both: bool) -> str:
    if name in _OF_MACHINE or name.endswith(_OF_NETWORK):
        return "machine"
    return "flags" if name.startswith("--") and of_both else "version"


@dataclass(frozen=True)
class Plan:
    """One start of the ranks of all nodes, as one node carries it out. The ranks' store is on
    ``address``, ``port``; everything between nodes goes through ``interface``."""

    nodes: tuple[int, ...]  # that take part, ascending
    first_rank: int  # of this node
    world_size: int
    address: str
    port: int
    interface: str

    def variables(self, number: int) -> dict[str, str]:
        """Return what torch.distributed reads for rank ``number`` of this node, beside its own."""
        interfaces = {name: os.environ.get(name) or self.interface for name in INTERFACE_VARIABLES}
        return interfaces | {
            "RANK": str(self.first_rank + number),
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


class Line:
    """Messages over one connection. After ``silence`` it counts as broken."""

    def __init__(self, connection: socket.socket, silence: timedelta) -> None:
        connection.settimeout(silence.total_seconds())
        self._socket = connection
        self._file = connection.makefile("rb")
        self._silence = silence

    def send(self, **message: Any) -> None:
        """Send one message. Raises OSError."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> dict[str, Any]:
        """Return the next message. Raises OSError, ValueError for what no launcher says."""
        try:
            text = self._file.readline(_LONGEST)
        except TimeoutError:
            seconds = self._silence.total_seconds()
            raise TimeoutError(f"nothing was heard of it for {seconds:.0f} s") from None
        if not text:
            raise ConnectionError("its launcher closed the connection")
        message = json_line(text)
        if message is None:
            raise ValueError("what arrived is no message of a launcher")
        return message

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class _Side:
    """Base of both sides. All that they hear is polled: nothing waits for a word."""

    def __init__(self, settings: NodesSettings, facts: Mapping[str, str], *, ranks: int) -> None:
        self._settings = settings
        self._facts = facts
        self._ranks = ranks
        self._address, self._port = address_of(settings.rdzv_endpoint or "")
        self._interface = ""

    def _plan(self, nodes: Sequence[int], port: int) -> Plan:
        return Plan(
            nodes=tuple(nodes),
            first_rank=nodes.index(self._settings.node_rank) * self._ranks,
            world_size=len(nodes) * self._ranks,
            address=self._address,
            port=port,
            interface=self._interface,
        )


@dataclass
class _Guest:
    """One connection of another node: what it said last, and why there is no more."""

    says: dict[str, Any]
    gone: str = ""


class Host(_Side):
    """Node 0's side. Raises ConfigError if it cannot listen."""

    def __init__(self, settings: NodesSettings, facts: Mapping[str, str], *, ranks: int) -> None:
        super().__init__(settings, facts, ranks=ranks)
        self._guests: dict[int, _Guest] = {}
        self._party: dict[int, _Guest] = {}  # of the plan
        self._says: dict[str, Any] = {}  # to all
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
            here = sorted(self._guests.copy().items())  # they come and go in other threads
            ready = {node: guest for node, guest in here if guest.says.get("ready")}
            late = time.monotonic() - began >= settings.node_wait.total_seconds()
            if ready.keys() == wanted or (late and 1 + len(ready) >= settings.least):
                return self._begin(ready)
            if line_due():
                missing = ", ".join(map(str, sorted(wanted - ready.keys())))
                log.info("Waiting for node %s at %s", missing, settings.rdzv_endpoint)
            stop.wait(_BEAT)
        return ExitStatus.STOPPED

    def _begin(self, party: dict[int, _Guest]) -> Plan:
        # Another port for each start: nodes tell one plan from the next by it, and a rank that
        # lingers from the start before finds nobody.
        plan = self._plan([0, *party], free_ports(1, self._address)[0])
        self._party, self._says = party, {"nodes": plan.nodes, "port": plan.port}
        log.info("Nodes %s: %d ranks", ", ".join(map(str, plan.nodes)), plan.world_size)
        return plan

    @property
    def trouble(self) -> str | None:
        """Return why the ranks that run must end now; None while all is well."""
        for node, guest in self._party.items():
            if guest.gone or guest.says.get("failed") == self._says.get("port", -1):
                return f"node {node}: {guest.gone or 'its ranks failed'}"
        return None

    @property
    def leaving(self) -> bool:
        """Return whether a node was asked to stop: all save and end, and the others go on."""
        return any(guest.says.get("leaving") for guest in self._party.values())

    @property
    def joining(self) -> bool:
        """Return whether a node waits to take part: after the next checkpoint all start again."""
        here = self._guests.copy().items()
        return any(g.says.get("ready") for node, g in here if node not in self._party)

    def ended(self, status: ExitStatus) -> bool:
        """Have the ranks of all nodes end, since none runs here. Return whether a node was lost, so
        that it was no fault of this one."""
        failed, deadline = status is ExitStatus.FAULT, time.monotonic() + _LAG
        # Its ranks' connections may have broken before its launcher's.
        while failed and not self.trouble and time.monotonic() < deadline:
            time.sleep(_BEAT)
        self._says = {}
        return failed and any(guest.gone for guest in self._party.values())

    def close(self, status: int) -> None:
        """Tell the others how this miner ended: they end alike."""
        with contextlib.suppress(OSError):
            # A thread in accept() keeps the port in use after close() alone, and the next start
            # here, as after a disk that was away, could not listen.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._says, self._party = {"over": int(status)}, {}
        deadline = time.monotonic() + _GOODBYE
        while self._guests and time.monotonic() < deadline:
            time.sleep(_BEAT)

    # --- threads -------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                line = Line(connection, self._settings.node_timeout)
                threading.Thread(
                    target=self._welcome, args=(line,), name="node", daemon=True
                ).start()
            except (OSError, RuntimeError):
                if self._listener.fileno() < 0:
                    return
                # For a moment no descriptor or thread is left: a node that was lost must be able
                # to come back when there is one again.
                time.sleep(_BEAT)

    def _welcome(self, line: Line) -> None:
        with contextlib.closing(line):
            try:
                message = line.read()
                node, problem = int(message["node"]), self._problem(message)
                if problem is not None:
                    log.warning("Node %d is refused: %s", node, problem.line)
                    # An older launcher takes a line of one word for a beat, which says nothing.
                    line.send(refused=problem.line, kind=problem.kind)
                    while line.read():  # closed with a word of theirs unread, ours would be lost
                        pass
            except (OSError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
                return  # a port scanner, or another program
            if problem is None:
                self._follow(node, line)

    def _problem(self, message: Mapping[str, Any]) -> Refusal | None:
        node, apart = int(message["node"]), float(message["time"]) - time.time()
        if not 0 < node < self._settings.most:
            return Refusal(
                f"--node_rank {node} is node 0's or beyond --nnodes {self._settings.nnodes}, so it "
                "has no part: give each node a number of its own",
                "flags",
            )
        if abs(apart) > CLOCKS_APART.total_seconds():
            return Refusal(
                f"the clock of this node is {apart:+.0f} s from node 0's, so logs and events could "
                "not be put in order: set it (timedatectl set-ntp true)"
            )
        return difference(self._facts, dict(message["facts"].items()), node)

    def _follow(self, node: int, line: Line) -> None:
        """Answer ``node`` and hear it, in turn, until it is gone."""
        guest, before = _Guest({}), self._guests.get(node)
        if before is not None:
            before.gone = "its launcher started again"
        self._guests[node] = guest
        try:
            while not guest.gone:
                # Ranks of a launcher that it replaced are to end first.
                replaces = self._party.get(node, guest) is not guest
                line.send(**({} if replaces else self._says))
                guest.says = line.read()
        except (OSError, ValueError) as error:
            guest.gone = guest.gone or str(error)
            if self._guests.get(node) is guest:
                del self._guests[node]
        log.warning("Node %d is gone: %s", node, guest.gone)


class Guest(_Side):
    """Every other node's side."""

    leaving = joining = False  # node 0 alone decides

    def __init__(self, settings: NodesSettings, facts: Mapping[str, str], *, ranks: int) -> None:
        super().__init__(settings, facts, ranks=ranks)
        self._says: dict[str, Any] = {}
        self._hears: dict[str, Any] = {}
        self._ran = 0  # port of the plan whose ranks run, or ran last
        self._known = False  # node 0 took us in before
        self._gone = ""  # why node 0 is not heard
        self._refused: ConfigError | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._keep_line, name="nodes", daemon=True).start()

    def meet(self, stop: threading.Event) -> Plan | ExitStatus:
        """Wait for node 0's word.

        Raises WrongNode, ConfigError if it refuses, or cannot be reached.
        """
        self._says["ready"] = True
        while not stop.is_set():
            hears = self._hears
            if self._refused is not None:
                raise self._refused
            if "over" in hears:
                return ExitStatus(hears["over"])
            if self._settings.node_rank in hears.get("nodes", ()) and hears["port"] != self._ran:
                self._says, self._ran = {}, hears["port"]
                return self._plan(hears["nodes"], hears["port"])
            stop.wait(_BEAT)
        return ExitStatus.STOPPED

    @property
    def trouble(self) -> str | None:
        well = self._hears.get("port") == self._ran
        return None if well else self._gone or "node 0 ended its ranks"

    def leave(self) -> None:
        """Ask node 0, whose rank 0 decides for all, to save and end."""
        self._says["leaving"] = True

    def ended(self, status: ExitStatus) -> bool:
        """Tell node 0, which counts the faults."""
        self._says["failed"] = self._ran if status is ExitStatus.FAULT else 0
        return True

    def close(self, status: int) -> None:
        self._closed.set()

    # --- the thread ----------------------------------------------------------------------------

    def _keep_line(self) -> None:
        began, line_due = time.monotonic(), Throttle(_SAY_AGAIN)
        endpoint, patience = self._settings.rdzv_endpoint, self._settings.rdzv_timeout
        while not self._closed.is_set():
            try:
                self._follow(socket.create_connection((self._address, self._port), timeout=5))
            except ConfigError as error:
                self._refused = error
                return
            except (OSError, ValueError) as error:
                self._gone, self._hears = f"node 0: {error}", {}
                self._ran = 0  # a node 0 that started again may choose the same port
                if not self._known and time.monotonic() - began > patience.total_seconds():
                    self._refused = ConfigError(
                        f"--rdzv_endpoint {endpoint} was not reached within --rdzv_timeout "
                        f"({error}), so this node has nobody to train with: start node 0, and "
                        "open the port between the nodes in its firewall"
                    )
                    return
                if line_due():
                    log.info("Waiting for node 0 at %s (%s)", endpoint, error)
                self._closed.wait(1.0)

    def _follow(self, connection: socket.socket) -> None:
        """Tell and hear node 0, in turn. Raises OSError, ValueError at the connection's end."""
        line = Line(connection, self._settings.node_timeout)
        with contextlib.closing(line):
            self._interface = interface_of(connection.getsockname()[0].partition("%")[0])
            line.send(node=self._settings.node_rank, time=time.time(), facts=dict(self._facts))
            while not self._closed.wait(_BEAT):
                hears = self._hears = line.read()
                if "refused" in hears:  # without a kind: by a launcher of an older version
                    raise Refusal(str(hears["refused"]), str(hears.get("kind", "version"))).error
                if "over" in hears:
                    self._closed.set()
                    return
                self._known, self._gone = True, ""
                line.send(**self._says)


def join_nodes(config: Config, *, ranks: int, remembered: int) -> Host | Guest | None:
    """Return this launcher's side; None for a miner of one machine.

    ``remembered``: as in :func:`facts_of`. Raises ConfigError.
    """
    if not config.nodes.several:
        return None
    kind = Host if config.nodes.leads else Guest
    return kind(config.nodes, facts_of(config, ranks=ranks, remembered=remembered), ranks=ranks)
