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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.engine.checkpoint import model_extra_state, optimizer_state, schedule_state
from echelon.engine.checkpoint.json_values import Unstorable, decode, encode
from echelon.engine.checkpoint.param_group_state import optimizer_groups
from echelon.engine.checkpoint.tensor_storage import raw
from echelon.errors import JobError
from echelon.job import Job
from echelon.profiler.optimizer_class import made_for
from echelon.trials.trial_context import without_trace

if TYPE_CHECKING:
    from echelon.engine.run import Run

#: Numbers along each side of the parameters that optimizers are tried on, and how many of them at most.
_SIDE, _COUNT = 4, 64
_STEPS = 2


def require_storable(run: Run) -> bool:
    """Refuse a job whose state could not be saved; returns whether `require_storable_state` must look again after the first step. Every
    rank must call it."""
    _, extra = model_extra_state.split_model(run)
    model_extra_state.collect_extra(run, extra)
    optimizer_groups(run)
    with run.ranks.together():
        common = [schedule_state.common(each) for each in run.schedules]
    if any(each != common for each in run.axes["pp"].gather(common)):
        raise JobError(
            "schedule= keeps other state on one pipeline stage than on another: a checkpoint holds one; make it of the optimizer's settings "
            "alone, or use pp=1"
        )
    if run.plan.free and run.job.evaluation is None and any(map(schedule_state.takes_metric, run.schedules)):
        raise JobError(
            "schedule= is stepped with the loss, of which each rank has its own under this plan; give evaluation=, or another schedule"
        )
    own = [optimizer for optimizer in run.optimizers if not _of_torch(optimizer)]
    if not own:
        return False
    with run.ranks.together():
        require_storable_optimizers(run.job, dict(run.model.named_parameters()))
    return True


def require_storable_state(run: Run) -> None:
    """Refuse live optimizer state that could not be saved. Every rank must call it."""
    optimizer_state.collect(run)


def _of_torch(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def require_storable_optimizers(job: Job, parameters: Mapping[str, Tensor]) -> None:
    """Step the job's optimizers on tiny parameters; refuse them where what they then keep is not what another has after loading it."""
    few = dict([(name, value) for name, value in parameters.items() if value.requires_grad][:_COUNT])
    with _undisturbed(), without_trace(job):
        try:
            made = _stepped(job, few)
            fresh = _made(job, few)
        except JobError:
            raise
        except Exception:  # it wants other shapes, values or devices: the live state is looked at after the first step
            return
        if len(made) != len(fresh):
            return
        for one, other in zip(made, fresh, strict=True):
            _require_restored(one, other)


def _stepped(job: Job, parameters: Mapping[str, Tensor]) -> list[Optimizer]:
    made = _made(job, parameters)
    numbers = torch.Generator().manual_seed(1)
    for _ in range(_STEPS):
        for optimizer in made:
            for group in optimizer.param_groups:
                for value in group["params"]:
                    value.grad = torch.randn(value.shape, generator=numbers).to(value.dtype)
        for optimizer in made:
            optimizer.step()
    return made


def _made(job: Job, parameters: Mapping[str, Tensor]) -> list[Optimizer]:
    numbers = torch.Generator().manual_seed(0)
    standins = {
        name: nn.Parameter(torch.randn([min(size, _SIDE) for size in value.shape], generator=numbers).to(value.dtype))
        for name, value in parameters.items()
    }
    return made_for(job, standins)


def _require_restored(one: Optimizer, other: Optimizer) -> None:
    count = sum(len(group["params"]) for group in one.param_groups)
    state = optimizer_state.state_dict_of(one)
    tensors: dict[str, Tensor] = {}
    try:
        plain = _encoded(state, tensors)
    except Unstorable as error:
        raise optimizer_state.refusal(one, error) from error
    found = optimizer_state.split(decode(plain, lambda path: tensors[path].clone()), count)
    settings = [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in one.param_groups]
    try:
        optimizer_state.restore(other, other.state_dict(), found.state, found.shared, found.extra, settings)
    except Exception as error:
        raise JobError(
            f"optimizer= is {type(one).__name__}, whose load_state_dict() fails on what its state_dict() gave "
            f"({type(error).__name__}: {error}): a run could not be resumed; repair it, or use another optimizer"
        ) from error
    back: dict[str, Tensor] = {}
    again = _encoded(optimizer_state.state_dict_of(other), back)
    lost = _difference(plain, again, "") or next((p for p in tensors if not _same(tensors[p], back.get(p))), None)
    if lost is not None:
        raise JobError(
            f"optimizer= is {type(one).__name__}, whose load_state_dict() does not give back what state_dict() saved ({lost}): a resumed run "
            "would go on without it; load it there, or keep it in optimizer.state"
        )


def _encoded(state: Mapping[str, Any], tensors: dict[str, Tensor]) -> Any:
    def put(path: str, value: Tensor) -> str:
        tensors[path] = value.detach().clone()
        return path

    # Restoring puts parameters first, wherever shared entries were.
    if isinstance(kept := state.get("state"), dict):
        state = {**state, "state": dict(sorted(kept.items(), key=lambda pair: type(pair[0]) is not int))}
    live = {
        key: [{k: v for k, v in group.items() if not callable(v)} for group in value]
        if key == "param_groups" and isinstance(value, list)
        else value
        for key, value in state.items()
    }
    return encode(live, "0", put)


def _difference(one: Any, other: Any, path: str) -> str | None:
    """Where two encoded values differ first."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next((d for k in one if (d := _difference(one[k], other[k], f"{path}/{k}" if path else str(k)))), None)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return next((d for at, (a, b) in pairs if (d := _difference(a, b, f"{path}/{at}"))), None)
    return None if one == other and type(one) is type(other) else path or "all of it"


def _same(one: Tensor, other: Tensor | None) -> bool:
    return (
        other is not None
        and one.dtype == other.dtype
        and one.shape == other.shape
        and bytes(raw(one)) == bytes(raw(other))
    )


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """The trial draws no random numbers of the training's, and its warnings are not the user's."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
