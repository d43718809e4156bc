"""What a mistake looks like, in one plain sentence with the remedy where there is one.

What is measured is told as a fact ("it is what rank 0's own samples give"); what only fits is told as a guess ("looks like").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from echelon.engine.parallel.shard_layout import compute_shard_sizes
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
    tensor_pair,
)
from echelon.verifier.known_bugs import STATE_PER_CALL, KnownBug
from echelon.verifier.reference import StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The first divergent step in both runs, and what is known beside it."""

    divergence: Difference
    differences: Sequence[Difference]
    bounds: Bounds
    plan: Plan
    #: Micro-batches of each data rank.
    micro_batch_count: int
    actual: StepRecord
    expected: StepRecord
    #: The reference before the step: parameters, buffers and optimizer states, by kind.
    tensors_before: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    #: Its gradients of the step before.
    previous_gradients: Mapping[str, Tensor | None] = field(default_factory=dict)
    known_bugs: Iterable[KnownBug] = ()
    #: Parameter -> how many ranks hold the same part of it, and those of the pipeline axis that do.
    replication: Mapping[str, tuple[int, frozenset[int]]] = field(default_factory=dict)
    #: Parameter -> the class of its module.
    module_classes: Mapping[str, str] = field(default_factory=dict)
    #: Second name of a tied parameter -> its first.
    aliases: Mapping[str, str] = field(default_factory=dict)
    forward_order: Mapping[str, int] = field(default_factory=dict)
    #: Learning rate -> how often a schedule has to be stepped for it.
    steps_by_rate: Mapping[float, int] = field(default_factory=dict)
    #: Whether the modules' outputs agree; None: not known.
    forward_agrees: bool | None = None
    #: What a call of forward changes of the model.
    changed_by_forward: Sequence[str] = ()
    #: Whether the same samples give another loss when they are computed again.
    loss_changes_on_repeat: Callable[[], bool] = lambda: False

    @property
    def same_kind(self) -> list[Difference]:
        """All tensors of the worst one's kind."""
        return [difference for difference in self.differences if difference.kind == self.divergence.kind]

    @property
    def out_of_bounds(self) -> list[Difference]:
        """Those of them that are over their bound."""
        return [difference for difference in self.same_kind if not self.bounds.allows(difference)]

    @property
    def tensor_pair(self) -> TensorPair | None:
        """The worst one's two tensors."""
        return tensor_pair(self.divergence, self.actual, self.expected)

    def agrees(self, kind: str) -> bool:
        """Whether everything of a kind is within bounds."""
        return all(self.bounds.allows(difference) for difference in self.differences if difference.kind == kind)


def explain(evidence: Evidence) -> str:
    """What the mistake looks like, with the remedy where there is one; empty where nothing can be said."""
    if evidence.divergence.kind == "start":
        return f"{_describe_extent(evidence)}; looks like weights that each rank drew with its own seed: rank 0's have to be sent to all"
    if evidence.divergence.kind == "copy":
        return "what the ranks hold as copies comes apart: looks like an update or a reduction that some ranks did not take part in"
    if evidence.divergence.kind == "draw":
        return (
            "all agrees with dropout off: looks like masks that differ over tp on what is whole on every rank; its ranks have to draw from "
            "one seed there"
        )
    if evidence.divergence.kind == "output":
        return "the loss and every gradient agree: the loss does not use what is off, or not so that it matters"
    if evidence.divergence.value == NOT_COMPARABLE or evidence.tensor_pair is None:
        return _explain_untied_weight(evidence)
    explanation = {
        "gradient": _explain_gradient, "loss": _explain_loss, "norm": _explain_norm, "buffer": _explain_buffer, "parameter": _explain_parameter,
        "optimizer": _explain_optimizer,
    }[evidence.divergence.kind](evidence, evidence.tensor_pair)  # fmt: skip
    return ", ".join(filter(None, (_describe_extent(evidence), explanation)))


