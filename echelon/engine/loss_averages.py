"""Count what each part of a batch averages over, to weigh it by that where parts differ.

By default a part (a rank's micro-batch) is weighed by its samples. Where the counts in the losses' graphs show that parts average over unequal
counts (padding, `ignore_index`, class weights), the step is computed again with each part weighed by its count, and so is every later one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from echelon.errors import DivergenceError
from echelon.loss_counts import LossTerm, Scalar, read_counts, recount_term

_Terms = tuple[LossTerm, ...]
_RepeatLoss = Callable[[int], Tensor | None]
#: Averages of one loss that are counted one by one.
_MAX_TERMS = 6
_GOLDEN_RATIO = 0.6180339887498949
#: Samples of a part up to which counts may always be as low as a minimum: then every count is checked.
_FEW_SAMPLES = 4
#: The numbers that are summed over parts: the number of parts; a hash of the averages' names and its square; the number of parts whose sum was
#: divided by more than was counted, and those divisors; parts that do not show what they count; parts that have averages.
_NAMES_HASH, _CLAMPED, _UNCERTAIN, _NONEMPTY, _HEADER_SIZE = 1, 3, 5, 6, 7
#: For each average: its count per sample, the square of that, and its count.
_NUMBERS_PER_TERM = 3
#: Products of counts, each with each.
_PRODUCTS_START = _HEADER_SIZE + _NUMBERS_PER_TERM * _MAX_TERMS
#: Relative rounding of sums of squares of doubles.
_COUNT_ROUNDING = 1e-14


class LossAverages:
    """The averages of one step's losses on this rank, as numbers that are summed over ranks."""

    size = _PRODUCTS_START + _MAX_TERMS * _MAX_TERMS

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: list[float | Tensor] = [0.0] * self.size
        #: The names of the last part's averages, and a hash of them.
        self._term_names: tuple[str, ...] | None = None
        self._names_hash = 0.0
        #: The counts of each average so far, and of losses given as (sum, count).
        self._term_counts: dict[int, CountHistory] = {}
        self.pair_counts = CountHistory()
        #: Whether the averages are entries of a list that grows with the samples; None: not tried yet.
        self._averages_sample_list: bool | None = None

    def begin_step(self) -> None:
        """Before a step's first forward."""
        self._numbers = [0.0] * self.size

    def add_part(self, loss: Tensor, sample_count: int, repeat_loss: _RepeatLoss) -> _Terms:
        """Count the loss of a part; returns its averages. `repeat_loss(times)` computes it with every sample given that many times."""
        terms = read_counts(loss, max_terms=1 if self._averages_sample_list else None).terms
        terms = _fold_terms(self._as_list_mean(terms, sample_count, repeat_loss))
        maybe_clamped = [self._may_be_clamped(i, t, sample_count) for i, t in enumerate(terms) if t.is_divided]
        is_suspect, is_small = any(maybe_clamped), sample_count <= _FEW_SAMPLES and len(terms) == 1
        if is_suspect or (maybe_clamped and is_small and not isinstance(terms[0].scale, Tensor)):
            recounted, is_certain = recount_term(terms, repeat_loss)
            if is_suspect and not is_certain:
                self.note_uncertain()
            if recounted is not None and (is_suspect or recounted.is_clamped):
                terms = (recounted,)
                if recounted.is_clamped:
                    self.note_clamped(recounted.scale)
        names = tuple([term.name for term in terms])
        self._add_numbers(0, [1.0])
        if not (len(terms) == 1 and terms[0].is_zeroed):  # `output.sum() * 0` stands for any average over nothing
            if names != self._term_names:
                self._term_names, self._names_hash = names, float(zlib.crc32(" ".join(names).encode()) & 0xFFFFF)
            self._add_numbers(_NAMES_HASH, [self._names_hash, self._names_hash * self._names_hash])
            self._add_numbers(_NONEMPTY, [1.0])
        for index, term in enumerate(terms):
            rate, start = term.count / sample_count, _HEADER_SIZE + _NUMBERS_PER_TERM * index
            self._add_numbers(start, [rate, rate * rate, term.count])
            self._add_numbers(_PRODUCTS_START + _MAX_TERMS * index, [term.count * other.count for other in terms])
        return terms

    def _as_list_mean(self, terms: _Terms, sample_count: int, repeat_loss: _RepeatLoss) -> _Terms:
        """The averages; one that counts the list's length where they are entries of a list with one or more for each sample."""
        length = terms[0].list_length if terms else 0.0
        if self._averages_sample_list is None and (len(terms) > 1 or (terms and sample_count == 1)):
            lengths = [term.list_length for term in terms]
            has_one_length = all(not isinstance(other, Tensor) and other == length for other in lengths)
            repeated = repeat_loss(2) if has_one_length else None
            self._averages_sample_list = repeated is not None and len(read_counts(repeated).terms) == 2 * len(terms)
        if not terms or not self._averages_sample_list:
            return terms
        return (LossTerm(name="mean of a list", count=length, scale=length),)

    def note_clamped(self, divisor: Scalar) -> None:
        """Note that a part's sum was divided by `divisor`, which is more than it counts."""
        self._add_numbers(_CLAMPED, [1.0, divisor])

    def note_uncertain(self) -> None:
        """Note that a part does not show what it counts: the step is compared with one device."""
        self._add_numbers(_UNCERTAIN, [1.0])

    def _may_be_clamped(self, index: int, term: LossTerm, sample_count: int) -> bool:
        """Whether a count is 1 (all that the host waits for of an accelerator's), or the lowest so far: `max(count, least)` gives such numbers."""
        if isinstance(term.scale, Tensor):
            return bool(term.divided_by_one)
        history = self._term_counts.setdefault(index, CountHistory())
        is_lowest = history.record(term.scale, sample_count) and history.rates_differ
        return is_lowest or bool(term.divided_by_one)

    def _add_numbers(self, start: int, values: Sequence[float | Tensor]) -> None:
        for index, value in enumerate(values, start):
            self._numbers[index] = self._numbers[index] + value

    def pack(self, extra: Sequence[float] = ()) -> Tensor:
        """This rank's share of the sums, followed by `extra` numbers."""
        numbers = [*self._numbers, *extra]
        if not any(isinstance(number, Tensor) for number in numbers):
            return torch.tensor(numbers, dtype=torch.float64).to(self._device, non_blocking=True)
        tensors = [torch.as_tensor(number, dtype=torch.float64) for number in numbers]
        return torch.stack([tensor.to(self._device, non_blocking=True) for tensor in tensors])

    def has_unequal_counts(self, sums: Sequence[float], step: int) -> bool:
        """Whether parts must be weighed by their (first) count, given the sums over all ranks; raises where no one weight is right."""
        part_count = sums[0]
        if part_count < 2:
            return False
        if round(sums[_NONEMPTY]) * round(sums[_NAMES_HASH + 1]) != round(sums[_NAMES_HASH]) ** 2:
            names = " + ".join(self._term_names or ()) or "none"
            problem = f"the loss adds up different averages on different parts of the batch (here {names})"
            remedy = "add every term on every part (as zero where it does not apply), or use one process without micro-batches (dp=1)"
            raise DivergenceError(f"step {step + 1}: {problem}; {remedy}", cause="terms of the loss depend on the data")
        starts = range(_HEADER_SIZE, _PRODUCTS_START, _NUMBERS_PER_TERM)
        rates = [sums[start : start + _NUMBERS_PER_TERM] for start in starts]

        def vary(rate: float, square: float) -> bool:
            return part_count * square - rate * rate > _COUNT_ROUNDING * part_count * part_count * square

        first = next((index for index, (rate, square, _) in enumerate(rates) if vary(rate, square)), None)
        if first is None:
            return bool(sums[_CLAMPED])  # one device divides the sum over all parts
        products = [sums[start : start + _MAX_TERMS] for start in range(_PRODUCTS_START, self.size, _MAX_TERMS)]
        for index, (_, _, count) in enumerate(rates):
            squared_counts = products[index][index] * products[first][first]
            rounding = _COUNT_ROUNDING * part_count * part_count * squared_counts
            if count and abs(products[first][index] ** 2 - squared_counts) > rounding:  # not in one proportion
                problem = "adds up averages over unequal counts"
                if not (_is_integer(rates[first][2]) and _is_integer(count)):
                    problem = "is not a mean over samples: its weight per sample changes from part to part"
                terms = " and ".join(self._describe_term(part_count, rates, i) for i in (first, index))
                result = "no single weight per rank or micro-batch gives the loss of the whole batch"
                remedy = "divide all terms by one count and return (sum, count), or use one process without micro-batches (dp=1)"
                message = f"step {step + 1}: the loss {problem}, {terms}, so that {result}; {remedy}"
                raise DivergenceError(message, cause="averages over unequal counts")
        return True

    def _describe_term(self, part_count: float, rates: Sequence[Sequence[float]], index: int) -> str:
        names = self._term_names or ()
        name = names[index] if index < len(names) else f"term {index + 1}"
        rate, square = rates[index][0] / part_count, rates[index][1] / part_count
        deviation = max(square - rate * rate, 0.0) ** 0.5
        divided_by = f"over {rate:.4g} items" if _is_integer(rates[index][2]) else f"divided by {rate:.4g}"
        return f"{name} {divided_by} per sample (varying by {deviation:.2g} between parts)"


