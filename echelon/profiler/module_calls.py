"""Where a model can be cut: its units in the order forward calls them, and whose values each of them reads.

A unit is a module that runs on one stage as a whole: a repeated block, or a module without children. What a model's forward
computes between units (additions, reshapes, masks) is glue: cheap, and free to run on every stage. Values are followed through
the glue, so that a skip connection or a loss that collects from every block is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakTensorKeyDictionary

from echelon.plan.profile import units
from echelon.tree import tree_leaves
from echelon.trials.module_tree import module_tree

#: What takes derivatives.
DIFFERENTIATE = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)

#: What tells how large a tensor is.
_SIZES = (Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__)  # type: ignore[attr-defined]

#: One tensor that a unit returned: (number of the visit, place among the tensors of its output).
Value = tuple[int, int]


@dataclass(slots=True)
class Visit:
    """One call of a unit."""

    path: str
    reads: set[Value] = field(default_factory=set)
    weights: set[str] = field(
        default_factory=set
    )  #: parameters and buffers, by name, that the glue just before it computes with
    outputs: int = 0  #: tensors that it returned
    flops: float = 0.0  #: of its products
    changes: bool = False  #: a buffer of its module


def unit_paths(model: nn.Module) -> list[str]:
    """The modules that are never cut in two, in the order of the module tree; together they hold all but the glue's parameters."""
    blocks = set(units(module_tree(model)))
    return list(_units_below(model, "", blocks))


def _units_below(module: nn.Module, path: str, blocks: set[str]) -> Iterator[str]:
    children = list(module.named_children())
    inside = any(block.startswith(path + "." if path else "") for block in blocks)
    # One that has both parameters of its own and children may use its children's without calling them (MultiheadAttention).
    whole = not children or path in blocks or (path and next(module.parameters(recurse=False), None) is not None)
    if whole and not (inside and path not in blocks):
        called = type(module).forward is not nn.Module.forward  # a ParameterDict is not: what it holds is the glue's
        if called and (next(module.parameters(), None) is not None or next(module.buffers(), None) is not None):
            yield path
        return
    for name, child in children:
        yield from _units_below(child, f"{path}.{name}" if path else name, blocks)


