"""Which fault of the catalogue has to be seen under which plan, on which models, and what has to be said of it."""

from __future__ import annotations

from typing import NamedTuple

from echelon.plan.certificate import Certificate
from echelon.plan.plan import Plan
from echelon.testing.rank_pool import RankPool
from tests.verifier import proofs


class Caught(NamedTuple):
    """A fault under a plan, the models on which it has to be seen, and what has to be said of it."""

    fault: str
    plan: str
    models: tuple[str, ...]  #: the quickest first
    words: tuple[str, ...]


OWN = "it is what data rank 0's own samples give: the sum over dp is missing"

CAUGHT = [
    Caught("loss times tp", "tp=2", ("mixer", "gpt-untied", "llama"), ("all of these tp = 2 times the reference",)),
    Caught("loss times dp", "dp=2", ("vgg", "gpt-tied", "gpt"), ("all of these dp = 2 times the reference",)),
    Caught("loss times dp", "dp=2 zero=3", ("keys", "vgg", "gpt"), ("all of these dp = 2 times the reference",)),
    Caught("gradients times micro-batches", "micro=2", ("shapes", "vgg", "keys"), ("micro-batches = 4 times the reference",)),
    Caught("mean of micro-batch means", "dp=2 micro=2", ("keys", "gpt-untied", "gpt"), ("mean of the micro-batches' means, weighted by samples",)),
    Caught("micro-batches weigh alike", "dp=2", ("vgg", "shapes", "norm"), ("at step 2", "plain mean of the micro-batches' means")),
    Caught("micro-batch dropped by a stage", "pp=2 micro=2", ("gpt", "gpt-untied", "mixer"), ("micro-batch 4 of 4 is left out",)),
    Caught("data order seeded per rank", "dp=2", ("vgg", "gpt-tied", "shapes"), ("rank 1 read other samples", "its own seed")),
    Caught("one parameter not reduced", "dp=2", ("vgg", "gpt-untied", "gpt"), ("1 of ", OWN)),
    Caught("biases not reduced", "dp=2 micro=2", ("shapes", "gpt-untied", "vgg"), ("all of them biases", OWN)),
    Caught("norm layers not reduced", "dp=2", ("norm", "gpt-untied", "llama"), ("all of them in norm layers", OWN)),
    Caught("norm layers not reduced over tp", "tp=2 sequence", ("gpt-untied", "llama", "transformer"), ("all of them in norm layers", "the sum of their gradients over tp is missing")),
    Caught("no sum over tp in backward", "tp=2", ("mixer", "gpt-tied", "llama"), ("looks like a sum over tp that is missing", "forward looks right")),
    Caught("bias added by every rank", "tp=2", ("mixer", "transformer", "swin"), ("forward is wrong: the first output that is off is that of", "cut over tp: row", "a bias that every rank adds")),
    Caught("reported loss of one rank", "dp=2", ("vgg", "gpt-untied", "norm"), ("loss at step 0", "the gradients agree", OWN)),
    Caught("clip by local norm", "tp=2", ("mixer", "gpt-tied", "llama"), ("gradient norm at step 0", "what rank 0 holds alone")),
    Caught("clip by local norm", "dp=2 zero=2", ("vgg", "gpt", "mixer"), ("gradient norm at step 0", "what rank 0 holds alone")),
    Caught("clip by local norm", "pp=2", ("gpt-untied", "gpt", "mixer"), ("gradient norm at step 0", "what rank 0 holds alone")),
    Caught("norm counts every copy", "tp=2", ("mixer", "gpt-tied", "llama"), ("gradient norm at step 0", "counts every rank's copy")),
    Caught("norm counts every copy", "dp=2", ("vgg", "gpt", "siamese"), ("sqrt(dp) = 1.41421 times the reference", "counts every rank's copy")),
    Caught("tied weight untied", "tp=2", ("gpt", "gpt-tied", "lstm"), ("an untied weight: the model shares",)),
    Caught("tied weight untied over stages", "pp=2", ("gpt", "gpt-tied", "lstm"), ("alone, of a weight that", "an untied weight")),
    Caught("weights seeded per rank", "dp=2", ("norm", "gpt-tied", "vgg"), ("before the first step: rank 1 starts from other numbers", "its own seed")),
    Caught("weights seeded per rank", "tp=2", ("gpt-untied", "mixer", "llama"), ("before the first step: rank 1 starts from other numbers", "its own seed")),
    Caught("dropout masks that differ over tp", "tp=2", ("gpt", "gpt-tied", "lstm", "transformer"), ("with random numbers on", "masks that differ over tp on what is whole")),
    Caught("stale batch-norm buffers", "dp=2", ("norm", "mlp-norm", "resnet"), ("running_mean at step 0", "a stale buffer")),
    Caught("batch-norm buffers of one rank", "dp=2", ("norm", "mlp-norm", "resnet"), ("running_mean at step 0", "each rank has another value of it")),
    Caught("last shard not updated", "dp=2 zero=2", ("shapes", "lora", "efficientnet"), ("what rank 1 of dp holds", "it was not updated")),
    Caught("optimizer state in the wrong order", "dp=2 zero=3", ("keys", "gpt-tied", "vgg"), ("(optimizer state) at step 0", "rank 0 of dp has what belongs to rank 1")),
    Caught("optimizer state in the wrong order", "tp=2", ("gpt-tied", "llama", "mixer"), ("(optimizer state) at step 0", "rank 0 of tp has what belongs to rank 1")),
    Caught("learning rate per micro-batch", "micro=2", ("shapes", "gpt-tied", "vgg"), ("parameter of", "at step 1", "the schedule gives that after 4 steps: it is stepped once per micro-batch")),
    Caught("push lost", "dp=2 exchange=server rows=40", ("users", "clicks", "sparse"), ("at step 0", "the gradients agree")),
    Caught("rows of each rank weigh alike", "dp=2 exchange=server rows=40", ("users", "clicks", "sparse"), ("gradient of users.weight at step 0", "dp = 2 times the reference")),
    Caught("gradients not cleared", "dp=2", ("norm", "gpt-untied", "vgg"), ("at step 1", "the gradient of the step before is still in it")),
]  # fmt: skip


#: Without a fault each of these has to pass.
QUIET = sorted({(model, case.plan) for case in CAUGHT for model in case.models})


def certify(ranks: RankPool, model: str, text: str, fault: str = "") -> Certificate:
    """The proof of a model under a plan, with a fault in the run or without."""
    plan = proofs.plan_for(model, text)
    count = Plan.from_json(plan).ranks
    return Certificate.from_json(ranks.run(count, proofs.prove_broken, model, plan, fault, timeout=150)[0])
