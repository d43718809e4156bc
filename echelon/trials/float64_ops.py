"""Let models run in float64 that cannot by themselves: operators without a float64 kernel, TorchScript functions with casts."""

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
    ends = [] if offs is None else offs.tolist()
    groups = list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []
    if offs is None:
        output = torch.bmm(mat_a, mat_b)
    elif mat_a.ndim == 2 and mat_b.ndim == 3:  # groups of rows of a
        parts = [mat_a[start:end] @ mat_b[group] for group, (start, end) in enumerate(groups)]
        zero_rows = mat_a.new_zeros(len(mat_a) - ends[-1], mat_b.shape[-1])
        output = torch.cat([*parts, zero_rows])
    elif mat_a.ndim == 3:  # of columns of b
        output = torch.cat([mat_a[group] @ mat_b[:, start:end] for group, (start, end) in enumerate(groups)], -1)
    else:  # of the dim that both share
        output = torch.stack([mat_a[:, start:end] @ mat_b[start:end] for start, end in groups])
    return output if bias is None else output + bias


_GROUPED_MM_OPS = [getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)]


def get_float64_replacement(func: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """What to call for `func`: an equivalent where it has no float64 kernel."""
    has_kernel = func not in _GROUPED_MM_OPS or not isinstance(args[0], Tensor) or args[0].dtype != torch.float64
    return func if has_kernel else _grouped_mm


@contextlib.contextmanager
def script_functions_as_python() -> Iterator[None]:
    """Run functions under `@torch.jit.script` as plain Python: modes do not see into them, and their optimizer changes the rounding of
    later calls."""
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
    """Restart Keras's numbering of layers, so that a rebuilt model has the same parameter names."""
    import sys

    state = sys.modules.get("keras.src.backend.common.global_state")
    if state is not None:
        state.set_global_attribute("object_name_uids", None)
