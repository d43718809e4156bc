"""Which tensor went wrong first, and what the mistake looks like, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from echelon.plan.plan import Plan
from echelon.plan.split import rounds
from echelon.verifier.compare import BROKEN, KINDS, Bounds, Difference, wide
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
    of = {
        "gradient": lambda record: record.gradients, "buffer": lambda record: record.buffers,
        "parameter": lambda record: record.parameters, "optimizer": lambda record: record.optimizer,
        "loss": lambda record: {"loss": record.loss}, "norm": lambda record: {"gradient norm": record.norm},
    }[worst.kind]  # fmt: skip
    plan, reference = of(mine).get(worst.name), of(true).get(worst.name)
    return None if plan is None or reference is None else Pair(plan=plan, true=reference)


def describe(
    worst: Difference, differences: Sequence[Difference], bounds: Bounds, pair: Pair | None, plan: Plan, samples: int
) -> str:  # fmt: skip
    """What is off, by how much, and what it looks like."""
    size = worst.why or f"relative difference {worst.value:.1e}, bound {bounds.of(worst):.0e}"
    what = worst.name if worst.kind in ("loss", "norm") else f"{worst.kind} of {worst.name}"
    guess = _guess(worst, [each for each in differences if each.step == worst.step], bounds, pair, plan, samples)
    return f"{what} at step {worst.step}: {size}{'; ' + guess if guess else ''}"


def _guess(
    worst: Difference, step: Sequence[Difference], bounds: Bounds, pair: Pair | None, plan: Plan, samples: int
) -> str:  # fmt: skip
    if worst.value == BROKEN or pair is None:
        return ""
    dp, turns = plan.mesh.dp, rounds(samples, plan.mesh.dp, plan.micro)
    peers = [each for each in step if each.kind == worst.kind]
    off = [each for each in peers if not bounds.hold(each)]
    scope = "" if len(peers) == 1 else f"{len(off)} of {len(peers)} {worst.kind}s are off"
    factor = ratio(pair)
    known = "" if factor is None else _factor(factor, dp, turns)
    if factor is not None and not known and pair.true.numel() > 1:
        known = f"{factor:.6g} times the reference exactly"
    if known:
        return ", ".join(filter(None, (scope, known)))
    if worst.kind == "gradient" and len(off) * 2 <= len(peers) and dp > 1:
        return f"{scope}: it looks like this rank's own, not summed over the data ranks"
    if worst.kind == "gradient":
        return (
            f"{scope}, by no common factor: micro-batches or ranks are weighted wrongly, or some samples are left out"
        )
    reason = {
        "loss": "the gradients agree: only the value that is reported is off",
        "norm": "the gradients agree: the norm is taken over some of them, or over some of them twice",
        "buffer": "the gradients agree: a buffer that is not the same on all ranks, or not updated once per micro-batch",
        "parameter": "the gradients agree: clipping, the learning rate or the optimizer differs",
        "optimizer": "gradients and parameters agree: the optimizer's state is out of place",
    }
    return ", ".join(filter(None, (scope, reason[worst.kind])))


def ratio(pair: Pair) -> float | None:
    """The number that the reference is multiplied by, where there is one."""
    mine, true = wide(pair.plan).flatten(), wide(pair.true).flatten()
    if mine.shape != true.shape or mine.is_complex() or not (mine.isfinite().all() and true.isfinite().all()):
        return None
    square = float(true @ true)
    if square == 0.0:
        return None
    factor = float(mine @ true) / square
    left = float((mine - factor * true).abs().max())
    # It has to explain the difference itself: what is off by 1e-7 in no pattern is "1 times the reference" but for that.
    clean = left <= CLEAN * max(abs(factor), CLEAN) * float(true.abs().max())
    return factor if clean and left <= 1e-3 * float((mine - true).abs().max()) else None


def _factor(factor: float, dp: int, turns: int) -> str:
    """A factor in words, by the number of the plan that it equals; empty where it equals none."""
    meanings = {
        "dp": (dp, "summed over the data ranks where a mean was due", "averaged over the data ranks once too often"),
        "micro-batches": (turns, "summed over micro-batches where a mean was due", "averaged over micro-batches once too often"),
        "dp x micro-batches": (dp * turns, "summed over all micro-batches where a mean was due", "averaged over all micro-batches once too often"),
        "sqrt(dp)": (dp**0.5, "a norm that counts every rank's copy", "a norm that is divided by the ranks"),
    }  # fmt: skip
    if abs(factor) < CLEAN:
        return "it is zero"
    if abs(factor + 1) < CLEAN:
        return "the sign is wrong"
    fits = []
    for name, (value, over, under) in meanings.items():
        if value > 1 and abs(factor / value - 1) < CLEAN:
            fits.append(f"{name} = {value:g} times the reference: {over}")
        if value > 1 and abs(factor * value - 1) < CLEAN:
            fits.append(f"1/{name} = 1/{value:g} of the reference: {under}")
    return " or ".join(fits)
