"""What one replica holds of its shards: rows and blocks (in the store), log numbers, windows, clocks, gradients that wait for a commit.

Entries of a shard's log change it, here alone, and the same on every replica: frames whose first array is the cover.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from echelon.errors import ServerError
from echelon.server.protocol import wire
from echelon.server.protocol.shard_sets import ShardSet, all_set
from echelon.server.protocol.specs import check_learning_rate
from echelon.server.replica.dedup import NOT_COUNTED, DedupTable

SnapshotPart = tuple[dict[str, Any], list[np.ndarray]]
#: A table's gradients or rows (n, dim), or one array for each dense block.
Values = Any
#: What a push does, to which ids or blocks, with which values.
Operation = tuple[dict[str, Any], np.ndarray, Values]
_INT64 = np.dtype(np.int64)


class ReplicaStore(Protocol):
    """Of the store, what a replica calls."""

    def shards_of(self, name: str, ids: np.ndarray) -> np.ndarray: ...
    def check_operations(
        self, operations: Iterable[tuple[Any, ...]], step: int | None, rates: Mapping[str, Any] | None
    ) -> None: ...
    def without_memory_limit(self) -> AbstractContextManager[None]: ...
    def apply(
        self,
        name: str,
        ids: np.ndarray,
        grads: Values,
        *,
        lr: float | None,
        lsn: np.ndarray,
        step: int | None,
        ids_are_unique: bool = False,
    ) -> None: ...
    @property
    def lazy_tables(self) -> Mapping[str, Any]: ...
    def advance_lazy_table(self, name: str, shards: np.ndarray, lr: float | None) -> None: ...
    def assign(self, name: str, ids: np.ndarray, rows: np.ndarray, *, lsn: np.ndarray) -> None: ...
    def initialize_blocks(self, name: str, blocks: np.ndarray, values: Values, *, lsn: np.ndarray) -> None: ...
    def read(self, name: str, ids: np.ndarray, wire_dtype: str) -> list[np.ndarray]: ...
    def read_blocks(self, name: str, blocks: np.ndarray) -> list[np.ndarray]: ...
    def changed_ids_until(
        self, name: str, shards: Any, since: np.ndarray, limit: int | None
    ) -> tuple[np.ndarray, np.ndarray]: ...
    def snapshot(self, shard: int) -> list[SnapshotPart]: ...
    def install(self, shard: int, parts: Sequence[SnapshotPart]) -> None: ...
    def drop(self, shard: int) -> None: ...
    def digest(self, shard: int) -> bytes: ...
    def expire(self, name: str, shards: Any, before_lsn: Any) -> int: ...
    def stats(self) -> dict[str, Any]: ...


class ReplicaDiverged(ServerError):  # noqa: N818 (what happened; its base says error)
    """An entry that does not follow what this replica holds: it must not go on as one."""


class PendingPush:
    """A push of a synchronous step that waits for the commit, as far as `shards` are concerned."""

    __slots__ = ("frame", "shards")

    def __init__(self, frame: wire.Frame, shards: np.ndarray) -> None:
        self.frame, self.shards = frame, shards

    @property
    def sort_key(self) -> tuple[str, int, int]:
        """By what replicas sort before they add up."""
        meta = self.frame.meta
        return meta["worker"], meta["incarnation"], meta["seq"]


def parse_operations(frame: wire.Frame) -> list[Operation]:
    """The operations of a push."""
    operations: list[Operation] = []
    arrays, index = frame.arrays, 1
    for op in frame.meta["ops"]:
        ids = arrays[index]
        if ids.dtype != _INT64 or ids.ndim != 1:
            raise wire.WireError("PUSH: ids and blocks are one row of 64-bit integers")
        if "table" in op:
            operations.append((op, ids, arrays[index + 1]))
            index += 2
        else:
            operations.append((op, ids, arrays[index + 1 : index + 1 + len(ids)]))
            index += 1 + len(ids)
    if index != len(arrays):
        raise wire.WireError(f"PUSH: {len(arrays)} arrays where its operations have {index}")
    return operations


def target_name(op: dict[str, Any]) -> str:
    """What an operation is on."""
    name = op.get("table") or op.get("dense") or op.get("set")
    if not isinstance(name, str):
        raise wire.WireError(f"PUSH: an operation on {name!r}; it names a table or a dense parameter")
    return name


def _operation_kind(op: dict[str, Any]) -> str:
    return "set" if "set" in op else "assign" if op.get("assign") else "apply"


def _is_assignment(op: dict[str, Any]) -> bool:
    """Whether it does not wait for a step's commit: values that are set."""
    return "set" in op or bool(op.get("assign"))


