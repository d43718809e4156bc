"""The cluster: nodes, their devices and links, with rates as functions of what is asked of them.

A rate is never one number: a small or skinny product, two ranks that share the memory bus and a short message are all
slower than the data sheet. A `Curve` holds measured points and answers for shapes between them.
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
class Point:
    """A rate (FLOP/s or bytes/s) at one shape."""

    dims: tuple[float, ...]
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The rate of one operation on one device while `ranks` processes of `threads` threads each do the same."""

    operation: str
    dtype: str = "float32"
    ranks: int = 1
    threads: int = 1
    points: tuple[Point, ...] = ()

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError(f"{self.operation}: a curve has at least one point")
        if any(not 0 < point.rate < math.inf for point in self.points):
            raise ValueError(f"{self.operation}: rates are above 0 and finite")
        if len({len(point.dims) for point in self.points}) > 1:
            raise ValueError(f"{self.operation}: all points of a curve have as many dims")
        if self.ranks < 1 or self.threads < 1:
            raise ValueError(f"{self.operation}: ranks={self.ranks} and threads={self.threads} are at least 1")

    def rate(self, dims: Sequence[float]) -> float:
        """The rate at `dims`. Beyond the measured range it stays as it is at the edge."""
        if len(self.points) == 1:
            return self.points[0].rate
        axes, table = _grid(self.points)
        inside = tuple(min(max(value, axis[0]), axis[-1]) for value, axis in zip(dims, axes, strict=True))
        if inside in table:
            return table[inside]
        found = _between(axes, table, inside)
        return _near(self.points, inside) if found is None else found


@lru_cache(maxsize=512)
def _grid(points: tuple[Point, ...]) -> tuple[tuple[tuple[float, ...], ...], dict[tuple[float, ...], float]]:
    """The values that each dim was measured at, and the rate by dims."""
    axes = tuple(tuple(sorted({point.dims[i] for point in points})) for i in range(len(points[0].dims)))
    return axes, {point.dims: point.rate for point in points}


def _between(
    axes: tuple[tuple[float, ...], ...], table: dict[tuple[float, ...], float], dims: Sequence[float]
) -> float | None:
    """Linear in log space between the corners of the cell that holds `dims`; None where a corner was not measured."""
    sides = []
    for value, axis in zip(dims, axes, strict=True):
        high = min(bisect_left(axis, value), len(axis) - 1)
        low = high if axis[high] == value else max(high - 1, 0)
        share = math.log(value / axis[low]) / math.log(axis[high] / axis[low]) if low != high and axis[low] > 0 else 0.0
        sides.append(((axis[low], 1.0 - share), (axis[high], share)) if low != high else ((axis[low], 1.0),))
    total = 0.0
    for corner in product(*sides):
        rate = table.get(tuple(value for value, _ in corner))
        if rate is None:
            return None
        total += math.prod(share for _, share in corner) * math.log(rate)
    return math.exp(total)


