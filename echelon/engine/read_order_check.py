"""Whether samples depend on what a process has read before: then data ranks, which share the samples, read others than one process."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np

from echelon.data.error_text import kind_of
from echelon.data.sample_digest import digest
from echelon.data.source import Samples, Source, is_stream, open_source
from echelon.errors import DataError, VerificationError
from echelon.job import Job
from echelon.trials.dataset_state import DataState, runs_code

#: Samples that are read in several orders, and readings and seconds after which they are read once more.
_TRIED, _MORE, _SECONDS = 16, 4096, 1.0


def require_independent_samples(job: Job) -> None:
    """Raise where readings change the data set, and with it later samples, as far as other orders and a second of further readings show.

    Where readings change nothing, the first step's samples are read once.
    """
    found = history_dependence(job)
    if found is not None:
        raise VerificationError(
            f"{kind_of(job.data)}: {found}; data ranks read fewer samples than one process, and so others; make a sample depend on its number "
            "only, or train in one process"
        )


def history_dependence(job: Job) -> str | None:
    """How a sample depends on what was read before; None where no trial shows that. Leaves no trace in the data set."""
    if is_stream(job.data) or not runs_code(job.data):
        return None
    source = open_source(job.data, collate=job.collate, seed=job.seed)
    if not isinstance(source, Samples):
        return None
    order = source.order(batch=job.batch, seed=job.seed, drop_last=job.drop_last)
    steps = job.steps if job.steps is not None else (job.epochs or 0) * order.steps_per_epoch
    first = [int(number) for number in order.ids(0, 0, min(order.size(0), _TRIED))]
    held = DataState(job.data)
    try:
        return _differing(source, held, first, (order.ids(step, 0, order.size(step)) for step in range(steps)))
    except DataError:  # raised again when it is that sample's turn
        return None
    finally:
        held.put_back()


def _differing(source: Source, held: DataState, first: Sequence[int], steps: Iterable[np.ndarray]) -> str | None:
    """Of the samples `first`, one that readings before change. Leaves changes behind."""
    reads = {number: _read(source, number) for number in first}
    if not held.changed(positions=True):
        return None
    held.put_back(generators=False)
    if any(_read(source, number) != reads[number] for number in first) and not held.unrestorable():
        return None  # it is random
    for number in first:
        if _read(source, number) != reads[number]:
            return f"sample {number} is another when it is read again"
    held.put_back(generators=False)
    for number in first[::-1]:
        if _read(source, number) != reads[number]:
            return f"sample {number} is another when it is read after others"
    count, end = 0, time.monotonic() + _SECONDS
    for ids in steps:
        for number in map(int, ids):
            source.sample(number)
        count += len(ids)
        if count > _MORE or time.monotonic() > end:
            break
    number = first[0]
    return (
        f"sample {number} is another when {count} others were read before"
        if _read(source, number) != reads[number]
        else None
    )


def _read(source: Source, number: int) -> str:
    return digest(source.sample(number))