Around = Callable[[str, Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]


@contextmanager
def intercepted(model: nn.Module, paths: list[str], around: Around) -> Iterator[None]:
    """Inside, each call of a unit goes through `around(path, forward, args, kwargs)`. Hooks on the units work as ever."""
    #: Modules, and the forward that somebody had put on each in place of its class's.
    wrapped: list[tuple[nn.Module, Any]] = []
    depth = 0

    def wrapper(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if depth:  # a unit that another unit calls is part of it
                return forward(*args, **kwargs)
            depth += 1
            try:
                return around(path, forward, args, kwargs)
            finally:
                depth -= 1

        return call

    try:
        for path in paths:
            module = model.get_submodule(path)
            wrapped.append((module, module.__dict__.get("forward")))
            module.forward = wrapper(path, module.forward)
        yield
    finally:
        for module, before in wrapped:
            if before is None:
                del module.__dict__["forward"]
            else:
                module.forward = before


class Follower(TorchFunctionMode):
    """Notes every visit of a unit and, through the glue, what it reads."""

    def __init__(self, compute: Around | None = None) -> None:
        """`compute(path, forward, args, kwargs)` calls a unit (default: as it is)."""
        super().__init__()
        self._compute = compute or (lambda path, forward, args, kwargs: forward(*args, **kwargs))
        self.visits: list[Visit] = []
        #: Parameters and `buffers` that the glue itself computes with, by identity, and how many visits were over each time.
        self.touched: dict[int, set[int]] = {}
        #: The model's, by identity.
        self.buffers: Set[int] = frozenset()
        #: Parameters whose sizes the glue reads, by identity.
        self.sized: set[int] = set()
        #: Whether the glue takes derivatives, through units that other stages hold.
        self.differentiates = False
        self._origin = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DIFFERENTIATE:
            self.differentiates = True
        out = func(*args, **kwargs)
        inputs, outputs = _tensors((args, kwargs)), _tensors(out)
        found = self.origin(inputs)
        # Reading .shape is no computation, but .T is the tensor itself.
        if func is not Tensor.__repr__ and (outputs or getattr(func, "__name__", "") != "__get__"):
            for tensor in inputs:
                if isinstance(tensor, nn.Parameter) or id(tensor) in self.buffers:
                    self.touched.setdefault(id(tensor), set()).add(len(self.visits))
        if func in _SIZES:
            self.sized.update(id(tensor) for tensor in inputs[:1] if isinstance(tensor, nn.Parameter))
        if found:
            # An operator that writes into its first argument (or `out=`) returns it, or nothing: __setitem__.
            written = [inputs[0]] if inputs and not outputs else []
            for tensor in (*outputs, *written):
                self._origin[tensor] = self.origin([tensor]) | found
        return out

    def around(self, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """For `intercepted`."""
        visit = Visit(path, set(self.origin(_tensors((args, kwargs)))))
        number = len(self.visits)
        self.visits.append(visit)
        self.__exit__(None, None, None)  # what happens inside a unit is its own business
        try:
            with FlopCounterMode(display=False) as counter:
                out = self._compute(path, forward, args, kwargs)
        finally:
            self.__enter__()
        visit.flops = float(counter.get_total_flops())
        leaves = _tensors(out)
        visit.outputs = len(leaves)
        for place, tensor in enumerate(leaves):
            self._origin[tensor] = frozenset({(number, place)})
        return out

    def origin(self, tensors: list[Tensor]) -> frozenset[Value]:
        """The units' values that `tensors` were computed from by glue alone."""
        return frozenset().union(*(self._origin.get(tensor, frozenset()) for tensor in tensors))


def follow(
    model: nn.Module, step: Callable[[], Any], compute: Around | None = None, *, looks: bool = False
) -> list[Visit]:
    """The visits of `step()`, which computes the loss with `model`; the last one, with an empty path, stands for the loss.

    Empty where the model cannot be cut: it is one unit, forward takes a derivative, the glue changes a buffer after the first unit,
    which stages that end before do not see, or reads one that a unit changes, which other stages do not see. `looks`: forward looks at
    numbers; then it must not change a buffer of its own at all, as the calls of a later step may follow from that. A unit whose
    parameters do not reach the loss at all is left out. One that is used without being called belongs to the module around it that is,
    or else to the glue.
    """
    paths = unit_paths(model)
    while "" not in paths:
        follower, watch = Follower(compute), _Buffers(model, paths)
        held = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        follower.buffers = {id(value) for value in model.buffers()}
        with intercepted(model, paths, watch.around(follower.around)), _calls(model) as running, follower:
            loss = step()
        if follower.differentiates or watch.changed or (looks and watch.moved):
            return []
        called = {visit.path for visit in follower.visits}
        known = {id(value) for path in called for value in model.get_submodule(path).parameters()}
        silent = _used([path for path in paths if path not in called], model, loss, known)
        if not silent:
            visits = [*follower.visits, Visit("", set(follower.origin(_tensors(loss))))]
            for visit in follower.visits:
                visit.changes = visit.path in watch.changing
            for name, value in held:
                for number in follower.touched.get(id(value), ()):
                    visits[number].weights.add(name)
            changing = {
                id(value) for path in watch.changing & called for value in model.get_submodule(path).buffers()
            } | watch.replaced
            return [] if changing & follower.touched.keys() else visits
        paths = _widened([path for path in paths if path in called or path in silent], silent, running)
    return []


class _Buffers:
    """Who changes buffers while a model is followed."""

    def __init__(self, model: nn.Module, paths: list[str]) -> None:
        self._model = model
        units = {id(value) for path in paths for value in model.get_submodule(path).buffers()}
        self._slots = [
            (slots, name)
            for slots in (module._buffers for module in model.modules())
            for name, value in slots.items()
            if value is not None and id(value) not in units
        ]
        self._start = self._marks()
        self._before: list[tuple[int, int]] | None = None
        #: Buffers, by identity, of units that changed theirs, as they were before.
        self.replaced: set[int] = set()
        #: Paths of units that change theirs.
        self.changing = {
            path
            for path in paths
            # Where numbers are invented the change is not seen.
            if any(
                isinstance(inner, _BatchNorm) and inner.track_running_stats
                for inner in model.get_submodule(path).modules()
            )
        }

    def around(self, inner: Around) -> Around:
        """`inner`, watched."""

        def call(path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            if self._before is None:  # what comes before the first unit every stage computes
                self._before = self._marks()
            unit = self._model.get_submodule(path)
            before = [_mark(value) for value in unit.buffers()]
            out = inner(path, forward, args, kwargs)
            if [_mark(value) for value in unit.buffers()] != before:
                self.changing.add(path)
                self.replaced |= {each for each, _ in before}
            return out

        return call

    @property
    def changed(self) -> bool:
        """Whether the glue changed one after the first unit."""
        return self._before is not None and self._marks() != self._before

    @property
    def moved(self) -> bool:
        """Whether it changed one at all."""
        return self._marks() != self._start

    def _marks(self) -> list[tuple[int, int]]:
        return [_mark(value) for slots, name in self._slots if (value := slots.get(name)) is not None]


def _mark(value: Tensor) -> tuple[int, int]:
    return id(value), value._version


@contextmanager
def _calls(model: nn.Module) -> Iterator[set[str]]:
    """The modules that are called inside, by path."""
    found: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda _, __, path=path: found.add(path))
        for path, module in model.named_modules()
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _used(paths: list[str], model: nn.Module, loss: Any, known: set[int]) -> list[str]:
    """Those units among `paths` whose parameters the loss depends on, but for those that units which are called hold too (`known`)."""
    (total, *_) = _tensors(loss)
    found = []
    for path in paths:
        held = model.get_submodule(path).parameters()
        parameters = [value for value in held if value.requires_grad and id(value) not in known]
        if not parameters or not total.requires_grad:
            continue
        grads = torch.autograd.grad(total, parameters, allow_unused=True, retain_graph=True)
        if any(grad is not None for grad in grads):
            found.append(path)
    return found


def _widened(paths: list[str], silent: list[str], running: set[str]) -> list[str]:
    """Replace units that are never called by the modules around them that are, which then swallow the units below them."""
    parents = {_around(path, running) for path in silent} - {""}  # the model itself: then it is the glue's
    kept = [path for path in paths if path not in silent and not any(path.startswith(p + ".") for p in parents)]
    outermost = [p for p in parents if not any(p != q and p.startswith(q + ".") for q in parents)]
    return [*kept, *outermost]


def _around(path: str, running: set[str]) -> str:
    while path:
        path = path.rpartition(".")[0]
        if path in running:
            break
    return path


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def crossing(visits: list[Visit], start: int) -> list[Value]:
    """The values that visits from `start` on read of those before it, in a fixed order."""
    return sorted({value for visit in visits[start:] for value in visit.reads if value[0] < start})
