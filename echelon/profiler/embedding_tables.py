"""Embedding tables that a parameter server could hold, how often they are read, and whether a server trains them as torch would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.errors import EchelonError, describe_error
from echelon.job import Job
from echelon.plan.profile import Amount, TableProfile
from echelon.profiler.fold_traces import BatchSizeFit
from echelon.profiler.optimizer_class import make_meta_parameters, make_trial_optimizers
from echelon.trials.op_recorder import ModuleTotals, StepTrace

TABLE_MODULES = (nn.Embedding, nn.EmbeddingBag)

#: Optimizers that servers run on rows.
_SERVER_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam, torch.optim.Adam, torch.optim.AdamW)
_REMEDY = "train tables with SGD, Adagrad, Adam, AdamW or SparseAdam: optimizer=lambda named: [AdamW(tables), ...(others)], chosen by name"


def find_tables(job: Job, model: nn.Module, first: StepTrace, second: StepTrace) -> tuple[TableProfile, ...]:
    """Each table of the model, in its order."""
    fit, tables = BatchSizeFit(first, second), []
    use_counts = Counter(id(value) for _, value in model.named_parameters(remove_duplicate=False))
    modules = {path: module for path, module in model.named_modules() if type(module) in TABLE_MODULES}
    optimizer_groups: dict[str, tuple[Optimizer, Mapping[str, Any]]] = {}
    optimizer_error = ""
    if modules:
        try:
            optimizer_groups = _find_optimizer_groups(job, model, modules)
        except EchelonError:
            raise
        except Exception as error:  # a user's own, which needs real parameters
            optimizer_error = f"its optimizer could not be inspected ({describe_error(error)})"
    for path, module in modules.items():
        small, large = (trace.module_totals.get(path, ModuleTotals()).lookup_ids for trace in (first, second))
        rows, dim = module.weight.shape
        optimizer, group = optimizer_groups.get(path, (None, {}))
        obstacle = _find_module_obstacle(module, use_counts) or optimizer_error
        if not obstacle:
            obstacle = "no optimizer trains it" if optimizer is None else find_optimizer_obstacle(optimizer, group)
        tables.append(
            TableProfile(
                path=path,
                rows=rows,
                dim=dim,
                dtype=str(module.weight.dtype).removeprefix("torch."),
                lookups=fit.fit_amount(small, large) if large else Amount(),
                optimizer="" if optimizer is None else type(optimizer).__name__,
                unsupported_reason=obstacle,
            )
        )
    return tuple(tables)


def _find_module_obstacle(module: nn.Module, use_counts: Mapping[int, int]) -> str:
    weight = module.weight
    assert isinstance(weight, Tensor)
    if use_counts[id(weight)] > 1:
        return "its weight is another module's too, which would need all of it; untie them"
    if not weight.requires_grad:
        return "it is not trained, so that there is nothing to exchange"
    if weight.dtype not in (torch.float32, torch.float64):
        return f"its rows are {str(weight.dtype).removeprefix('torch.')}, which servers do not train"
    if getattr(module, "max_norm", None) is not None:
        return "max_norm= rescales rows as they are read, which servers do not; leave it out"
    if getattr(module, "scale_grad_by_freq", False):
        return "scale_grad_by_freq= counts ids over the whole batch, of which each rank has a part; leave it out"
    return "its weight has a gradient hook, which served rows would lack; remove it" if weight._backward_hooks else ""


def _find_optimizer_groups(
    job: Job, model: nn.Module, modules: Iterable[str]
) -> dict[str, tuple[Optimizer, Mapping[str, Any]]]:
    trainable = {name: value for name, value in model.named_parameters() if value.requires_grad}
    placeholders = make_meta_parameters(trainable)
    optimizers = make_trial_optimizers(job, placeholders)
    grouped = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    groups = {id(value): (optimizer, group) for optimizer, group in grouped for value in group["params"]}
    weights = {path: placeholders.get(f"{path}.weight" if path else "weight") for path in modules}
    return {path: groups[id(weight)] for path, weight in weights.items() if id(weight) in groups}


def find_optimizer_obstacle(optimizer: Optimizer, group: Mapping[str, Any]) -> str:
    """Why a server cannot train rows as this optimizer would, with a remedy; empty: it can, bit for bit.

    Rows that no sample of a step uses have a zero gradient. Servers apply what moves them nevertheless (momentum, Adam's averages, weight
    decay) when the row is next read.
    """
    if type(optimizer) not in _SERVER_OPTIMIZERS:
        return f"no server computes {type(optimizer).__name__}; {_REMEDY}"
    if group.get("amsgrad"):
        return "servers do not support amsgrad=; leave it out"
    return "servers do not support maximize=; negate the loss" if group.get("maximize") else ""
