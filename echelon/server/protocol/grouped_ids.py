"""A worker's ids before they are sent: each once, in the order of the routes they take, gradients of duplicates added up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echelon.server import kernels as k
from echelon.server.protocol.hashing import shard_bits
from echelon.server.protocol.specs import StoreError


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedIds:
    """Distinct ids by route, in a route as they first came: `ids[bounds[r]:bounds[r + 1]]` are route r's.

    The last two bounds are of those that have no route. `places[i]`: where the i-th id given lies in `ids`. `input_bytes`: all of them as they
    came, in bytes, which tell several times faster than arrays whether others are the same.
    """

    input_bytes: bytes
    ids: np.ndarray
    route_offsets: list[int]
    inverse: np.ndarray

    def route_slice(self, route: int) -> slice:
        """Where a route's lie in `ids`; a number behind all routes stands for none."""
        index = min(route, len(self.route_offsets) - 2)
        return slice(self.route_offsets[index], self.route_offsets[index + 1])

    def sum_gradients(self, grads: np.ndarray) -> np.ndarray:
        """Gradients, a row per id given, as a row per id in `ids`; those of one id are added in the order given."""
        grads = np.ascontiguousarray(grads)
        if grads.ndim != 2 or len(grads) != len(self.inverse):
            raise StoreError(f"gradients: shape {grads.shape} for {len(self.inverse)} ids; expected one row per id")
        out = np.empty((len(self.ids), grads.shape[1]), grads.dtype)
        k.segment_sum(grads if grads.flags.writeable else grads.copy(), self.inverse, out)
        return out

    def expand(self, rows: np.ndarray) -> np.ndarray:
        """Rows in the order of `ids`, as the ids were given."""
        if len(rows) != len(self.ids):
            raise StoreError(f"rows: {len(rows)} for {len(self.ids)} distinct ids; expected one per id")
        out = np.empty((len(self.inverse), rows.shape[1]), rows.dtype)
        k.gather_rows(rows, self.inverse, out)
        return out


def group_by_route(ids: np.ndarray, route_of: np.ndarray, num_routes: int) -> GroupedIds:
    """`route_of`: the route of each shard, 65535 for none; `num_routes`: how many there are."""
    ids = np.ascontiguousarray(ids, np.int64).reshape(-1)
    ids = ids if ids.flags.writeable else ids.copy()
    route_of = np.ascontiguousarray(route_of, np.uint16)
    count = len(ids)
    distinct, inverse = np.empty(count, np.int64), np.empty(count, np.int32)
    route_offsets = np.zeros(num_routes + 2, np.int64)
    route_of = route_of if route_of.flags.writeable else route_of.copy()
    num_distinct = k.group_ids(
        ids,
        make_hash_table(count),
        np.uint64(64 - shard_bits(len(route_of))),
        route_of,
        distinct,
        route_offsets,
        inverse,
    )
    return GroupedIds(
        input_bytes=ids.tobytes(), ids=distinct[:num_distinct], route_offsets=route_offsets.tolist(), inverse=inverse
    )


def make_hash_table(count: int) -> np.ndarray:
    """An empty hash table for n entries, at most half full."""
    return np.zeros(1 << max(4, (2 * count - 1).bit_length()), np.int32)
