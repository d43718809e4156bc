"""Ways to put a fault into a live run: a part of the engine is replaced from outside, for as long as a context lasts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from echelon.engine import build_model
from echelon.engine.build_model import Assembly
from echelon.engine.run import Run

#: What takes the place of a part of the engine, for a while.
Changes = Callable[[], Sequence[AbstractContextManager[object]]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One mistake. `needs` says which plans and jobs it shows under: under others it changes nothing."""

    name: str
    what: str
    needs: str
    changes: Changes


def norms_of(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of its norm layers."""
    norms = (each for each in model.modules() if "norm" in type(each).__name__.lower())
    return [value for each in norms for value in each.parameters(recurse=False)]


def changed_loss(change: Callable[[Run, Any], Any]) -> AbstractContextManager[object]:
    """The loss of every micro-batch, changed."""
    loss = Run._loss_of
    return patch.object(Run, "_loss_of", lambda self, model, batch: change(self, loss(self, model, batch)))


def times(value: Any, factor: int) -> Any:
    """A loss, or the sum of (sum, count), times a factor."""
    return (value[0] * factor, value[1]) if isinstance(value, tuple) else value * factor


def changed_model(change: Callable[[nn.Module], None]) -> AbstractContextManager[object]:
    """The model, changed before anything holds its parameters."""
    build = Assembly._build

    def changed(self: Assembly, warn: Any) -> nn.Module:
        model = build(self, warn)
        change(model)
        return model

    return patch.object(Assembly, "_build", changed)


def left_out(choose: Callable[[nn.Module], Iterable[Tensor]]) -> Sequence[AbstractContextManager[object]]:
    """Parameters whose gradients the data ranks do not add up."""
    chosen: set[int] = set()
    exchange = build_model.Exchange

    def note(model: nn.Module) -> None:
        chosen.clear()
        chosen.update(map(id, choose(model)))

    def without(parameters: Sequence[nn.Parameter], *rest: Any) -> Any:
        return exchange([each for each in parameters if id(each) not in chosen], *rest)

    return [changed_model(note), patch.object(build_model, "Exchange", without)]
