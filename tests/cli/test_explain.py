"""A plan in words, without a job."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echelon.cli.app import app
from echelon.plan.text import from_text
from tests.plan.test_check import machine

JOB = str(Path(__file__).with_name("job.py"))


@pytest.fixture(autouse=True)
def _unmeasured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))


def explain(*arguments: str) -> tuple[int, str]:
    answer = CliRunner().invoke(app, ["explain", *arguments])
    return answer.exit_code, answer.output


def test_a_plan_in_words() -> None:
    code, text = explain("dp=2 zero=3 micro=8")
    assert code == 0
    assert "2 ranks" in text
    assert "parameters, gradients and optimizer state are sharded" in text


def test_a_plan_file_is_read_like_its_short_form(tmp_path: Path) -> None:
    from_text("dp=2 zero=3 micro=8").save(tmp_path / "plan.json")
    assert explain(str(tmp_path / "plan.json")) == explain("dp=2 zero=3 micro=8")


def test_why_not_names_the_difference_and_the_rule() -> None:
    _, text = explain("dp=2", "--why-not", "dp=2 cp=2")
    assert "cp: 1 -> 2" in text
    assert "the context axis is not executed yet; use dp instead of cp" in text
    assert "it is the same plan" in explain("dp=2", "--why-not", "dp=2")[1]


def test_json_holds_the_same_answer() -> None:
    answer = json.loads(explain("dp=2", "--why-not", "dp=2 zero=1", "--json")[1])
    assert answer["plan"] == "dp=2"
    assert answer["other"]["differs"] == ["zero: 0 -> 1"]


def test_a_plan_that_is_none_is_wrong_use() -> None:
    code, text = explain("dp=2 zer=1")
    assert code == 2
    assert "did you mean zero?" in text
    assert explain("auto")[0] == 2


def test_a_plan_that_the_job_cannot_have_is_wrong_use(tmp_path: Path) -> None:
    machine("cpu", 4).save(tmp_path / "cluster.json")
    code, text = explain("dp=17", "--job", JOB, "--cluster", str(tmp_path / "cluster.json"))
    assert code == 2
    assert "dp=17: a batch of 16 leaves some rank without a sample; use dp=16 or less" in text


def test_more_ranks_than_a_machine_bears_are_remarked(tmp_path: Path) -> None:
    assert "dp=100000: the plan needs 100000 devices and this machine has" in explain("dp=100000")[1]
    machine("cuda", 2).save(tmp_path / "cluster.json")
    assert "there are 2; use dp=2 or less" in explain("dp=4", "--cluster", str(tmp_path / "cluster.json"))[1]
    assert "devices" not in explain("dp=2")[1]


def test_with_a_job_the_cuts_are_told_module_by_module(tmp_path: Path) -> None:
    machine("cpu", 4).save(tmp_path / "cluster.json")
    code, text = explain("tp=2", "--job", JOB, "--cluster", str(tmp_path / "cluster.json"))
    assert code == 0, text
    assert "how modules are cut: 99% of the parameters' bytes" in text
    assert "  0: column (pair)\n  2: row (pair)" in text
    code, text = explain("pp=2 micro=4", "--job", JOB, "--cluster", str(tmp_path / "cluster.json"), "--json")
    stages = json.loads(text)["stages"]
    assert [stage["units"] for stage in stages] == [["0"], ["2"]]
    assert sum(stage["share"] for stage in stages) == pytest.approx(1)


@pytest.mark.slow
def test_the_documented_sample_is_what_is_printed(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs" / "axes.md").read_text()
    command, sample = re.search(r"    echelon explain ([^\n]+)\n.*?```\n(.+?)```", page, re.DOTALL).groups()  # type: ignore[union-attr]
    plan, option, job = shlex.split(command)
    machine("cpu", 4).save(tmp_path / "cluster.json")
    code, text = explain(plan, option, str(root / job), "--cluster", str(tmp_path / "cluster.json"))
    assert code == 0, text
    assert text.endswith(f"\n{sample}")


def test_more_stages_than_units_is_wrong_use(tmp_path: Path) -> None:
    machine("cpu", 4).save(tmp_path / "cluster.json")
    code, text = explain("pp=3", "--job", JOB, "--cluster", str(tmp_path / "cluster.json"))
    assert code == 2
    assert "pp=3: 3 stages, and the model has 2 units" in text
    assert "use pp=2 or less, or dp=3 zero=3" in text
