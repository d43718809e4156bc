"""Seconds of collectives over links of which only the data sheet is known: rings inside nodes, rings of nodes between them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from echelon.errors import PlanError
from echelon.plan.cluster import Cluster
from echelon.simulator.calibration import FittedConstants


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that talk to each other: how many, and how many of them share a fast domain."""

    ranks: int
    ranks_per_domain: int

    @property
    def domains(self) -> int:
        """Domains that it spans."""
        return -(-self.ranks // self.ranks_per_domain)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The links of a cluster as its ranks see them."""

    intra_domain_rate: float  #: bytes/s per device
    inter_domain_rate: float  #: bytes/s per domain that collectives reach
    domain_size: int  #: devices that share the fast link
    is_mesh: bool  #: whether each pair of devices has links of its own and no switch between them
    constants: FittedConstants

    def group(self, ranks: int, stride: int) -> RankGroup:
        """A group whose members are `stride` ranks apart."""
        return RankGroup(ranks, max(min(ranks, self.domain_size // stride), 1))

    def _effective_rate(self, ranks_per_domain: int) -> float:
        """Bytes/s of each of so many devices of a domain among themselves: in a mesh the links to all others lie idle."""
        used_fraction = (
            (ranks_per_domain - 1) / (self.domain_size - 1)
            if self.is_mesh and 1 < ranks_per_domain < self.domain_size
            else 1.0
        )
        return self.intra_domain_rate * self.constants.inside * used_fraction

    def gather_seconds(self, size: float, group: RankGroup) -> float:
        """Every rank gets all of `size` bytes, of which each has its part; a scatter of sums takes as long. Round a ring: from node to
        node as often as there are others."""
        return self._ring_seconds(size, group, group.domains - 1)

    def all_reduce_seconds(self, size: float, group: RankGroup) -> float:
        """Every rank gets the sum: a scatter of sums, then a gather; along a tree where there are many nodes, which takes fewer hops."""
        return 2 * self._ring_seconds(size, group, min(group.domains - 1, math.log2(max(group.domains, 1))))

    def _ring_seconds(self, size: float, group: RankGroup, hops: float) -> float:
        """Once through all ranks, inside nodes and between them at the same time."""
        if group.ranks < 2 or not size:
            return 0.0
        intra_domain = (
            size * (group.ranks - 1) / group.ranks / self._effective_rate(group.ranks_per_domain)
            if group.ranks_per_domain > 1
            else 0.0
        )
        inter_domain = 0.0
        if group.domains > 1:
            # Groups side by side share the network of a node: this one has as much of it as it has ranks there.
            rate = self.inter_domain_rate * group.ranks_per_domain / self.domain_size
            inter_domain = size * (group.domains - 1) / group.domains / rate
        return max(intra_domain, inter_domain) + self.constants.latency_inside + self.constants.latency_between * hops

    def all_to_all_seconds(self, size: float, group: RankGroup) -> float:
        """Every rank has `size` bytes, of which each other rank gets an equal part."""
        if group.ranks < 2 or not size:
            return 0.0
        near_fraction, far_fraction = (
            (group.ranks_per_domain - 1) / group.ranks,
            (group.ranks - group.ranks_per_domain) / group.ranks,
        )
        seconds = self.constants.latency_inside + size * near_fraction / self._effective_rate(group.ranks_per_domain)
        if group.domains > 1:
            # All devices of a domain send at once, to all others at once.
            seconds += size * far_fraction * self.domain_size / self.inter_domain_rate + self.constants.latency_between
        return seconds

    def send_seconds(self, size: float, stride: int, ranks: int, identical_ranks: int = 1) -> float:
        """From one rank to one `stride` ranks further, while all others do the same. `identical_ranks`: ranks side by side that have the same
        to send: each sends its part, and those that receive put them together."""
        if not size:
            return 0.0
        if identical_ranks > 1:
            return self.send_seconds(size / identical_ranks, stride, ranks) + self.gather_seconds(
                size, self.group(identical_ranks, 1)
            )
        if stride * ranks <= self.domain_size:
            return self.constants.latency_inside + size / self._effective_rate(2)
        # Of the ranks in a domain, those whose neighbour is in another send through the network.
        crossing_ranks = min(stride, self.domain_size)
        rate = self.inter_domain_rate / crossing_ranks
        return self.constants.latency_inside + self.constants.latency_between + size / rate


def cluster_network(cluster: Cluster, ranks: int, constants: FittedConstants) -> Network:
    """The links between the first `ranks` devices of a cluster."""
    node = cluster.nodes[0]
    devices_per_node = len(node.devices)
    if ranks > 1 and devices_per_node > 1 and node.wire is None:
        raise PlanError(
            f"{cluster.name}: no link between the devices of a node is described; a cluster file gives it under [inside]"
        )
    # Larger than a node where several nodes are one domain; smaller where a node has several, which then talk over its network.
    domain = (node.wire.domain if node.wire else 0) or devices_per_node
    if ranks > domain and cluster.network is None:
        raise PlanError(
            f"{cluster.name}: {ranks} ranks reach over nodes and no link between nodes is described; a cluster file gives it under [between]"
        )
    # A domain of several nodes has the network of all of them, one of a few devices its share of the node's.
    inter_domain_rate = math.inf
    if cluster.network:
        rate_fraction = constants.between if cluster.network.share is None else cluster.network.share
        inter_domain_rate = cluster.network.rate * rate_fraction * (domain / devices_per_node)
    mesh = node.wire is not None and node.wire.kind.endswith("mesh")
    return Network(
        intra_domain_rate=node.wire.rate if node.wire else math.inf,
        inter_domain_rate=inter_domain_rate,
        domain_size=domain,
        is_mesh=mesh,
        constants=constants,
    )
