"""Who should hold what: pure functions from servers and the present map to the chains that one would like."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from echelon.server.protocol.shard_map import ServerEntry, ShardMap


def without(members: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The servers or workers of a map, except for these."""
    return {name: member for name, member in members.items() if name not in names}


def interleave_hosts(servers: Mapping[str, ServerEntry]) -> list[str]:
    """Servers in an order in which neighbours are on different hosts as far as possible, oldest first."""
    hosts: dict[str, list[str]] = {}
    for name in sorted(servers, key=lambda server: (servers[server].incarnation, server)):
        hosts.setdefault(servers[name].host, []).append(name)
    turns = zip_longest(*sorted(hosts.values(), key=len, reverse=True))
    return [name for turn in turns for name in turn if name is not None]


def build_chain(head: str, order: Sequence[str], servers: Mapping[str, ServerEntry], replicas: int) -> tuple[str, ...]:
    """The chain of a head: the next ones of the ring, those on hosts that it lacks first."""
    position = order.index(head)
    others = [*order[position + 1 :], *order[:position]]
    chain = [head]
    while len(chain) < replicas and others:
        hosts = {servers[name].host for name in chain}
        chain.append(min(others, key=lambda name: servers[name].host in hosts))
        others.remove(chain[-1])
    return tuple(chain)


def compute_target_chains(
    shard_map: ShardMap, replicas: int, *, leaving: Collection[str] = (), max_heads: int | None = None
) -> list[tuple[str, ...]]:
    """The chains that one would like: as few moves of heads as balance takes; all shards of a head have one chain.

    `max_heads`: how many servers are heads at most, the others only replicas (None: all are heads). Those that head the most stay.
    """
    servers = without(shard_map.servers, leaving)
    if not servers:
        return list(shard_map.chains)
    order, heads = interleave_hosts(servers), shard_map.heads
    # Those that have the most keep the one more that not all can have.
    head_servers = sorted(order, key=lambda name: (-heads.count(name), order.index(name)))[:max_heads]
    shards_per_head, extra = divmod(shard_map.num_shards, len(head_servers))
    quota = {name: shards_per_head + (rank < extra) for rank, name in enumerate(head_servers)}
    targets: dict[int, str] = {}
    for shard, head in enumerate(heads):
        if head is not None and quota.get(head):
            quota[head] -= 1
            targets[shard] = head
    for shard, chain in enumerate(shard_map.chains):
        if shard not in targets:
            # A replica that is there already needs no copy.
            with_room = [name for name in chain if quota.get(name)]
            targets[shard] = [*with_room, max(head_servers, key=lambda name: (quota[name], -order.index(name)))][0]
            quota[targets[shard]] -= 1
    chains = {name: build_chain(name, order, servers, replicas) for name in order}
    return [chains[targets[shard]] for shard in range(shard_map.num_shards)]
