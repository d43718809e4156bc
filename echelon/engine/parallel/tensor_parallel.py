"""Tensor parallelism: weights are sharded over a group of ranks, and modules compute with plain local shards.

    x ──copy──> column-parallel ──(local columns)──> row-parallel ──all-reduce──> y         a pair: one collective per direction
    x ──copy──> column-parallel ──all-gather──> y                                           gather: any single product
    ids ──────> local vocabulary rows ──all-reduce──> y                                     vocabulary
    weight shards ──all-gather──> full weight while the module runs                         stored: works for every module

Parameters are plain tensors that hold this rank's shard: optimizers step them at full speed, and fully_shard takes them like any others.
Between the sharded modules the model's own code runs unchanged, on part of the sequence where the plan says so (sequence_parallel.py).
tp_forwards.py holds the modules' forwards, tp_collectives.py the communication, shard_layout.py where a shard lies in the full tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from echelon.engine.parallel.module_tensors import as_registered, named_tensors, replace_tensors
from echelon.engine.parallel.sequence_parallel import (
    contains_module,
    install_sequence_parallel,
    make_segment_communicators,
)
from echelon.engine.parallel.shard_layout import TPShard
from echelon.engine.parallel.tp_collectives import TPCommunicator
from echelon.engine.parallel.tp_forwards import FORWARD_BUILDERS
from echelon.errors import PlanError
from echelon.nn.recurrent import refresh_flat_weights
from echelon.nn.views import LocalWidthViews
from echelon.partition.tp_layers import accept_input_by_name, count_inputs
from echelon.plan.placement import Placement, compute_shard_sizes, shard_attribute
from echelon.plan.sequence_segment import SequenceSegment

# Shards


def find_tp_shards(model: nn.Module, placements: Iterable[Placement], tp: TPCommunicator) -> dict[str, TPShard]:
    """This rank's shard of each sharded parameter and buffer, under each of its names."""
    shards_by_id: dict[int, TPShard] = {}
    for placement in placements:
        module = model.get_submodule(placement.path)
        for piece in placement.slices:
            tensor = attrgetter(piece.name)(module)
            shards_by_id[id(tensor)] = TPShard(
                tensor.shape, piece.dim, piece.fused_sizes, tp.rank, tp.size, placement.unit
            )
    names = named_tensors(model, remove_duplicate=False)
    return {name: shards_by_id[id(tensor)] for name, tensor in names if id(tensor) in shards_by_id}


def shard_parameters(model: nn.Module, tp_shards: Mapping[str, TPShard]) -> None:
    """Keep only this rank's shards of the parameters and buffers; shared ones stay shared."""

    def shard(name: str, tensor: Tensor) -> Tensor | None:
        return as_registered(tp_shards[name].extract(tensor), tensor) if name in tp_shards else None

    replace_tensors(model, shard)


# Computation


def install_tensor_parallel(
    model: nn.Module, placements: Iterable[Placement], tp: TPCommunicator, segments: Iterable[SequenceSegment] = ()
) -> None:
    """Make modules compute with shards. Their parameters are still full, and must be sharded before the first call."""
    segment_tps = make_segment_communicators(segments, tp)
    partial_names = {name for segment in segment_tps for name in segment.partial_gradients}
    stored: dict[str, list[_StoredModule]] = {}
    for placement in placements:
        module: Any = model.get_submodule(placement.path)
        module_tp = next(
            (item for segment, item in segment_tps.items() if contains_module(segment, placement.path)), tp
        )
        _localize_attributes(model, module, placement, tp)
        if placement.cut == "stored":
            stored_module = _StoredModule.from_placement(module, placement, tp, partial_names)
            stored.setdefault(placement.gathered_in, []).append(stored_module)
        elif placement.cut in FORWARD_BUILDERS:
            forward = FORWARD_BUILDERS[placement.cut](module, module_tp)
            if placement.uses_rng:
                forward = _with_rank_rng(module, forward, placement.cut, module_tp)
            module.forward = PatchedForward(accept_input_by_name(module, forward))
    for scope_path, modules in stored.items():
        _gather_while_running(model.get_submodule(scope_path), scope_path, modules)
    for segment, segment_tp in segment_tps.items():
        install_sequence_parallel(model, segment, segment_tp)
    for layer in model.modules():
        # Fused inference kernels read the weights of submodules without calling them.
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0
        if isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False


