"""A certificate covers one plan, one job file, one model and the versions it was made with; nothing else."""

from __future__ import annotations

from dataclasses import replace

from echelon.plan.certificate import Certificate, Finding
from echelon.plan.plan import Plan

FACTS = {"plan": Plan(zero=0), "job": "a" * 64, "model": "b" * 64, "versions": {"torch": "2.13.0", "echelon": "0.1.0"}}
GOOD = Finding(kind="gradient", tensors=3, worst=1e-15, where="a.weight", bound=1e-9)
CERTIFICATE = Certificate(**FACTS, batch=8, steps=2, verified=True, findings=(GOOD,))


def test_what_was_verified_is_covered() -> None:
    assert CERTIFICATE.stale(**FACTS) == []
    assert Certificate.from_json(CERTIFICATE.to_json()) == CERTIFICATE


def test_each_difference_is_a_reason_that_names_both_sides() -> None:
    changes = {
        "plan": (Plan(zero=3), ['certified "dp=1", now "dp=1 zero=3"']),
        "job": ("c" * 64, ["aaaaaaaaaaaa", "cccccccccccc"]),
        "model": ("d" * 64, ["bbbbbbbbbbbb", "dddddddddddd"]),
        "versions": ({"torch": "2.12.0", "echelon": "0.1.0"}, ["torch differs: certified 2.13.0, now 2.12.0"]),
    }
    for name, (value, words) in changes.items():
        (reason,) = CERTIFICATE.stale(**(FACTS | {name: value}))
        assert all(word in reason for word in words)


def test_a_failed_proof_covers_nothing() -> None:
    assert replace(CERTIFICATE, verified=False).stale(**FACTS) == ["the verification failed"]


def test_a_finding_is_good_within_its_bound() -> None:
    assert GOOD.good
    assert not replace(GOOD, worst=2e-9).good
    assert not replace(GOOD, worst=float("nan")).good
