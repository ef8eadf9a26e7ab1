"""Average the values of uploads with other members: the child process of :mod:`.hivemind`.

    python -m distributed_training.exchange.hivemind_peer DESCRIPTOR

It runs hivemind's DHT and a subclass of hivemind's averager, in server mode. For each
:class:`~.hivemind.Order` it connects to the members, loads the decoded values of its own upload,
and averages once. A member discards the average, since it applies only the validator's file; the
validator's peer sends zeros and writes the average into a file.

hivemind checks nobody's identity outside its DHT, and its reducer sums whatever it gets. So this
averager takes part only with members, whose identity their connection has proved, and its reducer
refuses values that no honest member sends. The average may still be false, since another member's
reducer may lie: the validator compares it with the uploads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import mmap
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind detects streams by this name only

import hivemind
import psutil
import torch
from hivemind.averaging import DecentralizedAverager, averager
from hivemind.averaging.allreduce import AllreduceException, AllReduceRunner
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.partition import BannedException, TensorPartContainer, TensorPartReducer
from hivemind.compression import Float16Compression
from hivemind.p2p import P2P, P2PContext, P2PHandlerError, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture
from hivemind.utils.asyncio import as_aiter, azip, enter_asynchronously
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr
from torch import Tensor

from distributed_training.common.processes import (
    ParentConnection,
    is_running,
    write_stacks_on_signal,
)
from distributed_training.exchange.hivemind import HANGS, Answer, Order, Ready, Settings
from distributed_training.protocol.average_file import write_average
from distributed_training.protocol.update_file import UpdateFile

log = logging.getLogger(__name__)

LONGEST = 10.0  # multiple of an upload's usual norm: a part with a larger norm is refused
_MEET = 10.0  # seconds for connecting to all members
_LAST_WORD = 5.0  # seconds that a follower has to receive the message that its group begins
_WITNESS = 1e-6  # weight of the validator, which sends zeros
_START = 60  # seconds that the DHT and the averager have to start
_FAILURES = 2  # consecutive failures after which all processes end, and the parent restarts them
_LONGEST_PLACE = 50  # characters of a folder's path, at most, so that sockets fit into it
_LOOK = 0.5  # seconds between two checks of the processes that this one must not outlive

# In the averager's process: the peers that may take part in this round.
_members: set[PeerID] = set()
_first = psutil.Process()  # this module's own process; the others are its forks and p2pd


def _end_with(processes: Sequence[psutil.Process]) -> None:
    """Start a thread that ends this process and its group once one of ``processes`` has ended.

    PR_SET_PDEATHSIG does not reach grandchildren, and p2pd does not know about us.
    """

    def watch() -> None:
        while all(map(is_running, processes)):
            time.sleep(_LOOK)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="end-watch", daemon=True).start()


def _own_scratch(identity: Path) -> Path:
    """Return a new folder for all sockets and pipes of this peer from now on.

    These processes end by SIGKILL, so hivemind never removes its files: after weeks of restarts
    there would be thousands in /tmp. A stop removes the folder. A start removes the folder that a
    kill has left behind: a file next to ``identity`` names it. Raises OSError.
    """
    note, prefix = identity.with_name("peer-scratch"), "dt-peer-"
    with contextlib.suppress(OSError, ValueError):
        if (left := Path(note.read_text())).name.startswith(prefix):
            shutil.rmtree(left, ignore_errors=True)
    usual = tempfile.gettempdir()
    # A socket's path has at most 107 characters, and a job's temporary folder may be longer.
    place = usual if len(usual) <= _LONGEST_PLACE else "/tmp"
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
    with contextlib.suppress(OSError):  # on a full disk the folder stays behind after a kill
        note.write_text(str(scratch))
    # Torch removes its shared-memory folder itself, and aborts if that is already gone.
    os.environ["TMPDIR"], tempfile.tempdir = place, str(scratch)
    P2P._UNIX_SOCKET_PREFIX = f"/unix{scratch}/"
    return scratch


class Node(hivemind.DHT):
    """hivemind's DHT, in a process that ends with the first one."""

    def run(self) -> None:
        _end_with([_first])
        super().run()


