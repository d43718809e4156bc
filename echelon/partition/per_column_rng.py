"""Whether each rank may draw its own random numbers between columns and their row: only if each column has its own.

A number per sample or position applies to all columns on one device. Ranks with their own would compute another model, which no comparison of values
shows: trials fix random numbers, and elsewhere they differ anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.partition.tp_layers import accept_input_by_name
from echelon.partition.tp_trial import ColumnRowPair, RecordedCall, running_as_rank
from echelon.tree import tree_tensors
from echelon.trials.random_state import preserve_random_states
from echelon.trials.trial_run import Forward, copied_buffers, replaced_forward, training_mode, wrapped_forwards


class DrawSizeRecorder(TorchDispatchMode):
    """Records how many random numbers each operator draws."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.is_recording = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.is_recording and torch.Tag.nondeterministic_seeded in func.tags:
            self.sizes += [tensor.numel() for tensor in tree_tensors(out)[:1]]
        return out

    def wrap_forward(self, wrapped_forward: Callable[..., Any]) -> Forward:
        """`wrapped_forward`, with its draws recorded."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            with self:
                return wrapped_forward(*args, **kwargs)

        return forward


def draws_per_column(pair: ColumnRowPair, recorded: RecordedCall) -> bool:
    """Whether the random numbers drawn between the columns and the row shrink with the columns."""
    layout, width = pair.layout, recorded.row_width
    with preserve_random_states():
        full_sizes = _record_draw_sizes(recorded, nullcontext())
        for rank in {0, layout.tp_size - 1}:
            try:
                rank_sizes = _record_draw_sizes(recorded, running_as_rank(recorded, layout, rank))
            except Exception:  # with fixed random numbers it did not fail on a shard
                return False
            local_width = recorded.local_range(layout, rank)[1]
            if [size * width for size in rank_sizes] != [size * local_width for size in full_sizes]:
                return False
    return True


def _record_draw_sizes(recorded: RecordedCall, rank_context: AbstractContextManager[None]) -> list[int]:
    model, recorder = recorded.model, DrawSizeRecorder()
    recorder.is_recording = False
    args, kwargs = recorded.copy_inputs()

    def start_recording(_: str, module: Any) -> Forward:
        column_forward = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            out = column_forward(*args, **kwargs)
            recorder.is_recording = True
            return out

        return forward

    def stop_recording(_: Tensor) -> Tensor:
        recorder.is_recording = False
        return recorded.row_output.clone()

    with (
        training_mode(model, training=True),
        copied_buffers(model, recorded.buffers_before),
        rank_context,
        wrapped_forwards(model, recorded.candidate.columns, start_recording),
        replaced_forward(recorded.row, accept_input_by_name(recorded.row, stop_recording)),
    ):
        recorder.wrap_forward(model.get_submodule(recorded.ancestor))(*args, **kwargs)
    return recorder.sizes
