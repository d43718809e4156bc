"""Where each rank can have a part of the sequence only (plan/segment.py), found by trying.

A chain is a run of repeated blocks of which each is given the very hidden states of the one before, and nobody else reads those. The
model runs once as it is, with its gradients. Then it runs as one rank would: a chain gets that rank's part of the hidden states, modules
that need the whole sequence are given what they were given before (of which exactly this rank's part must have reached them), rows give
this rank's part of what they gave. Every block's hidden states and their gradients must be this rank's part of what they were, and every
buffer what it was.

Gradients of parameters tell where they are used: they are the whole on each rank, or add up over the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from echelon.plan.placement import Placement, shares
from echelon.plan.profile import units
from echelon.plan.segment import Gather, Segment
from echelon.profiler.blocks import JOINING, Chain, chains, tensors_of
from echelon.profiler.coupling import first_line
from echelon.profiler.recorded import Record, WrongError, changed, draws, first, first_of, total_of
from echelon.profiler.rehearsal import alike, calling, deciding, equal, mode, rehearsing, same
from echelon.profiler.tree import module_tree

_OPENING = ("column", "attention")  #: cuts that need the whole of their input


@dataclass(frozen=True, slots=True)
class Segments:
    """What was found: the segments, how modules are cut for them, and why there are none where that is so."""

    segments: tuple[Segment, ...]
    placements: tuple[Placement, ...]
    why: str = ""


def find_segments(model: nn.Module, step: Callable[[], Any], ways: int, placements: Sequence[Placement]) -> Segments:
    """The segments of `model` (real numbers), cut by `placements` over `ways` ranks; `step()` computes its loss."""
    drawn, decides = draws(model, step, units(module_tree(model))), deciding(model, step)
    with rehearsing(model):
        return _found(model, alike(model, step), ways, placements, drawn, decides)


def _found(
    model: nn.Module,
    step: Callable[[], Any],
    ways: int,
    placements: Sequence[Placement],
    drawn: Mapping[str, list[int]],
    decides: Container[str],
) -> Segments:
    runs = list(chains(model, step, placements))
    why = "" if runs else "it has no repeated blocks that hand on hidden states of samples, positions and channels"
    found: list[Segment] = []
    for chain in runs:
        try:
            if any(unit in decides for unit in chain.units):
                raise WrongError("it looks at numbers, and for others it may compute what no part of a sequence can")
            segment, parted = _Rehearsal(model, step, ways, placements, chain, drawn).segment()
            with mode(model, training=False):
                again = _Rehearsal(model, step, ways, placements, chain, drawn) if _evaluates(step) else None
                if again is not None and again.segment() != (segment, parted):
                    raise WrongError(
                        "it works on a part of the sequence in training, and otherwise when it is evaluated"
                    )
            found.append(segment)
            placements = parted
        except WrongError as error:
            why = f"{chain.units[0]}: {error}"
    return Segments(tuple(found), tuple(placements), "" if found else why)


def _evaluates(step: Callable[[], Any]) -> bool:
    """Whether the model has a loss when it does not train."""
    try:
        loss, _ = step()
        return total_of(loss).requires_grad
    except Exception:
        return False


class _Rehearsal:
    def __init__(
        self,
        model: nn.Module,
        step: Callable[[], Any],
        ways: int,
        placements: Sequence[Placement],
        chain: Chain,
        drawn: Mapping[str, list[int]],
    ) -> None:
        self.model, self.step, self.ways, self.placements, self.chain = model, step, ways, placements, chain
        inside = [each for each in placements if any(each.path.startswith(unit + ".") for unit in chain.units)]
        self.rows = [each.path for each in inside if each.cut in JOINING]
        self.columns = [each.path for each in inside if each.cut in _OPENING]
        #: Modules without a part in a pair.
        self.others = [
            path
            for unit in chain.units
            for path, module in model.get_submodule(unit).named_modules(prefix=unit)
            if path != unit and not any(f"{each}.".startswith(f"{path}.") for each in (*self.rows, *self.columns))
        ]
        self.record = Record(model, step, chain, (*self.rows, *self.columns), self.others)
        self.parameters = self.record.parameters
        self.dim = 0 if self.record.mixes(0) and not self.record.mixes(1) else 1
        self.length = self.record.hidden(chain.units[0]).shape[self.dim]
        if self.length < 2 * ways:
            raise WrongError(f"samples of {self.length} positions are too short to try it with {ways} ranks")
        sizes = [size for unit in chain.units for size in drawn[unit]]
        if any(size % self.length for size in sizes):
            raise WrongError("it draws random numbers for samples as a whole, of which each part would draw its own")
        self.draws = bool(sizes)
        #: Row -> the modules that may be given the whole sequence for it: its columns, or one that holds them.
        self.choices = self._choices()
        self.level = dict.fromkeys(map(_kind, self.rows), 0)
        #: Kinds of modules that work on the whole sequence only.
        self.again: set[str] = set()

    def segment(self) -> tuple[Segment, Sequence[Placement]]:
        """The segment, and how modules are cut for it."""
        gathers = self._gathers()
        grads = [self._run(rank, slopes=True).grads for rank in range(self.ways)]
        placements = {each.path: each for each in self.placements}
        names = {f"{each.path}.{part.name}": each for each in self.placements for part in each.slices}
        partial: list[str] = []
        for name in self.parameters:
            holder = names.get(name)
            if holder is not None and holder.cut in ("column", "between", "row", "attention"):
                continue
            joins = {name.removesuffix(".bias"), name.removesuffix(".out_proj.bias")} & set(self.rows)
            if joins or self._partial(name, [each.get(name) for each in grads]):
                partial.append(name)
                if holder is not None:
                    placements[holder.path] = _at_rest(holder, self.record.unit(name))
        tidy = tuple(
            Gather(path=path, arguments=tuple(sorted(names)), again=_kind(path) in self.again)
            for path, names in gathers.items()
        )
        segment = Segment(
            units=self.chain.units,
            argument=self.chain.argument,
            dim=self.dim,
            gathers=tidy,
            draws=self.draws,
            partial=tuple(partial),
        )
        return segment, tuple(placements.values())

    def _partial(self, name: str, parts: Sequence[Tensor | None]) -> bool:
        true = self.record.grads.get(name)
        if true is None or all(part is None for part in parts):
            if true is None and all(part is None for part in parts):
                return False  # nothing learns there
            raise WrongError(f"the gradient of {name} is another one on a part of the sequence")
        held = [torch.zeros_like(true) if part is None else part for part in parts]
        most = max((float(grad.abs().max()) for grad in self.record.grads.values() if grad.numel()), default=0.0)
        if self._within(name) and equal(torch.stack(held).sum(0), true, most):
            return True
        if all(equal(part, true, most) for part in held):
            return False
        raise WrongError(f"the gradient of {name} does not add up from those on parts of the sequence")

    def _within(self, name: str) -> bool:
        return any(name.startswith(unit + ".") for unit in self.chain.units)

    def _choices(self) -> dict[str, list[list[str]]]:
        found: dict[str, list[list[str]]] = {}
        order = [path for path in self.record.args if path in {*self.rows, *self.columns}]  # as they were called
        columns: list[str] = []
        for path in order:
            columns += [path] if path in self.columns else []
            if path in self.rows:
                shared = set.intersection(*(set(self.record.around(each)) for each in columns or [path]))
                around = sorted((each for each in shared if each in self.record.args), key=len, reverse=True)
                found[path] = [columns, *([each] for each in around)]
                columns = []
        return found

    def _gathers(self) -> dict[str, set[str]]:
        """Modules that are given the whole sequence, with the arguments that are parts before that."""
        while True:
            try:
                gathers: dict[str, set[str]] = {}
                for rank in {0, self.ways - 1}:
                    for path, names in self._run(rank).gathers.items():
                        gathers.setdefault(path, set()).update(names)
                return gathers
            except WrongError as error:
                if error.module and _kind(error.module) not in self.again:
                    self.again.add(_kind(error.module))
                    continue
                kind = _kind(error.row)
                more = max((len(ways) for row, ways in self.choices.items() if _kind(row) == kind), default=0)
                if not error.row or self.level[kind] + 1 >= more:
                    raise
                self.level[kind] += 1

    def _run(self, rank: int, *, slopes: bool = False) -> _Rank:
        trial = _Rank(self, rank)
        with ExitStack() as stack, torch.set_grad_enabled(True):
            for module, forward in trial.forwards():
                stack.enter_context(calling(module, forward))
            try:
                loss, buffers = self.step()
                total = total_of(loss)
            except WrongError:
                raise
            except Exception as error:  # whatever the code says to a part of the sequence, it does not work on one
                where = f"{trial.open}: " if trial.open else ""
                raise WrongError(
                    f"{where}{type(error).__name__} on a part of the sequence: {first_line(error)}", row=trial.open
                ) from error
            if not equal(total.detach(), torch.tensor(self.record.total, dtype=total.dtype)):
                raise WrongError("the loss is another one")
            off = next((name for name, true in self.record.buffers.items() if not same(buffers.get(name), true)), None)
            if off is not None:
                holder = off.rpartition(".")[0]
                raise WrongError(f"{off} is another one", module=holder if holder in self.others else "")
            if slopes:
                found = torch.autograd.grad(total, list(self.parameters.values()), allow_unused=True)
                trial.grads = {n: g for n, g in zip(self.parameters, found, strict=True) if g is not None}
                if trial.off:
                    raise WrongError(
                        f"the gradient of what goes into {trial.off[0] or self.chain.units[0]} is another one"
                    )
        return trial


class _Rank:
    """The model as one rank would run it."""

    def __init__(self, rehearsal: _Rehearsal, rank: int) -> None:
        self.rehearsal, self.rank = rehearsal, rank
        sizes = shares(rehearsal.length, rehearsal.ways)
        self.start, self.size = sum(sizes[:rank]), sizes[rank]
        self.open = ""  #: the row that is on its way
        self.gathers: dict[str, set[str]] = {}
        self.grads: dict[str, Tensor] = {}
        self.off: list[str] = []  #: rows whose gradients were other ones

    def forwards(self) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
        """Modules and what they compute meanwhile, each once."""
        rehearsal, model = self.rehearsal, self.rehearsal.model
        needs = {
            path: row
            for row, ways in rehearsal.choices.items()
            for path in ways[min(rehearsal.level[_kind(row)], len(ways) - 1)]
        }
        others = [path for path in rehearsal.others if path in rehearsal.record.outs]
        for path in dict.fromkeys((*needs, *rehearsal.rows, *others, *rehearsal.chain.units)):
            module = model.get_submodule(path)
            forward: Callable[..., Any] = module.forward
            if path in others and path not in needs:
                forward = self._other(path, forward)
            if path in rehearsal.rows:
                forward = self._row(path, forward)
            if path in needs:
                forward = self._whole(path, needs[path], forward)
            if path in rehearsal.chain.units:
                forward = self._block(path, forward)
            yield module, forward

    def part(self, x: Tensor) -> Tensor:
        """This rank's part of `x`; empty where it is no sequence."""
        long = x.dim() == 3 and x.shape[self.rehearsal.dim] == self.rehearsal.length
        return x.narrow(self.rehearsal.dim, self.start, self.size) if long else x.new_empty(0)

    def _parted(self, x: Tensor, path: str) -> Tensor:
        return _Parted.apply(x, self, path)

    def _whole(self, path: str, row: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        recorded = self.rehearsal.record.args[path]

        def change(name: str, x: Any) -> Any:
            true = recorded.get(name)
            if not isinstance(x, Tensor) or true is None or equal(x, true):
                return x
            if equal(x, self.part(true)):
                self.gathers.setdefault(path, set()).add(name)
                return _Traded.apply(x, true, self)
            raise WrongError(f"what reaches {path} is no part of what reached it on the whole sequence", row=self.open)

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.open = row
            args = tuple(change(str(place), each) for place, each in enumerate(args))
            return inner(*args, **{name: change(name, each) for name, each in kwargs.items()})

        return forward

    def _other(self, path: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        """A module that works position by position gives its part of what it gave; one that does not needs the whole."""
        given, gave = self.rehearsal.record.args[path], self.rehearsal.record.outs[path]
        again = _kind(path) in self.rehearsal.again
        whole = self._whole(path, "", inner)

        def forward(*args: Any, **kwargs: Any) -> Any:
            mine = dict(tensors_of(args, kwargs))
            parts = [name for name, x in mine.items() if name in given and equal(x, self.part(given[name]))]
            rest = [name for name in mine.keys() - set(parts) if name in given]
            if not parts or mine.keys() != given.keys() or not all(equal(mine[name], given[name]) for name in rest):
                return inner(*args, **kwargs)
            if again:
                return first(whole(*args, **kwargs), lambda x: self._parted(x, path))
            try:
                out = inner(*args, **kwargs)
            except WrongError:
                raise
            except Exception as error:
                raise WrongError(f"{path}: {type(error).__name__}: {first_line(error)}", module=path) from error
            if not isinstance(first_of(out), Tensor) or not equal(first_of(out), self.part(gave)):
                raise WrongError(f"what {path} gives is no part of what it gave on the whole sequence", module=path)
            return out

        return forward

    def _row(self, path: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        true = self.rehearsal.record.args[path]

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = dict(tensors_of(args, kwargs))
            if given.keys() != true.keys() or not all(equal(given[name], true[name]) for name in true):
                raise WrongError(
                    f"what reaches {path} is another value where a part of the sequence comes in", row=path
                )
            out = inner(*args, **kwargs)
            self.open = ""
            if not self.part(first_of(out)).numel():
                raise WrongError(f"what {path} gives is no hidden states")
            return first(out, lambda x: self._parted(x, path))

        return forward

    def _block(self, path: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        chain, true = self.rehearsal.chain, self.rehearsal.record.outs[path]

        def leave(x: Tensor) -> Tensor:
            if not equal(x, self.part(true)):
                raise WrongError(f"what {path} gives is no part of what it gave on the whole sequence")
            return _Traded.apply(x, true, self) if path == chain.units[-1] else x

        def forward(*args: Any, **kwargs: Any) -> Any:
            if path == chain.units[0]:
                args, kwargs = changed(args, kwargs, chain.argument, lambda x: self._parted(x, ""))
            return first(inner(*args, **kwargs), leave)

        return forward


class _Parted(torch.autograd.Function):
    """One rank's part; backward the gradient that the whole had, of which the part's must be a part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: _Rank, path: str) -> Tensor:
        ctx.rank, ctx.path, ctx.shape = rank, path, x.shape
        return rank.part(x).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        slope = ctx.rank.rehearsal.record.slopes.get(ctx.path)
        if slope is None:
            return grads[0].new_zeros(ctx.shape), None, None
        if not equal(grads[0], ctx.rank.part(slope), float(slope.abs().max())):
            ctx.rank.off.append(ctx.path)
        return slope, None, None


class _Traded(torch.autograd.Function):
    """The whole in place of a part; backward the part of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Tensor, rank: _Rank) -> Tensor:
        ctx.rank = rank
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.rank.part(grads[0]).clone(), None, None


# Small things


def _kind(path: str) -> str:
    """Modules in the same place of their blocks are of one kind."""
    return re.sub(r"\d+", "*", path)


def _at_rest(placement: Placement, unit: str) -> Placement:
    """Ranks that have different parts of a sequence cannot share the outputs of a layer: its weight is put together instead, for as long
    as the block runs. Not only while the layer does: which positions call it may be another matter on each rank."""
    return replace(placement, cut="stored", within=unit)
