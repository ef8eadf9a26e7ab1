"""Average the values of uploads with other members: the child process of :mod:`.hivemind`.

    python -m distributed_training.exchange.hivemind_peer DESCRIPTOR

It holds hivemind's DHT and a subclass of hivemind's averager, in server mode. For each
:class:`~.hivemind.Order` it connects to the members, copies what their own upload decodes to, and
averages once. A member throws the average away, since it applies the validator's file only; the
validator's peer sends zeros and writes the average into a file.

hivemind checks nobody's identity outside its DHT, and its reducer sums whatever it gets. So this
averager takes part only with members, by the identity that their connection has proved, and its
reducer refuses what no honest member sends. What it returns may still be false: a reducer may lie.
The validator compares.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind knows streams by this name only

import hivemind
import psutil
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AllreduceException, AllReduceRunner
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.partition import BannedException, TensorPartContainer, TensorPartReducer
from hivemind.compression import Float16Compression
from hivemind.p2p import P2PContext, P2PHandlerError, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture
from hivemind.utils.asyncio import as_aiter, azip, enter_asynchronously
from hivemind.utils.multiaddr import Multiaddr
from torch import Tensor

from distributed_training.common.processes import (
    ParentConnection,
    is_running,
    write_stacks_on_signal,
)
from distributed_training.exchange.hivemind import Addresses, Answer, Order, Ready, Settings
from distributed_training.protocol.average_file import write_average
from distributed_training.protocol.update_file import UpdateFile, row_chunks, rows_and_columns

log = logging.getLogger(__name__)

LONGEST = 10.0  # times the usual norm of an upload: a longer part is refused
_MEET = 10.0  # seconds for connecting to all members
_LAST_WORD = 5.0  # seconds in which a follower hears that its group begins
_WITNESS = 1e-6  # weight of the validator, which sends zeros
_LOOK = 0.5  # seconds between two looks at processes whose end ends all

_members: set[PeerID] = set()  # of the averager's process: who may take part in this round
_first = psutil.Process()  # of this module's; the others are its forks and p2pd


def _end_with(processes: Sequence[psutil.Process]) -> None:
    """End this process and its group when one of ``processes`` has ended. Starts a thread.

    PR_SET_PDEATHSIG reaches no grandchild, and p2pd knows nothing of us.
    """

    def watch() -> None:
        while all(map(is_running, processes)):
            time.sleep(_LOOK)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="end-watch", daemon=True).start()


class Node(hivemind.DHT):
    """hivemind's DHT, in a process that ends with the first one."""

    def run(self) -> None:
        _end_with([_first])
        super().run()


class SharedTensor(Tensor):
    """A tensor in memory that forked processes share already.

    hivemind's constructor would copy it into /dev/shm, which has 64 MB in a container.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def zeros(cls, shape: Sequence[int]) -> SharedTensor:
        flat = torch.frombuffer(
            mmap.mmap(-1, 4 * max(1, torch.Size(shape).numel())), dtype=torch.float32
        )
        return flat[: torch.Size(shape).numel()].view(*shape).as_subclass(cls)

    def share_memory_(self) -> SharedTensor:
        return self


class Reducer(TensorPartReducer):
    """Sums no part that is not finite, weighs more than one, or is far longer than an upload."""

    def __init__(
        self, shapes: Sequence[torch.Size], senders: Sequence[PeerID], limit: float
    ) -> None:
        super().__init__(shapes, len(senders))
        self._senders, self._limit = senders, limit

    async def accumulate_part(
        self, sender_index: int, part_index: int, tensor_part: Tensor, weight: float = 1.0
    ) -> Tensor:
        norm = float(torch.linalg.vector_norm(tensor_part))
        # "Not below", for NaN.
        if not norm <= self._limit or not 0.0 < weight <= 1.0:
            log.warning(
                "What %s sent in the all-reduce is refused: its part %d has norm %.3g (limit %.3g) "
                "and weight %.3g",
                *(self._senders[sender_index], part_index, norm, self._limit, weight),
            )
            raise BannedException(f"sender {sender_index}")  # the runner leaves it out from here on
        return await super().accumulate_part(sender_index, part_index, tensor_part, weight)


class Discarded(TensorPartContainer):
    """Keeps no results, which may be all values of the model: a member throws them away."""

    def register_processed_part(self, peer_index: int, part_index: int, part: Tensor) -> None:
        super().register_processed_part(peer_index, part_index, torch.zeros(1).expand(part.shape))


class Runner(AllReduceRunner):
    """hivemind's all-reduce with our reducer; ``sizes``: values that each peer reduces."""

    def __init__(self, *, limit: float, keeps: bool, **given: Any) -> None:
        super().__init__(**given)
        if not keeps:
            self.tensor_part_container.__class__ = Discarded
        theirs: TensorPartReducer = self.tensor_part_reducer  # type: ignore[has-type]
        theirs.num_parts = 0  # else it warns of parts that it never got
        theirs.finalize()
        shapes = [part.shape for part in self.parts_for_local_averaging]
        self.tensor_part_reducer = Reducer(shapes, self.sender_peer_ids, limit)
        parts = self.tensor_part_container._input_parts_by_peer
        self.sizes = [sum(part.numel() for part, _ in each) for each in parts]


