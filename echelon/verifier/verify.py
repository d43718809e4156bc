"""The proof: the truth and the plan, step by step beside each other, and the certificate of how far they were apart.

Every rank of the world calls `verify`. All of them execute the plan through the engine, in float64, which decides, and in the plan's own
precision, which decides only where all gradients are off by one factor. Rank 0 also runs the reference and compares, so that nothing is
kept longer than one step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from echelon.engine.checks.read_order_check import require_independent_samples
from echelon.engine.process_groups import WorldCommunicator
from echelon.errors import EchelonError, PlanError, VerificationError
from echelon.job import Job
from echelon.plan.certificate import Certificate, Finding
from echelon.plan.check import require_executable
from echelon.plan.check_model import splits_batch
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.profiler.sample_coupling import first_line
from echelon.trials.determinism import DeterministicMode
from echelon.trials.isolation import IsolatedJob
from echelon.trials.trial_context import preserve_job_state
from echelon.verifier import tolerances
from echelon.verifier.batch_collation import RankCollatedData, collate_as_ranks
from echelon.verifier.candidate_run import CandidateRun
from echelon.verifier.choose_reference import (
    ReferenceChoice,
    choose_reference,
    fits_easily,
    free_memory,
    parse_reference,
    require_unsplit_batches,
)
from echelon.verifier.compare import Bounds, summarize_differences
from echelon.verifier.compare_outputs import format_names
from echelon.verifier.context import Comparator, VerificationContext
from echelon.verifier.diagnose_failure import Diagnosis, diagnose
from echelon.verifier.fingerprints import versions
from echelon.verifier.loss_state_check import DivergentLossState, find_divergent_loss_state
from echelon.verifier.plan_reference import PlanReferenceContext, ReferencePlanRun
from echelon.verifier.precision_drift import DRIFT_BOUNDS, MIN_FACTOR_DEVIATION
from echelon.verifier.reduced_job import ReducedJob, affordable_flops, reduce_job
from echelon.verifier.reference_data import ReferenceData, open_reference_data
from echelon.verifier.regrouping_check import require_separable_loss
from echelon.verifier.self_check import Nondeterminism, self_check
from echelon.verifier.single_device import SingleDeviceContext
from echelon.verifier.staleness import add_staleness_finding, measure_staleness, synchronous_plan
from echelon.verifier.tensor_checksum import compare_replicas
from echelon.world import World, read_world

T = TypeVar("T")

_RANDOM_PARTS_MESSAGE = (
    "{where}: parts of a batch draw other numbers than the whole, so that nobody can tell whether samples see each other; draw them through "
    "functions of torch, numpy.random or random, which a proof holds still, or use a plan that keeps batches whole"
)


def verify(
    job: Job,
    plan: Plan,
    *,
    world: World | None = None,
    steps: int = 2,
    job_hash: str = "",
    device: torch.device | None = None,
    profile: Profile | None = None,
    reference: str = "auto",
    memory: int | None = None,
    seconds: float | None = None,
) -> Certificate:
    """Prove that `plan` computes what one device computes. Called by every rank; each gets the same certificate.

    Looks at the first `steps` steps, and at the epoch's last where it is short. `job_hash` is `identity.job_hash` of the job's
    file: without it the certificate covers no file. A plan that `check` refuses for the job's `profile` is refused here too.
    `reference`: what to compare with, "device", "host" or another plan; "auto" is the strongest for which one device has the
    memory: `memory` bytes, or what is free. `seconds`: how long it may take; a large job is then proved on fewer samples.
    """
    world = world or read_world()
    if plan.ranks != world.size:
        raise PlanError(
            f'the plan "{plan}" is for {plan.ranks} ranks and {world.size} are here: start {plan.ranks}, or change dp'
        )
    if steps < 1:
        raise VerificationError(f"steps={steps}: a proof needs at least one step")
    require_executable(plan, profile)
    job = dataclasses.replace(job, warmup_data=None)  # its steps compute the same with other samples
    with preserve_job_state(job):
        return _verify(job, plan, world, steps, job_hash, device, profile, reference, memory, seconds)


def _verify(
    job: Job,
    plan: Plan,
    world: World,
    steps: int,
    job_hash: str,
    device: torch.device | None,
    profile: Profile | None,
    reference: str,
    memory: int | None,
    seconds: float | None,
) -> Certificate:
    if plan != synchronous_plan(plan):
        inner_certificate = verify(
            job, synchronous_plan(plan), world=world, steps=steps, job_hash=job_hash, device=device, profile=profile,
            reference=reference, memory=memory,
        )  # fmt: skip
        return _prove_staleness_bound(inner_certificate, job, plan, world, device)
    ranks = WorldCommunicator(world, device)
    try:
        reduced_job = None if seconds is None else _reduce_job(job, plan, profile, ranks, seconds)
        if reduced_job is not None:
            inner_certificate = verify(
                reduced_job.job, reduced_job.plan, world=world, steps=steps, job_hash=job_hash, device=device, profile=reduced_job.profile,
                reference=reference, memory=memory,
            )  # fmt: skip
            return dataclasses.replace(
                inner_certificate, plan=plan, batch=job.batch_size, notes=(reduced_job.note, *inner_certificate.notes)
            )
        with ranks.raise_on_all_ranks():
            if world.is_main and plan.mesh.dp > 1:
                require_independent_samples(job)
            data = open_reference_data(job)
            chosen_steps = data.choose_steps(steps)
            decision = _choose_reference(job, plan, ranks, profile, reference, memory) if world.is_main else None
        reference_choice, is_checked, unknown_note = _broadcast(ranks, decision)
        context: VerificationContext | None = None
        with ranks.raise_on_all_ranks():
            if world.rank == world.size - 1 and not is_checked:
                unknown_note = _require_supported(
                    job, plan, reference_choice
                )  # beside rank 0's first step: it takes about as long
            if world.is_main:
                data = collate_as_ranks(data, plan)
                context = _build_context(job, plan, data, chosen_steps, reference_choice, ranks)
                if isinstance(data, RankCollatedData):
                    context.notes.append(
                        "collation mixes samples or draws: one device gets the micro-batches of the plan, joined"
                    )
        unknown_note = ranks.all_gather_object(unknown_note)[-1]
        with ranks.raise_on_all_ranks():
            if context and unknown_note and context.determinism.needs_seeding and splits_batch(plan, job.batch_size):
                raise VerificationError(
                    _RANDOM_PARTS_MESSAGE.format(
                        where=format_names([note for note in context.notes if "be held" in note])
                    )
                )
        if context and unknown_note:
            context.notes.append(unknown_note)
        determinism = _broadcast(ranks, context.determinism if context else None)
        comparator, drift_comparator, skipped_steps, loss_state = _run_side_by_side(
            job, plan, ranks, chosen_steps, context, determinism, reference_choice
        )
        _check_random_draws(job, plan, ranks, chosen_steps, context, comparator, determinism)
        nondeterminism: Nondeterminism | None = None
        with ranks.raise_on_all_ranks():
            if context and comparator:
                context.widen_bounds_for_rounding(comparator)
                nondeterminism = self_check(context, comparator) if isinstance(context, SingleDeviceContext) else None
        diagnosis = _diagnose(
            job, plan, ranks, chosen_steps, None if nondeterminism else context, comparator, determinism
        )
        with ranks.raise_on_all_ranks():
            certificate = (
                _build_certificate(
                    context,
                    comparator,
                    drift_comparator,
                    diagnosis,
                    skipped_steps,
                    job_hash,
                    nondeterminism,
                    loss_state,
                )
                if context and comparator and drift_comparator
                else None
            )
        text = _broadcast(ranks, certificate.to_json() if certificate else None)
        return Certificate.from_json(text, source="the certificate of rank 0")
    finally:
        ranks.close()


def _reduce_job(
    job: Job, plan: Plan, profile: Profile | None, ranks: WorldCommunicator, seconds: float
) -> ReducedJob | None:
    """The smaller job that all ranks prove in place of this one, by rank 0's clock; None: this one."""
    affordable = 0.0
    with ranks.raise_on_all_ranks():
        if ranks.world.is_main:
            profile = profile or _profile_job(job)[0]
            affordable = math.inf if profile is None else affordable_flops(ranks.device, seconds)
    affordable, profile = _broadcast(ranks, (affordable, profile))
    return None if profile is None else reduce_job(job, plan, profile, affordable, open_reference_data(job).total_steps)


