"""Search over plans for a machine that was measured.

Every plan of the data axis is forecast: dp, ZeRO stages and micro-batches, each rank with its share of the cores, which is the load that
machines are measured under. Other plans - blocks computed again, the model cut over tp and pp - come in the order of a time that they cannot be
below, and are forecast while that is below what is in hand. What they cannot be below: products take as long in parts as whole, so that the
busiest rank of a cut has its part of them at least; and a plan that computes blocks again does all that it does without.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, product

from echelon.errors import PlanError
from echelon.plan.check import Problem, check
from echelon.plan.cluster import Cluster
from echelon.plan.forecast import Forecast
from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan, Recompute, Schedule
from echelon.plan.profile import Profile
from echelon.plan.stages import find_stages
from echelon.planner.candidate import Candidate, Complete
from echelon.planner.goal import Costs
from echelon.planner.server_plans import served_plans
from echelon.planner.space import powers
from echelon.simulator.cost.curves import operator_seconds
from echelon.simulator.node_load import load_of, require_one_kind
from echelon.simulator.step import price

#: The tensor axis talks in every block: beyond one machine's usual devices it is not searched.
_TENSOR = 8
#: A bound is reckoned in another order than a forecast: digits that may differ.
_DIGITS = 1 - 1e-9
_AGAIN: tuple[Recompute, ...] = ("selective", "block")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Plans that cut the model over one mesh and have one micro-batch."""

    mesh: Mesh
    micro: int | None


@dataclass(slots=True)
class Found:
    """What was forecast, and what of it is good, the best first."""

    costs: Costs
    top: int
    near: float
    everything: list[Candidate] = field(default_factory=list)
    good: list[tuple[tuple[float, float, float, str], Candidate]] = field(default_factory=list)

    def add(self, made: Candidate) -> None:
        """One more."""
        self.everything.append(made)
        forecast = made.forecast
        if forecast.fits and forecast.time.step <= self.costs.goal.limit:
            key = self.costs.of(forecast), forecast.time.step, forecast.memory.peak, str(made.plan)
            insort(self.good, (key, made), key=lambda each: each[0])

    @property
    def enough(self) -> float:
        """What costs more than this is of no interest."""
        if len(self.good) < self.top:
            return float("inf")
        return max(self.good[0][0][0] * (1 + self.near), self.good[self.top - 1][0][0])


