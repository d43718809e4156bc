"""Sequence parallelism: between tensor-parallel modules each rank holds part of the sequence, so norms, dropouts and residuals save less
for backward.

    hidden ──slice──> norm ──all-gather──> columns ... row ──reduce-scatter──> residual ──> norm ... ──gather──> rest of the model

The all-reduce that a row-parallel module needs anyway becomes a reduce-scatter and an all-gather: the same bytes. Parameters applied to a part
of the sequence get a part of their gradient, which `sum_gradients` adds up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from echelon.engine.parallel.tp_collectives import TPCommunicator
from echelon.plan.placement import compute_shard_sizes
from echelon.plan.sequence_segment import SequenceSegment


class SequenceParallelCommunicator(TPCommunicator):
    """The tensor group inside a segment: row-parallel modules return this rank's part of the sequence."""

    def __init__(self, tp: TPCommunicator, segment: SequenceSegment) -> None:
        super().__init__(tp)
        self.segment, self._dim, self._draws_random = segment, segment.dim, segment.uses_rng
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

    def _copy_to_region(self, x: Tensor) -> Tensor:
        """For a sequence that was just gathered: one reduce-scatter in backward sums its readers' gradients and splits them."""
        last_gather = self._last_gather
        if last_gather is None or last_gather[2] is not x or last_gather[3] != x._version:
            return super()._copy_to_region(x)
        return self.all_gather(last_gather[0], self._dim, self._shard_sizes, x)

    def reduce_row_output(self, x: Tensor, dim: int | None = None) -> Tensor:
        """Sum a row-parallel module's partial outputs; keep this rank's part of the sequence."""
        return self.with_rank_rng(self.reduce_scatter(x, self._dim if dim is None else dim, self._shard_sizes))

    def contains(self, path: str) -> bool:
        """Whether a module is in one of the segment's blocks."""
        return any(path == block or path.startswith(f"{block}.") for block in self.segment.blocks)


def install_sequence_parallel(model: nn.Module, tp: SequenceParallelCommunicator) -> None:
    """Run the segment's blocks on parts of the sequence, except modules that need all of it."""
    segment, blocks = tp.segment, tp.segment.blocks
    for gather in segment.gathers:
        module = model.get_submodule(gather.path)
        _transform_inputs(module, gather.arguments, tp.gather_sequence)
        if gather.returns_sequence:
            _transform_output(module, tp.slice_sequence)
    for path in blocks:
        # Each block begins and ends with the shared generator, which recomputation restores.
        module = model.get_submodule(path)
        _transform_inputs(module, (segment.argument,), tp.enter_segment if path == blocks[0] else tp.with_rank_rng)
        _transform_output(module, tp.leave_segment if path == blocks[-1] else tp.with_shared_rng)


def _transform_inputs(module: Any, argument_names: tuple[str, ...], transform: Callable[[Tensor], Tensor]) -> None:
    """Pass `transform(argument)` to a module."""
    original_forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        args = tuple(transform(x) if str(index) in argument_names else x for index, x in enumerate(args))
        kwargs = {name: transform(x) if name in argument_names else x for name, x in kwargs.items()}
        return original_forward(*args, **kwargs)

    module.forward = forward


def _transform_output(module: Any, transform: Callable[[Tensor], Tensor]) -> None:
    """Return `transform(hidden states)` from a module, whose output is or begins with them."""
    original_forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = original_forward(*args, **kwargs)
        return transform(out) if isinstance(out, Tensor) else type(out)([transform(out[0]), *out[1:]])

    module.forward = forward
