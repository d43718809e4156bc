"""What can be known of a job before its first step, though it matters only after hours of work."""

from __future__ import annotations

from collections.abc import Mapping

from echelon.errors import DataError, JobError
from echelon.job import Job


def require_evaluation(job: Job) -> None:
    """Refuse an evaluation that can only fail: an empty set, metrics that are not functions."""
    from echelon.data.source import is_stream, open_source

    if not isinstance(job.metrics, Mapping):
        raise JobError(f"metrics={job.metrics!r}: give names and functions, metrics={{'accuracy': accuracy}}")
    for name, metric in job.metrics.items():
        if not callable(metric):
            raise JobError(f"metrics[{name!r}]={metric!r} is not a function of (output, batch)")
    if job.evaluation is None or is_stream(job.evaluation):
        return
    try:
        open_source(job.evaluation, collate=job.collate, seed=job.seed)
    except DataError as error:
        raise DataError(f"evaluation=: {error}") from None
