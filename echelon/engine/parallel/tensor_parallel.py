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

from echelon.engine.parallel.index_check import require_in_range
from echelon.engine.parallel.multihead_attention import make_attention_forward
from echelon.engine.parallel.sequence_parallel import (
    contains_module,
    install_sequence_parallel,
    make_segment_communicators,
)
from echelon.engine.parallel.shard_layout import TPShard
from echelon.engine.parallel.tp_collectives import TPCommunicator
from echelon.engine.parallel.vocab_parallel import ShardedLogits
from echelon.errors import PlanError
from echelon.nn.recurrent import refresh_flat_weights
from echelon.nn.views import LocalWidthViews
from echelon.partition import tp_layers
from echelon.partition.tp_layers import accept_input_by_name, count_inputs, count_outputs, get_output_first_weight
from echelon.plan.placement import Placement, compute_shard_sizes, shard_attribute
from echelon.plan.sequence_segment import SequenceSegment

__all__ = ["TPCommunicator", "shard_parameters", "install_tensor_parallel", "find_tp_shards"]

# What is kept


def find_tp_shards(model: nn.Module, placements: Iterable[Placement], tp: TPCommunicator) -> dict[str, TPShard]:
    """Parameter or buffer, by each of its names -> the part of it that this rank keeps."""
    shards_by_id: dict[int, TPShard] = {}
    for placement in placements:
        module = model.get_submodule(placement.path)
        for tensor_slice in placement.slices:
            tensor = attrgetter(tensor_slice.name)(module)
            shards_by_id[id(tensor)] = TPShard(
                tensor.shape, tensor_slice.dim, tensor_slice.fused_sizes, tp.rank, tp.size, placement.unit
            )
    return {name: shards_by_id[id(tensor)] for name, tensor in _named_tensors(model) if id(tensor) in shards_by_id}


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


@torch.no_grad()
def shard_parameters(model: nn.Module, tp_shards: Mapping[str, TPShard]) -> None:
    """Keep only this rank's parts of the parameters and buffers; those that are shared stay shared."""
    shards_by_id = {id(tensor): tp_shards[name] for name, tensor in _named_tensors(model) if name in tp_shards}
    sharded_tensors: dict[int, Tensor] = {}
    for module in model.modules():
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is not None and id(tensor) in shards_by_id:
                    if id(tensor) not in sharded_tensors:
                        local_values = shards_by_id[id(tensor)].extract(tensor)
                        is_parameter = isinstance(tensor, nn.Parameter)
                        sharded_tensors[id(tensor)] = (
                            nn.Parameter(local_values, tensor.requires_grad) if is_parameter else local_values
                        )
                    registry[name] = sharded_tensors[id(tensor)]  # type: ignore[assignment]
        refresh_flat_weights(module)


# What is computed


def install_tensor_parallel(
    model: nn.Module, placements: Iterable[Placement], tp: TPCommunicator, segments: Iterable[SequenceSegment] = ()
) -> None:
    """Make the modules compute with their parts. Their parameters are whole still, and cut before the first call."""
    segment_tps = make_segment_communicators(segments, tp)
    partial_names = {name for segment in segment_tps for name in segment.partial_gradients}
    rest_sharded: dict[str, list[_RestShardedModule]] = {}
    for placement in placements:
        module, path = model.get_submodule(placement.path), placement.path
        module_tp = next(
            (segment_tp for segment, segment_tp in segment_tps.items() if contains_module(segment, path)), tp
        )
        for name in placement.divided_attributes:
            owner_path, _, attribute = name.rpartition(".")
            owner, width = model.get_submodule(owner_path), count_inputs(module)
            full_value = getattr(owner, attribute)
            setattr(owner, attribute, shard_attribute(full_value, tp.rank, tp.size, width=width, unit=placement.unit))
        if placement.view_module is not None:
            width = count_inputs(module)
            local_width = compute_shard_sizes(width, tp.size, placement.unit)[tp.rank]
            _fit_views(model.get_submodule(placement.view_module), width, local_width)
        if placement.cut == "stored":
            sharded_dims = {
                tensor_slice.name: (
                    tensor_slice.dim,
                    compute_shard_sizes(getattr(module, tensor_slice.name).shape[tensor_slice.dim], tp.size),
                )
                for tensor_slice in placement.slices
            }
            sharded_names = {f"{path}.{name}" for name in sharded_dims}
            rest_sharded.setdefault(placement.gathered_in, []).append(
                (path, module, sharded_dims, tp.all_gather if sharded_names & partial_names else tp.gather_from_region)
            )
        elif placement.cut in _FORWARD_BUILDERS:
            forward = _FORWARD_BUILDERS[placement.cut](module, module_tp)
            if placement.uses_rng:
                forward = _with_rank_rng(module, forward, placement.cut, module_tp)
            module.forward = PatchedForward(accept_input_by_name(module, forward))
    for scope_path, modules in rest_sharded.items():
        _gather_while_running(model.get_submodule(scope_path), scope_path, modules)
    for segment, segment_tp in segment_tps.items():
        install_sequence_parallel(model, segment, segment_tp)
    for layer in model.modules():
        # Fused kernels for evaluation read weights without calling the modules that hold them.
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0
        if isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False


