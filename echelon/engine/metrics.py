"""Metrics over a whole evaluation set: means are added up batch by batch, others are computed once over all outputs.

A metric gives (sum, count), or one number. Of a small set such a number is computed once, over all outputs and batches, joined in the order of the
samples. Of a larger one it is tried whether it is a mean over samples: a mean over all rows is the weighted mean of the means over any parts of them.
AUC, F1, perplexity or a correlation are not; for these the whole set is joined, as far as memory allows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from echelon.engine.parallel.vocab_parallel import Logits
from echelon.errors import JobError
from echelon.loss_counts import ModelOutput, given_again
from echelon.trials.random_state import random_states

#: How a metric is added up: pairs and means batch by batch, others over the whole set.
Kind = Literal["pair", "mean", "whole"]
#: Relative difference between the mean over rows and over their parts that rounding explains (float32).
_ROUNDING = 2e-5
#: Parts that rows are cut into, as fractions: unequal, and some of few rows.
_CUTS = ((0.34,), (0.1, 0.62), (0.9,))


@dataclass(frozen=True, slots=True)
class Part:
    """Output and batch of some samples."""

    output: Any
    batch: Any
    samples: int


class UnjoinableError(Exception):
    """Outputs or batches of several parts do not fit together."""


Metric = Callable[[Any, Any], Any]


def classify(metric: Metric, parts: Sequence[Part]) -> Kind | None:
    """What kind of metric it is, seen on these parts; None: they do not tell.

    Real outputs may hide the difference: where every prediction is right, F1 is 1 for all rows and for every part of them. So the same is
    tried with shaken outputs, on which a mean stays a mean. Where the value never varies (F1 without a positive sample) nothing is known.
    """
    counted = [widened(part) for part in parts if part.samples]
    if counted and _varies(metric, counted[0]):
        return "whole"  # it keeps state: it is called once per evaluation, whatever the plan
    trials = [(part, pieces) for part in counted for pieces in _pieces(part)]
    if len(counted) > 1:
        with contextlib.suppress(UnjoinableError):
            together = joined(counted)
            trials += [(together, counted), *((together, pieces) for pieces in _pieces(together))]
    varied = False
    for part, pieces in trials:
        found = _compared(metric, part, pieces)
        if isinstance(found, str):
            return found
        varied |= found
    generator = torch.Generator().manual_seed(0)
    for _, pieces in trials:
        shaken = [_shaken(piece, generator) for piece in pieces]
        with contextlib.suppress(UnjoinableError):
            together = joined(shaken)
            # Outputs that no model gives may be outside what the metric takes.
            if _is_number(_value(metric, together)):
                found = _compared(metric, together, shaken)
                if isinstance(found, str):
                    return found
                varied |= found
    return "mean" if varied else None


def _compared(metric: Metric, part: Part, pieces: Sequence[Part]) -> Literal["pair", "whole"] | bool:
    """ "whole" where it is no mean over these pieces; else whether they have different values, so that this says something."""
    whole = _value(metric, part)
    if isinstance(whole, tuple):
        return "pair"
    values = [_value(metric, piece) for piece in pieces]
    if not _is_number(whole) or not all(map(_is_number, values)):
        return "whole"
    weighed = sum(value * piece.samples for value, piece in zip(values, pieces, strict=True))  # type: ignore[operator, misc]
    mean = weighed / sum(piece.samples for piece in pieces)
    largest = max(abs(value) for value in (whole, *values))  # type: ignore[arg-type]
    if not math.isclose(mean, whole, rel_tol=0.0, abs_tol=_ROUNDING * largest + 1e-9):  # type: ignore[arg-type]
        return "whole"
    return any(value != whole for value in values)


def is_mean(metric: Metric, before: Part | None, part: Part) -> bool:
    """Whether the metric of two batches is the weighted mean of theirs; of batches that do not fit together, of two pieces of the second."""
    with contextlib.suppress(UnjoinableError):
        if before is not None:
            pieces = [widened(before), widened(part)]
            return _compared(metric, joined(pieces), pieces) != "whole"
    return all(_compared(metric, widened(part), pieces) != "whole" for pieces in _pieces(widened(part))[:1])


def adds_up(metric: Metric, part: Part) -> bool:
    """Whether the (sum, count) of a part is twice as much where every sample is given twice; also where that cannot be tried."""
    once = _numbers(_value(metric, part))
    given = given_again((part.output, part.batch), part.samples, 2)
    twice = None if given is None else _numbers(_value(metric, Part(given[0], given[1], 2 * part.samples)))
    if once is None or twice is None or len(once) != len(twice):
        return True
    return all(
        math.isclose(2 * one, two, rel_tol=_ROUNDING, abs_tol=1e-9) for one, two in zip(once, twice, strict=True)
    )


def _varies(metric: Metric, part: Part) -> bool:
    """Whether two calls with the same arguments and the same random numbers return different values."""
    with random_states():
        first = _numbers(_value(metric, part))
    with random_states():
        second = _numbers(_value(metric, part))
    if first is None or second is None or len(first) != len(second):
        return False
    return not np.allclose(first, second, rtol=_ROUNDING, atol=1e-9, equal_nan=True)


def _numbers(value: Any) -> list[float] | None:
    try:
        return [float(each) for each in (value if isinstance(value, tuple) else (value,))]
    except (TypeError, ValueError):  # the metric failed, or returned tuples of something else
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _shaken(part: Part, generator: torch.Generator) -> Part:
    """With its outputs in another order, and numbers among them changed."""
    order = torch.randperm(part.samples, generator=generator)

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.numel():
            return value
        if value.dim() and value.shape[0] == part.samples:
            value = value[order.to(value.device)]
        if not value.is_floating_point():
            return value
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
        return value + noise * value.abs().mean().clamp(min=0.1)

    return Part(_map(leaf, part.output), part.batch, part.samples)


def _pieces(part: Part) -> list[list[Part]]:
    found = []
    for cut in _CUTS:
        inner = sorted({min(max(round(each * part.samples), 1), part.samples - 1) for each in cut})
        bounds = [0, *inner, part.samples]
        if part.samples > 1:
            found.append([rows(part, first, last) for first, last in itertools.pairwise(bounds)])
    return found


def _value(metric: Metric, part: Part) -> float | tuple[Any, Any] | None:
    """What it gives; None where it fails, as a metric may on a part that has one class only."""
    try:
        value = metric(*cloned((part.output, part.batch)))  # it may edit them
        return value if isinstance(value, tuple) else float(value)
    except Exception:
        return None


# Structures of tensors


def _map(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """`function` of every leaf of structures alike: mappings, sequences, dataclasses and what is made like them."""
    if isinstance(first, Mapping):
        made = {key: _map(function, value, *(each[key] for each in others)) for key, value in first.items()}
        return made if type(first) is dict else _like(first, made)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(_map(function, *values) for values in zip(first, *others, strict=True)))
    if isinstance(first, list | tuple) and any(_holds_tensor(each) for each in first):
        return type(first)(_map(function, *values) for values in zip(first, *others, strict=True))
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        made = {name: _map(function, *(getattr(each, name) for each in (first, *others))) for name in names}
        return dataclasses.replace(first, **made)
    return function(first, *others)


def _like(first: Mapping[str, Any], made: dict[str, Any]) -> Any:
    """A mapping of the same kind (ModelOutput, BatchEncoding), else a plain one."""
    try:
        return type(first)(**made) if dataclasses.is_dataclass(first) else type(first)(made)  # type: ignore[call-arg]
    except Exception:
        return made


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensor, value))
    return isinstance(value, Tensor) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def plain(tree: Any) -> Any:
    """`tree` with whole tensors in place of those that ranks hold in parts. Ranks that hold parts of one must call it together."""

    def leaf(value: Any) -> Any:
        if isinstance(value, FakeTensor):  # another stage has it
            return None
        if isinstance(value, Logits):
            return value.copied() if value._whole is None else value.gathered()
        return value.full_tensor() if isinstance(value, DTensor) else value

    return _map(leaf, tree)


def differentiable(tree: Any) -> Any:
    """`tree` with its numbers as leaves of a graph, so that what is computed from them has one."""

    def leaf(value: Any) -> Any:
        if type(value) is Logits and value._whole is not None:
            return leaf(value._whole)
        if type(value) is Logits:
            return Logits(leaf(value._local), value._dim, value._sizes, value._axis)
        if type(value) is not Tensor or not value.is_floating_point():
            return value
        return ModelOutput.apply(value.detach().requires_grad_())

    return _map(leaf, tree)


def versions(tree: Any) -> list[int]:
    """How often each tensor was written to."""
    found: list[int] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            held = value._local if type(value) is Logits else value
            found.append(0 if held.is_inference() else held._version)
        return value

    _map(leaf, tree)
    return found


def cloned(tree: Any) -> Any:
    """`tree` with containers, tensors and arrays of its own. Ranks that hold parts of a tensor must call it together."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return plain(value).clone() if isinstance(value, Logits | DTensor) else value.clone()
        return value.copy() if isinstance(value, np.ndarray | list | dict | set) else value

    return _map(leaf, tree)


