"""A training from start to end: what is told, what is saved and noted, what an interruption and a resume leave."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch

import echelon
from echelon.errors import CheckpointError, DataError, EchelonError, IncompatibleCheckpointError, JobError
from echelon.events import Event
from echelon.flow.run_folder import RunFolder
from echelon.flow.train_result import TrainResult
from echelon.plan.certificate import Certificate
from echelon.testing.rank_pool import RankPool
from tests.flow.jobs import FILE, STEPS, Endless, last_loss, make, samples
from tests.observer.runs import cluster, forecast, plan


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))


def train(
    folder: Path, job: echelon.Job | str, plan: str = "dp=1", **settings: object
) -> tuple[TrainResult, list[Event]]:
    """Train; what came of it and what was told."""
    events: list[Event] = []
    trained = echelon.train(job, plan, out=folder, quiet=True, listeners=[events.append], **settings)
    return trained, events


def of(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event.kind == kind]


def bests(events: list[Event]) -> list[int]:
    return [event.step for event in of(events, "checkpoint") if event.data["best"]]


def test_the_best_is_a_checkpoint_that_was_evaluated(tmp_path: Path) -> None:
    """Off the beat of `every`, the weights that are saved next are not those that were evaluated."""
    job = make(eval_data=samples(opposite=True))
    _, events = train(tmp_path / "run", job, every=3, keep=1)
    assert [event.step for event in of(events, "evaluation")] == [4, 8, 12]
    assert [event.step for event in of(events, "checkpoint")] == [3, 4, 6, 9, 12]
    assert bests(events) == [4]
    note = json.loads((tmp_path / "run" / "checkpoints" / "best.json").read_text())
    assert (note["checkpoint"], note["loss"]) == (
        "step-00000004",
        of(events, "evaluation")[0].data["metrics"]["loss"],
    )
    assert [path.name for path in RunFolder(tmp_path / "run", keep=1).list_checkpoints()] == [
        "step-00000012",
        "step-00000004",
    ]


def test_each_better_evaluation_is_saved(tmp_path: Path) -> None:
    _, events = train(tmp_path, make(eval_data=samples()), every=100)
    assert bests(events) == [4, 8, 12]


def test_a_resumed_run_remembers_the_best(tmp_path: Path) -> None:
    train(tmp_path, make(eval_data=samples(opposite=True), epochs=1))
    _, events = train(tmp_path, make(eval_data=samples(opposite=True), epochs=2))
    assert bests(events) == []


def test_the_rate_that_is_told_is_the_one_that_was_used(tmp_path: Path) -> None:
    halved = make(lr_schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), epochs=1)
    _, events = train(tmp_path, halved)
    assert [event.data["rate"] for event in of(events, "step")] == [0.05, 0.025, 0.0125, 0.00625]


def test_every_rank_knows_the_last_loss(ranks: RankPool, tmp_path: Path) -> None:
    one, other = ranks.run(2, last_loss, str(tmp_path))
    assert one is not None
    assert one == other


def test_nohup_means_it(tmp_path: Path) -> None:
    def listen(event: Event) -> None:
        if event.kind == "step" and event.step == 1:
            os.kill(os.getpid(), signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        trained = echelon.train(make(), "dp=1", out=tmp_path, quiet=True, listeners=[listen])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert trained.steps == 3 * STEPS


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_batch_system_and_a_closed_terminal_are_a_request_too(tmp_path: Path, number: int) -> None:
    def listen(event: Event) -> None:
        if event.kind == "step" and event.step == 1:
            os.kill(os.getpid(), number)

    trained = echelon.train(make(), "dp=1", out=tmp_path, quiet=True, listeners=[listen])
    assert trained.interrupted
    assert trained.checkpoint == RunFolder(tmp_path, keep=1).list_checkpoints()[0]


@pytest.mark.parametrize("after", range(1, 7))
def test_an_interrupt_loses_neither_step_nor_evaluation(tmp_path: Path, after: int) -> None:
    events: list[Event] = []

    def listen(event: Event) -> None:
        events.append(event)
        if event.kind == "step" and event.step == after:
            os.kill(os.getpid(), signal.SIGINT)

    job = make(eval_data=samples())
    trained = echelon.train(job, "dp=1", out=tmp_path, quiet=True, listeners=[listen])
    (end,) = of(events, "end")
    assert end.data["reason"] == "interrupted"
    assert after < end.step < 3 * STEPS
    assert (trained.interrupted, trained.steps) == (True, end.step)
    assert f"interrupted at step {end.step}" in repr(trained)
    assert [event.step for event in of(events, "step")] == list(range(1, end.step + 1))
    assert [event.step for event in of(events, "evaluation")] == [step for step in (4, 8) if step <= end.step]


def test_a_stream_is_saved_now_and_then(tmp_path: Path) -> None:
    _, events = train(tmp_path, make(data=Endless(), epochs=None, steps=40))
    assert [event.step for event in of(events, "checkpoint")] == list(range(4, 41, 4))


def test_no_document_of_an_earlier_start_stays_behind(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, keep=1)
    folder.write_documents([plan(), forecast(), None])
    assert (tmp_path / "forecast.json").is_file()
    folder.write_documents([plan(), None])
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["plan.json"]


@pytest.mark.slow
def test_the_certificate_is_kept_with_the_run_while_it_covers_it(tmp_path: Path) -> None:
    file, proof, run = tmp_path / "proved.py", tmp_path / "proof.json", tmp_path / "run"
    file.write_text(FILE)
    echelon.verify(str(file), "dp=1", out=proof)
    train(run, str(file), require_certificate=proof)
    kept = run / "certificate.json"
    assert Certificate.load(kept) == Certificate.load(proof)
    train(run, str(file))
    assert kept.is_file()  # nobody required it, but it still holds
    train(run, str(file), plan="dp=1 micro=4")
    assert not kept.exists()


def test_what_a_killed_write_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "checkpoints" / "step-00000002.partial"
    left.mkdir(parents=True)
    (left / "rank-00000.bin").write_bytes(b"x")
    train(tmp_path, make(epochs=1))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


def test_a_checkpoint_of_another_job_is_refused(tmp_path: Path) -> None:
    train(tmp_path, make(epochs=1))
    with pytest.raises(IncompatibleCheckpointError, match="batch=8"):
        train(tmp_path, make(epochs=1, batch_size=4))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rank-00000.bin", "tensors.json", "checkpoint.json"])
def test_a_damaged_checkpoint_is_passed_over_and_written_again(tmp_path: Path, name: str) -> None:
    first, _ = train(tmp_path, make())
    damaged = tmp_path / "checkpoints" / "step-00000012" / name
    damaged.write_bytes(damaged.read_bytes()[:-1])
    again, events = train(tmp_path, make())
    assert f"{name}: " in of(events, "warning")[0].data["message"]
    assert "cut short" in of(events, "warning")[0].data["message"]
    assert of(events, "start")[0].data["resumed_from"] == 8
    assert (again.steps, again.loss) == (first.steps, first.loss)
    _, events = train(tmp_path, make())
    assert of(events, "start")[0].data["resumed_from"] == 12


def test_why_no_checkpoint_can_be_read_is_told(tmp_path: Path) -> None:
    train(tmp_path, make())
    for file in (tmp_path / "checkpoints").glob("*/*.bin"):
        file.write_bytes(b"x")
    with pytest.raises(CheckpointError, match="none of 3 checkpoints can be read") as caught:
        train(tmp_path, make())
    assert str(caught.value).count("cut short") == 3
    assert caught.value.exit_code == 2


def files(folder: Path) -> dict[str, bytes]:
    """Everything in a run's folder but the lock, which says who looked at it last."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"]
    return {str(path): path.read_bytes() for path in found}


