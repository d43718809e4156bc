"""A second look, when the proof failed: the first divergent step once more, with everything watched.

Both runs are made again up to that step. Every rank then says what its modules gave for the first micro-batch and which samples it read;
rank 0 holds the step's tensors against the mistakes that the reference can imitate. None of it is done for a plan that passes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import TracebackType
from typing import Any, Self

import numpy as np
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from echelon.data.sample_digest import digest
from echelon.engine.process_groups import WorldCommunicator
from echelon.plan.batch_split import count_micro_batches, split_batch
from echelon.plan.certificate import Finding
from echelon.plan.plan import Plan
from echelon.profiler.sample_coupling import first_line
from echelon.verifier import explain_failure, job_reader, known_bugs
from echelon.verifier.candidate_run import CandidateRun, Replication
from echelon.verifier.compare import NOT_COMPARABLE, Difference
from echelon.verifier.compare_outputs import hookable_modules, output_tensors
from echelon.verifier.context import Comparator
from echelon.verifier.reference import Reference, StepRecord
from echelon.verifier.single_device import SingleDeviceContext
from echelon.verifier.tensor_checksum import TensorChecksum, compute_checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What it told, in words, and how far the outputs are off where any could be compared."""

    remarks: tuple[str, ...]
    output_finding: Finding | None


@dataclass(frozen=True, slots=True)
class ModuleOutput:
    """What one call of a module gave: the marks of its floating tensors, None for one that is not whole here."""

    path: str
    call: int
    checksums: tuple[TensorChecksum | None, ...]


class ModuleOutputRecorder:
    """Notes the outputs of a model's modules, in the order in which they are ready."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: list[Any] = []
        self._calls: dict[str, int] = {}
        self.outputs: list[ModuleOutput] = []

    def __enter__(self) -> Self:
        self._hooks = [
            module.register_forward_hook(lambda _, __, output, path=path: self._record(path, output))
            for path, module in hookable_modules(self._model)
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _record(self, path: str, output: Any) -> None:
        checksums = tuple(_local_checksum(leaf) for leaf in output_tensors(output) if leaf.is_floating_point())
        self._calls[path] = self._calls.get(path, 0) + 1
        self.outputs.append(ModuleOutput(path, self._calls[path], checksums))


def _local_checksum(value: Tensor) -> TensorChecksum | None:
    """None: another stage's, which has no numbers here, or a shard."""
    return None if value.is_meta or isinstance(value, FakeTensor | DTensor) else compute_checksum(value)


def diagnose(
    candidate: CandidateRun,
    ranks: WorldCommunicator,
    steps: Sequence[int],
    context: SingleDeviceContext | None,
    comparator: Comparator | None,
) -> Diagnosis | None:
    """Called by every rank with a fresh run; `steps` up to the one that diverged. The answer is rank 0's."""
    step = steps[-1]
    for earlier_step in steps[:-1]:
        candidate.step(earlier_step)
    with ranks.raise_on_all_ranks():
        outputs = expected_outputs(context.reference_at(step), step) if context is not None else []
    expected: list[ModuleOutput] = ranks.all_gather_object(outputs)[0]
    digests_by_rank = ranks.all_gather_object(
        [digest(micro_batch.batch) for micro_batch in candidate.read_batch(step).micro_batches]
    )
    candidate.prepare(step)
    with ModuleOutputRecorder(candidate.run.model) as recorder:
        actual = candidate.step(step)
    differences_by_rank = ranks.all_gather_object(
        _output_differences(recorder.outputs, expected) if candidate.run.data_parallel.rank == 0 else {}
    )
    replication = candidate.gather_replication()
    with ranks.raise_on_all_ranks():
        if context is None or comparator is None or actual is None:
            return None
        output_finding = _summarize_outputs(expected, differences_by_rank, context.bounds.widest("output"))
        try:
            remarks = _collect_remarks(context, comparator, actual, replication, digests_by_rank, output_finding)
        except Exception as error:
            # A model that cannot be run in parts, say. The verdict stands without its cause.
            remarks = [f"what it looks like could not be found out: {type(error).__name__}: {first_line(error)}"]
        return Diagnosis(remarks=tuple(filter(None, remarks)), output_finding=output_finding)


