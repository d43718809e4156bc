"""Sequence parallelism: between tensor-parallel modules each rank holds part of the sequence, so norms, dropouts and residuals save less
for backward.

    hidden ──slice──> norm ──all-gather──> columns ... row ──reduce-scatter──> residual ──> norm ... ──gather──> rest of the model

The all-reduce that a row-parallel module needs anyway becomes a reduce-scatter and an all-gather: the same bytes. Parameters applied to a part
of the sequence get a part of their gradient, which `sum_gradients` adds up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from echelon.engine.parallel.tp_collectives import TPCommunicator
from echelon.plan.placement import compute_shard_sizes
from echelon.plan.sequence_segment import SequenceSegment


class SequenceParallelCommunicator(TPCommunicator):
    """The tensor group inside a segment: row-parallel modules return this rank's part of the sequence."""

    def __init__(self, tp: TPCommunicator, segment: SequenceSegment) -> None:
        super().__init__(tp)
        self._dim, self._draws_random = segment.dim, segment.uses_rng
        # Of the last sequence. Recomputation in backward sees the same batch, so the same length.
        self._shard_sizes: list[int] = []
        self._last_gather: tuple[Any, tuple[int, bool], Tensor, int] | None = None

    def enter_segment(self, hidden: Tensor) -> Tensor:
        """Take this rank's part of the hidden states that enter the segment."""
        self._shard_sizes = compute_shard_sizes(hidden.shape[self._dim], self.size)
        return self.slice_sequence(hidden)

    def slice_sequence(self, hidden: Tensor) -> Tensor:
        """This rank's part of replicated hidden states."""
        return self.with_rank_rng(self.slice_to_region(hidden, self._dim, self._shard_sizes))

    def with_rank_rng(self, x: Tensor) -> Tensor:
        """Return `x`; from here on each rank draws its own random numbers."""
        if self._draws_random:
            self.rng.use_rank_rng(x.device)
        return x

    def with_shared_rng(self, x: Tensor) -> Tensor:
        """Return `x`; from here on all ranks draw the same."""
        if self._draws_random:
            self.rng.use_shared_rng(x.device)
        return x

    def leave_segment(self, hidden: Tensor) -> Tensor:
        """The full hidden states, for what follows the segment."""
        self._last_gather = self._last_copy = None
        return self.gather_from_region(self.with_shared_rng(hidden), self._dim, self._shard_sizes)

    def gather_sequence(self, x: Tensor) -> Tensor:
        """The full sequence, for a module that needs it. Arguments that share a tensor still do."""
        cache_key = x._version, torch.is_grad_enabled()
        if self._last_gather is not None and self._last_gather[0] is x and self._last_gather[1] == cache_key:
            return self._last_gather[2]
        gathered = self.gather_from_region(x, self._dim, self._shard_sizes)
        self.with_shared_rng(x)
        self._last_gather = x, cache_key, gathered, gathered._version
        return gathered

    def copy_to_region(self, x: Tensor) -> Tensor:
        """For a sequence that was just gathered: one reduce-scatter in backward sums its readers' gradients and splits them."""
        last_gather = self._last_gather
        if last_gather is None or last_gather[2] is not x or last_gather[3] != x._version:
            return super().copy_to_region(x)
        cache_key = x._version, torch.is_grad_enabled()
        if self._last_copy is None or self._last_copy[0]() is not x or self._last_copy[1] != cache_key:
            self._last_copy = ref(x), cache_key, self.all_gather(last_gather[0], self._dim, self._shard_sizes, x)
        return self._last_copy[2]

    def reduce_row_output(self, x: Tensor, dim: int | None = None) -> Tensor:
        """Sum a row-parallel module's partial outputs; keep this rank's part of the sequence."""
        return self.with_rank_rng(self.reduce_scatter(x, self._dim if dim is None else dim, self._shard_sizes))


def make_segment_communicators(
    segments: Iterable[SequenceSegment], tp: TPCommunicator
) -> dict[SequenceSegment, SequenceParallelCommunicator]:
    """The tensor group as each segment sees it."""
    return {segment: SequenceParallelCommunicator(tp, segment) for segment in segments}


def contains_module(segment: SequenceSegment, path: str) -> bool:
    """Whether a module is in one of the segment's blocks."""
    return any(path == unit or path.startswith(unit + ".") for unit in segment.blocks)


def install_sequence_parallel(
    model: nn.Module, segment: SequenceSegment, segment_tp: SequenceParallelCommunicator
) -> None:
    """Run the segment's blocks on parts of the sequence, except modules that need all of it."""
    for gather in segment.gathers:
        module = model.get_submodule(gather.path)
        _transform_inputs(module, gather.arguments, segment_tp.gather_sequence)
        if gather.returns_sequence:
            _transform_output(module, segment_tp.slice_sequence)
    for unit in segment.blocks:
        # Each block begins and ends with the shared generator, which recomputation restores.
        module = model.get_submodule(unit)
        _transform_inputs(
            module,
            (segment.argument,),
            segment_tp.enter_segment if unit == segment.blocks[0] else segment_tp.with_rank_rng,
        )
        _transform_output(
            module, segment_tp.leave_segment if unit == segment.blocks[-1] else segment_tp.with_shared_rng
        )


def _transform_inputs(module: Any, argument_names: tuple[str, ...], transform: Callable[[Tensor], Tensor]) -> None:
    """Pass `transform(argument)` to a module."""
    original_forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        args = tuple(
            transform(value) if str(position) in argument_names else value for position, value in enumerate(args)
        )
        return original_forward(
            *args, **{name: transform(value) if name in argument_names else value for name, value in kwargs.items()}
        )

    module.forward = forward


def _transform_output(module: Any, transform: Callable[[Tensor], Tensor]) -> None:
    """Return `transform(hidden states)` from a module, whose output is or begins with them."""
    original_forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = original_forward(*args, **kwargs)
        return transform(out) if isinstance(out, Tensor) else type(out)([transform(out[0]), *out[1:]])

    module.forward = forward
