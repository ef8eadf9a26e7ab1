"""The home of compressions: how uploads of a network are encoded, chosen by name.

The public network's kind, ``top-k``, is in ``protocol/gradients.py``. Another one is a class of
``protocol.compression.Compression`` and one line, ``COMPRESSIONS.register(name, make)``, in a
module that ``--plugins`` names. Miners and validators of a network must have the same.
"""

from __future__ import annotations

from collections.abc import Callable

from distributed_training.common.kinds import Kinds
from distributed_training.config.settings import TrainingSettings
from distributed_training.config.types import choose_kind
from distributed_training.protocol.compression import Compression
from distributed_training.protocol.gradients import TopK

#: Name -> a function of the settings, which hold the network's rules.
COMPRESSIONS: Kinds[Callable[[TrainingSettings], Compression]] = Kinds("compression")

COMPRESSIONS.register("top-k", lambda s: TopK(s.topk_compression, s.target_chunk, s.use_dct))


def compression_of(settings: TrainingSettings) -> Compression:
    """Return the network's compression of uploads. Raises ConfigError for an unknown name."""
    return choose_kind(COMPRESSIONS, settings.compression, key="compression.kind")(settings)
