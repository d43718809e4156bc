"""Whether layers can be cut in pairs: runs the module that holds a pair on one rank's columns.

Whether the code between them works on part of the columns is not guessed from operators. What reaches the row must be exactly that rank's
part of what reached it before, in training and in evaluation, buffers must end as before, at several parameter values (trial_values.py),
and so must the gradients that come back. Layouts (tp_layouts.py) are tried until one works; views whose width the code took from elsewhere
are adapted (nn/views.py), and the plan notes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from echelon.nn.views import LocalWidthViews
from echelon.partition.tp_layers import (
    accept_input_by_name,
    count_outputs,
    get_matmul,
    get_output_first_weight,
    is_linear,
)
from echelon.partition.tp_layouts import Candidate, ColumnLayout, iterate_layouts
from echelon.plan.placement import compute_shard_sizes, shard_attribute
from echelon.tree import tree_map, tree_tensors
from echelon.trials.trial_run import (
    Forward,
    RunStep,
    are_tensors_close,
    are_trees_close,
    copied_buffers,
    copy_tree,
    replaced_forward,
    training_mode,
    wrapped_forwards,
)


@dataclass(frozen=True, slots=True)
class ColumnRowPair:
    """A candidate that works."""

    candidate: Candidate
    layout: ColumnLayout
    #: Parameters that stay whole and act on the columns (a learnt scale, a norm of each head): each rank has a share of their gradients.
    partial_parameters: tuple[str, ...]
    draws_random: bool  #: whether the module that holds it draws random numbers in training


@dataclass(slots=True)
class RecordedCall:
    """The call of the module that holds a pair, what came out of it, and what the row in it was given and gave."""

    training: bool
    ancestor: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    row_input: Tensor
    row_output: Tensor
    channel_dim: int  #: of `row_input` that is cut
    #: The model's buffers when the call began, and when it ended.
    buffers_before: dict[str, Tensor]
    buffers_after: dict[str, Tensor]

    @property
    def row_width(self) -> int:
        """Of what the row was given."""
        return self.row_input.shape[self.channel_dim]


def record_calls(model: nn.Module, candidates: Iterable[Candidate], run_step: RunStep) -> dict[Candidate, RecordedCall]:
    """What the candidates do in the model as it is."""
    ancestors_by_candidate = {pair: list(_iterate_common_ancestors(pair.paths)) for pair in candidates}
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    outputs: dict[str, Any] = {}
    row_calls: dict[str, tuple[Tensor, Tensor]] = {}
    buffers_at_start: dict[str, dict[str, Tensor]] = {}
    buffers_at_end: dict[str, dict[str, Tensor]] = {}
    last_copies: dict[str, Tensor] = {}
    hooks = []

    def copy_buffers() -> dict[str, Tensor]:
        """Copies of those now; one that has not changed is not copied again."""
        nonlocal last_copies
        copies = last_copies
        last_copies = {
            name: copies[name] if name in copies and torch.equal(copies[name], value) else value.detach().clone()
            for name, value in model.named_buffers()
        }
        return last_copies

    for path in {path for ancestors in ancestors_by_candidate.values() for path in ancestors}:

        def record_start(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            calls[path], buffers_at_start[path] = copy_tree((args, kwargs)), copy_buffers()

        def record_end(_: nn.Module, __: Any, out: Any, path: str = path) -> None:
            outputs[path], buffers_at_end[path] = copy_tree(out), copy_buffers()

        hooks.append(model.get_submodule(path).register_forward_pre_hook(record_start, with_kwargs=True))
        hooks.append(model.get_submodule(path).register_forward_hook(record_end))
    for row in {pair_candidate.row for pair_candidate in ancestors_by_candidate}:

        def record_row(_: nn.Module, args: Any, kwargs: Any, out: Any, row: str = row) -> None:
            row_input = [*args, *kwargs.values()][0]
            row_calls[row] = row_input.detach().clone(), out.detach().clone()

        hooks.append(model.get_submodule(row).register_forward_hook(record_row, with_kwargs=True))
    try:
        run_step()
    finally:
        for hook in hooks:
            hook.remove()
    recorded = {}
    for candidate, ancestors in ancestors_by_candidate.items():
        ancestor = next((path for path in ancestors if path in calls), None)
        if ancestor is not None and candidate.row in row_calls:
            module: Any = model.get_submodule(candidate.row)
            channel_dim = _find_channel_dim(module)
            recorded[candidate] = RecordedCall(
                model.training, ancestor, *calls[ancestor], outputs[ancestor], *row_calls[candidate.row], channel_dim,
                buffers_at_start[ancestor], buffers_at_end[ancestor],
            )  # fmt: skip
    return recorded


def copy_detached(tree: Any) -> Any:
    """The same without gradients: code may change it in place."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, copy_tree(tree))


