"""Verifying a job file: plan, ranks, proof, certificate."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.flow.broadcast_plan import agree_plan
from echelon.flow.deadlock_watchdog import bounded
from echelon.flow.gate import LEAST
from echelon.flow.job_identity import cover
from echelon.flow.resolve_plan import JobLike, PlanLike, Subject
from echelon.flow.spawn import begin, run_script_again

if TYPE_CHECKING:
    from echelon.plan.certificate import Certificate


def verify(
    job: JobLike,
    plan: PlanLike = None,
    *,
    steps: int = 2,
    out: str | Path | None = None,
    reference: str = "auto",
    memory: int | None = None,
) -> Certificate:
    """Prove that `plan` computes what one device computes; `out` is where the certificate goes.

    `reference`: what to compare with, "device", "host" or another plan; "auto" takes the strongest for which one device has the
    memory, `memory` bytes or what is free. Started alone with a plan for several ranks, it runs the script again in each of them.
    """
    world = begin("verify")
    subject = Subject(job)
    prepared = agree_plan(subject, plan, world)
    if not world.launched and prepared.plan.ranks > 1:
        run_script_again(prepared)
    from echelon.engine.process_groups import shared_store
    from echelon.verifier.fingerprints import job_hash
    from echelon.verifier.verify import verify as prove

    digest = job_hash(subject.spec) if subject.spec else ""
    store = shared_store(world, "proof") if world.size > 1 else None
    with bounded(world, store, prepared.plan, LEAST, math.inf):
        certificate = prove(
            subject.job,
            prepared.plan,
            world=world,
            steps=steps,
            job_hash=digest,
            profile=prepared.profile,
            reference=reference,
            memory=memory,
        )
    certificate = cover(certificate, subject.identity, prepared.profile)
    if prepared.fallback:
        certificate = dataclasses.replace(certificate, notes=(prepared.fallback, *certificate.notes))
    if out is not None and world.main:
        certificate.save(out)
    return certificate


def verify_file(spec: str, **options: Any) -> None:
    """`verify` of one rank that the command line started."""
    verify(spec, **options)
