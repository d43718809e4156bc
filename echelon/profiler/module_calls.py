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

from echelon.plan.profile import find_fsdp_units
from echelon.tree import tree_leaves
from echelon.trials.module_tree import list_modules

#: What takes derivatives.
DERIVATIVE_FUNCTIONS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)

#: What tells how large a tensor is.
_SIZE_FUNCTIONS = (Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__)  # type: ignore[attr-defined]

#: One tensor that a unit returned: (number of the visit, place among the tensors of its output).
UnitOutput = tuple[int, int]


@dataclass(slots=True)
class UnitCall:
    """One call of a unit."""

    path: str
    reads: set[UnitOutput] = field(default_factory=set)
    glue_parameters: set[str] = field(
        default_factory=set
    )  #: parameters and buffers, by name, that the glue just before it computes with
    num_outputs: int = 0  #: tensors that it returned
    flops: float = 0.0  #: of its products
    changes_buffers: bool = False  #: a buffer of its module


def list_unit_paths(model: nn.Module) -> list[str]:
    """The modules that are never cut in two, in the order of the module tree; together they hold all but the glue's parameters."""
    blocks = set(find_fsdp_units(list_modules(model)))
    return list(_iterate_units(model, "", blocks))


def _iterate_units(module: nn.Module, path: str, blocks: set[str]) -> Iterator[str]:
    children = list(module.named_children())
    contains_block = any(block.startswith(path + "." if path else "") for block in blocks)
    # One that has both parameters of its own and children may use its children's without calling them (MultiheadAttention).
    is_atomic = not children or path in blocks or (path and next(module.parameters(recurse=False), None) is not None)
    if is_atomic and not (contains_block and path not in blocks):
        has_forward = (
            type(module).forward is not nn.Module.forward
        )  # a ParameterDict is not: what it holds is the glue's
        if has_forward and (next(module.parameters(), None) is not None or next(module.buffers(), None) is not None):
            yield path
        return
    for name, child in children:
        yield from _iterate_units(child, f"{path}.{name}" if path else name, blocks)


