"""Blocks that are alike: few of them are traced, and the trace is stretched to as many as there are.

Nothing is guessed. Blocks count as alike where their classes, attributes, parameters and buffers are, where forward calls each of them
once, one after another, with arguments of the same shapes and values, and does the same between any two of them (`alike_in_forward` looks
at all of them, with the insides of all but the first left out). Where the traced ones turn out not to grow evenly all are traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from echelon.plan.profile import Visit, units
from echelon.profiler.module_calls import intercepted
from echelon.trials.module_tree import module_tree
from echelon.trials.op_recorder import Call, Figures, Trace

#: Blocks that are traced: the first and the last, and two between them that tell what each further one adds.
TRACED = 4
#: From so many blocks on it is worth it.
_WORTH = 8
#: Parts of a module's state that say nothing of what it computes, or that are looked at by themselves.
_ASIDE = {"_parameters", "_buffers", "_modules", "training"}
#: How far two sums of bytes may lie apart, in parts of the larger, and be the same.
_SAME = 1e-9


class _UnevenError(Exception):
    """The traced blocks do not tell of the others."""


@dataclass(frozen=True, slots=True)
class Run:
    """`count` blocks alike, the children of the list at `path`."""

    path: str
    count: int

    @property
    def more(self) -> int:
        """Blocks that are not traced."""
        return self.count - TRACED

    def block(self, number: int) -> str:
        """The path of a block."""
        return f"{self.path}.{number}" if self.path else str(number)


def find(model: nn.Module) -> Run | None:
    """The longest list of blocks alike, if it is long enough."""
    paths = units(module_tree(model))
    best: Run | None = None
    for parent in dict.fromkeys(path.rpartition(".")[0] for path in paths):
        holder = model.get_submodule(parent)
        names = list(holder._modules)
        inner = [f"{parent}.{name}" if parent else name for name in names]
        if not isinstance(holder, nn.ModuleList | nn.Sequential) or len(names) < _WORTH or not set(inner) <= set(paths):
            continue
        marks = [_mark(child) for child in holder.children()]
        if len(marks) == len(names) and all(mark is not None and _alike(mark, marks[0]) for mark in marks):
            best = max((best, Run(parent, len(names))), key=lambda run: run.count if run else 0)
    return best


def _mark(module: nn.Module) -> Any:
    """What decides what a module computes; None: not told."""
    state = {name: value for name, value in vars(module).items() if name not in _ASIDE}
    hooks = [name for name, value in state.items() if "hook" in name and isinstance(value, dict) and value]
    if hooks:
        return None
    plain = {name: _plain(value) for name, value in state.items()}
    inner = {name: _mark(child) for name, child in module.named_children()}
    if None in inner.values():
        return None
    held = [
        [(name, _plain(value), getattr(value, "requires_grad", None)) for name, value in slots.items()]
        for slots in (module._parameters, module._buffers)
    ]
    return type(module), plain, held, inner


def _plain(value: Any) -> Any:
    """A tensor by its shape; anything else by itself, so that objects of their own are never alike."""
    return (tuple(value.shape), value.dtype, value.stride()) if isinstance(value, Tensor) else value


@contextmanager
def shortened(model: nn.Module, run: Run) -> Iterator[None]:
    """Inside, the list holds the first few blocks only."""
    holder = model.get_submodule(run.path)
    before = dict(holder._modules)
    try:
        for name in list(before)[TRACED:]:
            del holder._modules[name]
        yield
    finally:
        holder._modules.clear()
        holder._modules.update(before)


def alike_in_forward(model: nn.Module, run: Run, step: Callable[[], Any]) -> bool:
    """Whether `step()`, which computes the loss, treats all blocks alike, and what comes before and after them as with few blocks."""
    whole = _glue(model, run, run.count, step)
    with shortened(model, run):
        few = _glue(model, run, TRACED, step)
    if whole is None or few is None or not all(_alike(whole[at], few[at]) for at in (0, 1, -1)):
        return False
    between = whole[1:-1]
    return all(_alike(each, between[0]) for each in between) and all(_alike(each, between[0]) for each in few[1:-1])


def _alike(one: Any, other: Any) -> bool:
    """Whether two notes are the same; what cannot be compared is not."""
    try:
        return bool(one == other)
    except Exception:  # a value with an equality of its own
        return False


def _glue(model: nn.Module, run: Run, count: int, step: Callable[[], Any]) -> list[Any] | None:
    """What is computed before the first block, between any two, and after the last, with what each block is given; None where blocks are
    not called once each in their order."""
    notes, called, given = _Notes(), list[int](), list[Any]()
    paths = [run.block(number) for number in range(count)]

    def around(path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        number = paths.index(path)
        notes.cut(tree_map(_shape, (args, dict(kwargs))))
        called.append(number)
        if not given:
            notes.silent = True
            given.append(forward(*args, **kwargs))
            notes.silent = False
        return tree_map(_fresh, given[0])

    with intercepted(model, paths, around), notes:
        step()
    notes.cut(None)
    return notes.parts if called == list(range(count)) else None


class _Notes(TorchDispatchMode):
    """Operators with the shapes that they read, cut into parts."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[Any] = []
        self.silent = False
        self._now: list[Any] = []

    def cut(self, given: Any) -> None:
        self.parts.append((self._now, given))
        self._now = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.silent:
            self._now.append((str(func), tree_map(_shape, (args, kwargs or {}))))
        return func(*args, **(kwargs or {}))


