"""A worker's ids before they are sent: each once, in the order of the routes they take, gradients of duplicates added up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echelon.server import kernels as k
from echelon.server.protocol.hashing import bits_of
from echelon.server.protocol.specs import StoreError


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """Distinct ids by route, in a route as they first came: `ids[bounds[r]:bounds[r + 1]]` are route r's.

    The last two bounds are of those that have no route. `places[i]`: where the i-th id given lies in `ids`. `given`: all of them as they
    came, in bytes, which tell several times faster than arrays whether others are the same.
    """

    given: bytes
    ids: np.ndarray
    bounds: list[int]
    places: np.ndarray

    def of(self, route: int) -> slice:
        """Where a route's lie in `ids`; a number behind all routes stands for none."""
        first = min(route, len(self.bounds) - 2)
        return slice(self.bounds[first], self.bounds[first + 1])

    def sum(self, grads: np.ndarray) -> np.ndarray:
        """Gradients, a row per id given, as a row per id in `ids`; those of one id are added in the order given."""
        grads = np.ascontiguousarray(grads)
        if grads.ndim != 2 or len(grads) != len(self.places):
            raise StoreError(f"gradients: shape {grads.shape} for {len(self.places)} ids; expected one row per id")
        out = np.empty((len(self.ids), grads.shape[1]), grads.dtype)
        k.add_up(grads if grads.flags.writeable else grads.copy(), self.places, out)
        return out

    def expand(self, rows: np.ndarray) -> np.ndarray:
        """Rows in the order of `ids`, as the ids were given."""
        if len(rows) != len(self.ids):
            raise StoreError(f"rows: {len(rows)} for {len(self.ids)} distinct ids; expected one per id")
        out = np.empty((len(self.places), rows.shape[1]), rows.dtype)
        k.take(rows, self.places, out)
        return out


def group(ids: np.ndarray, route_of: np.ndarray, routes: int) -> Grouped:
    """`route_of`: the route of each shard, 65535 for none; `routes`: how many there are."""
    ids = np.ascontiguousarray(ids, np.int64).reshape(-1)
    ids = ids if ids.flags.writeable else ids.copy()
    route_of = np.ascontiguousarray(route_of, np.uint16)
    n = len(ids)
    distinct, places = np.empty(n, np.int64), np.empty(n, np.int32)
    bounds = np.zeros(routes + 2, np.int64)
    route_of = route_of if route_of.flags.writeable else route_of.copy()
    found = k.group(ids, table_for(n), np.uint64(64 - bits_of(len(route_of))), route_of, distinct, bounds, places)
    return Grouped(given=ids.tobytes(), ids=distinct[:found], bounds=bounds.tolist(), places=places)


def table_for(n: int) -> np.ndarray:
    """An empty hash table for n entries, at most half full."""
    return np.zeros(1 << max(4, (2 * n - 1).bit_length()), np.int32)
