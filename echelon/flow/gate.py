"""The gate: no plan trains before a proof covers it.

    one process, whole batches     nothing to prove: this is what plans are compared with
    a certificate in the cache     made by an earlier start from the same inputs, for the same plan and versions
    anything else                  verified now, on the first steps' own data, in a bounded time

`auto` walks down its candidates until one is proved and ends at one process, so it refuses no job that one process trains.
A given plan that is disproved before it trains is replaced by the nearest proved one, and the reason is logged; `fallback=False` raises instead.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from echelon.errors import EchelonError, LaunchError, PlanError, UnpartedState, UnprovedPlan
from echelon.flow.deadlock_watchdog import bounded
from echelon.flow.job_identity import cover
from echelon.flow.resolve_plan import PlanLike, Prepared, Subject, prepare, read_plan
from echelon.flow.spawn import DISPROVED
from echelon.launchers.rank_ipc import in_words
from echelon.plan.check import require, undivided
from echelon.plan.document_cache import Store
from echelon.plan.plan import Plan
from echelon.world import World, cache_folder

if TYPE_CHECKING:
    import torch.distributed as dist

    from echelon.engine.process_groups import Ranks
    from echelon.job import Job
    from echelon.plan.certificate import Certificate

T = TypeVar("T")
Limit = Callable[["Prepared"], float]

#: Verification may take this many seconds, or this share of the run that it precedes, whichever is more.
LEAST, SHARE = 30.0, 0.05
#: Steps from the start that are verified, besides a short last one of the epoch.
STEPS = 2
_OFF = (
    "not verified (--no-verify): nothing shows that this plan computes what one device computes; leave --no-verify out "
    "to prove it first"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the gate found: the certificate, if a proof was needed and wanted, and one line about it."""

    certificate: Certificate | None = None
    line: str = ""
    #: Whether the line is a warning.
    skipped: bool = False
    #: Seconds that the verification took; 0 where nothing had to be verified.
    seconds: float = 0.0


def is_plain(plan: Plan, job: Job) -> bool:
    """Whether the plan is what others are compared with: one process that computes each batch whole, kernel by kernel."""
    parts = plan.micro is not None and plan.micro < job.batch
    other = plan.recompute != "none" or plan.compile or plan.served or plan.precision not in (None, job.precision)
    return plan.ranks == 1 and not parts and not other


def require_proof(subject: Subject, prepared: Prepared, world: World, *, verify: bool, quiet: bool = False) -> Verdict:
    """The proof that covers `prepared.plan`, from the cache or made now; raises UnprovedPlan. Every rank must call it."""
    job, plan = subject.job, prepared.plan
    if is_plain(plan, job):
        return Verdict()
    if not verify:
        return Verdict(line=_OFF, skipped=True)
    from echelon.engine.process_groups import Ranks, shared_store

    ranks = Ranks(world)  # also so that the proof's own runs need not meet again and again
    errors: dist.Store | None = None
    try:
        errors = shared_store(world, "proof") if world.size > 1 else None
        known = _known(subject, plan) if world.main else None
        text = ranks.gather(known.to_json() if known is not None else "")[0]
        if text:
            from echelon.plan.certificate import Certificate

            return _judged(Certificate.from_json(text, source="the certificate of rank 0"), plan, seconds=0.0)
        begin, limit = time.perf_counter(), bound(job, prepared)
        if world.main and not quiet:
            print(f'verifying "{plan}" on the first steps\' data, at most {limit:.0f} s ...', file=sys.stderr)  # noqa: T201
        with bounded(world, errors, plan, limit):
            certificate = _verify(subject, prepared, ranks, limit)
        if world.main:
            keep(subject, certificate)
        return _judged(certificate, plan, seconds=time.perf_counter() - begin)
    except Exception as error:
        first = _first_error(errors, error)
        ranks.abandon()
        if isinstance(error, UnprovedPlan) and first != str(error):
            raise UnprovedPlan(first) from error
        raise
    finally:
        ranks.close()


def _first_error(errors: dist.Store | None, error: Exception) -> str:
    """What the first rank that failed raised: the others only lost their connections to it."""
    mine = str(error)
    if errors is None:
        return mine
    try:
        return errors.compare_set("error", "", mine.encode(errors="replace").decode()).decode()
    except Exception:  # rank 0, which may host the store, has exited
        return mine


