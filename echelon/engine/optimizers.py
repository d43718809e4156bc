"""The job's optimizers over this rank's parameters, fused where torch can, and their schedules."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from echelon.engine.checkpoint.schedule_state import require_steppable, required_arguments
from echelon.engine.group_settings import is_plain_json, parameters_of, read_group_settings
from echelon.engine.init_model import allows_sparse_gradients
from echelon.engine.parallel.full_tensor_optimizer import FullTensorOptimizer
from echelon.engine.process_groups import Communicator
from echelon.errors import EchelonError, JobError, PlanError
from echelon.job import Job, call_optimizer
from echelon.plan.plan import Plan
from echelon.profiler.profile_optimizer import FUSED_OPTIMIZERS, FUSED_SHARDED_OPTIMIZERS
from echelon.trials.trial_context import preserve_job_state

_Named = Sequence[tuple[str, nn.Parameter]]
_Optimizers = Sequence[Optimizer]
_Shapes = Mapping[str, Sequence[int]]
#: By parameter what trains it: its optimizer, and the settings of its group.
_Settings = Mapping[str, Mapping[str, Any]]
_FullOptimizers = Mapping[int, FullTensorOptimizer]
#: Torch's error for an optimizer without parameters.
_EMPTY_LIST_ERROR = "empty parameter list"


def make_optimizers(
    job: Job,
    plan: Plan,
    model: nn.Module,
    ranks: Communicator,
    *,
    shapes: _Shapes,
    full_optimizers: _FullOptimizers,
    loss_parameters: Collection[nn.Parameter],
    reference_settings: _Settings,
) -> list[Optimizer]:
    """The job's optimizers for what this rank trains; errors are raised on all ranks. Every rank must call it.

    `shapes`: of the whole model's parameters. `loss_parameters`: those that the job's function may add. `reference_settings`: of one process.
    """
    trained = _trained_parameters(model, full_optimizers)
    if full_optimizers and any(ranks.all_gather_object(_needs_values(job, trained))):
        for full_tensor_optimizer in full_optimizers.values():
            full_tensor_optimizer.broadcast_values()
        trained = _trained_parameters(model, full_optimizers)
    if any(ranks.all_gather_object(any(p.is_meta for p in model.parameters()))):
        rank_types = ranks.all_gather_object(_optimizer_types(job, model, trained, shapes))
        if None in rank_types or any(types != rank_types[0] for types in rank_types):
            # Over the parameters of its own stage the job's function gives something else than on one device.
            trained = _trained_parameters(model, full_optimizers, all_stages=True)
    with ranks.raise_on_all_ranks():
        optimizers = _make_checked(job, plan, trained)
        _require_known_parameters(optimizers, [*(parameter for _, parameter in trained), *loss_parameters])
        if reference_settings:
            cause = "the identity, the attributes, the order or the number of the parameters, and this plan trains other tensors in their place"
            settings = _settings_by_parameter(dict(trained), optimizers)
            _require_settings(settings, reference_settings, PlanError, cause, ", or use a plan without zero, tp and pp")
        else:
            _require_same_settings(job, model, trained, shapes, optimizers)
        _require_trial_order(optimizers, full_optimizers)
        _remove_other_stages(optimizers, full_optimizers)
    for index, optimizer in enumerate(optimizers):
        if index in full_optimizers:
            full_optimizers[index].free_unowned(optimizer)
        _choose_kernels(optimizer, fused=plan.fused)
    return optimizers


def _trained_parameters(model: nn.Module, full_optimizers: _FullOptimizers, *, all_stages: bool = False) -> _Named:
    """What the optimizers are made over: this rank's parameters, or whole ones in their place. `all_stages`: also those without memory."""
    full = {name: p for optimizer in full_optimizers.values() for name, p in optimizer.parameters.items()}
    trained = [(name, full.get(name, p)) for name, p in model.named_parameters() if p.requires_grad]
    local = [(name, p) for name, p in trained if all_stages or name in full or not p.is_meta]
    if trained and not local:
        # All that is trained is on other stages: an optimizer of nothing keeps schedules and settings in step with theirs.
        return [("nothing", nn.Parameter(torch.zeros(0)))]
    return local


def _optimizer_types(job: Job, model: nn.Module, trained: _Named, shapes: _Shapes) -> list[str] | None:
    """The classes of optimizers that the job's function returns for these; None where it fails, or returns others than for the whole model."""
    try:
        optimizers = _as_list(_call_job_optimizer(job, trained))
        _require_same_settings(job, model, trained, shapes, optimizers)
    except Exception:  # raised again by the whole model
        return None
    return [type(optimizer).__name__ for optimizer in optimizers]


def _remove_other_stages(optimizers: _Optimizers, full_optimizers: _FullOptimizers) -> None:
    """Take parameters of other stages out of the groups, which stay as they are on one device."""
    for index, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups if index not in full_optimizers else ():
            is_local = [not parameter.is_meta for parameter in group["params"]]
            for parameter in filter(lambda parameter: parameter.is_meta, group["params"]):
                optimizer.state.pop(parameter, None)
            for key in {"params", "param_names"} & group.keys() if not all(is_local) else ():
                group[key] = list(itertools.compress(group[key], is_local))


