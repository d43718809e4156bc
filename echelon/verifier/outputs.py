"""What the model gave for the samples of a step: marked by both runs, share by share, and compared.

One device gives the whole batch's output at once. It is cut as the plan shares the samples out, along the dim that has as many entries
as there are samples; a tensor that has no such dim, or another shape there (padding up to the longest), is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from echelon.plan.split import Slice
from echelon.verifier.compare import FLOOR, Difference
from echelon.verifier.mark import Mark, mark

#: By which tensor of the output, for which samples.
Outputs = Mapping[str, Mark]


@contextlib.contextmanager
def listening(
    model: nn.Module,
    note: Callable[[list[Tensor | None]], None],
    look: Callable[[Tensor], Tensor] = lambda value: value,
) -> Iterator[None]:
    """Call `note` with the tensors of each output of the model, None for one that is not whole here or has no fractions.

    `look` gives the whole of a tensor that only looks like it.
    """

    @torch.no_grad()
    def heard(_: nn.Module, __: Any, output: Any) -> None:
        note([_numbers(look(leaf)) for leaf in leaves(output)])

    hook = model.register_forward_hook(heard)
    try:
        yield
    finally:
        hook.remove()


def leaves(output: Any) -> Iterator[Tensor]:
    """The tensors of an output of any structure, in its own order."""
    for leaf in tree_leaves(vars(output) if dataclasses.is_dataclass(output) else output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from leaves(leaf)


def _numbers(value: Tensor) -> Tensor | None:
    held = not value.is_meta and not isinstance(value, FakeTensor | DTensor)
    return value if held and (value.is_floating_point() or value.is_complex()) else None


def marked(tensors: Sequence[Tensor | None], part: Slice, *, first: int = 0, of: int | None = None) -> dict[str, Mark]:
    """The marks of an output for the samples `part` of the batch, where it has `of` samples and these are those from `first` on."""
    found = {}
    for number, tensor in enumerate(tensors):
        mine = None if tensor is None else _share(tensor, first, part.size, part.size if of is None else of)
        if mine is not None:
            found[f"output {number} for samples {part.start} to {part.stop - 1}"] = mark(mine)
    return found


def _share(tensor: Tensor, first: int, size: int, of: int) -> Tensor | None:
    if size == of:
        return tensor
    dim = next((dim for dim, length in enumerate(tensor.shape) if length == of), None)
    return None if dim is None else tensor.narrow(dim, first, size)


def compared(plan: Outputs, true: Outputs, step: int) -> list[Difference]:
    """How far each share of each tensor is off, where both runs have it in one shape."""
    floor = FLOOR * max((each.norm for each in true.values()), default=0.0)  # of what is zero but for rounding
    return [
        Difference(kind="output", name=name, step=step, value=plan[name].apart(expected, floor))
        for name, expected in true.items()
        if name in plan and plan[name].shape == expected.shape
    ]
