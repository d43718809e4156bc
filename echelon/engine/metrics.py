"""Metrics over a whole evaluation set: means are added up batch by batch, others are computed once over all outputs.

A metric gives (sum, count), or one number. Of a small set such a number is computed once, over all outputs and batches, joined in the order of the
samples. Of a larger one it is tried whether it is a mean over samples: a mean over all rows is the weighted mean of the means over any parts of them.
AUC, F1, perplexity or a correlation are not; for these the whole set is joined, as far as memory allows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from echelon.engine.parallel.vocab_parallel import ShardedLogits
from echelon.errors import JobError
from echelon.loss_counts import ModelOutputMarker, repeat_samples
from echelon.trials.random_state import preserve_random_states

#: How a metric is added up: pairs and means batch by batch, others over the whole set.
MetricKind = Literal["pair", "mean", "whole"]
#: Relative difference between the mean over rows and over their parts that rounding explains (float32).
_ROUNDING_TOLERANCE = 2e-5
#: Parts that rows are cut into, as fractions: unequal, and some of few rows.
_SPLIT_FRACTIONS = ((0.34,), (0.1, 0.62), (0.9,))


@dataclass(frozen=True, slots=True)
class EvaluationPart:
    """Output and batch of some samples."""

    output: Any
    batch: Any
    sample_count: int


class UnjoinableError(Exception):
    """Outputs or batches of several parts do not fit together."""


Metric = Callable[[Any, Any], Any]


def classify_metric(metric: Metric, parts: Sequence[EvaluationPart]) -> MetricKind | None:
    """What kind of metric it is, seen on these parts; None: they do not tell.

    Real outputs may hide the difference: where every prediction is right, F1 is 1 for all rows and for every part of them. So the same is
    tried with shaken outputs, on which a mean stays a mean. Where the value never varies (F1 without a positive sample) nothing is known.
    """
    widened_parts = [widen_outputs(part) for part in parts if part.sample_count]
    if widened_parts and _is_nondeterministic(metric, widened_parts[0]):
        return "whole"  # it keeps state: it is called once per evaluation, whatever the plan
    trials = [(part, subparts) for part in widened_parts for subparts in _split_part(part)]
    if len(widened_parts) > 1:
        with contextlib.suppress(UnjoinableError):
            joined = join_parts(widened_parts)
            trials += [(joined, widened_parts), *((joined, subparts) for subparts in _split_part(joined))]
    has_varied = False
    for part, subparts in trials:
        outcome = _compare_with_mean(metric, part, subparts)
        if isinstance(outcome, str):
            return outcome
        has_varied |= outcome
    generator = torch.Generator().manual_seed(0)
    for _, subparts in trials:
        perturbed = [_perturb(subpart, generator) for subpart in subparts]
        with contextlib.suppress(UnjoinableError):
            joined = join_parts(perturbed)
            # Outputs that no model gives may be outside what the metric takes.
            if _is_finite_float(_try_metric(metric, joined)):
                outcome = _compare_with_mean(metric, joined, perturbed)
                if isinstance(outcome, str):
                    return outcome
                has_varied |= outcome
    return "mean" if has_varied else None


def _compare_with_mean(
    metric: Metric, part: EvaluationPart, subparts: Sequence[EvaluationPart]
) -> Literal["pair", "whole"] | bool:
    """ "whole" where it is no mean over these pieces; else whether they have different values, so that this says something."""
    whole_value = _try_metric(metric, part)
    if isinstance(whole_value, tuple):
        return "pair"
    values = [_try_metric(metric, subpart) for subpart in subparts]
    if not _is_finite_float(whole_value) or not all(map(_is_finite_float, values)):
        return "whole"
    weighted_sum = sum(value * subpart.sample_count for value, subpart in zip(values, subparts, strict=True))  # type: ignore[operator, misc]
    mean = weighted_sum / sum(subpart.sample_count for subpart in subparts)
    largest = max(abs(value) for value in (whole_value, *values))  # type: ignore[arg-type]
    if not math.isclose(mean, whole_value, rel_tol=0.0, abs_tol=_ROUNDING_TOLERANCE * largest + 1e-9):  # type: ignore[arg-type]
        return "whole"
    return any(value != whole_value for value in values)


def is_mean(metric: Metric, previous: EvaluationPart | None, part: EvaluationPart) -> bool:
    """Whether the metric of two batches is the weighted mean of theirs; of batches that do not fit together, of two pieces of the second."""
    with contextlib.suppress(UnjoinableError):
        if previous is not None:
            subparts = [widen_outputs(previous), widen_outputs(part)]
            return _compare_with_mean(metric, join_parts(subparts), subparts) != "whole"
    return all(
        _compare_with_mean(metric, widen_outputs(part), subparts) != "whole"
        for subparts in _split_part(widen_outputs(part))[:1]
    )


def pair_adds_up(metric: Metric, part: EvaluationPart) -> bool:
    """Whether the (sum, count) of a part is twice as much where every sample is given twice; also where that cannot be tried."""
    once = _as_floats(_try_metric(metric, part))
    repeated = repeat_samples((part.output, part.batch), part.sample_count, 2)
    twice = (
        None
        if repeated is None
        else _as_floats(_try_metric(metric, EvaluationPart(repeated[0], repeated[1], 2 * part.sample_count)))
    )
    if once is None or twice is None or len(once) != len(twice):
        return True
    return all(
        math.isclose(2 * one, two, rel_tol=_ROUNDING_TOLERANCE, abs_tol=1e-9)
        for one, two in zip(once, twice, strict=True)
    )


def _is_nondeterministic(metric: Metric, part: EvaluationPart) -> bool:
    """Whether two calls with the same arguments and the same random numbers return different values."""
    with preserve_random_states():
        first = _as_floats(_try_metric(metric, part))
    with preserve_random_states():
        second = _as_floats(_try_metric(metric, part))
    if first is None or second is None or len(first) != len(second):
        return False
    return not np.allclose(first, second, rtol=_ROUNDING_TOLERANCE, atol=1e-9, equal_nan=True)


def _as_floats(value: Any) -> list[float] | None:
    try:
        return [float(number) for number in (value if isinstance(value, tuple) else (value,))]
    except (TypeError, ValueError):  # the metric failed, or returned tuples of something else
        return None


def _is_finite_float(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _perturb(part: EvaluationPart, generator: torch.Generator) -> EvaluationPart:
    """With its outputs in another order, and numbers among them changed."""
    order = torch.randperm(part.sample_count, generator=generator)

    def perturb_leaf(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.numel():
            return value
        if value.dim() and value.shape[0] == part.sample_count:
            value = value[order.to(value.device)]
        if not value.is_floating_point():
            return value
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
        return value + noise * value.abs().mean().clamp(min=0.1)

    return EvaluationPart(_map_structure(perturb_leaf, part.output), part.batch, part.sample_count)


def _split_part(part: EvaluationPart) -> list[list[EvaluationPart]]:
    splits = []
    for fractions in _SPLIT_FRACTIONS:
        inner_bounds = sorted(
            {min(max(round(fraction * part.sample_count), 1), part.sample_count - 1) for fraction in fractions}
        )
        bounds = [0, *inner_bounds, part.sample_count]
        if part.sample_count > 1:
            splits.append([slice_part(part, start, stop) for start, stop in itertools.pairwise(bounds)])
    return splits


def _try_metric(metric: Metric, part: EvaluationPart) -> float | tuple[Any, Any] | None:
    """What it gives; None where it fails, as a metric may on a part that has one class only."""
    try:
        value = metric(*clone_tree((part.output, part.batch)))  # it may edit them
        return value if isinstance(value, tuple) else float(value)
    except Exception:
        return None


# Structures of tensors


def _map_structure(function: Callable[..., Any], tree: Any, *other_trees: Any) -> Any:
    """`function` of every leaf of structures alike: mappings, sequences, dataclasses and what is made like them."""
    if isinstance(tree, Mapping):
        mapped = {
            key: _map_structure(function, value, *(other[key] for other in other_trees)) for key, value in tree.items()
        }
        return mapped if type(tree) is dict else _rebuild_mapping(tree, mapped)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map_structure(function, *values) for values in zip(tree, *other_trees, strict=True)))
    if isinstance(tree, list | tuple) and any(_holds_tensor(other) for other in tree):
        return type(tree)(_map_structure(function, *values) for values in zip(tree, *other_trees, strict=True))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree) if field.init]
        mapped = {
            name: _map_structure(function, *(getattr(other, name) for other in (tree, *other_trees))) for name in names
        }
        return dataclasses.replace(tree, **mapped)
    return function(tree, *other_trees)


def _rebuild_mapping(original: Mapping[str, Any], items: dict[str, Any]) -> Any:
    """A mapping of the same kind (ModelOutput, BatchEncoding), else a plain one."""
    try:
        return type(original)(**items) if dataclasses.is_dataclass(original) else type(original)(items)  # type: ignore[call-arg]
    except Exception:
        return items


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensor, value))
    return isinstance(value, Tensor) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def to_full_tensors(tree: Any) -> Any:
    """`tree` with whole tensors in place of those that ranks hold in parts. Ranks that hold parts of one must call it together."""

    def to_full_tensor(value: Any) -> Any:
        if isinstance(value, FakeTensor):  # another stage has it
            return None
        if isinstance(value, ShardedLogits):
            return value.gather_detached() if value._full_tensor is None else value.full_tensor()
        return value.full_tensor() if isinstance(value, DTensor) else value

    return _map_structure(to_full_tensor, tree)


def as_graph_leaves(tree: Any) -> Any:
    """`tree` with its numbers as leaves of a graph, so that what is computed from them has one."""

    def as_graph_leaf(value: Any) -> Any:
        if type(value) is ShardedLogits and value._full_tensor is not None:
            return as_graph_leaf(value._full_tensor)
        if type(value) is ShardedLogits:
            return value.with_local(as_graph_leaf(value._local))
        if type(value) is not Tensor or not value.is_floating_point():
            return value
        return ModelOutputMarker.apply(value.detach().requires_grad_())

    return _map_structure(as_graph_leaf, tree)


def tensor_versions(tree: Any) -> list[int]:
    """How often each tensor was written to."""
    counts: list[int] = []

    def record_version(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensor = value._local if type(value) is ShardedLogits else value
            counts.append(0 if tensor.is_inference() else tensor._version)
        return value

    _map_structure(record_version, tree)
    return counts


def clone_tree(tree: Any) -> Any:
    """`tree` with containers, tensors and arrays of its own. Ranks that hold parts of a tensor must call it together."""

    def clone_leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return to_full_tensors(value).clone() if isinstance(value, ShardedLogits | DTensor) else value.clone()
        return value.copy() if isinstance(value, np.ndarray | list | dict | set) else value

    return _map_structure(clone_leaf, tree)


def trees_equal(left: Any, right: Any) -> bool:
    """Whether two trees hold the same numbers; NaN differs from itself."""
    same = True

    def compare_leaf(first: Any, second: Any) -> Any:
        nonlocal same
        if isinstance(first, Tensor):
            same &= isinstance(second, Tensor) and torch.equal(first, second)
        elif isinstance(first, np.ndarray):
            same &= isinstance(second, np.ndarray) and np.array_equal(first, second)
        elif isinstance(first, list | dict | set):
            same &= type(first) is type(second) and len(first) == len(second)
        return first

    try:
        _map_structure(compare_leaf, left, right)
        _map_structure(compare_leaf, right, left)
    except (KeyError, ValueError, TypeError, AttributeError):
        return False
    return same


def holds_full_tensors(tree: Any) -> bool:
    """Whether no other rank holds a part of its tensors."""
    is_full = True

    def check_leaf(value: Any) -> Any:
        nonlocal is_full
        is_full &= not (isinstance(value, DTensor) or (isinstance(value, ShardedLogits) and value._full_tensor is None))
        return value

    _map_structure(check_leaf, tree)
    return is_full


def move_part(part: EvaluationPart, device: torch.device) -> EvaluationPart:
    """The same on another device."""

    def move_leaf(value: Any) -> Any:
        return value.detach().to(device) if isinstance(value, Tensor) else value

    return EvaluationPart(
        _map_structure(move_leaf, part.output), _map_structure(move_leaf, part.batch), part.sample_count
    )


def widen_outputs(part: EvaluationPart) -> EvaluationPart:
    """With outputs in float32 at least: half precision rounds means by more than parts differ."""

    def widen_leaf(value: Any) -> Any:
        is_narrow = isinstance(value, Tensor) and value.is_floating_point() and value.element_size() < 4
        return value.float() if is_narrow else value

    return EvaluationPart(_map_structure(widen_leaf, part.output), part.batch, part.sample_count)


def slice_part(part: EvaluationPart, start: int, stop: int) -> EvaluationPart:
    """Some samples of a part: what has a row for each sample is cut, the rest stays."""

    def slice_leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            has_rows = (
                value.dim() > 0 and part.sample_count > 0 and value.shape[0] and value.shape[0] % part.sample_count == 0
            )
            rows_per_sample = value.shape[0] // part.sample_count if has_rows else 0
            return value[start * rows_per_sample : stop * rows_per_sample] if has_rows else value
        if isinstance(value, list | tuple) and len(value) == part.sample_count:
            return value[start:stop]
        return value

    return EvaluationPart(_map_structure(slice_leaf, part.output), _map_structure(slice_leaf, part.batch), stop - start)


def join_parts(parts: Sequence[EvaluationPart]) -> EvaluationPart:
    """All samples of these parts as one."""
    sample_counts = [part.sample_count for part in parts]

    def join_leaves(*values: Any) -> Any:
        first = values[0]
        if isinstance(first, Tensor):
            return _join_tensors(values, sample_counts)
        if isinstance(first, list) and all(isinstance(value, list) for value in values):
            return [item for value in values for item in value]
        if isinstance(first, tuple) and all(isinstance(value, tuple) for value in values):
            return tuple(item for value in values for item in value)
        return first

    try:
        output = _map_structure(join_leaves, *(part.output for part in parts))
        batch = _map_structure(join_leaves, *(part.batch for part in parts))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise UnjoinableError(f"their structures differ ({error})") from error
    return EvaluationPart(output, batch, sum(sample_counts))


def _join_tensors(values: Sequence[Tensor], sample_counts: Sequence[int]) -> Tensor:
    if values[0].dim() == 0:  # a loss: the mean, weighed
        if not values[0].is_floating_point():
            return values[0]
        weights = torch.tensor(sample_counts, dtype=torch.float64, device=values[0].device)
        mean = (torch.stack([value.double() for value in values]) * weights).sum() / weights.sum()
        return mean.to(values[0].dtype)
    if any(value.shape[1:] != values[0].shape[1:] for value in values):
        shapes = sorted({tuple(value.shape) for value in values})
        raise UnjoinableError(f"a tensor has the shapes {', '.join(map(str, shapes[:3]))} in different batches")
    if any(value.shape[0] % count for value, count in zip(values, sample_counts, strict=True)):
        return values[0]  # it has no rows of samples: weights of classes, a bias
    return torch.cat(list(values))


def part_bytes(part: EvaluationPart) -> int:
    """Bytes of its tensors."""
    total_bytes = 0

    def add_leaf(value: Any) -> Any:
        nonlocal total_bytes
        total_bytes += value.numel() * value.element_size() if isinstance(value, Tensor) else 0
        return value

    _map_structure(add_leaf, part.output)
    _map_structure(add_leaf, part.batch)
    return total_bytes


def to_metric_pair(name: str, value: Any) -> tuple[float, float]:
    """(sum, count) of what a metric gave for the whole set."""
    pair = value if isinstance(value, tuple) else (value, 1.0)
    if len(pair) != 2:
        raise JobError(f"metric {name!r} gave a tuple of {len(pair)}: give a number, or (sum, count)")
    return float(to_scalar(pair[0], name)), float(to_scalar(pair[1], name))


def to_pair(name: str, value: Any, device: torch.device) -> Tensor:
    """(sum, count) as one tensor; of a mean (mean, NaN)."""
    pair = value if isinstance(value, tuple) else (value, math.nan)
    # Half precision has too few digits for a sum over a batch.
    parts = [torch.as_tensor(to_scalar(part, name), dtype=torch.float64, device=device) for part in pair]
    return torch.stack([part.detach() for part in parts])


def to_scalar(value: Any, name: str) -> Tensor | float:
    """What can be added to a sum on any device without waiting for that device."""
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() != 1:
        raise JobError(
            f"metric {name!r} gave a tensor of shape {tuple(value.shape)}: give a scalar mean, or (sum, count)"
        )
    return value.reshape(())
