"""Gradients of some rows of a table: their ids and, in the same order, one gradient each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from echelon.engine.process_groups import Communicator

RowGradients = tuple[np.ndarray, Tensor]


def sum_duplicate_rows(row_gradients: Sequence[RowGradients]) -> RowGradients:
    """The sum over equal ids, in the order of the ids."""
    ids, positions = np.unique(np.concatenate([ids for ids, _ in row_gradients]), return_inverse=True)
    gradients = torch.cat([gradients for _, gradients in row_gradients])
    summed = torch.zeros((len(ids), gradients.shape[1]), dtype=gradients.dtype, device=gradients.device)
    return ids, summed.index_add_(0, torch.from_numpy(positions.reshape(-1)).to(gradients.device), gradients)


def gather_rows(communicator: Communicator, ids: np.ndarray, gradients: Tensor) -> list[RowGradients]:
    """Every rank's rows, in rank order."""
    if communicator.size == 1:
        return [(ids, gradients)]
    counts = communicator.all_gather_object(len(ids))
    padded_ids = torch.zeros(max(counts), dtype=torch.int64, device=gradients.device)
    padded_ids[: len(ids)] = torch.from_numpy(ids).to(gradients.device)
    padded_gradients = gradients.new_zeros((max(counts), gradients.shape[1]))
    padded_gradients[: len(ids)] = gradients
    all_ids = [torch.empty_like(padded_ids) for _ in counts]
    all_gradients = [torch.empty_like(padded_gradients) for _ in counts]
    dist.all_gather(all_ids, padded_ids, group=communicator.process_group)
    dist.all_gather(all_gradients, padded_gradients, group=communicator.process_group)
    return [
        (rank_ids[:count].cpu().numpy(), rank_gradients[:count])
        for count, rank_ids, rank_gradients in zip(counts, all_ids, all_gradients, strict=True)
    ]
