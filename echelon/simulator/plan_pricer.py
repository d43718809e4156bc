"""Prices of many plans of one model on one cluster that is known by its data sheets: what they share is reckoned once."""

from __future__ import annotations

from dataclasses import replace

from echelon.plan.batch_split import rounds
from echelon.plan.cluster import Cluster
from echelon.plan.forecast import Forecast
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.simulator.calibration import fitted
from echelon.simulator.model_summary import Work, recast
from echelon.simulator.plan_layout import Layout, lay_out
from echelon.simulator.sheet_memory import held_by_ranks, put_together
from echelon.simulator.sheet_step import Known, Placed, passes, step_time
from echelon.simulator.step import forecast_of, kinds, kinds_of_ranks, shares_of_kinds
from echelon.simulator.summarize_profile import distil
from echelon.simulator.training_stack import Stack


class Quotes:
    """Bounds are cheap and never above the forecast, so that whoever looks for the best plan need not forecast all of them."""

    def __init__(self, profile: Profile, cluster: Cluster, stack: Stack | None = None) -> None:
        self.profile, self.work, self.batch = profile, distil(profile), profile.batch
        self.stack, self.fitted = stack or Stack(), fitted()
        #: The cluster as it would be with devices of each kind alone.
        self.clusters = kinds(cluster)
        self._whole, self._reached = cluster, dict[int, list[Cluster]]()
        #: For each rank that there may be, the kind of its device.
        self.on = kinds_of_ranks(cluster)
        self.devices = sum(len(node.devices) for node in self.clusters[0].nodes)
        self._known: list[Known] = [{} for _ in self.clusters]
        self._works: dict[object, Work] = {}
        self._parts: dict[tuple[object, ...], list[tuple[float, float, float]]] = {}

    @property
    def cluster(self) -> Cluster:
        """One whose devices are all of the first kind."""
        return self.clusters[0]

    def placed(self, plan: Plan) -> list[Placed]:
        """The plan on devices of each kind that ranks are on; refuses what cannot be."""
        work, shares = self._work(plan), shares_of_kinds(self.batch, plan, self.on, len(self.clusters))
        return [
            Placed(
                lay_out(work, self.batch, cluster, plan, self.stack, largest=largest, here=here, devices=self.devices),
                cluster,
                known,
            )
            for cluster, known, (largest, here) in zip(self._clusters(plan.ranks), self._known, shares, strict=True)
            if here
        ]

    def _clusters(self, ranks: int) -> list[Cluster]:
        """As so many ranks see them: links of nodes that none of them is on do not count."""
        if len(self.clusters) == 1:
            return self.clusters
        nodes = -(-ranks // len(self.cluster.nodes[0].devices))
        if nodes not in self._reached:
            self._reached[nodes] = kinds(self._whole, ranks)
        return self._reached[nodes]

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
                passes(
                    lay_out(self._work(plan), self.batch, cluster, alone, self.stack, devices=self.devices),
                    self.fitted,
                    known,
                )
                for cluster, known in zip(self.clusters, self._known, strict=True)
            ]
        return self._parts[key]

    def least_seconds(self, placed: list[Placed]) -> float:
        """A step takes at least so long."""
        if placed[0].layout.plan.mesh.pp > 1:
            return step_time(placed, self.fitted, walked=False).step
        return max(step_time([each], self.fitted, walked=False).step for each in placed)

    def may_fit(self, placed: list[Placed]) -> bool:
        """Whether the ends of the pipeline fit: where they do not, the plan does not."""
        layouts = [each.layout for each in placed]
        return all(self._fits(layout, rank) for layout in layouts for rank in {layout.here[0], layout.here[-1]})

    def fits(self, placed: list[Placed]) -> bool:
        """Whether all ranks of the pipeline fit."""
        return all(self._fits(each.layout, rank) for each in placed for rank in each.layout.here)

    def peak(self, placed: list[Placed]) -> float:
        """Bytes of the fullest rank, what is unsure and the framework included, on the device that it fills most."""
        found = []
        for layout in (each.layout for each in placed):
            held = [put_together(each, self.fitted) for each in held_by_ranks(layout)]
            found.append((max(each.high + each.framework for each in held), layout.capacity))
        return max(found, key=lambda each: each[0] / each[1])[0]

    def forecast(self, placed: list[Placed]) -> Forecast:
        """What `simulate` says."""
        return forecast_of(placed, self.fitted)

    def _fits(self, layout: Layout, rank: int) -> bool:
        held = put_together(held_by_ranks(layout, rank)[0], self.fitted)
        return held.high + held.framework <= layout.capacity
