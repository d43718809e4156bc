"""What the ranks add up once a step, in one small message that travels while backward runs: the loss, the number of items
it counts, whether anybody asks to stop, and the batch-norm statistics.

Running statistics after a step are exactly those of one device that runs all ranks' micro-batches one after another. A
running mean r after micro-batches 1..G is (1-m)^G r0 plus a sum over them, so each rank's part of that sum, decayed by the
micro-batches that come after it, adds up to the whole. How often each rank called each layer travels along: where a model calls one by chance,
ranks call it unequally often, and the parts are exchanged once more with the right decay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.engine.buffer_rules import CallState
from echelon.engine.buffer_sync import Unknown
from echelon.engine.process_groups import Group
from echelon.errors import DivergenceError
from echelon.nn.batchnorm import SynchronisedBatchNorm


class StepStatistics:
    """One step's sums over the ranks: `begin` before its first forward, `send` after its last, `receive` after backward."""

    def __init__(
        self,
        model: nn.Module,
        ranks: Group,
        *,
        split: bool = False,
        frozen: bool = False,
        later: bool | None = None,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        """`split`: whether a rank computes its part of a batch in micro-batches; `frozen`: whether parameters that are not trained are whole and
        may be looked at. `later`: the host hears of news a step later (default: on an accelerator, which must not wait for it)."""
        self._ranks = ranks
        self._buffers: list[_Running | Unknown | CallState] = []
        #: State that calls change by a known rule; None: nothing does.
        self.calls: CallState | None = None
        self._unknown: Unknown | None = None
        self._sums = torch.empty(0)
        self._work: dist.Work | None = None
        self._numbers = self._rest = 0
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
        norms = [norm for norm in norms if norm.running_mean is None or not norm.running_mean.is_meta]  # other stages'
        # A synchronised batch norm has the same statistics on every rank already.
        local = [norm for norm in norms if not isinstance(norm, SynchronisedBatchNorm)] if ranks.size > 1 else []
        later = ranks.device.type != "cpu" if later is None else later
        if local:
            self._buffers.append(_Running(local, ranks, later=later))
        unknown = Unknown(model, ranks, later=later, frozen=frozen, warn=warn)
        if unknown.slots and (ranks.size > 1 or split):
            self._unknown = unknown
            self._buffers.append(unknown)

    @property
    def surprised(self) -> frozenset[str]:
        """Buffers that a step was seen to change for the first time since somebody last looked for rules."""
        return frozenset() if self._unknown is None else frozenset(self._unknown.surprising)

    @property
    def averaged(self) -> frozenset[str]:
        """Those of them that this rank had other values of than the mean."""
        return frozenset() if self._unknown is None else frozenset(self._unknown.averaged)

    def weigh(self, part: float) -> None:
        """This rank's part of the step's samples, by which its buffers count in means."""
        if self._unknown is not None:
            self._unknown.weight = part

    def adopt(self, calls: CallState) -> None:
        """Have this state put together by its own rules."""
        self._buffers = [each for each in self._buffers if each is not self.calls] + [calls]
        self.calls = calls
        if self._unknown is not None:
            self._unknown.leave(calls.rules)

    def looked(self) -> None:
        """The rules of everything that changes have been looked for."""
        if self._unknown is not None:
            self._unknown.surprising.clear()
            self._unknown.averaged.clear()

    @torch.no_grad()
    def begin(self) -> None:
        """Before the step's first forward."""
        for buffers in self._buffers:
            buffers.begin()

    @torch.no_grad()
    def send(self, *shares: Tensor, rest: Tensor) -> None:
        """After the step's last forward: this rank's shares of numbers to add up, the loss among them; `rest`: a vector of more."""
        head = torch.stack([share.detach().double() for share in shares])
        self._numbers, self._rest = len(shares), len(rest)
        self._sums = torch.cat([head, rest, *(buffers.share() for buffers in self._buffers)])
        if self._ranks.size > 1:
            self._work = dist.all_reduce(self._sums, group=self._ranks.group, async_op=True)

    @torch.no_grad()
    def receive(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """Those numbers, and the vector, summed over the ranks; buffers now hold their common values."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._buffers:
            rest = self._sums[self._numbers + self._rest :]
            for buffers in self._buffers:
                part, rest = rest[: buffers.size], rest[buffers.size :]
                buffers.set(part)
        return tuple(self._sums[: self._numbers]), self._sums[self._numbers : self._numbers + self._rest]

    @property
    def news(self) -> Tensor | None:
        """On an accelerator: above 0 if a rank saw what it had not seen before. Then all must `settle`."""
        found = [each.news for each in self._buffers if each.news is not None]
        return torch.stack(found).sum() if found else None

    @torch.no_grad()
    def settle(self) -> None:
        """Agree on which buffers change and bring them to their common values now. Every rank must call it."""
        for buffers in self._buffers:
            buffers.settle()

    @property
    def changing(self) -> dict[str, tuple[int, ...]] | None:
        """The buffers without a known rule that steps change, and their shapes; None: nobody has looked."""
        return None if self._unknown is None or self._ranks.size == 1 else self._unknown.changing

    def expect(self, changing: Mapping[str, Sequence[int]] | None) -> None:
        """Go on from a checkpoint: these are known to change (None: look again)."""
        if self._unknown is not None:
            self._unknown.expect(changing)


class _Running:
    """The running means and variances of local batch norms, all in one flat tensor; no value visits the host."""

    def __init__(self, norms: list[_BatchNorm], ranks: Group, *, later: bool) -> None:
        """`later`: the host may not wait for what the ranks add up."""
        self._ranks, device = ranks, ranks.device
        self._later = later
        #: Where the host may not wait: above 0 if ranks called a layer unequally often.
        self.news: Tensor | None = None
        self._tensors = [part for norm in norms for part in (norm.running_mean, norm.running_var) if part is not None]
        self._counters = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
        widths = torch.tensor([2 * norm.num_features for norm in norms], device=device)
        self._norm = torch.repeat_interleave(torch.arange(len(norms), device=device), widths)
        self._keep = torch.tensor([1.0 - (norm.momentum or 0.0) for norm in norms], dtype=torch.float64, device=device)
        #: momentum=None: a plain average over all batches so far.
        self._average = torch.tensor([norm.momentum is None for norm in norms], device=device)
        self.size = self._norm.numel() + ranks.size * len(norms)

    def begin(self) -> None:
        self._start, self._before = self._flat(), self._calls()

    def share(self) -> Tensor:
        self._mine = self._calls() - self._before
        self._now = self._flat()
        slots = self._mine.new_zeros(self._ranks.size, len(self._mine))
        slots[self._ranks.rank] = self._mine
        later = self._mine * (self._ranks.size - 1 - self._ranks.rank)  # as if all ranks called as often
        return torch.cat([self._part(later), slots.view(-1)])

    def _part(self, later: Tensor) -> Tensor:
        """This rank's part, given how many calls of other ranks come after its own."""
        decayed = (self._now - self._start * self._each(self._keep**self._mine)) * self._each(self._keep**later)
        summed = self._now * self._each(self._before + self._mine) - self._start * self._each(self._before)
        return torch.where(self._each(self._average), summed, decayed)

    def set(self, sums: Tensor) -> None:
        parts, calls = sums[: len(self._norm)], sums[len(self._norm) :].view(self._ranks.size, -1)
        total = calls.sum(0)
        unequal = (calls != calls[0]).any()
        if self._later:
            self.news = unequal.double()
        elif unequal:
            parts = self._ranks.sum(self._part(calls[self._ranks.rank + 1 :].sum(0)))
        decayed = self._start * self._each(self._keep**total) + parts
        averaged = (self._start * self._each(self._before) + parts) / self._each(self._before + total).clamp(min=1)
        value = torch.where(self._each(self._average), averaged, decayed)
        _write(self._tensors, value)
        _write(self._counters, self._before + total)

    def settle(self) -> None:
        """On an accelerator, whose host hears of it too late: unequal calls end the run."""
        if self.news is not None and self.news > 0:
            raise DivergenceError(
                "a batch norm is called more often on some ranks than on others (by chance, or depending on the data), so that its running statistics "
                "are not those of one device; call it equally often, or use batchnorm=sync",
                cause="calls depend on the rank",
            )

    def _flat(self) -> Tensor:
        return torch.cat(self._tensors).double()

    def _calls(self) -> Tensor:
        return torch.stack(self._counters).double()

    def _each(self, per_norm: Tensor) -> Tensor:
        return per_norm[self._norm]


def _write(tensors: list[Tensor], flat: Tensor) -> None:
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
