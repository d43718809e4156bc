"""Summarize a profile: its operators, parameters and saved activations, by part of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from echelon.plan.plan import Plan
from echelon.plan.profile import DTYPE_BYTES, MemorySnapshot, Operator, ParameterProfile, Profile, fold_path
from echelon.simulator.experts import Experts, experts_per_token, find_experts
from echelon.simulator.model_parts import ModelParts, is_within, operator_kind
from echelon.simulator.model_summary import (
    PARTS,
    ModelSummary,
    OperatorSummary,
    PartName,
    PartSummary,
    PipelineUnitSummary,
    SavedBytes,
)
from echelon.simulator.tp_cuts import TPCuts, cut_model, is_forward_product

#: Samples at which per-sample amounts are evaluated.
_MANY_SAMPLES = 1 << 20
_LARGE_TENSOR_BYTES = 2**20


def summarize_profile(profile: Profile, plan: Plan | None = None) -> ModelSummary:
    """The work of a profile, cut over tp by `plan` or by the ideal rule."""
    parts = ModelParts(profile)
    cuts, experts = cut_model(profile, parts, plan), find_experts(profile, parts)
    attention_modules = {
        operator.module
        for operator in profile.operators
        if operator_kind(operator) in ("activation_matmul", "attention") and not experts.computes(operator)
    }
    own_bytes = {path: size / _MANY_SAMPLES for path, size in own_saved_bytes(profile, _MANY_SAMPLES).items()}
    block_bytes = {path: size for path, size in own_bytes.items() if parts.part_of(path) == "block"}
    before, block, after = (
        _summarize_part(profile, parts, part, cuts, experts, attention_modules, own_bytes) for part in PARTS
    )
    layers, block_output = parts.layers, max(parts.block_output_bytes.values(), default=0.0)
    sharded_bytes = sum(size for path, size in block_bytes.items() if cuts.shards_saved(path))
    products, replicated_products = _product_output_bytes(profile, parts, cuts)
    peak = max(moment.alive.per_sample for moment in profile.moments)
    saved = max(moment.saved.per_sample for moment in profile.moments)
    return ModelSummary(
        layers=layers,
        repeats_blocks=bool(parts.blocks),
        before=before,
        block=block,
        after=after,
        tied_elements=sum(
            float(parameter.elements)
            for parameter in profile.parameters
            if parts.part_of(fold_path(parameter.name)) == "before"
            and any(parts.part_of(fold_path(name)) == "after" for name in parameter.aliases)
        ),
        parameter_width=profile.bytes / profile.elements if profile.elements else 4.0,
        precision=profile.precision,
        optimizers=profile.optimizers,
        trained_tensors=tuple((each.bytes, each.dtype) for each in profile.parameters if each.trainable),
        clips_gradients=profile.clips_gradients,
        saved=SavedBytes(
            tp_sharded=sharded_bytes / layers,
            replicated=(sum(block_bytes.values()) - sharded_bytes) / layers,
            attention_core=sum(size for path, size in block_bytes.items() if path in attention_modules) / layers,
            products=products / layers,
            replicated_products=replicated_products / layers,
        ),
        block_output_bytes=block_output,
        key_value_bytes=_key_value_bytes(profile, attention_modules, layers, block_output),
        loss_bytes=max(peak - sum(block_bytes.values()) - before.saved_bytes, after.saved_bytes),
        loss_saved_bytes=max(saved - sum(own_bytes.values()), 0.0),
        saved_fraction=saved / max(saved, sum(own_bytes.values()), 1e-9),
        loss_is_tp_sharded=cuts.shards_loss,
        largest_operator_bytes=max((operator.moved.per_sample for operator in block.operators), default=0.0),
        largest_outputs=_largest_outputs(profile, parts, cuts),
        largest_weight_bytes=max(
            (cuts.local_bytes(each) for each in profile.parameters if parts.in_block(fold_path(each.name))), default=0.0
        ),
        moments=tuple((_moment_part(parts, moment), moment) for moment in profile.moments),
        input_bytes=float(profile.input_bytes),
        buffer_bytes=float(profile.buffers),
        expert_elements=sum(each.elements for each in profile.parameters if experts.owns_parameter(each)) / layers,
        expert_count=experts.count,
        routed_bytes=block_output * experts_per_token(profile, parts, experts) if experts.count else 0.0,
        pipeline_units=_summarize_pipeline_units(profile, layers),
    )


def own_saved_bytes(profile: Profile, samples: int) -> dict[str, float]:
    """Bytes that the modules of each folded path keep for backward, without those of their submodules."""
    totals: dict[str, float] = {}
    for module in profile.modules:
        path = fold_path(module.path)
        totals[path] = totals.get(path, 0.0) + module.count * module.saved.at(samples)
    own_bytes = dict(totals)
    for path, size in totals.items():
        outer = next((outer for outer in _enclosing_modules(path) if outer in totals), None)
        if outer is not None:
            own_bytes[outer] -= size
    return {path: max(size, 0.0) for path, size in own_bytes.items()}


def _summarize_part(
    profile: Profile,
    parts: ModelParts,
    part: PartName,
    cuts: TPCuts,
    experts: Experts,
    attention_modules: set[str],
    own_bytes: dict[str, float],
) -> PartSummary:
    repeats = parts.layers if part == "block" else 1
    parameters = [each for each in profile.parameters if parts.part_of(fold_path(each.name)) == part]
    operators = []
    for position, operator in enumerate(profile.operators):
        if parts.part_of(operator.module) != part:
            continue
        kind, is_expert = operator_kind(operator), part == "block" and experts.computes(operator)
        kind = "weight_matmul" if is_expert and kind == "activation_matmul" else kind
        operators.append(
            OperatorSummary(
                name=operator.name,
                kind=kind,
                phase=operator.phase,
                dtype=operator.dtype,
                count=operator.count / repeats,
                dims=operator.dims,
                flops=operator.flops,
                moved=operator.moved,
                in_attention_core=operator.module in attention_modules and operator.module not in parts.blocks,
                tp_sharded=cuts.shards_compute(operator.module, part, kind),
                is_expert=is_expert,
                ends_block=position in parts.ending_operators,
                is_kept_by_selective=cuts.keeps_output(operator),
            )
        )
    return PartSummary(
        operators=tuple(operators),
        elements=sum(parameter.elements for parameter in parameters) / repeats,
        replicated_elements=sum(map(cuts.replicated_elements, parameters)) / repeats,
        tensors=len(parameters) / repeats,
        large_tensors=sum(parameter.bytes >= _LARGE_TENSOR_BYTES for parameter in parameters) / repeats,
        saved_bytes=sum(size for path, size in own_bytes.items() if parts.part_of(path) == part) / repeats,
        shared_elements=sum(
            float(each.elements) for each in parameters if part != "block" and _is_shared(profile, each)
        ),
        tp_messages=cuts.messages(part),
    )


def _is_shared(profile: Profile, parameter: ParameterProfile) -> bool:
    """Whether no pipeline unit contains a parameter."""
    names = (parameter.name, *parameter.aliases)
    return not any(is_within(name, unit.path) for name in names for unit in profile.pipeline_units)


def _largest_outputs(profile: Profile, parts: ModelParts, cuts: TPCuts) -> tuple[float, float]:
    largest = [0.0, 0.0]
    for module in profile.modules:
        path = fold_path(module.path)
        if parts.in_block(path):
            is_whole = not cuts.shards_output(path)
            largest[is_whole] = max(largest[is_whole], module.output.per_sample)
    return largest[0], largest[1]


def _moment_part(parts: ModelParts, moment: MemorySnapshot) -> PartName:
    path = moment.module.partition(" ")[0]
    return "after" if path == "loss" else parts.part_of(path)


def _key_value_bytes(profile: Profile, attention_modules: set[str], layers: int, block_output: float) -> float:
    """Bytes of keys and values of one block: the outputs of the products around attention, without the queries (as large as attention's
    output) and the last product's output. If unknown, twice the block's output."""
    attention = next((each for each in profile.operators if each.phase == "forward" and each.kind == "attention"), None)
    if attention is None:
        return 2 * block_output
    heads, queries, _, head_dim = attention.dims
    query_bytes = heads.per_sample * queries.fixed * head_dim.fixed * DTYPE_BYTES.get(attention.dtype, 4)
    for module in (attention.module, *_enclosing_modules(attention.module)):
        products = [each for each in profile.operators if is_forward_product(each) and is_within(each.module, module)]
        if module and products:
            output_bytes = sum(
                product.count * product.dims[1].per_sample * product.dims[2].fixed * DTYPE_BYTES.get(product.dtype, 4)
                for product in products
            )
            key_value_bytes = max(output_bytes / layers - query_bytes - block_output, 0.0)
            return min(key_value_bytes, 2 * block_output) or 2 * block_output
    return 2 * block_output


def _summarize_pipeline_units(profile: Profile, layers: int) -> tuple[PipelineUnitSummary, ...]:
    """Each unit measured in blocks; without repeated blocks, in fractions of the model."""
    in_block = {
        unit.path: not profile.fsdp_units or any(is_within(unit.path, block) for block in profile.fsdp_units)
        for unit in profile.pipeline_units
    }
    own_elements = {path: 0.0 for path, is_inside in in_block.items() if is_inside}
    for parameter in profile.parameters:
        path = next((path for path in _enclosing_modules(parameter.name) if path in own_elements), None)
        if path is not None:
            own_elements[path] += parameter.elements
    calls = Counter(unit.path for unit in profile.pipeline_units)
    total_cost = sum(unit.cost for unit in profile.pipeline_units if in_block[unit.path])
    total_elements = sum(own_elements.values())
    return tuple(
        PipelineUnitSummary(
            blocks=layers * unit.cost / total_cost if in_block[unit.path] and total_cost else 0.0,
            # A module that is called several times exists once: each call counts for its part.
            elements=layers * own_elements[unit.path] / calls[unit.path] / total_elements
            if in_block[unit.path] and total_elements
            else 0.0,
            boundary_bytes=unit.boundary_bytes.per_sample,
        )
        for unit in profile.pipeline_units
    )


def _enclosing_modules(name: str) -> Iterator[str]:
    """The modules that contain a module or a parameter, innermost first, the model itself last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _product_output_bytes(profile: Profile, parts: ModelParts, cuts: TPCuts) -> tuple[float, float]:
    """Outputs in blocks that recompute=selective keeps: (sharded by tp, not sharded)."""
    sizes = [0.0, 0.0]
    for operator in profile.operators:
        if operator.phase == "forward" and cuts.keeps_output(operator) and parts.in_block(operator.module):
            is_whole = not cuts.shards_output(operator.module)
            sizes[is_whole] += operator.count * _output_bytes(operator, _MANY_SAMPLES) / _MANY_SAMPLES
    return sizes[0], sizes[1]


def _output_bytes(operator: Operator, samples: int) -> float:
    """Output bytes of one call of a product or an attention."""
    dims = [amount.at(samples) for amount in operator.dims]
    width = DTYPE_BYTES.get(operator.dtype, 4)
    if operator.kind == "convolution":
        images, _, out_channels, _, output_elements, _ = dims
        return images * out_channels * output_elements * width
    batch, rows, columns, head_dim = dims
    if operator.kind == "attention":
        return batch * rows * (head_dim * width + 4)  # with the log-sum-exp of each query in float32
    return batch * rows * columns * width
