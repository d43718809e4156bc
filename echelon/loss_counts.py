"""Read from a loss's autograd graph how many items each of its means averages over.

A mean over the batch splits exactly over ranks and micro-batches only if every part averages over the same number of items per sample.
`ignore_index`, masks and class weights break that in rare batches, so the counts are read from the graph of each loss:

    loss = 0.9 * nll_loss + 0.1 * sum / count          AddBackward0
                                                       ├── MulBackward1 ── NllLossBackward0      term: total_weight
                                                       └── MulBackward1 ── DivBackward0 ── Sum   term: count

A term's count is such that `term = sum / count`, constant factors included. Reading does not synchronize with an accelerator: counts
stay tensors there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from echelon.tree import map_tensors, tree_leaves, tree_tensors

Scalar = float | Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """One average in a loss: `name` is its operator, `count` what its sum is divided by."""

    name: str
    count: Scalar
    #: The factor that restores its sum: `count`, unless nothing was counted (a focal loss sums over negatives too).
    scale: Scalar
    #: Whether the count is a tensor's number of elements, not of those that a loss chose to count.
    counted_by_shape: bool = False
    #: Whether it is a sum divided by a number, which may be `max(count, minimum)`; and whether that is 1, the usual minimum.
    is_divided: bool = False
    divided_by_one: bool | Tensor = False
    #: Whether that number is more than what was counted.
    is_clamped: bool = False
    #: Whether it is multiplied by zero.
    is_zeroed: bool = False
    #: A further divisor: the length of the list whose mean is the loss.
    list_length: Scalar = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossReading:
    """The averages that a loss adds up, and the operators through which the graph could not be read."""

    terms: tuple[LossTerm, ...] = ()
    opaque_operators: tuple[str, ...] = ()

    @property
    def only_term(self) -> LossTerm | None:
        """The average that is the loss up to constant factors; None for a sum of several, or one that is not readable."""
        return self.terms[0] if len(self.terms) == 1 and not self.opaque_operators else None


#: Operators that average over every element of their input, by the name of their backward without its number.
_MEAN_OPERATORS = {
    "MseLoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "SoftMarginLoss", "KlDiv",
}  # fmt: skip
#: Operators that average over the rows of their input.
_ROW_MEAN_OPERATORS = {"MultiMarginLoss", "MultilabelMarginLoss"}
#: Operators that leave a single number as it is, or add numbers up.
_TRANSPARENT_OPERATORS = {
    "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Permute", "Transpose", "T", "Expand", "Clone", "ToCopy", "Alias",
    "AliasBackward", "Copy", "CopyBackwards", "Neg", "Add", "Sub", "Rsub", "Where", "Select", "NanToNum",
}  # fmt: skip
#: Those of them that only change the shape.
_VIEW_OPERATORS = {"View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Expand", "Alias"}
#: Operators that reduce or collect single numbers.
_LIST_OPERATORS = ("Mean", "Sum", "Stack", "Cat")
_SUM_OPERATORS = {"Sum", "Nansum", "Dot", "Mv", "Mm", "Bmm"}
#: `reduction=` as autograd saves it.
_REDUCED_BY_MEAN, _REDUCED_BY_SUM = 1, 2
#: Operators through which numbers that do not require gradients may be samples.
_MIXING_OPS = {"Mul", "Mm", "Bmm", "Addmm", "Baddbmm", "Mv", "Dot", "Embedding", "Index", "Gather", "Where", "Div"}
#: Suffixes of operators that compare outputs with targets.
_LOSS_SUFFIXES = ("Loss", "Loss2D", "Logits", "Entropy")
#: Operators below a penalty on parameters; what is larger is the model.
_MAX_PENALTY_NODES = 16
#: Growth of a count beyond rounding, and the relative tolerance of a sum.
_MIN_GROWTH, _SUM_TOLERANCE = 1 + 1e-6, 1e-3
#: Elements of outputs and batches that are repeated more than twice, at most.
_MAX_REPEATED_NUMEL = 2**24
#: Operators of a loss that are read, more than anyone writes term by term.
_MAX_NODES = 1024


class ModelOutputMarker(torch.autograd.Function):
    """Marks a model's output, which is no parameter, in a graph without the model."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def read_counts(loss: Tensor, *, accept_sums: bool = True, max_terms: int | None = None) -> LossReading:
    """The averages in `loss`, a single number; empty where it has no graph.

    `accept_sums`: a loss with reduction="sum" that is divided by a count is an average too (not in a model that gets `num_items_in_batch`,
    which is the whole batch's). `max_terms`: averages after which reading ends.
    """
    terms: list[LossTerm] = []
    opaque: list[str] = []
    if loss.grad_fn is not None:
        _collect_terms(loss.grad_fn, terms, opaque, accept_sums, max_terms)
    return LossReading(terms=tuple(terms), opaque_operators=tuple(opaque))


