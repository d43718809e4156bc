"""Layers that can be cut over ranks without talking in between: columns into a row, found by trying.

    up ──> activation ──> down          q, k, v ──> heads ──> out          convolution ──> batch norm ──> convolution

Candidates follow from who reads whom; whether one works is tried (columns.py). Modules in between that learn something channel by channel
(batch norm, a depthwise convolution) are cut along.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from echelon.partition.per_column_rng import draws_by_column
from echelon.partition.tp_layers import channelwise, is_product
from echelon.partition.tp_layouts import Candidate
from echelon.partition.tp_trial import Pair, Seen, find_layout, holds, watched
from echelon.partition.trial_values import at_each
from echelon.profiler.module_calls import Follower, Visit, intercepted
from echelon.tree import tree_leaves
from echelon.trials.trial_run import alike, deciding, drawing, mode, rehearsing


@dataclass(frozen=True, slots=True)
class Found:
    """What a model's modules can be cut into."""

    pairs: tuple[Pair, ...]
    called: frozenset[str]  #: modules without children, and attention, that forward calls
    touched: frozenset[int]  #: parameters that are also used outside the calls of what holds them, by identity
    sized: frozenset[int]  #: parameters whose sizes are read outside the module that holds them, by identity
    #: Modules whose outputs a cross entropy reads, no other module does, and nobody changes in place: parts do not know their views.
    scored: frozenset[str]


def find_pairs(model: nn.Module, step: Callable[[], Any], ways: int, hints: Iterable[Candidate] = ()) -> Found:
    """Every pair of `model` for so many ranks; `step()` computes its loss on real numbers (float64 best)."""
    draws, decides = drawing(model, step), deciding(model, step)
    with rehearsing(model):
        found, seen = _found(model, step, ways, hints, draws)
    pairs = [
        each
        for each in found.pairs
        if seen[each.candidate].holder not in decides
        and (not each.draws or draws_by_column(model, each, seen[each.candidate]))
    ]
    return replace(found, pairs=tuple(pairs))


def _found(
    model: nn.Module, step: Callable[[], Any], ways: int, hints: Iterable[Candidate], draws: Container[str]
) -> tuple[Found, Mapping[Candidate, Seen]]:
    """What can be cut, and what the candidates did in training."""
    trains = _followed(model, step)
    followed = [trains]
    with suppress(Exception), mode(model, training=False):  # it may have no loss but in training
        followed.append(_followed(model, step))
    touched = frozenset(key for each in followed for key in each.touched)
    sized = frozenset(key for each in followed for key in each.sized)
    bound = touched | sized
    calls = Counter(visit.path for visit in trains.visits)
    hinted = [each for each in hints if all(calls[path] == 1 for path in each.paths)]
    candidates = [
        each
        for each in (*hinted, *_candidates(model, trains.visits, calls))
        # A trial computes with parts and leaves the parameters as they are, so that it does not tell.
        if not any(id(value) in bound for path in each.paths for value in model.get_submodule(path).parameters())
        and not any(run.escapes(each) or run.lent & {*each.between} for run in followed)
    ]
    pairs, seen = _tried(model, alike(model, step), ways, candidates, draws, evaluates=len(followed) > 1)
    read = {source for visit in trains.visits for source, _ in visit.reads}
    found = Found(
        pairs=tuple(pairs.values()),
        called=frozenset(visit.path for run in followed for visit in run.visits),
        touched=touched,
        sized=sized,
        scored=frozenset(trains.visits[each].path for each in trains.scored - read - trains.written),
    )
    return found, seen


def _tried(
    model: nn.Module,
    step: Callable[[], Any],
    ways: int,
    candidates: Sequence[Candidate],
    draws: Container[str],
    *,
    evaluates: bool,
) -> tuple[dict[str, Pair], Mapping[Candidate, Seen]]:
    """The candidates that work at all parameter values, by their rows, and what they did at the first."""
    first: dict[Candidate, Seen] = {}
    pairs: dict[str, Pair] = {}
    for number, name in enumerate(at_each(model, step)):
        if first and (name == "initial" or not pairs):
            continue  # initial values say nothing that others have not
        try:
            seen = [watched(model, [each.candidate for each in pairs.values()] if first else candidates, step)]
            if evaluates and not first:
                with mode(model, training=False):
                    seen.append(watched(model, candidates, step))
        except Exception:  # a model that does not take such parameters; the next are others
            continue
        if first:
            rank = (ways - 1) * (number % 2)
            pairs = {
                row: pair
                for row, pair in pairs.items()
                if pair.candidate in seen[0]
                and holds(model, pair.candidate, seen[0][pair.candidate], pair.layout, rank, slopes=name == "trained")
            }
            continue
        first = seen[0]
        for each in candidates:
            if each.row not in pairs and each in first:
                cut = find_layout(model, step, each, [run[each] for run in seen if each in run], ways)
                if cut is not None:
                    pairs[each.row] = Pair(each, *cut, first[each].holder in draws)
    return pairs, first


