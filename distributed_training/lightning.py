"""Make a Lightning ``Trainer`` a member of a network with one callback.

    lightning.Trainer(callbacks=[LightningCallback("network.toml")])

When training starts, a ``Trainer`` that resumes has already loaded its own checkpoint. Its weights
are then replaced by the weights in the member's run folder, which are as new or newer. Lightning
calls the callbacks that write checkpoints last, so a step's checkpoint has the weights after any
update that was applied at that step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from distributed_training.member import join


class LightningCallback(Callback):
    """Make a Lightning ``Trainer`` a member of a store network.

    ``net`` is the membership, once training has started. The reported loss is the loss of the last
    micro-batch.

    Args:
        network: File, URL or name, as for :func:`distributed_training.join`.
        tokens: Tokens in this rank's share of an optimizer step, for the log and the events.
        **settings: Settings of ``miner.toml``, as for :func:`distributed_training.join`.

    Examples:
        ```python
        from lightning.pytorch import Trainer

        from distributed_training.lightning import LightningCallback

        trainer = Trainer(callbacks=[LightningCallback("network.toml", wallet_name="w")])
        trainer.fit(module, loader)
        ```
    """

    def __init__(
        self, network: str | Path | None, *, tokens: int | None = None, **settings: Any
    ) -> None:
        self.net: Any = None
        self._network, self._tokens, self._settings = network, tokens, settings
        self._steps = 0  # optimizer steps reported so far

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._steps = trainer.global_step
        self.net = join(self._network, trainer.model, trainer.optimizers, **self._settings)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._steps:
            return  # this micro-batch only added to an accumulated gradient
        self._steps = trainer.global_step
        loss = (outputs or {}).get("loss")
        if loss is not None:
            loss = loss * trainer.accumulate_grad_batches  # Lightning divided it by that number
        self.net.step(loss=loss, tokens=self._tokens)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.net.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.net is not None:
            self.net.__exit__(type(exception), exception, None)
