"""Documents survive the way to JSON and back, and what is no such document is named with its path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given

from echelon.errors import DocumentError
from echelon.plan.certificate import Certificate, Finding
from echelon.plan.plan import Plan
from tests.plan.strategies import plans


@given(plans)
def test_round_trip(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest


@given(plans, plans)
def test_digest_tells_plans_apart(left: Plan, right: Plan) -> None:
    assert (left.digest == right.digest) == (left == right)


def test_digest_is_the_same_everywhere() -> None:
    # Certificates of other machines name plans by it: a change of this value is a new VERSION.
    assert Plan(precision="fp32").digest[:16] == "241c7bf2c54d5cca"


def test_an_int_in_a_float_field_survives_the_way() -> None:
    finding = Finding(kind="loss", tensors=1, max_difference=0, where="loss", bound=1)
    certificate = Certificate(
        plan=Plan(), job="", model="", versions={}, batch=8, steps=2, verified=True, findings=(finding,)
    )
    assert Certificate.from_json(certificate.to_json()) == certificate


def edited(**changes: object) -> str:
    return json.dumps(
        {key: value for key, value in (json.loads(Plan().to_json()) | changes).items() if value != "drop"}
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object of kind 'plan', found list"),
        (edited(kind="profile"), "expected kind 'plan', found 'profile'"),
        (edited(version=99), "version 99, this echelon reads version 5"),
        (edited(zero=1), "edited by hand or damaged"),
        (edited(hash=None, zero="1"), r"here\.zero: expected int, found '1'"),
        (edited(hash=None, zero=9), "here: zero=9: a ZeRO stage is 0, 1, 2 or 3"),
        (edited(hash=None, zero=True), r"here\.zero: expected int, found True"),
        (edited(hash=None, nero=1), "here: unknown field nero; Plan has mesh, zero"),
        (edited(hash=None, precision="fp12"), r"here\.precision: 'fp12' is not one of 'fp32'"),
        (edited(hash=None, mesh={"dp": "x"}), r"here\.mesh\.dp: expected int, found 'x'"),
        (edited(hash=None, mesh={"dp": 0}), r"here\.mesh: dp=0"),
        (edited(hash=None, mesh=3), r"here\.mesh: expected an object, found 3"),
    ],
)
def test_what_is_no_plan_is_named(text: str, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        Plan.from_json(text, source="here")


def test_files_are_written_whole_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    Plan(zero=2).save(path)
    assert Plan.load(path) == Plan(zero=2)
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]
    path.write_text(path.read_text()[:40])
    with pytest.raises(DocumentError, match=r"plan\.json: not JSON .* was the file cut short"):
        Plan.load(path)
    with pytest.raises(DocumentError, match="cannot be read as a plan"):
        Plan.load(tmp_path / "absent.json")


def test_saving_makes_the_folder_and_says_where_it_cannot(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "plan.json"
    Plan(zero=2).save(path)
    assert Plan.load(path) == Plan(zero=2)
    with pytest.raises(DocumentError, match=r"inside\.json: the plan cannot be written .* give another path"):
        Plan().save(path / "inside.json")
