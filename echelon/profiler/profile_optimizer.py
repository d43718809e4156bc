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
from echelon.plan.profile import Rule
from echelon.profiler.optimizer_class import OptimizerClass, classes, made_for, meta_parameters, plainly
from echelon.profiler.sample_coupling import first_line
from echelon.trials.op_recorder import Recorder

#: Those that take fused=True in their constructor, where the same switch in a group turns the kernel on later, as the engine does; and of
#: these the ones whose kernels know sharded tensors.
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
FUSED_SHARDED = (torch.optim.Adam, torch.optim.AdamW)
#: State per parameter element where a step on the meta device fails: what nearly all optimizers hold at most.
_GUESS = 2


def rules(job: Job, parameters: Mapping[str, Tensor]) -> tuple[tuple[Rule, ...], list[str]]:
    """One rule per optimizer, and notes on what had to be guessed. `parameters`: the trainable ones, of any device."""
    standins = meta_parameters(parameters)
    notes: list[str] = []
    try:
        made = made_for(job, standins)
    except EchelonError:
        raise
    except Exception as error:  # a function that looks at values
        return (_guessed(standins, f"{type(error).__name__}: {first_line(error)}", notes),), notes
    found = classes(job, standins, made)
    return tuple(_rule(each, notes, kind) for each, kind in zip(made, found, strict=True)), notes


def _guessed(parameters: Mapping[str, Tensor], why: str, notes: list[str]) -> Rule:
    size = sum(value.numel() * value.element_size() for value in parameters.values())
    notes.append(
        f"optimizer= cannot be called with parameters on the meta device ({why}): its state is taken as {_GUESS} x the parameters"
    )
    elements = sum(value.numel() for value in parameters.values())
    return Rule(
        name="the optimizer", state=_GUESS * size, temporary=0, elements=elements, reads="model", draws=True, untried=why
    )  # fmt: skip


def _rule(optimizer: Optimizer, notes: list[str], kind: OptimizerClass) -> Rule:
    held = [value for group in optimizer.param_groups for value in group["params"]]
    size = sum(value.numel() * value.element_size() for value in held)
    temporary = 0.0
    try:
        temporary = _step(optimizer, held)
        state = sum(_state_bytes(entry) for entry in optimizer.state.values())
    except Exception as error:  # any optimizer of the user's own: what it does on the meta device is its business
        state = _GUESS * size
        notes.append(
            f"{type(optimizer).__name__} cannot step on the meta device ({type(error).__name__}): its state is taken as {_GUESS} x the "
            "parameters"
        )
    return Rule(
        name=type(optimizer).__name__,
        state=state,
        temporary=int(temporary),
        elements=sum(value.numel() for value in held),
        fused=type(optimizer) in FUSED,
        fused_sharded=type(optimizer) in FUSED_SHARDED,
        reads=kind.reads,
        draws=kind.draws,
        untried=kind.untried,
    )


def _step(optimizer: Optimizer, held: list[Tensor]) -> float:
    """Step twice; bytes that the second one had alive at most besides what it started with."""
    plainly(optimizer)
    for value in held:
        value.grad = torch.empty_like(value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
        recorder = Recorder(1)
        for value in held:
            recorder.ignore(value)
            recorder.ignore(value.grad)  # type: ignore[arg-type]
        for entry in optimizer.state.values():
            for tensor in _state_tensors(entry):
                recorder.ignore(tensor)
        with recorder:
            optimizer.step()
    return max((call.alive for call in recorder.trace.calls), default=0.0)


def _state_tensors(entry: Any) -> list[Tensor]:
    return [value for value in entry.values() if isinstance(value, Tensor)]


def _state_bytes(entry: Any) -> int:
    return sum(value.numel() * value.element_size() for value in _state_tensors(entry))
