"""Sum the loss and the metrics of an evaluation over batches and ranks, and collect outputs for metrics over the whole set."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import Tensor

from echelon.engine.checkpoint.function_state import snapshot_metrics
from echelon.engine.checkpoint.run_attributes import RunAttributes
from echelon.engine.evaluation_parts import (
    EvaluationPart,
    UnjoinableError,
    join_parts,
    move_part,
    part_bytes,
    slice_part,
)
from echelon.engine.full_outputs import clone_tree, holds_full_tensors, output_versions, to_full_tensors, trees_equal
from echelon.engine.loss_averages import CountHistory
from echelon.engine.losses import CountRatios
from echelon.engine.metrics import MetricKind, classify_metric, is_mean, pair_adds_up, to_pair
from echelon.engine.precision import autocast
from echelon.engine.run_state import RunState
from echelon.errors import JobError
from echelon.trials.snapshot import Snapshot
from echelon.world import usable_memory

#: Relative rounding of counts that are sums of float32.
_COUNT_TOLERANCE = 1e-5
#: Micro-batches of the first evaluation by which metrics are classified.
_CLASSIFICATION_BATCHES = 4
#: Rows of a batch by which later batches are checked, and those by which ranks are compared.
_CHECKED_ROWS, _RANK_CHECKED_ROWS = 256, 8
#: Bytes of outputs and batches on a rank up to which every metric is computed over the whole set.
_SMALL_SET_BYTES = 16 << 20
#: Bytes that are collected for metrics over the whole set, at most: this much, and this part of the memory.
_MAX_COLLECTED_BYTES, _MEMORY_DIVISOR = 4 << 30, 8


class EvaluationSums:
    """Loss and metrics of one pass over the set, on this rank. Every rank adds as many micro-batches."""

    def __init__(
        self,
        run: RunState,
        attributes: RunAttributes,
        kinds: dict[str, MetricKind],
        metrics_before: Snapshot,
        mutating_metrics: set[str],
    ) -> None:
        """`kinds`: those known so far, to which this pass adds. `metrics_before`: what metrics kept before the evaluation. `mutating_metrics`: those
        that edit their arguments; ranks add to it at the end."""
        self._run, self._attributes, self._loss, self._kinds = run, attributes, run.evaluation_loss, kinds
        self._metrics, self._metrics_before = run.job.metrics, metrics_before
        self._mutating_metrics, self._new_mutating_metrics = mutating_metrics, set[str]()
        self._names = ["loss", *self._metrics]
        self._sums = torch.zeros(len(self._names), 2, dtype=torch.float64, device=run.device)
        #: The first parts, by which metrics are classified; then those of metrics over the whole set.
        self._parts: list[EvaluationPart] = []
        self._batch_count = self._collected_bytes = 0
        #: Whether a batch was left out of the parts.
        self._has_dropped_batches = False
        self._previous_rows: EvaluationPart | None = None
        #: Metrics taken for means that later batches show to be none, and the loss if its averages have no common weight.
        self._misclassified: set[str] = set()
        #: The count ratios of the batches whose loss counts something; at most one where they agree.
        self._ratios: list[CountRatios | None] = []
        #: What batches divided their sums by in which the loss counted nothing.
        self._empty_divisor = 0.0
        #: The counts of what is given as (sum, count), by name.
        self._count_histories: dict[str, CountHistory] = {}
        self._max_collected_bytes = min(_MAX_COLLECTED_BYTES, usable_memory() // _MEMORY_DIVISOR)

    def add(self, batch: Any, loss_and_output: tuple[Tensor, Any] | None, sample_count: int) -> None:
        """Count a micro-batch. `loss_and_output`: None on stages without a loss. `sample_count`: 0 for a filler that keeps the ranks in step."""
        if loss_and_output is not None:
            loss, output = loss_and_output
            if sample_count:
                loss = self._weigh_loss(loss, output, batch, sample_count)
            # A part is gathered by all ranks that hold one, whatever counts.
            is_due = holds_full_tensors(output) or not self._has_dropped_batches or self._batch_count.bit_count() == 1
            needs_part = self._metrics and not self._all_classified_as("pair")
            needs_part = needs_part and (is_due or not self._all_classified_as("pair", "mean"))
            part = EvaluationPart(to_full_tensors(output), batch, sample_count) if needs_part else None
            if sample_count:
                metric_rows = self._compute_metrics(output, batch)
                self._check_pairs(metric_rows, output, batch, sample_count)
                self._sums += _to_pairs(torch.stack([loss, *metric_rows]), sample_count)
                if part is not None:
                    self._check_means(part)
                    self._collect_part(part)
                else:
                    self._has_dropped_batches = True
        self._batch_count += 1
        if self._batch_count == _CLASSIFICATION_BATCHES:
            self._agree_on_kinds()

    # Batches

    def _weigh_loss(self, loss: Tensor, output: Any, batch: Any, sample_count: int) -> Tensor:
        """The loss with what it really counts."""
        empty_divisor, ratios = self._loss.empty_divisor, self._loss.count_ratios
        if ratios is None and self._may_be_clamped("loss", loss, sample_count):
            inputs = to_full_tensors(output), batch
            recounted, empty_divisor = self._loss.recount(self._run.model, loss, inputs, sample_count)
            if recounted is not None and recounted[1] != loss[1]:
                history = self._count_histories["loss"]
                history.highest_clamped = max(history.highest_clamped, float(loss[1]))
            loss = loss if recounted is None else recounted
        self._empty_divisor = empty_divisor or self._empty_divisor
        if float(loss[1]):  # else nothing counts
            if self._ratios and not _same_ratios(self._ratios[0], ratios):
                self._misclassified.add("loss")
            self._ratios = [ratios]
        return loss

    def _may_be_clamped(self, name: str, pair: Tensor, sample_count: int) -> bool:
        """Whether a count may be more than what was counted."""
        history = self._count_histories.setdefault(name, CountHistory())
        return not math.isnan(count := float(pair[1])) and history.may_be_clamped(count, sample_count)

    def _check_pairs(self, metric_rows: Sequence[Tensor], output: Any, batch: Any, sample_count: int) -> None:
        """Check whether metrics given as (sum, count) add up where the count is low."""
        maybe_clamped = [
            name
            for name, row in zip(self._metrics, metric_rows, strict=True)
            if self._kinds.get(name) != "whole" and self._may_be_clamped(name, row, sample_count)
        ]
        part = EvaluationPart(to_full_tensors(output), batch, sample_count) if maybe_clamped else None
        if part is not None and self._run.is_reporting:
            with self._preserve_metric_state():
                self._misclassified |= {name for name in maybe_clamped if not pair_adds_up(self._metrics[name], part)}

    def _all_classified_as(self, *kinds: str) -> bool:
        return all(self._kinds.get(name) in kinds for name in self._metrics)

    def _named(self, kind: MetricKind) -> list[str]:
        return [name for name in self._metrics if self._kinds.get(name) == kind]

    def _compute_metrics(self, output: Any, batch: Any) -> list[Tensor]:
        """Every metric of a batch. Each sees the same output and batch, whatever others write to them."""
        is_first_batch, metric_rows = not self._batch_count, []
        originals = (to_full_tensors(output), batch) if is_first_batch and self._metrics else (output, batch)
        versions_before = output_versions(originals)
        for name in self._metrics:
            arguments = clone_tree(originals) if is_first_batch or name in self._mutating_metrics else originals
            metric_rows.append(self._compute_metric(name, *arguments))
            if (is_first_batch and not trees_equal(arguments, originals)) or (
                arguments is originals and output_versions(originals) != versions_before
            ):
                self._new_mutating_metrics.add(name)
                versions_before = output_versions(originals)
        return metric_rows

    def _compute_metric(self, name: str, output: Any, batch: Any) -> Tensor:
        """A metric of a batch; zeros for one over the whole set, and for one of unknown kind that fails."""
        kind = self._kinds.get(name)
        if kind != "whole":
            try:
                with autocast(self._run.precision, self._run.device):
                    return to_pair(name, self._metrics[name](output, batch), self._run.device)
            except JobError:
                raise
            except Exception:
                if kind is not None:
                    raise
        return self._sums.new_zeros(2)

    def _check_means(self, part: EvaluationPart) -> None:
        """Check again whether metrics are means: samples may be sorted, so that the first ones did not show it."""
        part = slice_part(part, 0, _CHECKED_ROWS) if part.sample_count > _CHECKED_ROWS else part
        means = self._named("mean")
        if means and self._has_dropped_batches and self._run.is_reporting:
            with self._preserve_metric_state():
                previous = self._previous_rows
                self._misclassified |= {name for name in means if not is_mean(self._metrics[name], previous, part)}
        with contextlib.suppress(UnjoinableError):  # a few rows may agree by chance
            part = join_parts([part, self._previous_rows]) if self._previous_rows is not None else part
        self._previous_rows = slice_part(part, 0, min(_CHECKED_ROWS, part.sample_count))

    @contextmanager
    def _preserve_metric_state(self) -> Iterator[None]:
        """Metrics may be called inside; what they keep is restored."""
        snapshot = snapshot_metrics(self._run.job, self._run.model)
        try:
            with autocast(self._run.precision, self._run.device):
                yield
        finally:
            snapshot.restore()

    def _collect_part(self, part: EvaluationPart) -> None:
        limit = _SMALL_SET_BYTES if self._all_classified_as("pair", "mean") else self._max_collected_bytes
        self._collected_bytes += part_bytes(part)
        is_too_large = self._collected_bytes > limit and self._batch_count >= _CLASSIFICATION_BATCHES
        if self._has_dropped_batches or is_too_large:
            self._has_dropped_batches, self._parts = True, []
        elif self._run.is_reporting:
            self._parts.append(move_part(part, torch.device("cpu")))

    # Kinds

    def _agree_on_kinds(self) -> None:
        """Agree over all ranks on the kind of every unknown metric; every rank comes here after the same batch."""
        run, unknown = self._run, [name for name in self._metrics if name not in self._kinds]
        if not unknown:
            return
        local_kinds: dict[str, MetricKind | None] = {}
        if run.is_reporting:
            with self._preserve_metric_state():
                local_kinds = {name: self._classify_metric(name) for name in unknown}
        votes = [vote for vote in run.ranks.all_gather_object(local_kinds) if vote]
        for name in unknown:
            voted_kinds = {vote[name] for vote in votes} - {None}
            self._kinds[name] = voted_kinds.pop() if len(voted_kinds) == 1 else "whole"
        whole_set_metrics = [name for name in unknown if self._kinds[name] == "whole"]
        for name in whole_set_metrics:  # what was summed of it so far is no part of it
            self._sums[self._names.index(name)] = 0
        if whole_set_metrics:
            self._metrics_before.restore()  # nor is what its calls so far left behind

    def _classify_metric(self, name: str) -> MetricKind | None:
        metric, parts = self._metrics[name], [move_part(part, self._run.device) for part in self._parts]
        if parts and self._attributes.changes_functions(lambda: metric(parts[0].output, parts[0].batch)):
            return "whole"  # every rank must have what the whole set leaves behind
        return classify_metric(metric, parts)

    def _check_means_across_ranks(self) -> None:
        """Check whether metrics are means over samples of several ranks too: one may have the long ones, another the short ones."""
        run, rows = self._run, self._previous_rows
        if not any(run.ranks.all_gather_object(self._has_dropped_batches and run.is_reporting)) or not run.is_reporting:
            return
        if rows is not None:
            rows = slice_part(rows, 0, min(_RANK_CHECKED_ROWS, rows.sample_count))
            rows = move_part(rows, torch.device("cpu"))
        rank_rows = run.data_parallel.gather_object(rows) or ()
        parts = [move_part(part, run.device) for part in rank_rows if part is not None]
        with self._preserve_metric_state():
            for name in self._named("mean") if len(parts) > 1 else ():
                if not all(is_mean(self._metrics[name], *pair) for pair in pairwise(parts)):
                    self._misclassified.add(name)

    # Results

    def finish(self, *, round_robin: bool) -> dict[str, float] | None:
        """The results; None: a metric is no mean or edits its arguments, or the loss has no common weight, and all must be evaluated again.
        `round_robin`: ranks took samples in turn, not one share after the other."""
        run = self._run
        self._agree_on_kinds()
        self._check_means_across_ranks()
        rank_states = run.ranks.all_gather_object(
            (self._misclassified, self._new_mutating_metrics, self._ratios, self._empty_divisor)
        )
        all_misclassified, all_mutating, all_ratios, empty_divisors = zip(*rank_states, strict=True)
        misclassified = set[str]().union(*all_misclassified)
        mutating_metrics = set[str]().union(*all_mutating) - self._mutating_metrics
        self._mutating_metrics |= mutating_metrics
        ratios = [rank_ratios[0] for rank_ratios in all_ratios if rank_ratios]
        if any(not _same_ratios(ratios[0], other) for other in ratios):
            misclassified.add("loss")
        self._loss.weighs_by_samples |= "loss" in misclassified
        self._kinds.update(dict.fromkeys(misclassified - {"loss"}, "whole"))
        if misclassified or mutating_metrics:
            return None
        uncomputed = self._compute_whole_set_metrics(round_robin=round_robin)
        sums = self._sums
        run.data_parallel.all_reduce(sums)
        run.model_parallel.all_reduce(sums if run.is_reporting else sums.zero_())
        if not sums[0, 1]:
            sums[0, 1] = max(empty_divisors)  # as one device divides, which counts nothing either
        values = [float(total / count) if count else math.nan for total, count in sums]
        results = dict(zip(self._names, values, strict=True))
        return results | dict.fromkeys(uncomputed, math.nan)

    def _compute_whole_set_metrics(self, *, round_robin: bool) -> list[str]:
        """Compute metrics over all samples, on the first data rank: those that are no means, and of a small set the means too. Returns the names of
        those that cannot be computed."""
        run = self._run
        rank_states = run.ranks.all_gather_object((run.is_reporting, self._collected_bytes, self._has_dropped_batches))
        largest = max(size for is_reporting, size, _ in rank_states if is_reporting)
        is_small = largest <= _SMALL_SET_BYTES and not any(dropped for reports, _, dropped in rank_states if reports)
        whole_set_metrics, mean_metrics = self._named("whole"), self._named("mean") if is_small else []
        if not whole_set_metrics and not mean_metrics:
            return []
        reason = ""
        if largest > self._max_collected_bytes:
            reason = f"their outputs take more than {self._max_collected_bytes / 2**30:.1f} GiB"
        rank_parts = run.data_parallel.gather_object(self._parts) if run.is_reporting and not reason else None
        self._parts = []
        problem, computed_means = "", list[str]()
        with run.ranks.raise_on_all_ranks():
            if rank_parts is not None:
                try:
                    whole_set = move_part(join_parts(_order_parts(rank_parts, round_robin)), run.device)
                except UnjoinableError as error:
                    problem = str(error)
                else:
                    computed_means = self._compute_joined(whole_set_metrics, mean_metrics, whole_set)
        rank_results = run.ranks.all_gather_object((rank_parts is not None, problem, computed_means))
        computed = [means for was_computed, _, means in rank_results if was_computed]
        for name in set(mean_metrics).intersection(*computed) if rank_parts is None else ():
            self._sums[self._names.index(name)] = 0  # its batches are counted there
        if whole_set_metrics and computed:
            self._attributes.share_metrics(has_metrics=rank_parts is not None)
        reason = reason or next((rank_problem for _, rank_problem, _ in rank_results if rank_problem), "")
        if reason and whole_set_metrics and run.world.is_main:
            run.warn(
                f"{', '.join(whole_set_metrics)}: not a mean over samples, and cannot be computed over the whole evaluation set, because {reason}; return (sum, "
                "count) from the metric, or what it needs as several such metrics"
            )
        return whole_set_metrics if reason else []

    def _compute_joined(
        self, whole_set_metrics: Sequence[str], mean_metrics: Sequence[str], whole_set: EvaluationPart
    ) -> list[str]:
        """Returns the `mean_metrics` that take the whole set."""
        computed_means = []
        for name in mean_metrics:
            with (
                contextlib.suppress(Exception),
                self._preserve_metric_state(),
            ):  # it takes batches: then its mean stands
                self._set_metric(name, whole_set)
                computed_means.append(name)
        for name in whole_set_metrics:
            try:
                with autocast(self._run.precision, self._run.device):
                    self._set_metric(name, whole_set)
            except Exception as error:
                error.add_note(f"in metric {name!r}, over the whole evaluation set")
                raise
        return computed_means

    def _set_metric(self, name: str, whole_set: EvaluationPart) -> None:
        value = self._metrics[name](*clone_tree((whole_set.output, whole_set.batch)))
        self._sums[self._names.index(name)] = to_pair(name, value, self._sums.device, mean_count=1.0)


def _order_parts(rank_parts: Sequence[Sequence[EvaluationPart]], round_robin: bool) -> list[EvaluationPart]:
    """The parts of all ranks in the order of the samples."""
    turns = zip_longest(*rank_parts) if round_robin else rank_parts
    return [part for turn in turns for part in turn if part is not None]


def _to_pairs(values: Tensor, sample_count: int) -> Tensor:
    """(sum, count) for each value, also of means (whose count is NaN)."""
    is_mean = values[:, 1].isnan()
    sums = torch.stack([values[:, 0] * sample_count, is_mean.double() * sample_count], 1)
    return torch.where(is_mean[:, None], sums, values)


def _same_ratios(left: CountRatios | None, right: CountRatios | None) -> bool:
    """Whether one weight joins losses whose averages have these counts: the same kind of count, in the same proportions."""
    if left is None or right is None or len(left) != len(right):
        return left is None and right is None
    return all(math.isclose(*pair, rel_tol=_COUNT_TOLERANCE) for pair in zip(left, right, strict=True))