class Averager(DecentralizedAverager):
    """hivemind's averager among members. ``keeps``: the tensors become the average."""

    runner_class = Runner

    def __init__(self, *given: Any, keeps: bool, **named: Any) -> None:
        self._keeps, self._limit, self._witnesses = keeps, 0.0, tuple[str, ...]()
        super().__init__(*given, **named)

    def begin_round(self, order: Order, limit: float) -> None:
        """Let a round begin, among the members of an order and under its own group key.

        ``limit``: norm above which a part is refused.
        """
        future = MPFuture()
        self._outer_pipe.send(("_begin_round", [future, order, limit], {}))
        future.result()

    async def _begin_round(self, future: Any, order: Order, limit: float) -> None:
        self._witnesses, self._limit = order.witnesses, limit
        _members.clear()
        _members.update([self.peer_id, *(PeerID.from_base58(peer) for peer, _ in order.members)])
        self._matchmaking.group_key_manager.group_bits = f"{order.serial:b}"
        future.set_result(None)

    @classmethod
    def get_stub(cls, p2p: Any, peer: PeerID, *, namespace: Any = None) -> Any:
        if peer not in _members:  # whom the DHT names: anybody may write there
            raise P2PHandlerError(f"{peer} is no member")
        return super().get_stub(p2p, peer, namespace=namespace)

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        if context.remote_id not in _members:
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        async for message in super().rpc_join_group(request, context):
            yield message
        await asyncio.sleep(_LAST_WORD)  # p2pd may reset the stream before the message is read

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        if context.remote_id not in _members:
            yield averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        async for message in super().rpc_aggregate_part(stream, context):
            yield message

    async def _aggregate_with_group(
        self, group_info: GroupInfo, min_vector_size: int, **given: Any
    ) -> Any:
        peers = group_info.peer_ids
        if strangers := set(peers) - _members:
            raise AllreduceException(f"its leader named {len(strangers)} who are no members")
        async with enter_asynchronously(self.get_tensors()) as tensors:
            runner = self.runner_class(
                limit=self._limit,
                keeps=self._keeps,
                p2p=self._p2p,
                servicer_type=type(self),
                prefix=self.prefix,
                tensors=tensors,
                group_id=group_info.group_id,
                ordered_peer_ids=peers,
                # hivemind balances by the bandwidth and mode that each peer gives, which it may
                # forge, and by a solver that SciPy has no longer. So all members reduce as much.
                peer_fractions=[float(str(peer) not in self._witnesses) for peer in peers],
                **given,
            )
            self._running_groups[group_info.group_id].set_result(runner)
            async for tensor, difference in azip(as_aiter(*tensors), runner):
                tensor.add_(difference)
        if lost := runner.tensor_part_container.failed_size:
            raise AllreduceException(f"{lost / self.total_size:.1%} of the values have no average")
        return [[str(peer), size] for peer, size in zip(peers, runner.sizes, strict=True)]


async def _meet(_: Any, node: Any, members: Addresses) -> None:
    """Connect to all ``members`` at once, and wait for none longer than for another."""
    connected = {str(info.peer_id) for info in await node.p2p.list_peers()}

    async def meet(peer: str, addresses: Sequence[str]) -> None:
        async with asyncio.timeout(_MEET):
            if peer not in connected:
                places = [Multiaddr(address.rpartition("/p2p/")[0]) for address in addresses]
                await node.p2p._client.connect(PeerID.from_base58(peer), places)
            await node.protocol.call_ping(PeerID.from_base58(peer))

    await asyncio.gather(*(meet(*each) for each in members), return_exceptions=True)


