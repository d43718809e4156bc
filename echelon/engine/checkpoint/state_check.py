"""Refuse state that a checkpoint could not hold, before the first step rather than at the first save.

Schedules and models show what they keep at once. Optimizers make their state while they step: those that are not torch's own are tried
for two steps on tiny parameters, and the state is restored into a second one and compared. Where that cannot be tried, and for what
depends on the plan, the live state is looked at after the first step.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.checkpoint_files.tensor_storage import tensor_bytes
from echelon.engine.checkpoint import model_extra_state, optimizer_state, schedule_state
from echelon.engine.checkpoint.json_values import UnstorableValue, decode, encode
from echelon.engine.checkpoint.param_group_state import gather_optimizer_groups
from echelon.engine.run_state import RunState
from echelon.errors import JobError
from echelon.job import Job
from echelon.profiler.optimizer_class import make_trial_optimizers
from echelon.trials.trial_context import preserve_job_state

#: Numbers along each side of the parameters that optimizers are tried on, and how many of them at most.
_MAX_TRIAL_SIDE, _MAX_TRIAL_PARAMETERS = 4, 64
_TRIAL_STEPS = 2


def require_storable(run: RunState) -> bool:
    """Refuse a job whose state could not be saved; returns whether `require_storable_state` must look again after the first step. Every
    rank must call it."""
    _, extra_state = model_extra_state.split_model_state(run)
    model_extra_state.collect_extra_state(run, extra_state)
    gather_optimizer_groups(run)
    with run.ranks.raise_on_all_ranks():
        common = [schedule_state.collect_common_state(each) for each in run.schedules]
    if any(each != common for each in run.axes["pp"].all_gather_object(common)):
        raise JobError(
            "lr_schedule= keeps other state on one pipeline stage than on another: a checkpoint holds one; make it of the optimizer's settings "
            "alone, or use pp=1"
        )
    if run.plan.asynchronous and run.job.eval_data is None and any(map(schedule_state.takes_metric, run.schedules)):
        raise JobError(
            "lr_schedule= is stepped with the loss, of which each rank has its own under this plan; give eval_data=, or another schedule"
        )
    custom_optimizers = [optimizer for optimizer in run.optimizers if not _is_torch_optimizer(optimizer)]
    if not custom_optimizers:
        return False
    with run.ranks.raise_on_all_ranks():
        require_storable_optimizers(run.job, dict(run.model.named_parameters()))
    return True


def require_storable_state(run: RunState) -> None:
    """Refuse live optimizer state that could not be saved. Every rank must call it."""
    optimizer_state.collect(run)


def _is_torch_optimizer(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def require_storable_optimizers(job: Job, parameters: Mapping[str, Tensor]) -> None:
    """Step the job's optimizers on tiny parameters; refuse them where what they then keep is not what another has after loading it."""
    trial_parameters = dict(
        [(name, value) for name, value in parameters.items() if value.requires_grad][:_MAX_TRIAL_PARAMETERS]
    )
    with _isolated_rng(), preserve_job_state(job):
        try:
            stepped = _step_trial_optimizers(job, trial_parameters)
            fresh = _make_trial_optimizers(job, trial_parameters)
        except JobError:
            raise
        except Exception:  # it wants other shapes, values or devices: the live state is looked at after the first step
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
    parameter_count = sum(len(group["params"]) for group in saved.param_groups)
    state = optimizer_state.read_state_dict(saved)
    tensors: dict[str, Tensor] = {}
    try:
        encoded = _encode_state(state, tensors)
    except UnstorableValue as error:
        raise optimizer_state.make_unstorable_error(saved, error) from error
    parts = optimizer_state.split_state_dict(decode(encoded, lambda path: tensors[path].clone()), parameter_count)
    settings = [
        {key: setting for key, setting in group.items() if key not in ("params", "param_names")}
        for group in saved.param_groups
    ]
    try:
        optimizer_state.restore(fresh, fresh.state_dict(), parts.state, parts.shared, parts.extra, settings)
    except Exception as error:
        raise JobError(
            f"optimizer= is {type(saved).__name__}, whose load_state_dict() fails on what its state_dict() gave "
            f"({type(error).__name__}: {error}): a run could not be resumed; repair it, or use another optimizer"
        ) from error
    restored_tensors: dict[str, Tensor] = {}
    reencoded = _encode_state(optimizer_state.read_state_dict(fresh), restored_tensors)
    difference = _first_difference(encoded, reencoded, "") or next(
        (
            tensor_path
            for tensor_path in tensors
            if not _is_bitwise_equal(tensors[tensor_path], restored_tensors.get(tensor_path))
        ),
        None,
    )
    if difference is not None:
        raise JobError(
            f"optimizer= is {type(saved).__name__}, whose load_state_dict() does not give back what state_dict() saved ({difference}): a resumed run "
            "would go on without it; load it there, or keep it in optimizer.state"
        )


def _encode_state(state: Mapping[str, Any], tensors: dict[str, Tensor]) -> Any:
    def store_tensor(path: str, value: Tensor) -> str:
        tensors[path] = value.detach().clone()
        return path

    # Restoring puts parameters first, wherever shared entries were.
    if isinstance(entries := state.get("state"), dict):
        state = {**state, "state": dict(sorted(entries.items(), key=lambda pair: type(pair[0]) is not int))}
    live = {
        key: [{k: v for k, v in group.items() if not callable(v)} for group in value]
        if key == "param_groups" and isinstance(value, list)
        else value
        for key, value in state.items()
    }
    return encode(live, "0", store_tensor)


def _first_difference(one: Any, other: Any, path: str) -> str | None:
    """Where two encoded values differ first."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next(
            (
                difference
                for key in one
                if (difference := _first_difference(one[key], other[key], f"{path}/{key}" if path else str(key)))
            ),
            None,
        )
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return next(
            (
                difference
                for index, (item, other_item) in pairs
                if (difference := _first_difference(item, other_item, f"{path}/{index}"))
            ),
            None,
        )
    return None if one == other and type(one) is type(other) else path or "all of it"


def _is_bitwise_equal(one: Tensor, other: Tensor | None) -> bool:
    return (
        other is not None
        and one.dtype == other.dtype
        and one.shape == other.shape
        and bytes(tensor_bytes(one)) == bytes(tensor_bytes(other))
    )


@contextlib.contextmanager
def _isolated_rng() -> Iterator[None]:
    """The trial draws no random numbers of the training's, and its warnings are not the user's."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
