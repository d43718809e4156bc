"""The costs that the simulator asks of a machine: one protocol, and one file per source of figures.

curves.py    rates and timings measured on this machine; launch_bound.py models the host of a GPU
roofline.py  data sheets; network.py models the links between devices
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
    """A communicator of ranks that are `stride` apart."""

    ranks: int
    stride: int = 1


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds of consecutive messages, and the part that computation can hide."""

    seconds: float = 0.0
    overlappable: float = 0.0

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(self.seconds + other.seconds, self.overlappable + other.overlappable)

    def __mul__(self, times: float) -> Exchange:
        return Exchange(self.seconds * times, self.overlappable * times)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWork:
    """What the host of one rank launches in a step, and what its device computes in the meantime."""

    #: Per micro-batch: samples, device seconds of forward and of backward.
    micro_batches: tuple[tuple[float, float, float], ...]
    tensors: float  #: parameters, each a tensor
    forward_calls: float  #: operators of one micro-batch
    backward_calls: float
    matmul_calls: float  #: forward and backward
    convolution_calls: float
    recompute: str
    block_calls: float  #: the `forward_calls` in recomputed blocks
    recomputed_calls: float
    fused_optimizer: bool
    accumulate_seconds: float  #: on the device, for each micro-batch but one
    optimizer_seconds: float  #: on the device


@dataclass(frozen=True, slots=True)
class HostSeconds:
    """How much the host lengthens a step."""

    per_micro_batch: float
    per_step: float = 0.0


class CostModel(Protocol):
    """Prices the work of one rank on one kind of device."""

    @property
    def capacity(self) -> float:
        """Bytes that a rank may use."""

    @property
    def trusts_trace(self) -> bool:
        """Whether memory peaks where the traced step peaked, as far as the plan runs the model as traced."""

    @property
    def compiled_fraction(self) -> float:
        """The fraction of element-wise time that remains under torch.compile."""

    @property
    def computes_fp8(self) -> bool:
        """Whether matrix units compute in fp8."""

    @property
    def overlap(self) -> float:
        """The fraction of an exchange that enough computation hides."""

    def require(self, plan: Plan) -> None:
        """Raise PlanError for a plan that cannot be priced."""

    def simplify(self, operators: Iterable[OperatorSummary]) -> tuple[OperatorSummary, ...]:
        """Fewer operators that cost the same."""

    def operator_seconds(self, operator: LocalOperator) -> float:
        """One call on the device."""

    def stream_seconds(self, name: str, moved: float) -> float:
        """An element-wise operator that reads and writes `moved` bytes."""

    def fresh_memory_seconds(self, size: float) -> float:
        """First touch of memory that the system hands out."""

    def optimizer_seconds(self, optimizer: OptimizerProfile, elements: float, *, fused: bool, width: float) -> float:
        """One update of `elements` parameters that reads and writes `width` bytes of each."""

    def message_seconds(self, collective: Collective, size: float, group: RankGroup) -> float:
        """One collective. `size`: bytes of the full tensor; for all_to_all, of each rank's tensor."""

    def exchange(self, collective: Collective, size: float, group: RankGroup, messages: Iterable[float]) -> Exchange:
        """`size` bytes that the data ranks exchange as consecutive `messages`, with copies into and out of buffers."""

    def send_seconds(self, size: float, stride: int, ranks: int, *, identical_ranks: int = 1) -> float:
        """From each of `ranks` ranks to the one `stride` ranks further. `identical_ranks`: adjacent ranks that hold the same tensor."""

    def hidden_seconds(self, exchange: float, compute: float) -> float:
        """The part of an exchange that computation hides."""

    def hook_seconds(self, calls: float) -> float:
        """Host work of FSDP hooks; a call is one unit in one pass."""

    def host_seconds(self, work: HostWork) -> HostSeconds:
        """How much the host lengthens a step."""

    def input_seconds(self, samples: float, input_bytes: float, compute: float) -> float:
        """Waiting for samples of `input_bytes` each while the device computes for `compute` seconds."""

    def straggler_fraction(self, ranks: int) -> float:
        """The fraction by which the slowest node lengthens a step."""

    def memory_forecast(self, memory: RankMemory) -> MemoryForecast:
        """Add the overheads of allocators, libraries and drivers."""

    def notes(self, profile: Profile, plan: Plan) -> tuple[str, ...]:
        """Notes for the reader of the forecast."""
