"""Join a store network from one's own training script.

    with distributed_training.join("network.toml", model, optimizer) as net:
        for batch in data:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            net.step(loss=loss)

The script keeps its model, optimizer, data and loop. :meth:`Net.step` does the rest of a miner:
uploads at the closes, updates, checkpoints, log, events, and the files that dashboard and
``dt-status`` read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


class Net:
    """A script's membership. :func:`join` returns it; leaving its context ends it."""

    outer_step: int = 0  # whose epoch-start weights the model trains from
    inner_step: int = 0  # optimizer steps in this outer step

    @property
    def verdict(self) -> str:
        """The verdict on this member in words, as ``dt-status`` shows it; empty beside rank 0."""
        return ""

    def step(self, loss: Tensor | float | None = None, tokens: int | None = None) -> None:
        """Take note of an optimizer step, and do what is due. Call it on each rank.

        ``loss`` and ``tokens``: of this rank's share of the step, for log and events. The weights
        may be others afterwards: an outer step has begun. It waits for no network and raises
        nothing.
        """

    def batches(self) -> Iterator[Tensor]:
        """Yield int64 (sequences, length) of the text that the network assigns. On each rank."""
        return iter(())

    def close(self) -> None:
        """Write a checkpoint and end the membership. Call it on each rank."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def join(
    network: str | PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    **settings: Any,
) -> Net:
    """Join a store network with ``model``, which gets the network's weights. On each rank.

    ``network``: file, URL or name, as ``--network``. ``settings``: those of ``miner.toml``, by
    their names with ``_`` for a dot (``wallet_name="w"``); environment, ``.env`` and ``miner.toml``
    are read too. Weights come from the network, or after a restart from the run folder, whatever
    the script has loaded into the model; the optimizer's state is the script's to keep.

    Raises ValueError with one line for settings, a network or a model that do not fit.
    """
    raise ValueError("join() is not in this version: run dt-miner")
