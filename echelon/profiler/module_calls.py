"""Where a model can be cut: its units in the order forward calls them, and whose values each of them reads.

A unit is a module that runs on one stage as a whole: a repeated block, or a module without children. What forward computes between units
(additions, reshapes, masks) is glue: cheap, and free to run on every stage. Values are tracked through the glue, so that skip connections and
losses over every block are seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakTensorKeyDictionary

from echelon.plan.profile import find_fsdp_units
from echelon.tree import tree_tensors
from echelon.trials.module_tree import list_modules, module_hooks
from echelon.trials.trial_run import wrapped_forwards

DERIVATIVE_FUNCTIONS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_SIZE_FUNCTIONS = (Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__)  # type: ignore[attr-defined]

#: One tensor that a unit returned: (index of the call, index among the tensors of its output).
UnitOutput = tuple[int, int]


@dataclass(slots=True)
class UnitCall:
    """One call of a unit."""

    path: str
    reads: set[UnitOutput] = field(default_factory=set)
    glue_parameters: set[str] = field(default_factory=set)  #: parameters and buffers of the glue just before it
    flops: float = 0.0  #: of its matrix products
    changes_buffers: bool = False  #: of its module


def list_unit_paths(model: nn.Module) -> list[str]:
    """The modules that are never split, in the order of the module tree; together they hold all but the glue's parameters."""
    blocks = set(find_fsdp_units(list_modules(model)))
    return list(_iterate_units(model, "", blocks))


def _iterate_units(module: nn.Module, path: str, blocks: set[str]) -> Iterator[str]:
    children = list(module.named_children())
    contains_block = any(block.startswith(path + "." if path else "") for block in blocks)
    # A module with both parameters and children may use its children's without calling them (MultiheadAttention).
    is_atomic = not children or path in blocks or (path and next(module.parameters(recurse=False), None) is not None)
    if is_atomic and not (contains_block and path not in blocks):
        has_forward = type(module).forward is not nn.Module.forward  # a ParameterDict's parameters are the glue's
        if has_forward and any(True for _ in (*module.parameters(), *module.buffers())):
            yield path
        return
    for name, child in children:
        yield from _iterate_units(child, f"{path}.{name}" if path else name, blocks)


