"""nn.MultiheadAttention with some of its heads on each rank of the tensor axis.

torch's own function wants all heads' widths to add up to the input's, so the attention itself is written out here: as its
documentation has it, with every mask and with the weights where they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from echelon.engine.parallel.tp_collectives import Axis
from echelon.plan.placement import shares


def attention(module: Any, axis: Axis) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The module's forward, with this rank's heads."""
    sizes = shares(module.num_heads, axis.size)
    start, mine = sum(sizes[: axis.rank]), sizes[axis.rank]

    def split(x: Tensor) -> Tensor:
        return x.unflatten(-1, (mine, module.head_dim)).transpose(1, 2)

    def masked(query: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor | None:
        """Both masks as one that is added to the scores: samples x heads x queries x keys."""
        both: Tensor | None = None
        if mask is not None:
            mask = axis.copied(_added(mask, query.dtype))
            if mask.dim() == 3:
                mask = mask.unflatten(0, (-1, module.num_heads))[:, start : start + mine]
            both = mask
        if padding is not None:
            padding = _added(padding, query.dtype)[:, None, None, :]
            both = padding if both is None else both + padding
        return both

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
        alone = query.dim() == 2
        inputs = [axis.copied(x) for x in (query, key, value)]
        if alone:
            inputs = [x.unsqueeze(0) for x in inputs]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not module.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        q, k, v = (split(F.linear(x, *each)) for x, each in zip(inputs, _projections(module), strict=True))
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = masked(q, key_padding_mask, None if causal else attn_mask)
        dropout = module.dropout if module.training else 0.0
        if dropout:
            axis.draws.own(q.device)
        weights: Tensor | None = None
        if need_weights:
            scores = (q * module.head_dim**-0.5) @ k.transpose(-2, -1)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            seen = weights @ v
        else:
            seen = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        if dropout:
            axis.draws.common(q.device)
        out = axis.joined(F.linear(seen.transpose(1, 2).flatten(2), module.out_proj.weight), 1)
        if module.out_proj.bias is not None:
            out = out + module.out_proj.bias
        if weights is not None:
            weights = (
                axis.summed(weights.sum(1)) / module.num_heads
                if average_attn_weights
                else axis.gathered(weights, 1, sizes)
            )
        if alone:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if module.batch_first else out.transpose(0, 1), weights

    return forward


def _projections(module: Any) -> list[tuple[Tensor, Tensor | None]]:
    """(weight, bias) of q, k and v: this rank's rows of each."""
    packed = module.in_proj_weight
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight) if packed is None else packed.chunk(3)
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    return list(zip(weights, biases, strict=True))


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """True: not to be seen."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf")) if mask.dtype is torch.bool else mask
