"""Estimate a training's speed and time left from its step events."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.plan.forecast import Forecast

#: Seconds over which the rate is averaged.
_RATE_SECONDS = 10.0
#: Steps over which the loss is averaged.
_LOSS_STEPS = 50


class ProgressTracker:
    """Running averages of a run. The first step is a warm-up: it counts only until there is a second."""

    __slots__ = ("_loss", "_samples", "_seconds", "_steps", "_weight", "ideal_rate", "step", "steps_seen", "total")

    def __init__(self, *, total: int | None = None, step: int = 0, ideal_rate: float | None = None) -> None:
        self.total = total
        #: Steps done.
        self.step = step
        #: Samples per second of all ranks if none waited for another; None: unknown.
        self.ideal_rate = ideal_rate
        self.steps_seen = 0
        self._samples = self._seconds = self._steps = 0.0
        self._loss = self._weight = 0.0

    def add(self, step: int, data: Mapping[str, Any]) -> None:
        self.step = step
        seconds = data["seconds"]
        if self.steps_seen == 1:
            self._samples = self._seconds = self._steps = 0.0
        decay = math.exp(-seconds / _RATE_SECONDS) if seconds > 0 else 1.0
        self._samples = self._samples * decay + data["samples"]
        self._seconds = self._seconds * decay + seconds
        self._steps = self._steps * decay + 1.0
        loss = data["loss"]
        if loss is not None and loss == loss:
            self._loss = self._loss * (1 - 1 / _LOSS_STEPS) + loss
            self._weight = self._weight * (1 - 1 / _LOSS_STEPS) + 1.0
        self.steps_seen += 1

    @property
    def loss(self) -> float | None:
        """Exponential moving average of the loss; None before the first."""
        return self._loss / self._weight if self._weight else None

    @property
    def rate(self) -> float | None:
        return self._samples / self._seconds if self._seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last step at the current rate; None: unknown."""
        if self.total is None or not self._steps:
            return None
        return max(self.total - self.step, 0) * self._seconds / self._steps

    @property
    def efficiency(self) -> float | None:
        """Samples per second relative to `ideal_rate`; None: unknown."""
        return self.rate / self.ideal_rate if self.rate is not None and self.ideal_rate else None


def ideal_rate(forecast: Forecast | None) -> float | None:
    """The forecast samples per second of all ranks without exchange. None for a single rank, which never waits."""
    if forecast is None or forecast.plan.ranks == 1:
        return None
    compute_seconds = forecast.time.step - forecast.time.exchange
    return forecast.batch / compute_seconds if compute_seconds > 0 else None
