"""Which certificate lets a run start, and the identity that it is for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from echelon.errors import DocumentError, JobError, VerificationError
from echelon.flow.gate import require_certificate
from echelon.plan.certificate import Certificate, Finding
from echelon.plan.document_cache import installed_versions
from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan
from echelon.verifier.fingerprints import job_hash, model_hash, versions

PLAN = Plan(mesh=Mesh(dp=2), zero=1)
NOW: dict[str, Any] = {
    "plan": PLAN,
    "job": "a" * 64,
    "model": "b" * 64,
    "versions": {"torch": "2.13.0", "echelon": "0.1.0"},
}
FINDING = Finding(kind="loss", tensors=1, max_difference=1e-15, where="loss", bound=1e-9)
GOOD = Certificate(**NOW, batch=8, steps=2, verified=True, findings=(FINDING,))


def test_a_certificate_that_covers_the_run_is_given_back(tmp_path: Path) -> None:
    GOOD.save(tmp_path / "certificate.json")
    assert require_certificate(tmp_path / "certificate.json", **NOW) == GOOD


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan": dataclasses.replace(PLAN, zero=3)}, ["the plan differs", "zero=1", "zero=3"]),
        ({"job": "c" * 64}, ["the job file changed", "aaaaaaaaaaaa", "cccccccccccc"]),
        ({"model": "c" * 64}, ["the parameters' names or shapes changed", "bbbbbbbbbbbb", "cccccccccccc"]),
        ({"versions": {"torch": "2.14.0", "echelon": "0.1.0"}}, ["torch differs", "2.13.0", "2.14.0"]),
        ({"versions": {"torch": "2.13.0", "echelon": "0.2.0"}}, ["echelon differs", "0.1.0", "0.2.0"]),
    ],
)
def test_a_stale_certificate_names_both_sides(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    GOOD.save(tmp_path / "certificate.json")
    with pytest.raises(VerificationError) as caught:
        require_certificate(tmp_path / "certificate.json", **NOW | changes)
    for word in words:
        assert word in str(caught.value)


def test_a_weaker_certificate_opens_the_gate_and_says_that_it_is_weaker(tmp_path: Path) -> None:
    weaker = dataclasses.replace(GOOD, reference="plan", reference_plan=Plan(mesh=Mesh(dp=2), zero=3))
    weaker.save(tmp_path / "certificate.json")
    found = require_certificate(tmp_path / "certificate.json", **NOW)
    assert found.reference_description == 'the plan "dp=2 zero=3"'
    assert found.limitation.endswith("an error that both share is not seen")
    assert GOOD.limitation == dataclasses.replace(GOOD, reference="host").limitation == ""
    with pytest.raises(ValueError, match="one implies the other"):
        dataclasses.replace(GOOD, reference="plan")


def test_every_reason_is_named(tmp_path: Path) -> None:
    off = dataclasses.replace(FINDING, max_difference=1.0)
    failed = dataclasses.replace(GOOD, verified=False, findings=(off,), divergent="loss at step 0")
    failed.save(tmp_path / "certificate.json")
    with pytest.raises(VerificationError, match=r"(?s)job file changed.*parameters.*the verification failed"):
        require_certificate(tmp_path / "certificate.json", **NOW | {"job": "c" * 64, "model": "d" * 64})


def test_no_certificate_and_one_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="cannot be read as a certificate"):
        require_certificate(tmp_path / "certificate.json", **NOW)
    (tmp_path / "certificate.json").write_text(GOOD.to_json().replace('"steps": 2', '"steps": 3'))
    with pytest.raises(DocumentError, match="edited by hand or damaged"):
        require_certificate(tmp_path / "certificate.json", **NOW)


def test_a_job_is_known_by_its_files_text_and_its_name(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("one")
    first = job_hash(file)
    assert job_hash(f"{file}:job") == first
    assert job_hash(f"{file}:other") != first
    file.write_text("two")
    assert job_hash(str(file)) != first
    with pytest.raises(JobError, match="cannot be read"):
        job_hash(tmp_path / "none.py")


def test_a_model_is_known_by_its_parameters_names_and_shapes_not_by_their_values() -> None:
    assert model_hash(nn.Linear(2, 3)) == model_hash(nn.Linear(2, 3))
    assert model_hash(nn.Linear(2, 3)) != model_hash(nn.Linear(3, 2))
    assert model_hash(nn.Linear(2, 3)) != model_hash(nn.Sequential(nn.Linear(2, 3)))


def test_versions_are_those_of_torch_echelon_and_numpy() -> None:
    assert versions().keys() == {"torch", "echelon", "numpy"}
    assert versions().items() <= installed_versions(("torch", "echelon", "numpy")).items()