def _collect_remarks(
    context: SingleDeviceContext,
    comparator: Comparator,
    actual: StepRecord,
    replication: Mapping[str, Replication],
    digests_by_rank: Sequence[Sequence[str]],
    output_finding: Finding | None,
) -> list[str]:
    evidence = _collect_evidence(context, comparator, actual, replication, output_finding)
    remarks = [explain_failure.explain(evidence), _describe_misread_samples(context, actual.step, digests_by_rank)]
    return [
        *remarks,
        _describe_outputs(output_finding, context.plan)
        if evidence.divergence.kind in ("gradient", "loss", "output")
        else "",
    ]


def expected_outputs(reference: Reference, step: int) -> list[ModuleOutput]:
    """The outputs for rank 0's first micro-batch; nothing where batch norm sees those of other ranks beside it."""
    if reference.couples_samples and reference.plan.batchnorm == "sync" and reference.plan.mesh.dp > 1:
        return []
    sample_range = split_batch(
        reference.data.samples_in(step), reference.plan.mesh.dp, reference.plan.micro, reference.plan.data.batch_shares
    )[0][0]
    batch = reference.read_batch(step, np.arange(sample_range.start, sample_range.stop))
    with ModuleOutputRecorder(reference.model) as recorder, reference.deterministic():
        reference.compute_loss(batch, sample_range.size)
    return recorder.outputs


def _output_differences(actual: Sequence[ModuleOutput], expected: Sequence[ModuleOutput]) -> dict[int, float]:
    """Number of an expected output -> how far this rank's is off; none for those that are not whole here."""
    checksums_by_call = {(output.path, output.call): output.checksums for output in actual}
    differences = {}
    for index, output in enumerate(expected):
        checksum_pairs = list(
            zip(checksums_by_call.get((output.path, output.call), ()), output.checksums, strict=False)
        )
        comparable_pairs = [(a, b) for a, b in checksum_pairs if a is not None and b is not None and a.shape == b.shape]
        if comparable_pairs and len(comparable_pairs) == len(output.checksums):
            differences[index] = max(a.relative_difference(b) for a, b in comparable_pairs)
    return differences


def _summarize_outputs(
    expected: Sequence[ModuleOutput], differences_by_rank: Sequence[Mapping[int, float]], bound: float
) -> Finding | None:
    """The first output that is off or, where none is, the one that is nearest to it. `bound`: of what the model gives in the end."""
    worst_by_output: dict[int, float] = {}
    for index, value in chain.from_iterable(differences.items() for differences in differences_by_rank):
        worst_by_output[index] = max(value, worst_by_output.get(index, 0.0))
    if not worst_by_output:
        return None
    out_of_bounds = [index for index in sorted(worst_by_output) if worst_by_output[index] > bound]
    chosen = out_of_bounds[0] if out_of_bounds else max(worst_by_output, key=lambda index: worst_by_output[index])
    where = expected[chosen].path or "the model itself"
    return Finding(
        kind="output", tensors=len(worst_by_output), max_difference=worst_by_output[chosen], where=where, bound=bound
    )


def _describe_outputs(finding: Finding | None, plan: Plan) -> str:
    if finding is None:
        return ""
    if finding.is_within_bound:
        return f"forward looks right: the outputs of {finding.tensors} modules agree on data rank 0"
    amount = "is not finite" if finding.max_difference == NOT_COMPARABLE else f"is off by {finding.max_difference:.1e}"
    cut_note = next(
        (f" (cut over tp: {placement.cut})" for placement in plan.tensor.placements if placement.path == finding.where),
        "",
    )
    hints_by_cut = {"row": "; looks like a sum over tp that is missing, or a bias that every rank adds"}
    hint = next((hint_text for cut_kind, hint_text in hints_by_cut.items() if f": {cut_kind})" in cut_note), "")
    return f"forward is wrong: the first output that is off is that of {finding.where}{cut_note}, which {amount}{hint}"