def bound(job: Job, prepared: Prepared) -> float:
    """Seconds that a verification may take: a small part of the expected run, but enough for any small model."""
    forecast, profile = prepared.forecast, prepared.profile
    steps = job.steps
    if steps is None and profile is not None and profile.samples:
        steps = (job.epochs or 0) * math.ceil(profile.samples / job.batch)
    expected = forecast.time.step * steps if forecast is not None and steps else 0.0
    return max(LEAST, SHARE * expected)


def _verify(subject: Subject, prepared: Prepared, ranks: Ranks, limit: float) -> Certificate:
    from echelon.verifier.fingerprints import job_hash
    from echelon.verifier.frozen_data import freeze
    from echelon.verifier.verify import verify

    plan, world = prepared.plan, ranks.world

    def proved(job: Job) -> Certificate:
        digest = job_hash(subject.spec) if subject.spec else ""
        with subject.recording():
            return verify(job, plan, world=world, job_hash=digest, profile=prepared.profile, seconds=limit, steps=STEPS)

    try:
        made = proved(subject.job)
        if (
            _is_unreadable(made) and plan.ranks == plan.mesh.dp
        ):  # ranks of one data group would train on different samples
            frozen = freeze(subject.job, ranks, STEPS)
            made = made if frozen is None else proved(frozen)
        return cover(made, subject.identity, prepared.profile)
    except (UnpartedState, PlanError) as error:
        raise UnprovedPlan(str(error)) from error
    except Exception as error:  # whatever a model does that one process may still train
        raise UnprovedPlan(
            f'"{plan}" cannot be verified (--no-verify trains it unproved): {in_words(error)}'
        ) from error


def _is_unreadable(certificate: Certificate) -> bool:
    """Whether the proof failed only because the data gives other samples at each reading."""
    return any(each.kind == "self" and each.where.startswith("data") for each in certificate.findings)


def _judged(certificate: Certificate, plan: Plan, *, seconds: float) -> Verdict:
    """The verdict of a certificate that covers the plan; raises where it says no."""
    if not certificate.deterministic:
        raise UnprovedPlan(f'"{plan}" cannot be proved: {certificate.divergent}; --no-verify trains it as it is')
    if not certificate.verified:
        raise UnprovedPlan(
            f'"{plan}" does not compute what {certificate.against} computes, first at {certificate.divergent}; fix the cause, or '
            "use another plan; --no-verify trains it as it is"
        )
    worst = max((finding.worst for finding in certificate.findings), default=0.0)
    how = f"in {seconds:.1f} s" if seconds else "by an earlier start"
    weaker = f"; weaker: {certificate.weakness}" if certificate.weakness else ""
    return Verdict(
        certificate=certificate,
        line=f'verified {how}: "{plan}" computes what {certificate.against} computes (worst difference {worst:.0e}){weaker}',
        seconds=seconds,
    )


# The cache of certificates. Verdicts of "no" are kept too: `auto` need not find out again.


def _known(subject: Subject, plan: Plan) -> Certificate | None:
    from echelon.plan.certificate import Certificate
    from echelon.verifier.fingerprints import versions

    return Store(cache_folder()).get(
        Certificate, _key(subject, plan), versions=versions(), environment=os.environ, arguments=subject.arguments()
    )


def keep(subject: Subject, certificate: Certificate) -> None:
    """Remember the verdict for later starts from the same inputs."""
    from echelon.verifier.fingerprints import versions

    try:
        inputs = subject.read_inputs()
        Store(cache_folder()).put(_key(subject, certificate.plan), certificate, versions=versions(), inputs=inputs)
    except OSError as error:
        subject.warnings.append(
            f"{cache_folder()}: the certificate could not be kept there ({error.strerror or error}), so the plan is verified at "
            "each start; make the folder writable, or name another in ECHELON_CACHE"
        )


def revoke(subject: Subject, certificate: Certificate, reason: str) -> None:
    """Withdraw a certificate after the run departed from it, so that no later start relies on it."""
    from echelon.plan.certificate import Finding

    seen = Finding(kind="run", tensors=1, worst=sys.float_info.max, where=reason, bound=0.0)
    findings = (*certificate.findings, seen)
    keep(subject, dataclasses.replace(certificate, verified=False, divergent=reason, findings=findings))


def _key(subject: Subject, plan: Plan) -> str:
    # For which model a plan was made does not change what it computes; the inputs decide the model.
    return f"{subject.identity.digest} {dataclasses.replace(plan, model=None).digest}"


