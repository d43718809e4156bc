"""Numbers that the host reads from sharded tensors are those of the whole tensor.

`parameter.norm().item()` of a sharded parameter is a sum that is still spread over the ranks when `.item()`, `float()` or `bool()` reads
it, and torch 2.13 returns this rank's part: every rank goes on with another number, without an error. Here such a read adds the parts up
first. It is a collective then: every rank that holds a shard must read, as it must compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

_READ = torch.ops.aten._local_scalar_dense.default


class _WholeRead:
    """Handles torch's host reads of sharded tensors while runs are open that want it."""

    def __init__(self) -> None:
        self.users = 0

    def __call__(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (value,) = args
        if all(isinstance(placement, Replicate) for placement in value.placements):
            return op(value.to_local())
        return op(value.full_tensor())


def read_whole() -> Callable[[], None]:
    """Make host reads of sharded tensors collective; returns what undoes it. Private names: torch has no public way in."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    found = handlers.get(_READ)
    handler = found if isinstance(found, _WholeRead) else _WholeRead()
    handlers[_READ] = handler
    handler.users += 1

    def undo() -> None:
        handler.users -= 1
        if not handler.users and handlers.get(_READ) is handler:
            del handlers[_READ]

    return undo
