"""A store of integers for tests of the protocol: one number per shard, exact sums, nothing compiled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from echelon.server.protocol.specs import StoreError
from echelon.server.store import SnapshotPart


class TinyStore:
    """Ids are shards; gradients are added."""

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards
        self.rows = np.zeros(num_shards, np.int64)
        self.lazy_tables: dict[str, Any] = {}

    def advance_lazy_table(self, name: str, shards: np.ndarray, lr: float | None) -> None:
        raise StoreError("no table here moves as a whole")

    def without_memory_limit(self) -> AbstractContextManager[None]:
        return nullcontext()

    def shards_of(self, name: str, ids: np.ndarray) -> np.ndarray:
        return ids % self.num_shards

    def check_operations(
        self, operations: Iterable[tuple[Any, ...]], step: int | None, rates: Mapping[str, Any] | None
    ) -> None:
        for name, _, values, *_ in operations:
            self._check(name, values)

    def _check(self, name: str, values: np.ndarray) -> None:
        if name != "t" or (values < 0).any():
            raise StoreError(f"{name}: {values}")

    def apply(
        self,
        name: str,
        ids: np.ndarray,
        grads: Any,
        *,
        lr: float | None,
        lsn: np.ndarray,
        step: int | None,
        ids_are_unique: bool = False,
    ) -> None:
        self._check(name, grads)
        np.add.at(self.rows, ids % self.num_shards, grads[:, 0])

    def assign(self, name: str, ids: np.ndarray, rows: np.ndarray, *, lsn: np.ndarray) -> None:
        self.rows[ids % self.num_shards] = rows[:, 0]

    def initialize_blocks(self, name: str, blocks: np.ndarray, values: Any, *, lsn: np.ndarray) -> None:
        raise StoreError("no blocks here")

    def read(self, name: str, ids: np.ndarray, wire_dtype: str) -> list[np.ndarray]:
        if name != "t":
            raise StoreError(f"{name}: no table of that name")
        return [self.rows[ids % self.num_shards][:, None]]

    def read_blocks(self, name: str, blocks: np.ndarray) -> list[np.ndarray]:
        raise StoreError("no blocks here")

    def changed_ids_until(
        self, name: str, shards: Any, since: np.ndarray, limit: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        return np.array(shards, np.int64), since

    def snapshot(self, shard: int) -> list[SnapshotPart]:
        return [({}, [self.rows[shard : shard + 1].copy()])]

    def install(self, shard: int, parts: Sequence[SnapshotPart]) -> None:
        self.rows[shard] = parts[0][1][0][0]

    def drop(self, shard: int) -> None:
        self.rows[shard] = 0

    def digest(self, shard: int) -> bytes:
        return self.rows[shard : shard + 1].tobytes()

    def expire(self, name: str, shards: Any, before_lsn: Any) -> int:
        return 0

    def stats(self) -> dict[str, Any]:
        return {}
