"""Make a Hugging Face ``Trainer`` a member of a network with one callback.

    trainer.add_callback(NetworkCallback("network.toml"))

A ``Trainer`` calls ``on_step_end`` after each optimizer step: once for all the micro-batches of
``gradient_accumulation_steps``, after it has set the learning rate and before it evaluates or
writes a checkpoint. So its checkpoints hold the weights after a whole update. When training begins,
a ``Trainer`` that resumes has already loaded its own checkpoint. Its weights are then replaced by
the weights in the member's run folder, which are as new or newer. The ``Trainer`` keeps its
optimizer's state, its schedule and its position in the data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from distributed_training.member import join


class NetworkCallback(TrainerCallback):
    """Make a Hugging Face ``Trainer`` a member of a store network.

    ``net`` is the membership, once training has begun. The reported loss is the last one that the
    ``Trainer`` logged; tokens are reported only if ``include_num_input_tokens_seen`` is set.

    Args:
        network: File, URL or name, as for :func:`distributed_training.join`.
        **settings: Settings of ``miner.toml``, as for :func:`distributed_training.join`.

    Examples:
        ```python
        from transformers import Trainer

        from distributed_training.huggingface import NetworkCallback

        trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
        trainer.add_callback(NetworkCallback("network.toml", wallet_name="w"))
        trainer.train()
        ```
    """

    def __init__(self, network: str | Path, **settings: Any) -> None:
        self.net: Any = None
        self._network = network
        self._settings = settings
        self._loss: float | None = None
        self._tokens = 0  # tokens reported so far

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any
    ) -> None:
        if args.load_best_model_at_end:
            raise ValueError(
                "load_best_model_at_end=True puts earlier weights into the model before the last "
                "checkpoint, from which the next start would continue, so no network was joined: "
                "leave it out, and load the best checkpoint afterwards"
            )
        self._tokens = state.num_input_tokens_seen
        self.net = join(self._network, model, optimizer, **self._settings)

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any, **_: Any) -> None:
        self._loss = logs.get("loss", self._loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        tokens = state.num_input_tokens_seen - self._tokens  # tokens of all ranks
        self._tokens += tokens
        self.net.step(loss=self._loss, tokens=tokens // args.world_size or None)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.net.close()
