"""Read from a loss's autograd graph how many items each of its means averages over.

A mean over the batch splits exactly over ranks and micro-batches only where every part averages over the same number of items per sample.
`ignore_index`, masks and class weights break that in rare batches, so the counts are read from the graph of each loss instead of being
inferred from labels:

    loss = 0.9 * nll_loss + 0.1 * sum / count          AddBackward0
                                                       ├── MulBackward1 ── NllLossBackward0      term: total_weight
                                                       └── MulBackward1 ── DivBackward0 ── Sum   term: count

A term's count is such that `term = sum / count`, constant factors included. Reading does not wait for an accelerator: what it counted
stays a tensor there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from echelon.tree import map_tensors, tensors, tree_leaves

Scalar = float | Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One average in a loss: `name` is its operator, `count` what its sum is divided by."""

    name: str
    count: Scalar
    #: What makes it its sum again: `count`, unless nothing was counted (a focal loss is a sum over negatives too).
    scale: Scalar
    #: Whether the count is the number of elements of a tensor, and not of those that a loss chose to count.
    by_shape: bool = False
    #: Whether it is a sum divided by a number, which may be `max(count, least)`; and whether that number is 1, the usual least.
    divided: bool = False
    at_one: bool | Tensor = False
    #: Whether the number is more than what was counted.
    hidden: bool = False
    #: Whether it is multiplied by zero.
    void: bool = False
    #: What divides it besides its own count: the length, where it is an entry of a list whose mean is the loss.
    outer: Scalar = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The averages that a loss adds up, and the operators through which the graph could not be read."""

    terms: tuple[Term, ...] = ()
    opaque: tuple[str, ...] = ()

    @property
    def only(self) -> Term | None:
        """The one average that the loss is, up to constant factors; None where it is a sum of several, or not readable."""
        return self.terms[0] if len(self.terms) == 1 and not self.opaque else None


#: Operators that average over every element of their input, by the name of their backward without its number.
_MEANS = {
    "MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "SoftMarginLoss", "KlDiv",
}  # fmt: skip
#: Operators that average over the rows of their input.
_ROW_MEANS = {"MultiMarginLoss", "MultilabelMarginLoss"}
#: Operators that leave a single number as it is, or add numbers up.
_TRANSPARENT = {
    "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Permute", "Transpose", "T", "Expand", "Clone", "ToCopy", "Alias",
    "AliasBackward", "Copy", "CopyBackwards", "Neg", "Add", "Sub", "Rsub", "Where", "Select", "NanToNum",
}  # fmt: skip
#: Those of them that only look at it in another shape.
_VIEWS = {"View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Expand", "Alias"}
_SUMS = {"Sum", "Nansum", "Dot", "Mv", "Mm", "Bmm"}
#: `reduction=` as autograd saves it.
_REDUCED_BY_MEAN, _REDUCED_BY_SUM = 1, 2
#: Operators through which numbers that do not require gradients may be samples.
_MIXING = {"Mul", "Mm", "Bmm", "Addmm", "Baddbmm", "Mv", "Dot", "Embedding", "Index", "Gather", "Where", "Div"}
#: How the operators end that compare outputs with targets.
_LOSSES = ("Loss", "Loss2D", "Logits", "Entropy")
#: Operators below a penalty on parameters; what is larger is the model.
_PENALTY = 16
#: A count that grows by more than rounding, and how far a sum may be off.
_GROWN, _CLOSE = 1 + 1e-6, 1e-3
#: Elements of outputs and batches that are given again more than twice.
_REPEATED = 2**24
#: A loss that adds up more terms than this is not one that a person wrote term by term.
_MOST = 1024


class ModelOutput(torch.autograd.Function):
    """Marks what a model returned, where nothing of the model is in the graph: it is no parameter."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        """The same numbers."""
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Nothing is done to them."""
        return gradient


