"""What the job's optimizers hold and make, found by one step on the meta device: no memory is used."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.errors import EchelonError, JobError
from echelon.job import Job
from echelon.plan.profile import Rule
from echelon.profiler.coupling import first_line
from echelon.profiler.trace import Recorder

#: Those that take fused=True in their constructor, where the same switch in a group turns the kernel on later, as the engine does; and of
#: these the ones whose kernels know sharded tensors.
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
FUSED_SHARDED = (torch.optim.Adam, torch.optim.AdamW)
#: State per parameter element where a step on the meta device fails: what nearly all optimizers hold at most.
_GUESS = 2
#: Numbers along each side of what optimizers are tried on, at first and then at most: Google's Adafactor computes with rows and columns
#: where both are 128 or longer, 8-bit Adam in blocks where a parameter has 4096 numbers.
_SMALL, _LARGE = 4, 512


def rules(job: Job, parameters: dict[str, Tensor]) -> tuple[tuple[Rule, ...], list[str]]:
    """One rule per optimizer, and notes on what had to be guessed. `parameters`: the trainable ones, of any device."""
    standins = {name: nn.Parameter(torch.empty_like(value, device="meta")) for name, value in parameters.items()}
    notes: list[str] = []
    made = made_for(job, standins)
    whole = _whole(job, standins, made)
    return tuple(_rule(each, notes, whole.get(place)) for place, each in enumerate(made)), notes


def on_pieces(job: Job, parameters: Mapping[str, Tensor]) -> tuple[Rule, ...]:
    """The same as far as the tensor axis asks: whether each of them can work on pieces. Nothing is measured."""
    standins = {name: nn.Parameter(torch.empty_like(value, device="meta")) for name, value in parameters.items()}
    try:
        made = made_for(job, standins)
        names, whole = [type(each).__name__ for each in made], _whole(job, standins, made)
    except EchelonError:
        raise
    except Exception as error:  # a user's own, which wants parameters with numbers
        names, whole = ["the optimizer"], {0: _said(error)}
    return tuple(
        Rule(name=name, state=0, temporary=0, elements=0, whole=place in whole, untried=whole.get(place, ""))
        for place, name in enumerate(names)
    )


def made_for(job: Job, parameters: dict[str, nn.Parameter]) -> list[Optimizer]:
    """The job's optimizers over these."""
    try:
        made = job.optimizer(iter(parameters.items()))
    except (TypeError, AttributeError, ValueError):
        made = job.optimizer(iter(parameters.values()))
    optimizers: list[Any] = list(made) if isinstance(made, list | tuple) else [made]
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise JobError(f"optimizer= gives {type(optimizer).__name__}, not a torch optimizer or a list of them")
    return optimizers


def _whole(job: Job, parameters: Mapping[str, Tensor], made: Sequence[Optimizer]) -> dict[int, str]:
    """Which of the job's optimizers, by place, do not treat each number by itself. One that cannot be tried may be such a one: with why
    it cannot."""
    small = {name: tuple(min(size, _SMALL) for size in value.shape) for name, value in parameters.items()}
    found = _tried(job, small, len(made), {})
    # Some do so from a certain size on only.
    return found if len(found) == len(made) else _tried(job, small | _largest(parameters, made), len(made), found)


def _largest(parameters: Mapping[str, Tensor], made: Sequence[Optimizer]) -> dict[str, tuple[int, ...]]:
    """One parameter of each shape that an optimizer treats alike, as large as it is; of more numbers than tell, fewer."""
    options = {
        id(value): (place, repr([group.get(name) for name in optimizer.defaults if name != "lr"]))
        for place, optimizer in enumerate(made)
        for group in optimizer.param_groups
        for value in group["params"]
    }
    found: dict[object, tuple[str, tuple[int, ...]]] = {}
    for name, value in parameters.items():
        shape = tuple(value.shape)
        if value.numel() > _LARGE**2:
            longest = sorted(shape)[-2:]
            shape = tuple(min(size, _LARGE if size in longest else 2 * _SMALL) for size in shape)
        found.setdefault((options.get(id(value)), shape), (name, shape))
    return dict(found.values())


def _tried(job: Job, shapes: Mapping[str, tuple[int, ...]], count: int, known: Mapping[int, str]) -> dict[int, str]:
    """Those of the job's `count` optimizers, with the `known` ones, that do not treat each number by itself: parameters of these shapes,
    and halves of them, are trained side by side."""
    found = dict(known)
    for last in (False, True):
        numbers = torch.Generator().manual_seed(0)
        whole: dict[str, nn.Parameter] = {}
        cuts: dict[str, tuple[int, int]] = {}
        for name, shape in shapes.items():
            dims = [dim for dim, size in enumerate(shape) if size > 1]
            cut = dims[-1 if last else 0] if dims else 0
            cuts[name] = (cut, shape[cut] // 2) if dims else (0, 1)
            whole[name] = nn.Parameter(torch.randn(shape, generator=numbers, dtype=torch.float64))
        half = {name: nn.Parameter(_half(value.detach(), *cuts[name])) for name, value in whole.items()}
        try:
            both = [made_for(job, each) for each in (whole, half)]
        except Exception as error:  # a user's own, which wants other shapes
            return dict.fromkeys(range(count), _said(error)) | found
        if any(len(made) != count for made in both):
            return (
                dict.fromkeys(range(count), "the job makes another number of optimizers for small parameters") | found
            )
        for _ in range(2):
            for name, value in whole.items():
                value.grad = torch.randn(value.shape, generator=numbers, dtype=torch.float64)
                half[name].grad = _half(value.grad, *cuts[name])
            for place, pair in enumerate(zip(*both, strict=True)):
                if place in known:
                    continue
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
