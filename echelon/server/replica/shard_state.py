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
from echelon.server.protocol.shard_sets import Cover, every
from echelon.server.protocol.specs import check_rate
from echelon.server.replica.dedup import ABSENT, Windows

Part = tuple[dict[str, Any], list[np.ndarray]]
#: A table's gradients or rows (n, dim), or one array for each dense block.
Values = Any
#: What a push does, to which ids or blocks, with which values.
Operation = tuple[dict[str, Any], np.ndarray, Values]
_INT64 = np.dtype(np.int64)


class Store(Protocol):
    """Of the store, what a replica calls."""

    def shards_of(self, name: str, ids: np.ndarray) -> np.ndarray: ...
    def prepare(self, entry: Iterable[tuple[Any, ...]], step: int | None, rates: Mapping[str, Any] | None) -> None: ...
    def unbounded(self) -> AbstractContextManager[None]: ...
    def apply(
        self,
        name: str,
        ids: np.ndarray,
        grads: Values,
        *,
        lr: float | None,
        lsn: np.ndarray,
        step: int | None,
        once: bool = False,
    ) -> None: ...
    @property
    def movers(self) -> Mapping[str, Any]: ...
    def advance(self, name: str, shards: np.ndarray, lr: float | None) -> None: ...
    def assign(self, name: str, ids: np.ndarray, rows: np.ndarray, *, lsn: np.ndarray) -> None: ...
    def set_blocks(self, name: str, blocks: np.ndarray, values: Values, *, lsn: np.ndarray) -> None: ...
    def read(self, name: str, ids: np.ndarray, wire: str) -> list[np.ndarray]: ...
    def read_blocks(self, name: str, blocks: np.ndarray) -> list[np.ndarray]: ...
    def changed_until(
        self, name: str, shards: Any, since: np.ndarray, limit: int | None
    ) -> tuple[np.ndarray, np.ndarray]: ...
    def snapshot(self, shard: int) -> list[Part]: ...
    def install(self, shard: int, parts: Sequence[Part]) -> None: ...
    def drop(self, shard: int) -> None: ...
    def digest(self, shard: int) -> bytes: ...
    def expire(self, name: str, shards: Any, before_lsn: Any) -> int: ...
    def stats(self) -> dict[str, Any]: ...


class Diverged(ServerError):  # noqa: N818 (what happened; its base says error)
    """An entry that does not follow what this replica holds: it must not go on as one."""


class Held:
    """A push of a synchronous step that waits for the commit, as far as `shards` are concerned."""

    __slots__ = ("frame", "shards")

    def __init__(self, frame: wire.Frame, shards: np.ndarray) -> None:
        self.frame, self.shards = frame, shards

    @property
    def order(self) -> tuple[str, int, int]:
        """By what replicas sort before they add up."""
        meta = self.frame.meta
        return meta["worker"], meta["incarnation"], meta["seq"]


def operations(frame: wire.Frame) -> list[Operation]:
    """The operations of a push."""
    found: list[Operation] = []
    arrays, at = frame.arrays, 1
    for op in frame.meta["ops"]:
        ids = arrays[at]
        if ids.dtype != _INT64 or ids.ndim != 1:
            raise wire.WireError("PUSH: ids and blocks are one row of 64-bit integers")
        if "table" in op:
            found.append((op, ids, arrays[at + 1]))
            at += 2
        else:
            found.append((op, ids, arrays[at + 1 : at + 1 + len(ids)]))
            at += 1 + len(ids)
    if at != len(arrays):
        raise wire.WireError(f"PUSH: {len(arrays)} arrays where its operations have {at}")
    return found


def named(op: dict[str, Any]) -> str:
    """What an operation is on."""
    name = op.get("table") or op.get("dense") or op.get("set")
    if not isinstance(name, str):
        raise wire.WireError(f"PUSH: an operation on {name!r}; it names a table or a dense parameter")
    return name


def _how(op: dict[str, Any]) -> str:
    return "set" if "set" in op else "assign" if op.get("assign") else "apply"


def _at_once(op: dict[str, Any]) -> bool:
    """Whether it does not wait for a step's commit: values that are set."""
    return "set" in op or bool(op.get("assign"))


