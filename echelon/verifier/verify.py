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

from echelon.engine.process_groups import Ranks
from echelon.engine.read_order_check import require_independent_samples
from echelon.errors import EchelonError, PlanError, VerificationError
from echelon.job import Job
from echelon.plan.certificate import Certificate, Finding
from echelon.plan.check import parts_batches, require
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.profiler.sample_coupling import first_line
from echelon.trials.determinism import Stillness
from echelon.trials.isolation import Isolated
from echelon.trials.trial_context import without_trace
from echelon.verifier import tolerances
from echelon.verifier.batch_collation import Parted, as_ranks_collate
from echelon.verifier.candidate_run import Trial
from echelon.verifier.choose_reference import Footing, asked, choose, free, require_whole, surely_fits
from echelon.verifier.compare import Bounds, findings
from echelon.verifier.compare_outputs import listed
from echelon.verifier.context import Basis, Referee
from echelon.verifier.diagnose_failure import Look, look
from echelon.verifier.fingerprints import versions
from echelon.verifier.loss_state_check import ReadState, find_read_state
from echelon.verifier.plan_reference import Peer, Versus
from echelon.verifier.precision_drift import ALLOWED, GROSS
from echelon.verifier.reduced_job import Sample, affordable_flops, smaller
from echelon.verifier.reference_data import Feed, open_feed
from echelon.verifier.regrouping_check import require_separable_loss
from echelon.verifier.self_check import Unsteady, self_check
from echelon.verifier.single_device import Case
from echelon.verifier.staleness import in_step, most_ahead, with_bound
from echelon.verifier.tensor_checksum import copies
from echelon.world import World, read_world

T = TypeVar("T")

