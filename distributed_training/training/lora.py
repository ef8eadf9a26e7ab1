"""Train adapters on a frozen base: the model kind ``lora``, which uses PEFT's modules.

LoRA (Hu et al. 2021, arXiv 2106.09685) adds to a linear layer W the product of two narrow matrices,
``alpha / r * B A``. Only B and A are trained and exchanged, in float32. W has the dtype that the
network's file names, and is published once. A network may also train only B and publish A once,
since the product of the members' mean B and mean A is not the mean of their products B A.

Parameters have the names that PEFT gives them in a transformers model, without the prefix that
``PeftModel`` adds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as checked
from torch import Tensor, nn

from distributed_training.config.installed import missing
from distributed_training.config.types import ConfigError
from distributed_training.protocol import keys
from distributed_training.protocol.metadata import MODEL_RULES
from distributed_training.protocol.types import Schema

from .copies import write_safetensors
from .model import (
    MODELS,
    CausalLM,
    UnfitModelError,
    build_causal_lm,
    build_meta_model,
    plain_name,
    write_config,
)
from .weights import load_weights

LORA = "lora"
ADAPTER_CONFIG = "adapter_config.json"  # PEFT's name for the file
_ALL = "all-linear"
_PEFT = "base_model.model."  # PEFT puts this before each name in its files and models
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FORM = "r=16,alpha=32,targets=all-linear,train=B"


@checked(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class LoraRules:
    """The table ``[model.settings]`` in a network's file.

    ``targets``: the last components of the names of the linear layers that get adapters.
    ``dtype``: the base's dtype. ``base``: the base's name on the hub with its commit; empty if it
    came from a folder.
    """

    r: Annotated[int, Field(ge=1, le=4096)]
    alpha: Annotated[int, Field(ge=1, le=65536)]
    targets: Annotated[list[str], Field(min_length=1, max_length=100)]
    train: Literal["both", "B"] = "both"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    base: Annotated[str, Field(max_length=200)] = ""

    @property
    def scaling(self) -> float:
        """The factor by which B A is multiplied."""
        return self.alpha / self.r

    @classmethod
    def of(cls, model_config: Mapping[str, Any]) -> Self:
        """Return the adapter rules in a ``config.json``. Raises UnfitModelError."""
        given = (model_config.get(MODEL_RULES) or {}).get("settings") or {}
        try:
            return cls(**given)
        except (ValidationError, TypeError) as error:
            raise UnfitModelError(
                f"model.settings has no valid rules for adapters ({_describe(error)}), so it is "
                f"unclear what to train: correct them in the network's file, as in --lora {_FORM}"
            ) from None


def _describe(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return f"{error}"[:200]
    wrong = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"[:200]


def read_rules(given: str, base: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """Return ``[model.settings]`` from ``r=16,alpha=32,...``, or from a folder that PEFT wrote.

    Args:
        given: The value of ``--lora``; if it names a folder, the folder comes first.
        base: The ``config.json`` of the base.
        name: The base's name on the hub, with its commit.

    Raises:
        ConfigError: If ``given`` is neither such rules nor such a folder.
    """
    rules: dict[str, Any] = {"r": 16, "targets": _ALL}
    words, known = given.split(","), {"r", "alpha", "targets", "train", "dtype"}
    if (Path(words[0]) / ADAPTER_CONFIG).is_file():
        rules |= _of_folder(Path(words.pop(0)))
        known = {"train", "dtype"}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in known or not equals:
            raise ConfigError(
                f"--lora {given:.100}: {word!r:.60} is neither a folder with {ADAPTER_CONFIG} nor "
                f"a rule for one of {', '.join(sorted(known))}, so no network was created: write "
                f"rules as in {_FORM}"
            )
        rules[key] = int(value) if value.isdecimal() else value
    if isinstance(rules["targets"], str):
        rules["targets"] = rules["targets"].split("+")
    if rules["targets"] == [_ALL]:
        # List the linear layers, except the head: another version of PEFT might choose others.
        plain = {key: value for key, value in base.items() if key != MODEL_RULES}
        model: Any = build_meta_model(plain)
        head = model.get_output_embeddings()
        layers = {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module is not head
        }
        rules["targets"] = sorted(layers)
    rules.setdefault("alpha", 2 * rules["r"] if isinstance(rules["r"], int) else 0)
    kept = base.get("dtype") or base.get("torch_dtype") or "float32"
    rules.setdefault("dtype", kept if kept in _DTYPES else "float32")
    LoraRules.of({MODEL_RULES: {"settings": rules}})
    return rules | ({"base": name} if name else {})


def _of_folder(folder: Path) -> dict[str, Any]:
    """Return the rules of the adapters in a folder that PEFT wrote. Raises ConfigError."""
    try:
        found = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        wrong = [
            key
            for key in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "lora_bias")
            if found.get(key)
        ]
        if found["peft_type"] != "LORA" or wrong or not isinstance(found["target_modules"], list):
            raise ValueError(f"it has {wrong[0] if wrong else 'no list of plain LoRA modules'}")
        last = {each.rpartition(".")[2] for each in found["target_modules"]}
        return {"r": found["r"], "alpha": found["lora_alpha"], "targets": sorted(last)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{folder / ADAPTER_CONFIG} has no adapters that a network can train ({error!r:.150}), "
            "so no network was created: choose plain LoRA adapters for linear layers"
        ) from None


def peft_config(model_config: Mapping[str, Any]) -> Any:
    """Return the ``peft.LoraConfig`` of a network's adapters. Raises UnfitModelError."""
    rules = LoraRules.of(model_config)
    if line := missing({LORA: "a network that trains adapters"}):
        raise UnfitModelError(line)
    from peft import LoraConfig

    base, _, commit = rules.base.partition("@")
    return LoraConfig(
        r=rules.r,
        lora_alpha=rules.alpha,
        target_modules=list(rules.targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base or None,
        revision=commit or None,
    )


class Lora(CausalLM):
    """A causal language model in which only adapters are trained."""

    libraries = ("transformers", "peft")

    def build(self, config: Mapping[str, Any]) -> nn.Module:
        rules = LoraRules.of(config)
        model: Any = build_causal_lm(config, _DTYPES[rules.dtype])
        whole = [model.get_input_embeddings(), model.get_output_embeddings()]
        named = {name.rpartition(".")[2] for name, each in model.named_modules() if each in whole}
        adapters = peft_config(config)
        from peft import inject_adapter_in_model

        try:
            if wrong := sorted(named & {*rules.targets}):
                raise ValueError(f"{wrong[0]} is not a layer of the decoder")
            for target in rules.targets:  # PEFT accepts a list if any entry matches
                if not any(name.endswith(f".{target}") for name, _ in model.named_modules()):
                    raise ValueError(f"the model has no layer {target:.60}")
            inject_adapter_in_model(adapters, model)
        except ValueError as error:
            raise UnfitModelError(
                f"the model cannot get adapters at {', '.join(rules.targets):.200} "
                f"({error!s:.200}), so nothing can be trained: correct targets in model.settings"
            ) from None
        if "trainable" in config[MODEL_RULES]:
            raise UnfitModelError(
                "model.trainable cannot be used with model.kind lora, which trains adapters: "
                "remove it"
            )
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.float()  # PEFT created it in the base's dtype
                parameter.requires_grad_(rules.train == "both" or ".lora_B." in name)
        return model  # type: ignore[no-any-return]

    def saved_name(self, name: str) -> str:
        if ".lora_" in name:
            return _PEFT + name.replace(".default.", ".")
        return name.replace(".base_layer.", ".")

    def differs(
        self, network: nn.Module, model: nn.Module, named: Mapping[str, nn.Parameter]
    ) -> str:
        """Return how a script's ``model`` differs in its use of adapters; empty if it does not.

        Comparing tensors would not reveal a different ``alpha``, DoRA or a merged adapter.
        """
        from peft.tuners.lora import LoraLayer

        layers = [each for each in network.modules() if isinstance(each, LoraLayer)]
        wanted = layers[0].scaling["default"]
        for name, each in model.named_modules():
            if isinstance(each, LoraLayer):
                found = each.scaling.get("default")
                if found != wanted:
                    return f"{name} has alpha / r = {found}, but the network's is {wanted:g}"
                if any(each.use_dora.values()) or each.merged or each.disable_adapters:
                    return f"{name} uses DoRA, or has merged or disabled its adapter"
                if list(each.active_adapters) != ["default"]:
                    return f"{name} trains the adapters {', '.join(each.active_adapters)}"
        for name, theirs in network.named_parameters():
            mine = named[plain_name(name)]
            if mine.is_floating_point() and mine.dtype != theirs.dtype:
                found, dtype = (str(each.dtype).removeprefix("torch.") for each in (mine, theirs))
                return f"{name} is {found}, but the network's file names {dtype}"
        return ""

    def save(
        self,
        folder: Path,
        config: Mapping[str, Any],
        files: Sequence[tuple[Path, Schema]],
        *,
        merge: bool,
    ) -> None:
        """Write adapters that PEFT can read, or with ``merge`` the model with merged adapters."""
        places = {name: (path, (name, shape)) for path, each in files for name, shape in each}
        names = [name for name in places if (".lora_" in name) != merge]
        rules = LoraRules.of(config)

        def read(name: str) -> Tensor:
            path, entry = places[name]
            return load_weights(path, [entry])[0]

        def values() -> Iterator[Tensor]:
            for name in names:
                low = name.replace(".base_layer.weight", ".lora_{}.default.weight").format
                if merge and low("A") != name:
                    yield read(name).addmm_(read(low("B")), read(low("A")), alpha=rules.scaling)
                else:
                    yield read(name)

        if merge:
            write_config(folder, config)
        else:
            peft_config(config).save_pretrained(folder)
        shapes = {name: places[name][1][1] for name in names}
        _write(folder / (keys.MODEL if merge else keys.ADAPTERS), shapes, values())


def _write(path: Path, shapes: Mapping[str, tuple[int, ...]], values: Iterable[Tensor]) -> None:
    entries = [(Lora().saved_name(name), torch.float32, shape) for name, shape in shapes.items()]
    write_safetensors(path, entries, values, metadata=keys.SAFETENSORS_METADATA)


def begin(folder: Path, model_config: Mapping[str, Any]) -> None:
    """Write the adapters that a network begins with: A is drawn as in PEFT, and B is zero."""
    generator = torch.Generator().manual_seed(0)
    model = build_meta_model(model_config)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if ".lora_" in n}

    def drawn() -> Iterator[Tensor]:
        for name, shape in shapes.items():
            values = torch.zeros(shape)
            if ".lora_A." in name:
                values.uniform_(-1, 1, generator=generator).div_(math.sqrt(shape[1]))
            yield values

    folder.mkdir()
    peft_config(model_config).save_pretrained(folder)
    _write(folder / keys.ADAPTERS, shapes, drawn())


MODELS.register(LORA, Lora)
