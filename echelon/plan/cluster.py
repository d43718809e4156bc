"""The cluster: nodes, their devices and links, with rates as functions of what is asked of them.

A rate is never one number: a small or skinny product, two ranks that share the memory bus and a short message are all
slower than the data sheet. A `RateCurve` holds measured points and answers for shapes between them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from typing import ClassVar, Literal

from echelon.plan.codec import Document


@dataclass(frozen=True, slots=True)
class RatePoint:
    """A rate (FLOP/s or bytes/s) at one shape."""

    dims: tuple[float, ...]
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RateCurve:
    """The rate of one operation on one device while `ranks` processes of `threads` threads each do the same."""

    operation: str
    dtype: str = "float32"
    ranks: int = 1
    threads: int = 1
    points: tuple[RatePoint, ...] = ()

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError(f"{self.operation}: a curve has at least one point")
        if any(not 0 < point.rate < math.inf for point in self.points):
            raise ValueError(f"{self.operation}: rates are above 0 and finite")
        if len({len(point.dims) for point in self.points}) > 1:
            raise ValueError(f"{self.operation}: all points of a curve have as many dims")
        if self.ranks < 1 or self.threads < 1:
            raise ValueError(f"{self.operation}: ranks={self.ranks} and threads={self.threads} are at least 1")

    def rate_at(self, dims: Sequence[float]) -> float:
        """The rate at `dims`. Beyond the measured range it stays as it is at the edge."""
        if len(self.points) == 1:
            return self.points[0].rate
        dim_values, rate_by_dims = _measured_grid(self.points)
        clamped_dims = tuple(
            min(max(value, values[0]), values[-1]) for value, values in zip(dims, dim_values, strict=True)
        )
        if clamped_dims in rate_by_dims:
            return rate_by_dims[clamped_dims]
        interpolated = _interpolate(dim_values, rate_by_dims, clamped_dims)
        return _inverse_distance_rate(self.points, clamped_dims) if interpolated is None else interpolated


@lru_cache(maxsize=512)
def _measured_grid(
    points: tuple[RatePoint, ...],
) -> tuple[tuple[tuple[float, ...], ...], dict[tuple[float, ...], float]]:
    """The values that each dim was measured at, and the rate by dims."""
    dim_values = tuple(tuple(sorted({point.dims[i] for point in points})) for i in range(len(points[0].dims)))
    return dim_values, {point.dims: point.rate for point in points}


def _interpolate(
    dim_values: tuple[tuple[float, ...], ...], rate_by_dims: dict[tuple[float, ...], float], dims: Sequence[float]
) -> float | None:
    """Linear in log space between the corners of the cell that holds `dims`; None where a corner was not measured."""
    corners = []
    for value, values in zip(dims, dim_values, strict=True):
        upper = min(bisect_left(values, value), len(values) - 1)
        lower = upper if values[upper] == value else max(upper - 1, 0)
        weight = (
            math.log(value / values[lower]) / math.log(values[upper] / values[lower])
            if lower != upper and values[lower] > 0
            else 0.0
        )
        corners.append(
            ((values[lower], 1.0 - weight), (values[upper], weight)) if lower != upper else ((values[lower], 1.0),)
        )
    log_rate = 0.0
    for corner in product(*corners):
        rate = rate_by_dims.get(tuple(value for value, _ in corner))
        if rate is None:
            return None
        log_rate += math.prod(weight for _, weight in corner) * math.log(rate)
    return math.exp(log_rate)


def _inverse_distance_rate(points: Sequence[RatePoint], dims: Sequence[float]) -> float:
    """Points weighed by closeness in log space, so that factors of two count alike."""
    weighted_seconds = total_weight = 0.0
    for point in points:
        distance = sum(
            math.log2(max(value, 1.0) / max(measured, 1.0)) ** 2
            for value, measured in zip(dims, point.dims, strict=True)
        )
        if distance < 1e-9:
            return point.rate
        # Fourth power of the distance: the nearest few decide, and far ones do not drag a corner to the mean.
        point_weight = 1.0 / distance**2
        weighted_seconds += point_weight / point.rate
        total_weight += point_weight
    return total_weight / weighted_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTiming:
    """A collective between `ranks` processes of one node: seconds by message bytes (of the full tensor)."""

    operation: Literal["all_reduce", "reduce_scatter", "all_gather"]
    backend: str
    ranks: int
    points: tuple[tuple[float, float], ...]  #: (bytes, seconds), ascending
    #: Share of it that passes while the ranks compute: 0 where the ranks' cores do the copying themselves.
    overlap: float = 0.0

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or any(smaller >= larger for smaller, larger in pairwise(sizes)):
            raise ValueError(f"{self.operation}: points ascend by bytes and there is at least one")
        if any(not 0 < seconds < math.inf for _, seconds in self.points):
            raise ValueError(f"{self.operation}: a message takes more than 0 seconds")
        if self.ranks < 2:
            raise ValueError(f"{self.operation}: ranks={self.ranks}: a message passes between at least 2")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"{self.operation}: overlap={self.overlap}: a share is between 0 and 1")

    @property
    def latency(self) -> float:
        """Seconds of the smallest message."""
        return self.points[0][1]

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the largest message."""
        return self.points[-1][0] / self.points[-1][1]

    def seconds(self, message_bytes: float) -> float:
        """Time of a message of `message_bytes` bytes: straight lines between points, the last bandwidth beyond them."""
        if message_bytes <= self.points[0][0]:
            return self.points[0][1]
        for (lower_bytes, lower_seconds), (upper_bytes, upper_seconds) in zip(
            self.points, self.points[1:], strict=False
        ):
            if message_bytes <= upper_bytes:
                return lower_seconds + (upper_seconds - lower_seconds) * (message_bytes - lower_bytes) / (
                    upper_bytes - lower_bytes
                )
        return self.points[-1][1] * message_bytes / self.points[-1][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheet:
    """What a data sheet says of a device: prices what was not measured there."""

    #: Dense FLOP/s of matrix products by precision: fp32, tf32, half, fp8, fp4; bf16 where it is not as fast as half.
    peaks: dict[str, float]
    vector: float  #: FLOP/s of everything that is no matrix product, in fp32
    bandwidth: float  #: bytes/s of its memory
    units: int  #: multiprocessors: a product is dealt out to them in tiles
    #: Power that it is allowed, as a share of what it is rated at: below 1 it clocks lower.
    power: float = 1.0
    #: Share of the peak that matrix instructions of earlier generations reach; kernels that were written for those use them.
    legacy: float = 1.0
    source: str = ""  #: where the figures were printed
    price: float | None = None  #: of one such device for an hour; None: not known

    def __post_init__(self) -> None:
        if "fp32" not in self.peaks:
            raise ValueError(
                f"peaks: {', '.join(self.peaks) or 'none'} given; fp32 is needed, every device computes in it"
            )
        unknown = sorted(set(self.peaks) - set(_PRECISION_FALLBACKS))
        if unknown:
            raise ValueError(
                f"peaks: {', '.join(unknown)}: not a precision; known are {', '.join(_PRECISION_FALLBACKS)}"
            )
        values = {f"{name} peak": value for name, value in self.peaks.items()}
        values |= {name: getattr(self, name) for name in ("vector", "bandwidth", "units", "power", "legacy")}
        values |= {"price": self.price} if self.price is not None else {}
        for name, value in values.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value}: a data sheet's figures are above 0 and finite")
        for name in ("power", "legacy"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name}={getattr(self, name)}: a share is at most 1")

    def peak_flops(self, precision: str) -> float:
        """FLOP/s of products in `precision`; one that it lacks is computed in the next wider one that it has."""
        for name in _PRECISION_FALLBACKS[precision]:
            if name in self.peaks:
                return self.peaks[name]
        return self.peaks["fp32"]