def _describe_misread_samples(context: SingleDeviceContext, step: int, digests_by_rank: Sequence[Sequence[str]]) -> str:
    """Which rank read other samples than the batch has for it."""
    plan, data = context.plan, context.data
    for rank, digests in enumerate(digests_by_rank):
        data_rank = plan.mesh.coordinate(rank)["dp"]
        for index, sample_range in enumerate(
            split_batch(data.samples_in(step), plan.mesh.dp, plan.micro, plan.data.batch_shares)[data_rank]
        ):
            positions = np.arange(sample_range.start, sample_range.stop)
            digest_of_batch, digest_again = (digest(data.read(step, positions)) for _ in range(2))
            if digest_of_batch == digest_again and index < len(digests) and digests[index] != digest_of_batch:
                return (
                    f"rank {rank} read other samples than those at {sample_range.start} to {sample_range.stop - 1} of the batch: looks like an order of the "
                    "data that each rank drew with its own seed"
                )
    return ""


def _collect_evidence(
    context: SingleDeviceContext,
    comparator: Comparator,
    actual: StepRecord,
    replication: Mapping[str, Replication],
    output_finding: Finding | None,
) -> explain_failure.Evidence:
    assert comparator.first_divergence is not None
    divergence = comparator.first_divergence
    reference = context.reference_at(divergence.step)
    micro_batch_count = count_micro_batches(
        context.data.samples_in(divergence.step),
        context.plan.mesh.dp,
        context.plan.micro,
        context.plan.data.batch_shares,
    )
    parameters = dict(reference.model.named_parameters())
    return explain_failure.Evidence(
        divergence=divergence,
        differences=[each for each in comparator.differences if each.step == divergence.step],
        bounds=context.bounds,
        plan=context.plan,
        micro_batch_count=micro_batch_count,
        actual=actual,
        expected=context.reference_at(divergence.step).step(divergence.step),
        tensors_before={
            "parameter": {name: value.detach() for name, value in parameters.items()},
            "buffer": {name: value.clone() for name, value in reference.model.named_buffers()},
        },
        previous_gradients={} if reference.last_record is None else reference.last_record.gradients,
        known_bugs=_possible_bugs(context.reference_at(divergence.step), divergence),
        loss_changes_on_repeat=lambda: known_bugs.loss_changes_on_repeat(
            context.reference_at(divergence.step), divergence.step
        ),
        changed_by_forward=known_bugs.changed_by_forward(context.reference_at(divergence.step), divergence.step),
        replication=replication,
        module_classes={
            name: type(reference.model.get_submodule(name.rpartition(".")[0])).__name__ for name in parameters
        },
        aliases={
            each: name for name in parameters for each in known_bugs.aliases_of(reference.model, name) if each != name
        },
        forward_order=comparator.forward_order,
        steps_by_rate=_rates_after_steps(context.build_reference(), micro_batch_count * divergence.step)
        if divergence.kind == "parameter" and micro_batch_count > 1
        else {},
        forward_agrees=None if output_finding is None else output_finding.is_within_bound,
    )


def _rates_after_steps(reference: Reference, steps: int) -> dict[float, int]:
    """The learning rates that the schedules give when they are stepped so often."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedules that are stepped without their optimizers say so
        for schedule in reference.schedules:
            for _ in range(0 if job_reader.requires_metric(schedule) else steps):
                schedule.step()
    return {float(group["lr"]): steps for optimizer in reference.optimizers for group in optimizer.param_groups}


def _possible_bugs(reference: Reference, divergence: Difference) -> Iterator[known_bugs.KnownBug]:
    """One after another, as they are asked for: each costs a pass over the batch."""
    name = divergence.name if divergence.kind == "gradient" else ""
    if name:
        yield from known_bugs.tied_weight_gradients(reference, divergence.step, name)
    yield from known_bugs.wrong_weightings(known_bugs.sum_micro_batches(reference, divergence.step, name))
