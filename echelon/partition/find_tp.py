"""Find how a model is cut over the tensor axis: which modules, in which way, and why the others are not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from echelon.nn.recurrent import refresh_flat_weights
from echelon.partition.hf_tp_plan import find_hinted_pairs
from echelon.partition.tp_layers import CONVOLUTIONS, TRANSPOSED, count_outputs, is_hf_conv1d, is_unmodified
from echelon.partition.tp_pairs import PairAnalysis, find_pairs
from echelon.partition.tp_trial import ColumnRowPair
from echelon.plan.placement import Cut, Placement, TensorSlice, compute_shard_sizes, cuts_by_parameter
from echelon.tree import tree_tensors
from echelon.trials.trial_run import (
    Forward,
    RunStep,
    are_trees_close,
    deterministic_training,
    make_repeatable,
    replaced_forward,
    training_mode,
)

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
#: A cut, or why there is none.
CutOrReason = tuple[Placement | None, str]
_Placements = dict[str, Placement]  # by module path
_Reasons = dict[str, str]


@dataclass(frozen=True, slots=True)
class TensorCuts:
    """The cuts for one number of ranks."""

    placements: tuple[Placement, ...]
    replicated: dict[str, str]  #: module that stays whole on every rank -> why
    stored_reasons: dict[str, str]  #: module that is sharded at rest only -> why
    #: Fractions of the parameters' bytes: cut in any way; cut in pairs or by heads, with one all-reduce; sharded at rest only.
    cut_share: float
    paired_share: float
    stored_share: float


def find_tensor_cuts(model: nn.Module, run_step: RunStep, tp_size: int) -> TensorCuts:
    """The cuts of `model` (real numbers) over `tp_size` ranks; `run_step()` computes its loss."""
    analysis = find_pairs(model, run_step, tp_size, find_hinted_pairs(model))
    pairs = list(_drop_overlapping_pairs(analysis.pairs))
    placements = {placement.path: placement for pair in pairs for placement in _pair_placements(model, pair)}
    replicated: dict[str, str] = {}
    attention_paths = [path for path, module in model.named_modules() if type(module) is nn.MultiheadAttention]
    out_projs = {f"{path}.out_proj" if path else "out_proj" for path in attention_paths}
    for path, module in model.named_modules():
        if path in placements or path in out_projs or not any(True for _ in module.parameters(recurse=False)):
            continue
        cut, reason = _find_single_cut(module, path, analysis, tp_size)
        if cut is not None:
            placements[path] = cut
        else:
            replicated[path] = reason
    _align_tied_parameters(model, placements, replicated, pairs, analysis)
    with deterministic_training(model):
        repeatable = make_repeatable(model, run_step)
        stored_reasons = _find_stored_cuts(model, repeatable, tp_size, placements, replicated, out_projs)
    total_bytes = sum(parameter.nbytes for parameter in model.parameters())

    def share(*cuts: str) -> float:
        names = cuts_by_parameter(placement for placement in placements.values() if placement.cut in cuts)
        named = model.named_parameters(remove_duplicate=False)
        return sum({id(value): value.nbytes for name, value in named if name in names}.values()) / total_bytes

    paired_share, stored_share = share("column", "between", "row", "attention"), share("stored")
    cut_share = paired_share + stored_share + share("gather", "logits", "vocabulary")
    return TensorCuts(tuple(placements.values()), replicated, stored_reasons, cut_share, paired_share, stored_share)


def _drop_overlapping_pairs(pairs: Iterable[ColumnRowPair]) -> Iterable[ColumnRowPair]:
    taken_paths: set[str] = set()
    divided_attributes: set[tuple[str, str]] = set()
    for pair in pairs:
        paths, pair_attributes = set(pair.candidate.paths), set(pair.layout.divided_attributes)
        if not taken_paths & paths and not divided_attributes & pair_attributes:
            taken_paths |= paths
            divided_attributes |= pair_attributes
            yield pair


def _pair_placements(model: nn.Module, pair: ColumnRowPair) -> Iterable[Placement]:
    candidate, layout = pair.candidate, pair.layout
    source = "hint" if candidate.is_hinted else "pair"
    common: dict[str, Any] = {"unit": layout.shard_multiple, "uses_rng": pair.draws_random, "source": source}
    for path in candidate.columns:
        slices = _output_slices(model.get_submodule(path), layout.fused_sizes)
        yield Placement(path=path, cut="column", slices=slices, **common)
    for path in candidate.between:
        yield Placement(path=path, cut="between", slices=_channel_slices(model.get_submodule(path)), **common)
    divided_attributes = tuple(f"{path}.{name}" if path else name for path, name in layout.divided_attributes)
    dim = 0 if is_hf_conv1d(model.get_submodule(candidate.row)) else 1
    yield Placement(
        path=candidate.row, cut="row", slices=(TensorSlice("weight", dim),), divided_attributes=divided_attributes,
        view_module=layout.refitted_module, partial_gradients=pair.partial_parameters, **common,
    )  # fmt: skip


def _output_slices(module: Any, fused_sizes: tuple[int, ...] = ()) -> tuple[TensorSlice, ...]:
    transposed = isinstance(module, _ConvNd) and module.transposed and module.groups == 1
    weight = TensorSlice("weight", 1 if is_hf_conv1d(module) or transposed else 0, fused_sizes)
    return (weight,) if module.bias is None else (weight, TensorSlice("bias", 0, fused_sizes))


def _channel_slices(module: nn.Module) -> tuple[TensorSlice, ...]:
    named_tensors = (*module._parameters.items(), *module._buffers.items())
    return tuple(TensorSlice(name, 0) for name, value in named_tensors if value is not None and value.dim())


def _stored_slices(module: nn.Module, tp_size: int) -> tuple[TensorSlice, ...]:
    """The cut of a module at rest: its matrices, along their longest dim; vectors are not worth a collective."""
    return tuple(
        TensorSlice(name, list(value.shape).index(max(value.shape)))
        for name, value in module._parameters.items()
        if value is not None and value.dim() > 1 and compute_shard_sizes(max(value.shape), tp_size)[-1]
    )


def _find_single_cut(module: nn.Module, path: str, analysis: PairAnalysis, tp_size: int) -> CutOrReason:
    """The cut that needs no partner, or why there is none."""
    if path not in analysis.called_modules:
        problem = "computes with parameters of its own" if list(module.children()) else "is not called as a module"
        return None, f"{type(module).__name__} {problem}"
    own_parameter_ids = {id(parameter) for parameter in module.parameters()}
    if analysis.parameters_read_outside & own_parameter_ids:
        return None, "its parameters are also used outside of it"
    if analysis.sizes_read_outside & own_parameter_ids:
        return None, "the sizes of its parameters are read outside of it"
    if type(module) is nn.MultiheadAttention:
        return _cut_attention(module, path, tp_size)
    is_embedding, is_linear_layer = type(module) in _EMBEDDINGS, type(module) is nn.Linear or is_hf_conv1d(module)
    if not (is_embedding or is_linear_layer or type(module) in (*CONVOLUTIONS, *TRANSPOSED)):
        return None, f"no rule to cut {type(module).__name__}"
    if not is_unmodified(module):
        return None, f"this {type(module).__name__} computes otherwise, or not with a weight of its own"
    if is_embedding:
        return _cut_embedding(module, path, tp_size)
    if is_linear_layer:
        cut: Cut = "logits" if path in analysis.cross_entropy_inputs else "gather"
        return _cut_outputs(path, cut, _output_slices(module), count_outputs(module), tp_size)
    return _cut_convolution(module, path, tp_size)  # type: ignore[arg-type]


def _cut_attention(module: nn.MultiheadAttention, path: str, tp_size: int) -> CutOrReason:
    num_heads = module.num_heads
    if module.bias_k is not None or module.add_zero_attn:
        return None, "attention with bias_k, bias_v or add_zero_attn is not cut by heads"
    if not compute_shard_sizes(num_heads, tp_size)[-1]:
        return None, f"{num_heads} heads are too few for {tp_size} ranks; use tp={num_heads} or less"
    fused_sizes = (module.embed_dim,) * 3
    slices = (
        TensorSlice("in_proj_weight", 0, fused_sizes),
        TensorSlice("in_proj_bias", 0, fused_sizes),
        *(TensorSlice(name, 0) for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")),
        TensorSlice("out_proj.weight", 1),
    )
    present = tuple(part for part in slices if attrgetter(part.name)(module) is not None)
    if "forward" in vars(module) or {part.name for part in present} - dict(module.named_parameters()).keys():
        return None, "this MultiheadAttention computes otherwise, or not with weights of its own"
    unit = module.embed_dim // num_heads
    return Placement(path=path, cut="attention", slices=present, unit=unit, source="known"), ""


def _cut_embedding(module: Any, path: str, tp_size: int) -> CutOrReason:
    if module.max_norm is not None or module.scale_grad_by_freq:
        return None, "an embedding with max_norm or scale_grad_by_freq is not cut by rows"
    if type(module) is nn.EmbeddingBag and (module.mode != "sum" or module.padding_idx is not None):
        return None, "embedding bags are cut by rows where mode='sum' and there is no padding_idx"
    return _cut_outputs(path, "vocabulary", (TensorSlice("weight", 0),), module.num_embeddings, tp_size)


def _cut_convolution(module: _ConvNd, path: str, tp_size: int) -> CutOrReason:
    if module.groups == 1:
        return _cut_outputs(path, "gather", _output_slices(module), module.out_channels, tp_size)
    if not compute_shard_sizes(module.groups, tp_size)[-1] or (module.transposed and module.groups % tp_size):
        return None, f"a convolution in {module.groups} groups cannot be dealt out to {tp_size} ranks"
    unit = 1 if module.transposed else module.out_channels // module.groups
    return Placement(path=path, cut="gather", slices=_output_slices(module), unit=unit, source="known"), ""


def _cut_outputs(path: str, cut: Cut, slices: tuple[TensorSlice, ...], size: int, tp_size: int) -> CutOrReason:
    if not compute_shard_sizes(size, tp_size)[-1]:
        return None, f"{size} outputs are too few for {tp_size} ranks; use tp={size} or less"
    return Placement(path=path, cut=cut, slices=slices), ""


def _align_tied_parameters(
    model: nn.Module, placements: _Placements, replicated: _Reasons, pairs: list[ColumnRowPair], analysis: PairAnalysis
) -> None:
    """A parameter that several modules share is cut the same way in all of them, or in none."""
    users: dict[int, list[tuple[str, str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in module._parameters.items():
            # A holder that is never called does not use it.
            if value is not None and (path in analysis.called_modules or id(value) in analysis.parameters_read_outside):
                users.setdefault(id(value), []).append((path, name))
    tied_uses = [tied_users for tied_users in users.values() if len(tied_users) > 1]

    def cuts_differ(uses: list[tuple[str, str]]) -> bool:
        return len({_parameter_cut(placements.get(path), name) for path, name in uses}) > 1

    # Giving up one cut may leave another without its partner.
    while conflicting_uses := next(filter(cuts_differ, tied_uses), None):
        tied_paths = [path for path, _ in conflicting_uses]
        partners = {path for pair in pairs if {*pair.candidate.paths} & {*tied_paths} for path in pair.candidate.paths}
        for path in (*tied_paths, *sorted(partners)):
            if placements.pop(path, None) is not None:
                replicated[path] = f"{' and '.join(tied_paths)} share a parameter and cannot be cut alike"


def _parameter_cut(placement: Placement | None, name: str) -> object:
    parts = [part for part in placement.slices if part.name == name] if placement is not None else []
    return (parts[0].dim, parts[0].fused_sizes, placement.unit) if placement is not None and parts else None


def _find_stored_cuts(
    model: nn.Module,
    run_step: RunStep,
    tp_size: int,
    placements: _Placements,
    replicated: _Reasons,
    out_projs: set[str],
) -> _Reasons:
    """Shard modules without another cut at rest, gathered while a module runs outside of which nothing reads them.

    Found by trial: elsewhere the parameters are NaN, which must reach neither the loss nor a buffer.
    """
    uses = Counter(id(value) for _, value in model.named_parameters(remove_duplicate=False))
    storable_paths = []
    for path in [*replicated, *sorted(out_projs)]:
        if path.rpartition(".")[0] in placements and path in out_projs:
            continue  # an out_proj goes with its attention
        module = model.get_submodule(path)
        own_parameters = [value for value in module._parameters.values() if value is not None]
        if getattr(module, "max_norm", None) is not None:
            replicated[path] = "max_norm changes its rows in forward, which a copy of them would not keep"
        elif all(value.dim() < 2 for value in own_parameters):
            replicated[path] = f"{type(module).__name__} has vectors only"
        elif any(uses[id(value)] > 1 for value in own_parameters):
            replicated.setdefault(path, "it shares a parameter")
        elif _stored_slices(module, tp_size):
            storable_paths.append(path)
    expected = {True: _run_detached(run_step)}
    with suppress(Exception), training_mode(model, training=False):  # it may have a loss in training only
        expected[False] = _run_detached(run_step)
    is_read_within = partial(_is_read_only_within, model, run_step, tp_size, expected)
    gather_scopes: dict[str, str | None] = {path: path for path in storable_paths}
    if storable_paths and not is_read_within({path: path for path in storable_paths}):
        for path in storable_paths:
            scopes = _iterate_enclosing_paths(path)
            gather_scopes[path] = next((scope for scope in scopes if is_read_within({path: scope})), None)
    reasons: dict[str, str] = {}
    for path, gather_scope in gather_scopes.items():
        if gather_scope is None:
            replicated.setdefault(path, "used outside of every module that holds it")
        else:
            slices = _stored_slices(model.get_submodule(path), tp_size)
            placements[path] = Placement(path=path, cut="stored", slices=slices, gathered_in=gather_scope)
            reasons[path] = replicated.pop(path, "it belongs to an attention that is")
    return reasons


def _iterate_enclosing_paths(path: str) -> Iterator[str]:
    """A module and those around it, innermost first."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _run_detached(run_step: RunStep) -> tuple[Tensor, dict[str, Tensor]]:
    loss, buffers = run_step()
    first_tensor = tree_tensors(loss)[0]
    return first_tensor.detach(), buffers