def _as_list(returned: Any) -> list[Any]:
    return list(returned) if isinstance(returned, list | tuple) else [returned]


def _needs_values(job: Job, trained: _Named) -> bool:
    try:
        _call_job_optimizer(job, trained)
    except Exception:
        return any(parameter.is_meta for _, parameter in trained)
    return False


def _require_trial_order(optimizers: _Optimizers, full_optimizers: _FullOptimizers) -> None:
    for index, optimizer in enumerate(optimizers):
        ids = set(map(id, parameters_of(optimizer)))
        for trial_index, full_tensor_optimizer in full_optimizers.items():
            stray = next((name for name, p in full_tensor_optimizer.parameters.items() if id(p) in ids), None)
            if stray is not None and trial_index != index:
                problem = f"{stray} is trained by optimizer {index + 1} here and by {trial_index + 1} in a trial call"
                raise JobError(f"optimizer=: {problem}; choose the optimizer by name or by shape alone")


def _make_checked(job: Job, plan: Plan, trained: _Named) -> list[Optimizer]:
    if not trained:
        raise JobError("no parameter requires a gradient: nothing would be trained")
    optimizers = _as_list(_call_job_optimizer(job, trained))
    served_names, allow_sparse = {table.parameter_name for table in plan.server.tables}, allows_sparse_gradients(plan)
    table_ids = {id(parameter) for name, parameter in trained if name in served_names}
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise JobError(f"optimizer= gives {type(optimizer).__name__}, not a torch optimizer or a list of them")
        is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
        if is_sparse and not allow_sparse and any(id(p) not in table_ids for p in parameters_of(optimizer)):
            problem = "optimizer= is SparseAdam, which takes sparse gradients alone; ranks sum dense ones"
            remedy = "train in one process (dp=1), with Adagrad or SGD (same result) or Adam, or with exchange=server"
            raise PlanError(f"{problem}: {remedy}")
        if required_arguments(optimizer.step):
            problem = f"optimizer= is {type(optimizer).__name__}, whose step() needs a closure, which no rank could evaluate alone"
            raise JobError(f"{problem}: use one that steps on gradients (AdamW, SGD)")
    return optimizers


def _call_job_optimizer(job: Job, trained: _Named) -> Any:
    try:
        return call_optimizer(job, list(trained))
    except Exception as error:
        if _EMPTY_LIST_ERROR not in str(error):
            raise
        names = ", ".join(name for name, _ in trained[:3]) + (", ..." if len(trained) > 3 else "")
        problem = f"one of the optimizers is given no parameter of the model's ({names})"
        raise JobError(f"optimizer=: {problem}; leave it out") from error


def _require_known_parameters(optimizers: _Optimizers, known_parameters: Collection[nn.Parameter]) -> None:
    known_ids = set(map(id, known_parameters))
    for optimizer in optimizers:
        stray = next((parameter for parameter in parameters_of(optimizer) if id(parameter) not in known_ids), None)
        if stray is not None:
            problem = f"a parameter of shape {tuple(stray.shape)} that neither the model that is trained nor loss= uses"
            remedy = "use the parameters that the function is given; put your own into the model, or into what loss= refers to"
            raise JobError(f"optimizer= holds {problem}: {remedy}")


def sparse_stepped_ids(optimizers: _Optimizers) -> set[int]:
    """Ids of the parameters whose optimizer may treat sparse gradients in its own way: SparseAdam, and those that are not torch's."""
    torch_classes = [cls for cls in vars(torch.optim).values() if isinstance(cls, type) and issubclass(cls, Optimizer)]
    dense_classes = tuple(cls for cls in torch_classes if cls not in (Optimizer, torch.optim.SparseAdam))
    sparse_optimizers = [optimizer for optimizer in optimizers if not isinstance(optimizer, dense_classes)]
    return {id(parameter) for optimizer in sparse_optimizers for parameter in parameters_of(optimizer)}


def trained_loss_parameters(
    optimizers: _Optimizers, held_by_loss: Mapping[str, nn.Parameter], plan: Plan, full_optimizers: _FullOptimizers
) -> dict[str, nn.Parameter]:
    """Of the parameters that the loss holds those that the optimizers train."""
    trained_ids = {id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)}
    trained = {name: parameter for name, parameter in held_by_loss.items() if id(parameter) in trained_ids}
    if trained and (plan.mesh.tp > 1 or plan.mesh.pp > 1 or plan.uses_servers or full_optimizers):
        problem = f'"{plan}" cannot train {next(iter(trained))}, a parameter of loss='
        remedy = "use one process, or dp and zero (with an optimizer that treats each number by itself)"
        raise PlanError(f"{problem}; {remedy}, or make it a parameter of the model")
    return trained