@pytest.mark.parametrize(
    ("changed", "error"), [({"batch_size": 4, "epochs": 9}, IncompatibleCheckpointError), ({"epochs": 2}, JobError)]
)
def test_a_refused_run_alters_nothing(tmp_path: Path, changed: dict[str, int], error: type[EchelonError]) -> None:
    train(tmp_path, make())
    before = files(tmp_path)
    with pytest.raises(error):
        train(tmp_path, make(**changed), plan="dp=1 micro=2")
    assert files(tmp_path) == before


def test_a_job_that_ends_before_its_checkpoint_is_refused(tmp_path: Path) -> None:
    train(tmp_path, make())
    with pytest.raises(JobError, match=r"step-00000012: step 12, but the job now ends at step 8.*--fresh"):
        train(tmp_path, make(epochs=2))


def test_a_finished_run_says_so_and_what_it_came_to(tmp_path: Path) -> None:
    job = make(eval_data=samples())
    first, _ = train(tmp_path, job)
    again, events = train(tmp_path, job)
    assert (again.steps, again.loss, again.metrics) == (first.steps, first.loss, first.metrics)
    assert "already finished at step 12; --fresh" in of(events, "end")[0].data["message"]
    assert not of(events, "memory")


def fails(*_: object) -> float:
    raise ValueError("a metric that was never tried")


