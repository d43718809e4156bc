"""What makes a model run in float64 that does not by itself: operators without a float64 kernel, and TorchScript functions with casts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _grouped_mm(
    mat_a: Tensor, mat_b: Tensor, *, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """`torch.nn.functional.grouped_mm` by one product for each group; `offs`: where the groups end."""
    if offs is None:
        output = torch.bmm(mat_a, mat_b)
        return output if bias is None else output + bias
    ends = offs.tolist()
    groups = list(zip([0, *ends[:-1]], ends, strict=True))
    if mat_a.ndim == 2 and mat_b.ndim == 3:  # rows of a
        parts = [mat_a[start:end] @ mat_b[group] for group, (start, end) in enumerate(groups)]
        zero_rows = mat_a.new_zeros(len(mat_a) - ends[-1], mat_b.shape[-1])
        output = torch.cat([*parts, zero_rows])
    elif mat_a.ndim == 3:  # columns of b
        output = torch.cat([mat_a[group] @ mat_b[:, start:end] for group, (start, end) in enumerate(groups)], -1)
    else:  # what both share
        output = torch.stack([mat_a[:, start:end] @ mat_b[start:end] for start, end in groups])
    return output if bias is None else output + bias


#: Operator without a float64 kernel -> the same by others.
FLOAT64_REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    operator: _grouped_mm
    for operator in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
    if operator is not None
}


def get_float64_replacement(func: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """What to call for `func`: in float64 an operator that has it."""
    needs_replacement = func in FLOAT64_REPLACEMENTS and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
    return FLOAT64_REPLACEMENTS[func] if needs_replacement else func


@contextlib.contextmanager
def script_functions_as_python() -> Iterator[None]:
    """Functions under `@torch.jit.script` run as plain Python: modes do not see into them, and their own optimizer rounds the first
    calls differently from later ones."""
    script_function_class: Any = torch._C.ScriptFunction
    original_call = script_function_class.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        python_function = getattr(self, "_torchdynamo_inline", None)  # the function that was compiled
        return original_call(self, *args, **kwargs) if python_function is None else python_function(*args, **kwargs)

    script_function_class.__call__ = call
    try:
        yield
    finally:
        script_function_class.__call__ = original_call


def reset_keras_layer_names() -> None:
    """Have Keras number its layers from the start, so that a model that is built again has the same parameter names."""
    import sys

    state = sys.modules.get("keras.src.backend.common.global_state")
    if state is not None:
        state.set_global_attribute("object_name_uids", None)
