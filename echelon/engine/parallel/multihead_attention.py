"""nn.MultiheadAttention with some of its heads on each tensor-parallel rank.

torch's function requires the heads' widths to add up to the input's, so the attention is written out here as its documentation
specifies it, with every mask and with the weights on request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from echelon.engine.parallel.tp_collectives import TPCommunicator
from echelon.plan.placement import compute_shard_sizes


def make_attention_forward(module: Any, tp: TPCommunicator) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The module's forward on this rank's heads."""
    heads_per_rank = compute_shard_sizes(module.num_heads, tp.size)
    first_head, local_heads = tp.local_span(heads_per_rank)

    def split_heads(x: Tensor, projection: tuple[Tensor, Tensor | None]) -> Tensor:
        return F.linear(x, *projection).unflatten(-1, (local_heads, module.head_dim)).transpose(1, 2)

    def merge_masks(dtype: torch.dtype, padding_mask: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
        """Both masks as one additive mask: samples x heads x queries x keys."""
        if attention_mask is not None:
            attention_mask = tp.copy_to_region(_to_additive_mask(attention_mask, dtype))
            if attention_mask.dim() == 3:
                attention_mask = attention_mask.unflatten(0, (-1, module.num_heads)).narrow(1, first_head, local_heads)
        if padding_mask is None:
            return attention_mask
        padding_mask = _to_additive_mask(padding_mask, dtype)[:, None, None, :]
        return padding_mask if attention_mask is None else attention_mask + padding_mask

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        is_unbatched = query.dim() == 2
        inputs = [tp.copy_to_region(x) for x in (query, key, value)]
        if is_unbatched:
            inputs = [x.unsqueeze(0) for x in inputs]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not module.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        q, k, v = map(split_heads, inputs, _local_projections(module))
        use_causal = is_causal and key_padding_mask is None and not need_weights
        mask = merge_masks(q.dtype, key_padding_mask, None if use_causal else attn_mask)
        dropout = module.dropout if module.training else 0.0
        if dropout:
            tp.rng.use_rank_rng(q.device)
        weights: Tensor | None = None
        if need_weights:
            scores = (q * module.head_dim**-0.5) @ k.transpose(-2, -1)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            attended = weights @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v, mask, dropout, use_causal)
        if dropout:
            tp.rng.use_shared_rng(q.device)
        out = tp.reduce_row_output(F.linear(attended.transpose(1, 2).flatten(2), module.out_proj.weight), 1)
        if module.out_proj.bias is not None:
            out = out + module.out_proj.bias
        if weights is not None and average_attn_weights:
            weights = tp.reduce_from_region(weights.sum(1)) / module.num_heads
        elif weights is not None:
            weights = tp.gather_from_region(weights, 1, heads_per_rank)
        if is_unbatched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if module.batch_first else out.transpose(0, 1), weights

    return forward


def _local_projections(module: Any) -> list[tuple[Tensor, Tensor | None]]:
    """(weight, bias) of q, k and v: this rank's rows."""
    weights = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    return list(zip(weights, biases, strict=True))


def _to_additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Boolean masks hide where True."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf")) if mask.dtype is torch.bool else mask