class CountHistory:
    """The counts of an average so far: `max(count, least)`, which hides what was counted, gives the lowest of them."""

    def __init__(self) -> None:
        self._lowest, self._last_rate = math.inf, 0.0
        self.rates_differ = False
        #: The highest count that was found to be more than what was counted.
        self.highest_clamped = 0.0

    def record(self, count: float, sample_count: int) -> bool:
        """Add a count; whether none before was lower."""
        rate, previous_lowest = count / max(sample_count, 1), self._lowest
        self.rates_differ |= previous_lowest != math.inf and not math.isclose(rate, self._last_rate)
        self._lowest, self._last_rate = min(previous_lowest, count), rate
        return count <= previous_lowest

    def may_be_clamped(self, count: float, sample_count: int) -> bool:
        """Add the count of a (sum, count); whether it may be more than what was counted: 1, or among the lowest so far."""
        previous_lowest = self._lowest
        is_lowest = self.record(count, sample_count)
        is_suspect = count == 1 or count <= self.highest_clamped or count < previous_lowest
        return is_suspect or (self.rates_differ and is_lowest)


def _fold_terms(terms: _Terms) -> _Terms:
    """At most `_MAX_TERMS` terms. The last one is the sum of the rest's counts, weighted so that changes do not cancel out by chance."""
    if len(terms) <= _MAX_TERMS:
        return terms
    separate, rest = terms[: _MAX_TERMS - 1], terms[_MAX_TERMS - 1 :]
    count = sum((1 + index * _GOLDEN_RATIO % 1) * term.count for index, term in enumerate(rest))
    return *separate, LossTerm(name=f"{len(rest)} more", count=count, scale=count)


