"""What is asserted of a parameter server under a bound: how far ahead of the slowest rank a rank has read."""

from __future__ import annotations

import dataclasses
import time

from torch import nn

from echelon.engine.process_groups import Ranks
from echelon.engine.run import Run
from echelon.errors import VerificationError
from echelon.job import Job
from echelon.plan.certificate import Certificate, Finding
from echelon.plan.plan import Plan
from echelon.trials.deep_copies import copy_module

#: Steps that are watched, at most and besides the bound.
_MOST, _BESIDES = 24, 4
#: Seconds that the last rank waits in each of them: without one that is behind nobody would ever have to wait.
_BEHIND = 0.02


def in_step(plan: Plan) -> Plan:
    """The plan whose numbers can be proved: with all ranks in step."""
    return dataclasses.replace(plan, staleness=0) if plan.served else plan


def most_ahead(job: Job, plan: Plan, ranks: Ranks) -> tuple[int, int]:
    """The most steps that a rank was ahead of the slowest when it had read its rows, by the servers' clocks, and in how many steps that was
    watched. Every rank must call it."""
    bound = plan.staleness or 0
    if isinstance(job.model, nn.Module):
        job = dataclasses.replace(job, model=copy_module(job.model))  # a proof must not train the user's own
    with Run(job, plan, ranks.world, device=ranks.device, watch=False) as run:
        hub, watched, most = run.hub, 0, 0
        assert hub is not None
        for batch in run.batches(min(run.total_steps, bound + _BESIDES, _MOST)):
            if run.data.rank == run.data.size - 1 and run.data.size > 1:
                time.sleep(_BEHIND)
            loss = run.backward(batch)
            most = max(most, hub.ahead_of_slowest())
            run.update(loss, batch.samples)
            watched += 1
        run.settle()
        return max(ranks.gather(most)), watched


def with_bound(certificate: Certificate, plan: Plan, seen: tuple[int, int]) -> Certificate:
    """What was proved of `in_step(plan)`, for the plan itself: with what was seen of its bound."""
    most, watched = seen
    if certificate.plan != in_step(plan):
        raise VerificationError(f'the certificate is of "{certificate.plan}", not of "{in_step(plan)}"')
    found, good = certificate.findings, certificate.verified
    told = f"a rank read rows up to {most} steps ahead of the slowest, in {watched} steps with one rank held back"
    divergent = certificate.divergent
    if plan.staleness is not None:
        where = f"rows read {most} steps ahead of the slowest rank"
        finding = Finding(
            kind="staleness", tensors=plan.mesh.dp, worst=float(most), where=where, bound=float(plan.staleness)
        )
        found, good = (*found, finding), good and finding.good
        if not finding.good and not divergent:
            divergent = f"{where}: the bound is staleness={plan.staleness}"
    notes = (
        f"numbers are proved with all ranks in step (staleness=0); as planned they follow from who comes first: {told}",
        *certificate.notes,
    )
    return dataclasses.replace(certificate, plan=plan, findings=found, verified=good, notes=notes, divergent=divergent)
