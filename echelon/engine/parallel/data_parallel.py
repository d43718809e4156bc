"""Data parallelism: each rank computes other samples of the global batch, and gradients are summed over the replicas.

    zero=0         GradientAllReduce   flat buckets, all-reduced while backward runs (gradient_allreduce.py)
    zero=1-3       fully_shard         reduce-scatter to the owner of each shard (fsdp.py)
    server plans   ServerBackend       pushed to parameter servers (engine/backends)

Losses are weighted by samples before backward, so every one of them sums. The loss's own parameters, and parameters that tensor-parallel ranks
or pipeline stages use in part, are few: `sum_gradients` reduces them after backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.engine.parallel.shard_layout import to_local
from echelon.engine.process_groups import Communicator


@torch.no_grad()
def sum_gradients(parameters: Sequence[nn.Parameter], communicator: Communicator) -> None:
    """Sum the gradients of parameters that each rank used in part; one that no rank used keeps none."""
    for _, same_dtype in groupby(sorted(parameters, key=_dtype_name), key=_dtype_name):
        group = list(same_dtype)
        unused = [index for index, parameter in enumerate(group) if parameter.grad is None]
        is_used = torch.ones(len(group))
        for index in unused:
            is_used[index], group[index].grad = 0.0, torch.zeros_like(group[index])
        grads = [to_local(parameter.grad) for parameter in group]  # type: ignore[arg-type]
        flat = communicator.all_reduce(torch.cat([*(grad.reshape(-1) for grad in grads), is_used.to(grads[0])]))
        *summed_grads, use_counts = flat.split([*(grad.numel() for grad in grads), len(group)])
        for grad, summed_grad in zip(grads, summed_grads, strict=True):
            grad.copy_(summed_grad.view_as(grad))
        counts = use_counts.tolist() if unused else []  # an accelerator is waited for only where needed
        for index in unused:
            group[index].grad = group[index].grad if counts[index] else None


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype)


def max_norm_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights of embeddings with `max_norm`."""
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    weights = [embedding.weight for embedding in embeddings if embedding.max_norm is not None]
    return [weight for weight in weights if isinstance(weight, nn.Parameter)]


@torch.no_grad()
def sync_max_norm_weights(weights: Iterable[Tensor], communicator: Communicator) -> None:
    """Give every rank the rows that a lookup with `max_norm` has shortened on any: all scale a row by the same factor, so the smallest magnitude
    of each element is the value on one device."""
    for weight in weights if communicator.size > 1 else ():
        min_magnitude = weight.abs()
        dist.all_reduce(min_magnitude, dist.ReduceOp.MIN, group=communicator.process_group)
        weight.copy_(min_magnitude.copysign(weight))
