"""Before a no: whether the job is deterministic at all. A job that differs from itself on one device proves nothing about a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from echelon.data.sample_digest import digest
from echelon.plan.certificate import Finding
from echelon.verifier import tolerances
from echelon.verifier.compare import BROKEN, Difference
from echelon.verifier.context import Referee
from echelon.verifier.diagnose_failure import expected_outputs
from echelon.verifier.first_divergence import first
from echelon.verifier.single_device import Case
from echelon.verifier.tolerances import Slack, copied

#: Not finite in both runs: a fault of the job, and the same fault in both.
_SAME = ("neither run is finite", "it holds NaN")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsteady:
    """How two runs of one device differ, in words and as a finding."""

    words: str
    finding: Finding


def self_check(case: Case, proof: Referee) -> Unsteady | None:
    """Two runs of the reference against each other, up to the step at which the plan departs; None: they agree, or the plan does."""
    if proof.worst is None:
        return None
    steps = case.steps[: case.steps.index(proof.worst.step) + 1]
    return _data(case, steps) or _numbers(case, steps, proof)


def _data(case: Case, steps: Sequence[int]) -> Unsteady | None:
    for step in steps:
        positions = np.arange(case.feed.size(step))
        once, again = (digest(case.feed.take(step, positions)) for _ in range(2))
        if once != again:
            words = (
                f"the data is not deterministic: the batch of step {step} differs between two readings, so ranks that read it by themselves "
                "train on different samples; seed the data set's own random numbers by the sample's index"
            )
            return Unsteady(words=words, finding=_finding(f"data (step {step})", 1, BROKEN, 0.0))
    return None


def _numbers(case: Case, steps: Sequence[int], proof: Referee) -> Unsteady | None:
    one, other = case.reference(), case.reference()
    slack = Slack(copied(dict(one.model.named_parameters())))
    for step in steps:
        made = tolerances.differences(one.step(step), other.step(step), slack)
        found = [each for each in made if each.why not in _SAME]
        worst = first(found, case.bounds, proof.order)
        if worst is not None:
            off = sum(not case.bounds.hold(each) for each in found)
            size = "a value that is not finite" if worst.value == BROKEN else f"{worst.value:.1e}"
            words = (
                f"the job is not deterministic: two runs of one device differ by {size} in the {worst.kind} of {worst.name} at step {step} "
                f"({off} of {len(found)} values differ){_where(case, step)}; no plan can be proved until they agree: seed what it draws from, "
                "or take it out"
            )
            return Unsteady(words=words, finding=_of(worst, off, case))
    return None


def _where(case: Case, step: int) -> str:
    """The first module whose output differs between two runs."""
    one, other = (expected_outputs(case.at(step), step) for _ in range(2))
    for mine, true in zip(one, other, strict=False):
        if mine != true and mine.marks:
            return f", first in the output of {mine.path or 'the model itself'}"
    return "" if not one else ", and the outputs of all modules agree: the loss, backward or the optimizer differs"


def _of(worst: Difference, off: int, case: Case) -> Finding:
    return _finding(f"{worst.kind} of {worst}", off, worst.value, case.bounds.of(worst))


def _finding(where: str, tensors: int, worst: float, bound: float) -> Finding:
    return Finding(kind="self", tensors=tensors, worst=worst, where=where, bound=bound)
