"""Give a script the model and the tokenizer of the network that it joins."""

from __future__ import annotations

import copy
import os
from contextlib import ExitStack
from typing import Any

from distributed_training.config import OPERATORS_FILE, Config, ConfigError, load_config
from distributed_training.protocol.metadata import MODEL_RULES


def model_config(network: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Return the content of the ``config.json`` of a network's model.

    Args:
        network: File, URL or name, as for :func:`distributed_training.join`; None for the network
            that ``miner.toml`` in the working folder names, which ``dt-join`` wrote.

    Raises:
        ValueError: With one line, if there is no such network, or its file has no model.

    Examples:
        ```python
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(**distributed_training.model_config())
        model = AutoModelForCausalLM.from_config(config)
        ```
    """
    config = _config_of(network)
    found = config.network.model
    if not found:
        raise ConfigError(
            f"the file of {config.general.network} has no [model.config], so its model is not "
            "known before joining it: ask its founder for the config.json"
        )
    return copy.deepcopy({key: value for key, value in found.items() if key != MODEL_RULES})


def lora_config(network: str | os.PathLike[str] | None = None) -> Any:
    """Return the ``peft.LoraConfig`` of a network that trains adapters, for ``get_peft_model``.

    A script may change ``lora_dropout`` in it, because the network does not prescribe that value.

    Args:
        network: As for :func:`model_config`.

    Raises:
        ValueError: With one line, if there is no such network, or it does not train adapters.

    Examples:
        ```python
        from peft import get_peft_model

        model = get_peft_model(model, distributed_training.lora_config())
        ```
    """
    from distributed_training.training.lora import LORA, peft_config

    config = _config_of(network)
    if config.network.head.kind != LORA:
        raise ConfigError(
            f"the network of {config.general.network} does not train adapters, so they have no "
            "configuration: train its model without them"
        )
    return peft_config(config.network.head.of_model({}))


def tokenizer(network: str | os.PathLike[str] | None = None) -> Any:
    """Return a network's tokenizer, a ``tokenizers.Tokenizer``.

    A tokenizer that the founder has published is fetched into the run folder, which needs the
    member's wallet.

    Args:
        network: As for :func:`model_config`.

    Raises:
        ValueError: With one line that says what an operator has to change.
        RuntimeError: If the registry, the store or the hub does not answer.
    """
    from tokenizers import Tokenizer

    from distributed_training.node.published import fetch_published
    from distributed_training.node.start import fetch_tokenizer, make_run_folder
    from distributed_training.scoring.verdicts import open_bucket
    from distributed_training.store.bucket_reader import BucketReader

    config = _config_of(network)
    folder = make_run_folder(config)
    with ExitStack() as stack:
        fetch_published(
            config, lambda: BucketReader(open_bucket(config, stack)), wanted={"tokenizer"}
        )
        path, _ = fetch_tokenizer(config, folder)
    return Tokenizer.from_file(str(path))


def _config_of(network: str | os.PathLike[str] | None) -> Config:
    words = [] if network is None else ["--network", os.fspath(network)]
    return load_config("miner", words, file=OPERATORS_FILE, check=False)
