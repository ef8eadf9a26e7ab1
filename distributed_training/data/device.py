"""Batches on their way to a GPU while it computes."""

from __future__ import annotations

import torch


class DeviceBuffer:
    """Double buffer: one batch is computed on while the next one is copied on a stream of its own.

    Copies are asynchronous because the host side is pinned; two pinned buffers alternate, each
    written again only when its copy is over. CUDA only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pinned: list[torch.Tensor] = []
        self._copied = [torch.cuda.Event(), torch.cuda.Event()]
        self._turn = 0
        self._staged: torch.Tensor | None = None

    def put(self, batch: torch.Tensor) -> None:
        """Start the copy of ``batch`` (CPU), to be taken later."""
        if not self._pinned or self._pinned[0].shape != batch.shape:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._stream.synchronize()
            self._pinned = [torch.empty_like(batch, pin_memory=True) for _ in range(2)]
        self._turn = 1 - self._turn
        self._copied[self._turn].synchronize()
        self._pinned[self._turn].copy_(batch)
        with torch.cuda.stream(self._stream):
            self._staged = self._pinned[self._turn].to(self._device, non_blocking=True)
            self._copied[self._turn].record(self._stream)

    def take(self) -> torch.Tensor | None:
        """The batch put last; the current stream waits for its copy, the host does not."""
        batch, self._staged = self._staged, None
        if batch is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            batch.record_stream(current)  # its memory is the other stream's
        return batch

    def clear(self) -> None:
        self._staged = None
