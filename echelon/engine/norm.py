"""The gradient norm of the whole model, and clipping by it, for parameters that are whole or sharded or some of each.

Not torch's clip_grad_norm_: it fails where plain and sharded parameters meet, and its local form clips by a shard's norm.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from echelon.engine.ranks import Ranks


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients that exist."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@torch.no_grad()
def scale(grads: list[Tensor], factor: float | Tensor) -> None:
    """Multiply every gradient by `factor`, in place."""
    if grads:
        torch._foreach_mul_([_local(grad) for grad in grads], factor)


@torch.no_grad()
def total_norm(grads: list[Tensor], ranks: Ranks) -> Tensor:
    """The 2-norm over all gradients as if they were on one device; the same value on every rank."""
    whole = [grad for grad in grads if not isinstance(grad, DTensor)]
    parts = [grad.to_local() for grad in grads if isinstance(grad, DTensor)]
    squares = _norm(whole, ranks).square()
    if parts:
        squares = squares + ranks.sum(_norm(parts, ranks).square())
    return squares.sqrt()


def _norm(tensors: list[Tensor], ranks: Ranks) -> Tensor:
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.zeros((), device=ranks.device)
    return torch.linalg.vector_norm(torch.stack([norm.to(filled[0].device) for norm in torch._foreach_norm(filled)]))


@torch.no_grad()
def clip(grads: list[Tensor], norm: Tensor, largest: float) -> None:
    """Scale the gradients so that their norm is at most `largest` (torch's formula, to the bit)."""
    scale(grads, torch.clamp(largest / (norm + 1e-6), max=1.0))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
