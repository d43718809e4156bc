"""What the best plan is: the fastest, the smallest, the cheapest, or the one with the fewest devices that is fast enough."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from echelon.errors import PlanError
from echelon.plan.cluster import Cluster
from echelon.plan.forecast import Forecast
from echelon.simulator.device_kinds import rank_devices, uses_data_sheets

GoalKind = Literal["fastest", "memory", "cheapest", "devices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """`devices` needs `within`: seconds in which `steps` steps must be done. `price`: of one device for an hour, whatever the cluster says."""

    kind: GoalKind = "fastest"
    within: float | None = None
    steps: int = 1
    price: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(GoalKind):
            raise PlanError(f"goal={self.kind!r}: not one of {', '.join(get_args(GoalKind))}")
        if self.kind == "devices" and self.within is None:
            raise PlanError(
                "goal=devices: the fewest devices for what? give the time that there is (--within) and the steps (--steps)"
            )
        if self.within is not None and not 0 < self.within < float("inf"):
            raise PlanError(f"within={self.within}: a deadline is in the future; give seconds above 0")
        if self.steps < 1:
            raise PlanError(f"steps={self.steps}: a training has at least one step")
        if self.steps != 1 and self.within is None:
            raise PlanError(
                f"steps={self.steps} without a deadline: nothing depends on it; give the time that there is (--within), or leave it out"
            )
        if self.price is not None and not 0 < self.price < float("inf"):
            raise PlanError(f"price={self.price}: what a device costs for an hour is above 0")
        if self.price is not None and self.kind != "cheapest":
            raise PlanError(
                f"price={self.price} with goal={self.kind}: nothing depends on it; use goal=cheapest, or leave it out"
            )
        if self.kind == "memory" and self.within is not None:
            raise PlanError(
                "goal=memory with a deadline: the smallest plan is the slowest; use goal=devices, or leave one of them out"
            )

    @property
    def step_limit(self) -> float:
        """Seconds that a step may take."""
        return float("inf") if self.within is None else self.within / self.steps


class Objective:
    """What plans cost on a cluster by a goal: what is to be as small as can be."""

    def __init__(self, goal: Goal, cluster: Cluster) -> None:
        self.goal = goal
        # Ranks of a CPU that was measured are processes on one machine, which costs the same however many they are.
        self._is_one_machine = cluster.device_kind == "cpu" and not uses_data_sheets(cluster)
        self._cumulative_hourly_prices = (
            list(accumulate(_hourly_prices(goal, cluster), initial=0.0)) if goal.kind == "cheapest" else []
        )

    def cost(self, seconds: float, ranks: int, peak: float) -> float:
        """Of a step of so many seconds; grows with each of the three."""
        if self.goal.kind == "memory":
            return peak
        if self.goal.kind == "devices":
            return ranks
        return seconds if self.goal.kind == "fastest" else self.price(seconds, ranks)

    def cost_of(self, forecast: Forecast) -> float:
        """Of a plan."""
        return self.cost(forecast.time.step, forecast.plan.ranks, forecast.memory.required)

    def key(self, forecast: Forecast) -> tuple[float, float, str]:
        """What plans are sorted by."""
        return self.cost_of(forecast), forecast.time.step, str(forecast.plan)

    def accepts(self, forecast: Forecast) -> bool:
        """Whether a plan fits and is fast enough."""
        return forecast.fits and forecast.time.step <= self.goal.step_limit

    def price(self, seconds: float, ranks: int) -> float:
        """Of a step: what the devices of its ranks cost meanwhile, which are the first of the cluster."""
        return (
            seconds
            * self._cumulative_hourly_prices[
                -1 if self._is_one_machine else min(ranks, len(self._cumulative_hourly_prices) - 1)
            ]
            / 3600
        )


def _hourly_prices(goal: Goal, cluster: Cluster) -> list[float]:
    """Of each device for an hour; where none is known each is one, and what is cheap takes few device-hours."""
    devices = rank_devices(cluster)
    prices = [goal.price or (device.sheet.price if device.sheet else None) for device in devices]
    missing = [device.name for device, price in zip(devices, prices, strict=True) if price is None]
    if missing and len(missing) < len(devices):
        raise PlanError(
            f"goal=cheapest: no price of {missing[0]} is known, and others have one; give it in the cluster's file (price), or one for all (--price)"
        )
    return [1.0 if price is None else price for price in prices]
