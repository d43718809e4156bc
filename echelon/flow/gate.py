"""The gate: no plan trains before a proof covers it.

    one process, whole batches     nothing to prove: this is what plans are compared with
    a certificate in the cache     made by an earlier start from the same inputs, for the same plan and versions
    anything else                  verified now, on the first steps' own data, in bounded time

`auto` tries its candidates until one is proved and ends with one process, so it refuses no job that one process trains. A requested plan
that is disproved before it trains is replaced by the nearest proved one, and the reason is logged; `fallback=False` raises instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from echelon.errors import (
    EchelonError,
    LaunchError,
    PlanError,
    UnshardableStateError,
    UnverifiedPlanError,
    VerificationError,
)
from echelon.flow.deadlock_watchdog import watch_for_deadlock
from echelon.flow.job_identity import bind_certificate
from echelon.flow.job_source import JobSource
from echelon.flow.resolve_plan import PlanLike, ResolvedPlan, parse_plan, resolve_plan
from echelon.launchers.rank_ipc import format_error
from echelon.plan.check import require_executable
from echelon.plan.check_model import unsplit_batch_changes
from echelon.plan.plan import Plan
from echelon.world import World

if TYPE_CHECKING:
    import torch.distributed as dist

    from echelon.engine.process_groups import WorldCommunicator
    from echelon.job import Job
    from echelon.plan.certificate import Certificate

T = TypeVar("T")
TimeLimit = Callable[["ResolvedPlan"], float]

#: Verification may take this many seconds, or this share of the run that it precedes, whichever is more.
MIN_SECONDS, RUN_SHARE = 30.0, 0.05
#: Steps from the start that are verified, besides a short last one of the epoch.
VERIFIED_STEPS = 2
_DISPROOF_ERRORS = (
    "UnverifiedPlanError", "DivergenceError", "UnshardableStateError", "PlanError", "UnsplittableModelError",
)  # fmt: skip
_NOT_VERIFIED = "not verified (--no-verify): nothing shows that this plan computes what one device computes; leave --no-verify out to prove it first"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The certificate, if a proof was needed and wanted, and one line about it."""

    certificate: Certificate | None = None
    message: str = ""
    #: Whether the line is a warning.
    is_unproved: bool = False
    #: Seconds that the verification took; 0 where nothing had to be verified.
    seconds: float = 0.0


def is_baseline(plan: Plan, job: Job) -> bool:
    """Whether the plan is what others are compared with: one process that computes each batch whole, kernel by kernel."""
    splits_batch = plan.micro is not None and plan.micro < job.batch_size
    changes_kernels = plan.recompute != "none" or plan.compile or plan.precision not in (None, job.precision)
    return plan.ranks == 1 and not (splits_batch or changes_kernels or plan.uses_servers)


def require_proof(
    source: JobSource, resolved: ResolvedPlan, world: World, *, verify: bool, quiet: bool = False
) -> Verdict:
    """The proof that covers `resolved.plan`, cached or made now, or an UnverifiedPlanError. Every rank must call it."""
    job, plan = source.job, resolved.plan
    if is_baseline(plan, job):
        return Verdict()
    if not verify:
        return Verdict(message=_NOT_VERIFIED, is_unproved=True)
    from echelon.engine.process_groups import WorldCommunicator, open_shared_store

    ranks = WorldCommunicator(world)  # stays open, which saves the proof's own runs a rendezvous each
    error_store: dist.Store | None = None
    try:
        error_store = open_shared_store(world, "proof") if world.size > 1 else None
        cached = _load_certificate(source, plan) if world.is_main else None
        certificate_json = ranks.broadcast_object(cached.to_json() if cached is not None else "")
        if certificate_json:
            from echelon.plan.certificate import Certificate

            certificate = Certificate.from_json(certificate_json, source="the certificate of rank 0")
            return _make_verdict(certificate, plan, seconds=0.0)
        start_time, limit = time.perf_counter(), verification_limit(job, resolved)
        if world.is_main and not quiet:
            print(f'verifying "{plan}" on the first steps\' data, at most {limit:.0f} s ...', file=sys.stderr)  # noqa: T201
        with watch_for_deadlock(world, error_store, plan, limit):
            certificate = _verify(source, resolved, ranks, limit)
        if world.is_main:
            save_certificate(source, certificate)
        return _make_verdict(certificate, plan, seconds=time.perf_counter() - start_time)
    except Exception as error:
        first_error = _first_error(error_store, error)
        ranks.abort()
        if isinstance(error, UnverifiedPlanError) and first_error != str(error):
            raise UnverifiedPlanError(first_error) from error
        raise
    finally:
        ranks.close()


def _first_error(error_store: dist.Store | None, error: Exception) -> str:
    """The error of the first rank that failed: the others only lost their connections to it."""
    own_error = str(error)
    if error_store is not None:
        with contextlib.suppress(Exception):  # rank 0, which may host the store, has exited
            return error_store.compare_set("error", "", own_error.encode(errors="replace").decode()).decode()
    return own_error