class Peer:
    """The DHT node and the averager of this process."""

    averager_class = Averager

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tensors = [SharedTensor.zeros(shape) for _, shape in settings.schema]
        self._dht = Node(
            start=True,
            host_maddrs=[f"/ip4/{settings.listen}/tcp/{settings.port}"],
            announce_maddrs=[settings.address] if settings.address else None,
            identity_path=settings.identity,
            use_relay=False,
            nat_port_map=False,
            auto_nat=False,
            startup_timeout=30,
        )
        self.peer_id = str(self._dht.peer_id)
        self.addresses = tuple(map(str, self._dht.get_visible_maddrs()))
        self._averager = self.averager_class(
            self._tensors,
            self._dht,
            start=True,
            keeps=settings.witness,
            prefix=f"{settings.run_id}_average",
            client_mode=False,  # server mode
            allow_state_sharing=False,
            compression=Float16Compression(),
            min_matchmaking_time=settings.gather,
            request_timeout=settings.gather / 4,
            next_chunk_timeout=settings.chunk,
            allreduce_timeout=settings.longest,
        )

    def average(self, order: Order) -> Answer:
        """Carry out an order: average once, or return why there is no average."""
        began = time.monotonic()
        try:
            scale = order.scale(sum(tensor.numel() for tensor in self._tensors))
            self._fill(order, scale)
            self._dht.run_coroutine(partial(_meet, members=order.members))
            self._averager.begin_round(order, LONGEST * order.usual * scale)
            gather, now = self._settings.gather, time.time()
            if now > order.at + gather:
                raise AllreduceException(f"its order came {now - order.at:.0f} s too late")
            time.sleep(max(0.0, order.at - now))
            group = self._averager.step(
                scheduled_time=order.at + gather,
                timeout=order.at + 3 * gather - time.time(),
                weight=_WITNESS if self._settings.witness else 1.0,
                allow_retries=False,
            )
            if order.average:
                names = [name for name, _ in self._settings.schema]
                with self._averager.get_tensors() as tensors:
                    write_average(Path(order.average), names, tensors, scale)
            shares = tuple((peer, size) for peer, size in group)
            return Answer(order.serial, shares, seconds=time.monotonic() - began)
        except Exception as error:  # noqa: BLE001 - of hivemind, peers' bytes, a disk
            return Answer(order.serial, failed=(str(error) or type(error).__name__)[:300])

    def _fill(self, order: Order, scale: float) -> None:
        """Copy what the upload decodes to into the tensors, times ``scale``; zeros without one."""
        schema = self._settings.schema
        file = UpdateFile.reopen(Path(order.upload), schema) if order.upload else None
        with self._averager.get_tensors() as tensors:
            for index, tensor in enumerate(tensors):
                rows = tensor.view(rows_and_columns(tensor.shape))
                for first, stop in row_chunks(*rows.shape):
                    if file is None:
                        rows[first:stop].zero_()
                    else:
                        rows[first:stop].copy_(file.rows(index, first, stop).mul_(scale))


def main(peer_class: type[Peer] = Peer) -> None:
    """Carry out the parent's orders until a process ends; ``peer_class``: another one in tests."""
    parent_process = _first.parent()
    with contextlib.suppress(OSError):  # it leads a session already
        os.setpgid(0, 0)
    write_stacks_on_signal()
    parent = ParentConnection(plugins=False)
    parent.forward_log()
    log.setLevel(logging.INFO)
    torch.set_num_threads(1)
    peer = peer_class(_next_order(parent))
    assert parent_process is not None
    # Without its DHT or p2pd an averager only fails. The parent starts all of them again.
    _end_with([parent_process, *_first.children(recursive=True)])
    parent.send(Ready(peer.peer_id, peer.addresses))
    while True:
        parent.send(peer.average(_next_order(parent)))


def _next_order(parent: ParentConnection) -> Any:
    try:
        return parent.receive()
    except (EOFError, OSError):  # it is gone: no order comes any more
        sys.exit()


if __name__ == "__main__":
    main()
