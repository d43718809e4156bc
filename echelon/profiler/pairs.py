"""Linear layers that can be cut over ranks without talking in between: columns into a row, found by trying.

    up ──> activation ──> down          q, k, v ──> heads ──> out

Whether the code between them works on a part of the columns is not guessed from operators: it is run on one. The model runs once as
it is; then the module that holds the pair runs with only one rank's columns, and what reaches the row must be exactly that rank's
part of what reached it before. Counts of heads that the code holds in attributes are divided for that, and the plan notes which.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from echelon.profiler.visits import Follower, Visit, intercepted

#: Numbers of ranks that a pair is tried for.
WAYS = (2, 3, 4, 6, 8, 16, 32, 64)
_EQUAL = 1e-9


@dataclass(frozen=True, slots=True)
class Pair:
    """Columns whose outputs, and nothing else that is learnt, make up the input of `row`."""

    columns: tuple[str, ...]
    row: str
    parts: tuple[int, ...]  #: of the columns' outputs, where there is one column and it is fused
    divide: tuple[tuple[str, str], ...]  #: (module path, attribute)
    ways: tuple[int, ...]  #: numbers of ranks that it works for


def is_linear(module: nn.Module) -> bool:
    """A layer that multiplies the last dimension: torch's own, or transformers' Conv1D (the weight lies transposed)."""
    return type(module) is nn.Linear or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


@dataclass(frozen=True, slots=True)
class Found:
    """What a model's modules can be cut into."""

    pairs: tuple[Pair, ...]
    called: frozenset[str]  #: modules without children that forward calls
    touched: frozenset[int]  #: parameters that are also used outside the module that holds them, by identity


def find_pairs(model: nn.Module, step: Callable[[], Any]) -> Found:
    """Every pair of `model`, whose loss `step()` computes on real numbers (float64 best)."""
    leaves = [path for path, module in model.named_modules() if path and not list(module.children()) and _holds(module)]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it calls no modules
    try:
        return _found(model, step, leaves)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _found(model: nn.Module, step: Callable[[], Any], leaves: list[str]) -> Found:
    follower = Follower()
    with intercepted(model, leaves, follower.around), follower:
        step()  # with gradients: some forwards take them
    candidates = list(_candidates(model, follower.visits))
    seen = _watched(model, candidates, step)
    tried = (_tried(model, columns, row, seen.get(row)) for columns, row in candidates)
    return Found(
        tuple(pair for pair in tried if pair is not None),
        frozenset(visit.path for visit in follower.visits),
        frozenset(follower.touched),
    )