def _iterate_common_ancestors(paths: Sequence[str]) -> Iterator[str]:
    """The modules that contain all of them, innermost first. Not all are called: a ModuleDict only holds."""
    split_paths = [path.split(".")[:-1] for path in paths]
    common_prefix: list[str] = []
    for path_components in zip(*split_paths, strict=False):
        if len(set(path_components)) > 1:
            break
        common_prefix.append(path_components[0])
    for length in range(len(common_prefix), -1, -1):
        yield ".".join(common_prefix[:length])


def find_layout(
    model: nn.Module, run_step: RunStep, candidate: Candidate, recorded_calls: Sequence[RecordedCall], tp_size: int
) -> tuple[ColumnLayout, tuple[str, ...]] | None:
    """The first layout that works in every recorded run, the first of which was in training; and the partial parameters."""
    training_run = recorded_calls[0]
    for layout in iterate_layouts(model, candidate, training_run.ancestor, training_run.row_width, tp_size):
        if all(_layout_works(model, candidate, recorded, layout) for recorded in recorded_calls):
            partial_parameters = _find_partial_parameters(model, run_step, candidate, training_run)
            return None if partial_parameters is None else (layout, partial_parameters)
    return None


def _layout_works(model: nn.Module, candidate: Candidate, recorded: RecordedCall, layout: ColumnLayout) -> bool:
    """Whether each rank's columns lead to exactly its part of the row's input."""
    sizes = layout.fused_sizes or tuple(count_outputs(model.get_submodule(path)) for path in candidate.columns)
    tp_size = layout.tp_size
    if any(not compute_shard_sizes(size, tp_size, layout.shard_multiple)[-1] for size in (*sizes, recorded.row_width)):
        return False
    if torch.equal(recorded.row_input, recorded.row_input.roll(1, recorded.channel_dim)):
        return False  # columns that are all alike tell nothing
    if not _row_outputs_add_up(model.get_submodule(candidate.row), recorded, layout):
        return False
    if all(size % (tp_size * layout.shard_multiple) == 0 for size in (*sizes, recorded.row_width)):
        return all(_rank_matches(model, candidate, recorded, layout, rank) for rank in {0, tp_size - 1})
    has_equal_widths = recorded.row_width == sizes[0] and len(set(sizes)) == 1
    return has_equal_widths and all(_rank_matches(model, candidate, recorded, layout, rank) for rank in range(tp_size))


def works_at_values(
    model: nn.Module,
    candidate: Candidate,
    recorded: RecordedCall,
    layout: ColumnLayout,
    rank: int,
    *,
    check_gradients: bool = False,
) -> bool:
    """Whether a layout that works at other parameter values (values.py) works at these, for gradients too where `check_gradients` says so."""
    if not all(bool(torch.isfinite(tensor).all()) for tensor in (recorded.row_input, recorded.row_output)):
        return True  # values that the model cannot compute with say nothing
    if not _rank_matches(model, candidate, recorded, layout, rank):
        return False
    return not check_gradients or _gradients_are_sharded(model, candidate, recorded, layout, rank)


def _gradients_are_sharded(
    model: nn.Module, candidate: Candidate, recorded: RecordedCall, layout: ColumnLayout, rank: int
) -> bool:
    """Whether the gradients that reach a rank's columns are its part of those that reach all columns. Code may compute the same values
    with other gradients: `x + y - y.detach()`."""
    generator, row_input = torch.Generator().manual_seed(2), recorded.row_input
    row_gradient = torch.randn(row_input.shape, generator=generator, dtype=row_input.dtype).to(row_input.device)
    shard_sizes = compute_shard_sizes(recorded.row_width, layout.tp_size, layout.shard_multiple)
    local_gradient = row_gradient.narrow(recorded.channel_dim, sum(shard_sizes[:rank]), shard_sizes[rank])
    full_gradients = _column_gradients(model, candidate, recorded, nullcontext(), row_gradient)
    as_rank = running_as_rank(model, candidate, recorded, layout, rank)
    rank_gradients = _column_gradients(model, candidate, recorded, as_rank, local_gradient)
    if full_gradients is None or rank_gradients is None:
        return full_gradients is rank_gradients
    for path, full_gradient, rank_gradient in zip(candidate.columns, full_gradients, rank_gradients, strict=True):
        channel_dim = _find_channel_dim(model.get_submodule(path))
        expected = _shard_columns(full_gradient.movedim(channel_dim, 0), layout.fused_sizes, layout, rank)
        scale = float(full_gradient.abs().max())
        if not are_tensors_close(rank_gradient, expected.movedim(0, channel_dim), scale):
            return False
    return True


