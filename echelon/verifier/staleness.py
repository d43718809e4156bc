"""Verify the staleness bound of a parameter server: how far ahead of the slowest rank a rank reads."""

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

#: The most steps that are watched, and how many more than the bound.
_MAX_STEPS, _STEPS_BEYOND_BOUND = 24, 4
#: Delay of the last rank in each of them: without a slow rank no rank would have to wait.
_DELAY_SECONDS = 0.02


def synchronous_plan(plan: Plan) -> Plan:
    """The plan whose values can be proved: with all ranks in step."""
    return plan.replace(staleness=0) if plan.uses_servers else plan


def measure_staleness(job: Job, plan: Plan, ranks: WorldCommunicator) -> tuple[int, int]:
    """(The most steps by which a rank was ahead of the slowest when it read its rows, the number of steps watched). Every rank must call it."""
    bound = plan.server.staleness or 0
    if isinstance(job.model, nn.Module):
        job = dataclasses.replace(job, model=copy_module(job.model))  # a proof must not train the user's module
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
    """The certificate of `synchronous_plan(plan)`, for the plan itself, with the measured staleness."""
    max_staleness, watched_steps = measured
    if certificate.plan != synchronous_plan(plan):
        raise VerificationError(f'the certificate is of "{certificate.plan}", not of "{synchronous_plan(plan)}"')
    note = (
        "numbers are proved with all ranks in step (staleness=0); as planned they depend on which rank comes first: a rank read rows up to "
        f"{max_staleness} steps ahead of the slowest, in {watched_steps} steps with one rank held back"
    )
    certificate = dataclasses.replace(certificate, plan=plan, notes=(note, *certificate.notes))
    bound, ranks = plan.server.staleness, plan.mesh.dp
    if bound is None:
        return certificate
    where, steps = f"rows read {max_staleness} steps ahead of the slowest rank", float(max_staleness)
    finding = Finding(kind="staleness", tensors=ranks, max_difference=steps, where=where, bound=float(bound))
    divergent = certificate.divergent
    if not finding.is_within_bound and not divergent:
        divergent = f"{where}: the bound is staleness={bound}"
    verified, findings = certificate.verified and finding.is_within_bound, (*certificate.findings, finding)
    return dataclasses.replace(certificate, findings=findings, verified=verified, divergent=divergent)
