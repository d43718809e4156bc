"""The tensor axis: weights cut over a group of ranks; everything computes on plain local tensors.

    column   y = x W        each rank has some of the outputs; backward adds up the gradients of x
    row      z = y V + b    each rank has some of the inputs; forward adds up z
    gather   column, and the outputs are put together again: right wherever a column stands alone
    stored   the weight itself is put together whenever it is needed: right wherever nothing else is

Parameters are plain tensors, this rank's pieces: optimizers run at full speed on them and fully_shard takes them as any others. Between
the cut modules the model's own code runs as it is, on parts of the sequence where the plan says so (sequence.py). Where a piece lies in
the whole is layout.py's to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from echelon.engine.parallel.index_check import require_inside
from echelon.engine.parallel.multihead_attention import attention
from echelon.engine.parallel.sequence_parallel import divide, holds, part_sequence
from echelon.engine.parallel.shard_layout import Piece
from echelon.engine.parallel.tp_collectives import Axis
from echelon.engine.parallel.vocab_parallel import Logits
from echelon.errors import PlanError
from echelon.nn.recurrent import relist
from echelon.nn.views import Fitted
from echelon.partition import tp_layers
from echelon.partition.tp_layers import by_name, inputs, outputs, weight_of
from echelon.plan.placement import Placement, portion, shares
from echelon.plan.sequence_segment import Segment

__all__ = ["Axis", "cut", "install", "pieces"]

# What is kept


def pieces(model: nn.Module, placements: Iterable[Placement], axis: Axis) -> dict[str, Piece]:
    """Parameter or buffer, by each of its names -> the part of it that this rank keeps."""
    found: dict[int, Piece] = {}
    for placement in placements:
        module = model.get_submodule(placement.path)
        for part in placement.slices:
            value = attrgetter(part.name)(module)
            found[id(value)] = Piece(value.shape, part.dim, part.parts, axis.rank, axis.size, placement.unit)
    return {name: found[id(value)] for name, value in _tensors(model) if id(value) in found}


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


@torch.no_grad()
def cut(model: nn.Module, found: Mapping[str, Piece]) -> None:
    """Keep only this rank's parts of the parameters and buffers; those that are shared stay shared."""
    parts = {id(value): found[name] for name, value in _tensors(model) if name in found}
    done: dict[int, Tensor] = {}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, value in slots.items():
                if value is not None and id(value) in parts:
                    if id(value) not in done:
                        part = parts[id(value)].take(value)
                        whole = isinstance(value, nn.Parameter)
                        done[id(value)] = nn.Parameter(part, value.requires_grad) if whole else part
                    slots[name] = done[id(value)]  # type: ignore[assignment]
        relist(module)


# What is computed


def install(model: nn.Module, placements: Iterable[Placement], axis: Axis, segments: Iterable[Segment] = ()) -> None:
    """Make the modules compute with their parts. Their parameters are whole still, and cut before the first call."""
    parts = divide(segments, axis)
    partial = {name for segment in parts for name in segment.partial}
    stored: dict[str, list[_Stored]] = {}
    for placement in placements:
        module, path = model.get_submodule(placement.path), placement.path
        inside = next((part for segment, part in parts.items() if holds(segment, path)), axis)
        for name in placement.divide:
            where, _, attribute = name.rpartition(".")
            holder, width = model.get_submodule(where), inputs(module)
            value = getattr(holder, attribute)
            setattr(holder, attribute, portion(value, axis.rank, axis.size, width=width, unit=placement.unit))
        if placement.fits is not None:
            width = inputs(module)
            mine = shares(width, axis.size, placement.unit)[axis.rank]
            _fit_views(model.get_submodule(placement.fits), width, mine)
        if placement.cut == "stored":
            sizes = {
                each.name: (each.dim, shares(getattr(module, each.name).shape[each.dim], axis.size))
                for each in placement.slices
            }
            own = {f"{path}.{name}" for name in sizes}
            stored.setdefault(placement.within, []).append(
                (path, module, sizes, axis.collected if own & partial else axis.gathered)
            )
        elif placement.cut in _FORWARDS:
            forward = _FORWARDS[placement.cut](module, inside)
            if placement.draws:
                forward = _drawing(module, forward, placement.cut, inside)
            module.forward = OwnForward(by_name(module, forward))
    for within, modules in stored.items():
        _put_together(model.get_submodule(within), within, modules)
    for segment, part in parts.items():
        part_sequence(model, segment, part)
    for layer in model.modules():
        # Fused kernels for evaluation read weights without calling the modules that hold them.
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0
        if isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False


