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
from echelon.plan.gradient_buckets import layout


class _Bucket:
    """Consecutive gradients in one flat tensor, with one number behind each parameter's: how many ranks used it."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        self.parameters, self.group = tuple(parameters), group
        sizes = [parameter.numel() for parameter in parameters]
        first = parameters[0]
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
        self.views = [
            _view(part, parameter)
            for part, parameter in zip(self.flat.split([*sizes, len(sizes)]), parameters, strict=False)
        ]
        self.used = self.flat[-len(sizes) :]
        self.filled: list[bool] = []
        self.missing = 0
        self.work: dist.Work | None = None
        self.reset()

    def reset(self) -> None:
        self.filled = [False] * len(self.parameters)
        self.missing = len(self.parameters)
        self.work = None

    def take(self, index: int) -> None:
        """Move a parameter's gradient in; from now on its `.grad` is the bucket's view, and later micro-batches add to that."""
        parameter, view = self.parameters[index], self.views[index]
        if parameter.grad is not view:
            assert parameter.grad is not None
            view.copy_(parameter.grad)
            parameter.grad = view

    def fill(self, index: int) -> None:
        """A parameter's gradient is final."""
        if self.work is not None:
            raise TrainingError(
                "a gradient was computed twice in one backward, after it had been exchanged (reentrant checkpointing does that): "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
        self.take(index)
        self.missing -= not self.filled[index]
        self.filled[index] = True

    def launch(self) -> None:
        if self.missing:
            for view, filled in zip(self.views, self.filled, strict=True):
                if not filled:
                    view.zero_()
            self.used.copy_(torch.tensor(self.filled, dtype=self.flat.dtype))
        else:
            self.used.fill_(1)
        self.work = dist.all_reduce(self.flat, group=self.group, async_op=True)

    def finish(self) -> None:
        assert self.work is not None
        self.work.wait()
        if self.missing:
            # Another rank may have used what this one did not: its gradient counts here too. Unused everywhere stays None.
            for index, ranks in enumerate(self.used.tolist()):
                if not self.filled[index]:
                    self.parameters[index].grad = self.views[index] if ranks else None
        self.reset()


def _view(flat: Tensor, parameter: Tensor) -> Tensor:
    """A gradient inside `flat`, laid out in memory as its parameter is: fused optimizer kernels take that for granted, and
    train something else in silence where it is not so (`channels_last` weights)."""
    if _dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
    return flat.view_as(parameter)


def _dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in whatever order."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != step:
                return False
            step *= size
    return True


class Exchange:
    """Sums gradients over the ranks of a group. `arm` before the backward whose gradients are final, `finish` after it."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], megabytes: int, group: dist.ProcessGroup | None = None
    ) -> None:
        kinds = [(each.numel() * each.element_size(), (each.dtype, each.device)) for each in parameters]
        self._buckets = [_Bucket([parameters[place] for place in part], group) for part in layout(kinds, megabytes)]
        self._armed = False
        self._next = 0
        self._hooks = []
        for bucket in self._buckets:
            for index, parameter in enumerate(bucket.parameters):
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._hook(bucket, index)))

    def _hook(self, bucket: _Bucket, index: int) -> Callable[[Tensor], None]:
        def ready(_: Tensor) -> None:
            if not self._armed:
                bucket.take(index)
                return
            bucket.fill(index)
            if not bucket.missing:
                self._launch_ready()

        return ready

    def _launch_ready(self) -> None:
        """Launch full buckets in their fixed order: every rank must issue its collectives in the same one."""
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._buckets[self._next].launch()
            self._next += 1

    def arm(self) -> None:
        """The next backward completes the gradients: exchange each as soon as it is ready."""
        self._armed, self._next = True, 0

    def finish(self) -> None:
        """Wait until every gradient is the sum over ranks."""
        self._armed = False
        for bucket in self._buckets[self._next :]:
            for index, parameter in enumerate(bucket.parameters):
                if not bucket.filled[index] and parameter.grad is not None:
                    bucket.fill(index)  # used in an earlier micro-batch but not in the last
            bucket.launch()
        for bucket in self._buckets:
            bucket.finish()

    def close(self) -> None:
        """Detach from the parameters."""
        for hook in self._hooks:
            hook.remove()