def verification_limit(job: Job, resolved: ResolvedPlan) -> float:
    """Seconds that a verification may take: a small part of the expected run, but enough for any small model."""
    forecast, profile = resolved.forecast, resolved.profile
    steps = job.steps
    if steps is None and profile is not None and profile.samples:
        steps = (job.epochs or 0) * math.ceil(profile.samples / job.batch_size)
    expected_seconds = forecast.time.step * steps if forecast is not None and steps else 0.0
    return max(MIN_SECONDS, RUN_SHARE * expected_seconds)


def _verify(source: JobSource, resolved: ResolvedPlan, ranks: WorldCommunicator, limit: float) -> Certificate:
    from echelon.verifier.frozen_data import freeze_samples
    from echelon.verifier.verify import verify

    plan, world = resolved.plan, ranks.world
    options: dict[str, Any] = {"profile": resolved.profile, "seconds": limit, "steps": VERIFIED_STEPS}

    def prove(job: Job) -> Certificate:
        with source.record_build():
            return verify(job, plan, world=world, job_hash=source.file_hash, **options)

    try:
        certificate = prove(source.job)
        # Data that gives other samples at each reading; ranks of one data group would train on different ones.
        is_unreadable = any(item.kind == "self" and item.where.startswith("data") for item in certificate.findings)
        if is_unreadable and plan.ranks == plan.mesh.dp:
            frozen_job = freeze_samples(source.job, ranks, VERIFIED_STEPS)
            certificate = certificate if frozen_job is None else prove(frozen_job)
        return bind_certificate(certificate, source.identity, resolved.profile)
    except (UnshardableStateError, PlanError) as error:
        raise UnverifiedPlanError(str(error)) from error
    except Exception as error:  # one process may still train the model
        message = f'"{plan}" cannot be verified (--no-verify trains it unproved): {format_error(error)}'
        raise UnverifiedPlanError(message) from error


def _make_verdict(certificate: Certificate, plan: Plan, *, seconds: float) -> Verdict:
    """The verdict of a certificate that covers the plan; raises where it does not verify it."""
    if not certificate.deterministic:
        raise UnverifiedPlanError(f'"{plan}" cannot be proved: {certificate.divergent}; --no-verify trains it as it is')
    reference = certificate.reference_description
    if not certificate.verified:
        problem = f'"{plan}" does not compute what {reference} computes, first at {certificate.divergent}'
        remedy = "fix the cause, or use another plan; --no-verify trains it as it is"
        raise UnverifiedPlanError(f"{problem}; {remedy}")
    difference = max((finding.max_difference for finding in certificate.findings), default=0.0)
    timing = f"in {seconds:.1f} s" if seconds else "by an earlier start"
    weakness = f"; weaker: {certificate.limitation}" if certificate.limitation else ""
    details = f"(worst difference {difference:.0e}){weakness}"
    message = f'verified {timing}: "{plan}" computes what {reference} computes {details}'
    return Verdict(certificate=certificate, message=message, seconds=seconds)


# The cache of certificates, failed ones included: `auto` does not try those plans again.


def _load_certificate(source: JobSource, plan: Plan) -> Certificate | None:
    from echelon.plan.certificate import Certificate
    from echelon.verifier.fingerprints import versions

    return source.load_cached(Certificate, _cache_key(source, plan), versions())


def save_certificate(source: JobSource, certificate: Certificate) -> None:
    """Remember the verdict for later starts from the same inputs."""
    from echelon.verifier.fingerprints import versions

    source.save_cached(_cache_key(source, certificate.plan), certificate, versions())


def revoke_certificate(source: JobSource, certificate: Certificate, reason: str) -> None:
    """Withdraw a certificate after the run diverged from its reference, so that no later start relies on it."""
    from echelon.plan.certificate import Finding

    run_finding = Finding(kind="run", tensors=1, max_difference=sys.float_info.max, where=reason, bound=0.0)
    findings = (*certificate.findings, run_finding)
    save_certificate(source, dataclasses.replace(certificate, verified=False, divergent=reason, findings=findings))


def require_certificate(path: str | Path, **scope: Any) -> Certificate:
    """The certificate in `path`, if it covers `scope` (the arguments of `Certificate.mismatch_reasons`); else every reason why not."""
    from echelon.plan.certificate import Certificate

    certificate = Certificate.load(path)
    reasons = certificate.mismatch_reasons(**scope)
    if reasons:
        lines = "\n".join(f"  - {reason}" for reason in reasons)
        raise VerificationError(f"{path} does not cover this run; verify again:\n{lines}")
    return certificate


def _cache_key(source: JobSource, plan: Plan) -> str:
    # The model that a plan was made for does not change what it computes; the inputs decide the model.
    return f"{source.identity.digest} {dataclasses.replace(plan, model=None).digest}"


