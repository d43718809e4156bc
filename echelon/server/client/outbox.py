"""What a worker has pushed and not yet been answered: pure bookkeeping, no sockets, no clock.

Pushes are numbered 1, 2, ... and every push covers every shard, even those for which it holds nothing. A shard's acknowledged
pushes are therefore a prefix, and one number per shard says which. Four rules keep each push applied exactly once:

- sections for one head go over one connection, in the order in which they are given here;
- a section covers a whole route less what is acknowledged, so whatever makes a server refuse push 5 makes it refuse push 6;
- after a new map, sections in flight whose route it changes are given again, in order, before anything new;
- after a lost connection, all unanswered sections of that head are given again, in order.

The server skips what it already has, shard by shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from echelon.server.protocol.shard_sets import ShardSet

Payload = TypeVar("Payload")
_ALL_SHARDS = slice(None)


class MapView(Protocol):
    """Of the map, what an outbox reads."""

    @property
    def version(self) -> int: ...

    @property
    def chains(self) -> Sequence[Sequence[str]]:
        """Per shard: its servers, head first; none where all are lost."""
        ...

    @property
    def epochs(self) -> Sequence[int]:
        """Per shard: the version at which its head last changed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """Shards with the same chain: they share frames."""

    chain: tuple[str, ...]
    shard_set: ShardSet

    @property
    def shards(self) -> np.ndarray:
        """Their numbers, as frames name them."""
        return self.shard_set.wire_shards

    @property
    def head(self) -> str:
        """Who orders and answers."""
        return self.chain[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Section(Generic[Payload]):
    """The part of one push that goes to one route, under one version of the map."""

    seq: int
    map_version: int
    route: Route
    shards: np.ndarray
    payload: Payload

    @property
    def head(self) -> str:
        """The server it goes to."""
        return self.route.head

    @property
    def covers_route(self) -> bool:
        """Whether it covers all of its route (the common case, for which the client has its rows sorted already)."""
        return len(self.shards) == len(self.route.shards)

    @property
    def index(self) -> slice | np.ndarray:
        """What indexes arrays per shard."""
        return self.route.shard_set.index if self.covers_route else self.shards


@dataclass(slots=True)
class _PendingPush(Generic[Payload]):
    seq: int
    payload: Payload
    in_flight: list[Section[Payload]]
    #: Shards that answered that they will not take it; None: no shard did.
    refused_mask: np.ndarray | None = None


def build_routes(chains: Sequence[Sequence[str]]) -> tuple[Route, ...]:
    """The routes of a map, in the order of their first shards. Shards without a living replica are on none."""
    shards_by_chain: dict[tuple[str, ...], list[int]] = {}
    for shard, chain in enumerate(chains):
        if chain:
            shards_by_chain.setdefault(tuple(chain), []).append(shard)
    return tuple(
        Route(chain=chain, shard_set=ShardSet(np.array(shards, np.uint16))) for chain, shards in shards_by_chain.items()
    )


class Outbox(Generic[Payload]):
    """Numbers pushes, remembers what is unanswered, and says what to send (again). `Payload` is only carried."""

    def __init__(self, map: MapView) -> None:
        self.map_version = map.version
        self.routes = build_routes(map.chains)
        self.last_seq = 0
        self._chains: list[tuple[str, ...]] = [tuple(chain) for chain in map.chains]
        #: Per shard: the last push that is acknowledged; so are all before it.
        self._acknowledged_seqs = np.zeros(len(map.chains), np.int64)
        self._pending_pushes: deque[_PendingPush[Payload]] = deque()
        self._unreachable_heads: set[str] = set()

    def __len__(self) -> int:
        """How many pushes still want an answer of some shard."""
        return len(self._pending_pushes)

    @property
    def oldest_pending_seq(self) -> int | None:
        """The number of the first push that is not fully acknowledged."""
        return self._pending_pushes[0].seq if self._pending_pushes else None

    def push(self, payload: Payload) -> list[Section[Payload]]:
        """Number a push and cut it: what is to be sent now (nothing for a head whose connection is down)."""
        self.last_seq += 1
        push = _PendingPush(seq=self.last_seq, payload=payload, in_flight=[])
        self._pending_pushes.append(push)
        sections = [
            Section(seq=push.seq, map_version=self.map_version, route=route, shards=route.shards, payload=payload)
            for route in self.routes
            if route.head not in self._unreachable_heads
        ]
        push.in_flight.extend(sections)
        return sections

    def acknowledge(self, section: Section[Payload]) -> int:
        """A section is applied, and with it all earlier pushes of these shards. How many pushes became complete by it."""
        index = section.index
        self._acknowledged_seqs[index] = np.maximum(self._acknowledged_seqs[index], section.seq)
        for push in self._pending_pushes:
            if push.seq > section.seq:
                break
            push.in_flight = [other for other in push.in_flight if self._is_still_in_flight(push, other, section)]
        return self._drop_complete()

    def _is_still_in_flight(
        self, push: _PendingPush[Payload], section: Section[Payload], answered: Section[Payload]
    ) -> bool:
        """Whether a section still waits for its answer after `answered` has one."""
        if section is answered:
            return False
        if section.map_version == answered.map_version and section.route.chain != answered.route.chain:
            return True  # routes of one map have no shard in common
        return bool(self._unanswered_mask(push, section.shards).any())

    def refuse(self, section: Section[Payload]) -> int:
        """A section will never be applied (the server said why): it is not sent again. It says nothing of earlier pushes."""
        for push in self._pending_pushes:
            if push.seq == section.seq:
                if push.refused_mask is None:
                    push.refused_mask = np.zeros(len(self._acknowledged_seqs), bool)
                push.refused_mask[section.shards] = True
                push.in_flight = [other for other in push.in_flight if self._unanswered_mask(push, other.shards).any()]
        return self._drop_complete()

    def needs_newer_map(self, section: Section[Payload], version: int) -> bool:
        """A section was refused by a server whose map is at `version`. Whether that map is yet to come (else it is sent again already)."""
        return version > self.map_version

    def install_map(self, map: MapView) -> list[Section[Payload]]:
        """A newer map: what is to be sent again under it, in order."""
        if map.version <= self.map_version:
            return []
        old_version, self.map_version = self.map_version, map.version
        self.routes = build_routes(map.chains)
        old_chains, self._chains = self._chains, [tuple(chain) for chain in map.chains]
        changed = np.array([epoch > old_version for epoch in map.epochs])
        changed |= np.array([old != new for old, new in zip(old_chains, self._chains, strict=True)])
        self._unreachable_heads &= {server for chain in map.chains for server in chain}
        for push in self._pending_pushes:
            push.in_flight = [section for section in push.in_flight if not changed[section.shards].any()]
        return list(self._make_missing_sections())

    def mark_unreachable(self, head: str) -> None:
        """The connection to a head is gone: what was under way there may or may not have arrived."""
        self._unreachable_heads.add(head)
        for push in self._pending_pushes:
            push.in_flight = [section for section in push.in_flight if section.head != head]

    def mark_reachable(self, head: str) -> list[Section[Payload]]:
        """A new connection to a head: what is to be sent over it, in order, before anything else."""
        self._unreachable_heads.discard(head)
        return list(self._make_missing_sections())

    def _make_missing_sections(self) -> Iterator[Section[Payload]]:
        """Sections for all that is neither acknowledged nor under way nor for a head that is down, push by push."""
        for push in self._pending_pushes:
            in_flight = np.zeros(len(self._acknowledged_seqs), bool)
            for section in push.in_flight:
                in_flight[section.shards] = True
            for route in self.routes:
                shards = route.shards
                missing_shards = shards[self._unanswered_mask(push, shards) & ~in_flight[shards]]
                if len(missing_shards) and route.head not in self._unreachable_heads:
                    section = Section(
                        seq=push.seq,
                        map_version=self.map_version,
                        route=route,
                        shards=missing_shards,
                        payload=push.payload,
                    )
                    push.in_flight.append(section)
                    yield section

    def _unanswered_mask(self, push: _PendingPush[Payload], shards: slice | np.ndarray) -> np.ndarray:
        """Of `shards`, which have not answered this push."""
        unanswered = self._acknowledged_seqs[shards] < push.seq
        return unanswered if push.refused_mask is None else unanswered & ~push.refused_mask[shards]

    def _drop_complete(self) -> int:
        """Let complete pushes go, in order: those of which nothing is under way, nor wanted."""
        dropped = 0
        while self._pending_pushes and not self._pending_pushes[0].in_flight:
            if np.count_nonzero(
                self._unanswered_mask(self._pending_pushes[0], _ALL_SHARDS)
            ):  # any() takes twice as long
                break
            self._pending_pushes.popleft()
            dropped += 1
        return dropped