@pytest.mark.parametrize("every", [None, 3])
def test_an_evaluation_that_fails_costs_nothing_of_what_was_trained(tmp_path: Path, every: int | None) -> None:
    events: list[Event] = []
    job = make(eval_data=samples(), metrics={"bad": fails})
    with pytest.raises(ValueError, match="never tried"):
        echelon.train(job, "dp=1", out=tmp_path, quiet=True, every=every, listeners=[events.append])
    assert of(events, "checkpoint")[-1].step == STEPS
    _, events = train(tmp_path, make(eval_data=samples()))
    assert of(events, "start")[0].data["resumed_from"] == STEPS


def test_a_later_evaluation_that_fails_is_saved_before(tmp_path: Path) -> None:
    evaluated: list[Event] = []

    def late(*_: object) -> float:
        return fails() if evaluated else 1.0

    def listen(event: Event) -> None:
        evaluated.extend([event] if event.kind == "evaluation" else [])

    job = make(eval_data=samples(), metrics={"late": late})
    with pytest.raises(ValueError, match="never tried"):
        echelon.train(job, "dp=1", out=tmp_path, quiet=True, every=100, listeners=[listen])
    assert RunFolder(tmp_path, keep=9).list_checkpoints()[0].name == "step-00000008"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"eval_data": []}, "eval_data="),
        ({"eval_data": samples(), "metrics": {"accuracy": 0.5}}, "metrics"),
        ({"eval_data": samples(), "metrics": [fails]}, "metrics"),
    ],
)
def test_an_evaluation_that_can_only_fail_is_refused_at_the_start(
    tmp_path: Path, fields: dict[str, object], words: str
) -> None:
    with pytest.raises(JobError, match=words) as caught:
        train(tmp_path / "run", make(**fields))
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()


class Broken:
    """A data set with a sample that cannot be read."""

    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if number == 17:
            raise OSError("a torn image")
        return torch.ones(8), torch.ones(1)


