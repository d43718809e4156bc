"""Resume a data set that keeps state of what it reads (a running mean, edits in place, a generator) as the saved run left it.

Batches are prefetched, so that state belongs to no step, and checkpoints hold digests of samples instead. A resumed run reads these samples in
a forked process, and where they differ it replays the reads of the finished steps.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from echelon.data.error_text import type_name
from echelon.data.loader import Loader, StepBatch
from echelon.data.open_data import is_stream
from echelon.data.sample_digest import digest
from echelon.data.warmup import StepLoader, WarmupLoader
from echelon.data.workers import prefetch_in_process
from echelon.engine.run_state import RunState
from echelon.errors import CheckpointError
from echelon.plan.format_units import format_seconds
from echelon.trials.dataset_state import DatasetState, may_change_on_read

#: Longest replay where no trial shows that samples depend on earlier ones, and length of a trial, in seconds.
_MAX_REPLAY_SECONDS, _TRIAL_SECONDS = 30.0, 1.0


@dataclass(frozen=True, slots=True)
class SampleRead:
    """The first micro-batch of a step, as the first rank read it."""

    step: int
    samples: int
    digest: str

    @classmethod
    def from_batch(cls, batch: StepBatch) -> SampleRead:
        return cls(batch.step, batch.micro_batches[0].samples, digest(batch.micro_batches[0].batch))


@dataclass(frozen=True, slots=True)
class _ReadTrial:
    """How a fresh data set reads steps of the saved run."""

    is_reproducible: bool  #: the first step's samples are equal
    depends_on_history: bool  #: the last step's differ, without the steps between
    changes_between_reads: bool  #: they differ from one read to the next
    changes_state: bool  #: reading changes state that is reachable from the data set
    step_seconds: float  #: to read one step


class ReadHistory:
    """The samples that a run's steps have read."""

    def __init__(self, run: RunState, is_batch_unchanged: Callable[[StepBatch], bool]) -> None:
        self._run, self._is_batch_unchanged = run, is_batch_unchanged
        self._first: SampleRead | None = None
        self._last: SampleRead | None = None
        self._batch: StepBatch | None = None

    def record(self, batch: StepBatch) -> None:
        """Record a step before it is computed."""
        run = self._run
        if run.world.is_main and _runs_code(run.loader, batch.step):
            self._batch = batch
            if batch.step == 0:
                self._first = SampleRead.from_batch(batch)

    def collect(self) -> dict[str, Any]:
        """The history for a checkpoint, on the first rank; empty where reading runs no user code."""
        if self._batch is not None and self._is_batch_unchanged(self._batch):
            self._last = SampleRead.from_batch(self._batch)
        reads = {"first": self._first, "last": self._last}
        return {name: asdict(sample_read) for name, sample_read in reads.items() if sample_read is not None}

    def rewind(self, step: int) -> None:
        """Forget steps from `step` on: the run that read them has loaded an earlier checkpoint."""
        self._batch = None
        if self._last is not None and self._last.step >= step:
            self._last = None

    def restore(self, stored: Any) -> None:
        """Replay the finished steps' reads where samples depend on them, or warn. Every rank must call it first. `stored`: what `collect` returned."""
        run, ranks, finished_steps = self._run, self._run.ranks, self._run.step_number
        if stored is not None:
            try:
                self._first, self._last = (SampleRead(**stored[n]) if n in stored else None for n in ("first", "last"))
            except TypeError as error:
                raise CheckpointError(f"the checkpoint's read history is damaged ({error!r})") from error
        if is_stream(run.job.data) or not 0 < finished_steps < run.total_steps:
            return
        if not any(ranks.all_gather_object(any(_runs_code(run.loader, step) for step in (0, finished_steps - 1)))):
            return
        with ranks.raise_on_all_ranks():
            trial = self._run_trial() if run.world.is_main else None
        trial = ranks.all_gather_object(trial)[0]
        if trial is not None:
            warning, should_replay = self._decide(trial, finished_steps)
            if warning:
                self._warn(warning)
            if should_replay:
                self._replay_steps(finished_steps, depends_on_history=trial.depends_on_history)

    def _decide(self, trial: _ReadTrial, finished_steps: int) -> tuple[str, bool]:
        is_suspected = trial.depends_on_history or trial.changes_between_reads
        seconds, fresh = trial.step_seconds * finished_steps, "the resumed run starts with a fresh data set"
        duration = f"about {format_seconds(seconds)}"
        if not trial.is_reproducible:
            cause = "it draws unseeded random numbers, or files or libraries have changed"
            return f"the first step's samples are not those that the interrupted run read: {cause}", False
        if self._run.workers:
            problem = "samples depend on those before, as the worker processes of the run before kept them"
            return f"{problem}: {fresh}; use workers=0 to restore it" if is_suspected else "", False
        if not (is_suspected or trial.changes_state) or seconds <= _MAX_REPLAY_SECONDS:
            return "", is_suspected or trial.changes_state
        if trial.depends_on_history and trial.changes_between_reads:
            return f"samples depend on those before: {finished_steps:,} steps are read again, {duration}", True
        if trial.depends_on_history:
            step = self._last.step + 1 if self._last else finished_steps
            return f"step {step}'s samples are not those of the interrupted run: files or libraries have changed", False
        cost = f"reading {finished_steps:,} steps again takes {duration}"
        return f"it keeps state of what it reads; {cost}, and no trial shows that samples depend on it: {fresh}", False

    def _warn(self, text: str) -> None:
        self._run.warn(f"{type_name(self._run.job.data)}: {text}")

    def _replay_steps(self, finished_steps: int, *, depends_on_history: bool) -> None:
        run, last = self._run, self._last
        is_equal: bool | None = None
        with run.ranks.raise_on_all_ranks():
            for batch in run.loader.steps(0, finished_steps):
                if run.world.is_main and last is not None and batch.step == last.step:
                    sample_read = SampleRead.from_batch(batch)
                    is_equal = sample_read == last if sample_read.samples == last.samples else None
        is_equal = run.ranks.all_gather_object(is_equal)[0]
        if depends_on_history and not is_equal:
            reason = "another plan read them"
            if is_equal is not None:
                reason = "evaluations or other code change it too, or files or libraries have changed"
            problem = f"samples depend on earlier readings, which cannot be repeated ({reason})"
            self._warn(f"{problem}: the resumed run reads other samples than an uninterrupted one")

    def _run_trial(self) -> _ReadTrial | None:
        """None if the data set cannot be read in another process, and reading a step in this one changes nothing in it."""
        try:
            trial = prefetch_in_process(self._run_forked_trial(), pin=False)
            with _preserve_file_positions(), contextlib.closing(trial):
                return next(trial)
        except Exception:  # it holds a device or a connection; a broken sample raises at its own step
            return self._run_local_trial()

    def _run_forked_trial(self) -> Iterator[_ReadTrial]:
        run, finished_steps = self._run, self._run.step_number
        first, last = self._first or SampleRead(0, 1, ""), self._last or SampleRead(finished_steps - 1, 1, "")
        dataset_states = _dataset_states(run)
        first_digest = _digest_samples(run.loader, 0, first.samples)
        start_time, read_count = time.perf_counter(), 1
        last_digest, step = _digest_samples(run.loader, last.step, last.samples), finished_steps
        while step and time.perf_counter() - start_time <= _TRIAL_SECONDS:
            step, read_count = step - 1, read_count + 1
            _digest_samples(run.loader, step, last.samples)
        sample_seconds = (time.perf_counter() - start_time) / (read_count * last.samples)
        yield _ReadTrial(
            is_reproducible=first.digest in ("", first_digest),
            depends_on_history=last.digest not in ("", last_digest),
            changes_between_reads=_digest_samples(run.loader, last.step, last.samples) != last_digest,
            changes_state=any(dataset_state.has_changed(with_generators=True) for dataset_state in dataset_states),
            step_seconds=sample_seconds * run.job.batch_size / run.data_parallel.size,
        )

    def _run_local_trial(self) -> _ReadTrial | None:
        run = self._run
        dataset_states, start_time, changes_state = _dataset_states(run), time.perf_counter(), False
        with contextlib.suppress(Exception):
            _digest_samples(run.loader, 0, 1)
            changes_state = any(dataset_state.has_changed(with_generators=True) for dataset_state in dataset_states)
        step_seconds = (time.perf_counter() - start_time) * run.job.batch_size / run.data_parallel.size
        for dataset_state in dataset_states:
            dataset_state.restore()
        return _ReadTrial(True, False, False, changes_state, step_seconds) if changes_state else None


