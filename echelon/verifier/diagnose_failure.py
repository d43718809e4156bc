"""Diagnose a failed proof: repeat the first divergent step and watch every module.

Both runs are repeated up to that step. Every rank then reports its modules' outputs for the first micro-batch and the samples that it read;
rank 0 compares the step's tensors with what known bugs would compute. A plan that passes costs none of this.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from echelon.data.sample_digest import digest
from echelon.engine.process_groups import WorldCommunicator
from echelon.errors import first_line
from echelon.plan.certificate import Finding
from echelon.plan.plan import Plan
from echelon.trials.module_tree import module_hooks
from echelon.verifier import explain_failure, job_reader, known_bugs
from echelon.verifier.candidate_run import CandidateRun, Replication
from echelon.verifier.compare import NOT_COMPARABLE, Difference
from echelon.verifier.compare_outputs import is_whole, output_tensors
from echelon.verifier.context import Comparator
from echelon.verifier.reference import Reference, StepRecord
from echelon.verifier.reference_data import positions_of
from echelon.verifier.single_device import SingleDeviceContext
from echelon.verifier.tensor_checksum import TensorChecksum, compute_checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What went wrong, in words, and how far the outputs are off if any could be compared."""

    remarks: tuple[str, ...]
    output_finding: Finding | None


#: (Module path, its call from 1) -> checksums of the output's floating tensors, None for one that is not whole on this rank.
ModuleOutputs = dict[tuple[str, int], tuple[TensorChecksum | None, ...]]


@contextlib.contextmanager
def record_module_outputs(model: nn.Module) -> Iterator[ModuleOutputs]:
    """Collect the outputs of a model's modules, in the order in which they are ready."""
    outputs: ModuleOutputs = {}
    calls: Counter[str] = Counter()

    def record(path: str, output: Any) -> None:
        tensors = [tensor for tensor in output_tensors(output) if tensor.is_floating_point()]
        calls[path] += 1
        outputs[path, calls[path]] = tuple(compute_checksum(t) if is_whole(t) else None for t in tensors)

    with module_hooks(model, after=record):
        yield outputs


def diagnose(
    candidate: CandidateRun, ranks: WorldCommunicator, steps: Sequence[int], context: SingleDeviceContext | None,
    comparator: Comparator | None,
) -> Diagnosis | None:  # fmt: skip
    """Every rank calls it with a fresh run and `steps` up to the one that diverged. The result is rank 0's."""
    step = steps[-1]
    for earlier_step in steps[:-1]:
        candidate.step(earlier_step)
    with ranks.raise_on_all_ranks():
        outputs = expected_outputs(context.reference_at(step), step) if context is not None else {}
    expected: ModuleOutputs = ranks.broadcast_object(outputs)
    own_digests = [digest(micro_batch.batch) for micro_batch in candidate.read_batch(step).micro_batches]
    digests_by_rank = ranks.all_gather_object(own_digests)
    candidate.prepare(step)
    with record_module_outputs(candidate.run.model) as outputs:
        actual = candidate.step(step)
    own_differences = _output_differences(outputs, expected) if candidate.run.data_parallel.rank == 0 else {}
    differences_by_rank = ranks.all_gather_object(own_differences)
    replication = candidate.gather_replication()
    with ranks.raise_on_all_ranks():
        if context is None or comparator is None or actual is None:
            return None
        finding = _summarize_outputs(differences_by_rank, list(expected), context.bounds.widest("output"))
        try:
            evidence = _collect_evidence(context, comparator, actual, replication, finding)
            remarks = [explain_failure.explain(evidence), _describe_misread_samples(context, step, digests_by_rank)]
            if evidence.divergence.kind in ("gradient", "loss", "output"):
                remarks.append(_describe_outputs(finding, context.plan))
        except Exception as error:
            # The model cannot be run in parts, say. The verdict stands without a cause.
            remarks = [f"the cause could not be determined: {type(error).__name__}: {first_line(error)}"]
        return Diagnosis(remarks=tuple(filter(None, remarks)), output_finding=finding)


def expected_outputs(reference: Reference, step: int) -> ModuleOutputs:
    """The outputs for rank 0's first micro-batch; empty where batch norm combines it with those of other ranks."""
    plan = reference.plan
    if reference.couples_samples and plan.batchnorm == "sync" and plan.mesh.dp > 1:
        return {}
    part = plan.split_batch(reference.data.samples_in(step))[0][0]
    batch = reference.read_batch(step, positions_of(part))
    with record_module_outputs(reference.model) as outputs, reference.deterministic():
        reference.compute_loss(batch, part.size)
    return outputs


def _output_differences(actual: ModuleOutputs, expected: ModuleOutputs) -> dict[tuple[str, int], float]:
    """How far this rank's outputs are off, where it has them whole."""
    differences = {}
    for call, checksums in expected.items():
        pairs = zip(actual.get(call, ()), checksums, strict=False)
        comparable = [(a, b) for a, b in pairs if a is not None and b is not None and a.shape == b.shape]
        if comparable and len(comparable) == len(checksums):
            differences[call] = max(a.relative_difference(b) for a, b in comparable)
    return differences


