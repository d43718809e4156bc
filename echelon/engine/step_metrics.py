"""Sum a step's numbers over the ranks in one small message that is sent while backward runs: the loss, what it counts, the stop flag, buffers
and batch-norm statistics.

A running mean r after micro-batches 1..G is (1-m)^G r0 plus a sum over them, so each rank's part of that sum, decayed by the micro-batches
that come after it, adds up to the whole. Where ranks call a layer unequally often, parts are exchanged once more with the right decay.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.engine.buffers.buffer_sync import BufferTracker
from echelon.engine.buffers.reduced_state import ReducedState
from echelon.engine.process_groups import Communicator
from echelon.errors import DivergenceError
from echelon.nn.batchnorm import SynchronisedBatchNorm


class StepMetrics:
    """One step's sums over the ranks: `begin_step` before its first forward, `send` after its last, `receive` after backward."""

    def __init__(
        self, model: nn.Module, ranks: Communicator, *, uses_micro_batches: bool = False, track_frozen: bool = False,
        deferred: bool | None = None, warn: Callable[[str], None] = lambda message: None,
    ) -> None:  # fmt: skip
        """`uses_micro_batches`: ranks split their part of a batch. `track_frozen`: also frozen parameters. `deferred`: the host reads changes a step later."""
        self._ranks = ranks
        self._synced_states: list[_RunningStatistics | BufferTracker | ReducedState] = []
        #: State that calls change by a known rule; None: nothing does.
        self.reduced_state: ReducedState | None = None
        self._sums = torch.empty(0)
        self._work: dist.Work | None = None
        self._sizes: list[int] = []
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and not isinstance(m, SynchronisedBatchNorm)]
        norms = [norm for norm in norms if norm.track_running_stats]
        norms = [norm for norm in norms if norm.running_mean is None or not norm.running_mean.is_meta]  # other stages'
        deferred = ranks.device.type != "cpu" if deferred is None else deferred
        if norms and ranks.size > 1:
            self._synced_states.append(_RunningStatistics(norms, ranks, deferred=deferred))
        self.buffer_tracker = BufferTracker(model, ranks, deferred=deferred, track_frozen=track_frozen, warn=warn)
        if self.buffer_tracker.slots and (ranks.size > 1 or uses_micro_batches):
            self._synced_states.append(self.buffer_tracker)

    def set_reduced_state(self, reduced_state: ReducedState) -> None:
        """Reduce this state by its own rules."""
        others = [state for state in self._synced_states if state is not self.reduced_state]
        self._synced_states = [*others, reduced_state]
        self.reduced_state = reduced_state
        self.buffer_tracker.stop_tracking(reduced_state.rules)

    @torch.no_grad()
    def begin_step(self, sample_fraction: float) -> None:
        """Before the step's first forward. `sample_fraction`: this rank's part of the step's samples, by which its buffers count in means."""
        self.buffer_tracker.sample_fraction = sample_fraction
        for state in self._synced_states:
            state.begin_step()

    @torch.no_grad()
    def send(self, *scalars: Tensor, extra: Tensor) -> None:
        """After the step's last forward: send this rank's shares of numbers to sum, the loss among them, and `extra`, a vector of more."""
        packed_scalars = torch.stack([scalar.detach().double() for scalar in scalars])
        parts = [packed_scalars, extra, *(state.pack() for state in self._synced_states)]
        self._sums, self._sizes = torch.cat(parts), [len(part) for part in parts]
        if self._ranks.size > 1:
            self._work = dist.all_reduce(self._sums, group=self._ranks.process_group, async_op=True)

    @torch.no_grad()
    def receive(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """Those numbers, and the vector, summed over the ranks; buffers then hold their common values."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        scalars, extra, *state_sums = self._sums.split(self._sizes)
        for state, sums in zip(self._synced_states, state_sums, strict=True):
            state.unpack(sums)
        return tuple(scalars), extra

    @property
    def resync_flag(self) -> Tensor | None:
        """On an accelerator: above 0 if a rank saw a first change. Then all must `resync`."""
        flags = [state.resync_flag for state in self._synced_states if state.resync_flag is not None]
        return torch.stack(flags).sum() if flags else None

    @torch.no_grad()
    def resync(self) -> None:
        """Agree on which buffers change, and reduce them. Every rank must call it."""
        for state in self._synced_states:
            state.resync()


class _RunningStatistics:
    """The running means and variances of local batch norms in one flat tensor; the host reads none of it."""

    def __init__(self, norms: list[_BatchNorm], ranks: Communicator, *, deferred: bool) -> None:
        """`deferred`: the host must not wait for sums over ranks."""
        self._ranks, device = ranks, ranks.device
        self._deferred = deferred
        #: Where the host may not wait: above 0 if ranks called a layer unequally often.
        self.resync_flag: Tensor | None = None
        statistics = (statistic for norm in norms for statistic in (norm.running_mean, norm.running_var))
        self._statistics = [statistic for statistic in statistics if statistic is not None]
        self._counters = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
        widths = torch.tensor([2 * norm.num_features for norm in norms], device=device)
        self._norm_index = torch.repeat_interleave(torch.arange(len(norms), device=device), widths)
        self._decay = torch.tensor([1.0 - (norm.momentum or 0.0) for norm in norms], dtype=torch.float64, device=device)
        #: momentum=None: a plain average over all batches so far.
        self._is_plain_average = torch.tensor([norm.momentum is None for norm in norms], device=device)
        self.size = self._norm_index.numel() + ranks.size * len(norms)

    def begin_step(self) -> None:
        self._initial_values, self._initial_calls = self._flat_values(), self._call_counts()

    def pack(self) -> Tensor:
        self._local_calls = self._call_counts() - self._initial_calls
        self._current_values = self._flat_values()
        calls_by_rank = self._local_calls.new_zeros(self._ranks.size, len(self._local_calls))
        calls_by_rank[self._ranks.rank] = self._local_calls
        later_calls = self._local_calls * (self._ranks.size - 1 - self._ranks.rank)  # as if all ranks called as often
        return torch.cat([self._local_part(later_calls), calls_by_rank.view(-1)])

    def _local_part(self, later_calls: Tensor) -> Tensor:
        """This rank's part, given how many calls of other ranks come after its own."""
        initial, current, per_element = self._initial_values, self._current_values, self._per_element
        decayed = current - initial * per_element(self._decay**self._local_calls)
        decayed *= per_element(self._decay**later_calls)
        initial_sum = initial * per_element(self._initial_calls)
        summed = current * per_element(self._initial_calls + self._local_calls) - initial_sum
        return torch.where(per_element(self._is_plain_average), summed, decayed)

    def unpack(self, sums: Tensor) -> None:
        initial, per_element = self._initial_values, self._per_element
        parts, calls_by_rank = sums[: len(self._norm_index)], sums[len(self._norm_index) :].view(self._ranks.size, -1)
        total_calls = calls_by_rank.sum(0)
        is_unequal = (calls_by_rank != calls_by_rank[0]).any()
        if self._deferred:
            self.resync_flag = is_unequal.double()
        elif is_unequal:
            parts = self._ranks.all_reduce(self._local_part(calls_by_rank[self._ranks.rank + 1 :].sum(0)))
        decayed = initial * per_element(self._decay**total_calls) + parts
        calls = self._initial_calls + total_calls
        averaged = (initial * per_element(self._initial_calls) + parts) / per_element(calls).clamp(min=1)
        _write_flat(self._statistics, torch.where(per_element(self._is_plain_average), averaged, decayed))
        _write_flat(self._counters, calls)

    def resync(self) -> None:
        """On an accelerator, whose host hears of it too late: unequal calls end the run."""
        if self.resync_flag is not None and self.resync_flag > 0:
            problem = "a batch norm is called more often on some ranks: its statistics are not those of one device"
            remedy = "call it equally often, or use batchnorm=sync"
            raise DivergenceError(f"{problem}; {remedy}", cause="calls depend on the rank")

    def _flat_values(self) -> Tensor:
        return torch.cat(self._statistics).double()

    def _call_counts(self) -> Tensor:
        return torch.stack(self._counters).double()

    def _per_element(self, per_norm: Tensor) -> Tensor:
        return per_norm[self._norm_index]


def _write_flat(tensors: list[Tensor], flat: Tensor) -> None:
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