def _prove_staleness_bound(
    certificate: Certificate, job: Job, plan: Plan, world: World, device: torch.device | None
) -> Certificate:
    """What was proved with all ranks in step, and what is seen of the bound that they keep as planned."""
    ranks = WorldCommunicator(world, device)
    try:
        return add_staleness_finding(certificate, plan, measure_staleness(job, plan, ranks))
    finally:
        ranks.close()


def _choose_reference(
    job: Job, plan: Plan, ranks: WorldCommunicator, profile: Profile | None, reference: str, memory: int | None
) -> tuple[ReferenceChoice, bool, str]:
    """What to compare with, whether the plan was held against a profile, and what has to be said where that was not possible."""
    if reference != "auto":
        return parse_reference(reference, plan, job, profile), profile is not None, _coupling_note(plan, profile)
    memory_limit, unknown_note = free_memory(ranks.device) if memory is None else memory, ""
    if memory is None and profile is None and fits_easily(job, memory_limit):
        return ReferenceChoice(), False, ""
    if profile is None:
        profile, unknown_note = _profile_job(job)
        require_executable(plan, profile)
    choice = choose_reference(
        plan, job, profile, device=ranks.device, memory=memory_limit, host_memory=free_memory(torch.device("cpu"))
    )
    return choice, True, unknown_note or _coupling_note(plan, profile)