def _shape(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype, leaf.stride(), leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _fresh(leaf: Any) -> Any:
    """A tensor of the same form that nothing is known of."""
    if not isinstance(leaf, Tensor):
        return leaf
    made = leaf.detach().clone()
    return made.requires_grad_(leaf.requires_grad) if leaf.is_floating_point() else made


def stretch(trace: Trace, run: Run) -> Trace:
    """The trace of a model with few blocks as that of all; raises where its blocks do not grow evenly."""
    forward, backward = (_ranges(trace.calls, run, phase) for phase in ("forward", "backward"))
    ahead = _growth(trace.calls, run, forward[1], forward[2], (1, 2))
    back = _growth(trace.calls, run, backward[2], backward[1], (2, 1))
    made: list[Call] = []
    shift = _ZERO
    for place, call in enumerate(trace.calls):
        made.append(_moved(call, shift, run, run.more))
        for (begin, end), growth, sign in ((forward[2], ahead, 1), (backward[2], back, -1)):
            if place != end - 1:
                continue
            first = run.more if sign < 0 else 0
            for number in range(1, run.more + 1):
                step = _add(shift, growth, number)
                made += [_moved(each, step, run, first + sign * number, own=True) for each in trace.calls[begin:end]]
            shift = _add(shift, growth, run.more)
    return replace(trace, calls=made, modules=_figures(trace, run, forward[2], ahead))


#: What grows: bytes alive, bytes kept, bytes of gradients, blocks of memory.
_State = tuple[float, float, float, float]
_ZERO: _State = (0.0, 0.0, 0.0, 0.0)


def _state(call: Call) -> _State:
    return call.alive, call.kept, call.gradients, call.blocks


def _add(state: _State, growth: _State, times: int) -> _State:
    a, b, c, d = (x + times * y for x, y in zip(state, growth, strict=True))
    return a, b, c, d


def _number(path: str, run: Run) -> int | None:
    """Which block of the run a module lies in."""
    inner = path[len(run.path) + 1 :] if run.path else path
    if run.path and not path.startswith(run.path + "."):
        return None
    head = inner.partition(".")[0]
    return int(head) if head.isdigit() else None


def _renamed(path: str, run: Run, number: int) -> str:
    inner = path[len(run.path) + 1 :] if run.path else path
    _, dot, rest = inner.partition(".")
    return run.block(number) + dot + rest


def _ranges(calls: list[Call], run: Run, phase: str) -> list[tuple[int, int]]:
    """For each traced block, from its first call to the first of the next one that comes."""
    begins: dict[int, int] = {}
    last = max((place for place, call in enumerate(calls) if call.phase == phase), default=-1) + 1
    for place, call in enumerate(calls):
        number = _number(call.path, run) if call.phase == phase else None
        if number is not None:
            begins.setdefault(number, place)
    order = list(range(TRACED)) if phase == "forward" else list(reversed(range(TRACED)))
    if list(begins) != order:
        raise _UnevenError
    ends = [*[begins[number] for number in order[1:]], last]
    found = dict(zip(order, zip((begins[number] for number in order), ends, strict=True), strict=True))
    return [found[number] for number in range(TRACED)]


def _growth(
    calls: list[Call], run: Run, one: tuple[int, int], next_: tuple[int, int], numbers: tuple[int, int]
) -> _State:
    """What one block more adds; the calls of two blocks must be the same but for that."""
    before, after = calls[slice(*one)], calls[slice(*next_)]
    if len(before) != len(after):
        raise _UnevenError
    growths = []
    for a, b in zip(before, after, strict=True):
        if _aside(a, run, numbers[0]) != _aside(b, run, numbers[1]):
            raise _UnevenError
        growths.append(tuple(y - x for x, y in zip(_state(a), _state(b), strict=True)))
    first = growths[0]
    large = max(max(abs(x) for x in _state(call)) for call in after)
    if any(abs(x - y) > _SAME * large for growth in growths for x, y in zip(growth, first, strict=True)):
        raise _UnevenError
    return first[0], first[1], first[2], first[3]


def _aside(call: Call, run: Run, number: int) -> Call:
    """A call without what grows, and without the number of its block."""
    path = _renamed(call.path, run, 0) if _number(call.path, run) == number else call.path
    return replace(call, path=path, alive=0.0, kept=0.0, gradients=0.0, blocks=0)


def _moved(call: Call, shift: _State, run: Run, by: int, *, own: bool = False) -> Call:
    """A call where more blocks are under way. `own`: of a block that is put in; else the last traced block becomes the last of all, and
    in backward the one before it too."""
    number = _number(call.path, run)
    path = call.path
    late = TRACED - 1 if call.phase == "forward" else TRACED - 2
    if number is not None and (own or number >= late):
        path = _renamed(call.path, run, number + by)
    alive, kept, gradients, blocks = (x + y for x, y in zip(_state(call), shift, strict=True))
    return replace(call, path=path, alive=alive, kept=kept, gradients=gradients, blocks=int(blocks))


def _figures(trace: Trace, run: Run, forward: tuple[int, int], growth: _State) -> dict[str, Figures]:
    """Figures of modules: each further block has those of a middle one, and what is around them that much more."""
    calls = trace.calls[slice(*forward)]
    flops, moved = sum(call.flops for call in calls), sum(call.moved for call in calls)
    found: dict[str, Figures] = {}
    for path, figures in trace.modules.items():
        number = _number(path, run)
        if number is None:
            around = not path or run.path == path or run.path.startswith(path + ".")
            found[path] = (
                replace(
                    figures,
                    flops=figures.flops + run.more * flops,
                    moved=figures.moved + run.more * moved,
                    kept=figures.kept + run.more * growth[1],
                )
                if around
                else figures
            )
            continue
        found[_renamed(path, run, number + (run.more if number == TRACED - 1 else 0))] = figures
        if number == TRACED - 2:
            found |= {_renamed(path, run, number + more): figures for more in range(1, run.more + 1)}
    return found


def stretched(traces: list[Trace], run: Run) -> list[Trace] | None:
    """The traces of all blocks; None where those that were traced do not tell of the others."""
    try:
        return [stretch(trace, run) for trace in traces]
    except _UnevenError:
        return None


def stretch_visits(visits: tuple[Visit, ...], run: Run) -> tuple[Visit, ...] | None:
    """Visits of all blocks by those of few; None where blocks differ."""
    places = [place for place, visit in enumerate(visits) if _number(visit.path, run) is not None]
    blocks = [visits[place] for place in places]
    if [visit.path for visit in blocks] != [run.block(n) for n in range(TRACED)] or places != list(
        range(places[0], places[0] + TRACED)
    ):
        return None
    if replace(blocks[2], path=blocks[1].path) != blocks[1]:
        return None
    more = tuple(replace(blocks[2], path=run.block(n)) for n in range(2, run.count - 1))
    last = replace(blocks[3], path=run.block(run.count - 1))
    return (*visits[: places[2]], *more, last, *visits[places[3] + 1 :])