def _require_same_settings(job: Job, model: nn.Module, trained: _Named, shapes: _Shapes, own: _Optimizers) -> None:
    """Require the settings that one device gives each parameter: the job's function may choose groups by order, number or size."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    full_shapes = {name: tuple(shapes.get(name, p.shape)) for name, p in parameters.items()}
    if not any(p.is_meta or tuple(p.shape) != full_shapes[name] for name, p in parameters.items()):
        return
    meta = {n: torch.empty(full_shapes[n], dtype=p.dtype, device="meta") for n, p in parameters.items()}
    meta_parameters = {name: nn.Parameter(tensor) for name, tensor in meta.items()}
    try:
        reference = _as_list(_call_job_optimizer(job, list(meta_parameters.items())))
    except Exception:  # it reads numbers, which meta tensors do not have
        return
    cause = "the order, the number or the size of the parameters, and a stage has some of them only, tp parts of them"
    settings = _settings_by_parameter(dict(trained), own)
    _require_settings(settings, _settings_by_parameter(meta_parameters, reference), JobError, cause, " or by dim()")


def _require_settings(own: _Settings, expected: _Settings, error: type[EchelonError], cause: str, hint: str) -> None:
    for name, local in own.items():
        reference = expected.get(name, local)
        key = next((key for key in (*local, *reference) if local.get(key) != reference.get(key)), None)
        if key is not None:
            values = f"{key}={local.get(key)} under this plan, and {key}={reference.get(key)} on one device"
            remedy = (
                f"choose groups by name (the function is given (name, parameter) pairs if it fails on parameters){hint}"
            )
            raise error(f"optimizer=: {name} has {values}: groups follow from {cause}; {remedy}")


def single_process_settings(job: Job) -> _Settings:
    """What one process trains each parameter of a given module with, whose parameters the job may know by identity. Call it before the module is cut."""
    if not isinstance(job.model, nn.Module):
        return {}
    trained = {name: parameter for name, parameter in job.model.named_parameters() if parameter.requires_grad}
    try:
        with preserve_job_state(job):
            return _settings_by_parameter(trained, _as_list(_call_job_optimizer(job, list(trained.items()))))
    except Exception:  # raised again when the optimizers are made
        return {}


def _settings_by_parameter(parameters: Mapping[str, Tensor], optimizers: _Optimizers) -> _Settings:
    settings_by_id: dict[int, dict[str, Any]] = {}
    for index, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            settings = {"optimizer": f"{index + 1} of {len(optimizers)}"}
            settings |= {key: value for key, value in read_group_settings(group).items() if is_plain_json(value)}
            settings_by_id.update(dict.fromkeys(map(id, group["params"]), settings))
    return {name: settings_by_id.get(id(parameter), {"optimizer": "none"}) for name, parameter in parameters.items()}


def add_late_parameters(job: Job, model: nn.Module, optimizers: _Optimizers, late_ids: Set[int]) -> None:
    """Put parameters that begin to train (`late_ids`, by id) into the groups that the job's function has for them."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for optimizer, reference in zip(optimizers, _as_list(_call_job_optimizer(job, trained)), strict=True):
        for group, reference_group in zip(optimizer.param_groups, reference.param_groups, strict=True):
            for position, parameter in enumerate(reference_group["params"]):
                if id(parameter) in late_ids:
                    group["params"].append(parameter)
                    if "param_names" in group and "param_names" in reference_group:
                        group["param_names"].append(reference_group["param_names"][position])


def _choose_kernels(optimizer: Optimizer, *, fused: bool) -> None:
    for group in optimizer.param_groups:
        # A user who chose an implementation keeps it.
        if group.get("fused") is not None or group.get("foreach") is not None or group.get("differentiable"):
            continue
        shardedness = {isinstance(parameter, DTensor) for parameter in group["params"]}
        kernels = FUSED_SHARDED_OPTIMIZERS if True in shardedness else FUSED_OPTIMIZERS
        # On CPUs fused kernels (torch 2.13) compute half precision wrongly: SGD's weights hardly move.
        is_supported = all(p.is_floating_point() and (p.itemsize > 2 or not p.is_cpu) for p in group["params"])
        if len(shardedness) > 1:
            if "foreach" in group:
                group["foreach"] = False  # kernels over many tensors take whole ones or sharded ones
        # Settings that the kernels or `init_late_momentum` do not support.
        elif isinstance(group.get("lr"), Tensor) or group.get("dampening"):
            continue
        elif fused and type(optimizer) in kernels and is_supported:
            group["fused"] = True


def init_late_momentum(optimizer: Optimizer) -> None:
    """Give momenta to parameters whose first gradient comes late: torch's fused SGD (2.13) takes momenta of all parameters or of none."""
    if not isinstance(optimizer, torch.optim.SGD) or not optimizer.state:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["fused"] and group["momentum"] else ():
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def make_schedules(job: Job, optimizers: list[Optimizer], total_steps: int) -> list[Any]:
    """One schedule per optimizer, from `schedule(optimizer)` or `schedule(optimizer, total_steps)`."""
    if job.lr_schedule is None:
        return []
    arguments = (total_steps,) if len(required_arguments(job.lr_schedule)) > 1 else ()
    schedules = [job.lr_schedule(optimizer, *arguments) for optimizer in optimizers]
    for schedule in schedules:
        require_steppable(schedule)
    return schedules
