"""The host of a GPU issues operators ahead of the device; where it is slower the device waits for it."""

from __future__ import annotations

from collections.abc import Iterable

from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.simulator.node_load import NodeLoad
from echelon.simulator.recomputation import block_forward_operators

#: Seconds that the host takes to issue a stretch of the step, and that the device takes to execute it.
LaunchSegment = tuple[float, float]


def host_stall_seconds(segments: Iterable[LaunchSegment]) -> float:
    """How much longer a step takes than the device works: no operator starts before it was issued, nor before the one before it has ended.

    The longest path: the host up to some stretch, the device from there on.
    """
    segments = list(segments)
    critical_path = device_seconds = sum(segment_device_seconds for _, segment_device_seconds in segments)
    issued, device_left = 0.0, device_seconds
    for host_seconds, segment_device_seconds in segments:
        issued, device_left = issued + host_seconds, device_left - segment_device_seconds
        critical_path = max(critical_path, issued + device_left)
    return critical_path - device_seconds


def pass_issue_seconds(full_profile: Profile, rank_profile: Profile, plan: Plan, load: NodeLoad) -> tuple[float, float]:
    """Seconds of the host for one micro-batch's forward and backward of a part of the `full_profile` model."""
    forward, backward = (
        sum(operator.count for operator in rank_profile.operators if operator.phase == phase)
        for phase in ("forward", "backward")
    )
    block_operators = (
        sum(operator.count for operator in block_forward_operators(full_profile, rank_profile))
        if plan.recompute != "none"
        else 0
    )
    block_forward_seconds, recompute_seconds = (
        _seconds_per_operator(rank_profile, load, f"host {pass_name} {{}} {plan.recompute}") if block_operators else 0.0
        for pass_name in ("forward", "again")
    )
    return (
        (forward - block_operators) * _seconds_per_operator(rank_profile, load, "host forward {}")
        + block_operators * block_forward_seconds,
        backward * _seconds_per_operator(rank_profile, load, "host backward {}") + block_operators * recompute_seconds,
    )


def accumulation_issue_seconds(profile: Profile, load: NodeLoad) -> float:
    """Seconds of the host to add a micro-batch's gradients to those before it."""
    return sum(parameter.trainable for parameter in profile.parameters) * _host_seconds(load, "host adding")


def optimizer_issue_seconds(profile: Profile, load: NodeLoad, *, fused: bool) -> float:
    """Seconds of the host for the optimizer's step."""
    operation = "host optimizer" + (":fused" if fused else "")
    return sum(parameter.trainable for parameter in profile.parameters) * _host_seconds(load, operation)


def _seconds_per_operator(profile: Profile, load: NodeLoad, operation_template: str) -> float:
    """Seconds of the host for one operator: products and convolutions come with operators of their own around them."""
    counts = {
        kind: sum(operator.count for operator in profile.operators if operator.kind == kind)
        for kind in ("matmul", "convolution")
    }
    total = sum(counts.values())
    if not total:
        return load.device.overhead
    return sum(count * _host_seconds(load, operation_template.format(kind)) for kind, count in counts.items()) / total


def _host_seconds(load: NodeLoad, operation: str) -> float:
    curve = load.device.nearest_curve(operation, "float32", ranks=load.ranks)
    return 1 / curve.rate_at((1.0,)) if curve else load.device.overhead