class ShardState:
    """All shards of one replica; arrays are per shard."""

    def __init__(self, store: ReplicaStore, num_shards: int) -> None:
        self.store, self.num_shards = store, num_shards
        self.lsn = np.zeros(num_shards, np.int64)
        #: The map's version under which the last entry was ordered. (stamp, lsn) names a state: each version has one head per shard.
        self.entry_version = np.zeros(num_shards, np.int64)
        self.dedup = DedupTable(num_shards)
        self.pending_pushes: dict[int, list[PendingPush]] = {}

    def check_sequence(self, frame: wire.Frame, shard_set: ShardSet) -> tuple[np.ndarray | None, bool]:
        """Of a push: per covered shard whether it is the next one there (None: on all); and whether some shard misses one before it."""
        meta = frame.meta
        slot = self.dedup.get_slot(meta["worker"], meta["incarnation"])
        last_seq, seq = self.dedup.last_seq[slot][shard_set.index], meta["seq"]
        is_next = last_seq == seq - 1
        if all_set(is_next):
            return None, False
        is_ahead = last_seq + 1 < seq
        if is_ahead.any():
            gap_allowed = (
                self.dedup.is_rolled_back[shard_set.index]
                & ~self.dedup.pushed_since_rollback[slot][shard_set.index]
                & is_ahead
            )
            return is_next | gap_allowed, bool((is_ahead & ~gap_allowed).any())
        return is_next, False

    def was_refused(self, frame: wire.Frame, shard_set: ShardSet) -> bool:
        """Whether a push that is sent again was counted, but not applied."""
        slot = self.dedup.get_slot(frame.meta["worker"], frame.meta["incarnation"])
        return bool((self.dedup.last_noop_seq[slot][shard_set.index] == frame.meta["seq"]).any())

    def apply_push(
        self, frame: wire.Frame, shard_set: ShardSet, *, version: int, covers_all_shards: bool, is_noop: bool
    ) -> None:
        """Apply a push to `shard_set` (`covers_all_shards`: that is all that it covers). `is_noop`: only count it. An error: nothing has changed."""
        meta, index = frame.meta, shard_set.index
        rates = meta.get("lr")
        if rates and not is_noop:
            for name, rate in rates.items():
                check_learning_rate(name, rate)
        lazy_table_rates = self._lazy_table_rates(meta) if self.store.lazy_tables and not is_noop else {}
        self.lsn[index] += 1
        if (meta["ops"] or lazy_table_rates) and not is_noop:
            try:
                self._apply_operations(frame, None if covers_all_shards else shard_set.shards)
            except BaseException:
                self.lsn[index] -= 1
                raise
            if meta.get("aggregate"):
                if lazy_table_rates or not all(_is_assignment(op) for op in meta["ops"]):
                    self.pending_pushes.setdefault(meta["step"], []).append(PendingPush(frame, shard_set.shards))
            else:
                for name, rate in lazy_table_rates.items():
                    self.store.advance_lazy_table(name, shard_set.shards, rate)
        self.entry_version[index] = version
        dedup = self.dedup
        slot = dedup.get_slot(meta["worker"], meta["incarnation"])
        dedup.last_seq[slot, index] = meta["seq"]
        dedup.pushed_since_rollback[slot, index] = True
        if is_noop:
            dedup.last_noop_seq[slot, index] = meta["seq"]
        if meta.get("tick"):
            clocks = dedup.clocks[slot]
            clocks[index] = np.maximum(clocks[index], meta["step"] + 1)

    def _apply_operations(self, frame: wire.Frame, shards: np.ndarray | None) -> None:
        meta, step = frame.meta, frame.meta["step"] + 1
        is_aggregated = bool(meta.get("aggregate"))
        operations = self._restrict_operations(frame, shards)
        if is_aggregated or len(operations) > 1:
            # One operation alone is refused before anything changes; of several none may be applied if one is refused.
            checked = [(target_name(op), ids, values, _operation_kind(op)) for op, ids, values in operations]
            self.store.check_operations(checked, step, meta.get("lr"))
        rates = meta.get("lr") or {}
        for index, (op, ids, values) in enumerate(operations):
            name = target_name(op)
            try:
                if "set" in op:
                    self.store.initialize_blocks(name, ids, values, lsn=self.lsn)
                elif op.get("assign"):
                    self.store.assign(name, ids, values, lsn=self.lsn)
                elif not is_aggregated:
                    self.store.apply(
                        name, ids, values, lr=rates.get(name), lsn=self.lsn, step=step, ids_are_unique=True
                    )
            except Exception as error:
                if index == 0:
                    raise
                raise ReplicaDiverged(f"half of push {meta['seq']} is applied, and then: {error}") from error

    def _lazy_table_rates(self, meta: Mapping[str, Any]) -> dict[str, float]:
        """The tables of which a push moves all rows, on every shard that it covers: it brings their rates."""
        rates = meta.get("lr") or {}
        for op in meta["ops"]:
            if op.get("table") in self.store.lazy_tables and not op.get("assign") and op["table"] not in rates:
                raise ServerError(
                    f"{op['table']}: a push moves all of its rows, and has no rate for them; push with lr="
                )
        return {name: rates[name] for name in sorted(rates) if name in self.store.lazy_tables}

    def commit_step(self, frame: wire.Frame, shard_set: ShardSet, *, version: int) -> None:
        """Add up what is pending of a step, in the order of workers, and apply it once."""
        self.lsn[shard_set.index] += 1
        self.entry_version[shard_set.index] = version
        step = frame.meta["step"]
        is_covered = np.zeros(self.num_shards, bool)
        is_covered[shard_set.index] = True
        by_target: dict[str, tuple[dict[str, Any], list[np.ndarray], list[Values], float | None]] = {}
        lazy_table_updates: dict[str, tuple[float, np.ndarray]] = {}
        remaining = []
        for push in sorted(self.pending_pushes.pop(step, []), key=lambda item: item.sort_key):
            shards = push.shards[is_covered[push.shards]]
            if len(shards) < len(push.shards):
                remaining.append(PendingPush(push.frame, push.shards[~is_covered[push.shards]]))
            if not len(shards):
                continue
            for name, lr in self._lazy_table_rates(push.frame.meta).items() if self.store.lazy_tables else ():
                lazy_table_updates.setdefault(name, (lr, np.zeros(self.num_shards, bool)))[1][shards] = True
            for op, ids, values in self._restrict_operations(push.frame, shards):
                if _is_assignment(op):
                    continue
                rates = push.frame.meta.get("lr") or {}
                entry = by_target.setdefault(target_name(op), (op, [], [], rates.get(target_name(op))))
                entry[1].append(ids)
                entry[2].append(values)
        if remaining:
            self.pending_pushes[step] = remaining
        for name, (op, id_arrays, grads, rate) in sorted(by_target.items()):
            all_grads: Values = (
                np.concatenate(grads) if "table" in op else [item for grad_list in grads for item in grad_list]
            )
            # What was acknowledged is applied, whatever the memory's bound.
            with self.store.without_memory_limit():
                self.store.apply(name, np.concatenate(id_arrays), all_grads, lr=rate, lsn=self.lsn, step=step + 1)
        for name, (lr, is_updated) in lazy_table_updates.items():
            self.store.advance_lazy_table(name, np.flatnonzero(is_updated), lr)

    def add_worker(self, frame: wire.Frame, shard_set: ShardSet, *, version: int) -> None:
        """Count a worker from a clock on, where it is not counted yet. Arrays: cover, clocks."""
        self.lsn[shard_set.index] += 1
        self.entry_version[shard_set.index] = version
        entry_shards, clocks = frame.arrays
        slot = self.dedup.get_slot(frame.meta["worker"], frame.meta["incarnation"])
        start_clocks = np.zeros(self.num_shards, np.int64)
        start_clocks[entry_shards] = clocks
        own_clocks = self.dedup.clocks[slot]
        own_clocks[shard_set.index] = np.where(
            own_clocks[shard_set.index] == NOT_COUNTED, start_clocks[shard_set.index], own_clocks[shard_set.index]
        )

    def forget_workers(self, frame: wire.Frame, shard_set: ShardSet, *, version: int) -> None:
        """Forget workers' lives that are over. `horizon`, `retained`: as in the map."""
        self.lsn[shard_set.index] += 1
        self.entry_version[shard_set.index] = version
        horizon, retained = int(frame.meta["horizon"]), {int(incarnation) for incarnation in frame.meta["kept"]}
        self.dedup.forget_expired(
            lambda incarnation: incarnation <= horizon and incarnation not in retained, shard_set.index
        )

    def expire_rows(self, frame: wire.Frame, shard_set: ShardSet, *, version: int) -> int:
        """Forget rows that nobody has written to since a log number. Arrays: cover, log numbers."""
        self.lsn[shard_set.index] += 1
        self.entry_version[shard_set.index] = version
        before_lsn = np.zeros(self.num_shards, np.int64)
        before_lsn[frame.arrays[0]] = frame.arrays[1]
        return self.store.expire(frame.meta["table"], shard_set.shards, before_lsn[shard_set.shards])

    def _restrict_operations(self, frame: wire.Frame, shards: np.ndarray | None) -> list[Operation]:
        """The operations of a push as far as they are on these shards (None: on all)."""
        if shards is None:
            return parse_operations(frame)
        operations: list[Operation] = []
        is_selected = np.zeros(self.num_shards, bool)
        is_selected[shards] = True
        for op, ids, values in parse_operations(frame):
            on_shards = is_selected[self.store.shards_of(target_name(op), ids)]
            if on_shards.all():
                operations.append((op, ids, values))
            elif on_shards.any():
                kept_values = (
                    values[on_shards]
                    if "table" in op
                    else [value for value, keep in zip(values, on_shards, strict=True) if keep]
                )
                operations.append((op, ids[on_shards], kept_values))
        return operations

    def snapshot(self, shard: int) -> list[SnapshotPart]:
        """Everything of one shard at this moment; the first part is what is not the store's."""
        frames = []
        for push in (
            pending_push
            for step in sorted(self.pending_pushes)
            for pending_push in sorted(self.pending_pushes[step], key=lambda item: item.sort_key)
        ):
            if shard in push.shards:
                operations = self._restrict_operations(push.frame, np.array([shard]))
                arrays = [np.array([shard], np.uint16)]
                for op, ids, values in operations:
                    arrays += [ids, values] if "table" in op else [ids, *values]
                meta = push.frame.meta | {"ops": [op for op, _, _ in operations]}
                frames.append(wire.join_buffers(wire.encode(wire.PUSH, 0, meta, arrays)))
        header = {
            "lsn": int(self.lsn[shard]),
            "stamp": int(self.entry_version[shard]),
            "windows": self.dedup.export_shard(shard),
            "restored": bool(self.dedup.is_rolled_back[shard]),
            "reached": int(self.dedup.departed_max_clock[shard]),
        }
        return [(header, frames), *self.store.snapshot(shard)]

    def install(self, shard: int, parts: Sequence[SnapshotPart]) -> None:
        """Replace one shard by a snapshot."""
        self.drop(shard)
        header, frames = parts[0]
        self.lsn[shard], self.entry_version[shard] = header["lsn"], header["stamp"]
        self.dedup.import_shard(
            shard,
            header["windows"],
            is_rolled_back=bool(header["restored"]),
            departed_max_clock=int(header.get("reached", 0)),
        )
        for raw in frames:
            frame = wire.parse(raw)
            self.pending_pushes.setdefault(frame.meta["step"], []).append(PendingPush(frame, np.array([shard])))
        with self.store.without_memory_limit():
            self.store.install(shard, parts[1:])

    def drop(self, shard: int) -> None:
        """Hold nothing of one shard."""
        self.lsn[shard] = self.entry_version[shard] = 0
        self.dedup.clear_shard(shard)
        for step in list(self.pending_pushes):
            remaining = [
                PendingPush(push.frame, push.shards[push.shards != shard]) for push in self.pending_pushes[step]
            ]
            self.pending_pushes[step] = [push for push in remaining if len(push.shards)]
            if not self.pending_pushes[step]:
                del self.pending_pushes[step]
        self.store.drop(shard)

    def digest(self, shard: int) -> bytes:
        """Equal on equal replicas, and on those alone."""
        pending_keys = sorted(
            (step, *push.sort_key)
            for step, pushes in self.pending_pushes.items()
            for push in pushes
            if shard in push.shards
        )
        dedup_state = [int(self.dedup.departed_max_clock[shard]), self.dedup.export_shard(shard)]
        text = json.dumps([int(self.lsn[shard]), int(self.entry_version[shard]), dedup_state, pending_keys])
        return hashlib.sha256(text.encode() + self.store.digest(shard)).digest()
