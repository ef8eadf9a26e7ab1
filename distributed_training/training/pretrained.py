"""Read the weights that a network begins with from a folder that ``transformers`` wrote.

The folder has ``config.json`` and the weights, in ``model.safetensors`` or in the shards that
``model.safetensors.index.json`` names. transformers makes up missing tensors and ignores unknown
ones. Here each tensor is compared with the model that members build. Tensors are read one by one,
so at most two of them are in memory in addition to the result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from distributed_training.protocol import keys

from .copies import write_safetensors
from .model import build_meta_model, initial_weights, kind_of
from .weights import checked_tensor

INDEX = "model.safetensors.index.json"
# Old files have this tensor, which models now compute from their configuration.
_COMPUTED = ".rotary_emb.inv_freq"


class WeightsError(ValueError):
    """A network cannot begin with this folder. The text is the cause; ``remedy`` is the remedy."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(cause)
        self.remedy = remedy


def read_weights(
    folder: Path,
    model_config: Mapping[str, Any],
    *,
    frozen: bool = False,
    more: Path | None = None,
) -> Iterator[Tensor]:
    """Yield the weights as float32 copies, in the order of the model's schema.

    ``frozen``: read the parameters that are not trained instead of the trained ones. ``more``:
    another folder with the tensors that ``folder`` lacks, such as adapters. Tied weights are
    yielded once, under whichever of their names the folder has. Raises WeightsError for a
    difference from the members' model: a tensor that is missing, unknown, not finite or of another
    shape, or a buffer with other values than theirs.
    """
    model, kind = build_meta_model(model_config), kind_of(model_config)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(kind.saved_name(name))
    buffers = dict(model.named_buffers())
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in (*_files(folder), *(() if more is None else _files(more))):
            try:
                file = stack.enter_context(safe_open(path, "pt"))
                files |= dict.fromkeys(file.keys(), (path, file))
            except Exception as error:  # noqa: BLE001 - foreign bytes: safetensors' own errors
                why = " ".join(str(error).split())
                raise WeightsError(
                    f"{path} cannot be read ({why:.200})", "download it again"
                ) from None
        known = {name for group in names.values() for name in group} | {*buffers}
        for name in sorted(files):
            if name not in known and not name.endswith(_COMPUTED):
                raise WeightsError(
                    f"{folder} has a tensor {name:.100} and the model of its config.json has none",
                    "use config.json and weights of one model, without quantization or adapters; "
                    "mixtures of experts and GPT-NeoX are saved under other names, which are not "
                    "read",
                )

        def read(name: str, shape: tuple[int, ...]) -> Tensor:
            path, file = files[name]
            try:
                found = file.get_tensor(name)
                values = checked_tensor(path, name, found, shape)
            except Exception as error:  # noqa: BLE001 - foreign bytes
                why = " ".join(str(error).split())
                raise WeightsError(
                    f"{why:.300}", "use config.json and weights from one complete save"
                ) from None
            # These values may be in the file's own memory, and the file may be rewritten.
            return values.clone() if values.data_ptr() == found.data_ptr() else values

        persistent = model.state_dict()
        for name in sorted(persistent.keys() & buffers.keys() & files.keys()):
            buffer = buffers[name]
            if not torch.equal(read(name, tuple(buffer.shape)), buffer.float()):
                raise WeightsError(
                    f"{folder} has other values for {name}, which is not trained, so no member "
                    "would get them",
                    "use a model without such a tensor",
                )
        for parameter, group in names.items():
            if parameter.requires_grad == frozen:
                continue
            name, shape = group[0], tuple(parameter.shape)
            there = [alias for alias in group if alias in files]
            if not there:
                raise WeightsError(
                    f"{folder} has no tensor {name}, which the model of its config.json has",
                    "use the whole model (if head and embedding are one, set tie_word_embeddings)",
                )
            weight = read(there[0], shape)
            for other in there[1:]:
                if not torch.equal(read(other, shape), weight):
                    raise WeightsError(
                        f"{other} and {there[0]} are one tensor in the model of {folder} but "
                        "differ in its files",
                        "set tie_word_embeddings to false in its config.json",
                    )
            yield weight


def write_frozen(
    path: Path, model_config: Mapping[str, Any], folder: Path | None, more: Path | None = None
) -> None:
    """Write the frozen tensors in their own dtypes, from a folder or with initial values.

    ``more`` and WeightsError: as in :func:`read_weights`. Raises OSError too.
    """
    model = build_meta_model(model_config)
    fixed = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    if folder is None:
        values: Iterable[Tensor] = initial_weights(model_config, seed=0, frozen=True)
    else:
        values = read_weights(folder, model_config, frozen=True, more=more)
    entries = [(name, each.dtype, tuple(each.shape)) for name, each in fixed]
    cast = (value.to(each.dtype) for value, (_, each) in zip(values, fixed, strict=True))
    write_safetensors(path, entries, cast)


def digest_weights(weights: Iterable[Tensor]) -> str:
    """Return the SHA-256 of float32 weights in schema order, in hex (``model.weights``)."""
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(weight.contiguous().numpy().data)
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    """Return the folder's weight files, as transformers chooses them. Raises WeightsError."""
    for name in (keys.MODEL, keys.ADAPTERS):
        if (folder / name).is_file():
            return [folder / name]
    if not (folder / INDEX).is_file():
        raise WeightsError(
            f"{folder} has neither {keys.MODEL} nor {INDEX}", "save it with save_pretrained"
        )
    try:
        content = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        paths = [folder / shard for shard in sorted({*content["weight_map"].values()})]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(
            f"{folder / INDEX} cannot be read ({type(error).__name__}: {error!s:.200})",
            "download it again",
        ) from None
    if lost := [path for path in paths if not path.is_file()]:
        raise WeightsError(
            f"{folder / INDEX} names {lost[0].name}, which is missing", "download it"
        )
    return paths
