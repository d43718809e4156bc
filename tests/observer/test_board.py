"""TensorBoard reads back what the run told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from echelon.events import Event
from echelon.observer import tensorboard
from echelon.observer.tensorboard import TensorBoardWriter

from .runs import step, training


@pytest.fixture(autouse=True)
def every_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "_INTERVAL", 0.0)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return {tag: [(p.step, p.value) for p in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def write(folder: Path, *events: Event) -> None:
    listener = TensorBoardWriter(folder)
    for event in events:
        listener(event)
    listener.close()


def test_every_scalar_is_read_back(tmp_path: Path) -> None:
    events = list(training(last=100, total=100))
    write(tmp_path, *events)
    read = scalars(tmp_path)
    steps = [event for event in events if event.kind == "step"]
    assert set(read) == {
        "train/loss", "train/learning_rate", "train/gradient_norm", "train/samples_per_second", "evaluation/loss", "evaluation/accuracy",
    }  # fmt: skip
    assert dict(read["train/loss"]) == pytest.approx({e.step: e.data["loss"] for e in steps})
    assert dict(read["train/learning_rate"]) == pytest.approx({e.step: e.data["rate"] for e in steps})
    assert read["train/samples_per_second"][5][1] == pytest.approx(256 / steps[5].data["seconds"])
    assert [number for number, _ in read["evaluation/accuracy"]] == [50, 100]


def test_points_of_steps_run_again_are_purged(tmp_path: Path) -> None:
    write(tmp_path, *(step(number, loss=1.0) for number in range(1, 41)))
    write(tmp_path, *(step(number, loss=2.0) for number in range(31, 51)))
    losses = scalars(tmp_path)["train/loss"]
    assert losses == [(number, 1.0 if number <= 30 else 2.0) for number in range(1, 51)]


def test_a_step_without_a_norm_and_a_loss_that_is_no_number(tmp_path: Path) -> None:
    write(tmp_path, step(1, norm=None, loss=None), step(2, norm=None))
    read = scalars(tmp_path)
    assert "train/gradient_norm" not in read
    assert str(read["train/loss"][0][1]) == "nan"


def test_points_are_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "_INTERVAL", 3600.0)
    write(tmp_path, *training(last=100, total=100))
    # The first, what was newest at each evaluation, and the last of all.
    assert [number for number, _ in scalars(tmp_path)["train/loss"]] == [1, 50, 100]


def test_a_curve_ends_where_the_training_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "_INTERVAL", 3600.0)
    write(tmp_path, *training(last=30, total=30))
    assert scalars(tmp_path)["train/loss"][-1] == (30, pytest.approx(step(30).data["loss"]))


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    """A file that may not grow refuses as a full disk does; the writer's own thread meets that, not us."""
    code = (
        "import resource, sys\n"
        "from echelon.observer.tensorboard import TensorBoardWriter\n"
        "from tests.observer.runs import step, training\n"
        "board = TensorBoardWriter(sys.argv[1])\n"
        "board(step(1))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (150, 150))\n"
        "for event in training(first=2, last=9, total=9): board(event)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("TensorBoard scalars of this run are incomplete") == 1


def test_a_folder_that_refuses_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    write(tmp_path, *training(last=3, total=3))
    assert capsys.readouterr().err.count("TensorBoard scalars of this run are incomplete") == 1


def test_nothing_is_imported_before_the_first_point() -> None:
    code = "import sys, echelon.observer as o; o.observers('x', world=__import__('echelon.world').world.World()); print(sorted({'torch', 'tensorboard', 'matplotlib', 'numpy'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