CallHandler = Callable[[str, Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]


@contextmanager
def intercept_unit_calls(model: nn.Module, paths: list[str], handle_call: CallHandler) -> Iterator[None]:
    """Inside, each call of a unit goes through `handle_call(path, forward, args, kwargs)`. Hooks on the units still work."""
    call_depth = 0

    def wrap_forward(path: str, module: Any) -> Callable[..., Any]:
        forward = module.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal call_depth
            if call_depth:  # a unit that another unit calls is part of it
                return forward(*args, **kwargs)
            call_depth += 1
            try:
                return handle_call(path, forward, args, kwargs)
            finally:
                call_depth -= 1

        return call

    with wrapped_forwards(model, paths, wrap_forward):
        yield


class UnitCallTracer(TorchFunctionMode):
    """Records every call of a unit and what it reads through the glue."""

    def __init__(self, call_unit: CallHandler | None = None) -> None:
        """`call_unit(path, forward, args, kwargs)` calls a unit (default: as it is)."""
        super().__init__()
        self._call_unit = call_unit or (lambda path, forward, args, kwargs: forward(*args, **kwargs))
        self.unit_calls: list[UnitCall] = []
        #: Ids of parameters and buffers (`buffer_ids`) that the glue computes with, and after how many calls.
        self.glue_reads: dict[int, set[int]] = {}
        self.buffer_ids: Set[int] = frozenset()
        self.glue_size_reads: set[int] = set()  #: ids of parameters whose sizes the glue reads
        self.takes_derivatives = False  #: whether the glue takes derivatives, through units of other stages
        self._origins_by_tensor = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DERIVATIVE_FUNCTIONS:
            self.takes_derivatives = True
        out = func(*args, **kwargs)
        inputs, outputs = tree_tensors((args, kwargs)), tree_tensors(out)
        origins = self.find_origins(inputs)
        # Reading .shape is no computation, but .T is.
        if func is not Tensor.__repr__ and (outputs or getattr(func, "__name__", "") != "__get__"):
            for tensor in inputs:
                if isinstance(tensor, nn.Parameter) or id(tensor) in self.buffer_ids:
                    self.glue_reads.setdefault(id(tensor), set()).add(len(self.unit_calls))
        if func in _SIZE_FUNCTIONS:
            self.glue_size_reads.update(id(tensor) for tensor in inputs[:1] if isinstance(tensor, nn.Parameter))
        if origins:
            # An operator that writes into its first argument (or `out=`) returns it, or nothing: __setitem__.
            written_inputs = [inputs[0]] if inputs and not outputs else []
            for tensor in (*outputs, *written_inputs):
                self._origins_by_tensor[tensor] = self.find_origins([tensor]) | origins
        return out

    def handle_call(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """For `intercept_unit_calls`."""
        unit_call = UnitCall(path, set(self.find_origins(tree_tensors((args, kwargs)))))
        call_index = len(self.unit_calls)
        self.unit_calls.append(unit_call)
        self.__exit__(None, None, None)  # the inside of a unit is not recorded
        try:
            with FlopCounterMode(display=False) as counter:
                out = self._call_unit(path, forward, args, kwargs)
        finally:
            self.__enter__()
        unit_call.flops = float(counter.get_total_flops())
        for output_index, tensor in enumerate(tree_tensors(out)):
            self._origins_by_tensor[tensor] = frozenset({(call_index, output_index)})
        return out

    def find_origins(self, tensors: list[Tensor]) -> frozenset[UnitOutput]:
        """The units' outputs that `tensors` were computed from by glue alone."""
        return frozenset().union(*(self._origins_by_tensor.get(tensor, frozenset()) for tensor in tensors))


def trace_unit_calls(
    model: nn.Module, run_step: Callable[[], Any], call_unit: CallHandler | None = None, *, reads_values: bool = False
) -> list[UnitCall]:
    """The unit calls of `run_step()`, which computes the loss with `model`; the last one, with an empty path, stands for the loss.

    Empty where the model cannot be split: it is a single unit, forward takes a derivative, the glue changes a buffer after the first unit, which
    earlier stages do not see, or reads one that a unit changes, which other stages do not see. `reads_values`: forward looks at values; then it
    must not change a buffer of its own at all, since the calls of a later step may depend on it. A unit whose parameters do not reach the loss
    is left out. One that is used without being called belongs to the innermost called module around it, or else to the glue.
    """
    paths = list_unit_paths(model)
    while "" not in paths:
        tracer, watch, called_modules = UnitCallTracer(call_unit), _BufferWatch(model, paths), set[str]()
        named_tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        tracer.buffer_ids = {id(value) for value in model.buffers()}
        handle_call = watch.wrap_handler(tracer.handle_call)
        with intercept_unit_calls(model, paths, handle_call), module_hooks(model, called_modules.add), tracer:
            loss = run_step()
        if tracer.takes_derivatives or watch.glue_changed_buffers or (reads_values and watch.glue_changed_any_buffer):
            return []
        called_units = {unit_call.path for unit_call in tracer.unit_calls}
        uncalled_paths = [path for path in paths if path not in called_units]
        uncalled_units = _find_used_units(model, uncalled_paths, loss, called_units)
        if not uncalled_units:
            unit_calls = [*tracer.unit_calls, UnitCall("", set(tracer.find_origins(tree_tensors(loss))))]
            for unit_call in tracer.unit_calls:
                unit_call.changes_buffers = unit_call.path in watch.changing_units
            for name, value in named_tensors:
                for call_index in tracer.glue_reads.get(id(value), ()):
                    unit_calls[call_index].glue_parameters.add(name)
            changing = [model.get_submodule(path) for path in watch.changing_units & called_units]
            changed_buffer_ids = {id(value) for module in changing for value in module.buffers()}
            return [] if (changed_buffer_ids | watch.changed_buffer_ids) & tracer.glue_reads.keys() else unit_calls
        used_paths = [path for path in paths if path in called_units or path in uncalled_units]
        paths = _replace_by_callers(used_paths, uncalled_units, called_modules)
    return []


class _BufferWatch:
    def __init__(self, model: nn.Module, paths: list[str]) -> None:
        self._model = model
        units = {id(value) for path in paths for value in model.get_submodule(path).buffers()}
        self._glue_buffer_slots = [
            (slots, name)
            for slots in (module._buffers for module in model.modules())
            for name, value in slots.items()
            if value is not None and id(value) not in units
        ]
        self._initial_versions = self._read_versions()
        self._versions_at_first_unit: list[tuple[int, int]] | None = None
        self.changed_buffer_ids: set[int] = set()  #: ids of the previous buffers of units that changed theirs
        #: Paths of units that change buffers; batch norms are known to, even where values are invented.
        self.changing_units = {path for path in paths if _has_running_stats(model.get_submodule(path))}

    def wrap_handler(self, handle_call: CallHandler) -> CallHandler:
        """`handle_call`, watched."""

        def call(path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            if self._versions_at_first_unit is None:  # every stage computes what precedes the first unit
                self._versions_at_first_unit = self._read_versions()
            unit = self._model.get_submodule(path)
            versions_before = [_tensor_version(value) for value in unit.buffers()]
            out = handle_call(path, forward, args, kwargs)
            if [_tensor_version(value) for value in unit.buffers()] != versions_before:
                self.changing_units.add(path)
                self.changed_buffer_ids |= {buffer_id for buffer_id, _ in versions_before}
            return out

        return call

    @property
    def glue_changed_buffers(self) -> bool:
        """Whether the glue changed a buffer after the first unit."""
        return self._versions_at_first_unit is not None and self._read_versions() != self._versions_at_first_unit

    @property
    def glue_changed_any_buffer(self) -> bool:
        """Whether the glue changed a buffer at all."""
        return self._read_versions() != self._initial_versions

    def _read_versions(self) -> list[tuple[int, int]]:
        values = [slots.get(name) for slots, name in self._glue_buffer_slots]
        return [_tensor_version(value) for value in values if value is not None]


def _has_running_stats(unit: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) and module.track_running_stats for module in unit.modules())


def _tensor_version(value: Tensor) -> tuple[int, int]:
    return id(value), value._version


def _find_used_units(model: nn.Module, paths: list[str], loss: Any, called_units: Iterable[str]) -> list[str]:
    """Those units among `paths` whose parameters the loss depends on, other than those that called units hold too."""
    first_loss = tree_tensors(loss)[0]
    called_ids = {id(value) for path in called_units for value in model.get_submodule(path).parameters()}
    used_paths = []
    for path in paths:
        parameters = model.get_submodule(path).parameters()
        own = [value for value in parameters if value.requires_grad and id(value) not in called_ids]
        if own and first_loss.requires_grad:
            grads = torch.autograd.grad(first_loss, own, allow_unused=True, retain_graph=True)
            used_paths += [path] if any(grad is not None for grad in grads) else []
    return used_paths


def _replace_by_callers(paths: list[str], uncalled: list[str], called_modules: set[str]) -> list[str]:
    """Replace units that are never called by the innermost called modules around them, which absorb the units below them."""
    callers = {_find_called_ancestor(path, called_modules) for path in uncalled} - {""}  # the model itself: the glue's

    def is_inside_caller(path: str) -> bool:
        return any(path.startswith(caller + ".") for caller in callers)

    remaining = [path for path in paths if path not in uncalled and not is_inside_caller(path)]
    return [*remaining, *(caller for caller in callers if not is_inside_caller(caller))]


def _find_called_ancestor(path: str, called_modules: set[str]) -> str:
    while path:
        path = path.rpartition(".")[0]
        if path in called_modules:
            break
    return path


def find_crossing_values(unit_calls: list[UnitCall], stage_start: int) -> list[UnitOutput]:
    """The values that calls from `stage_start` on read from earlier ones, in a fixed order."""
    return sorted({read for call in unit_calls[stage_start:] for read in call.reads if read[0] < stage_start})