def _column_gradients(
    model: nn.Module,
    candidate: Candidate,
    recorded: RecordedCall,
    rank_context: AbstractContextManager[None],
    row_gradient: Tensor,
) -> list[Tensor] | None:
    """The gradients of the columns' outputs where the row's input has the gradient `row_gradient`; None: no gradient gets there."""
    column_outputs: list[Tensor] = []

    def make_leaf_forward(_: str, module: Any) -> Forward:
        column_forward = module.forward

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            column_outputs.append(column_forward(*args, **kwargs).detach().requires_grad_(True))
            return column_outputs[-1].clone()

        return forward

    args, kwargs = copy_detached((recorded.args, recorded.kwargs))
    ancestor = model.get_submodule(recorded.ancestor)
    with (
        training_mode(ancestor, training=True),
        copied_buffers(model, recorded.buffers_before),
        rank_context,
        wrapped_forwards(model, candidate.columns, make_leaf_forward),
        _captured_row_inputs(model, candidate.row, recorded) as row_inputs,
        torch.enable_grad(),
    ):
        ancestor(*args, **kwargs)
    if not row_inputs[0].requires_grad:
        return None
    gradients = torch.autograd.grad(row_inputs[0], column_outputs, row_gradient, allow_unused=True)
    pairs = zip(column_outputs, gradients, strict=True)
    return [torch.zeros_like(output) if gradient is None else gradient for output, gradient in pairs]


@contextmanager
def _captured_row_inputs(model: nn.Module, row: str, recorded: RecordedCall) -> Iterator[list[Tensor]]:
    """Inside, the row returns what it returned when it was recorded; yields the inputs that it gets."""
    inputs: list[Tensor] = []

    def forward(row_input: Tensor) -> Tensor:
        inputs.append(row_input)
        return recorded.row_output.clone()

    module = model.get_submodule(row)
    with replaced_forward(module, accept_input_by_name(module, forward)):
        yield inputs


def _find_channel_dim(module: Any) -> int:
    return -1 if is_linear(module) else -1 - len(module.kernel_size)


def _row_outputs_add_up(row_module: Any, recorded: RecordedCall, layout: ColumnLayout) -> bool:
    """Whether what the ranks' inputs of the row give, each with its part of the weight, adds up to what it gave."""
    shard_sizes = compute_shard_sizes(recorded.row_width, layout.tp_size, layout.shard_multiple)
    matmul = get_matmul(row_module)
    with torch.no_grad():
        shards = zip(
            recorded.row_input.split(shard_sizes, recorded.channel_dim),
            get_output_first_weight(row_module).split(shard_sizes, 1),
            strict=True,
        )
        total = torch.stack([matmul(input_shard, weight_shard, None) for input_shard, weight_shard in shards]).sum(0)
        if row_module.bias is not None:
            total = total + row_module.bias.view(-1, *(1,) * (-1 - recorded.channel_dim))
    return are_tensors_close(total, recorded.row_output)


def _find_partial_parameters(
    model: nn.Module, run_step: RunStep, candidate: Candidate, recorded: RecordedCall
) -> tuple[str, ...] | None:
    """Parameters that reach the row beside the columns; None where something does that cannot be added up over the ranks."""
    leaves: list[Tensor] = []

    def make_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        leaves.append(leaf.detach().requires_grad_(True))
        return leaves[-1].clone()

    def detach_output(_: str, module: Any) -> Forward:
        forward = module.forward
        return lambda *args, **kwargs: forward(*args, **kwargs).detach()

    args, kwargs = tree_map(make_leaf, copy_tree((recorded.args, recorded.kwargs)))
    trainable = {name: value for name, value in model.named_parameters() if value.requires_grad}
    with (
        copied_buffers(model, recorded.buffers_before),
        wrapped_forwards(model, (*candidate.columns, *candidate.between), detach_output),
        _captured_row_inputs(model, candidate.row, recorded) as row_inputs,
        torch.enable_grad(),
    ):
        model.get_submodule(recorded.ancestor)(*args, **kwargs)
        if not row_inputs[0].requires_grad:
            return ()
        grads = torch.autograd.grad(row_inputs[0].sum(), [*leaves, *trainable.values()], allow_unused=True)
    names = [name for name, grad in zip(trainable, grads[len(leaves) :], strict=True) if grad is not None]
    if any(grad is not None for grad in grads[: len(leaves)]) or any(trainable[name].dim() > 1 for name in names):
        return None
    parameters = [trainable[name] for name in names]
    return tuple(names) if _reaches_loss_only_through(model, run_step, candidate.row, parameters) else None


def _reaches_loss_only_through(model: nn.Module, run_step: RunStep, row: str, parameters: list[nn.Parameter]) -> bool:
    """Whether the loss depends on parameters through a row alone."""
    module = model.get_submodule(row)
    row_forward = module.forward
    detached = accept_input_by_name(module, lambda row_input: row_forward(row_input.detach()))
    with replaced_forward(module, detached), torch.enable_grad():
        loss, _ = run_step()
        total = tree_tensors(loss)[0]
        grads = torch.autograd.grad(total.sum(), parameters, allow_unused=True) if total.requires_grad else ()
    return all(grad is None for grad in grads)


