"""Who should hold what: pure functions from servers and the present map to the chains that one would like."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from echelon.server.protocol.shard_map import ServerEntry, ShardMap


def interleave_hosts(servers: Mapping[str, ServerEntry]) -> list[str]:
    """Servers in an order in which neighbours are on different hosts as far as possible, oldest first."""
    hosts: dict[str, list[str]] = {}
    for name in sorted(servers, key=lambda server: (servers[server].incarnation, server)):
        hosts.setdefault(servers[name].host, []).append(name)
    order: list[str] = []
    queues = sorted(hosts.values(), key=len, reverse=True)
    while any(queues):
        for queue in queues:
            if queue:
                order.append(queue.pop(0))
    return order


def build_chain(head: str, order: Sequence[str], servers: Mapping[str, ServerEntry], replicas: int) -> tuple[str, ...]:
    """The chain of a head: the next ones of the ring, those on hosts that it lacks first."""
    position = order.index(head)
    others = [*order[position + 1 :], *order[:position]]
    chain = [head]
    while len(chain) < replicas and others:
        hosts = {servers[name].host for name in chain}
        on_other_hosts = [name for name in others if servers[name].host not in hosts]
        chain.append((on_other_hosts or others)[0])
        others.remove(chain[-1])
    return tuple(chain)


def compute_target_chains(
    shard_map: ShardMap, replicas: int, *, leaving: Collection[str] = (), max_heads: int | None = None
) -> list[tuple[str, ...]]:
    """The chains that one would like: as few moves of heads as balance takes; all shards of a head have one chain.

    `max_heads`: how many servers are heads at most, the others only replicas (None: all are heads). Those that head the most stay.
    """
    remaining_servers = {name: entry for name, entry in shard_map.servers.items() if name not in leaving}
    if not remaining_servers:
        return list(shard_map.chains)
    order = interleave_hosts(remaining_servers)
    head_counts = {name: sum(head == name for head in shard_map.heads) for name in order}
    # Those that have the most keep the one more that not all can have.
    head_servers = sorted(order, key=lambda name: (-head_counts[name], order.index(name)))[:max_heads]
    shards_per_head, extra = divmod(shard_map.num_shards, len(head_servers))
    quota = {name: shards_per_head + (rank < extra) for rank, name in enumerate(head_servers)}
    target_heads: list[str | None] = []
    for head in shard_map.heads:
        if head is not None and quota.get(head):
            quota[head] -= 1
            target_heads.append(head)
        else:
            target_heads.append(None)
    for shard, head in enumerate(target_heads):
        if head is None:
            # A replica that is there already needs no copy.
            replicas_with_room = [name for name in shard_map.chains[shard] if quota.get(name)]
            chosen = (
                replicas_with_room[0]
                if replicas_with_room
                else max(head_servers, key=lambda name: (quota[name], -order.index(name)))
            )
            quota[chosen] -= 1
            target_heads[shard] = chosen
    chains = {name: build_chain(name, order, remaining_servers, replicas) for name in order}
    return [chains[head] for head in target_heads if head is not None]
