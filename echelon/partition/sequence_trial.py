"""A model on one rank's part of the sequence, held against what it gave on the whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from echelon.partition.block_chains import tensors_of
from echelon.partition.reference_pass import WrongError, changed, first, first_of
from echelon.plan.placement import shares
from echelon.profiler.sample_coupling import first_line
from echelon.trials.trial_run import equal

if TYPE_CHECKING:
    from echelon.partition.find_sequence_parallel import _Rehearsal


def kind_of(path: str) -> str:
    """Modules in the same place of their blocks are of one kind."""
    return re.sub(r"\d+", "*", path)


class RankTrial:
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
            for path in ways[min(rehearsal.level[kind_of(row)], len(ways) - 1)]
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
        again = kind_of(path) in self.rehearsal.again
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
    def forward(ctx: Any, x: Tensor, rank: RankTrial, path: str) -> Tensor:
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
    def forward(ctx: Any, x: Tensor, whole: Tensor, rank: RankTrial) -> Tensor:
        ctx.rank = rank
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.rank.part(grads[0]).clone(), None, None
