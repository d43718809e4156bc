"""The proof: one device and the plan, step by step beside each other, and the certificate of how far they were apart.

Every rank of the world calls `verify`. All of them execute the plan through the engine; rank 0 also runs the reference and
compares, so that nothing is kept longer than one step. Twice: in float64, which decides, and in the plan's own precision,
which is told for information.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from echelon.engine.ranks import Ranks
from echelon.errors import PlanError, VerificationError
from echelon.job import Job
from echelon.plan.certificate import Certificate
from echelon.plan.check import require
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.profiler import profile as make_profile
from echelon.profiler.still import Stillness
from echelon.verifier.case import Case, Referee
from echelon.verifier.compare import Bounds, findings
from echelon.verifier.feed import open_feed
from echelon.verifier.identity import versions
from echelon.verifier.look import Look, look
from echelon.verifier.trial import Trial
from echelon.world import World, read_world

T = TypeVar("T")

#: Half of a format's digits: the drift beyond which a reader should look twice. It decides nothing.
DRIFT = {"fp32": 2.0**-11.5, "tf32": 2.0**-5, "bf16": 2.0**-3.5, "fp16": 2.0**-5}


def verify(
    job: Job,
    plan: Plan,
    *,
    world: World | None = None,
    steps: int = 2,
    job_hash: str = "",
    device: torch.device | None = None,
    profile: Profile | None = None,
) -> Certificate:
    """Prove that `plan` computes what one device computes. Called by every rank; each gets the same certificate.

    Looks at the first `steps` steps, and at the epoch's last where it is short. `job_hash` is `identity.job_hash` of the job's
    file: without it the certificate covers no file. A plan that `check` refuses for the job's `profile` is refused here too.
    """
    world = world or read_world()
    if plan.ranks != world.size:
        raise PlanError(
            f'the plan "{plan}" is for {plan.ranks} ranks and {world.size} are here: start {plan.ranks}, or change dp'
        )
    if steps < 1:
        raise VerificationError(f"steps={steps}: a proof needs at least one step")
    ranks = Ranks(world, device)
    try:
        with ranks.together():
            if world.main:
                _require(job, plan, profile)
        with ranks.together():
            feed = open_feed(job)
            chosen = feed.steps(steps)
            case = Case(job, plan, feed, ranks.device, chosen) if world.main else None
        still = _from_main(ranks, case.still if case else None)
        proof, _ = _beside(job, plan, ranks, chosen, case, still, torch.float64)
        with ranks.together():
            if case and proof:
                case.reconsider(proof)
        seen = _look_again(job, plan, ranks, chosen, case, proof, still)
        drift, skipped = _beside(job, plan, ranks, chosen, case, dataclasses.replace(still, narrow=False), None)
        with ranks.together():
            certificate = (
                _certificate(case, proof, drift, seen, skipped, job_hash) if case and proof and drift else None
            )
        text = _from_main(ranks, certificate.to_json() if certificate else None)
        return Certificate.from_json(text, source="the certificate of rank 0")
    finally:
        ranks.close()


def _require(job: Job, plan: Plan, profile: Profile | None) -> None:
    """Raise where a training would: some plans end in ranks that wait for each other for ever, which no comparison can tell."""
    if profile is None and (plan.mesh.dp > 1 or plan.micro is not None):
        # Far cheaper than the proof. A job that cannot be profiled may still be proved, or fail there for its own reason.
        with contextlib.suppress(Exception):
            profile = make_profile(job)
    require(plan, profile)


def _beside(
    job: Job,
    plan: Plan,
    ranks: Ranks,
    steps: Sequence[int],
    case: Case | None,
    still: Stillness,
    dtype: torch.dtype | None,
) -> tuple[Referee | None, int]:
    """The plan's run and, on rank 0, the reference beside it. Also the number of steps that a loss scale made the run skip."""
    exact = dtype is not None
    with Trial(job, plan, ranks, still, dtype) as trial:
        with ranks.together():
            referee = Referee(case, exact=exact) if case is not None else None
        before = trial.holdings() if exact else []
        with ranks.together():
            if referee is not None:
                referee.begin(before, steps[0])
        for number in steps:
            mine = trial.step(number)
            after = trial.holdings() if exact else []
            with ranks.together():
                if referee is not None and mine is not None:
                    referee.judge(mine, after)
        return referee, trial.skipped


def _look_again(
    job: Job,
    plan: Plan,
    ranks: Ranks,
    steps: Sequence[int],
    case: Case | None,
    proof: Referee | None,
    still: Stillness,
) -> Look | None:
    """Why the proof failed, on rank 0; None where it did not."""
    number = _from_main(ranks, (proof.worst.step if proof.worst else -1) if proof else None)
    if number < 0:
        return None
    # Compiled modules do not tell what those inside them give.
    with Trial(job, dataclasses.replace(plan, compile=False), ranks, still, torch.float64) as trial:
        return look(trial, ranks, steps[: steps.index(number) + 1], case, proof)


def _certificate(
    case: Case, proof: Referee, drift: Referee, seen: Look | None, skipped: int, job_hash: str
) -> Certificate:
    found = findings(proof.differences, case.bounds)
    if seen is not None and seen.outputs is not None:
        found = (seen.outputs, *found)
    notes = [*case.notes, *drift.notes]
    precision = case.plan.precision or case.job.precision
    if skipped:
        notes.append(f"in {precision} {skipped} of {len(case.steps)} steps were skipped while the loss scale settled")
    if not any(each.kind == "norm" for each in found):
        notes.append("the gradient norm is not compared: the job does not clip, so the plan does not compute it")
    return Certificate(
        plan=case.plan,
        job=job_hash,
        model=case.model,
        versions=versions(),
        batch=case.job.batch,
        steps=len(case.steps),
        verified=all(each.good for each in found),
        findings=found,
        divergent="; ".join([proof.divergent, *(seen.remarks if seen is not None else ())]),
        drift=findings(drift.differences, Bounds(least=DRIFT[precision])),
        notes=tuple(notes),
    )


def _from_main(ranks: Ranks, value: T | None) -> T:
    """Rank 0's value on every rank."""
    box = [value]
    if ranks.world.size > 1:
        dist.broadcast_object_list(box, 0)
    assert box[0] is not None
    return box[0]
