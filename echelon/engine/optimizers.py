"""The job's optimizers over live parameters: called as the user likes, fused where torch can, with their schedules."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from echelon.engine.checkpoint.param_group_state import is_plain, settings
from echelon.engine.checkpoint.schedule_state import require_steps
from echelon.engine.parallel.whole_tensor_optimizer import WholeOptimizer
from echelon.engine.process_groups import Group
from echelon.errors import JobError, PlanError
from echelon.job import Job, call_optimizer
from echelon.plan.plan import Plan
from echelon.profiler.profile_optimizer import FUSED, FUSED_SHARDED
from echelon.trials.trial_context import without_trace

#: Torch's word for an optimizer without parameters.
_EMPTY = "empty parameter list"


def make_optimizers(
    job: Job,
    model: nn.Module,
    ranks: Group,
    *,
    shapes: Mapping[str, Sequence[int]],
    fused: bool,
    served: Set[str] = frozenset(),
    whole: Mapping[int, WholeOptimizer] | None = None,
    others: Collection[nn.Parameter] = (),
    sparse: bool = False,
    alone: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Optimizer]:
    """The job's optimizers for what this rank trains. Every rank must call it: where one cannot make them none goes on.

    `shapes`: of the whole model's parameters. `served`: parameters that are tables of a parameter server. `whole`: by place, what steps
    on whole tensors. `others`: parameters that the loss holds, which the job's function may add. `sparse`: gradients may be. `alone`: what `settings_alone` returned.
    """
    whole = whole or {}
    named = _trained(model, whole)
    if whole and any(ranks.gather(_fails(job, named))):
        for each in whole.values():  # it looks at values, and needs them all
            each.fill()
        named = _trained(model, whole)
    if any(ranks.gather(any(value.is_meta for value in model.parameters()))):
        kinds = ranks.gather(_kinds(job, model, named, shapes))
        if None in kinds or any(each != kinds[0] for each in kinds):
            # Over the parameters of its own stage the job's function gives something else than on one device.
            named = _trained(model, whole, absent=True)
    with ranks.together():
        optimizers = _make(job, named, served, sparse=sparse)
        _require_known(optimizers, [*(value for _, value in named), *others])
        if alone:
            _require_same_objects(dict(named), optimizers, alone)
        else:
            _require_same_settings(job, model, named, shapes, optimizers)
        _require_places(optimizers, whole)
        _leave_to_others(optimizers, whole)
    for place, optimizer in enumerate(optimizers):
        if whole and place in whole:
            whole[place].adopt(optimizer)
        _choose_kernels(optimizer, fused=fused)
    return optimizers


def _trained(
    model: nn.Module, whole: Mapping[int, WholeOptimizer], *, absent: bool = False
) -> list[tuple[str, nn.Parameter]]:
    """What the optimizers are made over: this rank's live parameters, or whole ones in their place. `absent`: and those of other stages,
    which have no memory."""
    instead = {name: value for each in whole.values() for name, value in each.parameters.items()}
    trained = [(name, instead.get(name, value)) for name, value in model.named_parameters() if value.requires_grad]
    found = [(name, value) for name, value in trained if absent or name in instead or not value.is_meta]
    if trained and not found:
        # All that is trained is on other stages: an optimizer of nothing keeps schedules and settings in step with theirs.
        return [("nothing", nn.Parameter(torch.zeros(0)))]
    return found


def _kinds(
    job: Job, model: nn.Module, named: list[tuple[str, nn.Parameter]], shapes: Mapping[str, Sequence[int]]
) -> list[str] | None:
    """The optimizers that the job's function gives for these; None where it gives none, or others than for the whole model."""
    try:
        made = _as_list(_called(job, named))
        _require_same_settings(job, model, named, shapes, made)
    except Exception:  # whatever it is, the whole model shows it again
        return None
    return [type(each).__name__ for each in made]


def _leave_to_others(optimizers: Sequence[Optimizer], whole: Mapping[int, WholeOptimizer]) -> None:
    """Take parameters of other stages out of the groups, which stay as they are on one device."""
    for place, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups if place not in whole else ():
            here = [at for at, value in enumerate(group["params"]) if not value.is_meta]
            if len(here) == len(group["params"]):
                continue
            for value in group["params"]:
                if value.is_meta:
                    optimizer.state.pop(value, None)
            for key in ("params", "param_names"):
                if key in group:
                    group[key] = [group[key][at] for at in here]


def _as_list(made: Any) -> list[Any]:
    return list(made) if isinstance(made, list | tuple) else [made]


def _fails(job: Job, named: list[tuple[str, nn.Parameter]]) -> bool:
    """Whether the job's function cannot be called with parameters that have no values."""
    try:
        _called(job, named)
    except Exception:
        return any(value.is_meta for _, value in named)
    return False


