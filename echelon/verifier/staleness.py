"""What is asserted of a parameter server under a bound: how far ahead of the slowest rank a rank has read."""

from __future__ import annotations

import dataclasses
import time

from torch import nn

from echelon.engine.backends.parameter_server import ParameterServerBackend
from echelon.engine.process_groups import WorldCommunicator
from echelon.engine.run import Run
from echelon.errors import VerificationError
from echelon.job import Job
from echelon.plan.certificate import Certificate, Finding
from echelon.plan.plan import Plan
from echelon.trials.deep_copies import copy_module

#: Steps that are watched, at most and besides the bound.
_MAX_STEPS, _STEPS_BEYOND_BOUND = 24, 4
#: Seconds that the last rank waits in each of them: without one that is behind nobody would ever have to wait.
_DELAY_SECONDS = 0.02


def synchronous_plan(plan: Plan) -> Plan:
    """The plan whose numbers can be proved: with all ranks in step."""
    return plan.replace(staleness=0) if plan.uses_servers else plan


def measure_staleness(job: Job, plan: Plan, ranks: WorldCommunicator) -> tuple[int, int]:
    """The most steps that a rank was ahead of the slowest when it had read its rows, by the servers' clocks, and in how many steps that was
    watched. Every rank must call it."""
    bound = plan.server.staleness or 0
    if isinstance(job.model, nn.Module):
        job = dataclasses.replace(job, model=copy_module(job.model))  # a proof must not train the user's own
    with Run(job, plan, ranks.world, device=ranks.device, monitor_divergence=False) as run:
        backend, watched_steps, max_staleness = run.backend, 0, 0
        assert isinstance(backend, ParameterServerBackend)
        for batch in run.batches(min(run.total_steps, bound + _STEPS_BEYOND_BOUND, _MAX_STEPS)):
            if run.data_parallel.rank == run.data_parallel.size - 1 and run.data_parallel.size > 1:
                time.sleep(_DELAY_SECONDS)
            loss = run.backward(batch)
            max_staleness = max(max_staleness, backend.steps_ahead_of_slowest())
            run.update(loss, batch.samples)
            watched_steps += 1
        run.check_last_step()
        return max(ranks.all_gather_object(max_staleness)), watched_steps


def add_staleness_finding(certificate: Certificate, plan: Plan, measured: tuple[int, int]) -> Certificate:
    """What was proved of `synchronous_plan(plan)`, for the plan itself: with what was seen of its bound."""
    max_staleness, watched_steps = measured
    if certificate.plan != synchronous_plan(plan):
        raise VerificationError(f'the certificate is of "{certificate.plan}", not of "{synchronous_plan(plan)}"')
    findings, verified = certificate.findings, certificate.verified
    observation = f"a rank read rows up to {max_staleness} steps ahead of the slowest, in {watched_steps} steps with one rank held back"
    divergent = certificate.divergent
    if plan.server.staleness is not None:
        where = f"rows read {max_staleness} steps ahead of the slowest rank"
        finding = Finding(
            kind="staleness",
            tensors=plan.mesh.dp,
            max_difference=float(max_staleness),
            where=where,
            bound=float(plan.server.staleness),
        )
        findings, verified = (*findings, finding), verified and finding.is_within_bound
        if not finding.is_within_bound and not divergent:
            divergent = f"{where}: the bound is staleness={plan.server.staleness}"
    notes = (
        f"numbers are proved with all ranks in step (staleness=0); as planned they follow from who comes first: {observation}",
        *certificate.notes,
    )
    return dataclasses.replace(
        certificate, plan=plan, findings=findings, verified=verified, notes=notes, divergent=divergent
    )
