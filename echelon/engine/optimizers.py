"""The job's optimizers over live parameters: called as the user likes, fused where torch can, with their schedules."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from echelon.engine.ranks import Group
from echelon.errors import JobError
from echelon.job import Job

#: Those that take fused=True in their constructor; the same switch in a group turns the kernel on later.
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
#: Of these, the kernels that know sharded tensors.
_FUSED_SHARDED = (torch.optim.Adam, torch.optim.AdamW)


#: Torch's word for an optimizer without parameters.
_EMPTY = "empty parameter list"


def make_optimizers(job: Job, model: nn.Module, ranks: Group, *, fused: bool) -> list[Optimizer]:
    """The job's optimizers for what this rank trains. Every rank must call it: where one cannot make them none goes on."""
    with ranks.together():
        optimizers = _make(job, model, fused=fused)
    kinds = ranks.gather([type(each).__name__ for each in optimizers])
    other = next((rank for rank, each in enumerate(kinds) if each != kinds[0]), None)
    if other is not None:
        raise JobError(
            f"optimizer= gives {', '.join(kinds[0])} on rank 0 and {', '.join(kinds[other])} on rank {other}, whose stage has other "
            f"parameters; a checkpoint could not tell which is which: {_INSTEAD}"
        )
    return optimizers


_INSTEAD = (
    "use one optimizer with parameter groups, cut the stages elsewhere (`stages` in the plan's document) so that each has parameters "
    "for every optimizer, or use pp=1"
)


def _make(job: Job, model: nn.Module, *, fused: bool) -> list[Optimizer]:
    trainable = [(name, value) for name, value in model.named_parameters() if value.requires_grad and not value.is_meta]
    if not trainable and any(value.requires_grad for value in model.parameters()):
        # All that is trained is on other stages: an optimizer of nothing keeps schedules and settings in step with theirs.
        trainable = [("nothing", nn.Parameter(torch.zeros(0)))]
    if not trainable:
        raise JobError("no parameter requires a gradient: nothing would be trained")
    made = _called(job, trainable, staged=any(value.is_meta for value in model.parameters()))
    optimizers: list[Optimizer] = []
    for optimizer in made if isinstance(made, list | tuple) else [made]:
        if not isinstance(optimizer, Optimizer):
            raise JobError(f"optimizer= gives {type(optimizer).__name__}, not a torch optimizer or a list of them")
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise JobError(
                "optimizer= is SparseAdam, which takes sparse gradients alone; here gradients are dense, so that they can be added up over "
                "ranks: use Adagrad or SGD, which train the same either way, or Adam, which also moves rows that a batch did not use"
            )
        optimizers.append(optimizer)
        _require_live(optimizer, trainable)
        _choose_kernels(optimizer, fused=fused)
    return optimizers


def _called(job: Job, trainable: list[tuple[str, nn.Parameter]], *, staged: bool) -> Any:
    """What the job's function gives for (name, parameter) pairs, or for parameters if it does not take pairs."""
    try:
        return job.optimizer(iter(trainable))
    except (TypeError, AttributeError, ValueError) as first:
        # A function that looks at each parameter (`p.ndim > 1`) fails on a pair; if it fails on parameters too, that is the error.
        try:
            return job.optimizer(value for _, value in trainable)
        except Exception as second:
            if not any(_EMPTY in str(error) for error in (first, second)):
                raise
            held = ", ".join(name for name, _ in trainable[:3]) + (", ..." if len(trainable) > 3 else "")
            if staged:
                raise JobError(
                    f"optimizer=: this stage has no parameter for one of the optimizers (it trains {held}): {_INSTEAD}"
                ) from second
            raise JobError(
                f"optimizer=: one of the optimizers is given no parameter of the model's ({held}); leave it out"
            ) from second


def _require_live(optimizer: Optimizer, trainable: list[tuple[str, nn.Parameter]]) -> None:
    live = {id(value) for _, value in trainable}
    for group in optimizer.param_groups:
        for value in group["params"]:
            if id(value) not in live:
                raise JobError(
                    "optimizer= holds a parameter that is not the running model's (a sharded model has its own): use the "
                    "parameters that the function is given, not those of a model outside"
                )


def _choose_kernels(optimizer: Optimizer, *, fused: bool) -> None:
    for group in optimizer.param_groups:
        # A user who chose an implementation keeps it.
        if group.get("fused") is not None or group.get("foreach") is not None or group.get("differentiable"):
            continue
        kinds = {isinstance(value, DTensor) for value in group["params"]}
        kernels = _FUSED_SHARDED if True in kinds else _FUSED
        floating = all(value.is_floating_point() for value in group["params"])
        if len(kinds) > 1:
            if "foreach" in group:
                group["foreach"] = False  # kernels over many tensors at once take whole ones or sharded ones
        elif fused and type(optimizer) in kernels and floating and not isinstance(group.get("lr"), torch.Tensor):
            group["fused"] = True


def make_schedules(job: Job, optimizers: list[Optimizer], steps: int) -> list[Any]:
    """One schedule per optimizer, from `schedule(optimizer)` or `schedule(optimizer, total_steps)`."""
    if job.schedule is None:
        return []
    places = [
        p for p in inspect.signature(job.schedule).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]  # fmt: skip
    made = [job.schedule(optimizer, steps) if len(places) > 1 else job.schedule(optimizer) for optimizer in optimizers]
    for schedule in made:
        if not hasattr(schedule, "step"):
            raise JobError(
                f"schedule= gives {type(schedule).__name__}, which has no step(); return a torch LRScheduler"
            )
    return made
