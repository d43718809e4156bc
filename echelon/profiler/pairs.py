"""Layers that can be cut over ranks without talking in between: columns into a row, found by trying.

    up ──> activation ──> down          q, k, v ──> heads ──> out          convolution ──> batch norm ──> convolution

Candidates follow from who reads whom; whether one works is tried (trying.py). Modules in between that learn something channel by channel
(batch norm, a depthwise convolution) are cut along.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from echelon.profiler.layers import channelwise, is_product
from echelon.profiler.trying import Candidate, Pair, tried, watched
from echelon.profiler.visits import Follower, Visit, intercepted


@dataclass(frozen=True, slots=True)
class Found:
    """What a model's modules can be cut into."""

    pairs: tuple[Pair, ...]
    called: frozenset[str]  #: modules without children that forward calls
    touched: frozenset[
        int
    ]  #: parameters that are also used outside the call of the module that holds them, by identity
    sized: frozenset[int]  #: parameters whose sizes are read outside the module that holds them, by identity
    scored: frozenset[str]  #: modules whose outputs a cross entropy reads, and no other module does


def find_pairs(model: nn.Module, step: Callable[[], Any], ways: int, hints: Iterable[Candidate] = ()) -> Found:
    """Every pair of `model` for so many ranks; `step()` computes its loss on real numbers (float64 best)."""
    leaves = [path for path, module in model.named_modules() if not list(module.children()) and _holds(module)]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it calls no modules
    try:
        return _found(model, step, ways, leaves, hints)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _found(
    model: nn.Module, step: Callable[[], Any], ways: int, leaves: list[str], hints: Iterable[Candidate]
) -> Found:
    follower = _Reads(model)
    with intercepted(model, leaves, follower.around), follower:
        step()  # with gradients: some forwards take them
    calls = Counter(visit.path for visit in follower.visits)
    hinted = [each for each in hints if all(calls[path] == 1 for path in each.paths)]
    candidates = [
        each
        for each in (*hinted, *_candidates(model, follower.visits, calls))
        # A trial computes with parts and leaves the parameters as they are, so that it does not tell.
        if not any(
            id(value) in follower.sized or id(value) in follower.touched
            for path in each.paths
            for value in model.get_submodule(path).parameters()
        )
    ]
    seen = watched(model, candidates, step)
    pairs: dict[str, Pair] = {}
    for each in candidates:
        if each.row not in pairs and each in seen and (pair := tried(model, step, each, seen[each], ways)) is not None:
            pairs[each.row] = pair
    read = {source for visit in follower.visits for source, _ in visit.reads}
    scored = frozenset(follower.visits[each].path for each in follower.scored - read)
    return Found(
        tuple(pairs.values()), frozenset(calls), frozenset(follower.touched), frozenset(follower.sized), scored
    )


class _Reads(Follower):
    """Notes as well which visits a cross entropy reads, and modules that compute with the parameters of others."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._called)
        self.scored: set[int] = set()
        self._model = model

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.cross_entropy:
            given = args[0] if args else (kwargs or {})["input"]
            self.scored |= {number for number, _ in self.origin([given])}
        out = super().__torch_function__(func, types, args, kwargs)
        if (
            isinstance(out, Tensor) and getattr(func, "__name__", "") == "__get__"
        ):  # `.T` and `.data` are the parameter itself
            self._touch(args)
        return out

    def _called(self, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        own = {id(value) for value in self._model.get_submodule(path).parameters()}
        with _Foreign(own, self._touch):
            return forward(*args, **kwargs)

    def _touch(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, nn.Parameter):
                self.touched.setdefault(id(value), set()).add(len(self.visits))


class _Foreign(TorchFunctionMode):
    """Notes parameters that are not a module's own, while it runs."""

    def __init__(self, own: set[int], note: Callable[[Iterable[Any]], None]) -> None:
        super().__init__()
        self._own, self._note = own, note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note(leaf for leaf in tree_leaves((args, kwargs)) if id(leaf) not in self._own)
        return func(*args, **(kwargs or {}))


def _holds(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or channelwise(module) is not None


def _candidates(model: nn.Module, visits: Sequence[Visit], calls: Mapping[str, int]) -> Iterator[Candidate]:
    readers: dict[int, set[int]] = {}
    for number, visit in enumerate(visits):
        for source, _ in visit.reads:
            readers.setdefault(source, set()).add(number)
    for number, visit in enumerate(visits):
        if not visit.reads or not is_product(model.get_submodule(visit.path)):
            continue
        columns, between = _sources(model, visits, number)
        inner = {number, *between}
        once = all(calls[visits[each].path] == 1 for each in (*columns, *inner))
        products = all(is_product(model.get_submodule(visits[each].path)) for each in columns)
        if columns and products and once and all(readers[each] <= inner for each in (*columns, *between)):
            yield Candidate(
                tuple(visits[each].path for each in columns), visit.path, tuple(visits[each].path for each in between)
            )


def _sources(model: nn.Module, visits: Sequence[Visit], row: int) -> tuple[list[int], list[int]]:
    """The visits that a row reads, (columns, between), seen through modules that work channel by channel."""
    columns: set[int] = set()
    between: set[int] = set()
    ahead = {source for source, _ in visits[row].reads}
    while ahead:
        number = ahead.pop()
        visit = visits[number]
        if visit.reads and channelwise(model.get_submodule(visit.path)) is not None:
            between.add(number)
            ahead |= {source for source, _ in visit.reads} - columns - between
        else:
            columns.add(number)
    return sorted(columns), sorted(between)
