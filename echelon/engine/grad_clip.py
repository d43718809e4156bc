"""The gradient norm of the whole model, and clipping by it, for parameters that are whole or sharded or some of each.

Not torch's clip_grad_norm_: it fails where plain and sharded parameters meet, and its local form clips by a shard's norm.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from echelon.engine.parallel.shard_layout import local
from echelon.engine.process_groups import Ranks


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients that exist; of a sparse one the rows that it holds."""
    return [_numbers(parameter) for parameter in parameters if parameter.grad is not None]


def _numbers(parameter: nn.Parameter) -> Tensor:
    grad = parameter.grad
    assert grad is not None
    if grad.is_sparse:
        parameter.grad = grad = grad.coalesce()
        return grad._values()  # not values(), which gives no view to write to
    return grad


@torch.no_grad()
def scale(grads: list[Tensor], factor: float | Tensor) -> None:
    """Multiply every gradient by `factor`, in place."""
    if grads:
        torch._foreach_mul_([local(grad) for grad in grads], factor)


@torch.no_grad()
def total_norm(grads: list[Tensor], copies: list[int], ranks: Ranks, *, alike: bool = True) -> Tensor:
    """The 2-norm over all gradients as if they were on one device; the same value on every rank.

    `copies`: for each gradient, how many ranks hold the same part of it; each brings its share. `alike`: all ranks hold parts of the
    same parameters, as the stages of a pipeline do not.
    """
    kinds: dict[int, list[Tensor]] = {}
    for grad, count in zip(grads, copies, strict=True):
        kinds.setdefault(count, []).append(local(grad))
    if alike and list(kinds) == [ranks.size]:  # whole on every rank: nothing to add up
        return _norm(kinds[ranks.size], ranks)
    shares = [_norm(values, ranks).square() / count for count, values in kinds.items()]
    # In one type on every rank: a stage without gradients has none of its own.
    nothing = torch.zeros((), dtype=torch.float64, device=ranks.device)
    mine = torch.stack(shares).sum() if shares else nothing
    return ranks.sum(mine.double()).sqrt().to(mine.dtype)


def _norm(tensors: list[Tensor], ranks: Ranks) -> Tensor:
    filled = [tensor for tensor in tensors if tensor.numel()]
    if not filled:
        return torch.zeros((), device=ranks.device)
    return torch.linalg.vector_norm(torch.stack([norm.to(filled[0].device) for norm in torch._foreach_norm(filled)]))


@torch.no_grad()
def clip(grads: list[Tensor], norm: Tensor, largest: float) -> None:
    """Scale the gradients so that their norm is at most `largest` (torch's formula, to the bit)."""
    scale(grads, shortening(norm, largest))


def shortening(norm: Tensor, largest: float) -> Tensor:
    """What gradients of this norm are multiplied by."""
    return torch.clamp(largest / (norm + 1e-6), max=1.0)
