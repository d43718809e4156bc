"""What can be known of a job before its first step, though it matters only after hours of work."""

from __future__ import annotations

from echelon.errors import DataError
from echelon.job import Job


def require_evaluation(job: Job) -> None:
    """Refuse an evaluation that cannot be opened."""
    from echelon.data.open_data import is_stream, open_source

    if job.eval_data is None or is_stream(job.eval_data):
        return
    try:
        open_source(job.eval_data, collate=job.collate, seed=job.seed)
    except DataError as error:
        raise DataError(f"eval_data=: {error}") from None
