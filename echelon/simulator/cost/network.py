"""Seconds of collectives by the data sheets of links: rings inside nodes, and rings of nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from echelon.errors import PlanError
from echelon.plan.cluster import Cluster
from echelon.simulator.calibration import FittedConstants
from echelon.simulator.cost.cost_model import RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The links of a cluster. A domain is a group of devices with a fast link: a node, a part of one, or several."""

    intra_domain_rate: float  #: bytes/s per device
    inter_domain_rate: float  #: bytes/s per domain that collectives reach
    domain_size: int  #: devices
    is_mesh: bool  #: each pair of devices has its own links, without a switch
    constants: FittedConstants

    def gather_seconds(self, size: float, group: RankGroup) -> float:
        """All-gather or reduce-scatter of `size` bytes along a ring, with one hop per further domain."""
        return self._ring_seconds(size, group, self._domains(group) - 1)

    def all_reduce_seconds(self, size: float, group: RankGroup) -> float:
        """A reduce-scatter and an all-gather; over many domains along a tree, which takes fewer hops."""
        domains = self._domains(group)
        return 2 * self._ring_seconds(size, group, min(domains - 1, math.log2(max(domains, 1))))

    def all_to_all_seconds(self, size: float, group: RankGroup) -> float:
        """Each rank sends every other rank its part of `size` bytes."""
        if group.ranks < 2 or not size:
            return 0.0
        near = self._ranks_per_domain(group)
        seconds = self.constants.latency_inside + size * (near - 1) / group.ranks / self._effective_rate(near)
        if self._domains(group) > 1:
            # All devices of a domain send at once.
            far_bytes = size * (group.ranks - near) / group.ranks
            seconds += far_bytes * self.domain_size / self.inter_domain_rate + self.constants.latency_between
        return seconds

    def send_seconds(self, size: float, stride: int, ranks: int, identical_ranks: int = 1) -> float:
        """From each rank to the one `stride` ranks further. Each of `identical_ranks` adjacent ranks with the same tensor sends a part, which
        the receivers gather."""
        if not size:
            return 0.0
        if identical_ranks > 1:
            gather_seconds = self.gather_seconds(size, RankGroup(identical_ranks))
            return self.send_seconds(size / identical_ranks, stride, ranks) + gather_seconds
        if stride * ranks <= self.domain_size:
            return self.constants.latency_inside + size / self._effective_rate(2)
        # The ranks of a domain that send to another one share its network.
        rate = self.inter_domain_rate / min(stride, self.domain_size)
        return self.constants.latency_inside + self.constants.latency_between + size / rate

    def _ranks_per_domain(self, group: RankGroup) -> int:
        return max(min(group.ranks, self.domain_size // group.stride), 1)

    def _domains(self, group: RankGroup) -> int:
        return -(-group.ranks // self._ranks_per_domain(group))

    def _effective_rate(self, ranks: int) -> float:
        """Bytes/s of each of `ranks` devices of a domain; in a mesh the links to all other devices are idle."""
        uses_part = self.is_mesh and 1 < ranks < self.domain_size
        used_fraction = (ranks - 1) / (self.domain_size - 1) if uses_part else 1.0
        return self.intra_domain_rate * self.constants.inside * used_fraction

    def _ring_seconds(self, size: float, group: RankGroup, hops: float) -> float:
        """One pass around the ring, inside domains and between them at the same time."""
        if group.ranks < 2 or not size:
            return 0.0
        near, domains = self._ranks_per_domain(group), self._domains(group)
        intra_domain = inter_domain = 0.0
        if near > 1:
            intra_domain = size * (group.ranks - 1) / group.ranks / self._effective_rate(near)
        if domains > 1:
            # Parallel groups share the network of a domain in proportion to their ranks there.
            inter_domain = size * (domains - 1) / domains / (self.inter_domain_rate * near / self.domain_size)
        return max(intra_domain, inter_domain) + self.constants.latency_inside + self.constants.latency_between * hops


def cluster_network(cluster: Cluster, constants: FittedConstants) -> Network:
    """The links between the devices of a cluster; `require_links` reports missing ones."""
    node, link, domain = cluster.nodes[0], cluster.network, _domain_size(cluster)
    rate = math.inf
    if link is not None:
        share = constants.between if link.share is None else link.share
        # A domain of several nodes has the network of all of them, a part of a node its share of that node's.
        rate = link.rate * share * (domain / len(node.devices))
    return Network(
        intra_domain_rate=node.wire.rate if node.wire else math.inf,
        inter_domain_rate=rate,
        domain_size=domain,
        is_mesh=node.wire is not None and node.wire.kind.endswith("mesh"),
        constants=constants,
    )


def require_links(cluster: Cluster, ranks: int) -> None:
    """Raise PlanError unless the cluster describes the links between the first `ranks` devices."""
    node = cluster.nodes[0]
    if ranks > 1 and len(node.devices) > 1 and node.wire is None:
        raise PlanError(f"{cluster.name}: the link inside a node is unknown; give it under [inside] in a cluster file")
    if ranks > _domain_size(cluster) and cluster.network is None:
        raise PlanError(
            f"{cluster.name}: {ranks} ranks span several nodes and the link between nodes is unknown; give it under [between] in a cluster file"
        )


def _domain_size(cluster: Cluster) -> int:
    node = cluster.nodes[0]
    return (node.wire.domain if node.wire else 0) or len(node.devices)
