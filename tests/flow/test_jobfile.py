"""How a job is found in its file, and what is told of files that are none."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from echelon.errors import JobError
from echelon.flow.job_file import file_being_read, load_job, make_job

ROOT = Path(__file__).parents[2]
FILE = "import torch\nimport echelon\ndef job():\n    return echelon.Job(model=torch.nn.Identity, optimizer=print, data=[], batch_size=1, steps={steps})\n"


def written(path: Path, text: str = FILE.format(steps=1)) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


@pytest.fixture(autouse=True)
def _tidy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize("name", ["random", "math", "json"])
def test_a_job_file_may_not_replace_a_module_of_python(tmp_path: Path, name: str) -> None:
    before = sys.modules.get(name)
    with pytest.raises(JobError, match=f"`{name}` is a module of Python's own.*rename the file"):
        load_job(written(tmp_path / f"{name}.py"))
    assert sys.modules.get(name) is before
    assert random.random() >= 0


def test_a_job_file_may_not_replace_a_loaded_module(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="`pytest` is the name of a module that is loaded already"):
        load_job(written(tmp_path / "pytest.py"))
    assert sys.modules["pytest"] is pytest


def test_job_files_of_one_name_may_follow_each_other(tmp_path: Path) -> None:
    for steps in (1, 2):
        spec = written(tmp_path / str(steps) / "echelon_test_job.py", FILE.format(steps=steps))
        assert load_job(spec).steps == steps
        assert load_job(spec).steps == steps


def test_a_job_file_that_fails_leaves_no_half_module(tmp_path: Path) -> None:
    broken = written(tmp_path / "broken" / "echelon_half_job.py", "first = 1\nraise RuntimeError('second')\n")
    with pytest.raises(RuntimeError, match="second"):
        load_job(broken)
    assert "echelon_half_job" not in sys.modules
    load_job(written(tmp_path / "whole" / "echelon_half_job.py"))
    whole = sys.modules["echelon_half_job"]
    with pytest.raises(RuntimeError, match="second"):
        load_job(broken)
    assert sys.modules["echelon_half_job"] is whole


def test_a_job_needs_no_name(tmp_path: Path) -> None:
    assert load_job(written(tmp_path / "echelon_nameless.py")).name is None


# A job file that does more, or less, than describe a job


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "import sys\nsys.exit(0)\n",
            r"line 2 ended Python \(sys\.exit\(0\)\) while it was read; put that under if __name__",
        ),
        ("import sys\n\nsys.exit()\n", r"line 3 ended Python \(sys\.exit\(\)\) while it was read"),
        (
            "import argparse\nargparse.ArgumentParser().parse_args(['--nope'])\n",
            r"line 2 ended Python \(sys\.exit\(2\)\) while it was read",
        ),
        (
            "def job():\n    raise SystemExit('done')\n",
            r"line 2 ended Python \(sys\.exit\('done'\)\) while .*:job was called",
        ),
    ],
)
def test_a_job_file_that_ends_python_is_no_success(tmp_path: Path, text: str, words: str) -> None:
    spec = written(tmp_path / "echelon_ending_job.py", text)
    with pytest.raises(JobError, match=f"{spec} {words}"):
        load_job(spec)
    assert file_being_read() is None


RANDOM = """
import random
import numpy
import torch
import echelon

def drawn():
    return [random.random(), numpy.random.rand(), torch.rand(()).item()]

early = drawn()

def job():
    data = [*early, *drawn()]
    return echelon.Job(model=torch.nn.Identity, optimizer=print, data=data, batch_size=1, steps=1)
"""


def test_random_data_of_a_job_is_the_same_in_every_process(tmp_path: Path) -> None:
    spec = written(tmp_path / "echelon_random_job.py", RANDOM)
    found = []
    for other in (1, 2):
        torch.manual_seed(other), random.seed(other), numpy.random.seed(other)
        made = load_job(spec)
        torch.manual_seed(other), random.seed(other), numpy.random.seed(other)
        found.append([*made.data, *make_job(sys.modules["echelon_random_job"].job).data[3:]])
    assert found[0] == found[1]
    torch.manual_seed(made.seed)
    assert torch.rand(()).item() not in made.data  # the model's first weight is not a sample


def test_a_job_file_that_is_read_can_be_told(tmp_path: Path) -> None:
    text = FILE.format(steps=1) + "from echelon.flow.job_file import file_being_read\nseen = file_being_read()\n"
    spec = written(tmp_path / "echelon_reading_job.py", text)
    load_job(spec)
    assert sys.modules["echelon_reading_job"].seen == Path(spec).resolve()
    assert file_being_read() is None


def test_a_job_function_that_needs_arguments_is_told(tmp_path: Path) -> None:
    spec = written(tmp_path / "echelon_arguments_job.py", "\ndef job(size):\n    return size\n")
    with pytest.raises(JobError, match=r"takes \(size\) \(.*echelon_arguments_job.py line 2\): .* without arguments"):
        load_job(spec)


def test_a_job_file_may_not_replace_an_installed_module(tmp_path: Path) -> None:
    """In a process that has not loaded it yet."""
    written(tmp_path / "jobs" / "torch.py", "import torch\n")
    code = "from echelon.flow.job_file import load_job; load_job('jobs/torch.py')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "`torch` is the name of an installed module" in done.stderr
    assert "rename the file" in done.stderr


SEVERAL = """
import torch
import echelon

def make(steps):
    return echelon.Job(model=torch.nn.Identity, optimizer=print, data=[1], batch_size=1, steps=steps)

def small():
    return make(1)

def plain():
    return echelon.Job(model=torch.nn.Identity, optimizer=print, data=[1], batch_size=1, steps=1)

def helper():
    return 3

def main():
    echelon.train(plain)

ready = make(2)
"""


def test_the_jobs_that_are_there_are_listed(tmp_path: Path) -> None:
    spec = written(tmp_path / "echelon_several_jobs.py", SEVERAL)
    with pytest.raises(JobError) as told:
        load_job(f"{spec}:nope")
    assert str(told.value).endswith(f"; it has {spec}:small, {spec}:plain, {spec}:ready")
    assert load_job(f"{spec}:small").steps == 1
    assert load_job(f"{spec}:ready").steps == 2


def test_what_is_no_job_file_is_named(tmp_path: Path) -> None:
    spec = written(tmp_path / "echelon_colon_job.py")
    with pytest.raises(JobError, match=f"names no function after the colon: give {spec}, or {spec}:name"):
        load_job(f"{spec}:")
    with pytest.raises(JobError, match=f"{tmp_path} is a folder: give a job file"):
        load_job(str(tmp_path))
