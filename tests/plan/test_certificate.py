"""A certificate covers one plan, one job file, one model and the versions it was made with; nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from echelon.errors import DocumentError
from echelon.plan.certificate import Certificate, Finding
from echelon.plan.plan import Plan

FACTS: dict[str, Any] = {
    "plan": Plan(zero=0),
    "job": "a" * 64,
    "model": "b" * 64,
    "versions": {"torch": "2.13.0", "echelon": "0.1.0"},
}
GOOD = Finding(kind="gradient", tensors=3, max_difference=1e-15, where="a.weight", bound=1e-9)
CERTIFICATE = Certificate(**FACTS, batch=8, steps=2, verified=True, findings=(GOOD,))
FAILED = replace(
    CERTIFICATE, verified=False, findings=(replace(GOOD, max_difference=1.0),), divergent="gradient of a.weight"
)


def test_what_was_verified_is_covered() -> None:
    assert CERTIFICATE.mismatch_reasons(**FACTS) == []
    assert Certificate.from_json(CERTIFICATE.to_json()) == CERTIFICATE


def test_each_difference_is_a_reason_that_names_both_sides() -> None:
    changes = {
        "plan": (Plan(zero=3), ['certified "dp=1", now "dp=1 zero=3"']),
        "job": ("c" * 64, ["aaaaaaaaaaaa", "cccccccccccc"]),
        "model": ("d" * 64, ["bbbbbbbbbbbb", "dddddddddddd"]),
        "versions": ({"torch": "2.12.0", "echelon": "0.1.0"}, ["torch differs: certified 2.13.0, now 2.12.0"]),
    }
    for name, (value, words) in changes.items():
        (reason,) = CERTIFICATE.mismatch_reasons(**(FACTS | {name: value}))
        assert all(word in reason for word in words)


def test_for_which_model_a_plan_was_made_is_no_difference() -> None:
    planned = replace(FACTS["plan"], model=FACTS["model"])
    assert CERTIFICATE.mismatch_reasons(**(FACTS | {"plan": planned})) == []
    assert replace(CERTIFICATE, plan=planned).mismatch_reasons(**FACTS) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"findings": ()}, "at least one kind"),
        ({"verified": False}, "verified=False, but all findings are within bounds"),
        ({"findings": (replace(GOOD, max_difference=1.0),)}, "verified=True, but not all findings are within bounds"),
        ({"divergent": "gradient of a.weight"}, "one of the two is wrong"),
    ],
)
def test_a_verdict_that_its_findings_do_not_give_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CERTIFICATE, **changes)
    with pytest.raises(ValueError, match="one of the two is wrong"):
        replace(FAILED, divergent="")


def test_an_edited_certificate_is_refused_with_and_without_its_hash() -> None:
    for text in (FAILED.to_json(), CERTIFICATE.to_json()):
        edited = json.loads(text) | {"steps": 9}
        with pytest.raises(DocumentError, match="edited by hand or damaged; make it again"):
            Certificate.from_json(json.dumps(edited))
        del edited["hash"]
        with pytest.raises(DocumentError, match="a certificate without its hash was edited by hand; make it again"):
            Certificate.from_json(json.dumps(edited))


def test_a_failed_proof_covers_nothing() -> None:
    assert FAILED.mismatch_reasons(**FACTS) == ["the verification failed"]


def test_a_finding_is_good_within_its_bound() -> None:
    assert GOOD.is_within_bound
    assert not replace(GOOD, max_difference=2e-9).is_within_bound
    assert not replace(GOOD, max_difference=float("nan")).is_within_bound
