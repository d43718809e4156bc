"""Before a proof fails: check that the job is deterministic. One that differs from itself on one device proves nothing about a plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from echelon.plan.certificate import Finding
from echelon.verifier import tolerances
from echelon.verifier.compare import NOT_COMPARABLE
from echelon.verifier.context import Comparator, Objection
from echelon.verifier.diagnose_failure import expected_outputs
from echelon.verifier.first_divergence import find_first_divergence
from echelon.verifier.single_device import SingleDeviceContext
from echelon.verifier.tolerances import ParameterTolerance, copy_to_float64

#: Not finite in both runs: the same fault of the job in both.
_SAME_FAULT = ("neither run is finite", "it holds NaN")


def self_check(context: SingleDeviceContext, comparator: Comparator) -> Objection | None:
    """Compare two runs of the reference up to the step in which the plan diverges; None: they agree, or the plan does not diverge."""
    if comparator.first_divergence is None:
        return None
    steps = context.steps[: context.steps.index(comparator.first_divergence.step) + 1]
    return _compare_readings(context, steps) or _compare_runs(context, steps, comparator)


def _compare_readings(context: SingleDeviceContext, steps: Sequence[int]) -> Objection | None:
    for step in steps:
        if context.data.repeated_digest(step, np.arange(context.data.samples_in(step))) is None:
            where = f"data (step {step})"
            return Objection(
                description=f"the data is not deterministic: the batch of step {step} differs between two readings, so ranks that read it by "
                "themselves train on different samples; seed the data set's own random numbers by the sample's index",
                finding=Finding(kind="self", tensors=1, max_difference=NOT_COMPARABLE, where=where, bound=0.0),
            )
    return None


def _compare_runs(context: SingleDeviceContext, steps: Sequence[int], comparator: Comparator) -> Objection | None:
    first, second, bounds = context.build_reference(), context.build_reference(), context.bounds
    parameter_tolerance = ParameterTolerance(copy_to_float64(dict(first.model.named_parameters())))
    for step in steps:
        differences = tolerances.compare_records(first.step(step), second.step(step), parameter_tolerance)
        relevant = [difference for difference in differences if difference.reason not in _SAME_FAULT]
        divergence = find_first_divergence(relevant, bounds, comparator.forward_order)
        if divergence is None:
            continue
        count, value = sum(not bounds.allows(difference) for difference in relevant), divergence.value
        amount = "a value that is not finite" if value == NOT_COMPARABLE else f"{value:.1e}"
        where, bound = f"{divergence.kind} of {divergence}", bounds.bound_for(divergence)
        return Objection(
            description=f"the job is not deterministic: two runs of one device differ by {amount} in the {divergence.kind} of {divergence.name} "
            f"at step {step} ({count} of {len(relevant)} values differ){_first_differing_module(context, step)}; no plan can be proved until "
            "they agree: seed its random numbers, or remove them",
            finding=Finding(kind="self", tensors=count, max_difference=value, where=where, bound=bound),
        )
    return None


def _first_differing_module(context: SingleDeviceContext, step: int) -> str:
    first_outputs, second_outputs = (expected_outputs(context.reference_at(step), step) for _ in range(2))
    for first, second in zip(first_outputs.items(), second_outputs.items(), strict=False):
        (path, _), checksums = first
        if first != second and checksums:
            return f", first in the output of {path or 'the model itself'}"
    text = ", and the outputs of all modules agree: the loss, backward or the optimizer differs"
    return text if first_outputs else ""
