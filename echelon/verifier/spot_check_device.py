"""Recompute a training step on one device, from the same state and samples, and compare."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from echelon.engine.checkpoint.model_extra_state import has_extra_state
from echelon.engine.checkpoint.reachable_state import StateChanges
from echelon.engine.checkpoint.run_attributes import ModelState, set_trainable
from echelon.engine.full_state import gather_full_tensors
from echelon.engine.precision import autocast
from echelon.engine.run import Run
from echelon.errors import JobError, first_line
from echelon.job import Job
from echelon.plan.plan import Plan
from echelon.trials.determinism import DeterministicMode, randomness_disabled
from echelon.trials.isolation import IsolatedJob
from echelon.trials.module_tree import is_torchscript
from echelon.trials.random_state import preserve_random_states
from echelon.trials.torch_patches import TorchPatches
from echelon.verifier import tolerances
from echelon.verifier.compare import NOT_COMPARABLE, Bounds, Difference, compare_tensors, to_float64
from echelon.verifier.forward_state import assign_tensors, local_buffers
from echelon.verifier.reference import Reference
from echelon.verifier.reference_data import CachedData, ReferenceData
from echelon.verifier.spot_check_pass import PassResult
from echelon.verifier.tolerances import DRIFT_BOUNDS

#: How many times one device's own rounding a difference may be.
_ROUNDING_FACTOR = 16

_Tensors = Mapping[str, Tensor | None]


class IncomparableStepError(Exception):
    """One device cannot take over the state of a step, so nothing is known about it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """What a step starts from, on rank 0: tensors by full name, and the state of modules and functions."""

    parameters: dict[str, Tensor]
    aliases: dict[str, str]  #: further names of parameters on rank 0, with their first
    buffers: dict[str, Tensor]
    attributes: StateChanges  #: other attributes of modules that changed since the start
    uncopyable: list[str]  #: those that cannot be copied
    trainable: dict[str, bool]  #: parameters frozen or unfrozen since the start
    extra_state: dict[str, Any]  #: from `get_extra_state()` of modules
    functions: IsolatedJob | None  #: the job's functions with their state before the step; None on other ranks

    @classmethod
    def gather(cls, run: Run, job: Job) -> StepState:
        """The state before the next step. Every rank must call it."""
        attributes, uncopyable = run.attributes.collect_model()
        flags_by_rank = run.ranks.all_gather_object(run.attributes.changed_trainable())
        first_names = {id(value): name for name, value in run.model.named_parameters()}
        names = {name: first_names[id(value)] for name, value in run.model.named_parameters(remove_duplicate=False)}
        return cls(
            parameters=gather_full_tensors(run, dict(run.model.named_parameters())),
            aliases={name: first_name for name, first_name in names.items() if name != first_name},
            buffers=gather_full_tensors(run, dict(run.model.named_buffers())), attributes=attributes, uncopyable=uncopyable,
            trainable={name: flag for flags in flags_by_rank for name, flag in flags.items()},
            functions=IsolatedJob(job, shared_model=run.model) if run.world.is_main else None,
            # A checkpoint restores it before attributes are first looked at.
            extra_state={path: copy.deepcopy(module.get_extra_state()) for path, module in _extra_modules(run.model)},
        )  # fmt: skip

    @torch.no_grad()
    def load_into(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        """Load it into a fresh model; floating tensors in `dtype`, if given."""
        for name, value in model.named_parameters():
            if name not in self.parameters:
                first_name, since = self.aliases.get(name), "since forward replaced it"
                if first_name is None:
                    raise JobError(f"{name} was a parameter at the start, and is none any more {since}")
                change = f"is the same parameter as {first_name} {since}, and was one of its own at the start"
                raise JobError(f"{name} {change}")
            value.copy_(self.parameters[name])
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

        def cast(value: Tensor) -> Tensor:
            return value.to(device, dtype if value.is_floating_point() else None, copy=True)

        assign_tensors(local_buffers(model), self.buffers)
        for path, module in model.named_modules():
            for key, value in () if is_torchscript(module) else module._buffers.items():
                saved = self.buffers.get(f"{path}.{key}" if path else key)
                # Forward has created the buffer, or given it another shape.
                if saved is not None and (value is None or value.shape != saved.shape):
                    module._buffers[key] = cast(saved)
        for path, module in _extra_modules(model):
            module.set_extra_state(copy.deepcopy(self.extra_state[path]))
        ModelState(model).restore(self.attributes, cast)
        set_trainable(model, self.trainable)


class SingleDeviceStep:
    """Recomputes steps of `run` on rank 0. `pristine`: as for `Reference`."""

    def __init__(self, run: Run, pristine: nn.Module | None) -> None:
        self._run, self._pristine = run, pristine
        self.device = torch.device("cpu")

    def find_divergence(
        self, step: int, state: StepState, result: PassResult, data: ReferenceData, plan: Plan
    ) -> tuple[str, str] | None:
        """The tensor that differs most beyond rounding between the run's step and one device's, and how; `plan` splits the samples of `data`."""
        data = CachedData(data)  # both computations get the same samples: other samples are no rounding
        recompute = partial(self._compute, state, step, data, plan, without_randomness=result.without_randomness)
        try:
            expected = recompute(torch.float64)
        except Exception as error:
            raise IncomparableStepError(f"{type(error).__name__}: {first_line(error)}") from error
        actual = result.loss, {name: result.gradients.get(name) for name in expected[1]}
        differences = _compare(actual, expected, step)
        bounds = Bounds(default=DRIFT_BOUNDS[self._run.precision])
        ignored = tolerances.zero_gradients(expected[1])
        large = [item for item in differences if not bounds.allows(item) and item.name not in ignored]
        if not large:
            return None
        # One device in the run's own precision shows what rounding does in this step.
        rounding = {item.name: item.value for item in _compare(recompute(None), expected, step)}
        large = [item for item in large if item.value > _ROUNDING_FACTOR * rounding.get(item.name, 0.0)]
        if not large:
            return None
        if state.uncopyable:
            raise IncomparableStepError(f"a copy of the model lacks {state.uncopyable[0]}")
        worst = max(large, key=lambda difference: difference.value)
        a, b = (loss if worst.kind == "loss" else gradients.get(worst.name) for loss, gradients in (actual, expected))
        count = f"{len(large)} of {len(differences)} values differ"
        description = _describe_difference(worst, self._run.plan, a, b)
        return worst.name, f"{description} from the same state and samples ({count})"

    def _compute(
        self, state: StepState, step: int, data: ReferenceData, plan: Plan, dtype: torch.dtype | None, *, without_randomness: bool
    ) -> tuple[Tensor, _Tensors]:  # fmt: skip
        """Loss and gradients of one device in `dtype`; None: in the precision of the run."""
        in_float64, functions = dtype == torch.float64, state.functions
        # Some models run in float64 only if casts are widened.
        determinism = DeterministicMode(fix_random=without_randomness, widen_casts=in_float64)
        assert functions is not None
        with preserve_random_states(devices=True), functions.active():
            # Building the schedule would reset what it shares with the loss.
            job, device, patches = dataclasses.replace(functions.job, lr_schedule=None), self.device, TorchPatches()
            pristine = self._pristine
            reference = Reference(
                job, plan, data, device=device, determinism=determinism, pristine=pristine, dtype=dtype
            )
            patches.restore()
            state.load_into(reference.model, dtype)
            with contextlib.ExitStack() as stack:
                if not in_float64:
                    stack.enter_context(autocast(self._run.precision, device))
                if without_randomness:
                    stack.enter_context(randomness_disabled(reference.model))
                loss = reference.backward(step)
        return loss, reference.gradients()


def _compare(actual: tuple[Tensor, _Tensors], expected: tuple[Tensor, _Tensors], step: int) -> list[Difference]:
    loss = compare_tensors("loss", {"loss": actual[0]}, {"loss": expected[0]}, step=step)
    return loss + compare_tensors("gradient", actual[1], expected[1], step=step)


def _describe_difference(difference: Difference, plan: Plan, actual: Tensor | None, expected: Tensor | None) -> str:
    """How far a tensor is off; as two numbers where one device's is zero or a number is not finite."""
    is_loss, end = difference.kind == "loss", "is what one device computes"
    name = "the loss" if is_loss else f"the gradient of {difference.name}"
    if difference.value < NOT_COMPARABLE:
        return f'{name} under "{plan}" is {difference.value:.2g} off what one device computes'
    if actual is not None and expected is not None and actual.shape != expected.shape:
        return f'{name} under "{plan}" has the shape {tuple(actual.shape)}, and {tuple(expected.shape)} {end}'
    name = name if is_loss else f"the largest element of {name}"
    return f'{name} under "{plan}" is {_format_largest(actual)}, and {_format_largest(expected)} {end}'


def _format_largest(tensor: Tensor | None) -> str:
    """A loss, or a gradient's largest element; one that nothing reached is zero."""
    if tensor is None or not tensor.numel():
        return "0"
    values = to_float64(tensor)
    return f"{float(values.abs().max()) if values.dim() or values.is_complex() else float(values):.4g}"


def _extra_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(path, module) for path, module in model.named_modules() if has_extra_state(module)]
