"""Tables whose rule moves every row at every step, without touching every row: a row is brought up to date when it is read or pushed to.

A row keeps the number of updates that it has had (its mark). Of those that it missed the gradient was zero, so that they follow from the row
and from the rates alone, which are kept per update (a `UpdateHistory`). A read computes the row as it is by now and writes nothing; a push brings
its rows up to date and updates them. A row that was never pushed to is brought up from its first value.

- Weights and momentum of a missed update are linear in both: the product of all of them is two by two numbers, found in a tree of products.
- Adam's averages shrink by constants: a missed update is one division per number, and they end where the rest is below rounding.
- Weight decay through Adam's or Adagrad's gradient has no such form: every missed update is computed.

The compiled loops are in `kernels.missed_updates`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from echelon.server.kernels.missed_updates import (
    ADAGRAD,
    ADAM,
    ADAM_COUPLED,
    B1,
    B2,
    DECAY,
    DIM,
    LINEAR,
    METHOD,
    UPDATES_PER_LEAF,
    apply_missed_updates,
    extend_products,
)
from echelon.server.protocol.hashing import shard_of
from echelon.server.protocol.specs import RULE_KINDS, Rule, StoreError, Table
from echelon.server.store.sparse_table import SparseTable, derive_seed, encode_init, encode_rule_params, make_row_layout

#: Numbers times updates that are brought up to date in one go, about 50 ms; between two the server says that it lives.
_MAX_WORK_PER_CALL = 10_000_000
#: Updates after which Adam's averages have mostly ended.
_ADAM_TAIL_UPDATES = 1000


def encode_lazy_params(rule: Rule) -> np.ndarray:
    """A rule as the loops read it."""
    method = {"sgd": LINEAR, "momentum": LINEAR, "adagrad": ADAGRAD}.get(rule.kind, ADAM)
    if rule.kind == "adam" and rule.weight_decay and not rule.decoupled:
        method = ADAM_COUPLED
    has_momentum = rule.kind == "momentum"
    return np.array(
        [
            method,
            rule.momentum if has_momentum else 0.0,
            1.0 - rule.dampening if has_momentum else 1.0,
            rule.nesterov,
            rule.weight_decay,
            rule.beta1,
            rule.beta2,
            rule.epsilon,
            rule.initial if rule.kind == "adagrad" else 0.0,
        ]
    )


class UpdateHistory:
    """The updates that rows have had, or miss: the rate of each, and what is kept of them to be quick."""

    def __init__(self, rule: Rule) -> None:
        self.count = 0
        self.params = encode_lazy_params(rule)
        self.rates = np.zeros(UPDATES_PER_LEAF)
        is_adam, has_tree = rule.kind == "adam", rule.kind != "adagrad"
        self.adam_terms = np.zeros((UPDATES_PER_LEAF if is_adam else 0, 2))
        self.product_tree = np.zeros((2 if has_tree else 0, 4))
        self.max_rate, self.min_decay_factor = 0.0, 1.0

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        return self.rates.nbytes + self.adam_terms.nbytes + self.product_tree.nbytes

    @property
    def replayed_updates(self) -> int:
        """How many updates are computed one by one for a row that had none, about."""
        method, converges = self.params[METHOD], self.params[B1] < math.sqrt(self.params[B2])
        if method == LINEAR:
            return 1
        return min(self.count, _ADAM_TAIL_UPDATES) if method == ADAM and converges else self.count

    def copy(self) -> UpdateHistory:
        """One that goes on by itself."""
        copied = object.__new__(UpdateHistory)
        copied.count, copied.params, copied.max_rate, copied.min_decay_factor = (
            self.count,
            self.params,
            self.max_rate,
            self.min_decay_factor,
        )
        copied.rates, copied.adam_terms, copied.product_tree = (
            self.rates.copy(),
            self.adam_terms.copy(),
            self.product_tree.copy(),
        )
        return copied

    def extend(self, rates: np.ndarray) -> None:
        """As many updates more, at these rates."""
        first, last = self.count, self.count + len(rates)
        while last > len(self.rates):
            self._double_capacity()
        self.rates[first:last] = rates
        extend_products(self.params, self.rates, self.adam_terms, self.product_tree, first, last)
        if len(self.adam_terms):
            self.max_rate = max(self.max_rate, float(np.abs(self.adam_terms[first:last, 0]).max(initial=0.0)))
        self.min_decay_factor = min(self.min_decay_factor, float((1.0 - rates * self.params[DECAY]).min(initial=1.0)))
        self.count = last

    def _double_capacity(self) -> None:
        self.rates = np.concatenate([self.rates, np.zeros_like(self.rates)])
        self.adam_terms = np.concatenate([self.adam_terms, np.zeros_like(self.adam_terms)])
        old_tree, leaves = self.product_tree, len(self.product_tree) // 2
        self.product_tree = np.zeros((2 * len(old_tree), 4))
        while leaves:  # each level of the tree has its numbers, from as many as it has nodes on
            self.product_tree[2 * leaves : 3 * leaves] = old_tree[leaves : 2 * leaves]
            leaves //= 2

    def to_rate_runs(self) -> tuple[np.ndarray, np.ndarray]:
        """The rates, each once as long as it stays: up to which update, and the rate."""
        rates = self.rates[: self.count]
        ends = np.append(np.flatnonzero(rates[1:] != rates[:-1]) + 1, self.count)[: self.count]
        return ends.astype(np.int64), rates[ends - 1]

    def extend_by_runs(self, ends: np.ndarray, rates: np.ndarray) -> None:
        """Take up what `to_rate_runs` gave, from the beginning."""
        self.extend(np.repeat(rates, np.diff(ends, prepend=0)))


def history_from_runs(spec: Table, ends: np.ndarray, rates: np.ndarray) -> UpdateHistory:
    """What `UpdateHistory.to_rate_runs` gave, checked."""
    is_valid = ends.dtype == np.int64 and rates.dtype == np.float64 and ends.ndim == 1 and ends.shape == rates.shape
    if not is_valid or (np.diff(ends, prepend=0) <= 0).any() or not np.isfinite(rates).all():
        raise StoreError(
            f"{spec.name}: learning rates {ends}, {rates} are no course of updates; was it mixed up on the way?"
        )
    history = UpdateHistory(spec.rule)
    history.extend_by_runs(ends, rates)
    return history


class _CatchUpKernel:
    """The loops with what they need of a table."""

    def __init__(self, spec: Table, keep_alive: Callable[[], None] = lambda: None) -> None:
        self._keep_alive = keep_alive
        layout = make_row_layout(spec)
        self.words = layout.stride // 8
        self._layout = np.array(
            [self.words, spec.dim, layout.weights_offset, layout.state_offset, layout.state_size], np.int64
        )
        self._scratch = np.zeros(max(5 * spec.dim, 8), spec.dtype)
        self._cast = np.zeros(8, spec.dtype)
        self._no_output = np.empty((0, spec.dim), spec.dtype)

    def read(
        self,
        history: UpdateHistory,
        row_numbers: np.ndarray,
        int64_view: np.ndarray,
        float_view: np.ndarray,
        out: np.ndarray,
    ) -> None:
        """Bring rows up to date that were copied to `out`."""
        self._bring_up_to_date(history, row_numbers, int64_view, float_view, out, -1)

    def write(
        self,
        history: UpdateHistory,
        row_numbers: np.ndarray,
        int64_view: np.ndarray,
        float_view: np.ndarray,
        update_count: int,
    ) -> None:
        """Bring rows up to date in place."""
        self._bring_up_to_date(history, row_numbers, int64_view, float_view, self._no_output, update_count)

    def _bring_up_to_date(
        self,
        history: UpdateHistory,
        row_numbers: np.ndarray,
        int64_view: np.ndarray,
        float_view: np.ndarray,
        out: np.ndarray,
        update_count: int,
    ) -> None:
        rows_per_call = max(1, _MAX_WORK_PER_CALL // max(1, history.replayed_updates * int(self._layout[DIM])))
        for first in range(0, len(row_numbers), rows_per_call):
            apply_missed_updates(
                history.params, history.rates, history.adam_terms, history.product_tree, history.max_rate, history.min_decay_factor, history.count,
                self._layout, row_numbers[first : first + rows_per_call], int64_view, float_view, out[first : first + rows_per_call], self._scratch, self._cast, update_count,
            )  # fmt: skip
            self._keep_alive()


class LazySparseTable(SparseTable):
    """The rows of a table whose rule moves all of them at every update (`Rule.every`).

    Shards that had the same updates share a course: those of one route have, as every push goes to all of it.
    """

    def __init__(
        self,
        spec: Table,
        *,
        num_shards: int,
        address_space: int,
        spill: Path | None,
        keep_alive: Callable[[], None] = lambda: None,
    ) -> None:
        """`keep_alive`: called every 50 ms or so while many updates are made up for."""
        super().__init__(spec, num_shards=num_shards, address_space=address_space, spill=spill)
        self._loops = _CatchUpKernel(spec, keep_alive)
        self._histories = {0: UpdateHistory(spec.rule)}
        self._history_of_shard = np.zeros(num_shards, np.int64)

    @property
    def bytes(self) -> int:
        """Memory in use, that of the updates' rates too."""
        return super().bytes + sum(history.bytes for history in self._histories.values())

    def get_history(self, shard: int) -> UpdateHistory:
        """The updates that a shard has had."""
        return self._histories[int(self._history_of_shard[shard])]

    def advance(self, shards: np.ndarray, lr: float | None) -> None:
        """An update of all rows of these shards; the gradients that it brought are applied already."""
        rate = np.array([self.spec.rule.lr if lr is None else float(lr)])
        for history_number in np.unique(self._history_of_shard[shards]).tolist():
            selected = shards[self._history_of_shard[shards] == history_number]
            if len(selected) < np.count_nonzero(self._history_of_shard == history_number):
                self._assign_history(selected, self._histories[history_number].copy())
                history_number = int(self._history_of_shard[selected[0]])
            self._histories[history_number].extend(rate)

    def set_history(self, shard: int, history: UpdateHistory) -> None:
        """A shard came from elsewhere, with the updates that it has had."""
        for other in self._histories.values():
            if other.count == history.count and np.array_equal(
                other.rates[: other.count], history.rates[: history.count]
            ):
                history = other
                break
        self._assign_history(np.array([shard]), history)

    def _assign_history(self, shards: np.ndarray, history: UpdateHistory) -> None:
        known_number = next((number for number, other in self._histories.items() if other is history), None)
        number = max(self._histories) + 1 if known_number is None else known_number
        self._histories[number] = history
        self._history_of_shard[shards] = number
        used_numbers = set(self._history_of_shard.tolist())
        self._histories = {
            other: kept_history for other, kept_history in self._histories.items() if other in used_numbers
        }

    def rows_of_shard(self, shard: int, *, clear: bool = False) -> np.ndarray:
        """The numbers of a shard's rows; with `clear` they are given back, and the shard has had no update."""
        if clear and self.get_history(shard).count:
            self.set_history(shard, UpdateHistory(self.spec.rule))
        return super().rows_of_shard(shard, clear=clear)

    def _group_by_history(self, ids: np.ndarray) -> Iterator[tuple[UpdateHistory, slice | np.ndarray]]:
        if len(self._histories) == 1:
            yield next(iter(self._histories.values())), slice(None)
            return
        history_numbers = self._history_of_shard[shard_of(ids, self.num_shards)]
        for history_number in np.unique(history_numbers).tolist():
            selected = history_numbers == history_number
            yield self._histories[history_number], slice(None) if selected.all() else np.flatnonzero(selected)

    def read(self, ids: np.ndarray) -> np.ndarray:
        """Weights as they are by now."""
        weights = super().read(ids)
        row_numbers = self.find(ids)[0]
        for history, selected in self._group_by_history(ids):
            if isinstance(selected, slice):
                self._loops.read(history, row_numbers, self.int64_view, self.float_view, weights)
            else:
                selected_weights = weights[selected]
                self._loops.read(history, row_numbers[selected], self.int64_view, self.float_view, selected_weights)
                weights[selected] = selected_weights
        return weights

    def write(
        self,
        ids: np.ndarray,
        row_numbers: np.ndarray,
        values: np.ndarray,
        lsn: np.ndarray,
        *,
        lr: float | None,
        step: int | None,
        is_assignment: bool,
    ) -> None:
        """Sets rows, or applies what a push brings of the next update."""
        if is_assignment:
            self._assign_rows(ids, row_numbers, values, lsn)
            return
        is_new = row_numbers == 0
        if is_new.any():
            new_ids = ids[is_new]
            super().write(
                new_ids, row_numbers[is_new], super().read(new_ids), lsn, lr=None, step=None, is_assignment=True
            )
            self._set_update_counts(new_ids, 0)
            row_numbers = self.find(ids)[0]
        for history, selected in self._group_by_history(ids):
            self._loops.write(history, row_numbers[selected], self.int64_view, self.float_view, history.count + 1)
            super().write(
                ids[selected],
                row_numbers[selected],
                values[selected],
                lsn,
                lr=lr,
                step=history.count + 1,
                is_assignment=False,
            )

    def _assign_rows(self, ids: np.ndarray, row_numbers: np.ndarray, values: np.ndarray, lsn: np.ndarray) -> None:
        super().write(ids, row_numbers, values, lsn, lr=None, step=None, is_assignment=True)
        for history, selected in self._group_by_history(ids):
            self._set_update_counts(ids[selected], history.count)

    def _set_update_counts(self, ids: np.ndarray, update_count: int) -> None:
        self.int64_view[self.find(ids)[0] * self.words + self.words - 1] = update_count

    def encode_rule(self, lr: float | None, step: int | None, *, is_assignment: bool) -> tuple[np.ndarray, np.ndarray]:
        """The rule of one update: bias is corrected by the table's count of them, and epsilon is Adam's, not SparseAdam's."""
        rule = self.spec.rule
        count = 1 if step is None else step
        rule_params_f64 = encode_rule_params(rule, lr, self.spec.dim)
        if count == 1:
            rule_params_f64[4] = 1.0  # torch's first momentum is the gradient itself, not dampened
        return rule_params_f64, np.array([RULE_KINDS.index(rule.kind), rule.nesterov, False, -1, count], np.int64)


