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
BOUND = 1e-9
#: A tensor is measured against its own largest value, but never against less than this part of its kind's largest in the model.
FLOOR = 1e-6
#: Stands for "not comparable" (NaN, missing, another shape): a document holds no infinity, and no bound admits this.
BROKEN = sys.float_info.max

#: In the order in which a step makes them; the first that is off is the one to name.
#: `start`: the ranks' copies before the first step, `copy`: after a step, `draw`: with random numbers on. Outputs come last: a gradient
#: that is off tells where.
KINDS = ("start", "gradient", "loss", "norm", "buffer", "parameter", "optimizer", "copy", "draw", "output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One tensor of the plan's run against the reference's. `why` says what is wrong where no number can."""

    kind: str
    name: str
    step: int
    value: float
    why: str = ""
    #: The reference's tensor is so small that it was measured against the floor.
    small: bool = False

    def __str__(self) -> str:
        return f"{self.name} (step {self.step}{', ' + self.why if self.why else ''})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The largest difference that passes: `least`, or more for tensors that are known to need it."""

    least: float = BOUND
    tensors: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def of(self, difference: Difference) -> float:
        """The bound of one tensor."""
        return self.tensors.get((difference.kind, difference.name), self.least)

    def widest(self, kind: str) -> float:
        """The widest among tensors of a kind: for others of it, of which no rounding is known."""
        return max([self.least, *(bound for (other, _), bound in self.tensors.items() if other == kind)])

    def hold(self, difference: Difference) -> bool:
        """Whether a difference is within its bound."""
        return difference.value <= self.of(difference)


def relative(value: Tensor, reference: Tensor, *, largest: float, slack: Tensor | None = None) -> float:
    """max|value - reference| / max(max|reference|, 1e-6 x largest), or BROKEN where that is no number.

    `slack` is granted element by element before the maximum is taken. Equal infinities are equal (attention masks hold
    them); whole numbers have no rounding, so any difference among them counts as 1 at least.
    """
    where = reference.device  # a GPU compares a large model in seconds, its host in minutes
    a, b = wide(value, where), wide(reference, where)
    apart = (a - b).abs()
    if not apart.isfinite().all():
        apart = torch.where(a == b, 0.0, apart)
    if slack is not None:
        apart = (apart - slack.to(where)).clamp(min=0.0)
    worst = float(apart.max()) if apart.numel() else 0.0
    if worst == 0.0:
        return 0.0
    scale = max(magnitude(reference), FLOOR * largest)
    if not math.isfinite(worst) or scale == 0.0:
        return BROKEN
    exact = not (reference.is_floating_point() or reference.is_complex())
    return max(min(worst / scale, BROKEN), 1.0 if exact else 0.0)


def magnitude(tensor: Tensor) -> float:
    """The largest absolute value among the finite ones."""
    size = wide(tensor, tensor.device).abs()
    most = float(size.max()) if size.numel() else 0.0
    return most if math.isfinite(most) else float(torch.where(size.isfinite(), size, 0.0).max())


def wide(tensor: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """As float64 on `device`, dense."""
    dense = tensor.detach().to(device)
    dense = dense.to_dense() if dense.layout != torch.strided else dense
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


def compare(
    kind: str,
    plan: Mapping[str, Tensor | None],
    reference: Mapping[str, Tensor | None],
    *,
    step: int,
    slack: Mapping[str, Tensor] | None = None,
) -> list[Difference]:
    """The difference of every tensor of one kind, in the reference's order; what only one side has is a difference.

    None (a parameter that no gradient reached) reads as zero: whether an optimizer skips it shows in the parameters.
    """
    sizes = {name: 0.0 if tensor is None else magnitude(tensor) for name, tensor in reference.items()}
    largest: dict[str, float] = {}
    for name, tensor in reference.items():
        if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
            largest[_family(kind, name)] = max(largest.get(_family(kind, name), 0.0), sizes[name])
    found = []
    for name, true in reference.items():
        if name not in plan:
            found.append(Difference(kind=kind, name=name, step=step, value=BROKEN, why="missing from the plan's run"))
            continue
        mine = plan[name]
        mine, true = _filled(mine, true), _filled(true, mine)
        if mine.shape != true.shape:
            why = f"shape {tuple(mine.shape)}, the reference has {tuple(true.shape)}"
            found.append(Difference(kind=kind, name=name, step=step, value=BROKEN, why=why))
            continue
        most = largest.get(_family(kind, name), 0.0)
        value = relative(mine, true, largest=most, slack=None if slack is None else slack.get(name))
        small = sizes[name] < FLOOR * most
        found.append(Difference(kind=kind, name=name, step=step, value=value, why=_why(mine, true, value), small=small))
    for name in plan.keys() - reference.keys():
        found.append(Difference(kind=kind, name=name, step=step, value=BROKEN, why="only in the plan's run"))
    return found


def findings(differences: Iterable[Difference], bounds: Bounds) -> tuple[Finding, ...]:
    """For each kind the difference that comes nearest to its bound, or is furthest beyond it."""
    worst: dict[str, Difference] = {}
    names: dict[str, set[str]] = {}
    for each in differences:
        names.setdefault(each.kind, set()).add(each.name)
        if each.kind not in worst or each.value / bounds.of(each) > worst[each.kind].value / bounds.of(
            worst[each.kind]
        ):
            worst[each.kind] = each
    return tuple(
        Finding(
            kind=kind,
            tensors=len(names[kind]),
            worst=worst[kind].value,
            where=str(worst[kind]),
            bound=bounds.of(worst[kind]),
        )
        for kind in KINDS
        if kind in worst
    )


def _filled(tensor: Tensor | None, like: Tensor | None) -> Tensor:
    if tensor is None:
        return torch.zeros(()) if like is None else torch.zeros_like(like)
    return tensor


def _family(kind: str, name: str) -> str:
    """What a tensor's floor is taken over. Optimizer states of different meaning (a moment, its square, a counter) do not mix."""
    return name.rpartition("/")[2] if kind == "optimizer" else ""


def _why(mine: Tensor, true: Tensor, value: float) -> str:
    if value != BROKEN:
        return ""
    if not wide(mine).isfinite().all():
        return "the plan's run is not finite" if wide(true).isfinite().all() else "neither run is finite"
    return "the reference is zero" if wide(true).isfinite().all() else "the reference is not finite"
