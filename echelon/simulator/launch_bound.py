"""The host of a GPU issues operators ahead of the device; where it is slower the device waits for it."""

from __future__ import annotations

from collections.abc import Iterable

from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.simulator.node_load import Load
from echelon.simulator.recomputation import forward_in_blocks

#: Seconds that the host takes to issue a stretch of the step, and that the device takes to execute it.
Stretch = tuple[float, float]


def held_up(stretches: Iterable[Stretch]) -> float:
    """How much longer a step takes than the device works: no operator starts before it was issued, nor before the one before it has ended.

    The longest path: the host up to some stretch, the device from there on.
    """
    stretches = list(stretches)
    longest = device = sum(seconds for _, seconds in stretches)
    issued, left = 0.0, device
    for host, seconds in stretches:
        issued, left = issued + host, left - seconds
        longest = max(longest, issued + left)
    return longest - device


def issuing(whole: Profile, profile: Profile, plan: Plan, load: Load) -> tuple[float, float]:
    """Seconds of the host for one micro-batch's forward and backward of a part of the `whole` model."""
    forward, backward = (
        sum(each.count for each in profile.operators if each.phase == phase) for phase in ("forward", "backward")
    )
    inner = sum(each.count for each in forward_in_blocks(whole, profile)) if plan.recompute != "none" else 0
    within, again = (
        _per_call(profile, load, f"host {what} {{}} {plan.recompute}") if inner else 0.0
        for what in ("forward", "again")
    )
    return (
        (forward - inner) * _per_call(profile, load, "host forward {}") + inner * within,
        backward * _per_call(profile, load, "host backward {}") + inner * again,
    )


def adding_up(profile: Profile, load: Load) -> float:
    """Seconds of the host to add a micro-batch's gradients to those before it."""
    return sum(each.trainable for each in profile.parameters) * _seconds(load, "host adding")


def updating(profile: Profile, load: Load, *, fused: bool) -> float:
    """Seconds of the host for the optimizer's step."""
    name = "host optimizer" + (":fused" if fused else "")
    return sum(each.trainable for each in profile.parameters) * _seconds(load, name)


def _per_call(profile: Profile, load: Load, what: str) -> float:
    """Seconds of the host for one operator: products and convolutions come with operators of their own around them."""
    counts = {
        kind: sum(each.count for each in profile.operators if each.kind == kind) for kind in ("matmul", "convolution")
    }
    total = sum(counts.values())
    if not total:
        return load.device.overhead
    return sum(count * _seconds(load, what.format(kind)) for kind, count in counts.items()) / total


def _seconds(load: Load, what: str) -> float:
    curve = load.device.curve(what, "float32", ranks=load.ranks)
    return 1 / curve.rate((1.0,)) if curve else load.device.overhead