def _is_read_only_within(
    model: nn.Module, run_step: RunStep, tp_size: int, expected: Mapping[bool, Any], gather_scopes: Mapping[str, str]
) -> bool:
    """Whether the matrices of modules (path -> gathering module), and their sizes, are read only while the gathering module runs.

    `expected`: the result of a step in training, and in evaluation if there is a loss.
    """
    called: set[str] = set()

    def make_gathering_forward(path: str, gather_scope: str) -> Forward:
        original_forward = model.get_submodule(gather_scope).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            called.add(path)
            with _swapped_parameters(modules[path], copies[path]):
                return original_forward(*args, **kwargs)

        return forward

    modules = {path: model.get_submodule(path) for path in gather_scopes}
    slices = {path: _stored_slices(module, tp_size) for path, module in modules.items()}
    originals = [modules[path].get_parameter(part.name) for path, parts in slices.items() for part in parts]
    copies = {path: {part.name: _copy_parameter(modules[path], part) for part in slices[path]} for path in modules}
    saved_values = [copy for named in copies.values() for copy in named.values()]
    with ExitStack() as stack, torch.no_grad():
        for module in modules.values():
            stack.enter_context(_swapped_parameters(module, _make_sharded_placeholders(module, tp_size)))
        for path, scope in gather_scopes.items():
            stack.enter_context(replaced_forward(model.get_submodule(scope), make_gathering_forward(path, scope)))
        try:
            for value in originals:
                value.fill_(math.nan)
            for training, expected_result in expected.items():
                with torch.enable_grad(), training_mode(model, training=training), _WeightNormSizeCheck():
                    if not are_trees_close(_run_detached(run_step), expected_result):
                        return False
            return called == set(gather_scopes)
        except Exception:  # code that looks at values may refuse NaN
            return False
        finally:
            for value, saved_value in zip(originals, saved_values, strict=True):
                value.copy_(saved_value)


