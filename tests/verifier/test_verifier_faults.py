"""The catalogue: a fault of each kind is caught and named; runs without faults pass. The whole table: `python -m bench.faults`."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.testing.fault_catalogue import FAULTS
from echelon.testing.rank_pool import RankPool
from echelon.verifier.compare import FLOAT64_BOUND
from tests.sampling import some
from tests.verifier.fault_table import CAUGHT, QUIET, Caught, certify


def test_every_fault_of_the_catalogue_is_tried_on_three_models() -> None:
    for name in FAULTS:
        assert len({model for case in CAUGHT if case.fault == name for model in case.models}) >= 3, name
    assert len(FAULTS) >= 12


def test_the_documented_catalogue_is_this_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "verify.md").read_text()
    table = text.partition("| fault | what happens | shows under |")[2].split("\n\n")[0]
    rows = [tuple(cell.strip() for cell in line.split("|")[1:4]) for line in table.splitlines()[2:]]
    assert rows == [(each.name, each.description, each.needs) for each in FAULTS.values()]


#: A third of the faults, each on its quickest model; `python -m bench.faults` has all of them on all models.
SOME = some("faults", {case.fault: case for case in reversed(CAUGHT)}.values(), 5)


@pytest.mark.slow
@pytest.mark.parametrize("case", SOME, ids=[f"{case.fault}-{case.plan}-{case.models[0]}" for case in SOME])
def test_a_fault_is_caught_and_named(ranks: RankPool, case: Caught) -> None:
    certificate = certify(ranks, case.models[0], case.plan, case.fault)
    assert not certificate.verified
    for words in case.words:
        assert words in certificate.divergent


FEW = some("quiet", QUIET, 2)


@pytest.mark.journey
@pytest.mark.parametrize(("model", "plan"), FEW, ids=[f"{plan}-{model}" for model, plan in FEW])
def test_no_false_alarm_where_there_is_no_fault(ranks: RankPool, model: str, plan: str) -> None:
    certificate = certify(ranks, model, plan)
    assert certificate.verified, certificate.divergent
    # The momentum of a bias before batch norm is of rounding alone; for such state the verifier has a wider bound of its own.
    assert all(
        finding.max_difference <= (finding.bound if finding.kind == "optimizer" else FLOAT64_BOUND)
        for finding in certificate.findings
    )
    assert {"start", "loss", "norm", "copy", "output"} <= {finding.kind for finding in certificate.findings}