def _holds(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _candidates(model: nn.Module, visits: Sequence[Visit]) -> Iterator[tuple[tuple[str, ...], str]]:
    """(columns, row) where the row reads the columns alone, and nothing else reads them."""
    readers: dict[int, set[int]] = {}
    for number, visit in enumerate(visits):
        for source, _ in visit.reads:
            readers.setdefault(source, set()).add(number)
    calls: dict[str, int] = {}
    for visit in visits:
        calls[visit.path] = calls.get(visit.path, 0) + 1
    for number, visit in enumerate(visits):
        if not visit.reads or not is_linear(model.get_submodule(visit.path)):
            continue
        sources = sorted({source for source, _ in visit.reads})
        paths = tuple(visits[source].path for source in sources)
        linear = all(is_linear(model.get_submodule(path)) for path in paths)
        once = all(calls[path] == 1 for path in (*paths, visit.path))
        if linear and once and all(readers[source] == {number} for source in sources):
            yield paths, visit.path


@dataclass(slots=True)
class _Seen:
    """The call of the module that holds a pair, what came out of it, and what the row in it was given and gave."""

    holder: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    reached: Tensor
    gave: Tensor


def _watched(
    model: nn.Module, candidates: Sequence[tuple[tuple[str, ...], str]], step: Callable[[], Any]
) -> dict[str, _Seen]:
    above = {row: list(_above((*columns, row))) for columns, row in candidates}
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    outs: dict[str, Any] = {}
    rows: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = []
    for path in {path for paths in above.values() for path in paths}:

        def before(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            calls[path] = copied((args, kwargs))

        def after(_: nn.Module, __: Any, out: Any, path: str = path) -> None:
            outs[path] = copied(out)

        hooks.append(model.get_submodule(path).register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(model.get_submodule(path).register_forward_hook(after))
    for row in above:

        def note(_: nn.Module, args: Any, out: Any, row: str = row) -> None:
            rows[row] = args[0].detach().clone(), out.detach().clone()

        hooks.append(model.get_submodule(row).register_forward_hook(note))
    try:
        step()
    finally:
        for hook in hooks:
            hook.remove()
    found = {}
    for row, paths in above.items():
        holder = next((path for path in paths if path in calls), None)
        if holder is not None and row in rows:
            found[row] = _Seen(holder, *calls[holder], outs[holder], *rows[row])
    return found


def copied(tree: Any) -> Any:
    """Tensors copied, so that what happens later does not change them; anything else copied if it can be."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone()
        try:
            return copy.copy(leaf)
        except Exception:  # not ours: kept as it is
            return leaf

    return tree_map(one, tree)


def _above(paths: Sequence[str]) -> Iterator[str]:
    """The modules that contain all of them, innermost first. Not all are called: a ModuleDict only holds."""
    split = [path.split(".")[:-1] for path in paths]
    shared: list[str] = []
    for names in zip(*split, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    for length in range(len(shared), -1, -1):
        yield ".".join(shared[:length])


def _tried(model: nn.Module, columns: tuple[str, ...], row: str, seen: _Seen | None) -> Pair | None:
    if seen is None:
        return None
    for parts in _parts(model, columns, seen.reached.shape[-1]):
        for divide in _attributes(model, columns, row, seen):
            ways = tuple(way for way in WAYS if _works(model, columns, row, seen, parts, divide, way))
            if ways:
                return Pair(columns, row, parts, divide, ways)
    return None


def _parts(model: nn.Module, columns: tuple[str, ...], width: int) -> Iterator[tuple[int, ...]]:
    """Ways in which a fused projection may be laid out."""
    yield ()
    if len(columns) > 1:
        return
    outputs = _outputs(model.get_submodule(columns[0]))
    if outputs > width and (outputs - width) % 2 == 0:
        yield width, (outputs - width) // 2, (outputs - width) // 2
    if outputs == 2 * width:
        yield width, width


def _outputs(module: Any) -> int:
    return int(module.out_features if isinstance(module, nn.Linear) else module.nf)


def _attributes(
    model: nn.Module, columns: tuple[str, ...], row: str, seen: _Seen
) -> Iterator[tuple[tuple[str, str], ...]]:
    """Sets of attributes to divide: none, counts of heads, those and widths."""
    yield ()
    holder, width = seen.holder, seen.reached.shape[-1]
    places = {holder}
    for path in (*columns, row):
        parent = path.rpartition(".")[0]
        while len(parent) >= len(holder) and parent not in places:
            places.add(parent)
            parent = parent.rpartition(".")[0]
    numbers = [
        (place, name, value)
        for place in sorted(places)
        for name, value in vars(model.get_submodule(place)).items()
        if type(value) is int and value > 1 and not name.startswith("_")
    ]
    heads = [
        (place, name)
        for place, name, _ in numbers
        if "head" in name and not any(word in name for word in ("dim", "size", "width", "group"))
    ]
    widths = {_outputs(model.get_submodule(path)) for path in columns} | {width}
    wide = [(place, name) for place, name, value in numbers if value in widths or 3 * value in widths]
    if heads:
        yield tuple(heads)
    if wide:
        yield tuple(dict.fromkeys((*heads, *wide)))


def _works(
    model: nn.Module,
    columns: tuple[str, ...],
    row: str,
    seen: _Seen,
    parts: tuple[int, ...],
    divide: tuple[tuple[str, str], ...],
    ways: int,
) -> bool:
    """Whether each rank's columns lead to exactly its part of the row's input."""
    sizes = parts or tuple(_outputs(model.get_submodule(path)) for path in columns)
    if any(size % ways for size in (*sizes, seen.reached.shape[-1])):
        return False
    if any(getattr(model.get_submodule(path), name) % ways for path, name in divide):
        return False
    return all(_right(model, columns, row, seen, parts, divide, ways, rank) for rank in {0, ways - 1})


def _right(
    model: nn.Module,
    columns: tuple[str, ...],
    row: str,
    seen: _Seen,
    parts: tuple[int, ...],
    divide: tuple[tuple[str, str], ...],
    ways: int,
    rank: int,
) -> bool:
    wanted = seen.reached.chunk(ways, -1)[rank]
    holder = model.get_submodule(seen.holder)
    args, kwargs = copied((seen.args, seen.kwargs))

    reached: list[Tensor] = []

    def answer(x: Tensor) -> Tensor:
        reached.append(x)
        return seen.gave.clone()

    with _divided(model, divide, ways), _cut(model, columns, parts, ways, rank), torch.no_grad():
        last: Any = model.get_submodule(row)
        last.forward = answer
        try:
            out = holder(*args, **kwargs)
        except Exception:  # whatever the code says to a part of its columns, it does not work on one
            return False
        finally:
            del last.__dict__["forward"]
    # What else comes out (a bias per head that later layers take over) must be as it was, too.
    return len(reached) == 1 and _equal(reached[0], wanted) and _alike(out, seen.out)


def _alike(out: Any, before: Any) -> bool:
    new, old = tree_leaves(out), tree_leaves(before)
    return len(new) == len(old) and all(
        _equal(a, b) for a, b in zip(new, old, strict=True) if isinstance(a, Tensor) and isinstance(b, Tensor)
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()) or not a.numel():
        return torch.equal(a, b)
    scale = b.abs().max().clamp(min=1e-30)
    bound = _EQUAL if b.dtype is torch.float64 else 1e-5
    return bool((a - b).abs().max() <= bound * scale)


@contextmanager
def _divided(model: nn.Module, divide: Iterable[tuple[str, str]], ways: int) -> Iterator[None]:
    before = [(model.get_submodule(path), name) for path, name in divide]
    values = [getattr(module, name) for module, name in before]
    try:
        for (module, name), value in zip(before, values, strict=True):
            setattr(module, name, value // ways)
        yield
    finally:
        for (module, name), value in zip(before, values, strict=True):
            setattr(module, name, value)


@contextmanager
def _cut(model: nn.Module, columns: Sequence[str], parts: Sequence[int], ways: int, rank: int) -> Iterator[None]:
    modules: list[Any] = [model.get_submodule(path) for path in columns]
    try:
        for module in modules:
            module.forward = _with_part(module, parts, ways, rank)
        yield
    finally:
        for module in modules:
            module.__dict__.pop("forward", None)


def _with_part(module: Any, parts: Sequence[int], ways: int, rank: int) -> Callable[[Tensor], Tensor]:
    weight = module.weight if isinstance(module, nn.Linear) else module.weight.t()

    def part(value: Tensor) -> Tensor:
        split = value.split(list(parts or (value.shape[0],)))
        return torch.cat([each.chunk(ways)[rank] for each in split])

    bias = None if module.bias is None else part(module.bias)
    cut = part(weight)
    return lambda x: F.linear(x, cut, bias)
