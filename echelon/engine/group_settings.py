"""Settings of an optimizer's parameter groups as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

_PARAMETER_KEYS = ("params", "param_names")
#: How a step is computed, not what: each plan chooses its own kernels.
IMPLEMENTATION_KEYS = ("fused", "foreach", "capturable", "differentiable")


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """An optimizer's parameters, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def read_group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings, without its parameters and without how its step is computed."""
    other_keys = (*_PARAMETER_KEYS, *IMPLEMENTATION_KEYS)
    return {key: _to_plain(value) for key, value in group.items() if key not in other_keys}


def _to_plain(value: Any) -> Any:
    """A setting with its tensors of one element (a learning rate) as numbers."""
    if type(value) in (list, tuple):
        return type(value)(_to_plain(item) for item in value)
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def is_plain_json(value: Any) -> bool:
    """Whether JSON can hold a value as it is."""
    if isinstance(value, list | tuple):
        return all(map(is_plain_json, value))
    return value is None or isinstance(value, str | int | float | bool)
