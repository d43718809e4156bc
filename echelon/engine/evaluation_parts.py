"""Outputs and batches of some samples of an evaluation: cut, joined, moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echelon.tree import map_tensors, tree_leaves, tree_map, tree_tensors


@dataclass(frozen=True, slots=True)
class EvaluationPart:
    """Output and batch of some samples."""

    output: Any
    batch: Any
    sample_count: int


class UnjoinableError(Exception):
    """Outputs or batches of several parts do not fit together."""


def _is_row_list(value: Any) -> bool:
    """Whether it is a list without tensors, which has one item per sample."""
    is_list = isinstance(value, list | tuple) and not hasattr(value, "_fields")
    return is_list and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def move_part(part: EvaluationPart, device: torch.device) -> EvaluationPart:
    """The same on another device, without graphs."""
    output, batch = (map_tensors(lambda t: t.detach().to(device), tree) for tree in (part.output, part.batch))
    return EvaluationPart(output, batch, part.sample_count)


def widen_outputs(part: EvaluationPart) -> EvaluationPart:
    """With outputs in float32 at least: half precision rounds means by more than parts differ."""

    def widen(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor

    return EvaluationPart(map_tensors(widen, part.output), part.batch, part.sample_count)


def part_bytes(part: EvaluationPart) -> int:
    """Bytes of its tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tree_tensors((part.output, part.batch)))


def slice_part(part: EvaluationPart, start: int, stop: int) -> EvaluationPart:
    """Samples `start` to `stop`: what has rows for each sample is cut, the rest stays."""
    count = part.sample_count

    def slice_leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            has_rows = value.dim() > 0 and count > 0 and value.shape[0] and value.shape[0] % count == 0
            rows = value.shape[0] // count if has_rows else 0
            return value[start * rows : stop * rows] if has_rows else value
        return value[start:stop] if isinstance(value, list | tuple) and len(value) == count else value

    output, batch = (tree_map(slice_leaf, tree, is_leaf=_is_row_list) for tree in (part.output, part.batch))
    return EvaluationPart(output, batch, stop - start)


def join_parts(parts: Sequence[EvaluationPart]) -> EvaluationPart:
    """All samples of these parts as one."""
    sample_counts = [part.sample_count for part in parts]

    def join_leaves(*values: Any) -> Any:
        if isinstance(values[0], Tensor):
            return _join_tensors(values, sample_counts)
        for kind in (list, tuple):
            if all(isinstance(value, kind) for value in values):
                return kind(item for value in values for item in value)
        return values[0]

    try:
        output = tree_map(join_leaves, *(part.output for part in parts), is_leaf=_is_row_list)
        batch = tree_map(join_leaves, *(part.batch for part in parts), is_leaf=_is_row_list)
    except (ValueError, TypeError, AttributeError) as error:
        raise UnjoinableError(f"their structures differ ({error})") from error
    return EvaluationPart(output, batch, sum(sample_counts))


def _join_tensors(values: Sequence[Tensor], sample_counts: Sequence[int]) -> Tensor:
    first = values[0]
    if first.dim() == 0:  # a loss: the weighted mean
        if not first.is_floating_point():
            return first
        weights = torch.tensor(sample_counts, dtype=torch.float64, device=first.device)
        mean = (torch.stack([value.double() for value in values]) * weights).sum() / weights.sum()
        return mean.to(first.dtype)
    if any(value.shape[1:] != first.shape[1:] for value in values):
        shapes = sorted({tuple(value.shape) for value in values})
        raise UnjoinableError(f"a tensor has the shapes {', '.join(map(str, shapes[:3]))} in different batches")
    if any(value.shape[0] % count for value, count in zip(values, sample_counts, strict=True)):
        return first  # it has no rows of samples: weights of classes, a bias
    return torch.cat(list(values))
