"""What rounding alone may do, so that only real differences count.

Parameters. Adam divides a gradient by its own size, so where the true gradient is zero (the bias of attention's keys) it turns rounding
noise into steps of full length. Gradients are compared first and decide. A parameter's element is then granted what its gradient's error
explains: with relative error e of the gradient, 4e (at most 2) times the largest move that the reference made of any parameter with the
same settings (learning rate, decay). Where gradients are equal, as in the rows of an embedding that no sample used, nothing is granted.

Rounding that is larger than float64's own: parts of a model that stay in float32, or sums that cancel (batch norm over two samples).
The reference is run again from parameters that are off by one rounding: every rounding after it falls differently, and nothing
else changes. The samples and their order are the same, so that samples which see each other cannot pass for noise. 16 times the
difference between the two is granted to each tensor. For float32 it is no less than 8 of its roundings. It is never more than
1e-4, or than the floor of the comparison where the tensor is that small: a gradient that is zero in truth is all noise. A
difference above 1e-4 is no rounding that grew but a choice that fell the other way (a tie, a number drawn): it grants nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from echelon.verifier.compare import BOUND, Bounds, Difference, compare, magnitude, wide
from echelon.verifier.compare_outputs import compared
from echelon.verifier.reference import Record, Reference

#: No bound is wider: semantic mistakes begin at about 1e-3.
WIDEST = 1e-4
#: Least bound where something is computed in float32.
NARROW = 8 * float(torch.finfo(torch.float32).eps)
#: What a twin's parameters are off by: 16 times the second is what float32 is granted in any case.
SHAKE, SHAKE_NARROW = float(torch.finfo(torch.float64).eps), NARROW / 16


class Slack:
    """How far each element of the parameters may be off because its gradient is noise."""

    def __init__(self, start: Mapping[str, Tensor]) -> None:
        """`start`: where the parameters began, `copied`."""
        self._start = start
        self._error: dict[str, Tensor] = {}

    def note(self, plan: Mapping[str, Tensor | None], reference: Mapping[str, Tensor | None]) -> None:
        """Take a step's gradients into account."""
        for name, true in reference.items():
            mine = plan.get(name)
            if true is None or mine is None or mine.shape != true.shape:
                continue
            true, mine = wide(true, true.device), wide(mine, true.device)
            error = ((mine - true).abs() / true.abs()).nan_to_num(0.0, posinf=2.0).mul_(4.0).clamp_(max=2.0)
            if name in self._error:
                error = torch.maximum(error, self._error[name])
            if error.any():
                self._error[name] = error

    def grant(self, parameters: Mapping[str, Tensor], groups: Mapping[str, str]) -> dict[str, Tensor]:
        """The slack of each parameter, given where the reference stands now: by the largest move in its own group."""
        largest: dict[str, float] = {}
        for name, value in parameters.items():
            if name not in self._start:  # made in forward
                continue
            start = self._start[name].to(value.device)
            moved = float((wide(value, value.device) - start).abs().max()) if value.numel() else 0.0
            group = groups.get(name, "")
            largest[group] = max(moved, largest.get(group, 0.0))
        return {name: error * largest.get(groups.get(name, ""), 0.0) for name, error in self._error.items()}


def copied(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, safe from what becomes of them; in float64 but for whole numbers."""
    fractions = {name: value.is_floating_point() or value.is_complex() for name, value in values.items()}
    return {
        name: wide(value).clone() if fractions[name] else value.detach().to("cpu", copy=True)
        for name, value in values.items()
    }


def zeros(gradients: Mapping[str, Tensor | None]) -> list[str]:
    """The parameters whose gradient is zero in truth: in float64 it is nothing but rounding, yet not exactly zero."""
    sizes = {name: magnitude(value) for name, value in gradients.items() if value is not None}
    largest = max(sizes.values(), default=0.0)
    return [name for name, size in sizes.items() if 0.0 < size <= BOUND * largest]


def widened(reference: Reference, twin: Reference, steps: Iterable[int], *, least: float = BOUND) -> Bounds:
    """Bounds from the reference against its twin, none below `least`."""
    granted: dict[tuple[str, str], float] = {}
    slack = Slack(copied(dict(reference.model.named_parameters())))
    for number in steps:
        for each in differences(twin.step(number), reference.step(number), slack):
            if each.value > WIDEST and not each.small:
                continue
            grant = min(16 * each.value, 1.0 if each.small else WIDEST)
            if grant > max(least, granted.get((each.kind, each.name), 0.0)):
                granted[each.kind, each.name] = grant
    return Bounds(least=least, tensors=granted)


def differences(plan: Record, true: Record, slack: Slack) -> list[Difference]:
    """Every tensor that one step made, in the plan's run against the reference."""
    slack.note(plan.gradients, true.gradients)
    step = true.step
    found = compare("gradient", plan.gradients, true.gradients, step=step)
    found += compare("loss", {"loss": plan.loss}, {"loss": true.loss}, step=step)
    if plan.norm is not None:
        found += compare("norm", {"gradient norm": plan.norm}, {"gradient norm": true.norm}, step=step)
    found += compare("buffer", plan.buffers, true.buffers, step=step)
    granted = slack.grant(true.parameters, true.groups)
    found += compare("parameter", plan.parameters, true.parameters, step=step, slack=granted)
    told = {name: value for name, value in true.optimizer.items() if name.split("/")[1] not in plan.untold}
    found += compare("optimizer", plan.optimizer, told, step=step)
    return found + compared(plan.outputs, true.outputs, step)
