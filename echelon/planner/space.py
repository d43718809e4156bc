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
from echelon.plan.batch_split import count_micro_batches, local_batch_sizes
from echelon.plan.check import check
from echelon.plan.cluster import Cluster, Interconnect
from echelon.plan.forecast import Forecast
from echelon.plan.mesh import Mesh
from echelon.plan.plan import DataPlan, Plan, Precision, Recompute, Schedule, TensorPlan
from echelon.plan.profile import Profile
from echelon.plan.stages import (
    INTERLEAVED_SCHEDULES,
    INTERLEAVED_STAGES_PER_RANK,
    balance_stages,
    forbidden_stage_starts,
)
from echelon.planner.goal import Goal, Objective
from echelon.planner.server_plans import served_plans, should_offer_servers
from echelon.simulator.plan_pricer import PlanPricer
from echelon.simulator.step import distinct_devices, rank_devices, simulate

#: The tensor axis talks in every block: beyond the devices that share a fast link it is not searched.
_MAX_TP = 16
#: Shares of the batch are told in such parts of the smallest.
_SHARE_RESOLUTION = 8
#: Sequences are not cut finer than this.
_MAX_CP = 16
#: Where few devices are wanted, numbers of nodes between one and the double of it that are looked at.
_STEPS_PER_DOUBLING = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFamily:
    """Plans that compute the same on a rank: they differ in ZeRO's stage, the schedule and how the sequence is cut."""

    mesh: Mesh
    micro: int
    recompute: Recompute
    precision: Precision | None


