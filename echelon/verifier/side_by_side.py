"""Run a plan side by side with its reference on every rank. Rank 0 compares after each step, so nothing is kept for longer."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from echelon.engine.process_groups import WorldCommunicator
from echelon.errors import EchelonError, VerificationError, first_line
from echelon.job import Job
from echelon.plan.plan import Plan
from echelon.trials.determinism import DeterministicMode
from echelon.verifier import diagnose_failure, tolerances
from echelon.verifier.candidate_run import CandidateRun
from echelon.verifier.compare_outputs import format_names
from echelon.verifier.context import Comparator, Objection, VerificationContext, dropout_note
from echelon.verifier.diagnose_failure import Diagnosis
from echelon.verifier.loss_state_check import find_divergent_loss_state
from echelon.verifier.regrouping_check import require_separable_loss
from echelon.verifier.single_device import SingleDeviceContext, WarmReference
from echelon.verifier.tensor_checksum import compare_replicas


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProofSetup:
    """A prepared proof, equal on every rank but for `context`, which is rank 0's."""

    job: Job
    plan: Plan
    ranks: WorldCommunicator
    steps: tuple[int, ...]
    determinism: DeterministicMode
    reference_plan: Plan | None = None  #: what the plan is compared with; None: one device
    context: VerificationContext | None = None

    def start_uncompiled_run(self, determinism: DeterministicMode, *, without_dropout: bool = True) -> CandidateRun:
        """The plan's run in float64, without compiled modules, which run no hooks."""
        plan = dataclasses.replace(self.plan, compile=False)
        return CandidateRun(self.job, plan, self.ranks, determinism, torch.float64, without_dropout=without_dropout)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProofResult:
    """The outcome of two runs side by side. The comparators are rank 0's."""

    comparator: Comparator | None  #: in float64
    drift_comparator: Comparator | None  #: in the plan's own precision
    skipped_steps: int  #: steps that a loss scale made the run in its own precision skip
    loss_state: Objection | None  #: state of the loss that the plan does not keep as one device does


def run_side_by_side(setup: ProofSetup) -> ProofResult:
    """Run the plan in float64 and in its own precision side by side with the reference. Every rank must call it."""
    job, plan, ranks, steps, determinism = setup.job, setup.plan, setup.ranks, setup.steps, setup.determinism
    context, reference_plan = setup.context, setup.reference_plan
    comparator: Comparator | None = None
    drift_comparator: Comparator | None = None
    warm: WarmReference | None = None
    reference_run: CandidateRun | None = None
    per_sample = reference_plan is not None
    with _failures_of(plan), contextlib.ExitStack() as stack:
        float64_run = CandidateRun(job, plan, ranks, determinism, torch.float64, per_sample=per_sample)
        stack.enter_context(float64_run)
        own_mode = dataclasses.replace(determinism, widen_casts=False)
        own_precision_run = stack.enter_context(CandidateRun(job, plan, ranks, own_mode, None))
        if reference_plan is not None:
            reference_run = CandidateRun(job, reference_plan, ranks, determinism, torch.float64, per_sample=True)
            stack.enter_context(reference_run)
        start_values = {} if reference_run is None else reference_run.gather_start_values()
        forward_order = {} if reference_run is None else reference_run.forward_order
        checksums = float64_run.checksum_state()
        with ranks.raise_on_all_ranks():
            if context is not None:
                if reference_run is not None:
                    context.model_hash = own_precision_run.run.fingerprint  # of the model as it is, before float64
                    if reference_run.modules_without_dropout:
                        context.notes.append(dropout_note(reference_run.modules_without_dropout))
                elif isinstance(context, SingleDeviceContext):
                    warm = context.take_reference()
                    start_values, forward_order = warm.start_values, warm.reference.forward_order
                start_values = tolerances.copy_to_float64(start_values)
                comparator = Comparator(context, start_values, forward_order, in_float64=True)
                drift_comparator = Comparator(context, start_values, forward_order, in_float64=False)
                comparator.compare_start(checksums, steps[0])
        # The first step shows the drift, except in fp16, whose loss scale may skip some steps before it has settled.
        drift_steps = steps if (plan.precision or job.precision) == "fp16" else steps[:1]
        for step in steps:
            actual = float64_run.step(step)
            own_precision = own_precision_run.step(step) if step in drift_steps else None
            expected = reference_run.step(step) if reference_run is not None else None
            checksums = float64_run.checksum_state()
            with ranks.raise_on_all_ranks():
                if comparator and drift_comparator and actual:
                    expected = warm.step(step) if warm is not None else expected
                    assert expected is not None
                    comparator.compare_step(actual, expected, checksums)
                    if own_precision:
                        drift_comparator.compare_step(own_precision, expected)
        if context is not None and warm is not None and warm.reference.altered_update_ops:
            names = format_names(sorted(warm.reference.altered_update_ops))
            changes = "random numbers are held and casts below float64 are lifted"
            context.notes.append(f"in the optimizers' steps {changes}, in both runs: {names}")
        loss_state = None
        if ranks.broadcast_object(comparator is not None and comparator.first_divergence is None):
            reference = None if warm is None else warm.reference
            with ranks.raise_on_all_ranks():
                if reference is not None:
                    require_separable_loss(reference, steps[-1])
            loss_state = find_divergent_loss_state(float64_run, steps[-1], reference)
        return ProofResult(
            comparator=comparator, drift_comparator=drift_comparator, skipped_steps=own_precision_run.skipped_steps,
            loss_state=loss_state,
        )  # fmt: skip


@contextlib.contextmanager
def _failures_of(plan: Plan) -> Iterator[None]:
    """An error that the job raises under a plan, after one device has run it, is a result: the plan cannot run it."""
    try:
        yield
    except EchelonError:
        raise
    except Exception as error:
        raise VerificationError(
            f'under "{plan}" the job fails where one device does not ({type(error).__name__}, "{first_line(error)}"); use another plan, or '
            "mend what it names"
        ) from error


def compare_random_draws(setup: ProofSetup, comparator: Comparator | None) -> None:
    """Run one step with random numbers as training draws them. Every rank must call it. No reference can draw the same numbers, and none is
    needed: what all tensor ranks hold has to stay equal."""
    context = setup.context
    if setup.plan.mesh.tp == 1:
        return
    if not setup.ranks.broadcast_object(context is not None and context.draws_random_numbers):
        return
    mode, step = dataclasses.replace(setup.determinism, fix_random=False), setup.steps[-1]
    with setup.start_uncompiled_run(mode, without_dropout=False) as candidate:
        checksums = candidate.checksum_gradients(step)
    with setup.ranks.raise_on_all_ranks():
        if comparator:
            comparator.add_differences(compare_replicas(checksums, step, "draw"))


def diagnose(setup: ProofSetup, comparator: Comparator | None) -> Diagnosis | None:
    """Why the proof failed, on rank 0; None: it did not, or there is no single device to look at. Every rank must call it."""
    context = setup.context if isinstance(setup.context, SingleDeviceContext) else None
    divergence = comparator.first_divergence if context and comparator else None
    step = setup.ranks.broadcast_object(-1 if divergence is None else divergence.step)
    if step < 0:
        return None
    steps = setup.steps[: setup.steps.index(step) + 1]
    with setup.start_uncompiled_run(setup.determinism) as candidate:
        return diagnose_failure.diagnose(candidate, setup.ranks, steps, context, comparator)
