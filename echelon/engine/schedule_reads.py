"""Refuse schedules that read parameters, gradients or optimizer state of which a rank holds a part only.

A rate that follows from a norm of the weights would be that of one stage's weights under pp and of one shard's under tp: every rank would go on with
a rate of its own. While a schedule is made or stepped, a torch function mode looks at what torch functions are given, and raises DivergenceError before
such a rate is used. Parameters that ZeRO shards are DTensors, of which torch computes the whole tensor's value: those may be read.

Not seen: a number that a gradient hook computes from a part and leaves in a Python variable, and shapes and sizes of parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from echelon.engine.parallel.shard_layout import Piece
from echelon.engine.parallel.whole_tensor_optimizer import WholeOptimizer
from echelon.errors import DivergenceError
from echelon.plan.plan import Plan

_PROPERTIES = (
    "shape", "dtype", "device", "requires_grad", "ndim", "layout", "is_leaf", "is_meta", "is_cpu", "is_cuda", "is_sparse",
    "itemsize", "nbytes", "grad_fn", "grad", "_version",
)  # fmt: skip
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "is_floating_point", "is_complex",
    "is_contiguous", "get_device", "requires_grad_", "register_hook", "is_inference", "__len__", "__repr__",
)  # fmt: skip
#: Torch functions that read no number: `p.grad is None` and `p.ndim` are fine.
_HARMLESS = frozenset(
    [getattr(Tensor, name).__get__ for name in _PROPERTIES] + [getattr(Tensor, name) for name in _METHODS]
)


class ScheduleReads:
    """Watches what the schedules of one run read."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        pieces: Mapping[str, Piece],
        optimizers: Sequence[Optimizer],
        whole: Mapping[int, WholeOptimizer],
    ) -> None:
        """`pieces`: the parameters that tp cuts. `whole`: by place, the optimizers whose tensors are owned by one rank each."""
        self._model, self._pieces, self._optimizers, self._whole = model, pieces, optimizers, whole
        # Ranks hold other parameters (stages), or gradients of their own samples (servers).
        self._everything = plan.mesh.pp > 1 or plan.served
        self._without = "exchange=server" if plan.served else "pp and tp" if self._everything or pieces else "zero"
        needed = self._everything or pieces or whole
        self._mode = _Mode(self._require_whole) if needed else None
        self._who = self._when = ""
        #: By id what may not be read, with its name; made when a schedule first calls a torch function.
        self._parts: dict[int, tuple[str, Tensor]] = {}

    def watching(self, schedule: Any = None, step: int | None = None) -> AbstractContextManager[None]:
        """Raise where the code inside reads a part of something. Left out: the schedules are being made."""
        return nullcontext() if self._mode is None else self._watching(self._mode, schedule, step)

    @contextlib.contextmanager
    def _watching(self, mode: _Mode, schedule: Any, step: int | None) -> Iterator[None]:
        self._when = "" if step is None else f"step {step + 1}: "
        self._who = "schedule=" if schedule is None else f"schedule= ({type(schedule).__name__})"
        try:
            with mode:
                yield
        finally:
            self._parts = {}

    def _require_whole(self, tensors: Sequence[Tensor]) -> None:
        if not self._parts:
            settings = [value for each in self._optimizers for group in each.param_groups for value in group.values()]
            if all(any(tensor is each for each in settings) for tensor in tensors):  # a rate that is a tensor
                return
            self._parts = {id(value): (name, value) for name, value in self._named_parts()}
        for tensor in tensors:
            if id(tensor) in self._parts:
                name = self._parts[id(tensor)][0]
                raise DivergenceError(
                    f"{self._when}{self._who} reads {name}, of which a rank has its own part only under this plan, so that ranks would train at "
                    f"rates that one device does not have; use a plan without {self._without}, or a schedule that follows from the step alone",
                    tensor=name.rpartition(" ")[2],
                    cause="a schedule that reads parameters, gradients or optimizer state",
                )

    def _named_parts(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters of which this rank has a part, their gradients and their optimizer state."""
        live = dict(self._model.named_parameters())
        found = {id(value): (name, value) for name, value in live.items() if self._everything or name in self._pieces}
        for each in self._whole.values():
            found |= {id(value): (name, value) for name, value in each.parameters.items()}
        if self._everything:  # also what stands in an optimizer for a stage without parameters
            groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
            found = {id(value): ("parameters", value) for group in groups for value in group["params"]} | found
        for name, value in found.values():
            yield f"parameter {name}", value
            if value.grad is not None:
                yield f"the gradient of {name}", value.grad
            states = [optimizer.state[value] for optimizer in self._optimizers if value in optimizer.state]
            for state in (state for state in states if isinstance(state, dict)):
                for key, each in state.items():
                    if isinstance(each, Tensor) and each.ndim:  # a count of steps is the same everywhere
                        yield f"{key} of {name}", each


class _Mode(TorchFunctionMode):
    """Passes the tensors of every torch function that may read numbers to `check`."""

    def __init__(self, check: Callable[[Sequence[Tensor]], None]) -> None:
        super().__init__()
        self._check = check

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _HARMLESS:
            self._check(list(_tensors((args, kwargs or {}))))
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        items: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for each in items:
            yield from _tensors(each)
