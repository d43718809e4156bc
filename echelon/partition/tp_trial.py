"""Whether layers can be cut in pairs: the module that holds a pair is run on one rank's columns.

Whether the code between them works on a part of the columns is not guessed from operators. What reaches the row must be exactly that
rank's part of what reached it before, in training and in evaluation, and buffers must be left as they were before, at several values of the
parameters (values.py), and so must the gradients that come back. Layouts (layouts.py)
are tried until one works; views by a width that the code took from elsewhere are fitted (nn/views.py), and the plan notes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from echelon.nn.views import Fitted
from echelon.partition.tp_layers import by_name, is_linear, outputs, product, weight_of
from echelon.partition.tp_layouts import Candidate, Layout, layouts
from echelon.plan.placement import portion, shares
from echelon.tree import tree_leaves, tree_map
from echelon.trials.trial_run import calling, copied, equal, mode, on_copies, same


@dataclass(frozen=True, slots=True)
class Pair:
    """A candidate that works."""

    candidate: Candidate
    layout: Layout
    #: Parameters that stay whole and act on the columns (a learnt scale, a norm of each head): each rank has a share of their gradients.
    partial: tuple[str, ...]
    draws: bool  #: whether the module that holds it draws random numbers in training


@dataclass(slots=True)
class Seen:
    """The call of the module that holds a pair, what came out of it, and what the row in it was given and gave."""

    training: bool
    holder: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    reached: Tensor
    gave: Tensor
    dim: int  #: of `reached` that is cut
    #: The model's buffers when the call began, and when it ended.
    before: dict[str, Tensor]
    after: dict[str, Tensor]

    @property
    def width(self) -> int:
        """Of what the row was given."""
        return self.reached.shape[self.dim]


def watched(model: nn.Module, candidates: Iterable[Candidate], step: Callable[[], Any]) -> dict[Candidate, Seen]:
    """What the candidates do in the model as it is."""
    above = {each: list(_above(each.paths)) for each in candidates}
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    outs: dict[str, Any] = {}
    rows: dict[str, tuple[Tensor, Tensor]] = {}
    began: dict[str, dict[str, Tensor]] = {}
    ended: dict[str, dict[str, Tensor]] = {}
    last: dict[str, Tensor] = {}
    hooks = []

    def buffers() -> dict[str, Tensor]:
        """Copies of those now; one that has not changed is not copied again."""
        nonlocal last
        last = {
            name: last[name] if name in last and torch.equal(last[name], value) else value.detach().clone()
            for name, value in model.named_buffers()
        }
        return last

    for path in {path for paths in above.values() for path in paths}:

        def before(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            calls[path], began[path] = copied((args, kwargs)), buffers()

        def after(_: nn.Module, __: Any, out: Any, path: str = path) -> None:
            outs[path], ended[path] = copied(out), buffers()

        hooks.append(model.get_submodule(path).register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(model.get_submodule(path).register_forward_hook(after))
    for row in {each.row for each in above}:

        def note(_: nn.Module, args: Any, kwargs: Any, out: Any, row: str = row) -> None:
            given = [*args, *kwargs.values()][0]
            rows[row] = given.detach().clone(), out.detach().clone()

        hooks.append(model.get_submodule(row).register_forward_hook(note, with_kwargs=True))
    try:
        step()
    finally:
        for hook in hooks:
            hook.remove()
    found = {}
    for candidate, paths in above.items():
        holder = next((path for path in paths if path in calls), None)
        if holder is not None and candidate.row in rows:
            module: Any = model.get_submodule(candidate.row)
            dim = _channel_dim(module)
            found[candidate] = Seen(
                model.training,
                holder,
                *calls[holder],
                outs[holder],
                *rows[candidate.row],
                dim,
                began[holder],
                ended[holder],
            )
    return found


def plain(tree: Any) -> Any:
    """The same without gradients: code may change it in place."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, copied(tree))


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


def find_layout(
    model: nn.Module, step: Callable[[], Any], candidate: Candidate, seen: Sequence[Seen], ways: int
) -> tuple[Layout, tuple[str, ...]] | None:
    """The first layout that works in every run that was `seen`, the first of which was in training, and what is partial then."""
    for layout in layouts(model, candidate, seen[0].holder, seen[0].width, ways):
        if all(_works(model, candidate, each, layout) for each in seen):
            partial = _partial(model, step, candidate, seen[0])
            return None if partial is None else (layout, partial)
    return None


def _works(model: nn.Module, candidate: Candidate, seen: Seen, layout: Layout) -> bool:
    """Whether each rank's columns lead to exactly its part of the row's input."""
    sizes = layout.parts or tuple(outputs(model.get_submodule(path)) for path in candidate.columns)
    ways = layout.ways
    if any(not shares(size, ways, layout.unit)[-1] for size in (*sizes, seen.width)):
        return False
    if torch.equal(seen.reached, seen.reached.roll(1, seen.dim)):
        return False  # columns that are all alike tell nothing
    if not _adds_up(model.get_submodule(candidate.row), seen, layout):
        return False
    if all(size % (ways * layout.unit) == 0 for size in (*sizes, seen.width)):
        return all(_right(model, candidate, seen, layout, rank) for rank in {0, ways - 1})
    even = seen.width == sizes[0] and len(set(sizes)) == 1
    return even and all(_right(model, candidate, seen, layout, rank) for rank in range(ways))


