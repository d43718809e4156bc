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
from echelon.plan.profile import Amount, Table
from echelon.profiler.fold_traces import Line
from echelon.profiler.optimizer_class import made_for
from echelon.profiler.sample_coupling import first_line
from echelon.trials.op_recorder import Figures, Trace

KINDS = (nn.Embedding, nn.EmbeddingBag)

#: Whose numbers servers compute for rows.
_COMPUTED = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam, torch.optim.Adam, torch.optim.AdamW)
_INSTEAD = "train tables with SGD, Adagrad, Adam, AdamW or SparseAdam: optimizer=lambda named: [AdamW(tables), ...(others)], chosen by name"


def find_tables(job: Job, model: nn.Module, first: Trace, second: Trace) -> tuple[Table, ...]:
    """Each table of the model, in its order."""
    line, found = Line(first, second), []
    whys = unfit(job, model)
    rules = trained_by(job, model)
    for path, module in model.named_modules():
        if type(module) not in KINDS:
            continue
        small, large = (trace.modules.get(path, Figures()).ids for trace in (first, second))
        rows, dim = module.weight.shape
        found.append(
            Table(
                path=path,
                rows=rows,
                dim=dim,
                dtype=str(module.weight.dtype).removeprefix("torch."),
                lookups=line.amount(small, large) if large else Amount(),
                rule=rules.get(path, ""),
                unfit=whys.get(path, ""),
            )
        )
    return tuple(found)


def unfit(job: Job, model: nn.Module) -> dict[str, str]:
    """By path of the table why no server can hold it, with the remedy."""
    uses = Counter(id(value) for _, value in model.named_parameters(remove_duplicate=False))
    found: dict[str, str] = {}
    groups = _groups(job, model)
    for path, module in model.named_modules():
        if type(module) not in KINDS:
            continue
        why = _module_unfit(module, uses)
        if not why and isinstance(groups, str):
            why = f"its optimizer could not be looked at ({groups})"
        elif not why and isinstance(groups, dict):
            optimizer, group = groups.get(path, (None, {}))
            why = table_rule(optimizer, group) if optimizer is not None else "no optimizer trains it"
        if why:
            found[path] = why
    return found


def trained_by(job: Job, model: nn.Module) -> dict[str, str]:
    """By path of the table the optimizer that trains it."""
    groups = _groups(job, model)
    return (
        {} if isinstance(groups, str) else {path: type(optimizer).__name__ for path, (optimizer, _) in groups.items()}
    )


def _module_unfit(module: nn.Module, uses: Mapping[int, int]) -> str:
    weight = module.weight
    assert isinstance(weight, Tensor)
    if uses[id(weight)] > 1:
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


def _groups(job: Job, model: nn.Module) -> dict[str, tuple[Optimizer, Mapping[str, Any]]] | str:
    """By path of the table its optimizer and group, on stand-ins; or why that cannot be told."""
    standins = {
        name: nn.Parameter(torch.empty_like(value, device="meta"))
        for name, value in model.named_parameters()
        if value.requires_grad
    }
    try:
        made = made_for(job, standins)
    except EchelonError:
        raise
    except Exception as error:  # a user's own, which wants parameters with numbers
        return f"{type(error).__name__}: {first_line(error)}"
    of = {id(value): (each, group) for each in made for group in each.param_groups for value in group["params"]}
    names = {
        (f"{path}.weight" if path else "weight"): path
        for path, module in model.named_modules()
        if type(module) in KINDS
    }
    return {
        path: of[id(standins[name])] for name, path in names.items() if name in standins and id(standins[name]) in of
    }


def table_rule(optimizer: Optimizer, group: Mapping[str, Any]) -> str:
    """Why a server cannot train rows as this optimizer would, with the remedy; empty: it can, to the last digit.

    A row that no sample of a step uses has a gradient of zero there. What moves it all the same (momentum, Adam's averages, weight decay)
    servers make up for when the row is next read.
    """
    kind = type(optimizer)
    if kind not in _COMPUTED:
        return f"no server computes {kind.__name__}; {_INSTEAD}"
    if group.get("amsgrad"):
        return "amsgrad= is not done by servers; leave it out"
    return "maximize= is not done by servers; negate the loss" if group.get("maximize") else ""
