"""Which of the modules that tp can cut it does cut: an integer program.

To cut a module divides what it computes and holds, and makes the ranks talk. Alone, each would be cut where that is faster; but they meet
in the memory of a device, and which of those that are faster whole must be cut all the same only all of them together tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy
from scipy.optimize import Bounds, LinearConstraint, milp

from echelon.plan.forecast import Forecast
from echelon.plan.placement import Uncut
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile, fold_path
from echelon.plan.stages import pairs


def choose(plan: Plan, profile: Profile, price: Callable[[Plan], Forecast]) -> Forecast:
    """The forecast of `plan` with what is faster whole left whole, as far as there is memory for it; as it is where nothing is gained.

    What each group saves is told by `price` without it, and all that is left whole is priced once more together.
    """
    cut = price(plan)
    together = groups(plan, profile)
    # Where the sequence is cut, segments lie between modules that must be cut too.
    if len(together) < 2 or plan.sequence or not cut.fits:
        return cut
    alone = [price(without(plan, group)) for group in together]
    step, need = cut.time.step, cut.memory.needed
    left = cheapest(
        [(each.time.step - step) / step for each in alone],
        [(each.memory.needed - need) / cut.capacity for each in alone],
        1 - need / cut.capacity,
    )
    if not left:
        return cut
    found = price(without(plan, set().union(*(together[place] for place in left))))
    return found if found.fits and found.time.step < step else cut


def cheapest(costs: Sequence[float], sizes: Sequence[float], room: float) -> list[int]:
    """Places of what to leave whole such that the sum of `costs` is least and that of `sizes` is within `room`; one at least is cut."""
    count = len(costs)
    answer = milp(
        numpy.array(costs),
        integrality=numpy.ones(count),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(numpy.array([sizes, [1.0] * count]), -math.inf, [room, count - 1]),
    )
    return [place for place in range(count) if answer.x[place] > 0.5] if answer.success else []


def groups(plan: Plan, profile: Profile) -> list[frozenset[str]]:
    """Folded paths of modules that are cut all or none: a row with its columns, what holds the same parameter, and blocks alike."""
    cut = {fold_path(each.path) for each in plan.placements}
    found = [{path} for path in sorted(cut)]
    bound = [{fold_path(each.path) for each in (*columns, row)} for columns, row in pairs(plan)]
    for parameter in profile.parameters:
        owners = {fold_path(name.rpartition(".")[0]) for name in (parameter.name, *parameter.aliases)}
        bound.append(owners & cut)
    for paths in bound:
        met = [group for group in found if group & paths]
        if len(met) > 1:
            found = [group for group in found if group not in met] + [set().union(*met)]
    return [frozenset(group) for group in found]


def without(plan: Plan, paths: Collection[str]) -> Plan:
    """`plan` with modules of these folded paths whole on every rank."""
    left = [each for each in plan.placements if fold_path(each.path) in paths]
    why = f"cut over tp={plan.mesh.tp} it would save less than the ranks would have to say"
    return replace(
        plan,
        placements=tuple(each for each in plan.placements if each not in left),
        uncut=(*plan.uncut, *(Uncut(path=each.path, why=why) for each in left)),
    )
