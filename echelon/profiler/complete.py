"""What a plan leaves open about a model: how the tensor axis cuts its modules, and where the stages of a pipeline begin."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import partial
from itertools import accumulate
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from echelon.errors import PlanError
from echelon.job import Job, call_loss, call_model, lift
from echelon.plan.placement import Placement
from echelon.plan.plan import Plan
from echelon.profiler.build import built
from echelon.profiler.example import Example
from echelon.profiler.ghost import Ghost
from echelon.profiler.sharding import Sharding, shard
from echelon.profiler.visits import Visit

#: Stages per rank of schedules that interleave them.
VIRTUAL = 2
_SEVERAL = ("interleaved", "zero-bubble")


def complete(plan: Plan, job: Job) -> Plan:
    """`plan` with the placements and stages that it lacks."""
    if plan.mesh.tp > 1 and not plan.placements:
        found = cuts(job, plan.mesh.tp)
        if not found.placements:
            why = next(iter(found.whole.values()), "it has no parameters")
            raise PlanError(
                f"tp={plan.mesh.tp}: nothing of the model can be cut ({why}); use dp, with zero=3 where memory is short"
            )
        plan = dataclasses.replace(plan, placements=found.placements)
    if plan.mesh.pp > 1:
        # What passes between stages is whole.
        plan = dataclasses.replace(plan, placements=tuple(map(_gathered, plan.placements)))
    if plan.mesh.pp > 1 and not plan.stages:
        count = plan.mesh.pp * (VIRTUAL if plan.schedule in _SEVERAL else 1)
        plan = dataclasses.replace(plan, stages=_stages(job, count, _pairs(plan.placements)))
    return plan


def _gathered(placement: Placement) -> Placement:
    return dataclasses.replace(placement, cut="gather") if placement.cut == "logits" else placement


def cuts(job: Job, ways: int) -> Sharding:
    """How the job's model is cut over so many ranks, and what stays whole."""
    for dtype in (torch.float64, None):
        torch.manual_seed(job.seed)
        made = copy.deepcopy(job.model) if isinstance(job.model, nn.Module) else job.model()
        model = (made if dtype is None else lift(made, dtype)).eval()
        batch = Example(job).batch(2) if dtype is None else _lifted(Example(job).batch(2))
        step = partial(_loss, job, model, batch)
        try:
            step()
            break
        except Exception:
            if dtype is None:
                raise
    return shard(model, step, ways)


def _loss(job: Job, model: nn.Module, batch: Any) -> Any:
    return call_loss(job, call_model(job, model, batch), batch, model)


def _lifted(batch: Any) -> Any:
    return tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, batch
    )


def _pairs(placements: Iterable[Placement]) -> Iterator[set[str]]:
    """Columns with their row: what is cut between them must not pass from one stage to another."""
    together: set[str] = set()
    for placement in placements:
        if placement.cut in ("column", "between"):
            together.add(placement.path)
        elif placement.cut == "row":
            yield {*together, placement.path}
            together = set()


def _stages(job: Job, count: int, pairs: Iterable[set[str]]) -> tuple[int, ...]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = built(job).train()
    ghost = Ghost(model, torch.device("cpu"))
    visits = ghost.visits(partial(_loss, job), Example(job).batch(2))
    if len(visits) - 1 < count:
        raise PlanError(
            f"{count} stages: the model has {max(len(visits) - 1, 0)} units that forward calls one after another, and each stage needs one; use "
            "fewer stages (dp with zero=3 also shares the memory)"
        )
    bound: set[int] = set()  # places in the middle of a pair
    for pair in pairs:
        places = [n for n, visit in enumerate(visits) if visit.path in pair]
        bound |= set(range(min(places) + 1, max(places) + 1)) if places else set()
    found = divide([_weight(model, visit) for visit in visits[:-1]], count, bound)
    if found is None:
        raise PlanError(
            f"{count} stages: too few places between the pairs of modules that tp cuts; use fewer stages, or tp=1"
        )
    return found


def _weight(model: nn.Module, visit: Visit) -> float:
    """About what a unit costs: its products, and a little for each parameter where there are none."""
    return visit.flops + 2.0 * sum(value.numel() for value in model.get_submodule(visit.path).parameters())


def divide(weights: Sequence[float], count: int, bound: Set[int] = frozenset()) -> tuple[int, ...] | None:
    """Where `count` stages of consecutive units begin, but the first, such that the heaviest is as light as can be; none begins at a
    place in `bound`. None: that cannot be."""
    sums = [0.0, *accumulate(weights)]
    size = len(weights)
    #: For each number of stages: (heaviest stage, where the last one begins) over the first n units.
    best: list[list[tuple[float, int]]] = [[(sums[n], 0) for n in range(size + 1)]]
    for stage in range(1, count):
        row = [(inf, 0)] * (size + 1)
        for end in range(stage + 1, size + 1):
            places = [begin for begin in range(stage, end) if begin not in bound]
            row[end] = min(((max(best[-1][b][0], sums[end] - sums[b]), b) for b in places), default=(inf, 0))
        best.append(row)
    if best[-1][size][0] == inf:
        return None
    bounds, end = [], size
    for stage in range(count - 1, 0, -1):
        end = best[stage][end][1]
        bounds.append(end)
    return tuple(reversed(bounds))
