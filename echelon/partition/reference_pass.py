"""The model as it is, before it is tried on parts of the sequence: what its modules were given and gave, the loss, gradients and buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from echelon.partition.block_chains import Chain, tensors_of
from echelon.partition.per_column_rng import Sizes
from echelon.tree import tree_leaves
from echelon.trials.random_state import random_states
from echelon.trials.trial_run import alike, calling, equal, mode


class WrongError(Exception):
    """A trial that failed: at the columns of a row, or at a module that needs the whole sequence."""

    def __init__(self, message: str, *, row: str = "", module: str = "") -> None:
        super().__init__(message)
        self.row, self.module = row, module


class Record:
    """One run of the model with its gradients."""

    def __init__(
        self, model: nn.Module, step: Callable[[], Any], chain: Chain, once: Sequence[str], others: Sequence[str]
    ) -> None:
        """`once`: modules of pairs, which must be called so often; `others`: modules of the blocks without a part in one."""
        self.model, self.step, self.chain = model, step, chain
        self.parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.args: dict[str, dict[str, Any]] = {}
        self.outs: dict[str, Tensor] = {}
        self.slopes: dict[str, Tensor | None] = {}
        self._note(once, others)

    def _note(self, once: Sequence[str], others: Sequence[str]) -> None:
        watched = dict[str, Tensor]()
        places = {*once, *others, *self.chain.units}
        places |= {above for path in once for above in self.around(path)}
        calls: Counter[str] = Counter()

        def around(path: str, inner: Callable[..., Any]) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                calls[path] += 1
                self.args[path] = {name: value.detach().clone() for name, value in tensors_of(args, kwargs)}
                if path == self.chain.units[0]:
                    args, kwargs = changed(args, kwargs, self.chain.argument, lambda x: watch("", x.clone()))
                return first(inner(*args, **kwargs), lambda x: watch(path, x))

            def watch(path: str, x: Tensor) -> Tensor:
                if path not in self.chain.units:
                    watched[path] = x
                    x = x.clone()  # others may read it as well, or change it in place
                if path:
                    self.outs[path] = x.detach().clone()
                return x

            return forward

        with ExitStack() as stack, torch.enable_grad():
            for path in places:
                module = self.model.get_submodule(path)
                stack.enter_context(calling(module, around(path, module.forward)))
            loss, self.buffers = self.step()
            total = total_of(loss)
            if not total.requires_grad:
                raise WrongError("its loss has no gradient")
            sources = [*self.parameters.values(), *(x for x in watched.values() if x.requires_grad)]
            slopes = torch.autograd.grad(total, sources, allow_unused=True)
        again = next((path for path in once if calls[path] != 1), None)
        if again is not None:
            raise WrongError(f"{again} is called {calls[again]} times")
        named = zip(self.parameters, slopes, strict=False)
        self.grads = {name: slope for name, slope in named if slope is not None}
        moving = [path for path, x in watched.items() if x.requires_grad]
        self.slopes = dict.fromkeys(watched) | dict(zip(moving, slopes[len(self.parameters) :], strict=True))
        self.total = float(total.detach())

    def around(self, path: str) -> Iterator[str]:
        """The modules around `path` that lie in its block, innermost first."""
        unit = self.unit(path)
        while (path := path.rpartition(".")[0]) != unit:
            yield path

    def unit(self, path: str) -> str:
        """The block that a module or parameter is in."""
        return next(unit for unit in self.chain.units if path.startswith(unit + "."))

    def hidden(self, unit: str) -> Tensor:
        """The hidden states that a block was given."""
        found: Tensor = self.args[unit][self.chain.argument]
        return found

    def mixes(self, dim: int) -> bool:
        """Whether in the first block positions along `dim` see each other: samples never do."""
        unit = self.chain.units[0]
        module, found = self.model.get_submodule(unit), list[Tensor]()
        inner = module.forward
        hidden = self.hidden(unit)
        odd, even = (torch.arange(start, hidden.shape[dim], 2) for start in (1, 0))
        other = hidden.index_copy(dim, odd, -hidden.roll(1, -1).index_select(dim, odd))

        def forward(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = changed(args, kwargs, self.chain.argument, lambda _: other)
            out = inner(*args, **kwargs)
            found.append(first_of(out).detach())
            return out

        with calling(module, forward):
            self.step()
        here, before = (x.index_select(dim, even) for x in (found[0], self.outs[unit]))
        return not equal(here, before)


def draws(model: nn.Module, step: Callable[[], Any], units: Sequence[str]) -> dict[str, list[int]]:
    """How many random numbers the blocks draw at a time in training. Not while it is rehearsed: then nobody does."""
    found = {unit: Sizes() for unit in units}
    with random_states(), mode(model, training=True), ExitStack() as stack:
        for unit, sizes in found.items():
            module = model.get_submodule(unit)
            stack.enter_context(calling(module, sizes.within(module.forward)))
        alike(model, step)()
    return {unit: sizes.found for unit, sizes in found.items()}


def total_of(loss: Any) -> Tensor:
    """A loss as one number."""
    (value, *_) = (leaf for leaf in tree_leaves(loss) if isinstance(leaf, Tensor))
    return value if value.dim() == 0 else value.sum()


def first_of(out: Any) -> Any:
    """The first of several outputs, or the one."""
    return out[0] if type(out) in (list, tuple) and out else out


def first(out: Any, change: Callable[[Tensor], Any]) -> Any:
    """An output with its first tensor changed, where it is a tensor or begins with one."""
    if isinstance(out, Tensor):
        return change(out)
    if type(out) in (list, tuple) and out and isinstance(out[0], Tensor):
        return type(out)([change(out[0]), *out[1:]])
    return out


def changed(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], argument: str, change: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with the one of that name or place changed."""
    return (
        tuple(change(each) if str(place) == argument else each for place, each in enumerate(args)),
        {name: change(each) if name == argument else each for name, each in kwargs.items()},
    )