def _require_places(optimizers: Sequence[Optimizer], whole: Mapping[int, WholeOptimizer]) -> None:
    """The trials saw the optimizers that are made here."""
    for place, optimizer in enumerate(optimizers):
        held = {id(value) for group in optimizer.param_groups for value in group["params"]}
        for other, each in whole.items():
            strays = [name for name, value in each.parameters.items() if id(value) in held]
            if strays and other != place:
                raise JobError(
                    f"optimizer=: {strays[0]} is trained by optimizer {place + 1} here and by optimizer {other + 1} of a trial call with "
                    "the same shapes; choose the optimizer by name or by shape alone"
                )


def _make(job: Job, trainable: list[tuple[str, nn.Parameter]], served: Set[str], *, sparse: bool) -> list[Optimizer]:
    if not trainable:
        raise JobError("no parameter requires a gradient: nothing would be trained")
    made = _called(job, trainable)
    optimizers: list[Optimizer] = []
    for optimizer in _as_list(made):
        if not isinstance(optimizer, Optimizer):
            raise JobError(f"optimizer= gives {type(optimizer).__name__}, not a torch optimizer or a list of them")
        tables = {id(value) for name, value in trainable if name in served}
        if (
            isinstance(optimizer, torch.optim.SparseAdam)
            and not sparse
            and any(id(value) not in tables for group in optimizer.param_groups for value in group["params"])
        ):
            raise PlanError(
                "optimizer= is SparseAdam, which takes sparse gradients alone; ranks add up dense ones: train in one process (dp=1), or with "
                "Adagrad or SGD, which train the same either way, or with Adam, which also moves rows that a batch did not use; or under a plan "
                "with exchange=server, which trains tables as SparseAdam does"
            )
        if _needs_closure(optimizer):
            raise JobError(
                f"optimizer= is {type(optimizer).__name__}, whose step computes the loss again by itself, which no rank could do alone: use one "
                "that steps on gradients (AdamW, SGD)"
            )
        optimizers.append(optimizer)
    return optimizers


def _needs_closure(optimizer: Optimizer) -> bool:
    """Whether `step()` does not do."""
    return any(
        each.default is each.empty
        and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        for each in inspect.signature(optimizer.step).parameters.values()
    )


def _called(job: Job, trainable: list[tuple[str, nn.Parameter]]) -> Any:
    try:
        return call_optimizer(job, trainable)
    except Exception as error:
        if _EMPTY not in str(error):
            raise
        held = ", ".join(name for name, _ in trainable[:3]) + (", ..." if len(trainable) > 3 else "")
        raise JobError(
            f"optimizer=: one of the optimizers is given no parameter of the model's ({held}); leave it out"
        ) from error


def _require_known(optimizers: Sequence[Optimizer], known: Collection[nn.Parameter]) -> None:
    """Every parameter is one that the function was given, or one that the loss holds."""
    ids = set(map(id, known))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            stray = next((value for value in group["params"] if id(value) not in ids), None)
            if stray is not None:
                raise JobError(
                    f"optimizer= holds a parameter of shape {tuple(stray.shape)} that neither the model that is trained nor loss= uses: make the "
                    "optimizer over the parameters that the function is given, not over those of another copy of the model; a parameter of "
                    "your own has to be in the model (nn.Parameter) or in what loss= refers to"
                )


def stepped_sparse(optimizers: Sequence[Optimizer]) -> set[int]:
    """Ids of the parameters whose optimizer may treat sparse gradients in a way of its own: SparseAdam, and those that are not torch's."""
    kinds = [each for each in vars(torch.optim).values() if isinstance(each, type) and each is not Optimizer]
    dense = tuple(each for each in kinds if issubclass(each, Optimizer) and each is not torch.optim.SparseAdam)
    own = [each for each in optimizers if not isinstance(each, dense)]
    return {id(value) for each in own for group in each.param_groups for value in group["params"]}


def loss_parameters_of(
    optimizers: Sequence[Optimizer], held_by_loss: Mapping[str, nn.Parameter], plan: Plan, *, gathered: bool
) -> dict[str, nn.Parameter]:
    """Of the parameters that the loss holds those that the optimizers train. `gathered`: whether an optimizer steps on whole tensors."""
    trained = {id(value) for each in optimizers for group in each.param_groups for value in group["params"]}
    found = {name: value for name, value in held_by_loss.items() if id(value) in trained}
    if found and (plan.mesh.tp > 1 or plan.mesh.pp > 1 or plan.served or gathered):
        raise PlanError(
            f'"{plan}" cannot train {next(iter(found))}, a parameter that loss= holds and optimizer= trains beside the model\'s: one process and plans of '
            "dp and zero can (zero: with an optimizer that treats each number by itself); or make it a parameter of the model"
        )
    return found


