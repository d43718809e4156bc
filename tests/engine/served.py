"""Trainings with a parameter server, called on every rank of the pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from echelon.engine.backends.coordinated_stop import CoordinatedStop
from echelon.engine.backends.launch_servers import ExternalServers
from echelon.engine.process_groups import WorldCommunicator
from echelon.engine.run import Run
from echelon.plan.parameter_server import ServedTable
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.world import World
from tests.verifier.proofs import make_job

TABLES = (
    ServedTable(path="users", rows=60, dim=4),
    ServedTable(path="items.0", rows=40, dim=4),
    ServedTable(path="items.1", rows=40, dim=4),
)


def plan_of(text: str) -> Plan:
    """With the tables of the job `mixed`."""
    plan = from_text(f"{text} threads=1")
    return plan.replace(tables=TABLES) if plan.uses_servers else plan


def train(
    world: World,
    text: str,
    *,
    stop: int,
    load: str | None = None,
    save: str | None = None,
    elsewhere: tuple[str, str] | None = None,
    **changes: Any,
) -> tuple[dict[str, Tensor], list[float]]:
    """All parameters after `stop` steps, on rank 0, and the losses; from and to a checkpoint where one is named; `elsewhere`: the address
    and the secret's file of servers that run already."""
    servers = ExternalServers(address=elsewhere[0], secret_file=Path(elsewhere[1])) if elsewhere else None
    with Run(make_job("mixed", **changes), plan_of(text), world, external_servers=servers) as run:
        if load is not None:
            run.load(Path(load))
        losses = [float(run.step(batch).loss) for batch in run.batches(stop)]
        run.synchronize()
        if save is not None:
            run.save(Path(save))
        state = run.gather_full_state()
        held = {} if state is None else {name: value for name, value in state.parameters.items() if len(value)}
        evaluated = run.evaluate(run.job.data)
        return held | run.backend.pull_tables(), [*losses, evaluated["loss"]]


def stop_together(world: World, asked_at: int, lead: int) -> int:
    """The step at which this rank stops where the last is asked to and the others go ahead of it as they may."""
    import time

    ranks = WorldCommunicator(world)
    agreement = CoordinatedStop(ranks, lead - 1)
    step = 0
    while True:
        step += 1
        if world.rank == world.size - 1:
            time.sleep(0.005)
        if agreement.report(step, stop_requested=world.rank == world.size - 1 and step >= asked_at):
            agreement.wait()
            return step
