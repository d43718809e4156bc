"""Drift: told to whoever reads, and a no where all gradients are off by one factor, which no rounding does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.cli.common import print_answer
from echelon.cli.verify import _describe_certificate
from echelon.engine.loss_weighing import LossWeighing
from echelon.plan.certificate import Certificate
from echelon.plan.plan import Plan
from echelon.verifier.reference import StepRecord
from echelon.verifier.tolerances import DRIFT_BOUNDS, MIN_FACTOR_DEVIATION, common_gradient_factor
from echelon.verifier.verify import verify
from echelon.world import World
from tests.verifier import proofs

DRAW = torch.Generator().manual_seed(0)
TRUE = {f"layer.{number}": torch.randn(16, 8, generator=DRAW).double() for number in range(10)}


def alone(**plan: Any) -> Certificate:
    return verify(proofs.make_job("keys"), Plan(**plan), world=World())


def record(gradients: dict[str, Tensor | None]) -> StepRecord:
    empty: Any = {}
    return StepRecord(
        step=0, loss=torch.zeros(()), norm=None, gradients=gradients, parameters=empty, buffers=empty, optimizer=empty
    )


def found(plan: dict[str, Any], true: dict[str, Any] = TRUE) -> float | None:
    return common_gradient_factor(record(plan), record(true))


def noisy(size: float) -> dict[str, Tensor]:
    return {name: value + size * torch.randn(value.shape, generator=DRAW) for name, value in TRUE.items()}


@pytest.mark.parametrize("times", [65536.0, 2.0, 0.5, 0.25, -1.0, 0.0])
def test_one_factor_over_all_gradients_is_found_through_the_noise_of_half_precision(times: float) -> None:
    made = found({name: times * value for name, value in noisy(0.1).items()})
    assert made == pytest.approx(times, rel=0.05, abs=1e-6)


def test_rounding_is_no_factor_however_large_it_is() -> None:
    for size in (0.0, 0.1, 1.0, 10.0):
        assert found(noisy(size)) is None
    assert max(DRIFT_BOUNDS.values()) * 4 < MIN_FACTOR_DEVIATION
    assert found({name: value * (1 + max(DRIFT_BOUNDS.values())) for name, value in TRUE.items()}) is None


def test_what_some_tensors_have_is_no_common_factor() -> None:
    assert (
        found({name: value * (2.0 if number < 8 else 1.0) for number, (name, value) in enumerate(TRUE.items())}) is None
    )
    assert found({name: value * (1.0 + number) for number, (name, value) in enumerate(TRUE.items())}) is None


def test_a_few_numbers_or_none_that_are_finite_tell_nothing() -> None:
    one = {"scale": torch.ones(1).double()}
    assert found({"scale": 3 * one["scale"]}, one) is None
    assert found({}, {}) is None
    assert found({name: value * float("inf") for name, value in TRUE.items()}) is None
    assert found(dict.fromkeys(TRUE)) is None


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # a CPU without bf16 says so
def test_a_factor_that_only_the_trained_precision_has_is_a_no(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    normalize = LossWeighing.normalize

    def left_in(self: LossWeighing, *args: Any, **options: Any) -> tuple[Tensor, Any]:
        loss, factor = normalize(self, *args, **options)
        is_proof = self.run.rank_model.parameters[0].dtype is torch.float64
        return loss, factor if is_proof else factor * 1024.0

    assert alone(precision=precision).verified
    monkeypatch.setattr(LossWeighing, "normalize", left_in)
    certificate = alone(precision=precision)
    assert not certificate.verified
    assert certificate.divergent.startswith(f"gradients in {precision} at step 0: 1")
    assert "times the reference, and in float64 they agree: looks like a loss scale" in certificate.divergent
    (bad,) = (each for each in certificate.findings if not each.is_within_bound)
    assert bad.kind == "drift"


def test_the_drift_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    certificate = alone()
    print_answer(False, None, *_describe_certificate(certificate, "certificate.json"))
    text = capsys.readouterr().out
    below = text[text.index("drift") :]
    for finding in certificate.drift:
        assert f"{finding.max_difference:.1e}" in below
        assert finding.kind in below