def is_uncertain(sums: Sequence[float]) -> bool:
    """Whether some part does not show what it counts."""
    return sums[_UNCERTAIN] > 0


def step_divisor(sums: Tensor, count: Tensor) -> Tensor:
    """What one device divides a step's sum by, given the sums over all ranks: `count`, or the least that parts divided by."""
    clamped_parts, divisor_sum = sums[_CLAMPED : _CLAMPED + 2]
    return torch.maximum(count, divisor_sum / clamped_parts.clamp(min=1))


def _is_integer(count: float) -> bool:
    """Whether items may have been counted; factors and class weights make other numbers."""
    return abs(count - round(count)) <= 1e-9 * max(abs(count), 1.0)


def weigh_by_count(loss: Tensor, term: LossTerm) -> tuple[Tensor, Tensor]:
    """A loss that is an average as (sum, count). An average over nothing is NaN, and zero as a part of a sum."""
    count, scale = (torch.as_tensor(x, dtype=torch.float64, device=loss.device) for x in (term.count, term.scale))
    total = loss * scale.to(loss.dtype)
    return total.where((count != 0) | term.is_clamped, total.new_zeros(())), count


def zero_loss(output: Any, loss: Any) -> Tensor | None:
    """Zero as a function of a model's output, from which every rank can run backward where its loss counts nothing; None where the loss has a graph."""
    loss_tensor = loss[0] if isinstance(loss, tuple) else loss
    if loss_tensor.device.type != "cpu" or isinstance(loss_tensor, FakeTensor):
        return None
    if loss_tensor.requires_grad and math.isfinite(loss_tensor.detach()):
        return None
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return sum((leaf.reshape(-1)[:0].sum() for leaf in leaves), start=loss_tensor.new_zeros(())) if leaves else None