def is_same(one: Any, other: Any) -> bool:
    """Whether two trees hold the same numbers; NaN differs from itself."""
    same = True

    def leaf(first: Any, second: Any) -> Any:
        nonlocal same
        if isinstance(first, Tensor):
            same &= isinstance(second, Tensor) and torch.equal(first, second)
        elif isinstance(first, np.ndarray):
            same &= isinstance(second, np.ndarray) and np.array_equal(first, second)
        elif isinstance(first, list | dict | set):
            same &= type(first) is type(second) and len(first) == len(second)
        return first

    try:
        _map(leaf, one, other)
        _map(leaf, other, one)
    except (KeyError, ValueError, TypeError, AttributeError):
        return False
    return same


def is_whole(tree: Any) -> bool:
    """Whether no other rank holds a part of its tensors."""
    found = True

    def leaf(value: Any) -> Any:
        nonlocal found
        found &= not (isinstance(value, DTensor) or (isinstance(value, Logits) and value._whole is None))
        return value

    _map(leaf, tree)
    return found


def moved(part: Part, device: torch.device) -> Part:
    """The same on another device."""

    def leaf(value: Any) -> Any:
        return value.detach().to(device) if isinstance(value, Tensor) else value

    return Part(_map(leaf, part.output), _map(leaf, part.batch), part.samples)


