"""Refuse samples that depend on earlier reads: each data rank reads only some of the samples."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np

from echelon.data.error_text import type_name
from echelon.data.open_data import is_stream, open_source
from echelon.data.sample_digest import digest
from echelon.data.source import SampleSource, Source
from echelon.errors import DataError, VerificationError
from echelon.job import Job
from echelon.trials.dataset_state import DatasetState, may_change_on_read

#: Samples that are read in several orders, and reads and seconds after which they are read once more.
_TRIED_SAMPLES, _EXTRA_READS, _EXTRA_SECONDS = 16, 4096, 1.0


def require_independent_samples(job: Job) -> None:
    """Raise where reads change the data set, and with it later samples, as far as other orders and a second of further reads show."""
    dependence = find_history_dependence(job)
    if dependence is not None:
        raise VerificationError(
            f"{type_name(job.data)}: {dependence}; each data rank reads only some of the samples, and would read different ones than one process; make a "
            "sample depend on its number only, or train in one process"
        )


def find_history_dependence(job: Job) -> str | None:
    """How a sample depends on earlier reads; None where no trial shows that. Leaves no trace in the data set."""
    if is_stream(job.data) or not may_change_on_read(job.data):
        return None
    source = open_source(job.data, collate=job.collate, seed=job.seed)
    if not isinstance(source, SampleSource):
        return None
    order = source.make_order(batch=job.batch_size, seed=job.seed, drop_last=job.drop_last)
    steps = job.steps if job.steps is not None else (job.epochs or 0) * order.steps_per_epoch
    first_samples = [int(sample_index) for sample_index in order.ids(0, 0, min(order.batch_size(0), _TRIED_SAMPLES))]
    dataset_state = DatasetState(job.data)
    try:
        step_ids = (order.ids(step, 0, order.batch_size(step)) for step in range(steps))
        return _find_dependent_sample(source, dataset_state, first_samples, step_ids)
    except DataError:  # raised again when it is that sample's turn
        return None
    finally:
        dataset_state.restore()


def _find_dependent_sample(
    source: Source, dataset_state: DatasetState, first_samples: Sequence[int], steps: Iterable[np.ndarray]
) -> str | None:
    """One of `first_samples` that earlier reads change. Leaves changes behind."""
    digests = {sample_index: _read_digest(source, sample_index) for sample_index in first_samples}
    if not dataset_state.has_changed(with_positions=True):
        return None

    def differing(samples: Sequence[int]) -> int | None:
        return next((index for index in samples if _read_digest(source, index) != digests[index]), None)

    dataset_state.restore(with_generators=False)
    if differing(first_samples) is not None and not dataset_state.has_unrestorable_changes():
        return None  # it is random
    if (sample_index := differing(first_samples)) is not None:
        return f"sample {sample_index} differs when it is read again"
    dataset_state.restore(with_generators=False)
    if (sample_index := differing(first_samples[::-1])) is not None:
        return f"sample {sample_index} differs when it is read after others"
    count, deadline = 0, time.monotonic() + _EXTRA_SECONDS
    for ids in steps:
        for index in map(int, ids):
            source.read_sample(index)
        count += len(ids)
        if count > _EXTRA_READS or time.monotonic() > deadline:
            break
    sample_index = differing(first_samples[:1])
    return None if sample_index is None else f"sample {sample_index} differs after {count} other reads"


def _read_digest(source: Source, sample_index: int) -> str:
    return digest(source.read_sample(sample_index))
