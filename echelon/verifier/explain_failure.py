"""Explain a failed proof in one sentence, with the remedy where there is one.

What is measured is stated as a fact ("it is what rank 0's own samples give"), what merely fits as a guess ("looks like").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from echelon.plan.placement import compute_shard_sizes
from echelon.plan.plan import Plan
from echelon.verifier.compare import FLOAT64_BOUND, NOT_COMPARABLE, Bounds, Difference, to_float64
from echelon.verifier.compare_outputs import format_names
from echelon.verifier.first_divergence import (
    FACTOR_TOLERANCE,
    TensorPair,
    equals_candidate_tensor,
    exact_ratio,
    forward_position,
    parameter_name,
    scalar_multiple,
)
from echelon.verifier.known_bugs import STATE_PER_CALL, KnownBug
from echelon.verifier.reference import StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The first divergent step in both runs, and what else is known."""

    divergence: Difference
    differences: Sequence[Difference]
    bounds: Bounds
    plan: Plan
    micro_batch_count: int  #: of each data rank
    actual: StepRecord
    expected: StepRecord
    tensors_before: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)  #: the reference's, by kind
    previous_gradients: Mapping[str, Tensor | None] = field(default_factory=dict)  #: the reference's in the step before
    known_bugs: Iterable[KnownBug] = ()
    #: Parameter -> how many ranks hold the same part of it, and the pipeline ranks that do.
    replication: Mapping[str, tuple[int, frozenset[int]]] = field(default_factory=dict)
    module_classes: Mapping[str, str] = field(default_factory=dict)  #: by parameter
    aliases: Mapping[str, str] = field(default_factory=dict)  #: second name of a tied parameter -> its first
    forward_order: Mapping[str, int] = field(default_factory=dict)
    steps_by_rate: Mapping[float, int] = field(
        default_factory=dict
    )  #: how often a schedule is stepped for a learning rate
    forward_agrees: bool | None = None  #: whether the modules' outputs do; None: unknown
    changed_by_forward: Sequence[str] = ()  #: in the model
    loss_changes_on_repeat: Callable[[], bool] = lambda: False  #: computed again on the same samples

    @property
    def same_kind(self) -> list[Difference]:
        return [difference for difference in self.differences if difference.kind == self.divergence.kind]

    @property
    def out_of_bounds(self) -> list[Difference]:
        """Those of them that exceed their bound."""
        return [difference for difference in self.same_kind if not self.bounds.allows(difference)]

    def agrees(self, kind: str) -> bool:
        """Whether everything of a kind is within bounds."""
        return all(self.bounds.allows(difference) for difference in self.differences if difference.kind == kind)

    def value_before(self) -> Tensor | None:
        """The divergent parameter or buffer before the step, in float64."""
        value = self.tensors_before.get(self.divergence.kind, {}).get(self.divergence.name)
        return None if value is None else to_float64(value)


_EXPLAINED_BY_KIND = {
    "copy": "what the ranks hold as copies diverges: looks like an update or a reduction that some ranks did not take part in",
    "draw": "all agrees with dropout off: looks like masks that differ over tp on what is whole on every rank; its ranks have to draw from "
    "one seed there",
    "output": "the loss and every gradient agree: the loss does not use what is off, or not so that it matters",
}


def explain(evidence: Evidence) -> str:
    """What the mistake looks like, with the remedy where there is one; empty: unknown."""
    kind = evidence.divergence.kind
    if kind == "start":
        return f"{_describe_extent(evidence)}; looks like weights that each rank drew with its own seed: rank 0's have to be sent to all"
    if kind in _EXPLAINED_BY_KIND:
        return _EXPLAINED_BY_KIND[kind]
    pair = TensorPair.find(evidence.divergence, evidence.actual, evidence.expected)
    if evidence.divergence.value == NOT_COMPARABLE or pair is None:
        return _explain_untied_weight(evidence)
    explanations = {
        "gradient": _explain_gradient, "loss": _explain_loss, "norm": _explain_norm, "buffer": _explain_buffer,
        "parameter": _explain_parameter, "optimizer": _explain_optimizer,
    }  # fmt: skip
    return ", ".join(filter(None, (_describe_extent(evidence), explanations[kind](evidence, pair))))


def _describe_extent(evidence: Evidence) -> str:
    same_kind, out_of_bounds = evidence.same_kind, evidence.out_of_bounds
    if len(same_kind) < 2:
        return ""
    kind = evidence.divergence.kind
    plural = {"optimizer": "optimizer states", "start": "tensors", "copy": "tensors"}.get(kind, f"{kind}s")
    text = f"{len(out_of_bounds)} of {len(same_kind)} {plural} are off"
    trait = _common_trait(evidence, [parameter_name(difference) for difference in out_of_bounds])
    return f"{text}, {trait}" if trait and 1 < len(out_of_bounds) < len(same_kind) else text


