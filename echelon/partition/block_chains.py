"""Chains: runs of repeated blocks of which each is given the very hidden states of the one before, which nobody else reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from echelon.plan.placement import Placement
from echelon.plan.profile import units
from echelon.profiler.module_calls import Follower, intercepted, unit_paths
from echelon.tree import tree_leaves
from echelon.trials.module_tree import module_tree

JOINING = ("row", "attention")  #: cuts after which the ranks add up


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks in the order of their calls, and the argument that is their hidden states."""

    units: tuple[str, ...]
    argument: str


class _Linked(Follower):
    """Notes as well which hidden states each unit was given and gave."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[str, Tensor] | None] = []
        self.gave: list[Tensor | None] = []

    def around(self, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """For `intercepted`."""
        self.given.append(next(tensors_of(args, kwargs), None))
        out = super().around(path, forward, args, kwargs)
        first = out[0] if type(out) in (list, tuple) and out else out
        self.gave.append(first if isinstance(first, Tensor) else None)
        return out


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The arguments of a call that are tensors, by position or name."""
    for name, value in (*((str(place), each) for place, each in enumerate(args)), *kwargs.items()):
        if isinstance(value, Tensor):
            yield name, value


def chains(model: nn.Module, step: Callable[[], Any], placements: Iterable[Placement]) -> Iterator[Chain]:
    """The chains of a model; `step()` computes its loss."""
    cut = [each.path for each in placements if each.cut in JOINING]
    blocks = {unit for unit in units(module_tree(model)) if _fit(model, unit, cut)}
    linked = _Linked()
    with intercepted(model, unit_paths(model), linked.around), linked:
        loss = step()
    calls = Counter(visit.path for visit in linked.visits)
    readers: dict[int, set[int]] = {}
    for number, visit in enumerate(linked.visits):
        for source, place in visit.reads:
            readers.setdefault(source, set()).update({number} if place == 0 else ())
    told = linked.origin([leaf for leaf in tree_leaves(loss) if isinstance(leaf, Tensor)])
    run: list[int] = []

    def follows(number: int) -> bool:
        given, before = linked.given[number], linked.gave[run[-1]]
        once = readers.get(run[-1]) == {number} and (run[-1], 0) not in told
        return given is not None and given[1] is before and once and given[0] == argument(run[-1])

    def argument(number: int) -> str:
        given = linked.given[number]
        return given[0] if given is not None else ""

    def good(number: int) -> bool:
        path, given, gave = linked.visits[number].path, linked.given[number], linked.gave[number]
        return (
            path in blocks
            and calls[path] == 1
            and given is not None
            and gave is not None
            and given[1].dim() == 3
            and given[1].is_floating_point()
            and given[1].shape == gave.shape
        )

    for number in range(len(linked.visits) + 1):
        here = number < len(linked.visits) and good(number)
        if run and not (here and follows(number)):
            yield Chain(tuple(linked.visits[each].path for each in run), argument(run[0]))
            run.clear()
        if here:
            run.append(number)


def _fit(model: nn.Module, unit: str, cut: Iterable[str]) -> bool:
    """Whether a block has something to add up, and no norm that would take its statistics over a part."""
    batch = any(isinstance(each, _NormBase) for each in model.get_submodule(unit).modules())
    return not batch and any(path.startswith(unit + ".") for path in cut)
