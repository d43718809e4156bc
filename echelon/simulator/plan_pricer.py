"""Prices of many plans of one model on one cluster that is known by its data sheets: what they share is reckoned once."""

from __future__ import annotations

from dataclasses import replace

from echelon.plan.batch_split import count_micro_batches
from echelon.plan.cluster import Cluster
from echelon.plan.forecast import Forecast
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.simulator.calibration import load_constants
from echelon.simulator.model_summary import ModelSummary, convert_precision
from echelon.simulator.plan_layout import PlanLayout, lay_out_plan
from echelon.simulator.sheet_memory import rank_memories, with_overheads
from echelon.simulator.sheet_step import PassCache, PlacedPlan, part_seconds, step_time
from echelon.simulator.step import (
    device_kinds_by_rank,
    forecast_placed_plan,
    ranks_by_device_kind,
    split_by_device_kind,
)
from echelon.simulator.summarize_profile import summarize_profile
from echelon.simulator.training_stack import TrainingStack


class PlanPricer:
    """Bounds are cheap and never above the forecast, so that whoever looks for the best plan need not forecast all of them."""

    def __init__(self, profile: Profile, cluster: Cluster, stack: TrainingStack | None = None) -> None:
        self.profile, self.model, self.batch = profile, summarize_profile(profile), profile.batch
        self.stack, self.constants = stack or TrainingStack(), load_constants()
        #: The cluster as it would be with devices of each kind alone.
        self.uniform_clusters = split_by_device_kind(cluster)
        self._full_cluster, self._clusters_by_nodes = cluster, dict[int, list[Cluster]]()
        #: For each rank that there may be, the kind of its device.
        self.kind_by_rank = device_kinds_by_rank(cluster)
        self.device_count = sum(len(node.devices) for node in self.uniform_clusters[0].nodes)
        self._pass_caches: list[PassCache] = [{} for _ in self.uniform_clusters]
        self._models: dict[object, ModelSummary] = {}
        self._part_seconds: dict[tuple[object, ...], list[tuple[float, float, float]]] = {}

    @property
    def cluster(self) -> Cluster:
        """One whose devices are all of the first kind."""
        return self.uniform_clusters[0]

    def place(self, plan: Plan) -> list[PlacedPlan]:
        """The plan on devices of each kind that ranks are on; refuses what cannot be."""
        model, ranks_by_kind = (
            self._model_for(plan),
            ranks_by_device_kind(self.batch, plan, self.kind_by_rank, len(self.uniform_clusters)),
        )
        return [
            PlacedPlan(
                lay_out_plan(
                    model,
                    self.batch,
                    cluster,
                    plan,
                    self.stack,
                    most_samples=largest_local_batch,
                    pp_ranks=pp_ranks,
                    device_count=self.device_count,
                ),
                cluster,
                pass_cache,
            )
            for cluster, pass_cache, (largest_local_batch, pp_ranks) in zip(
                self._reachable_clusters(plan.ranks), self._pass_caches, ranks_by_kind, strict=True
            )
            if pp_ranks
        ]

    def _reachable_clusters(self, ranks: int) -> list[Cluster]:
        """As so many ranks see them: links of nodes that none of them is on do not count."""
        if len(self.uniform_clusters) == 1:
            return self.uniform_clusters
        nodes = -(-ranks // len(self.cluster.nodes[0].devices))
        if nodes not in self._clusters_by_nodes:
            self._clusters_by_nodes[nodes] = split_by_device_kind(self._full_cluster, ranks)
        return self._clusters_by_nodes[nodes]

    def _model_for(self, plan: Plan) -> ModelSummary:
        """What the model computes in the plan's precision, cut as it says where it does."""
        key = (plan.precision, plan.tensor.placements, plan.tensor.replicated)
        if key not in self._models:
            has_cuts = bool(plan.tensor.placements or plan.tensor.replicated)
            self._models[key] = convert_precision(
                summarize_profile(self.profile, plan) if has_cuts else self.model, plan.precision
            )
        return self._models[key]

    def part_seconds(self, plan: Plan) -> list[tuple[float, float, float]]:
        """For each kind of device, seconds that a micro-batch of `plan` computes before the blocks, in one block and after them."""
        mesh = plan.mesh
        micro_batch_count = count_micro_batches(self.batch, mesh.dp, plan.micro)
        samples = -(-self.batch // (mesh.dp * micro_batch_count))
        key = (samples, mesh.cp, mesh.tp, plan.tensor.sequence, plan.recompute, plan.precision, plan.compile)
        if key not in self._part_seconds:
            single_stage = plan.replace(mesh=replace(mesh, pp=1), stages=(), schedule="1f1b")
            self._part_seconds[key] = [
                part_seconds(
                    lay_out_plan(
                        self._model_for(plan),
                        self.batch,
                        cluster,
                        single_stage,
                        self.stack,
                        device_count=self.device_count,
                    ),
                    self.constants,
                    pass_cache,
                )
                for cluster, pass_cache in zip(self.uniform_clusters, self._pass_caches, strict=True)
            ]
        return self._part_seconds[key]

    def step_seconds_bound(self, placed: list[PlacedPlan]) -> float:
        """A step takes at least so long."""
        if placed[0].layout.plan.mesh.pp > 1:
            return step_time(placed, self.constants, event_by_event=False).step
        return max(step_time([placed_plan], self.constants, event_by_event=False).step for placed_plan in placed)

    def may_fit(self, placed: list[PlacedPlan]) -> bool:
        """Whether the ends of the pipeline fit: where they do not, the plan does not."""
        layouts = [placed_plan.layout for placed_plan in placed]
        return all(
            self._rank_fits(layout, rank) for layout in layouts for rank in {layout.pp_ranks[0], layout.pp_ranks[-1]}
        )

    def fits(self, placed: list[PlacedPlan]) -> bool:
        """Whether all ranks of the pipeline fit."""
        return all(
            self._rank_fits(placed_plan.layout, rank) for placed_plan in placed for rank in placed_plan.layout.pp_ranks
        )

    def peak_memory(self, placed: list[PlacedPlan]) -> float:
        """Bytes of the fullest rank, what is unsure and the framework included, on the device that it fills most."""
        peaks = []
        for layout in (each.layout for each in placed):
            memories = [with_overheads(each, self.constants) for each in rank_memories(layout)]
            peaks.append((max(each.high + each.framework for each in memories), layout.capacity))
        return max(peaks, key=lambda each: each[0] / each[1])[0]

    def forecast(self, placed: list[PlacedPlan]) -> Forecast:
        """What `simulate` says."""
        return forecast_placed_plan(placed, self.constants)

    def _rank_fits(self, layout: PlanLayout, rank: int) -> bool:
        memory = with_overheads(rank_memories(layout, rank)[0], self.constants)
        return memory.high + memory.framework <= layout.capacity