def _require_same_settings(
    job: Job,
    model: nn.Module,
    named: Sequence[tuple[str, nn.Parameter]],
    shapes: Mapping[str, Sequence[int]],
    made: Sequence[Optimizer],
) -> None:
    """A stage has some of the parameters, tp parts of them: a function that chooses groups by order, number or size may choose others
    than on one device. It is asked once more with stand-ins for the whole model."""
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    whole = {name: tuple(shapes.get(name, value.shape)) for name, value in trained.items()}
    if not any(value.is_meta or tuple(value.shape) != whole[name] for name, value in trained.items()):
        return
    standins = {
        name: nn.Parameter(torch.empty(whole[name], dtype=value.dtype, device="meta"))
        for name, value in trained.items()
    }
    try:
        alone = _called(job, list(standins.items()))
    except Exception:  # it looks at numbers, which stand-ins have not
        return
    here = _settings(dict(named), made)
    there = _settings(standins, _as_list(alone))
    for name, mine in ((name, each) for name, each in here.items() if name in there):
        key = next((key for key in (*mine, *there[name]) if mine.get(key) != there[name].get(key)), None)
        if key is not None:
            raise JobError(
                f"optimizer=: {name} has {key}={mine.get(key)} under this plan, and {key}={there[name].get(key)} on one device: groups "
                "follow from the order, the number or the size of the parameters, and a stage has some of them only, tp parts of them; "
                "choose groups by name (the function is given (name, parameter) pairs if it fails on parameters) or by dim()"
            )


def settings_alone(job: Job) -> dict[str, dict[str, Any]]:
    """By parameter what one process trains it with, where the job gives a module: the user's code may know its parameters by identity. To be
    asked before the module is cut."""
    if not isinstance(job.model, nn.Module):
        return {}
    named = {name: value for name, value in job.model.named_parameters() if value.requires_grad}
    try:
        with without_trace(job):
            return _settings(named, _as_list(_called(job, list(named.items()))))
    except Exception:  # whatever it is, making the optimizers shows it again
        return {}


def _require_same_objects(
    named: Mapping[str, Tensor], made: Sequence[Optimizer], alone: Mapping[str, Mapping[str, Any]]
) -> None:
    """zero, tp and pp train tensors of their own in place of the module's parameters."""
    for name, mine in _settings(named, made).items():
        theirs = alone.get(name, mine)
        key = next((key for key in (*mine, *theirs) if mine.get(key) != theirs.get(key)), None)
        if key is not None:
            raise PlanError(
                f"optimizer=: {name} has {key}={mine.get(key)} under this plan, and {key}={theirs.get(key)} on one device: groups follow from "
                "the identity, the attributes, the order or the number of the parameters, and this plan trains other tensors in their place; choose "
                "groups by name (the function is given (name, parameter) pairs if it fails on parameters), or use a plan without zero, tp and pp"
            )


def _settings(named: Mapping[str, Tensor], optimizers: Sequence[Optimizer]) -> dict[str, dict[str, Any]]:
    """By parameter what it is trained with."""
    found: dict[int, dict[str, Any]] = {}
    for place, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            plain = {key: value for key, value in settings(group).items() if is_plain(value)}
            found.update(
                {id(value): {"optimizer": f"{place + 1} of {len(optimizers)}"} | plain for value in group["params"]}
            )
    return {name: found.get(id(value), {"optimizer": "none"}) for name, value in named.items()}


def adopt(job: Job, model: nn.Module, optimizers: Sequence[Optimizer], late: Set[int]) -> None:
    """Put parameters that train only now (`late`, by id) into the groups that the job's function has for them."""
    named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    for mine, made in zip(optimizers, _as_list(_called(job, named)), strict=True):
        for group, theirs in zip(mine.param_groups, made.param_groups, strict=True):
            for place, value in enumerate(theirs["params"]):
                if id(value) in late:
                    group["params"].append(value)
                    if "param_names" in group and "param_names" in theirs:
                        group["param_names"].append(theirs["param_names"][place])


def _choose_kernels(optimizer: Optimizer, *, fused: bool) -> None:
    for group in optimizer.param_groups:
        # A user who chose an implementation keeps it.
        if group.get("fused") is not None or group.get("foreach") is not None or group.get("differentiable"):
            continue
        kinds = {isinstance(value, DTensor) for value in group["params"]}
        kernels = FUSED_SHARDED if True in kinds else FUSED
        # On CPUs fused kernels (torch 2.13) compute half precision wrongly: SGD's weights hardly move.
        floating = all(
            value.is_floating_point() and (value.itemsize > 2 or not value.is_cpu) for value in group["params"]
        )
        if len(kinds) > 1:
            if "foreach" in group:
                group["foreach"] = False  # kernels over many tensors at once take whole ones or sharded ones
        elif fused and type(optimizer) in kernels and floating and not _unusual(group):
            group["fused"] = True


def _unusual(group: Mapping[str, Any]) -> bool:
    """Settings that the kernels do not take, or `begin_late` could not."""
    return isinstance(group.get("lr"), Tensor) or bool(group.get("dampening"))


def begin_late(optimizer: Optimizer) -> None:
    """Give a momentum to parameters whose first gradient comes now, after that of others: torch's fused SGD (2.13) takes momenta of all
    parameters or of none. Zeros are what it begins with by itself, where gradients are not dampened."""
    if not isinstance(optimizer, torch.optim.SGD) or not optimizer.state:
        return
    for group in optimizer.param_groups:
        for value in group["params"] if group["fused"] and group["momentum"] else ():
            if value.grad is not None and optimizer.state[value].get("momentum_buffer") is None:
                optimizer.state[value]["momentum_buffer"] = torch.zeros_like(value)


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
        require_steps(schedule)
    return made