def recount_term(
    terms: Sequence[LossTerm], repeat_loss: Callable[[int], Tensor | None]
) -> tuple[LossTerm | None, bool]:
    """The only term with its true count, which `max(count, minimum)` may hide (None if it does not show), and whether that is certain.

    `repeat_loss(times)` is the same loss with every sample repeated; None if it cannot be computed. Its sum must grow by `times`, and so
    must its count; one that a minimum hides grows less until it exceeds the minimum. A sum of zero does not show whether it grows.
    """
    term, first_loss = terms[0], repeat_loss(1)
    if len(terms) > 1 or first_loss is None:
        return None, False
    total = float(first_loss.detach()) * float(term.scale)
    for times in (1, 2, 4, 8, 16, 32, 64):
        loss = first_loss if times == 1 else repeat_loss(times)
        reading = None if loss is None else read_counts(loss).only_term
        if loss is None or reading is None:
            break
        # A loss that draws random numbers, communicates, has no row per sample or is the model's own does not grow like this.
        if not math.isclose(float(loss.detach()) * float(reading.scale), times * total, rel_tol=_SUM_TOLERANCE):
            return None, False
        if times > 1 and reading.scale > term.scale * _MIN_GROWTH:
            count = reading.scale / times
            is_clamped = not math.isclose(count, term.scale, rel_tol=_SUM_TOLERANCE)
            return replace(term, count=count, is_clamped=is_clamped), True
    return (replace(term, count=term.scale * 0, is_clamped=True), bool(total)) if times > 2 else (None, False)


def repeat_samples(value: Any, sample_count: int, times: int) -> Any:
    """An output or a batch with every sample repeated `times` times; tensors without one row per sample stay. None if that is too large
    (twice never is), or if samples hold more than tensors."""
    if not all(isinstance(leaf, Tensor) or leaf is None for leaf in tree_leaves(value)):
        return None
    if times > 2 and times * sum(tensor.numel() for tensor in tree_tensors(value)) > _MAX_REPEATED_NUMEL:
        return None
    return map_tensors(lambda t: torch.cat([t] * times) if t.dim() and len(t) == sample_count else t, value)


