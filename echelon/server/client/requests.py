"""A worker's pulls and pushes, split by route: arrays are grouped once, and each route's frame takes slices of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from echelon.server.client.routing import NO_ROUTE, Route, RoutingTable
from echelon.server.protocol.grouped_ids import GroupedIds
from echelon.server.protocol.specs import BLOCK_SIZE, Dense, Table
from echelon.server.protocol.wire import ChunkedArray
from echelon.server.protocol.wire_dtypes import dequantize

#: Which rows of a table: a slice if a route's lie together, else their numbers.
RowIndex = slice | np.ndarray
#: Where to receive an array; None: in a new one.
Destination = np.ndarray | ChunkedArray | None
#: Bytes of rows in one frame at most: frames have a limit (wire.MAX_FRAME_BYTES), and a server sends them one at a time.
MAX_ROWS_BYTES = 64 << 20
_NO_SHARDS = np.empty(0, np.uint16)


@dataclass(slots=True, eq=False)
class TablePush:
    """A table's part of a push: distinct ids by route, and their summed gradients."""

    spec: Table
    grouped_ids: GroupedIds
    values: np.ndarray

    def select(self, route_number: int | None, shard_mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids and gradients of a route, or of the shards in `shard_mask` if it is None."""
        rows: RowIndex
        if route_number is not None:
            rows = self.grouped_ids.route_slice(route_number)
        else:
            rows = np.flatnonzero(shard_mask[self.grouped_ids.shards(len(shard_mask))])
        return self.grouped_ids.ids[rows], self.values[rows]


@dataclass(slots=True, eq=False)
class DensePush:
    """A dense parameter's part of a push."""

    spec: Dense
    values: np.ndarray
    block_shards: np.ndarray

    def select(self, shard_mask: np.ndarray) -> list[np.ndarray]:
        """The numbers of the blocks in `shard_mask`, and each block's gradient."""
        blocks = np.flatnonzero(shard_mask[self.block_shards])
        return [blocks, *(self.values[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] for block in blocks)]


@dataclass(slots=True, eq=False)
class Push:
    """One call of `push` or `assign`."""

    routing_table: RoutingTable
    meta: dict[str, Any]
    tables: list[TablePush]
    dense: list[DensePush]
    #: Set the values instead of applying gradients.
    is_assignment: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of ids and values."""
        table_bytes = sum(part.values.nbytes + part.grouped_ids.ids.nbytes for part in self.tables)
        return table_bytes + sum(part.values.nbytes for part in self.dense)

    def build_frame(self, route: Route, shards: np.ndarray) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
        """The ops and arrays of a frame for these shards of a route."""
        is_whole_route = len(shards) == len(route.shards) and self.routing_table.has_route(route)
        route_number = route.number if is_whole_route else None
        shard_mask = np.zeros(self.routing_table.num_shards if self.dense or not is_whole_route else 0, bool)
        if len(shard_mask):
            shard_mask[shards] = True
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
    """A table's part of a pull: distinct ids by route, and their rows."""

    spec: Table
    wire_dtype: str
    grouped_ids: GroupedIds
    rows: np.ndarray

    @property
    def can_receive_in_place(self) -> bool:
        """Whether rows arrive in the dtype of the table."""
        return self.wire_dtype == self.spec.dtype

    def store_rows(self, index: RowIndex, rows: np.ndarray) -> None:
        """Store received rows. An array of all rows is kept as it is: it may be shared memory that the server wrote."""
        is_all = isinstance(index, slice) and index == slice(0, len(self.rows))
        if is_all and (rows.shape, rows.dtype) == (self.rows.shape, self.rows.dtype):
            self.rows = rows
        else:
            self.rows[index] = rows


@dataclass(slots=True, eq=False)
class DensePull:
    """A dense parameter's part of a pull, received in place."""

    spec: Dense
    values: np.ndarray
    block_shards: np.ndarray

    def block_destinations(self, blocks: np.ndarray) -> ChunkedArray:
        """Where to receive these blocks: adjacent ones as one array."""
        run_ends = np.flatnonzero(np.diff(blocks, append=-1) != 1)
        first_blocks, last_blocks = blocks[np.concatenate(([0], run_ends[:-1] + 1))], blocks[run_ends]
        runs = zip(first_blocks.tolist(), last_blocks.tolist(), strict=True)
        return ChunkedArray([self.values[first * BLOCK_SIZE : (last + 1) * BLOCK_SIZE] for first, last in runs])


@dataclass(slots=True, eq=False)
class PullPart:
    """One frame of a pull."""

    pull: Pull
    shards: np.ndarray
    tables: list[tuple[TablePull, RowIndex]]
    dense: list[tuple[DensePull, np.ndarray]]
    #: Where the arrays of the reply were received.
    _destinations: list[Destination] = field(default_factory=list)

    def build_frame(self) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
        """The ops and arrays of its frame."""
        ops: list[dict[str, Any]] = [{"table": table.spec.name, "wire": table.wire_dtype} for table, _ in self.tables]
        ops += [{"dense": dense.spec.name} for dense, _ in self.dense]
        arrays = [table.grouped_ids.ids[rows] for table, rows in self.tables] + [blocks for _, blocks in self.dense]
        return ops, [self.shards, *arrays]

    def choose_destinations(self, meta: Mapping[str, Any], layouts: Sequence[Any]) -> list[Destination]:
        """Where to receive the arrays of the reply."""
        destinations: list[Destination] = []
        for table, rows in self.tables:
            destinations.append(table.rows[rows] if table.can_receive_in_place and isinstance(rows, slice) else None)
            if table.wire_dtype in ("i2", "i1"):
                destinations.append(None)
        for dense, blocks in self.dense:
            destinations.append(dense.block_destinations(blocks))
        fits = len(destinations) == len(layouts) and all(
            array is None or (array.dtype, array.shape) == layout
            for array, layout in zip(destinations, layouts, strict=True)
        )
        self._destinations = destinations if fits else [None] * len(layouts)
        return self._destinations

    def store_reply(self, arrays: Sequence[Any]) -> None:
        """Store the arrays of the reply that were not received in place."""
        destinations = self._destinations if len(self._destinations) == len(arrays) else [None] * len(arrays)
        received = iter(zip(arrays, destinations, strict=True))
        for table, rows in self.tables:
            array, destination = next(received)
            scales = [next(received)[0]] if table.wire_dtype in ("i2", "i1") else []
            if array is not destination:
                is_final = table.can_receive_in_place
                table.store_rows(rows, array if is_final else dequantize([array, *scales], table.spec.dtype))
        for dense, blocks in self.dense:
            array, destination = next(received)
            if array is not destination:
                for run in dense.block_destinations(blocks).chunks:
                    run[:], array = array[: len(run)], array[len(run) :]


@dataclass(slots=True, eq=False)
class Pull:
    """One call of `pull`. `pending_parts`: how many parts have no reply."""

    step: int
    staleness: int | None
    tables: dict[str, TablePull] = field(default_factory=dict)
    dense: dict[str, DensePull] = field(default_factory=dict)
    pending_parts: int = 0
    #: Why a server refused a part.
    error: Exception | None = None

    def split_by_route(self, routing_table: RoutingTable) -> list[tuple[Route | None, PullPart]]:
        """Split a new pull by route, and large replies into several parts: each route's rows lie together."""
        parts: list[tuple[Route | None, PullPart]] = []
        for route_number, route in routing_table.numbered_routes:
            remaining_bytes = 0
            for pulled, rows, nbytes in self._bounded_ranges(routing_table, route_number):
                if nbytes > remaining_bytes:
                    part = PullPart(self, route.shards if route else _NO_SHARDS, [], [])
                    parts.append((route, part))
                    remaining_bytes = MAX_ROWS_BYTES
                remaining_bytes -= nbytes
                if isinstance(pulled, TablePull):
                    part.tables.append((pulled, rows))
                else:
                    assert isinstance(rows, np.ndarray)
                    part.dense.append((pulled, rows))
        return parts

    def _bounded_ranges(self, routing: RoutingTable, number: int) -> Iterator[_Range]:
        """A route's rows and blocks, and the bytes of each range."""
        for pulled in self.tables.values():
            rows, row_bytes = pulled.grouped_ids.route_slice(number), max(1, pulled.rows.itemsize * pulled.spec.dim)
            count = max(1, MAX_ROWS_BYTES // row_bytes)
            for first in range(rows.start, rows.stop, count):
                end = min(rows.stop, first + count)
                yield pulled, slice(first, end), (end - first) * row_bytes
        for dense in self.dense.values():
            blocks = np.flatnonzero(routing.route_of_shard[dense.block_shards] == number)
            block_bytes = BLOCK_SIZE * dense.values.itemsize
            count = max(1, MAX_ROWS_BYTES // block_bytes)
            for first in range(0, len(blocks), count):
                yield dense, blocks[first : first + count], len(blocks[first : first + count]) * block_bytes

    def reroute_part(self, part: PullPart, routing_table: RoutingTable) -> Iterator[tuple[Route | None, PullPart]]:
        """Split a part by the routes of another map."""
        parts: dict[int, PullPart] = {}
        shards: dict[int, list[np.ndarray]] = {}

        def split(item_shards: np.ndarray) -> Iterator[tuple[PullPart, np.ndarray]]:
            for number, positions in routing_table.split_by_route(item_shards):
                shards.setdefault(number, []).append(item_shards[positions])
                yield parts.setdefault(number, PullPart(self, _NO_SHARDS, [], [])), positions

        for table, rows in part.tables:
            row_numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
            for new_part, positions in split(table.grouped_ids.shards(routing_table.num_shards)[row_numbers]):
                new_part.tables.append((table, row_numbers[positions]))
        for dense, blocks in part.dense:
            for new_part, positions in split(dense.block_shards[blocks]):
                new_part.dense.append((dense, blocks[positions]))
        for number, new_part in parts.items():
            new_part.shards = np.unique(np.concatenate(shards[number])).astype(np.uint16)
            yield (routing_table.routes[number] if number != NO_ROUTE else None), new_part


_Range = tuple[TablePull | DensePull, RowIndex, int]