class DataSheetSpace:
    """Every plan that is worth a look, by families."""

    def __init__(
        self, profile: Profile, cluster: Cluster, *, ranks: int | None, beyond: bool, precisions: tuple[Precision | None, ...] = (None,)
    ) -> None:  # fmt: skip
        self.profile, self.cluster, self.ranks, self.include_unsupported = profile, cluster, ranks, beyond
        self.precisions = precisions
        self.pricer = PlanPricer(profile, cluster)
        self.device_count = self.pricer.device_count
        self._seconds_per_block_sample: list[float] | None = None
        self._stage_starts: dict[tuple[object, ...], tuple[int, ...] | None] = {}
        node = self.pricer.cluster.nodes[0]
        self._fast_domain_size = max(node.wire.domain if node.wire else 1, len(node.devices))

    def families(self, device_count: int) -> Iterator[PlanFamily]:
        """Meshes over so many devices."""
        profile, model = self.profile, self.pricer.model
        recompute_options: list[Recompute] = ["none", "selective", "block"] if profile.fsdp_units else ["none"]
        for tp, pp, cp in product(
            powers_of_two(min(device_count, _MAX_TP, self._fast_domain_size)),
            divisors(device_count),
            powers_of_two(min(device_count, _MAX_CP)),
        ):
            dp, remainder = divmod(device_count, tp * pp * cp)
            if (
                remainder
                or dp > profile.batch
                or pp > max(len(profile.pipeline_units), 1)
                or (cp > 1 and not self.include_unsupported)
            ):
                continue
            local_batch = -(-profile.batch // dp)
            for ep in powers_of_two(dp * cp) if self.include_unsupported and model.expert_elements else [1]:
                if (dp * cp) % ep or (ep > 1 and model.expert_count % ep):
                    continue
                mesh = Mesh(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep)
                for micro_batch_size, recompute, precision in product(
                    micro_batch_sizes(local_batch), recompute_options, self.precisions
                ):
                    yield PlanFamily(mesh=mesh, micro=micro_batch_size, recompute=recompute, precision=precision)

    def device_counts(self, *, fine_grained: bool) -> list[int]:
        """Numbers of devices: 1, 2, 4 ... and all; `fine_grained`: whole nodes too, all up to 16, then 16 for each doubling."""
        if self.ranks is not None:
            if not 1 <= self.ranks <= self.device_count:
                raise PlanError(
                    f"ranks={self.ranks}: {self.cluster.name} has {self.device_count} devices; use 1 to {self.device_count}"
                )
            return [self.ranks]
        counts = {*powers_of_two(self.device_count), self.device_count}
        per_node, nodes = len(self.pricer.cluster.nodes[0].devices), 1
        while fine_grained and nodes * per_node <= self.device_count:
            counts.add(nodes * per_node)
            nodes += max(2 ** (nodes.bit_length() - 1) // _STEPS_PER_DOUBLING, 1)
        return sorted(counts)

    def seconds_bound_at_size(self, device_count: int) -> float:
        """Seconds that no plan of so many devices is faster than: blocks computed as well as any micro-batch and tp compute them."""
        if self._seconds_per_block_sample is None:
            batch, options = self.profile.batch, []
            splits = [
                (tp, cp)
                for tp, cp in product(powers_of_two(_MAX_TP), powers_of_two(_MAX_CP if self.include_unsupported else 1))
                if tp * cp <= self.device_count
            ]
            for (tp, cp), micro_batch_size, precision in product(splits, micro_batch_sizes(batch), self.precisions):
                family = PlanFamily(
                    mesh=Mesh(tp=tp, cp=cp), micro=micro_batch_size, recompute="none", precision=precision
                )
                samples = -(-batch // count_micro_batches(batch, 1, micro_batch_size))
                options.append([seconds * tp * cp / samples for seconds in self._block_seconds(family)])
            self._seconds_per_block_sample = [min(kind) for kind in zip(*options, strict=True)]
        ranks_by_kind = Counter(self.pricer.kind_by_rank[:device_count])
        samples_per_second = sum(
            rank_count / self._seconds_per_block_sample[kind] for kind, rank_count in ranks_by_kind.items()
        )
        return self.profile.batch * self.pricer.model.layers / samples_per_second

    def _block_seconds(self, family: PlanFamily) -> list[float]:
        """For each kind of device, seconds of one block, there and back; norms and residuals take least where the sequence is cut."""
        plan = self.base_plan(family).replace(sequence=family.mesh.tp > 1)
        return [block for _, block, _ in self.pricer.part_seconds(plan)]

    def step_seconds_bound(self, family: PlanFamily) -> float:
        """Seconds that no plan of the family is faster than: the blocks of the fullest rank, one micro-batch after another."""
        micro_batch_count = count_micro_batches(self.profile.batch, family.mesh.dp, family.micro)
        block_seconds = self._block_seconds(family)
        if len(block_seconds) == 1 or family.mesh.pp == 1:
            slowest_block = max(
                block_seconds[device_kind] for device_kind in set(self.pricer.kind_by_rank[: family.mesh.ranks])
            )
            return micro_batch_count * self._most_blocks_per_rank(family.mesh.pp) * slowest_block
        # Slow ranks may have few blocks: all are done soonest where every rank takes equally long.
        seconds_per_rank = [
            max(block_seconds[device_kind] for device_kind in kinds) for kinds in self._kinds_by_stage(family.mesh)
        ]
        return micro_batch_count * self.pricer.model.layers / sum(1 / rank_seconds for rank_seconds in seconds_per_rank)

    def _kinds_by_stage(self, mesh: Mesh) -> list[set[int]]:
        """For each rank of pp the kinds of device that it is on."""
        ranks_per_stage = mesh.ranks // mesh.pp
        return [
            set(self.pricer.kind_by_rank[rank * ranks_per_stage : (rank + 1) * ranks_per_stage])
            for rank in range(mesh.pp)
        ]

    def _most_blocks_per_rank(self, pp: int) -> float:
        """Blocks that the fullest rank has at least: blocks alike are not cut in two."""
        model = self.pricer.model
        has_equal_blocks = all(unit.blocks in (0.0, 1.0) for unit in model.pipeline_units)
        return -(-model.layers // pp) if has_equal_blocks else model.layers / pp

    def base_plan(self, family: PlanFamily) -> Plan:
        """A plan of the family, without stages."""
        local_batch = -(-self.profile.batch // family.mesh.dp)
        return Plan(
            mesh=family.mesh,
            micro=family.micro if family.micro < local_batch else None,
            recompute=family.recompute,
            precision=family.precision,
            model=self.profile.model,
            tensor=TensorPlan(sequence=False),
        )

    def plans(self, family: PlanFamily) -> Iterator[Plan]:
        """The plans of a family."""
        mesh = family.mesh
        template = self.base_plan(family)
        # gpipe takes as long as 1f1b, or longer, and holds as much, or more (tests/planner/test_space.py): it cannot be the best.
        schedules: list[Schedule] = ["1f1b"] if mesh.pp == 1 else ["1f1b", "interleaved", "zero-bubble"]
        for zero, schedule, sequence in product(
            (0, 1, 2, 3) if mesh.dp > 1 else (0,), schedules, (False, True) if mesh.tp > 1 else (False,)
        ):
            if sequence and mesh.pp > 1 and not self.include_unsupported:
                continue
            if schedule == "zero-bubble" and (zero or family.recompute != "none"):
                continue
            shards_as_one = zero > 0 and self.profile.traced == "real"
            plan = template.replace(zero=zero, schedule=schedule, sequence=sequence, shard_as_one=shards_as_one)
            if mesh.pp == 1:
                yield plan
                continue
            stage_slowdowns = self.stage_slowdowns(plan)
            # Stages that match unequal devices may not fit where stages that are alike do.
            for stage_starts in {
                self._balanced_stage_starts(plan, slowdowns)
                for slowdowns in ((stage_slowdowns, ()) if stage_slowdowns else ((),))
            }:
                if stage_starts is not None:
                    yield plan.replace(stages=stage_starts)

    def stage_slowdowns(self, plan: Plan) -> tuple[float, ...]:
        """How long each stage takes for a block beside the fastest; () where all devices are alike."""
        block_seconds = [block for _, block, _ in self.pricer.part_seconds(plan)]
        if len(block_seconds) == 1:
            return ()
        seconds_by_stage = [
            max(block_seconds[device_kind] for device_kind in kinds) for kinds in self._kinds_by_stage(plan.mesh)
        ]
        stages_per_rank = INTERLEAVED_STAGES_PER_RANK if plan.pipeline.schedule in INTERLEAVED_SCHEDULES else 1
        return tuple(round(seconds / min(seconds_by_stage), 2) for seconds in seconds_by_stage) * stages_per_rank

    def _balanced_stage_starts(self, plan: Plan, stage_slowdowns: tuple[float, ...]) -> tuple[int, ...] | None:
        """Where the stages begin such that the slowest is as fast as can be, on devices of this pace."""
        before, block, after = max(self.pricer.part_seconds(plan), key=sum)
        total_stages = plan.mesh.pp * (
            INTERLEAVED_STAGES_PER_RANK if plan.pipeline.schedule in INTERLEAVED_SCHEDULES else 1
        )
        # To a tenth of a block: finer differences would only make the same cuts be looked for again.
        blocks_before, blocks_after = round(10 * before / block) / 10, round(10 * after / block) / 10
        key = (total_stages, blocks_before, blocks_after, stage_slowdowns)
        if key not in self._stage_starts:
            unit_costs = self._unit_costs(blocks_before, blocks_after)
            self._stage_starts[key] = balance_stages(
                unit_costs, total_stages, forbidden_stage_starts(plan, self.profile.pipeline_units), stage_slowdowns
            )
        return self._stage_starts[key]

    def _unit_costs(self, blocks_before: float, blocks_after: float) -> list[float]:
        """What each visit costs, in blocks: what is before the blocks and after them is shared by the visits there."""
        costs = [indices.blocks for indices in self.pricer.model.pipeline_units]
        block_indices = [index for index, unit_cost in enumerate(costs) if unit_cost]
        first, last = (block_indices[0], block_indices[-1]) if block_indices else (0, len(costs) - 1)
        for indices, cost in ((range(first), blocks_before), (range(last + 1, len(costs)), blocks_after)):
            for unit in indices:
                costs[unit] = cost / len(indices)
        if not first:
            costs[0] += blocks_before
        if last == len(costs) - 1:
            costs[-1] += blocks_after
        return costs

    def forecast(self, plan: Plan) -> Forecast:
        """What a plan takes and holds here."""
        return (
            simulate(self.profile, self.cluster, plan)
            if plan.uses_servers
            else self.pricer.forecast(self.pricer.place(plan))
        )

    def is_refused(self, plan: Plan) -> bool:
        """Whether the engine cannot execute it; with `include_unsupported` axes that it lacks are no reason."""
        problems = check(plan, self.profile, self.pricer.cluster)
        if self.include_unsupported:
            problems = tuple(
                problem for problem in problems if not problem.not_implemented and problem.path != "sequence"
            )
        return any(problem.severity == "error" for problem in problems)


def search_data_sheets(
    space: DataSheetSpace, objective: Objective, *, top: int, tolerance: float, exhaustive: bool
) -> list[Forecast]:
    """The `top` plans that fit and every other whose cost is within `tolerance` of the least; best first. Empty: nothing fits."""
    results: list[tuple[float, float, str, Forecast]] = []
    goal, tie_breaker = objective.goal, count()
    queue: list[tuple[float, int, int | PlanFamily | Plan]] = []

    def enqueue(seconds: float, entry: int | PlanFamily) -> None:
        if exhaustive or seconds <= goal.step_limit:
            ranks = entry if isinstance(entry, int) else entry.mesh.ranks
            heapq.heappush(queue, (objective.cost(seconds, ranks, 0.0), next(tie_breaker), entry))

    for size in space.device_counts(fine_grained=goal.kind in ("devices", "cheapest")):
        enqueue(space.seconds_bound_at_size(size), size)
    cost_cutoff = float("inf")
    while queue:
        cost_bound, _, entry = heapq.heappop(queue)
        if not exhaustive and cost_bound > cost_cutoff:
            break
        if isinstance(entry, int):
            for family in space.families(entry):
                enqueue(space.step_seconds_bound(family), family)
            continue
        if isinstance(entry, PlanFamily):
            for plan in space.plans(entry):
                cost = _cost_lower_bound(space, objective, plan, exhaustive=exhaustive)
                if cost is not None:
                    heapq.heappush(queue, (cost, next(tie_breaker), plan))
            continue
        if space.is_refused(entry):
            continue
        forecast = space.pricer.forecast(space.pricer.place(entry))
        if forecast.fits and forecast.time.step <= goal.step_limit:
            insort(
                results,
                (objective.cost_of(forecast), forecast.time.step, str(entry), forecast),
                key=lambda result: result[:3],
            )
            cost_cutoff = max(
                results[0][0] * (1 + tolerance),
                results[min(top, len(results)) - 1][0] if len(results) >= top else float("inf"),
            )
    return [forecast for index, (cost, _, _, forecast) in enumerate(results) if index < top or cost <= cost_cutoff]


def uneven_share_forecasts(space: DataSheetSpace, goal: Goal) -> list[Forecast]:
    """Plans of the data axis over all devices of an unequal cluster, with shares of the batch in proportion to the devices' speed."""
    profile, devices = space.profile, rank_devices(space.cluster)
    device_kinds = distinct_devices(devices)
    if len(device_kinds) < 2 or space.ranks not in (None, space.device_count) or profile.batch < space.device_count:
        return []
    forecasts = []
    recompute_options: tuple[Recompute, ...] = ("none", "selective", "block") if profile.fsdp_units else ("none",)
    for micro_batch_size, zero, recompute in product(micro_batch_sizes(profile.batch), (0, 1, 2, 3), recompute_options):
        plan = Plan(
            mesh=Mesh(dp=space.device_count),
            micro=micro_batch_size,
            zero=zero,
            recompute=recompute,
            model=profile.model,
        )
        layers = space.pricer.model.layers
        seconds_by_kind = [before + block * layers + after for before, block, after in space.pricer.part_seconds(plan)]
        plan = plan.replace(
            batch_shares=_integer_ratio([1 / seconds_by_kind[device_kinds.index(device)] for device in devices])
        )
        if micro_batch_size > max(
            local_batch_sizes(profile.batch, space.device_count, plan.data.batch_shares)
        ) or space.is_refused(plan):
            continue
        forecast = space.pricer.forecast(space.pricer.place(plan))
        if forecast.fits and forecast.time.step <= goal.step_limit:
            forecasts.append(forecast)
    return forecasts


def server_forecasts(space: DataSheetSpace, goal: Goal) -> list[Forecast]:
    """Plans of the data axis with the tables on servers, where that is worth a look: over all devices, with shares where these are unequal."""
    profile, cluster = space.profile, space.cluster
    if not should_offer_servers(profile, cluster):
        return []
    rank_count = space.ranks or space.device_count
    shares = {forecast.plan.data.batch_shares for forecast in uneven_share_forecasts(space, goal)} or {()}
    plans = [
        Plan(
            mesh=Mesh(dp=rank_count),
            micro=micro_batch_size,
            data=DataPlan(batch_shares=rank_shares),
            model=profile.model,
        )
        for micro_batch_size, rank_shares in product(micro_batch_sizes(-(-profile.batch // rank_count)), shares)
        if profile.batch >= rank_count
    ]
    executable = (plan for plan in served_plans(profile, cluster, plans) if not space.is_refused(plan))
    forecasts = [space.forecast(plan) for plan in executable]
    return [candidate for candidate in forecasts if candidate.fits and candidate.time.step <= goal.step_limit]


def _integer_ratio(speeds: list[float]) -> tuple[int, ...]:
    """Small whole numbers in about the proportion of `speeds`."""
    slowest = min(speeds)
    parts = [max(round(_SHARE_RESOLUTION * speed / slowest), 1) for speed in speeds]
    divisor = math.gcd(*parts)
    return tuple(part // divisor for part in parts)


def _cost_lower_bound(space: DataSheetSpace, objective: Objective, plan: Plan, *, exhaustive: bool) -> float | None:
    """What the plan costs at least; None: it cannot be what is looked for."""
    placed = space.pricer.place(plan)
    if exhaustive:
        return 0.0
    if not space.pricer.may_fit(placed):
        return None
    if objective.goal.kind == "memory":
        return space.pricer.peak_memory(placed)
    seconds = space.pricer.step_seconds_bound(placed)
    return objective.cost(seconds, plan.ranks, 0.0) if seconds <= objective.goal.step_limit else None


def devices_needed(profile: Profile, cluster: Cluster, *, minimum: int, maximum: int = 2**20) -> int | None:
    """More than `minimum` devices of such nodes (the first power of two) that some plan fits on; None: one sample fills a device whatever
    is done."""
    per_node = min(len(node.devices) for node in cluster.nodes)
    for size in (1 << k for k in range(minimum.bit_length(), maximum.bit_length())):
        nodes = tuple(islice(cycle(cluster.nodes), -(-size // per_node)))
        larger_cluster = replace(cluster, nodes=nodes)
        if larger_cluster.network is None and len(nodes) > 1:
            larger_cluster = replace(larger_cluster, network=Interconnect(kind="assumed", rate=1e9))
        space = DataSheetSpace(profile, larger_cluster, ranks=size, beyond=False)
        for family in space.families(size):
            if family.micro == 1 and family.recompute in ("block", "none"):
                plans = (plan for plan in space.plans(family) if plan.zero in (0, 3))
                if any(space.pricer.fits(placed) for placed in map(space.pricer.place, plans)):
                    return size
    return None


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4 ... up to `limit`."""
    return [2**k for k in range(limit.bit_length())]


def divisors(size: int) -> list[int]:
    """Everything that divides `size`."""
    return [divisor for divisor in range(1, size + 1) if size % divisor == 0]


def micro_batch_sizes(local_batch: int) -> list[int]:
    """1, 2, 4 ... samples, and the whole share."""
    return sorted({*powers_of_two(local_batch), local_batch})
