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
        made = torch.bmm(mat_a, mat_b)
        return made if bias is None else made + bias
    ends = offs.tolist()
    groups = list(zip([0, *ends[:-1]], ends, strict=True))
    if mat_a.ndim == 2 and mat_b.ndim == 3:  # rows of a
        parts = [mat_a[start:end] @ mat_b[at] for at, (start, end) in enumerate(groups)]
        rest = mat_a.new_zeros(len(mat_a) - ends[-1], mat_b.shape[-1])
        made = torch.cat([*parts, rest])
    elif mat_a.ndim == 3:  # columns of b
        made = torch.cat([mat_a[at] @ mat_b[:, start:end] for at, (start, end) in enumerate(groups)], -1)
    else:  # what both share
        made = torch.stack([mat_a[:, start:end] @ mat_b[start:end] for start, end in groups])
    return made if bias is None else made + bias


#: Operator without a float64 kernel -> the same by others.
SWAPPED: dict[Callable[..., Any], Callable[..., Any]] = {
    operator: _grouped_mm
    for operator in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
    if operator is not None
}


def swapped(func: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """What to call for `func`: in float64 an operator that has it."""
    wide = func in SWAPPED and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
    return SWAPPED[func] if wide else func


@contextlib.contextmanager
def plain_script_functions() -> Iterator[None]:
    """Functions under `@torch.jit.script` run as plain Python: modes do not see into them, and their own optimizer rounds the first
    calls differently from later ones."""
    kind: Any = torch._C.ScriptFunction
    compiled = kind.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        source = getattr(self, "_torchdynamo_inline", None)  # the function that was compiled
        return compiled(self, *args, **kwargs) if source is None else source(*args, **kwargs)

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = compiled


def restart_names() -> None:
    """Have Keras number its layers from the start, so that a model that is built again has the same parameter names."""
    import sys

    state = sys.modules.get("keras.src.backend.common.global_state")
    if state is not None:
        state.set_global_attribute("object_name_uids", None)
