"""Shards grouped into routes: those with the same chain of servers share frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from echelon.server.protocol.grouped_ids import GroupedIds, group_by_route
from echelon.server.protocol.shard_sets import ShardSet

#: The route number of shards without a living replica.
NO_ROUTE = 65535


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """Shards with the same chain. `number`: its place in the routing table."""

    number: int
    chain: tuple[str, ...]
    shard_set: ShardSet

    @property
    def shards(self) -> np.ndarray:
        """The shard numbers, as frames carry them."""
        return self.shard_set.wire_shards

    @property
    def head(self) -> str:
        """The server that orders pushes and replies."""
        return self.chain[0]


@dataclass(frozen=True, eq=False)
class RoutingTable:
    """The routes of one map, in the order of their first shards, and the route number of each shard."""

    routes: tuple[Route, ...]
    route_of_shard: np.ndarray

    @classmethod
    def from_chains(cls, chains: Sequence[Sequence[str]]) -> RoutingTable:
        shards_by_chain: dict[tuple[str, ...], list[int]] = {}
        for shard, chain in enumerate(chains):
            if chain:
                shards_by_chain.setdefault(tuple(chain), []).append(shard)
        route_of_shard = np.full(len(chains), NO_ROUTE, np.uint16)
        routes = []
        for number, (servers, shards) in enumerate(shards_by_chain.items()):
            routes.append(Route(number=number, chain=servers, shard_set=ShardSet(np.array(shards, np.uint16))))
            route_of_shard[shards] = number
        return cls(tuple(routes), route_of_shard)

    @property
    def num_shards(self) -> int:
        return len(self.route_of_shard)

    @cached_property
    def numbered_routes(self) -> list[tuple[int, Route | None]]:
        """All routes by number, and NO_ROUTE if shards are on none."""
        unrouted = [(NO_ROUTE, None)] if (self.route_of_shard == NO_ROUTE).any() else []
        return [*enumerate(self.routes), *unrouted]

    def has_route(self, route: Route) -> bool:
        """Whether a route is of this table, not of another map's."""
        return route.number < len(self.routes) and self.routes[route.number] is route

    def group_ids(self, ids: np.ndarray) -> GroupedIds:
        """Distinct ids by route."""
        return group_by_route(ids, self.route_of_shard, len(self.routes))

    def split_by_route(self, shards: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """The positions in `shards` for each route number among them."""
        route_numbers = self.route_of_shard[shards]
        for number in np.unique(route_numbers).tolist():
            yield number, np.flatnonzero(route_numbers == number)
