"""All-reduce of gradients in flat buckets while backward still runs (zero=0).

    backward    grad 9  grad 8 │ grad 7  grad 6  grad 5 │ grad 4 ...
    exchange                   └─ all-reduce bucket 0 ─┘└─ all-reduce bucket 1 ─┘

Not DDP: it rebuilds its buckets after the first step, so a resumed run sums in another order and is not bit-equal on three ranks or more. Here
the layout depends on the parameters alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.errors import TrainingError
from echelon.plan.gradient_buckets import assign_buckets


class _GradientBucket:
    """Consecutive gradients in one flat tensor, followed by the number of ranks that used each parameter."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self.parameters, self.group = tuple(parameters), group
        sizes = [parameter.numel() for parameter in parameters]
        first = parameters[0]
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
        *slices, self.use_counts = self.flat.split([*sizes, len(sizes)])
        self.views = [_gradient_view(item, parameter) for item, parameter in zip(slices, parameters, strict=True)]
        self.reset()

    def reset(self) -> None:
        self.is_filled = [False] * len(self.parameters)
        self.missing_count = len(self.parameters)
        self.work: dist.Work | None = None

    def adopt_gradient(self, index: int) -> None:
        """Move a gradient in: its `.grad` becomes a view of the bucket, to which later micro-batches add."""
        parameter, view = self.parameters[index], self.views[index]
        if parameter.grad is not view:
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view

    def mark_final(self, index: int) -> None:
        """A parameter's gradient is complete."""
        if self.work is not None:
            raise TrainingError(
                "a gradient was computed twice in one backward, after its all-reduce (reentrant checkpointing does that): "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        self.adopt_gradient(index)
        self.missing_count -= not self.is_filled[index]
        self.is_filled[index] = True

    def start_all_reduce(self) -> None:
        if self.missing_count:
            for view, is_filled in zip(self.views, self.is_filled, strict=True):
                if not is_filled:
                    view.zero_()
            self.use_counts.copy_(torch.tensor(self.is_filled, dtype=self.flat.dtype))
        else:
            self.use_counts.fill_(1)
        self.work = dist.all_reduce(self.flat, group=self.group, async_op=True)

    def wait(self) -> None:
        assert self.work is not None
        self.work.wait()
        if self.missing_count:
            # A parameter unused here takes the gradient of ranks that used it; unused everywhere, it keeps None.
            for index, use_count in enumerate(self.use_counts.tolist()):
                if not self.is_filled[index]:
                    self.parameters[index].grad = self.views[index] if use_count else None
        self.reset()


def _gradient_view(flat: Tensor, parameter: Tensor) -> Tensor:
    """A gradient inside `flat`, with its parameter's memory layout: fused optimizer kernels assume it, and silently compute something else
    where it differs (`channels_last` weights)."""
    if torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
    return flat.view_as(parameter)


class GradientAllReduce:
    """Sums gradients over a group: `sync_next_backward` before the backward that completes them, `wait` after it."""

    def __init__(self, parameters: list[nn.Parameter], megabytes: int, group: dist.ProcessGroup | None = None) -> None:
        buckets = assign_buckets([(p.nbytes, (p.dtype, p.device)) for p in parameters], megabytes)
        self._buckets = [_GradientBucket([parameters[index] for index in bucket], group) for bucket in buckets]
        self._sync_enabled = False
        self._next_bucket = 0
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, bucket, index))
            for bucket in self._buckets
            for index, parameter in enumerate(bucket.parameters)
        ]

    def _on_gradient(self, bucket: _GradientBucket, index: int, _: Tensor) -> None:
        if not self._sync_enabled:
            bucket.adopt_gradient(index)
            return
        bucket.mark_final(index)
        # In a fixed order: every rank must issue its collectives in the same one.
        while self._next_bucket < len(self._buckets) and not self._buckets[self._next_bucket].missing_count:
            self._buckets[self._next_bucket].start_all_reduce()
            self._next_bucket += 1

    def sync_next_backward(self) -> None:
        """The next backward completes the gradients: reduce each bucket as soon as it is full."""
        self._sync_enabled, self._next_bucket = True, 0

    def wait(self) -> None:
        """Return when every gradient is the sum over ranks."""
        self._sync_enabled = False
        for bucket in self._buckets[self._next_bucket :]:
            for index, parameter in enumerate(bucket.parameters):
                if not bucket.is_filled[index] and parameter.grad is not None:
                    bucket.mark_final(index)  # used in an earlier micro-batch, but not in the last
            bucket.start_all_reduce()
        for bucket in self._buckets:
            bucket.wait()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
