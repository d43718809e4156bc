"""The catalogue: every fault is caught on three models and named; runs without faults pass. (ECHELON_ZOO=all: all three, else one.)"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import NamedTuple

import pytest

from echelon.plan.certificate import Certificate
from echelon.plan.plan import Plan
from echelon.testing.catalogue import CATALOGUE
from echelon.testing.ranks import Pool
from echelon.verifier.compare import BOUND
from tests.verifier import proofs

ALL = os.environ.get("ECHELON_ZOO") == "all"


class Caught(NamedTuple):
    """A fault under a plan, the models on which it has to be seen, and what has to be said of it."""

    fault: str
    plan: str
    models: tuple[str, ...]
    words: tuple[str, ...]


OWN = "it is what data rank 0's own samples give: the sum over dp is missing"

CAUGHT = [
    Caught("loss times tp", "tp=2", ("gpt-untied", "mixer", "llama"), ("all of these tp = 2 times the reference",)),
    Caught("loss times dp", "dp=2", ("gpt-tied", "vgg", "gpt"), ("all of these dp = 2 times the reference",)),
    Caught("loss times dp", "dp=2 zero=3", ("keys", "vgg", "gpt"), ("all of these dp = 2 times the reference",)),
    Caught("gradients times micro-batches", "micro=2", ("shapes", "vgg", "keys"), ("micro-batches = 4 times the reference",)),
    Caught("mean of micro-batch means", "dp=2 micro=2", ("gpt-untied", "gpt", "keys"), ("mean of the micro-batches' means, weighed by samples",)),
    Caught("micro-batches weigh alike", "dp=2", ("vgg", "shapes", "norm"), ("at step 2", "plain mean of the micro-batches' means")),
    Caught("micro-batch dropped by a stage", "pp=2 micro=2", ("gpt-untied", "gpt", "mixer"), ("micro-batch 4 of 4 is left out",)),
    Caught("data order seeded per rank", "dp=2", ("gpt-tied", "vgg", "shapes"), ("rank 1 read other samples", "its own seed")),
    Caught("one parameter not reduced", "dp=2", ("gpt-untied", "vgg", "gpt"), ("1 of ", OWN)),
    Caught("biases not reduced", "dp=2 micro=2", ("gpt-untied", "vgg", "shapes"), ("all of them biases", OWN)),
    Caught("norm layers not reduced", "dp=2", ("gpt-untied", "llama", "norm"), ("all of them in norm layers", OWN)),
    Caught("norm layers not reduced over tp", "tp=2 sequence", ("gpt-untied", "llama", "transformer"), ("all of them in norm layers", "the sum of their gradients over tp is missing")),
    Caught("no sum over tp in backward", "tp=2", ("gpt-tied", "mixer", "llama"), ("looks like a sum over tp that is missing", "forward looks right")),
    Caught("bias added by every rank", "tp=2", ("transformer", "mixer", "swin"), ("forward is wrong: the first output that is off is that of", "cut over tp: row", "a bias that every rank adds")),
    Caught("reported loss of one rank", "dp=2", ("gpt-untied", "vgg", "norm"), ("loss at step 0", "the gradients agree", OWN)),
    Caught("clip by local norm", "tp=2", ("gpt-tied", "llama", "mixer"), ("gradient norm at step 0", "what rank 0 holds alone")),
    Caught("clip by local norm", "dp=2 zero=2", ("vgg", "gpt", "mixer"), ("gradient norm at step 0", "what rank 0 holds alone")),
    Caught("clip by local norm", "pp=2", ("gpt-untied", "gpt", "mixer"), ("gradient norm at step 0", "what rank 0 holds alone")),
    Caught("norm counts every copy", "tp=2", ("gpt-tied", "llama", "mixer"), ("gradient norm at step 0", "counts every rank's copy")),
    Caught("norm counts every copy", "dp=2", ("vgg", "gpt", "siamese"), ("sqrt(dp) = 1.41421 times the reference", "counts every rank's copy")),
    Caught("tied weight untied", "tp=2", ("gpt-tied", "gpt", "lstm"), ("an untied weight: the model shares",)),
    Caught("tied weight untied over stages", "pp=2", ("gpt-tied", "gpt", "lstm"), ("alone, of a weight that", "an untied weight")),
    Caught("weights seeded per rank", "dp=2", ("gpt-tied", "vgg", "norm"), ("before the first step: rank 1 starts from other numbers", "its own seed")),
    Caught("weights seeded per rank", "tp=2", ("gpt-untied", "mixer", "llama"), ("before the first step: rank 1 starts from other numbers", "its own seed")),
    Caught("stale batch-norm buffers", "dp=2", ("mlp-norm", "resnet", "norm"), ("running_mean at step 0", "a stale buffer")),
    Caught("batch-norm buffers of one rank", "dp=2", ("mlp-norm", "resnet", "norm"), ("running_mean at step 0", "each rank has another value of it")),
    Caught("last shard not updated", "dp=2 zero=2", ("shapes", "lora", "efficientnet"), ("what rank 1 of dp holds", "it was not updated")),
    Caught("optimizer state in the wrong order", "dp=2 zero=3", ("gpt-tied", "vgg", "keys"), ("(optimizer state) at step 0", "rank 0 of dp has what belongs to rank 1")),
    Caught("optimizer state in the wrong order", "tp=2", ("gpt-tied", "llama", "mixer"), ("(optimizer state) at step 0", "rank 0 of tp has what belongs to rank 1")),
    Caught("learning rate per micro-batch", "micro=2", ("gpt-tied", "vgg", "shapes"), ("parameter of", "at step 1", "the schedule gives that after 4 steps: it is stepped once per micro-batch")),
    Caught("gradients not cleared", "dp=2", ("gpt-untied", "vgg", "norm"), ("at step 1", "the gradient of the step before is still in it")),
]  # fmt: skip


def certify(ranks: Pool, model: str, text: str, fault: str = "") -> Certificate:
    plan = proofs.plan_for(model, text)
    count = Plan.from_json(plan).ranks
    return Certificate.from_json(ranks.run(count, proofs.prove_broken, model, plan, fault, timeout=150)[0])


def test_every_fault_of_the_catalogue_is_tried_on_three_models() -> None:
    for name in CATALOGUE:
        assert len({model for case in CAUGHT if case.fault == name for model in case.models}) >= 3, name
    assert len(CATALOGUE) >= 12


def test_the_documented_catalogue_is_this_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "verify.md").read_text()
    table = text.partition("| fault | what happens | shows under |")[2].split("\n\n")[0]
    rows = [tuple(cell.strip() for cell in line.split("|")[1:4]) for line in table.splitlines()[2:]]
    assert rows == [(each.name, each.what, each.needs) for each in CATALOGUE.values()]


SOME = [(case, case.models[number % 3]) for number, case in enumerate(CAUGHT)]
EACH = [(case, model) for case in CAUGHT for model in case.models] if ALL else SOME


@pytest.mark.parametrize(("case", "model"), EACH, ids=[f"{case.fault}-{case.plan}-{model}" for case, model in EACH])
def test_a_fault_is_caught_and_named(ranks: Pool, case: Caught, model: str) -> None:
    certificate = certify(ranks, model, case.plan, case.fault)
    assert not certificate.verified
    for words in case.words:
        assert words in certificate.divergent


GOOD = [(model, case.plan) for case in CAUGHT for model in case.models]
QUIET = sorted(set(GOOD)) if ALL else random.Random(5).sample(sorted(set(GOOD)), 6)


@pytest.mark.parametrize(("model", "plan"), QUIET, ids=[f"{plan}-{model}" for model, plan in QUIET])
def test_no_false_alarm_where_there_is_no_fault(ranks: Pool, model: str, plan: str) -> None:
    certificate = certify(ranks, model, plan)
    assert certificate.verified, certificate.divergent
    assert all(finding.worst <= BOUND for finding in certificate.findings)
    assert {"start", "copy"} <= {finding.kind for finding in certificate.findings}
    assert not any(finding.kind == "output" for finding in certificate.findings), "only a proof that failed looks again"