def _followed(model: nn.Module, step: Callable[[], Any]) -> _Reads:
    leaves = [path for path, module in model.named_modules() if _holds(module)]
    follower = _Reads(model)

    def run() -> Any:
        with intercepted(model, leaves, follower.around), follower:
            return step()  # with gradients: some forwards take them

    left = [leaf for leaf in tree_leaves(alike(model, run)()) if isinstance(leaf, Tensor)]
    follower.told = {number for number, _ in follower.origin(left)}
    return follower


class _Reads(Follower):
    """Notes as well which visits a cross entropy reads, modules that compute with the parameters of others, and whose buffers others read."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._called)
        self.scored: set[int] = set()
        #: Visits whose outputs, or what was made of them before a cross entropy read it, were changed in place.
        self.written: set[int] = set()
        #: What comes of a cross entropy, which is no part of anything.
        self._losses = WeakTensorKeyDictionary()
        #: Visits that the loss or a buffer is computed from.
        self.told: set[int] = set()
        #: Modules that work channel by channel, by path, of which a buffer with a row for each channel is read outside.
        self.lent: set[str] = set()
        self._model = model
        self._channels = [
            (path, module._buffers, name)
            for path, module in model.named_modules()
            if channelwise(module) is not None
            for name, value in module._buffers.items()
            if value is not None and value.dim()
        ]

    def escapes(self, candidate: Candidate) -> bool:
        """Whether what the columns gave reaches the loss or a buffer by another way than the row: a penalty, say. A rank would take it of
        its part."""
        inner = {*candidate.columns, *candidate.between}
        reached: set[int] = set()
        for number, visit in enumerate(self.visits):
            if visit.path in inner or (visit.path != candidate.row and any(each in reached for each, _ in visit.reads)):
                reached.add(number)
        return bool(self.told & reached)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.cross_entropy:
            given = args[0] if args else (kwargs or {})["input"]
            self.scored |= {number for number, _ in self.origin([given])}
        out = self._written(func, types, args, kwargs)
        # Not `.dtype`, which a part has as well.
        if getattr(func, "__name__", "") != "__get__" or isinstance(out, Tensor | torch.Size):
            self._lend(tree_leaves((args, kwargs)))
        return out

    def _written(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """What `func` gives; notes what it changes in place."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        before = [(leaf, leaf._version, self.origin([leaf])) for leaf in inputs if self.origin([leaf])]
        out = super().__torch_function__(func, types, args, kwargs)
        for leaf, version, origin in before:
            if leaf._version != version and leaf not in self._losses:
                self.written |= {number for number, _ in origin}
        if func is F.cross_entropy or any(leaf in self._losses for leaf in inputs):
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    self._losses[leaf] = True
        return out

    def _called(self, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        own = {id(value) for value in self._model.get_submodule(path).parameters()}
        own |= {id(value) for value in self._model.get_submodule(path).buffers()}
        with _Foreign(own, self._met):
            return forward(*args, **kwargs)

    def _met(self, values: list[Any]) -> None:
        self._lend(values)
        for value in values:
            if isinstance(value, nn.Parameter):
                self.touched.setdefault(id(value), set()).add(len(self.visits))

    def _lend(self, values: list[Any]) -> None:
        met = {id(value) for value in values if isinstance(value, Tensor)}
        self.lent |= {path for path, slots, name in self._channels if id(slots[name]) in met}


class _Foreign(TorchFunctionMode):
    """Notes what is computed with and not a module's own, while it runs."""

    def __init__(self, own: set[int], note: Callable[[list[Any]], None]) -> None:
        super().__init__()
        self._own, self._note = own, note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note([leaf for leaf in tree_leaves((args, kwargs)) if id(leaf) not in self._own])
        return func(*args, **(kwargs or {}))


def _holds(module: nn.Module) -> bool:
    """Whether a module's parameters are its own business: one without children, or attention, which does not call its child."""
    if list(module.children()) and type(module) is not nn.MultiheadAttention:
        return False
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
