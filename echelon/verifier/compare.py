"""How far two sets of tensors are apart. Pure: tensors in, numbers and names out."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from echelon.plan.certificate import Finding

#: Largest relative difference that float64 rounding is granted; a semantic mistake stays above 1e-3 (facts: 1e-15..2e-14 measured).
FLOAT64_BOUND = 1e-9
#: A tensor is measured against its own largest value, but never against less than this part of its kind's largest in the model.
RELATIVE_FLOOR = 1e-6
#: Stands for "not comparable" (NaN, missing, another shape): a document holds no infinity, and no bound admits this.
NOT_COMPARABLE = sys.float_info.max

#: In the order in which a step makes them; the first that is off is the one to name.
#: `start`: the ranks' copies before the first step, `copy`: after a step, `draw`: with random numbers on. Outputs come last: a gradient
#: that is off tells where.
DIFFERENCE_KINDS = ("start", "gradient", "loss", "norm", "buffer", "parameter", "optimizer", "copy", "draw", "output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One tensor of the plan's run against the reference's. `reason` says what is wrong where no number can."""

    kind: str
    name: str
    step: int
    value: float
    reason: str = ""
    #: The reference's tensor is so small that it was measured against the floor.
    below_floor: bool = False

    def __str__(self) -> str:
        return f"{self.name} (step {self.step}{', ' + self.reason if self.reason else ''})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The largest difference that passes: `default`, or more for tensors that are known to need it."""

    default: float = FLOAT64_BOUND
    by_tensor: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def bound_for(self, difference: Difference) -> float:
        """The bound of one tensor."""
        return self.by_tensor.get((difference.kind, difference.name), self.default)

    def widest(self, kind: str) -> float:
        """The widest among tensors of a kind: for others of it, of which no rounding is known."""
        return max(
            [self.default, *(bound for (tensor_kind, _), bound in self.by_tensor.items() if tensor_kind == kind)]
        )

    def allows(self, difference: Difference) -> bool:
        """Whether a difference is within its bound."""
        return difference.value <= self.bound_for(difference)


def relative_difference(actual: Tensor, expected: Tensor, *, largest: float, tolerance: Tensor | None = None) -> float:
    """max|value - reference| / max(max|reference|, 1e-6 x largest), or BROKEN where that is no number.

    `tolerance` is granted element by element before the maximum is taken. Equal infinities are equal (attention masks hold
    them); whole numbers have no rounding, so any difference among them counts as 1 at least.
    """
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
    is_integer = not (expected.is_floating_point() or expected.is_complex())
    return max(min(largest_difference / scale, NOT_COMPARABLE), 1.0 if is_integer else 0.0)


def max_abs(tensor: Tensor) -> float:
    """The largest absolute value among the finite ones."""
    absolute = to_float64(tensor, tensor.device).abs()
    result = float(absolute.max()) if absolute.numel() else 0.0
    return result if math.isfinite(result) else float(torch.where(absolute.isfinite(), absolute, 0.0).max())


def to_float64(tensor: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """As float64 on `device`, dense."""
    dense = tensor.detach().to(device)
    dense = dense.to_dense() if dense.layout != torch.strided else dense
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


def compare_tensors(
    kind: str,
    actual: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    *,
    step: int,
    tolerances: Mapping[str, Tensor] | None = None,
) -> list[Difference]:
    """The difference of every tensor of one kind, in the reference's order; what only one side has is a difference.

    None (a parameter that no gradient reached) reads as zero: whether an optimizer skips it shows in the parameters.
    """
    sizes = {name: 0.0 if tensor is None else max_abs(tensor) for name, tensor in expected.items()}
    largest: dict[str, float] = {}
    for name, tensor in expected.items():
        if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
            largest[_floor_group(kind, name)] = max(largest.get(_floor_group(kind, name), 0.0), sizes[name])
    differences = []
    for name, expected_tensor in expected.items():
        if name not in actual:
            differences.append(
                Difference(kind=kind, name=name, step=step, value=NOT_COMPARABLE, reason="missing from the plan's run")
            )
            continue
        actual_tensor = actual[name]
        actual_tensor, expected_tensor = (
            _zeros_if_none(actual_tensor, expected_tensor),
            _zeros_if_none(expected_tensor, actual_tensor),
        )
        if actual_tensor.shape != expected_tensor.shape:
            reason = f"shape {tuple(actual_tensor.shape)}, the reference has {tuple(expected_tensor.shape)}"
            differences.append(Difference(kind=kind, name=name, step=step, value=NOT_COMPARABLE, reason=reason))
            continue
        group_largest = largest.get(_floor_group(kind, name), 0.0)
        value = relative_difference(
            actual_tensor,
            expected_tensor,
            largest=group_largest,
            tolerance=None if tolerances is None else tolerances.get(name),
        )
        below_floor = sizes[name] < RELATIVE_FLOOR * group_largest
        differences.append(
            Difference(
                kind=kind,
                name=name,
                step=step,
                value=value,
                reason=_incomparable_reason(actual_tensor, expected_tensor, value),
                below_floor=below_floor,
            )
        )
    for name in actual.keys() - expected.keys():
        differences.append(
            Difference(kind=kind, name=name, step=step, value=NOT_COMPARABLE, reason="only in the plan's run")
        )
    return differences


def summarize_differences(differences: Iterable[Difference], bounds: Bounds) -> tuple[Finding, ...]:
    """For each kind the difference that comes nearest to its bound, or is furthest beyond it."""
    worst_by_kind: dict[str, Difference] = {}
    names_by_kind: dict[str, set[str]] = {}
    for difference in differences:
        names_by_kind.setdefault(difference.kind, set()).add(difference.name)
        if difference.kind not in worst_by_kind or difference.value / bounds.bound_for(difference) > worst_by_kind[
            difference.kind
        ].value / bounds.bound_for(worst_by_kind[difference.kind]):
            worst_by_kind[difference.kind] = difference
    return tuple(
        Finding(
            kind=kind,
            tensors=len(names_by_kind[kind]),
            max_difference=worst_by_kind[kind].value,
            where=str(worst_by_kind[kind]),
            bound=bounds.bound_for(worst_by_kind[kind]),
        )
        for kind in DIFFERENCE_KINDS
        if kind in worst_by_kind
    )


def _zeros_if_none(tensor: Tensor | None, like: Tensor | None) -> Tensor:
    if tensor is None:
        return torch.zeros(()) if like is None else torch.zeros_like(like)
    return tensor


def _floor_group(kind: str, name: str) -> str:
    """What a tensor's floor is taken over. Optimizer states of different meaning (a moment, its square, a counter) do not mix."""
    return name.rpartition("/")[2] if kind == "optimizer" else ""


def _incomparable_reason(actual: Tensor, expected: Tensor, value: float) -> str:
    if value != NOT_COMPARABLE:
        return ""
    if not to_float64(actual).isfinite().all():
        return "the plan's run is not finite" if to_float64(expected).isfinite().all() else "neither run is finite"
    return "the reference is zero" if to_float64(expected).isfinite().all() else "the reference is not finite"
