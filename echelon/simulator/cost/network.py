"""Seconds of collectives over links of which only the data sheet is known: rings inside nodes, rings of nodes between them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from echelon.errors import PlanError
from echelon.plan.cluster import Cluster
from echelon.simulator.calibration import Fitted


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that talk to each other: how many, and how many of them share a fast domain."""

    ranks: int
    near: int

    @property
    def spans(self) -> int:
        """Domains that it spans."""
        return -(-self.ranks // self.near)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """The links of a cluster as its ranks see them."""

    inside: float  #: bytes/s per device
    between: float  #: bytes/s per domain that collectives reach
    domain: int  #: devices that share the fast link
    mesh: bool  #: whether each pair of devices has links of its own and no switch between them
    fitted: Fitted

    def group(self, ranks: int, stride: int) -> Group:
        """A group whose members are `stride` ranks apart."""
        return Group(ranks, max(min(ranks, self.domain // stride), 1))

    def _rate(self, near: int) -> float:
        """Bytes/s of each of so many devices of a domain among themselves: in a mesh the links to all others lie idle."""
        share = (near - 1) / (self.domain - 1) if self.mesh and 1 < near < self.domain else 1.0
        return self.inside * self.fitted.inside * share

    def gather(self, size: float, group: Group) -> float:
        """Every rank gets all of `size` bytes, of which each has its part; a scatter of sums takes as long. Round a ring: from node to
        node as often as there are others."""
        return self._passed(size, group, group.spans - 1)

    def reduce(self, size: float, group: Group) -> float:
        """Every rank gets the sum: a scatter of sums, then a gather; along a tree where there are many nodes, which takes fewer hops."""
        return 2 * self._passed(size, group, min(group.spans - 1, math.log2(max(group.spans, 1))))

    def _passed(self, size: float, group: Group, hops: float) -> float:
        """Once through all ranks, inside nodes and between them at the same time."""
        if group.ranks < 2 or not size:
            return 0.0
        inside = size * (group.ranks - 1) / group.ranks / self._rate(group.near) if group.near > 1 else 0.0
        crossing = 0.0
        if group.spans > 1:
            # Groups side by side share the network of a node: this one has as much of it as it has ranks there.
            rate = self.between * group.near / self.domain
            crossing = size * (group.spans - 1) / group.spans / rate
        return max(inside, crossing) + self.fitted.latency_inside + self.fitted.latency_between * hops

    def swap(self, size: float, group: Group) -> float:
        """Every rank has `size` bytes, of which each other rank gets an equal part."""
        if group.ranks < 2 or not size:
            return 0.0
        near, far = (group.near - 1) / group.ranks, (group.ranks - group.near) / group.ranks
        seconds = self.fitted.latency_inside + size * near / self._rate(group.near)
        if group.spans > 1:
            # All devices of a domain send at once, to all others at once.
            seconds += size * far * self.domain / self.between + self.fitted.latency_between
        return seconds

    def send(self, size: float, stride: int, ranks: int, parts: int = 1) -> float:
        """From one rank to one `stride` ranks further, while all others do the same. `parts`: ranks side by side that have the same
        to send: each sends its part, and those that receive put them together."""
        if not size:
            return 0.0
        if parts > 1:
            return self.send(size / parts, stride, ranks) + self.gather(size, self.group(parts, 1))
        if stride * ranks <= self.domain:
            return self.fitted.latency_inside + size / self._rate(2)
        # Of the ranks in a domain, those whose neighbour is in another send through the network.
        crossing = min(stride, self.domain)
        rate = self.between / crossing
        return self.fitted.latency_inside + self.fitted.latency_between + size / rate


def wires_of(cluster: Cluster, ranks: int, fitted: Fitted) -> Wires:
    """The links between the first `ranks` devices of a cluster."""
    node = cluster.nodes[0]
    count = len(node.devices)
    if ranks > 1 and count > 1 and node.wire is None:
        raise PlanError(
            f"{cluster.name}: no link between the devices of a node is described; a cluster file gives it under [inside]"
        )
    # Larger than a node where several nodes are one domain; smaller where a node has several, which then talk over its network.
    domain = (node.wire.domain if node.wire else 0) or count
    if ranks > domain and cluster.network is None:
        raise PlanError(
            f"{cluster.name}: {ranks} ranks reach over nodes and no link between nodes is described; a cluster file gives it under [between]"
        )
    # A domain of several nodes has the network of all of them, one of a few devices its share of the node's.
    between = math.inf
    if cluster.network:
        share = fitted.between if cluster.network.share is None else cluster.network.share
        between = cluster.network.rate * share * (domain / count)
    mesh = node.wire is not None and node.wire.kind.endswith("mesh")
    return Wires(
        inside=node.wire.rate if node.wire else math.inf, between=between, domain=domain, mesh=mesh, fitted=fitted
    )
