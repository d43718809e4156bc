"""Bring a data set that keeps what it reads (a running mean, a counter, edits in place, a generator) to where the interrupted run left it.

A checkpoint holds none of it: batches are read ahead of the steps, so what the data set keeps belongs to no step. The steps before are read again instead.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from echelon.data.describe import kind_of
from echelon.data.source import is_stream
from echelon.engine.read_order import history_dependence
from echelon.plan.figures import seconds
from echelon.profiler.data_state import DataState, runs_code

if TYPE_CHECKING:
    from echelon.engine.run import Run

#: Seconds of reading that are spent although no trial shows that samples depend on earlier ones.
_AFFORDABLE = 30.0


def restore_read_history(run: Run) -> None:
    """Read what the steps before this one read, where that changes the data set. Every rank calls it, before it has read anything."""
    job, done, ranks = run.job, run.step_number, run.ranks
    sets = [each for each in (job.data, job.warmup_data) if runs_code(each)]
    if is_stream(job.data) or not 0 < done < run.total_steps or not any(ranks.gather(bool(sets))):
        return
    name = kind_of(job.data)
    if run.workers:
        if any(ranks.gather(history_dependence(job) is not None)):
            run.warn(
                f"{name}: samples depend on those before, as the worker processes of the run before kept them: the resumed run starts with it as it "
                "was made; use workers=0 to have it as it was"
            )
        return
    held, begin = [DataState(each) for each in sets], time.perf_counter()
    batches = run.loader.steps(0, done)
    with ranks.together():
        next(batches)
    expected = max(ranks.gather((time.perf_counter() - begin) * done))
    if not any(ranks.gather(any(each.changed(generators=True) for each in held))):
        return
    if expected > _AFFORDABLE:
        if not any(ranks.gather(history_dependence(job) is not None)):
            for each in held:
                each.put_back()
            run.warn(
                f"{name} keeps what it reads; to read {done:,} steps again takes about {seconds(expected)}, and no trial shows that samples depend on "
                "earlier ones: the resumed run starts with it as it was made"
            )
            return
        run.warn(f"{name}: samples depend on those before: {done:,} steps are read again, about {seconds(expected)}")
    with ranks.together():
        for _ in batches:
            pass
