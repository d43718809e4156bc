"""No false alarms: right plans of unusual jobs pass, and what they reach is left as it was."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from echelon.engine.process_groups import WorldCommunicator
from echelon.engine.run import Run
from echelon.errors import DivergenceError, VerificationError
from echelon.job import Job
from echelon.plan.certificate import Certificate
from echelon.plan.plan import Plan
from echelon.testing.fault_catalogue import inject_fault
from echelon.testing.rank_pool import RankPool
from echelon.verifier.candidate_run import CandidateRun
from echelon.verifier.context import Comparator
from echelon.verifier.diagnose_failure import diagnose
from echelon.verifier.reference_data import open_reference_data
from echelon.verifier.side_by_side import ProofSetup, run_side_by_side
from echelon.verifier.single_device import SingleDeviceContext
from echelon.verifier.spot_check import SpotChecks
from echelon.verifier.verify import verify
from echelon.world import World
from tests.verifier import unusual


def judged(job: Job, plan: Plan) -> tuple[Comparator, SingleDeviceContext]:
    """The proof without a profile, which takes longer than all the rest."""
    feed = open_reference_data(job)
    with WorldCommunicator(World(), None) as ranks:
        case = SingleDeviceContext(job, plan, feed, feed.choose_steps(2))
        setup = ProofSetup(
            job=job, plan=plan, ranks=ranks, steps=feed.choose_steps(2), determinism=case.determinism, context=case
        )
        result = run_side_by_side(setup)
        assert result.comparator is not None
        assert result.loss_state is None, result.loss_state
        case.widen_bounds_for_rounding(result.comparator)
        return result.comparator, case


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", unusual.JOBS)
def test_a_right_plan_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith(("hf", "batch_enc")):
        pytest.importorskip("transformers")
    if name.startswith("keras"):
        monkeypatch.setenv("KERAS_BACKEND", "torch")
        pytest.importorskip("keras")
    proof, case = judged(unusual.JOBS[name](), Plan(micro=3))
    assert proof.first_divergence is None, proof.divergence_text
    assert not case.bounds.by_tensor, "rounding is granted nothing: the job computes in float64"


#: Those whose ranks could come apart, or whose copies could be missed under sharding.
TWO_RANKS = [
    *((name, "dp=2 micro=3") for name in (
        "optimizer_that_edits_gradients", "optimizer_that_draws", "muon", "embedding_with_max_norm", "numpy_random_numbers",
        "python_random_numbers", "generators_of_the_model", "loss_object_with_state", "loss_that_reads_the_module",
        "factory_around_a_module", "factory_that_gives_the_same_module", "dataclass_batches", "script_module",
        "empty_and_integer_parameters",
    )),
    *((name, "dp=2 zero=3") for name in (
        "factory_around_a_module", "distillation", "optimizer_that_draws",
    )),
    *((name, "pp=2 micro=4") for name in ("distillation", "loss_object_with_state", "dataclass_batches")),
]  # fmt: skip


@pytest.mark.slow
def test_right_plans_of_two_ranks_pass(ranks: RankPool) -> None:
    texts = ranks.run(2, unusual.prove, TWO_RANKS, timeout=300)[0]
    answers = dict(zip(TWO_RANKS, texts, strict=True))
    found = {proof: Certificate.from_json(text) for proof, text in answers.items() if text.startswith("{")}
    assert answers.keys() == found.keys(), {proof: text for proof, text in answers.items() if proof not in found}
    wrong = {proof: each.divergent for proof, each in found.items() if not each.verified}
    assert not wrong


class _OnOneDevice(unusual._Layers):
    """Code that asks for whole batches."""

    def change(self, x: Tensor) -> Tensor:
        return x[:4] + x[4:8]


def test_what_fails_under_a_plan_alone_is_an_answer() -> None:
    def halves(output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[-1][:4])

    job = unusual.job(model=_OnOneDevice, loss=halves, drop_last=True)
    with pytest.raises(
        VerificationError, match=r'under "dp=1 micro=3" the job fails where one device does not \(RuntimeError'
    ):
        judged(job, Plan(micro=3))


def test_what_a_job_reaches_is_left_as_it_was() -> None:
    loss, module = unusual._Average(), unusual.net()
    calls = [0]

    def counted(output: Tensor, batch: Any) -> Tensor:
        calls[0] += 1
        return loss(output, batch) + module[0].weight.square().sum()  # type: ignore[index, union-attr]

    before = {name: value.clone() for name, value in module.state_dict().items()}
    verify(unusual.job(model=module, loss=counted), Plan(), world=World())
    assert calls == [0]
    assert not loss.mean.any()
    assert loss.weights.dtype == torch.float32
    for name, value in module.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, before[name])
        assert module.get_parameter(name).grad is None


def test_a_penalty_reads_the_weights_that_are_trained() -> None:
    """Against a loop written out: with the user's own weights, which never move, the second step would differ."""
    module = unusual.net()
    job = unusual.job(
        model=module,
        loss=lambda o, b: F.cross_entropy(o, b[-1]) + sum(p.square().sum() for p in module.parameters()),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    feed = open_reference_data(job)
    case = SingleDeviceContext(job, Plan(), feed, (0, 1))
    reference, plain = case.build_reference(), unusual.net().double()
    plain.load_state_dict(module.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in (0, 1):
        record = reference.step(step)
        x, y = feed.read(step, torch.arange(8).numpy())
        optimizer.zero_grad()
        loss = F.cross_entropy(plain(x.double()), y) + sum(p.square().sum() for p in plain.parameters())
        loss.backward()
        assert record.loss.item() == pytest.approx(loss.item(), rel=1e-12)
        optimizer.step()


def test_half_precision_inside_an_optimizer_is_noted() -> None:
    certificate = verify(unusual.JOBS["muon"](), Plan(), world=World())
    assert certificate.verified, certificate.divergent
    assert any("optimizers' steps" in note and "bfloat16" in note for note in certificate.notes), certificate.notes


def test_draws_that_cannot_be_held_prove_no_plan_that_parts_batches() -> None:
    job = unusual.JOBS["random_numbers_that_cannot_be_held"]()
    with pytest.raises(
        VerificationError, match=r"could not be held: the model itself .* it cannot be determined whether samples"
    ):
        verify(job, Plan(micro=3), world=World())
    assert verify(job, Plan(), world=World()).verified


class _Spoiled(nn.Module):
    """Wrong under micro-batches, in a way that held random numbers must not hide."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.rand(()) * len(x)


def test_held_random_numbers_hide_no_mistake() -> None:
    assert judged(unusual.job(model=_Spoiled), Plan(micro=3))[0].first_divergence is not None


# What is no plan's fault, or not the one that it looks like


class _Entropy(unusual._Layers):
    def change(self, x: Tensor) -> Tensor:
        return x * (1 + int.from_bytes(os.urandom(2), "big") * 1e-6)


class _Samples(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return unusual.X[index] + int.from_bytes(os.urandom(2), "big") * 1e-5, unusual.Y[index]


def test_a_job_that_differs_from_itself_is_reported_as_such() -> None:
    certificate = verify(unusual.job(model=_Entropy), Plan(), world=World())
    assert not certificate.verified
    assert not certificate.deterministic
    assert certificate.findings[0].kind == "self"
    assert certificate.divergent.startswith("the job is not deterministic: two runs of one device differ by")
    assert "first in the output of head" in certificate.divergent
    assert Certificate.from_json(certificate.to_json()).deterministic is False


def test_data_with_entropy_of_its_own_is_reported_as_such() -> None:
    certificate = verify(unusual.job(data=_Samples()), Plan(), world=World())
    assert not certificate.deterministic
    assert certificate.divergent.startswith("the data is not deterministic: the batch of step 0 differs")


def test_a_wrong_plan_of_a_deterministic_job_is_the_plans_fault() -> None:
    with inject_fault("gradients times micro-batches"):
        certificate = verify(unusual.job(), Plan(micro=2), world=World())
    assert not certificate.verified
    assert certificate.deterministic


class _Teacher(unusual._Layers):
    """A mean teacher that moves with every call."""

    def __init__(self, *, used: bool = True) -> None:
        super().__init__()
        self.teacher, self.used = nn.Linear(8, 8).requires_grad_(False), used

    def change(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.hidden.weight, 0.1)
        return x + self.teacher(x) if self.used else x


class _Counts(unusual._Layers):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def change(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 0.1 * self.calls)


class _Spectral(unusual._Layers):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.utils.parametrizations.spectral_norm(self.hidden)


def _growing() -> Any:
    calls = [0]

    def loss(output: Tensor, batch: Any) -> Tensor:
        calls[0] += 1
        return F.cross_entropy(output * (1 + 0.1 * calls[0]), batch[-1])

    return loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "what"),
    [
        (unusual.job(model=_Counts), "forward changes calls at each call"),
        (unusual.job(loss=_growing()), "the loss, or what forward calls, changes something that it keeps at each call"),
    ],
    ids=["counter", "loss"],
)
def test_state_that_moves_with_every_call_is_named(job: Job, what: str) -> None:
    certificate = verify(job, Plan(micro=3), world=World())
    assert certificate.deterministic
    assert what in certificate.divergent
    assert "micro-batches call it 3 times a step" in certificate.divergent


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [_Teacher, lambda: _Teacher(used=False), _Spectral], ids=["teacher", "unused teacher", "spectral norm"]
)
def test_state_that_moves_once_a_step_is_proved(model: Any) -> None:
    """The engine changes it once a step, however many micro-batches call it."""
    assert verify(unusual.job(model=model), Plan(micro=3), world=World()).verified


def test_samples_that_see_each_other_are_no_state() -> None:
    def contrastive(output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output @ output.T, torch.arange(len(output)))

    proof, case = judged(unusual.job(loss=contrastive), Plan(micro=4))
    ranks = WorldCommunicator(World(), None)
    try:
        with CandidateRun(case.job, case.plan, ranks, case.determinism, torch.float64) as trial:
            found = diagnose(trial, ranks, case.steps[:1], case, proof)
    finally:
        ranks.close()
    assert found is not None
    assert any("samples of a batch see each other" in each for each in found.remarks), found.remarks


def test_many_steps_are_compared_with_what_begins_late() -> None:
    class Late(torch.optim.SGD):
        """Scales its steps from the sixth on, as an engine that cut a tensor would not."""

    with pytest.MonkeyPatch.context() as patch:
        usual = Run.update

        def update(run: Run, *args: Any) -> Any:
            step = usual(run, *args)
            if run.step_number == 6 and run.precision == "fp32":
                with torch.no_grad():
                    run.model.head.bias += 1e-3  # type: ignore[union-attr, operator]
            return step

        patch.setattr(Run, "update", update)
        job = unusual.job(model=unusual._Layers, optimizer=lambda p: Late(p, lr=0.1), epochs=9)
        assert verify(job, Plan(), world=World()).verified
        assert "parameter of head.bias at step 5" in verify(job, Plan(), world=World(), steps=7).divergent


@pytest.mark.parametrize("name", ["loss_that_reads_the_module", "loss_object_with_state", "hf_qwen2_moe"])
def test_spot_checks_of_right_steps_find_nothing(name: str) -> None:
    """In the middle of a training: the loss reads the run's live module, and class weights are in the run's precision."""
    if name.startswith("hf"):
        pytest.importorskip("transformers")
    job = unusual.JOBS[name]()
    pristine = copy.deepcopy(job.model) if isinstance(job.model, nn.Module) else None
    with Run(job, Plan(), World()) as run:
        checks = SpotChecks(job, run, pristine, None)
        for batch in run.batches():
            checks.check_step(batch)
        assert checks.count == run.step_number == 3


def test_a_spot_check_sees_a_gradient_that_is_off() -> None:
    job = unusual.JOBS["loss_that_reads_the_module"]()
    pristine = copy.deepcopy(job.model)
    with Run(job, Plan(), World()) as run:
        checks = SpotChecks(job, run, pristine, None)  # type: ignore[arg-type]
        usual = run.backward

        def halved(batch: Any) -> Tensor:
            found = usual(batch)
            run.model[0].weight.grad *= 0.5  # type: ignore[index, union-attr, operator]
            return found

        run.backward = halved  # type: ignore[method-assign]
        with pytest.raises(DivergenceError, match=r"gradient of 0\.weight"):
            checks.check_step(next(run.batches()))


def test_a_spot_check_against_zero_says_both_numbers() -> None:
    job = unusual.job(loss=lambda output, batch: 0 * output.sum())
    with Run(job, Plan(), World()) as run:
        checks = SpotChecks(job, run, None, None)
        usual = run.backward
        run.backward = lambda batch: usual(batch) + 0.25  # type: ignore[method-assign]
        with pytest.raises(DivergenceError, match=r'the loss under "dp=1" is 0\.25, and 0 is what one device computes'):
            checks.check_step(next(run.batches()))


class TiesLate(nn.Module):
    """Makes one layer's weight that of another in its second call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last, self.calls = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            self.second.weight = self.first.weight
        return self.last(self.second(self.first(x)))


def test_a_spot_check_names_the_parameter_that_changed_its_place() -> None:
    job = unusual.job(model=TiesLate)
    with Run(job, Plan(), World()) as run:
        checks = SpotChecks(job, run, None, None)
        first, second, third = run.batches()
        run.step(first)
        run.step(second)
        checks.check_step(third)
        assert "second.weight is the same parameter as first.weight since forward replaced it" in checks.stop_reason
