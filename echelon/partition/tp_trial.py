"""Test whether layers can be cut in pairs, by running the module that holds a pair on one rank's columns.

The input of the row must be exactly that rank's shard of its full input, in training and in evaluation, buffers must end as before, at several
parameter values (trial_values.py), and the same holds for gradients. Layouts (tp_layouts.py) are tried until one works; views whose width the code
took from elsewhere are adapted (nn/views.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
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
from echelon.tree import map_tensors, tree_tensors
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
    #: Parameters that stay whole and act on the columns (a learned scale, a norm of each head): each rank has a part of their gradients.
    partial_parameters: tuple[str, ...]
    draws_random: bool  #: whether the module that holds it draws random numbers in training


@dataclass(slots=True)
class RecordedCall:
    """The call of the module that holds a candidate, its output, and the input and output of the candidate's row."""

    model: nn.Module
    candidate: Candidate
    training: bool
    ancestor: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    row_input: Tensor
    row_output: Tensor
    channel_dim: int  #: the dim of `row_input` that is cut
    buffers_before: dict[str, Tensor]  #: of the model
    buffers_after: dict[str, Tensor]

    @property
    def row(self) -> Any:
        """The row's module."""
        return self.model.get_submodule(self.candidate.row)

    @property
    def row_width(self) -> int:
        """Size of `row_input` along the cut dim."""
        return self.row_input.shape[self.channel_dim]

    def copy_inputs(self) -> Any:
        """(args, kwargs) without gradients; code may change them in place."""
        return map_tensors(Tensor.detach, copy_tree((self.args, self.kwargs)))

    def local_range(self, layout: ColumnLayout, rank: int) -> tuple[int, int]:
        """(start, size) of a rank's columns in the row's input."""
        sizes = compute_shard_sizes(self.row_width, layout.tp_size, layout.shard_multiple)
        return sum(sizes[:rank]), sizes[rank]