def holds(
    model: nn.Module, candidate: Candidate, seen: Seen, layout: Layout, rank: int, *, slopes: bool = False
) -> bool:
    """Whether a layout that works at other parameter values (values.py) works at these, for gradients too where `slopes` says so."""
    if not all(bool(torch.isfinite(each).all()) for each in (seen.reached, seen.gave)):
        return True  # values that the model cannot compute with say nothing
    if not _right(model, candidate, seen, layout, rank):
        return False
    return not slopes or _slopes_part(model, candidate, seen, layout, rank)


def _slopes_part(model: nn.Module, candidate: Candidate, seen: Seen, layout: Layout, rank: int) -> bool:
    """Whether the gradients that reach a rank's columns are its part of those that reach all columns. Code may give the same values and
    other gradients: `x + y - y.detach()`."""
    numbers = torch.Generator().manual_seed(2)
    slope = torch.randn(seen.reached.shape, generator=numbers, dtype=seen.reached.dtype).to(seen.reached.device)
    dealt = shares(seen.width, layout.ways, layout.unit)
    mine = slope.narrow(seen.dim, sum(dealt[:rank]), dealt[rank])
    whole = _slopes(model, candidate, seen, nullcontext(), slope)
    parts = _slopes(model, candidate, seen, as_rank(model, candidate, seen, layout, rank), mine)
    if whole is None or parts is None:
        return whole is parts
    for path, true, found in zip(candidate.columns, whole, parts, strict=True):
        dim = _channel_dim(model.get_submodule(path))
        wanted = _part(true.movedim(dim, 0), layout.parts, layout, rank).movedim(0, dim)
        if not equal(found, wanted, float(true.abs().max())):
            return False
    return True