def _describe_extent(evidence: Evidence) -> str:
    """How many are off, and what they have in common."""
    same_kind, out_of_bounds = evidence.same_kind, evidence.out_of_bounds
    if len(same_kind) < 2:
        return ""
    plural = {"optimizer": "optimizer states", "start": "tensors", "copy": "tensors"}.get(
        evidence.divergence.kind, f"{evidence.divergence.kind}s"
    )
    text = f"{len(out_of_bounds)} of {len(same_kind)} {plural} are off"
    names = [parameter_name(each) for each in out_of_bounds]
    common_trait = ""
    if len(out_of_bounds) < len(same_kind):
        classes = {evidence.module_classes.get(name, "") for name in names}
        pipeline_rank_sets = {
            pipeline_ranks_of
            for _, pipeline_ranks_of in (evidence.replication[name] for name in names if name in evidence.replication)
        }
        if all("norm" in each.lower() for each in classes):
            common_trait = f"all of them in norm layers ({', '.join(sorted(classes))})"
        elif all(name.endswith("bias") for name in names):
            common_trait = "all of them biases"
        elif (
            len(pipeline_rank_sets) == 1
            and len(pipeline_ranks := next(iter(pipeline_rank_sets))) == 1
            and evidence.plan.mesh.pp > 1
        ):
            common_trait = f"all of them on rank {min(pipeline_ranks)} of the pipeline"
    return f"{text}, {common_trait}" if common_trait and len(out_of_bounds) > 1 else text


def _explain_gradient(evidence: Evidence, pair: TensorPair) -> str:
    return (
        _explain_untied_weight(evidence)
        or _explain_constant_factor(evidence, pair)
        or _match_known_bug(evidence, pair)
        or _explain_uncleared_gradient(evidence, pair)
        or _explain_wrong_shard(evidence, pair)
        or _explain_missing_sequence_sum(evidence)
        or _explain_wrong_backward(evidence)
        or _explain_unmatched(evidence)
    )


def _explain_unmatched(evidence: Evidence) -> str:
    """By no common factor. A forward that is wrong is told of beside this."""
    if evidence.forward_agrees is False:
        return ""
    if evidence.agrees("loss") and evidence.plan.mesh.tp > 1:
        return "by no common factor, and the loss agrees: backward is wrong; looks like a sum over tp that is missing there"
    return (
        "by no common factor: looks like micro-batches or ranks that are weighed wrongly, or samples that are left out"
    )


def _explain_untied_weight(evidence: Evidence) -> str:
    second_names = [difference.name for difference in evidence.differences if difference.name in evidence.aliases]
    if not second_names:
        return ""
    return (
        f"an untied weight: the model shares {evidence.aliases[second_names[0]]} and {second_names[0]}, the plan's run has two parameters; "
        "tie them again after they are cut"
    )


def _explain_constant_factor(evidence: Evidence, pair: TensorPair) -> str:
    """A clean factor, by the numbers of the plan that it equals."""
    factor = exact_ratio(pair)
    if factor is None:
        return ""
    explanation = _explain_factor(factor, evidence)
    if not explanation:
        return f"{factor:.6g} times the reference exactly" if pair.expected.numel() > 1 else ""
    share_factor = [_has_ratio(difference, evidence, factor) for difference in evidence.out_of_bounds]
    return f"all of these {explanation}" if len(share_factor) > 1 and all(share_factor) else explanation


def _has_ratio(difference: Difference, evidence: Evidence, factor: float) -> bool:
    tensors = tensor_pair(difference, evidence.actual, evidence.expected)
    actual_ratio = None if tensors is None else exact_ratio(tensors)
    return actual_ratio is not None and abs(actual_ratio - factor) <= FACTOR_TOLERANCE * abs(factor)


