"""The averager, wire-compatible with the public network. Imported in the swarm host only."""

from __future__ import annotations

from typing import Any

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.group_info import GroupInfo
from hivemind.compression import (
    CompressionBase,
    CompressionInfo,
    Float16Compression,
    NoCompression,
)

#: By ``--neuron.all_reduce_compression``. hivemind's 8-bit quantizations are not among them: they
#: fail on parts of few values, which load balancing makes, and such a part is lost for the round.
COMPRESSIONS = {"none": NoCompression, "float16": Float16Compression}


def compressed_part_size(compression: CompressionBase, part_size: int) -> int:
    """The ``part_size_bytes`` with which hivemind cuts tensors into parts of ``part_size`` bytes
    before compression.

    hivemind counts the bytes after it, so the same number would give a peer that compresses parts
    of more values than its group has, and the round would fail for everybody.
    """
    one = CompressionInfo.from_tensor(torch.zeros(1))
    return int(part_size * compression.estimate_compression_ratio(one))


class RoundBroken(RuntimeError):
    """The group was found and the transfer then failed. Not retried: parts of the tensors have
    already been replaced by averages, and averaging them again would count some peers twice."""


# The name is part of the RPC names on the wire (protocol page, section 1).
class DTGradAverager(DecentralizedAverager):
    """A full peer (NODE) that tells who took part and who failed.

    A step's result is ``{"peers": [peer id, ...], "failed": [peer id, ...], "kept_local": f}``
    where ``kept_local`` is the part of all values for which no average came back.
    """

    async def _aggregate_with_group(
        self, group_info: GroupInfo, min_vector_size: int, **kwargs: Any
    ) -> Any:
        try:
            await super()._aggregate_with_group(group_info, min_vector_size, **kwargs)
        except Exception as error:  # hivemind wraps whatever happened; its message is kept
            raise RoundBroken(str(error) or type(error).__name__) from error
        runner = self._running_groups[group_info.group_id].result()
        container = runner.tensor_part_container
        return {
            "peers": [str(peer) for peer in group_info.peer_ids],
            "failed": sorted(str(peer) for peer in runner.banned_senders),
            "kept_local": container.failed_size / max(1, container.total_size),
        }