_UNHELD = (
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
    require(plan, profile)
    job = dataclasses.replace(job, warmup_data=None)  # its steps compute the same with other samples
    with without_trace(job):
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
    if plan != in_step(plan):
        proved = verify(
            job, in_step(plan), world=world, steps=steps, job_hash=job_hash, device=device, profile=profile,
            reference=reference, memory=memory,
        )  # fmt: skip
        return _with_bound(proved, job, plan, world, device)
    ranks = Ranks(world, device)
    try:
        sample = None if seconds is None else _sample(job, plan, profile, ranks, seconds)
        if sample is not None:
            proved = verify(
                sample.job, sample.plan, world=world, steps=steps, job_hash=job_hash, device=device, profile=sample.profile,
                reference=reference, memory=memory,
            )  # fmt: skip
            return dataclasses.replace(proved, plan=plan, batch=job.batch, notes=(sample.note, *proved.notes))
        with ranks.together():
            if world.main and plan.mesh.dp > 1:
                require_independent_samples(job)
            feed = open_feed(job)
            chosen = feed.steps(steps)
            decided = _footing(job, plan, ranks, profile, reference, memory) if world.main else None
        footing, known, unknown = _from_main(ranks, decided)
        basis: Basis | None = None
        with ranks.together():
            if world.rank == world.size - 1 and not known:
                unknown = _require(job, plan, footing)  # beside rank 0's first step: it takes about as long
            if world.main:
                feed = as_ranks_collate(feed, plan)
                basis = _basis(job, plan, feed, chosen, footing, ranks)
                if isinstance(feed, Parted):
                    basis.notes.append(
                        "collation mixes samples or draws: one device gets the micro-batches of the plan, joined"
                    )
        unknown = ranks.gather(unknown)[-1]
        with ranks.together():
            if basis and unknown and basis.still.seeded and parts_batches(plan, job.batch):
                raise VerificationError(
                    _UNHELD.format(where=listed([note for note in basis.notes if "be held" in note]))
                )
        if basis and unknown:
            basis.notes.append(unknown)
        still = _from_main(ranks, basis.still if basis else None)
        proof, drift, skipped, kept = _beside(job, plan, ranks, chosen, basis, still, footing)
        _draw(job, plan, ranks, chosen, basis, proof, still)
        unsteady: Unsteady | None = None
        with ranks.together():
            if basis and proof:
                basis.reconsider(proof)
                unsteady = self_check(basis, proof) if isinstance(basis, Case) else None
        seen = _look_again(job, plan, ranks, chosen, None if unsteady else basis, proof, still)
        with ranks.together():
            certificate = (
                _certificate(basis, proof, drift, seen, skipped, job_hash, unsteady, kept)
                if basis and proof and drift
                else None
            )
        text = _from_main(ranks, certificate.to_json() if certificate else None)
        return Certificate.from_json(text, source="the certificate of rank 0")
    finally:
        ranks.close()


def _sample(job: Job, plan: Plan, profile: Profile | None, ranks: Ranks, seconds: float) -> Sample | None:
    """The smaller job that all ranks prove in place of this one, by rank 0's clock; None: this one."""
    affordable = 0.0
    with ranks.together():
        if ranks.world.main:
            profile = profile or _profile(job)[0]
            affordable = math.inf if profile is None else affordable_flops(ranks.device, seconds)
    affordable, profile = _from_main(ranks, (affordable, profile))
    return None if profile is None else smaller(job, plan, profile, affordable, open_feed(job).total)


def _with_bound(
    certificate: Certificate, job: Job, plan: Plan, world: World, device: torch.device | None
) -> Certificate:
    """What was proved with all ranks in step, and what is seen of the bound that they keep as planned."""
    ranks = Ranks(world, device)
    try:
        return with_bound(certificate, plan, most_ahead(job, plan, ranks))
    finally:
        ranks.close()


def _footing(
    job: Job, plan: Plan, ranks: Ranks, profile: Profile | None, reference: str, memory: int | None
) -> tuple[Footing, bool, str]:
    """What to compare with, whether the plan was held against a profile, and what has to be said where that was not possible."""
    if reference != "auto":
        return asked(reference, plan, job, profile), profile is not None, _uncompared(plan, profile)
    limit, unknown = free(ranks.device) if memory is None else memory, ""
    if memory is None and profile is None and surely_fits(job, limit):
        return Footing(), False, ""
    if profile is None:
        profile, unknown = _profile(job)
        require(plan, profile)
    chosen = choose(plan, job, profile, device=ranks.device, memory=limit, host=free(torch.device("cpu")))
    return chosen, True, unknown or _uncompared(plan, profile)


def _require(job: Job, plan: Plan, footing: Footing) -> str:
    """Raise where a training would: some plans end in ranks that wait for each other for ever, which no comparison can tell. Gives what
    has to be said where nobody knows."""
    if plan.mesh.dp == 1 and plan.micro is None:
        return ""
    profile, unknown = _profile(job)
    require(plan, profile)
    require_whole(footing, plan, profile)
    return unknown or _uncompared(plan, profile)


def _uncompared(plan: Plan, profile: Profile | None) -> str:
    """What has to be said where the plan parts batches, and only this proof tells whether it may."""
    if profile is None or profile.coupled is not None or not parts_batches(plan, profile.batch):
        return ""
    return (
        f"beforehand it was not known whether samples of a batch see each other, because {profile.uncompared}: the reference computes whole "
        "batches, so that they would show here"
    )


def _profile(job: Job) -> tuple[Profile | None, str]:
    """None, and why, where it cannot be made: such a job may still be proved, or fail there for its own reason."""
    from echelon.profiler import profile

    isolated = Isolated(job)
    try:
        with isolated.active():
            return profile(isolated.job), ""
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        return None, f"whether a training would refuse the plan is not known: the job could not be profiled ({why})"


def _basis(job: Job, plan: Plan, feed: Feed, steps: Sequence[int], footing: Footing, ranks: Ranks) -> Basis:
    if footing.kind == "plan":
        return Versus(job, plan, feed, steps, footing)
    device = ranks.device if footing.kind == "device" else torch.device("cpu")
    return Case(job, plan, feed, steps, device, footing)


def _beside(
    job: Job,
    plan: Plan,
    ranks: Ranks,
    steps: Sequence[int],
    basis: Basis | None,
    still: Stillness,
    footing: Footing,
) -> tuple[Referee | None, Referee | None, int, ReadState | None]:
    """The plan's runs in float64 and in its own precision, held against the truth; the number of steps that a loss scale made the
    second skip; and state of the loss that the plan does not keep as one device does. The referees are rank 0's."""
    with _failing_as(plan), contextlib.ExitStack() as stack:
        exact = stack.enter_context(Trial(job, plan, ranks, still, torch.float64, singly=footing.plan is not None))
        own = stack.enter_context(Trial(job, plan, ranks, dataclasses.replace(still, narrow=False), None))
        peer = stack.enter_context(Peer(job, footing.plan, ranks, still)) if footing.plan is not None else None
        start = peer.start() if peer is not None else {}
        before = exact.holdings()
        proof = drift = truth = None
        with ranks.together():
            if peer is not None and basis is not None:
                basis.model = own.run.fingerprint  # of the model as it is, before float64
                peer.tell(basis)
            elif isinstance(basis, Case):
                truth = basis.take()
                start = truth.start
            if basis is not None:
                began, order = tolerances.copied(start), truth.reference.order if truth else peer.order if peer else {}
                proof, drift = (Referee(basis, began, order, exact=each) for each in (True, False))
                proof.begin(before, steps[0])
        # The first step tells the drift, but for fp16: its loss scale may skip some before it has settled.
        drifting = steps if (plan.precision or job.precision) == "fp16" else steps[:1]
        for number in steps:
            mine, rough = exact.step(number), own.step(number) if number in drifting else None
            other = peer.step(number) if peer is not None else None
            after = exact.holdings()
            with ranks.together():
                if proof and drift and mine:
                    true = truth.step(number) if truth is not None else other
                    assert true is not None
                    proof.judge(mine, true, after)
                    if rough:
                        drift.judge(rough, true)
        if basis is not None and truth is not None and truth.reference.held_update:
            names = listed(sorted(truth.reference.held_update))
            basis.notes.append(
                f"in the optimizers' steps random numbers are held and casts below float64 are lifted, in both runs: {names}"
            )
        kept = None
        if _from_main(ranks, proof.worst is None if proof else None):
            with ranks.together():
                if truth is not None:
                    require_separable_loss(truth.reference, steps[-1])
            kept = find_read_state(exact, steps[-1], truth.reference if truth else None)
        return proof, drift, own.skipped, kept


@contextlib.contextmanager
def _failing_as(plan: Plan) -> Iterator[None]:
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


def _draw(
    job: Job,
    plan: Plan,
    ranks: Ranks,
    steps: Sequence[int],
    basis: Basis | None,
    proof: Referee | None,
    still: Stillness,
) -> None:
    """One step with random numbers as a training draws them. No reference can draw the same, and none is needed: what the ranks of the
    tensor axis all hold has to stay the same there."""
    if plan.mesh.tp == 1 or not _from_main(ranks, basis.draws if basis else None):
        return
    loud = dataclasses.replace(still, random=False)
    with Trial(job, dataclasses.replace(plan, compile=False), ranks, loud, torch.float64, silent=False) as trial:
        held = trial.drawn(steps[-1])
    with ranks.together():
        if proof:
            proof.note(copies(held, steps[-1], "draw"))


def _look_again(
    job: Job,
    plan: Plan,
    ranks: Ranks,
    steps: Sequence[int],
    basis: Basis | None,
    proof: Referee | None,
    still: Stillness,
) -> Look | None:
    """Why the proof failed, on rank 0; None where it did not, or where there is no one device to look at."""
    case = basis if isinstance(basis, Case) else None
    number = _from_main(ranks, proof.worst.step if case and proof and proof.worst else -1)
    if number < 0:
        return None
    # Compiled modules do not tell what those inside them give.
    with Trial(job, dataclasses.replace(plan, compile=False), ranks, still, torch.float64) as trial:
        return look(trial, ranks, steps[: steps.index(number) + 1], case, proof)


def _certificate(
    basis: Basis,
    proof: Referee,
    drift: Referee,
    seen: Look | None,
    skipped: int,
    job_hash: str,
    unsteady: Unsteady | None = None,
    kept: ReadState | None = None,
) -> Certificate:
    found, footing = findings(proof.differences, basis.bounds), basis.footing
    if seen is not None and seen.outputs is not None and not (seen.outputs.good and _outputs(found)):
        found = (seen.outputs, *(each for each in found if each.kind != "output"))  # module by module, which tells more
    notes = [*filter(None, [footing.note]), *basis.notes, *proof.notes, *drift.notes]
    remarks = seen.remarks if seen is not None else ()
    if proof.worst is not None and footing.plan is not None:
        remarks = (f'either the plan is wrong or its reference "{footing.plan}" is: this proof cannot tell which',)
    precision = basis.plan.precision or basis.job.precision
    if skipped:
        notes.append(
            f"in {precision} {skipped} of {len(basis.steps)} steps were skipped while the loss scale settled; where the first is, its drift "
            "decides nothing"
        )
    divergent = "; ".join(filter(None, [proof.divergent, *remarks]))
    if drift.factor is not None and not divergent:
        where = f"gradients in {precision} at step {basis.steps[0]}"
        worst = abs(drift.factor - 1)
        tensors = len({each.name for each in drift.differences if each.kind == "gradient"})
        found = (*found, Finding(kind="drift", tensors=tensors, worst=worst, where=where, bound=GROSS))
        divergent = (
            f"{where}: {drift.factor:.6g} times the reference, and in float64 they agree: looks like a loss scale, or another factor of "
            f"{precision} alone, that is not taken out"
        )
    if kept is not None and not divergent:
        found, divergent = (*found, kept.finding), kept.words
    if unsteady is not None:
        found, divergent = (unsteady.finding, *found), unsteady.words
        notes.append("not deterministic: two runs of one device differ, so that nothing is known of the plan")
    return Certificate(
        plan=basis.plan,
        job=job_hash,
        model=basis.model,
        versions=versions(),
        batch=basis.job.batch,
        steps=len(basis.steps),
        verified=all(each.good for each in found),
        findings=found,
        divergent=divergent,
        drift=findings(drift.differences, Bounds(least=ALLOWED[precision])),
        notes=tuple(notes),
        deterministic=unsteady is None,
        reference=footing.kind,
        peer=footing.plan,
    )


def _outputs(found: Sequence[Finding]) -> bool:
    return any(each.kind == "output" for each in found)


def _from_main(ranks: Ranks, value: T | None) -> T:
    """Rank 0's value on every rank."""
    box = [value]
    if ranks.world.size > 1:
        dist.broadcast_object_list(box, 0)
    assert box[0] is not None
    return box[0]
