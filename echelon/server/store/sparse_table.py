"""A sparse table in memory: rows by id, made when first written, found by a compiled index per shard.

Rows lie in one reserved range of addresses (memory is taken as they are made), or in a file that the system's page cache
pages in and out (`spill`). One thread at a time.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from echelon.server import kernels as k
from echelon.server.protocol.hashing import bits_of, name_key, shard_of
from echelon.server.protocol.specs import INITS, RULES, SIZES, Init, Rule, StoreError, StoreFull, Table
from echelon.server.store.write_log import MOST_SHARDS, Recent

#: Most of a shard's slots that may be in use before it doubles.
LOAD = 0.8
_LEAST = 16
#: Bytes from which on a table has large pages: a lookup in it misses the cache of page addresses too. A small one would take two of them.
_HUGE = 16 << 20
#: How much of a spill file is claimed at a time, so that a full disk is an error and not a signal.
_CLAIM = 64 << 20
_MASK = (1 << 64) - 1
#: Reads whose rows are remembered for the pushes that follow them: of as many workers, and of steps ahead.
_READS = 64
#: Ids of these reads in sum (8 bytes each, which are not in `bytes`); a read of more than an eighth of that is not remembered.
_READ_IDS = 1 << 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where things lie in a row, in elements of their own size; `stride` in bytes."""

    stride: int
    stored: int
    dim: int
    weights: int
    scale: int
    state: int
    states: int
    count: int

    def places(self) -> np.ndarray:
        """As the kernels read it."""
        return np.array(
            [self.stride // 8, self.stored, self.dim, self.weights, self.scale, self.state, self.states], np.int64
        )


def state_of(rule: Rule, dim: int) -> tuple[int, int]:
    """How many numbers of state `dim` weights have under a rule, and which of them counts updates (-1: none does)."""
    count = 0 if rule.every else {"momentum": 1 if rule.dampening else 0, "adam": 1, "lamb": 1}.get(rule.kind, 0)
    states = {"sgd": 0, "rowwise_adagrad": 1, "momentum": dim, "adagrad": dim}.get(rule.kind, 2 * dim)
    return states + count, states if count else -1


def layout_of(spec: Table) -> Layout:
    """id and lsn, the weights, their scale if they are integers, the state; last the mark of rows that all move (`replay`)."""
    wide, narrow = SIZES[spec.dtype], SIZES[spec.stored]
    states, count = state_of(spec.rule, spec.dim)
    end = 16 + spec.dim * narrow
    scale = 0
    if spec.stored in ("i2", "i1"):
        scale = -(-end // 4)
        end = scale * 4 + 4
    state = -(-end // wide)
    stride = -(-(state + states) * wide // 8) * 8 + 8 * spec.rule.every
    stored = k.NATIVE if spec.stored == spec.dtype else {"f4": k.F4, "f2": k.F2, "i2": k.I2, "i1": k.I1}[spec.stored]
    return Layout(
        stride=stride,
        stored=stored,
        dim=spec.dim,
        weights=16 // narrow,
        scale=scale,
        state=state,
        states=states,
        count=count,
    )


def weights_of(spec: Table, rows: np.ndarray) -> list[np.ndarray]:
    """The weights of whole rows (n, words) as they are stored: copies, and the scales of integers."""
    layout = layout_of(spec)
    raw = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), layout.stride)
    values = np.ascontiguousarray(raw[:, 16 : 16 + spec.dim * SIZES[spec.stored]]).view(spec.stored)
    if layout.stored not in (k.I2, k.I1):
        return [values]
    scales = np.ascontiguousarray(raw[:, layout.scale * 4 : layout.scale * 4 + 4]).view(np.float32)
    return [values, scales.reshape(-1)]


def scalars_of(rule: Rule, lr: float | None, width: int) -> np.ndarray:
    """A rule's numbers, float64, as the kernels read them."""
    rate = rule.lr if lr is None else float(lr)
    own = rule.decoupled
    first = rule.initial if rule.kind in ("adagrad", "rowwise_adagrad") else 0.0
    return np.array(
        [
            rate,
            0.0 if own else rule.weight_decay,
            1.0 - rate * rule.weight_decay if own else 1.0,
            rule.momentum,
            1.0 - rule.dampening,
            rule.beta1,
            1.0 - rule.beta1,
            rule.beta2,
            1.0 - rule.beta2,
            rule.epsilon,
            first,
            float(width),
        ]
    )


def given_step(rule: Rule, step: int | None, name: str) -> int:
    """The step that a rule goes by; 0 where each row counts its own."""
    if rule.steps != "given" or rule.kind not in ("adam", "lamb"):
        return 0
    if step is None or step < 1:
        raise StoreError(
            f"{name}: step={step}: its rule corrects bias by the push's step, counted from 1; push with it, or use steps='row'"
        )
    return step


def switches_of(rule: Rule, count: int, *, sparse: bool, step: int | None, name: str) -> np.ndarray:
    """A rule's choices as the kernels read them."""
    given = given_step(rule, step, name)
    return np.array([RULES.index(rule.kind), rule.nesterov, sparse, count, given], np.int64)


def seed_of(name: str, init: Init) -> np.uint64:
    """What a table's first values are drawn from."""
    return np.uint64((name_key(name) + init.seed * 0x9E3779B97F4A7C15) & _MASK)


def init_of(init: Init) -> tuple[int, np.ndarray]:
    """An initialiser as the kernels read it."""
    return INITS.index(init.kind), np.array([0.0 if init.kind == "zeros" else init.value, init.scale])


def reserve(size: int, what: str) -> mmap.mmap:
    """Addresses for `size` bytes, zeros; memory is taken page by page as they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        area = mmap.mmap(-1, size, flags=flags)
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{what}: {size} bytes of addresses cannot be reserved ({error}); give a smaller memory="
        ) from error
    return area


class Rows:
    """The rows of one table."""

    def __init__(self, spec: Table, *, shards: int, room: int, spill: Path | None, logged: bool = True) -> None:
        self.spec = spec
        self.shards = shards
        self.layout = layout_of(spec)
        #: Whether weights are stored as they are computed with, and rows move when they are pushed to only.
        self.native = self.layout.stored == k.NATIVE and not spec.rule.every
        self._places = self.layout.places()
        self._shift = np.uint64(64 - bits_of(shards))
        self.words = self.layout.stride // 8
        self.most = min(max(room // self.layout.stride, 1024), 2**32 - 2)
        self._file: int | None = None
        size = (self.most + 1) * self.layout.stride
        if spill is None:
            self._area = reserve(size, f"table {spec.name}")
        else:
            self._file, self._area = _spilled(spill, size, spec.name)
        self._claimed = 0
        self._view()
        #: The first row of the chain of rows given back, the first never used, the chain's length; row 0 is scratch.
        self.free = np.array([0, 1, 0], np.int64)
        self._claim(1)
        least = _LEAST * shards
        self._slots = max(8 * least, 6 * self.most)
        self._index_area = reserve(self._slots * 8, f"table {spec.name}'s index")
        self.index = np.frombuffer(self._index_area, np.uint64)
        self.starts = np.arange(shards, dtype=np.int64) * _LEAST
        self.masks = np.full(shards, _LEAST - 1, np.int64)
        self.used = np.zeros(shards, np.int64)
        self._bump = least
        #: Slots that shards have, in sum: asked for at every push of every table.
        self._held = least
        self._huge = False
        self._regions: dict[int, list[int]] = {}
        self._kind, self._scalars = init_of(spec.init)
        self._seed = seed_of(spec.name, spec.init)
        self._float = np.dtype(spec.dtype)
        self._writes = 0
        self._recent = Recent(shards) if logged and shards <= MOST_SHARDS else None
        self._found: tuple[int, np.ndarray, tuple[np.ndarray, np.ndarray, int]] | None = None
        #: Where the rows of the last reads are, by how many ids, the first and the last: a push of the same ids mostly follows, and need
        #: not look for them. Where others lie between, nothing is lost: of each row that is known it is seen whether it is the id's.
        self._read: dict[tuple[int, int, int], np.ndarray] = {}
        self._ruled: tuple[tuple[float | None, int | None], tuple[np.ndarray, np.ndarray, np.ndarray]] | None = None
        self._absent = np.empty(0, np.int64)
        self._ring = np.empty((2, 2 * k.BATCH), np.int64)
        self._nearest = np.full(spec.dim, 1 << 15, np.uint16)
        self._draws = np.zeros(spec.dim, np.uint16)
        self._scratch = np.zeros(2 * spec.dim + 2, self._float)

    def _view(self) -> None:
        self.ri = np.frombuffer(self._area, np.int64)
        self.rc = self.ri.view(self.spec.dtype)
        self.r4 = self.ri.view(np.float32)
        self.r2 = self.ri.view(np.int16)
        self.r1 = self.ri.view(np.int8)

    # Room

    @property
    def count(self) -> int:
        """How many rows there are."""
        return int(self.used.sum())

    @property
    def spilled(self) -> int:
        """Bytes of rows in a file."""
        return 0 if self._file is None else int(self.free[1]) * self.layout.stride

    @property
    def bytes(self) -> int:
        """Memory in use: rows (also those given back, which are used again) and index; what is spilled is not in memory."""
        rows = 0 if self._file is not None else int(self.free[1]) * self.layout.stride
        return rows + self._held * 8

    def need(self, missing: np.ndarray) -> int:
        """Bytes that rows not yet there would take, `missing` of them per shard."""
        new = self._fresh(missing)
        grown = self._grown(missing)
        index = int((grown[1] - (self.masks[grown[0]] + 1)).sum()) * 8
        return index + (0 if self._file is not None else new * self.layout.stride)

    def _fresh(self, missing: np.ndarray) -> int:
        """Rows that are not made of ones given back."""
        return max(0, int(missing.sum()) - int(self.free[2]))

    def _grown(self, missing: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The shards that must grow to take that many more, and how many slots each then has."""
        wanted = self.used + missing
        which = np.flatnonzero(wanted > LOAD * (self.masks + 1))
        slots = np.exp2(np.ceil(np.log2(wanted[which] / LOAD + 1))).astype(np.int64)
        return which, np.maximum(slots, _LEAST)

    def most_need(self, new: int) -> int | None:
        """Bytes that so many new rows take at most, whatever their shards; None: there may be no room for them here."""
        # A shard that grows has at most twice the slots that LOAD asks for, and one to round up.
        slots = int(2 * (self.count + new) / LOAD) + 2 * self.shards
        rows = int(self.free[1]) + new
        fits = rows <= self.most + 1 and self._bump + slots <= self._slots
        claimed = self._file is None or rows * self.layout.stride <= self._claimed
        return new * self.layout.stride + 8 * slots if fits and claimed else None

    def fits(self, missing: np.ndarray) -> bool:
        """Whether the reserved addresses take that many more."""
        new = self._fresh(missing)
        return (
            int(self.free[1]) + new <= self.most + 1 and self._bump + int(self._grown(missing)[1].sum()) <= self._slots
        )

    def claim(self, missing: np.ndarray) -> None:
        """Takes what rows not yet there need of the spill file, if that is where they go. Raises StoreFull before anything changes."""
        self._claim(int(self.free[1]) + self._fresh(missing))

    def grow(self, missing: np.ndarray) -> None:
        """Makes the index large enough; afterwards that many more rows can be made."""
        if not self._huge and self.bytes + self.need(missing) > _HUGE:
            self._huge = True
            for area in (self._area, self._index_area) if self._file is None else (self._index_area,):
                if hasattr(mmap, "MADV_HUGEPAGE"):
                    area.madvise(mmap.MADV_HUGEPAGE)
        which, slots = self._grown(missing)
        for shard, size in zip(which.tolist(), slots.tolist(), strict=True):
            start, mask = int(self.starts[shard]), int(self.masks[shard])
            self._held += size - (mask + 1)
            to = self._region(size)
            k.move(self.index, start, mask, to, size - 1)
            self.starts[shard], self.masks[shard] = to, size - 1
            self._let_go(start, mask + 1)

    def _region(self, slots: int) -> int:
        kept = self._regions.get(slots)
        if kept:
            return kept.pop()
        at = self._bump
        self._bump += slots
        return at

    def _let_go(self, start: int, slots: int) -> None:
        first, last = start * 8, (start + slots) * 8
        low, high = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
        if high > low:
            self._index_area.madvise(mmap.MADV_DONTNEED, low, high - low)
            self.index[start : low // 8] = 0
            self.index[high // 8 : start + slots] = 0
        else:
            self.index[start : start + slots] = 0
        self._regions.setdefault(slots, []).append(start)

    def _claim(self, rows: int) -> None:
        """Blocks of the spill file for that many rows: writing to a mapped hole of a full disk would be a signal."""
        size = rows * self.layout.stride
        if self._file is None or size <= self._claimed:
            return
        size = min(-(-size // _CLAIM) * _CLAIM, (self.most + 1) * self.layout.stride)
        try:
            os.posix_fallocate(self._file, 0, size)
        except OSError as error:
            raise StoreFull(
                f"table {self.spec.name}: its spill file cannot grow to {size} bytes ({error}); nothing was applied; make room on "
                "that disk, expire old rows, or add servers"
            ) from error
        self._claimed = size

    # Finding, reading, writing

    def check(self, step: int | None) -> None:
        """Whether the rule can go by that step."""
        given_step(self.spec.rule, step, self.spec.name)

    def find(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """The row of each id (0: none), how many there are none of per shard, and in sum."""
        # An entry is found when it is prepared and again when it is applied: the second time it is known.
        if self._found is not None and self._found[0] == self._writes and np.array_equal(self._found[1], ids):
            return self._found[2]
        where = np.zeros(len(ids), np.int64)
        missing = np.zeros(self.shards, np.int64)
        absent = k.find(
            self.index, self.starts, self.masks, self._shift, self.ri, self.words, ids, where, self._ring, missing
        )
        self._found = (self._writes, ids.copy(), (where, missing, absent))
        return where, missing, absent

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Weights in the table's arithmetic."""
        out = np.empty((len(ids), self.spec.dim), self._float)
        known = np.zeros(len(ids), np.int64)
        k.read(
            self.index, self.starts, self.masks, self._shift, ids, known, self._ring, self._places, self.ri, self.rc, self.r4, self.r2, self.r1,
            self._kind, self._scalars, self._seed, self._nearest, out,
        )  # fmt: skip
        if self.native and 0 < len(ids) <= _READ_IDS // 8:
            while self._read and (
                len(self._read) >= _READS or len(ids) + sum(key[0] for key in self._read) > _READ_IDS
            ):
                del self._read[next(iter(self._read))]
            self._read[len(ids), ids.item(0), ids.item(-1)] = known
        return out

    def update(
        self, ids: np.ndarray, values: np.ndarray, lsn: np.ndarray, *, lr: float | None, step: int | None
    ) -> np.ndarray:
        """Updates the rows that are here, of a table that stores them as it computes; which of the ids (unique) have none."""
        self._writes += 1
        n = len(ids)
        if n > len(self._absent):
            self._absent = np.empty(2 * n, np.int64)
        known = self._read.pop((n, ids.item(0), ids.item(-1)), None) if n and self._read else None
        if known is None:
            known = np.zeros(n, np.int64)
        c, p, switches = self._rule(lr, step)
        missing = k.update(
            self.index, self.starts, self.masks, self._shift, ids, known, self._ring, values, lsn, self._places, self.ri, self.rc,
            c, p, switches, self._scratch, self._absent,
        )  # fmt: skip
        if self._recent is not None:
            self._recent.add(ids if not missing else ids[known != 0], lsn, int(self.free[1]))
        return self._absent[:missing]

    def _rule(self, lr: float | None, step: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rule's numbers, in the arithmetic's float and in float64, and its choices; the last ones are kept."""
        step = step if self.spec.rule.steps == "given" else None
        if self._ruled is None or self._ruled[0] != (lr, step):
            p, switches = self.numbers(lr, step, setting=False)
            self._ruled = ((lr, step), (p.astype(self._float), p, switches))
        return self._ruled[1]

    def write(
        self,
        ids: np.ndarray,
        where: np.ndarray,
        values: np.ndarray,
        lsn: np.ndarray,
        *,
        lr: float | None,
        step: int | None,
        setting: bool,
    ) -> None:
        """Updates or sets rows; ids are unique, `where` is fresh and there is room."""
        self._writes += 1
        if self._recent is not None:
            self._recent.add(ids, lsn, int(self.free[1]))
        p, switches = self.numbers(lr, step, setting=setting)
        k.apply(
            self.index, self.starts, self.masks, self.used, self._shift, self.free, ids, where, values, lsn,
            self._places, self.ri, self.rc, self.r4, self.r2, self.r1, self._kind, self._scalars, self._seed,
            p.astype(self._float), p, switches, self._scratch, self._nearest, self._draws, setting,
        )  # fmt: skip

    def numbers(self, lr: float | None, step: int | None, *, setting: bool) -> tuple[np.ndarray, np.ndarray]:
        """The rule's scalars and switches, as the kernels read them."""
        rule, step = self.spec.rule, 1 if setting else step
        switches = switches_of(rule, self.layout.count, sparse=True, step=step, name=self.spec.name)
        return scalars_of(rule, lr, self.spec.dim), switches

    # Shards

    def of(self, shard: int, *, clear: bool = False) -> np.ndarray:
        """The numbers of a shard's rows; with `clear` they are given back."""
        if clear:
            self._writes += 1
            self._read.clear()
        rows = np.empty(int(self.used[shard]), np.int64)
        found = k.walk(
            self.index, int(self.starts[shard]), int(self.masks[shard]), self.ri, self.words, self.free, clear, rows
        )
        assert found == len(rows), (self.spec.name, shard, found, len(rows))
        if clear:
            self.used[shard] = 0
            self._held += _LEAST - (int(self.masks[shard]) + 1)
            self._let_go(int(self.starts[shard]), int(self.masks[shard]) + 1)
            self.starts[shard], self.masks[shard] = self._region(_LEAST), _LEAST - 1
        return rows

    def written(self, shards: np.ndarray, since: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Of each shard: ids and log numbers of the rows that were written after a log number."""
        known, late = np.zeros(len(shards), bool), np.empty(0, np.int64)
        if self._recent is not None:
            known, late = self._recent.since(shards, since)
        where = self.find(late)[0]
        late, where = late[where != 0], where[where != 0]
        lsns, homes = self.column(where, 1), shard_of(late, self.shards)
        for shard, after, logged in zip(shards.tolist(), since.tolist(), known, strict=True):
            if logged:
                mine = (homes == shard) & (lsns > after)
                yield late[mine], lsns[mine]
            else:
                yield self._walked(shard, after)

    def _walked(self, shard: int, since: int) -> tuple[np.ndarray, np.ndarray]:
        ids, lsns = np.empty((2, int(self.used[shard])), np.int64)
        n = k.written(
            self.index, int(self.starts[shard]), int(self.masks[shard]), self.ri, self.words, since, ids, lsns
        )
        return ids[:n], lsns[:n]

    def column(self, rows: np.ndarray, at: int) -> np.ndarray:
        """Ids (0) or log numbers (1) of rows."""
        out = np.empty(len(rows), np.int64)
        k.column(self.ri, self.words, rows, at, out)
        return out

    def whole(self, rows: np.ndarray) -> np.ndarray:
        """Copies of rows as they lie, (rows, words) int64."""
        out = np.empty(len(rows) * self.words, np.int64)
        k.copy_out(self.ri, self.words, rows, out)
        return out.reshape(len(rows), self.words)

    def insert(self, rows: np.ndarray) -> None:
        """Rows of one shard that `whole` gave, whose ids are not here; there is room."""
        self._writes += 1
        if self._recent is not None and len(rows):
            self._recent.replaced(int(shard_of(rows[:1, 0], self.shards)[0]), int(rows[:, 1].max()))
        k.copy_in(
            self.index,
            self.starts,
            self.masks,
            self.used,
            self._shift,
            self.ri,
            self.words,
            self.free,
            rows.reshape(-1),
        )

    def remove(self, ids: np.ndarray) -> None:
        """Takes rows out, those that are here."""
        self._writes += 1
        self._read.clear()
        k.remove(self.index, self.starts, self.masks, self.used, self._shift, self.ri, self.words, self.free, ids)

    def sorted(self, shard: int) -> np.ndarray:
        """The numbers of a shard's rows in the order of their ids."""
        rows = self.of(shard)
        return rows[np.argsort(self.column(rows, 0))]

    def close(self) -> None:
        """Gives the spill file back; memory goes with the last view."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _spilled(folder: Path, size: int, name: str) -> tuple[int, mmap.mmap]:
    """A file without a name in `folder`, mapped; it is gone when it is closed, however the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file, path = tempfile.mkstemp(prefix="rows-", dir=folder)
        os.unlink(path)
        os.ftruncate(file, size)
        return file, mmap.mmap(file, size)
    except OSError as error:
        raise StoreError(
            f"table {name}: no spill file of {size} bytes in {folder} ({error}); give another spill= or none"
        ) from error