def read_counts(loss: Tensor, *, summed: bool = True, most: int | None = None) -> Reading:
    """The averages in `loss`, a single number; empty where it has no graph. `summed`: a loss with reduction="sum" that is divided by a count is an
    average too (not in a model that gets the number of labels as an argument, `num_items_in_batch`: that number is the whole batch's). `most`: averages after which
    reading ends."""
    terms: list[Term] = []
    opaque: list[str] = []
    if loss.grad_fn is None:
        return Reading()
    _walk(loss.grad_fn, terms, opaque, summed=summed, most=most)
    return Reading(terms=tuple(terms), opaque=tuple(opaque))


def recount(terms: Sequence[Term], again: Callable[[int], Tensor | None]) -> tuple[Term | None, bool]:
    """The only term with what it really counts, where `max(count, least)` may hide that (None where it does not show), and whether that is sure.

    `again(times)` is the same loss with every sample given that many times; None where it cannot be computed. Its sum must grow by `times`. So does
    its count; one that a minimum hides grows less, or not at all, until it exceeds the minimum. A sum of zero does not show whether it grows.
    """
    term, first = terms[0], again(1)
    if len(terms) > 1 or first is None:
        return None, False
    total = float(first.detach()) * float(term.scale)
    for times in (1, 2, 4, 8, 16, 32, 64):
        loss = first if times == 1 else again(times)
        reading = None if loss is None else read_counts(loss).only
        if loss is None or reading is None:
            break
        grown = reading.scale
        # It may draw or ask other ranks, samples may lie in no row of their own, or the model computes the loss: then it does not grow so.
        if not math.isclose(float(loss.detach()) * float(grown), times * total, rel_tol=_CLOSE):
            return None, False
        if times > 1 and grown > term.scale * _GROWN:
            count = grown / times
            return replace(term, count=count, hidden=not math.isclose(count, term.scale, rel_tol=_CLOSE)), True
    return (replace(term, count=term.scale * 0, hidden=True), bool(total)) if times > 2 else (None, False)


def given_again(value: Any, samples: int, times: int) -> Any:
    """An output or a batch with every sample given `times` times; tensors without one row per sample stay as they are. None where that is too
    much (twice is never), or where samples hold more than tensors."""
    if not all(isinstance(leaf, Tensor) or leaf is None for leaf in tree_leaves(value)):
        return None
    if times > 2 and times * sum(part.numel() for part in tensors(value)) > _REPEATED:
        return None
    return map_tensors(lambda part: torch.cat([part] * times) if part.dim() and len(part) == samples else part, value)


def _walk(node: Any, terms: list[Term], opaque: list[str], *, summed: bool, most: int | None) -> None:
    """Add the averages below `node`, the loss itself."""
    #: Operators, each with the factor by which its output enters the loss, what that was divided by last on the way, if anything, and the factor
    #: before that.
    pending: list[tuple[Any, Scalar, Scalar | None, Scalar]] = [(node, 1.0, None, 1.0)]
    #: Terms that are multiplied by zero.
    void: list[Term] = []
    visits = 0
    while pending and len(terms) != most:
        node, factor, divisor, outer = pending.pop()
        visits += 1
        if visits > _MOST:
            opaque.append("a loss of very many terms")
            terms.clear()
            return
        kind = _kind(node)
        found = _average(node, kind)
        if found is not None or (_is_sum(node, kind, summed=summed) and not _single_inputs(node)):
            name = f"{kind} / count" if found is None else kind
            if not isinstance(factor, Tensor) and factor == 0:
                void.append(Term(name=name.lower(), count=0.0, scale=0.0, void=True))
            # A sum that nothing divides is no mean; what parameters alone decide does not depend on how samples are split.
            elif (found is not None or divisor is not None) and not _of_parameters(node):
                count = scale = _positive(_over(1.0 if found is None else found, factor))
                nothing = found is None and _counts_nothing(node, divisor)
                if isinstance(nothing, Tensor):
                    count = torch.where(nothing, 0.0, count)
                elif nothing:
                    count = 0.0
                terms.append(
                    Term(
                        name=name.lower(),
                        count=count,
                        scale=scale,
                        by_shape=found is not None and "NllLoss" not in kind,
                        divided=found is None,
                        at_one=found is None and divisor == 1,
                        outer=_positive(_over(1.0, outer if found is None else factor)),
                    )
                )
        elif kind == "Div" and _is_single(node) and not _differentiable(node, 1):
            other = node._saved_other
            pending.append((node.next_functions[0][0], _over(factor, other), _plain(other), factor))
        elif kind == "Mul" and _is_single(node) and _multiplies_averages(node):
            opaque.append("a product of averages")  # which no weight of its parts makes that of the whole batch
        elif kind == "Mul" and _is_single(node):
            pending.extend((*each, outer) for each in _factors(node, factor, divisor))
        elif kind in ("Mean", "Sum", "Stack", "Cat") or (kind in _TRANSPARENT and _is_single(node)):
            if kind == "Mean":  # of a list
                length = float(_elements(node.next_functions[0][0]) or 1)
                factor, outer = _over(factor, length), _over(outer, length)
            pending.extend(
                (each, factor, divisor, outer) for each, _ in reversed(node.next_functions) if each is not None
            )
        elif not _is_leaf(node):
            opaque.append(node.name())
    if void and not terms:
        terms.append(void[0])


