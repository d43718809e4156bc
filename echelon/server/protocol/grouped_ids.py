"""Deduplicate and group a worker's ids by route before sending them; add up the gradients of duplicates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echelon.server import kernels as k
from echelon.server.protocol.hashing import shard_bits, shard_of
from echelon.server.protocol.specs import StoreError


@dataclass(slots=True, kw_only=True, eq=False)
class GroupedIds:
    """Distinct ids by route, in each route in order of first occurrence: `ids[route_offsets[r]:route_offsets[r + 1]]` are route r's.

    The last range is that of ids without a route. `inverse[i]`: the position in `ids` of the i-th id. `input_bytes`: the ids as given, in
    bytes, which compare several times faster than arrays.
    """

    input_bytes: bytes
    ids: np.ndarray
    route_offsets: list[int]
    inverse: np.ndarray
    _shards: np.ndarray | None = None

    def shards(self, num_shards: int) -> np.ndarray:
        """The shard of each of `ids`."""
        if self._shards is None:
            self._shards = shard_of(self.ids, num_shards)
        return self._shards

    def route_slice(self, route: int) -> slice:
        """The range of a route in `ids`; any larger number means ids without a route."""
        index = min(route, len(self.route_offsets) - 2)
        return slice(self.route_offsets[index], self.route_offsets[index + 1])

    def sum_gradients(self, grads: np.ndarray) -> np.ndarray:
        """Gradients of the ids as given, as one row for each of `ids`; duplicates are added in their order."""
        grads = np.ascontiguousarray(grads)
        if grads.ndim != 2 or len(grads) != len(self.inverse):
            raise StoreError(f"gradients: shape {grads.shape} for {len(self.inverse)} ids; expected one row per id")
        out = np.empty((len(self.ids), grads.shape[1]), grads.dtype)
        k.segment_sum(grads if grads.flags.writeable else grads.copy(), self.inverse, out)
        return out

    def expand(self, rows: np.ndarray) -> np.ndarray:
        """Rows of `ids` as rows of the ids as given."""
        if len(rows) != len(self.ids):
            raise StoreError(f"rows: {len(rows)} for {len(self.ids)} distinct ids; expected one per id")
        out = np.empty((len(self.inverse), rows.shape[1]), rows.dtype)
        k.gather_rows(rows, self.inverse, out)
        return out


def group_by_route(ids: np.ndarray, route_of: np.ndarray, num_routes: int) -> GroupedIds:
    """`route_of`: the route of each shard, 65535 for none."""
    ids = np.ascontiguousarray(ids, np.int64).reshape(-1)
    ids = ids if ids.flags.writeable else ids.copy()
    distinct, inverse = np.empty(len(ids), np.int64), np.empty(len(ids), np.int32)
    table, shift = make_hash_table(len(ids)), np.uint64(64 - shard_bits(len(route_of)))
    route_offsets = np.zeros(num_routes + 2, np.int64)
    num_distinct = k.group_ids(ids, table, shift, route_of, distinct, route_offsets, inverse)
    offsets = route_offsets.tolist()
    return GroupedIds(input_bytes=ids.tobytes(), ids=distinct[:num_distinct], route_offsets=offsets, inverse=inverse)


def make_hash_table(count: int) -> np.ndarray:
    """An empty hash table that `count` entries fill at most by half."""
    return np.zeros(1 << max(4, (2 * count - 1).bit_length()), np.int32)
