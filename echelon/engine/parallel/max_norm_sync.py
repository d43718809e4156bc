"""Embeddings with `max_norm`: looking a row up shortens it for good, on the ranks whose samples use it.

All who shorten a row scale it by the same factor. So of each number the smallest magnitude on any rank is what one device has.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.engine.process_groups import Communicator


def max_norm_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights that lookups change."""
    embeddings = [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    ]
    return [module.weight for module in embeddings if isinstance(module.weight, nn.Parameter)]


@torch.no_grad()
def sync_max_norm_weights(weights: Iterable[Tensor], communicator: Communicator) -> None:
    """Every rank takes over what any of them has shortened."""
    for weight in weights if communicator.size > 1 else ():
        min_magnitude = weight.abs()
        dist.all_reduce(min_magnitude, dist.ReduceOp.MIN, group=communicator.process_group)
        weight.copy_(min_magnitude.copysign(weight))
