"""Search over plans for clusters that are known by their data sheets: up to tens of thousands of devices.

Plans are looked at in the order of a bound that their forecast cannot be below: first of whole families (a mesh with a micro-batch and
what is computed again), then of single plans. Once the bound is above what is in hand nothing better is left: that is the proof, and
`exhaustive=True` looks at everything all the same.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, cycle, islice, product

from echelon.errors import PlanError
from echelon.plan.batch_split import rounds, sizes
from echelon.plan.check import check
from echelon.plan.cluster import Cluster, Wire
from echelon.plan.forecast import Forecast
from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan, Precision, Recompute, Schedule
from echelon.plan.profile import Profile
from echelon.plan.stages import INTERLEAVING, VIRTUAL, bound, divide
from echelon.planner.goal import Costs, Goal
from echelon.planner.server_plans import served_plans, worth
from echelon.simulator.plan_pricer import Quotes
from echelon.simulator.step import distinct, on_ranks, simulate

#: The tensor axis talks in every block: beyond the devices that share a fast link it is not searched.
_TENSOR = 16
#: Shares of the batch are told in such parts of the smallest.
_FINE = 8
#: Sequences are not cut finer than this.
_CONTEXT = 16
#: Where few devices are wanted, numbers of nodes between one and the double of it that are looked at.
_STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Plans that compute the same on a rank: they differ in ZeRO's stage, the schedule and how the sequence is cut."""

    mesh: Mesh
    micro: int
    recompute: Recompute
    precision: Precision | None


