"""Bring a data set that keeps what it reads (a running mean, a counter, edits in place, a generator) to where the interrupted run left it.

A checkpoint holds none of it: batches are read ahead of the steps, so what the data set keeps belongs to no step, and it may lie anywhere: in
attributes, closures, globals, an open file. A checkpoint holds digests of samples instead. A resumed run reads these samples in a forked process,
and where they are others it reads again what the steps before have read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from echelon.data.error_text import kind_of
from echelon.data.loader import Loader, StepBatch
from echelon.data.sample_digest import digest
from echelon.data.source import is_stream
from echelon.data.warmup import Batches, Warmed
from echelon.data.workers import ahead
from echelon.errors import CheckpointError
from echelon.plan.format_units import seconds
from echelon.trials.dataset_state import DataState, runs_code

if TYPE_CHECKING:
    from echelon.engine.run import Run

#: Seconds of reading that are spent although no trial shows that samples depend on earlier ones, and seconds of a trial.
_AFFORDABLE, _TRIAL = 30.0, 1.0


@dataclass(frozen=True, slots=True)
class Read:
    """The first samples of a step's global batch, as the first rank read them: one micro-batch."""

    step: int
    samples: int
    digest: str

    @classmethod
    def of(cls, batch: StepBatch) -> Read:
        return cls(batch.step, batch.micros[0].samples, digest(batch.micros[0].batch))


@dataclass(frozen=True, slots=True)
class _Trial:
    """What a data set that has read nothing yet gives for the steps of the interrupted run."""

    reproducible: bool  #: the first step's samples are the same
    differs: bool  #: the last step's are not, when those between were not read
    drifts: bool  #: they change from one reading to the next
    changes: bool  #: reading changes what the data set keeps, as far as that is seen
    seconds: float  #: of reading one step


