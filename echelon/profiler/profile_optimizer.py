"""What the job's optimizers hold and allocate, found by steps on the meta device, which use no memory; and what they read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from echelon.errors import EchelonError
from echelon.job import Job
from echelon.plan.profile import OptimizerProfile
from echelon.profiler.optimizer_class import (
    OptimizerClass,
    classify_optimizers,
    disable_device_kernels,
    make_meta_parameters,
    make_trial_optimizers,
)
from echelon.profiler.sample_coupling import first_line
from echelon.trials.op_recorder import OpRecorder

#: Those that take fused=True in their constructor, where the same switch in a group turns the kernel on later, as the engine does; and of
#: these the ones whose kernels know sharded tensors.
FUSED_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
FUSED_SHARDED_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW)
#: State per parameter element where a step on the meta device fails: what nearly all optimizers hold at most.
_ASSUMED_STATES = 2


def profile_optimizers(job: Job, parameters: Mapping[str, Tensor]) -> tuple[tuple[OptimizerProfile, ...], list[str]]:
    """One rule per optimizer, and notes on what had to be guessed. `parameters`: the trainable ones, of any device."""
    placeholders = make_meta_parameters(parameters)
    notes: list[str] = []
    try:
        optimizers = make_trial_optimizers(job, placeholders)
    except EchelonError:
        raise
    except Exception as error:  # a function that looks at values
        return (_assume_rule(placeholders, f"{type(error).__name__}: {first_line(error)}", notes),), notes
    optimizer_classes = classify_optimizers(job, placeholders, optimizers)
    return tuple(
        _profile_optimizer(optimizer, notes, optimizer_class)
        for optimizer, optimizer_class in zip(optimizers, optimizer_classes, strict=True)
    ), notes


def _assume_rule(parameters: Mapping[str, Tensor], reason: str, notes: list[str]) -> OptimizerProfile:
    parameter_bytes = sum(value.numel() * value.element_size() for value in parameters.values())
    notes.append(
        f"optimizer= cannot be called with parameters on the meta device ({reason}): its state is taken as {_ASSUMED_STATES} x the parameters"
    )
    elements = sum(value.numel() for value in parameters.values())
    return OptimizerProfile(
        name="the optimizer", state_bytes=_ASSUMED_STATES * parameter_bytes, temporary_bytes=0, trainable_elements=elements, update_scope="model", uses_rng=True, untested_reason=reason
    )  # fmt: skip


def _profile_optimizer(optimizer: Optimizer, notes: list[str], optimizer_class: OptimizerClass) -> OptimizerProfile:
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    parameter_bytes = sum(value.numel() * value.element_size() for value in parameters)
    temporary_bytes = 0.0
    try:
        temporary_bytes = _measure_temporary_bytes(optimizer, parameters)
        state_bytes = sum(_count_state_bytes(entry) for entry in optimizer.state.values())
    except Exception as error:  # any optimizer of the user's own: what it does on the meta device is its business
        state_bytes = _ASSUMED_STATES * parameter_bytes
        notes.append(
            f"{type(optimizer).__name__} cannot step on the meta device ({type(error).__name__}): its state is taken as {_ASSUMED_STATES} x the "
            "parameters"
        )
    return OptimizerProfile(
        name=type(optimizer).__name__,
        state_bytes=state_bytes,
        temporary_bytes=int(temporary_bytes),
        trainable_elements=sum(value.numel() for value in parameters),
        fused=type(optimizer) in FUSED_OPTIMIZERS,
        fused_sharded=type(optimizer) in FUSED_SHARDED_OPTIMIZERS,
        update_scope=optimizer_class.reads,
        uses_rng=optimizer_class.draws,
        untested_reason=optimizer_class.untried,
    )


def _measure_temporary_bytes(optimizer: Optimizer, parameters: list[Tensor]) -> float:
    """Step twice; bytes that the second one had alive at most besides what it started with."""
    disable_device_kernels(optimizer)
    for value in parameters:
        value.grad = torch.empty_like(value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
        recorder = OpRecorder(1)
        for value in parameters:
            recorder.ignore_storage(value)
            recorder.ignore_storage(value.grad)  # type: ignore[arg-type]
        for entry in optimizer.state.values():
            for tensor in _list_state_tensors(entry):
                recorder.ignore_storage(tensor)
        with recorder:
            optimizer.step()
    return max((op_call.alive_bytes for op_call in recorder.trace.calls), default=0.0)


def _list_state_tensors(entry: Any) -> list[Tensor]:
    return [value for value in entry.values() if isinstance(value, Tensor)]


def _count_state_bytes(entry: Any) -> int:
    return sum(value.numel() * value.element_size() for value in _list_state_tensors(entry))