def _common_trait(evidence: Evidence, names: Sequence[str]) -> str:
    classes = {evidence.module_classes.get(name, "") for name in names}
    if all("norm" in name.lower() for name in classes):
        return f"all of them in norm layers ({', '.join(sorted(classes))})"
    if all(name.endswith("bias") for name in names):
        return "all of them biases"
    stages = {evidence.replication[name][1] for name in names if name in evidence.replication}
    if len(stages) == 1 and len(next(iter(stages))) == 1 and evidence.plan.mesh.pp > 1:
        return f"all of them on rank {min(next(iter(stages)))} of the pipeline"
    return ""


def _explain_gradient(evidence: Evidence, pair: TensorPair) -> str:
    explanation = _explain_untied_weight(evidence) or _explain_constant_factor(evidence, pair)
    if explanation := explanation or _match_known_bug(evidence, pair):
        return explanation
    previous = evidence.previous_gradients.get(evidence.divergence.name)
    if previous is not None and scalar_multiple(pair.actual - pair.expected, previous) is not None:
        return "the gradient of the step before is still in it: clear gradients after every step"
    if shard := describe_wrong_shard(pair, evidence.plan):
        return f"only {shard} is off"
    partial_names = {name for segment in evidence.plan.tensor.segments for name in segment.partial_gradients}
    if all(difference.name in partial_names for difference in evidence.out_of_bounds):
        return "each rank of tp uses them on its part of the sequence: the sum of their gradients over tp is missing"
    explanation = _explain_wrong_backward(evidence)
    if explanation or evidence.forward_agrees is False:  # a wrong forward is described elsewhere
        return explanation
    text = "by no common factor"
    if evidence.agrees("loss") and evidence.plan.mesh.tp > 1:
        return f"{text}, and the loss agrees: backward is wrong; looks like a sum over tp that is missing there"
    return f"{text}: looks like micro-batches or ranks that are weighted wrongly, or samples that are left out"


def _explain_untied_weight(evidence: Evidence) -> str:
    name = next((item.name for item in evidence.differences if item.name in evidence.aliases), None)
    if name is None:
        return ""
    names = f"{evidence.aliases[name]} and {name}"
    return f"an untied weight: the model shares {names}, the plan's run has two parameters; tie them again after they are cut"


def _explain_constant_factor(evidence: Evidence, pair: TensorPair) -> str:
    factor = exact_ratio(pair)
    if factor is None:
        return ""
    explanation = _explain_factor(factor, evidence)
    if not explanation:
        return f"{factor:.6g} times the reference exactly" if pair.expected.numel() > 1 else ""
    others = evidence.out_of_bounds
    pairs = [TensorPair.find(difference, evidence.actual, evidence.expected) for difference in others]
    ratios = [None if other is None else exact_ratio(other) for other in pairs]
    share_factor = all(r is not None and abs(r - factor) <= FACTOR_TOLERANCE * abs(factor) for r in ratios)
    return f"all of these {explanation}" if len(others) > 1 and share_factor else explanation


def _match_known_bug(evidence: Evidence, pair: TensorPair) -> str:
    description = next((bug.description for bug in evidence.known_bugs if equals_candidate_tensor(bug.value, pair)), "")
    if description != STATE_PER_CALL:
        return description
    if evidence.changed_by_forward or evidence.loss_changes_on_repeat():
        return _explain_state_per_call(evidence)
    return (
        "it is the sum of the micro-batches, each computed by itself: samples of a batch see each other, and splitting it trains another "
        "objective; keep the batch whole (dp=1 without micro=), or make the loss of each sample its own"
    )


def _explain_state_per_call(evidence: Evidence) -> str:
    state_names = format_names(evidence.changed_by_forward) or "something that it keeps"
    changer = "forward" if evidence.changed_by_forward else "the loss, or what forward calls,"
    calls = (
        f"micro-batches call it {evidence.micro_batch_count} times a step, and one device calls it once: train without micro=, or change it once a step"
        if evidence.micro_batch_count > 1
        else "each rank changes its own copy: change it from what all ranks hold, once a step"
    )
    return f"{changer} changes {state_names} at each call, and {calls}"


