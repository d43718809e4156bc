"""The best plans of a job on a cluster, forecast and sorted.

On a machine that was measured (`measured`): dp, ZeRO stages, micro-batches, tp, pp with its schedules, and what is computed again. On a cluster
that is known by its data sheets (`space`): all axes at once, over up to tens of thousands of devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

from echelon.errors import PlanError
from echelon.plan.check import require
from echelon.plan.cluster import Cluster
from echelon.plan.forecast import Forecast
from echelon.plan.format_units import seconds
from echelon.plan.plan import Plan, Precision
from echelon.plan.profile import Profile
from echelon.plan.stages import bound, find_stages
from echelon.planner import measured
from echelon.planner.candidate import WORTH, Candidate, Complete, simplest_first
from echelon.planner.goal import Costs, Goal
from echelon.planner.measured import Machine
from echelon.planner.space import Space, best, devices_needed, with_servers, with_shares
from echelon.planner.tp_selection import choose
from echelon.simulator.step import by_sheet, price

#: So many reasons are told when all plans are refused.
_REASONS = 8


def search(
    profile: Profile,
    cluster: Cluster,
    *,
    top: int = 5,
    ranks: int | None = None,
    complete: Complete | None = None,
    goal: Goal | None = None,
    exhaustive: bool = False,
    beyond: bool = False,
    precisions: tuple[Precision | None, ...] = (None,),
) -> tuple[Candidate, ...]:
    """The `top` plans that can be executed and fit, best first. `ranks`: only plans for so many ranks.

    `complete`: without it no plan of a measured machine has a tensor axis, whose cuts only a look into the model tells.
    `goal`: what the best is; the fastest where it is not given. `exhaustive`: forecast every plan, also those that cannot be the best.
    `beyond`: axes too that are forecast and not executed yet. `precisions`: other than the job's, None.
    """
    wanted = goal or Goal()
    strange = next((each for each in precisions if each not in (None, *get_args(Precision))), None)
    if strange is not None:
        raise PlanError(f"precision={strange}: not one of {', '.join(get_args(Precision))}")
    if "fp8" in precisions and not beyond:
        raise PlanError("precision=fp8: it is forecast and not executed yet; with beyond (--beyond) it is searched too")
    if set(precisions) != {None} and not by_sheet(cluster):
        raise PlanError(
            "precisions are searched on clusters that are known by their data sheets; here give the job's precision"
        )
    if by_sheet(cluster):
        space = Space(profile, cluster, ranks=ranks, beyond=beyond, precisions=precisions)
        return _wide(space, Costs(wanted, cluster), top, complete, exhaustive=exhaustive)
    costs, machine = Costs(wanted, cluster), Machine(profile, cluster, ranks=ranks, complete=complete)
    near = WORTH if wanted.kind != "devices" else 0.0
    found = measured.best(machine, costs, top=top, near=near, exhaustive=exhaustive)
    if not found.everything:
        raise _no_plan(machine)
    if not found.good:
        if any(candidate.forecast.fits for candidate in found.everything):
            raise _too_slow(found.everything, wanted)
        raise _too_large(found.everything, cluster.kind)
    good = [candidate for _, candidate in found.good]
    return _sharded(simplest_first(good, costs, top), costs, profile, lambda plan: price(profile, cluster, plan))


def _wide(
    space: Space, costs: Costs, top: int, complete: Complete | None, *, exhaustive: bool
) -> tuple[Candidate, ...]:
    """On a cluster by its data sheets."""
    wanted, goal = top, costs.goal
    known: dict[tuple[object, ...], Plan | PlanError] = {}
    beside = [*with_shares(space, goal), *with_servers(space, goal)]
    while True:
        found = best(space, costs, top=wanted, near=WORTH if goal.kind != "devices" else 0.0, exhaustive=exhaustive)
        done, refused = _completed(space, costs, (*found, *beside), complete, known)
        # What was not looked at costs no less than the last that was found: with the cuts that the model allows plans may cost more than that.
        if len(found) < wanted or (done and costs.of(done[0].forecast) <= costs.of(found[-1])):
            break
        wanted *= 4
    if not done:
        raise _nothing(space, goal, refused)
    return _sharded(simplest_first(done, costs, top), costs, space.profile, space.forecast)


def _completed(
    space: Space,
    costs: Costs,
    found: Sequence[Forecast],
    complete: Complete | None,
    known: dict[tuple[object, ...], Plan | PlanError],
) -> tuple[list[Candidate], list[PlanError]]:
    """What was found, with its cuts and priced with them, best first; and why others have none. `known`: cuts by what decides them."""
    done: list[Candidate] = []
    refused: list[PlanError] = []
    for forecast in found:
        if complete is not None and forecast.plan.open:
            try:
                plan = _cut(space, forecast.plan, complete, known)
            except PlanError as error:
                refused.append(error)
                continue
            forecast = space.forecast(plan)
        if forecast.fits and forecast.time.step <= costs.goal.limit:
            done.append(Candidate(plan=forecast.plan, forecast=forecast))
    done.sort(key=lambda each: (costs.of(each.forecast), each.forecast.time.step, str(each.plan)))
    return done, refused


def _cut(space: Space, plan: Plan, complete: Complete, known: dict[tuple[object, ...], Plan | PlanError]) -> Plan:
    """A plan with its cuts, whose stages do not begin between a column and its row, and that can be executed."""
    kind = plan.mesh.tp, plan.sequence, plan.mesh.pp > 1
    if kind not in known:
        try:
            known[kind] = complete(plan)
        except PlanError as error:
            known[kind] = error
    like, visits = known[kind], space.profile.visits
    if isinstance(like, PlanError):
        raise like
    plan = replace(plan, placements=like.placements, uncut=like.uncut, segments=like.segments)
    if set(plan.stages) & bound(plan, visits):
        stages = find_stages(plan, visits, space.pace(plan))
        if stages is None:
            raise PlanError(f'"{plan}": too few places where a stage may begin; use a smaller pp')
        plan = replace(plan, stages=stages)
    if space.refused(plan):
        require(plan, space.profile, space.quotes.cluster)
    return plan


def _nothing(space: Space, goal: Goal, refused: Sequence[PlanError]) -> PlanError:
    if refused:
        return refused[0]
    if goal.limit < math.inf:
        fastest = best(space, Costs(Goal(), space.cluster), top=1, near=0.0, exhaustive=False)
        if fastest:
            return _late(fastest[0], goal)
    profile, cluster = space.profile, space.cluster
    asked = f" of {space.ranks} devices" if space.ranks is not None else f" of {cluster.name} ({space.devices} devices)"
    needed = devices_needed(profile, cluster, above=space.ranks or space.devices)
    error = PlanError(
        f"{profile.name}: {profile.elements:,} parameters fit no plan{asked}; "
        + (
            f"{needed} devices of this kind would hold it"
            if needed is not None
            else "one sample and one block alone fill a device: larger devices, smaller blocks or shorter samples are needed"
        )
    )
    error.exit_code = 1
    return error


def _late(fastest: Forecast, goal: Goal) -> PlanError:
    error = PlanError(
        f'no plan is done in time: the fastest, "{fastest.plan}", takes {seconds(fastest.time.step * goal.steps)} for {goal.steps:,} '
        f"step{'s' * (goal.steps > 1)} and there are {seconds(goal.within or 0)}; give more time, more devices or fewer steps"
    )
    error.exit_code = 1
    return error


def _too_slow(everything: Sequence[Candidate], goal: Goal) -> PlanError:
    return _late(min((c.forecast for c in everything if c.forecast.fits), key=lambda each: each.time.step), goal)


def _sharded(
    found: tuple[Candidate, ...], costs: Costs, profile: Profile, price: Callable[[Plan], Forecast]
) -> tuple[Candidate, ...]:
    """What was found with all that is faster whole left whole. Bounds are of plans that cut everything, so that this comes after the search."""
    if costs.goal.kind == "memory" or not any(each.plan.placements for each in found):
        return found
    better = [choose(each.plan, profile, price) if each.plan.placements else each.forecast for each in found]
    made = [Candidate(plan=each.plan, forecast=each) for each in better]
    return simplest_first(sorted(made, key=lambda each: costs.of(each.forecast)), costs, len(made))


def _no_plan(machine: Machine) -> PlanError:
    """Every plan is refused: why, each reason once however many plans it refuses."""
    ranks, refused = machine.ranks, [machine.errors(plan) for plan in machine.plans()]
    reasons = {str(problem): problem for problems in refused for problem in problems}
    asked = f" of {ranks} ranks" if ranks is not None else ""
    told = [f"  {reason}" for reason in list(reasons)[:_REASONS]]
    more = [f"  and {len(reasons) - _REASONS} more"] if len(reasons) > _REASONS else []
    return PlanError("\n".join([f"no plan{asked} can be executed:", *told, *more]), list(reasons.values()))


def _too_large(everything: list[Candidate], kind: str) -> PlanError:
    """Nothing fits: what the closest one lacks, and what would help."""
    closest = min(everything, key=lambda candidate: candidate.forecast.memory.needed / candidate.forecast.capacity)
    forecast = closest.forecast
    error = PlanError(
        f'no plan fits: the closest, "{closest.plan}", needs up to {forecast.memory.needed / 1e9:.2f} GB per rank and there are '
        f"{forecast.capacity / 1e9:.2f} GB: {(forecast.memory.needed - forecast.capacity) / 1e9:.2f} GB are missing (the peak is at "
        f"{forecast.peak_at}); {_remedy(everything, closest, kind)}"
    )
    error.exit_code = 1
    return error


def _remedy(everything: list[Candidate], closest: Candidate, kind: str) -> str:
    if kind == "cpu":
        # The ranks of a machine share its memory: more of them do not help.
        least = min(c.forecast.memory.needed * c.plan.ranks for c in everything)
        return f"a machine with {least / 0.95 / 1e9:.1f} GB would hold it, or a smaller model"
    memory = closest.forecast.memory
    # Parameters, gradients and optimizer state can be sharded over any number of ranks; what a sample needs cannot.
    fixed = memory.framework + (memory.activations + memory.temporary) * memory.high / memory.peak
    room = closest.forecast.capacity - fixed
    if room <= 0:
        return "one sample alone fills a device: a smaller model or shorter samples are needed"
    plan = closest.plan
    state = (closest.forecast.memory.needed - fixed) * (plan.ranks if plan.zero == 3 or plan.mesh.dp == 1 else 1)
    return f"about {max(math.ceil(state / room), plan.ranks + 1)} devices of this size under zero=3 would hold it"
