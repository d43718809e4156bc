"""The gradient norm of the whole model, and clipping by it, for whole and sharded parameters together.

Not torch's clip_grad_norm_: it fails where plain and sharded parameters meet, and its local form clips by a shard's norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from echelon.engine.parallel.shard_layout import to_local
from echelon.engine.process_groups import WorldCommunicator


def gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients that exist; of a sparse one its rows."""
    grads = []
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
            grads.append(parameter.grad._values())  # not values(), which gives no view to write to
        elif parameter.grad is not None:
            grads.append(parameter.grad)
    return grads


@torch.no_grad()
def scale_gradients(grads: list[Tensor], factor: float | Tensor) -> None:
    """Multiply every gradient by `factor`, in place."""
    if grads:
        torch._foreach_mul_([to_local(grad) for grad in grads], factor)


@torch.no_grad()
def total_norm(
    grads: Sequence[Tensor], replica_counts: Sequence[int], ranks: WorldCommunicator, *, same_parameters: bool = True
) -> Tensor:
    """The 2-norm over all gradients as on one device, equal on every rank. `replica_counts`: how many ranks hold the same part of each.
    `same_parameters`: all ranks hold parts of the same parameters, as the stages of a pipeline do not."""
    gradients_by_count: dict[int, list[Tensor]] = {}
    for grad, replica_count in zip(grads, replica_counts, strict=True):
        gradients_by_count.setdefault(replica_count, []).append(to_local(grad))
    if same_parameters and list(gradients_by_count) == [ranks.size]:  # whole on every rank: nothing to sum
        return _local_norm(gradients_by_count[ranks.size], ranks)
    squared_norms = [_local_norm(grads, ranks).square() / count for count, grads in gradients_by_count.items()]
    # In one dtype on every rank, also on a stage without gradients.
    zero = torch.zeros((), dtype=torch.float64, device=ranks.device)
    local_sum = torch.stack(squared_norms).sum() if squared_norms else zero
    return ranks.all_reduce(local_sum.double()).sqrt().to(local_sum.dtype)


def _local_norm(tensors: list[Tensor], ranks: WorldCommunicator) -> Tensor:
    nonempty = [tensor for tensor in tensors if tensor.numel()]
    if not nonempty:
        return torch.zeros((), device=ranks.device)
    norms = torch._foreach_norm(nonempty)
    return torch.linalg.vector_norm(torch.stack([norm.to(nonempty[0].device) for norm in norms]))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor by which clipping scales gradients of this norm (torch's formula, to the bit)."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