def _require_supported(job: Job, plan: Plan, reference_choice: ReferenceChoice) -> str:
    """Raise where a training would: some plans end in ranks that wait for each other for ever, which no comparison can tell. Gives what
    has to be said where nobody knows."""
    if plan.mesh.dp == 1 and plan.micro is None:
        return ""
    profile, unknown_note = _profile_job(job)
    require_executable(plan, profile)
    require_unsplit_batches(reference_choice, plan, profile)
    return unknown_note or _coupling_note(plan, profile)


def _coupling_note(plan: Plan, profile: Profile | None) -> str:
    """What has to be said where the plan parts batches, and only this proof tells whether it may."""
    if profile is None or profile.samples_coupled is not None or not splits_batch(plan, profile.batch):
        return ""
    return (
        f"beforehand it was not known whether samples of a batch see each other, because {profile.coupling_unknown_reason}: the reference computes whole "
        "batches, so that they would show here"
    )


def _profile_job(job: Job) -> tuple[Profile | None, str]:
    """None, and why, where it cannot be made: such a job may still be proved, or fail there for its own reason."""
    from echelon.profiler import profile

    isolated_job = IsolatedJob(job)
    try:
        with isolated_job.active():
            return profile(isolated_job.job), ""
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        return None, f"whether a training would refuse the plan is not known: the job could not be profiled ({reason})"


def _build_context(
    job: Job,
    plan: Plan,
    data: ReferenceData,
    steps: Sequence[int],
    reference_choice: ReferenceChoice,
    ranks: WorldCommunicator,
) -> VerificationContext:
    if reference_choice.kind == "plan":
        return PlanReferenceContext(job, plan, data, steps, reference_choice)
    device = ranks.device if reference_choice.kind == "device" else torch.device("cpu")
    return SingleDeviceContext(job, plan, data, steps, device, reference_choice)