def _explain_wrong_backward(evidence: Evidence) -> str:
    """Where backward goes wrong, if the gradients of the last modules are right."""
    order, out_of_bounds = evidence.forward_order, evidence.out_of_bounds
    last = max((forward_position(item.name, order) for item in out_of_bounds), default=0)
    agreeing = filter(evidence.bounds.allows, evidence.same_kind)
    has_right_end = any(forward_position(item.name, order) > last for item in agreeing)
    if not evidence.agrees("loss") or not has_right_end or len(out_of_bounds) < 2:
        return ""
    path = next((path for path, position in order.items() if position == last), "") or "the model itself"
    axes = [axis for axis in ("tp", "dp", "pp") if getattr(evidence.plan.mesh, axis) > 1]
    return (
        f"the loss agrees, and of the gradients those of all modules after {path}: backward is right until there; looks like a sum over "
        f"{' or '.join(axes)} that is missing where the gradient goes on"
    )


def _explain_loss(evidence: Evidence, pair: TensorPair) -> str:
    explanation = _explain_constant_factor(evidence, pair) or _match_known_bug(evidence, pair)
    if not evidence.agrees("gradient"):
        return explanation
    prefix = "the gradients agree: only the value that is reported is off"
    return f"{prefix}; {explanation}" if explanation else prefix


def _explain_norm(evidence: Evidence, pair: TensorPair) -> str:
    norm, squares_with_copies = float(pair.actual), 0.0
    for name, grad in evidence.expected.gradients.items():
        if grad is not None:
            copies, _ = evidence.replication.get(name, (1, frozenset()))
            squares_with_copies += copies * float(torch.linalg.vector_norm(to_float64(grad))) ** 2
    norm_with_copies = squares_with_copies**0.5
    local_norm = None if evidence.actual.local_norm is None else float(evidence.actual.local_norm)
    if local_norm and abs(norm / local_norm - 1) < FACTOR_TOLERANCE:
        return "the gradients agree: the norm is that of what rank 0 holds alone; add up the squares over the ranks before the root"
    explanation = _explain_constant_factor(evidence, pair)
    if norm_with_copies and abs(norm / norm_with_copies - 1) < FACTOR_TOLERANCE:
        text = "the gradients agree: the norm counts every rank's copy of parameters that are not cut; divide each square by its copies"
        return f"{explanation.partition(':')[0]}; {text}" if explanation else text
    return explanation or "the gradients agree: looks like a norm over some of them, or over some of them twice"


def _explain_buffer(evidence: Evidence, pair: TensorPair) -> str:
    name, before = evidence.divergence.name, evidence.value_before()
    if before is not None and equals_candidate_tensor(before, pair):
        return "the gradients agree: a stale buffer, as it was before the step"
    replicas = [item for item in evidence.differences if (item.kind, item.name) == ("copy", name)]
    if not all(map(evidence.bounds.allows, replicas)):
        return "the gradients agree: each rank has another value of it; reduce it over dp"
    if name in evidence.changed_by_forward:
        return f"the gradients agree: {_explain_state_per_call(evidence)}"
    return (
        "the gradients agree: looks like a buffer that is updated another number of times: once for each micro-batch here and once for the "
        "batch on one device, or the other way round; without micro= it is the same"
    )


def _explain_parameter(evidence: Evidence, pair: TensorPair) -> str:
    prefix = "the gradients agree"
    if evidence.divergence.name in evidence.changed_by_forward:
        return f"{prefix}: {_explain_state_per_call(evidence)}"
    for a, b in zip(evidence.actual.learning_rates, evidence.expected.learning_rates, strict=False):
        if abs(a - b) > FACTOR_TOLERANCE * abs(b):
            return f"{prefix}, the learning rate does not: {a:.6g}, the reference has {b:.6g}; {_explain_rate(evidence, a)}"
    actual, expected, before = pair.actual, pair.expected, evidence.value_before()
    shard, differing = describe_wrong_shard(pair, evidence.plan), _differing_elements(pair)
    is_unchanged = before is not None and torch.equal(actual[differing], before[differing])
    if is_unchanged or shard is not None:
        where = f"{shard} is off" if shard else "some of it is off"
        return f"{prefix}: {where}{', as it was before the step: it was not updated' if is_unchanged else ''}"
    if before is not None:
        ratio = exact_ratio(TensorPair(actual - before, expected - before))
        if ratio is not None:
            return f"{prefix}: the step is {ratio:.6g} times the reference's: looks like clipping or the learning rate"
    return f"{prefix}: looks like clipping, the learning rate or the optimizer"


