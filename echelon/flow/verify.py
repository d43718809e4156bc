"""The entry point from Python to the verifier: prove that a plan computes what one device computes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

from echelon.flow.broadcast_plan import agree_on_plan
from echelon.flow.deadlock_watchdog import watch_for_deadlock
from echelon.flow.gate import MIN_SECONDS
from echelon.flow.job_identity import bind_certificate
from echelon.flow.job_source import JobLike, JobSource
from echelon.flow.resolve_plan import PlanLike, ResolvedPlan
from echelon.flow.script_calls import call_in_script, rerun_script
from echelon.plan.certificate import Certificate
from echelon.world import World


def verify(
    job: JobLike,
    plan: PlanLike = None,
    *,
    steps: int = 2,
    out: str | Path | None = None,
    reference: str = "auto",
    memory: int | None = None,
) -> Certificate:
    """Prove that `plan` computes what one device computes: losses, gradients and parameters in float64.

    The certificate says whether it does (`.verified`) and which tensor is the first to differ. A script that is started as
    one process with a plan for several ranks is run again in each rank, as by `train`.

    Args:
        job: A Job, a function that returns one, or `file.py[:name]`.
        plan: A Plan, its short form ("dp=2 zero=1"), a plan file, or None: the fastest plan for this machine.
        steps: Training steps to compare.
        out: Write the certificate to this file.
        reference: What to compare with: "device", "host" or another plan; "auto" takes the strongest that fits into `memory`.
        memory: Bytes of memory of one device. [what is free]
    """

    def execute(world: World) -> Certificate:
        return verify_job(JobSource(job), plan, world, steps=steps, out=out, reference=reference, memory=memory)

    return call_in_script("verify", execute, Certificate)


def verify_job(
    source: JobSource,
    requested: PlanLike,
    world: World,
    *,
    steps: int = 2,
    out: str | Path | None = None,
    reference: str = "auto",
    memory: int | None = None,
    start_ranks: Callable[[ResolvedPlan], str] = rerun_script,
) -> Certificate:
    """Verify in this process, with the ranks to which it belongs, or on ranks that `start_ranks` starts."""
    resolved = agree_on_plan(source, requested, world)
    if not world.launched and resolved.plan.ranks > 1:
        return Certificate.from_json(start_ranks(resolved))
    from echelon.engine.process_groups import open_shared_store
    from echelon.verifier.verify import verify as prove

    store = open_shared_store(world, "proof") if world.size > 1 else None
    with watch_for_deadlock(world, store, resolved.plan, MIN_SECONDS, math.inf):
        certificate = prove(
            source.job, resolved.plan, world=world, steps=steps, job_hash=source.file_hash,
            profile=resolved.profile, reference=reference, memory=memory,
        )  # fmt: skip
    certificate = bind_certificate(certificate, source.identity, resolved.profile)
    if resolved.fallback:
        certificate = dataclasses.replace(certificate, notes=(resolved.fallback, *certificate.notes))
    if out is not None and world.is_main:
        certificate.save(out)
    return certificate