def test_what_fails_in_the_middle_is_no_wrong_use(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a torn image") as caught:
        train(tmp_path, make(data=Broken()))
    assert caught.value.exit_code == 1


def test_a_file_that_is_not_python_and_a_certificate_that_is_not_there_are_wrong_use(tmp_path: Path) -> None:
    (tmp_path / "torn.py").write_text("def job(:\n")
    with pytest.raises(JobError, match=r"torn\.py, line 1"):
        train(tmp_path / "run", str(tmp_path / "torn.py"))
    with pytest.raises(JobError, match="no such certificate"):
        train(tmp_path / "run", make(), require_certificate=tmp_path / "none.json")


def test_two_trainings_do_not_share_a_folder(tmp_path: Path) -> None:
    refused: list[str] = []

    def listen(event: Event) -> None:
        if event.kind == "step" and event.step == 1:
            with pytest.raises(EchelonError) as caught:
                train(tmp_path, make())
            refused.append(str(caught.value))

    echelon.train(make(), "dp=1", out=tmp_path, quiet=True, listeners=[listen])
    assert f"another training uses this folder (process {os.getpid()} on {socket.gethostname()})" in refused[0]
    train(tmp_path, make())  # once it has ended the folder is free


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_planned(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EchelonError, match=r"the run's folder cannot be written \(.*file is a file\).*--out") as caught:
        echelon.train("absent.py", "auto", out=tmp_path / "file" / "run")
    assert caught.value.exit_code == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(EchelonError, match="the run's folder cannot be written"):
        train(tmp_path / "run", make())


def test_what_is_unchanged_is_not_written_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, keep=1)
    folder.write_documents([plan(), cluster()])
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    folder.write_documents([plan(), cluster()])
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")} == before


@pytest.mark.parametrize("call", ["train(job, 'dp=1')", "parallelize(job, 'dp=1')", "verify(job, 'dp=1')"])
def test_a_job_file_without_a_guard_is_told(tmp_path: Path, call: str) -> None:
    file = tmp_path / "unguarded.py"
    file.write_text(f"{FILE}\nechelon.{call}\n")
    words = r"called while .*unguarded\.py is read.*put it under if __name__ == '__main__':"
    with pytest.raises(JobError, match=words):
        train(tmp_path / "run", str(file))
    train(tmp_path / "run", make(epochs=1))  # and only while it is read


def test_an_edited_job_file_goes_on_and_is_told(tmp_path: Path) -> None:
    file, run = tmp_path / "edited.py", tmp_path / "run"
    file.write_text(FILE)
    _, events = train(run, f"{file}:tiny")
    assert not of(events, "warning")
    _, events = train(run, f"{file}:tiny")
    assert not of(events, "warning")
    file.write_text(FILE.replace("epochs=1", "epochs=2"))
    _, events = train(run, f"{file}:tiny")
    (warning,) = of(events, "warning")
    assert "was trained by another version of the job file" in warning.data["message"]
    assert of(events, "end")[0].step == 2 * STEPS


def test_an_edited_module_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, module, run = tmp_path / "importing.py", tmp_path / "length_of_importing.py", tmp_path / "run"
    file.write_text("from length_of_importing import EPOCHS\n" + FILE.replace("epochs=1", "epochs=EPOCHS"))
    monkeypatch.syspath_prepend(tmp_path)
    for epochs in ("1", "1 + 1"):
        monkeypatch.delitem(sys.modules, "length_of_importing", raising=False)
        module.write_text(f"EPOCHS = {epochs}\n")
        _, events = train(run, f"{file}:tiny")
    (warning,) = of(events, "warning")
    assert "was trained by another version of modules that the job file imports" in warning.data["message"]
    assert of(events, "end")[0].step == 2 * STEPS


def test_jobs_without_a_name_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nameless.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    for spec in ("nameless.py", "nameless.py:tiny"):
        echelon.train(spec, "dp=1", quiet=True)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["nameless", "nameless-tiny"]
    manifest = tmp_path / "runs" / "nameless-tiny" / "checkpoints" / "step-00000004" / "checkpoint.json"
    assert json.loads(manifest.read_text())["job"] == "nameless-tiny"


def test_parallelize_takes_what_it_knows() -> None:
    with pytest.raises(TypeError, match="wokers"):
        echelon.parallelize(make(), "dp=1", wokers=2)  # type: ignore[call-arg]


