"""A tensor in two numbers, so that ranks can compare large ones without sending them: do they hold the same, and did they start from it?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.verifier.compare import BOUND, BROKEN, Difference


@dataclass(frozen=True, slots=True)
class Mark:
    """A tensor's shape, its 2-norm, and its product with fixed weights that no tensor is likely to be at right angles with."""

    shape: tuple[int, ...]
    norm: float
    product: float

    def apart(self, reference: Mark, floor: float = 0.0) -> float:
        """About |a - b| / |b|: the weights are about one, and signs fall as by chance. `floor`: |b| counts for no less."""
        if self.shape != reference.shape:
            return BROKEN
        if self == reference:
            return 0.0
        off = max(abs(self.product - reference.product), abs(self.norm - reference.norm))
        scale = max(reference.norm, floor)
        value = off / scale if scale else BROKEN
        return value if value < BROKEN else BROKEN  # NaN too


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a parameter or buffer: ranks that have the same place hold copies."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """This part of it."""
        return whole[tuple(slice(at, at + size) for at, size in zip(self.start, self.shape, strict=True))]


#: What each rank holds, in rank order.
Holdings = Sequence[Mapping[Place, Mark]]


def mark(value: Tensor, weights: Tensor | None = None) -> Mark:
    """The mark of a tensor of floating numbers; `weights` where somebody has made enough of them."""
    flat = value.detach().reshape(-1)
    flat = (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).double()
    flat = flat.nan_to_num(nan=3.0, posinf=5.0, neginf=-7.0)  # masks hold infinities
    if weights is None:
        weights = weigh(flat.numel(), flat.device)
    product = float(flat @ weights[: flat.numel()])
    return Mark(tuple(value.shape), float(torch.linalg.vector_norm(flat)), product)


def weigh(count: int, device: torch.device) -> Tensor:
    """The fixed weights of so many numbers: the first of more are the same."""
    return torch.arange(1, count + 1, device=device, dtype=torch.float64).square_().mul_(0.7).cos_()


def copies(holdings: Holdings, step: int) -> list[Difference]:
    """After a step: what several ranks hold is the same on all of them."""
    first: dict[Place, tuple[int, Mark]] = {}
    found: dict[str, Difference] = {}
    for rank, marks in enumerate(holdings):
        for place, mine in marks.items():
            origin, expected = first.setdefault(place, (rank, mine))
            why = f"rank {rank} holds other numbers than rank {origin}"
            _keep(found, Difference(kind="copy", name=place.name, step=step, value=mine.apart(expected), why=why))
    return list(found.values())


def starts(holdings: Holdings, reference: Mapping[str, Tensor], step: int) -> list[Difference]:
    """Before the first step: every rank has the reference's values, as far as both have a tensor of that name."""
    expected: dict[Place, Mark] = {}
    found: dict[str, Difference] = {}
    for rank, marks in enumerate(holdings):
        for place, mine in marks.items():
            if place.name in reference:
                if place not in expected:
                    expected[place] = mark(place.of(reference[place.name]))
                true = expected[place]
                why = f"rank {rank} starts from other numbers than one device does"
                _keep(found, Difference(kind="start", name=place.name, step=step, value=mine.apart(true), why=why))
    return list(found.values())


def _keep(found: dict[str, Difference], each: Difference) -> None:
    """The worst of each tensor; within bounds there is nothing to explain."""
    if each.name not in found or each.value > found[each.name].value:
        plain = Difference(kind=each.kind, name=each.name, step=each.step, value=each.value)
        found[each.name] = each if each.value > BOUND else plain