class OwnForward:
    """A forward for one module. A copy of that module would call it too, and compute with the weights of the first."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        #: Called before it with its first argument.
        self.note: Callable[[Any], None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.note is not None:
            self.note(args[0] if args else None)
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise PlanError(
            "tp: a model that is cut cannot be copied (copy.deepcopy, AveragedModel), as its ranks compute it together; keep averages "
            "of its parameters, or save a checkpoint, which any plan loads"
        )


def _drawing(module: Any, inner: Callable[..., Any], cut: str, axis: Axis) -> Callable[..., Any]:
    """Between a column and its row each rank draws its own random numbers."""

    def column(x: Tensor) -> Any:
        out = inner(x)
        if module.training:
            axis.draws.own(out.device)
        return out

    def row(x: Tensor) -> Any:
        if module.training:
            axis.draws.common(x.device)
        return inner(x)

    return column if cut == "column" else row


def _fit_views(holder: Any, width: int, mine: int) -> None:
    inner = holder.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with Fitted(width, mine):
            return inner(*args, **kwargs)

    holder.forward = OwnForward(forward)


def _product(module: Any) -> Callable[[Tensor, Tensor | None], Tensor]:
    """(x, bias) -> output, with the local weight, which is another tensor wherever ZeRO puts it together."""
    multiply = tp_layers.product(module)
    return lambda x, bias: multiply(x, weight_of(module), bias)


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def _column(module: Any, axis: Axis) -> Callable[..., Tensor]:
    product = _product(module)
    return lambda x: product(axis.copied(x), module.bias)


def _row(module: Any, axis: Axis) -> Callable[..., Tensor]:
    product = _product(module)

    def forward(x: Tensor) -> Tensor:
        total = axis.joined(product(x, None))
        bias = module.bias
        if bias is not None and isinstance(module, _ConvNd):
            bias = bias.view(-1, *(1,) * len(module.kernel_size))
        return _plus(total, bias)

    return forward


def _gather(module: Any, axis: Axis) -> Callable[..., Tensor]:
    wide = len(module.kernel_size) if isinstance(module, _ConvNd) else 0
    sizes = shares(outputs(module), axis.size)
    if wide and module.groups > 1:
        return _grouped(module, axis)
    product = _product(module)

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = axis.copied(x)
        out = type(module).forward(module, x, *args, **kwargs) if wide else product(x, module.bias)
        return axis.gathered(out, out.dim() - 1 - wide, sizes)

    return forward


def _logits(module: Any, axis: Axis) -> Callable[..., Tensor]:
    product, sizes = _product(module), shares(outputs(module), axis.size)

    def forward(x: Tensor) -> Tensor:
        out = product(axis.copied(x), module.bias)
        return Logits(out, out.dim() - 1, sizes, axis)

    return forward


def _grouped(module: Any, axis: Axis) -> Callable[..., Tensor]:
    """Of a convolution in groups each rank has some groups, with their inputs."""
    groups, wide = shares(module.groups, axis.size), len(module.kernel_size)
    inputs = [each * module.in_channels // module.groups for each in groups]
    outputs = [each * module.out_channels // module.groups for each in groups]
    module.groups = groups[axis.rank]

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        dim = x.dim() - 1 - wide
        out = type(module).forward(module, axis.sliced(x, dim, inputs), *args, **kwargs)
        return axis.gathered(out, dim, outputs)

    return forward


def _vocabulary(module: Any, axis: Axis) -> Callable[..., Tensor]:
    sizes = shares(module.num_embeddings, axis.size)
    start, length = sum(sizes[: axis.rank]), sizes[axis.rank]
    padding = None if module.padding_idx is None else module.padding_idx - start
    padding = padding if padding is not None and 0 <= padding < length else None

    def here(ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of this rank's part, and which of them are its own."""
        require_inside(ids, sum(sizes), type(module).__name__)
        mine = ids - start
        inside = (mine >= 0) & (mine < length)
        return mine.where(inside, 0), inside

    def table(ids: Tensor) -> Tensor:
        rows, inside = here(ids)
        found = F.embedding(rows, module.weight, padding)
        return axis.summed(found.masked_fill(~inside.unsqueeze(-1), 0.0))

    def bag(ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        rows, inside = here(ids)
        weights = inside.to(module.weight.dtype)
        if per_sample_weights is not None:
            weights = axis.copied(per_sample_weights) * weights
        last = module.include_last_offset
        found = F.embedding_bag(
            rows, module.weight, offsets, mode="sum", per_sample_weights=weights, include_last_offset=last
        )
        return axis.summed(found)

    return bag if isinstance(module, nn.EmbeddingBag) else table


_FORWARDS: dict[str, Callable[[Any, Axis], Callable[..., Any]]] = {
    "column": _column,
    "row": _row,
    "attention": attention,
    "gather": _gather,
    "logits": _logits,
    "vocabulary": _vocabulary,
}


#: A module and its path, its parameters that are cut at rest with their dims and sizes, and what puts them together.
_Stored = tuple[str, nn.Module, dict[str, tuple[int, list[int]]], Callable[[Tensor, int, Sequence[int]], Tensor]]


def _put_together(holder: nn.Module, path: str, modules: Sequence[_Stored]) -> None:
    """While `holder` runs, the modules' own parameters are whole."""
    inner = holder.forward

    @contextmanager
    def whole() -> Iterator[None]:
        kept: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            for where, module, sizes, together in modules:
                for name, (dim, dealt) in sizes.items():
                    value = module._parameters[name]
                    if not isinstance(value, nn.Parameter) or value.is_meta:
                        continue  # whole already, within an outer call; or another stage's
                    if isinstance(value, DTensor):
                        raise PlanError(
                            f"{where}.{name} is cut at rest and used all over {path or 'the model'}, and zero shards a part of that by "
                            "itself; use zero=0 with tp"
                        )
                    kept.append((module, name, value))
                    module._parameters[name] = together(value, dim, dealt)  # type: ignore[assignment]
                relist(module)
            yield
        finally:
            for module, name, value in kept:
                module._parameters[name] = value
                relist(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with whole():
            return inner(*args, **kwargs)

    holder.forward = OwnForward(forward)
