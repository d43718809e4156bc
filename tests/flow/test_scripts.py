"""A script that keeps its own loop, proves its plan or fails: started by plain `python`, it becomes its ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.observer import read_events

JOB = """
import json, sys, torch, echelon
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))

def job():
    return echelon.Job(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        loss=lambda output, batch: F.cross_entropy(output, batch[-1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=TensorDataset(numbers(40, 8), torch.arange(40) % 4),
        batch_size=16,
        epochs=2,
    )
"""
LOOP = """
with echelon.parallelize(job, PLAN) as run:
    losses = [float(run.step(batch).loss) for batch in run.batches()]
    if run.world.is_main:
        open("losses.json", "w").write(json.dumps(losses))
"""


def script(
    folder: Path, text: str, *command: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run JOB and `text` by plain `python script.py`, or by `command`."""
    (folder / "script.py").write_text(JOB + text)
    values = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    values |= {"ECHELON_CACHE": str(folder / "cache"), "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *(command or ("script.py",))],
        cwd=folder, env=values | (environment or {}), capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
def test_an_own_loop_has_the_same_losses_on_any_number_of_ranks(tmp_path: Path) -> None:
    losses = []
    for plan in ("dp=1", "dp=2 zero=1"):
        done = script(tmp_path, LOOP.replace("PLAN", repr(plan)))
        assert done.returncode == 0, done.stderr
        losses.append(json.loads((tmp_path / "losses.json").read_text()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(losses[0]) == 6


@pytest.mark.slow
def test_a_script_proves_its_plan(tmp_path: Path) -> None:
    done = script(tmp_path, "print(echelon.verify(job, 'dp=2', out='certificate.json').verified)")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"
    assert json.loads((tmp_path / "certificate.json").read_text())["verified"] is True


@pytest.mark.slow
def test_an_error_of_the_ranks_is_one_message(tmp_path: Path) -> None:
    changed = "echelon.Job(**{name: getattr(job(), name) for name in echelon.Job.__slots__} | {'lr_schedule': lambda optimizer, steps: 'none'})"
    done = script(tmp_path, f"echelon.train({changed}, 'dp=2')")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [done.stderr.strip()], done.stderr
    assert "lr_schedule= returns str" in done.stderr


@pytest.mark.slow
def test_a_plan_for_other_ranks_than_were_started(tmp_path: Path) -> None:
    done = script(tmp_path, "echelon.train(job, 'dp=2')", environment={"RANK": "0", "WORLD_SIZE": "1"})
    assert done.returncode != 0
    assert 'the plan "dp=2" needs 2 ranks, but 1 were started' in done.stderr


@pytest.mark.slow
def test_the_users_setting_is_not_taken_for_a_launchers_plan(tmp_path: Path) -> None:
    text = "print(echelon.train(job, 'dp=1', quiet=True).steps)"
    started = {"RANK": "0", "WORLD_SIZE": "1", "ECHELON_PLAN": "dp=2"}  # as torchrun starts a rank
    done = script(tmp_path, text, environment=started)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "6"


@pytest.mark.slow
def test_each_training_of_a_script_runs_once_under_its_own_plan(tmp_path: Path) -> None:
    """Those before ranks start are done when the ranks, which run the script from its beginning, come to them."""
    text = """
for folder, plan in (("a", "dp=1"), ("b", "bad=1"), ("c", "dp=2"), ("d", "dp=2 zero=1")):
    try:
        trained = echelon.train(job, plan, out=folder, resume=False)
        print(folder, trained.folder, trained.loss, flush=True)
    except echelon.EchelonError as error:
        print(folder, error, flush=True)
"""
    done = script(tmp_path, text, environment={"ECHELON_QUIET": "1"})
    assert done.returncode == 0, done.stderr
    found = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert "b plan 'bad=1'" in done.stdout
    assert "b this call failed before the script started its ranks: plan 'bad=1'" in done.stdout  # in the ranks
    assert [found[name][0] for name in "acd"] == ["a", "c", "d"]
    assert len({f"{float(found[name][1]):.5f}" for name in "acd"}) == 1
    plans = {}
    for name in "acd":
        (run,) = [log.parent for log in (tmp_path / name).rglob("events.jsonl")]
        plans[name] = [event.data["plan"] for event in read_events(run) if event.kind == "start"]
    assert plans == {"a": ["dp=1"], "c": ["dp=2"], "d": ["dp=2 zero=1"]}


@pytest.mark.slow
def test_ranks_return_their_result_and_train_the_module_that_was_given(tmp_path: Path) -> None:
    """The script continues once, in the process that the user started, as after a training in one process."""
    text = """
def trained(plan):
    model = nn.Linear(8, 4)
    with torch.no_grad():
        model.weight.zero_(), model.bias.zero_()
    described = echelon.Job(**{name: getattr(job(), name) for name in echelon.Job.__slots__} | {"model": model})
    results = [echelon.train(described, plan, out=f"{plan}-{launch}", quiet=True, verify=False) for launch in (1, 2)]
    return [results[0].steps, results[0].loss, results[1].loss, model.weight.abs().sum().item()], results[1]

if __name__ == "__main__":
    values, result = trained("dp=2")
    assert (str(result.plan), result.certificate, result.interrupted) == ("dp=2", None, False)
    assert str(result.checkpoint) == "dp=2-2/checkpoints/step-00000006" and result.checkpoint.is_dir()
    print(json.dumps(values))
"""
    done = script(tmp_path, text)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    reference = script(tmp_path, text.replace('"dp=2"', '"dp=1"').replace('"dp=2-2', '"dp=1-2'))
    assert reference.returncode == 0, reference.stderr
    assert json.loads(line) == pytest.approx(json.loads(reference.stdout), rel=1e-4)


@pytest.mark.slow
def test_a_loop_before_ranks_start_is_not_repeated(tmp_path: Path) -> None:
    done = script(tmp_path, LOOP.replace("PLAN", "'dp=1'") + "echelon.train(job, 'dp=2')")
    assert done.returncode == 2
    assert "has already called parallelize() for one process" in done.stderr
    assert (tmp_path / "losses.json").is_file()


@pytest.mark.slow
def test_a_script_is_profiled_for_what_it_passes(tmp_path: Path) -> None:
    """Its model may follow from a loop or from its arguments, of which the file's text knows nothing."""
    text = """
from dataclasses import replace
from echelon.flow.job_source import JobSource
for width in (3, 5):
    print(JobSource(replace(job(), model=lambda: nn.Linear(8, width))).profile().elements)
"""
    done = script(tmp_path, text)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["27", "45"]


@pytest.mark.slow
def test_an_error_of_ours_is_one_line_on_one_rank_too(tmp_path: Path) -> None:
    done = script(tmp_path, "echelon.train(job, 'dp=1', keep=0)")
    assert done.returncode == 2
    assert done.stderr == "error: keep=0: expected an integer of at least 1\n"


@pytest.mark.slow
def test_a_script_takes_its_settings_from_the_environment_and_the_file(tmp_path: Path) -> None:
    text = "print(echelon.train(job, quiet=True).folder)"
    (tmp_path / "echelon.toml").write_text('[train]\nplan = "dp=1 micro=4"\nout = "filed"\n')
    done = script(tmp_path, text, environment={"ECHELON_OUT": "told"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "told"
    assert json.loads((tmp_path / "told" / "plan.json").read_text())["micro"] == 4


FAIL = """
import os
if os.environ.get("RANK") == "1":
    raise KeyError("lost on the way")
"""


@pytest.mark.slow
def test_an_error_of_the_script_itself_shows_its_traceback_once(tmp_path: Path) -> None:
    done = script(tmp_path, f"with echelon.parallelize(job, 'dp=2'):{FAIL.replace(chr(10), chr(10) + '    ')}")
    assert done.returncode == 1
    assert "rank 1 failed" in done.stderr
    assert done.stderr.count("KeyError: 'lost on the way'") == 1
    assert done.stderr.count("Traceback") == 1


@pytest.mark.slow
def test_a_module_that_is_run_as_a_script_fails_in_one_message(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    text = JOB + "echelon.train(job(), 'dp=2 keep')"  # `keep` without zero: a plan that is wrong in itself
    (tmp_path / "package" / "training.py").write_text(text)
    done = script(
        tmp_path, "", "-m", "package.training", environment={"PYTHONPATH": f"{Path.cwd()}{os.pathsep}{tmp_path}"}
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
