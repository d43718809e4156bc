"""A resumed run finds a data set that keeps what it reads as an unbroken run would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon.data import Packed
from echelon.data.loader import Loader
from echelon.data.packed.from_arrays import ArrayPackingSource
from echelon.data.packed.pack import pack
from echelon.engine.checkpoint import read_history
from echelon.engine.run import Run
from echelon.job import Job
from echelon.plan.text import from_text
from echelon.world import World
from tests.engine.jobs import DATA, mlp
from tests.engine.stateful_datasets import (
    LEAVES_FILES_OPEN,
    Cached,
    Closure,
    Drawing,
    Entropy,
    Harder,
    InPlace,
    Lines,
    LinesElsewhere,
    Normalised,
    Plain,
    Previous,
    Rare,
    Read,
    Reopened,
    Slotted,
    collected,  # noqa: F401 (a fixture)
)

pytestmark = LEAVES_FILES_OPEN

STEPS, STOP = 10, 6


def job(kind: type[Plain], **changes: Any) -> Job:
    return mlp(data=kind(), batch_size=8, epochs=None, steps=STEPS, **changes)


def started(made: Job, said: list[str] | None = None, **options: Any) -> Run:
    return Run(made, from_text("dp=1"), World(), warn=(said if said is not None else []).append, **options)


def trained(run: Run, stop: int | None = None) -> list[float]:
    return [float(run.step(batch).loss) for batch in run.batches(stop)]


def resumed(kind: type[Plain], folder: Path, said: list[str] | None = None, **options: Any) -> tuple[Run, Plain]:
    """A run in another process: with a data set of its own."""
    with started(job(kind)) as run:
        trained(run, STOP)
        run.save(folder)
    made = job(kind)
    run = started(made, said, **options)
    run.load(folder)
    return run, made.data


def warnings_of_an_equal_resume(kind: type[Plain], folder: Path) -> list[str]:
    """What a resumed run warns of, once it has trained as an unbroken one."""
    with started(job(kind)) as run:
        whole = trained(run)
    said: list[str] = []
    run, _ = resumed(kind, folder, said)
    with run:
        assert trained(run) == whole[STOP:]
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [Harder, Normalised, InPlace, Previous, Drawing, Closure, Lines, LinesElsewhere, Reopened, Slotted, Rare],
    ids=lambda each: each.__name__,
)
def test_a_resumed_run_reads_what_an_unbroken_one_reads(kind: type[Plain], tmp_path: Path) -> None:
    assert warnings_of_an_equal_resume(kind, tmp_path / "step") == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Harder, Normalised, InPlace])
def test_it_is_read_again_however_long_that_takes(
    kind: type[Plain], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_history, "_MAX_REPLAY_SECONDS", 0.0)
    said = warnings_of_an_equal_resume(kind, tmp_path / "step")
    assert len(said) == 1
    assert "6 steps are read again, about" in said[0]


def warnings_of_a_resume_that_reads_nothing(kind: type[Plain], folder: Path, **options: Any) -> list[str]:
    said: list[str] = []
    run, data = resumed(kind, folder, said, **options)
    run.close()
    assert data.reads == 0
    return said


def test_a_cache_is_not_filled_for_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_history, "_MAX_REPLAY_SECONDS", 0.0)
    (said,) = warnings_of_a_resume_that_reads_nothing(Cached, tmp_path / "step")
    assert "starts with a fresh data set" in said


@pytest.mark.parametrize("kind", [Normalised, Drawing, Closure])
def test_what_worker_processes_kept_is_not_restored_and_that_is_said(kind: type[Plain], tmp_path: Path) -> None:
    said = warnings_of_a_resume_that_reads_nothing(kind, tmp_path / "step", workers=1)
    assert any("use workers=0" in each for each in said)


def test_samples_that_no_seed_fixes_are_not_read_again(tmp_path: Path) -> None:
    (said,) = warnings_of_a_resume_that_reads_nothing(Entropy, tmp_path / "step")
    assert "the first step's samples are not those that the interrupted run read" in said


class Counting:
    """A sample that counts how often it is asked for its values."""

    def __init__(self, values: Any) -> None:
        self.values, self.calls = values, 0

    def get(self) -> Any:
        self.calls += 1
        return self.values * self.calls


def together(items: list[tuple[Counting, Any]]) -> Any:
    return torch.stack([each.get() for each, _ in items]), torch.stack([label for _, label in items])


class Annealing:
    """Counts its calls, and scales samples from the eighth on."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: list[Any]) -> Any:
        self.calls += 1
        rows, labels = torch.utils.data.default_collate(samples)
        return rows * (2 if self.calls > 7 else 1), labels


