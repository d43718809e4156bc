"""The second look: the first module whose output is off, and nothing that a plan without faults would pay for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from echelon.engine.build_model import RankModel
from echelon.plan.certificate import Certificate
from echelon.plan.plan import Plan
from echelon.testing.fault_catalogue import inject_fault
from echelon.verifier import diagnose_failure, explain_failure
from echelon.verifier.diagnose_failure import record_module_outputs
from echelon.verifier.verify import verify
from echelon.world import World
from tests.verifier import proofs


def alone(job: Any, **plan: Any) -> Certificate:
    return verify(job, Plan(**plan), world=World())


def output(certificate: Certificate) -> Any:
    return next((each for each in certificate.findings if each.kind == "output"), None)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["tokens", "value", "head"])
def test_the_first_module_whose_output_is_off_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build = RankModel._build

    def wrong(self: RankModel, warn: Any) -> nn.Module:
        model = build(self, warn)
        model.get_submodule(path).register_forward_hook(lambda _, __, value: value * 1.01)
        return model

    monkeypatch.setattr(RankModel, "_build", wrong)
    certificate = alone(proofs.make_job("keys"), micro=4)
    assert (
        f"forward is wrong: the first output that is off is that of {path}, which is off by 1.0e-02"
        in certificate.divergent
    )
    finding = output(certificate)
    assert (finding.where, finding.is_within_bound) == (path, False)
    assert "weighted wrongly" not in certificate.divergent


def test_a_forward_that_is_right_is_said_to_look_so() -> None:
    with inject_fault("gradients times micro-batches"):
        certificate = alone(proofs.make_job("keys"), micro=4)
    assert "forward looks right: the outputs of 6 modules agree on data rank 0" in certificate.divergent
    assert output(certificate).is_within_bound


def test_what_lies_deep_in_an_output_is_marked_as_the_proof_compares_it() -> None:
    @dataclass
    class Inner:
        states: Tensor

    @dataclass
    class Outer:
        inner: Inner
        logits: Tensor

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Outer:
            return Outer(Inner(x), x + 1)

    model = Model()
    with record_module_outputs(model) as outputs:
        model(torch.ones(2))
    assert len(outputs["", 1]) == 2


class Island(proofs.Attention):
    """Computes its scores in float32 whatever it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.like = torch.ones(1, dtype=torch.float32)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).to(self.like).softmax(-1).log()


def test_rounding_of_parts_in_float32_is_not_taken_for_a_wrong_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    build = RankModel._build

    def wrong(self: RankModel, warn: Any) -> nn.Module:
        model = build(self, warn)
        for path, factor in (("tokens", 1 + 1e-8), ("head", 1.01)):  # a rounding, a mistake
            model.get_submodule(path).register_forward_hook(lambda _, __, value, factor=factor: value * factor)
        return model

    monkeypatch.setattr(RankModel, "_build", wrong)
    certificate = alone(proofs.make_job("keys", model=Island), micro=4)
    assert any("computed below float64 all the same" in note for note in certificate.notes)
    assert "forward is wrong: the first output that is off is that of head" in certificate.divergent
    assert output(certificate).bound > 1e-9


def test_a_plan_that_passes_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose_failure, "record_module_outputs", lambda model: pytest.fail("a second look"))
    certificate = alone(proofs.make_job("keys"), micro=4)
    assert certificate.verified
    assert output(certificate).is_within_bound


def test_a_verdict_stands_where_its_cause_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(evidence: explain_failure.Evidence) -> str:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(explain_failure, "explain", fails)
    with inject_fault("gradients times micro-batches"):
        certificate = alone(proofs.make_job("keys"), micro=4)
    assert not certificate.verified
    assert certificate.divergent.endswith("the cause could not be determined: RuntimeError: no such luck")


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Another sample each time that it is asked."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(0, 32, (9,), generator=self.draw)
        return tokens[:-1], tokens[1:]

    draw = torch.Generator().manual_seed(0)


def test_samples_that_differ_by_themselves_are_not_blamed_on_a_rank() -> None:
    certificate = alone(proofs.make_job("keys", data=Noisy()))
    assert not certificate.verified
    assert "read other samples" not in certificate.divergent


def test_outputs_are_noted_in_the_order_in_which_they_are_ready() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    with record_module_outputs(model) as outputs:
        model(torch.ones(1, 2))
        model[0](torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert list(outputs) == [("0", 1), ("1.0", 1), ("1", 1), ("", 1), ("0", 2)]
    assert outputs["0", 1] == outputs["0", 2]
