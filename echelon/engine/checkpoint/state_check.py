"""Refuse state that a checkpoint could not hold before the first step, not at the first save. Optimizers that are not torch's own are stepped
twice on tiny parameters; where that fails, and for what depends on the plan, the live state is checked after the first step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.engine.checkpoint import model_extra_state, optimizer_state, schedule_state
from echelon.engine.checkpoint.json_values import StoreTensor, TensorRecorder, UnstorableValue, decode, encode
from echelon.engine.checkpoint.param_group_state import gather_optimizer_groups
from echelon.engine.checkpoint.reachable_state import store_digest
from echelon.engine.group_settings import parameters_of
from echelon.engine.run_state import RunState
from echelon.errors import JobError
from echelon.job import Job
from echelon.profiler.optimizer_class import make_trial_optimizers
from echelon.trials.random_state import preserve_random_states
from echelon.trials.trial_context import preserve_job_state

#: Largest size of each dim of the trial parameters, and their largest number.
_MAX_TRIAL_SIDE, _MAX_TRIAL_PARAMETERS = 4, 64
_TRIAL_STEPS = 2


def require_storable(run: RunState) -> bool:
    """Refuse state that could not be saved; returns whether to check again after the first step. Every rank must call it."""
    _, extra_state = model_extra_state.split_model_state(run)
    model_extra_state.collect_extra_state(run, extra_state)
    gather_optimizer_groups(run)
    with run.ranks.raise_on_all_ranks():
        common = [schedule_state.collect_common_state(schedule) for schedule in run.schedules]
    if any(state != common for state in run.axes["pp"].all_gather_object(common)):
        problem = "lr_schedule= keeps different state on different pipeline stages, and a checkpoint holds one"
        raise JobError(f"{problem}; derive it from the optimizer's settings alone, or use pp=1")
    if run.plan.asynchronous and run.job.eval_data is None and any(map(schedule_state.takes_metric, run.schedules)):
        problem = "lr_schedule= is stepped with the loss, which differs between ranks under this asynchronous plan"
        raise JobError(f"{problem}; give eval_data=, or another schedule")
    if all(type(optimizer).__module__.startswith("torch.optim.") for optimizer in run.optimizers):
        return False
    with run.ranks.raise_on_all_ranks():
        require_storable_optimizers(run.job, dict(run.model.named_parameters()))
    return True


def require_storable_optimizers(job: Job, parameters: Mapping[str, Tensor]) -> None:
    """Step the job's optimizers on tiny parameters; refuse them if a second one does not have the same state after loading it."""
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    trial_parameters = dict(list(trained.items())[:_MAX_TRIAL_PARAMETERS])
    with preserve_random_states(), warnings.catch_warnings(), preserve_job_state(job):
        warnings.simplefilter("ignore")
        try:
            stepped = _step_trial_optimizers(job, trial_parameters)
            fresh = _make_trial_optimizers(job, trial_parameters)
        except JobError:
            raise
        except Exception:  # it requires other shapes, values or devices: the live state is checked after the first step
            return
        for pair in zip(stepped, fresh, strict=True) if len(stepped) == len(fresh) else ():
            _require_restorable(*pair)


def _step_trial_optimizers(job: Job, parameters: Mapping[str, Tensor]) -> list[Optimizer]:
    optimizers = _make_trial_optimizers(job, parameters)
    generator = torch.Generator().manual_seed(1)
    for _ in range(_TRIAL_STEPS):
        for value in chain.from_iterable(map(parameters_of, optimizers)):
            value.grad = torch.randn(value.shape, generator=generator).to(value.dtype)
        for optimizer in optimizers:
            optimizer.step()
    return optimizers


def _make_trial_optimizers(job: Job, parameters: Mapping[str, Tensor]) -> list[Optimizer]:
    generator, trial_parameters = torch.Generator().manual_seed(0), {}
    for name, value in parameters.items():
        shape = [min(size, _MAX_TRIAL_SIDE) for size in value.shape]
        trial_parameters[name] = nn.Parameter(torch.randn(shape, generator=generator).to(value.dtype))
    return make_trial_optimizers(job, trial_parameters)


def _require_restorable(saved: Optimizer, fresh: Optimizer) -> None:
    recorder = TensorRecorder()
    try:
        encoded, expected = _encode_state(saved, recorder), _encode_state(saved, store_digest)
    except UnstorableValue as error:
        raise optimizer_state.make_unstorable_error(saved, error) from error
    state = decode(encoded, lambda ref: recorder.tensors[ref[0]].clone())
    parts = optimizer_state.split_state_dict(state, len(parameters_of(saved)))
    settings = [{key: v for key, v in g.items() if key not in ("params", "param_names")} for g in saved.param_groups]
    whose = f"optimizer= is {type(saved).__name__}, whose load_state_dict()"
    try:
        optimizer_state.restore(fresh, fresh.state_dict(), parts, settings)
    except Exception as error:
        problem = f"fails on what its state_dict() returned ({type(error).__name__}: {error})"
        raise JobError(f"{whose} {problem}; repair it, or use another optimizer") from error
    difference = _first_difference(expected, _encode_state(fresh, store_digest))
    if difference is not None:
        name = difference.removesuffix("/v")  # of a tensor's digest
        problem = f"does not restore what state_dict() returned ({name}): a resumed run would lose it"
        raise JobError(f"{whose} {problem}; load it there, or keep it in optimizer.state")


def _encode_state(optimizer: Optimizer, store_tensor: StoreTensor) -> Any:
    state = optimizer_state.read_state_dict(optimizer)
    # Restoring puts the parameters' entries first, wherever shared ones were.
    if isinstance(entries := state.get("state"), dict):
        state = {**state, "state": dict(sorted(entries.items(), key=lambda entry: type(entry[0]) is not int))}
    if isinstance(groups := state.get("param_groups"), list):
        without_code = [{key: value for key, value in group.items() if not callable(value)} for group in groups]
        state = {**state, "param_groups": without_code}
    return encode(state, "0", store_tensor)


def _first_difference(one: Any, other: Any, path: str = "") -> str | None:
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        pairs = {str(key): (one[key], other[key]) for key in one}
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = {str(index): pair for index, pair in enumerate(zip(one, other, strict=True))}
    else:
        return None if one == other and type(one) is type(other) else path or "all of it"
    differences = (_first_difference(*pair, f"{path}/{key}" if path else key) for key, pair in pairs.items())
    return next(filter(None, differences), None)
