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

from echelon.server.protocol.shard_sets import Cover

Payload = TypeVar("Payload")
_ALL = slice(None)


class Routed(Protocol):
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
    cover: Cover

    @property
    def shards(self) -> np.ndarray:
        """Their numbers, as frames name them."""
        return self.cover.wire

    @property
    def head(self) -> str:
        """Who orders and answers."""
        return self.chain[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Section(Generic[Payload]):
    """The part of one push that goes to one route, under one version of the map."""

    seq: int
    version: int
    route: Route
    cover: np.ndarray
    payload: Payload

    @property
    def head(self) -> str:
        """The server it goes to."""
        return self.route.head

    @property
    def whole(self) -> bool:
        """Whether it covers all of its route (the common case, for which the client has its rows sorted already)."""
        return len(self.cover) == len(self.route.shards)

    @property
    def at(self) -> slice | np.ndarray:
        """What indexes arrays per shard."""
        return self.route.cover.at if self.whole else self.cover


@dataclass(slots=True)
class _Push(Generic[Payload]):
    seq: int
    payload: Payload
    flying: list[Section[Payload]]
    #: Shards that answered that they will not take it; None: no shard did.
    refused: np.ndarray | None = None


def routes_of(chains: Sequence[Sequence[str]]) -> tuple[Route, ...]:
    """The routes of a map, in the order of their first shards. Shards without a living replica are on none."""
    members: dict[tuple[str, ...], list[int]] = {}
    for shard, chain in enumerate(chains):
        if chain:
            members.setdefault(tuple(chain), []).append(shard)
    return tuple(Route(chain=chain, cover=Cover(np.array(shards, np.uint16))) for chain, shards in members.items())


class Outbox(Generic[Payload]):
    """Numbers pushes, remembers what is unanswered, and says what to send (again). `Payload` is only carried."""

    def __init__(self, map: Routed) -> None:
        self.version = map.version
        self.routes = routes_of(map.chains)
        self.last = 0
        self._chains: list[tuple[str, ...]] = [tuple(chain) for chain in map.chains]
        #: Per shard: the last push that is acknowledged; so are all before it.
        self._done = np.zeros(len(map.chains), np.int64)
        self._pushes: deque[_Push[Payload]] = deque()
        self._down: set[str] = set()

    def __len__(self) -> int:
        """How many pushes still want an answer of some shard."""
        return len(self._pushes)

    @property
    def oldest(self) -> int | None:
        """The number of the first push that is not fully acknowledged."""
        return self._pushes[0].seq if self._pushes else None

    def push(self, payload: Payload) -> list[Section[Payload]]:
        """Number a push and cut it: what is to be sent now (nothing for a head whose connection is down)."""
        self.last += 1
        push = _Push(seq=self.last, payload=payload, flying=[])
        self._pushes.append(push)
        sections = [
            Section(seq=push.seq, version=self.version, route=route, cover=route.shards, payload=payload)
            for route in self.routes
            if route.head not in self._down
        ]
        push.flying.extend(sections)
        return sections

    def acknowledge(self, section: Section[Payload]) -> int:
        """A section is applied, and with it all earlier pushes of these shards. How many pushes became complete by it."""
        at = section.at
        self._done[at] = np.maximum(self._done[at], section.seq)
        for push in self._pushes:
            if push.seq > section.seq:
                break
            push.flying = [each for each in push.flying if self._flies(push, each, section)]
        return self._settle()

    def _flies(self, push: _Push[Payload], each: Section[Payload], answered: Section[Payload]) -> bool:
        """Whether a section still waits for its answer after `answered` has one."""
        if each is answered:
            return False
        if each.version == answered.version and each.route.chain != answered.route.chain:
            return True  # routes of one map have no shard in common
        return bool(self._wants(push, each.cover).any())

    def refuse(self, section: Section[Payload]) -> int:
        """A section will never be applied (the server said why): it is not sent again. It says nothing of earlier pushes."""
        for push in self._pushes:
            if push.seq == section.seq:
                if push.refused is None:
                    push.refused = np.zeros(len(self._done), bool)
                push.refused[section.cover] = True
                push.flying = [each for each in push.flying if self._wants(push, each.cover).any()]
        return self._settle()

    def stale(self, section: Section[Payload], version: int) -> bool:
        """A section was refused by a server whose map is at `version`. Whether that map is yet to come (else it is sent again already)."""
        return version > self.version

    def install(self, map: Routed) -> list[Section[Payload]]:
        """A newer map: what is to be sent again under it, in order."""
        if map.version <= self.version:
            return []
        since, self.version = self.version, map.version
        self.routes = routes_of(map.chains)
        before, self._chains = self._chains, [tuple(chain) for chain in map.chains]
        moved = np.array([epoch > since for epoch in map.epochs])
        moved |= np.array([old != new for old, new in zip(before, self._chains, strict=True)])
        self._down &= {server for chain in map.chains for server in chain}
        for push in self._pushes:
            push.flying = [each for each in push.flying if not moved[each.cover].any()]
        return list(self._missing())

    def lose(self, head: str) -> None:
        """The connection to a head is gone: what was under way there may or may not have arrived."""
        self._down.add(head)
        for push in self._pushes:
            push.flying = [each for each in push.flying if each.head != head]

    def regain(self, head: str) -> list[Section[Payload]]:
        """A new connection to a head: what is to be sent over it, in order, before anything else."""
        self._down.discard(head)
        return list(self._missing())

    def _missing(self) -> Iterator[Section[Payload]]:
        """Sections for all that is neither acknowledged nor under way nor for a head that is down, push by push."""
        for push in self._pushes:
            flying = np.zeros(len(self._done), bool)
            for section in push.flying:
                flying[section.cover] = True
            for route in self.routes:
                shards = route.shards
                cover = shards[self._wants(push, shards) & ~flying[shards]]
                if len(cover) and route.head not in self._down:
                    section = Section(
                        seq=push.seq, version=self.version, route=route, cover=cover, payload=push.payload
                    )
                    push.flying.append(section)
                    yield section

    def _wants(self, push: _Push[Payload], shards: slice | np.ndarray) -> np.ndarray:
        """Of `shards`, which have not answered this push."""
        waiting = self._done[shards] < push.seq
        return waiting if push.refused is None else waiting & ~push.refused[shards]

    def _settle(self) -> int:
        """Let complete pushes go, in order: those of which nothing is under way, nor wanted."""
        settled = 0
        while self._pushes and not self._pushes[0].flying:
            if np.count_nonzero(self._wants(self._pushes[0], _ALL)):  # any() takes twice as long
                break
            self._pushes.popleft()
            settled += 1
        return settled
