"""Refuse schedules that read parameters, gradients or optimizer state of which a rank holds only a part.

A rate that follows from a norm of the weights would differ between pipeline stages and tp shards. While a schedule is constructed or stepped, a torch
function mode checks the arguments of torch functions. Parameters that ZeRO shards may be read: torch computes the full DTensor's value. Not seen:
a number that a gradient hook computes from a part and leaves in a Python variable, and shapes of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from echelon.engine.parallel.full_tensor_optimizer import FullTensorOptimizer
from echelon.errors import DivergenceError
from echelon.tree import tree_tensors

if TYPE_CHECKING:
    from echelon.engine.build_model import RankModel

_PROPERTIES = (
    "shape", "dtype", "device", "requires_grad", "ndim", "layout", "is_leaf", "is_meta", "is_cpu", "is_cuda", "is_sparse",
    "itemsize", "nbytes", "grad_fn", "grad", "_version",
)  # fmt: skip
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "is_floating_point", "is_complex",
    "is_contiguous", "get_device", "requires_grad_", "register_hook", "is_inference", "__len__", "__repr__",
)  # fmt: skip
#: Torch functions that read no number: `p.grad is None` and `p.ndim` are fine.
_HARMLESS_FUNCTIONS = {getattr(Tensor, name).__get__ for name in _PROPERTIES} | {getattr(Tensor, m) for m in _METHODS}


class ScheduleReadCheck:
    """Watches what the schedules of one run read."""

    def __init__(
        self, rank_model: RankModel, optimizers: Sequence[Optimizer], full_tensor: Mapping[int, FullTensorOptimizer]
    ) -> None:
        """`full_tensor`: by index, the optimizers that step on full tensors."""
        plan, self._model, self._tp_shards = rank_model.plan, rank_model.model, rank_model.tp_shards
        self._optimizers, self._full_tensor_optimizers = optimizers, full_tensor
        # Ranks hold other parameters (stages), or gradients of their own samples (servers).
        self._all_partial = plan.mesh.pp > 1 or plan.uses_servers
        axes = "pp and tp" if self._all_partial or self._tp_shards else "zero"
        self._excluded_settings = "exchange=server" if plan.uses_servers else axes
        is_needed = self._all_partial or self._tp_shards or full_tensor
        self._mode = _ReadMode(self._require_full_tensors) if is_needed else None
        self._reader = self._step_prefix = ""
        #: By id, tensors that may not be read, with their names; collected when a schedule first calls a torch function.
        self._partial_tensors: dict[int, tuple[str, Tensor]] = {}

    @contextmanager
    def watch(self, schedule: Any = None, step: int | None = None) -> Iterator[None]:
        """Raise where the code inside reads a part of a tensor. `schedule`: None while they are constructed."""
        self._step_prefix = "" if step is None else f"step {step + 1}: "
        self._reader = "lr_schedule=" if schedule is None else f"lr_schedule= ({type(schedule).__name__})"
        try:
            with self._mode or nullcontext():
                yield
        finally:
            self._partial_tensors = {}

    def _require_full_tensors(self, tensors: Sequence[Tensor]) -> None:
        if not self._partial_tensors:
            groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
            setting_ids = {id(setting) for group in groups for setting in group.values()}
            if all(id(tensor) in setting_ids for tensor in tensors):  # a rate that is a tensor
                return
            self._partial_tensors = {id(tensor): (name, tensor) for name, tensor in self._named_partial_tensors()}
        for tensor in tensors:
            if id(tensor) in self._partial_tensors:
                name = self._partial_tensors[id(tensor)][0]
                raise DivergenceError(
                    f"{self._step_prefix}{self._reader} reads {name}, of which each rank has only a part under this plan, so ranks would train at other "
                    f"rates than one device; use a plan without {self._excluded_settings}, or a schedule that depends on the step alone",
                    tensor=name.rpartition(" ")[2],
                    cause="a schedule that reads parameters, gradients or optimizer state",
                )

    def _named_partial_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters of which this rank has a part, their gradients and their optimizer state."""
        partial: dict[int, tuple[str, Tensor]] = {}
        if self._all_partial:  # also what stands in an optimizer for a stage without parameters
            groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
            partial = {id(parameter): ("parameters", parameter) for group in groups for parameter in group["params"]}
        for name, parameter in self._model.named_parameters():
            if self._all_partial or name in self._tp_shards:
                partial[id(parameter)] = name, parameter
        for full_tensor_optimizer in self._full_tensor_optimizers.values():
            partial |= {id(p): (name, p) for name, p in full_tensor_optimizer.parameters.items()}
        for name, tensor in partial.values():
            yield f"parameter {name}", tensor
            if tensor.grad is not None:
                yield f"the gradient of {name}", tensor.grad
            states = [optimizer.state[tensor] for optimizer in self._optimizers if tensor in optimizer.state]
            for state in (state for state in states if isinstance(state, dict)):
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.ndim:  # a count of steps is the same everywhere
                        yield f"{key} of {name}", value


class _ReadMode(TorchFunctionMode):
    """Passes the tensors of every torch function that may read numbers to `check`."""

    def __init__(self, check: Callable[[Sequence[Tensor]], None]) -> None:
        super().__init__()
        self._check = check

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _HARMLESS_FUNCTIONS:
            self._check(tree_tensors((args, kwargs)))
        return func(*args, **(kwargs or {}))
