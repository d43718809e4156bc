"""Prove that a plan computes what one device computes, and certify how far the two are apart.

Every rank calls `verify`. All of them execute the plan through the engine: in float64, which decides, and in the plan's own precision,
which decides only where all gradients are off by one factor. Rank 0 also runs the reference and compares.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from echelon.engine.checks.read_order_check import require_independent_samples
from echelon.engine.process_groups import WorldCommunicator
from echelon.errors import PlanError, VerificationError, first_line
from echelon.job import Job
from echelon.plan.certificate import Certificate
from echelon.plan.check import require_executable
from echelon.plan.check_model import splits_batch
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.trials.isolation import IsolatedJob
from echelon.trials.trial_context import preserve_job_state
from echelon.verifier.build_certificate import build_certificate
from echelon.verifier.choose_reference import (
    ReferenceChoice,
    choose_reference,
    fits_easily,
    free_memory,
    parse_reference,
    require_unsplit_batches,
)
from echelon.verifier.compare_outputs import format_names
from echelon.verifier.context import VerificationContext
from echelon.verifier.reduced_job import ReducedJob, affordable_flops, reduce_job
from echelon.verifier.reference_data import RankCollatedData, collate_as_ranks, open_reference_data
from echelon.verifier.self_check import self_check
from echelon.verifier.side_by_side import ProofSetup, compare_random_draws, diagnose, run_side_by_side
from echelon.verifier.single_device import SingleDeviceContext
from echelon.verifier.staleness import add_staleness_finding, measure_staleness, synchronous_plan
from echelon.world import World, read_world


@dataclasses.dataclass(frozen=True, slots=True)
class _Request:
    job: Job
    plan: Plan
    world: World
    steps: int
    job_hash: str
    device: torch.device | None
    profile: Profile | None
    reference: str
    memory: int | None
    seconds: float | None


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
    """Prove that `plan` computes what one device computes. Every rank calls it and gets the same certificate.

    Runs the first `steps` steps, and the epoch's last if it is short. `job_hash`: `fingerprints.job_hash` of the job's file; without it
    the certificate covers no file. A plan that `check` refuses for the job's `profile` is refused here too. `reference`: what to compare
    with, "device", "host" or another plan; "auto": the strongest that fits in `memory` bytes of one device, or in what is free.
    `seconds`: time limit; a large job is then verified on fewer samples.
    """
    world = world or read_world()
    if plan.ranks != world.size:
        remedy = f"start {plan.ranks}, or change dp"
        raise PlanError(f'the plan "{plan}" is for {plan.ranks} ranks and {world.size} are here: {remedy}')
    if steps < 1:
        raise VerificationError(f"steps={steps}: a proof needs at least one step")
    job = dataclasses.replace(job, warmup_data=None)  # warmup computes the same on other samples
    return _verify(_Request(job, plan, world, steps, job_hash, device, profile, reference, memory, seconds))


def _verify(request: _Request) -> Certificate:
    plan, synchronous = request.plan, synchronous_plan(request.plan)
    require_executable(plan, request.profile)
    with preserve_job_state(request.job):
        if plan != synchronous:
            certificate = _verify(dataclasses.replace(request, plan=synchronous, seconds=None))
            with WorldCommunicator(request.world, request.device) as ranks:
                return add_staleness_finding(certificate, plan, measure_staleness(request.job, plan, ranks))
        with WorldCommunicator(request.world, request.device) as ranks:
            reduced = None if request.seconds is None else _reduce_job(request, ranks, request.seconds)
            if reduced is None:
                return _prove(request, ranks)
            job, plan, profile = reduced.job, reduced.plan, reduced.profile
            certificate = _verify(dataclasses.replace(request, job=job, plan=plan, profile=profile, seconds=None))
            notes = (reduced.note, *certificate.notes)
            return dataclasses.replace(certificate, plan=request.plan, batch=request.job.batch_size, notes=notes)


def _reduce_job(request: _Request, ranks: WorldCommunicator, seconds: float) -> ReducedJob | None:
    """The smaller job that all ranks verify instead, by rank 0's clock; None: the whole job."""
    job, profile, affordable = request.job, request.profile, 0.0
    with ranks.raise_on_all_ranks():
        if ranks.world.is_main:
            profile = profile or _profile_job(job)[0]
            affordable = math.inf if profile is None else affordable_flops(ranks.device, seconds)
    affordable, profile = ranks.broadcast_object((affordable, profile))
    if profile is None:
        return None
    return reduce_job(job, request.plan, profile, affordable, open_reference_data(job).total_steps)


