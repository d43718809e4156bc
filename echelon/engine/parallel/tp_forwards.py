"""Forwards of tensor-parallel modules, one per kind of placement (plan/placement.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from echelon.engine.parallel.multihead_attention import make_attention_forward
from echelon.engine.parallel.tp_collectives import TPCommunicator
from echelon.engine.parallel.vocab_parallel import ShardedLogits, make_embedding_forward
from echelon.partition.tp_layers import count_outputs, get_matmul, get_output_first_weight
from echelon.plan.placement import compute_shard_sizes


def local_product(module: Any) -> Callable[[Tensor, Tensor | None], Tensor]:
    """(x, bias) -> output with the weight as it is at the call: ZeRO replaces it whenever it gathers."""
    multiply = get_matmul(module)
    return lambda x, bias: multiply(x, get_output_first_weight(module), bias)


def _make_column_forward(module: Any, tp: TPCommunicator) -> Callable[..., Tensor]:
    product = local_product(module)
    return lambda x: product(tp.copy_to_region(x), module.bias)


def _make_row_forward(module: Any, tp: TPCommunicator) -> Callable[..., Tensor]:
    product = local_product(module)
    spatial_dims = len(module.kernel_size) if isinstance(module, _ConvNd) else 0

    def forward(x: Tensor) -> Tensor:
        output = tp.reduce_row_output(product(x, None))
        bias = module.bias
        return output if bias is None else output + bias.view(-1, *(1,) * spatial_dims)

    return forward


def _make_gather_forward(module: Any, tp: TPCommunicator) -> Callable[..., Tensor]:
    if isinstance(module, _ConvNd):
        return _make_conv_gather_forward(module, tp)
    return _make_output_forward(module, tp, tp.gather_from_region)


def _make_logits_forward(module: Any, tp: TPCommunicator) -> Callable[..., Tensor]:
    return _make_output_forward(module, tp, lambda local, dim, sizes: ShardedLogits(local, dim, sizes, tp))


def _make_output_forward(module: Any, tp: TPCommunicator, finish: Callable[..., Tensor]) -> Callable[..., Tensor]:
    product, shard_sizes = local_product(module), compute_shard_sizes(count_outputs(module), tp.size)

    def forward(x: Tensor) -> Tensor:
        out = product(tp.copy_to_region(x), module.bias)
        return finish(out, out.dim() - 1, shard_sizes)

    return forward


def _make_conv_gather_forward(module: Any, tp: TPCommunicator) -> Callable[..., Tensor]:
    """Each rank computes some output channels; of a grouped convolution some groups, from their input channels."""
    spatial_dims, groups = len(module.kernel_size), module.groups
    if groups > 1:
        local_groups = compute_shard_sizes(groups, tp.size)
        input_sizes = [count * module.in_channels // groups for count in local_groups]
        output_sizes = [count * module.out_channels // groups for count in local_groups]
        module.groups = local_groups[tp.rank]
    else:
        output_sizes = compute_shard_sizes(module.out_channels, tp.size)

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        channel_dim = x.dim() - 1 - spatial_dims
        local_x = tp.slice_to_region(x, channel_dim, input_sizes) if groups > 1 else tp.copy_to_region(x)
        out = type(module).forward(module, local_x, *args, **kwargs)
        return tp.gather_from_region(out, channel_dim, output_sizes)

    return forward


#: By `Placement.cut`. "between" computes as before on local channels; "stored" gathers parameters instead (tensor_parallel.py).
FORWARD_BUILDERS: dict[str, Callable[[Any, TPCommunicator], Callable[..., Any]]] = {
    "column": _make_column_forward,
    "row": _make_row_forward,
    "attention": make_attention_forward,
    "gather": _make_gather_forward,
    "logits": _make_logits_forward,
    "vocabulary": make_embedding_forward,
}
