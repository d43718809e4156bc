"""The best plans of a job on a cluster, forecast and sorted.

On a machine that was measured: every dp, thread count, ZeRO stage and micro-batch; where none of these fits, or none can be executed,
blocks are computed again and the model is cut over tp and pp, which costs time and saves memory. On a cluster that is known by its data
sheets: all axes at once (`space`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

from echelon.errors import PlanError
from echelon.plan.check import Problem, check, require
from echelon.plan.cluster import Cluster
from echelon.plan.figures import seconds
from echelon.plan.forecast import Forecast
from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan, Precision, Recompute
from echelon.plan.profile import Profile
from echelon.plan.stages import bound, find_stages
from echelon.planner.goal import Goal
from echelon.planner.served import served_plans
from echelon.planner.shardings import choose
from echelon.planner.space import Space, best, devices_needed, with_servers, with_shares
from echelon.simulator.load import require_one_kind
from echelon.simulator.step import by_sheet, price

#: So many reasons are told when all plans are refused.
_REASONS = 8
#: The tensor axis talks in every block: beyond one machine's usual devices it is not searched.
_TENSOR = 8
#: A plan must be this much faster to be preferred to one with fewer processes: forecasts are not finer than that.
_WORTH = 0.02


#: Fills in how a plan cuts the model; it looks into the model, which the planner cannot.
Complete = Callable[[Plan], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that can be executed, and its forecast."""

    plan: Plan
    forecast: Forecast


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
        return _wide(space, wanted, top, complete, exhaustive=exhaustive)
    everything = candidates(profile, cluster, ranks=ranks)
    fitting = _good(everything, wanted)
    if not fitting or exhaustive:
        # Before the model is cut, for which it is made and run: tables that fit no device may fit no host either.
        everything += _priced(served_plans(profile, cluster, _plans(profile, cluster, ranks)), profile, cluster)
        fitting = _good(everything, wanted)
    if not fitting or exhaustive:
        everything += _priced(_cut_plans(profile, cluster, ranks, complete), profile, cluster)
        fitting = _good(everything, wanted)
    if not everything:
        raise _no_plan(profile, cluster, ranks)
    if not fitting:
        if any(candidate.forecast.fits for candidate in everything):
            raise _too_slow(everything, wanted)
        raise _too_large(everything, cluster.kind)
    fitting.sort(key=lambda each: (_cost(wanted, each), each.forecast.time.step, each.forecast.memory.peak))
    return _sharded(_simplest_first(fitting, wanted, top), wanted, profile, lambda plan: price(profile, cluster, plan))


def _wide(space: Space, goal: Goal, top: int, complete: Complete | None, *, exhaustive: bool) -> tuple[Candidate, ...]:
    """On a cluster by its data sheets."""
    wanted = top
    known: dict[tuple[object, ...], Plan | PlanError] = {}
    while True:
        found = best(space, goal, top=wanted, near=_WORTH if goal.kind != "devices" else 0.0, exhaustive=exhaustive)
        found = sorted(
            (*found, *with_shares(space, goal), *with_servers(space, goal)),
            key=lambda each: (_price(goal, each), each.time.step),
        )
        done, refused = _completed(space, goal, found, complete, known)
        if len(found) < wanted or (done and _cost(goal, done[0]) <= _price(goal, found[-1])):
            break
        wanted *= 4  # with the cuts that the model allows they cost more than what comes after them may: look further
    if not done:
        raise _nothing(space, goal, refused)
    return _sharded(_simplest_first(done, goal, top), goal, space.profile, space.forecast)


