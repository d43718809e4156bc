"""Blocks that are alike: few of them are traced, and the trace is stretched to as many as there are.

Nothing is guessed. Blocks count as alike where their classes, attributes, parameters and buffers are, where forward calls each of them
once, one after another, with arguments of the same shapes and values, and does the same between any two of them (`is_uniform_in_forward` looks
at all of them, with the insides of all but the first left out). Where the traced ones turn out not to grow evenly all are traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from echelon.plan.profile import PipelineUnit, find_fsdp_units
from echelon.profiler.module_calls import intercept_unit_calls
from echelon.trials.module_tree import list_modules
from echelon.trials.op_recorder import ModuleTotals, OpCall, StepTrace

#: Blocks that are traced: the first and the last, and two between them that tell what each further one adds.
TRACED_BLOCKS = 4
#: From so many blocks on it is worth it.
_MIN_BLOCKS = 8
#: Parts of a module's state that say nothing of what it computes, or that are looked at by themselves.
_IGNORED_ATTRIBUTES = {"_parameters", "_buffers", "_modules", "training"}
#: How far two sums of bytes may lie apart, in parts of the larger, and be the same.
_RELATIVE_TOLERANCE = 1e-9


class _UnevenBlocksError(Exception):
    """The traced blocks do not tell of the others."""


@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """`count` blocks alike, the children of the list at `path`."""

    path: str
    count: int

    @property
    def num_untraced(self) -> int:
        """Blocks that are not traced."""
        return self.count - TRACED_BLOCKS

    def block_path(self, index: int) -> str:
        """The path of a block."""
        return f"{self.path}.{index}" if self.path else str(index)


def find_repeated_blocks(model: nn.Module) -> RepeatedBlocks | None:
    """The longest list of blocks alike, if it is long enough."""
    paths = find_fsdp_units(list_modules(model))
    longest: RepeatedBlocks | None = None
    for parent in dict.fromkeys(path.rpartition(".")[0] for path in paths):
        block_list = model.get_submodule(parent)
        child_names = list(block_list._modules)
        child_paths = [f"{parent}.{name}" if parent else name for name in child_names]
        if (
            not isinstance(block_list, nn.ModuleList | nn.Sequential)
            or len(child_names) < _MIN_BLOCKS
            or not set(child_paths) <= set(paths)
        ):
            continue
        signatures = [_compute_module_signature(child) for child in block_list.children()]
        if len(signatures) == len(child_names) and all(
            signature is not None and _safe_equal(signature, signatures[0]) for signature in signatures
        ):
            longest = max(
                (longest, RepeatedBlocks(parent, len(child_names))), key=lambda blocks: blocks.count if blocks else 0
            )
    return longest


def _compute_module_signature(module: nn.Module) -> Any:
    """What decides what a module computes; None: not told."""
    attributes = {name: value for name, value in vars(module).items() if name not in _IGNORED_ATTRIBUTES}
    hooks = [name for name, value in attributes.items() if "hook" in name and isinstance(value, dict) and value]
    if hooks:
        return None
    attribute_signatures = {name: _attribute_signature(value) for name, value in attributes.items()}
    child_signatures = {name: _compute_module_signature(child) for name, child in module.named_children()}
    if None in child_signatures.values():
        return None
    tensor_signatures = [
        [
            (name, _attribute_signature(value), getattr(value, "requires_grad", None))
            for name, value in named_tensors.items()
        ]
        for named_tensors in (module._parameters, module._buffers)
    ]
    return type(module), attribute_signatures, tensor_signatures, child_signatures


def _attribute_signature(value: Any) -> Any:
    """A tensor by its shape; anything else by itself, so that objects of their own are never alike."""
    return (tuple(value.shape), value.dtype, value.stride()) if isinstance(value, Tensor) else value


@contextmanager
def shortened_model(model: nn.Module, blocks: RepeatedBlocks) -> Iterator[None]:
    """Inside, the list holds the first few blocks only."""
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
    """Whether `run_step()`, which computes the loss, treats all blocks alike, and what comes before and after them as with few blocks."""
    full = _record_glue(model, blocks, blocks.count, run_step)
    with shortened_model(model, blocks):
        short = _record_glue(model, blocks, TRACED_BLOCKS, run_step)
    if full is None or short is None or not all(_safe_equal(full[index], short[index]) for index in (0, 1, -1)):
        return False
    inner = full[1:-1]
    return all(_safe_equal(segment, inner[0]) for segment in inner) and all(
        _safe_equal(segment, inner[0]) for segment in short[1:-1]
    )


def _safe_equal(first: Any, second: Any) -> bool:
    """Whether two notes are the same; what cannot be compared is not."""
    try:
        return bool(first == second)
    except Exception:  # a value with an equality of its own
        return False


def _record_glue(
    model: nn.Module, blocks: RepeatedBlocks, num_blocks: int, run_step: Callable[[], Any]
) -> list[Any] | None:
    """What is computed before the first block, between any two, and after the last, with what each block is given; None where blocks are
    not called once each in their order."""
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
    """Operators with the shapes that they read, cut into parts."""

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
    """A tensor of the same form that nothing is known of."""
    if not isinstance(leaf, Tensor):
        return leaf
    copied = leaf.detach().clone()
    return copied.requires_grad_(leaf.requires_grad) if leaf.is_floating_point() else copied


def extend_trace(trace: StepTrace, blocks: RepeatedBlocks) -> StepTrace:
    """The trace of a model with few blocks as that of all; raises where its blocks do not grow evenly."""
    forward, backward = (_find_block_ranges(trace.calls, blocks, phase) for phase in ("forward", "backward"))
    forward_growth = _compute_block_growth(trace.calls, blocks, forward[1], forward[2], (1, 2))
    backward_growth = _compute_block_growth(trace.calls, blocks, backward[2], backward[1], (2, 1))
    extended_calls: list[OpCall] = []
    shift = _ZERO_COUNTERS
    for call_index, op_call in enumerate(trace.calls):
        extended_calls.append(_shift_op_call(op_call, shift, blocks, blocks.num_untraced))
        for (begin, end), growth, direction in ((forward[2], forward_growth, 1), (backward[2], backward_growth, -1)):
            if call_index != end - 1:
                continue
            first_offset = blocks.num_untraced if direction < 0 else 0
            for added in range(1, blocks.num_untraced + 1):
                block_shift = _add_growth(shift, growth, added)
                extended_calls += [
                    _shift_op_call(block_call, block_shift, blocks, first_offset + direction * added, is_inserted=True)
                    for block_call in trace.calls[begin:end]
                ]
            shift = _add_growth(shift, growth, blocks.num_untraced)
    return replace(
        trace, calls=extended_calls, module_totals=_extend_module_totals(trace, blocks, forward[2], forward_growth)
    )


#: What grows: bytes alive, bytes kept, bytes of gradients, blocks of memory.
_MemoryCounters = tuple[float, float, float, float]
_ZERO_COUNTERS: _MemoryCounters = (0.0, 0.0, 0.0, 0.0)


def _read_counters(op_call: OpCall) -> _MemoryCounters:
    return op_call.alive_bytes, op_call.saved_bytes, op_call.gradient_bytes, op_call.large_storages


def _add_growth(before: _MemoryCounters, growth: _MemoryCounters, times: int) -> _MemoryCounters:
    alive_bytes, saved_bytes, gradients, large = (
        counter + times * added for counter, added in zip(before, growth, strict=True)
    )
    return alive_bytes, saved_bytes, gradients, large


def _find_block_index(path: str, blocks: RepeatedBlocks) -> int | None:
    """Which block of the run a module lies in."""
    path_in_list = path[len(blocks.path) + 1 :] if blocks.path else path
    if blocks.path and not path.startswith(blocks.path + "."):
        return None
    block_name = path_in_list.partition(".")[0]
    return int(block_name) if block_name.isdigit() else None


def _rename_block(path: str, blocks: RepeatedBlocks, index: int) -> str:
    path_in_list = path[len(blocks.path) + 1 :] if blocks.path else path
    _, dot, suffix = path_in_list.partition(".")
    return blocks.block_path(index) + dot + suffix


def _find_block_ranges(op_calls: list[OpCall], blocks: RepeatedBlocks, phase: str) -> list[tuple[int, int]]:
    """For each traced block, from its first call to the first of the next one that comes."""
    first_calls: dict[int, int] = {}
    phase_end = max((index for index, call in enumerate(op_calls) if call.phase == phase), default=-1) + 1
    for index, call in enumerate(op_calls):
        block_index = _find_block_index(call.path, blocks) if call.phase == phase else None
        if block_index is not None:
            first_calls.setdefault(block_index, index)
    order = list(range(TRACED_BLOCKS)) if phase == "forward" else list(reversed(range(TRACED_BLOCKS)))
    if list(first_calls) != order:
        raise _UnevenBlocksError
    ends = [*[first_calls[block_index] for block_index in order[1:]], phase_end]
    ranges = dict(zip(order, zip((first_calls[block_index] for block_index in order), ends, strict=True), strict=True))
    return [ranges[block_index] for block_index in range(TRACED_BLOCKS)]


def _compute_block_growth(
    op_calls: list[OpCall],
    blocks: RepeatedBlocks,
    first_range: tuple[int, int],
    second_range: tuple[int, int],
    indices: tuple[int, int],
) -> _MemoryCounters:
    """What one block more adds; the calls of two blocks must be the same but for that."""
    first_calls, second_calls = op_calls[slice(*first_range)], op_calls[slice(*second_range)]
    if len(first_calls) != len(second_calls):
        raise _UnevenBlocksError
    growths = []
    for first, second in zip(first_calls, second_calls, strict=True):
        if _normalize_op_call(first, blocks, indices[0]) != _normalize_op_call(second, blocks, indices[1]):
            raise _UnevenBlocksError
        growths.append(
            tuple(
                second_value - first_value
                for first_value, second_value in zip(_read_counters(first), _read_counters(second), strict=True)
            )
        )
    first_growth = growths[0]
    largest_counter = max(max(abs(first_value) for first_value in _read_counters(op_call)) for op_call in second_calls)
    if any(
        abs(first_value - second_value) > _RELATIVE_TOLERANCE * largest_counter
        for growth in growths
        for first_value, second_value in zip(growth, first_growth, strict=True)
    ):
        raise _UnevenBlocksError
    return first_growth[0], first_growth[1], first_growth[2], first_growth[3]


def _normalize_op_call(op_call: OpCall, blocks: RepeatedBlocks, block_index: int) -> OpCall:
    """A call without what grows, and without the number of its block."""
    path = (
        _rename_block(op_call.path, blocks, 0)
        if _find_block_index(op_call.path, blocks) == block_index
        else op_call.path
    )
    return replace(op_call, path=path, alive_bytes=0.0, saved_bytes=0.0, gradient_bytes=0.0, large_storages=0)


def _shift_op_call(
    op_call: OpCall, shift: _MemoryCounters, blocks: RepeatedBlocks, offset: int, *, is_inserted: bool = False
) -> OpCall:
    """A call where more blocks are under way. `is_inserted`: of a block that is put in; else the last traced block becomes the last of all, and
    in backward the one before it too."""
    block_index = _find_block_index(op_call.path, blocks)
    path = op_call.path
    first_shifted_block = TRACED_BLOCKS - 1 if op_call.phase == "forward" else TRACED_BLOCKS - 2
    if block_index is not None and (is_inserted or block_index >= first_shifted_block):
        path = _rename_block(op_call.path, blocks, block_index + offset)
    alive, saved, gradients, large = (
        counter + added for counter, added in zip(_read_counters(op_call), shift, strict=True)
    )
    return replace(
        op_call, path=path, alive_bytes=alive, saved_bytes=saved, gradient_bytes=gradients, large_storages=int(large)
    )


def _extend_module_totals(
    trace: StepTrace, blocks: RepeatedBlocks, forward_range: tuple[int, int], growth: _MemoryCounters
) -> dict[str, ModuleTotals]:
    """Figures of modules: each further block has those of a middle one, and what is around them that much more."""
    op_calls = trace.calls[slice(*forward_range)]
    flops, moved_bytes = sum(op_call.flops for op_call in op_calls), sum(op_call.moved_bytes for op_call in op_calls)
    extended: dict[str, ModuleTotals] = {}
    for path, totals in trace.module_totals.items():
        index = _find_block_index(path, blocks)
        if index is None:
            is_enclosing = not path or blocks.path == path or blocks.path.startswith(path + ".")
            extended[path] = (
                replace(
                    totals,
                    flops=totals.flops + blocks.num_untraced * flops,
                    moved_bytes=totals.moved_bytes + blocks.num_untraced * moved_bytes,
                    saved_bytes=totals.saved_bytes + blocks.num_untraced * growth[1],
                )
                if is_enclosing
                else totals
            )
            continue
        extended[_rename_block(path, blocks, index + (blocks.num_untraced if index == TRACED_BLOCKS - 1 else 0))] = (
            totals
        )
        if index == TRACED_BLOCKS - 2:
            extended |= {
                _rename_block(path, blocks, index + offset): totals for offset in range(1, blocks.num_untraced + 1)
            }
    return extended


def extend_traces(traces: list[StepTrace], blocks: RepeatedBlocks) -> list[StepTrace] | None:
    """The traces of all blocks; None where those that were traced do not tell of the others."""
    try:
        return [extend_trace(trace, blocks) for trace in traces]
    except _UnevenBlocksError:
        return None


def extend_pipeline_units(units: tuple[PipelineUnit, ...], blocks: RepeatedBlocks) -> tuple[PipelineUnit, ...] | None:
    """Visits of all blocks by those of few; None where blocks differ."""
    positions = [position for position, unit in enumerate(units) if _find_block_index(unit.path, blocks) is not None]
    block_units = [units[position] for position in positions]
    if [unit.path for unit in block_units] != [
        blocks.block_path(index) for index in range(TRACED_BLOCKS)
    ] or positions != list(range(positions[0], positions[0] + TRACED_BLOCKS)):
        return None
    if replace(block_units[2], path=block_units[1].path) != block_units[1]:
        return None
    middle_units = tuple(replace(block_units[2], path=blocks.block_path(index)) for index in range(2, blocks.count - 1))
    last_unit = replace(block_units[3], path=blocks.block_path(blocks.count - 1))
    return (*units[: positions[2]], *middle_units, last_unit, *units[positions[3] + 1 :])
