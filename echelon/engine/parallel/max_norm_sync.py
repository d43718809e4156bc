"""Embeddings with `max_norm`: looking a row up shortens it for good, on the ranks whose samples use it.

All who shorten a row scale it by the same factor. So of each number the smallest magnitude on any rank is what one device has.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.engine.process_groups import Group


def shortened(model: nn.Module) -> list[nn.Parameter]:
    """The weights that lookups change."""
    tables = [
        each
        for each in model.modules()
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm is not None
    ]
    return [each.weight for each in tables if isinstance(each.weight, nn.Parameter)]


@torch.no_grad()
def agree(weights: Iterable[Tensor], ranks: Group) -> None:
    """Every rank takes over what any of them has shortened."""
    for weight in weights if ranks.size > 1 else ():
        least = weight.abs()
        dist.all_reduce(least, dist.ReduceOp.MIN, group=ranks.group)
        weight.copy_(least.copysign(weight))