class SharedTensor(Tensor):
    """A tensor in memory that forked processes already share.

    hivemind's constructor would copy it into /dev/shm, which has 64 MB in a container.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def zeros(cls, shape: Sequence[int]) -> SharedTensor:
        memory = mmap.mmap(-1, 4 * torch.Size(shape).numel())
        return torch.frombuffer(memory, dtype=torch.float32).view(*shape).as_subclass(cls)

    def share_memory_(self) -> SharedTensor:
        return self


class Reducer(TensorPartReducer):
    """Refuses a part that is not finite, weighs more than 1, or is far longer than an upload."""

    senders: Sequence[PeerID]
    limit: float  # norm of a part

    async def accumulate_part(
        self, sender_index: int, part_index: int, tensor_part: Tensor, weight: float = 1.0
    ) -> Tensor:
        norm = float(torch.linalg.vector_norm(tensor_part))
        # "not <=" is also true for NaN.
        if not norm <= self.limit or not 0.0 < weight <= 1.0:
            log.warning(
                "What %s sent in the all-reduce is refused: its part %d has norm %.3g (limit %.3g) "
                "and weight %.3g",
                *(self.senders[sender_index], part_index, norm, self.limit, weight),
            )
            raise BannedException(f"sender {sender_index}")  # the runner then ignores this sender
        return await super().accumulate_part(sender_index, part_index, tensor_part, weight)


class Discarded(TensorPartContainer):
    """Keeps no results, since a member discards them and they may be as large as the model."""

    def register_processed_part(self, peer_index: int, part_index: int, part: Tensor) -> None:
        super().register_processed_part(peer_index, part_index, torch.zeros(1).expand(part.shape))


class Runner(AllReduceRunner):
    """hivemind's all-reduce with our reducer. ``sizes``: how many values each peer reduces."""

    def __init__(self, *, limit: float, keeps: bool, **given: Any) -> None:
        super().__init__(**given)
        reducer, container = self.tensor_part_reducer, self.tensor_part_container
        reducer.__class__ = Reducer
        reducer.senders, reducer.limit = self.sender_peer_ids, limit
        if not keeps:
            container.__class__ = Discarded
        parts = container._input_parts_by_peer
        self.sizes = [sum(part.numel() for part, _ in each) for each in parts]

    def should_delay_results(self, peer_id: PeerID) -> bool:
        # With a delay the validator, which reduces nothing, would get its first part only after the
        # members have sent each other everything, and would have given up by then.
        return False


class Averager(DecentralizedAverager):
    """hivemind's averager, which averages with members only."""

    runner_class = Runner
    _order: Order  # the order that is being carried out

    def begin_round(self, order: Order) -> None:
        """Begin a round among the members of an order, under the order's own group key."""
        future = MPFuture()
        self._outer_pipe.send(("_begin_round", [order, future], {}))
        future.result()

    async def _begin_round(self, order: Order, future: Any) -> None:
        self._order = order
        _members.clear()
        _members.update([self.peer_id, *(PeerID.from_base58(each) for each, _, _ in order.members)])
        self._matchmaking.group_key_manager.group_bits = f"{order.serial:b}"
        future.set_result(None)

    @classmethod
    def get_stub(cls, p2p: Any, peer: PeerID, *, namespace: Any = None) -> Any:
        if peer not in _members:  # anybody may write peers into the DHT
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
            raise AllreduceException(f"its leader named {len(strangers)} peers that are no members")
        try:
            # With hivemind's own timeout, a task that nothing awaits would raise TimeoutError, and
            # asyncio would log that its exception was never retrieved.
            async with asyncio.timeout(self._order.ends - time.time()):
                runner = await self._reduce(group_info, peers, given)
        except TimeoutError:
            raise AllreduceException(
                "it had not ended when the close's grace ended, so some link is too slow for it"
            ) from None
        if lost := runner.tensor_part_container.failed_size:
            raise AllreduceException(f"{lost / self.total_size:.1%} of the values have no average")
        return [*zip(map(str, peers), runner.sizes, strict=True)]

    async def _reduce(
        self, group_info: GroupInfo, peers: Sequence[PeerID], given: Mapping[str, Any]
    ) -> Runner:
        """Average the tensors with these peers; return the runner that did it."""
        async with enter_asynchronously(self.get_tensors()) as tensors:
            runner = self.runner_class(
                limit=LONGEST * self._order.usual * self._order.scale(self.total_size),
                keeps=bool(self._order.average),
                p2p=self._p2p,
                servicer_type=type(self),
                prefix=self.prefix,
                tensors=tensors,
                group_id=group_info.group_id,
                ordered_peer_ids=peers,
                # hivemind balances the shares by the bandwidth and mode that each peer reports,
                # which a peer may forge, and with a solver that SciPy no longer has. So here all
                # members reduce equal shares.
                peer_fractions=[float(str(peer) != self._order.leader) for peer in peers],
                **given,
            )
            self._running_groups[group_info.group_id].set_result(runner)
            async for tensor, difference in azip(as_aiter(*tensors), runner):
                tensor.add_(difference)
        return runner


async def _meet(_: Any, node: Any, members: Sequence[tuple[str, str, int]]) -> None:
    """Connect to all ``members`` in parallel, with the same time limit for each."""

    async def meet(peer: str, address: str, _: int) -> None:
        async with asyncio.timeout(_MEET):
            await node.p2p._client.connect(PeerID.from_base58(peer), [Multiaddr(address)])
            await node.protocol.call_ping(PeerID.from_base58(peer))

    await asyncio.gather(*(meet(*each) for each in members), return_exceptions=True)