def _match_known_bug(evidence: Evidence, pair: TensorPair) -> str:
    description = next((bug.description for bug in evidence.known_bugs if equals_candidate_tensor(bug.value, pair)), "")
    if description != STATE_PER_CALL:
        return description
    if evidence.changed_by_forward or evidence.loss_changes_on_repeat():
        return _explain_state_per_call(evidence)
    return (
        "it is the sum of the micro-batches, each computed by itself: samples of a batch see each other, and in parts another objective is "
        "trained; keep the batch whole (dp=1 without micro=), or make the loss of each sample its own"
    )


def _explain_state_per_call(evidence: Evidence) -> str:
    """State that moves with every call, where a plan makes another number of calls than one device."""
    state_names = format_names(evidence.changed_by_forward) or "something that it keeps"
    changer = "forward" if evidence.changed_by_forward else "the loss, or what forward calls,"
    calls = (
        f"micro-batches call it {evidence.micro_batch_count} times a step, and one device calls it once: train without micro=, or change it once a step"
        if evidence.micro_batch_count > 1
        else "each rank changes its own copy: change it from what all ranks hold, once a step"
    )
    return f"{changer} changes {state_names} at each call, and {calls}"


def _explain_uncleared_gradient(evidence: Evidence, pair: TensorPair) -> str:
    previous = evidence.previous_gradients.get(evidence.divergence.name)
    if previous is None or previous.shape != pair.expected.shape:
        return ""
    multiple = scalar_multiple(to_float64(pair.actual) - to_float64(pair.expected), previous)
    return (
        "" if multiple is None else "the gradient of the step before is still in it: clear gradients after every step"
    )


def _explain_wrong_backward(evidence: Evidence) -> str:
    """Where the gradients go wrong on their way back, if they are right at the end."""
    within_bounds = [difference for difference in evidence.same_kind if evidence.bounds.allows(difference)]
    last_position = max(
        (forward_position(difference.name, evidence.forward_order) for difference in evidence.out_of_bounds), default=0
    )
    later = [
        difference
        for difference in within_bounds
        if forward_position(difference.name, evidence.forward_order) > last_position
    ]
    if not evidence.agrees("loss") or not later or len(evidence.out_of_bounds) < 2:
        return ""
    path = (
        next((path for path, position in evidence.forward_order.items() if position == last_position), "")
        or "the model itself"
    )
    axes = [axis for axis in ("tp", "dp", "pp") if getattr(evidence.plan.mesh, axis) > 1]
    return (
        f"the loss agrees, and of the gradients those of all modules after {path}: backward is right until there; looks like a sum over "
        f"{' or '.join(axes)} that is missing where the gradient goes on"
    )


def _explain_missing_sequence_sum(evidence: Evidence) -> str:
    """Only those are off that add up from the parts of a sequence."""
    partial_names = {name for segment in evidence.plan.tensor.segments for name in segment.partial_gradients}
    if not all(difference.name in partial_names for difference in evidence.out_of_bounds):
        return ""
    return "each rank of tp uses them on its part of the sequence: the sum of their gradients over tp is missing"


def _explain_wrong_shard(evidence: Evidence, pair: TensorPair) -> str:
    """What is off is just what one rank holds."""
    shard = describe_wrong_shard(pair, evidence.plan)
    return "" if shard is None else f"only {shard} is off"


def _explain_loss(evidence: Evidence, pair: TensorPair) -> str:
    explanation = _explain_constant_factor(evidence, pair) or _match_known_bug(evidence, pair)
    if not evidence.agrees("gradient"):
        return explanation
    prefix = "the gradients agree: only the value that is reported is off"
    return f"{prefix}; {explanation}" if explanation else prefix


