"""The units of a job's model in the order of their calls, and the bytes that pass from one to the next: where a pipeline can be split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from echelon.job import Job, call_loss, call_model
from echelon.plan.profile import Amount, PipelineUnit, is_within
from echelon.profiler.fake_model import CallOutput, FakeModel, ForwardFunction
from echelon.profiler.module_calls import UnitCall, UnitOutput, find_crossing_values, list_unit_paths
from echelon.profiler.repeated_blocks import RepeatedBlocks, extend_pipeline_units, shortened_model
from echelon.tree import tree_leaves
from echelon.trials.example_batch import ExampleBatches
from echelon.trials.random_extremes import UNIFORM_EXTREMES, uniform_draws_fixed_at
from echelon.trials.shape_model import build_fake_model

#: Two batch sizes, which separate a fixed part from a part per sample.
_BATCH_SIZES = (2, 4)


def find_pipeline_units(
    job: Job, example: ExampleBatches | None = None, repeated_blocks: RepeatedBlocks | None = None
) -> tuple[PipelineUnit, ...]:
    """The units, without computing anything. Empty: the model cannot be split into stages. Errors of its code on fake tensors propagate.
    `repeated_blocks`: blocks that are known to be treated alike."""
    example = example or ExampleBatches(job)

    def loss(model: nn.Module, batch: Any) -> Any:
        return call_loss(job, call_model(job, model, batch), batch, model)

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build_fake_model(job).train()
    if repeated_blocks is not None:
        with shortened_model(model, repeated_blocks):
            short_units = _trace_pipeline_units(model, example, loss)
        all_units = extend_pipeline_units(short_units, repeated_blocks) if short_units else ()
        if all_units is not None:
            return all_units
    return _trace_pipeline_units(model, example, loss)


def _trace_pipeline_units(model: nn.Module, example: ExampleBatches, loss: ForwardFunction) -> tuple[PipelineUnit, ...]:
    fake_model = FakeModel(model, torch.device("cpu"))
    unit_calls = fake_model.trace_calls(loss, example.batch(_BATCH_SIZES[0]))
    called_paths = [unit_call.path for unit_call in unit_calls if unit_call.path]
    paths = list(dict.fromkeys(called_paths))
    small_outputs, large_outputs = (
        fake_model.compute_outputs(loss, example.batch(size), paths, training=True, unit_calls=unit_calls)
        for size in _BATCH_SIZES
    )
    if not len(unit_calls) == len(small_outputs) == len(large_outputs):
        return ()  # the called units depend on the batch
    if not _has_stable_calls(fake_model, example, loss, called_paths):
        return ()
    units = []
    for index, unit_call in enumerate(unit_calls[:-1]):
        received = _fit_crossing_bytes(find_crossing_values(unit_calls, index), small_outputs, large_outputs)
        path, cost, changes = unit_call.path, _estimate_work(model, unit_call), unit_call.changes_buffers
        units.append(PipelineUnit(path=path, cost=cost, boundary_bytes=received, changes_buffers=changes))
    return tuple(units)


def _has_stable_calls(
    fake_model: FakeModel, example: ExampleBatches, loss: ForwardFunction, expected: Sequence[str]
) -> bool:
    """Whether forward calls the same units for any random numbers, and for other samples if batches hold more than tensors."""
    all_paths = list_unit_paths(fake_model.model)
    others = [path for path in all_paths if not any(is_within(path, e) or is_within(e, path) for e in expected)]
    paths, size = list(dict.fromkeys([*expected, *others])), _BATCH_SIZES[0]
    has_other_leaves = any(not isinstance(leaf, Tensor | None) for leaf in tree_leaves(example.batch(1)))
    starts = range(size, len(example.samples), size) if has_other_leaves else ()
    try:
        for extreme in UNIFORM_EXTREMES:
            with uniform_draws_fixed_at(extreme):
                if fake_model.list_unit_calls(loss, example.batch(size), paths) != expected:
                    return False
        batches = (example.batch(size, first_sample=start) for start in starts)
        return all(fake_model.list_unit_calls(loss, batch, paths) == expected for batch in batches)
    except Exception:  # a user's forward may do anything with such values
        return False


def _estimate_work(model: nn.Module, unit_call: UnitCall) -> float:
    """Approximate cost of a unit: its matrix products, and a little for each parameter."""
    return unit_call.flops + 2.0 * sum(value.numel() for value in model.get_submodule(unit_call.path).parameters())


def _fit_crossing_bytes(
    values: Sequence[UnitOutput], small_outputs: list[CallOutput], large_outputs: list[CallOutput]
) -> Amount:
    small_bytes = sum(_output_bytes(small_outputs[call], index) for call, index in values)
    large_bytes = sum(_output_bytes(large_outputs[call], index) for call, index in values)
    slope = (large_bytes - small_bytes) / (_BATCH_SIZES[1] - _BATCH_SIZES[0])
    return Amount(small_bytes - slope * _BATCH_SIZES[0], slope)


def _output_bytes(outputs: CallOutput, output_index: int) -> float:
    try:
        return float(outputs.leaves[outputs.tensor_indices[output_index]].nbytes)
    except Exception:  # its size depends on values (nonzero), which are unknown
        return 0.0
