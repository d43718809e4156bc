"""Read what an optimizer's parameter group is set to, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

#: Entries of a parameter group that name live parameters.
_PARAMETER_KEYS = ("params", "param_names")
#: How a group's step is computed, not what: the running plan chooses the kernels, and another plan may have saved.
IMPLEMENTATION_KEYS = ("fused", "foreach", "capturable", "differentiable")


def is_plain_json(value: Any) -> bool:
    """Whether JSON holds it as it is."""
    if isinstance(value, list | tuple):
        return all(map(is_plain_json, value))
    return value is None or isinstance(value, str | int | float | bool)


def read_group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group, without its parameters and without how its step is computed."""
    return {
        key: _to_plain(value) for key, value in group.items() if key not in (*_PARAMETER_KEYS, *IMPLEMENTATION_KEYS)
    }


def _to_plain(value: Any) -> Any:
    """A setting as a plain value: a tensor of one number (a learning rate) as its number."""
    if type(value) in (list, tuple):
        return type(value)(_to_plain(item) for item in value)
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
