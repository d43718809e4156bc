"""The proof itself: right plans pass, broken runs do not, and the message says where and what."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from echelon.engine.run import Run
from echelon.errors import DivergenceError, PlanError, VerificationError
from echelon.plan.certificate import Certificate
from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan
from echelon.testing.models import MLP
from echelon.testing.rank_pool import RankError, RankPool
from echelon.verifier.compare import FLOAT64_BOUND, Difference, compare_tensors
from echelon.verifier.context import Comparator
from echelon.verifier.reference_data import open_reference_data
from echelon.verifier.single_device import SingleDeviceContext
from echelon.verifier.tolerances import copy_to_float64
from echelon.verifier.verify import verify
from echelon.world import World
from tests.sampling import only_whole
from tests.verifier import proofs


def alone(job: Any, **plan: Any) -> Certificate:
    return verify(job, Plan(**plan), world=World())


def require_verified(certificate: Certificate) -> None:
    assert certificate.verified, certificate.divergent
    assert certificate.divergent == ""
    for finding in certificate.findings:
        assert finding.max_difference <= FLOAT64_BOUND, finding


STAGES: list[proofs.Proof] = [("gpt", "", {"zero": zero, "micro": 2}) for zero in range(4)]
NORMS: list[proofs.Proof] = [
    ("norm", "", {"zero": 0, "batchnorm": "sync"}),
    ("norm", "", {"zero": 3, "batchnorm": "local"}),
]


@pytest.mark.slow
def test_unequal_shares_of_the_batch_are_verified(ranks: RankPool) -> None:
    cases: list[proofs.Proof] = [
        ("gpt", "", {"zero": 0, "micro": 2, "batch_shares": (3, 1)}),
        ("gpt", "", {"zero": 3, "batch_shares": (1, 4)}),
        ("norm", "", {"zero": 1, "batchnorm": "sync", "batch_shares": (2, 1)}),
        ("norm", "", {"zero": 0, "batchnorm": "local", "batch_shares": (2, 1)}),
    ]
    for text in ranks.run(2, proofs.prove, cases, timeout=240)[0]:
        require_verified(Certificate.from_json(text))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=only_whole)])
def test_every_zero_stage_is_verified(ranks: RankPool, size: int) -> None:
    cases = STAGES + NORMS
    answers = ranks.run(size, proofs.prove, cases, timeout=240)
    assert all(answer == answers[0] for answer in answers), "every rank has the same certificate"
    for text, (name, _, _) in zip(answers[0], cases, strict=True):
        certificate = Certificate.from_json(text)
        require_verified(certificate)
        kinds = {finding.kind for finding in certificate.findings}
        every = {"start", "gradient", "output", "loss", "norm", "parameter", "optimizer", "copy"}
        assert kinds == (every | {"buffer"} if name == "norm" else every)
        assert certificate.steps == 3
        assert f"one of the steps is the epoch's last, of {5 if name == 'gpt' else 9} samples" in certificate.notes


@pytest.mark.slow
def test_noise_that_adam_blows_up_is_no_difference() -> None:
    job = proofs.make_job("keys", optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-30))
    case = SingleDeviceContext(job, Plan(micro=1), open_reference_data(job), (0,))
    twin, true = case.build_reference(perturbed=True).step(0), case.build_reference().step(0)
    (bare,) = (
        each
        for each in compare_tensors("parameter", twin.parameters, true.parameters, step=0)
        if each.name == "key.bias"
    )
    assert bare.value > 1e-2, "the job must show what this test is about"
    require_verified(alone(job, micro=1))


def test_unused_rows_get_no_slack() -> None:
    """An embedding's unused rows have a gradient of exactly zero: one that moves all the same is found."""

    def moved(run: Run, *args: Any) -> Any:
        step = original(run, *args)
        with torch.no_grad():
            run.model.get_parameter("tokens.weight")[31] += 1e-5
        return step

    original = Run.update
    rows = torch.where(proofs.TOKENS == 31, 0, proofs.TOKENS)
    job = proofs.make_job("keys", data=TensorDataset(rows[:, :-1], rows[:, 1:]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "update", moved)
        assert "parameter of tokens.weight at step 0" in alone(job).divergent


@pytest.mark.slow
@pytest.mark.parametrize("moved", [0.0, 1e-3])
def test_slack_is_measured_by_the_moves_of_a_parameters_own_group(
    moved: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of the keys' bias is noise. Steps of 1e-5 explain no move of 1e-3, whatever steps other groups make."""

    def two_rates(pairs: Any) -> torch.optim.Optimizer:
        named = dict(pairs)
        slow = {"params": [named.pop("key.bias")], "lr": 1e-5}
        return torch.optim.AdamW([slow, {"params": list(named.values())}], lr=1e-1, eps=1e-30)

    def wrong(run: Run, *args: Any) -> Any:
        step = original(run, *args)
        with torch.no_grad():
            run.model.get_parameter("key.bias").add_(moved)
        return step

    original = Run.update
    monkeypatch.setattr(Run, "update", wrong)
    certificate = alone(proofs.make_job("keys", optimizer=two_rates), micro=1)
    assert certificate.divergent.startswith("parameter of key.bias at step 0" if moved else "")
    assert certificate.verified is not bool(moved), certificate.divergent


def test_a_user_module_is_not_trained_by_its_proof() -> None:
    module = proofs.Attention()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    require_verified(alone(proofs.make_job("keys", model=module), micro=3))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(value.dtype == torch.float32 for value in module.state_dict().values())


class Quirks(proofs.Attention):
    """Draws with a function, casts to float32, and once by a way that no cast shows."""

    def __init__(self, *, island: bool = False) -> None:
        super().__init__()
        self.like = torch.ones(1, dtype=torch.float32) if island else None

    def forward(self, tokens: Tensor) -> Tensor:
        output = F.dropout(super().forward(tokens), 0.5).float().softmax(-1)
        return output.log() if self.like is None else output.to(self.like.to(output.device)).log()


@pytest.mark.slow
def test_functional_dropout_and_casts_are_held_still_and_said() -> None:
    certificate = alone(proofs.make_job("keys", model=Quirks), micro=3)
    require_verified(certificate)
    notes = " | ".join(certificate.notes)
    assert "random numbers are held at the middle of their distribution in both runs: the model itself (aten" in notes
    assert "casts below float64 are lifted to float64 in both runs: the model itself (aten._to_copy.default)" in notes
    assert "all the same" not in notes


class Chance(proofs.Attention):
    """Draws in every way: a dropout module, dropout and noise as functions, and where asked for what cannot be held."""

    def __init__(self, *, wild: bool = False) -> None:
        super().__init__()
        self.module, self.wild = torch.nn.Dropout(0.1), wild
        self.masked, self.noisy, self.odd = Masked(), Noisy(), Odd()

    def forward(self, tokens: Tensor) -> Tensor:
        output = self.noisy(self.masked(self.module(super().forward(tokens))))
        return self.odd(output) if self.wild else output


class Masked(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)


class Noisy(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class Odd(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty_like(x).geometric_(0.5)


@pytest.mark.slow
def test_the_certificate_says_what_randomness_was_left_out_what_was_held_and_what_could_not_be() -> None:
    certificate = alone(proofs.make_job("keys", model=Chance), micro=3)
    require_verified(certificate)
    off, held = "dropout is off in both runs, so its masks are no part of the proof: module", (
        "random numbers are held at the middle of their distribution in both runs: "
        "masked (aten.bernoulli_.float), noisy (aten.randn_like.default)"
    )  # fmt: skip
    assert {off, held} <= set(certificate.notes)
    assert not any("could not be held" in note for note in certificate.notes)
    with pytest.raises(VerificationError, match=r"could not be held: odd \(aten\.geometric_\.default\)"):
        alone(proofs.make_job("keys", model=lambda: Chance(wild=True)), micro=3)


class Drawn(Dataset[tuple[Tensor, Tensor]]):
    """Makes each sample when it is asked for, from a seed of its own, in float32."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(number)
        return torch.randn(8, generator=draw).float() / 3, torch.randint(0, 4, (), generator=draw)


def test_what_a_data_set_draws_and_casts_is_left_to_it() -> None:
    """Only the model is held still."""

    class Net(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.5).float()

    data = Drawn()
    certificate = alone(proofs.make_job("norm", model=lambda: Net(8, 4), data=data), micro=3)
    require_verified(certificate)
    notes = " | ".join(certificate.notes)
    assert "random numbers are held" in notes, "the job must show what this test is about"
    assert "lifted to float64" in notes


def test_a_model_that_runs_in_no_other_type_is_proved_with_its_casts_lifted() -> None:
    class Policy(proofs.Attention):
        """Casts what a layer is given to a type of its own, whatever its weights are; Keras does."""

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(F.dropout(self.tokens(tokens), 0.5).to(torch.float32))

    certificate = alone(proofs.make_job("keys", model=Policy), micro=3)
    require_verified(certificate)
    notes = " | ".join(certificate.notes)
    assert "lifted to float64 in both runs: the model does not run without that (" in notes
    assert "random numbers are held at the middle" in notes
    assert "all the same" not in notes
    with pytest.raises(RuntimeError, match="must match"):
        alone(proofs.make_job("keys", loss=lambda output, batch: (output - torch.ones(7)).mean()))


@pytest.mark.slow
def test_a_part_in_float32_is_listed_and_bounded_by_the_references_own_rounding() -> None:
    certificate = alone(proofs.make_job("keys", model=lambda: Quirks(island=True)), micro=3)
    assert certificate.verified, certificate.divergent
    assert any("computed below float64 all the same" in note for note in certificate.notes)
    assert all(FLOAT64_BOUND < finding.bound <= 1e-4 for finding in certificate.findings)
    if not torch.cuda.is_available():  # an H200 came to 3e-11
        worst = max(finding.max_difference for finding in certificate.findings)
        assert worst > FLOAT64_BOUND, "else the wider bound would prove nothing"


@pytest.mark.parametrize(("factor", "left"), [(1.0, ""), (1.0 + 1e-8, "gradient of 0.weight at step 0")])
def test_what_rounding_explains_is_granted_and_nothing_more(factor: float, left: str) -> None:
    """Nearly equal samples under a batch norm: the bias before it has a true gradient of zero, as a sum that cancels."""
    data = TensorDataset(proofs.X[:1] + 1e-2 * proofs.X, proofs.Y)
    job = proofs.make_job("norm", data=data, model=lambda: MLP(width=16, layers=2, inputs=8, classes=4, norm=True))
    case = SingleDeviceContext(job, Plan(), open_reference_data(job), (0,))
    truth = case.take_reference()
    referee = Comparator(case, copy_to_float64(truth.start_values), truth.reference.forward_order, in_float64=True)
    other = case.build_reference()  # stands for a right run: it adds up the same samples in another order
    pieces = other.position_groups
    other.position_groups = lambda size: [piece[::-1].copy() for piece in pieces(size)]  # type: ignore[method-assign]
    run = dataclasses.replace(other.step(0), outputs={})  # which come in that order as well
    weight = run.gradients["0.weight"]
    assert weight is not None
    weight.mul_(factor)
    referee.compare_step(run, truth.step(0))
    (bias,) = (each for each in referee.differences if (each.kind, each.name) == ("gradient", "0.bias"))
    assert bias.value > FLOAT64_BOUND, "the job must show what this test is about"
    case.widen_bounds_for_rounding(referee)
    assert referee.divergence_text.startswith(left)
    assert bool(referee.divergence_text) is bool(left)
    assert any("ill-conditioned" in note and "gradient of 0.bias" in note for note in case.notes)
    assert case.bounds.bound_for(Difference(kind="gradient", name="0.weight", step=0, value=0.0)) == FLOAT64_BOUND


WEAK = {
    "a product of means": lambda output: output.mean(0).square().sum(),
    "a neighbour in the batch": lambda output: (output * output.roll(1, 0)).mean(),
}


@pytest.mark.slow
@pytest.mark.parametrize("share", [1e-6, 1e-7])
@pytest.mark.parametrize("kind", WEAK)
def test_samples_that_see_each_other_a_little_do_not_pass_for_rounding(kind: str, share: float) -> None:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), batch[1].flatten()) + share * WEAK[kind](output)

    try:
        certificate = alone(proofs.make_job("keys", loss=loss), micro=4)
    except (PlanError, DivergenceError):  # seen by the profile, or by the run itself
        return
    assert not certificate.verified
    assert "gradient of" in certificate.divergent
    assert all(finding.bound == FLOAT64_BOUND for finding in certificate.findings)


def test_a_choice_that_falls_the_other_way_widens_nothing() -> None:
    """Every weight ties; one rounding breaks the ties, and what follows from that is no measure of rounding."""

    class Tied(proofs.Attention):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.tokens(tokens) * self.gate.max(0).values)

        def __init__(self) -> None:
            super().__init__()
            self.gate = torch.nn.Parameter(torch.ones(5, 16))

    job = proofs.make_job("keys", model=Tied)
    case = SingleDeviceContext(job, Plan(), open_reference_data(job), (0,))
    bounds = case._widen_bounds(FLOAT64_BOUND)
    apart = compare_tensors(
        "gradient",
        case.build_reference(perturbed=True).step(0).gradients,
        case.build_reference().step(0).gradients,
        step=0,
    )
    gate = next(each for each in apart if each.name == "gate")
    assert gate.value > 1e-4, "the job must show what this test is about"
    assert bounds.bound_for(gate) == FLOAT64_BOUND


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # a CPU without bf16 says so
def test_drift_is_told_in_the_plans_own_precision() -> None:
    for precision, least, most in (("fp32", 1e-9, 1e-3), ("bf16", 1e-4, 1.0)):
        certificate = alone(proofs.make_job("keys"), precision=precision)
        require_verified(certificate)
        (loss,) = (finding for finding in certificate.drift if finding.kind == "loss")
        (gradient,) = (finding for finding in certificate.drift if finding.kind == "gradient")
        assert loss.max_difference < most
        assert least < gradient.max_difference < most
        assert "drift leaves out gradients that are zero in truth and rounding alone: key.bias" in certificate.notes


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_a_plan_without_a_precision_drifts_in_the_jobs() -> None:
    named = alone(proofs.make_job("keys"), precision="bf16")
    left = alone(proofs.make_job("keys", precision="bf16"))
    assert left.drift == named.drift


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_on_a_gpu(precision: str) -> None:
    for name in ("gpt", "norm"):
        certificate = verify(
            proofs.make_job(name), Plan(precision=precision), world=World(), device=torch.device("cuda", 0)
        )
        require_verified(certificate)
        assert not any("could not be held" in note for note in certificate.notes)


def test_a_loss_that_is_not_a_number_is_not_verified() -> None:
    def loss(output: Tensor, batch: Any) -> Tensor:
        return output.mean() * math.nan

    certificate = alone(proofs.make_job("keys", loss=loss))
    assert not certificate.verified
    assert "neither run is finite" in certificate.divergent


def test_a_plan_for_other_ranks_is_refused() -> None:
    with pytest.raises(PlanError, match="is for 2 ranks and 1 are here"):
        verify(proofs.make_job("keys"), Plan(mesh=Mesh(dp=2)), world=World())
    with pytest.raises(VerificationError, match="steps=0"):
        verify(proofs.make_job("keys"), Plan(), world=World(), steps=0)


@pytest.mark.slow
def test_a_plan_that_a_training_would_refuse_is_refused() -> None:
    job = proofs.make_job("keys", loss=lambda output, batch: output.mean(0).square().sum())
    with pytest.raises(PlanError, match="a sample's loss depends on the others of its batch"):
        alone(job, micro=4)
    require_verified(alone(job))


def test_a_plan_whose_ranks_would_wait_for_ever_is_refused_on_every_rank(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="the model could not be traced"):
        ranks.run(2, proofs.prove, [("gated", "", {"zero": 3})], timeout=120)


def test_copies_of_whole_numbers_are_compared(ranks: RankPool) -> None:
    (text,) = ranks.run(2, proofs.prove, [("counts", "", {})], timeout=120)[0]
    certificate = Certificate.from_json(text)
    assert certificate.divergent.startswith("seen after step 0: rank 1 holds other numbers than rank 0")


def test_a_certificate_says_where_the_job_could_not_be_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(job: Any) -> Any:
        raise RuntimeError("no luck with this one\nand more")

    monkeypatch.setattr("echelon.profiler.profile", fails)
    said = "whether training would refuse the plan is unknown: the job could not be profiled (RuntimeError: no luck with this one)"
    assert said in alone(proofs.make_job("keys"), micro=4).notes
    assert said not in alone(proofs.make_job("keys")).notes, "one rank with the whole batch has nothing to refuse"
    assert said in verify(proofs.make_job("keys"), Plan(), world=World(), memory=10**12).notes


class Stream(IterableDataset):
    """Tokens in their own order."""

    def __iter__(self) -> Any:
        return zip(proofs.TOKENS[:, :-1], proofs.TOKENS[:, 1:], strict=True)


def test_a_stream_is_verified() -> None:
    job = proofs.make_job("keys", data=Stream(), epochs=None, steps=9)
    certificate = verify(job, Plan(micro=3), world=World(), steps=4)
    require_verified(certificate)
    assert certificate.steps == 4
