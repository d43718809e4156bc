"""What the best plan is: the fastest, the smallest, the cheapest, or the one with the fewest devices that is fast enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from echelon.errors import PlanError

Kind = Literal["fastest", "memory", "cheapest", "devices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """`devices` needs `within`: seconds in which `steps` steps must be done. `price`: of one device for an hour."""

    kind: Kind = "fastest"
    within: float | None = None
    steps: int = 1
    price: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise PlanError(f"goal={self.kind!r}: not one of {', '.join(get_args(Kind))}")
        if self.kind == "devices" and self.within is None:
            raise PlanError(
                "goal=devices: the fewest devices for what? give the time that there is (--within) and the steps (--steps)"
            )
        if self.within is not None and not 0 < self.within < float("inf"):
            raise PlanError(f"within={self.within}: a deadline is in the future; give seconds above 0")
        if self.steps < 1:
            raise PlanError(f"steps={self.steps}: a training has at least one step")
        if not 0 < self.price < float("inf"):
            raise PlanError(f"price={self.price}: what a device costs for an hour is above 0")
        if self.kind == "memory" and self.within is not None:
            raise PlanError(
                "goal=memory with a deadline: the smallest plan is the slowest; use goal=devices, or leave one of them out"
            )

    @property
    def limit(self) -> float:
        """Seconds that a step may take."""
        return float("inf") if self.within is None else self.within / self.steps

    def cost(self, seconds: float, ranks: int, peak: float) -> float:
        """What is to be as small as can be; grows with each of the three."""
        if self.kind == "memory":
            return peak
        if self.kind == "devices":
            return ranks
        return seconds if self.kind == "fastest" else self.money(seconds, ranks)

    def money(self, seconds: float, ranks: int) -> float:
        """What a step costs."""
        return seconds * ranks * self.price / 3600