def _collect_terms(node: Any, terms: list[LossTerm], opaque: list[str], sums: bool, max_terms: int | None) -> None:
    """Add the averages below `node`, the loss itself. `sums`: `accept_sums` of `read_counts`."""
    # Operators with the factor by which their output enters the loss, the last divisor on the way, if any, and the factor before that.
    pending: list[tuple[Any, Scalar, Scalar | None, Scalar]] = [(node, 1.0, None, 1.0)]
    zeroed_term: LossTerm | None = None
    visits = 0
    while pending and len(terms) != max_terms:
        node, factor, divisor, list_length = pending.pop()
        visits += 1
        if visits > _MAX_NODES:
            opaque.append("a loss of very many terms")
            terms.clear()
            return
        operator = _operator_name(node)
        mean_divisor = _mean_divisor(node, operator)
        is_sum_loss = sums and getattr(node, "_saved_reduction", None) == _REDUCED_BY_SUM
        is_sum = mean_divisor is None and (operator in _SUM_OPERATORS or is_sum_loss) and not _has_single_inputs(node)
        if mean_divisor is not None or is_sum:
            name = (f"{operator} / count" if is_sum else operator).lower()
            if not isinstance(factor, Tensor) and factor == 0:
                zeroed_term = zeroed_term or LossTerm(name=name, count=0.0, scale=0.0, is_zeroed=True)
            # An undivided sum is no mean, and a penalty on parameters does not depend on how samples are split.
            elif (mean_divisor is not None or divisor is not None) and not _is_penalty(node):
                count = scale = _absolute(_divide(1.0 if mean_divisor is None else mean_divisor, factor))
                is_empty = is_sum and _is_empty_sum(node, divisor)
                if isinstance(is_empty, Tensor):
                    count = torch.where(is_empty, 0.0, count)
                elif is_empty:
                    count = 0.0
                by_shape, by_one = not is_sum and "NllLoss" not in operator, is_sum and divisor == 1
                length = _absolute(_divide(1.0, list_length if is_sum else factor))
                terms.append(LossTerm(
                    name=name, count=count, scale=scale, counted_by_shape=by_shape, is_divided=is_sum, divided_by_one=by_one, list_length=length,
                ))  # fmt: skip
        elif operator == "Div" and _numel(node) == 1 and not _has_gradient_divisor(node):
            other = node._saved_other
            pending.append((node.next_functions[0][0], _divide(factor, other), _to_scalar(other), factor))
        elif operator == "Mul" and _numel(node) == 1 and _multiplies_averages(node):
            opaque.append("a product of averages")  # no weighting of its parts gives the whole batch's
        elif operator == "Mul" and _numel(node) == 1:
            pending.extend((*side, list_length) for side in _product_sides(node, factor, divisor))
        elif operator in _LIST_OPERATORS or (operator in _TRANSPARENT_OPERATORS and _numel(node) == 1):
            if operator == "Mean":  # of a list
                length = float(_numel(node.next_functions[0][0]) or 1)
                factor, list_length = _divide(factor, length), _divide(list_length, length)
            sides = [side for side, _ in reversed(node.next_functions) if side is not None]
            pending.extend((side, factor, divisor, list_length) for side in sides)
        elif operator != "AccumulateGrad":
            opaque.append(node.name())
    if zeroed_term is not None and not terms:
        terms.append(zeroed_term)


def _is_empty_sum(node: Any, divisor: Scalar | None) -> bool | Tensor:
    """Whether an empty sum was divided by 1, as by `mask.sum().clamp(min=1)`, so the part has no weight.

    A single sample with all-zero targets, divided by the number of samples, looks the same: `recount_term` decides.
    """
    summed = node.next_functions[0][0]
    if divisor is None or summed is None or (not isinstance(divisor, Tensor) and divisor != 1):
        return False
    if _numel(summed) == 0:
        return divisor == 1
    if _operator_name(summed) != "Mul":
        return False
    saved = [getattr(summed, name, None) for name in ("_saved_self", "_saved_other")]
    empty = [~mask.any() for mask in saved if type(mask) is Tensor]
    if not empty:
        return False
    is_empty = torch.stack(empty).any() & (divisor == 1)
    return is_empty if isinstance(divisor, Tensor) or is_empty.device.type != "cpu" else bool(is_empty)


def _mean_divisor(node: Any, operator: str) -> Scalar | None:
    if operator == "Mean" and not _has_single_inputs(node):
        numel = getattr(node, "_saved_self_sym_numel", None)
        return float(math.prod(node._saved_self_sym_sizes) if numel is None else numel)
    if getattr(node, "_saved_reduction", None) != _REDUCED_BY_MEAN:
        return None
    if operator in ("NllLoss", "NllLoss2D", "NllLossNd"):
        return _to_scalar(node._saved_total_weight)
    if operator in _MEAN_OPERATORS:
        return float(node._saved_self.numel())
    return float(len(node._saved_self)) if operator in _ROW_MEAN_OPERATORS and node._saved_self.dim() > 1 else None


