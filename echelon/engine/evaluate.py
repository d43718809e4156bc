"""The one true value of the loss and the metrics over a data set: each sample counts once, on any number of ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from echelon.data.loader import MicroBatch, evaluation_batches
from echelon.data.open_data import is_stream, open_source
from echelon.data.stream import Stream, evaluation_stream
from echelon.engine.checkpoint.function_state import snapshot_functions, snapshot_metrics
from echelon.engine.checkpoint.run_attributes import RunAttributes
from echelon.engine.loss_averages import CountHistory
from echelon.engine.losses import CountRatios
from echelon.engine.metrics import (
    EvaluationPart,
    MetricKind,
    UnjoinableError,
    classify_metric,
    clone_tree,
    holds_full_tensors,
    is_mean,
    join_parts,
    move_part,
    pair_adds_up,
    part_bytes,
    slice_part,
    tensor_versions,
    to_full_tensors,
    to_metric_pair,
    to_pair,
    trees_equal,
)
from echelon.engine.precision import autocast
from echelon.engine.run_state import RunState
from echelon.errors import JobError
from echelon.plan.batch_split import local_batch_sizes
from echelon.trials.snapshot import Snapshot
from echelon.world import usable_memory

#: Relative rounding of counts that are sums of float32.
_COUNT_TOLERANCE = 1e-5
#: Micro-batches of the first evaluation by which metrics are told apart: means, and others.
_CLASSIFICATION_BATCHES = 4
#: Rows of a batch by which later batches are checked, and those by which ranks are compared.
_CHECKED_ROWS, _RANK_CHECKED_ROWS = 256, 8
#: Bytes of outputs and batches on a rank up to which every metric is computed over the whole set.
_SMALL_SET_BYTES = 16 << 20
#: Bytes of outputs and batches that are collected for metrics over the whole set, at most: this much, and this part of the memory.
_MAX_COLLECTED_BYTES, _MEMORY_DIVISOR = 4 << 30, 8


class Evaluator:
    """Evaluates one run, and remembers what its evaluations found out about the loss and the metrics."""

    def __init__(self, run: RunState, attributes: RunAttributes) -> None:
        self.run, self.attributes = run, attributes
        #: How each metric is reduced (metrics.py); known after the first evaluation.
        self.metric_kinds: dict[str, MetricKind] = {}
        self._pipeline_batches = 0

    @torch.no_grad()
    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Loss and the job's metrics over `data` (default: the job's evaluation set). Every rank must call it."""
        run, job, loss = self.run, self.run.job, self.run.evaluation_loss
        data = job.eval_data if data is None else data
        if data is None:
            raise JobError("nothing to evaluate on: give the job eval_data=, or pass a data set")
        run.model.eval()
        loss.is_stateful = not run.step_number or bool(self.attributes.functions.changed_objects())
        restore_loss_state = snapshot_functions(job, run.model) if loss.is_stateful else None
        metrics_before = snapshot_metrics(job, run.model)
        mutating_metrics: set[str] = set()
        try:
            while True:
                sums = _EvaluationSums(self, metrics_before, mutating_metrics)
                for micro_batch in _micro_batches(run, data):
                    batch = run.move_batch(micro_batch.batch)
                    sums.add(batch, self._evaluate_batch(batch), micro_batch.samples)
                results = sums.finish(round_robin=is_stream(data))
                if results is not None:
                    return results
                # A metric is no mean or edits its arguments, or the loss has no common weight.
                metrics_before.restore()
                if restore_loss_state is not None:
                    restore_loss_state()
        finally:
            run.model.train()
            run.rank_model.reshard()

    def _evaluate_batch(self, batch: Any) -> tuple[Tensor, Any] | None:
        """The loss of a batch and the model's output; None on stages without a loss."""
        run, pipeline = self.run, self.run.rank_model.pipeline
        if pipeline is None:
            (loss,) = run.evaluation_loss(run.model, batch)
        else:
            self._pipeline_batches += 1
            seed = partial(run.seed_random, run.step_number, run.data_parallel.rank, -self._pipeline_batches)
            losses = pipeline.forward(batch, run.evaluation_loss, seed)
            if not losses:
                return None
            (loss,) = losses
        output, run.evaluation_loss.output = run.evaluation_loss.output, None
        return loss, output