class Space:
    """Every plan that is worth a look, by families."""

    def __init__(
        self, profile: Profile, cluster: Cluster, *, ranks: int | None, beyond: bool, precisions: tuple[Precision | None, ...] = (None,)
    ) -> None:  # fmt: skip
        self.profile, self.cluster, self.ranks, self.beyond = profile, cluster, ranks, beyond
        self.precisions = precisions
        self.quotes = Quotes(profile, cluster)
        self.devices = self.quotes.devices
        self._efficiency: list[float] | None = None
        self._splits: dict[tuple[object, ...], tuple[int, ...] | None] = {}
        node = self.quotes.cluster.nodes[0]
        self._near = max(node.wire.domain if node.wire else 1, len(node.devices))

    def families(self, size: int) -> Iterator[Family]:
        """Meshes over so many devices."""
        profile, work = self.profile, self.quotes.work
        again: list[Recompute] = ["none", "selective", "block"] if profile.units else ["none"]
        for tp, pp, cp in product(powers(min(size, _TENSOR, self._near)), divisors(size), powers(min(size, _CONTEXT))):
            dp, left = divmod(size, tp * pp * cp)
            if left or dp > profile.batch or pp > max(len(profile.visits), 1) or (cp > 1 and not self.beyond):
                continue
            share = -(-profile.batch // dp)
            for ep in powers(dp * cp) if self.beyond and work.experts else [1]:
                if (dp * cp) % ep or (ep > 1 and work.number % ep):
                    continue
                mesh = Mesh(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep)
                for micro, recompute, precision in product(micros(share), again, self.precisions):
                    yield Family(mesh=mesh, micro=micro, recompute=recompute, precision=precision)

    def sizes(self, *, fine: bool) -> list[int]:
        """Numbers of devices: 1, 2, 4 ... and all; `fine`: whole nodes too, all up to 16, then 16 for each doubling."""
        if self.ranks is not None:
            if not 1 <= self.ranks <= self.devices:
                raise PlanError(
                    f"ranks={self.ranks}: {self.cluster.name} has {self.devices} devices; use 1 to {self.devices}"
                )
            return [self.ranks]
        found = {*powers(self.devices), self.devices}
        per_node, nodes = len(self.quotes.cluster.nodes[0].devices), 1
        while fine and nodes * per_node <= self.devices:
            found.add(nodes * per_node)
            nodes += max(2 ** (nodes.bit_length() - 1) // _STEPS, 1)
        return sorted(found)

    def least_at(self, size: int) -> float:
        """Seconds that no plan of so many devices is faster than: blocks computed as well as any micro-batch and tp compute them."""
        if self._efficiency is None:
            share, found = self.profile.batch, []
            wide = [
                (tp, cp)
                for tp, cp in product(powers(_TENSOR), powers(_CONTEXT if self.beyond else 1))
                if tp * cp <= self.devices
            ]
            for (tp, cp), micro, precision in product(wide, micros(share), self.precisions):
                family = Family(mesh=Mesh(tp=tp, cp=cp), micro=micro, recompute="none", precision=precision)
                samples = -(-share // rounds(share, 1, micro))
                found.append([seconds * tp * cp / samples for seconds in self._blocks(family)])
            self._efficiency = [min(kind) for kind in zip(*found, strict=True)]
        on = Counter(self.quotes.on[:size])
        speed = sum(number / self._efficiency[kind] for kind, number in on.items())
        return self.profile.batch * self.quotes.work.layers / speed

    def _blocks(self, family: Family) -> list[float]:
        """For each kind of device, seconds of one block, there and back; norms and residuals take least where the sequence is cut."""
        plan = replace(self.plan(family), sequence=family.mesh.tp > 1)
        return [block for _, block, _ in self.quotes.seconds_of_parts(plan)]

    def least(self, family: Family) -> float:
        """Seconds that no plan of the family is faster than: the blocks of the fullest rank, one micro-batch after another."""
        turns = rounds(self.profile.batch, family.mesh.dp, family.micro)
        blocks = self._blocks(family)
        if len(blocks) == 1 or family.mesh.pp == 1:
            slowest = max(blocks[kind] for kind in set(self.quotes.on[: family.mesh.ranks]))
            return turns * self._fullest(family.mesh.pp) * slowest
        # Slow ranks may have few blocks: all are done soonest where every rank takes equally long.
        paces = [max(blocks[kind] for kind in kinds) for kinds in self._on_stages(family.mesh)]
        return turns * self.quotes.work.layers / sum(1 / pace for pace in paces)

    def _on_stages(self, mesh: Mesh) -> list[set[int]]:
        """For each rank of pp the kinds of device that it is on."""
        each = mesh.ranks // mesh.pp
        return [set(self.quotes.on[rank * each : (rank + 1) * each]) for rank in range(mesh.pp)]

    def _fullest(self, pp: int) -> float:
        """Blocks that the fullest rank has at least: blocks alike are not cut in two."""
        work = self.quotes.work
        alike = all(place.blocks in (0.0, 1.0) for place in work.places)
        return -(-work.layers // pp) if alike else work.layers / pp

    def plan(self, family: Family) -> Plan:
        """A plan of the family, without stages."""
        share = -(-self.profile.batch // family.mesh.dp)
        return Plan(
            mesh=family.mesh,
            micro=family.micro if family.micro < share else None,
            recompute=family.recompute,
            precision=family.precision,
            model=self.profile.model,
            sequence=False,
        )

    def plans(self, family: Family) -> Iterator[Plan]:
        """The plans of a family."""
        mesh = family.mesh
        base = self.plan(family)
        # gpipe takes as long as 1f1b, or longer, and holds as much, or more (tests/planner/test_space.py): it cannot be the best.
        schedules: list[Schedule] = ["1f1b"] if mesh.pp == 1 else ["1f1b", "interleaved", "zero-bubble"]
        for zero, schedule, sequence in product(
            (0, 1, 2, 3) if mesh.dp > 1 else (0,), schedules, (False, True) if mesh.tp > 1 else (False,)
        ):
            if sequence and mesh.pp > 1 and not self.beyond:
                continue
            if schedule == "zero-bubble" and (zero or family.recompute != "none"):
                continue
            whole = zero > 0 and self.profile.traced == "real"
            plan = replace(base, zero=zero, schedule=schedule, sequence=sequence, whole=whole)
            if mesh.pp == 1:
                yield plan
                continue
            pace = self.pace(plan)
            # Stages that match unequal devices may not fit where stages that are alike do.
            for stages in {self._split(plan, each) for each in ((pace, ()) if pace else ((),))}:
                if stages is not None:
                    yield replace(plan, stages=stages)

    def pace(self, plan: Plan) -> tuple[float, ...]:
        """How long each stage takes for a block beside the fastest; () where all devices are alike."""
        blocks = [block for _, block, _ in self.quotes.seconds_of_parts(plan)]
        if len(blocks) == 1:
            return ()
        slowest = [max(blocks[kind] for kind in kinds) for kinds in self._on_stages(plan.mesh)]
        chunks = VIRTUAL if plan.schedule in INTERLEAVING else 1
        return tuple(round(each / min(slowest), 2) for each in slowest) * chunks

    def _split(self, plan: Plan, pace: tuple[float, ...]) -> tuple[int, ...] | None:
        """Where the stages begin such that the slowest is as fast as can be, on devices of this pace."""
        before, block, after = max(self.quotes.seconds_of_parts(plan), key=sum)
        stages = plan.mesh.pp * (VIRTUAL if plan.schedule in INTERLEAVING else 1)
        # To a tenth of a block: finer differences would only make the same cuts be looked for again.
        early, late = round(10 * before / block) / 10, round(10 * after / block) / 10
        key = (stages, early, late, pace)
        if key not in self._splits:
            weights = self._weights(early, late)
            self._splits[key] = divide(weights, stages, bound(plan, self.profile.visits), pace)
        return self._splits[key]

    def _weights(self, early: float, late: float) -> list[float]:
        """What each visit costs, in blocks: what is before the blocks and after them is shared by the visits there."""
        weights = [place.blocks for place in self.quotes.work.places]
        inner = [at for at, weight in enumerate(weights) if weight]
        first, last = (inner[0], inner[-1]) if inner else (0, len(weights) - 1)
        for place, cost in ((range(first), early), (range(last + 1, len(weights)), late)):
            for visit in place:
                weights[visit] = cost / len(place)
        if not first:
            weights[0] += early
        if last == len(weights) - 1:
            weights[-1] += late
        return weights

    def forecast(self, plan: Plan) -> Forecast:
        """What a plan takes and holds here."""
        return (
            simulate(self.profile, self.cluster, plan)
            if plan.served
            else self.quotes.forecast(self.quotes.placed(plan))
        )

    def refused(self, plan: Plan) -> bool:
        """Whether the engine cannot execute it; with `beyond` axes that it lacks are no reason."""
        problems = check(plan, self.profile, self.quotes.cluster)
        if self.beyond:
            problems = tuple(each for each in problems if not each.ahead and each.path != "sequence")
        return any(each.severity == "error" for each in problems)


def best(space: Space, costs: Costs, *, top: int, near: float, exhaustive: bool) -> list[Forecast]:
    """The `top` plans that fit and every other whose cost is within `near` of the least; best first. Empty: nothing fits."""
    found: list[tuple[float, float, str, Forecast]] = []
    goal, order = costs.goal, count()
    queue: list[tuple[float, int, int | Family | Plan]] = []

    def put(seconds: float, item: int | Family) -> None:
        if exhaustive or seconds <= goal.limit:
            ranks = item if isinstance(item, int) else item.mesh.ranks
            heapq.heappush(queue, (costs.cost(seconds, ranks, 0.0), next(order), item))

    for size in space.sizes(fine=goal.kind in ("devices", "cheapest")):
        put(space.least_at(size), size)
    enough = float("inf")
    while queue:
        lowest, _, item = heapq.heappop(queue)
        if not exhaustive and lowest > enough:
            break
        if isinstance(item, int):
            for family in space.families(item):
                put(space.least(family), family)
            continue
        if isinstance(item, Family):
            for plan in space.plans(item):
                cost = _bound(space, costs, plan, exhaustive=exhaustive)
                if cost is not None:
                    heapq.heappush(queue, (cost, next(order), plan))
            continue
        if space.refused(item):
            continue
        forecast = space.quotes.forecast(space.quotes.placed(item))
        if forecast.fits and forecast.time.step <= goal.limit:
            insort(found, (costs.of(forecast), forecast.time.step, str(item), forecast), key=lambda each: each[:3])
            enough = max(
                found[0][0] * (1 + near), found[min(top, len(found)) - 1][0] if len(found) >= top else float("inf")
            )
    return [forecast for place, (cost, _, _, forecast) in enumerate(found) if place < top or cost <= enough]


def with_shares(space: Space, goal: Goal) -> list[Forecast]:
    """Plans of the data axis over all devices of an unequal cluster, with shares of the batch in proportion to the devices' speed."""
    profile, devices = space.profile, on_ranks(space.cluster)
    kinds = distinct(devices)
    if len(kinds) < 2 or space.ranks not in (None, space.devices) or profile.batch < space.devices:
        return []
    found = []
    again: tuple[Recompute, ...] = ("none", "selective", "block") if profile.units else ("none",)
    for micro, zero, recompute in product(micros(profile.batch), (0, 1, 2, 3), again):
        plan = Plan(mesh=Mesh(dp=space.devices), micro=micro, zero=zero, recompute=recompute, model=profile.model)
        layers = space.quotes.work.layers
        took = [before + block * layers + after for before, block, after in space.quotes.seconds_of_parts(plan)]
        plan = replace(plan, shares=_whole([1 / took[kinds.index(device)] for device in devices]))
        if micro > max(sizes(profile.batch, space.devices, plan.shares)) or space.refused(plan):
            continue
        forecast = space.quotes.forecast(space.quotes.placed(plan))
        if forecast.fits and forecast.time.step <= goal.limit:
            found.append(forecast)
    return found


def with_servers(space: Space, goal: Goal) -> list[Forecast]:
    """Plans of the data axis with the tables on servers, where that is worth a look: over all devices, with shares where these are unequal."""
    profile, cluster = space.profile, space.cluster
    if not worth(profile, cluster):
        return []
    size = space.ranks or space.devices
    shares = {forecast.plan.shares for forecast in with_shares(space, goal)} or {()}
    plans = [
        Plan(mesh=Mesh(dp=size), micro=micro, shares=share, model=profile.model)
        for micro, share in product(micros(-(-profile.batch // size)), shares)
        if profile.batch >= size
    ]
    good = (plan for plan in served_plans(profile, cluster, plans) if not space.refused(plan))
    found = [space.forecast(plan) for plan in good]
    return [each for each in found if each.fits and each.time.step <= goal.limit]


def _whole(speeds: list[float]) -> tuple[int, ...]:
    """Small whole numbers in about the proportion of `speeds`."""
    least = min(speeds)
    found = [max(round(_FINE * speed / least), 1) for speed in speeds]
    common = math.gcd(*found)
    return tuple(each // common for each in found)


def _bound(space: Space, costs: Costs, plan: Plan, *, exhaustive: bool) -> float | None:
    """What the plan costs at least; None: it cannot be what is looked for."""
    placed = space.quotes.placed(plan)
    if exhaustive:
        return 0.0
    if not space.quotes.may_fit(placed):
        return None
    if costs.goal.kind == "memory":
        return space.quotes.peak(placed)
    seconds = space.quotes.least_seconds(placed)
    return costs.cost(seconds, plan.ranks, 0.0) if seconds <= costs.goal.limit else None


def devices_needed(profile: Profile, cluster: Cluster, *, above: int, most: int = 2**20) -> int | None:
    """More than `above` devices of such nodes (the first power of two) that some plan fits on; None: one sample fills a device whatever
    is done."""
    per_node = min(len(node.devices) for node in cluster.nodes)
    for size in (1 << k for k in range(above.bit_length(), most.bit_length())):
        nodes = tuple(islice(cycle(cluster.nodes), -(-size // per_node)))
        larger = replace(cluster, nodes=nodes)
        if larger.network is None and len(nodes) > 1:
            larger = replace(larger, network=Wire(kind="assumed", rate=1e9))
        space = Space(profile, larger, ranks=size, beyond=False)
        for family in space.families(size):
            if family.micro == 1 and family.recompute in ("block", "none"):
                plans = (plan for plan in space.plans(family) if plan.zero in (0, 3))
                if any(space.quotes.fits(placed) for placed in map(space.quotes.placed, plans)):
                    return size
    return None


def powers(most: int) -> list[int]:
    """1, 2, 4 ... up to `most`."""
    return [2**k for k in range(most.bit_length())]


def divisors(size: int) -> list[int]:
    """Everything that divides `size`."""
    return [each for each in range(1, size + 1) if size % each == 0]


def micros(share: int) -> list[int]:
    """1, 2, 4 ... samples, and the whole share."""
    return sorted({*powers(share), share})