def test_a_last_evaluation_that_failed_is_made_up_for(tmp_path: Path) -> None:
    broken = tmp_path / "broken"  # a file: what a metric keeps would be restored

    def metric(output: torch.Tensor, batch: object) -> torch.Tensor:
        return fails() if broken.exists() else output.mean()  # type: ignore[return-value]

    def listen(event: Event) -> None:
        if event.kind == "step" and event.step == 3 * STEPS:
            broken.touch()

    job = make(eval_data=samples(), metrics={"mean": metric})
    with pytest.raises(ValueError, match="never tried"):
        echelon.train(job, "dp=1", out=tmp_path / "one", quiet=True, listeners=[listen])
    broken.unlink()
    again, events = train(tmp_path / "one", job)
    wanted, _ = train(tmp_path / "other", job)
    assert (again.steps, again.metrics) == (wanted.steps, wanted.metrics)
    assert [event.step for event in of(events, "evaluation")] == [12]
    best = RunFolder(tmp_path / "one", keep=3).best_checkpoint()
    assert best is not None
    assert best[0].name == "step-00000012"
    _, events = train(tmp_path / "one", job)
    assert not of(events, "evaluation")


def test_the_best_on_another_evaluation_set_does_not_count(tmp_path: Path) -> None:
    train(tmp_path, make(eval_data=samples(), epochs=1))
    _, events = train(tmp_path, make(eval_data=samples(opposite=True), epochs=2))
    assert "the evaluation data, the loss or the collation changed" in str(
        [event.data for event in of(events, "warning")]
    )
    assert bests(events) == [8]


@pytest.mark.slow
@pytest.mark.parametrize(
    "edit", [{"loss": float("nan")}, {"manifest": "0"}, {"checkpoint": "step-00000001"}, {"judge": None}]
)
def test_an_edited_note_of_the_best_is_dropped(tmp_path: Path, edit: dict[str, object]) -> None:
    train(tmp_path, make(eval_data=samples(opposite=True), epochs=1))
    path = tmp_path / "checkpoints" / "best.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | edit))
    _, events = train(tmp_path, make(eval_data=samples(opposite=True), epochs=2))
    assert "no longer the best" in str([event.data for event in of(events, "warning")])
    assert bests(events) == [8]


def test_the_best_of_steps_that_are_done_again_is_dropped(tmp_path: Path) -> None:
    job = make(eval_data=samples(), epochs=2)
    train(tmp_path, job)
    (tmp_path / "checkpoints" / "step-00000008" / "rank-00000.bin").write_bytes(b"x")
    _, events = train(tmp_path, job)
    assert "damaged" in str([event.data for event in of(events, "warning")])
    assert bests(events) == [8]


def test_a_linked_checkpoint_is_none_and_its_run_stays_whole(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    train(one, make(epochs=1))
    before = files(one)
    (other / "checkpoints").mkdir(parents=True)
    (other / "checkpoints" / "step-00000004").symlink_to(one / "checkpoints" / "step-00000004")
    _, events = train(other, make())
    assert of(events, "start")[0].data["resumed_from"] == 0
    assert "step-00000004: a symbolic link" in of(events, "warning")[0].data["message"]
    assert files(one) == before
    assert not (other / "checkpoints" / "step-00000004").is_symlink()


def test_checkpoints_may_lie_on_another_disk(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    train(tmp_path / "run", make(epochs=1))
    _, events = train(tmp_path / "run", make(epochs=2))
    assert of(events, "start")[0].data["resumed_from"] == STEPS


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("step-00000004.partial", False),
        ("step-00000004", False),
        ("step-00000004/checkpoint.json", True),
        ("best.json", True),
    ],
)
def test_files_in_the_place_of_checkpoints_do_not_end_a_run(tmp_path: Path, name: str, folder: bool) -> None:
    path = tmp_path / "checkpoints" / name
    path.parent.mkdir(parents=True)
    path.mkdir() if folder else path.write_text("x")
    trained, _ = train(tmp_path, make(eval_data=samples()))
    assert trained.steps == 12
    assert [each.name for each in RunFolder(tmp_path, keep=3).list_checkpoints()][-1] == "step-00000004"
