"""Refuse state that a checkpoint could not hold before the first step, not at the first save.

Schedules and models show their state at once. Optimizers create theirs while they step: those that are not torch's own are stepped twice on
tiny parameters, and their state is restored into a second optimizer and compared. Where that is not possible, and for what depends on the plan,
the live state is checked after the first step.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.checkpoint_files.tensor_format import tensor_bytes
from echelon.engine.checkpoint import model_extra_state, optimizer_state, schedule_state
from echelon.engine.checkpoint.json_values import TensorRecorder, UnstorableValue, decode, encode
from echelon.engine.checkpoint.param_group_state import gather_optimizer_groups
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
    """Refuse a job whose state could not be saved; returns whether `require_storable_state` must check again after the first step. Every
    rank must call it."""
    _, extra_state = model_extra_state.split_model_state(run)
    model_extra_state.collect_extra_state(run, extra_state)
    gather_optimizer_groups(run)
    with run.ranks.raise_on_all_ranks():
        common = [schedule_state.collect_common_state(schedule) for schedule in run.schedules]
    if any(state != common for state in run.axes["pp"].all_gather_object(common)):
        raise JobError(
            "lr_schedule= keeps different state on different pipeline stages, and a checkpoint holds one; derive it from the optimizer's settings "
            "alone, or use pp=1"
        )
    if run.plan.asynchronous and run.job.eval_data is None and any(map(schedule_state.takes_metric, run.schedules)):
        raise JobError(
            "lr_schedule= is stepped with the loss, which differs between ranks under this asynchronous plan; give eval_data=, or another schedule"
        )
    if all(type(optimizer).__module__.startswith("torch.optim.") for optimizer in run.optimizers):
        return False
    with run.ranks.raise_on_all_ranks():
        require_storable_optimizers(run.job, dict(run.model.named_parameters()))
    return True


def require_storable_state(run: RunState) -> None:
    """Refuse live optimizer state that could not be saved. Every rank must call it."""
    optimizer_state.collect(run)


def require_storable_optimizers(job: Job, parameters: Mapping[str, Tensor]) -> None:
    """Step the job's optimizers on tiny parameters; refuse them if a second one does not have the same state after loading it."""
    trial_parameters = dict(
        [(name, value) for name, value in parameters.items() if value.requires_grad][:_MAX_TRIAL_PARAMETERS]
    )
    with preserve_random_states(), warnings.catch_warnings(), preserve_job_state(job):
        warnings.simplefilter("ignore")
        try:
            stepped = _step_trial_optimizers(job, trial_parameters)
            fresh = _make_trial_optimizers(job, trial_parameters)
        except JobError:
            raise
        except Exception:  # it requires other shapes, values or devices: the live state is checked after the first step
            return
        if len(stepped) != len(fresh):
            return
        for stepped_optimizer, fresh_optimizer in zip(stepped, fresh, strict=True):
            _require_restorable(stepped_optimizer, fresh_optimizer)


def _step_trial_optimizers(job: Job, parameters: Mapping[str, Tensor]) -> list[Optimizer]:
    optimizers = _make_trial_optimizers(job, parameters)
    generator = torch.Generator().manual_seed(1)
    for _ in range(_TRIAL_STEPS):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for value in group["params"]:
                    value.grad = torch.randn(value.shape, generator=generator).to(value.dtype)
        for optimizer in optimizers:
            optimizer.step()
    return optimizers


def _make_trial_optimizers(job: Job, parameters: Mapping[str, Tensor]) -> list[Optimizer]:
    generator = torch.Generator().manual_seed(0)
    trial_parameters = {
        name: nn.Parameter(
            torch.randn([min(size, _MAX_TRIAL_SIDE) for size in value.shape], generator=generator).to(value.dtype)
        )
        for name, value in parameters.items()
    }
    return make_trial_optimizers(job, trial_parameters)


def _require_restorable(saved: Optimizer, fresh: Optimizer) -> None:
    recorder, restored = TensorRecorder(), TensorRecorder()
    try:
        encoded = _encode_state(saved, recorder)
    except UnstorableValue as error:
        raise optimizer_state.make_unstorable_error(saved, error) from error
    parameter_count = sum(len(group["params"]) for group in saved.param_groups)
    state = decode(encoded, lambda ref: recorder.tensors[ref[0]].clone())
    parts = optimizer_state.split_state_dict(state, parameter_count)
    settings = [
        {key: setting for key, setting in group.items() if key not in ("params", "param_names")}
        for group in saved.param_groups
    ]
    try:
        optimizer_state.restore(fresh, fresh.state_dict(), parts.state, parts.shared, parts.extra, settings)
    except Exception as error:
        raise JobError(
            f"optimizer= is {type(saved).__name__}, whose load_state_dict() fails on what its state_dict() returned "
            f"({type(error).__name__}: {error}): a run could not be resumed; repair it, or use another optimizer"
        ) from error
    difference = _first_difference(encoded, _encode_state(fresh, restored)) or next(
        (
            path
            for path, tensor in recorder.tensors.items()
            if not _is_bitwise_equal(tensor, restored.tensors.get(path))
        ),
        None,
    )
    if difference is not None:
        raise JobError(
            f"optimizer= is {type(saved).__name__}, whose load_state_dict() does not restore what state_dict() returned ({difference}): a resumed "
            "run would lose it; load it there, or keep it in optimizer.state"
        )


def _encode_state(optimizer: Optimizer, recorder: TensorRecorder) -> Any:
    state = optimizer_state.read_state_dict(optimizer)
    # Restoring puts the parameters' entries first, wherever shared ones were.
    if isinstance(entries := state.get("state"), dict):
        state = {**state, "state": dict(sorted(entries.items(), key=lambda entry: type(entry[0]) is not int))}
    if isinstance(groups := state.get("param_groups"), list):
        without_code = [{key: value for key, value in group.items() if not callable(value)} for group in groups]
        state = {**state, "param_groups": without_code}
    return encode(state, "0", recorder)


def _first_difference(one: Any, other: Any, path: str = "") -> str | None:
    """The path of the first difference between two encoded values."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        pairs = {str(key): (one[key], other[key]) for key in one}
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = {str(index): pair for index, pair in enumerate(zip(one, other, strict=True))}
    else:
        return None if one == other and type(one) is type(other) else path or "all of it"
    differences = (_first_difference(*pair, f"{path}/{key}" if path else key) for key, pair in pairs.items())
    return next(filter(None, differences), None)


def _is_bitwise_equal(one: Tensor, other: Tensor | None) -> bool:
    if other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bytes(tensor_bytes(one)) == bytes(tensor_bytes(other))
