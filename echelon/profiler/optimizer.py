"""What the job's optimizers hold and make, found by one step on the meta device: no memory is used."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.errors import JobError
from echelon.job import Job
from echelon.plan.profile import Rule
from echelon.profiler.trace import Recorder

#: Those that the engine switches to fused kernels, and of these the ones whose kernels know sharded tensors.
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
FUSED_SHARDED = (torch.optim.Adam, torch.optim.AdamW)
#: State per parameter element where a step on the meta device fails: what nearly all optimizers hold at most.
_GUESS = 2


def rules(job: Job, parameters: dict[str, Tensor]) -> tuple[tuple[Rule, ...], list[str]]:
    """One rule per optimizer, and notes on what had to be guessed. `parameters`: the trainable ones, of any device."""
    standins = {name: nn.Parameter(torch.empty_like(value, device="meta")) for name, value in parameters.items()}
    try:
        made = job.optimizer(iter(standins.items()))
    except (TypeError, AttributeError, ValueError):
        made = job.optimizer(iter(standins.values()))
    optimizers = list(made) if isinstance(made, list | tuple) else [made]
    notes: list[str] = []
    found = []
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise JobError(f"optimizer= gives {type(optimizer).__name__}, not a torch optimizer or a list of them")
        found.append(_rule(optimizer, notes))
    return tuple(found), notes


def _rule(optimizer: Optimizer, notes: list[str]) -> Rule:
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
    )


def _step(optimizer: Optimizer, held: list[Tensor]) -> float:
    """Step twice; bytes that the second one had alive at most besides what it started with."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            group["fused"] = False  # there is no fused kernel on the meta device; the state is the same
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