class Peer:
    """The DHT node and the averager of this process."""

    averager_class = Averager

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._dht = Node(
            start=True,
            host_maddrs=[f"/ip4/{settings.listen}/tcp/{settings.port}"],
            announce_maddrs=[settings.address] if settings.address else None,
            identity_path=settings.identity,
            use_relay=False,
            nat_port_map=False,
            auto_nat=False,
            startup_timeout=_START,
        )
        self.ready = Ready(str(self._dht.peer_id), str(self._dht.get_visible_maddrs()[0]))
        self._averager = self.averager_class(
            [SharedTensor.zeros(shape) for _, shape in settings.schema],
            self._dht,
            start=True,
            prefix=f"{settings.run_id}_average",
            client_mode=False,  # server mode
            allow_state_sharing=False,
            compression=Float16Compression(),
            min_matchmaking_time=settings.gather,
            request_timeout=settings.gather / 4,
            next_chunk_timeout=settings.chunk,
        )

    def average(self, order: Order) -> Answer:
        """Carry out an order: average once, or return why there is no average."""
        try:
            scale = order.scale(self._averager.total_size)
            self._fill(order, scale)
            self._dht.run_coroutine(partial(_meet, members=order.members))
            self._averager.begin_round(order)
            gather, now = self._settings.gather, time.time()
            if now > order.at + gather:
                raise AllreduceException(f"its order came {now - order.at:.0f} s too late")
            time.sleep(max(0.0, order.at - now))
            group = self._averager.step(
                scheduled_time=order.at + gather,
                timeout=order.at + 3 * gather - time.time(),
                weight=1.0 if order.upload else _WITNESS,
                allow_retries=False,
            )
            if order.average:
                names = [name for name, _ in self._settings.schema]
                with self._averager.get_tensors() as tensors:
                    write_average(Path(order.average), names, tensors, scale)
            return Answer(order.serial, tuple(group))
        except Exception as error:  # noqa: BLE001 - from hivemind, peers' bytes or the disk
            return Answer(order.serial, failed=(str(error) or type(error).__name__)[:300])

    def _fill(self, order: Order, scale: float) -> None:
        """Fill the tensors with the upload's decoded values, clipped and multiplied by ``scale``.

        Without an upload, fill them with zeros.
        """
        schema = self._settings.schema
        file = UpdateFile.reopen(Path(order.upload), schema) if order.upload else None
        with self._averager.get_tensors() as tensors:
            for (name, shape), tensor in zip(schema, tensors, strict=True):
                if file is None:
                    tensor.zero_()
                else:
                    tensor.copy_(file.decode(name, shape).mul_(scale))
            norm = math.hypot(*(float(torch.linalg.vector_norm(each)) for each in tensors))
            for tensor in tensors if norm > order.longest * scale else ():
                tensor.mul_(order.longest * scale / norm)


def _own_the_log() -> None:
    """Send hivemind's log lines where ours go, since its own handler masks no secret."""
    if os.environ.get("HIVEMIND_LOGLEVEL") != "DEBUG":  # for debugging, keep the stacks
        use_hivemind_log_handler("nowhere")
        # hivemind logs each failed average as an error, but our answer already says why it failed.
        logging.getLogger(averager.__name__).setLevel(logging.CRITICAL)
    log.setLevel(logging.INFO)


def main(peer_class: type[Peer] = Peer) -> None:
    """Carry out the parent's orders until a process ends. ``peer_class``: replaced in tests.

    The parent restarts all processes when this one ends. It ends by SIGALRM if it hangs, and after
    consecutive failures, since a DHT that has lost all its peers never finds them again.
    """
    parent_process = _first.parent()
    with contextlib.suppress(OSError):  # it already leads a session
        os.setpgid(0, 0)
    write_stacks_on_signal()
    parent = ParentConnection(plugins=False)
    parent.forward_log()
    _own_the_log()
    torch.set_num_threads(1)
    signal.alarm(_START)
    settings = parent.receive()
    scratch = _own_scratch(Path(settings.identity))
    peer, failures = peer_class(settings), 0
    signal.alarm(0)

    def end(*_: object) -> None:
        shutil.rmtree(scratch, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    # This handles the parent's signal. It is set only now, so that no fork inherits it.
    signal.signal(signal.SIGTERM, end)
    assert parent_process is not None
    # End together with the DHT and p2pd, since an averager can only fail without them.
    _end_with([parent_process, *_first.children(recursive=True)])
    parent.send(peer.ready)
    with contextlib.suppress(EOFError, OSError):  # the parent is gone, so no more orders come
        while failures < _FAILURES:
            order = parent.receive()
            signal.alarm(math.ceil(max(0.0, order.ends - time.time()) + HANGS))
            answer = peer.average(order)
            signal.alarm(0)
            parent.send(answer)
            failures = failures + 1 if answer.failed else 0
    end()


if __name__ == "__main__":
    main()
