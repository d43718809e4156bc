"""The loss and the metrics over a data set: each sample counts once, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from echelon.data.loader import MicroBatch, evaluation_batches
from echelon.data.open_data import is_stream, open_source
from echelon.data.stream import Stream, evaluation_stream
from echelon.engine.checkpoint.function_state import snapshot_functions, snapshot_metrics
from echelon.engine.checkpoint.run_attributes import RunAttributes
from echelon.engine.evaluation_sums import EvaluationSums
from echelon.engine.metrics import MetricKind
from echelon.engine.run_state import RunState
from echelon.errors import JobError
from echelon.plan.batch_split import local_batch_sizes


class Evaluator:
    """Evaluates one run, and remembers what its evaluations found out about the loss and the metrics."""

    def __init__(self, run: RunState, attributes: RunAttributes) -> None:
        self._run, self._attributes = run, attributes
        #: How each metric is reduced (metrics.py); known after the first evaluation.
        self.metric_kinds: dict[str, MetricKind] = {}
        self._pipeline_batches = 0

    @torch.no_grad()
    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Loss and the job's metrics over `data` (default: the job's evaluation set). Every rank must call it."""
        run, job, loss = self._run, self._run.job, self._run.evaluation_loss
        data = job.eval_data if data is None else data
        if data is None:
            raise JobError("nothing to evaluate on: give the job eval_data=, or pass a data set")
        run.model.eval()
        loss.is_stateful = not run.step_number or bool(self._attributes.functions.changed_objects())
        restore_loss_state = snapshot_functions(job, run.model) if loss.is_stateful else None
        metrics_before = snapshot_metrics(job, run.model)
        mutating_metrics: set[str] = set()
        try:
            while True:
                sums = EvaluationSums(run, self._attributes, self.metric_kinds, metrics_before, mutating_metrics)
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
        run, pipeline = self._run, self._run.rank_model.pipeline
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


def _micro_batches(run: RunState, data: Any) -> Iterator[MicroBatch]:
    dp_rank, dp_size = run.data_parallel.rank, run.data_parallel.size
    shares, collate, seed, pin = run.plan.data.batch_shares, run.job.collate, run.job.seed, run.device.type == "cuda"
    # All ranks evaluate as many samples each, so that no more than the smallest share fits everywhere.
    rank_samples = local_batch_sizes(run.job.batch_size, dp_size, shares)
    batch_size = run.plan.micro or (min(rank_samples) if shares else max(rank_samples))
    options: dict[str, Any] = {"dp_rank": dp_rank, "dp_size": dp_size, "batch_size": batch_size, "pin": pin}
    with run.ranks.raise_on_all_ranks():
        if is_stream(data):
            stream, ranks = Stream(data, collate=collate, seed=seed), run.ranks
            options |= {"all_gather": ranks.all_gather_object, "model_parallel_size": ranks.size // dp_size}
            return evaluation_stream(stream, **options)
        return evaluation_batches(open_source(data, collate=collate, seed=seed), workers=run.workers, **options)
