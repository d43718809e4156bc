"""Batch norm with statistics over all data ranks' samples.

torch's SyncBatchNorm refuses CPU tensors; this implementation serves both kinds of device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class SynchronisedBatchNorm(_BatchNorm):
    """Batch norm over the samples of every rank in `group`; ranks may hold different numbers of them."""

    group: dist.ProcessGroup | None = None

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"batch norm needs at least 2 dims, found {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; in evaluation mode with running statistics this is torch's own batch norm."""
        if not (self.training or self.running_mean is None):
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, variance, count = _SyncNormalize.apply(input, self.weight, self.bias, self.eps, self.group)
        if self.training and self.track_running_stats:
            self._update_running_stats(mean, variance, count)
        return output

    @torch.no_grad()
    def _update_running_stats(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class _SyncNormalize(torch.autograd.Function):
    """Forward gathers (mean, variance, count) of the ranks; backward sums the two reductions that the gradient needs."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        input_fp32 = input.to(torch.promote_types(input.dtype, torch.float32))  # half precision cannot hold the sums
        dims, shape = _reduction_dims(input), _broadcast_shape(input)
        variance, mean = torch.var_mean(input_fp32, dims, correction=0)
        count = torch.full((1,), input.numel() // input.shape[1], dtype=input_fp32.dtype, device=input.device)
        mean, variance, count = _combine_moments(torch.cat([mean, variance, count]), group)
        scale = torch.rsqrt(variance + eps)
        normalized = (input_fp32 - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normalized, weight, scale, count)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, count)
        output = normalized if weight is None else normalized * weight.view(shape)
        if bias is not None:
            output = output + bias.view(shape)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normalized, weight, scale, count = ctx.saved_tensors
        grad = grads[0].to(normalized.dtype)
        dims, shape = _reduction_dims(grad), _broadcast_shape(grad)
        bias_grad, weight_grad = grad.sum(dims), (grad * normalized).sum(dims)
        reduced_sums = torch.cat([bias_grad, weight_grad])
        if dist.is_initialized():
            dist.all_reduce(reduced_sums, group=ctx.group)
        sum_grad, sum_grad_normalized = reduced_sums.chunk(2)
        centered_grad = grad - (sum_grad.view(shape) + normalized * sum_grad_normalized.view(shape)) / count
        input_grad = centered_grad * (scale if weight is None else scale * weight).view(shape)
        weight_result = None if weight is None else weight_grad.to(weight.dtype)
        bias_result = bias_grad if ctx.needs_input_grad[2] else None
        return input_grad.to(grads[0].dtype), weight_result, bias_result, None, None


def _combine_moments(local_moments: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and count over the ranks, from each one's (Chan's formula: no cancellation of large squares)."""
    rank_moments = [local_moments]
    if dist.is_initialized():
        rank_moments = [torch.empty_like(local_moments) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rank_moments, local_moments, group=group)
    moments = torch.stack(rank_moments)
    channels = (moments.shape[1] - 1) // 2
    means, variances, counts = moments[:, :channels], moments[:, channels:-1], moments[:, -1:]
    count = counts.sum(0)
    mean = (means * counts).sum(0) / count
    variance = ((variances + (means - mean) ** 2) * counts).sum(0) / count
    return mean, variance, count


def _reduction_dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _broadcast_shape(x: Tensor) -> list[int]:
    return [-1 if dim == 1 else 1 for dim in range(x.dim())]


def synchronise(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """`model` with every batch norm synchronised over `group`; parameters, buffers and names stay the same objects."""
    for name, child in model.named_children():
        setattr(model, name, synchronise(child, group))
    if not isinstance(model, _BatchNorm):
        return model
    tracks = model.track_running_stats
    replacement = SynchronisedBatchNorm(model.num_features, model.eps, model.momentum, False, tracks, device="meta")
    replacement.affine = model.affine
    replacement._parameters.update(model._parameters)
    replacement._buffers.update(model._buffers)
    replacement.group = group
    return replacement.train(model.training)
