"""The verbs that need a machine: doctor, plan, simulate, verify, train, report, in the order in which a user meets them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from echelon.cli.app import app
from echelon.plan.certificate import Certificate
from echelon.plan.plan import Plan
from tests.machine import environment
from tests.sampling import WHOLE, only_whole

JOB = str(Path(__file__).with_name("job.py"))


class Shell:
    """Runs `echelon` in a folder of its own."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self._environment = environment(cache)

    def __call__(self, *arguments: str, code: int = 0) -> Result:
        """Run it in this process, which has torch loaded already, and expect an exit code."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.folder)
            for name, value in self._environment.items():
                patch.setenv(name, value)
            done = CliRunner().invoke(app, arguments, prog_name="echelon")
        assert done.exit_code == code, done.output
        assert "Traceback" not in done.stderr
        return done

    def started(
        self, *arguments: str, code: int = 0, traceback: bool = False, by: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run it as a command, `by` a launcher where one is given."""
        done = subprocess.run(
            [sys.executable, *by, "-m", "echelon", *arguments],
            cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        assert traceback or "Traceback" not in done.stderr
        return done

    def json(self, *arguments: str, code: int = 0) -> Any:
        """The answer for machines."""
        return json.loads(self(*arguments, "--json", code=code).stdout)


@pytest.fixture(scope="module")
def echelon(tmp_path_factory: pytest.TempPathFactory, known_machine: Path) -> Shell:
    shell = Shell(tmp_path_factory.mktemp("shell"), known_machine)
    shell("doctor", "-o", "cluster.json")
    return shell


@pytest.mark.slow
def test_doctor_knows_the_machine_once_it_is_measured(echelon: Shell) -> None:
    answer = echelon.json("doctor")
    assert answer["cluster"]["nodes"][0]["cores"] >= 1
    assert set(answer["versions"]) >= {"python", "torch", "echelon"}
    assert any("cp and ep" in problem for problem in answer["will_not_work"])
    assert "versions:" in echelon("doctor").stdout


@pytest.mark.slow
def test_plan_writes_the_best_one(echelon: Shell) -> None:
    answer = echelon.json("plan", JOB, "-o", "plan.json", "--top", "3")
    assert str(Plan.load(echelon.folder / "plan.json")) == answer["plan"]
    assert 1 <= len(answer["candidates"]) <= 3
    assert all(each["fits"] for each in answer["candidates"][:1])
    text = echelon.started("plan", JOB, "--cluster", "cluster.json").stdout
    assert answer["plan"] in text
    assert "memory per rank:" in text  # why it is the best
    assert answer["why"][0].startswith(f'"{answer["plan"]}": ')


def test_what_is_known_is_not_made_again(echelon: Shell) -> None:
    echelon("plan", JOB)
    kept = [
        entry
        for entry in echelon.json("cache", "show")["entries"]
        if entry["key"] == f"{JOB}:job" or entry["kind"] == "cluster"
    ]
    assert {entry["kind"] for entry in kept} == {"profile", "cluster"}
    assert all(entry["good"] for entry in kept)
    before = {entry["path"]: Path(entry["path"]).stat().st_mtime_ns for entry in kept}
    echelon("plan", JOB)
    assert {path: Path(path).stat().st_mtime_ns for path in before} == before


def test_simulate_is_what_plan_said(echelon: Shell) -> None:
    best = echelon.json("plan", JOB, "--cluster", "cluster.json")["candidates"][0]
    answer = echelon.json("simulate", JOB, "--plan", best["plan"], "--cluster", "cluster.json")
    assert answer["forecast"]["time"] == best["forecast"]["time"]
    assert "samples/s" in echelon("simulate", JOB, "--plan", "dp=1").stdout


def test_simulate_says_no_to_what_does_not_fit(echelon: Shell) -> None:
    cluster = json.loads((echelon.folder / "cluster.json").read_text())
    del cluster["hash"]
    for node in cluster["nodes"]:
        node["memory"] = 1000
        for device in node["devices"]:
            device["memory"] = 1000
    (echelon.folder / "tiny.json").write_text(json.dumps(cluster))
    assert "DOES NOT FIT" in echelon("simulate", JOB, "--plan", "dp=1", "--cluster", "tiny.json", code=1).stdout
    assert "fits" in echelon("plan", JOB, "--cluster", "tiny.json", code=1).stderr


def test_explain_prices_both_plans(echelon: Shell) -> None:
    answer = echelon.json("explain", "dp=1", "--why-not", "dp=2", "--job", JOB)
    assert answer["cost"]["step"] > 0
    assert answer["other"]["cost"]["fits"]
    assert '"dp=2" against "dp=1"' in echelon("explain", "dp=1", "--why-not", "dp=2", "--job", JOB).stdout


def test_a_plan_that_cannot_be_is_wrong_use(echelon: Shell) -> None:
    done = echelon("train", JOB, "--plan", "dp=1000000", code=2)
    assert "dp=1000000" in done.stderr
    assert "no such file" in echelon("train", "absent.py", "--plan", "dp=1", code=2).stderr
    assert "keep=0" in echelon("train", JOB, "--keep", "0", code=2).stderr


@pytest.mark.slow
def test_verify_then_train_behind_the_gate(echelon: Shell) -> None:
    command = ["verify", JOB, "--plan", "dp=2 zero=1", "-o", "proof.json", "--json"]
    certificate = json.loads(echelon.started(*command).stdout)
    assert certificate["verified"] is True
    assert Certificate.load(echelon.folder / "proof.json").plan.zero == 1

    refused = echelon("train", JOB, "--plan", "dp=2", "--require-certificate", "proof.json", "--out", "refused", code=1)
    assert 'certified "dp=2 zero=1", now "dp=2"' in refused.stderr

    answer = echelon.json("train", JOB, "--plan", "dp=2 zero=1", "--require-certificate", "proof.json")
    assert (answer["reason"], answer["step"], answer["folder"]) == ("finished", 12, "runs/small")
    assert answer["loss"] > 0
    assert Certificate.load(echelon.folder / "runs" / "small" / "certificate.json").plan.zero == 1
    assert echelon.json("report", "runs/small") == {"report": "runs/small/report.html"}


@pytest.mark.slow
def test_a_weaker_proof_opens_the_gate_and_the_training_says_so(echelon: Shell) -> None:
    told = echelon("verify", JOB, "--plan", "dp=2 zero=1", "-o", "weak.json", "--memory", "0.000001").stdout
    assert "note: reference: dp=2 zero=3, as the model needs" in " ".join(told.split())
    assert 'verified: "dp=2 zero=1" computes what the plan "dp=2 zero=3" computes (weaker:' in " ".join(told.split())
    gate = ["--plan", "dp=2 zero=1", "--require-certificate", "weak.json", "--out", "weak"]
    assert echelon.json("train", JOB, *gate)["reason"] == "finished"
    events = (echelon.folder / "weak" / "events.jsonl").read_text()
    assert "weak.json is a weaker proof: it was compared with the plan" in events


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp=2", pytest.param("pp=2 schedule=1f1b micro=2", marks=only_whole)])
def test_a_plan_that_cuts_the_model_is_written_in_short_form_everywhere(echelon: Shell, plan: str) -> None:
    folder = plan[:2]
    assert echelon.json("simulate", JOB, "--plan", plan)["fits"]
    certificate = echelon.json("verify", JOB, "--plan", plan, "-o", f"{folder}.json")
    assert certificate["verified"] is True
    answer = echelon.json("train", JOB, "--plan", plan, "--out", folder, "--require-certificate", f"{folder}.json")
    assert (answer["reason"], answer["step"]) == ("finished", 12)
    kept = Plan.load(echelon.folder / folder / "plan.json")
    assert bool(kept.tensor.placements) is (kept.mesh.tp > 1)
    assert bool(kept.pipeline.stages) is (kept.mesh.pp > 1)
    assert kept == Certificate.load(echelon.folder / f"{folder}.json").plan


SINGLE = """
from dataclasses import replace
from torch import nn
from tests.cli.job import job as sound

def job():
    return replace(sound(), model=lambda: nn.Linear(8, 1))
"""


FALLS_BACK = '"dp=1 pp=2" falls back to "dp=2 zero=3" on the same ranks, which shares the memory too: pp=2: the model cannot be cut'


@pytest.mark.slow
def test_a_model_that_cannot_be_cut_is_trained_all_the_same(echelon: Shell) -> None:
    (echelon.folder / "single.py").write_text(SINGLE)
    answer = echelon.json("train", "single.py", "--plan", "pp=2", "--out", "single")
    assert answer["reason"] == "finished"
    events = (echelon.folder / "single" / "events.jsonl").read_text().splitlines()
    assert sum(FALLS_BACK in str(json.loads(line)) for line in events) == 1
    assert str(Plan.load(echelon.folder / "single" / "plan.json")) == "dp=2 zero=3"


@only_whole
def test_a_certificate_and_a_forecast_name_the_plan_that_took_the_place_of_another(echelon: Shell) -> None:
    (echelon.folder / "single.py").write_text(SINGLE)
    simulated = echelon("simulate", "single.py", "--plan", "pp=2", "--json")
    assert json.loads(simulated.stdout)["plan"] == "dp=2 zero=3"
    assert FALLS_BACK in simulated.stderr
    certificate = echelon.json("verify", "single.py", "--plan", "pp=2", "-o", "single.json")
    assert certificate["verified"] is True
    assert FALLS_BACK in certificate["notes"][0]
    assert str(Certificate.load(echelon.folder / "single.json").plan) == "dp=2 zero=3"


@pytest.mark.slow
def test_ranks_that_torchrun_started_share_the_cuts_that_one_found(echelon: Shell) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = echelon.started("verify", JOB, "--plan", "tp=2", "-o", "cut.json", "--json", by=torchrun)
    assert json.loads(done.stdout)["verified"] is True
    assert Certificate.load(echelon.folder / "cut.json").plan.tensor.placements


@pytest.mark.slow
def test_a_finished_run_has_nothing_left_to_do_and_a_fresh_one_starts_beside_it(echelon: Shell) -> None:
    first = echelon.json("train", JOB, "--plan", "dp=1", "--out", "again")
    assert echelon.json("train", JOB, "--plan", "dp=1", "--out", "again")["step"] == first["step"]
    fresh = echelon.json("train", JOB, "--plan", "dp=1", "--out", "again", "--fresh")
    assert fresh["folder"] == "again-2"
    assert fresh["loss"] == first["loss"]


BROKEN = """
import os
import echelon
from tests.cli.job import job as sound

def job():
    made = sound()
    if os.environ.get("RANK") == "1":
        return {}["lost on the way"]
    return made
"""


@pytest.mark.slow
def test_an_error_of_the_job_on_any_rank_names_its_line(echelon: Shell) -> None:
    (echelon.folder / "broken.py").write_text(BROKEN)
    done = echelon.started("train", "broken.py", "--plan", "dp=2", code=1)
    assert "rank 1 failed: " in done.stderr
    assert "broken.py, line 9: KeyError: 'lost on the way'" in done.stderr
    if WHOLE:  # it starts the ranks once more
        assert (
            "Traceback"
            in echelon.started("train", "broken.py", "--plan", "dp=2", "--debug", code=1, traceback=True).stderr
        )


@pytest.mark.slow
def test_of_ranks_that_torchrun_started_one_tells_the_proof(echelon: Shell) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = echelon.started("verify", JOB, "--plan", "dp=2", "-o", "together.json", "--json", by=torchrun)
    assert json.loads(done.stdout) == json.loads((echelon.folder / "together.json").read_text())
