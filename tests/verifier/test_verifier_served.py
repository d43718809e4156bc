"""Proofs with a parameter server: the numbers of one device in float64, and the bound that ranks keep."""

from __future__ import annotations

import dataclasses

import pytest

from echelon.plan.certificate import Certificate, Finding
from echelon.plan.text import from_text
from echelon.testing.rank_pool import RankPool
from echelon.verifier.compare import FLOAT64_BOUND
from echelon.verifier.staleness import add_staleness_finding, synchronous_plan
from tests.sampling import only_whole
from tests.verifier import proofs
from tests.verifier.fault_table import certify

pytest.importorskip("numba")


@pytest.mark.slow
def test_all_parameters_on_servers_within_a_bound(ranks: RankPool) -> None:
    certificate = certify(ranks, "sparse-free", "dp=2 exchange=server rows=40 dense=server staleness=1")
    assert certificate.verified, certificate.divergent
    found = {finding.kind: finding for finding in certificate.findings}
    assert found["staleness"].max_difference <= found["staleness"].bound == 1
    assert all(each.max_difference <= FLOAT64_BOUND for kind, each in found.items() if kind != "staleness")
    assert "numbers are proved with all ranks in step" in certificate.notes[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "plan"),
    [
        ("moved", "dp=2 micro=4 exchange=server rows=40 servers=2 replicas=2"),
        pytest.param("moved-too", "dp=2 exchange=server rows=40 dense=server", marks=only_whole),
    ],
)
def test_optimizers_that_move_every_row_at_every_step(ranks: RankPool, job: str, plan: str) -> None:
    """Six rules, a table each, over several steps with schedules; most rows are read by no sample for many of them, some by none at all."""
    document = proofs.plan_for(job, plan)
    text, *_ = ranks.run(2, proofs.prove_broken, job, document, "", steps=8, timeout=150)
    certificate = Certificate.from_json(text)
    assert certificate.verified, certificate.divergent
    assert all(each.max_difference <= FLOAT64_BOUND for each in certificate.findings)


def test_a_bound_that_is_not_kept_is_no_certificate() -> None:
    plan = from_text("dp=2 exchange=server staleness=2")
    good = Certificate(
        plan=synchronous_plan(plan), job="", model="", versions={}, batch=8, steps=2, verified=True,
        findings=(Finding(kind="loss", tensors=1, max_difference=0.0, where="loss", bound=FLOAT64_BOUND),),
    )  # fmt: skip
    assert add_staleness_finding(good, plan, (2, 9)).verified
    broken = add_staleness_finding(good, plan, (3, 9))
    assert not broken.verified
    assert "rows read 3 steps ahead of the slowest rank: the bound is staleness=2" in broken.divergent
    free = add_staleness_finding(
        dataclasses.replace(good, plan=synchronous_plan(plan)), plan.replace(staleness=None), (30, 40)
    )
    assert free.verified
    assert "up to 30 steps ahead of the slowest" in free.notes[0]