def _run_side_by_side(
    job: Job,
    plan: Plan,
    ranks: WorldCommunicator,
    steps: Sequence[int],
    context: VerificationContext | None,
    determinism: DeterministicMode,
    reference_choice: ReferenceChoice,
) -> tuple[Comparator | None, Comparator | None, int, DivergentLossState | None]:
    """The plan's runs in float64 and in its own precision, held against the truth; the number of steps that a loss scale made the
    second skip; and state of the loss that the plan does not keep as one device does. The referees are rank 0's."""
    with _failures_of(plan), contextlib.ExitStack() as stack:
        float64_run = stack.enter_context(
            CandidateRun(job, plan, ranks, determinism, torch.float64, per_sample=reference_choice.plan is not None)
        )
        own_precision_run = stack.enter_context(
            CandidateRun(job, plan, ranks, dataclasses.replace(determinism, widen_casts=False), None)
        )
        reference_run = (
            stack.enter_context(ReferencePlanRun(job, reference_choice.plan, ranks, determinism))
            if reference_choice.plan is not None
            else None
        )
        start_values = reference_run.gather_start_values() if reference_run is not None else {}
        checksums_before = float64_run.checksum_state()
        comparator = drift_comparator = warm_reference = None
        with ranks.raise_on_all_ranks():
            if reference_run is not None and context is not None:
                context.model_hash = own_precision_run.run.fingerprint  # of the model as it is, before float64
                reference_run.add_notes(context)
            elif isinstance(context, SingleDeviceContext):
                warm_reference = context.take_reference()
                start_values = warm_reference.start_values
            if context is not None:
                float64_start, forward_order = (
                    tolerances.copy_to_float64(start_values),
                    warm_reference.reference.forward_order
                    if warm_reference
                    else reference_run.forward_order
                    if reference_run
                    else {},
                )
                comparator, drift_comparator = (
                    Comparator(context, float64_start, forward_order, in_float64=in_float64)
                    for in_float64 in (True, False)
                )
                comparator.compare_start(checksums_before, steps[0])
        # The first step tells the drift, but for fp16: its loss scale may skip some before it has settled.
        drift_steps = steps if (plan.precision or job.precision) == "fp16" else steps[:1]
        for step in steps:
            actual, own_precision_record = (
                float64_run.step(step),
                own_precision_run.step(step) if step in drift_steps else None,
            )
            reference_record = reference_run.step(step) if reference_run is not None else None
            checksums_after = float64_run.checksum_state()
            with ranks.raise_on_all_ranks():
                if comparator and drift_comparator and actual:
                    expected = warm_reference.step(step) if warm_reference is not None else reference_record
                    assert expected is not None
                    comparator.compare_step(actual, expected, checksums_after)
                    if own_precision_record:
                        drift_comparator.compare_step(own_precision_record, expected)
        if context is not None and warm_reference is not None and warm_reference.reference.altered_update_ops:
            names = format_names(sorted(warm_reference.reference.altered_update_ops))
            context.notes.append(
                f"in the optimizers' steps random numbers are held and casts below float64 are lifted, in both runs: {names}"
            )
        loss_state = None
        if _broadcast(ranks, comparator.first_divergence is None if comparator else None):
            with ranks.raise_on_all_ranks():
                if warm_reference is not None:
                    require_separable_loss(warm_reference.reference, steps[-1])
            loss_state = find_divergent_loss_state(
                float64_run, steps[-1], warm_reference.reference if warm_reference else None
            )
        return comparator, drift_comparator, own_precision_run.skipped_steps, loss_state


@contextlib.contextmanager
def _failures_of(plan: Plan) -> Iterator[None]:
    """What the job raises under a plan, after one device has run it, is an answer: the plan does not run it."""
    try:
        yield
    except EchelonError:
        raise
    except Exception as error:
        raise VerificationError(
            f'under "{plan}" the job fails where one device does not ({type(error).__name__}, "{first_line(error)}"); use another plan, or '
            "mend what it names"
        ) from error


def _check_random_draws(
    job: Job,
    plan: Plan,
    ranks: WorldCommunicator,
    steps: Sequence[int],
    context: VerificationContext | None,
    comparator: Comparator | None,
    determinism: DeterministicMode,
) -> None:
    """One step with random numbers as a training draws them. No reference can draw the same, and none is needed: what the ranks of the
    tensor axis all hold has to stay the same there."""
    if plan.mesh.tp == 1 or not _broadcast(ranks, context.draws_random_numbers if context else None):
        return
    random_mode = dataclasses.replace(determinism, fix_random=False)
    with CandidateRun(
        job, dataclasses.replace(plan, compile=False), ranks, random_mode, torch.float64, without_dropout=False
    ) as candidate:
        checksums = candidate.checksum_gradients(steps[-1])
    with ranks.raise_on_all_ranks():
        if comparator:
            comparator.add_differences(compare_replicas(checksums, steps[-1], "draw"))


