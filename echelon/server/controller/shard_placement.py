"""Who should hold what: pure functions from servers and the present map to the chains that one would like."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from echelon.server.protocol.shard_map import Map, Seat


def ring(servers: Mapping[str, Seat]) -> list[str]:
    """Servers in an order in which neighbours are on different hosts as far as possible, oldest first."""
    hosts: dict[str, list[str]] = {}
    for name in sorted(servers, key=lambda each: (servers[each].incarnation, each)):
        hosts.setdefault(servers[name].host, []).append(name)
    order: list[str] = []
    queues = sorted(hosts.values(), key=len, reverse=True)
    while any(queues):
        for queue in queues:
            if queue:
                order.append(queue.pop(0))
    return order


def behind(head: str, order: Sequence[str], servers: Mapping[str, Seat], count: int) -> tuple[str, ...]:
    """The chain of a head: the next ones of the ring, those on hosts that it lacks first."""
    at = order.index(head)
    others = [*order[at + 1 :], *order[:at]]
    chain = [head]
    while len(chain) < count and others:
        hosts = {servers[name].host for name in chain}
        fresh = [name for name in others if servers[name].host not in hosts]
        chain.append((fresh or others)[0])
        others.remove(chain[-1])
    return tuple(chain)


def wish(map: Map, replicas: int, *, leaving: Collection[str] = (), heads: int | None = None) -> list[tuple[str, ...]]:
    """The chains that one would like: as few moves of heads as balance takes; all shards of a head have one chain.

    `heads`: how many servers are heads at most, the others only replicas (None: all are heads). Those that head the most stay.
    """
    staying = {name: seat for name, seat in map.servers.items() if name not in leaving}
    if not staying:
        return list(map.chains)
    order = ring(staying)
    had = {name: sum(head == name for head in map.heads) for name in order}
    # Those that have the most keep the one more that not all can have.
    leading = sorted(order, key=lambda name: (-had[name], order.index(name)))[:heads]
    most, extra = divmod(map.shards, len(leading))
    quota = {name: most + (place < extra) for place, name in enumerate(leading)}
    wanted: list[str | None] = []
    for head in map.heads:
        if head is not None and quota.get(head):
            quota[head] -= 1
            wanted.append(head)
        else:
            wanted.append(None)
    for shard, head in enumerate(wanted):
        if head is None:
            # A replica that is there already needs no copy.
            here = [name for name in map.chains[shard] if quota.get(name)]
            chosen = here[0] if here else max(leading, key=lambda name: (quota[name], -order.index(name)))
            quota[chosen] -= 1
            wanted[shard] = chosen
    chains = {name: behind(name, order, staying, replicas) for name in order}
    return [chains[head] for head in wanted if head is not None]
