"""The contents of one replica's shards: rows and blocks (in the store), log numbers, deduplication, clocks, pushes that await a commit.

Entries of a shard's log change it, the same on every replica: frames whose first array is the shards that they cover.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import TYPE_CHECKING, Any

import numpy as np

from echelon.errors import ServerError
from echelon.server.protocol import wire
from echelon.server.protocol.shard_sets import ShardSet, all_set
from echelon.server.protocol.specs import check_learning_rate
from echelon.server.replica.dedup import NOT_COUNTED, DedupTable
from echelon.server.store import SnapshotPart

if TYPE_CHECKING:  # without numba there is none
    from echelon.server.store.store import ParameterStore

Values = Any  # gradients or rows of a table (n, dim), or one array for each dense block
Operation = tuple[dict[str, Any], np.ndarray, Values]  # one operation of a push, its ids or blocks, and its values
_INT64 = np.dtype(np.int64)


class ReplicaDiverged(ServerError):  # noqa: N818 (what happened; its base says error)
    """An entry does not follow from what this replica holds: it must stop."""


@dataclass(slots=True, eq=False)
class PendingPush:
    """A push of a synchronous step that awaits its commit on these shards."""

    frame: wire.Frame
    shards: np.ndarray

    @property
    def sort_key(self) -> tuple[str, int, int]:
        """The order in which all replicas sum."""
        meta = self.frame.meta
        return meta["worker"], meta["incarnation"], meta["seq"]


def parse_operations(frame: wire.Frame) -> list[Operation]:
    """The operations of a push."""
    operations: list[Operation] = []
    arrays, index = frame.arrays, 1
    for op in frame.meta["ops"]:
        ids = arrays[index]
        if ids.dtype != _INT64 or ids.ndim != 1:
            raise wire.WireError("PUSH: ids and blocks are one-dimensional int64 arrays")
        values = arrays[index + 1] if "table" in op else arrays[index + 1 : index + 1 + len(ids)]
        operations.append((op, ids, values))
        index += 2 if "table" in op else 1 + len(ids)
    if index != len(arrays):
        raise wire.WireError(f"PUSH: {len(arrays)} arrays, but its operations have {index}")
    return operations


def target_name(op: dict[str, Any]) -> str:
    """The table or dense parameter of an operation."""
    name = op.get("table") or op.get("dense") or op.get("set")
    if not isinstance(name, str):
        raise wire.WireError(f"PUSH: an operation on {name!r}, which names no table or dense parameter")
    return name


def _operation_kind(op: dict[str, Any]) -> str:
    """What the store does: "apply" gradients, "assign" rows, or "set" the first values of blocks."""
    return "set" if "set" in op else "assign" if op.get("assign") else "apply"


def covers_frame(shard_set: ShardSet, frame: wire.Frame) -> bool:
    """Whether `shard_set`, some of the shards of a frame, are all of them."""
    return len(shard_set) == len(frame.arrays[0])


class ShardState:
    """All shards of one replica. Arrays are per shard."""

    def __init__(self, store: ParameterStore, num_shards: int) -> None:
        self.store, self.num_shards = store, num_shards
        self.lsn = np.zeros(num_shards, np.int64)
        #: The map version under which the last entry was ordered. Each version has one head per shard, so (version, lsn) names a state.
        self.entry_version = np.zeros(num_shards, np.int64)
        self.dedup = DedupTable(num_shards)
        self.pending_pushes: dict[int, list[PendingPush]] = {}

    def check_sequence(self, frame: wire.Frame, shard_set: ShardSet) -> tuple[np.ndarray | None, bool]:
        """Per shard of a push, whether it is the worker's next one there (None: on all); and whether some shard lacks an earlier one."""
        meta = frame.meta
        slot = self.dedup.get_slot(meta["worker"], meta["incarnation"])
        last_seq, seq = self.dedup.last_seq[slot][shard_set.index], meta["seq"]
        is_next = last_seq == seq - 1
        if all_set(is_next):
            return None, False
        is_ahead = last_seq + 1 < seq
        if is_ahead.any():
            has_pushed = self.dedup.pushed_since_rollback[slot][shard_set.index]
            gap_allowed = self.dedup.is_rolled_back[shard_set.index] & ~has_pushed & is_ahead
            return is_next | gap_allowed, bool((is_ahead & ~gap_allowed).any())
        return is_next, False

    def has_pending(self, shard_set: ShardSet, before_step: float = float("inf")) -> bool:
        """Whether gradients of earlier steps await their commit on these shards."""
        earlier = (pushes for step, pushes in self.pending_pushes.items() if step < before_step)
        return any(np.isin(push.shards, shard_set.shards).any() for pushes in earlier for push in pushes)

    def was_refused(self, frame: wire.Frame, shard_set: ShardSet) -> bool:
        """Whether a push that is sent again was counted, but not applied."""
        slot = self.dedup.get_slot(frame.meta["worker"], frame.meta["incarnation"])
        return bool((self.dedup.last_noop_seq[slot][shard_set.index] == frame.meta["seq"]).any())

    def apply_push(self, frame: wire.Frame, shard_set: ShardSet, *, version: int, is_noop: bool) -> None:
        """Apply a push to `shard_set`, all or a part of its shards; only count it if `is_noop`. An error changes nothing."""
        meta, index = frame.meta, shard_set.index
        rates = meta.get("lr")
        if rates and not is_noop:
            for name, rate in rates.items():
                check_learning_rate(name, rate)
        lazy_table_rates = self._lazy_table_rates(meta) if self.store.lazy_tables and not is_noop else {}
        self.lsn[index] += 1
        if (meta["ops"] or lazy_table_rates) and not is_noop:
            try:
                self._apply_operations(frame, None if covers_frame(shard_set, frame) else shard_set.shards)
            except BaseException:
                self.lsn[index] -= 1
                raise
            if meta.get("aggregate"):
                if lazy_table_rates or not all(_operation_kind(op) != "apply" for op in meta["ops"]):
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
            # The store refuses a single operation before it changes anything; of several, all are checked before the first is applied.
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
                    lr = rates.get(name)
                    self.store.apply(name, ids, values, lr=lr, lsn=self.lsn, step=step, ids_are_unique=True)
            except Exception as error:
                if index == 0:
                    raise
                raise ReplicaDiverged(f"push {meta['seq']} is applied in part, and then: {error}") from error

    def _lazy_table_rates(self, meta: Mapping[str, Any]) -> dict[str, float]:
        """The learning rates of lazy tables: a push moves all of their rows on every shard that it covers."""
        rates = meta.get("lr") or {}
        for op in meta["ops"]:
            if op.get("table") in self.store.lazy_tables and not op.get("assign") and op["table"] not in rates:
                raise ServerError(f"{op['table']}: its rule moves every row, which needs a rate; push with lr=")
        return {name: rates[name] for name in sorted(rates) if name in self.store.lazy_tables}

    def _restrict_operations(self, frame: wire.Frame, shards: np.ndarray | None) -> list[Operation]:
        """The operations of a push restricted to these shards (None: all)."""
        if shards is None:
            return parse_operations(frame)
        operations: list[Operation] = []
        is_selected = np.zeros(self.num_shards, bool)
        is_selected[shards] = True
        for op, ids, values in parse_operations(frame):
            selected = is_selected[self.store.shards_of(target_name(op), ids)]
            if selected.all():
                operations.append((op, ids, values))
            elif selected.any():
                some: Values = values[selected] if "table" in op else list(compress(values, selected))
                operations.append((op, ids[selected], some))
        return operations

    def apply_entry(self, frame: wire.Frame, shard_set: ShardSet, *, version: int) -> None:
        """Apply an entry of the head's own."""
        meta, index, per_shard = frame.meta, shard_set.index, np.zeros(self.num_shards, np.int64)
        if frame.kind not in (wire.COMMIT_STEP, wire.ADD_WORKER, wire.FORGET_WORKERS, wire.EXPIRE):
            raise wire.WireError(f"{wire.KIND_NAMES.get(frame.kind, frame.kind)} is not a log entry")
        if frame.kind in (wire.ADD_WORKER, wire.EXPIRE):
            per_shard[frame.arrays[0]] = frame.arrays[1]
        self.lsn[index] += 1
        self.entry_version[index] = version
        if frame.kind == wire.COMMIT_STEP:
            self._commit_step(meta["step"], shard_set)
        elif frame.kind == wire.ADD_WORKER:  # from a clock on, where it does not count yet
            clocks = self.dedup.clocks[self.dedup.get_slot(meta["worker"], meta["incarnation"])]
            clocks[index] = np.where(clocks[index] == NOT_COUNTED, per_shard[index], clocks[index])
        elif frame.kind == wire.FORGET_WORKERS:
            horizon, retained = int(meta["horizon"]), set(map(int, meta["kept"]))
            self.dedup.forget_expired(lambda incarnation: incarnation <= horizon and incarnation not in retained, index)
        else:  # rows that were last written before a log number
            self.store.expire(meta["table"], shard_set.shards, per_shard[shard_set.shards])

    def _commit_step(self, step: int, shard_set: ShardSet) -> None:
        """Sum the pending gradients of a step in the order of workers, and apply them once."""
        grads_by_target: dict[str, tuple[float | None, list[tuple[np.ndarray, Values]]]] = {}
        lazy_updates: dict[str, tuple[float, list[np.ndarray]]] = {}
        remaining, is_covered = [], np.zeros(self.num_shards, bool)
        is_covered[shard_set.index] = True
        for push in sorted(self.pending_pushes.pop(step, []), key=lambda push: push.sort_key):
            meta, shards = push.frame.meta, push.shards[is_covered[push.shards]]
            if len(shards) < len(push.shards):
                remaining.append(PendingPush(push.frame, push.shards[~is_covered[push.shards]]))
            if not len(shards):
                continue
            for name, lr in self._lazy_table_rates(meta).items() if self.store.lazy_tables else ():
                lazy_updates.setdefault(name, (lr, []))[1].append(shards)
            for op, ids, values in self._restrict_operations(push.frame, shards):
                if _operation_kind(op) == "apply":
                    name = target_name(op)
                    rate = (meta.get("lr") or {}).get(name)
                    grads_by_target.setdefault(name, (rate, []))[1].append((ids, values))
        if remaining:
            self.pending_pushes[step] = remaining
        for name, (rate, pushed) in sorted(grads_by_target.items()):
            id_arrays, grads = zip(*pushed, strict=True)
            joined: Values = np.concatenate(grads) if isinstance(grads[0], np.ndarray) else list(chain(*grads))
            # It was acknowledged, so it is applied whatever the memory limit.
            with self.store.without_memory_limit():
                self.store.apply(name, np.concatenate(id_arrays), joined, lr=rate, lsn=self.lsn, step=step + 1)
        for name, (lr, shard_arrays) in lazy_updates.items():
            self.store.advance_lazy_table(name, np.unique(np.concatenate(shard_arrays)), lr)

    def _iterate_pending(self, shard: int) -> Iterator[tuple[int, PendingPush]]:
        """The pending pushes of a shard with their steps, in the same order on every replica."""
        for step in sorted(self.pending_pushes):
            for push in sorted(self.pending_pushes[step], key=lambda push: push.sort_key):
                if shard in push.shards:
                    yield step, push

    def snapshot(self, shard: int) -> list[SnapshotPart]:
        """A copy of one shard; the first part is everything that is not the store's."""
        frames = []
        for _, push in self._iterate_pending(shard):
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
        self.dedup.import_shard(shard, header["windows"])
        self.dedup.is_rolled_back[shard] = header["restored"]
        self.dedup.departed_max_clock[shard] = header.get("reached", 0)
        for raw in frames:
            frame = wire.parse(raw)
            self.pending_pushes.setdefault(frame.meta["step"], []).append(PendingPush(frame, np.array([shard])))
        with self.store.without_memory_limit():
            self.store.install(shard, parts[1:])

    def drop(self, shard: int) -> None:
        """Forget one shard."""
        self.lsn[shard] = self.entry_version[shard] = 0
        self.dedup.clear_shard(shard)
        for step, pushes in list(self.pending_pushes.items()):
            remaining = [PendingPush(push.frame, push.shards[push.shards != shard]) for push in pushes]
            self.pending_pushes[step] = [push for push in remaining if len(push.shards)]
        self.pending_pushes = {step: pushes for step, pushes in self.pending_pushes.items() if pushes}
        self.store.drop(shard)

    def digest(self, shard: int) -> bytes:
        """Equal on equal replicas, and only on those."""
        pending_keys = [(step, *push.sort_key) for step, push in self._iterate_pending(shard)]
        dedup_state = [int(self.dedup.departed_max_clock[shard]), self.dedup.export_shard(shard)]
        text = json.dumps([int(self.lsn[shard]), int(self.entry_version[shard]), dedup_state, pending_keys])
        return hashlib.sha256(text.encode() + self.store.digest(shard)).digest()
