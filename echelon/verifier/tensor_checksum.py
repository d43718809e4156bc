"""A tensor in two numbers, so that ranks can compare large ones without sending them: do they hold the same, and did they start from it?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.verifier.compare import BOUND, BROKEN, FLOOR, Difference


@dataclass(frozen=True, slots=True)
class Mark:
    """A tensor's shape, its 2-norm, and its product with fixed weights that no tensor is likely to be at right angles with.

    Infinities count in `endless` alone: the product of the weights with 1 or -1 in their places. NaN is in the norm. Of whole numbers
    there is a product alone, which is exact.
    """

    shape: tuple[int, ...]
    norm: float
    product: float | int
    endless: float = 0.0

    @property
    def broken(self) -> bool:
        """Whether it is the mark of a tensor that holds NaN."""
        return math.isnan(self.norm)

    def apart(self, reference: Mark, floor: float = 0.0) -> float:
        """About |a - b| / |b|: the weights are about one, and signs fall as by chance. `floor`: |b| counts for no less.

        NaN is no number, on both sides too; infinities have to be in the same places.
        """
        if self.shape != reference.shape or self.broken or reference.broken:
            return BROKEN
        if abs(self.endless - reference.endless) > BOUND:
            return BROKEN
        if self == reference:
            return 0.0
        if isinstance(reference.product, int):
            return 1.0  # whole numbers have no rounding
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
    """The mark of a tensor; `weights` for floating numbers, where somebody has made enough of them."""
    flat = value.detach().reshape(-1)
    if not (flat.is_floating_point() or flat.is_complex()):
        return Mark(tuple(value.shape), 0.0, int((flat.long() * _scatter(flat.numel(), flat.device)).sum()))
    flat = (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).double()
    weights = weigh(flat.numel(), flat.device) if weights is None else weights[: flat.numel()]
    norm, endless = float(torch.linalg.vector_norm(flat)), 0.0
    if math.isinf(norm):  # masks hold infinities
        endless = float((flat.isposinf().double() - flat.isneginf().double()) @ weights)
        flat = flat.nan_to_num(nan=math.nan, posinf=0.0, neginf=0.0)
        norm = float(torch.linalg.vector_norm(flat))
    return Mark(tuple(value.shape), norm, float(flat @ weights), endless)


def weigh(count: int, device: torch.device) -> Tensor:
    """The fixed weights of so many numbers: the first of more are the same."""
    return torch.arange(1, count + 1, device=device, dtype=torch.float64).square_().mul_(0.7).cos_()


def _scatter(count: int, device: torch.device) -> Tensor:
    """The same for whole numbers: products wrap around at 64 bits, alike on every device."""
    spread = torch.arange(1, count + 1, device=device) * -7046029254386353131  # 2**64 by the golden ratio, odd
    return spread ^ (spread >> 31)


def copies(holdings: Holdings, step: int, kind: str = "copy") -> list[Difference]:
    """After a step: what several ranks hold is the same on all of them."""
    sizes = (each.norm for marks in holdings for each in marks.values() if not each.broken)
    floor = FLOOR * max(sizes, default=0.0) if kind == "draw" else 0.0  # gradients that are zero but for rounding
    first: dict[Place, tuple[int, Mark]] = {}
    found: dict[str, Difference] = {}
    for rank, marks in enumerate(holdings):
        for place, mine in marks.items():
            origin, expected = first.setdefault(place, (rank, mine))
            why = _why(rank, mine, f"holds other numbers than rank {origin}")
            _keep(found, Difference(kind=kind, name=place.name, step=step, value=mine.apart(expected, floor), why=why))
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
                why = _why(rank, mine, "starts from other numbers than one device does")
                _keep(found, Difference(kind="start", name=place.name, step=step, value=mine.apart(true), why=why))
    return list(found.values())


def _why(rank: int, mine: Mark, other: str) -> str:
    return f"rank {rank} {'holds NaN' if mine.broken else other}"


def _keep(found: dict[str, Difference], each: Difference) -> None:
    """The worst of each tensor; within bounds there is nothing to explain."""
    if each.name not in found or each.value > found[each.name].value:
        plain = Difference(kind=each.kind, name=each.name, step=each.step, value=each.value)
        found[each.name] = each if each.value > BOUND else plain