def _completed(
    space: Space,
    goal: Goal,
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
        if forecast.fits and forecast.time.step <= goal.limit:
            done.append(Candidate(plan=forecast.plan, forecast=forecast))
    done.sort(key=lambda each: (_cost(goal, each), each.forecast.time.step))
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
        fastest = best(space, Goal(), top=1, near=0.0, exhaustive=False)
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


def _good(everything: Sequence[Candidate], goal: Goal) -> list[Candidate]:
    return [each for each in everything if each.forecast.fits and each.forecast.time.step <= goal.limit]


def _cost(goal: Goal, candidate: Candidate) -> float:
    return _price(goal, candidate.forecast)


def _price(goal: Goal, forecast: Forecast) -> float:
    return goal.cost(forecast.time.step, forecast.plan.ranks, _needed(forecast))


def _simplest_first(fitting: list[Candidate], goal: Goal, top: int) -> tuple[Candidate, ...]:
    """Among plans that cost nearly the same the simplest one is the best."""
    if goal.kind == "devices":
        return tuple(fitting[:top])
    limit = _cost(goal, fitting[0]) * (1 + _WORTH)
    chosen = min((candidate for candidate in fitting if _cost(goal, candidate) <= limit), key=_simplicity)
    return (chosen, *[candidate for candidate in fitting if candidate is not chosen][: top - 1])


def _sharded(
    found: tuple[Candidate, ...], goal: Goal, profile: Profile, price: Callable[[Plan], Forecast]
) -> tuple[Candidate, ...]:
    """What was found with all that is faster whole left whole. Bounds are of plans that cut everything, so that this comes after the search."""
    if goal.kind == "memory" or not any(each.plan.placements for each in found):
        return found
    better = [choose(each.plan, profile, price) if each.plan.placements else each.forecast for each in found]
    made = [Candidate(plan=each.plan, forecast=each) for each in better]
    return _simplest_first(sorted(made, key=lambda each: _cost(goal, each)), goal, len(made))


def candidates(profile: Profile, cluster: Cluster, *, ranks: int | None = None) -> list[Candidate]:
    """Every plan of the data axis that passes `check`, whether it fits or not."""
    require_one_kind(cluster)
    return _priced(_plans(profile, cluster, ranks), profile, cluster)


def _priced(plans: Iterable[Plan], profile: Profile, cluster: Cluster) -> list[Candidate]:
    good = (plan for plan in plans if not _errors(plan, profile, cluster))
    return [Candidate(plan=plan, forecast=price(profile, cluster, plan)) for plan in good]


def _errors(plan: Plan, profile: Profile, cluster: Cluster) -> list[Problem]:
    return [problem for problem in check(plan, profile, cluster) if problem.severity == "error"]


def _plans(profile: Profile, cluster: Cluster, ranks: int | None) -> Iterator[Plan]:
    cpu = cluster.kind == "cpu"
    most = cluster.ranks
    if ranks is not None and ranks < 1:
        raise PlanError(f"ranks={ranks}: a plan has at least one rank")
    sizes = [ranks] if ranks is not None else _sizes(min(most, profile.batch))
    for dp in sizes:
        threads = max(cluster.cores // dp, 1) if cpu else None
        share = -(-profile.batch // dp)
        for zero in (0, 1, 2, 3) if dp > 1 else (0,):
            # A model that may run other blocks on other ranks: only whole sharding is safe then.
            whole = zero > 0 and bool(profile.unsteady)
            for micro in _micros(share):
                yield Plan(
                    mesh=Mesh(dp=dp),
                    zero=zero,
                    micro=micro,
                    threads=threads,
                    whole=whole,
                    model=profile.model,
                )


def _cut_plans(profile: Profile, cluster: Cluster, ranks: int | None, complete: Complete | None) -> Iterator[Plan]:
    """Plans that hold less: blocks computed again, and the model cut over tp, pp or both, with the rest of the ranks on dp."""
    if profile.units:
        yield from (replace(plan, recompute="block") for plan in _plans(profile, cluster, ranks))
    cuts: dict[int, Plan | None] = {}
    for size in [ranks] if ranks is not None else _sizes(cluster.ranks):
        for tp, pp in product(_powers(min(size, _TENSOR)), _powers(size)):
            dp = size // (tp * pp)
            if tp == pp == 1 or dp * tp * pp != size or dp > profile.batch or pp > max(len(profile.visits), 1):
                continue
            if tp not in cuts:
                cuts[tp] = Plan() if tp == 1 else _tensor_cuts(tp, complete)
            cut = cuts[tp]
            if cut is not None:
                yield from _variants(replace(cut, mesh=Mesh(dp=dp, tp=tp, pp=pp)), profile, cluster)


def _variants(plan: Plan, profile: Profile, cluster: Cluster) -> Iterator[Plan]:
    """A mesh with the micro-batches, ZeRO stages and recomputation that may make it fit."""
    share = -(-profile.batch // plan.mesh.dp)
    threads = max(cluster.cores // plan.ranks, 1) if cluster.kind == "cpu" else None
    if plan.mesh.pp > 1:
        stages = find_stages(plan, profile.visits)
        if stages is None:
            return
        plan = replace(plan, stages=stages)
        micros = list(dict.fromkeys(max(share // (turns * plan.mesh.pp), 1) for turns in (1, 2, 4, 8)))
    else:
        micros = [micro or share for micro in _micros(share)]
    again: list[Recompute] = ["none", "block"] if profile.units else ["none"]
    for zero, micro, recompute in product((0, 1, 3) if plan.mesh.dp > 1 else (0,), micros, again):
        whole = zero > 0 and bool(profile.unsteady)
        yield replace(
            plan, zero=zero, micro=micro if micro < share else None, recompute=recompute, threads=threads, whole=whole,
            model=profile.model,
        )  # fmt: skip


def _tensor_cuts(tp: int, complete: Complete | None) -> Plan | None:
    """A plan that knows how tp cuts the model; None where it cannot."""
    try:
        return complete(Plan(mesh=Mesh(tp=tp))) if complete is not None else None
    except PlanError:
        return None


def _powers(most: int) -> list[int]:
    return [2**k for k in range(most.bit_length())]


def _sizes(most: int) -> list[int]:
    """1, 2, 4 ... and the whole machine."""
    sizes = [1]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == most else [*sizes, most]


def _micros(share: int) -> list[int | None]:
    """The whole share at once, then halves of it down to one sample."""
    micros: list[int | None] = [None]
    size = share
    while size > 1:
        size = -(-size // 2)
        micros.append(size)
    return micros


def _simplicity(candidate: Candidate) -> tuple[int, bool, int, int, float, float]:
    plan = candidate.plan
    return (
        plan.ranks,
        plan.served,
        plan.ranks // plan.mesh.dp,
        plan.zero,
        -(plan.micro or math.inf),
        candidate.forecast.time.step,
    )


def _no_plan(profile: Profile, cluster: Cluster, ranks: int | None) -> PlanError:
    """Every plan is refused: why, each reason once however many plans it refuses."""
    refused = [_errors(plan, profile, cluster) for plan in _plans(profile, cluster, ranks)]
    reasons = {str(problem): problem for problems in refused for problem in problems}
    asked = f" of {ranks} ranks" if ranks is not None else ""
    told = [f"  {reason}" for reason in list(reasons)[:_REASONS]]
    more = [f"  and {len(reasons) - _REASONS} more"] if len(reasons) > _REASONS else []
    return PlanError("\n".join([f"no plan{asked} can be executed:", *told, *more]), list(reasons.values()))


def _too_large(everything: list[Candidate], kind: str) -> PlanError:
    """Nothing fits: what the closest one lacks, and what would help."""
    closest = min(everything, key=lambda candidate: _needed(candidate.forecast) / candidate.forecast.capacity)
    forecast = closest.forecast
    error = PlanError(
        f'no plan fits: the closest, "{closest.plan}", needs up to {_needed(forecast) / 1e9:.2f} GB per rank and there are '
        f"{forecast.capacity / 1e9:.2f} GB: {(_needed(forecast) - forecast.capacity) / 1e9:.2f} GB are missing (the peak is at "
        f"{forecast.peak_at}); {_remedy(everything, closest, kind)}"
    )
    error.exit_code = 1
    return error


def _needed(forecast: Forecast) -> float:
    return forecast.memory.high + forecast.memory.framework


def _remedy(everything: list[Candidate], closest: Candidate, kind: str) -> str:
    if kind == "cpu":
        # The ranks of a machine share its memory: more of them do not help.
        least = min(_needed(c.forecast) * c.plan.ranks for c in everything)
        return f"a machine with {least / 0.95 / 1e9:.1f} GB would hold it, or a smaller model"
    memory = closest.forecast.memory
    # Parameters, gradients and optimizer state can be sharded over any number of ranks; what a sample needs cannot.
    fixed = memory.framework + (memory.activations + memory.temporary) * memory.high / memory.peak
    room = closest.forecast.capacity - fixed
    if room <= 0:
        return "one sample alone fills a device: a smaller model or shorter samples are needed"
    plan = closest.plan
    state = (_needed(closest.forecast) - fixed) * (plan.ranks if plan.zero == 3 or plan.mesh.dp == 1 else 1)
    return f"about {max(math.ceil(state / room), plan.ranks + 1)} devices of this size under zero=3 would hold it"