def widened(part: Part) -> Part:
    """With outputs in float32 at least: half precision rounds means by more than parts differ."""

    def leaf(value: Any) -> Any:
        narrow = isinstance(value, Tensor) and value.is_floating_point() and value.element_size() < 4
        return value.float() if narrow else value

    return Part(_map(leaf, part.output), part.batch, part.samples)


def rows(part: Part, first: int, last: int) -> Part:
    """Some samples of a part: what has a row for each sample is cut, the rest stays."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            many = value.dim() > 0 and part.samples > 0 and value.shape[0] and value.shape[0] % part.samples == 0
            each = value.shape[0] // part.samples if many else 0
            return value[first * each : last * each] if many else value
        if isinstance(value, list | tuple) and len(value) == part.samples:
            return value[first:last]
        return value

    return Part(_map(leaf, part.output), _map(leaf, part.batch), last - first)


def joined(parts: Sequence[Part]) -> Part:
    """All samples of these parts as one."""
    samples = [part.samples for part in parts]

    def leaf(*values: Any) -> Any:
        first = values[0]
        if isinstance(first, Tensor):
            return _joined_tensor(values, samples)
        if isinstance(first, list) and all(isinstance(value, list) for value in values):
            return [each for value in values for each in value]
        if isinstance(first, tuple) and all(isinstance(value, tuple) for value in values):
            return tuple(each for value in values for each in value)
        return first

    try:
        output = _map(leaf, *(part.output for part in parts))
        batch = _map(leaf, *(part.batch for part in parts))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise UnjoinableError(f"their structures differ ({error})") from error
    return Part(output, batch, sum(samples))


def _joined_tensor(values: Sequence[Tensor], samples: Sequence[int]) -> Tensor:
    if values[0].dim() == 0:  # a loss: the mean, weighed
        if not values[0].is_floating_point():
            return values[0]
        weights = torch.tensor(samples, dtype=torch.float64, device=values[0].device)
        mean = (torch.stack([value.double() for value in values]) * weights).sum() / weights.sum()
        return mean.to(values[0].dtype)
    if any(value.shape[1:] != values[0].shape[1:] for value in values):
        shapes = sorted({tuple(value.shape) for value in values})
        raise UnjoinableError(f"a tensor has the shapes {', '.join(map(str, shapes[:3]))} in different batches")
    if any(value.shape[0] % count for value, count in zip(values, samples, strict=True)):
        return values[0]  # it has no rows of samples: weights of classes, a bias
    return torch.cat(list(values))


def size_of(part: Part) -> int:
    """Bytes of its tensors."""
    total = 0

    def leaf(value: Any) -> Any:
        nonlocal total
        total += value.numel() * value.element_size() if isinstance(value, Tensor) else 0
        return value

    _map(leaf, part.output)
    _map(leaf, part.batch)
    return total


def number(name: str, value: Any) -> tuple[float, float]:
    """(sum, count) of what a metric gave for the whole set."""
    pair = value if isinstance(value, tuple) else (value, 1.0)
    if len(pair) != 2:
        raise JobError(f"metric {name!r} gave a tuple of {len(pair)}: give a number, or (sum, count)")
    return float(scalar(pair[0], name)), float(scalar(pair[1], name))


def scalar(part: Any, name: str) -> Tensor | float:
    """What can be added to a sum on any device without waiting for that device."""
    if not isinstance(part, Tensor):
        return float(part)
    if part.numel() != 1:
        raise JobError(
            f"metric {name!r} gave a tensor of shape {tuple(part.shape)}: give a scalar mean, or (sum, count)"
        )
    return part.reshape(())