def _copy_parameter(module: nn.Module, part: TensorSlice) -> nn.Parameter:
    value = module.get_parameter(part.name)
    return nn.Parameter(value.detach().clone(), value.requires_grad)


class _WeightNormSizeCheck(TorchFunctionMode):
    """Rejects sizes that torch's kernel does not check: `_weight_norm` would write out of bounds and abort the process."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._weight_norm and len(args) > 1:
            v, g, dim = args[0], args[1], args[2] if len(args) > 2 else 0
            if g.numel() != (1 if dim == -1 else v.shape[dim]):
                raise ValueError(f"weight norm: {tuple(g.shape)} norms for {tuple(v.shape)} along {dim}")
        return func(*args, **(kwargs or {}))


def _make_sharded_placeholders(module: nn.Module, tp_size: int) -> dict[str, nn.Parameter]:
    placeholders = {}
    for part in _stored_slices(module, tp_size):
        value = module.get_parameter(part.name)
        shard = value.new_full(part.largest_shard_shape(value.shape, tp_size, 1), math.nan)
        placeholders[part.name] = nn.Parameter(shard, value.requires_grad)
    return placeholders


@contextmanager
def _swapped_parameters(module: nn.Module, values: dict[str, nn.Parameter]) -> Iterator[None]:
    before = dict(module._parameters)
    try:
        module._parameters.update(values)
        refresh_flat_weights(module)
        yield
    finally:
        module._parameters.update(before)
        refresh_flat_weights(module)
