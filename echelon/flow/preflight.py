"""What can be known of a job before its first step, though it matters only after hours of work."""

from __future__ import annotations

from echelon.errors import DataError
from echelon.job import Job


def require_evaluation(job: Job) -> None:
    """Refuse an evaluation that cannot be opened."""
    from echelon.data.source import is_stream, open_source

    if job.evaluation is None or is_stream(job.evaluation):
        return
    try:
        open_source(job.evaluation, collate=job.collate, seed=job.seed)
    except DataError as error:
        raise DataError(f"evaluation=: {error}") from None
