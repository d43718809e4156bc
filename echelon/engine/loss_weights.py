"""Weigh each part of a batch by what its loss really averages over.

By default a part (a rank's micro-batch) counts by its samples. That is exact where every part averages over the same number of items per
sample, and that is checked at every step from the counts in the loss's graph. Where parts turn out to average over unequal counts (padding,
`ignore_index`, class weights), the step is computed again with each part weighed by its count, and so is every later one.
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
from echelon.loss_counts import Scalar, Term, read_counts, recount

#: Averages of one loss that are watched one by one.
_TERMS = 6
_GOLDEN = 0.6180339887498949
#: Samples of a part up to which counts may always be as low as a minimum: then every count is looked at.
_FEW = 4
#: Parts, which averages each has (as a word and its square), parts whose sum was divided by more than was counted, and by what, parts of which it does
#: not show what they count, and parts that have any averages.
_HEAD = 7
_HIDDEN, _DOUBTS, _NAMED = 3, 5, 6
#: For each average: its count per sample, the square of that, and its count.
_EACH = 3
#: Products of counts, each with each.
_PRODUCTS = _HEAD + _EACH * _TERMS
#: Relative rounding of sums of squares of doubles.
_ROUNDING = 1e-14


class Averages:
    """The averages of one step's losses on this rank, as numbers that add up over ranks."""

    size = _PRODUCTS + _TERMS * _TERMS

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: list[float | Tensor] = [0.0] * self.size
        #: The last part's averages by name, and a word that stands for them.
        self._names: tuple[str, ...] | None = None
        self._word = 0.0
        #: Of each average the least count so far, its first count per sample, and whether there was another.
        self._counts: dict[int, tuple[float, float, bool]] = {}
        #: The counts of losses given as (sum, count).
        self.pairs = LowCounts()
        #: Whether the averages are entries of a list that grows with the samples; None: not tried yet.
        self._lists_samples: bool | None = None

    def begin(self) -> None:
        """Before a step's first forward."""
        self._numbers = [0.0] * self.size

    def add(self, loss: Tensor, samples: int, again: Callable[[int], Tensor | None]) -> tuple[Term, ...]:
        """Take the loss of one part of `samples` samples into account; returns its averages. `again(times)` computes it with every sample given that
        many times; None where that cannot be done."""
        terms = read_counts(loss, most=1 if self._lists_samples else None).terms
        terms = _folded(self._of_list(terms, samples, again))
        low = [self._is_low(place, term, samples) for place, term in enumerate(terms) if term.divided]
        if any(low):
            recounted, sure = recount(terms, again)
            if not sure:
                self.doubt()
            if recounted is not None:
                terms = (recounted,)
                if recounted.hidden:
                    self.hide(recounted.scale)
        elif low and samples <= _FEW and len(terms) == 1 and not isinstance(terms[0].scale, Tensor):
            recounted, _ = recount(terms, again)
            if recounted is not None and recounted.hidden:
                terms = (recounted,)
                self.hide(recounted.scale)
        names = tuple([term.name for term in terms])
        self._add(0, [1.0])
        if not (len(terms) == 1 and terms[0].void):  # `output.sum() * 0` stands for any average over nothing
            if names != self._names:
                self._names, self._word = names, float(zlib.crc32(" ".join(names).encode()) & 0xFFFFF)
            self._add(1, [self._word, self._word * self._word])
            self._add(_NAMED, [1.0])
        for place, term in enumerate(terms):
            rate = term.count / samples
            self._add(_HEAD + _EACH * place, [rate, rate * rate, term.count])
            self._add(_PRODUCTS + _TERMS * place, [term.count * other.count for other in terms])
        return terms

    def _of_list(
        self, terms: tuple[Term, ...], samples: int, again: Callable[[int], Tensor | None]
    ) -> tuple[Term, ...]:
        """The averages; one that counts the list's length where they are entries of a list with one or more for each sample."""
        length = terms[0].outer if terms else 0.0
        if self._lists_samples is None and (len(terms) > 1 or (terms and samples == 1)):
            alike = not isinstance(length, Tensor) and all(
                not isinstance(term.outer, Tensor) and term.outer == length for term in terms
            )
            twice = again(2) if alike else None
            self._lists_samples = twice is not None and len(read_counts(twice).terms) == 2 * len(terms)
        return (Term(name="mean of a list", count=length, scale=length),) if terms and self._lists_samples else terms

    def hide(self, scale: Scalar) -> None:
        """Note that a part's sum was divided by `scale`, which is more than it counts."""
        self._add(_HIDDEN, [1.0, scale])

    def doubt(self) -> None:
        """Note that it does not show what a part counts: the step is to be compared with one device."""
        self._add(_DOUBTS, [1.0])

    def _is_low(self, place: int, term: Term, samples: int) -> bool:
        """Whether a count is 1, or as low as none before where counts per sample differ: `max(count, least)` gives such numbers. The host of an
        accelerator does not know it, and waits for this alone."""
        if isinstance(term.scale, Tensor):
            return bool(term.at_one)
        rate = term.scale / samples
        least, first, differ = self._counts.get(place, (term.scale, rate, False))
        differ = differ or not math.isclose(rate, first)
        self._counts[place] = min(least, term.scale), first, differ
        return bool(term.at_one) or (differ and term.scale <= least)

    def _add(self, start: int, values: Sequence[float | Tensor]) -> None:
        for place, value in enumerate(values, start):
            self._numbers[place] = self._numbers[place] + value

    def share(self, more: Sequence[float] = ()) -> Tensor:
        """This rank's share of the sums, and `more` numbers behind them."""
        numbers = [*self._numbers, *more]
        if not any(isinstance(number, Tensor) for number in numbers):
            return torch.tensor(numbers, dtype=torch.float64).to(self._device, non_blocking=True)
        parts = [torch.as_tensor(number, dtype=torch.float64) for number in numbers]
        return torch.stack([part.to(self._device, non_blocking=True) for part in parts])

    def unequal(self, sums: Sequence[float], step: int) -> bool:
        """Whether parts must be weighed by their (first) count, given the sums over all ranks; raises where no one weight is right."""
        parts = sums[0]
        if parts < 2:
            return False
        if round(sums[_NAMED]) * round(sums[2]) != round(sums[1]) ** 2:
            raise DivergenceError(
                f"step {step + 1}: the loss adds up different averages on different parts of the batch (here {' + '.join(self._names or ()) or 'none'}), "
                "so that their sum is not the loss of the whole batch; add every term on every part (as zero where it does not apply), or "
                "use one process without micro-batches (dp=1)",
                cause="terms of the loss depend on the data",
            )
        rates = [sums[start : start + _EACH] for start in range(_HEAD, _PRODUCTS, _EACH)]
        moving = [
            place
            for place, (rate, square, _) in enumerate(rates)
            if parts * square - rate * rate > _ROUNDING * parts * parts * square
        ]
        if not moving:
            return bool(sums[_HIDDEN])  # one device divides the sum over all parts
        first = moving[0]
        products = [sums[start : start + _TERMS] for start in range(_PRODUCTS, self.size, _TERMS)]
        for place, (_, _, count) in enumerate(rates):
            whole = products[place][place] * products[first][first]
            if count and abs(products[first][place] ** 2 - whole) > _ROUNDING * parts * parts * whole:
                what = (
                    "adds up averages over unequal counts"
                    if all(_is_whole(rates[each][2]) for each in (first, place))
                    else "is not a mean over samples: its weight per sample changes from part to part"
                )
                raise DivergenceError(
                    f"step {step + 1}: the loss {what}, {self._describe(parts, rates, first)} and "
                    f"{self._describe(parts, rates, place)}, so that no single weight per rank or micro-batch gives the loss of the whole batch; "
                    "divide all terms by one count and return (sum, count), or use one process without micro-batches (dp=1)",
                    cause="averages over unequal counts",
                )
        return True

    def _describe(self, parts: float, rates: Sequence[Sequence[float]], place: int) -> str:
        names = self._names or ()
        name = names[place] if place < len(names) else f"term {place + 1}"
        rate, square = rates[place][0] / parts, rates[place][1] / parts
        spread = max(square - rate * rate, 0.0) ** 0.5
        over = f"over {rate:.4g} items" if _is_whole(rates[place][2]) else f"divided by {rate:.4g}"
        return f"{name} {over} per sample (varying by {spread:.2g} between parts)"


