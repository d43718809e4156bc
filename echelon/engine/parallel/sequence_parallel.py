"""Sequence parallelism: between the modules that tp cuts each rank has a part of the sequence, so that norms, dropouts and residuals keep
less for backward.

    hidden states ──sliced──> norm ──whole──> columns ... row ──scattered──> residual ──> norm ... ──gathered──> what follows

A sum over the ranks, which a row needs anyway, is a scattered sum and a gather: the same bytes on the way. Parameters that meet a part of
the sequence have a part of their gradient, which `add_up` adds up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from echelon.engine.parallel.tp_collectives import Axis
from echelon.plan.placement import shares
from echelon.plan.sequence_segment import Segment


class Part(Axis):
    """The tensor group inside a segment: rows give each rank its part of the sequence."""

    def __init__(self, axis: Axis, segment: Segment) -> None:
        super().__init__(axis)
        self._dim, self._drawing = segment.dim, segment.draws
        # Of the sequence that was cut last. What is computed again in backward is of the same batch, so of the same length.
        self._sizes: list[int] = []
        self._brought: tuple[Any, tuple[int, bool], Tensor, int] | None = None

    def enter(self, hidden: Tensor) -> Tensor:
        """Hidden states into the segment."""
        self._sizes = shares(hidden.shape[self._dim], self.size)
        return self.cut(hidden)

    def cut(self, hidden: Tensor) -> Tensor:
        """This rank's part of what every rank has."""
        return self.own(self.sliced(hidden, self._dim, self._sizes))

    def own(self, x: Tensor) -> Tensor:
        """`x`, from where on each rank draws its own random numbers."""
        if self._drawing:
            self.draws.own(x.device)
        return x

    def common(self, x: Tensor) -> Tensor:
        """`x`, from where on all ranks draw the same."""
        if self._drawing:
            self.draws.common(x.device)
        return x

    def leave(self, hidden: Tensor) -> Tensor:
        """Hidden states out of it."""
        self._brought = self._copied = None
        return self.gathered(self.common(hidden), self._dim, self._sizes)

    def whole(self, x: Tensor) -> Tensor:
        """A part as the whole, for a module that needs that. Arguments that are one tensor stay one."""
        state = x._version, torch.is_grad_enabled()
        if self._brought is not None and self._brought[0] is x and self._brought[1] == state:
            return self._brought[2]
        whole = self.gathered(x, self._dim, self._sizes)
        self.common(x)
        self._brought = x, state, whole, whole._version
        return whole

    def copied(self, x: Tensor) -> Tensor:
        """A whole that was just put together: its columns' gradients add up where they are dealt out again, in one message."""
        met = self._brought
        if met is None or met[2] is not x or met[3] != x._version:
            return super().copied(x)
        state = x._version, torch.is_grad_enabled()
        if self._copied is None or self._copied[0]() is not x or self._copied[1] != state:
            self._copied = ref(x), state, self.collected(met[0], self._dim, self._sizes, x)
        return self._copied[2]

    def joined(self, x: Tensor, dim: int | None = None) -> Tensor:
        """What a row gives, this rank's part of it."""
        return self.own(self.scattered(x, self._dim if dim is None else dim, self._sizes))


def divide(segments: Iterable[Segment], axis: Axis) -> dict[Segment, Part]:
    """The axis as each segment sees it."""
    return {segment: Part(axis, segment) for segment in segments}


def holds(segment: Segment, path: str) -> bool:
    """Whether a module belongs to one of the segment's blocks."""
    return any(path == unit or path.startswith(unit + ".") for unit in segment.units)


def part_sequence(model: nn.Module, segment: Segment, part: Part) -> None:
    """Make the segment's blocks work on parts, and the modules in them that cannot on the whole."""
    for gather in segment.gathers:
        module = model.get_submodule(gather.path)
        _before(module, gather.arguments, part.whole)
        if gather.again:
            _behind(module, part.cut)
    for unit in segment.units:
        # Each block begins and ends with the common numbers: so it is found when it is computed again.
        module = model.get_submodule(unit)
        _before(module, (segment.argument,), part.enter if unit == segment.units[0] else part.own)
        _behind(module, part.leave if unit == segment.units[-1] else part.common)


def _before(module: Any, arguments: tuple[str, ...], change: Callable[[Tensor], Tensor]) -> None:
    """Change what a module is given."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        args = tuple(change(each) if str(place) in arguments else each for place, each in enumerate(args))
        return inner(*args, **{name: change(each) if name in arguments else each for name, each in kwargs.items()})

    module.forward = forward


def _behind(module: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Change what a module gives: that is hidden states, or begins with them."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = inner(*args, **kwargs)
        return change(out) if isinstance(out, Tensor) else type(out)([change(out[0]), *out[1:]])

    module.forward = forward
