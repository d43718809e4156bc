"""Selects the modules that tp cuts, by an integer program.

Cutting a module divides its computation and memory and adds communication. Each module has its own gain or loss of time, but all share a
device's memory, so which of those that are faster replicated must be cut all the same is a joint decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import numpy
from scipy.optimize import Bounds, LinearConstraint, milp

from echelon.plan.forecast import Forecast
from echelon.plan.placement import ReplicatedModule
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile, fold_path
from echelon.plan.stages import column_row_pairs


def replicate_faster_modules(plan: Plan, profile: Profile, forecast_plan: Callable[[Plan], Forecast]) -> Forecast:
    """The forecast of `plan` with modules replicated that are faster so, as far as memory allows; unchanged if nothing is gained.

    `forecast_plan` prices the plan without each group in turn, and once more with the selection.
    """
    baseline = forecast_plan(plan)
    groups = inseparable_modules(plan, profile)
    # With a sharded sequence, segments end at modules that must be cut too.
    if len(groups) < 2 or plan.tensor.sequence or not baseline.fits:
        return baseline
    without_each_group = [forecast_plan(replicate_modules(plan, group)) for group in groups]
    baseline_seconds, baseline_memory = baseline.time.step, baseline.memory.required
    replicated_groups = select_to_replicate(
        [(forecast.time.step - baseline_seconds) / baseline_seconds for forecast in without_each_group],
        [(forecast.memory.required - baseline_memory) / baseline.capacity for forecast in without_each_group],
        1 - baseline_memory / baseline.capacity,
    )
    if not replicated_groups:
        return baseline
    candidate = forecast_plan(replicate_modules(plan, set().union(*(groups[index] for index in replicated_groups))))
    return candidate if candidate.fits and candidate.time.step < baseline_seconds else baseline


def select_to_replicate(
    time_changes: Sequence[float], memory_changes: Sequence[float], free_memory: float
) -> list[int]:
    """Indices of the groups to replicate: the least sum of `time_changes` whose `memory_changes` fit `free_memory`. At least one stays cut."""
    group_count = len(time_changes)
    solution = milp(
        numpy.array(time_changes),
        integrality=numpy.ones(group_count),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(
            numpy.array([memory_changes, [1.0] * group_count]), -math.inf, [free_memory, group_count - 1]
        ),
    )
    return [index for index in range(group_count) if solution.x[index] > 0.5] if solution.success else []


def inseparable_modules(plan: Plan, profile: Profile) -> list[frozenset[str]]:
    """Folded paths of modules that are cut together: a row with its columns, and modules with the same parameter."""
    cut_paths = {fold_path(placement.path) for placement in plan.tensor.placements}
    module_groups = [{path} for path in sorted(cut_paths)]
    pairs = column_row_pairs(plan)
    linked_sets = [{fold_path(placement.path) for placement in (*columns, row)} for columns, row in pairs]
    for parameter in profile.parameters:
        owners = {fold_path(name.rpartition(".")[0]) for name in (parameter.name, *parameter.aliases)}
        linked_sets.append(owners & cut_paths)
    for paths in linked_sets:
        overlapping = [group for group in module_groups if group & paths]
        if len(overlapping) > 1:
            module_groups = [group for group in module_groups if group not in overlapping] + [set().union(*overlapping)]
    return [frozenset(group) for group in module_groups]


def replicate_modules(plan: Plan, paths: Collection[str]) -> Plan:
    """`plan` with the modules of these folded paths replicated."""
    replicated = [placement for placement in plan.tensor.placements if fold_path(placement.path) in paths]
    reason = f"cutting it over tp={plan.mesh.tp} would cost more communication than it saves"
    return plan.replace(
        placements=tuple(placement for placement in plan.tensor.placements if placement not in replicated),
        replicated=(
            *plan.tensor.replicated,
            *(ReplicatedModule(path=placement.path, reason=reason) for placement in replicated),
        ),
    )
