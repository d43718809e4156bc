"""Repeated blocks: few of them are traced, and the trace is extended to all.

Blocks are alike if their classes, attributes, parameters and buffers are, if forward calls each of them once, in order, with arguments of the same
shapes and values, and computes the same between any two of them (`is_uniform_in_forward` runs all of them, with only the first computed). If the
traced ones do not grow evenly, all are traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from echelon.plan.profile import PipelineUnit, find_fsdp_units, is_within
from echelon.profiler.module_calls import intercept_unit_calls
from echelon.trials.module_tree import list_modules
from echelon.trials.op_recorder import ModuleTotals, OpCall, StepTrace

#: Blocks that are traced: the first and the last, and two in between that show what each further one adds.
TRACED_BLOCKS = 4
_MIN_BLOCKS = 8
#: Attributes of a module that do not affect what it computes, or that are compared separately.
_IGNORED_ATTRIBUTES = {"_parameters", "_buffers", "_modules", "training"}
#: Relative difference of equal sums of bytes.
_RELATIVE_TOLERANCE = 1e-9


class _UnevenBlocksError(Exception):
    """The traced blocks cannot be extrapolated."""


@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """`count` identical blocks, the children of the list at `path`."""

    path: str
    count: int

    @property
    def num_untraced(self) -> int:
        """Blocks that are not traced."""
        return self.count - TRACED_BLOCKS

    def block_path(self, index: int) -> str:
        """The path of a block."""
        return f"{self.path}.{index}" if self.path else str(index)

    def index_of(self, path: str) -> int | None:
        """The block that a module is in."""
        if self.path and not path.startswith(f"{self.path}."):
            return None
        name = self._path_in_list(path).partition(".")[0]
        return int(name) if name.isdigit() else None

    def rename(self, path: str, index: int) -> str:
        """The path of the same module in another block."""
        _, dot, suffix = self._path_in_list(path).partition(".")
        return self.block_path(index) + dot + suffix

    def _path_in_list(self, path: str) -> str:
        return path[len(self.path) + 1 :] if self.path else path


def find_repeated_blocks(model: nn.Module) -> RepeatedBlocks | None:
    """The longest list of identical blocks, if it is long enough."""
    paths = find_fsdp_units(list_modules(model))
    candidates = []
    for parent in dict.fromkeys(path.rpartition(".")[0] for path in paths):
        block_list = model.get_submodule(parent)
        names = list(block_list._modules)
        child_paths = {f"{parent}.{name}" if parent else name for name in names}
        is_list = isinstance(block_list, nn.ModuleList | nn.Sequential)
        if not is_list or len(names) < _MIN_BLOCKS or not child_paths <= set(paths):
            continue
        first, *others = (_compute_module_signature(child) for child in block_list.children())
        if first is not None and len(others) == len(names) - 1 and all(_safe_equal(other, first) for other in others):
            candidates.append(RepeatedBlocks(parent, len(names)))
    return max(candidates, key=lambda blocks: blocks.count, default=None)


def _compute_module_signature(module: nn.Module) -> Any:
    attributes = {name: value for name, value in vars(module).items() if name not in _IGNORED_ATTRIBUTES}
    if any("hook" in name and isinstance(value, dict) and value for name, value in attributes.items()):
        return None
    children = {name: _compute_module_signature(child) for name, child in module.named_children()}
    if None in children.values():
        return None
    tensors = [
        [(name, _attribute_signature(value), getattr(value, "requires_grad", None)) for name, value in named.items()]
        for named in (module._parameters, module._buffers)
    ]
    return type(module), {name: _attribute_signature(value) for name, value in attributes.items()}, tensors, children


def _attribute_signature(value: Any) -> Any:
    """A tensor by its shape; anything else by its own equality, so that distinct plain objects differ."""
    return (tuple(value.shape), value.dtype, value.stride()) if isinstance(value, Tensor) else value


@contextmanager
def shortened_model(model: nn.Module, blocks: RepeatedBlocks) -> Iterator[None]:
    """Inside, the list holds only the first few blocks."""
    block_list = model.get_submodule(blocks.path)
    original_modules = dict(block_list._modules)
    try:
        for name in list(original_modules)[TRACED_BLOCKS:]:
            del block_list._modules[name]
        yield
    finally:
        block_list._modules.clear()
        block_list._modules.update(original_modules)


def is_uniform_in_forward(model: nn.Module, blocks: RepeatedBlocks, run_step: Callable[[], Any]) -> bool:
    """Whether `run_step()`, which computes the loss, treats all blocks alike, and the rest as with few blocks."""
    full = _record_glue(model, blocks, blocks.count, run_step)
    with shortened_model(model, blocks):
        short = _record_glue(model, blocks, TRACED_BLOCKS, run_step)
    if full is None or short is None or not all(_safe_equal(full[index], short[index]) for index in (0, 1, -1)):
        return False
    return all(_safe_equal(segment, full[1]) for segment in (*full[1:-1], *short[1:-1]))


def _safe_equal(first: Any, second: Any) -> bool:
    try:
        return bool(first == second)
    except Exception:  # a value with its own `__eq__`
        return False


def _record_glue(
    model: nn.Module, blocks: RepeatedBlocks, num_blocks: int, run_step: Callable[[], Any]
) -> list[Any] | None:
    """Operators before the first block, between any two, and after the last, with the inputs of each block; None if blocks are not called
    once each, in order."""
    recorder, called_indices, first_output = _GlueRecorder(), list[int](), list[Any]()
    paths = [blocks.block_path(index) for index in range(num_blocks)]

    def handle_call(path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        index = paths.index(path)
        recorder.end_segment(tree_map(_leaf_signature, (args, dict(kwargs))))
        called_indices.append(index)
        if not first_output:
            recorder.is_paused = True
            first_output.append(forward(*args, **kwargs))
            recorder.is_paused = False
        return tree_map(_copy_leaf, first_output[0])

    with intercept_unit_calls(model, paths, handle_call), recorder:
        run_step()
    recorder.end_segment(None)
    return recorder.segments if called_indices == list(range(num_blocks)) else None


class _GlueRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.segments: list[Any] = []
        self.is_paused = False
        self._current_ops: list[Any] = []

    def end_segment(self, block_inputs: Any) -> None:
        self.segments.append((self._current_ops, block_inputs))
        self._current_ops = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_paused:
            self._current_ops.append((str(func), tree_map(_leaf_signature, (args, kwargs or {}))))
        return func(*args, **(kwargs or {}))


def _leaf_signature(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype, leaf.stride(), leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _copy_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    copied = leaf.detach().clone()
    return copied.requires_grad_(leaf.requires_grad) if leaf.is_floating_point() else copied


def _extend_trace(trace: StepTrace, blocks: RepeatedBlocks) -> StepTrace:
    """The trace of all blocks from that of few; raises where its blocks do not grow evenly."""
    forward, backward = (_find_block_ranges(trace.calls, blocks, phase) for phase in ("forward", "backward"))
    forward_growth = _compute_block_growth(trace.calls, blocks, forward, 1, 2)
    backward_growth = _compute_block_growth(trace.calls, blocks, backward, 2, 1)
    extended: list[OpCall] = []
    untraced = blocks.num_untraced
    shift: _MemoryCounters = (0.0,) * 4
    for call_index, op_call in enumerate(trace.calls):
        extended.append(_shift_op_call(op_call, shift, blocks, untraced))
        for (begin, end), growth, direction in ((forward[2], forward_growth, 1), (backward[2], backward_growth, -1)):
            if call_index != end - 1:
                continue
            first_offset = untraced if direction < 0 else 0
            for added in range(1, untraced + 1):
                block_shift, offset = _add_growth(shift, growth, added), first_offset + direction * added
                calls = trace.calls[begin:end]
                extended += [_shift_op_call(call, block_shift, blocks, offset, is_inserted=True) for call in calls]
            shift = _add_growth(shift, growth, untraced)
    totals = _extend_module_totals(trace, blocks, forward[2], saved_bytes=forward_growth[1])
    return replace(trace, calls=extended, module_totals=totals)


#: What grows with each block: bytes alive, bytes saved, bytes of gradients, large storages.
_MemoryCounters = tuple[float, ...]


def _read_counters(op_call: OpCall) -> _MemoryCounters:
    return op_call.alive_bytes, op_call.saved_bytes, op_call.gradient_bytes, op_call.large_storages


def _add_growth(before: _MemoryCounters, growth: _MemoryCounters, times: int) -> _MemoryCounters:
    return tuple(counter + times * added for counter, added in zip(before, growth, strict=True))


def _find_block_ranges(op_calls: list[OpCall], blocks: RepeatedBlocks, phase: str) -> list[tuple[int, int]]:
    """For each traced block, from its first call to that of the next block, or to the end of the phase."""
    first_calls: dict[int, int] = {}
    phase_end = 0
    for index, call in enumerate(op_calls):
        if call.phase == phase:
            phase_end = index + 1
            block_index = blocks.index_of(call.path)
            if block_index is not None:
                first_calls.setdefault(block_index, index)
    order = list(range(TRACED_BLOCKS))[:: 1 if phase == "forward" else -1]
    if list(first_calls) != order:
        raise _UnevenBlocksError
    starts = [*first_calls.values(), phase_end]
    return [(first_calls[block], starts[order.index(block) + 1]) for block in range(TRACED_BLOCKS)]


def _compute_block_growth(
    op_calls: list[OpCall], blocks: RepeatedBlocks, ranges: list[tuple[int, int]], first: int, second: int
) -> _MemoryCounters:
    """What each further block adds; the calls of two blocks must be the same otherwise."""
    first_calls, second_calls = (op_calls[slice(*ranges[index])] for index in (first, second))
    first_keys = [_normalize_op_call(call, blocks, first) for call in first_calls]
    if first_keys != [_normalize_op_call(call, blocks, second) for call in second_calls]:
        raise _UnevenBlocksError
    pairs = zip(first_calls, second_calls, strict=True)
    growths = [_add_growth(_read_counters(after), _read_counters(before), -1) for before, after in pairs]
    tolerance = _RELATIVE_TOLERANCE * max(abs(counter) for call in second_calls for counter in _read_counters(call))
    if any(abs(a - b) > tolerance for growth in growths for a, b in zip(growth, growths[0], strict=True)):
        raise _UnevenBlocksError
    return growths[0]


def _normalize_op_call(op_call: OpCall, blocks: RepeatedBlocks, block_index: int) -> OpCall:
    """A call without what grows, and without the number of its block."""
    is_inside = blocks.index_of(op_call.path) == block_index
    path = blocks.rename(op_call.path, 0) if is_inside else op_call.path
    return replace(op_call, path=path, alive_bytes=0.0, saved_bytes=0.0, gradient_bytes=0.0, large_storages=0)


def _shift_op_call(
    op_call: OpCall, shift: _MemoryCounters, blocks: RepeatedBlocks, offset: int, *, is_inserted: bool = False
) -> OpCall:
    """A call with more blocks alive. `is_inserted`: of an added block; otherwise the last traced block, and in backward the one before it too,
    become the last of all."""
    index, path = blocks.index_of(op_call.path), op_call.path
    first_shifted_block = TRACED_BLOCKS - 1 if op_call.phase == "forward" else TRACED_BLOCKS - 2
    if index is not None and (is_inserted or index >= first_shifted_block):
        path = blocks.rename(path, index + offset)
    alive, saved, gradients, large = _add_growth(_read_counters(op_call), shift, 1)
    shifted = replace(op_call, path=path, alive_bytes=alive, saved_bytes=saved, gradient_bytes=gradients)
    return replace(shifted, large_storages=int(large))


def _extend_module_totals(
    trace: StepTrace, blocks: RepeatedBlocks, forward_range: tuple[int, int], saved_bytes: float
) -> dict[str, ModuleTotals]:
    """Figures of modules: each added block has those of a middle one, and modules around the list that much more."""
    op_calls, untraced = trace.calls[slice(*forward_range)], blocks.num_untraced
    flops, moved_bytes = sum(call.flops for call in op_calls), sum(call.moved_bytes for call in op_calls)
    extended: dict[str, ModuleTotals] = {}
    for path, totals in trace.module_totals.items():
        index = blocks.index_of(path)
        if index is None:
            is_enclosing = not path or is_within(blocks.path, path)
            grown = replace(
                totals,
                flops=totals.flops + untraced * flops,
                moved_bytes=totals.moved_bytes + untraced * moved_bytes,
                saved_bytes=totals.saved_bytes + untraced * saved_bytes,
            )
            extended[path] = grown if is_enclosing else totals
            continue
        extended[blocks.rename(path, index + (untraced if index == TRACED_BLOCKS - 1 else 0))] = totals
        if index == TRACED_BLOCKS - 2:
            extended |= {blocks.rename(path, index + offset): totals for offset in range(1, untraced + 1)}
    return extended


def extend_traces(traces: list[StepTrace], blocks: RepeatedBlocks) -> list[StepTrace] | None:
    """The traces of all blocks; None where the traced ones cannot be extrapolated."""
    try:
        return [_extend_trace(trace, blocks) for trace in traces]
    except _UnevenBlocksError:
        return None


def extend_pipeline_units(units: tuple[PipelineUnit, ...], blocks: RepeatedBlocks) -> tuple[PipelineUnit, ...] | None:
    """The units of all blocks from those of few; None where blocks differ."""
    positions = [position for position, unit in enumerate(units) if blocks.index_of(unit.path) is not None]
    start = min(positions, default=0)
    block_units = units[start : start + TRACED_BLOCKS]
    paths = [blocks.block_path(index) for index in range(TRACED_BLOCKS)]
    if len(positions) != TRACED_BLOCKS or [unit.path for unit in block_units] != paths:
        return None
    if replace(block_units[2], path=block_units[1].path) != block_units[1]:
        return None
    middle_units = tuple(replace(block_units[2], path=blocks.block_path(index)) for index in range(2, blocks.count - 1))
    last_unit = replace(block_units[3], path=blocks.block_path(blocks.count - 1))
    return (*units[: start + 2], *middle_units, last_unit, *units[start + TRACED_BLOCKS :])
