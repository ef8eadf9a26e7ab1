"""Row shards of every parameter, the collectives over them, and their copies in host memory.

FSDP2 splits every parameter along its first dimension as ``torch.chunk`` does: each of W ranks gets
``ceil(rows / W)`` rows, and the last ranks get fewer or none. The optimizer, the epoch-start
weights, the momentum, the error feedback and the checkpoints all work on these plain float32 row
blocks.

On several machines, ranks are numbered machine by machine. Each machine holds one whole copy of the
model, sharded over its own ranks (HSDP). Weights are gathered within a machine. Only gradients
travel between machines, among the ranks that hold the same shard. All copies go through the same
steps, so one machine's copy or checkpoint is the same as any other's.

Copies from a GPU alternate between two pinned buffers: one is filled over the bus, on its own
stream, while all cores empty the other. A plain ``.to("cpu")`` goes through a small buffer of the
driver, which a single core empties into memory that has never been touched.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from distributed_training.protocol.types import RankFailedError
from distributed_training.protocol.update_file import rows_and_columns

log = logging.getLogger(__name__)

#: Time limit of each collective in the model's groups, which gather weights and reduce gradients.
#: Ranks reach a collective within seconds of each other, or within minutes while the model
#: compiles. After the limit NCCL aborts the process and gloo raises an error, both before
#: --neuron.hang_timeout.
COLLECTIVE_TIMEOUT = timedelta(minutes=8)


@dataclass(frozen=True)
class Layout:
    """The place of a rank among all ranks.

    ``local_world_size``: number of ranks on each node, or 0 if all are on one node.
    """

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 0

    @property
    def shards(self) -> int:
        """Number of ranks on each node, which together hold one copy of the model."""
        return self.local_world_size or self.world_size

    @property
    def replicas(self) -> int:
        """Number of copies of the model: one on each node."""
        return self.world_size // self.shards

    @property
    def on_node_0(self) -> bool:
        return self.rank < self.shards

    @property
    def shard(self) -> int:
        """Number of the part that this rank holds of its copy."""
        return self.rank % self.shards


Result = TypeVar("Result")


def row_range(rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return the first row of ``rank``'s share and one past the last; equal if it has none."""
    chunk = math.ceil(rows / world_size)
    # Cut rows as torch.chunk does: the last ranks may have fewer rows, or none.
    start = min(rows, rank * chunk)
    return start, min(rows, start + chunk)


@dataclass(frozen=True)
class ParameterShard:
    """Rows ``start:stop`` of one parameter: the part that this rank owns.

    ``dtensor``: the tensor that holds these rows, or a plain tensor, which each rank holds whole.
    The ``shape`` of a scalar is (1,).
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    dtensor: Tensor

    @property
    def local(self) -> Tensor:
        """This rank's rows, float32, on the device.

        Writing to it changes the weights; the gathered copies must be dropped afterwards
        (``discard_gradients``).
        """
        # Detach, since autograd does not allow in-place writes to a leaf.
        if not isinstance(self.dtensor, DTensor):
            return self.dtensor.detach().view(self.shape)[self.start : self.stop]
        return self.dtensor.to_local().detach()

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of ranks that the rows are spread over; None: only this rank has them."""
        return self.dtensor.device_mesh if isinstance(self.dtensor, DTensor) else None

    @property
    def is_one_row(self) -> bool:
        """True if the whole parameter is a single row of a file, which the ranks encode together.

        Such a parameter is copied and gathered right at the boundary, all others afterwards.
        """
        return rows_and_columns(self.shape)[0] == 1

    def empty_rows(self) -> Tensor:
        """Return a new host tensor for this rank's rows."""
        return torch.empty((self.stop - self.start, *self.shape[1:]), dtype=torch.float32)


#: Time limit of each collective in the host-memory streams: pseudo-gradient, average, votes.
STREAM_TIMEOUT = timedelta(minutes=10)


