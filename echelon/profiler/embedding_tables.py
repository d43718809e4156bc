"""The tables of a model that a parameter server could hold, how often they are read, and whether a server trains them as torch would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.errors import EchelonError
from echelon.job import Job
from echelon.plan.profile import Amount, TableProfile
from echelon.profiler.fold_traces import BatchSizeFit
from echelon.profiler.optimizer_class import make_trial_optimizers
from echelon.profiler.sample_coupling import first_line
from echelon.trials.op_recorder import ModuleTotals, StepTrace

TABLE_MODULES = (nn.Embedding, nn.EmbeddingBag)

#: Whose numbers servers compute for rows.
_SERVER_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam, torch.optim.Adam, torch.optim.AdamW)
_REMEDY = "train tables with SGD, Adagrad, Adam, AdamW or SparseAdam: optimizer=lambda named: [AdamW(tables), ...(others)], chosen by name"


def find_tables(job: Job, model: nn.Module, first: StepTrace, second: StepTrace) -> tuple[TableProfile, ...]:
    """Each table of the model, in its order."""
    fit, tables = BatchSizeFit(first, second), []
    obstacles = find_unservable_tables(job, model)
    optimizer_names = find_table_optimizers(job, model)
    for path, module in model.named_modules():
        if type(module) not in TABLE_MODULES:
            continue
        small, large = (trace.module_totals.get(path, ModuleTotals()).lookup_ids for trace in (first, second))
        rows, row_size = module.weight.shape
        tables.append(
            TableProfile(
                path=path,
                rows=rows,
                dim=row_size,
                dtype=str(module.weight.dtype).removeprefix("torch."),
                lookups=fit.fit_amount(small, large) if large else Amount(),
                optimizer=optimizer_names.get(path, ""),
                unsupported_reason=obstacles.get(path, ""),
            )
        )
    return tuple(tables)


def find_unservable_tables(job: Job, model: nn.Module) -> dict[str, str]:
    """By path of the table why no server can hold it, with the remedy."""
    use_counts = Counter(id(value) for _, value in model.named_parameters(remove_duplicate=False))
    obstacles: dict[str, str] = {}
    optimizer_groups = _find_optimizer_groups(job, model)
    for path, module in model.named_modules():
        if type(module) not in TABLE_MODULES:
            continue
        obstacle = _find_module_obstacle(module, use_counts)
        if not obstacle and isinstance(optimizer_groups, str):
            obstacle = f"its optimizer could not be looked at ({optimizer_groups})"
        elif not obstacle and isinstance(optimizer_groups, dict):
            optimizer, group = optimizer_groups.get(path, (None, {}))
            obstacle = find_optimizer_obstacle(optimizer, group) if optimizer is not None else "no optimizer trains it"
        if obstacle:
            obstacles[path] = obstacle
    return obstacles


def find_table_optimizers(job: Job, model: nn.Module) -> dict[str, str]:
    """By path of the table the optimizer that trains it."""
    groups = _find_optimizer_groups(job, model)
    return (
        {} if isinstance(groups, str) else {path: type(optimizer).__name__ for path, (optimizer, _) in groups.items()}
    )


def _find_module_obstacle(module: nn.Module, use_counts: Mapping[int, int]) -> str:
    weight = module.weight
    assert isinstance(weight, Tensor)
    if use_counts[id(weight)] > 1:
        return "its weight is another module's too, which would need all of it; untie them"
    if not weight.requires_grad:
        return "it is not trained: nothing of it is exchanged as it is"
    if weight.dtype not in (torch.float32, torch.float64):
        return f"its rows are {str(weight.dtype).removeprefix('torch.')}, which a server does not train"
    if getattr(module, "max_norm", None) is not None:
        return "max_norm= shortens rows while they are read, which a server does not; leave it out"
    if getattr(module, "scale_grad_by_freq", False):
        return "scale_grad_by_freq= counts ids over the whole batch, of which each rank has a part; leave it out"
    if weight._backward_hooks:
        return "its weight has a gradient hook, which rows of a server would not have; take it off"
    return ""


def _find_optimizer_groups(job: Job, model: nn.Module) -> dict[str, tuple[Optimizer, Mapping[str, Any]]] | str:
    """By path of the table its optimizer and group, on stand-ins; or why that cannot be told."""
    placeholders = {
        name: nn.Parameter(torch.empty_like(value, device="meta"))
        for name, value in model.named_parameters()
        if value.requires_grad
    }
    try:
        optimizers = make_trial_optimizers(job, placeholders)
    except EchelonError:
        raise
    except Exception as error:  # a user's own, which wants parameters with numbers
        return f"{type(error).__name__}: {first_line(error)}"
    groups = {
        id(value): (optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for value in group["params"]
    }
    paths = {
        (f"{path}.weight" if path else "weight"): path
        for path, module in model.named_modules()
        if type(module) in TABLE_MODULES
    }
    return {
        path: groups[id(placeholders[name])]
        for name, path in paths.items()
        if name in placeholders and id(placeholders[name]) in groups
    }


def find_optimizer_obstacle(optimizer: Optimizer, group: Mapping[str, Any]) -> str:
    """Why a server cannot train rows as this optimizer would, with the remedy; empty: it can, to the last digit.

    A row that no sample of a step uses has a gradient of zero there. What moves it all the same (momentum, Adam's averages, weight decay)
    servers make up for when the row is next read.
    """
    optimizer_class = type(optimizer)
    if optimizer_class not in _SERVER_OPTIMIZERS:
        return f"no server computes {optimizer_class.__name__}; {_REMEDY}"
    if group.get("amsgrad"):
        return "amsgrad= is not done by servers; leave it out"
    return "maximize= is not done by servers; negate the loss" if group.get("maximize") else ""