def _rank_matches(
    model: nn.Module, candidate: Candidate, recorded: RecordedCall, layout: ColumnLayout, rank: int
) -> bool:
    shard_sizes = compute_shard_sizes(recorded.row_width, layout.tp_size, layout.shard_multiple)
    expected_input = recorded.row_input.narrow(recorded.channel_dim, sum(shard_sizes[:rank]), shard_sizes[rank])
    ancestor = model.get_submodule(recorded.ancestor)
    args, kwargs = copy_detached((recorded.args, recorded.kwargs))
    with (
        training_mode(ancestor, training=recorded.training),
        copied_buffers(model, recorded.buffers_before),
        running_as_rank(model, candidate, recorded, layout, rank),
        _captured_row_inputs(model, candidate.row, recorded) as row_inputs,
    ):
        try:
            out = ancestor(*args, **kwargs)
        except Exception:  # whatever the code says to a part of its columns, it does not work on one
            return False
        buffers = dict(model.named_buffers())
    # What else comes out (a bias per head that later layers take over, a buffer) must be as it was, too.
    sharded_buffers = {f"{path}.{name}" for path in candidate.between for name in model.get_submodule(path)._buffers}
    expected_buffers = {
        name: _shard_columns(value, (), layout, rank) if name in sharded_buffers and value.dim() else value
        for name, value in recorded.buffers_after.items()
    }
    return (
        len(row_inputs) == 1
        and are_tensors_close(row_inputs[0], expected_input)
        and are_trees_close((out, buffers), (recorded.output, expected_buffers))
    )


@contextmanager
def running_as_rank(
    model: nn.Module, candidate: Candidate, recorded: RecordedCall, layout: ColumnLayout, rank: int
) -> Iterator[None]:
    """Inside, what lies before the row computes as one rank would."""
    local_width = compute_shard_sizes(recorded.row_width, layout.tp_size, layout.shard_multiple)[rank]
    with (
        _divided_attributes(model, layout, recorded.row_width, rank),
        _sharded_pair(model, candidate, layout, rank),
        nullcontext() if layout.refitted_module is None else LocalWidthViews(recorded.row_width, local_width),
    ):
        yield


@contextmanager
def _divided_attributes(model: nn.Module, layout: ColumnLayout, row_width: int, rank: int) -> Iterator[None]:
    attributes = [(model.get_submodule(path), name) for path, name in layout.divided_attributes]
    original_values = [getattr(module, name) for module, name in attributes]
    try:
        for (module, name), value in zip(attributes, original_values, strict=True):
            unit = layout.shard_multiple
            setattr(module, name, shard_attribute(value, rank, layout.tp_size, width=row_width, unit=unit))
        yield
    finally:
        for (module, name), value in zip(attributes, original_values, strict=True):
            setattr(module, name, value)


@contextmanager
def _sharded_pair(model: nn.Module, candidate: Candidate, layout: ColumnLayout, rank: int) -> Iterator[None]:
    """The columns and the modules between compute with one rank's part."""
    between = [model.get_submodule(path) for path in candidate.between]
    tensor_slots: list[dict[str, Any]] = [
        slots for module in between for slots in (module._parameters, module._buffers)
    ]
    original_slots = [dict(slots) for slots in tensor_slots]
    with wrapped_forwards(model, candidate.columns, lambda _, module: _make_sharded_forward(module, layout, rank)):
        try:
            for slot in tensor_slots:
                for name, value in slot.items():
                    if value is not None and value.dim():
                        slot[name] = _shard_columns(value.detach(), (), layout, rank)
            yield
        finally:
            for slot, values in zip(tensor_slots, original_slots, strict=True):
                slot.update(values)


def _shard_columns(value: Tensor, fused_sizes: Sequence[int], layout: ColumnLayout, rank: int) -> Tensor:
    shards = []
    for block in value.split(list(fused_sizes or (value.shape[0],))):
        shard_sizes = compute_shard_sizes(block.shape[0], layout.tp_size, layout.shard_multiple)
        shards.append(block.narrow(0, sum(shard_sizes[:rank]), shard_sizes[rank]))
    return torch.cat(shards)


def _make_sharded_forward(module: Any, layout: ColumnLayout, rank: int) -> Callable[..., Tensor]:
    weight = _shard_columns(get_output_first_weight(module), layout.fused_sizes, layout, rank)
    bias = None if module.bias is None else _shard_columns(module.bias, layout.fused_sizes, layout, rank)
    matmul = get_matmul(module)
    return accept_input_by_name(module, lambda layer_input: matmul(layer_input, weight, bias))
