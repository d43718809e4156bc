"""The forecast: time and memory of a step, by cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.plan.codec import Document
from echelon.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryForecast:
    """Bytes on the largest rank, by component, at the moment of the peak. `low` and `high` bound the peak."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float  #: saved for backward
    temporary: float  #: short-lived: an operator's inputs, outputs and workspace, gathered parameters
    buckets: float  #: for communication
    framework: float  #: what the process holds without a model; not part of the peak
    low: float
    high: float

    @property
    def peak(self) -> float:
        """Bytes that training adds to a process: RSS growth on a CPU, the allocator's peak on a GPU."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.temporary + self.buckets

    @property
    def total(self) -> float:
        """Peak including the framework."""
        return self.peak + self.framework

    @property
    def required(self) -> float:
        """Bytes to reserve: the upper bound including the framework."""
        return self.high + self.framework


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeForecast:
    """Seconds of one step, by cause. `low` and `high` bound the step."""

    forward: float
    backward: float
    exchange: float  #: exposed communication
    hidden: float  #: communication overlapped with backward, not part of the step
    optimizer: float
    input: float
    overhead: float
    low: float
    high: float
    bubble: float = 0.0  #: idle time of a pipeline's ranks

    @property
    def step(self) -> float:
        """Seconds of one step."""
        return self.forward + self.backward + self.bubble + self.exchange + self.optimizer + self.input + self.overhead


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast(Document):
    """What one plan of one model costs on one cluster."""

    KIND: ClassVar[str] = "forecast"

    plan: Plan
    batch: int
    time: TimeForecast
    memory: MemoryForecast
    capacity: float  #: bytes that one rank may use
    peak_at: str = ""  #: where the memory peaks
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the upper bound fits."""
        return self.memory.required <= self.capacity

    @property
    def samples_per_second(self) -> float:
        """Samples per second."""
        return self.batch / self.time.step