def _counts_nothing(node: Any, divisor: Scalar | None) -> bool | Tensor:
    """Whether a sum is over nothing and was divided by 1, as by `mask.sum().clamp(min=1)`: the part has no weight then.

    One sample whose targets are all zero looks the same where a sum is divided by the number of samples: `recount` decides.
    """
    below = node.next_functions[0][0]
    if divisor is None or below is None or (not isinstance(divisor, Tensor) and divisor != 1):
        return False
    if _elements(below) == 0:
        return divisor == 1
    saved = [getattr(below, name, None) for name in ("_saved_self", "_saved_other")] if _kind(below) == "Mul" else []
    empty = [~mask.any() for mask in saved if type(mask) is Tensor]
    if not empty:
        return False
    nothing = torch.stack(empty).any() & (divisor == 1)
    return nothing if isinstance(divisor, Tensor) or nothing.device.type != "cpu" else bool(nothing)


def _is_sum(node: Any, kind: str, *, summed: bool) -> bool:
    return kind in _SUMS or (summed and getattr(node, "_saved_reduction", None) == _REDUCED_BY_SUM)


def _average(node: Any, kind: str) -> Scalar | None:
    """What an operator that averages divides by; None: it is none."""
    if kind == "Mean" and not _single_inputs(node):
        return float(
            node._saved_self_sym_numel
            if hasattr(node, "_saved_self_sym_numel")
            else math.prod(node._saved_self_sym_sizes)
        )
    if kind in ("NllLoss", "NllLoss2D", "NllLossNd") and node._saved_reduction == _REDUCED_BY_MEAN:
        return _plain(node._saved_total_weight)
    if getattr(node, "_saved_reduction", None) != _REDUCED_BY_MEAN:
        return None
    if kind in _MEANS:
        return float(node._saved_self.numel())
    return float(len(node._saved_self)) if kind in _ROW_MEANS and node._saved_self.dim() > 1 else None


def _of_parameters(node: Any) -> bool:
    """Whether an average or a sum is over parameters alone: a penalty, whatever the samples are."""
    pending, seen = [node], 0
    while pending:
        node = pending.pop()
        seen += 1
        kind = _kind(node)
        if kind == "AccumulateGrad":
            continue
        if kind.endswith(_LOSSES):  # first: of most losses this is all there is to look at, at every step
            return False
        inner = [each for each, _ in node.next_functions]
        constant = None in inner and not _scalar_side(node)
        if seen > _PENALTY or not inner or kind == ModelOutput.__name__:
            return False
        if "Convolution" in kind or (constant and (kind in _MIXING or _grows(node))):
            return False
        pending += [each for each in inner if each is not None]
    return True