class PatchedForward:
    """A module's replacement forward. It refuses copies: a copied module would call it too, and compute with the original's weights."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        #: Called with the first argument before each forward.
        self.pre_hook: Callable[[Any], None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.pre_hook is not None:
            self.pre_hook(args[0] if args else None)
        return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise PlanError(
            "tp: a tensor-parallel model cannot be copied (copy.deepcopy, AveragedModel), because its ranks compute it together; average "
            "its parameters instead, or save a checkpoint, which any plan can load"
        )


def _localize_attributes(model: nn.Module, module: nn.Module, placement: Placement, tp: TPCommunicator) -> None:
    """Divide head counts and widths that the model's code reads, and make its views ask for local widths."""
    width = count_inputs(module)
    for name in placement.divided_attributes:
        owner_path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(owner_path)
        value = shard_attribute(getattr(owner, attribute), tp.rank, tp.size, width=width, unit=placement.unit)
        setattr(owner, attribute, value)
    if placement.view_module is not None:
        local_width = compute_shard_sizes(width, tp.size, placement.unit)[tp.rank]
        _run_within(model.get_submodule(placement.view_module), lambda: LocalWidthViews(width, local_width))


def _run_within(module: Any, make_context: Callable[[], Any]) -> None:
    original_forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with make_context():
            return original_forward(*args, **kwargs)

    module.forward = PatchedForward(forward)


def _with_rank_rng(
    module: Any, original_forward: Callable[..., Any], cut: str, tp: TPCommunicator
) -> Callable[..., Any]:
    """Between a column-parallel module and its row-parallel one, each rank draws its own random numbers."""

    def column_forward(x: Tensor) -> Any:
        out = original_forward(x)
        if module.training:
            tp.rng.use_rank_rng(out.device)
        return out

    def row_forward(x: Tensor) -> Any:
        if module.training:
            tp.rng.use_shared_rng(x.device)
        return original_forward(x)

    return column_forward if cut == "column" else row_forward


@dataclass(frozen=True, slots=True)
class _StoredModule:
    """A module whose parameters are sharded only between calls."""

    path: str
    module: nn.Module
    sharded_dims: Mapping[str, tuple[int, list[int]]]  #: parameter -> dim, shard sizes
    gather: Callable[[Tensor, int, Sequence[int]], Tensor]

    @classmethod
    def from_placement(
        cls, module: Any, placement: Placement, tp: TPCommunicator, partial_names: set[str]
    ) -> _StoredModule:
        dims = {
            piece.name: (piece.dim, compute_shard_sizes(getattr(module, piece.name).shape[piece.dim], tp.size))
            for piece in placement.slices
        }
        has_partial_gradients = not partial_names.isdisjoint(f"{placement.path}.{name}" for name in dims)
        return cls(placement.path, module, dims, tp.all_gather if has_partial_gradients else tp.gather_from_region)


def _gather_while_running(scope: nn.Module, scope_path: str, stored_modules: Sequence[_StoredModule]) -> None:
    """While `scope` runs, the stored modules hold full parameters."""

    @contextmanager
    def full_parameters() -> Iterator[None]:
        local_parameters: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            for stored in stored_modules:
                for name, (dim, shard_sizes) in stored.sharded_dims.items():
                    parameter = stored.module._parameters[name]
                    if not isinstance(parameter, nn.Parameter) or parameter.is_meta:
                        continue  # gathered by an outer call, or held by another pipeline stage
                    if isinstance(parameter, DTensor):
                        raise PlanError(
                            f"{stored.path}.{name} is sharded by tp at rest and used all over {scope_path or 'the model'}, part of which zero shards "
                            "separately; use zero=0 with tp"
                        )
                    local_parameters.append((stored.module, name, parameter))
                    full_parameter: Any = stored.gather(parameter, dim, shard_sizes)
                    stored.module._parameters[name] = full_parameter
                refresh_flat_weights(stored.module)
            yield
        finally:
            for module, name, parameter in local_parameters:
                module._parameters[name] = parameter
                refresh_flat_weights(module)

    _run_within(scope, full_parameters)
