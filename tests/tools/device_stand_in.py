"""Tensors that behave like a GPU's where there is none.

A :class:`OnDevice` reports the device ``cuda:0``, gives no numpy array, and meets host tensors only
in copies: what would raise on a GPU raises here. Its numbers are kept in a host tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map


class OnDevice(Tensor):
    """``host`` as it would be on a GPU."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), dtype=host.dtype, device="cuda:0"
        )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        if not copies and any(not isinstance(x, OnDevice) and x.dim() for x in tensors):
            raise RuntimeError(f"{func}: tensors on cuda:0 and on the CPU")
        wanted = kwargs.pop("device", None)
        host = func(*tree_map(_host, args), **tree_map(_host, kwargs))
        if func is torch.ops.aten.copy_.default:
            return args[0]
        stays = wanted is None or torch.device(wanted).type == "cuda"
        return tree_map(lambda x: OnDevice(x) if isinstance(x, Tensor) and stays else x, host)


def _host(value: Any) -> Any:
    return value.host if isinstance(value, OnDevice) else value
