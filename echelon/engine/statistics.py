"""What the ranks add up once a step, in one small message that travels while backward runs: the loss, the number of items
it counts, whether anybody asks to stop, and the batch-norm statistics.

Running statistics after a step are exactly those of one device that runs all ranks' micro-batches one after another. A
running mean r after micro-batches 1..G is (1-m)^G r0 plus a sum over them, so each rank's part of that sum, decayed by the
micro-batches that come after it, adds up to the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.engine.buffers import Unknown
from echelon.engine.ranks import Group
from echelon.nn.batchnorm import SynchronisedBatchNorm


class StepStatistics:
    """One step's sums over the ranks: `begin` before its first forward, `send` after its last, `receive` after backward."""

    def __init__(
        self,
        model: nn.Module,
        ranks: Group,
        *,
        later: bool | None = None,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        """`later`: the host hears of news a step later (default: on an accelerator, which must not wait for it)."""
        self._ranks = ranks
        self._buffers: list[_Running | Unknown] = []
        self._unknown: Unknown | None = None
        self._sums = torch.empty(0)
        self._work: dist.Work | None = None
        self._numbers = 0
        if ranks.size == 1:
            return
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
        norms = [norm for norm in norms if norm.running_mean is None or not norm.running_mean.is_meta]  # other stages'
        # A synchronised batch norm has the same statistics on every rank already.
        local = [norm for norm in norms if not isinstance(norm, SynchronisedBatchNorm)]
        if local:
            self._buffers.append(_Running(local, ranks))
        later = ranks.device.type != "cpu" if later is None else later
        unknown = Unknown(model, ranks, later=later, warn=warn)
        if unknown.slots:
            self._unknown = unknown
            self._buffers.append(unknown)

    @torch.no_grad()
    def begin(self) -> None:
        """Before the step's first forward."""
        for buffers in self._buffers:
            buffers.begin()

    @torch.no_grad()
    def send(self, *shares: Tensor) -> None:
        """After the step's last forward: this rank's shares of numbers to add up, the loss among them."""
        head = torch.stack([share.detach().double() for share in shares])
        self._numbers = len(shares)
        self._sums = torch.cat([head, *(buffers.share() for buffers in self._buffers)])
        if self._ranks.size > 1:
            self._work = dist.all_reduce(self._sums, group=self._ranks.group, async_op=True)

    @torch.no_grad()
    def receive(self) -> tuple[Tensor, ...]:
        """Those numbers summed over the ranks; buffers now hold their common values."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            rest = self._sums[self._numbers :]
            for buffers in self._buffers:
                part, rest = rest[: buffers.size], rest[buffers.size :]
                buffers.set(part)
        return tuple(self._sums[: self._numbers])

    @property
    def news(self) -> Tensor | None:
        """On an accelerator: above 0 if a rank saw a buffer change that it had not seen change. Then all must `settle`."""
        return None if self._unknown is None else self._unknown.news

    @torch.no_grad()
    def settle(self) -> None:
        """Agree on which buffers change and bring them to their common values now. Every rank must call it."""
        if self._unknown is not None:
            self._unknown.settle()

    @property
    def changing(self) -> dict[str, tuple[int, ...]] | None:
        """The buffers without a known rule that steps change, and their shapes; None: nobody has looked."""
        return None if self._unknown is None else self._unknown.changing

    def expect(self, changing: Mapping[str, Sequence[int]] | None) -> None:
        """Go on from a checkpoint: these are known to change (None: look again)."""
        if self._unknown is not None:
            self._unknown.expect(changing)


class _Running:
    """The running means and variances of local batch norms, all in one flat tensor; no value visits the host."""

    def __init__(self, norms: list[_BatchNorm], ranks: Group) -> None:
        self._ranks, device = ranks, ranks.device
        self._tensors = [part for norm in norms for part in (norm.running_mean, norm.running_var) if part is not None]
        self._counters = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
        widths = torch.tensor([2 * norm.num_features for norm in norms], device=device)
        self._norm = torch.repeat_interleave(torch.arange(len(norms), device=device), widths)
        self._keep = torch.tensor([1.0 - (norm.momentum or 0.0) for norm in norms], dtype=torch.float64, device=device)
        #: momentum=None: a plain average over all batches so far.
        self._average = torch.tensor([norm.momentum is None for norm in norms], device=device)
        self.size = self._norm.numel()

    def begin(self) -> None:
        self._start, self._before = self._flat(), self._calls()

    def share(self) -> Tensor:
        self._mine = self._calls() - self._before
        later = self._mine * (self._ranks.size - 1 - self._ranks.rank)
        decayed = (self._flat() - self._start * self._each(self._keep**self._mine)) * self._each(self._keep**later)
        summed = self._flat() * self._each(self._before + self._mine) - self._start * self._each(self._before)
        return torch.where(self._each(self._average), summed, decayed)

    def set(self, sums: Tensor) -> None:
        total = self._mine * self._ranks.size
        decayed = self._start * self._each(self._keep**total) + sums
        averaged = (self._start * self._each(self._before) + sums) / self._each(self._before + total).clamp(min=1)
        value = torch.where(self._each(self._average), averaged, decayed)
        _write(self._tensors, value)
        _write(self._counters, self._before + total)

    def _flat(self) -> Tensor:
        return torch.cat(self._tensors).double()

    def _calls(self) -> Tensor:
        return torch.stack(self._counters).double()

    def _each(self, per_norm: Tensor) -> Tensor:
        return per_norm[self._norm]


def _write(tensors: list[Tensor], flat: Tensor) -> None:
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