class LowCounts:
    """Which counts of sums given as (sum, count) may be more than what was counted, as `max(count, least)` makes them."""

    def __init__(self) -> None:
        self._least, self._rate, self._differ = math.inf, 0.0, False
        #: The highest count that was more.
        self.hidden = 0.0

    def is_low(self, count: float, samples: int) -> bool:
        """Whether it is the first, or 1, or as low as any before where counts per sample differ, or no higher than one that was more."""
        rate = count / max(samples, 1)
        first = self._least == math.inf
        self._differ = self._differ or not (first or math.isclose(rate, self._rate))
        low = (
            first
            or count == 1
            or count <= self.hidden
            or count < self._least
            or (self._differ and count == self._least)
        )
        self._least, self._rate = min(self._least, count), rate
        return low


def _folded(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    """At most `_TERMS` terms. The last one stands for the rest: the sum of their counts, with weights by which changes do not cancel out by chance."""
    if len(terms) <= _TERMS:
        return terms
    kept, rest = terms[: _TERMS - 1], terms[_TERMS - 1 :]
    count = sum((1 + place * _GOLDEN % 1) * term.count for place, term in enumerate(rest))
    return *kept, Term(name=f"{len(rest)} more", count=count, scale=count)


def doubts(sums: Sequence[float]) -> bool:
    """Whether it does not show of some part what it counts."""
    return sums[_DOUBTS] > 0


def divisor(sums: Tensor, count: Tensor) -> Tensor:
    """What one device divides a step's sum by, given the sums over all ranks: `count`, or the least that parts divided by."""
    parts, least = sums[_HIDDEN : _HIDDEN + 2]
    return torch.maximum(count, least / parts.clamp(min=1))


def _is_whole(count: float) -> bool:
    """Whether items may have been counted; factors and class weights make other numbers."""
    return abs(count - round(count)) <= 1e-9 * max(abs(count), 1.0)


def weighed(loss: Tensor, term: Term) -> tuple[Tensor, Tensor]:
    """A loss that is an average as (sum, count). Nothing is averaged over no item: NaN then, and zero as a part of a sum."""
    count, scale = (
        torch.as_tensor(number, dtype=torch.float64, device=loss.device) for number in (term.count, term.scale)
    )
    total = loss * scale.to(loss.dtype)
    return total.where((count != 0) | term.hidden, total.new_zeros(())), count


def nothing(output: Any, value: Any) -> Tensor | None:
    """Zero as a function of a model's output, to begin backward with where the loss counts nothing of it: every rank must go through
    backward. None where the loss is a plain number, as almost always (asked of the host's tensors only)."""
    part = value[0] if isinstance(value, tuple) else value
    if (
        part.device.type != "cpu"
        or isinstance(part, FakeTensor)
        or (part.requires_grad and math.isfinite(part.detach()))
    ):
        return None
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return sum((leaf.reshape(-1)[:0].sum() for leaf in leaves), start=part.new_zeros(())) if leaves else None