#: What a device that lacks a precision computes in instead.
_PRECISION_FALLBACKS = {
    "fp4": ("fp4", "fp8", "half", "fp32"),
    "fp8": ("fp8", "half", "fp32"),
    "half": ("half", "fp32"),
    "bf16": ("bf16", "half", "fp32"),
    "tf32": ("tf32", "fp32"),
    "fp32": ("fp32",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Interconnect:
    """A network by its data sheet: inside nodes (bytes/s per device) or between them (bytes/s per node), in each direction."""

    kind: str
    rate: float
    #: Devices that share it: more than a node has where several nodes form one domain; 0: those of a node.
    domain: int = 0
    #: Share of the rate that large collectives reach, where it was measured.
    share: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf or self.domain < 0:
            raise ValueError(
                f"{self.kind}: rate={self.rate} bytes/s is above 0 and finite, domain={self.domain} not below 0"
            )
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"{self.kind}: share={self.share} of the rate is above 0 and at most 1")


#: Small blocks share a stretch of memory: one grain is lost per this many bytes (mimalloc's 32 MiB segments hold 24 to 30).
_ALLOCATOR_SEGMENT_BYTES = 20 * 2**20


def allocated_bytes(size: float, blocks: float, padding: float) -> float:
    """Bytes that an allocator takes for `size` bytes in `blocks` blocks."""
    return size + padding * min(blocks, size / _ALLOCATOR_SEGMENT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU, or all CPU cores of a node together (`cores` of them)."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory: int  #: bytes
    cores: int = 1
    instructions: tuple[str, ...] = ()
    curves: tuple[RateCurve, ...] = ()
    overhead: float = 0.0  #: seconds that one operator costs however small
    page_fault_seconds: float = 0.0  #: seconds per byte of memory that the system hands out anew (a CPU's page faults)
    framework: int = 0  #: bytes that a process holds before it has a model
    block_padding: float = 0.0  #: bytes that the allocator adds to a large block (huge pages); see `allocated_bytes`
    retained: float = (
        0.0  #: bytes that the allocator has not given back at the peak, per byte that comes and goes by then
    )
    workspace: float = 0.0  #: bytes that libraries take once and keep
    sheet: DataSheet | None = None  #: prices what has no curve

    def nearest_curve(self, operation: str, dtype: str, *, ranks: int = 1, threads: int = 1) -> RateCurve | None:
        """The curve measured under the load nearest to `ranks` x `threads`; None: this operation was not measured."""
        candidates = [curve for curve in self.curves if curve.operation == operation and curve.dtype == dtype]
        if not candidates:
            return None

        def distance(curve: RateCurve) -> tuple[float, float]:
            return abs(math.log2(curve.threads / threads)), abs(math.log2(curve.ranks / ranks))

        return min(candidates, key=distance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine: devices of one kind and the links between its ranks."""

    name: str
    cores: int
    memory: int  #: bytes of the machine
    devices: tuple[Device, ...]
    links: tuple[CollectiveTiming, ...] = ()
    wire: Interconnect | None = None  #: between its devices, where no link was measured

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError(f"node {self.name}: a node has at least one device")

    def nearest_timing(self, operation: str, ranks: int) -> CollectiveTiming | None:
        """The link measured with the number of ranks nearest to `ranks`."""
        candidates = [timing for timing in self.links if timing.operation == operation]
        return min(candidates, key=lambda timing: abs(math.log2(timing.ranks / max(ranks, 1))), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Document):
    """The machines that a plan is for."""

    KIND: ClassVar[str] = "cluster"
    VERSION: ClassVar[int] = 5

    name: str
    nodes: tuple[Node, ...]
    versions: dict[str, str]  #: of what it was measured with
    notes: tuple[str, ...] = ()
    network: Interconnect | None = None  #: between nodes

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError("a cluster has at least one node")

    @property
    def device_kind(self) -> str:
        """cpu or cuda."""
        return self.nodes[0].devices[0].kind

    @property
    def max_ranks(self) -> int:
        """The most ranks it takes: one per GPU, one per core."""
        return sum(node.cores if self.device_kind == "cpu" else len(node.devices) for node in self.nodes)

    @property
    def cores(self) -> int:
        """CPU cores of all nodes."""
        return sum(node.cores for node in self.nodes)