class Machine:
    """Plans of one model for one machine."""

    def __init__(self, profile: Profile, cluster: Cluster, *, ranks: int | None, complete: Complete | None) -> None:
        require_one_kind(cluster)
        if ranks is not None and ranks < 1:
            raise PlanError(f"ranks={ranks}: a plan has at least one rank")
        self.profile, self.cluster, self.ranks, self.complete = profile, cluster, ranks, complete
        self._cuts: dict[tuple[int, bool], Plan | None] = {}
        self._products: dict[tuple[object, ...], float] = {}

    def plans(self) -> Iterator[Plan]:
        """Those of the data axis."""
        profile = self.profile
        for dp in [self.ranks] if self.ranks is not None else sizes(min(self.cluster.ranks, profile.batch)):
            share = -(-profile.batch // dp)
            for zero, micro in product((0, 1, 2, 3) if dp > 1 else (0,), halves(share)):
                yield self._made(Plan(mesh=Mesh(dp=dp), zero=zero, micro=micro))

    def _made(self, plan: Plan) -> Plan:
        """With what follows from its ranks and the model."""
        cpu = self.cluster.kind == "cpu"
        return replace(
            plan,
            threads=max(self.cluster.cores // plan.ranks, 1) if cpu else None,
            # A model that may run other blocks on other ranks: only whole sharding is safe then.
            whole=plan.zero > 0 and bool(self.profile.unsteady),
            model=self.profile.model,
        )

    def families(self, *, tensor: bool) -> Iterator[Family]:
        """The model cut over pp, or where `tensor` over tp, with or without pp; the rest of the ranks are on dp."""
        profile = self.profile
        for size in [self.ranks] if self.ranks is not None else sizes(self.cluster.ranks):
            wide = powers(min(size, _TENSOR))[1:] if tensor and self.complete else [1] * (not tensor)
            for tp, pp in product(wide, powers(size)):
                dp = size // (tp * pp)
                if tp == pp == 1 or dp * tp * pp != size or dp > profile.batch or pp > max(len(profile.visits), 1):
                    continue
                share = -(-profile.batch // dp)
                # A pipeline needs several micro-batches, and more than some for each stage gain nothing.
                few = dict.fromkeys(max(share // (turns * pp), 1) for turns in (1, 2, 4, 8))
                for micro in halves(share) if pp == 1 else few:
                    yield Family(mesh=Mesh(dp=dp, tp=tp, pp=pp), micro=None if micro == share else micro)

    def least(self, family: Family) -> float:
        """Seconds that no plan of the family is faster than."""
        plan = self._made(Plan(mesh=family.mesh, micro=family.micro))
        load = load_of(self.profile, self.cluster, plan)
        total = 0.0
        for samples in load.micros:
            key = samples, load.ranks, load.threads
            if key not in self._products:
                self._products[key] = sum(
                    each.count * operator_seconds(each, samples, load, self.profile.precision)
                    for each in self.profile.operators
                    if each.kind != "stream"
                )
            total += self._products[key]
        return total / (family.mesh.tp * family.mesh.pp) * _DIGITS

    def least_again(self, forecast: Forecast) -> float:
        """Seconds that the plan with blocks computed again is not below: all but what waits for hosts and other ranks, and the memory that is
        not asked for anew."""
        load, time = load_of(self.profile, self.cluster, forecast.plan), forecast.time
        fresh = sum(map(self.profile.kept, load.micros)) * load.device.fault * load.crowding
        return (time.step - time.overhead - time.bubble - fresh) * _DIGITS

    def cut(self, family: Family) -> Iterator[Plan]:
        """The plans of a family that keep all activations."""
        mesh = family.mesh
        like = self._placed(mesh)
        if like is None:
            return
        schedules: tuple[Schedule, ...] = ("1f1b",) if mesh.pp == 1 else ("1f1b", "interleaved", "zero-bubble")
        for zero, schedule in product((0, 1, 2, 3) if mesh.dp > 1 else (0,), schedules):
            plan = replace(like, mesh=mesh, micro=family.micro, zero=zero, schedule=schedule, stages=())
            stages = find_stages(plan, self.profile.visits) if mesh.pp > 1 else ()
            if stages is not None:
                yield self._made(replace(plan, stages=stages))

    def _placed(self, mesh: Mesh) -> Plan | None:
        """A plan that knows how tp cuts the model; None where it cannot."""
        if mesh.tp == 1:
            return Plan()
        kind = mesh.tp, mesh.pp > 1
        if kind not in self._cuts:
            try:
                assert self.complete is not None
                self._cuts[kind] = self.complete(Plan(mesh=Mesh(tp=mesh.tp, pp=2 if mesh.pp > 1 else 1)))
            except PlanError:
                self._cuts[kind] = None
        return self._cuts[kind]

    def again(self, plan: Plan) -> list[Plan]:
        """A plan that keeps all activations, with blocks computed again instead."""
        if not self.profile.units or plan.served or plan.schedule == "zero-bubble":
            return []
        return [replace(plan, recompute=each) for each in _AGAIN]

    def priced(self, plans: Iterable[Plan]) -> list[Candidate]:
        """Those of `plans` that can be executed, and what they cost."""
        good = (plan for plan in plans if not self.errors(plan))
        return [Candidate(plan=plan, forecast=price(self.profile, self.cluster, plan)) for plan in good]

    def errors(self, plan: Plan) -> list[Problem]:
        """Why it cannot be executed."""
        return [problem for problem in check(plan, self.profile, self.cluster) if problem.severity == "error"]


def best(machine: Machine, costs: Costs, *, top: int, near: float, exhaustive: bool) -> Found:
    """The `top` plans that fit and every other whose cost is within `near` of the least, among all that was forecast."""
    found, order = Found(costs, top, near), count()
    queue: list[tuple[float, int, Family | Plan]] = []

    def put(seconds: float, item: Family | Plan) -> None:
        ranks = item.mesh.ranks
        heapq.heappush(queue, (costs.cost(seconds, ranks, 0.0), next(order), item))

    def take(made: Candidate) -> None:
        found.add(made)
        for plan in machine.again(made.plan):
            put(machine.least_again(made.forecast), plan)

    for made in machine.priced(machine.plans()):
        take(made)
    if not found.good:
        # Tables that fit no device may fit the hosts: trained by servers, which changes more than where things are.
        for made in machine.priced(served_plans(machine.profile, machine.cluster, machine.plans())):
            take(made)
    # Ranks of tp on a CPU share the cores that one rank's threads use: where another plan fits, looking for cuts, for which the model is
    # run, is not worth its time.
    cpu = machine.cluster.kind == "cpu"
    for tensor in (False, True):
        if tensor and cpu and found.good:
            break
        for family in machine.families(tensor=tensor):
            put(machine.least(family), family)
        if tensor or cpu:
            _drain(machine, found, queue, take, exhaustive=exhaustive)
    return found


def _drain(
    machine: Machine,
    found: Found,
    queue: list[tuple[float, int, Family | Plan]],
    take: Callable[[Candidate], None],
    *,
    exhaustive: bool,
) -> None:
    """Forecast what is in the queue, while it may be of interest."""
    while queue:
        lowest, _, item = heapq.heappop(queue)
        if not exhaustive and lowest > found.enough:
            break
        if isinstance(item, Family):
            for made in machine.priced(machine.cut(item)):
                take(made)
        else:
            for made in machine.priced([item]):
                found.add(made)


def candidates(profile: Profile, cluster: Cluster, *, ranks: int | None = None) -> list[Candidate]:
    """Every plan of the data axis that passes `check`, whether it fits or not."""
    machine = Machine(profile, cluster, ranks=ranks, complete=None)
    return machine.priced(machine.plans())


def sizes(most: int) -> list[int]:
    """1, 2, 4 ... and the whole machine."""
    return sorted({*powers(most), most})


def halves(share: int) -> list[int | None]:
    """The whole share at once, then halves of it down to one sample."""
    found: list[int | None] = [None]
    size = share
    while size > 1:
        size = -(-size // 2)
        found.append(size)
    return found
