"""All that one server holds, by virtual shard: tables and dense parameters, read, updated, snapshot, moved, within its memory.

One thread at a time. What is absent reads as its initial value; a push creates it. `StoreFull` is raised before anything changes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from echelon.server import kernels as k
from echelon.server.client.combine import group, table_for
from echelon.server.protocol.hashing import bits_of, shard_of
from echelon.server.protocol.specs import Dense, Init, Rule, StoreError, StoreFull, Table, check_rate
from echelon.server.store import shard_transfer
from echelon.server.store.dense_param import Blocks
from echelon.server.store.lazy_updates import Moving
from echelon.server.store.narrow_numbers import narrow
from echelon.server.store.shard_transfer import Part
from echelon.server.store.sparse_table import Rows, weights_of
from echelon.server.store.validate import blocks_of, distinct, ids_of, rows_of


class _Unbounded:
    """See `Store.unbounded`: around each entry that a backup takes, so made once."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __enter__(self) -> None:
        self._store._bounded = False

    def __exit__(self, *error: object) -> None:
        self._store._bounded = True


class Store:
    """`memory`: bytes that rows, index and blocks may take (None: the machine's); `spill`: a folder for rows beyond memory; `alive`: called
    now and then during work that may take seconds."""

    def __init__(
        self,
        *,
        shards: int,
        memory: int | None = None,
        spill: Path | None = None,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        bits_of(shards)
        self._alive = alive
        self.shards = shards
        self.memory = memory
        self.spill = spill
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._bound = physical if memory is None else memory
        #: Addresses per table: a replica may have to go beyond its bound (see `unbounded`).
        beyond = physical if memory is None else min(4 * memory, max(2 * memory, physical))
        self._room = beyond if spill is None else _free(spill)
        self._bounded = True
        self._unbounded = _Unbounded(self)
        self._rows: dict[str, Rows] = {}
        self._movers: dict[str, Moving] = {}
        #: Ids that were pushed to, but not often enough yet: a table of counts each.
        self._waiting: dict[str, Rows] = {}
        self._blocks: dict[str, Blocks] = {}
        #: New rows of a table for which there is room for certain, while nothing else takes memory.
        self._sure: dict[str, int] = {}

    def declare(self, spec: Table | Dense) -> None:
        """Makes a table or dense parameter known; again with the same spec: nothing happens."""
        known = self.specs.get(spec.name)
        if known is not None:
            if known != spec:
                raise StoreError(
                    f"{spec.name}: declared as {known}, now as {spec}; use another name, or the same spec in every worker"
                )
            return
        self._sure.clear()  # it takes memory, too
        if isinstance(spec, Dense):
            if spec.rule.kind == "rowwise_adagrad":
                raise StoreError(
                    f"{spec.name}: rowwise_adagrad keeps one number per row and a dense parameter has no rows; use adagrad"
                )
            self._blocks[spec.name] = Blocks(spec, shards=self.shards)
            return
        if spec.rule.every:
            moving = Moving(spec, shards=self.shards, room=self._room, spill=self.spill, alive=self._alive)
            self._rows[spec.name] = self._movers[spec.name] = moving
        else:
            self._rows[spec.name] = Rows(spec, shards=self.shards, room=self._room, spill=self.spill)
        if spec.admit > 1:
            count = Table(
                name=spec.name, dim=1, rule=Rule(kind="sgd"), init=Init(kind="zeros"), dtype="f8", stored="f8"
            )
            self._waiting[spec.name] = Rows(count, shards=self.shards, room=self._bound // 2, spill=None, logged=False)

    @property
    def specs(self) -> dict[str, Table | Dense]:
        """What is declared, by name."""
        specs: dict[str, Table | Dense] = {name: table.spec for name, table in self._rows.items()}
        return specs | {name: dense.spec for name, dense in self._blocks.items()}

    def shards_of(self, name: str, ids: np.ndarray) -> np.ndarray:
        """The shard of each id, or of each block of a dense parameter."""
        if name not in self._blocks:
            return shard_of(ids_of(ids), self.shards)
        dense, blocks = self._blocks[name], ids_of(ids)
        for block in blocks.tolist():
            dense.spec.length(block)
        return dense.shard[blocks]

    def unbounded(self) -> AbstractContextManager[None]:
        """Within it memory has no bound: a backup takes what its head took, and a commit what was acknowledged, or they part."""
        return self._unbounded

    # Reading

    def read(self, name: str, ids: np.ndarray, wire: str = "f4") -> list[np.ndarray]:
        """Rows in the order of ids as `wire` (for i2 and i1: and their scales)."""
        table = self._table(name)
        ids = ids_of(ids)
        if wire != table.spec.stored or wire[0] == "f":
            return narrow(table.read(ids), wire)
        # Integers as they are stored: rounded again they would have other scales.
        where, _, absent = table.find(ids)
        out = weights_of(table.spec, table.whole(where))
        if absent:
            for mine, initial in zip(out, narrow(table.read(ids[where == 0]), wire), strict=True):
                mine[where == 0] = initial
        return out

    def read_blocks(self, name: str, blocks: np.ndarray) -> list[np.ndarray]:
        """Each block's values, read-only views that stay as they are while somebody holds them."""
        dense = self._dense(name)
        return [dense.read(block) for block in ids_of(blocks).tolist()]

    def ids(self, name: str, shard: int) -> np.ndarray:
        """The ids that have rows in a shard, in no order."""
        table = self._table(name)
        return table.column(table.of(shard), 0)

    def changed(self, name: str, shards: Sequence[int], since: np.ndarray, limit: int | None = None) -> np.ndarray:
        """Ids (of a dense parameter: blocks) written after log number since[i] of shards[i]; see `changed_until`."""
        return self.changed_until(name, shards, since, limit)[0]

    def changed_until(
        self, name: str, shards: Sequence[int], since: np.ndarray, limit: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """And up to which log number each shard's answer is whole: ask on from there.

        With a limit the oldest changes of a shard come first, and as many more than the limit as belong to one log number.
        """
        found: list[np.ndarray] = []
        until = np.array(since, np.int64)
        left = np.iinfo(np.int64).max if limit is None else limit
        for i, (ids, lsns) in enumerate(self._written(name, np.array(shards, np.int64), until.copy())):
            if left <= 0:
                break
            if not len(ids):
                continue
            order = np.argsort(lsns, kind="stable")
            ids, lsns = ids[order], lsns[order]
            cut = len(ids) if len(ids) <= left else int(np.searchsorted(lsns, lsns[left - 1], side="right"))
            found.append(ids[:cut])
            until[i] = lsns[cut - 1]
            left -= cut
        return np.concatenate(found) if found else np.empty(0, np.int64), until

    def _written(self, name: str, shards: np.ndarray, since: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if name not in self._blocks:
            yield from self._table(name).written(shards, since)
            return
        dense = self._blocks[name]
        for shard, after in zip(shards.tolist(), since.tolist(), strict=True):
            here = [b for b in dense.of(shard) if dense.held[b].lsn > after]
            yield np.array(here, np.int64), np.array([dense.held[b].lsn for b in here], np.int64)

    # Writing

    def apply(
        self,
        name: str,
        ids: np.ndarray,
        grads: Any,
        *,
        lr: float | None = None,
        lsn: np.ndarray,
        step: int | None = None,
        once: bool = False,
    ) -> None:
        """Updates rows by gradients (ids, dim), those of the same id added up first; of a dense parameter: blocks, one gradient each.

        `lsn`: of each of all shards, the log number of this entry; `step`: counted from 1, for rules that go by it. `once`: each id is there
        once, as workers send them, which need not be looked at; if one is not, its row is updated by one gradient after the other.
        """
        ids = ids_of(ids)
        check_rate(name, lr)
        if name in self._blocks:
            self._apply_blocks(self._blocks[name], ids, grads, lr=lr, lsn=lsn, step=step)
            return
        table = self._table(name)
        table.check(step)
        values = rows_of(table, ids, grads)
        lsn = np.ascontiguousarray(lsn, np.int64)
        native = table.native and name not in self._waiting
        if not (once and native):
            ids, values = self._summed(ids, values)
        if native:
            if not self._is_sure(name, table, len(ids)):
                _, missing, absent = table.find(ids)
                if absent:
                    self._make_room([(table, missing)], 0)
            # Nothing can be refused any more: rows that are here are updated in the pass that finds them, and new ones made after. The same
            # on every replica, however sure it is of its room: an id that is there twice, and should not be, must not part them.
            new = table.update(ids, values, lsn, lr=lr, step=step)
            if not len(new):
                return
            ids, values = self._summed(ids[new], values[new])
        where, missing, absent = table.find(ids)
        if absent and name in self._waiting:
            ids, where, values = self._admit(table, ids, where, values, lsn)
        elif absent:
            self._make_room([(table, missing)], 0)
        table.write(ids, where, values, lsn, lr=lr, step=step, setting=False)

    @property
    def movers(self) -> Mapping[str, Moving]:
        """The tables all of whose rows move with each push that names them."""
        return self._movers

    def advance(self, name: str, shards: np.ndarray, lr: float | None = None) -> None:
        """Ends an update of such a table on these shards, after `apply` of the gradients that it has there.

        Its rate was checked before anything of the entry was done: half an entry must not be.
        """
        moving = self._movers[name]
        before = moving.bytes
        moving.advance(np.asarray(shards, np.int64), lr)
        if moving.bytes != before:
            self._sure.clear()  # what is kept of its updates takes memory, too

    def assign(self, name: str, ids: np.ndarray, values: np.ndarray, *, lsn: np.ndarray) -> None:
        """Sets rows as they are, with the state of a fresh row; admission does not ask. Of an id that is there twice, the last counts."""
        table = self._table(name)
        ids = ids_of(ids)
        values = rows_of(table, ids, values)
        if not k.unique(ids, table_for(len(ids))):
            _, last = np.unique(ids[::-1], return_index=True)
            ids, values = ids[len(ids) - 1 - last], values[len(ids) - 1 - last]
        where, missing, _ = table.find(ids)
        self._make_room([(table, missing)], 0)
        table.write(ids, where, values, np.ascontiguousarray(lsn, np.int64), lr=None, step=None, setting=True)
        if name in self._waiting:
            waiting = self._waiting[name]
            waiting.remove(ids[waiting.find(ids)[0] != 0])

    def set_blocks(
        self, name: str, blocks: np.ndarray, values: Sequence[np.ndarray], *, lsn: np.ndarray | None = None
    ) -> None:
        """First values of blocks; those that have values keep them."""
        dense = self._dense(name)
        blocks = ids_of(blocks)
        new = blocks_of(dense, blocks, values)
        self._make_room([], dense.need(blocks))
        for block, value in zip(blocks.tolist(), new, strict=True):
            if block not in dense.held:
                dense.set(block, value, 0 if lsn is None else int(lsn[dense.shard[block]]))

    def prepare(
        self, entry: Iterable[tuple[Any, ...]], step: int | None = None, rates: Mapping[str, Any] | None = None
    ) -> None:
        """Raises what these operations, all of them together, would raise; changes nothing.

        Each is (name, ids or blocks, values), an update, or has a fourth item: "apply", "assign" (a table's rows) or "set" (blocks).
        """
        pushed: dict[str, list[np.ndarray]] = {}
        assigned: dict[str, list[np.ndarray]] = {}
        blocks: dict[str, list[np.ndarray]] = {}
        for name, keys, values, *how in entry:
            ids = ids_of(keys)
            what = how[0] if how else "apply"
            check_rate(name, (rates or {}).get(name))
            if what == "set" or (what == "apply" and name in self._blocks):
                dense = self._dense(name)
                blocks_of(dense, ids, values)
                if what == "apply":
                    dense.check(sorted(set(ids.tolist())), step)
                blocks.setdefault(name, []).append(ids)
                continue
            table = self._table(name)
            rows_of(table, ids, values)
            if what == "apply":
                table.check(step)
            (pushed if what == "apply" else assigned).setdefault(name, []).append(ids)
        needs: list[tuple[Rows, np.ndarray]] = []
        for name, parts in assigned.items():
            needs.append((self._table(name), self._table(name).find(distinct(parts))[1]))
        for name, parts in pushed.items():
            ids = distinct(parts)
            _, missing, absent = self._table(name).find(ids)
            if absent and name in self._waiting:
                needs += self._split(self._table(name), ids)[3]
            elif absent:
                needs.append((self._table(name), missing))
        self._check(needs, sum(self._blocks[name].need(np.concatenate(parts)) for name, parts in blocks.items()))

    def expire(self, name: str, shards: Sequence[int], before_lsn: int | np.ndarray) -> int:
        """Removes rows whose last write is before that log number (one for all, or one per shard named); how many rows."""
        limits = np.broadcast_to(np.asarray(before_lsn, np.int64), (len(shards),))
        gone = 0
        for kind in (self._waiting.get(name), self._table(name)):
            gone = 0
            if kind is None:
                continue
            for shard, limit in zip(shards, limits, strict=True):
                rows = kind.of(int(shard))
                ids = kind.column(rows, 0)[kind.column(rows, 1) < limit]
                kind.remove(ids)
                gone += len(ids)
        return gone

    # Shards

    def snapshot(self, shard: int) -> list[Part]:
        """All of a shard, copied now, in parts of about 1 MiB: for `install` on any server that knows the same specs."""
        return shard_transfer.snapshot(shard, self._rows, self._waiting, self._blocks)

    def install(self, shard: int, parts: Sequence[Part]) -> None:
        """A shard as `snapshot` gave it, instead of what was here of it. Raises before anything changes."""
        tables, blocks, courses = shard_transfer.arrived(shard, parts, self._rows, self._waiting, self._blocks)
        needs = []
        for table, chunks in tables:
            missing = np.zeros(self.shards, np.int64)
            # Of rows that are dropped first, as many are used again.
            missing[shard] = sum(len(chunk) for chunk in chunks) - table.used[shard]
            needs.append((table, missing))
        held = sum(dense.cost(block) for dense in self._blocks.values() for block in dense.of(shard))
        self._check(needs, sum(dense.cost(block) for dense, block, _ in blocks) - held)
        for table, missing in needs:
            table.claim(missing)
        self._sure.clear()
        self.drop(shard)
        for (table, missing), (_, chunks) in zip(needs, tables, strict=True):
            missing[shard] = sum(len(chunk) for chunk in chunks)
            table.grow(missing)
            for chunk in chunks:
                table.insert(chunk)
        for dense, block, values in blocks:
            dense.held[block] = values
        for moving, course in courses:
            moving.take(shard, course)

    def drop(self, shard: int) -> None:
        """Forgets a shard."""
        for table in (*self._rows.values(), *self._waiting.values()):
            table.of(shard, clear=True)
        for dense in self._blocks.values():
            for block in dense.of(shard):
                del dense.held[block]

    def digest(self, shard: int) -> bytes:
        """SHA-256 of all of a shard, whatever the order in which it came to be."""
        return shard_transfer.digest(shard, self._rows, self._waiting, self._blocks)

    def stats(self) -> dict[str, Any]:
        """Rows and bytes per name, rows per shard, bytes in sum and their bound."""
        per_shard = np.zeros(self.shards, np.int64)
        tables = {}
        for name, table in self._rows.items():
            waiting = self._waiting.get(name)
            per_shard += table.used
            tables[name] = {
                "rows": table.count,
                "bytes": table.bytes + (waiting.bytes if waiting else 0),
                "row_bytes": table.layout.stride,
                "waiting": waiting.count if waiting else 0,
                "spilled": table.spilled,
            }
        dense = {name: {"blocks": len(held.held), "bytes": held.bytes} for name, held in self._blocks.items()}
        return {"tables": tables, "dense": dense, "rows": per_shard, "bytes": self.bytes, "memory": self._bound}

    @property
    def bytes(self) -> int:
        """Memory in use."""
        rows = sum(table.bytes for table in (*self._rows.values(), *self._waiting.values()))
        return rows + sum(dense.bytes for dense in self._blocks.values())

    def close(self) -> None:
        """Gives spill files back."""
        for table in self._rows.values():
            table.close()

    # Within

    def _table(self, name: str) -> Rows:
        try:
            return self._rows[name]
        except KeyError:
            raise StoreError(
                f"{name}: no table of that name here; declared: {', '.join(sorted(self.specs)) or 'none'}"
            ) from None

    def _dense(self, name: str) -> Blocks:
        try:
            return self._blocks[name]
        except KeyError:
            raise StoreError(
                f"{name}: no dense parameter of that name here; declared: {', '.join(sorted(self.specs)) or 'none'}"
            ) from None

    def _summed(self, ids: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if k.unique(ids, table_for(len(ids))):
            return ids, values
        grouped = group(ids, np.zeros(self.shards, np.uint16), 1)
        return grouped.ids, grouped.sum(values)

    def _split(
        self, table: Rows, ids: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[tuple[Rows, np.ndarray]]]:
        """Of a table with admission: which ids wait on, their rows among the waiting, who comes in, and what both need."""
        where, _, _ = table.find(ids)
        waiting = self._waiting[table.spec.name]
        known, _, _ = waiting.find(ids)
        counts = waiting.column(known, 2).view(np.float64) * (known != 0)
        absent = where == 0
        enters = absent & (counts + 1 >= table.spec.admit)
        stays = absent & ~enters
        new = np.bincount(shard_of(ids[enters], self.shards), minlength=self.shards)
        late = np.bincount(shard_of(ids[stays & (known == 0)], self.shards), minlength=self.shards)
        return stays, known, enters, [(table, new), (waiting, late)]

    def _admit(
        self, table: Rows, ids: np.ndarray, where: np.ndarray, values: np.ndarray, lsn: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Counts a push to ids that are not admitted yet; what is left has rows or comes in now."""
        stays, known, enters, needs = self._split(table, ids)
        self._make_room(needs, 0)
        waiting = self._waiting[table.spec.name]
        lsn = np.ascontiguousarray(lsn, np.int64)
        waiting.remove(ids[enters & (known != 0)])
        late = ids[stays]
        waiting.write(late, waiting.find(late)[0], np.full((len(late), 1), -1.0), lsn, lr=1.0, step=None, setting=False)
        here = ~stays
        return ids[here], where[here], values[here]

    def _apply_blocks(
        self, dense: Blocks, blocks: np.ndarray, grads: Any, *, lr: float | None, lsn: np.ndarray, step: int | None
    ) -> None:
        values = blocks_of(dense, blocks, grads)
        names = blocks.tolist()
        if len(set(names)) != len(names):
            sums: dict[int, np.ndarray] = {}
            for block, value in zip(names, values, strict=True):
                sums[block] = sums[block] + value if block in sums else value
            names, values = list(sums), list(sums.values())
        dense.check(names, step)
        self._make_room([], dense.need(blocks))
        dense.apply(names, values, lr=lr, lsn=lsn, step=step)

    def _is_sure(self, name: str, table: Rows, new: int) -> bool:
        """Whether so many new rows cannot be refused. Asked of every push, so it is reckoned once for many."""
        if self._sure.get(name, 0) < new:
            for rows in (new + (1 << 20), new):
                need = table.most_need(rows)
                if need is not None and self.bytes + need <= self._bound:
                    self._sure[name] = rows
                    return True
            return False
        return True

    def _make_room(self, tables: Sequence[tuple[Rows, np.ndarray]], blocks: int) -> None:
        self._check(tables, blocks)
        self._sure.clear()
        for table, missing in tables:
            table.claim(missing)
        for table, missing in tables:
            table.grow(missing)

    def _check(self, tables: Sequence[tuple[Rows, np.ndarray]], blocks: int) -> None:
        """Whether that many new rows per shard, and bytes of blocks, fit."""
        need = blocks + sum(table.need(missing) for table, missing in tables)
        over = self._bounded and need > 0 and self.bytes + need > self._bound
        if over or not all(table.fits(missing) for table, missing in tables):
            what = ", ".join(
                f"table {t.spec.name}: {int(m.sum())} new rows of {t.layout.stride} bytes" for t, m in tables if m.any()
            )
            raise StoreFull(
                f"{what or 'dense blocks'} need {need} bytes, and this server holds {self.bytes} of at most {self._bound}; nothing was "
                f"applied; raise memory=, {'' if self.spill else 'give spill=, '}expire old rows, admit fewer (admit=), store them narrower (stored=) or add servers"
            )


def _free(folder: Path) -> int:
    """Bytes free where a folder is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