class PatchedForward:
    """A forward for one module. A copy of that module would call it too, and compute with the weights of the first."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        #: Called before it with its first argument.
        self.pre_hook: Callable[[Any], None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.pre_hook is not None:
            self.pre_hook(args[0] if args else None)
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise PlanError(
            "tp: a model that is cut cannot be copied (copy.deepcopy, AveragedModel), as its ranks compute it together; keep averages "
            "of its parameters, or save a checkpoint, which any plan loads"
        )


def _with_rank_rng(
    module: Any, original_forward: Callable[..., Any], cut: str, tp: TPCommunicator
) -> Callable[..., Any]:
    """Between a column and its row each rank draws its own random numbers."""

    def column_forward(x: Tensor) -> Any:
        out = original_forward(x)
        if module.training:
            tp.rng.use_rank_rng(out.device)
        return out

    def row_forward(x: Tensor) -> Any:
        if module.training:
            tp.rng.use_shared_rng(x.device)
        return original_forward(x)

    return column_forward if cut == "column" else row_forward


def _fit_views(module: Any, width: int, local_width: int) -> None:
    original_forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with LocalWidthViews(width, local_width):
            return original_forward(*args, **kwargs)

    module.forward = PatchedForward(forward)


def _local_product(module: Any) -> Callable[[Tensor, Tensor | None], Tensor]:
    """(x, bias) -> output, with the local weight, which is another tensor wherever ZeRO puts it together."""
    multiply = tp_layers.get_matmul(module)
    return lambda x, bias: multiply(x, get_output_first_weight(module), bias)


def _add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def _column_forward(module: Any, tp: TPCommunicator) -> Callable[..., Tensor]:
    product = _local_product(module)
    return lambda x: product(tp.copy_to_region(x), module.bias)


def _row_forward(module: Any, tp: TPCommunicator) -> Callable[..., Tensor]:
    product = _local_product(module)

    def forward(x: Tensor) -> Tensor:
        output = tp.reduce_row_output(product(x, None))
        bias = module.bias
        if bias is not None and isinstance(module, _ConvNd):
            bias = bias.view(-1, *(1,) * len(module.kernel_size))
        return _add_bias(output, bias)

    return forward


def _gather_forward(module: Any, tp: TPCommunicator) -> Callable[..., Tensor]:
    spatial_dims = len(module.kernel_size) if isinstance(module, _ConvNd) else 0
    shard_sizes = compute_shard_sizes(count_outputs(module), tp.size)
    if spatial_dims and module.groups > 1:
        return _grouped_conv_forward(module, tp)
    product = _local_product(module)

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = tp.copy_to_region(x)
        out = type(module).forward(module, x, *args, **kwargs) if spatial_dims else product(x, module.bias)
        return tp.gather_from_region(out, out.dim() - 1 - spatial_dims, shard_sizes)

    return forward


def _logits_forward(module: Any, tp: TPCommunicator) -> Callable[..., Tensor]:
    product, shard_sizes = _local_product(module), compute_shard_sizes(count_outputs(module), tp.size)

    def forward(x: Tensor) -> Tensor:
        out = product(tp.copy_to_region(x), module.bias)
        return ShardedLogits(out, out.dim() - 1, shard_sizes, tp)

    return forward


def _grouped_conv_forward(module: Any, tp: TPCommunicator) -> Callable[..., Tensor]:
    """Of a convolution in groups each rank has some groups, with their inputs."""
    groups_per_rank, spatial_dims = compute_shard_sizes(module.groups, tp.size), len(module.kernel_size)
    input_sizes = [group_count * module.in_channels // module.groups for group_count in groups_per_rank]
    output_sizes = [group_count * module.out_channels // module.groups for group_count in groups_per_rank]
    module.groups = groups_per_rank[tp.rank]

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        dim = x.dim() - 1 - spatial_dims
        out = type(module).forward(module, tp.slice_to_region(x, dim, input_sizes), *args, **kwargs)
        return tp.gather_from_region(out, dim, output_sizes)

    return forward


def _vocab_forward(module: Any, tp: TPCommunicator) -> Callable[..., Tensor]:
    shard_sizes = compute_shard_sizes(module.num_embeddings, tp.size)
    first_row, local_rows = sum(shard_sizes[: tp.rank]), shard_sizes[tp.rank]
    padding_row = None if module.padding_idx is None else module.padding_idx - first_row
    padding_row = padding_row if padding_row is not None and 0 <= padding_row < local_rows else None

    def to_local_rows(ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of this rank's part, and which of them are its own."""
        require_in_range(ids, sum(shard_sizes), type(module).__name__)
        local_ids = ids - first_row
        is_local = (local_ids >= 0) & (local_ids < local_rows)
        return local_ids.where(is_local, 0), is_local

    def lookup(ids: Tensor) -> Tensor:
        rows, is_local = to_local_rows(ids)
        embedded = F.embedding(rows, module.weight, padding_row)
        return tp.reduce_from_region(embedded.masked_fill(~is_local.unsqueeze(-1), 0.0))

    def lookup_bag(ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        rows, is_local = to_local_rows(ids)
        weights = is_local.to(module.weight.dtype)
        if per_sample_weights is not None:
            weights = tp.copy_to_region(per_sample_weights) * weights
        include_last_offset = module.include_last_offset
        embedded = F.embedding_bag(
            rows,
            module.weight,
            offsets,
            mode="sum",
            per_sample_weights=weights,
            include_last_offset=include_last_offset,
        )
        return tp.reduce_from_region(embedded)

    return lookup_bag if isinstance(module, nn.EmbeddingBag) else lookup


_FORWARD_BUILDERS: dict[str, Callable[[Any, TPCommunicator], Callable[..., Any]]] = {
    "column": _column_forward,
    "row": _row_forward,
    "attention": make_attention_forward,
    "gather": _gather_forward,
    "logits": _logits_forward,
    "vocabulary": _vocab_forward,
}


#: A module and its path, its parameters that are cut at rest with their dims and sizes, and what puts them together.
_RestShardedModule = tuple[
    str, nn.Module, dict[str, tuple[int, list[int]]], Callable[[Tensor, int, Sequence[int]], Tensor]
]


def _gather_while_running(scope: nn.Module, scope_path: str, sharded_modules: Sequence[_RestShardedModule]) -> None:
    """While `scope` runs, the modules' own parameters are whole."""
    original_forward = scope.forward

    @contextmanager
    def full_parameters() -> Iterator[None]:
        local_parameters: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            for module_path, module, sharded_dims, gather in sharded_modules:
                for name, (dim, shard_sizes) in sharded_dims.items():
                    parameter = module._parameters[name]
                    if not isinstance(parameter, nn.Parameter) or parameter.is_meta:
                        continue  # whole already, within an outer call; or another stage's
                    if isinstance(parameter, DTensor):
                        raise PlanError(
                            f"{module_path}.{name} is cut at rest and used all over {scope_path or 'the model'}, and zero shards a part of that by "
                            "itself; use zero=0 with tp"
                        )
                    local_parameters.append((module, name, parameter))
                    module._parameters[name] = gather(parameter, dim, shard_sizes)  # type: ignore[assignment]
                refresh_flat_weights(module)
            yield
        finally:
            for module, name, parameter in local_parameters:
                module._parameters[name] = parameter
                refresh_flat_weights(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with full_parameters():
            return original_forward(*args, **kwargs)

    scope.forward = PatchedForward(forward)
