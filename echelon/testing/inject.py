"""Ways to put a fault into a live run: a part of the engine is replaced from outside, for as long as a context lasts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from echelon.engine.backends import allreduce
from echelon.engine.build_model import RankModel
from echelon.engine.loss_weighing import LossWeighing

#: What takes the place of a part of the engine, for a while.
FaultPatches = Callable[[], Sequence[AbstractContextManager[object]]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One mistake. `needs` says which plans and jobs it shows under: under others it changes nothing."""

    name: str
    description: str
    needs: str
    patches: FaultPatches


def norm_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of its norm layers."""
    norms = (norm for norm in model.modules() if "norm" in type(norm).__name__.lower())
    return [parameter for norm in norms for parameter in norm.parameters(recurse=False)]


def patch_loss(change: Callable[[LossWeighing, Any], Any]) -> AbstractContextManager[object]:
    """The loss of every micro-batch, changed."""
    weigh = LossWeighing.weigh

    def weigh_changed(self: LossWeighing, loss: Any, *rest: Any) -> Tensor:
        return weigh(self, change(self, loss), *rest)

    return patch.object(LossWeighing, "weigh", weigh_changed)


def scale_loss(loss: Any, factor: int) -> Any:
    """A loss, or the sum of (sum, count), times a factor."""
    return (loss[0] * factor, loss[1]) if isinstance(loss, tuple) else loss * factor


def patch_model(change: Callable[[nn.Module], None]) -> AbstractContextManager[object]:
    """The model, changed before anything holds its parameters."""
    original_build = RankModel._build

    def build_changed(self: RankModel, warn: Any) -> nn.Module:
        model = original_build(self, warn)
        change(model)
        return model

    return patch.object(RankModel, "_build", build_changed)


def skip_gradient_reduction(
    choose: Callable[[nn.Module], Iterable[Tensor]],
) -> Sequence[AbstractContextManager[object]]:
    """Parameters whose gradients the data ranks do not add up."""
    skipped: set[int] = set()
    original_exchange = allreduce.GradientAllReduce

    def record_skipped(model: nn.Module) -> None:
        skipped.clear()
        skipped.update(map(id, choose(model)))

    def exchange_others(parameters: Sequence[nn.Parameter], *rest: Any) -> Any:
        return original_exchange([parameter for parameter in parameters if id(parameter) not in skipped], *rest)

    return [patch_model(record_skipped), patch.object(allreduce, "GradientAllReduce", exchange_others)]