@contextlib.contextmanager
def _preserve_file_positions() -> Iterator[None]:
    """Restore the positions of files that are open read-only: a forked process shares and moves them."""
    positions: dict[int, int] = {}
    for descriptor in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # a pipe, a socket, or the listing itself
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                positions[descriptor] = os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        yield
    finally:
        for descriptor, position in positions.items():
            with contextlib.suppress(OSError):
                if os.lseek(descriptor, 0, os.SEEK_CUR) != position:
                    os.lseek(descriptor, position, os.SEEK_SET)


def _locate_step(loader: StepLoader, step: int) -> tuple[StepLoader, int]:
    return loader.locate_step(step) if isinstance(loader, WarmupLoader) else (loader, step)


def _runs_code(loader: StepLoader, step: int) -> bool:
    """Whether reading a step's samples runs user code, which may keep state."""
    part, _ = _locate_step(loader, step)
    return isinstance(part, Loader) and part.source.runs_user_code


def _digest_samples(loader: StepLoader, step: int, count: int) -> str:
    """A digest of the first `count` samples of a step's global batch, read here as one batch."""
    loader_part, step = _locate_step(loader, step)
    assert isinstance(loader_part, Loader)
    source, order = loader_part.source, loader_part.order
    return digest(source.read_batch(order.ids(step, 0, min(count, order.batch_size(step))), order.epoch_of(step)))


def _dataset_states(run: RunState) -> list[DatasetState]:
    job = run.job
    return [DatasetState(source) for source in (job.data, job.warmup_data, job.collate) if may_change_on_read(source)]
