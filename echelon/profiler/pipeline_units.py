"""The units of a job's model in the order of their calls, and what passes from one to the next: where a pipeline can be cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from echelon.job import Job, call_loss, call_model
from echelon.plan.profile import Amount
from echelon.plan.profile import PipelineUnit as Planned
from echelon.profiler.fake_model import CallOutput, FakeModel
from echelon.profiler.module_calls import UnitCall, UnitOutput, find_crossing_values, list_unit_paths
from echelon.profiler.repeated_blocks import RepeatedBlocks, extend_pipeline_units, shortened_model
from echelon.tree import tree_leaves
from echelon.trials.example_batch import ExampleBatches
from echelon.trials.random_extremes import UNIFORM_EXTREMES, uniform_draws_fixed_at
from echelon.trials.shape_model import build_fake_model

#: Samples of the two batches that tell a fixed part from a part per sample.
_BATCH_SIZES = (2, 4)


def find_pipeline_units(
    job: Job, example: ExampleBatches | None = None, repeated_blocks: RepeatedBlocks | None = None
) -> tuple[Planned, ...]:
    """Nothing is computed. Empty: the model cannot be cut into stages. Whatever its code says to tensors without numbers is raised.
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


def _trace_pipeline_units(
    model: nn.Module, example: ExampleBatches, loss: Callable[[nn.Module, Any], Any]
) -> tuple[Planned, ...]:
    fake_model = FakeModel(model, torch.device("cpu"))
    unit_calls = fake_model.trace_calls(loss, example.batch(_BATCH_SIZES[0]))
    paths = list(dict.fromkeys(unit_call.path for unit_call in unit_calls if unit_call.path))
    small_outputs, large_outputs = (
        fake_model.compute_outputs(loss, example.batch(size), paths, training=True, unit_calls=unit_calls)
        for size in _BATCH_SIZES
    )
    if not len(unit_calls) == len(small_outputs) == len(large_outputs):
        return ()  # which units are called depends on the batch
    if not _has_stable_calls(fake_model, example, loss, [unit_call.path for unit_call in unit_calls if unit_call.path]):
        return ()
    return tuple(
        Planned(
            path=unit_call.path,
            cost=_estimate_work(model, unit_call),
            boundary_bytes=_fit_crossing_bytes(
                find_crossing_values(unit_calls, call_index), small_outputs, large_outputs
            ),
            changes_buffers=unit_call.changes_buffers,
        )
        for call_index, unit_call in enumerate(unit_calls[:-1])
    )


def _has_stable_calls(
    fake_model: FakeModel, example: ExampleBatches, loss: Callable[[nn.Module, Any], Any], expected_paths: Sequence[str]
) -> bool:
    """Whether forward calls the same units whatever random numbers it draws, and for other samples where batches hold more than tensors."""
    others = [
        path
        for path in list_unit_paths(fake_model.model)
        if not any(_is_nested(expected, path) for expected in expected_paths)
    ]
    paths = list(dict.fromkeys([*expected_paths, *others]))
    non_tensor_leaves = [leaf for leaf in tree_leaves(example.batch(1)) if not isinstance(leaf, Tensor | None)]
    batch = example.batch(_BATCH_SIZES[0])
    try:
        for extreme in UNIFORM_EXTREMES:
            with uniform_draws_fixed_at(extreme):
                if fake_model.list_unit_calls(loss, batch, paths) != expected_paths:
                    return False
        starts = range(_BATCH_SIZES[0], len(example.samples), _BATCH_SIZES[0]) if non_tensor_leaves else ()
        return all(
            fake_model.list_unit_calls(loss, example.batch(_BATCH_SIZES[0], first_sample=start), paths)
            == expected_paths
            for start in starts
        )
    except Exception:  # whatever a user's forward does with such numbers
        return False


def _is_nested(first: str, second: str) -> bool:
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.")


def _estimate_work(model: nn.Module, unit_call: UnitCall) -> float:
    """About what a unit costs: its products, and a little for each parameter where there are none."""
    return unit_call.flops + 2.0 * sum(value.numel() for value in model.get_submodule(unit_call.path).parameters())


def _fit_crossing_bytes(
    values: Sequence[UnitOutput], small_outputs: Sequence[CallOutput], large_outputs: Sequence[CallOutput]
) -> Amount:
    small_bytes, large_bytes = (
        sum(_output_bytes(outputs[call_index], output_index) for call_index, output_index in values)
        for outputs in (small_outputs, large_outputs)
    )
    slope = (large_bytes - small_bytes) / (_BATCH_SIZES[1] - _BATCH_SIZES[0])
    return Amount(small_bytes - slope * _BATCH_SIZES[0], slope)


def _output_bytes(outputs: CallOutput, output_index: int) -> float:
    value = outputs.leaves[outputs.tensor_indices[output_index]]
    assert isinstance(value, Tensor)
    try:
        return float(value.numel() * value.element_size())
    except Exception:  # its size follows from values (nonzero), which are not there
        return 0.0
