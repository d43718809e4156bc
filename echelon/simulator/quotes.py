"""Prices of many plans of one model on one cluster that is known by its data sheets: what they share is reckoned once."""

from __future__ import annotations

from dataclasses import replace

from echelon.plan.cluster import Cluster
from echelon.plan.forecast import Forecast
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.plan.split import rounds
from echelon.simulator.distil import distil
from echelon.simulator.fitted import fitted
from echelon.simulator.layout import Layout, lay_out
from echelon.simulator.sheet_memory import held_by_ranks, put_together
from echelon.simulator.sheet_step import Known, passes, step_time
from echelon.simulator.stack import Stack
from echelon.simulator.step import forecast_of, kinds, most_samples, worst
from echelon.simulator.work import Work, recast


class Quotes:
    """Bounds are cheap and never above the forecast, so that whoever looks for the best plan need not forecast all of them."""

    def __init__(self, profile: Profile, cluster: Cluster, stack: Stack | None = None) -> None:
        self.profile, self.work, self.batch = profile, distil(profile), profile.batch
        self.stack, self.fitted = stack or Stack(), fitted()
        #: The cluster as it would be with devices of each kind alone.
        self.clusters = kinds(cluster)
        self._whole = cluster
        self._known: list[Known] = [{} for _ in self.clusters]
        self._works: dict[object, Work] = {}
        self._parts: dict[tuple[object, ...], list[tuple[float, float, float]]] = {}

    @property
    def cluster(self) -> Cluster:
        """One whose devices are all of the first kind."""
        return self.clusters[0]

    def layouts(self, plan: Plan) -> list[Layout]:
        """The plan on devices of each kind; refuses what cannot be."""
        work, most = self._work(plan), most_samples(self.batch, self._whole, plan, self.clusters)
        return [
            lay_out(work, self.batch, cluster, plan, self.stack, largest=largest)
            for cluster, largest in zip(self.clusters, most, strict=True)
        ]

    def _work(self, plan: Plan) -> Work:
        """What the model computes in the plan's precision, cut as it says where it does."""
        key = (plan.precision, plan.placements, plan.uncut)
        if key not in self._works:
            cuts = bool(plan.placements or plan.uncut)
            self._works[key] = recast(distil(self.profile, plan) if cuts else self.work, plan.precision)
        return self._works[key]

    def seconds_of_parts(self, plan: Plan) -> list[tuple[float, float, float]]:
        """For each kind of device, seconds that a micro-batch of `plan` computes before the blocks, in one block and after them."""
        mesh = plan.mesh
        turns = rounds(self.batch, mesh.dp, plan.micro)
        samples = -(-self.batch // (mesh.dp * turns))
        key = (samples, mesh.cp, mesh.tp, plan.sequence, plan.recompute, plan.precision, plan.compile)
        if key not in self._parts:
            alone = replace(plan, mesh=replace(mesh, pp=1), stages=(), schedule="1f1b")
            self._parts[key] = [
                passes(layout, self.fitted, known)
                for layout, known in zip(self.layouts(alone), self._known, strict=True)
            ]
        return self._parts[key]

    def least_seconds(self, layouts: list[Layout]) -> float:
        """A step takes at least so long."""
        return max(
            step_time(layout, cluster, self.fitted, walked=False, known=known).step
            for layout, cluster, known in zip(layouts, self.clusters, self._known, strict=True)
        )

    def may_fit(self, layouts: list[Layout]) -> bool:
        """Whether the ends of the pipeline fit: where they do not, the plan does not."""
        return all(self._fits(layout, rank) for layout in layouts for rank in {0, layout.plan.mesh.pp - 1})

    def fits(self, layouts: list[Layout]) -> bool:
        """Whether all ranks of the pipeline fit."""
        return all(self._fits(layout, rank) for layout in layouts for rank in range(layout.plan.mesh.pp))

    def peak(self, layouts: list[Layout]) -> float:
        """Bytes of the fullest rank, what is unsure and the framework included, on the device that it fills most."""
        tightest = min(layouts, key=lambda each: each.capacity)
        held = [put_together(each, self.fitted) for each in held_by_ranks(tightest)]
        return max(each.high + each.framework for each in held)

    def forecast(self, layouts: list[Layout]) -> Forecast:
        """What `simulate` says."""
        return worst(
            [
                forecast_of(layout, cluster, self.fitted, known)
                for layout, cluster, known in zip(layouts, self.clusters, self._known, strict=True)
            ]
        )

    def _fits(self, layout: Layout, rank: int) -> bool:
        held = put_together(held_by_ranks(layout, rank)[0], self.fitted)
        return held.high + held.framework <= layout.capacity