def _summarize_outputs(
    differences_by_rank: Sequence[Mapping[tuple[str, int], float]], calls: Sequence[tuple[str, int]], bound: float
) -> Finding | None:
    """The first output that is off or, if none is, the one nearest to `bound`."""
    values = {call: [differences[call] for differences in differences_by_rank if call in differences] for call in calls}
    worst = {call: max(values[call]) for call in calls if values[call]}
    if not worst:
        return None
    out_of_bounds = [call for call in worst if worst[call] > bound]
    chosen = out_of_bounds[0] if out_of_bounds else max(worst, key=worst.__getitem__)
    where = chosen[0] or "the model itself"
    return Finding(kind="output", tensors=len(worst), max_difference=worst[chosen], where=where, bound=bound)


def _describe_outputs(finding: Finding | None, plan: Plan) -> str:
    if finding is None:
        return ""
    if finding.is_within_bound:
        return f"forward looks right: the outputs of {finding.tensors} modules agree on data rank 0"
    amount = "is not finite" if finding.max_difference == NOT_COMPARABLE else f"is off by {finding.max_difference:.1e}"
    cut = next((placement.cut for placement in plan.tensor.placements if placement.path == finding.where), "")
    cut_note = f" (cut over tp: {cut})" if cut else ""
    hint = "; looks like a sum over tp that is missing, or a bias that every rank adds" if cut == "row" else ""
    return f"forward is wrong: the first output that is off is that of {finding.where}{cut_note}, which {amount}{hint}"


def _describe_misread_samples(context: SingleDeviceContext, step: int, digests_by_rank: Sequence[Sequence[str]]) -> str:
    plan, data = context.plan, context.data
    ranges_by_rank = plan.split_batch(data.samples_in(step))
    for rank, digests in enumerate(digests_by_rank):
        parts = ranges_by_rank[plan.mesh.coordinate(rank)["dp"]]
        for part, own_digest in zip(parts, digests, strict=False):
            if data.repeated_digest(step, positions_of(part)) not in (None, own_digest):
                return (
                    f"rank {rank} read other samples than those at {part.start} to {part.stop - 1} of the batch: looks like an order of the "
                    "data that each rank drew with its own seed"
                )
    return ""


def _collect_evidence(
    context: SingleDeviceContext, comparator: Comparator, actual: StepRecord, replication: Mapping[str, Replication],
    output_finding: Finding | None,
) -> explain_failure.Evidence:  # fmt: skip
    divergence = comparator.first_divergence
    assert divergence is not None
    step, reference = divergence.step, context.reference_at(divergence.step)
    micro_batch_count = context.plan.count_micro_batches(context.data.samples_in(step))
    model, parameters = reference.model, dict(reference.model.named_parameters())
    steps_by_rate: dict[float, int] = {}
    if divergence.kind == "parameter" and micro_batch_count > 1:
        steps_by_rate = _rates_after_steps(context.build_reference(), micro_batch_count * step)
    return explain_failure.Evidence(
        divergence=divergence, differences=[difference for difference in comparator.differences if difference.step == step],
        bounds=context.bounds, plan=context.plan, micro_batch_count=micro_batch_count, actual=actual,
        expected=context.reference_at(step).step(step),
        tensors_before={
            "parameter": {name: value.detach() for name, value in parameters.items()},
            "buffer": {name: value.clone() for name, value in model.named_buffers()},
        },
        previous_gradients={} if reference.last_record is None else reference.last_record.gradients,
        known_bugs=_possible_bugs(context.reference_at(step), divergence),
        loss_changes_on_repeat=lambda: known_bugs.loss_changes_on_repeat(context.reference_at(step), step),
        changed_by_forward=known_bugs.changed_by_forward(context.reference_at(step), step), replication=replication,
        module_classes={name: type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in parameters},
        aliases={alias: name for name in parameters for alias in known_bugs.aliases_of(model, name) if alias != name},
        forward_order=comparator.forward_order, steps_by_rate=steps_by_rate,
        forward_agrees=None if output_finding is None else output_finding.is_within_bound,
    )  # fmt: skip


def _rates_after_steps(reference: Reference, steps: int) -> dict[float, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedules that are stepped without their optimizers
        for schedule in reference.schedules:
            for _ in range(0 if job_reader.requires_metric(schedule) else steps):
                schedule.step()
    return {float(group["lr"]): steps for optimizer in reference.optimizers for group in optimizer.param_groups}


def _possible_bugs(reference: Reference, divergence: Difference) -> Iterator[known_bugs.KnownBug]:
    """Lazily: each costs a pass over the batch."""
    name = divergence.name if divergence.kind == "gradient" else ""
    if name:
        yield from known_bugs.tied_weight_gradients(reference, divergence.step, name)
    yield from known_bugs.wrong_weightings(known_bugs.sum_micro_batches(reference, divergence.step, name))
