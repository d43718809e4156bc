"""Where a model keeps its state: each buffer by its module's dict and its key, as a forward may put another tensor there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm


class TensorSlot(NamedTuple):
    """A module's buffers or parameters, and the key of one."""

    owner: dict[str, Tensor | None]
    key: str

    @property
    def tensor(self) -> Tensor | None:
        return self.owner.get(self.key)


def named_slots(model: nn.Module, registry: str = "_buffers") -> Iterator[tuple[str, nn.Module, TensorSlot]]:
    """Every place for a buffer (or for a parameter: `registry="_parameters"`), with its name and module."""
    for path, module in model.named_modules():
        owner: Any = getattr(module, registry)
        owner = owner if isinstance(owner, dict) else dict(owner.items())  # TorchScript has a view of its own
        for key in owner:
            yield f"{path}.{key}" if path else key, module, TensorSlot(owner, key)


def find_state_slots(model: nn.Module, *, include_parameters: bool = True) -> dict[str, TensorSlot]:
    """State that forward may change: buffers but those of batch norms, and whole parameters."""
    slots: dict[str, TensorSlot] = {}
    for registry in ("_buffers", "_parameters") if include_parameters else ("_buffers",):
        for name, module, slot in named_slots(model, registry):
            is_statistic = registry == "_buffers" and isinstance(module, _BatchNorm)
            if not is_statistic and not isinstance(slot.tensor, DTensor) and has_numbers(slot.tensor):
                slots[name] = slot
    return slots


def has_numbers(tensor: Tensor | None) -> TypeGuard[Tensor]:
    """Whether it holds numbers; flags and bytes are mostly a step's own masks."""
    if tensor is None:
        return False
    numeric = tensor.is_floating_point() or tensor.dtype in (torch.int16, torch.int32, torch.int64)
    return numeric and not tensor.is_meta


def make_writable(slot: TensorSlot) -> Tensor:
    """The tensor in a place; of one whose elements share memory (`expand`), a copy that takes its place."""
    tensor = slot.tensor
    assert tensor is not None
    if any(stride == 0 and length > 1 for length, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        slot.owner[slot.key] = tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
    return tensor