def _slopes(
    model: nn.Module, candidate: Candidate, seen: Seen, computing: AbstractContextManager[None], slope: Tensor
) -> list[Tensor] | None:
    """The gradients of the columns' outputs where the row's input has the gradient `slope`; None: no gradient gets there."""
    given: list[Tensor] = []
    reached: list[Tensor] = []

    def leaf(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            given.append(inner(*args, **kwargs).detach().requires_grad_(True))
            return given[-1].clone()

        return forward

    def answer(x: Tensor) -> Tensor:
        reached.append(x)
        return seen.gave.clone()

    args, kwargs = plain((seen.args, seen.kwargs))
    holder, row = model.get_submodule(seen.holder), model.get_submodule(candidate.row)
    with mode(holder, training=True), on_copies(model, seen.before), computing, ExitStack() as stack:
        for path in candidate.columns:
            column = model.get_submodule(path)
            stack.enter_context(calling(column, leaf(column.forward)))
        stack.enter_context(calling(row, by_name(row, answer)))
        with torch.enable_grad():
            holder(*args, **kwargs)
    if not reached[0].requires_grad:
        return None
    slopes = torch.autograd.grad(reached[0], given, slope, allow_unused=True)
    return [torch.zeros_like(x) if found is None else found for x, found in zip(given, slopes, strict=True)]


def _channel_dim(module: Any) -> int:
    return -1 if is_linear(module) else -1 - len(module.kernel_size)


def _adds_up(row: Any, seen: Seen, layout: Layout) -> bool:
    """Whether what the ranks' inputs of the row give, each with its part of the weight, adds up to what it gave."""
    dealt = shares(seen.width, layout.ways, layout.unit)
    multiply = product(row)
    with torch.no_grad():
        parts = zip(seen.reached.split(dealt, seen.dim), weight_of(row).split(dealt, 1), strict=True)
        total = torch.stack([multiply(x, part, None) for x, part in parts]).sum(0)
        if row.bias is not None:
            total = total + row.bias.view(-1, *(1,) * (-1 - seen.dim))
    return equal(total, seen.gave)


def _partial(model: nn.Module, step: Callable[[], Any], candidate: Candidate, seen: Seen) -> tuple[str, ...] | None:
    """Parameters that reach the row beside the columns; None where something does that cannot be added up over the ranks."""
    leaves: list[Tensor] = []
    reached: list[Tensor] = []

    def given(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        leaves.append(leaf.detach().requires_grad_(True))
        return leaves[-1].clone()

    def answer(x: Tensor) -> Tensor:
        reached.append(x)
        return seen.gave.clone()

    args, kwargs = tree_map(given, copied((seen.args, seen.kwargs)))
    own = {name: value for name, value in model.named_parameters() if value.requires_grad}
    with on_copies(model, seen.before), ExitStack() as stack, torch.enable_grad():
        for path in (*candidate.columns, *candidate.between):
            module = model.get_submodule(path)
            stack.enter_context(calling(module, _detached(module.forward)))
        row = model.get_submodule(candidate.row)
        stack.enter_context(calling(row, by_name(row, answer)))
        model.get_submodule(seen.holder)(*args, **kwargs)
        if not reached[0].requires_grad:
            return ()
        grads = torch.autograd.grad(reached[0].sum(), [*leaves, *own.values()], allow_unused=True)
    names = [name for name, grad in zip(own, grads[len(leaves) :], strict=True) if grad is not None]
    if any(grad is not None for grad in grads[: len(leaves)]) or any(own[name].dim() > 1 for name in names):
        return None
    return tuple(names) if _only_there(model, step, candidate.row, [own[name] for name in names]) else None


def _detached(inner: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: inner(*args, **kwargs).detach()


def _only_there(model: nn.Module, step: Callable[[], Any], row: str, parameters: list[nn.Parameter]) -> bool:
    """Whether the loss depends on parameters through a row alone."""
    module = model.get_submodule(row)
    inner = module.forward
    with calling(module, by_name(module, lambda x: inner(x.detach()))), torch.enable_grad():
        loss, _ = step()
        (total, *_) = (leaf for leaf in tree_leaves(loss) if isinstance(leaf, Tensor))
        grads = torch.autograd.grad(total.sum(), parameters, allow_unused=True) if total.requires_grad else ()
    return all(grad is None for grad in grads)


def _right(model: nn.Module, candidate: Candidate, seen: Seen, layout: Layout, rank: int) -> bool:
    dealt = shares(seen.width, layout.ways, layout.unit)
    wanted = seen.reached.narrow(seen.dim, sum(dealt[:rank]), dealt[rank])
    holder = model.get_submodule(seen.holder)
    args, kwargs = plain((seen.args, seen.kwargs))

    reached: list[Tensor] = []

    def answer(x: Tensor) -> Tensor:
        reached.append(x)
        return seen.gave.clone()

    row = model.get_submodule(candidate.row)
    with (
        mode(holder, training=seen.training),
        on_copies(model, seen.before),
        as_rank(model, candidate, seen, layout, rank),
        calling(row, by_name(row, answer)),
    ):
        try:
            out = holder(*args, **kwargs)
        except Exception:  # whatever the code says to a part of its columns, it does not work on one
            return False
        buffers = dict(model.named_buffers())
    # What else comes out (a bias per head that later layers take over, a buffer) must be as it was, too.
    cut = {f"{path}.{name}" for path in candidate.between for name in model.get_submodule(path)._buffers}
    after = {
        name: _part(value, (), layout, rank) if name in cut and value.dim() else value
        for name, value in seen.after.items()
    }
    return len(reached) == 1 and equal(reached[0], wanted) and same((out, buffers), (seen.out, after))


@contextmanager
def as_rank(model: nn.Module, candidate: Candidate, seen: Seen, layout: Layout, rank: int) -> Iterator[None]:
    """Inside, what lies before the row computes as one rank would."""
    mine = shares(seen.width, layout.ways, layout.unit)[rank]
    with (
        _divided(model, layout, seen.width, rank),
        _cut(model, candidate, layout, rank),
        nullcontext() if layout.fits is None else Fitted(seen.width, mine),
    ):
        yield


@contextmanager
def _divided(model: nn.Module, layout: Layout, width: int, rank: int) -> Iterator[None]:
    places = [(model.get_submodule(path), name) for path, name in layout.divide]
    values = [getattr(module, name) for module, name in places]
    try:
        for (module, name), value in zip(places, values, strict=True):
            setattr(module, name, portion(value, rank, layout.ways, width=width, unit=layout.unit))
        yield
    finally:
        for (module, name), value in zip(places, values, strict=True):
            setattr(module, name, value)


@contextmanager
def _cut(model: nn.Module, candidate: Candidate, layout: Layout, rank: int) -> Iterator[None]:
    """The columns and the modules between compute with one rank's part."""
    slots: list[dict[str, Any]] = [
        each
        for path in candidate.between
        for each in (model.get_submodule(path)._parameters, model.get_submodule(path)._buffers)
    ]
    before: list[Mapping[str, Any]] = [dict(each) for each in slots]
    with ExitStack() as stack:
        for path in candidate.columns:
            module = model.get_submodule(path)
            stack.enter_context(calling(module, _with_part(module, layout, rank)))
        try:
            for slot in slots:
                for name, value in slot.items():
                    if value is not None and value.dim():
                        slot[name] = _part(value.detach(), (), layout, rank)
            yield
        finally:
            for slot, values in zip(slots, before, strict=True):
                slot.update(values)


def _part(value: Tensor, parts: Sequence[int], layout: Layout, rank: int) -> Tensor:
    found = []
    for each in value.split(list(parts or (value.shape[0],))):
        dealt = shares(each.shape[0], layout.ways, layout.unit)
        found.append(each.narrow(0, sum(dealt[:rank]), dealt[rank]))
    return torch.cat(found)


def _with_part(module: Any, layout: Layout, rank: int) -> Callable[..., Tensor]:
    weight = _part(weight_of(module), layout.parts, layout, rank)
    bias = None if module.bias is None else _part(module.bias, layout.parts, layout, rank)
    multiply = product(module)
    return by_name(module, lambda x: multiply(x, weight, bias))