def _grows(node: Any) -> bool:
    """Whether an operator broadcasts what it differentiates by, as over samples."""
    largest = max(_elements(each) for each, _ in node.next_functions if each is not None)
    return _elements(node) > largest


def _elements(node: Any) -> int:
    metadata: Any = getattr(node, "_input_metadata", ())
    return math.prod(metadata[0].shape) if metadata else 0


def _scalar_side(node: Any) -> bool:
    """Whether what a product or quotient does not differentiate by is a single number."""
    other = getattr(node, "_saved_other", None)
    return _kind(node) in ("Mul", "Div") and (not isinstance(other, Tensor) or other.numel() == 1)


def _multiplies_averages(node: Any) -> bool:
    """Whether both sides of a product depend on samples."""
    sides = [each for each, _ in node.next_functions if each is not None]
    return len(sides) > 1 and not any(_of_parameters(each) for each in sides)


def _factors(node: Any, factor: Scalar, divisor: Scalar | None) -> Iterator[tuple[Any, Scalar, Scalar | None]]:
    """The differentiable sides of a product of single numbers, each with the other side as its factor."""
    sides = [each for each, _ in node.next_functions]
    for place, side in enumerate(sides):
        if side is None:
            continue
        other = getattr(node, "_saved_self" if place else "_saved_other", None)
        if other is None:
            other = 1.0
        # A number times a sum is a coefficient; a tensor times a sum may be the reciprocal of a count.
        data = isinstance(other, Tensor) and other.dtype.is_floating_point
        yield side, _times(factor, other), _plain(other) if divisor is None and data else divisor


def _kind(node: Any) -> str:
    name: str = node.name().removeprefix("torch::autograd::")
    return name.rstrip("0123456789").removesuffix("Backward")


def _is_single(node: Any) -> bool:
    """Whether the operator's output is one number."""
    return _elements(node) == 1


def _single_inputs(node: Any) -> bool:
    """Whether an operator reduces single numbers, one by one or stacked: `torch.stack([a, b]).sum()`."""
    inner = [each for each, _ in node.next_functions if each is not None]
    if inner and _kind(inner[0]) in ("Stack", "Cat"):
        inner = [each for each, _ in inner[0].next_functions if each is not None]
        return bool(inner) and all(_is_single(each) for each in inner)
    return bool(inner) and all(_is_scalar(each) for each in inner)


def _is_scalar(node: Any) -> bool:
    """Whether the output is one number without dimensions, or a view of such a one; a batch of one sample has a dimension too."""
    while _is_single(node) and node._input_metadata[0].shape and _kind(node) in _VIEWS:
        node = node.next_functions[0][0]
        if node is None:
            return False
    return _is_single(node) and not node._input_metadata[0].shape


def _differentiable(node: Any, place: int) -> bool:
    return len(node.next_functions) > place and node.next_functions[place][0] is not None


def _is_leaf(node: Any) -> bool:
    return _kind(node) == "AccumulateGrad"


def _times(factor: Scalar, by: Scalar) -> Scalar:
    return factor * _plain(by)


def _over(value: Scalar, by: Scalar) -> Scalar:
    divisor = _plain(by)
    if isinstance(divisor, Tensor) or divisor:
        return value / divisor
    return math.inf  # a mean over nothing: its sum is multiplied by infinity, its count is zero


def _positive(weight: Scalar) -> Scalar:
    """Whatever the sign of the loss is: that of a sum and its count cancel."""
    return weight.abs() if isinstance(weight, Tensor) else abs(weight)


def _plain(value: Any) -> Scalar:
    """A number; of an accelerator, which must not be waited for, a tensor in double precision."""
    if isinstance(value, Tensor):
        value = value.detach() if value.requires_grad else value
        if not value.is_cpu or type(value) is not Tensor:
            return value.detach().reshape(()).double()
    try:
        return float(value)
    except RuntimeError:  # a trace on fake tensors, which have no values
        return math.nan
