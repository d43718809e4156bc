"""Verifying a job file: plan, ranks, proof, certificate."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.flow.broadcast_plan import agree_on_plan
from echelon.flow.deadlock_watchdog import watch_for_deadlock
from echelon.flow.gate import MIN_SECONDS
from echelon.flow.job_identity import bind_certificate
from echelon.flow.job_source import JobLike, JobSource
from echelon.flow.resolve_plan import PlanLike
from echelon.flow.spawn import prepare_process, rerun_script

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
    world = prepare_process("verify")
    job_source = JobSource(job)
    resolved = agree_on_plan(job_source, plan, world)
    if not world.launched and resolved.plan.ranks > 1:
        rerun_script(resolved)
    from echelon.engine.process_groups import open_shared_store
    from echelon.verifier.fingerprints import job_hash
    from echelon.verifier.verify import verify as prove

    job_digest = job_hash(job_source.spec) if job_source.spec else ""
    store = open_shared_store(world, "proof") if world.size > 1 else None
    with watch_for_deadlock(world, store, resolved.plan, MIN_SECONDS, math.inf):
        certificate = prove(
            job_source.job,
            resolved.plan,
            world=world,
            steps=steps,
            job_hash=job_digest,
            profile=resolved.profile,
            reference=reference,
            memory=memory,
        )
    certificate = bind_certificate(certificate, job_source.identity, resolved.profile)
    if resolved.fallback:
        certificate = dataclasses.replace(certificate, notes=(resolved.fallback, *certificate.notes))
    if out is not None and world.is_main:
        certificate.save(out)
    return certificate


def verify_file(spec: str, **options: Any) -> None:
    """`verify` of one rank that the command line started."""
    verify(spec, **options)
