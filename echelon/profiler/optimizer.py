"""What the job's optimizers hold and make, found by one step on the meta device: no memory is used."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.errors import JobError
from echelon.job import Job
from echelon.plan.profile import Rule
from echelon.profiler.coupling import first_line
from echelon.profiler.trace import Recorder

#: Those that the engine switches to fused kernels, and of these the ones whose kernels know sharded tensors.
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
FUSED_SHARDED = (torch.optim.Adam, torch.optim.AdamW)
#: State per parameter element where a step on the meta device fails: what nearly all optimizers hold at most.
_GUESS = 2
#: Numbers along each side of what optimizers are tried on.
_SMALL = 4


def rules(job: Job, parameters: dict[str, Tensor]) -> tuple[tuple[Rule, ...], list[str]]:
    """One rule per optimizer, and notes on what had to be guessed. `parameters`: the trainable ones, of any device."""
    standins = {name: nn.Parameter(torch.empty_like(value, device="meta")) for name, value in parameters.items()}
    notes: list[str] = []
    made = _made(job, standins)
    whole = _whole(job, {name: tuple(value.shape) for name, value in parameters.items()}, len(made))
    return tuple(_rule(each, notes, whole.get(place)) for place, each in enumerate(made)), notes


def _made(job: Job, parameters: dict[str, nn.Parameter]) -> list[Optimizer]:
    try:
        made = job.optimizer(iter(parameters.items()))
    except (TypeError, AttributeError, ValueError):
        made = job.optimizer(iter(parameters.values()))
    optimizers: list[Any] = list(made) if isinstance(made, list | tuple) else [made]
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise JobError(f"optimizer= gives {type(optimizer).__name__}, not a torch optimizer or a list of them")
    return optimizers


def _whole(job: Job, shapes: Mapping[str, tuple[int, ...]], count: int) -> dict[int, str]:
    """Which of the job's `count` optimizers, by place, do not treat each number by itself: small parameters, and halves of them, are
    trained side by side. One that cannot be tried may be such a one: with why it cannot."""
    found: dict[int, str] = {}
    for last in (False, True):
        numbers = torch.Generator().manual_seed(0)
        whole: dict[str, nn.Parameter] = {}
        cuts: dict[str, tuple[int, int]] = {}
        for name, shape in shapes.items():
            small = tuple(min(size, _SMALL) for size in shape)
            dims = [dim for dim, size in enumerate(small) if size > 1]
            cuts[name] = (dims[-1 if last else 0], _SMALL // 2) if dims else (0, 1)
            whole[name] = nn.Parameter(torch.randn(small, generator=numbers, dtype=torch.float64))
        half = {name: nn.Parameter(_half(value.detach(), *cuts[name])) for name, value in whole.items()}
        try:
            both = [_made(job, each) for each in (whole, half)]
        except Exception as error:  # a user's own, which wants other shapes
            return dict.fromkeys(range(count), _said(error))
        if any(len(made) != count for made in both):
            return dict.fromkeys(range(count), "the job makes another number of optimizers for small parameters")
        for _ in range(2):
            for name, value in whole.items():
                value.grad = torch.randn(value.shape, generator=numbers, dtype=torch.float64)
                half[name].grad = _half(value.grad, *cuts[name])
            for place, pair in enumerate(zip(*both, strict=True)):
                try:
                    for optimizer in pair:
                        _plainly(optimizer)
                        optimizer.step()
                except Exception as error:  # it needs more than gradients, or another device
                    found[place] = _said(error)
        for place, optimizer in enumerate(both[0]):
            held = {id(value) for group in optimizer.param_groups for value in group["params"]}
            mine = [name for name, value in whole.items() if id(value) in held]
            if not all(torch.allclose(_half(whole[n].detach(), *cuts[n]), half[n], 1e-9, 1e-12) for n in mine):
                found.setdefault(place, "")
    return found


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _plainly(optimizer: Optimizer) -> None:
    """Without the kernels of a device that is not here: they compute the same."""
    for group in optimizer.param_groups:
        for switch in ("fused", "capturable"):
            if group.get(switch):
                group[switch] = False


def _half(value: Tensor, dim: int, length: int) -> Tensor:
    return value.narrow(dim, 0, min(length, value.shape[dim])).clone() if value.dim() else value.clone()


def _rule(optimizer: Optimizer, notes: list[str], whole: str | None) -> Rule:
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
        whole=whole is not None,
        untried=whole or "",
    )


def _step(optimizer: Optimizer, held: list[Tensor]) -> float:
    """Step twice; bytes that the second one had alive at most besides what it started with."""
    _plainly(optimizer)
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