def _diagnose(
    job: Job,
    plan: Plan,
    ranks: WorldCommunicator,
    steps: Sequence[int],
    context: VerificationContext | None,
    comparator: Comparator | None,
    determinism: DeterministicMode,
) -> Diagnosis | None:
    """Why the proof failed, on rank 0; None where it did not, or where there is no one device to look at."""
    device_context = context if isinstance(context, SingleDeviceContext) else None
    step = _broadcast(
        ranks, comparator.first_divergence.step if device_context and comparator and comparator.first_divergence else -1
    )
    if step < 0:
        return None
    # Compiled modules do not tell what those inside them give.
    with CandidateRun(job, dataclasses.replace(plan, compile=False), ranks, determinism, torch.float64) as candidate:
        return diagnose(candidate, ranks, steps[: steps.index(step) + 1], device_context, comparator)


def _build_certificate(
    context: VerificationContext,
    comparator: Comparator,
    drift_comparator: Comparator,
    diagnosis: Diagnosis | None,
    skipped_steps: int,
    job_hash: str,
    nondeterminism: Nondeterminism | None = None,
    loss_state: DivergentLossState | None = None,
) -> Certificate:
    findings, reference_choice = summarize_differences(comparator.differences, context.bounds), context.reference_choice
    if (
        diagnosis is not None
        and diagnosis.output_finding is not None
        and not (diagnosis.output_finding.is_within_bound and _has_outputs(findings))
    ):
        findings = (
            diagnosis.output_finding,
            *(each for each in findings if each.kind != "output"),
        )  # module by module, which tells more
    notes = [*filter(None, [reference_choice.note]), *context.notes, *comparator.notes, *drift_comparator.notes]
    remarks = diagnosis.remarks if diagnosis is not None else ()
    if comparator.first_divergence is not None and reference_choice.plan is not None:
        remarks = (
            f'either the plan is wrong or its reference "{reference_choice.plan}" is: this proof cannot tell which',
        )
    precision = context.plan.precision or context.job.precision
    if skipped_steps:
        notes.append(
            f"in {precision} {skipped_steps} of {len(context.steps)} steps were skipped while the loss scale settled; where the first is, its drift "
            "decides nothing"
        )
    divergent = "; ".join(filter(None, [comparator.divergence_text, *remarks]))
    if drift_comparator.gradient_factor is not None and not divergent:
        where = f"gradients in {precision} at step {context.steps[0]}"
        deviation = abs(drift_comparator.gradient_factor - 1)
        tensors = len({each.name for each in drift_comparator.differences if each.kind == "gradient"})
        findings = (
            *findings,
            Finding(kind="drift", tensors=tensors, max_difference=deviation, where=where, bound=MIN_FACTOR_DEVIATION),
        )
        divergent = (
            f"{where}: {drift_comparator.gradient_factor:.6g} times the reference, and in float64 they agree: looks like a loss scale, or another factor of "
            f"{precision} alone, that is not taken out"
        )
    if loss_state is not None and not divergent:
        findings, divergent = (*findings, loss_state.finding), loss_state.description
    if nondeterminism is not None:
        findings, divergent = (nondeterminism.finding, *findings), nondeterminism.description
        notes.append("not deterministic: two runs of one device differ, so that nothing is known of the plan")
    return Certificate(
        plan=context.plan,
        job=job_hash,
        model=context.model_hash,
        versions=versions(),
        batch=context.job.batch_size,
        steps=len(context.steps),
        verified=all(each.is_within_bound for each in findings),
        findings=findings,
        divergent=divergent,
        drift=summarize_differences(drift_comparator.differences, Bounds(default=DRIFT_BOUNDS[precision])),
        notes=tuple(notes),
        deterministic=nondeterminism is None,
        reference=reference_choice.kind,
        reference_plan=reference_choice.plan,
    )


def _has_outputs(findings: Sequence[Finding]) -> bool:
    return any(finding.kind == "output" for finding in findings)


def _broadcast(ranks: WorldCommunicator, value: T | None) -> T:
    """Rank 0's value on every rank."""
    broadcast_list = [value]
    if ranks.world.size > 1:
        dist.broadcast_object_list(broadcast_list, 0)
    assert broadcast_list[0] is not None
    return broadcast_list[0]