# Which plan is tried after which


def candidate_plans(
    source: JobSource, plan: PlanLike, *, ranks: int | None = None, fallback: bool = True
) -> Iterator[ResolvedPlan]:
    """The requested plan and its replacements; for `auto` the candidates, best first. The last one is one process."""
    if parse_plan(plan) is not None:
        requested = resolve_plan(source, plan, ranks=ranks)
        if not fallback:
            require_requested_plan(requested)
        yield requested
        yield from fallback_plans(requested) if fallback else ()
        return
    try:
        first = resolve_plan(source, plan, ranks=ranks)
    except PlanError as error:
        if error.exit_code == 1:  # it fits nowhere
            raise
        yield single_process_plan(f"no plan could be searched for: {error}")
        return
    except EchelonError:
        raise
    except Exception as error:  # a model that cannot be traced: one process need not
        yield single_process_plan(f"the job could not be profiled ({type(error).__name__}: {error})")
        return
    yield first
    for candidate in first.candidates[1:]:
        plan, forecast = candidate.plan, candidate.forecast
        warnings = tuple(map(str, require_executable(plan, first.profile, first.cluster)))
        yield dataclasses.replace(first, plan=plan, forecast=forecast, warnings=warnings, candidates=())
    yield dataclasses.replace(single_process_plan(""), profile=first.profile, cluster=first.cluster)


def require_requested_plan(resolved: ResolvedPlan) -> None:
    """Raise if the requested plan had to be replaced."""
    if resolved.fallback:
        remedy = "--no-fallback forbids that: leave it out, or give the plan named here"
        raise UnverifiedPlanError(f"{resolved.fallback} ({remedy})")


def fallback_plans(requested: ResolvedPlan) -> Iterator[ResolvedPlan]:
    """Replacements of a requested plan, nearest first: without recomputation, with whole batches, one process."""
    unsplit = requested.plan.replace(**dict(unsplit_batch_changes(requested.plan)))
    for plan in dict.fromkeys((dataclasses.replace(requested.plan, recompute="none"), unsplit, Plan())):
        if plan != requested.plan:
            yield dataclasses.replace(requested, plan=plan, forecast=None, candidates=(), is_fallback=True)


def single_process_plan(reason: str) -> ResolvedPlan:
    """The plan that needs no proof."""
    warning = f"training in one process: {reason}" if reason else ""
    return ResolvedPlan(plan=Plan(), warnings=(warning,) if warning else (), fallback=warning)


def run_first_proved(
    plans: Iterator[ResolvedPlan], execute: Callable[[ResolvedPlan], T], limit: TimeLimit | None = None
) -> T:
    """Call `execute` with the first plan that is not disproved; each one carries the reasons why those before it were left.

    A plan of `auto` that fails otherwise before its first step is followed by the last one, one process: if the job is at fault, it
    fails there too, and that error counts. One process also follows once failed proofs together took longer than the last one's `limit`.
    """
    reasons: list[str] = []
    resolved = next(plans)
    proof_seconds = 0.0
    while True:
        start_time = time.monotonic()
        try:
            return execute(_add_reasons(resolved, reasons))
        except Exception as exception:
            error = exception
        failed_plan, is_wrong = resolved.plan, is_disproved(error)
        if not is_wrong and has_started(error):
            raise error
        proof_seconds += 0.0 if has_started(error) else time.monotonic() - start_time
        remaining = (candidate for candidate in plans if candidate.plan != failed_plan)
        next_plan = next(remaining, None)
        is_late = limit is not None and proof_seconds > limit(resolved)
        if next_plan is not None and not next_plan.is_fallback and (is_late or not is_wrong):
            next_plan = deque(chain([next_plan], remaining), maxlen=1)[0]
        if next_plan is None or (next_plan.is_fallback and (not is_wrong or has_started(error))):
            raise error
        resolved = next_plan
        outcome = f'"{failed_plan}" runs as "{resolved.plan}"'
        outcome = outcome if resolved.is_fallback else f'auto left "{failed_plan}"'
        reasons.append(f"{outcome}: {format_error(error)}")


def _add_reasons(resolved: ResolvedPlan, reasons: list[str]) -> ResolvedPlan:
    if not reasons:
        return resolved
    fallback = "\n".join([*([resolved.fallback] if resolved.fallback else []), *reasons])
    return dataclasses.replace(resolved, fallback=fallback, warnings=(*reasons, *resolved.warnings))


def is_disproved(error: Exception) -> bool:
    """Whether an error, perhaps of ranks that this process started, shows that the plan computes something else or cannot be executed."""
    kind = error.error_class if isinstance(error, LaunchError) else type(error).__name__
    return kind in _DISPROOF_ERRORS


def has_started(error: Exception) -> bool:
    """Whether steps were trained before the error: then another plan would repeat or hide it."""
    return bool(getattr(error, "started", False))
