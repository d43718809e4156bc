"""Gradients summed over the data ranks, in buckets, while backward still runs (zero=0).

Written by hand because DDP rebuilds its buckets after the first step: a resumed run then sums in another order and is not
bit-equal at three ranks or more. Here the layout follows from the parameters alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.errors import TrainingError
from echelon.plan.gradient_buckets import assign_buckets


class _GradientBucket:
    """Consecutive gradients in one flat tensor, with one number behind each parameter's: how many ranks used it."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self.parameters, self.group = tuple(parameters), group
        sizes = [parameter.numel() for parameter in parameters]
        first = parameters[0]
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
        self.views = [
            _gradient_view(flat_slice, parameter)
            for flat_slice, parameter in zip(self.flat.split([*sizes, len(sizes)]), parameters, strict=False)
        ]
        self.use_counts = self.flat[-len(sizes) :]
        self.filled: list[bool] = []
        self.missing_count = 0
        self.work: dist.Work | None = None
        self.reset()

    def reset(self) -> None:
        self.filled = [False] * len(self.parameters)
        self.missing_count = len(self.parameters)
        self.work = None

    def adopt_gradient(self, index: int) -> None:
        """Move a parameter's gradient in; from now on its `.grad` is the bucket's view, and later micro-batches add to that."""
        parameter, view = self.parameters[index], self.views[index]
        if parameter.grad is not view:
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view

    def mark_final(self, index: int) -> None:
        """A parameter's gradient is final."""
        if self.work is not None:
            raise TrainingError(
                "a gradient was computed twice in one backward, after it had been exchanged (reentrant checkpointing does that): "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        self.adopt_gradient(index)
        self.missing_count -= not self.filled[index]
        self.filled[index] = True

    def start_all_reduce(self) -> None:
        if self.missing_count:
            for view, filled in zip(self.views, self.filled, strict=True):
                if not filled:
                    view.zero_()
            self.use_counts.copy_(torch.tensor(self.filled, dtype=self.flat.dtype))
        else:
            self.use_counts.fill_(1)
        self.work = dist.all_reduce(self.flat, group=self.group, async_op=True)

    def wait(self) -> None:
        assert self.work is not None
        self.work.wait()
        if self.missing_count:
            # Another rank may have used what this one did not: its gradient counts here too. Unused everywhere stays None.
            for index, use_count in enumerate(self.use_counts.tolist()):
                if not self.filled[index]:
                    self.parameters[index].grad = self.views[index] if use_count else None
        self.reset()


def _gradient_view(flat: Tensor, parameter: Tensor) -> Tensor:
    """A gradient inside `flat`, laid out in memory as its parameter is: fused optimizer kernels take that for granted, and
    train something else in silence where it is not so (`channels_last` weights)."""
    if _is_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
    return flat.view_as(parameter)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in whatever order."""
    expected_stride = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected_stride:
                return False
            expected_stride *= size
    return True


class GradientAllReduce:
    """Sums gradients over the ranks of a group. `sync_next_backward` before the backward whose gradients are final, `wait` after it."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], megabytes: int, group: dist.ProcessGroup | None = None
    ) -> None:
        sizes_and_kinds = [
            (tensor.numel() * tensor.element_size(), (tensor.dtype, tensor.device)) for tensor in parameters
        ]
        self._buckets = [
            _GradientBucket([parameters[position] for position in positions], group)
            for positions in assign_buckets(sizes_and_kinds, megabytes)
        ]
        self._sync_enabled = False
        self._next_bucket = 0
        self._hooks = []
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._make_hook(bucket, index)))

    def _make_hook(self, bucket: _GradientBucket, index: int) -> Callable[[Tensor], None]:
        def on_gradient(_: Tensor) -> None:
            if not self._sync_enabled:
                bucket.adopt_gradient(index)
                return
            bucket.mark_final(index)
            if not bucket.missing_count:
                self._launch_full_buckets()

        return on_gradient

    def _launch_full_buckets(self) -> None:
        """Launch full buckets in their fixed order: every rank must issue its collectives in the same one."""
        while self._next_bucket < len(self._buckets) and not self._buckets[self._next_bucket].missing_count:
            self._buckets[self._next_bucket].start_all_reduce()
            self._next_bucket += 1

    def sync_next_backward(self) -> None:
        """The next backward completes the gradients: exchange each as soon as it is ready."""
        self._sync_enabled, self._next_bucket = True, 0

    def wait(self) -> None:
        """Wait until every gradient is the sum over ranks."""
        self._sync_enabled = False
        for bucket in self._buckets[self._next_bucket :]:
            for index, parameter in enumerate(bucket.parameters):
                if not bucket.filled[index] and parameter.grad is not None:
                    bucket.mark_final(index)  # used in an earlier micro-batch but not in the last
            bucket.start_all_reduce()
        for bucket in self._buckets:
            bucket.wait()

    def close(self) -> None:
        """Detach from the parameters."""
        for hook in self._hooks:
            hook.remove()
