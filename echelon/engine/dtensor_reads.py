"""Make host reads of sharded tensors return the whole tensor's number.

In torch 2.13 `.item()`, `float()` or `bool()` of `parameter.norm()` returns this rank's part of a sum over a sharded parameter. With this patch
such a read sums the parts first: a collective, which every rank that holds a shard must call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

_LOCAL_SCALAR_OP = torch.ops.aten._local_scalar_dense.default


class _FullTensorRead:
    def __init__(self) -> None:
        self.user_count = 0

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (dtensor,) = args
        if all(isinstance(placement, Replicate) for placement in dtensor.placements):
            return op(dtensor.to_local())
        return op(dtensor.full_tensor())


def patch_host_reads() -> Callable[[], None]:
    """Make host reads of sharded tensors collective; returns what undoes it. Private names: torch has no public way in."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    installed = handlers.get(_LOCAL_SCALAR_OP)
    handler = installed if isinstance(installed, _FullTensorRead) else _FullTensorRead()
    handlers[_LOCAL_SCALAR_OP] = handler
    handler.user_count += 1

    def undo() -> None:
        handler.user_count -= 1
        if not handler.user_count and handlers.get(_LOCAL_SCALAR_OP) is handler:
            del handlers[_LOCAL_SCALAR_OP]

    return undo
