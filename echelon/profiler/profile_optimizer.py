"""What the job's optimizers hold, allocate and read, by steps on the meta device, which use no memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from echelon.errors import EchelonError, describe_error
from echelon.job import Job
from echelon.plan.profile import OptimizerProfile
from echelon.profiler.optimizer_class import (
    OptimizerClass,
    classify_optimizers,
    disable_device_kernels,
    make_meta_parameters,
    make_trial_optimizers,
)
from echelon.trials.op_recorder import OpRecorder

#: Optimizers whose fused kernel the engine can turn on later by setting `fused` in a group, and those whose kernel supports sharded tensors.
FUSED_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
FUSED_SHARDED_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW)
#: State elements per parameter element where a step on the meta device fails: nearly all optimizers hold no more.
_ASSUMED_STATES = 2


def profile_optimizers(job: Job, parameters: Mapping[str, Tensor]) -> tuple[tuple[OptimizerProfile, ...], list[str]]:
    """A profile of each optimizer, and notes on assumptions. `parameters`: the trainable ones, on any device."""
    placeholders = make_meta_parameters(parameters)
    notes: list[str] = []
    try:
        optimizers = make_trial_optimizers(job, placeholders)
    except EchelonError:
        raise
    except Exception as error:  # a function that looks at values
        reason, state_bytes = describe_error(error), _ASSUMED_STATES * sum(x.nbytes for x in placeholders.values())
        assumption = f"its state is taken as {_ASSUMED_STATES} x the parameters"
        notes.append(f"optimizer= cannot be called with parameters on the meta device ({reason}): {assumption}")
        assumed = OptimizerProfile(
            name="the optimizer", state_bytes=state_bytes, temporary_bytes=0,
            trainable_elements=sum(x.numel() for x in placeholders.values()), update_scope="model", uses_rng=True, untested_reason=reason,
        )  # fmt: skip
        return (assumed,), notes
    optimizer_classes = classify_optimizers(job, placeholders, optimizers)
    pairs = zip(optimizers, optimizer_classes, strict=True)
    return tuple(_profile_optimizer(optimizer, notes, optimizer_class) for optimizer, optimizer_class in pairs), notes


def _profile_optimizer(optimizer: Optimizer, notes: list[str], optimizer_class: OptimizerClass) -> OptimizerProfile:
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    kind, temporary_bytes = type(optimizer), 0.0
    try:
        temporary_bytes = _measure_temporary_bytes(optimizer, parameters)
        state_bytes = sum(tensor.nbytes for tensor in _state_tensors(optimizer))
    except Exception as error:  # a user's optimizer may do anything on the meta device
        state_bytes = _ASSUMED_STATES * sum(value.nbytes for value in parameters)
        assumption = f"its state is taken as {_ASSUMED_STATES} x the parameters"
        notes.append(f"{kind.__name__} cannot step on the meta device ({type(error).__name__}): {assumption}")
    return OptimizerProfile(
        name=kind.__name__,
        state_bytes=state_bytes,
        temporary_bytes=int(temporary_bytes),
        trainable_elements=sum(value.numel() for value in parameters),
        fused=kind in FUSED_OPTIMIZERS,
        fused_sharded=kind in FUSED_SHARDED_OPTIMIZERS,
        update_scope=optimizer_class.reads,
        uses_rng=optimizer_class.draws,
        untested_reason=optimizer_class.untried,
    )


def _measure_temporary_bytes(optimizer: Optimizer, parameters: list[Tensor]) -> float:
    disable_device_kernels(optimizer)
    gradients = [torch.empty_like(value) for value in parameters]
    for value, gradient in zip(parameters, gradients, strict=True):
        value.grad = gradient
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
        recorder = OpRecorder(1)
        for tensor in (*parameters, *gradients, *_state_tensors(optimizer)):
            recorder.ignore_storage(tensor)
        with recorder:
            optimizer.step()
    return max((op_call.alive_bytes for op_call in recorder.trace.calls), default=0.0)


def _state_tensors(optimizer: Optimizer) -> list[Tensor]:
    return [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