class _EvaluationSums:
    """Loss and metrics of an evaluation so far, on this rank."""

    def __init__(self, evaluator: Evaluator, metrics_before: Snapshot, mutating_metrics: set[str]) -> None:
        """`metrics_before`: what metrics kept before this evaluation. `mutating_metrics`: those that edit their arguments; ranks add to it at the end."""
        run = evaluator.run
        self._run, self._evaluator, self._loss = run, evaluator, run.evaluation_loss
        self._metrics, self._metrics_before = run.job.metrics, metrics_before
        self._mutating_metrics, self._new_mutating_metrics = mutating_metrics, set[str]()
        self._names = ["loss", *self._metrics]
        self._sums = torch.zeros(len(self._names), 2, dtype=torch.float64, device=run.device)
        #: The first parts, by which the kinds of metrics are found; then those of metrics over the whole set.
        self._parts: list[EvaluationPart] = []
        self._batch_count = self._collected_bytes = 0
        #: Whether a batch was left out of the parts.
        self._has_dropped_batches = False
        self._previous_rows: EvaluationPart | None = None
        #: Metrics taken for means that later batches show to be none, and the loss if its averages have no common weight.
        self._misclassified: set[str] = set()
        #: By how many averages each batch's loss is weighed, and their counts; None: by samples. Unset before the first batch that counts.
        self._ratios: CountRatios | None = None
        self._has_ratios = False
        #: What batches divided their sums by in which the loss counted nothing.
        self._empty_divisor = 0.0
        #: The counts of what is given as (sum, count), by name.
        self._clamped_counts: dict[str, CountHistory] = {}
        self._max_collected_bytes = min(_MAX_COLLECTED_BYTES, usable_memory() // _MEMORY_DIVISOR)

    def add(self, batch: Any, loss_and_output: tuple[Tensor, Any] | None, sample_count: int) -> None:
        """Count a micro-batch. `loss_and_output`: its loss and the model's output; None on stages without a loss."""
        if loss_and_output is not None:
            loss, output = loss_and_output
            empty_divisor = self._loss.empty_divisor
            if sample_count and self._loss.count_ratios is None and self._may_be_clamped("loss", loss, sample_count):
                loss, empty_divisor = self._recount_loss(loss, output, batch, sample_count)
            self._empty_divisor = empty_divisor or self._empty_divisor
            if sample_count and float(loss[1]):  # else nothing counts
                if self._has_ratios and not _same_ratios(self._ratios, self._loss.count_ratios):
                    self._misclassified.add("loss")
                self._ratios, self._has_ratios = self._loss.count_ratios, True
            # A part is gathered by all ranks that hold one, whatever counts.
            is_due = holds_full_tensors(output) or not self._has_dropped_batches or self._batch_count.bit_count() == 1
            needs_part = (
                self._metrics
                and not self._all_classified_as("pair")
                and (is_due or not self._all_classified_as("pair", "mean"))
            )
            part = EvaluationPart(to_full_tensors(output), batch, sample_count) if needs_part else None
            if sample_count:  # else a filler that only keeps the ranks in step
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

    def _may_be_clamped(self, name: str, pair: Tensor, sample_count: int) -> bool:
        """Whether a count may be more than what was counted."""
        count = float(pair[1])
        return not math.isnan(count) and self._clamped_counts.setdefault(name, CountHistory()).may_be_clamped(
            count, sample_count
        )

    def _recount_loss(self, loss: Tensor, output: Any, batch: Any, sample_count: int) -> tuple[Tensor, float]:
        recounted, empty_divisor = self._loss.recount(
            self._run.model, loss, (to_full_tensors(output), batch), sample_count
        )
        if recounted is not None and recounted[1] != loss[1]:
            self._clamped_counts["loss"].highest_clamped = max(
                self._clamped_counts["loss"].highest_clamped, float(loss[1])
            )
        return loss if recounted is None else recounted, empty_divisor

    def _check_pairs(self, metric_rows: Sequence[Tensor], output: Any, batch: Any, sample_count: int) -> None:
        """Look whether metrics given as (sum, count) add up where the count is low."""
        run = self._run
        rows_of_pairs = [
            (name, row)
            for name, row in zip(self._metrics, metric_rows, strict=True)
            if self._evaluator.metric_kinds.get(name) != "whole"
        ]
        maybe_clamped = [name for name, row in rows_of_pairs if self._may_be_clamped(name, row, sample_count)]
        part = EvaluationPart(to_full_tensors(output), batch, sample_count) if maybe_clamped else None
        if part is None or not run.is_reporting:
            return
        with self._preserve_metric_state():
            self._misclassified |= {name for name in maybe_clamped if not pair_adds_up(self._metrics[name], part)}

    def _all_classified_as(self, *kinds: str) -> bool:
        """Whether every metric is known, as one of these."""
        return all(self._evaluator.metric_kinds.get(name) in kinds for name in self._metrics)

    def _compute_metric(self, name: str, kind: str | None, output: Any, batch: Any) -> Tensor:
        """A metric of a batch; nothing of one over the whole set, and of one that fails while its kind is not known."""
        if kind == "whole":
            return self._sums.new_zeros(2)
        try:
            with autocast(self._run.precision, self._run.device):
                return to_pair(name, self._metrics[name](output, batch), self._run.device)
        except JobError:
            raise
        except Exception:
            if kind is not None or not self._metrics:
                raise
            return self._sums.new_zeros(2)

    def _compute_metrics(self, output: Any, batch: Any) -> list[Tensor]:
        """Every metric of a batch. Each sees the same output and batch, whatever others write to them."""
        is_first_batch, metric_rows = not self._batch_count, []
        originals = (to_full_tensors(output), batch) if is_first_batch and self._metrics else (output, batch)
        versions_before = tensor_versions(originals)
        for name in self._metrics:
            arguments = clone_tree(originals) if is_first_batch or name in self._mutating_metrics else originals
            metric_rows.append(self._compute_metric(name, self._evaluator.metric_kinds.get(name), *arguments))
            if (is_first_batch and not trees_equal(arguments, originals)) or (
                arguments is originals and tensor_versions(originals) != versions_before
            ):
                self._new_mutating_metrics.add(name)
                versions_before = tensor_versions(originals)
        return metric_rows

    def _check_means(self, part: EvaluationPart) -> None:
        """Look again whether metrics are means: samples may be sorted, so that the first ones did not show it."""
        part = slice_part(part, 0, _CHECKED_ROWS) if part.sample_count > _CHECKED_ROWS else part
        means = [name for name in self._metrics if self._evaluator.metric_kinds.get(name) == "mean"]
        if means and self._has_dropped_batches and self._run.is_reporting:
            with self._preserve_metric_state():
                self._misclassified |= {
                    name for name in means if not is_mean(self._metrics[name], self._previous_rows, part)
                }
        with contextlib.suppress(UnjoinableError):  # a few rows may agree by chance
            part = join_parts([part, self._previous_rows]) if self._previous_rows is not None else part
        self._previous_rows = slice_part(part, 0, min(_CHECKED_ROWS, part.sample_count))

    @contextmanager
    def _preserve_metric_state(self) -> Iterator[None]:
        """Metrics may be called inside, and what they keep is afterwards as it was."""
        snapshot = snapshot_metrics(self._run.job, self._run.model)
        try:
            with autocast(self._run.precision, self._run.device):
                yield
        finally:
            snapshot.restore()

    def _collect_part(self, part: EvaluationPart) -> None:
        limit = _SMALL_SET_BYTES if self._all_classified_as("pair", "mean") else self._max_collected_bytes
        self._collected_bytes += part_bytes(part)
        if self._has_dropped_batches or (
            self._collected_bytes > limit and self._batch_count >= _CLASSIFICATION_BATCHES
        ):
            self._has_dropped_batches, self._parts = True, []
        elif self._run.is_reporting:
            self._parts.append(move_part(part, torch.device("cpu")))

    def _agree_on_kinds(self) -> None:
        """Agree over all ranks on the kind of every metric that is not known; every rank comes here in the same turn."""
        run, kinds = self._run, self._evaluator.metric_kinds
        unknown = [name for name in self._metrics if name not in kinds]
        if unknown:
            local_kinds: dict[str, MetricKind | None] = {}
            if run.is_reporting:
                with self._preserve_metric_state():
                    local_kinds = {name: self._classify_metric(name) for name in unknown}
            votes = [vote for vote in run.ranks.all_gather_object(local_kinds) if vote]
            for name in unknown:
                voted_kinds = {vote[name] for vote in votes} - {None}
                kinds[name] = voted_kinds.pop() if len(voted_kinds) == 1 else "whole"
        whole_set_metrics = [name for name in unknown if kinds[name] == "whole"]
        for name in whole_set_metrics:  # what was added up of it so far is no part of it
            self._sums[self._names.index(name)] = 0
        if whole_set_metrics:
            self._metrics_before.restore()  # nor is what its calls so far left behind

    def _classify_metric(self, name: str) -> MetricKind | None:
        parts = [move_part(part, self._run.device) for part in self._parts]
        if parts and self._evaluator.attributes.changes_functions(
            lambda: self._metrics[name](parts[0].output, parts[0].batch)
        ):
            return "whole"  # every rank must have what the whole set leaves behind
        return classify_metric(self._metrics[name], parts)

    def finish(self, *, round_robin: bool) -> dict[str, float] | None:
        """What it all comes to; None: a metric is no mean, or the loss has no common weight, and it must be evaluated again. `round_robin`: ranks took samples in turn, not one
        share after the other."""
        run = self._run
        self._agree_on_kinds()
        self._check_means_across_ranks()
        rank_states = run.ranks.all_gather_object(
            (self._misclassified, self._ratios, self._has_ratios, self._new_mutating_metrics, self._empty_divisor)
        )
        misclassified = set[str]().union(*(value for value, *_ in rank_states))
        mutating_metrics = set[str]().union(*(value for *_, value, _ in rank_states)) - self._mutating_metrics
        self._mutating_metrics |= mutating_metrics
        rank_ratios = [ratios for _, ratios, has_ratios, *_ in rank_states if has_ratios]
        if any(not _same_ratios(rank_ratios[0], value) for value in rank_ratios):
            misclassified.add("loss")
        if misclassified:
            self._loss.weighs_by_samples |= "loss" in misclassified
            self._evaluator.metric_kinds.update({name: "whole" for name in misclassified if name != "loss"})
        if misclassified or mutating_metrics:
            return None
        uncomputed = self._compute_whole_set_metrics(round_robin=round_robin)
        sums = self._sums
        run.data_parallel.all_reduce(sums)
        run.model_parallel.all_reduce(sums if run.is_reporting else sums.zero_())
        if not sums[0, 1]:
            sums[0, 1] = max(
                empty_divisor for *_, empty_divisor in rank_states
            )  # as one device, which counts nothing either, divides
        means = {
            name: float(total / count) if count else float("nan")
            for name, (total, count) in zip(self._names, sums, strict=True)
        }
        return means | dict.fromkeys(uncomputed, float("nan"))

    def _check_means_across_ranks(self) -> None:
        """Look whether metrics are means over samples of several ranks too: one may have the long ones, another the short ones."""
        run = self._run
        if not any(run.ranks.all_gather_object(self._has_dropped_batches and run.is_reporting)) or not run.is_reporting:
            return
        previous_rows = self._previous_rows
        local_rows = (
            None
            if previous_rows is None
            else move_part(
                slice_part(previous_rows, 0, min(_RANK_CHECKED_ROWS, previous_rows.sample_count)), torch.device("cpu")
            )
        )
        parts = [
            move_part(part, run.device)
            for part in run.data_parallel.gather_object(local_rows) or ()
            if part is not None
        ]
        with self._preserve_metric_state():
            for name in self._metrics if len(parts) > 1 else ():
                if self._evaluator.metric_kinds[name] == "mean" and not all(
                    is_mean(self._metrics[name], *pair) for pair in pairwise(parts)
                ):
                    self._misclassified.add(name)

    def _compute_whole_set_metrics(self, *, round_robin: bool) -> list[str]:
        """Compute metrics over all samples, on the first data rank: those that are no means, and of a small set the means too. Returns the names of those
        that cannot be computed."""
        run = self._run
        rank_states = [
            fields
            for *fields, is_reporting in run.ranks.all_gather_object(
                (self._collected_bytes, self._has_dropped_batches, run.is_reporting)
            )
            if is_reporting
        ]
        is_small = (
            not any(has_dropped for _, has_dropped in rank_states)
            and max(size for size, _ in rank_states) <= _SMALL_SET_BYTES
        )
        whole_set_metrics = [name for name in self._metrics if self._evaluator.metric_kinds[name] == "whole"]
        mean_metrics = (
            [name for name in self._metrics if self._evaluator.metric_kinds[name] == "mean"] if is_small else []
        )
        if not whole_set_metrics and not mean_metrics:
            return []
        reason = ""
        if max(size for size, _ in rank_states) > self._max_collected_bytes:
            reason = f"their outputs take more than {self._max_collected_bytes / 2**30:.1f} GiB"
        rank_parts = run.data_parallel.gather_object(self._parts) if run.is_reporting and not reason else None
        self._parts = []
        problem, computed_means = "", list[str]()
        with run.ranks.raise_on_all_ranks():
            if rank_parts is not None:
                problem, computed_means = self._compute_joined(
                    whole_set_metrics, mean_metrics, rank_parts, round_robin=round_robin
                )
        rank_results = run.ranks.all_gather_object((problem, computed_means, rank_parts is not None))
        for name in set(mean_metrics).intersection(
            *(rank_means for _, rank_means, computed in rank_results if computed)
        ):
            if rank_parts is None:  # its batches are counted there
                self._sums[self._names.index(name)] = 0
        if whole_set_metrics and any(computed for *_, computed in rank_results):
            self._evaluator.attributes.share_metrics(has_metrics=rank_parts is not None)
        reason = reason or next((fields for fields, *_ in rank_results if fields), "")
        if reason and whole_set_metrics and run.world.is_main:
            run.warn(
                f"{', '.join(whole_set_metrics)}: not a mean over samples, and cannot be computed over the whole evaluation set, because {reason}; return (sum, "
                "count) from the metric, or what it needs as several such metrics"
            )
        return whole_set_metrics if reason else []

    def _compute_joined(
        self,
        whole_set_metrics: Sequence[str],
        mean_metrics: Sequence[str],
        rank_parts: Sequence[Sequence[EvaluationPart]],
        *,
        round_robin: bool,
    ) -> tuple[str, list[str]]:
        """Why it cannot be done, and the `mean_metrics` for which it was."""
        if round_robin:
            parts = [
                parts_of_rank[turn]
                for turn in range(max(map(len, rank_parts)))
                for parts_of_rank in rank_parts
                if turn < len(parts_of_rank)
            ]
        else:
            parts = [part for parts_of_rank in rank_parts for part in parts_of_rank]
        try:
            whole_set = move_part(join_parts(parts), self._run.device)
        except UnjoinableError as error:
            return str(error), []
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
        return "", computed_means

    def _set_metric(self, name: str, whole_set: EvaluationPart) -> None:
        value = self._metrics[name](*clone_tree((whole_set.output, whole_set.batch)))
        self._sums[self._names.index(name)] = torch.tensor(to_metric_pair(name, value), dtype=torch.float64)


def _to_pairs(values: Tensor, sample_count: int) -> Tensor:
    """(sum, count) for each value, of means (whose count is NaN) as well."""
    is_mean = values[:, 1].isnan()
    return torch.where(
        is_mean[:, None], torch.stack([values[:, 0] * sample_count, is_mean.double() * sample_count], 1), values
    )


def _same_ratios(left: CountRatios | None, right: CountRatios | None) -> bool:
    """Whether one weight joins losses whose averages have these counts: the same kind of count, in the same proportions."""
    if left is None or right is None or len(left) != len(right):
        return left is None and right is None
    return all(math.isclose(*pair, rel_tol=_COUNT_TOLERANCE) for pair in zip(left, right, strict=True))


def _micro_batches(run: RunState, data: Any) -> Iterator[MicroBatch]:
    data_ranks = run.data_parallel
    rank, rank_count = data_ranks.rank, data_ranks.size
    # All ranks have as many samples here, so that no more than the smallest share fits everywhere.
    micro_batch_size = run.plan.micro or (min if run.plan.data.batch_shares else max)(
        local_batch_sizes(run.job.batch_size, rank_count, run.plan.data.batch_shares)
    )
    collate, seed = run.job.collate, run.job.seed
    with run.ranks.raise_on_all_ranks():
        pin_memory = run.device.type == "cuda"
        if is_stream(data):
            stream = Stream(data, collate=collate, seed=seed)
            replicas = run.ranks.size // rank_count
            agree = run.ranks.all_gather_object
            return evaluation_stream(
                stream,
                dp_rank=rank,
                dp_size=rank_count,
                batch_size=micro_batch_size,
                all_gather=agree,
                pin=pin_memory,
                model_parallel_size=replicas,
            )
        source = open_source(data, collate=collate, seed=seed)
        return evaluation_batches(
            source, dp_rank=rank, dp_size=rank_count, batch_size=micro_batch_size, pin=pin_memory, workers=run.workers
        )
