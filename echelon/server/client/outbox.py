"""A worker's unacknowledged pushes: pure bookkeeping, no sockets, no clock.

Pushes are numbered 1, 2, ... and every push covers every shard, even those for which it has no rows. The acknowledged pushes of a shard
are therefore a prefix, and one number per shard describes them. Four rules keep each push applied exactly once:

- sections for one head use one connection, in the order in which they are returned here;
- a section covers a whole route less what is acknowledged, so whatever makes a server refuse push 5 makes it refuse push 6;
- after a new map, sections in flight whose route it changes are sent again, in order, before anything new;
- after a lost connection, all unanswered sections of that head are sent again, in order.

The server skips what it already has, shard by shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from echelon.server.client.routing import Route, RoutingTable
from echelon.server.protocol.shard_map import ShardMap

Payload = TypeVar("Payload")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Section(Generic[Payload]):
    """The part of one push for one route, under one version of the map."""

    seq: int
    map_version: int
    route: Route
    shards: np.ndarray
    payload: Payload

    @property
    def head(self) -> str:
        return self.route.head

    @property
    def covers_route(self) -> bool:
        """Whether it covers its whole route: the common case, for which rows are grouped already."""
        return len(self.shards) == len(self.route.shards)

    @property
    def index(self) -> slice | np.ndarray:
        """What selects its shards from per-shard arrays."""
        return self.route.shard_set.index if self.covers_route else self.shards


@dataclass(slots=True)
class _PendingPush(Generic[Payload]):
    seq: int
    payload: Payload
    in_flight: list[Section[Payload]]
    #: Shards that refused it; None: none did.
    refused_mask: np.ndarray | None = None


class Outbox(Generic[Payload]):
    """Numbers pushes, tracks what is unanswered, and returns what to send (again)."""

    def __init__(self, map: ShardMap) -> None:
        self.map_version, self._chains = map.version, map.chains
        self.routing_table = RoutingTable.from_chains(map.chains)
        self.last_seq = 0
        #: Per shard the last acknowledged push.
        self._acknowledged_seqs = np.zeros(len(map.chains), np.int64)
        self._pending_pushes: deque[_PendingPush[Payload]] = deque()
        self._unreachable_heads: set[str] = set()

    def __len__(self) -> int:
        """The number of pushes that some shard has not answered."""
        return len(self._pending_pushes)

    @property
    def oldest_pending_seq(self) -> int | None:
        """The first push that is not fully acknowledged."""
        return self._pending_pushes[0].seq if self._pending_pushes else None

    def push(self, payload: Payload) -> list[Section[Payload]]:
        """Number a push and split it into the sections to send now, none for unreachable heads."""
        self.last_seq += 1
        push = _PendingPush(seq=self.last_seq, payload=payload, in_flight=[])
        self._pending_pushes.append(push)
        routes = [route for route in self.routing_table.routes if route.head not in self._unreachable_heads]
        push.in_flight = [self._make_section(push, route, route.shards) for route in routes]
        return list(push.in_flight)

    def _make_section(self, push: _PendingPush[Payload], route: Route, shards: np.ndarray) -> Section[Payload]:
        return Section(seq=push.seq, map_version=self.map_version, route=route, shards=shards, payload=push.payload)

    def acknowledge(self, section: Section[Payload]) -> int:
        """A section is applied, and all earlier pushes of its shards. Returns how many pushes this completed."""
        index = section.index
        self._acknowledged_seqs[index] = np.maximum(self._acknowledged_seqs[index], section.seq)
        for push in self._pending_pushes:
            if push.seq > section.seq:
                break
            push.in_flight = [other for other in push.in_flight if self._is_in_flight(push, other, section)]
        return self._drop_complete()

    def _is_in_flight(self, push: _PendingPush[Payload], section: Section[Payload], answered: Section[Payload]) -> bool:
        """Whether a section is still unanswered after `answered` was."""
        if section is answered:
            return False
        if section.map_version == answered.map_version and section.route.chain != answered.route.chain:
            return True  # routes of one map have no shard in common
        return bool(self._unanswered_mask(push, section.shards).any())

    def refuse(self, section: Section[Payload]) -> None:
        """A section will never be applied and is not sent again. Earlier pushes are not affected."""
        for push in self._pending_pushes:
            if push.seq == section.seq:
                if push.refused_mask is None:
                    push.refused_mask = np.zeros(len(self._acknowledged_seqs), bool)
                push.refused_mask[section.shards] = True
                push.in_flight = [other for other in push.in_flight if self._unanswered_mask(push, other.shards).any()]
        self._drop_complete()

    def install_map(self, map: ShardMap) -> list[Section[Payload]]:
        """Use a newer map. Returns what to send again under it, in order."""
        if map.version <= self.map_version:
            return []
        self.routing_table = RoutingTable.from_chains(map.chains)
        changed = np.array([epoch > self.map_version for epoch in map.epochs])
        changed |= np.array([old != new for old, new in zip(self._chains, map.chains, strict=True)])
        self.map_version, self._chains = map.version, map.chains
        self._unreachable_heads &= {server for chain in map.chains for server in chain}
        for push in self._pending_pushes:
            push.in_flight = [section for section in push.in_flight if not changed[section.shards].any()]
        return list(self._make_missing_sections())

    def mark_unreachable(self, head: str) -> None:
        """The connection to a head is lost: what was in flight may or may not have arrived."""
        self._unreachable_heads.add(head)
        for push in self._pending_pushes:
            push.in_flight = [section for section in push.in_flight if section.head != head]

    def mark_reachable(self, head: str) -> list[Section[Payload]]:
        """A head has a new connection. Returns what to send over it, in order, before anything else."""
        self._unreachable_heads.discard(head)
        return list(self._make_missing_sections())

    def _make_missing_sections(self) -> Iterator[Section[Payload]]:
        """Sections for all that is neither answered nor in flight nor for an unreachable head, push by push."""
        for push in self._pending_pushes:
            in_flight = np.zeros(len(self._acknowledged_seqs), bool)
            for section in push.in_flight:
                in_flight[section.shards] = True
            for route in self.routing_table.routes:
                shards = route.shards
                missing_shards = shards[self._unanswered_mask(push, shards) & ~in_flight[shards]]
                if len(missing_shards) and route.head not in self._unreachable_heads:
                    section = self._make_section(push, route, missing_shards)
                    push.in_flight.append(section)
                    yield section

    def _unanswered_mask(self, push: _PendingPush[Payload], shards: slice | np.ndarray) -> np.ndarray:
        """Which of `shards` have not answered this push."""
        unanswered = self._acknowledged_seqs[shards] < push.seq
        return unanswered if push.refused_mask is None else unanswered & ~push.refused_mask[shards]

    def _drop_complete(self) -> int:
        """Drop leading pushes of which nothing is in flight or unanswered. Returns how many."""
        dropped = 0
        while self._pending_pushes and not self._pending_pushes[0].in_flight:
            unanswered = self._unanswered_mask(self._pending_pushes[0], slice(None))
            if np.count_nonzero(unanswered):  # any() takes twice as long
                break
            self._pending_pushes.popleft()
            dropped += 1
        return dropped
