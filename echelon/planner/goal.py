"""What "best" means: the fastest plan, the smallest, the cheapest, or the one on the fewest devices that meets a deadline."""

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
    """`within`: a deadline in seconds for `steps` steps; `devices` needs it. `price`: per device-hour, overrides the cluster's prices."""

    kind: GoalKind = "fastest"
    within: float | None = None
    steps: int = 1
    price: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(GoalKind):
            raise PlanError(f"goal={self.kind!r}: not one of {', '.join(get_args(GoalKind))}")
        if self.kind == "devices" and self.within is None:
            raise PlanError("goal=devices needs a deadline (--within) and a number of steps (--steps)")
        if self.within is not None and not 0 < self.within < float("inf"):
            raise PlanError(f"within={self.within}: the deadline must be above 0 seconds")
        if self.steps < 1:
            raise PlanError(f"steps={self.steps}: must be at least 1")
        if self.steps != 1 and self.within is None:
            raise PlanError(f"steps={self.steps} has no effect without a deadline (--within)")
        if self.price is not None and not 0 < self.price < float("inf"):
            raise PlanError(f"price={self.price}: the price of a device-hour must be above 0")
        if self.price is not None and self.kind != "cheapest":
            raise PlanError(f"price={self.price} has no effect with goal={self.kind}; use goal=cheapest")
        if self.kind == "memory" and self.within is not None:
            raise PlanError("goal=memory takes no deadline: the smallest plan is the slowest; use goal=devices")

    @property
    def step_limit(self) -> float:
        """The longest step that meets the deadline, in seconds."""
        return float("inf") if self.within is None else self.within / self.steps


class Objective:
    """The cost of plans on a cluster under a goal, to be minimized."""

    def __init__(self, goal: Goal, cluster: Cluster) -> None:
        self.goal = goal
        # Ranks on a measured CPU are processes of one machine: its price does not depend on their number.
        self._is_one_machine = cluster.device_kind == "cpu" and not uses_data_sheets(cluster)
        #: Of the first 0, 1, 2 ... devices.
        self._hourly_prices: list[float] = []
        if goal.kind == "cheapest":
            self._hourly_prices += accumulate(_device_hourly_prices(goal, cluster), initial=0.0)

    def cost(self, seconds: float, ranks: int, peak: float) -> float:
        """The cost of a step; it grows with each argument."""
        if self.goal.kind == "memory":
            return peak
        if self.goal.kind == "devices":
            return ranks
        return seconds if self.goal.kind == "fastest" else self.price(seconds, ranks)

    def cost_of(self, forecast: Forecast) -> float:
        """The cost of a plan."""
        return self.cost(forecast.time.step, forecast.plan.ranks, forecast.memory.required)

    def key(self, forecast: Forecast) -> tuple[float, float, str]:
        """The sort key of plans."""
        return self.cost_of(forecast), forecast.time.step, str(forecast.plan)

    def accepts(self, forecast: Forecast) -> bool:
        """Whether a plan fits and meets the deadline."""
        return forecast.fits and forecast.time.step <= self.goal.step_limit

    def price(self, seconds: float, ranks: int) -> float:
        """The price of a step on the first `ranks` devices of the cluster."""
        last = len(self._hourly_prices) - 1
        return seconds * self._hourly_prices[last if self._is_one_machine else min(ranks, last)] / 3600


def _device_hourly_prices(goal: Goal, cluster: Cluster) -> list[float]:
    """The price of an hour of each device; 1 if no price is known, so that the cheapest plan takes the fewest device-hours."""
    devices = rank_devices(cluster)
    prices = [goal.price or (device.sheet.price if device.sheet else None) for device in devices]
    missing = [device.name for device, price in zip(devices, prices, strict=True) if price is None]
    if missing and len(missing) < len(devices):
        raise PlanError(
            f"goal=cheapest: {missing[0]} has no price and other devices have; add it to the cluster file (price), or give one for all (--price)"
        )
    return [1.0 if price is None else price for price in prices]
