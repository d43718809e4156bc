"""Measure how far two sets of tensors are apart. Pure: tensors in, numbers and names out."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from echelon.plan.certificate import Finding

#: Largest relative difference granted to float64 rounding (1e-15 to 2e-14 measured); a semantic mistake stays above 1e-3.
FLOAT64_BOUND = 1e-9
#: A tensor is measured against its own largest value, but no less than this part of the largest of its kind in the model.
RELATIVE_FLOOR = 1e-6
#: Stands for "not comparable" (NaN, missing, another shape): JSON has no infinity, and no bound admits this.
NOT_COMPARABLE = sys.float_info.max

#: In the order in which a step computes them; the first that is off is reported. `start`: each rank's values before the first step,
#: `copy`: replicas after a step, `draw`: replicas with random numbers on. Outputs come last: a gradient that is off says more.
DIFFERENCE_KINDS = ("start", "gradient", "loss", "norm", "buffer", "parameter", "optimizer", "copy", "draw", "output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One tensor of the plan's run against the reference's. `reason` says what is wrong where no number can."""

    kind: str
    name: str
    step: int
    value: float
    reason: str = ""
    below_floor: bool = False  #: the reference's tensor is so small that it was measured against the floor

    def __str__(self) -> str:
        return f"{self.name} (step {self.step}{', ' + self.reason if self.reason else ''})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The largest difference that passes: `default`, or more for tensors known to need it."""

    default: float = FLOAT64_BOUND
    by_tensor: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def bound_for(self, difference: Difference) -> float:
        return self.by_tensor.get((difference.kind, difference.name), self.default)

    def widest(self, kind: str) -> float:
        """The widest bound of a kind, for tensors of it whose rounding is unknown."""
        return max([self.default, *(bound for (other, _), bound in self.by_tensor.items() if other == kind)])

    def allows(self, difference: Difference) -> bool:
        return difference.value <= self.bound_for(difference)


def has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def to_float64(tensor: Tensor, device: torch.device | str = "cpu") -> Tensor:
    value = dense(tensor.detach().to(device))
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def max_abs(tensor: Tensor) -> float:
    """The largest absolute value among the finite ones."""
    absolute = to_float64(tensor, tensor.device).abs()
    result = float(absolute.max()) if absolute.numel() else 0.0
    return result if math.isfinite(result) else float(torch.where(absolute.isfinite(), absolute, 0.0).max())


def relative_difference(actual: Tensor, expected: Tensor, *, largest: float, tolerance: Tensor | None = None) -> float:
    """max|actual - expected| / max(max|expected|, 1e-6 x largest), or NOT_COMPARABLE where that is no number. `tolerance` is granted element by
    element before the maximum is taken. Equal infinities are equal (attention masks hold them). Integers have no rounding: any difference among
    them counts as 1 at least."""
    device = expected.device  # a GPU compares a large model in seconds, its host in minutes
    a, b = to_float64(actual, device), to_float64(expected, device)
    difference = (a - b).abs()
    if not difference.isfinite().all():
        difference = torch.where(a == b, 0.0, difference)
    if tolerance is not None:
        difference = (difference - tolerance.to(device)).clamp(min=0.0)
    largest_difference = float(difference.max()) if difference.numel() else 0.0
    if largest_difference == 0.0:
        return 0.0
    scale = max(max_abs(expected), RELATIVE_FLOOR * largest)
    if not math.isfinite(largest_difference) or scale == 0.0:
        return NOT_COMPARABLE
    return max(min(largest_difference / scale, NOT_COMPARABLE), 0.0 if has_fractions(expected) else 1.0)


def compare_tensors(
    kind: str,
    actual: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    *,
    step: int,
    tolerances: Mapping[str, Tensor] | None = None,
) -> list[Difference]:
    """The difference of every tensor of one kind, in the reference's order; a tensor that one side lacks is a difference. None (a parameter
    that no gradient reached) reads as zero: whether an optimizer skips it shows in the parameters."""
    make = partial(Difference, kind=kind, step=step)
    missing = partial(make, value=NOT_COMPARABLE)
    sizes = {name: 0.0 if tensor is None else max_abs(tensor) for name, tensor in expected.items()}
    largest: defaultdict[str, float] = defaultdict(float)
    for name, tensor in expected.items():
        if tensor is not None and has_fractions(tensor):
            largest[_floor_group(kind, name)] = max(largest[_floor_group(kind, name)], sizes[name])
    differences = []
    for name, tensor in expected.items():
        if name not in actual:
            differences.append(missing(name=name, reason="missing from the plan's run"))
            continue
        a, b = _zeros_if_none(actual[name], tensor), _zeros_if_none(tensor, actual[name])
        if a.shape != b.shape:
            reason = f"shape {tuple(a.shape)}, the reference has {tuple(b.shape)}"
            differences.append(missing(name=name, reason=reason))
            continue
        group_largest = largest[_floor_group(kind, name)]
        value = relative_difference(a, b, largest=group_largest, tolerance=(tolerances or {}).get(name))
        reason, is_small = _incomparable_reason(a, b, value), sizes[name] < RELATIVE_FLOOR * group_largest
        differences.append(make(name=name, value=value, reason=reason, below_floor=is_small))
    extra_names = actual.keys() - expected.keys()
    return differences + [missing(name=name, reason="only in the plan's run") for name in extra_names]


def summarize_differences(differences: Iterable[Difference], bounds: Bounds) -> tuple[Finding, ...]:
    """For each kind the difference that is nearest to its bound, or furthest beyond it."""
    by_kind: defaultdict[str, list[Difference]] = defaultdict(list)
    for difference in differences:
        by_kind[difference.kind].append(difference)
    findings = []
    for kind in (kind for kind in DIFFERENCE_KINDS if kind in by_kind):
        worst = max(by_kind[kind], key=lambda difference: difference.value / bounds.bound_for(difference))
        tensors, bound = len({difference.name for difference in by_kind[kind]}), bounds.bound_for(worst)
        findings.append(Finding(kind=kind, tensors=tensors, max_difference=worst.value, where=str(worst), bound=bound))
    return tuple(findings)


def _zeros_if_none(tensor: Tensor | None, like: Tensor | None) -> Tensor:
    if tensor is None:
        return torch.zeros(()) if like is None else torch.zeros_like(like)
    return tensor


def _floor_group(kind: str, name: str) -> str:
    """What a tensor's floor is taken over: optimizer states of different meaning (a moment, its square, a counter) do not mix."""
    return name.rpartition("/")[2] if kind == "optimizer" else ""


def _incomparable_reason(actual: Tensor, expected: Tensor, value: float) -> str:
    if value != NOT_COMPARABLE:
        return ""
    expected_is_finite = to_float64(expected).isfinite().all()
    if not to_float64(actual).isfinite().all():
        return "the plan's run is not finite" if expected_is_finite else "neither run is finite"
    return "the reference is zero" if expected_is_finite else "the reference is not finite"
