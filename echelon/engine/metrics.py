"""Find out how a metric over a whole evaluation set is computed: summed batch by batch, or once over all outputs.

A metric gives (sum, count), or one number. Such a number may be a mean over samples: a mean over all rows is the weighted mean of the means
over any parts of them. AUC, F1, perplexity or a correlation are not; for these the whole set is joined, as far as memory allows.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from echelon.engine.evaluation_parts import EvaluationPart, UnjoinableError, join_parts, slice_part, widen_outputs
from echelon.engine.full_outputs import clone_tree
from echelon.errors import JobError
from echelon.loss_counts import repeat_samples
from echelon.tree import map_tensors
from echelon.trials.random_state import preserve_random_states

#: How a metric is reduced: pairs and means batch by batch, others over the whole set.
MetricKind = Literal["pair", "mean", "whole"]
Metric = Callable[[Any, Any], Any]
#: Relative difference between the mean over rows and over their parts that rounding explains (float32).
_ROUNDING_TOLERANCE = 2e-5
#: Where rows are cut, as fractions: into unequal parts, some of few rows.
_SPLIT_FRACTIONS = ((0.34,), (0.1, 0.62), (0.9,))


def classify_metric(metric: Metric, parts: Sequence[EvaluationPart]) -> MetricKind | None:
    """The kind of a metric, as these parts show it; None where they do not.

    Real outputs may hide the difference: where every prediction is right, F1 is 1 for all rows and for every part of them. So perturbed
    outputs are tried as well, on which a mean stays a mean. Where the value never varies (F1 without a positive sample) nothing is known.
    """
    parts = [widen_outputs(part) for part in parts if part.sample_count]
    if parts and _is_nondeterministic(metric, parts[0]):
        return "whole"  # it keeps state: it is called once per evaluation, whatever the plan
    trials = [(part, subparts) for part in parts for subparts in _split_part(part)]
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


def _perturbed_trials(
    metric: Metric, trials: Sequence[tuple[EvaluationPart, Sequence[EvaluationPart]]]
) -> Iterator[tuple[EvaluationPart, Sequence[EvaluationPart]]]:
    generator = torch.Generator().manual_seed(0)
    for _, subparts in trials:
        perturbed = [_perturb(subpart, generator) for subpart in subparts]
        with contextlib.suppress(UnjoinableError):
            joined = join_parts(perturbed)
            # Outputs that no model gives may be outside what the metric takes.
            if _is_finite_float(_try_metric(metric, joined)):
                yield joined, perturbed


def _compare_with_mean(
    metric: Metric, part: EvaluationPart, subparts: Sequence[EvaluationPart]
) -> Literal["pair", "whole"] | bool:
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
    part = widen_outputs(part)
    with contextlib.suppress(UnjoinableError):
        if previous is not None:
            subparts = [widen_outputs(previous), part]
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
    """Whether two calls with the same arguments and the same random numbers return different values."""
    values = []
    for _ in range(2):
        with preserve_random_states():
            values.append(_as_floats(_try_metric(metric, part)))
    return _differ(values[0], values[1], equal_nan=True)


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
    """Permute the rows of the outputs, and change their numbers."""
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
    return [[slice_part(part, *bounds) for bounds in itertools.pairwise([0, *inner, count])] for inner in cuts]


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
        raise JobError(
            f"metric {name!r} gave a tensor of shape {tuple(value.shape)}: give a scalar mean, or (sum, count)"
        )
    return value.reshape(())
