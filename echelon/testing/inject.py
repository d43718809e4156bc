"""Put a fault into a live run: parts of the engine are replaced from outside, for as long as a context lasts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn

from echelon.engine.backends import allreduce
from echelon.engine.build_model import RankModel
from echelon.errors import EchelonError

Patches = Sequence[AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One mistake. `needs`: the plans and jobs under which it shows; under others it changes nothing."""

    name: str
    description: str
    needs: str
    patches: Callable[[], Patches]


#: By name.
FAULTS: dict[str, Fault] = {}


@contextlib.contextmanager
def inject_fault(name: str) -> Iterator[None]:
    """Runs that are made inside have this fault."""
    if name not in FAULTS:
        raise EchelonError(f"{name!r}: no such fault; the catalogue has {', '.join(FAULTS)}")
    with contextlib.ExitStack() as stack:
        for context in FAULTS[name].patches():
            stack.enter_context(context)
        yield


def register_fault(name: str, needs: str) -> Callable[[Callable[[], Patches]], None]:
    """Register the decorated function, which returns a fault's patches and whose docstring describes it."""

    def register(patches: Callable[[], Patches]) -> None:
        FAULTS[name] = Fault(name=name, description=patches.__doc__ or "", needs=needs, patches=patches)

    return register


def register_wrapper(name: str, owner: Any, attribute: str, needs: str) -> Callable[[Callable[..., Any]], None]:
    """Register the fault of calling the decorated function, with the original first, in place of `owner.attribute`."""

    def register(wrapper: Callable[..., Any]) -> None:
        patches = functools.wraps(wrapper)(lambda: [wrap(owner, attribute, wrapper)])
        register_fault(name, needs)(patches)

    return register


def wrap(owner: Any, attribute: str, wrapper: Callable[..., Any]) -> AbstractContextManager[object]:
    """Replace `owner.attribute` by `wrapper(original, ...)`."""
    original = getattr(owner, attribute)
    return patch.object(owner, attribute, lambda *args, **options: wrapper(original, *args, **options))


def scale_loss(loss: Any, factor: int) -> Any:
    """A loss, or the sum of (sum, count), times a factor."""
    return (loss[0] * factor, loss[1]) if isinstance(loss, tuple) else loss * factor


def norm_parameters(model: nn.Module) -> list[nn.Parameter]:
    norms = (norm for norm in model.modules() if "norm" in type(norm).__name__.lower())
    return [parameter for norm in norms for parameter in norm.parameters(recurse=False)]


def patch_model(change: Callable[[nn.Module], None]) -> AbstractContextManager[object]:
    """The model, changed before anything holds its parameters."""

    def build_changed(build: Callable[..., nn.Module], self: RankModel, warn: Any) -> nn.Module:
        model = build(self, warn)
        change(model)
        return model

    return wrap(RankModel, "_build", build_changed)


def skip_gradient_reduction(choose: Callable[[nn.Module], Iterable[Tensor]]) -> Patches:
    """Parameters whose gradients the data ranks do not sum."""
    skipped: set[int] = set()

    def record_skipped(model: nn.Module) -> None:
        skipped.clear()
        skipped.update(map(id, choose(model)))

    def reduce_others(make: Callable[..., Any], parameters: Sequence[nn.Parameter], *rest: Any) -> Any:
        return make([parameter for parameter in parameters if id(parameter) not in skipped], *rest)

    return [patch_model(record_skipped), wrap(allreduce, "GradientAllReduce", reduce_others)]
