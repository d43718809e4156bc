"""Batch norm whose statistics are those of all data ranks' samples together.

Written by hand because torch's SyncBatchNorm refuses CPU tensors; one implementation then serves both kinds of device.
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
        output, mean, variance, count = _Normalise.apply(input, self.weight, self.bias, self.eps, self.group)
        if self.training and self.track_running_stats:
            self._track(mean, variance, count)
        return output

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class _Normalise(torch.autograd.Function):
    """Forward gathers (mean, variance, count) of the ranks; backward sums the two reductions that the gradient needs."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = input.to(torch.promote_types(input.dtype, torch.float32))  # half precision cannot hold the sums
        dims, shape = _dims(input), _shape(input)
        variance, mean = torch.var_mean(wide, dims, correction=0)
        count = torch.full((1,), input.numel() // input.shape[1], dtype=wide.dtype, device=input.device)
        mean, variance, count = _combine(torch.cat([mean, variance, count]), group)
        scale = torch.rsqrt(variance + eps)
        normal = (wide - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normal, weight, scale, count)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, count)
        output = normal if weight is None else normal * weight.view(shape)
        if bias is not None:
            output = output + bias.view(shape)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normal, weight, scale, count = ctx.saved_tensors
        grad = grads[0].to(normal.dtype)
        dims, shape = _dims(grad), _shape(grad)
        bias_grad, weight_grad = grad.sum(dims), (grad * normal).sum(dims)
        sums = torch.cat([bias_grad, weight_grad])
        if dist.is_initialized():
            dist.all_reduce(sums, group=ctx.group)
        sum_grad, sum_normal = sums.chunk(2)
        inner = grad - (sum_grad.view(shape) + normal * sum_normal.view(shape)) / count
        input_grad = inner * (scale if weight is None else scale * weight).view(shape)
        return (
            input_grad.to(grads[0].dtype),
            None if weight is None else weight_grad.to(weight.dtype),
            bias_grad if ctx.needs_input_grad[2] else None,
            None,
            None,
        )


def _combine(local: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and count over the ranks, from each one's (Chan's formula: no cancellation of large squares)."""
    parts = [local]
    if dist.is_initialized():
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, local, group=group)
    table = torch.stack(parts)
    channels = (table.shape[1] - 1) // 2
    means, variances, counts = table[:, :channels], table[:, channels:-1], table[:, -1:]
    count = counts.sum(0)
    mean = (means * counts).sum(0) / count
    variance = ((variances + (means - mean) ** 2) * counts).sum(0) / count
    return mean, variance, count


def _dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _shape(x: Tensor) -> list[int]:
    return [-1 if dim == 1 else 1 for dim in range(x.dim())]


def synchronise(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """`model` with every batch norm synchronised over `group`; parameters, buffers and names stay the very same."""
    for name, child in model.named_children():
        setattr(model, name, synchronise(child, group))
    if not isinstance(model, _BatchNorm):
        return model
    twin = SynchronisedBatchNorm(
        model.num_features, model.eps, model.momentum, False, model.track_running_stats, device="meta"
    )
    twin.affine = model.affine
    twin._parameters.update(model._parameters)
    twin._buffers.update(model._buffers)
    twin.group = group
    return twin.train(model.training)
