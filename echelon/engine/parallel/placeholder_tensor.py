"""Tensors of other ranks' stages: names and shapes without numbers, which nobody can compute with unseen.

torch's kernels on the CPU take a meta tensor beside real ones and return memory that nobody wrote (2.13: F.linear, matmul). These raise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.errors import PlanError


def make_placeholder(tensor: Tensor) -> Tensor:
    """`tensor` without its numbers; a parameter stays one."""
    with torch.no_grad():
        empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return _PlaceholderParameter(empty.as_subclass(Tensor), tensor.requires_grad)
    return empty.as_subclass(_PlaceholderBuffer)


def _run_on_placeholders(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        if any(isinstance(leaf, Tensor) and not leaf.is_meta for leaf in tree_leaves((args, kwargs))):
            raise PlanError(
                "pp: forward computes with a weight or buffer of a module that another stage holds, and how it gets at it was not seen when "
                "the model was cut; read it by calling its module, or use pp=1 (dp with zero=3 also shares the memory)"
            )
        out = func(*args, **(kwargs or {}))
        # `.T` and the like are absent as well.
        return out.as_subclass(_PlaceholderBuffer) if type(out) is Tensor and out.is_meta else out


class _PlaceholderParameter(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run_on_placeholders(func, args, kwargs)


class _PlaceholderBuffer(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run_on_placeholders(func, args, kwargs)