def _is_penalty(node: Any) -> bool:
    """Whether an average or a sum is over parameters alone, independent of the samples."""
    pending, node_count = [node], 0
    while pending:
        node = pending.pop()
        node_count += 1
        operator = _operator_name(node)
        if operator == "AccumulateGrad":
            continue
        if operator.endswith(_LOSS_SUFFIXES):  # first, because it decides for most losses
            return False
        inputs = [input_node for input_node, _ in node.next_functions]
        has_constant = None in inputs and not _has_scalar_operand(node)
        if node_count > _MAX_PENALTY_NODES or not inputs or operator == ModelOutputMarker.__name__:
            return False
        if "Convolution" in operator or (has_constant and (operator in _MIXING_OPS or _broadcasts(node))):
            return False
        pending += [input_node for input_node in inputs if input_node is not None]
    return True


def _broadcasts(node: Any) -> bool:
    largest = max(_numel(input_node) for input_node, _ in node.next_functions if input_node is not None)
    return _numel(node) > largest


def _numel(node: Any) -> int:
    metadata: Any = getattr(node, "_input_metadata", ())
    return math.prod(metadata[0].shape) if metadata else 0


def _has_scalar_operand(node: Any) -> bool:
    """Whether the constant operand of a product or quotient is a single number."""
    other = getattr(node, "_saved_other", None)
    return _operator_name(node) in ("Mul", "Div") and (not isinstance(other, Tensor) or other.numel() == 1)


def _multiplies_averages(node: Any) -> bool:
    sides = [side for side, _ in node.next_functions if side is not None]
    return len(sides) > 1 and not any(_is_penalty(side) for side in sides)


def _product_sides(node: Any, factor: Scalar, divisor: Scalar | None) -> Iterator[tuple[Any, Scalar, Scalar | None]]:
    """The differentiable sides of a product of single numbers, each with the other side as its factor."""
    sides = [input_node for input_node, _ in node.next_functions]
    for index, side in enumerate(sides):
        if side is None:
            continue
        other = getattr(node, "_saved_self" if index else "_saved_other", None)
        if other is None:
            other = 1.0
        # A number times a sum is a coefficient; a tensor times a sum may be the reciprocal of a count.
        is_tensor = isinstance(other, Tensor) and other.dtype.is_floating_point
        yield side, factor * _to_scalar(other), _to_scalar(other) if divisor is None and is_tensor else divisor


def _operator_name(node: Any) -> str:
    name: str = node.name().removeprefix("torch::autograd::")
    return name.rstrip("0123456789").removesuffix("Backward")


def _has_single_inputs(node: Any) -> bool:
    """Whether an operator reduces single numbers, one by one or stacked: `torch.stack([a, b]).sum()`."""
    inputs = [input_node for input_node, _ in node.next_functions if input_node is not None]
    if inputs and _operator_name(inputs[0]) in ("Stack", "Cat"):
        inputs = [input_node for input_node, _ in inputs[0].next_functions if input_node is not None]
        return bool(inputs) and all(_numel(input_node) == 1 for input_node in inputs)
    return bool(inputs) and all(_is_scalar(input_node) for input_node in inputs)


def _is_scalar(node: Any) -> bool:
    """Whether the output is a number without dimensions, or a view of one; a batch of one sample has a dimension too."""
    while _numel(node) == 1 and node._input_metadata[0].shape and _operator_name(node) in _VIEW_OPERATORS:
        node = node.next_functions[0][0]
        if node is None:
            return False
    return _numel(node) == 1 and not node._input_metadata[0].shape


def _has_gradient_divisor(node: Any) -> bool:
    return len(node.next_functions) > 1 and node.next_functions[1][0] is not None


def _divide(value: Scalar, divisor: Scalar) -> Scalar:
    scalar = _to_scalar(divisor)
    if isinstance(scalar, Tensor) or scalar:
        return value / scalar
    return math.inf  # a mean over nothing: its sum is multiplied by infinity, its count is zero


def _absolute(weight: Scalar) -> Scalar:
    """The signs of a sum and its count cancel."""
    return weight.abs() if isinstance(weight, Tensor) else abs(weight)


def _to_scalar(value: Any) -> Scalar:
    """A number; on an accelerator, with which this must not synchronize, a tensor in double precision."""
    if isinstance(value, Tensor):
        value = value.detach() if value.requires_grad else value
        if not value.is_cpu or type(value) is not Tensor:
            return value.detach().reshape(()).double()
    try:
        return float(value)
    except RuntimeError:  # a trace on fake tensors, which have no values
        return math.nan