def _explain_rate(evidence: Evidence, actual_rate: float) -> str:
    for rate, steps in evidence.steps_by_rate.items():
        if abs(rate - actual_rate) <= FACTOR_TOLERANCE * abs(actual_rate):
            return f"the schedule gives that after {steps} steps: it is stepped once per micro-batch"
    return "looks like a schedule that is stepped another number of times"


def _explain_optimizer(evidence: Evidence, pair: TensorPair) -> str:
    prefix = "gradients and parameters agree"
    for axis, dim, ranks in _possible_cuts(pair.expected, evidence.plan):
        sizes = compute_shard_sizes(pair.expected.shape[dim], ranks)
        actual_shards, expected_shards = pair.actual.split(sizes, dim), pair.expected.split(sizes, dim)
        for rank, shards in enumerate(zip(actual_shards, expected_shards, strict=True)):
            for other_rank, other in enumerate(expected_shards):
                if other_rank != rank and equals_candidate_tensor(other, TensorPair(*shards)):
                    return f"{prefix}: rank {rank} of {axis} has what belongs to rank {other_rank}: state in the wrong order of shards"
    shard = describe_wrong_shard(pair, evidence.plan)
    return f"{prefix}: {f'only {shard} is off' if shard else 'looks like state that is out of place'}"


def describe_wrong_shard(pair: TensorPair, plan: Plan) -> str | None:
    """The rank whose part of a tensor is exactly what is off; None: another part is, or all of it."""
    differing = _differing_elements(pair)
    for axis, dim, ranks in _possible_cuts(pair.expected, plan):
        length, start = pair.expected.shape[dim], 0
        indices = differing.movedim(dim, 0).reshape(length, -1).any(1).nonzero().flatten().tolist()
        for rank, size in enumerate(compute_shard_sizes(length, ranks)):
            if indices and start <= indices[0] and indices[-1] < start + size:
                return f"what rank {rank} of {axis} holds ({start} to {start + size - 1} of {length} along dim {dim})"
            start += size
    return None


def _differing_elements(pair: TensorPair) -> Tensor:
    return (pair.actual - pair.expected).abs() > FLOAT64_BOUND * max(float(pair.expected.abs().max()), 1e-30)


def _possible_cuts(expected: Tensor, plan: Plan) -> list[tuple[str, int, int]]:
    """(axis, dim, ranks) along which a tensor may be cut."""
    cuts = [("dp", 0, plan.mesh.dp)] if plan.zero else []
    cuts += [("tp", dim, plan.mesh.tp) for dim in range(expected.ndim)]
    return [cut for cut in cuts if cut[2] > 1 and expected.ndim > cut[1] and expected.shape[cut[1]] >= cut[2]]


def _explain_factor(factor: float, evidence: Evidence) -> str:
    """A factor in words, by the number of the plan that it equals; empty: none."""
    mesh, micro_batch_count = evidence.plan.mesh, evidence.micro_batch_count
    meanings: dict[str, tuple[float, str, str]] = {
        "dp": (mesh.dp, "a sum over the data ranks where a mean was due", "a mean over the data ranks that is taken twice"),
        "tp": (mesh.tp, "a loss that every rank of the tensor axis adds whole", "a division by tp too many"),
        "pp": (mesh.pp, "a loss that every rank of the pipeline adds whole", "a division by pp too many"),
        "micro-batches": (micro_batch_count, "a sum over micro-batches where a mean was due", "a mean over micro-batches that is taken twice"),
        "dp x micro-batches": (mesh.dp * micro_batch_count, "a sum over all micro-batches where a mean was due", "a mean over all micro-batches that is taken twice"),
    }  # fmt: skip
    if mesh.dp == 1 or micro_batch_count == 1:
        del meanings["dp x micro-batches"]
    if evidence.divergence.kind == "norm":
        words = ("a norm that counts every rank's copy", "a norm that is divided by the ranks")
        meanings |= {f"sqrt({axis})": (getattr(mesh, axis) ** 0.5, *words) for axis in ("dp", "tp", "pp")}
    if abs(factor) < FACTOR_TOLERANCE:
        return "it is zero"
    if abs(factor + 1) < FACTOR_TOLERANCE:
        return "the sign is wrong"
    explanations = []
    for name, (value, too_large, too_small) in meanings.items():
        if value > 1 and abs(factor / value - 1) < FACTOR_TOLERANCE:
            explanations.append(f"{name} = {value:g} times the reference: looks like {too_large}")
        if value > 1 and abs(factor * value - 1) < FACTOR_TOLERANCE:
            explanations.append(f"1/{name} = 1/{value:g} of the reference: looks like {too_small}")
    return " or ".join(explanations)