class ReadHistory:
    """What the steps of a run have read."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._first: Read | None = None
        self._last: Read | None = None
        self._batch: StepBatch | None = None

    def note(self, batch: StepBatch) -> None:
        """Of a step that is about to be computed."""
        run = self._run
        if run.world.main and _runs_code(run.loader, batch.step):
            self._batch = batch
            if batch.step == 0:
                self._first = Read.of(batch)

    def collect(self) -> dict[str, Any]:
        """For a checkpoint, by the first rank; what runs no code of the user's is not in it."""
        if self._batch is not None and self._run.is_unedited(self._batch):
            self._last = Read.of(self._batch)
        return {name: asdict(each) for name, each in (("first", self._first), ("last", self._last)) if each is not None}

    def go_back(self, step: int) -> None:
        """Steps from `step` on do not count any more: the run that read them loaded an earlier checkpoint."""
        self._batch = None
        if self._last is not None and self._last.step >= step:
            self._last = None

    def restore(self, stored: Any) -> None:
        """Read again what the steps before this one read, where samples depend on it; warn where that is not enough. Every rank calls it, before
        it has read anything. `stored`: what `collect` gave, None where it does not count."""
        run, ranks = self._run, self._run.ranks
        if stored is not None:
            try:
                self._first, self._last = (
                    Read(**stored[name]) if name in stored else None for name in ("first", "last")
                )
            except TypeError as error:
                raise CheckpointError(f"the checkpoint's record of what was read is damaged ({error!r})") from error
        job, done = run.job, run.step_number
        if is_stream(job.data) or not 0 < done < run.total_steps:
            return
        if not any(ranks.gather(any(_runs_code(run.loader, step) for step in (0, done - 1)))):
            return
        with ranks.together():
            found = self._tried() if run.world.main else None
        found = ranks.gather(found)[0]
        name = kind_of(job.data)
        if found is None:
            return
        if not found.reproducible:
            run.warn(
                f"{name}: the first step's samples are not those that the interrupted run read: it draws random numbers that no seed fixes, or files or "
                "libraries have changed; the resumed run reads other samples than an unbroken one"
            )
            return
        if run.workers:
            if found.differs or found.drifts:
                run.warn(
                    f"{name}: samples depend on those before, as the worker processes of the run before kept them: the resumed run starts with it as it "
                    "was made; use workers=0 to have it as it was"
                )
            return
        if not (found.differs or found.drifts or found.changes):
            return
        expected = found.seconds * done
        if expected > _AFFORDABLE and not (found.differs and found.drifts):
            run.warn(
                f"{name}: step {self._last.step + 1 if self._last else done}'s samples are not those that the interrupted run read, and do not depend on "
                "what is read before: files or libraries have changed"
                if found.differs
                else f"{name} keeps what it reads; to read {done:,} steps again takes about {seconds(expected)}, and no trial shows that samples depend "
                "on earlier ones: the resumed run starts with it as it was made"
            )
            return
        if expected > _AFFORDABLE:
            run.warn(
                f"{name}: samples depend on those before: {done:,} steps are read again, about {seconds(expected)}"
            )
        self._read_again(done, differs=found.differs)

    def _read_again(self, done: int, *, differs: bool) -> None:
        run, last = self._run, self._last
        equal: bool | None = None
        with run.ranks.together():
            for batch in run.loader.steps(0, done):
                if run.world.main and last is not None and batch.step == last.step:
                    again = Read.of(batch)
                    equal = again == last if again.samples == last.samples else None
        equal = run.ranks.gather(equal)[0]
        if differs and not equal:
            why = "another plan read them"
            if equal is not None:
                why = "evaluations or other code change it too, or files or libraries have changed"
            run.warn(
                f"{kind_of(run.job.data)}: samples depend on earlier readings, which cannot be repeated ({why}): the resumed run "
                "reads other samples than an unbroken one"
            )

    def _tried(self) -> _Trial | None:
        """None: the data set cannot be read in another process, and reading a step in this one changes nothing in it."""
        try:
            with _positions_kept(), contextlib.closing(ahead(self._trial(), pin=False)) as trial:
                return next(trial)
        except Exception:  # it holds a device or a connection; a broken sample raises when its step comes
            return self._tried_here()

    def _trial(self) -> Iterator[_Trial]:
        """In a process of its own: whatever reading changes is gone with it."""
        run, done = self._run, self._run.step_number
        first, last = self._first or Read(0, 1, ""), self._last or Read(done - 1, 1, "")
        held = _states(run)
        begun = _read(run.loader, 0, first.samples)
        begin, count = time.perf_counter(), 1
        found = _read(run.loader, last.step, last.samples)
        for step in reversed(range(done)):
            if time.perf_counter() - begin > _TRIAL:
                break
            _read(run.loader, step, last.samples)
            count += 1
        took = (time.perf_counter() - begin) / (count * last.samples)
        yield _Trial(
            reproducible=first.digest in ("", begun),
            differs=last.digest not in ("", found),
            drifts=_read(run.loader, last.step, last.samples) != found,
            changes=any(each.changed(generators=True) for each in held),
            seconds=took * run.job.batch / run.data.size,
        )

    def _tried_here(self) -> _Trial | None:
        run = self._run
        held, begin, changes = _states(run), time.perf_counter(), False
        with contextlib.suppress(Exception):
            _read(run.loader, 0, 1)
            changes = any(each.changed(generators=True) for each in held)
        took = (time.perf_counter() - begin) * run.job.batch / run.data.size
        for each in held:
            each.put_back()
        return _Trial(True, False, False, changes, took) if changes else None


@contextlib.contextmanager
def _positions_kept() -> Iterator[None]:
    """A forked process shares the positions in open files: what it reads moves them here too. Only files that are open for reading alone."""
    held: dict[int, int] = {}
    for number in map(int, os.listdir("/dev/fd")):
        with contextlib.suppress(OSError):  # a pipe, a socket, or the listing itself
            if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                held[number] = os.lseek(number, 0, os.SEEK_CUR)
    try:
        yield
    finally:
        for number, position in held.items():
            with contextlib.suppress(OSError):
                if os.lseek(number, 0, os.SEEK_CUR) != position:
                    os.lseek(number, position, os.SEEK_SET)


def _part_of(loader: Batches, step: int) -> tuple[Batches, int]:
    return loader.part_of(step) if isinstance(loader, Warmed) else (loader, step)


def _runs_code(loader: Batches, step: int) -> bool:
    """Whether reading a step's samples runs code that may keep something."""
    part, _ = _part_of(loader, step)
    return isinstance(part, Loader) and part.source.runs_code


def _read(loader: Batches, step: int, count: int) -> str:
    """A digest of the first `count` samples of a step's global batch, read here as one batch."""
    part, step = _part_of(loader, step)
    assert isinstance(part, Loader)
    count = min(count, part.order.size(step))
    return digest(part.source.take(part.order.ids(step, 0, count), part.order.epoch_of(step)))


def _states(run: Run) -> list[DataState]:
    job = run.job
    return [DataState(each) for each in (job.data, job.warmup_data, job.collate) if runs_code(each)]
