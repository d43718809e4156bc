"""The cluster: nodes, their devices and links.

No rate is a single number: a small or skinny matrix product, two ranks that share the memory bus and a short message are all slower than the
data sheet. A `RateCurve` interpolates between measured points.
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
        if not self.points or any(not 0 < point.rate < math.inf for point in self.points):
            raise ValueError(f"{self.operation}: a curve has at least one point, with rates above 0 and finite")
        if len({len(point.dims) for point in self.points}) > 1:
            raise ValueError(f"{self.operation}: all points of a curve need the same number of dims")
        if self.ranks < 1 or self.threads < 1:
            raise ValueError(f"{self.operation}: ranks={self.ranks} and threads={self.threads} must be at least 1")

    def rate_at(self, dims: Sequence[float]) -> float:
        """The rate at `dims`, constant outside the measured range."""
        if len(self.points) == 1:
            return self.points[0].rate
        grid, rates = _measured_grid(self.points)
        clamped = tuple(min(max(value, axis[0]), axis[-1]) for value, axis in zip(dims, grid, strict=True))
        if clamped in rates:
            return rates[clamped]
        interpolated = _interpolate(grid, rates, clamped)
        return _inverse_distance_rate(self.points, clamped) if interpolated is None else interpolated


#: The measured values of each dim, ascending.
_Grid = tuple[tuple[float, ...], ...]


@lru_cache(maxsize=512)
def _measured_grid(points: tuple[RatePoint, ...]) -> tuple[_Grid, dict[tuple[float, ...], float]]:
    """The grid, and the rate by dims."""
    grid = tuple(tuple(sorted({point.dims[i] for point in points})) for i in range(len(points[0].dims)))
    return grid, {point.dims: point.rate for point in points}


def _interpolate(grid: _Grid, rates: dict[tuple[float, ...], float], dims: Sequence[float]) -> float | None:
    """Linear in log space between the corners of the cell that holds `dims`; None where a corner was not measured."""
    corners: list[tuple[tuple[float, float], ...]] = []
    for value, axis in zip(dims, grid, strict=True):
        upper = min(bisect_left(axis, value), len(axis) - 1)
        low, high = axis[max(upper - 1, 0)], axis[upper]
        if high in (value, low):
            corners.append(((high, 1.0),))
        else:
            weight = math.log(value / low) / math.log(high / low) if low > 0 else 0.0
            corners.append(((low, 1.0 - weight), (high, weight)))
    log_rate = 0.0
    for corner in product(*corners):
        rate = rates.get(tuple(value for value, _ in corner))
        if rate is None:
            return None
        log_rate += math.prod(weight for _, weight in corner) * math.log(rate)
    return math.exp(log_rate)


def _inverse_distance_rate(points: Sequence[RatePoint], dims: Sequence[float]) -> float:
    """Points weighted by closeness in log space, so that factors of two count the same everywhere."""
    logs = [math.log2(max(value, 1.0)) for value in dims]
    weighted_seconds = total_weight = 0.0
    for point in points:
        distance = sum((log - math.log2(max(value, 1.0))) ** 2 for log, value in zip(logs, point.dims, strict=True))
        if distance < 1e-9:
            return point.rate
        # Fourth power of the distance: the nearest few decide, and distant points do not pull a corner to the mean.
        weight = 1.0 / distance**2
        weighted_seconds += weight / point.rate
        total_weight += weight
    return total_weight / weighted_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTiming:
    """A collective between `ranks` processes of one node: seconds by message size (bytes of the full tensor)."""

    operation: Literal["all_reduce", "reduce_scatter", "all_gather"]
    backend: str
    ranks: int
    points: tuple[tuple[float, float], ...]  #: (bytes, seconds), ascending
    overlap: float = 0.0  #: fraction that overlaps with computation: 0 where the ranks' own cores do the copying

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or any(smaller >= larger for smaller, larger in pairwise(sizes)):
            raise ValueError(f"{self.operation}: needs at least one point, in ascending order of bytes")
        if any(not 0 < seconds < math.inf for _, seconds in self.points):
            raise ValueError(f"{self.operation}: seconds must be above 0 and finite")
        if self.ranks < 2 or not 0 <= self.overlap <= 1:
            limits = "ranks must be at least 2, overlap between 0 and 1"
            raise ValueError(f"{self.operation}: ranks={self.ranks}, overlap={self.overlap}: {limits}")

    @property
    def latency(self) -> float:
        """Seconds of the smallest message."""
        return self.points[0][1]

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the largest message."""
        return self.points[-1][0] / self.points[-1][1]

    def seconds(self, message_bytes: float) -> float:
        """Time of a message: linear between points, at the last bandwidth beyond them."""
        if message_bytes <= self.points[0][0]:
            return self.points[0][1]
        for (low, low_seconds), (high, high_seconds) in pairwise(self.points):
            if message_bytes <= high:
                return low_seconds + (high_seconds - low_seconds) * (message_bytes - low) / (high - low)
        return self.points[-1][1] * message_bytes / self.points[-1][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheet:
    """A device's data sheet: prices what was not measured."""

    peaks: dict[str, float]  #: dense FLOP/s of matrix products by precision; bf16 only if slower than half
    vector: float  #: FLOP/s of everything but matrix products, in fp32
    bandwidth: float  #: bytes/s of its memory
    units: int  #: multiprocessors: matrix products are tiled over them
    power: float = 1.0  #: allowed power, as a fraction of the rated power: below 1 it clocks lower
    #: Fraction of the peak that matrix instructions of earlier generations reach; kernels that were written for those use them.
    legacy: float = 1.0
    source: str = ""
    price: float | None = None  #: of one device for an hour, in any currency

    def __post_init__(self) -> None:
        unknown = sorted(set(self.peaks) - set(_PRECISION_FALLBACKS))
        if unknown or "fp32" not in self.peaks:
            rule = f"fp32 is required, the others are {', '.join(_PRECISION_FALLBACKS)}"
            raise ValueError(f"peaks: {', '.join(unknown) or 'fp32 missing'}: not a precision; {rule}")
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
        """FLOP/s of matrix products in `precision`, or in the next wider one that the device has."""
        return next(self.peaks[name] for name in _PRECISION_FALLBACKS[precision] if name in self.peaks)


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
    domain: int = 0  #: devices that share it, where several nodes form one domain; 0: those of a node
    share: float | None = None  #: fraction of the rate that large collectives reach, where it was measured
    source: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.rate < math.inf or self.domain < 0:
            limits = "the rate must be above 0 and finite, the domain at least 0"
            raise ValueError(f"{self.kind}: rate={self.rate} bytes/s, domain={self.domain}: {limits}")
        if self.share is not None and not 0 < self.share <= 1:
            raise ValueError(f"{self.kind}: share={self.share} of the rate is above 0 and at most 1")


#: Small blocks share a segment: one padding is lost per this many bytes (mimalloc's 32 MiB segments hold 24 to 30).
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
    overhead: float = 0.0  #: seconds per operator, however small
    page_fault_seconds: float = 0.0  #: seconds per byte of memory that the system newly maps (a CPU's page faults)
    framework: int = 0  #: bytes that a process holds without a model
    block_padding: float = 0.0  #: bytes that the allocator adds to a large block (huge pages); see `allocated_bytes`
    retained: float = 0.0  #: bytes that the allocator still holds at the peak, per byte of freed transient memory
    workspace: float = 0.0  #: bytes that libraries allocate once and keep
    sheet: DataSheet | None = None  #: prices what has no curve

    def nearest_curve(self, operation: str, dtype: str, *, ranks: int = 1, threads: int = 1) -> RateCurve | None:
        """The curve measured under the load nearest to `ranks` x `threads`; None: this operation was not measured."""
        curves = [curve for curve in self.curves if curve.operation == operation and curve.dtype == dtype]

        def distance(curve: RateCurve) -> tuple[float, float]:
            return abs(math.log2(curve.threads / threads)), abs(math.log2(curve.ranks / ranks))

        return min(curves, key=distance, default=None)


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
        """The timing measured with the number of ranks nearest to `ranks`."""
        timings = [timing for timing in self.links if timing.operation == operation]
        return min(timings, key=lambda timing: abs(math.log2(timing.ranks / max(ranks, 1))), default=None)


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
        """One rank per GPU, or per core."""
        return sum(node.cores if self.device_kind == "cpu" else len(node.devices) for node in self.nodes)

    @property
    def cores(self) -> int:
        """CPU cores of all nodes."""
        return sum(node.cores for node in self.nodes)
