"""Layers that the tensor axis supports: matrix products, and modules that work channel by channel."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase

from echelon.trials.trial_run import Forward

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer, torch's or transformers'."""
    return (type(module) is nn.Linear or is_hf_conv1d(module)) and is_unmodified(module)


def is_hf_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_unmodified(module: nn.Module) -> bool:
    """Whether a module computes as its class does, with its own weight and bias: no replaced forward, no weight computed from other parameters
    (`nn.utils.weight_norm`)."""
    parameters = module._parameters
    holds_own_parameters = all(parameters.get(name) is getattr(module, name, None) for name in ("weight", "bias"))
    return holds_own_parameters and parameters.get("weight") is not None and "forward" not in vars(module)


def is_matmul_layer(module: nn.Module) -> bool:
    """Whether it is a linear layer or an ungrouped convolution; subclasses may compute something else."""
    return is_linear(module) or (type(module) in CONVOLUTIONS and bool(module.groups == 1) and is_unmodified(module))


def get_channel_attributes(module: Any) -> tuple[str, ...] | None:
    """The attributes that count the channels of a channel-wise module; None: it is not known to be one."""
    if isinstance(module, _NormBase):
        return ("num_features",)
    if type(module) is nn.GroupNorm:
        return "num_groups", "num_channels"
    if type(module) in CONVOLUTIONS and module.groups == module.in_channels == module.out_channels:
        return "groups", "in_channels", "out_channels"
    return () if type(module) is nn.PReLU and module.num_parameters > 1 else None


def count_outputs(module: Any) -> int:
    """Outputs of a linear layer or convolution."""
    return int(next(getattr(module, name) for name in ("out_features", "out_channels", "nf") if hasattr(module, name)))


def count_inputs(module: Any) -> int:
    """Inputs of a linear layer or convolution; 0: it is neither."""
    names = ("in_features", "in_channels", "nx")
    return int(next((getattr(module, name) for name in names if hasattr(module, name)), 0))


def get_output_first_weight(module: Any) -> Tensor:
    """The weight with its outputs first."""
    weight: Tensor = module.weight
    return weight.t() if is_hf_conv1d(module) else weight


def get_matmul(module: Any) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """The module's function (x, weight, bias) -> output, where the weight has its outputs first."""
    return F.linear if isinstance(module, nn.Linear) or is_hf_conv1d(module) else module._conv_forward


def accept_input_by_name(module: nn.Module, forward: Callable[..., Any]) -> Forward:
    """`forward`, whose first argument may also be passed by the name that the module's class gives it."""
    input_name = list(inspect.signature(type(module).forward).parameters)[1]

    def call_with_input(*args: Any, **kwargs: Any) -> Any:
        return forward(kwargs.pop(input_name), *args, **kwargs) if input_name in kwargs else forward(*args, **kwargs)

    return call_with_input
