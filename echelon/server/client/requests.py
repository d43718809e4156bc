"""What a worker pulls and pushes, cut by route: arrays sorted once, of which each route's frame takes slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from echelon.server.client.combine import Grouped, group
from echelon.server.client.outbox import Route
from echelon.server.protocol.hashing import block_shards, shard_of
from echelon.server.protocol.specs import BLOCK, Dense, Table
from echelon.server.protocol.wire import Pieces
from echelon.server.store.narrow_numbers import widen

#: Which rows of a parcel: a slice where a route's lie together, else their numbers.
Rows = slice | np.ndarray
#: In place of a route's number: the shard has no living replica.
NOWHERE = 65535
#: Bytes of rows that one frame brings at most: frames have a limit (wire.MAX_FRAME), and a server sends them one at a time.
LARGE = 64 << 20
_NONE = np.zeros(0, bool)
_NOTHING = np.empty(0, np.uint16)


@dataclass(frozen=True, slots=True, eq=False)
class Roads:
    """The routes of one map, by shard; NOWHERE for shards on none.

    `ways`: all routes with their numbers, and, if some shards are on none, NOWHERE and None. `numbers`: a route's, by its id.
    """

    routes: tuple[Route, ...]
    of: np.ndarray
    ways: tuple[tuple[int, Route | None], ...]
    numbers: Mapping[int, int]

    @classmethod
    def of_map(cls, routes: Sequence[Route], shards: int) -> Roads:
        """Which of these routes each of so many shards is on."""
        of = np.full(shards, NOWHERE, np.uint16)
        for number, route in enumerate(routes):
            of[route.shards] = number
        nowhere = [(NOWHERE, None)] if (of == NOWHERE).any() else []
        return cls(
            routes=tuple(routes),
            of=of,
            ways=(*enumerate(routes), *nowhere),
            numbers={id(route): number for number, route in enumerate(routes)},
        )

    @property
    def shards(self) -> int:
        """How many there are."""
        return len(self.of)

    def sort(self, ids: np.ndarray) -> Grouped:
        """Each id once, by route."""
        return group(ids, self.of, len(self.routes))

    def split(self, shards: np.ndarray) -> Iterator[tuple[Route | None, np.ndarray]]:
        """Places in `shards` by the route of the shard; None: they are on no route."""
        taken = self.of[shards]
        for number in np.unique(taken):
            yield (self.routes[number] if number != NOWHERE else None), np.flatnonzero(taken == number)


@dataclass(slots=True, eq=False)
class Grads:
    """A table's part of a push: each id once, gradients added up, by the routes of the map at that time."""

    table: Table
    order: Grouped
    values: np.ndarray
    _shards: np.ndarray | None = None

    def part(self, number: int | None, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids and gradients of a route by its number, or of the shards in `mask`."""
        ids = self.order.ids
        if number is not None:
            rows: Rows = self.order.of(number)
        else:
            if self._shards is None:
                self._shards = shard_of(ids, len(mask))
            rows = np.flatnonzero(mask[self._shards])
        return ids[rows], self.values[rows]


@dataclass(slots=True, eq=False)
class DenseGrad:
    """A dense parameter's part of a push."""

    spec: Dense
    values: np.ndarray
    shards: np.ndarray

    def part(self, mask: np.ndarray) -> list[np.ndarray]:
        """The blocks of the shards in `mask`, and each block's gradient."""
        blocks = np.flatnonzero(mask[self.shards])
        return [blocks, *(self.values[block * BLOCK : (block + 1) * BLOCK] for block in blocks)]


@dataclass(slots=True, eq=False)
class Parcel:
    """A push as a worker made it."""

    roads: Roads
    meta: dict[str, Any]
    tables: list[Grads]
    dense: list[DenseGrad]
    #: Values are to be set, not gradients to be applied.
    sets: bool = False

    @property
    def size(self) -> int:
        """Bytes of ids and values."""
        sparse = sum(each.values.nbytes + each.order.ids.nbytes for each in self.tables)
        return sparse + sum(each.values.nbytes for each in self.dense)

    def _mask(self, cover: np.ndarray) -> np.ndarray:
        mask = np.zeros(self.roads.shards, bool)
        mask[cover] = True
        return mask

    def part(self, route: Route, cover: np.ndarray) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
        """The ops of a frame for these shards, and its arrays."""
        number = self.roads.numbers.get(id(route)) if len(cover) == len(route.shards) else None
        mask = self._mask(cover) if number is None or self.dense else _NONE
        ops: list[dict[str, Any]] = []
        arrays = [cover]
        for grads in self.tables:
            ids, values = grads.part(number, mask)
            if len(ids):
                ops.append({"table": grads.table.name} | ({"assign": True} if self.sets else {}))
                arrays += [ids, values]
        for dense in self.dense:
            blocks, *values_of = dense.part(mask)
            if len(blocks):
                ops.append({"set" if self.sets else "dense": dense.spec.name})
                arrays += [blocks, *values_of]
        return ops, arrays


@dataclass(slots=True, eq=False)
class Wanted:
    """A table's part of a pull: each id once, by route, and the rows as they come in."""

    table: Table
    wire: str
    order: Grouped
    rows: np.ndarray
    _shards: np.ndarray | None = None

    def shards(self, count: int) -> np.ndarray:
        """The shard of each id."""
        if self._shards is None:
            self._shards = shard_of(self.order.ids, count)
        return self._shards

    @property
    def plain(self) -> bool:
        """Whether rows arrive as they are wanted, so that they can be received in place."""
        return self.wire == self.table.dtype

    def put(self, at: Rows, rows: np.ndarray) -> None:
        """Rows that came in. All of them at once stay where they lie: that may be memory that the server wrote."""
        mine = self.rows
        if isinstance(at, slice) and at == slice(0, len(mine)) and (rows.shape, rows.dtype) == (mine.shape, mine.dtype):
            self.rows = rows
        else:
            mine[at] = rows


@dataclass(slots=True, eq=False)
class WantedDense:
    """A dense parameter's part of a pull, received in place."""

    spec: Dense
    values: np.ndarray
    shards: np.ndarray

    def runs(self, blocks: np.ndarray) -> Pieces:
        """Where these blocks go: neighbours together."""
        ends = np.flatnonzero(np.diff(blocks, append=-1) != 1)
        firsts, lasts = blocks[np.concatenate(([0], ends[:-1] + 1))], blocks[ends]
        pairs = zip(firsts.tolist(), lasts.tolist(), strict=True)
        return Pieces([self.values[first * BLOCK : (last + 1) * BLOCK] for first, last in pairs])


@dataclass(slots=True, eq=False)
class Part:
    """What one frame of a pull asks for."""

    pull: Pull
    cover: np.ndarray
    tables: list[tuple[Wanted, Rows]]
    dense: list[tuple[WantedDense, np.ndarray]]
    #: Where the answer's arrays were received, by their place in it.
    _placed: list[np.ndarray | Pieces | None] = field(default_factory=list)

    def frame(self) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
        """Its ops and arrays."""
        ops: list[dict[str, Any]] = [{"table": each.table.name, "wire": each.wire} for each, _ in self.tables]
        ops += [{"dense": each.spec.name} for each, _ in self.dense]
        arrays = [each.order.ids[rows] for each, rows in self.tables] + [blocks for _, blocks in self.dense]
        return ops, [self.cover, *arrays]

    def places(self, meta: Mapping[str, Any], described: Sequence[Any]) -> list[np.ndarray | Pieces | None]:
        """Where the arrays of the answer go; None: into an array of their own first."""
        found: list[np.ndarray | Pieces | None] = []
        for each, rows in self.tables:
            found.append(each.rows[rows] if each.plain and isinstance(rows, slice) else None)
            if each.wire in ("i2", "i1"):
                found.append(None)
        for dense, blocks in self.dense:
            found.append(dense.runs(blocks))
        fits = len(found) == len(described) and all(
            place is None or (place.dtype == dtype and place.shape == shape)
            for place, (dtype, shape) in zip(found, described, strict=True)
        )
        self._placed = found if fits else [None] * len(described)
        return self._placed

    def take(self, arrays: Sequence[Any]) -> None:
        """The answer is here: put what is not in its place there."""
        placed = self._placed if len(self._placed) == len(arrays) else [None] * len(arrays)
        rest = iter(zip(arrays, placed, strict=True))
        for each, rows in self.tables:
            got, place = next(rest)
            scales = [next(rest)[0]] if each.wire in ("i2", "i1") else []
            if got is place:
                continue
            each.put(rows, got if each.plain else widen([got, *scales], each.table.dtype))
        for dense, blocks in self.dense:
            got, place = next(rest)
            if got is not place:
                for run in dense.runs(blocks).pieces:
                    run[:], got = got[: len(run)], got[len(run) :]


@dataclass(slots=True, eq=False)
class Pull:
    """Everything that one call pulls. `open` counts the parts that are not here."""

    step: int
    bound: int | None
    tables: dict[str, Wanted] = field(default_factory=dict)
    dense: dict[str, WantedDense] = field(default_factory=dict)
    open: int = 0
    #: What a server refused of it.
    error: Exception | None = None

    def parts(self, roads: Roads) -> list[tuple[Route | None, Part]]:
        """Cut by route, the first time: rows lie together, and a route's frame covers all of it. Large answers come in several."""
        found: list[tuple[Route | None, Part]] = []
        for number, route in roads.ways:
            room = 0
            for each, rows, size in self._pieces(roads, number):
                if size > room:
                    part, room = Part(self, route.shards if route else _NOTHING, [], []), LARGE
                    found.append((route, part))
                room -= size
                if isinstance(each, Wanted):
                    part.tables.append((each, rows))
                else:
                    assert isinstance(rows, np.ndarray)
                    part.dense.append((each, rows))
        return found

    def _pieces(self, roads: Roads, number: int) -> Iterator[tuple[Wanted | WantedDense, Rows, int]]:
        """A route's share, in pieces of at most LARGE bytes."""
        for wanted in self.tables.values():
            rows, width = wanted.order.of(number), max(1, wanted.rows.itemsize * wanted.table.dim)
            count = max(1, LARGE // width)
            for first in range(rows.start, rows.stop, count):
                last = min(rows.stop, first + count)
                yield wanted, slice(first, last), (last - first) * width
        for dense in self.dense.values():
            blocks = np.flatnonzero(roads.of[dense.shards] == number)
            count = max(1, LARGE // (BLOCK * dense.values.itemsize))
            for first in range(0, len(blocks), count):
                piece = blocks[first : first + count]
                yield dense, piece, len(piece) * BLOCK * dense.values.itemsize

    def again(self, part: Part, roads: Roads) -> Iterator[tuple[Route | None, Part]]:
        """Cut a part by the routes of another map."""
        found: dict[int, Part] = {}
        routes: dict[int, Route | None] = {}

        def of(route: Route | None) -> Part:
            routes[id(route)] = route
            return found.setdefault(id(route), Part(self, np.empty(0, np.uint16), [], []))

        for wanted, rows in part.tables:
            numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            for route, places in roads.split(wanted.shards(roads.shards)[numbers]):
                of(route).tables.append((wanted, numbers[places]))
        for dense, blocks in part.dense:
            for route, places in roads.split(dense.shards[blocks]):
                of(route).dense.append((dense, blocks[places]))
        for key, each in found.items():
            shards = [wanted.shards(roads.shards)[rows] for wanted, rows in each.tables]
            shards += [dense.shards[blocks] for dense, blocks in each.dense]
            each.cover = np.unique(np.concatenate(shards)).astype(np.uint16)
            yield routes[key], each


def shards_of_blocks(spec: Dense, shards: int) -> np.ndarray:
    """The shard of each block."""
    return block_shards(spec, shards)