# Which plan is tried after which


def attempts(
    subject: Subject, wanted: PlanLike, *, ranks: int | None = None, fallback: bool = True
) -> Iterator[Prepared]:
    """The plan that was asked for and what may replace it; for `auto` the candidates, best first. In the end one process."""
    if read_plan(wanted) is not None:
        given = prepare(subject, wanted, ranks=ranks)
        if not fallback:
            require_as_given(given)
        yield given
        yield from fallback_plans(given) if fallback else ()
        return
    try:
        first = prepare(subject, wanted, ranks=ranks)
    except PlanError as error:
        if error.exit_code == 1:  # it fits nowhere
            raise
        yield one_process(f"no plan could be searched for: {error}")
        return
    except Exception as error:  # whatever a model does that cannot be traced: one process asks nothing of it
        if isinstance(error, EchelonError) and not isinstance(error, PlanError):
            raise
        yield one_process(f"the job could not be profiled ({type(error).__name__}: {error})")
        return
    yield first
    for candidate in first.candidates[1:]:
        warnings = tuple(map(str, require(candidate.plan, first.profile, first.cluster)))
        yield dataclasses.replace(
            first, plan=candidate.plan, forecast=candidate.forecast, warnings=warnings, candidates=()
        )
    yield dataclasses.replace(one_process(""), profile=first.profile, cluster=first.cluster)


def require_as_given(prepared: Prepared) -> None:
    """Raise where another plan than the given one was prepared."""
    if prepared.fallback:
        raise UnprovedPlan(
            f"{prepared.fallback} (--no-fallback forbids that: leave it out, or give the plan named here)"
        )


def fallback_plans(given: Prepared) -> Iterator[Prepared]:
    """What may take the place of a plan that the user gave, nearest first: without recomputation, with whole batches, one process."""
    plans = [
        dataclasses.replace(given.plan, recompute="none"),
        dataclasses.replace(given.plan, **dict(undivided(given.plan))),
        Plan(),
    ]
    for plan in dict.fromkeys(plans):
        if plan != given.plan:
            yield dataclasses.replace(given, plan=plan, forecast=None, candidates=(), is_fallback=True)


def one_process(why: str) -> Prepared:
    """The plan that needs no proof."""
    line = f"training in one process: {why}" if why else ""
    return Prepared(plan=Plan(), warnings=(line,) if line else (), fallback=line)


def first_proved(plans: Iterator[Prepared], execute: Callable[[Prepared], T], limit: Limit | None = None) -> T:
    """What `execute` returns for the first plan that is not disproved; each next one says why those before it were left.

    A plan of `auto` that fails in another way before its first step is followed by the last one, one process: if the job is at fault, it
    fails there too, and that error counts. One process also follows once failed proofs took longer together than `limit` of the last of them.
    """
    reasons: list[str] = []
    prepared = next(plans)
    spent = 0.0
    while True:
        begin = time.monotonic()
        try:
            return execute(_explained(prepared, reasons))
        except Exception as caught:
            error = caught
        left, wrong = prepared.plan, disproved(error)
        if not wrong and has_started(error):
            raise error
        spent += 0.0 if has_started(error) else time.monotonic() - begin
        rest = (each for each in plans if each.plan != left)
        following = next(rest, None)
        late = limit is not None and spent > limit(prepared)
        if following is not None and not following.is_fallback and (late or not wrong):
            following = deque(chain([following], rest), maxlen=1)[0]
        if following is None or (following.is_fallback and (not wrong or has_started(error))):
            raise error
        prepared = following
        instead = f'"{left}" runs as "{prepared.plan}"' if prepared.is_fallback else f'auto left "{left}"'
        reasons.append(f"{instead}: {in_words(error)}")


def _explained(prepared: Prepared, reasons: list[str]) -> Prepared:
    if not reasons:
        return prepared
    fallback = "\n".join([*([prepared.fallback] if prepared.fallback else []), *reasons])
    return dataclasses.replace(prepared, fallback=fallback, warnings=(*reasons, *prepared.warnings))


def disproved(error: Exception) -> bool:
    """Whether an error, perhaps of ranks that this process started, says that the plan computes something else or cannot be executed."""
    kind = error.kind if isinstance(error, LaunchError) else type(error).__name__
    return kind in DISPROVED


def has_started(error: Exception) -> bool:
    """Whether steps were trained before the error: then another plan would repeat or hide it."""
    return bool(getattr(error, "started", False))