class State:
    """All shards of one replica; arrays are per shard."""

    def __init__(self, store: Store, shards: int) -> None:
        self.store, self.shards = store, shards
        self.lsn = np.zeros(shards, np.int64)
        #: The map's version under which the last entry was ordered. (stamp, lsn) names a state: each version has one head per shard.
        self.stamp = np.zeros(shards, np.int64)
        self.windows = Windows(shards)
        self.pending: dict[int, list[Held]] = {}

    def due(self, frame: wire.Frame, cover: Cover) -> tuple[np.ndarray | None, bool]:
        """Of a push: per covered shard whether it is the next one there (None: on all); and whether some shard misses one before it."""
        meta = frame.meta
        slot = self.windows.slot(meta["worker"], meta["incarnation"])
        last, seq = self.windows.last[slot][cover.at], meta["seq"]
        fresh = last == seq - 1
        if every(fresh):
            return None, False
        ahead = last + 1 < seq
        if ahead.any():
            loose = self.windows.restored[cover.at] & ~self.windows.since[slot][cover.at] & ahead
            return fresh | loose, bool((ahead & ~loose).any())
        return fresh, False

    def refused_before(self, frame: wire.Frame, cover: Cover) -> bool:
        """Whether a push that is sent again was counted, but not applied."""
        slot = self.windows.slot(frame.meta["worker"], frame.meta["incarnation"])
        return bool((self.windows.void[slot][cover.at] == frame.meta["seq"]).any())

    def push(self, frame: wire.Frame, cover: Cover, *, version: int, whole: bool, void: bool) -> None:
        """Apply a push to `cover` (`whole`: that is all that it covers). `void`: only count it. An error: nothing has changed."""
        meta, at = frame.meta, cover.at
        rates = meta.get("lr")
        if rates and not void:
            for name, rate in rates.items():
                check_rate(name, rate)
        moved = self._moved(meta) if self.store.movers and not void else {}
        self.lsn[at] += 1
        if (meta["ops"] or moved) and not void:
            try:
                self._operate(frame, None if whole else cover.shards)
            except BaseException:
                self.lsn[at] -= 1
                raise
            if meta.get("aggregate"):
                if moved or not all(_at_once(op) for op in meta["ops"]):
                    self.pending.setdefault(meta["step"], []).append(Held(frame, cover.shards))
            else:
                for name, rate in moved.items():
                    self.store.advance(name, cover.shards, rate)
        self.stamp[at] = version
        windows = self.windows
        slot = windows.slot(meta["worker"], meta["incarnation"])
        windows.last[slot, at] = meta["seq"]
        windows.since[slot, at] = True
        if void:
            windows.void[slot, at] = meta["seq"]
        if meta.get("tick"):
            clock = windows.clock[slot]
            clock[at] = np.maximum(clock[at], meta["step"] + 1)

    def _operate(self, frame: wire.Frame, fresh: np.ndarray | None) -> None:
        meta, step = frame.meta, frame.meta["step"] + 1
        held = bool(meta.get("aggregate"))
        cut = self._cut(frame, fresh)
        if held or len(cut) > 1:
            # One operation alone is refused before anything changes; of several none may be applied if one is refused.
            entry = [(named(op), ids, values, _how(op)) for op, ids, values in cut]
            self.store.prepare(entry, step, meta.get("lr"))
        rates = meta.get("lr") or {}
        for place, (op, ids, values) in enumerate(cut):
            name = named(op)
            try:
                if "set" in op:
                    self.store.set_blocks(name, ids, values, lsn=self.lsn)
                elif op.get("assign"):
                    self.store.assign(name, ids, values, lsn=self.lsn)
                elif not held:
                    self.store.apply(name, ids, values, lr=rates.get(name), lsn=self.lsn, step=step, once=True)
            except Exception as error:
                if place == 0:
                    raise
                raise Diverged(f"half of push {meta['seq']} is applied, and then: {error}") from error

    def _moved(self, meta: Mapping[str, Any]) -> dict[str, float]:
        """The tables of which a push moves all rows, on every shard that it covers: it brings their rates."""
        rates = meta.get("lr") or {}
        for op in meta["ops"]:
            if op.get("table") in self.store.movers and not op.get("assign") and op["table"] not in rates:
                raise ServerError(
                    f"{op['table']}: a push moves all of its rows, and has no rate for them; push with lr="
                )
        return {name: rates[name] for name in sorted(rates) if name in self.store.movers}

    def commit(self, frame: wire.Frame, cover: Cover, *, version: int) -> None:
        """Add up what is pending of a step, in the order of workers, and apply it once."""
        self.lsn[cover.at] += 1
        self.stamp[cover.at] = version
        step = frame.meta["step"]
        members = np.zeros(self.shards, bool)
        members[cover.at] = True
        together: dict[str, tuple[dict[str, Any], list[np.ndarray], list[Values], float | None]] = {}
        moved: dict[str, tuple[float, np.ndarray]] = {}
        rest = []
        for held in sorted(self.pending.pop(step, []), key=lambda each: each.order):
            here = held.shards[members[held.shards]]
            if len(here) < len(held.shards):
                rest.append(Held(held.frame, held.shards[~members[held.shards]]))
            if not len(here):
                continue
            for name, lr in self._moved(held.frame.meta).items() if self.store.movers else ():
                moved.setdefault(name, (lr, np.zeros(self.shards, bool)))[1][here] = True
            for op, ids, values in self._cut(held.frame, here):
                if _at_once(op):
                    continue
                rates = held.frame.meta.get("lr") or {}
                entry = together.setdefault(named(op), (op, [], [], rates.get(named(op))))
                entry[1].append(ids)
                entry[2].append(values)
        if rest:
            self.pending[step] = rest
        for name, (op, keys, grads, rate) in sorted(together.items()):
            joined: Values = np.concatenate(grads) if "table" in op else [each for part in grads for each in part]
            # What was acknowledged is applied, whatever the memory's bound.
            with self.store.unbounded():
                self.store.apply(name, np.concatenate(keys), joined, lr=rate, lsn=self.lsn, step=step + 1)
        for name, (lr, where) in moved.items():
            self.store.advance(name, np.flatnonzero(where), lr)

    def enrol(self, frame: wire.Frame, cover: Cover, *, version: int) -> None:
        """Count a worker from a clock on, where it is not counted yet. Arrays: cover, clocks."""
        self.lsn[cover.at] += 1
        self.stamp[cover.at] = version
        whole, clocks = frame.arrays
        slot = self.windows.slot(frame.meta["worker"], frame.meta["incarnation"])
        starts = np.zeros(self.shards, np.int64)
        starts[whole] = clocks
        clock = self.windows.clock[slot]
        clock[cover.at] = np.where(clock[cover.at] == ABSENT, starts[cover.at], clock[cover.at])

    def forget(self, frame: wire.Frame, cover: Cover, *, version: int) -> None:
        """Forget workers' lives that are over. `horizon`, `kept`: as in the map."""
        self.lsn[cover.at] += 1
        self.stamp[cover.at] = version
        horizon, kept = int(frame.meta["horizon"]), {int(life) for life in frame.meta["kept"]}
        self.windows.let_go(lambda life: life <= horizon and life not in kept, cover.at)

    def expire(self, frame: wire.Frame, cover: Cover, *, version: int) -> int:
        """Forget rows that nobody has written to since a log number. Arrays: cover, log numbers."""
        self.lsn[cover.at] += 1
        self.stamp[cover.at] = version
        before = np.zeros(self.shards, np.int64)
        before[frame.arrays[0]] = frame.arrays[1]
        return self.store.expire(frame.meta["table"], cover.shards, before[cover.shards])

    def _cut(self, frame: wire.Frame, fresh: np.ndarray | None) -> list[Operation]:
        """The operations of a push as far as they are on these shards (None: on all)."""
        if fresh is None:
            return operations(frame)
        found: list[Operation] = []
        members = np.zeros(self.shards, bool)
        members[fresh] = True
        for op, ids, values in operations(frame):
            here = members[self.store.shards_of(named(op), ids)]
            if here.all():
                found.append((op, ids, values))
            elif here.any():
                kept = (
                    values[here] if "table" in op else [each for each, take in zip(values, here, strict=True) if take]
                )
                found.append((op, ids[here], kept))
        return found

    def snapshot(self, shard: int) -> list[Part]:
        """Everything of one shard at this moment; the first part is what is not the store's."""
        frames = []
        for held in (
            each for step in sorted(self.pending) for each in sorted(self.pending[step], key=lambda one: one.order)
        ):
            if shard in held.shards:
                cut = self._cut(held.frame, np.array([shard]))
                arrays = [np.array([shard], np.uint16)]
                for op, ids, values in cut:
                    arrays += [ids, values] if "table" in op else [ids, *values]
                meta = held.frame.meta | {"ops": [op for op, _, _ in cut]}
                frames.append(wire.joined(wire.encode(wire.PUSH, 0, meta, arrays)))
        front = {
            "lsn": int(self.lsn[shard]),
            "stamp": int(self.stamp[shard]),
            "windows": self.windows.column(shard),
            "restored": bool(self.windows.restored[shard]),
            "reached": int(self.windows.reached[shard]),
        }
        return [(front, frames), *self.store.snapshot(shard)]

    def install(self, shard: int, parts: Sequence[Part]) -> None:
        """Replace one shard by a snapshot."""
        self.drop(shard)
        front, frames = parts[0]
        self.lsn[shard], self.stamp[shard] = front["lsn"], front["stamp"]
        self.windows.install(
            shard, front["windows"], restored=bool(front["restored"]), reached=int(front.get("reached", 0))
        )
        for raw in frames:
            frame = wire.parse(raw)
            self.pending.setdefault(frame.meta["step"], []).append(Held(frame, np.array([shard])))
        with self.store.unbounded():
            self.store.install(shard, parts[1:])

    def drop(self, shard: int) -> None:
        """Hold nothing of one shard."""
        self.lsn[shard] = self.stamp[shard] = 0
        self.windows.forget(shard)
        for step in list(self.pending):
            kept = [Held(each.frame, each.shards[each.shards != shard]) for each in self.pending[step]]
            self.pending[step] = [each for each in kept if len(each.shards)]
            if not self.pending[step]:
                del self.pending[step]
        self.store.drop(shard)

    def digest(self, shard: int) -> bytes:
        """Equal on equal replicas, and on those alone."""
        waiting = sorted(
            (step, *held.order) for step, each in self.pending.items() for held in each if shard in held.shards
        )
        known = [int(self.windows.reached[shard]), self.windows.column(shard)]
        text = json.dumps([int(self.lsn[shard]), int(self.stamp[shard]), known, waiting])
        return hashlib.sha256(text.encode() + self.store.digest(shard)).digest()
