"""Servers over the nodes of a cluster: pure functions from what nodes have and hold to where one more should go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResources:
    """A node of the cluster, and what it has in all."""

    id: str
    cpus: float
    memory: float


def choose_node(
    nodes: Sequence[NodeResources],
    servers_per_node: Mapping[str, int],
    *,
    cpus: float = 0.0,
    memory: float = 0.0,
    avoid: str | None = None,
) -> str | None:
    """The node for one more server: that with the fewest of ours, then the largest; None where it fits on none.

    `avoid`: one that does not answer; only if there is no other.
    """
    candidates = [
        node
        for node in nodes
        if node.cpus >= cpus * (servers_per_node.get(node.id, 0) + 1)
        and node.memory >= memory * (servers_per_node.get(node.id, 0) + 1)
    ]
    best = min(
        candidates,
        key=lambda node: (node.id == avoid, servers_per_node.get(node.id, 0), -node.cpus, -node.memory, node.id),
        default=None,
    )
    return None if best is None else best.id


def find_crowded_node(
    nodes: Sequence[NodeResources], servers_per_node: Mapping[str, int], *, cpus: float = 0.0, memory: float = 0.0
) -> str | None:
    """A node with at least two servers more than another that has room for one: after a lost node came back, or a new one came."""
    target = choose_node(nodes, servers_per_node, cpus=cpus, memory=memory)
    fullest = max(servers_per_node, key=lambda node: (servers_per_node[node], node), default=None)
    if target is None or fullest is None or servers_per_node[fullest] < servers_per_node.get(target, 0) + 2:
        return None
    return fullest