def _explain_norm(evidence: Evidence, pair: TensorPair) -> str:
    norm = float(to_float64(pair.actual))
    squares = {
        name: float(torch.linalg.vector_norm(to_float64(grad))) ** 2
        for name, grad in evidence.expected.gradients.items()
        if grad is not None
    }
    norm_of_copies = (
        sum(square * evidence.replication.get(name, (1, frozenset()))[0] for name, square in squares.items()) ** 0.5
    )
    local_norm = None if evidence.actual.local_norm is None else float(evidence.actual.local_norm)
    if local_norm and abs(norm / local_norm - 1) < FACTOR_TOLERANCE:
        return "the gradients agree: the norm is that of what rank 0 holds alone; add up the squares over the ranks before the root"
    explanation = _explain_constant_factor(evidence, pair)
    if norm_of_copies and abs(norm / norm_of_copies - 1) < FACTOR_TOLERANCE:
        copies_explanation = "the gradients agree: the norm counts every rank's copy of parameters that are not cut; divide each square by its copies"
        return f"{explanation.partition(':')[0]}; {copies_explanation}" if explanation else copies_explanation
    return explanation or "the gradients agree: looks like a norm over some of them, or over some of them twice"


def _explain_buffer(evidence: Evidence, pair: TensorPair) -> str:
    value_before = evidence.tensors_before.get("buffer", {}).get(evidence.divergence.name)
    if value_before is not None and equals_candidate_tensor(to_float64(value_before), pair):
        return "the gradients agree: a stale buffer, as it was before the step"
    replica_differences = [
        difference
        for difference in evidence.differences
        if (difference.kind, difference.name) == ("copy", evidence.divergence.name)
    ]
    if any(not evidence.bounds.allows(difference) for difference in replica_differences):
        return "the gradients agree: each rank has another value of it; reduce it over dp"
    if evidence.divergence.name in evidence.changed_by_forward:
        return f"the gradients agree: {_explain_state_per_call(evidence)}"
    return (
        "the gradients agree: looks like a buffer that is updated another number of times: once for each micro-batch here and once for the "
        "batch on one device, or the other way round; without micro= it is the same"
    )


def _explain_parameter(evidence: Evidence, pair: TensorPair) -> str:
    prefix = "the gradients agree"
    if evidence.divergence.name in evidence.changed_by_forward:
        return f"{prefix}: {_explain_state_per_call(evidence)}"
    actual_rates, expected_rates = evidence.actual.learning_rates, evidence.expected.learning_rates
    wrong_rates = [
        (a, b) for a, b in zip(actual_rates, expected_rates, strict=False) if abs(a - b) > FACTOR_TOLERANCE * abs(b)
    ]
    if wrong_rates:
        a, b = wrong_rates[0]
        steps_for_rate = next(
            (
                step_count
                for rate, step_count in evidence.steps_by_rate.items()
                if abs(rate - a) <= FACTOR_TOLERANCE * abs(a)
            ),
            None,
        )
        schedule_note = (
            "looks like a schedule that is stepped another number of times"
            if steps_for_rate is None
            else f"the schedule gives that after {steps_for_rate} steps: it is stepped once per micro-batch"
        )
        return f"{prefix}, the learning rate does not: {a:.6g}, the reference has {b:.6g}; {schedule_note}"
    shard = describe_wrong_shard(pair, evidence.plan)
    value_before = evidence.tensors_before.get("parameter", {}).get(evidence.divergence.name)
    differing = (to_float64(pair.actual) - to_float64(pair.expected)).abs() > FLOAT64_BOUND * max(
        float(to_float64(pair.expected).abs().max()), 1e-30
    )
    is_unchanged = value_before is not None and bool(
        torch.equal(to_float64(pair.actual)[differing], to_float64(value_before)[differing])
    )
    if is_unchanged or shard is not None:
        where = f"{shard} is off" if shard else "some of it is off"
        return f"{prefix}: {where}{', as it was before the step: it was not updated' if is_unchanged else ''}"
    step_ratio = (
        None
        if value_before is None
        else exact_ratio(
            TensorPair(
                actual=to_float64(pair.actual) - to_float64(value_before),
                expected=to_float64(pair.expected) - to_float64(value_before),
            )
        )
    )
    if step_ratio is not None:
        return f"{prefix}: the step is {step_ratio:.6g} times the reference's: looks like clipping or the learning rate"
    return f"{prefix}: looks like clipping, the learning rate or the optimizer"