CallHandler = Callable[[str, Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]


@contextmanager
def intercept_unit_calls(model: nn.Module, paths: list[str], handle_call: CallHandler) -> Iterator[None]:
    """Inside, each call of a unit goes through `handle_call(path, forward, args, kwargs)`. Hooks on the units work as ever."""
    #: Modules, and the forward that somebody had put on each in place of its class's.
    original_forwards: list[tuple[nn.Module, Any]] = []
    call_depth = 0

    def wrap_forward(path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
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

    try:
        for path in paths:
            module = model.get_submodule(path)
            original_forwards.append((module, module.__dict__.get("forward")))
            module.forward = wrap_forward(path, module.forward)
        yield
    finally:
        for module, original_forward in original_forwards:
            if original_forward is None:
                del module.__dict__["forward"]
            else:
                module.forward = original_forward


class UnitCallTracer(TorchFunctionMode):
    """Notes every visit of a unit and, through the glue, what it reads."""

    def __init__(self, call_unit: CallHandler | None = None) -> None:
        """`call_unit(path, forward, args, kwargs)` calls a unit (default: as it is)."""
        super().__init__()
        self._call_unit = call_unit or (lambda path, forward, args, kwargs: forward(*args, **kwargs))
        self.unit_calls: list[UnitCall] = []
        #: Parameters and `buffer_ids` that the glue itself computes with, by identity, and how many visits were over each time.
        self.glue_reads: dict[int, set[int]] = {}
        #: The model's, by identity.
        self.buffer_ids: Set[int] = frozenset()
        #: Parameters whose sizes the glue reads, by identity.
        self.glue_size_reads: set[int] = set()
        #: Whether the glue takes derivatives, through units that other stages hold.
        self.takes_derivatives = False
        self._origins_by_tensor = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DERIVATIVE_FUNCTIONS:
            self.takes_derivatives = True
        out = func(*args, **kwargs)
        inputs, outputs = _find_tensors((args, kwargs)), _find_tensors(out)
        origins = self.find_origins(inputs)
        # Reading .shape is no computation, but .T is the tensor itself.
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

    def handle_call(
        self, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """For `intercept_unit_calls`."""
        unit_call = UnitCall(path, set(self.find_origins(_find_tensors((args, kwargs)))))
        call_index = len(self.unit_calls)
        self.unit_calls.append(unit_call)
        self.__exit__(None, None, None)  # what happens inside a unit is its own business
        try:
            with FlopCounterMode(display=False) as counter:
                out = self._call_unit(path, forward, args, kwargs)
        finally:
            self.__enter__()
        unit_call.flops = float(counter.get_total_flops())
        output_tensors = _find_tensors(out)
        unit_call.num_outputs = len(output_tensors)
        for output_index, tensor in enumerate(output_tensors):
            self._origins_by_tensor[tensor] = frozenset({(call_index, output_index)})
        return out

    def find_origins(self, tensors: list[Tensor]) -> frozenset[UnitOutput]:
        """The units' values that `tensors` were computed from by glue alone."""
        return frozenset().union(*(self._origins_by_tensor.get(tensor, frozenset()) for tensor in tensors))


def trace_unit_calls(
    model: nn.Module, run_step: Callable[[], Any], call_unit: CallHandler | None = None, *, reads_values: bool = False
) -> list[UnitCall]:
    """The visits of `run_step()`, which computes the loss with `model`; the last one, with an empty path, stands for the loss.

    Empty where the model cannot be cut: it is one unit, forward takes a derivative, the glue changes a buffer after the first unit,
    which stages that end before do not see, or reads one that a unit changes, which other stages do not see. `reads_values`: forward looks at
    numbers; then it must not change a buffer of its own at all, as the calls of a later step may follow from that. A unit whose
    parameters do not reach the loss at all is left out. One that is used without being called belongs to the module around it that is,
    or else to the glue.
    """
    paths = list_unit_paths(model)
    while "" not in paths:
        tracer, watch = UnitCallTracer(call_unit), _BufferWatch(model, paths)
        named_tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        tracer.buffer_ids = {id(value) for value in model.buffers()}
        with (
            intercept_unit_calls(model, paths, watch.wrap_handler(tracer.handle_call)),
            _record_called_modules(model) as called_modules,
            tracer,
        ):
            loss = run_step()
        if tracer.takes_derivatives or watch.glue_changed_buffers or (reads_values and watch.glue_changed_any_buffer):
            return []
        called_units = {unit_call.path for unit_call in tracer.unit_calls}
        called_parameter_ids = {id(value) for path in called_units for value in model.get_submodule(path).parameters()}
        uncalled_units = _find_used_units(
            [path for path in paths if path not in called_units], model, loss, called_parameter_ids
        )
        if not uncalled_units:
            unit_calls = [*tracer.unit_calls, UnitCall("", set(tracer.find_origins(_find_tensors(loss))))]
            for unit_call in tracer.unit_calls:
                unit_call.changes_buffers = unit_call.path in watch.changing_units
            for name, value in named_tensors:
                for call_index in tracer.glue_reads.get(id(value), ()):
                    unit_calls[call_index].glue_parameters.add(name)
            changed_buffer_ids = {
                id(value)
                for path in watch.changing_units & called_units
                for value in model.get_submodule(path).buffers()
            } | watch.changed_buffer_ids
            return [] if changed_buffer_ids & tracer.glue_reads.keys() else unit_calls
        paths = _replace_by_callers(
            [path for path in paths if path in called_units or path in uncalled_units], uncalled_units, called_modules
        )
    return []


class _BufferWatch:
    """Who changes buffers while a model is followed."""

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
        #: Buffers, by identity, of units that changed theirs, as they were before.
        self.changed_buffer_ids: set[int] = set()
        #: Paths of units that change theirs.
        self.changing_units = {
            path
            for path in paths
            # Where numbers are invented the change is not seen.
            if any(
                isinstance(submodule, _BatchNorm) and submodule.track_running_stats
                for submodule in model.get_submodule(path).modules()
            )
        }

    def wrap_handler(self, handle_call: CallHandler) -> CallHandler:
        """`handle_call`, watched."""

        def call(path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            if self._versions_at_first_unit is None:  # what comes before the first unit every stage computes
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
        """Whether the glue changed one after the first unit."""
        return self._versions_at_first_unit is not None and self._read_versions() != self._versions_at_first_unit

    @property
    def glue_changed_any_buffer(self) -> bool:
        """Whether it changed one at all."""
        return self._read_versions() != self._initial_versions

    def _read_versions(self) -> list[tuple[int, int]]:
        return [
            _tensor_version(value) for slots, name in self._glue_buffer_slots if (value := slots.get(name)) is not None
        ]


def _tensor_version(value: Tensor) -> tuple[int, int]:
    return id(value), value._version


@contextmanager
def _record_called_modules(model: nn.Module) -> Iterator[set[str]]:
    """The modules that are called inside, by path."""
    called: set[str] = set()
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, path=path: called.add(path))
        for path, module in model.named_modules()
    ]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


def _find_used_units(paths: list[str], model: nn.Module, loss: Any, called_parameter_ids: set[int]) -> list[str]:
    """Those units among `paths` whose parameters the loss depends on, but for those that units which are called hold too (`called_parameter_ids`)."""
    (first_loss, *_) = _find_tensors(loss)
    used_paths = []
    for path in paths:
        parameters = model.get_submodule(path).parameters()
        own = [value for value in parameters if value.requires_grad and id(value) not in called_parameter_ids]
        if not own or not first_loss.requires_grad:
            continue
        grads = torch.autograd.grad(first_loss, own, allow_unused=True, retain_graph=True)
        if any(grad is not None for grad in grads):
            used_paths.append(path)
    return used_paths


def _replace_by_callers(paths: list[str], uncalled: list[str], called_modules: set[str]) -> list[str]:
    """Replace units that are never called by the modules around them that are, which then swallow the units below them."""
    callers = {_find_called_ancestor(path, called_modules) for path in uncalled} - {
        ""
    }  # the model itself: then it is the glue's
    remaining = [
        path
        for path in paths
        if path not in uncalled and not any(path.startswith(ancestor + ".") for ancestor in callers)
    ]
    outermost = [
        ancestor
        for ancestor in callers
        if not any(
            ancestor != other_ancestor and ancestor.startswith(other_ancestor + ".") for other_ancestor in callers
        )
    ]
    return [*remaining, *outermost]


def _find_called_ancestor(path: str, called_modules: set[str]) -> str:
    while path:
        path = path.rpartition(".")[0]
        if path in called_modules:
            break
    return path


def _find_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def find_crossing_values(unit_calls: list[UnitCall], stage_start: int) -> list[UnitOutput]:
    """The values that visits from `stage_start` on read of those before it, in a fixed order."""
    return sorted({read for call in unit_calls[stage_start:] for read in call.reads if read[0] < stage_start})
