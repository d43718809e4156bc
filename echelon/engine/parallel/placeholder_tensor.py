"""Placeholders for tensors of other ranks' stages: name and shape without values, and an error for code that computes with them.

A meta tensor is not enough: torch's CPU kernels accept one next to real tensors and return uninitialized memory (2.13: F.linear, matmul).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.errors import PlanError


def make_placeholder(tensor: Tensor) -> Tensor:
    """A placeholder for `tensor`: a parameter for a parameter."""
    with torch.no_grad():
        empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return _PlaceholderParameter(empty.as_subclass(Tensor), tensor.requires_grad)
    return empty.as_subclass(_PlaceholderBuffer)


class _PlaceholderBuffer(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if any(isinstance(leaf, Tensor) and not leaf.is_meta for leaf in tree_leaves((args, kwargs))):
                raise PlanError(
                    "pp: forward computes with a weight or buffer of a module that another stage holds, in a way that was not seen when the model "
                    "was split into stages; read it by calling its module, or use pp=1 (dp with zero=3 also shares the memory)"
                )
            out = func(*args, **(kwargs or {}))
            # Views (`.T`) are placeholders too.
            return out.as_subclass(_PlaceholderBuffer) if type(out) is Tensor and out.is_meta else out


class _PlaceholderParameter(nn.Parameter):
    __torch_function__ = _PlaceholderBuffer.__torch_function__