def collated() -> Job:
    return mlp(collate=Annealing(), batch_size=8, epochs=None, steps=STEPS)


def listed() -> Job:
    data = [(Counting(row), label) for row, label in DATA]
    return mlp(data=data, collate=together, batch_size=8, epochs=None, steps=STEPS)


@pytest.mark.parametrize("made", [collated, listed])
def test_what_collation_keeps_comes_back(made: Callable[[], Job], tmp_path: Path) -> None:
    with started(made()) as run:
        whole = trained(run)
    with started(made()) as run:
        trained(run, STOP)
        run.save(tmp_path / "step")
    with started(made()) as run:
        run.load(tmp_path / "step")
        assert trained(run) == whole[STOP:]


def test_it_is_read_again_after_a_warm_up_that_keeps_nothing(tmp_path: Path) -> None:
    def made() -> Job:
        return mlp(data=Closure(), warmup_data=DATA, batch_size=8, epochs=None, steps=STEPS)

    with started(made()) as run:
        whole, warm = trained(run), run.total_steps - STEPS
    with started(made()) as run:
        trained(run, warm + 2)
        run.save(tmp_path / "step")
    with started(made()) as run:
        run.load(tmp_path / "step")
        assert trained(run) == whole[warm + 2 :]


@pytest.mark.parametrize(("kind", "steps"), [(Plain, 0), (Read, STOP)])
def test_only_data_that_keep_something_are_read_again(
    kind: type[Plain], steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[int] = []
    made = Loader._make_request
    folder = tmp_path / "step"
    with started(job(kind)) as run:
        trained(run, STOP)
        run.save(folder)
    with started(job(kind)) as run:
        monkeypatch.setattr(Loader, "_make_request", lambda self, step: (requested.append(step), made(self, step))[1])
        run.load(folder)
    assert requested == list(range(steps))


def test_packed_data_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, labels = (each.numpy() for each in DATA.tensors)
    pack(
        ArrayPackingSource({"row": rows, "label": labels}, {"tuple": ["row", "label"]}, {"source": "test"}),
        tmp_path / "set",
    )
    made = mlp(data=Packed(tmp_path / "set"), batch_size=8, epochs=None, steps=STEPS)
    with started(made) as run:
        trained(run, STOP)
        run.save(tmp_path / "step")
    with started(made) as run:
        monkeypatch.setattr(Loader, "_make_request", lambda self, step: pytest.fail("it reads"))
        run.load(tmp_path / "step")
    assert run.step_number == STOP


def test_a_run_that_goes_back_in_its_own_process_reads_nothing_twice(tmp_path: Path) -> None:
    made = job(Read)
    with started(made) as run:
        trained(run, 2)
        run.save(tmp_path / "step")
        trained(run, 4)
        run.load(tmp_path / "step")
    assert made.data.reads == 4 * 8


def test_a_run_that_went_back_records_no_later_step(tmp_path: Path) -> None:
    with started(job(Read)) as run:
        trained(run, 2)
        run.save(tmp_path / "two")
        trained(run, 4)
        run.save(tmp_path / "four")
        assert run.read_history.collect()["last"]["step"] == 3
        run.load(tmp_path / "two")
        assert "last" not in run.read_history.collect()
        trained(run, 3)
        assert run.read_history.collect()["last"]["step"] == 2


def test_a_finished_run_reads_nothing_again(tmp_path: Path) -> None:
    with started(job(Read)) as run:
        trained(run)
        run.save(tmp_path / "step")
    made = job(Read)
    with started(made) as run:
        run.load(tmp_path / "step")
    assert made.data.reads == 0
