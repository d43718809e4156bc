"""Forecasts of plans of one model on one cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from echelon.plan.cluster import Cluster
from echelon.plan.forecast import Forecast, TimeForecast
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.simulator import compute
from echelon.simulator.calibration import load_constants
from echelon.simulator.compute import PassCache, PlacedPlan
from echelon.simulator.cost.cost_model import CostModel, RankGroup
from echelon.simulator.cost.curves import CurveCosts
from echelon.simulator.cost.roofline import RooflineCosts
from echelon.simulator.device_kinds import (
    device_kinds_by_rank,
    ranks_by_device_kind,
    split_by_device_kind,
    uses_data_sheets,
)
from echelon.simulator.memory import fullest_rank_memory, rank_memories
from echelon.simulator.model_summary import ModelSummary
from echelon.simulator.parameter_server_cost import (
    add_server_costs,
    fill_served_tables,
    without_served_tables,
    without_servers,
)
from echelon.simulator.plan_layout import PlanLayout, lay_out_plan
from echelon.simulator.step import step_time
from echelon.simulator.summarize_profile import summarize_profile
from echelon.simulator.training_stack import TrainingStack

#: A note is added when the device waits for its host for more than this fraction of a step.
_HOST_BOUND_FRACTION = 0.05


def simulate(profile: Profile, cluster: Cluster, plan: Plan, *, stack: TrainingStack | None = None) -> Forecast:
    """Predict the step time and the memory of `plan` on `cluster`. `stack`: a training system other than echelon's engine.

    Devices that were measured are priced by their curves, others by their data sheets.
    """
    return Simulator(profile, cluster, stack).forecast(plan)


class Simulator:
    """Forecasts many plans and shares the work that they have in common. Its bounds are cheap and never exceed the forecast."""

    def __init__(self, profile: Profile, cluster: Cluster, stack: TrainingStack | None = None) -> None:
        self.profile, self.cluster, self.batch = profile, cluster, profile.batch
        self.is_measured = not uses_data_sheets(cluster)
        self.model = summarize_profile(profile)
        #: One cluster per kind of device.
        self.uniform_clusters = [cluster] if self.is_measured else split_by_device_kind(cluster)
        #: The kind of device that each possible rank runs on.
        self.kind_by_rank = [0] * cluster.max_ranks if self.is_measured else device_kinds_by_rank(cluster)
        self._stack, self._constants = stack or TrainingStack(), load_constants()
        self._models: dict[object, ModelSummary] = {}
        self._costs: dict[object, list[tuple[CostModel, PassCache]]] = {}
        self._part_seconds: dict[tuple[object, ...], list[tuple[float, float, float]]] = {}

    def forecast(self, plan: Plan) -> Forecast:
        """Step time by cause and memory by component; raises PlanError for a plan that cannot be priced."""
        if plan.uses_servers:
            return self._forecast_with_servers(fill_served_tables(plan, self.profile))
        return self.forecast_placed(self.place(plan))

    def place(self, plan: Plan) -> list[PlacedPlan]:
        """The plan on each kind of device that its ranks use."""
        placed = []
        kinds = ranks_by_device_kind(self.batch, plan, self.kind_by_rank, len(self.uniform_clusters))
        for (cost, cache), (local_batch, pp_ranks) in zip(self._costs_of(plan), kinds, strict=True):
            if pp_ranks:
                layout = self._lay_out(plan, cost, local_batch=local_batch, pp_ranks=pp_ranks)
                cost.require(plan)
                placed.append(PlacedPlan(layout, cost, cache))
        return placed

    def forecast_placed(self, placed: Sequence[PlacedPlan]) -> Forecast:
        """The forecast of a placed plan."""
        if placed[0].layout.plan.mesh.pp > 1:
            # Each stage is on its own devices.
            time = step_time(placed)
            return _worst_forecast([self._forecast_of_kind(each, time) for each in placed])
        return _worst_forecast([self._forecast_of_kind(each, step_time([each])) for each in placed])

    def part_seconds(self, plan: Plan) -> list[tuple[float, float, float]]:
        """For each kind of device, seconds of one micro-batch before the blocks, in one block and after them."""
        mesh = plan.mesh
        samples = -(-self.batch // mesh.dp), plan.count_micro_batches(self.batch)
        load = (plan.ranks, plan.threads) if self.is_measured else ()
        key = (samples, mesh.cp, mesh.tp, mesh.ep, plan.tensor, plan.recompute, plan.precision, plan.compile, *load)
        if key not in self._part_seconds:
            single_stage = plan.replace(mesh=replace(mesh, pp=1), stages=(), schedule="1f1b")
            self._part_seconds[key] = [
                compute.part_seconds(PlacedPlan(self._lay_out(single_stage, cost), cost, cache))
                for cost, cache in self._costs_of(plan)
            ]
        return self._part_seconds[key]

    def step_seconds_bound(self, placed: Sequence[PlacedPlan]) -> float:
        """A lower bound on the step time, in seconds."""
        if placed[0].layout.plan.mesh.pp > 1:
            return step_time(placed, event_by_event=False).step
        return max(step_time([each], event_by_event=False).step for each in placed)

    def may_fit(self, placed: Sequence[PlacedPlan]) -> bool:
        """Whether the first and the last rank of the pipeline fit: a necessary condition."""
        return all(self._fits(each, {each.layout.pp_ranks[0], each.layout.pp_ranks[-1]}) for each in placed)

    def fits(self, placed: Sequence[PlacedPlan]) -> bool:
        """Whether all ranks of the pipeline fit."""
        return all(self._fits(each, each.layout.pp_ranks) for each in placed)

    def peak_memory(self, placed: Sequence[PlacedPlan]) -> float:
        """Bytes on the fullest rank, on the kind of device that it fills most."""
        peaks = [(fullest_rank_memory(each.layout, each.cost)[0].required, each.cost.capacity) for each in placed]
        return max(peaks, key=lambda peak: peak[0] / peak[1])[0]

    def _fits(self, placed: PlacedPlan, ranks: Iterable[int]) -> bool:
        return all(
            placed.cost.memory_forecast(memory).required <= placed.cost.capacity
            for rank in ranks
            for memory in rank_memories(placed.layout, rank)
        )

    def _forecast_of_kind(self, placed: PlacedPlan, time: TimeForecast) -> Forecast:
        layout, cost = placed.layout, placed.cost
        memory, where = fullest_rank_memory(layout, cost)
        notes = [*cost.notes(self.profile, layout.plan)]
        is_host_bound = time.overhead >= _HOST_BOUND_FRACTION * time.step
        if self.is_measured and self.cluster.device_kind == "cuda" and is_host_bound:
            notes.append(
                f"the device waits {time.overhead / time.step:.0%} of the step for its host, which launches operators more slowly than they run: "
                "larger micro-batches help, and the wait depends on what else the host does"
            )
        return Forecast(
            plan=layout.plan,
            batch=layout.batch,
            time=time,
            memory=memory,
            capacity=cost.capacity,
            peak_at=where,
            notes=tuple(notes),
        )

    def _forecast_with_servers(self, plan: Plan) -> Forecast:
        ranks_plan = without_servers(plan)
        ranks_only = Simulator(without_served_tables(self.profile, plan), self.cluster, self._stack)
        base = ranks_only.forecast(ranks_plan)
        loopback = None
        if self.is_measured:
            (cost, _), *_ = self._costs_of(ranks_plan)

            def loopback(size: float) -> float:
                # In an all-gather over two ranks, each sends the other half of it.
                return cost.message_seconds("all_gather", 2 * size, RankGroup(2))

        return add_server_costs(base, self.profile, self.cluster, plan, loopback)

    def _lay_out(
        self, plan: Plan, cost: CostModel, *, local_batch: int | None = None, pp_ranks: tuple[int, ...] | None = None
    ) -> PlanLayout:
        return lay_out_plan(
            self._model_of(plan),
            self.batch,
            plan,
            self._stack,
            local_batch=local_batch,
            pp_ranks=pp_ranks,
            trusts_trace=cost.trusts_trace,
        )

    def _model_of(self, plan: Plan) -> ModelSummary:
        """The model, cut as the plan cuts it."""
        key = plan.mesh.tp, plan.tensor.placements, plan.tensor.replicated
        if not any(key[1:]):
            return self.model
        if key not in self._models:
            self._models[key] = summarize_profile(self.profile, plan)
        return self._models[key]

    def _costs_of(self, plan: Plan) -> list[tuple[CostModel, PassCache]]:
        """For each kind of device, its cost model under the load of a plan, and the cache of passes that it priced."""
        if self.is_measured:
            load = plan.ranks, plan.threads
            if load not in self._costs:
                self._costs[load] = [(CurveCosts(self.cluster, *load), {})]
            return self._costs[load]
        # Links of unused nodes do not count.
        per_node, is_mixed = len(self.uniform_clusters[0].nodes[0].devices), len(self.uniform_clusters) > 1
        nodes = -(-plan.ranks // per_node) if is_mixed else 0
        if nodes not in self._costs:
            clusters = split_by_device_kind(self.cluster, plan.ranks) if nodes else self.uniform_clusters
            known = next(iter(self._costs.values()), [])
            caches: list[PassCache] = [cache for _, cache in known] or [{} for _ in clusters]
            self._costs[nodes] = [
                (RooflineCosts(cluster, self._constants, self._stack.attention_kernel), cache)
                for cluster, cache in zip(clusters, caches, strict=True)
            ]
        return self._costs[nodes]


def _worst_forecast(forecasts: Sequence[Forecast]) -> Forecast:
    """The slowest kind of device sets the time, the one with the least free memory sets the memory."""
    longest = max(forecasts, key=lambda forecast: forecast.time.step)
    tightest = max(forecasts, key=lambda forecast: forecast.memory.required / forecast.capacity)
    return replace(
        longest,
        memory=tightest.memory,
        capacity=tightest.capacity,
        peak_at=tightest.peak_at,
        notes=tuple(dict.fromkeys(note for forecast in forecasts for note in forecast.notes)),
    )
