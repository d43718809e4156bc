"""Whether each rank may draw its own random numbers between columns and their row: only what is drawn for each column by itself.

One number for a whole sample or position is one for all columns on one device. Ranks that drew their own would have several, which is
another model, and no comparison of numbers tells: they are held still there, and differ anyway where they are not.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.partition.tp_layers import by_name
from echelon.partition.tp_trial import Pair, Seen, as_rank, plain
from echelon.plan.placement import shares
from echelon.tree import tree_leaves
from echelon.trials.random_state import random_states
from echelon.trials.trial_run import calling, mode, on_copies


class Sizes(TorchDispatchMode):
    """How many random numbers are drawn at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []
        self.counts = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.counts and torch.Tag.nondeterministic_seeded in func.tags:
            self.found += [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)][:1]
        return out

    def within(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """`inner`, in which draws are counted."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            with self:
                return inner(*args, **kwargs)

        return forward


def draws_by_column(model: nn.Module, pair: Pair, seen: Seen) -> bool:
    """Whether all that is drawn between the columns and the row gets fewer as the columns do. Not while it is rehearsed: then nobody
    draws."""
    layout = pair.layout
    dealt = shares(seen.width, layout.ways, layout.unit)
    with random_states():
        whole = _drawn(model, pair, seen, nullcontext())
        for rank in {0, layout.ways - 1}:
            try:
                part = _drawn(model, pair, seen, as_rank(model, pair.candidate, seen, layout, rank))
            except Exception:  # numbers that were held still did not show that it fails on a part
                return False
            if [size * seen.width for size in part] != [size * dealt[rank] for size in whole]:
                return False
    return True


def _drawn(model: nn.Module, pair: Pair, seen: Seen, computing: AbstractContextManager[None]) -> list[int]:
    sizes = Sizes()
    sizes.counts = False
    args, kwargs = plain((seen.args, seen.kwargs))

    def begin(inner: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            out = inner(*args, **kwargs)
            sizes.counts = True
            return out

        return forward

    def end(_: Tensor) -> Tensor:
        sizes.counts = False
        return seen.gave.clone()

    with mode(model, training=True), on_copies(model, seen.before), computing, ExitStack() as stack:
        for path in pair.candidate.columns:
            column = model.get_submodule(path)
            stack.enter_context(calling(column, begin(column.forward)))
        row = model.get_submodule(pair.candidate.row)
        stack.enter_context(calling(row, by_name(row, end)))
        sizes.within(model.get_submodule(seen.holder))(*args, **kwargs)
    return sizes.found
