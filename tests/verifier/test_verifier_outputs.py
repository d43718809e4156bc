"""Outputs of any structure are part of every proof, share by share; so is the gradient norm, whether the job clips or not."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.engine.parallel.vocab_parallel import ShardedLogits
from echelon.plan.batch_split import SampleRange
from echelon.plan.certificate import Certificate
from echelon.plan.plan import Plan
from echelon.testing.rank_pool import RankPool
from echelon.verifier.compare import NOT_COMPARABLE
from echelon.verifier.compare_outputs import (
    checksum_outputs,
    compare_outputs,
    output_tensors,
    record_outputs,
    uncompared_outputs_note,
)
from echelon.verifier.verify import verify
from echelon.world import World
from tests.verifier import proofs


@dataclass
class Pair:
    left: Tensor
    right: Any


def test_the_tensors_of_an_output_are_found_in_any_structure() -> None:
    a, b, c = (torch.full((2,), float(number)) for number in range(3))
    for output in ((a, [b, None, {"c": c}]), Pair(a, {"b": b, "c": Pair(c, "words")}), {"a": a, "rest": (b, c)}):
        assert [float(leaf[0]) for leaf in output_tensors(output)] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_the_share_of_some_samples_is_cut_where_the_samples_are(dim: int) -> None:
    numbers = torch.Generator().manual_seed(0)
    whole = torch.randn(*(16 if each == dim else 3 + each for each in range(3)), generator=numbers, dtype=torch.float64)
    mine = whole.narrow(dim, 4, 2)
    (found,) = compare_outputs(
        checksum_outputs([mine], SampleRange(8, 10)),
        checksum_outputs([whole], SampleRange(8, 10), first=4, batch_size=16),
        0,
    )  # of 16 samples of which these are the fifth and the sixth
    assert found.value == 0.0
    assert found.name == "output 0 for samples 8 to 9"
    (found,) = compare_outputs(
        checksum_outputs([mine * 1.01], SampleRange(8, 10)),
        checksum_outputs([whole], SampleRange(8, 10), first=4, batch_size=16),
        0,
    )
    assert found.value == pytest.approx(0.01, rel=1)


def test_what_cannot_be_cut_by_samples_or_has_another_shape_is_left_out() -> None:
    whole, part = SampleRange(0, 16), SampleRange(0, 4)
    ragged, scalar = torch.ones(4, 5), torch.ones(())
    assert set(checksum_outputs([torch.ones(7), None, scalar], part, batch_size=16).values()) == {None}
    assert (
        compare_outputs(checksum_outputs([ragged], part), checksum_outputs([torch.ones(16, 9)], part, batch_size=16), 0)
        == []
    )
    assert (
        compare_outputs(checksum_outputs([scalar], whole), checksum_outputs([scalar], whole, batch_size=16), 0) != []
    )  # all samples: nothing to cut


def test_what_is_left_out_is_counted_and_named() -> None:
    parts = [SampleRange(0, 4), SampleRange(4, 8)]
    rows, other = torch.ones(8, 3), torch.ones(7)
    true = checksum_outputs([rows, other], parts[0], batch_size=8) | checksum_outputs(
        [rows, other], parts[1], first=4, batch_size=8
    )
    mine = checksum_outputs([rows[:4], other], parts[0]) | checksum_outputs([rows[4:], other], parts[1])
    assert (
        uncompared_outputs_note(
            checksum_outputs([rows[:4]], parts[0]), checksum_outputs([rows], parts[0], batch_size=8), parts[:1]
        )
        == ""
    )
    assert uncompared_outputs_note(mine, true, parts) == (
        "outputs of 2 of 4 micro-batches are compared, without output 1 for samples 0 to 3 (no dim of samples in the reference), "
        "output 1 for samples 4 to 7 (no dim of samples in the reference)"
    )
    silent = uncompared_outputs_note(checksum_outputs([rows[:4]], parts[0]), true, parts)
    assert "outputs of 1 of 4 micro-batches are compared" in silent
    assert "output 0 for samples 4 to 7 (the plan's run does not return it once per micro-batch" in silent
    padded = uncompared_outputs_note(
        checksum_outputs([torch.ones(4, 5)], parts[0]), checksum_outputs([rows], parts[0], batch_size=8), parts[:1]
    )
    assert padded == "the model's outputs are not compared: (4, 5), in the reference (4, 3)"
    assert uncompared_outputs_note({}, {}, parts).startswith("the model's outputs are not compared")


def test_what_is_zero_but_for_rounding_is_no_difference() -> None:
    all_of_them, noise = SampleRange(0, 4), torch.full((4,), 1e-17, dtype=torch.float64)
    true = checksum_outputs([torch.ones(4), noise], all_of_them)
    assert all(
        each.value < 1e-9
        for each in compare_outputs(checksum_outputs([torch.ones(4), -3 * noise], all_of_them), true, 0)
    )
    assert any(
        each.value > 1e-3
        for each in compare_outputs(checksum_outputs([torch.ones(4), noise + 1], all_of_them), true, 0)
    )


def test_an_output_that_is_not_a_number_in_either_run_does_not_pass() -> None:
    both, odd = SampleRange(0, 2), torch.tensor([1.0, float("nan")])
    found = compare_outputs(
        checksum_outputs([odd, torch.ones(2)], both), checksum_outputs([odd, torch.ones(2)], both), 0
    )
    assert [each.value for each in found] == [NOT_COMPARABLE, 0.0]
    assert found[0].reason == "it holds NaN"


def test_logits_that_are_looked_at_stay_cut() -> None:
    part = torch.randn(2, 3)
    axis: Any = SimpleNamespace(gather_from_region=lambda local, dim, sizes: torch.cat([local, local], dim))
    logits = ShardedLogits(part, 1, [3, 3], axis)
    assert torch.equal(logits.gather_detached(), torch.cat([part, part], 1))
    assert logits._full_tensor is None


def test_a_model_is_heard_only_meanwhile() -> None:
    model, heard = nn.Linear(2, 2), []
    with record_outputs(model, heard.append):
        model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert len(heard) == 1


def kinds(certificate: Certificate) -> dict[str, int]:
    return {each.kind: each.tensors for each in certificate.findings}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan", "shares"),
    [("gpt", "tp=2", 1), ("gpt", "pp=2 micro=2", 4), ("gpt", "dp=2 pp=2 micro=2", 4), ("norm", "dp=2 micro=3", 4)],
)
def test_outputs_of_every_share_are_compared(ranks: RankPool, name: str, plan: str, shares: int) -> None:
    document = proofs.plan_for(name, plan)
    text = ranks.run(Plan.from_json(document).ranks, proofs.prove_broken, name, document, "")[0]
    certificate = Certificate.from_json(text)
    assert certificate.verified, certificate.divergent
    assert kinds(certificate)["output"] == shares
    assert kinds(certificate)["norm"] == 1  # "norm" does not clip


@pytest.mark.slow
def test_an_output_that_the_loss_does_not_use_is_proved_too(ranks: RankPool) -> None:
    (text,) = ranks.run(2, proofs.prove, [("aside", "", {})])[0]
    certificate = Certificate.from_json(text)
    assert not certificate.verified
    assert certificate.divergent.startswith("output 1 for samples 6 to 11 at step 0: relative difference")
    assert "the loss and every gradient agree" in certificate.divergent


def test_a_rank_whose_outputs_are_not_told_is_named(ranks: RankPool) -> None:
    (text,) = ranks.run(2, proofs.prove, [("twice", "", {})])[0]
    certificate = Certificate.from_json(text)
    assert certificate.verified, certificate.divergent
    (note,) = (note for note in certificate.notes if "outputs" in note)
    assert note.startswith(
        "outputs of 1 of 2 micro-batches are compared, without output 0 for samples 6 to 11 (the plan's run"
    )


class Bare(nn.Module):
    """Gives one number for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean()


def test_a_certificate_says_where_no_output_is_compared() -> None:
    job = proofs.make_job("aside", model=Bare, loss=lambda output, batch: output)
    certificate = verify(job, Plan(micro=4), world=World())
    assert certificate.verified, certificate.divergent
    assert any("outputs are not compared" in note for note in certificate.notes)
