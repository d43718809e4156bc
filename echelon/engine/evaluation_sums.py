"""Sum the loss and the metrics of an evaluation over batches and ranks, and collect outputs for metrics over the whole set."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import Tensor

from echelon.engine import metrics
from echelon.engine.checkpoint.function_state import snapshot_metrics
from echelon.engine.checkpoint.run_attributes import RunAttributes
from echelon.engine.full_outputs import clone_tree, holds_full_tensors, output_versions, to_full_tensors, trees_equal
from echelon.engine.loss_averages import CountHistory
from echelon.engine.losses import COUNT_TOLERANCE, CountRatios
from echelon.engine.metrics import EvaluationPart
from echelon.engine.precision import autocast
from echelon.engine.run_state import RunState
from echelon.errors import JobError
from echelon.trials.snapshot import Snapshot
from echelon.world import usable_memory

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
        self, run: RunState, attributes: RunAttributes, kinds: dict[str, metrics.MetricKind], before: Snapshot, mutating: set[str]
    ) -> None:  # fmt: skip
        """`kinds`: those known so far, to which this pass adds. `before`: the metrics' state. `mutating`: metrics that edit their arguments."""
        self._run, self._attributes, self._loss, self._kinds = run, attributes, run.evaluation_loss, kinds
        self._metrics, self._metrics_before = run.job.metrics, before
        self._mutating_metrics, self._new_mutating_metrics = mutating, set[str]()
        self._names = ["loss", *self._metrics]
        self._sums = torch.zeros(len(self._names), 2, dtype=torch.float64, device=run.device)
        #: The first parts, by which metrics are classified; then those of metrics over the whole set.
        self._parts: list[EvaluationPart] = []
        self._batch_count = self._collected_bytes = 0
        self._has_dropped_batches = False
        self._previous_rows: EvaluationPart | None = None
        #: Metrics taken for means that later batches show to be none, and the loss if its averages have no common weight.
        self._misclassified: set[str] = set()
        #: The count ratios of the batches whose loss counts something; at most one where they agree.
        self._ratios: list[CountRatios | None] = []
        #: What batches divided their sums by in which the loss counted nothing.
        self._empty_divisor = 0.0
        self._count_histories = defaultdict[str, CountHistory](CountHistory)
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
                rows = torch.stack([loss, *metric_rows])
                means = torch.stack([rows[:, 0] * sample_count, torch.full_like(rows[:, 0], sample_count)], 1)
                self._sums += torch.where(rows[:, 1:].isnan(), means, rows)
                if part is not None:
                    self._check_means(part)
                    self._collect_part(part)
                else:
                    self._has_dropped_batches = True
        self._batch_count += 1
        if self._batch_count == _CLASSIFICATION_BATCHES:
            self._agree_on_kinds()

    def _weigh_loss(self, loss: Tensor, output: Any, batch: Any, sample_count: int) -> Tensor:
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
        count = float(pair[1])
        return not math.isnan(count) and self._count_histories[name].may_be_clamped(count, sample_count)

    def _check_pairs(self, metric_rows: Sequence[Tensor], output: Any, batch: Any, sample_count: int) -> None:
        rows = zip(self._metrics, metric_rows, strict=True)
        rows_of_batches = [(name, row) for name, row in rows if self._kinds.get(name) != "whole"]
        maybe_clamped = [name for name, row in rows_of_batches if self._may_be_clamped(name, row, sample_count)]
        part = EvaluationPart(to_full_tensors(output), batch, sample_count) if maybe_clamped else None
        if part is not None and self._run.is_reporting:
            with self._preserve_metric_state():
                clamped = {name: self._metrics[name] for name in maybe_clamped}
                self._misclassified |= {n for n, metric in clamped.items() if not metrics.pair_adds_up(metric, part)}

    def _all_classified_as(self, *kinds: str) -> bool:
        return all(self._kinds.get(name) in kinds for name in self._metrics)

    def _named(self, kind: metrics.MetricKind) -> list[str]:
        return [name for name in self._metrics if self._kinds.get(name) == kind]

    def _compute_metrics(self, output: Any, batch: Any) -> list[Tensor]:
        """Every metric of a batch. Each sees the same output and batch, whatever others write to them."""
        is_first_batch, metric_rows = not self._batch_count, []
        originals = (to_full_tensors(output), batch) if is_first_batch and self._metrics else (output, batch)
        versions_before = output_versions(originals)
        for name in self._metrics:
            arguments = clone_tree(originals) if is_first_batch or name in self._mutating_metrics else originals
            metric_rows.append(self._compute_metric(name, *arguments))
            is_edited = is_first_batch and not trees_equal(arguments, originals)
            if is_edited or (arguments is originals and output_versions(originals) != versions_before):
                self._new_mutating_metrics.add(name)
                versions_before = output_versions(originals)
        return metric_rows

    def _compute_metric(self, name: str, output: Any, batch: Any) -> Tensor:
        """A metric of a batch; zeros for one over the whole set, and for one of unknown kind that fails."""
        kind = self._kinds.get(name)
        if kind != "whole":
            try:
                with autocast(self._run.precision, self._run.device):
                    return metrics.to_pair(name, self._metrics[name](output, batch), self._run.device)
            except JobError:
                raise
            except Exception:
                if kind is not None:
                    raise
        return self._sums.new_zeros(2)

    def _check_means(self, part: EvaluationPart) -> None:
        """Check again whether metrics are means: samples may be sorted, so that the first ones did not show it."""
        means, part = self._named("mean"), part.slice(0, _CHECKED_ROWS)
        if means and self._has_dropped_batches and self._run.is_reporting:
            with self._preserve_metric_state():
                previous, own = self._previous_rows, self._metrics
                self._misclassified |= {name for name in means if not metrics.is_mean(own[name], previous, part)}
        with contextlib.suppress(metrics.UnjoinableError):  # a few rows may agree by chance
            part = metrics.join_parts([part, self._previous_rows]) if self._previous_rows is not None else part
        self._previous_rows = part.slice(0, _CHECKED_ROWS)

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
        self._collected_bytes += part.nbytes
        is_too_large = self._collected_bytes > limit and self._batch_count >= _CLASSIFICATION_BATCHES
        if self._has_dropped_batches or is_too_large:
            self._has_dropped_batches, self._parts = True, []
        elif self._run.is_reporting:
            self._parts.append(part.to(torch.device("cpu")))

    def _agree_on_kinds(self) -> None:
        """Agree over all ranks on the kind of every unknown metric; every rank comes here after the same batch."""
        run, unknown = self._run, [name for name in self._metrics if name not in self._kinds]
        if not unknown:
            return
        local_kinds: dict[str, metrics.MetricKind | None] = {}
        if run.is_reporting:
            with self._preserve_metric_state():
                local_kinds = {name: self._classify_metric(name) for name in unknown}
        votes = [vote for vote in run.ranks.all_gather_object(local_kinds) if vote]
        for name in unknown:
            voted_kinds = {vote[name] for vote in votes} - {None}
            self._kinds[name] = voted_kinds.pop() if len(voted_kinds) == 1 else "whole"
            if self._kinds[name] == "whole":  # what its calls so far summed and left behind is no part of it
                self._sums[self._names.index(name)] = 0
                self._metrics_before.restore()

    def _classify_metric(self, name: str) -> metrics.MetricKind | None:
        metric, parts = self._metrics[name], [part.to(self._run.device) for part in self._parts]
        if parts and self._attributes.changes_functions(lambda: metric(parts[0].output, parts[0].batch)):
            return "whole"  # every rank must have what the whole set leaves behind
        return metrics.classify_metric(metric, parts)

    def _check_means_across_ranks(self) -> None:
        """Check whether metrics are means over samples of several ranks too: one may have the long ones, another the short ones."""
        run, rows = self._run, self._previous_rows
        if not any(run.ranks.all_gather_object(self._has_dropped_batches and run.is_reporting)) or not run.is_reporting:
            return
        if rows is not None:
            rows = rows.slice(0, _RANK_CHECKED_ROWS).to(torch.device("cpu"))
        parts = [part.to(run.device) for part in run.data_parallel.gather_object(rows) or () if part is not None]
        with self._preserve_metric_state():
            for name in self._named("mean") if len(parts) > 1 else ():
                if not all(metrics.is_mean(self._metrics[name], *pair) for pair in pairwise(parts)):
                    self._misclassified.add(name)

    def finish(self, *, round_robin: bool) -> dict[str, float] | None:
        """The results; None: metrics turned out otherwise, and all must be evaluated again. `round_robin`: ranks took samples in turn."""
        run = self._run
        self._agree_on_kinds()
        self._check_means_across_ranks()
        local_state = (self._misclassified, self._new_mutating_metrics, self._ratios, self._empty_divisor)
        rank_states = run.ranks.all_gather_object(local_state)
        all_misclassified, all_mutating, all_ratios, empty_divisors = zip(*rank_states, strict=True)
        misclassified = set[str]().union(*all_misclassified)
        mutating = set[str]().union(*all_mutating) - self._mutating_metrics
        self._mutating_metrics |= mutating
        ratios = [rank_ratios[0] for rank_ratios in all_ratios if rank_ratios]
        if any(not _same_ratios(ratios[0], other) for other in ratios):
            misclassified.add("loss")
        self._loss.weighs_by_samples |= "loss" in misclassified
        self._kinds.update(dict.fromkeys(misclassified - {"loss"}, "whole"))
        if misclassified or mutating:
            return None
        uncomputed = self._compute_whole_set_metrics(round_robin=round_robin)
        sums = self._sums
        run.data_parallel.all_reduce(sums)
        run.model_parallel.all_reduce(sums if run.is_reporting else sums.zero_())
        if not sums[0, 1]:
            sums[0, 1] = max(empty_divisors)  # as one device divides, which counts nothing either
        values = [float(total / count) if count else math.nan for total, count in sums]
        return dict(zip(self._names, values, strict=True)) | dict.fromkeys(uncomputed, math.nan)

    def _compute_whole_set_metrics(self, *, round_robin: bool) -> list[str]:
        """Compute metrics over all samples on the first data rank, of a small set the means too. Returns the names of those that cannot be computed."""
        run = self._run
        rank_states = run.ranks.all_gather_object((run.is_reporting, self._collected_bytes, self._has_dropped_batches))
        largest = max(size for is_reporting, size, _ in rank_states if is_reporting)
        is_small = largest <= _SMALL_SET_BYTES and not any(dropped for reports, _, dropped in rank_states if reports)
        whole_set_metrics, mean_metrics = self._named("whole"), self._named("mean") if is_small else []
        if not whole_set_metrics and not mean_metrics:
            return []
        limit = self._max_collected_bytes
        reason = f"their outputs take more than {limit / 2**30:.1f} GiB" if largest > limit else ""
        rank_parts = run.data_parallel.gather_object(self._parts) if run.is_reporting and not reason else None
        self._parts = []
        problem, computed_means = "", list[str]()
        with run.ranks.raise_on_all_ranks():
            if rank_parts is not None:
                try:
                    turns = zip_longest(*rank_parts) if round_robin else rank_parts
                    parts = [part for turn in turns for part in turn if part is not None]
                    whole_set = metrics.join_parts(parts).to(run.device)
                except metrics.UnjoinableError as error:
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
            problem = f"not a mean over samples, and cannot be computed over the whole evaluation set, because {reason}"
            remedy = "return (sum, count) from the metric, or what it needs as several such metrics"
            run.warn(f"{', '.join(whole_set_metrics)}: {problem}; {remedy}")
        return whole_set_metrics if reason else []

    def _compute_joined(self, whole: Sequence[str], means: Sequence[str], whole_set: EvaluationPart) -> list[str]:
        """Compute metrics over the whole set; returns those of `means` that take it."""
        computed_means = []
        for name in means:
            # Where it takes batches only, its mean stands.
            with contextlib.suppress(Exception), self._preserve_metric_state():
                self._set_metric(name, whole_set)
                computed_means.append(name)
        for name in whole:
            try:
                with autocast(self._run.precision, self._run.device):
                    self._set_metric(name, whole_set)
            except Exception as error:
                error.add_note(f"in metric {name!r}, over the whole evaluation set")
                raise
        return computed_means

    def _set_metric(self, name: str, whole_set: EvaluationPart) -> None:
        value = self._metrics[name](*clone_tree((whole_set.output, whole_set.batch)))
        self._sums[self._names.index(name)] = metrics.to_pair(name, value, self._sums.device, mean_count=1.0)


def _same_ratios(left: CountRatios | None, right: CountRatios | None) -> bool:
    """Whether one weight joins losses whose averages have these counts: the same kind of count, in the same proportions."""
    if left is None or right is None or len(left) != len(right):
        return left is None and right is None
    return all(math.isclose(*pair, rel_tol=COUNT_TOLERANCE) for pair in zip(left, right, strict=True))
