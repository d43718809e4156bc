"""What the simulator asks of a machine: one protocol, one file per source of prices.

curves.py    rates and timings that were measured on this machine; launch_bound.py is the host of a GPU
roofline.py  data sheets; network.py is the links between devices
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from echelon.plan.forecast import MemoryForecast
from echelon.plan.plan import Plan
from echelon.plan.profile import OptimizerProfile, Profile
from echelon.simulator.model_summary import Collective, LocalOperator, OperatorSummary
from echelon.simulator.rank_memory import RankMemory


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that communicate, each `stride` ranks from the next."""

    ranks: int
    stride: int = 1


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds of messages sent one after another, and the part of them that computation can hide."""

    seconds: float = 0.0
    overlappable: float = 0.0

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(self.seconds + other.seconds, self.overlappable + other.overlappable)

    def __mul__(self, times: float) -> Exchange:
        return Exchange(self.seconds * times, self.overlappable * times)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWork:
    """What the host of one rank issues in a step, and what its device computes meanwhile."""

    #: Of each micro-batch: samples, and seconds of the device for forward and backward.
    micro_batches: tuple[tuple[float, float, float], ...]
    tensors: float  #: parameters, each a tensor
    forward_calls: float  #: operators of one micro-batch
    backward_calls: float
    matmul_calls: float  #: of both
    convolution_calls: float
    recompute: str
    block_calls: float  #: of `forward_calls`, those in blocks that are recomputed
    recomputed_calls: float
    fused_optimizer: bool
    accumulate_seconds: float  #: of the device, for each micro-batch but one
    optimizer_seconds: float  #: of the device


@dataclass(frozen=True, slots=True)
class HostSeconds:
    """How much longer a step takes because of its host."""

    per_micro_batch: float
    per_step: float = 0.0


class CostModel(Protocol):
    """Prices the work of one rank, on devices of one kind."""

    @property
    def capacity(self) -> float:
        """Bytes that a rank may use."""

    @property
    def trusts_trace(self) -> bool:
        """Whether memory peaks where the traced step peaked, as far as the plan runs the model as it was traced."""

    @property
    def compiled_fraction(self) -> float:
        """Of the element-wise time, what torch.compile leaves."""

    @property
    def computes_fp8(self) -> bool:
        """Whether matrix units compute in fp8."""

    @property
    def overlap(self) -> float:
        """Share of an exchange that hides behind enough computation."""

    def require(self, plan: Plan) -> None:
        """Refuse a plan that cannot be priced."""

    def simplify(self, operators: Iterable[OperatorSummary]) -> tuple[OperatorSummary, ...]:
        """Fewer operators that cost the same."""

    def operator_seconds(self, operator: LocalOperator) -> float:
        """One call on the device."""

    def stream_seconds(self, name: str, moved: float) -> float:
        """An element-wise operator that reads and writes `moved` bytes."""

    def fresh_memory_seconds(self, size: float) -> float:
        """Touching memory that the system hands out anew."""

    def optimizer_seconds(self, optimizer: OptimizerProfile, elements: float, *, fused: bool, width: float) -> float:
        """One update of `elements` parameters, which reads and writes `width` bytes of each."""

    def message_seconds(self, collective: Collective, size: float, group: RankGroup) -> float:
        """One collective; `size`: bytes of the full tensor, of all_to_all those that each rank has."""

    def exchange(self, collective: Collective, size: float, group: RankGroup, messages: Iterable[float]) -> Exchange:
        """`size` bytes that the data ranks send as `messages`, one after another, with copies into buffers and out of them."""

    def send_seconds(self, size: float, stride: int, ranks: int, *, identical_ranks: int = 1) -> float:
        """From each of `ranks` ranks to the one `stride` ranks further. `identical_ranks`: neighbours that hold the same tensor."""

    def hidden_seconds(self, exchange: float, compute: float) -> float:
        """The part of an exchange that hides behind computation."""

    def hook_seconds(self, calls: float) -> float:
        """Host work around the units of FSDP, each call a unit in one pass."""

    def host_seconds(self, work: HostWork) -> HostSeconds:
        """How much longer a step takes because of its host."""

    def input_seconds(self, samples: float, input_bytes: float, compute: float) -> float:
        """Waiting for samples of `input_bytes` each while the device computes for `compute` seconds."""

    def straggler_fraction(self, ranks: int) -> float:
        """By which share the slowest of all nodes makes a step longer."""

    def memory_forecast(self, memory: RankMemory) -> MemoryForecast:
        """With what allocators, libraries and drivers add."""

    def notes(self, profile: Profile, plan: Plan) -> tuple[str, ...]:
        """What a reader of the forecast should know."""
