"""Which tensor went wrong first, and whether it is a multiple of the reference or another value that is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from echelon.verifier.compare import BOUND, KINDS, Bounds, Difference, wide
from echelon.verifier.reference import Record

#: How exactly a tensor must be a multiple of the reference to be called one.
CLEAN = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A tensor of the plan's run and the reference's."""

    plan: Tensor
    true: Tensor


def first(differences: Iterable[Difference], bounds: Bounds, order: Mapping[str, int]) -> Difference | None:
    """The first difference over its bound: by step, then in the order in which a step makes things, then in forward order."""
    over = [each for each in differences if not bounds.hold(each)]
    return min(over, key=lambda each: (each.step, KINDS.index(each.kind), place(owner(each), order)), default=None)


def owner(difference: Difference) -> str:
    """The parameter or buffer that a difference is about."""
    return difference.name.split("/")[1] if difference.kind == "optimizer" else difference.name


def place(name: str, order: Mapping[str, int]) -> int:
    """When forward first entered the module that owns `name`; one it never enters itself stands with its parent."""
    path = name
    while path:
        path = path.rpartition(".")[0]
        if path in order:
            return order[path]
    return len(order)


def pair(worst: Difference, mine: Record, true: Record) -> Pair | None:
    """The two tensors behind a difference, where both runs have one."""
    of: Mapping[str, Callable[[Record], Mapping[str, Tensor | None]]] = {
        "gradient": lambda record: record.gradients, "buffer": lambda record: record.buffers,
        "parameter": lambda record: record.parameters, "optimizer": lambda record: record.optimizer,
        "loss": lambda record: {"loss": record.loss}, "norm": lambda record: {"gradient norm": record.norm},
    }  # fmt: skip
    if worst.kind not in of:
        return None
    plan, reference = (of[worst.kind](record).get(worst.name) for record in (mine, true))
    return None if plan is None or reference is None else Pair(plan=plan, true=reference)


def describe(worst: Difference, bounds: Bounds) -> str:
    """What is off and by how much."""
    size = worst.why or f"relative difference {worst.value:.1e}, bound {bounds.of(worst):.0e}"
    where = {
        "loss": f"loss at step {worst.step}",
        "norm": f"gradient norm at step {worst.step}",
        "start": f"{worst.name} before the first step",
        "copy": f"{worst.name} after step {worst.step}",
        "draw": f"{worst.name} with random numbers on, at step {worst.step}",
        "output": f"{worst.name} at step {worst.step}",
        "optimizer": f"{worst.name.rpartition('/')[2]} of {owner(worst)} (optimizer state) at step {worst.step}",
    }
    return f"{where.get(worst.kind, f'{worst.kind} of {worst.name} at step {worst.step}')}: {size}"


def explains(value: Tensor, pair: Pair) -> bool:
    """Whether the plan's tensor is `value` rather than the reference's."""
    mine, true = wide(pair.plan), wide(pair.true)
    if mine.shape != value.shape or not value.isfinite().all() or not mine.isfinite().all():
        return False
    left = float((mine - value).abs().max()) if mine.numel() else 0.0
    return left <= CLEAN * float(value.abs().max()) + BOUND and left < 1e-3 * float((mine - true).abs().max())


def ratio(pair: Pair) -> float | None:
    """The number that the reference is multiplied by, where there is one."""
    factor = proportion(pair.plan, pair.true)
    if factor is None:
        return None
    mine, true = wide(pair.plan), wide(pair.true)
    # It has to explain the difference itself: what is off by 1e-7 in no pattern is "1 times the reference" but for that.
    left = float((mine - factor * true).abs().max())
    return factor if left <= 1e-3 * float((mine - true).abs().max()) else None


def proportion(value: Tensor, base: Tensor) -> float | None:
    """`value` as a multiple of `base`, where it is one."""
    a, b = wide(value).flatten(), wide(base).flatten()
    if a.shape != b.shape or a.is_complex() or not (a.isfinite().all() and b.isfinite().all()):
        return None
    square = float(b @ b)
    if square == 0.0:
        return None
    factor = float(a @ b) / square
    left = float((a - factor * b).abs().max())
    return factor if left <= CLEAN * max(abs(factor), CLEAN) * float(b.abs().max()) else None
