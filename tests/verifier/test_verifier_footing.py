"""What a plan is compared with where one device does not hold the model, and what the certificate says of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from echelon.errors import VerificationError
from echelon.partition.complete_plan import complete
from echelon.plan.certificate import Certificate
from echelon.plan.mesh import Mesh
from echelon.plan.plan import Plan
from echelon.plan.text import from_text
from echelon.profiler import profile, sample_coupling
from echelon.testing.rank_pool import RankError, RankPool
from echelon.verifier.choose_reference import choose_reference, fits_easily, float64_memory, parse_reference
from echelon.verifier.fingerprints import model_hash
from echelon.verifier.verify import verify
from echelon.world import World
from tests.verifier import proofs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.slow
def test_what_a_reference_needs_grows_with_the_model_and_with_the_batch() -> None:
    job = proofs.make_job("gpt")
    small, long = float64_memory(profile(job)), float64_memory(profile(proofs.make_job("gpt", batch_size=16)))
    elements = sum(value.numel() for value in job.model().parameters())
    assert small > 32 * elements, "parameter, gradient and AdamW's two states, eight bytes each"
    assert long > small
    assert fits_easily(job, 4 * 32 * elements)
    assert not fits_easily(job, 4 * 32 * elements - 1)


def test_the_strongest_reference_that_fits_is_taken() -> None:
    job, plan = proofs.make_job("gpt"), Plan(mesh=Mesh(dp=2))
    known = profile(job)
    size = int(float64_memory(known)) + 1

    def chosen(device: torch.device, memory: int, host: int) -> str:
        return choose_reference(plan, job, known, device=device, memory=memory, host_memory=host).kind

    assert chosen(CUDA, size, 0) == "device"
    assert chosen(CUDA, size // 2, size) == "host"
    assert chosen(CUDA, size // 2, size // 2) == "plan"
    assert chosen(CPU, size // 2, size) == "plan", "on a CPU the device is the host"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "other"), [("tp=2", "dp=2 zero=3"), ("dp=2 zero=1", "dp=2 zero=3"), ("dp=2 zero=3", "dp=1 tp=2")]
)
def test_the_other_plan_is_never_the_same_one(text: str, other: str) -> None:
    job = proofs.make_job("gpt")
    footing = choose_reference(complete(from_text(text), job), job, profile(job), device=CPU, memory=1, host_memory=1)
    assert str(footing.plan) == other
    assert f"reference: {other}, as the model needs" in footing.note
    assert footing.note.endswith("an error that both plans share is not seen")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "other"), [("tp=2", "dp=2 zero=3"), ("dp=2 zero=1", "dp=1 tp=2"), ("pp=2 micro=2", "dp=1 tp=2")]
)
def test_where_samples_may_see_each_other_one_of_two_plans_has_whole_batches(text: str, other: str) -> None:
    job = proofs.make_job("gpt")
    unknown = dataclasses.replace(profile(job), samples_coupled=None, coupling_unknown_reason="it is too large")
    footing = choose_reference(complete(from_text(text), job), job, unknown, device=CPU, memory=1, host_memory=1)
    assert str(footing.plan) == other
    with pytest.raises(
        VerificationError, match=r"it is unknown whether samples see each other, because it is too large; give"
    ):
        parse_reference("dp=2 zero=3", Plan(mesh=Mesh(dp=2)), job, unknown)


def test_a_proof_that_tells_what_was_not_known_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_coupling, "MAX_PARAMETERS", 10)
    certificate = verify(proofs.make_job("keys"), Plan(micro=3), world=World())
    assert certificate.verified
    assert any(
        "because the model is too large to try it on a CPU: the reference computes whole" in note
        for note in certificate.notes
    )


def test_what_cannot_be_compared_is_refused() -> None:
    norm, gpt = proofs.make_job("norm"), proofs.make_job("gpt")
    with pytest.raises(VerificationError, match="its samples see each other"):
        choose_reference(Plan(mesh=Mesh(dp=2)), norm, profile(norm), device=CPU, memory=1, host_memory=1)
    with pytest.raises(VerificationError, match="one rank has no other plan; use a smaller batch"):
        choose_reference(Plan(micro=2), gpt, profile(gpt), device=CPU, memory=1, host_memory=1)
    with pytest.raises(VerificationError, match="needs 4 ranks, and the plan has 2"):
        parse_reference("dp=4", Plan(mesh=Mesh(dp=2)), gpt)
    with pytest.raises(VerificationError, match="compared with itself proves nothing"):
        parse_reference("dp=2", Plan(mesh=Mesh(dp=2)), gpt)


def test_a_reference_on_the_host_is_as_strong_and_is_told() -> None:
    certificate = verify(proofs.make_job("keys"), Plan(micro=3), world=World(), reference="host")
    assert certificate.verified
    assert certificate.reference == "host"
    assert certificate.limitation == ""
    assert "reference: one process on the host's CPU, as requested" in certificate.notes


def certify(ranks: RankPool, plan: str, fault: str = "") -> Certificate:
    document = proofs.plan_for("gpt", plan)
    texts = ranks.run(2, proofs.prove_broken, "gpt", document, fault, memory=10_000, timeout=150)
    assert texts[0] == texts[1]
    return Certificate.from_json(texts[0])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp=2", "pp=2 micro=2"])
def test_a_model_that_does_not_fit_is_compared_with_another_plan(ranks: RankPool, plan: str) -> None:
    certificate = certify(ranks, plan)
    assert certificate.verified, certificate.divergent
    assert certificate.reference == "plan"
    assert certificate.reference_plan is not None
    assert certificate.reference_plan.mesh == Mesh(dp=2)
    assert certificate.reference_plan.zero == 3
    assert certificate.model == model_hash(proofs.make_job("gpt").model())
    assert "an error that both share is not seen" in certificate.limitation
    assert certificate.notes[0].startswith("reference: dp=2 zero=3")
    assert "one device has 10.0 kB: an error that both plans share is not seen" in certificate.notes[0]
    kinds = {each.kind: each.tensors for each in certificate.findings}
    expected = {"start", "gradient", "loss", "norm", "parameter", "optimizer", "copy", "output"}
    assert kinds.keys() == (expected | {"draw"} if plan == "tp=2" else expected)  # it has dropout
    assert kinds["output"] == 8, "the two plans share the samples out in other ways: they are compared one by one"


@pytest.mark.slow
def test_a_fault_of_one_of_the_two_plans_is_seen(ranks: RankPool) -> None:
    certificate = certify(ranks, "tp=2", "loss times tp")
    assert not certificate.verified
    assert certificate.divergent.startswith("gradient of tokens.weight at step 0")
    assert 'either the plan is wrong or its reference "dp=2 zero=3' in certificate.divergent


@pytest.mark.slow
def test_a_fault_that_both_plans_share_is_not_seen_as_the_certificate_says(ranks: RankPool) -> None:
    assert certify(ranks, "dp=2 zero=1", "loss times dp").verified


def test_a_limit_is_told_to_every_rank_or_refused_on_every_rank(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="its samples see each other"):
        ranks.run(2, proofs.prove_broken, "norm", proofs.plan_for("norm", "dp=2"), "", memory=10_000, timeout=60)