def _near(points: Sequence[Point], dims: Sequence[float]) -> float:
    """Points weighed by closeness in log space, so that factors of two count alike."""
    total = weight = 0.0
    for point in points:
        distance = sum(math.log2(max(a, 1.0) / max(b, 1.0)) ** 2 for a, b in zip(dims, point.dims, strict=True))
        if distance < 1e-9:
            return point.rate
        # Fourth power of the distance: the nearest few decide, and far ones do not drag a corner to the mean.
        share = 1.0 / distance**2
        total += share / point.rate
        weight += share
    return weight / total


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A collective between `ranks` processes of one node: seconds by message bytes (of the full tensor)."""

    operation: Literal["all_reduce", "reduce_scatter", "all_gather"]
    backend: str
    ranks: int
    points: tuple[tuple[float, float], ...]  #: (bytes, seconds), ascending
    #: Share of it that passes while the ranks compute: 0 where the ranks' cores do the copying themselves.
    overlap: float = 0.0

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or any(a >= b for a, b in pairwise(sizes)):
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

    def seconds(self, size: float) -> float:
        """Time of a message of `size` bytes: straight lines between points, the last bandwidth beyond them."""
        if size <= self.points[0][0]:
            return self.points[0][1]
        for (a, s), (b, t) in zip(self.points, self.points[1:], strict=False):
            if size <= b:
                return s + (t - s) * (size - a) / (b - a)
        return self.points[-1][1] * size / self.points[-1][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
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
        strange = sorted(set(self.peaks) - set(_WIDER))
        if strange:
            raise ValueError(f"peaks: {', '.join(strange)}: not a precision; known are {', '.join(_WIDER)}")
        figures = {f"{name} peak": value for name, value in self.peaks.items()}
        figures |= {name: getattr(self, name) for name in ("vector", "bandwidth", "units", "power", "legacy")}
        figures |= {"price": self.price} if self.price is not None else {}
        for name, value in figures.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value}: a data sheet's figures are above 0 and finite")
        for name in ("power", "legacy"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name}={getattr(self, name)}: a share is at most 1")

    def peak(self, precision: str) -> float:
        """FLOP/s of products in `precision`; one that it lacks is computed in the next wider one that it has."""
        for name in _WIDER[precision]:
            if name in self.peaks:
                return self.peaks[name]
        return self.peaks["fp32"]


#: What a device that lacks a precision computes in instead.
_WIDER = {
    "fp4": ("fp4", "fp8", "half", "fp32"),
    "fp8": ("fp8", "half", "fp32"),
    "half": ("half", "fp32"),
    "bf16": ("bf16", "half", "fp32"),
    "tf32": ("tf32", "fp32"),
    "fp32": ("fp32",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
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
_STRETCH = 20 * 2**20


def rounded(size: float, blocks: float, grain: float) -> float:
    """Bytes that an allocator takes for `size` bytes in `blocks` blocks."""
    return size + grain * min(blocks, size / _STRETCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU, or all CPU cores of a node together (`cores` of them)."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory: int  #: bytes
    cores: int = 1
    instructions: tuple[str, ...] = ()
    curves: tuple[Curve, ...] = ()
    overhead: float = 0.0  #: seconds that one operator costs however small
    fault: float = 0.0  #: seconds per byte of memory that the system hands out anew (a CPU's page faults)
    framework: int = 0  #: bytes that a process holds before it has a model
    grain: float = 0.0  #: bytes that the allocator adds to a large block (huge pages); see `rounded`
    retained: float = (
        0.0  #: bytes that the allocator has not given back at the peak, per byte that comes and goes by then
    )
    workspace: float = 0.0  #: bytes that libraries take once and keep
    sheet: Sheet | None = None  #: prices what has no curve

    def curve(self, operation: str, dtype: str, *, ranks: int = 1, threads: int = 1) -> Curve | None:
        """The curve measured under the load nearest to `ranks` x `threads`; None: this operation was not measured."""
        found = [curve for curve in self.curves if curve.operation == operation and curve.dtype == dtype]
        if not found:
            return None

        def distance(curve: Curve) -> tuple[float, float]:
            return abs(math.log2(curve.threads / threads)), abs(math.log2(curve.ranks / ranks))

        return min(found, key=distance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine: devices of one kind and the links between its ranks."""

    name: str
    cores: int
    memory: int  #: bytes of the machine
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    wire: Wire | None = None  #: between its devices, where no link was measured

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError(f"node {self.name}: a node has at least one device")

    def link(self, operation: str, ranks: int) -> Link | None:
        """The link measured with the number of ranks nearest to `ranks`."""
        found = [link for link in self.links if link.operation == operation]
        return min(found, key=lambda link: abs(math.log2(link.ranks / max(ranks, 1))), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Document):
    """The machines that a plan is for."""

    KIND: ClassVar[str] = "cluster"
    VERSION: ClassVar[int] = 4

    name: str
    nodes: tuple[Node, ...]
    versions: dict[str, str]  #: of what it was measured with
    notes: tuple[str, ...] = ()
    network: Wire | None = None  #: between nodes

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError("a cluster has at least one node")

    @property
    def kind(self) -> str:
        """cpu or cuda."""
        return self.nodes[0].devices[0].kind

    @property
    def ranks(self) -> int:
        """The most ranks it takes: one per GPU, one per core."""
        return sum(node.cores if self.kind == "cpu" else len(node.devices) for node in self.nodes)

    @property
    def cores(self) -> int:
        """CPU cores of all nodes."""
        return sum(node.cores for node in self.nodes)
