"""Tables whose rule moves every row at every step, without touching every row: a row is brought up to date when it is read or pushed to.

A row keeps the number of updates that it has had (its mark). Of those that it missed the gradient was zero, so that they follow from the row
and from the rates alone, which are kept per update (a `Course`). A read computes the row as it is by now and writes nothing; a push brings
its rows up to date and updates them. A row that was never pushed to is brought up from its first value.

- Weights and momentum of a missed update are linear in both: the product of all of them is two by two numbers, found in a tree of products.
- Adam's averages shrink by constants: a missed update is one division per number, and they end where the rest is below rounding.
- Weight decay through Adam's or Adagrad's gradient has no such form: every missed update is computed.

The compiled loops are in `kernels.missed`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from echelon.server.kernels.missed import (
    ADAGRAD,
    AVERAGES,
    B1,
    B2,
    BLOCK,
    COUPLED,
    DECAY,
    DIM,
    HOW,
    LINEAR,
    bring,
    extend,
)
from echelon.server.protocol.hashing import shard_of
from echelon.server.protocol.specs import RULES, Rule, StoreError, Table
from echelon.server.store.sparse_table import Rows, init_of, layout_of, scalars_of, seed_of

#: Numbers times updates that are brought up to date in one go, about 50 ms; between two the server says that it lives.
_AT_ONCE = 10_000_000
#: Updates after which Adam's averages have mostly ended.
_ENDED = 1000


def numbers_of(rule: Rule) -> np.ndarray:
    """A rule as the loops read it."""
    how = {"sgd": LINEAR, "momentum": LINEAR, "adagrad": ADAGRAD}.get(rule.kind, AVERAGES)
    if rule.kind == "adam" and rule.weight_decay and not rule.decoupled:
        how = COUPLED
    moving = rule.kind == "momentum"
    return np.array(
        [
            how,
            rule.momentum if moving else 0.0,
            1.0 - rule.dampening if moving else 1.0,
            rule.nesterov,
            rule.weight_decay,
            rule.beta1,
            rule.beta2,
            rule.epsilon,
            rule.initial if rule.kind == "adagrad" else 0.0,
        ]
    )


class Course:
    """The updates that rows have had, or miss: the rate of each, and what is kept of them to be quick."""

    def __init__(self, rule: Rule) -> None:
        self.now = 0
        self.numbers = numbers_of(rule)
        self.rates = np.zeros(BLOCK)
        adam, tree = rule.kind == "adam", rule.kind != "adagrad"
        self.terms = np.zeros((BLOCK if adam else 0, 2))
        self.nodes = np.zeros((2 if tree else 0, 4))
        self.most, self.least = 0.0, 1.0

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return self.rates.nbytes + self.terms.nbytes + self.nodes.nbytes

    @property
    def work(self) -> int:
        """How many updates are computed one by one for a row that had none, about."""
        how, ends = self.numbers[HOW], self.numbers[B1] < math.sqrt(self.numbers[B2])
        if how == LINEAR:
            return 1
        return min(self.now, _ENDED) if how == AVERAGES and ends else self.now

    def copy(self) -> Course:
        """One that goes on by itself."""
        other = object.__new__(Course)
        other.now, other.numbers, other.most, other.least = self.now, self.numbers, self.most, self.least
        other.rates, other.terms, other.nodes = self.rates.copy(), self.terms.copy(), self.nodes.copy()
        return other

    def extend(self, rates: np.ndarray) -> None:
        """As many updates more, at these rates."""
        first, last = self.now, self.now + len(rates)
        while last > len(self.rates):
            self._double()
        self.rates[first:last] = rates
        extend(self.numbers, self.rates, self.terms, self.nodes, first, last)
        if len(self.terms):
            self.most = max(self.most, float(np.abs(self.terms[first:last, 0]).max(initial=0.0)))
        self.least = min(self.least, float((1.0 - rates * self.numbers[DECAY]).min(initial=1.0)))
        self.now = last

    def _double(self) -> None:
        self.rates = np.concatenate([self.rates, np.zeros_like(self.rates)])
        self.terms = np.concatenate([self.terms, np.zeros_like(self.terms)])
        old, leaves = self.nodes, len(self.nodes) // 2
        self.nodes = np.zeros((2 * len(old), 4))
        while leaves:  # each level of the tree has its numbers, from as many as it has nodes on
            self.nodes[2 * leaves : 3 * leaves] = old[leaves : 2 * leaves]
            leaves //= 2

    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        """The rates, each once as long as it stays: up to which update, and the rate."""
        rates = self.rates[: self.now]
        ends = np.append(np.flatnonzero(rates[1:] != rates[:-1]) + 1, self.now)[: self.now]
        return ends.astype(np.int64), rates[ends - 1]

    def follow(self, ends: np.ndarray, rates: np.ndarray) -> None:
        """Take up what `runs` gave, from the beginning."""
        self.extend(np.repeat(rates, np.diff(ends, prepend=0)))


def course_of(spec: Table, ends: np.ndarray, rates: np.ndarray) -> Course:
    """What `Course.runs` gave, checked."""
    good = ends.dtype == np.int64 and rates.dtype == np.float64 and ends.ndim == 1 and ends.shape == rates.shape
    if not good or (np.diff(ends, prepend=0) <= 0).any() or not np.isfinite(rates).all():
        raise StoreError(
            f"{spec.name}: learning rates {ends}, {rates} are no course of updates; was it mixed up on the way?"
        )
    course = Course(spec.rule)
    course.follow(ends, rates)
    return course


class _Loops:
    """The loops with what they need of a table."""

    def __init__(self, spec: Table, alive: Callable[[], None] = lambda: None) -> None:
        self._alive = alive
        layout = layout_of(spec)
        self.words = layout.stride // 8
        self._layout = np.array([self.words, spec.dim, layout.weights, layout.state, layout.states], np.int64)
        self._scratch = np.zeros(max(5 * spec.dim, 8), spec.dtype)
        self._c = np.zeros(8, spec.dtype)
        self._nothing = np.empty((0, spec.dim), spec.dtype)

    def read(self, course: Course, where: np.ndarray, ri: np.ndarray, rc: np.ndarray, out: np.ndarray) -> None:
        """Bring rows up to date that were copied to `out`."""
        self._bring(course, where, ri, rc, out, -1)

    def write(self, course: Course, where: np.ndarray, ri: np.ndarray, rc: np.ndarray, mark: int) -> None:
        """Bring rows up to date in place."""
        self._bring(course, where, ri, rc, self._nothing, mark)

    def _bring(
        self, course: Course, where: np.ndarray, ri: np.ndarray, rc: np.ndarray, out: np.ndarray, mark: int
    ) -> None:
        rows = max(1, _AT_ONCE // max(1, course.work * int(self._layout[DIM])))
        for first in range(0, len(where), rows):
            bring(
                course.numbers, course.rates, course.terms, course.nodes, course.most, course.least, course.now,
                self._layout, where[first : first + rows], ri, rc, out[first : first + rows], self._scratch, self._c, mark,
            )  # fmt: skip
            self._alive()


class Moving(Rows):
    """The rows of a table whose rule moves all of them at every update (`Rule.every`).

    Shards that had the same updates share a course: those of one route have, as every push goes to all of it.
    """

    def __init__(
        self, spec: Table, *, shards: int, room: int, spill: Path | None, alive: Callable[[], None] = lambda: None
    ) -> None:
        """`alive`: called every 50 ms or so while many updates are made up for."""
        super().__init__(spec, shards=shards, room=room, spill=spill)
        self._loops = _Loops(spec, alive)
        self._courses = {0: Course(spec.rule)}
        self._course_of = np.zeros(shards, np.int64)

    @property
    def bytes(self) -> int:
        """Memory in use, that of the updates' rates too."""
        return super().bytes + sum(course.bytes for course in self._courses.values())

    def course(self, shard: int) -> Course:
        """The updates that a shard has had."""
        return self._courses[int(self._course_of[shard])]

    def advance(self, shards: np.ndarray, lr: float | None) -> None:
        """An update of all rows of these shards; the gradients that it brought are applied already."""
        rate = np.array([self.spec.rule.lr if lr is None else float(lr)])
        for number in np.unique(self._course_of[shards]).tolist():
            mine = shards[self._course_of[shards] == number]
            if len(mine) < np.count_nonzero(self._course_of == number):
                self._share(mine, self._courses[number].copy())
                number = int(self._course_of[mine[0]])
            self._courses[number].extend(rate)

    def take(self, shard: int, course: Course) -> None:
        """A shard came from elsewhere, with the updates that it has had."""
        for other in self._courses.values():
            if other.now == course.now and np.array_equal(other.rates[: other.now], course.rates[: course.now]):
                course = other
                break
        self._share(np.array([shard]), course)

    def _share(self, shards: np.ndarray, course: Course) -> None:
        known = next((number for number, each in self._courses.items() if each is course), None)
        number = max(self._courses) + 1 if known is None else known
        self._courses[number] = course
        self._course_of[shards] = number
        left = set(self._course_of.tolist())
        self._courses = {each: kept for each, kept in self._courses.items() if each in left}

    def of(self, shard: int, *, clear: bool = False) -> np.ndarray:
        """The numbers of a shard's rows; with `clear` they are given back, and the shard has had no update."""
        if clear and self.course(shard).now:
            self.take(shard, Course(self.spec.rule))
        return super().of(shard, clear=clear)

    def _by_course(self, ids: np.ndarray) -> Iterator[tuple[Course, slice | np.ndarray]]:
        if len(self._courses) == 1:
            yield next(iter(self._courses.values())), slice(None)
            return
        numbers = self._course_of[shard_of(ids, self.shards)]
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            yield self._courses[number], slice(None) if mine.all() else np.flatnonzero(mine)

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Weights as they are by now."""
        out = super().read(ids)
        where = self.find(ids)[0]
        for course, mine in self._by_course(ids):
            if isinstance(mine, slice):
                self._loops.read(course, where, self.ri, self.rc, out)
            else:
                part = out[mine]
                self._loops.read(course, where[mine], self.ri, self.rc, part)
                out[mine] = part
        return out

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
        """Sets rows, or applies what a push brings of the next update."""
        if setting:
            self._set(ids, where, values, lsn)
            return
        fresh = where == 0
        if fresh.any():
            new = ids[fresh]
            super().write(new, where[fresh], super().read(new), lsn, lr=None, step=None, setting=True)
            self._mark(new, 0)
            where = self.find(ids)[0]
        for course, mine in self._by_course(ids):
            self._loops.write(course, where[mine], self.ri, self.rc, course.now + 1)
            super().write(ids[mine], where[mine], values[mine], lsn, lr=lr, step=course.now + 1, setting=False)

    def _set(self, ids: np.ndarray, where: np.ndarray, values: np.ndarray, lsn: np.ndarray) -> None:
        super().write(ids, where, values, lsn, lr=None, step=None, setting=True)
        for course, mine in self._by_course(ids):
            self._mark(ids[mine], course.now)

    def _mark(self, ids: np.ndarray, mark: int) -> None:
        self.ri[self.find(ids)[0] * self.words + self.words - 1] = mark

    def numbers(self, lr: float | None, step: int | None, *, setting: bool) -> tuple[np.ndarray, np.ndarray]:
        """The rule of one update: bias is corrected by the table's count of them, and epsilon is Adam's, not SparseAdam's."""
        rule = self.spec.rule
        count = 1 if step is None else step
        scalars = scalars_of(rule, lr, self.spec.dim)
        if count == 1:
            scalars[4] = 1.0  # torch's first momentum is the gradient itself, not dampened
        return scalars, np.array([RULES.index(rule.kind), rule.nesterov, False, -1, count], np.int64)


def brought(spec: Table, rows: np.ndarray, course: Course) -> np.ndarray:
    """Whole rows (n, words), as a snapshot has them, up to date; copies."""
    loops = _Loops(spec)
    ri = np.concatenate([np.zeros((1, loops.words), np.int64), rows]).reshape(-1)
    loops.write(course, np.arange(1, len(rows) + 1), ri, ri.view(spec.dtype), course.now)
    return ri.reshape(-1, loops.words)[1:]


def first_rows(spec: Table, ids: np.ndarray, course: Course) -> np.ndarray:
    """Rows that were never pushed to, as they are after these updates."""
    from echelon.server import kernels

    kind, scalars = init_of(spec.init)
    out = np.empty((len(ids), spec.dim), spec.dtype)
    for row, number in zip(out, ids.tolist(), strict=True):
        kernels.initial(kind, scalars[0], scalars[1], seed_of(spec.name, spec.init), number, row)
    loops = _Loops(spec)
    ri = np.zeros(loops.words, np.int64)
    loops.read(course, np.zeros(len(ids), np.int64), ri, ri.view(spec.dtype), out)
    return out
