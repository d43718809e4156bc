"""A pipeline stage: the model's own forward, of which only some units are computed.

Nothing is traced into a graph and no code is replaced. Every stage runs the model's forward as it is written; a unit of another
stage is not computed: what it would return is either received from the stage before, or absent. An absent value is a fake tensor: it has a
shape and no numbers, whatever is computed from it is absent too, and asking for its value is an error. So masks, positions and
other things that follow from the batch are there on every stage without being sent, and a short batch, evaluation mode or a dict
of outputs need no care.

Random numbers follow from their place in forward (the micro-batch, the visits so far, the draws since the last one), not from what was
drawn before: a stage skips what others compute, and what several stages compute for themselves (noise that is added first and is the
target in the end) must be one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from echelon.errors import DivergenceError, TrainingError
from echelon.profiler.fake_model import Forward, Ghost, Returned
from echelon.profiler.module_calls import Value, Visit, crossing, intercepted
from echelon.tree import tree_flatten, tree_unflatten
from echelon.trials.determinism import DRAWING

#: Makes random numbers begin anew, for a place in forward.
Seed = Callable[..., None]


class _Done(BaseException):
    """This stage's last unit is computed: the rest of forward is other stages' work. Not an Exception: models may catch those."""


class Stage(nn.Module):
    """Visits `first` to `last` (exclusive) of a model. `stage(*received, batch=...)` gives what later stages read, or the loss."""

    def __init__(
        self,
        model: nn.Module,
        ghost: Ghost,
        visits: list[Visit],
        first: int,
        last: int,
    ) -> None:
        super().__init__()
        self.model = model
        self._ghost, self._visits = ghost, visits
        self.first, self.last = first, last
        self._paths = list(dict.fromkeys(visit.path for visit in visits if visit.path))
        self.incoming = crossing(visits, first)
        #: Whether it gives the loss.
        self.final = last == len(visits)
        #: What the stages after this one read.
        self.outgoing = [] if self.final else crossing(visits, last)

    def forward(self, *received: Tensor, batch: Any, forward: Forward, seed: Seed) -> Any:
        """The outgoing values, in order; on the last stage what `forward` gives. `seed(*place)` is told the place in forward."""
        values: dict[Value, Tensor] = dict(zip(self.incoming, received, strict=True))
        # A value that was received is given away as a copy, and one that will be sent is kept as a copy: what stands between units may
        # change values in place, and does so on every stage that needs them.
        walk = _Walk(self, values, self._returned(batch, forward), _Glue(seed))
        with walk.watched(), intercepted(self.model, self._paths, walk.around), walk.glue:
            try:
                result = forward(self.model, batch)
            except _Done:
                return tuple(
                    values[value].clone(memory_format=torch.contiguous_format)
                    if value in self.incoming
                    else values[value].contiguous()
                    for value in self.outgoing
                )
        return result

    def _returned(self, batch: Any, forward: Forward) -> list[Returned]:
        return self._ghost.returned(forward, batch, self._paths, training=self.model.training, visits=self._visits)

    def shapes(self, batch: Any, forward: Forward) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What comes in and goes out for a batch of this shape, as tensors on the meta device."""
        returned = self._returned(batch, forward)

        def metas(values: Sequence[Value]) -> tuple[Tensor, ...]:
            fakes = [returned[visit].leaves[returned[visit].tensors[place]] for visit, place in values]
            return tuple(
                torch.empty(fake.shape, dtype=fake.dtype, device="meta", requires_grad=fake.requires_grad)
                for fake in fakes
            )

        outgoing = [(len(returned) - 1, i) for i in range(len(returned[-1].leaves))] if self.final else self.outgoing
        return metas(self.incoming), metas(outgoing)


class _Glue(TorchFunctionMode):
    """Between units: each draw has a seed of its own, as a stage on which its size is absent draws nothing."""

    def __init__(self, seed: Seed) -> None:
        super().__init__()
        self._seed = seed
        self._visits = self._draws = 0
        self._between = True
        seed(0, 0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._between and func in DRAWING:
            self._draws += 1
            self._seed(self._visits, self._draws)
        return func(*args, **(kwargs or {}))

    def unit(self, compute: Callable[[], Any]) -> Any:
        """What a unit gives, which draws in its own way."""
        self._seed(self._visits, -1)
        aside = (
            _get_current_function_mode() is self
        )  # else the model has put one of its own upon it (`with torch.device`)
        if aside:
            self.__exit__(None, None, None)
        self._between = False
        try:
            return compute()
        finally:
            self._between = True
            if aside:
                self.__enter__()

    def visited(self) -> None:
        """A visit is over, here or on another stage."""
        self._visits, self._draws = self._visits + 1, 0
        self._seed(self._visits, 0)  # for what does not ask torch: Python's and NumPy's


class _Walk:
    """One forward of a stage: which visit comes next, and what is known of the values so far."""

    def __init__(self, stage: Stage, values: dict[Value, Tensor], returned: list[Returned], glue: _Glue) -> None:
        self._stage, self._values, self._returned, self.glue = stage, values, returned, glue
        self._wanted = set(stage.outgoing)
        self._next = 0
        #: The visit that was just computed, until its hooks have run.
        self._computed: int | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at what this stage's units return after every other hook on them (fully_shard has some)."""
        stage = self._stage
        paths = {visit.path for visit in stage._visits[stage.first : stage.last] if visit.path}
        hooks = [stage.model.get_submodule(path).register_forward_hook(partial(self._after, path)) for path in paths]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def around(self, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        number, stage = self._next, self._stage
        self._next += 1
        planned = stage._visits[number].path if number < len(stage._visits) else ""
        if planned != path:
            raise DivergenceError(
                f"pp: the model called {path} where {planned or 'the loss'} was planned: its calls change while it trains (layer drop, layers "
                "that join later, samples that decide), so that it cannot be cut into stages; use pp=1 (dp with zero=3 also shares the memory)"
            )
        if not stage.first <= number < stage.last:
            self.glue.visited()
            return self._elsewhere(number)
        absent = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, FakeTensor)]
        if absent:
            raise TrainingError(
                f"pp: {path} reads a value that no stage sends ({tuple(absent[0].shape)}): a bug in echelon, please report"
            )
        out = self.glue.unit(lambda: forward(*args, **kwargs))
        self.glue.visited()
        self._computed = number
        return out

    def _after(self, path: str, _: nn.Module, __: Any, out: Any) -> None:
        number, stage = self._computed, self._stage
        if number is None or stage._visits[number].path != path:
            return  # part of another unit
        self._computed = None
        leaves = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
        for place, leaf in enumerate(leaves):
            if (number, place) in self._wanted:
                self._values[number, place] = leaf if number == stage.last - 1 else leaf.clone()
        if number == stage.last - 1 and not stage.final:
            raise _Done

    def _elsewhere(self, number: int) -> Any:
        """What a visit of another stage returned: received, or absent."""
        what = self._returned[number]
        leaves = list(what.leaves)
        for place, leaf in enumerate(what.tensors):
            received = self._values.get((number, place))
            # An absent one takes no part in backward: models may change it in place, which a leaf of a graph does not allow.
            leaves[leaf] = leaves[leaf].detach() if received is None else received.clone()
        return tree_unflatten(leaves, what.spec)
