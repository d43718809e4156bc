"""Lazy tables: their rule moves every row at every step, without touching every row. A row is brought up to date when it is read or pushed to.

A row stores the number of updates that it has had. In the updates that it missed its gradient was zero, so they follow from the row and from
the learning rates alone, which are kept per update (`UpdateHistory`). A read computes the present row and writes nothing; a push brings its
rows up to date and updates them. A row that was never pushed to is brought up to date from its first value.

- Weights and momentum are linear in a missed update: the product of all of them is a 2 x 2 matrix, computed from a tree of products.
- Adam's averages shrink by constants: a missed update is one division per number, and they end where the rest is below rounding.
- Weight decay through Adam's or Adagrad's gradient has no closed form: every missed update is computed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from echelon.server.kernels import missed_updates as k
from echelon.server.protocol.hashing import shard_of
from echelon.server.protocol.specs import RULE_KINDS, Rule, StoreError, Table
from echelon.server.store.row_layout import encode_rule_params, initial_values, make_row_layout
from echelon.server.store.sparse_table import SparseTable

#: Numbers times updates per kernel call, about 50 ms; between two calls the server shows that it is alive.
_MAX_WORK_PER_CALL = 10_000_000
_ADAM_TAIL_UPDATES = 1000  # updates after which Adam's averages have mostly decayed


def encode_lazy_params(rule: Rule) -> np.ndarray:
    """A rule in the order of `kernels.missed_updates`."""
    method = {"sgd": k.LINEAR, "momentum": k.LINEAR, "adagrad": k.ADAGRAD}.get(rule.kind, k.ADAM)
    if rule.kind == "adam" and rule.weight_decay and not rule.decoupled:
        method = k.ADAM_COUPLED
    momentum = (rule.momentum, 1.0 - rule.dampening) if rule.kind == "momentum" else (0.0, 1.0)
    initial = rule.initial if rule.kind == "adagrad" else 0.0
    adam = (rule.beta1, rule.beta2, rule.epsilon)
    return np.array([method, *momentum, rule.nesterov, rule.weight_decay, *adam, initial])


class UpdateHistory:
    """The updates of a shard: the learning rate of each, and terms derived from them."""

    def __init__(self, rule: Rule) -> None:
        self.count = 0
        self.params = encode_lazy_params(rule)
        self.rates = np.zeros(k.UPDATES_PER_LEAF)
        is_adam, has_tree = rule.kind == "adam", rule.kind != "adagrad"
        self.adam_terms = np.zeros((k.UPDATES_PER_LEAF if is_adam else 0, 2))
        self.product_tree = np.zeros((2 if has_tree else 0, 4))
        self.max_rate, self.min_decay_factor = 0.0, 1.0

    @property
    def bytes(self) -> int:
        return self.rates.nbytes + self.adam_terms.nbytes + self.product_tree.nbytes

    @property
    def replayed_updates(self) -> int:
        """About how many updates are computed one by one for a row that had none."""
        method, converges = self.params[k.METHOD], self.params[k.B1] < math.sqrt(self.params[k.B2])
        if method == k.LINEAR:
            return 1
        return min(self.count, _ADAM_TAIL_UPDATES) if method == k.ADAM and converges else self.count

    def extend(self, rates: np.ndarray) -> None:
        first, last = self.count, self.count + len(rates)
        while last > len(self.rates):
            self._double_capacity()
        self.rates[first:last] = rates
        k.extend_products(self.params, self.rates, self.adam_terms, self.product_tree, first, last)
        if len(self.adam_terms):
            self.max_rate = max(self.max_rate, float(np.abs(self.adam_terms[first:last, 0]).max(initial=0.0)))
        self.min_decay_factor = min(self.min_decay_factor, float((1.0 - rates * self.params[k.DECAY]).min(initial=1.0)))
        self.count = last

    def _double_capacity(self) -> None:
        self.rates = np.concatenate([self.rates, np.zeros_like(self.rates)])
        self.adam_terms = np.concatenate([self.adam_terms, np.zeros_like(self.adam_terms)])
        old_tree, leaves = self.product_tree, len(self.product_tree) // 2
        self.product_tree = np.zeros((2 * len(old_tree), 4))
        while leaves:  # a level of n nodes lies at n ... 2 n - 1
            self.product_tree[2 * leaves : 3 * leaves] = old_tree[leaves : 2 * leaves]
            leaves //= 2

    def to_rate_runs(self) -> tuple[np.ndarray, np.ndarray]:
        """The rates, run-length encoded: up to which update, and the rate."""
        rates = self.rates[: self.count]
        ends = np.append(np.flatnonzero(rates[1:] != rates[:-1]) + 1, self.count)[: self.count]
        return ends.astype(np.int64), rates[ends - 1]


def history_from_runs(spec: Table, ends: np.ndarray, rates: np.ndarray) -> UpdateHistory:
    """The inverse of `UpdateHistory.to_rate_runs`, checked."""
    is_valid = ends.dtype == np.int64 and rates.dtype == np.float64 and ends.ndim == 1 and ends.shape == rates.shape
    if not is_valid or (np.diff(ends, prepend=0) <= 0).any() or not np.isfinite(rates).all():
        raise StoreError(f"{spec.name}: {ends}, {rates} are not runs of learning rates; was the data mixed up?")
    history = UpdateHistory(spec.rule)
    history.extend(np.repeat(rates, np.diff(ends, prepend=0)))
    return history


class _CatchUpKernel:
    """The kernel, with what it needs of a table. It reads rows from two views of the table's memory, int64 and float."""

    def __init__(self, spec: Table, keep_alive: Callable[[], None] = lambda: None) -> None:
        self._keep_alive = keep_alive
        layout = make_row_layout(spec)
        self.words, self._dim = layout.words, spec.dim
        offsets = (layout.weights_offset, layout.state_offset, layout.state_size)
        self._layout = np.array([self.words, spec.dim, *offsets], np.int64)
        self._scratch = (np.zeros(max(5 * spec.dim, 8), spec.dtype), np.zeros(8, spec.dtype))
        self._no_output = np.empty((0, spec.dim), spec.dtype)

    def __call__(
        self,
        history: UpdateHistory,
        row_numbers: np.ndarray,
        views: tuple[Any, ...],
        *,
        out: np.ndarray | None = None,
        update_count: int = -1,
    ) -> None:
        """Bring weights up to date in `out`; or rows in place, which then have had `update_count` updates."""
        out = self._no_output if out is None else out
        rates = (history.params, history.rates, history.adam_terms, history.product_tree)
        bounds = (history.max_rate, history.min_decay_factor, history.count)
        rows_per_call = max(1, _MAX_WORK_PER_CALL // max(1, history.replayed_updates * self._dim))
        for first in range(0, len(row_numbers), rows_per_call):
            rows = slice(first, first + rows_per_call)
            row_args = (self._layout, row_numbers[rows], *views, out[rows], *self._scratch)
            k.apply_missed_updates(*rates, *bounds, *row_args, update_count)
            self._keep_alive()


class LazySparseTable(SparseTable):
    """A table whose rule moves all rows at every update (`Rule.every`).

    Shards that had the same updates share a history: those of one route do, as every push goes to all of it.
    """

    def __init__(self, spec: Table, *, keep_alive: Callable[[], None] = lambda: None, **options: Any) -> None:
        """`keep_alive` is called every 50 ms or so while missed updates are computed."""
        super().__init__(spec, **options)
        self._catch_up = _CatchUpKernel(spec, keep_alive)
        self._kernel_views = (self.int64_view, self.float_view)
        self._histories = {0: UpdateHistory(spec.rule)}
        self._history_of_shard = np.zeros(self.num_shards, np.int64)

    @property
    def bytes(self) -> int:
        return super().bytes + sum(history.bytes for history in self._histories.values())

    def get_history(self, shard: int) -> UpdateHistory:
        return self._histories[int(self._history_of_shard[shard])]

    def advance(self, shards: np.ndarray, lr: float | None) -> None:
        """An update of all rows of these shards, whose gradients are already applied."""
        rate = np.array([self.spec.rule.lr if lr is None else float(lr)])
        for number in np.unique(self._history_of_shard[shards]).tolist():
            selected = shards[self._history_of_shard[shards] == number]
            history = self._histories[number]
            if len(selected) < np.count_nonzero(self._history_of_shard == number):
                history = copy.deepcopy(history)
                self._assign_history(selected, history)
            history.extend(rate)

    def set_history(self, shard: int, history: UpdateHistory) -> None:
        """A shard was installed, with the updates that it has had."""
        rates, others = history.rates[: history.count], self._histories.values()
        same = (other for other in others if np.array_equal(other.rates[: other.count], rates))
        self._assign_history(np.array([shard]), next(same, history))

    def _assign_history(self, shards: np.ndarray, history: UpdateHistory) -> None:
        new_number = max(self._histories) + 1
        number = next((number for number, other in self._histories.items() if other is history), new_number)
        self._histories[number], self._history_of_shard[shards] = history, number
        used = set(self._history_of_shard.tolist())
        self._histories = {number: other for number, other in self._histories.items() if number in used}

    def rows_of_shard(self, shard: int, *, clear: bool = False) -> np.ndarray:
        """The row numbers of a shard; `clear` frees the rows, and the shard has had no update."""
        if clear and self.get_history(shard).count:
            self.set_history(shard, UpdateHistory(self.spec.rule))
        return super().rows_of_shard(shard, clear=clear)

    def _group_by_history(self, ids: np.ndarray) -> Iterator[tuple[UpdateHistory, slice | np.ndarray]]:
        if len(self._histories) == 1:
            yield next(iter(self._histories.values())), slice(None)
            return
        numbers = self._history_of_shard[shard_of(ids, self.num_shards)]
        for number in np.unique(numbers).tolist():
            selected = numbers == number
            yield self._histories[number], slice(None) if selected.all() else np.flatnonzero(selected)

    def read(self, ids: np.ndarray) -> np.ndarray:
        weights = super().read(ids)
        row_numbers = self.find(ids)[0]
        for history, selected in self._group_by_history(ids):
            part = weights[selected]  # a view if all are selected, else a copy
            self._catch_up(history, row_numbers[selected], self._kernel_views, out=part)
            if not isinstance(selected, slice):
                weights[selected] = part
        return weights

    def write(
        self, ids: np.ndarray, row_numbers: np.ndarray, values: np.ndarray, lsn: np.ndarray, **options: Any
    ) -> None:
        """Set rows, or apply the gradients of the next update."""
        if options.get("is_assignment"):
            super().write(ids, row_numbers, values, lsn, is_assignment=True)
            for history, selected in self._group_by_history(ids):
                self._set_update_counts(ids[selected], history.count)
            return
        if (is_new := row_numbers == 0).any():
            new_ids = ids[is_new]
            super().write(new_ids, row_numbers[is_new], super().read(new_ids), lsn, is_assignment=True)
            self._set_update_counts(new_ids, 0)
            row_numbers = self.find(ids)[0]
        for history, selected in self._group_by_history(ids):
            some_ids, some_rows, next_update = ids[selected], row_numbers[selected], history.count + 1
            self._catch_up(history, some_rows, self._kernel_views, update_count=next_update)
            super().write(some_ids, some_rows, values[selected], lsn, lr=options.get("lr"), step=next_update)

    def _set_update_counts(self, ids: np.ndarray, update_count: int) -> None:
        self.int64_view[self.find(ids)[0] * self.words + self.words - 1] = update_count

    def encode_rule(self, lr: float | None, step: int | None, *, is_assignment: bool) -> tuple[np.ndarray, np.ndarray]:
        """One update: the bias correction goes by the table's update count, and epsilon is Adam's, not SparseAdam's."""
        rule, count = self.spec.rule, 1 if step is None else step
        params = encode_rule_params(rule, lr, self.spec.dim)
        if count == 1:
            params[4] = 1.0  # torch's first momentum is the gradient itself, not dampened
        return params, np.array([RULE_KINDS.index(rule.kind), rule.nesterov, False, -1, count], np.int64)


def bring_rows_up_to_date(spec: Table, rows: np.ndarray, history: UpdateHistory) -> np.ndarray:
    """Copies of whole rows (n, words) of a snapshot, up to date."""
    catch_up = _CatchUpKernel(spec)
    int64_view = np.concatenate([np.zeros((1, catch_up.words), np.int64), rows]).reshape(-1)
    views = (int64_view, int64_view.view(spec.dtype))
    catch_up(history, np.arange(1, len(rows) + 1), views, update_count=history.count)
    return int64_view.reshape(-1, catch_up.words)[1:]


def make_initial_rows(spec: Table, ids: np.ndarray, history: UpdateHistory) -> np.ndarray:
    """Rows that were never pushed to, after these updates."""
    catch_up, weights = _CatchUpKernel(spec), initial_values(spec, ids, spec.dim, spec.dtype)
    int64_view = np.zeros(catch_up.words, np.int64)
    catch_up(history, np.zeros(len(ids), np.int64), (int64_view, int64_view.view(spec.dtype)), out=weights)
    return weights