def _explain_optimizer(evidence: Evidence, pair: TensorPair) -> str:
    prefix = "gradients and parameters agree"
    for axis, dim, ranks in _possible_cuts(pair.expected, evidence.plan):
        sizes = compute_shard_sizes(pair.expected.shape[dim], ranks)
        actual_shards, expected_shards = (
            to_float64(pair.actual).split(sizes, dim),
            to_float64(pair.expected).split(sizes, dim),
        )
        for rank, actual_shard in enumerate(actual_shards):
            for other_rank, expected_shard in enumerate(expected_shards):
                if (
                    other_rank != rank
                    and actual_shard.shape == expected_shard.shape
                    and equals_candidate_tensor(
                        expected_shard, TensorPair(actual=actual_shard, expected=expected_shards[rank])
                    )
                ):
                    return f"{prefix}: rank {rank} of {axis} has what belongs to rank {other_rank}: state in the wrong order of shards"
    shard = describe_wrong_shard(pair, evidence.plan)
    return f"{prefix}: {f'only {shard} is off' if shard else 'looks like state that is out of place'}"


def describe_wrong_shard(pair: TensorPair, plan: Plan) -> str | None:
    """The rank whose part of a tensor is what is off, in words; None where it is another part, or all."""
    differing = (to_float64(pair.actual) - to_float64(pair.expected)).abs() > FLOAT64_BOUND * max(
        float(to_float64(pair.expected).abs().max()), 1e-30
    )
    for axis, dim, ranks in _possible_cuts(pair.expected, plan):
        differing_indices = (
            differing.movedim(dim, 0).reshape(differing.shape[dim], -1).any(1).nonzero().flatten().tolist()
        )
        start = 0
        for rank, size in enumerate(compute_shard_sizes(pair.expected.shape[dim], ranks)):
            if differing_indices and start <= differing_indices[0] and differing_indices[-1] < start + size:
                return f"what rank {rank} of {axis} holds ({start} to {start + size - 1} of {pair.expected.shape[dim]} along dim {dim})"
            start += size
    return None


def _possible_cuts(expected: Tensor, plan: Plan) -> list[tuple[str, int, int]]:
    """(axis, dim, ranks) in which a tensor may be cut."""
    cuts = [("dp", 0, plan.mesh.dp)] if plan.zero else []
    cuts += [("tp", dim, plan.mesh.tp) for dim in range(expected.ndim)]
    return [
        (axis, dim, ranks)
        for axis, dim, ranks in cuts
        if ranks > 1 and expected.ndim > dim and expected.shape[dim] >= ranks
    ]


def _explain_factor(factor: float, evidence: Evidence) -> str:
    """A factor in words, by the number of the plan that it equals; empty where it equals none."""
    mesh, micro_batch_count = evidence.plan.mesh, evidence.micro_batch_count
    meanings = {
        "dp": (mesh.dp, "a sum over the data ranks where a mean was due", "a mean over the data ranks that is taken twice"),
        "tp": (mesh.tp, "a loss that every rank of the tensor axis adds whole", "a division by tp too many"),
        "pp": (mesh.pp, "a loss that every rank of the pipeline adds whole", "a division by pp too many"),
        "micro-batches": (micro_batch_count, "a sum over micro-batches where a mean was due", "a mean over micro-batches that is taken twice"),
        "dp x micro-batches": (mesh.dp * micro_batch_count, "a sum over all micro-batches where a mean was due", "a mean over all micro-batches that is taken twice"),
    }  # fmt: skip
    if mesh.dp == 1 or micro_batch_count == 1:
        del meanings["dp x micro-batches"]
    if evidence.divergence.kind == "norm":
        meanings |= {
            f"sqrt({axis})": (
                getattr(mesh, axis) ** 0.5,
                "a norm that counts every rank's copy",
                "a norm that is divided by the ranks",
            )
            for axis in ("dp", "tp", "pp")
        }
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