def open_stream(layout: Layout) -> RowStream:
    """Create a stream and its groups.

    All ranks call this. A single rank without a process group needs no groups.
    """
    if layout.world_size == 1 and not dist.is_initialized():
        return RowStream(group=None, layout=layout, copy=None)
    # The stream needs its own group, since FSDP queues its collectives in another order. The
    # backend is gloo, since these tensors are in host memory, which NCCL cannot access.
    group = dist.new_group(backend="gloo", timeout=STREAM_TIMEOUT)
    assert group is not None
    if layout.replicas == 1:
        return RowStream(group=group, layout=layout, copy=group)

    def mine(kinds: Iterable[range]) -> dist.ProcessGroup:
        """Create these disjoint groups and return the one that this rank is in."""
        # Creating a group is collective: ranks outside the group must call this too.
        made = [(dist.new_group(list(k), backend="gloo", timeout=STREAM_TIMEOUT), k) for k in kinds]
        return next(found for found, ranks in made if layout.rank in ranks)

    world, shards = layout.world_size, layout.shards
    peers = mine(range(shard, world, shards) for shard in range(shards))
    copy = mine(range(first, first + shards) for first in range(0, world, shards))
    return RowStream(group=group, layout=layout, copy=copy, peers=peers)


class RowStream:
    """Holds votes, and moves rows and small values between the ranks.

    It has its own gloo group and works in host memory. If several nodes hold copies
    (:class:`Layout`), each rank of node 0 sends its rows to its peers, which hold the same rows.
    ``group``: None for a single rank.
    """

    def __init__(
        self,
        *,
        group: dist.ProcessGroup | None,
        layout: Layout,
        copy: dist.ProcessGroup | None,
        peers: dist.ProcessGroup | None = None,
    ) -> None:
        self.group = group
        self.layout = layout
        self.rank, self.world_size = layout.rank, layout.world_size
        self._copy = copy  # the ranks that hold one copy of the model together with this rank
        self._peers = peers  # the ranks that hold the same rows as this rank, node 0's first

    def of_copy(self, value: Result) -> list[Result]:
        """Return the ``value`` of each rank that holds a part of this copy (sent pickled)."""
        found: list[Result] = [value] * self.layout.shards
        if self.group is not None:
            dist.all_gather_object(found, value, group=self._copy)
        return found

    def whole(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Gather whole tensors on every rank; ``rows``: this rank's rows of each, in host memory.

        The ranks of a copy send all rows in one message: use it only for small tensors, such as
        vectors and the narrow matrices of adapters.
        """
        found = self.of_copy(list(rows)) if rows else []
        return [torch.cat(each) for each in zip(*found, strict=True)]

    def replicate(self, rows: Tensor) -> None:
        """Send the first copy's ``rows`` to the other copies (contiguous rows, in host memory)."""
        if self._peers is not None and rows.numel():
            dist.broadcast(rows, group=self._peers, group_src=0)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum elementwise over ranks, in float64; the result is bit-identical on all ranks."""
        if self.group is None:
            return [float(value) for value in values]
        # float64 keeps token counts exact, and the square of a norm within range.
        tensor = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(tensor, group=self.group)
        return tensor.tolist()

    def raise_if_any(self, problem: str | None, fault: Callable[[str], Exception]) -> None:
        """Raise ``fault`` on all ranks if any has a ``problem``; its text is the lowest rank's."""
        # Raise on all ranks: if one rank raised without the others, they would hang until the
        # group's timeout. Send a number first, since usually there is no text to pickle and send.
        if self.sum([float(problem is not None)])[0] == 0:
            return
        answers = self.all_gather(problem)
        rank, text = next((r, a) for r, a in enumerate(answers) if a is not None)
        raise fault(text if self.world_size == 1 else f"rank {rank}: {text}")

    def all_gather(self, value: Result) -> list[Result]:
        """Return every rank's ``value``, on all ranks (sent pickled; small values only)."""
        found: list[Result] = [value] * self.world_size
        if self.group is None:
            return found
        dist.all_gather_object(found, value, group=self.group)
        return found

    def run_on_all(
        self, work: Callable[[], Result], fault: Callable[[str], Exception] = RankFailedError
    ) -> Result:
        """Run ``work()`` on each rank; if it fails on one rank, fail on all of them.

        ``work`` may not wait for another rank. Raises ``fault`` on all ranks alike.
        """
        problem = None
        try:
            result = work()
        # The rank is out of memory, or a file is bad.
        except (RuntimeError, MemoryError, OSError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
            # torch raises a RuntimeError if the host is out of memory.
            if isinstance(error, MemoryError) or "t allocate memory" in problem:
                problem += "; free host memory there"
        self.raise_if_any(problem, fault)
        return result

    def from_rank_0(self, value: Result) -> Result:
        """Return rank 0's ``value`` on every rank (sent pickled; small values only)."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]


STAGE = 1 << 25  # float32 elements in each of the two buffers: 128 MiB

#: A tensor or a flat part of a tensor, and the tensor that it is copied into.
Piece = tuple[Tensor, Tensor]


class HostCopies:
    """Copies tensors from one device to host memory, for one thread at a time.

    ``stage``: how many float32 elements each buffer holds.
    """

    def __init__(self, device: torch.device, *, stage: int = STAGE) -> None:
        cuda = device.type == "cuda"
        self._device, self._stage, self._turn = device, stage, threading.Lock()
        self._stream = torch.cuda.Stream(device) if cuda else None
        self._copied = [torch.cuda.Event(), torch.cuda.Event()] if cuda else []
        self._buffers = _make_buffers(stage, device)

    def fill(self, pairs: Sequence[Piece], after: torch.cuda.Event | None = None) -> None:
        """Copy each pair's float32 tensor to its host tensor. Returns when all are copied.

        ``after``: the event that the copies wait for; None: everything that is queued on the
        current stream.
        """
        with self._turn:
            if self._stream is not None:
                # Only the side stream waits for what training has queued; the host does not.
                after = after or torch.cuda.current_stream(self._device).record_event()
                self._stream.wait_event(after)
            before: tuple[int, Piece] | None = None
            # Empty each buffer one turn later, so that the cores empty one while the bus fills the
            # other.
            for number, (source, target) in enumerate(self._pieces(pairs)):
                turn = number % 2
                part = self._buffers[turn][: source.numel()]
                with torch.cuda.stream(self._stream):  # does nothing without a stream
                    # The host does not wait here, because the buffer is pinned.
                    part.copy_(source, non_blocking=True)
                    if self._stream is not None:
                        self._copied[turn].record(self._stream)
                if before is not None:
                    self._empty(*before)
                before = turn, (part, target)
            if before is not None:
                self._empty(*before)

    def _pieces(self, pairs: Sequence[Piece]) -> Iterator[Piece]:
        """Yield flat parts of the tensors that fit into a buffer."""
        for source, target in pairs:
            flat = source.detach().reshape(-1).split(self._stage)
            yield from zip(flat, target.view(-1).split(self._stage), strict=True)

    def _empty(self, turn: int, piece: Piece) -> None:
        if self._stream is not None:
            # The host waits only here: until the event, the buffer holds the values of two turns
            # ago.
            self._copied[turn].synchronize()
        part, target = piece
        target.copy_(part)


def _make_buffers(stage: int, device: torch.device) -> list[Tensor]:
    """Make two buffers of ``stage`` float32 elements, pinned for a GPU if memory allows it."""
    make = partial(torch.empty, stage, dtype=torch.float32)
    if device.type == "cuda":
        try:
            return [make(pin_memory=True) for _ in range(2)]
        except (RuntimeError, MemoryError) as error:
            log.warning(
                "%s: no pinned memory for copies (%s), so training continues, but slower during "
                "uploads and checkpoints: free host memory, or raise the limit on locked memory "
                "(ulimit -l)",
                device,
                str(error).split("\n", 1)[0],
            )
    return [make() for _ in range(2)]


_copies = functools.cache(HostCopies)  # one for each device


def fill_host(pairs: Sequence[Piece], after: torch.cuda.Event | None = None) -> None:
    """Copy each pair's float32 tensor to its host tensor; see :meth:`HostCopies.fill`."""
    on_gpu = [pair for pair in pairs if pair[0].device.type == "cuda"]
    if on_gpu:
        _copies(on_gpu[0][0].device).fill(on_gpu, after)
    for tensor, taken in pairs:
        if tensor.device.type != "cuda":
            taken.copy_(tensor.detach())


def queued(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that comes after everything that is queued on ``device`` now.

    Return None for a device without a queue.
    """
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


_LOWER = 5  # added to the niceness of a thread that writes


def enter_thread(device: torch.device, *, background: bool = False) -> None:
    """Make ``device`` the calling thread's device. A thread that may use a GPU calls this first.

    ``background``: if training runs on a GPU, also lower the priority of this thread and of the
    threads that it starts, so that the thread that queues the GPU's work always finds a free core.
    """
    if device.type != "cuda":
        return
    # A thread starts on GPU 0. When it leaves a stream of another GPU, it returns to GPU 0's stream
    # and creates a CUDA context there. For every other rank that would take half a gigabyte on
    # rank 0's GPU.
    torch.cuda.set_device(device)
    # Do not change the main thread: it trains, and also writes if no thread can be started.
    if background and threading.current_thread() is not threading.main_thread():
        with contextlib.suppress(OSError):  # the system may not have thread priorities
            thread = threading.get_native_id()
            now = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, now + _LOWER)
