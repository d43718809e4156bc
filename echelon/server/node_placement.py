"""Servers over the nodes of a cluster: pure functions from what nodes have and hold to where one more should go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the cluster, and what it has in all."""

    id: str
    cpus: float
    memory: float


def choose(
    nodes: Sequence[Node], taken: Mapping[str, int], *, cpus: float = 0.0, memory: float = 0.0, avoid: str | None = None
) -> str | None:
    """The node for one more server: that with the fewest of ours, then the largest; None where it fits on none.

    `avoid`: one that does not answer; only if there is no other.
    """
    fitting = [
        node
        for node in nodes
        if node.cpus >= cpus * (taken.get(node.id, 0) + 1) and node.memory >= memory * (taken.get(node.id, 0) + 1)
    ]
    best = min(
        fitting,
        key=lambda node: (node.id == avoid, taken.get(node.id, 0), -node.cpus, -node.memory, node.id),
        default=None,
    )
    return None if best is None else best.id


def crowded(nodes: Sequence[Node], taken: Mapping[str, int], *, cpus: float = 0.0, memory: float = 0.0) -> str | None:
    """A node with at least two servers more than another that has room for one: after a lost node came back, or a new one came."""
    best = choose(nodes, taken, cpus=cpus, memory=memory)
    most = max(taken, key=lambda node: (taken[node], node), default=None)
    if best is None or most is None or taken[most] < taken.get(best, 0) + 2:
        return None
    return most