def bring_rows_up_to_date(spec: Table, rows: np.ndarray, history: UpdateHistory) -> np.ndarray:
    """Whole rows (n, words), as a snapshot has them, up to date; copies."""
    kernel = _CatchUpKernel(spec)
    int64_view = np.concatenate([np.zeros((1, kernel.words), np.int64), rows]).reshape(-1)
    kernel.write(history, np.arange(1, len(rows) + 1), int64_view, int64_view.view(spec.dtype), history.count)
    return int64_view.reshape(-1, kernel.words)[1:]


def make_initial_rows(spec: Table, ids: np.ndarray, history: UpdateHistory) -> np.ndarray:
    """Rows that were never pushed to, as they are after these updates."""
    from echelon.server import kernels

    kind, init_params = encode_init(spec.init)
    weights = np.empty((len(ids), spec.dim), spec.dtype)
    for row, row_id in zip(weights, ids.tolist(), strict=True):
        kernels.init_row(kind, init_params[0], init_params[1], derive_seed(spec.name, spec.init), row_id, row)
    kernel = _CatchUpKernel(spec)
    int64_view = np.zeros(kernel.words, np.int64)
    kernel.read(history, np.zeros(len(ids), np.int64), int64_view, int64_view.view(spec.dtype), weights)
    return weights