def record_calls(model: nn.Module, candidates: Iterable[Candidate], run_step: RunStep) -> dict[Candidate, RecordedCall]:
    """The candidates' calls in the unchanged model."""
    ancestors_by_candidate = {candidate: list(_iterate_common_ancestors(candidate.paths)) for candidate in candidates}
    inputs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    outputs: dict[str, Any] = {}
    row_calls: dict[str, tuple[Tensor, Tensor]] = {}
    buffers_before: dict[str, dict[str, Tensor]] = {}
    buffers_after: dict[str, dict[str, Tensor]] = {}
    last_copies: dict[str, Tensor] = {}

    def copy_buffers() -> dict[str, Tensor]:
        """Copies of the buffers; unchanged ones are not copied again."""
        nonlocal last_copies
        copies = last_copies
        last_copies = {
            name: copies[name] if name in copies and torch.equal(copies[name], value) else value.detach().clone()
            for name, value in model.named_buffers()
        }
        return last_copies

    def record_start(path: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        inputs[path], buffers_before[path] = copy_tree((args, kwargs)), copy_buffers()

    def record_end(path: str, _: nn.Module, __: Any, out: Any) -> None:
        outputs[path], buffers_after[path] = copy_tree(out), copy_buffers()

    def record_row(path: str, _: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        row_input = [*args, *kwargs.values()][0]
        row_calls[path] = row_input.detach().clone(), out.detach().clone()

    with ExitStack() as hooks:
        for path in {path for ancestors in ancestors_by_candidate.values() for path in ancestors}:
            module = model.get_submodule(path)
            start_hook = module.register_forward_pre_hook(partial(record_start, path), with_kwargs=True)
            hooks.callback(start_hook.remove)
            hooks.callback(module.register_forward_hook(partial(record_end, path)).remove)
        for path in {candidate.row for candidate in ancestors_by_candidate}:
            row = model.get_submodule(path)
            hooks.callback(row.register_forward_hook(partial(record_row, path), with_kwargs=True).remove)
        run_step()
    recorded = {}
    for candidate, ancestors in ancestors_by_candidate.items():
        ancestor = next((path for path in ancestors if path in inputs), None)
        if ancestor is not None and candidate.row in row_calls:
            recorded[candidate] = RecordedCall(
                model, candidate, model.training, ancestor, *inputs[ancestor], outputs[ancestor], *row_calls[candidate.row],
                _find_channel_dim(model.get_submodule(candidate.row)), buffers_before[ancestor], buffers_after[ancestor],
            )  # fmt: skip
    return recorded


def _iterate_common_ancestors(paths: Sequence[str]) -> Iterator[str]:
    """The modules that contain all of them, innermost first. Not all are called: a ModuleDict has no forward."""
    common_prefix: list[str] = []
    for names in zip(*(path.split(".")[:-1] for path in paths), strict=False):
        if len(set(names)) > 1:
            break
        common_prefix.append(names[0])
    for length in range(len(common_prefix), -1, -1):
        yield ".".join(common_prefix[:length])


def find_layout(
    recorded_calls: Sequence[RecordedCall], run_step: RunStep, tp_size: int
) -> tuple[ColumnLayout, tuple[str, ...]] | None:
    """The first layout that works in every recorded run, the first of which was in training; and the partial parameters."""
    first = recorded_calls[0]
    for layout in iterate_layouts(first.model, first.candidate, first.ancestor, first.row_width, tp_size):
        if all(_layout_works(recorded, layout) for recorded in recorded_calls):
            partial_parameters = _find_partial_parameters(first, run_step)
            return None if partial_parameters is None else (layout, partial_parameters)
    return None


def _layout_works(recorded: RecordedCall, layout: ColumnLayout) -> bool:
    columns = recorded.candidate.columns
    sizes = layout.fused_sizes or tuple(count_outputs(recorded.model.get_submodule(path)) for path in columns)
    all_sizes, tp_size = (*sizes, recorded.row_width), layout.tp_size
    if any(not compute_shard_sizes(size, tp_size, layout.shard_multiple)[-1] for size in all_sizes):
        return False
    if torch.equal(recorded.row_input, recorded.row_input.roll(1, recorded.channel_dim)):
        return False  # identical columns prove nothing
    if not _row_outputs_add_up(recorded, layout):
        return False
    if all(size % (tp_size * layout.shard_multiple) == 0 for size in all_sizes):
        return all(_rank_matches(recorded, layout, rank) for rank in {0, tp_size - 1})
    return len(set(all_sizes)) == 1 and all(_rank_matches(recorded, layout, rank) for rank in range(tp_size))


def works_at_values(recorded: RecordedCall, layout: ColumnLayout, rank: int, *, check_gradients: bool = False) -> bool:
    """Whether a layout that works at other parameter values works at these, with `check_gradients` for gradients too."""
    if not all(bool(torch.isfinite(tensor).all()) for tensor in (recorded.row_input, recorded.row_output)):
        return True  # values that the model cannot compute with prove nothing
    if not _rank_matches(recorded, layout, rank):
        return False
    return not check_gradients or _gradients_are_sharded(recorded, layout, rank)


def _gradients_are_sharded(recorded: RecordedCall, layout: ColumnLayout, rank: int) -> bool:
    """Whether the gradients of a rank's columns are its shard of the full gradients. Code may compute the same values with other gradients:
    `x + y - y.detach()`."""
    generator, row_input = torch.Generator().manual_seed(2), recorded.row_input
    row_gradient = torch.randn(row_input.shape, generator=generator, dtype=row_input.dtype).to(row_input.device)
    local_gradient = row_gradient.narrow(recorded.channel_dim, *recorded.local_range(layout, rank))
    full_gradients = _column_gradients(recorded, nullcontext(), row_gradient)
    rank_gradients = _column_gradients(recorded, running_as_rank(recorded, layout, rank), local_gradient)
    if full_gradients is None or rank_gradients is None:
        return full_gradients is rank_gradients
    for path, full, actual in zip(recorded.candidate.columns, full_gradients, rank_gradients, strict=True):
        channel_dim = _find_channel_dim(recorded.model.get_submodule(path))
        expected = _shard_columns(full.movedim(channel_dim, 0), layout.fused_sizes, layout, rank)
        if not are_tensors_close(actual, expected.movedim(0, channel_dim), float(full.abs().max())):
            return False
    return True


def _column_gradients(
    recorded: RecordedCall, rank_context: AbstractContextManager[None], row_gradient: Tensor
) -> list[Tensor] | None:
    """The gradients of the columns' outputs if the row's input has the gradient `row_gradient`; None: no gradient reaches them."""
    column_outputs: list[Tensor] = []

    def make_leaf_forward(_: str, module: Any) -> Forward:
        column_forward = module.forward

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            column_outputs.append(column_forward(*args, **kwargs).detach().requires_grad_(True))
            return column_outputs[-1].clone()

        return forward

    args, kwargs = recorded.copy_inputs()
    ancestor = recorded.model.get_submodule(recorded.ancestor)
    with (
        training_mode(ancestor, training=True),
        copied_buffers(recorded.model, recorded.buffers_before),
        rank_context,
        wrapped_forwards(recorded.model, recorded.candidate.columns, make_leaf_forward),
        _captured_row_inputs(recorded) as row_inputs,
        torch.enable_grad(),
    ):
        ancestor(*args, **kwargs)
    if not row_inputs[0].requires_grad:
        return None
    gradients = torch.autograd.grad(row_inputs[0], column_outputs, row_gradient, allow_unused=True)
    pairs = zip(column_outputs, gradients, strict=True)
    return [torch.zeros_like(output) if gradient is None else gradient for output, gradient in pairs]


@contextmanager
def _captured_row_inputs(recorded: RecordedCall) -> Iterator[list[Tensor]]:
    """Inside, the row returns its recorded output; yields its inputs."""
    inputs: list[Tensor] = []

    def forward(row_input: Tensor) -> Tensor:
        inputs.append(row_input)
        return recorded.row_output.clone()

    with replaced_forward(recorded.row, accept_input_by_name(recorded.row, forward)):
        yield inputs


def _find_channel_dim(module: Any) -> int:
    return -1 if is_linear(module) else -1 - len(module.kernel_size)


def _row_outputs_add_up(recorded: RecordedCall, layout: ColumnLayout) -> bool:
    """Whether the row's outputs on the ranks' shards of its input and weight add up to its full output."""
    row, dim = recorded.row, recorded.channel_dim
    sizes = compute_shard_sizes(recorded.row_width, layout.tp_size, layout.shard_multiple)
    matmul = get_matmul(row)
    with torch.no_grad():
        inputs, weights = recorded.row_input.split(sizes, dim), get_output_first_weight(row).split(sizes, 1)
        total = torch.stack([matmul(x, weight, None) for x, weight in zip(inputs, weights, strict=True)]).sum(0)
        if row.bias is not None:
            total = total + row.bias.view(-1, *(1,) * (-1 - dim))
    return are_tensors_close(total, recorded.row_output)


def _find_partial_parameters(recorded: RecordedCall, run_step: RunStep) -> tuple[str, ...] | None:
    """Parameters other than the columns' that reach the row; None where something does that cannot be summed over the ranks."""
    model, candidate, leaves = recorded.model, recorded.candidate, list[Tensor]()

    def make_leaf(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        leaves.append(tensor.detach().requires_grad_(True))
        return leaves[-1].clone()

    def detach_output(_: str, module: Any) -> Forward:
        forward = module.forward
        return lambda *args, **kwargs: forward(*args, **kwargs).detach()

    args, kwargs = map_tensors(make_leaf, copy_tree((recorded.args, recorded.kwargs)))
    trainable = {name: value for name, value in model.named_parameters() if value.requires_grad}
    with (
        copied_buffers(model, recorded.buffers_before),
        wrapped_forwards(model, (*candidate.columns, *candidate.between), detach_output),
        _captured_row_inputs(recorded) as row_inputs,
        torch.enable_grad(),
    ):
        model.get_submodule(recorded.ancestor)(*args, **kwargs)
        if not row_inputs[0].requires_grad:
            return ()
        grads = torch.autograd.grad(row_inputs[0].sum(), [*leaves, *trainable.values()], allow_unused=True)
    names = [name for name, grad in zip(trainable, grads[len(leaves) :], strict=True) if grad is not None]
    parameters = [trainable[name] for name in names]
    if any(grad is not None for grad in grads[: len(leaves)]) or any(parameter.dim() > 1 for parameter in parameters):
        return None
    return tuple(names) if _reach_loss_only_through(recorded.row, run_step, parameters) else None


def _reach_loss_only_through(row: Any, run_step: RunStep, parameters: list[nn.Parameter]) -> bool:
    row_forward = row.forward
    detached = accept_input_by_name(row, lambda row_input: row_forward(row_input.detach()))
    with replaced_forward(row, detached), torch.enable_grad():
        loss, _ = run_step()
        total = tree_tensors(loss)[0]
        grads = torch.autograd.grad(total.sum(), parameters, allow_unused=True) if total.requires_grad else ()
    return all(grad is None for grad in grads)


def _rank_matches(recorded: RecordedCall, layout: ColumnLayout, rank: int) -> bool:
    model = recorded.model
    expected_input = recorded.row_input.narrow(recorded.channel_dim, *recorded.local_range(layout, rank))
    ancestor = model.get_submodule(recorded.ancestor)
    args, kwargs = recorded.copy_inputs()
    with (
        training_mode(ancestor, training=recorded.training),
        copied_buffers(model, recorded.buffers_before),
        running_as_rank(recorded, layout, rank),
        _captured_row_inputs(recorded) as row_inputs,
    ):
        try:
            out = ancestor(*args, **kwargs)
        except Exception:  # whatever the code raises, it does not work on a shard of its columns
            return False
        buffers = dict(model.named_buffers())
    # Other outputs (a bias per head that later layers use, a buffer) must be unchanged, too.
    between = recorded.candidate.between
    sharded_buffers = {f"{path}.{name}" for path in between for name in model.get_submodule(path)._buffers}
    expected_buffers = {
        name: _shard_columns(value, (), layout, rank) if name in sharded_buffers and value.dim() else value
        for name, value in recorded.buffers_after.items()
    }
    input_matches = len(row_inputs) == 1 and are_tensors_close(row_inputs[0], expected_input)
    return input_matches and are_trees_close((out, buffers), (recorded.output, expected_buffers))


@contextmanager
def running_as_rank(recorded: RecordedCall, layout: ColumnLayout, rank: int) -> Iterator[None]:
    """Inside, the modules before the row compute as on one rank."""
    width = recorded.row_width
    with (
        _divided_attributes(recorded.model, layout, width, rank),
        _sharded_pair(recorded, layout, rank),
        nullcontext()
        if layout.refitted_module is None
        else LocalWidthViews(width, recorded.local_range(layout, rank)[1]),
    ):
        yield


@contextmanager
def _divided_attributes(model: nn.Module, layout: ColumnLayout, row_width: int, rank: int) -> Iterator[None]:
    attributes = [(model.get_submodule(path), name) for path, name in layout.divided_attributes]
    originals = [(module, name, getattr(module, name)) for module, name in attributes]
    unit = layout.shard_multiple
    try:
        for module, name, value in originals:
            setattr(module, name, shard_attribute(value, rank, layout.tp_size, width=row_width, unit=unit))
        yield
    finally:
        for module, name, value in originals:
            setattr(module, name, value)


@contextmanager
def _sharded_pair(recorded: RecordedCall, layout: ColumnLayout, rank: int) -> Iterator[None]:
    model, candidate = recorded.model, recorded.candidate
    between = [model.get_submodule(path) for path in candidate.between]
    tensor_slots: list[dict[str, Any]] = [slots for m in between for slots in (m._parameters, m._buffers)]
    original_slots = [dict(slots) for slots in tensor_slots]
    with wrapped_forwards(model, candidate.columns, lambda _, module: _make_sharded_forward(module, layout, rank)):
        try:
            for slots in tensor_slots:
                for name, value in slots.items():
                    if value is not None and value.dim():
                        slots[name] = _shard_columns(value.detach(), (), layout, rank)
            yield
        finally:
            for slots, values in zip(tensor_slots, original_slots, strict=True):
                slots.update(values)


def _shard_columns(value: Tensor, fused_sizes: Sequence[int], layout: ColumnLayout, rank: int) -> Tensor:
    shards = []
    for block in value.split(list(fused_sizes or (value.shape[0],))):
        sizes = compute_shard_sizes(block.shape[0], layout.tp_size, layout.shard_multiple)
        shards.append(block.narrow(0, sum(sizes[:rank]), sizes[rank]))
    return torch.cat(shards)


def _make_sharded_forward(module: Any, layout: ColumnLayout, rank: int) -> Callable[..., Tensor]:
    weight = _shard_columns(get_output_first_weight(module), layout.fused_sizes, layout, rank)
    bias = None if module.bias is None else _shard_columns(module.bias, layout.fused_sizes, layout, rank)
    matmul = get_matmul(module)
    return accept_input_by_name(module, lambda layer_input: matmul(layer_input, weight, bias))
