"""Choose cluster nodes for servers: pure functions of the nodes' resources and servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResources:
    """A node of the cluster, and its total resources."""

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
    """The node for one more server: with the fewest servers, then the largest; None if it fits on no node.

    `avoid`: a node that does not answer, used only if there is no other.
    """

    def has_room(node: NodeResources) -> bool:
        count = servers_per_node.get(node.id, 0) + 1
        return node.cpus >= cpus * count and node.memory >= memory * count

    def cost(node: NodeResources) -> tuple[bool, int, float, float, str]:
        return node.id == avoid, servers_per_node.get(node.id, 0), -node.cpus, -node.memory, node.id

    best = min(filter(has_room, nodes), key=cost, default=None)
    return None if best is None else best.id


def find_crowded_node(
    nodes: Sequence[NodeResources], servers_per_node: Mapping[str, int], *, cpus: float = 0.0, memory: float = 0.0
) -> str | None:
    """A node with at least two servers more than another that has room for one: after a node joined or came back."""
    target = choose_node(nodes, servers_per_node, cpus=cpus, memory=memory)
    fullest = max(servers_per_node, key=lambda node: (servers_per_node[node], node), default=None)
    if target is None or fullest is None or servers_per_node[fullest] < servers_per_node.get(target, 0) + 2:
        return None
    return fullest
