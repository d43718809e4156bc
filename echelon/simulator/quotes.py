"""Prices of many plans of one model on one cluster that is known by its data sheets: what they share is reckoned once."""

from __future__ import annotations

from dataclasses import replace

from echelon.plan.cluster import Cluster
from echelon.plan.forecast import Forecast
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.plan.split import rounds
from echelon.simulator.fitted import fitted
from echelon.simulator.sheet_memory import parts, put_together
from echelon.simulator.stack import Stack
from echelon.simulator.step import forecast_of, slowest
from echelon.simulator.sheet_step import Layout, Pass, lay_out, passes, time
from echelon.simulator.work import distil


class Quotes:
    """Bounds are cheap and never above the forecast, so that whoever looks for the best plan need not forecast all of them."""

    def __init__(self, profile: Profile, cluster: Cluster, stack: Stack | None = None) -> None:
        self.work, self.batch = distil(profile), profile.batch
        self.cluster, self.stack, self.fitted = slowest(cluster), stack or Stack(), fitted()
        self._known: dict[tuple[object, ...], Pass] = {}
        self._parts: dict[tuple[object, ...], tuple[float, float, float]] = {}

    def layout(self, plan: Plan) -> Layout:
        """The plan on the cluster; refuses what cannot be."""
        return lay_out(self.work, self.batch, self.cluster, plan, self.stack, self._known)

    def seconds_of_parts(self, plan: Plan) -> tuple[float, float, float]:
        """Seconds that a micro-batch of `plan` computes before the blocks, in one block and after them, there and back."""
        mesh = plan.mesh
        turns = rounds(self.batch, mesh.dp, plan.micro)
        samples = -(-self.batch // (mesh.dp * turns))
        key = (samples, mesh.cp, mesh.tp, plan.sequence, plan.recompute, plan.precision, plan.compile)
        if key not in self._parts:
            alone = replace(plan, mesh=replace(mesh, pp=1), stages=(), schedule="1f1b")
            self._parts[key] = passes(self.layout(alone), self.fitted)
        return self._parts[key]

    def least_seconds(self, layout: Layout) -> float:
        """A step takes at least so long."""
        return time(layout, self.cluster, self.fitted, walked=False).step

    def may_fit(self, layout: Layout) -> bool:
        """Whether the ends of the pipeline fit: where they do not, the plan does not."""
        return all(self._fits(layout, rank) for rank in {0, layout.plan.mesh.pp - 1})

    def peak(self, layout: Layout) -> float:
        """Bytes of the fullest rank, what is unsure and the framework included."""
        held = [put_together(each, self.fitted) for each in parts(layout)]
        return max(each.high + each.framework for each in held)

    def forecast(self, layout: Layout) -> Forecast:
        """What `simulate` says."""
        return forecast_of(layout, self.cluster, self.fitted)

    def _fits(self, layout: Layout, rank: int) -> bool:
        held = put_together(parts(layout, rank)[0], self.fitted)
        return held.high + held.framework <= layout.capacity
