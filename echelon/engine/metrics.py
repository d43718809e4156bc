"""Find out how a metric over a whole evaluation set is computed: summed batch by batch, or once over all outputs.

A metric gives (sum, count), or one number. That may be a mean over samples: the weighted mean of the means over any parts of them. AUC, F1,
perplexity or a correlation are not; for these the whole set is joined, as far as memory allows.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from echelon.engine.full_outputs import clone_tree
from echelon.errors import JobError
from echelon.loss_counts import repeat_samples
from echelon.tree import map_tensors, tree_map, tree_tensors
from echelon.trials.random_state import preserve_random_states

#: How a metric is reduced: pairs and means batch by batch, others over the whole set.
MetricKind = Literal["pair", "mean", "whole"]
Metric = Callable[[Any, Any], Any]
#: Relative difference between the mean over rows and over their parts that rounding explains (float32).
_ROUNDING_TOLERANCE = 2e-5
#: Where rows are cut, as fractions: into unequal parts, some of few rows.
_SPLIT_FRACTIONS = ((0.34,), (0.1, 0.62), (0.9,))


@dataclass(frozen=True, slots=True)
class EvaluationPart:
    """Output and batch of some samples."""

    output: Any
    batch: Any
    sample_count: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in tree_tensors((self.output, self.batch)))

    def to(self, device: torch.device) -> EvaluationPart:
        """The part on another device, without graphs."""
        output, batch = map_tensors(lambda tensor: tensor.detach().to(device), (self.output, self.batch))
        return EvaluationPart(output, batch, self.sample_count)

    def widen(self) -> EvaluationPart:
        """With outputs in float32 at least: half precision rounds means by more than parts differ."""

        def widen(tensor: Tensor) -> Tensor:
            return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor

        return replace(self, output=map_tensors(widen, self.output))

    def slice(self, start: int, stop: int) -> EvaluationPart:
        """Samples `start` to `stop`: what has rows for each sample is cut, the rest stays."""
        count, stop = self.sample_count, min(stop, self.sample_count)

        def slice_leaf(value: Any) -> Any:
            if isinstance(value, Tensor):
                rows, rest = divmod(len(value), count) if value.dim() and count else (0, 0)
                return value[start * rows : stop * rows] if rows and not rest else value
            return value[start:stop] if isinstance(value, list | tuple) and len(value) == count else value

        output, batch = (tree_map(slice_leaf, tree, is_leaf=_is_row_list) for tree in (self.output, self.batch))
        return EvaluationPart(output, batch, stop - start)


class UnjoinableError(Exception):
    """Outputs or batches of several parts do not fit together."""


def _is_row_list(value: Any) -> bool:
    """Whether it is a list without tensors, which has one item per sample."""
    return isinstance(value, list | tuple) and not hasattr(value, "_fields") and not tree_tensors(value)


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


_Subparts = Sequence[EvaluationPart]
_Trial = tuple[EvaluationPart, _Subparts]


def classify_metric(metric: Metric, parts: Sequence[EvaluationPart]) -> MetricKind | None:
    """The kind of a metric, as these parts show it; None where its value never varies (F1 without a positive sample).

    Perturbed outputs are tried as well: where every prediction is right, F1 is 1 for all rows and for every part of them.
    """
    parts = [part.widen() for part in parts if part.sample_count]
    if parts and _is_nondeterministic(metric, parts[0]):
        return "whole"  # it keeps state: it is called once per evaluation, whatever the plan
    trials: list[_Trial] = [(part, subparts) for part in parts for subparts in _split_part(part)]
    if len(parts) > 1:
        with contextlib.suppress(UnjoinableError):
            joined = join_parts(parts)
            trials += [(joined, parts), *((joined, subparts) for subparts in _split_part(joined))]
    has_varied = False
    for part, subparts in itertools.chain(trials, _perturbed_trials(metric, trials)):
        outcome = _compare_with_mean(metric, part, subparts)
        if isinstance(outcome, str):
            return outcome
        has_varied |= outcome
    return "mean" if has_varied else None


def _perturbed_trials(metric: Metric, trials: Sequence[_Trial]) -> Iterator[_Trial]:
    generator = torch.Generator().manual_seed(0)
    for _, subparts in trials:
        perturbed = [_perturb(subpart, generator) for subpart in subparts]
        with contextlib.suppress(UnjoinableError):
            joined = join_parts(perturbed)
            # Outputs that no model gives may be outside what the metric takes.
            if _is_finite_float(_try_metric(metric, joined)):
                yield joined, perturbed


def _compare_with_mean(metric: Metric, part: EvaluationPart, subparts: _Subparts) -> Literal["pair", "whole"] | bool:
    """ "whole" if it is no mean over these pieces; else whether they have different values, so that this says something."""
    whole_value = _try_metric(metric, part)
    if isinstance(whole_value, tuple):
        return "pair"
    values: list[Any] = [_try_metric(metric, subpart) for subpart in subparts]
    if whole_value is None or not all(map(_is_finite_float, (whole_value, *values))):
        return "whole"
    counts = [subpart.sample_count for subpart in subparts]
    mean = sum(value * count for value, count in zip(values, counts, strict=True)) / sum(counts)
    largest = max(abs(value) for value in (whole_value, *values))
    if not math.isclose(mean, whole_value, rel_tol=0.0, abs_tol=_ROUNDING_TOLERANCE * largest + 1e-9):
        return "whole"
    return any(value != whole_value for value in values)


def is_mean(metric: Metric, previous: EvaluationPart | None, part: EvaluationPart) -> bool:
    """Whether the metric of two batches is the weighted mean of theirs; of batches that do not fit together, of two pieces of the second."""
    part = part.widen()
    with contextlib.suppress(UnjoinableError):
        if previous is not None:
            subparts = [previous.widen(), part]
            return _compare_with_mean(metric, join_parts(subparts), subparts) != "whole"
    return all(_compare_with_mean(metric, part, subparts) != "whole" for subparts in _split_part(part)[:1])


def pair_adds_up(metric: Metric, part: EvaluationPart) -> bool:
    """Whether (sum, count) doubles where every sample is given twice; also where that cannot be tried."""
    repeated = repeat_samples((part.output, part.batch), part.sample_count, 2)
    if repeated is None:
        return True
    once = _as_floats(_try_metric(metric, part))
    twice = _as_floats(_try_metric(metric, EvaluationPart(repeated[0], repeated[1], 2 * part.sample_count)))
    return not _differ(None if once is None else [2 * number for number in once], twice, equal_nan=False)


def _is_nondeterministic(metric: Metric, part: EvaluationPart) -> bool:
    with preserve_random_states():
        once = _as_floats(_try_metric(metric, part))
    with preserve_random_states():
        return _differ(once, _as_floats(_try_metric(metric, part)), equal_nan=True)


def _differ(left: list[float] | None, right: list[float] | None, *, equal_nan: bool) -> bool:
    """Whether two values of a metric differ; not where one is missing."""
    if left is None or right is None or len(left) != len(right):
        return False
    return not np.allclose(left, right, rtol=_ROUNDING_TOLERANCE, atol=1e-9, equal_nan=equal_nan)


def _as_floats(value: Any) -> list[float] | None:
    try:
        return [float(number) for number in (value if isinstance(value, tuple) else (value,))]
    except (TypeError, ValueError):  # the metric failed, or returned tuples of something else
        return None


def _is_finite_float(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _perturb(part: EvaluationPart, generator: torch.Generator) -> EvaluationPart:
    order = torch.randperm(part.sample_count, generator=generator)

    def perturb(tensor: Tensor) -> Tensor:
        if tensor.dim() and tensor.shape[0] == part.sample_count and tensor.numel():
            tensor = tensor[order.to(tensor.device)]
        if not tensor.is_floating_point() or not tensor.numel():
            return tensor
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)
        return tensor + noise * tensor.abs().mean().clamp(min=0.1)

    return EvaluationPart(map_tensors(perturb, part.output), part.batch, part.sample_count)


def _split_part(part: EvaluationPart) -> list[list[EvaluationPart]]:
    count = part.sample_count
    if count < 2:
        return []
    cuts = [sorted({min(max(round(f * count), 1), count - 1) for f in fractions}) for fractions in _SPLIT_FRACTIONS]
    return [[part.slice(*bounds) for bounds in itertools.pairwise([0, *inner, count])] for inner in cuts]


def _try_metric(metric: Metric, part: EvaluationPart) -> float | tuple[Any, Any] | None:
    """What it gives; None where it fails, as a metric may on a part with one class only."""
    try:
        value = metric(*clone_tree((part.output, part.batch)))  # it may edit them
        return value if isinstance(value, tuple) else float(value)
    except Exception:
        return None


def to_pair(name: str, value: Any, device: torch.device, *, mean_count: float = math.nan) -> Tensor:
    """(sum, count) as one tensor; of a mean its value and `mean_count`."""
    pair = value if isinstance(value, tuple) else (value, mean_count)
    if len(pair) != 2:
        raise JobError(f"metric {name!r} gave a tuple of {len(pair)}: give a number, or (sum, count)")
    # Half precision has too few digits for a sum over a batch.
    parts = [torch.as_tensor(_to_scalar(part, name), dtype=torch.float64, device=device) for part in pair]
    return torch.stack([part.detach() for part in parts])


def _to_scalar(value: Any, name: str) -> Tensor | float:
    """A number that is added to sums without waiting for its device."""
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() != 1:
        shape = tuple(value.shape)
        raise JobError(f"metric {name!r} gave a tensor of shape {shape}: give a scalar mean, or (sum, count)")
    return value.reshape(())
