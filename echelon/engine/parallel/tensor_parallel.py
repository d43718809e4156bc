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
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from echelon.engine.parallel.module_tensors import as_registered, named_tensors, replace_tensors
from echelon.engine.parallel.sequence_parallel import SequenceParallelCommunicator, install_sequence_parallel
from echelon.engine.parallel.shard_layout import TPShard
from echelon.engine.parallel.tp_collectives import TPCommunicator
from echelon.engine.parallel.tp_forwards import FORWARD_BUILDERS
from echelon.errors import PlanError
from echelon.nn.recurrent import refresh_flat_weights
from echelon.nn.views import LocalWidthViews
from echelon.partition.tp_layers import accept_input_by_name, count_inputs
from echelon.plan.placement import Placement, compute_shard_sizes, shard_attribute
from echelon.plan.sequence_segment import SequenceSegment


def find_tp_shards(model: nn.Module, placements: Iterable[Placement], tp: TPCommunicator) -> dict[str, TPShard]:
    """This rank's shard of each sharded parameter and buffer, under each of its names."""
    shards_by_id: dict[int, TPShard] = {}
    for placement in placements:
        module = model.get_submodule(placement.path)
        for piece in placement.slices:
            tensor, unit = attrgetter(piece.name)(module), placement.unit
            shards_by_id[id(tensor)] = TPShard(tensor.shape, piece.dim, piece.fused_sizes, tp.rank, tp.size, unit)
    names = named_tensors(model, remove_duplicate=False)
    return {name: shards_by_id[id(tensor)] for name, tensor in names if id(tensor) in shards_by_id}


def shard_parameters(model: nn.Module, tp_shards: Mapping[str, TPShard]) -> None:
    """Keep only this rank's shards of the parameters and buffers; shared ones stay shared."""

    def shard(name: str, tensor: Tensor) -> Tensor | None:
        return as_registered(tp_shards[name].extract(tensor), tensor) if name in tp_shards else None

    replace_tensors(model, shard)


def install_tensor_parallel(
    model: nn.Module, placements: Iterable[Placement], tp: TPCommunicator, segments: Iterable[SequenceSegment] = ()
) -> None:
    """Make modules compute with shards. Their parameters are still full, and must be sharded before the first call."""
    segment_tps = [SequenceParallelCommunicator(tp, segment) for segment in segments]
    partial_names = {name for segment_tp in segment_tps for name in segment_tp.segment.partial_gradients}
    stored: dict[str, list[_StoredParameter]] = {}
    for placement in placements:
        module: Any = model.get_submodule(placement.path)
        _localize_attributes(model, module, placement, tp)
        if placement.cut == "stored":
            parameters = _stored_parameters(module, placement, tp, partial_names)
            stored.setdefault(placement.gathered_in, []).extend(parameters)
        elif placement.cut in FORWARD_BUILDERS:
            module_tp = next((s for s in segment_tps if s.contains(placement.path)), tp)
            forward = FORWARD_BUILDERS[placement.cut](module, module_tp)
            if placement.uses_rng:
                forward = _with_rank_rng(module, forward, placement.cut, module_tp)
            module.forward = PatchedForward(accept_input_by_name(module, forward))
    for scope_path, scope_parameters in stored.items():
        _gather_while_running(model.get_submodule(scope_path), scope_path, scope_parameters)
    for segment_tp in segment_tps:
        install_sequence_parallel(model, segment_tp)
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
    width, unit = count_inputs(module), placement.unit
    for name in placement.divided_attributes:
        owner_path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(owner_path)
        value = shard_attribute(getattr(owner, attribute), tp.rank, tp.size, width=width, unit=unit)
        setattr(owner, attribute, value)
    if placement.view_module is not None:
        local_width = compute_shard_sizes(width, tp.size, unit)[tp.rank]
        _run_within(model.get_submodule(placement.view_module), lambda: LocalWidthViews(width, local_width))


def _run_within(module: Any, make_context: Callable[[], Any]) -> None:
    original_forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with make_context():
            return original_forward(*args, **kwargs)

    module.forward = PatchedForward(forward)


def _with_rank_rng(module: Any, forward: Callable[..., Any], cut: str, tp: TPCommunicator) -> Callable[..., Any]:
    """Between a column-parallel module and its row-parallel one, each rank draws its own random numbers."""

    def forward_with_rng(x: Tensor) -> Any:
        if module.training and cut != "column":
            tp.rng.use_shared_rng(x.device)
        out = forward(x)
        if module.training and cut == "column":
            tp.rng.use_rank_rng(out.device)
        return out

    return forward_with_rng


@dataclass(frozen=True, slots=True)
class _StoredParameter:
    """A parameter that is sharded only between calls of its module."""

    module: nn.Module
    path: str
    name: str
    gather: Callable[[Tensor], Tensor]

    def assign(self, value: Any) -> None:
        self.module._parameters[self.name] = value
        refresh_flat_weights(self.module)


def _stored_parameters(
    module: Any, placement: Placement, tp: TPCommunicator, partial_names: set[str]
) -> Iterator[_StoredParameter]:
    paths = {piece.name: f"{placement.path}.{piece.name}" for piece in placement.slices}
    gather = tp.gather_from_region if partial_names.isdisjoint(paths.values()) else tp.all_gather
    for piece in placement.slices:
        shard_sizes = compute_shard_sizes(getattr(module, piece.name).shape[piece.dim], tp.size)
        gather_full = partial(gather, dim=piece.dim, shard_sizes=shard_sizes)
        yield _StoredParameter(module, paths[piece.name], piece.name, gather_full)


def _gather_while_running(scope: nn.Module, scope_path: str, stored_parameters: Sequence[_StoredParameter]) -> None:
    """While `scope` runs, the modules of stored parameters hold them in full."""

    @contextmanager
    def full_parameters() -> Iterator[None]:
        shards: list[tuple[_StoredParameter, nn.Parameter]] = []
        try:
            for stored in stored_parameters:
                shard = stored.module._parameters[stored.name]
                if not isinstance(shard, nn.Parameter) or shard.is_meta:
                    continue  # gathered by an outer call, or held by another pipeline stage
                if isinstance(shard, DTensor):
                    raise PlanError(
                        f"{stored.path} is sharded by tp at rest and used all over {scope_path or 'the model'}, part of which zero shards "
                        "separately; use zero=0 with tp"
                    )
                shards.append((stored, shard))
                stored.assign(stored.gather(shard))
            yield
        finally:
            for stored, shard in shards:
                stored.assign(shard)

    _run_within(scope, full_parameters)
