"""Run the swarm process, which owns p2pd, the DHT node and the averager.

    python -m distributed_training.swarm.averager_process DESCRIPTOR    (started by rank 0)

DESCRIPTOR is this process's end of a socket: commands come in and answers leave as lines of JSON
(:mod:`.supervisor`). Standard output and error are hivemind's log. It leads a process group of
its own, with p2pd in it, and ends that group when rank 0 is gone or when it cannot go on itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cryptography.exceptions import UnsupportedAlgorithm
from google.protobuf.message import DecodeError
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, P2PDaemonError, PeerID
from hivemind.utils.multiaddr import Multiaddr

from distributed_training.common.processes import write_stacks_on_signal

from .averager import DTGradAverager
from .supervisor import (
    Average,
    Beat,
    Cancel,
    Ended,
    Failed,
    Found,
    HostConfig,
    Message,
    Ready,
    RoundOrder,
    describe_end,
    from_line,
    map_tensors,
    to_line,
)

log = logging.getLogger(__name__)

BEAT = 2.0  # seconds between two signs of life
_LOOK_AFTER_PARENT = 1.0
_KEEP_IN_TOUCH = 10.0
_ASK_AGAIN = 5.0  # seconds after which a peer that did not answer is asked again
_DAEMON_TIMEOUT = 10.0  # seconds p2pd may take to say who it is
_LEAVE_TIMEOUT = 3.0  # seconds for leaving the DHT


def set_aside_damaged(identity: Path) -> None:
    """Rename an identity file that no p2pd starts with.

    hivemind writes the file in place, so a kill meanwhile damages it. Under a new identity the
    miner is another peer, and announces that.
    """
    try:
        PeerID.from_identity(identity.read_bytes())
    except FileNotFoundError:
        return  # it will be made
    except (ValueError, TypeError, DecodeError, UnsupportedAlgorithm):
        identity.replace(identity.with_suffix(".damaged"))
        log.warning("%s is damaged and set aside: this peer gets a new id", identity)


class HostFailed(RuntimeError):
    """The swarm process cannot go on; the text has the reason."""


class Host:
    """One DHT node and one averager for the life of the process."""

    def __init__(
        self, config: HostConfig, orders: asyncio.StreamReader, answers: asyncio.StreamWriter
    ) -> None:
        self._config = config
        self._orders = orders
        self._answers = answers
        self._cancelled: float = -1  # the newest round that is not wanted any more
        self._number = -1
        self._round: asyncio.Task[Average | Failed] | None = None

    def tell(self, message: Message) -> None:
        self._answers.write(to_line(message))

    async def run(self) -> None:
        """Run until :class:`~.supervisor.Close`, or rank 0 is gone.

        Raises HostFailed and hivemind's errors.
        """
        node = await self._start_node()
        tensors = map_tensors(self._config.tensors, self._config.shapes)
        os.close(self._config.tensors)  # the mapping stays
        averager = DTGradAverager(node, self._config, tensors)
        async with averager.serving():
            addresses = [str(address) for address in await node.get_visible_maddrs()]
            # Inside: a peer that hears of us at once finds our calls registered.
            self.tell(Ready(str(node.peer_id), addresses))
            try:
                await _first_of(
                    self._obey(averager),
                    self._watch_daemon(node),
                    self._watch_parent(),
                    self._keep_in_touch(node),
                )
            except HostFailed as error:
                # Before this context ends: its tasks may wait for answers through a dead p2pd.
                self.tell(Ended(str(error)))
                raise
        with contextlib.suppress(OSError, TimeoutError, P2PDaemonError):
            async with asyncio.timeout(_LEAVE_TIMEOUT):
                await node.shutdown()

    async def _start_node(self) -> DHTNode:
        config = self._config
        set_aside_damaged(Path(config.identity))
        # p2pd's sockets, otherwise in /tmp for anybody to connect to, and left there by a kill.
        P2P._UNIX_SOCKET_PREFIX = f"/unix{config.sockets}/"
        return await DHTNode.create(
            initial_peers=config.initial_peers,
            host_maddrs=config.listen,
            announce_maddrs=config.announce or None,
            identity_path=config.identity,
            startup_timeout=config.start_timeout,
            # Asked again every five seconds, not ever less often: a peer whose swarm process was
            # started again is to be found for the next round.
            blacklist_time=_ASK_AGAIN,
            backoff_rate=1.0,
        )

    async def _obey(self, averager: DTGradAverager) -> None:
        found = partial(self.tell, Found())
        async for line in self._orders:
            match from_line(line):
                case RoundOrder() as order:
                    self._number = order.number
                    self._round = asyncio.create_task(averager.average(order, found))
                    self._round.add_done_callback(self._tell_outcome)
                    # The cancel may have come first: several threads of rank 0 send.
                    if order.number <= self._cancelled:
                        self._round.cancel()
                case Cancel(number):
                    self._cancelled = max(self._cancelled, number)
                    if self._round is not None and self._number <= number:
                        self._round.cancel()
                case _:  # Close
                    return

    def _tell_outcome(self, task: asyncio.Task[Average | Failed]) -> None:
        if task.cancelled():
            if self._number <= self._cancelled:  # or else this process ends
                self.tell(Failed("CANCELLED"))
        elif (error := task.exception()) is not None:
            log.error("The round failed with an error that was not expected", exc_info=error)
            self.tell(Failed("SWARM_DOWN", f"{type(error).__name__}: {error}"[:500]))
        else:
            self.tell(task.result())

    async def _watch_daemon(self, node: DHTNode) -> None:
        """Raise HostFailed when p2pd ends or hangs; until then send signs of life."""
        p2p = node.p2p
        ended = asyncio.create_task(p2p._child.wait())
        while not ended.done():
            try:
                async with asyncio.timeout(_DAEMON_TIMEOUT):
                    await p2p._client.identify()
            except (OSError, EOFError, TimeoutError) as error:
                await asyncio.wait([ended], timeout=1.0)  # one that ends closes its socket first
                if not ended.done():
                    raise HostFailed(f"p2pd does not answer ({error!r})") from None
                break
            # After p2pd has answered: rank 0 takes silence for a hang and ends both.
            self.tell(Beat(len(node.protocol.routing_table.uid_to_peer_id)))
            await asyncio.wait([ended], timeout=BEAT)
        raise HostFailed(f"p2pd {describe_end(ended.result())}")

    async def _keep_in_touch(self, node: DHTNode) -> None:
        """Tell the initial peers that we are here: one that is started again knows nobody."""
        peers = {PeerID.from_base58(Multiaddr(p)["p2p"]) for p in self._config.initial_peers}
        while True:
            for peer in peers - {node.peer_id}:
                await node.protocol.call_ping(peer, strict=False)
            await asyncio.sleep(_KEEP_IN_TOUCH)

    async def _watch_parent(self) -> None:
        """Wait until rank 0 is gone."""
        # Nobody but this process knows of p2pd, which would hold the port for good.
        while os.getppid() == self._config.parent:
            await asyncio.sleep(_LOOK_AFTER_PARENT)


async def _first_of(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until the first ends, and raise its error."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


async def serve(config: HostConfig, connection: socket.socket) -> None:
    asyncio.get_running_loop().set_exception_handler(_log_problem)
    orders, answers = await asyncio.open_connection(sock=connection)
    try:
        await Host(config, orders, answers).run()
    except HostFailed as error:
        why = str(error)
    except Exception as error:  # whatever hivemind raises: rank 0 is told, and starts another
        log.exception("The swarm process ends")
        why = f"{type(error).__name__}: {error}"
    else:
        return
    with contextlib.suppress(OSError):
        answers.write(to_line(Ended(why)))
        # This process is killed next: what was not sent by then is lost.
        await answers.drain()


def _log_problem(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # hivemind's matchmaking drops a waiting task with each look into the DHT.
    if not context["message"].startswith("Task was destroyed"):
        loop.default_exception_handler(context)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is rank 0's to act on
    write_stacks_on_signal()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    # Training needs the cores; sums of parts are short.
    torch.set_num_threads(1)
    connection = socket.socket(fileno=int(sys.argv[1]))
    config = _first_line(connection)
    try:
        asyncio.run(serve(config, connection))
    finally:
        shutil.rmtree(config.sockets, ignore_errors=True)
        # p2pd, and whatever else hivemind started: nobody but this group's leader knows of them.
        os.killpg(os.getpgrp(), signal.SIGKILL)
    return 0


def _first_line(connection: socket.socket) -> HostConfig:
    """Read the configuration, with the tensors' descriptor as numbered here.

    Raises SystemExit if rank 0 is gone.
    """
    received, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    line = b""
    while received and not line.endswith(b"\n"):
        received = connection.recv(1)
        line += received
    if not received:
        raise SystemExit(0)
    config = from_line(line)
    assert isinstance(config, HostConfig)
    return replace(config, tensors=descriptors[0])


if __name__ == "__main__":
    sys.exit(main())
