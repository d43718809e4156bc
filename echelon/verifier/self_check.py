"""Before a no: whether the job is deterministic at all. A job that differs from itself on one device proves nothing about a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from echelon.data.sample_digest import digest
from echelon.plan.certificate import Finding
from echelon.verifier import tolerances
from echelon.verifier.compare import NOT_COMPARABLE, Difference
from echelon.verifier.context import Comparator
from echelon.verifier.diagnose_failure import expected_outputs
from echelon.verifier.first_divergence import find_first_divergence
from echelon.verifier.single_device import SingleDeviceContext
from echelon.verifier.tolerances import ParameterTolerance, copy_to_float64

#: Not finite in both runs: a fault of the job, and the same fault in both.
_SAME_FAULT = ("neither run is finite", "it holds NaN")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nondeterminism:
    """How two runs of one device differ, in words and as a finding."""

    description: str
    finding: Finding


def self_check(context: SingleDeviceContext, comparator: Comparator) -> Nondeterminism | None:
    """Two runs of the reference against each other, up to the step at which the plan departs; None: they agree, or the plan does."""
    if comparator.first_divergence is None:
        return None
    steps = context.steps[: context.steps.index(comparator.first_divergence.step) + 1]
    return _compare_readings(context, steps) or _compare_runs(context, steps, comparator)


def _compare_readings(context: SingleDeviceContext, steps: Sequence[int]) -> Nondeterminism | None:
    for step in steps:
        positions = np.arange(context.data.samples_in(step))
        digest_once, digest_again = (digest(context.data.read(step, positions)) for _ in range(2))
        if digest_once != digest_again:
            description = (
                f"the data is not deterministic: the batch of step {step} differs between two readings, so ranks that read it by themselves "
                "train on different samples; seed the data set's own random numbers by the sample's index"
            )
            return Nondeterminism(
                description=description, finding=_self_finding(f"data (step {step})", 1, NOT_COMPARABLE, 0.0)
            )
    return None


def _compare_runs(context: SingleDeviceContext, steps: Sequence[int], comparator: Comparator) -> Nondeterminism | None:
    first_run, second_run = context.build_reference(), context.build_reference()
    parameter_tolerance = ParameterTolerance(copy_to_float64(dict(first_run.model.named_parameters())))
    for step in steps:
        differences = tolerances.compare_records(first_run.step(step), second_run.step(step), parameter_tolerance)
        relevant = [difference for difference in differences if difference.reason not in _SAME_FAULT]
        divergence = find_first_divergence(relevant, context.bounds, comparator.forward_order)
        if divergence is not None:
            differing_count = sum(not context.bounds.allows(difference) for difference in relevant)
            amount = "a value that is not finite" if divergence.value == NOT_COMPARABLE else f"{divergence.value:.1e}"
            description = (
                f"the job is not deterministic: two runs of one device differ by {amount} in the {divergence.kind} of {divergence.name} at step {step} "
                f"({differing_count} of {len(relevant)} values differ){_first_differing_module(context, step)}; no plan can be proved until they agree: seed what it draws from, "
                "or take it out"
            )
            return Nondeterminism(description=description, finding=_finding_of(divergence, differing_count, context))
    return None


def _first_differing_module(context: SingleDeviceContext, step: int) -> str:
    """The first module whose output differs between two runs."""
    first_outputs, second_outputs = (expected_outputs(context.reference_at(step), step) for _ in range(2))
    for first, second in zip(first_outputs, second_outputs, strict=False):
        if first != second and first.checksums:
            return f", first in the output of {first.path or 'the model itself'}"
    return (
        ""
        if not first_outputs
        else ", and the outputs of all modules agree: the loss, backward or the optimizer differs"
    )


def _finding_of(divergence: Difference, tensors: int, context: SingleDeviceContext) -> Finding:
    return _self_finding(
        f"{divergence.kind} of {divergence}", tensors, divergence.value, context.bounds.bound_for(divergence)
    )


def _self_finding(where: str, tensors: int, worst: float, bound: float) -> Finding:
    return Finding(kind="self", tensors=tensors, max_difference=worst, where=where, bound=bound)