def _prove(request: _Request, ranks: WorldCommunicator) -> Certificate:
    setup = _prepare(request, ranks)
    context = setup.context
    result = run_side_by_side(setup)
    comparator = result.comparator
    compare_random_draws(setup, comparator)
    nondeterminism = None
    with ranks.raise_on_all_ranks():
        if isinstance(context, SingleDeviceContext) and comparator:
            context.widen_bounds_for_rounding(comparator)
            nondeterminism = self_check(context, comparator)
    diagnosis = diagnose(dataclasses.replace(setup, context=None) if nondeterminism else setup, comparator)
    text = ""
    with ranks.raise_on_all_ranks():
        if context:
            text = build_certificate(context, result, diagnosis, nondeterminism, request.job_hash).to_json()
    return Certificate.from_json(ranks.broadcast_object(text), source="the certificate of rank 0")


def _prepare(request: _Request, ranks: WorldCommunicator) -> ProofSetup:
    """Choose the reference and scan its first step on rank 0 while the last rank checks that training would accept the plan."""
    job, plan, world = request.job, request.plan, request.world
    decision = None
    with ranks.raise_on_all_ranks():
        if world.is_main and plan.mesh.dp > 1:
            require_independent_samples(job)
        data = open_reference_data(job)
        steps = data.choose_steps(request.steps)
        if world.is_main:
            decision = _choose_reference(request, ranks)
    choice, is_checked, coupling_note = ranks.broadcast_object(decision)
    context: VerificationContext | None = None
    with ranks.raise_on_all_ranks():
        if world.rank == world.size - 1 and not is_checked:
            coupling_note = _require_supported(job, plan, choice)  # takes about as long as rank 0's first step
        if world.is_main:
            data = collate_as_ranks(data, plan)
            if choice.kind == "plan":
                context = VerificationContext(job, plan, data, steps, choice)
            else:
                device = ranks.device if choice.kind == "device" else torch.device("cpu")
                context = SingleDeviceContext(job, plan, data, steps, device, choice)
            if isinstance(data, RankCollatedData):
                note = "collation mixes samples or draws: one device gets the micro-batches of the plan, joined"
                context.notes.append(note)
    coupling_note = ranks.all_gather_object(coupling_note)[-1]
    with ranks.raise_on_all_ranks():
        if context and coupling_note:
            if context.determinism.needs_seeding and splits_batch(plan, job.batch_size):
                where = format_names([note for note in context.notes if "be held" in note])
                raise VerificationError(
                    f"{where}: parts of a batch draw other numbers than the whole, so it cannot be determined whether samples see each other; draw "
                    "them through functions of torch, numpy.random or random, which a proof holds still, or use a plan that keeps batches whole"
                )
            context.notes.append(coupling_note)
    return ProofSetup(
        job=job, plan=plan, ranks=ranks, steps=steps, reference_plan=choice.plan, context=context,
        determinism=ranks.broadcast_object(context.determinism if context else None),
    )  # fmt: skip


def _choose_reference(request: _Request, ranks: WorldCommunicator) -> tuple[ReferenceChoice, bool, str]:
    """What to compare with, whether the plan was checked against a profile, and a note where that was not possible."""
    job, plan, profile, memory = request.job, request.plan, request.profile, request.memory
    if request.reference != "auto":
        choice = parse_reference(request.reference, plan, job, profile)
        return choice, profile is not None, _coupling_note(plan, profile)
    if memory is None:
        memory = free_memory(ranks.device)
        if profile is None and fits_easily(job, memory):
            return ReferenceChoice(), False, ""
    note = ""
    if profile is None:
        profile, note = _profile_job(job)
        require_executable(plan, profile)
    host_memory = free_memory(torch.device("cpu"))
    choice = choose_reference(plan, job, profile, device=ranks.device, memory=memory, host_memory=host_memory)
    return choice, True, note or _coupling_note(plan, profile)


def _require_supported(job: Job, plan: Plan, choice: ReferenceChoice) -> str:
    """Raise where training would: some plans end in a deadlock, which no comparison shows. Returns a note where that is unknown."""
    if plan.mesh.dp == 1 and plan.micro is None:
        return ""
    profile, note = _profile_job(job)
    require_executable(plan, profile)
    require_unsplit_batches(choice, plan, profile)
    return note or _coupling_note(plan, profile)


def _coupling_note(plan: Plan, profile: Profile | None) -> str:
    """The note where the plan splits batches and only this proof shows whether it may."""
    if profile is None or profile.samples_coupled is not None or not splits_batch(plan, profile.batch):
        return ""
    return (
        f"beforehand it was not known whether samples of a batch see each other, because {profile.coupling_unknown_reason}: the reference computes "
        "whole batches, so that they would show here"
    )


def _profile_job(job: Job) -> tuple[Profile | None, str]:
    """The job's profile, or why there is none: such a job may still be verified, or fail for a reason of its own."""
    from echelon.profiler import profile

    isolated_job = IsolatedJob(job)
    try:
        with isolated_job.active():
            return profile(isolated_job.job), ""
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        return None, f"whether training would refuse the plan is unknown: the job could not be profiled ({reason})"
