"""What a worker pulls and pushes, cut by route: arrays sorted once, of which each route's frame takes slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from echelon.server.client.outbox import Route
from echelon.server.protocol.grouped_ids import GroupedIds, group_by_route
from echelon.server.protocol.hashing import block_shards, shard_of
from echelon.server.protocol.specs import BLOCK_SIZE, Dense, Table
from echelon.server.protocol.wire import ChunkedArray
from echelon.server.protocol.wire_dtypes import dequantize

#: Which rows of a parcel: a slice where a route's lie together, else their numbers.
RowIndex = slice | np.ndarray
#: In place of a route's number: the shard has no living replica.
NO_ROUTE = 65535
#: Bytes of rows that one frame brings at most: frames have a limit (wire.MAX_FRAME), and a server sends them one at a time.
MAX_ROWS_BYTES = 64 << 20
_EMPTY_MASK = np.zeros(0, bool)
_NO_SHARDS = np.empty(0, np.uint16)


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTable:
    """The routes of one map, by shard; NOWHERE for shards on none.

    `numbered_routes`: all routes with their numbers, and, if some shards are on none, NOWHERE and None. `route_numbers`: a route's, by its id.
    """

    routes: tuple[Route, ...]
    route_of_shard: np.ndarray
    numbered_routes: tuple[tuple[int, Route | None], ...]
    route_numbers: Mapping[int, int]

    @classmethod
    def from_routes(cls, routes: Sequence[Route], num_shards: int) -> RoutingTable:
        """Which of these routes each of so many shards is on."""
        route_of_shard = np.full(num_shards, NO_ROUTE, np.uint16)
        for number, route in enumerate(routes):
            route_of_shard[route.shards] = number
        unrouted = [(NO_ROUTE, None)] if (route_of_shard == NO_ROUTE).any() else []
        return cls(
            routes=tuple(routes),
            route_of_shard=route_of_shard,
            numbered_routes=(*enumerate(routes), *unrouted),
            route_numbers={id(route): number for number, route in enumerate(routes)},
        )

    @property
    def num_shards(self) -> int:
        """How many there are."""
        return len(self.route_of_shard)

    def group_ids(self, ids: np.ndarray) -> GroupedIds:
        """Each id once, by route."""
        return group_by_route(ids, self.route_of_shard, len(self.routes))

    def split_by_route(self, shards: np.ndarray) -> Iterator[tuple[Route | None, np.ndarray]]:
        """Places in `shards` by the route of the shard; None: they are on no route."""
        route_numbers = self.route_of_shard[shards]
        for number in np.unique(route_numbers):
            yield (self.routes[number] if number != NO_ROUTE else None), np.flatnonzero(route_numbers == number)


@dataclass(slots=True, eq=False)
class TablePush:
    """A table's part of a push: each id once, gradients added up, by the routes of the map at that time."""

    spec: Table
    grouped_ids: GroupedIds
    values: np.ndarray
    _id_shards: np.ndarray | None = None

    def select(self, route_number: int | None, shard_mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids and gradients of a route by its number, or of the shards in `shard_mask`."""
        ids = self.grouped_ids.ids
        if route_number is not None:
            rows: RowIndex = self.grouped_ids.route_slice(route_number)
        else:
            if self._id_shards is None:
                self._id_shards = shard_of(ids, len(shard_mask))
            rows = np.flatnonzero(shard_mask[self._id_shards])
        return ids[rows], self.values[rows]


@dataclass(slots=True, eq=False)
class DensePush:
    """A dense parameter's part of a push."""

    spec: Dense
    values: np.ndarray
    block_shards: np.ndarray

    def select(self, shard_mask: np.ndarray) -> list[np.ndarray]:
        """The blocks of the shards in `shard_mask`, and each block's gradient."""
        blocks = np.flatnonzero(shard_mask[self.block_shards])
        return [blocks, *(self.values[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] for block in blocks)]


@dataclass(slots=True, eq=False)
class Push:
    """A push as a worker made it."""

    routing_table: RoutingTable
    meta: dict[str, Any]
    tables: list[TablePush]
    dense: list[DensePush]
    #: Values are to be set, not gradients to be applied.
    is_assignment: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of ids and values."""
        table_bytes = sum(part.values.nbytes + part.grouped_ids.ids.nbytes for part in self.tables)
        return table_bytes + sum(part.values.nbytes for part in self.dense)

    def _shard_mask(self, shards: np.ndarray) -> np.ndarray:
        mask = np.zeros(self.routing_table.num_shards, bool)
        mask[shards] = True
        return mask

    def build_frame(self, route: Route, shards: np.ndarray) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
        """The ops of a frame for these shards, and its arrays."""
        route_number = self.routing_table.route_numbers.get(id(route)) if len(shards) == len(route.shards) else None
        shard_mask = self._shard_mask(shards) if route_number is None or self.dense else _EMPTY_MASK
        ops: list[dict[str, Any]] = []
        arrays = [shards]
        for table_push in self.tables:
            ids, values = table_push.select(route_number, shard_mask)
            if len(ids):
                ops.append({"table": table_push.spec.name} | ({"assign": True} if self.is_assignment else {}))
                arrays += [ids, values]
        for dense_push in self.dense:
            blocks, *block_values = dense_push.select(shard_mask)
            if len(blocks):
                ops.append({"set" if self.is_assignment else "dense": dense_push.spec.name})
                arrays += [blocks, *block_values]
        return ops, arrays


@dataclass(slots=True, eq=False)
class TablePull:
    """A table's part of a pull: each id once, by route, and the rows as they come in."""

    spec: Table
    wire_dtype: str
    grouped_ids: GroupedIds
    rows: np.ndarray
    _id_shards: np.ndarray | None = None

    def id_shards(self, num_shards: int) -> np.ndarray:
        """The shard of each id."""
        if self._id_shards is None:
            self._id_shards = shard_of(self.grouped_ids.ids, num_shards)
        return self._id_shards

    @property
    def can_receive_in_place(self) -> bool:
        """Whether rows arrive as they are wanted, so that they can be received in place."""
        return self.wire_dtype == self.spec.dtype

    def store_rows(self, index: RowIndex, rows: np.ndarray) -> None:
        """Rows that came in. All of them at once stay where they lie: that may be memory that the server wrote."""
        destination = self.rows
        if (
            isinstance(index, slice)
            and index == slice(0, len(destination))
            and (rows.shape, rows.dtype) == (destination.shape, destination.dtype)
        ):
            self.rows = rows
        else:
            destination[index] = rows


@dataclass(slots=True, eq=False)
class DensePull:
    """A dense parameter's part of a pull, received in place."""

    spec: Dense
    values: np.ndarray
    block_shards: np.ndarray

    def block_destinations(self, blocks: np.ndarray) -> ChunkedArray:
        """Where these blocks go: neighbours together."""
        run_ends = np.flatnonzero(np.diff(blocks, append=-1) != 1)
        first_blocks, last_blocks = blocks[np.concatenate(([0], run_ends[:-1] + 1))], blocks[run_ends]
        runs = zip(first_blocks.tolist(), last_blocks.tolist(), strict=True)
        return ChunkedArray([self.values[first * BLOCK_SIZE : (last + 1) * BLOCK_SIZE] for first, last in runs])


@dataclass(slots=True, eq=False)
class PullPart:
    """What one frame of a pull asks for."""

    pull: Pull
    shards: np.ndarray
    tables: list[tuple[TablePull, RowIndex]]
    dense: list[tuple[DensePull, np.ndarray]]
    #: Where the answer's arrays were received, by their place in it.
    _destinations: list[np.ndarray | ChunkedArray | None] = field(default_factory=list)

    def build_frame(self) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
        """Its ops and arrays."""
        ops: list[dict[str, Any]] = [
            {"table": pulled.spec.name, "wire": pulled.wire_dtype} for pulled, _ in self.tables
        ]
        ops += [{"dense": pulled.spec.name} for pulled, _ in self.dense]
        arrays = [pulled.grouped_ids.ids[rows] for pulled, rows in self.tables] + [blocks for _, blocks in self.dense]
        return ops, [self.shards, *arrays]

    def choose_destinations(
        self, meta: Mapping[str, Any], layouts: Sequence[Any]
    ) -> list[np.ndarray | ChunkedArray | None]:
        """Where the arrays of the answer go; None: into an array of their own first."""
        destinations: list[np.ndarray | ChunkedArray | None] = []
        for table, rows in self.tables:
            destinations.append(table.rows[rows] if table.can_receive_in_place and isinstance(rows, slice) else None)
            if table.wire_dtype in ("i2", "i1"):
                destinations.append(None)
        for dense, blocks in self.dense:
            destinations.append(dense.block_destinations(blocks))
        fits = len(destinations) == len(layouts) and all(
            destination is None or (destination.dtype == dtype and destination.shape == shape)
            for destination, (dtype, shape) in zip(destinations, layouts, strict=True)
        )
        self._destinations = destinations if fits else [None] * len(layouts)
        return self._destinations

    def store_reply(self, arrays: Sequence[Any]) -> None:
        """The answer is here: put what is not in its place there."""
        destinations = self._destinations if len(self._destinations) == len(arrays) else [None] * len(arrays)
        received = iter(zip(arrays, destinations, strict=True))
        for table, rows in self.tables:
            array, destination = next(received)
            scales = [next(received)[0]] if table.wire_dtype in ("i2", "i1") else []
            if array is destination:
                continue
            table.store_rows(
                rows, array if table.can_receive_in_place else dequantize([array, *scales], table.spec.dtype)
            )
        for dense, blocks in self.dense:
            array, destination = next(received)
            if array is not destination:
                for run in dense.block_destinations(blocks).chunks:
                    run[:], array = array[: len(run)], array[len(run) :]


@dataclass(slots=True, eq=False)
class Pull:
    """Everything that one call pulls. `pending_parts` counts the parts that are not here."""

    step: int
    staleness: int | None
    tables: dict[str, TablePull] = field(default_factory=dict)
    dense: dict[str, DensePull] = field(default_factory=dict)
    pending_parts: int = 0
    #: What a server refused of it.
    error: Exception | None = None

    def split_by_route(self, routing_table: RoutingTable) -> list[tuple[Route | None, PullPart]]:
        """Cut by route, the first time: rows lie together, and a route's frame covers all of it. Large answers come in several."""
        parts: list[tuple[Route | None, PullPart]] = []
        for route_number, route in routing_table.numbered_routes:
            remaining_bytes = 0
            for pulled, rows, nbytes in self._bounded_ranges(routing_table, route_number):
                if nbytes > remaining_bytes:
                    part, remaining_bytes = (
                        PullPart(self, route.shards if route else _NO_SHARDS, [], []),
                        MAX_ROWS_BYTES,
                    )
                    parts.append((route, part))
                remaining_bytes -= nbytes
                if isinstance(pulled, TablePull):
                    part.tables.append((pulled, rows))
                else:
                    assert isinstance(rows, np.ndarray)
                    part.dense.append((pulled, rows))
        return parts

    def _bounded_ranges(
        self, routing_table: RoutingTable, route_number: int
    ) -> Iterator[tuple[TablePull | DensePull, RowIndex, int]]:
        """A route's share, in pieces of at most LARGE bytes."""
        for table in self.tables.values():
            rows, row_bytes = table.grouped_ids.route_slice(route_number), max(1, table.rows.itemsize * table.spec.dim)
            count = max(1, MAX_ROWS_BYTES // row_bytes)
            for first in range(rows.start, rows.stop, count):
                end = min(rows.stop, first + count)
                yield table, slice(first, end), (end - first) * row_bytes
        for dense in self.dense.values():
            blocks = np.flatnonzero(routing_table.route_of_shard[dense.block_shards] == route_number)
            count = max(1, MAX_ROWS_BYTES // (BLOCK_SIZE * dense.values.itemsize))
            for first in range(0, len(blocks), count):
                block_range = blocks[first : first + count]
                yield dense, block_range, len(block_range) * BLOCK_SIZE * dense.values.itemsize

    def reroute_part(self, part: PullPart, routing_table: RoutingTable) -> Iterator[tuple[Route | None, PullPart]]:
        """Cut a part by the routes of another map."""
        parts: dict[int, PullPart] = {}
        routes: dict[int, Route | None] = {}

        def part_of(route: Route | None) -> PullPart:
            routes[id(route)] = route
            return parts.setdefault(id(route), PullPart(self, np.empty(0, np.uint16), [], []))

        for table, rows in part.tables:
            row_numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            for route, positions in routing_table.split_by_route(
                table.id_shards(routing_table.num_shards)[row_numbers]
            ):
                part_of(route).tables.append((table, row_numbers[positions]))
        for dense, blocks in part.dense:
            for route, positions in routing_table.split_by_route(dense.block_shards[blocks]):
                part_of(route).dense.append((dense, blocks[positions]))
        for route_id, new_part in parts.items():
            shards = [table.id_shards(routing_table.num_shards)[rows] for table, rows in new_part.tables]
            shards += [dense.block_shards[blocks] for dense, blocks in new_part.dense]
            new_part.shards = np.unique(np.concatenate(shards)).astype(np.uint16)
            yield routes[route_id], new_part


def shards_of_blocks(spec: Dense, num_shards: int) -> np.ndarray:
    """The shard of each block."""
    return block_shards(spec, num_shards)
