"""The work of a profile: its operators, parameters and what it keeps, put together by block.

Where a plan leaves open how tp cuts the model the ideal rule holds: products in blocks and of the vocabulary are divided, and so is all
that lies beside them in modules that hold products; norms, dropouts and residuals are whole, or divided along the sequence. A plan
that says how it cuts is taken at its word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from echelon.plan.mesh import Mesh
from echelon.plan.placement import cuts_by_parameter
from echelon.plan.plan import Plan
from echelon.plan.profile import DTYPE_BYTES, Operator, ParameterProfile, Profile, fold_path
from echelon.simulator.model_summary import ModelSummary, OperatorSummary, PipelineUnitSummary, SavedBytes
from echelon.simulator.rank_shares import RankShares, is_within
from echelon.simulator.recomputation import output_bytes, own_saved_bytes
from echelon.simulator.whole_tensor_cost import trained_fraction

#: Products of weights; other products (written-out attention) are of activations alone.
_WEIGHT_PRODUCTS = (
    "mm",
    "addmm",
    "_int_mm",
    "mkldnn_rnn_layer",
    "mkldnn_rnn_layer_backward",
    "_cudnn_rnn",
    "_cudnn_rnn_backward",
)
#: Sums of tp per block and pass by the ideal rule: one behind attention, one behind the feed-forward part.
_IDEAL_ALL_REDUCES = 2
_MODEL_PARTS = ("before", "block", "after")
#: Samples at which an amount per sample is read.
_SAMPLES_FOR_RATIO = 1 << 20


def summarize_profile(profile: Profile, plan: Plan | None = None) -> ModelSummary:
    """The work of a profile. A model without repeated blocks is one block. `plan`: whose cuts hold, where it has some."""
    block_paths = tuple(dict.fromkeys(map(fold_path, profile.fsdp_units)))
    layers = max(len(profile.fsdp_units), 1)
    modules_after = _modules_after_blocks(profile, block_paths)
    cuts = _TensorParallelCuts(profile, block_paths, plan)
    experts = _find_experts(profile, block_paths)
    attention_modules = {
        operator.module
        for operator in profile.operators
        if _operator_kind(operator) in ("inner", "attention") and not experts.computes(operator)
    }
    operators_by_part: dict[str, list[OperatorSummary]] = {name: [] for name in _MODEL_PARTS}
    for operator in profile.operators:
        part = _model_part(operator.module, block_paths, modules_after)
        is_expert = part == "block" and experts.computes(operator)
        operator_kind = "product" if is_expert and _operator_kind(operator) == "inner" else _operator_kind(operator)
        operators_by_part[part].append(
            OperatorSummary(
                kind=operator_kind,
                phase=operator.phase,
                dtype=operator.dtype,
                count=operator.count / layers if part == "block" else float(operator.count),
                dims=tuple((dim.fixed, dim.per_sample) for dim in operator.dims),
                flops=(operator.flops.fixed, operator.flops.per_sample),
                moved=(operator.moved.fixed, operator.moved.per_sample),
                in_attention_core=operator.module in attention_modules and operator.module not in block_paths,
                tp_sharded=cuts.shards_compute(operator.module, part, operator_kind),
                operand_layout=operator.name.partition(":")[2],
                is_expert=is_expert,
            )
        )
    elements, replicated_elements, tied_elements = (
        dict.fromkeys(_MODEL_PARTS, 0.0),
        dict.fromkeys(_MODEL_PARTS, 0.0),
        0.0,
    )
    tensor_counts = dict.fromkeys(_MODEL_PARTS, 0.0)
    for parameter in profile.parameters:
        part = _model_part(fold_path(parameter.name), block_paths, modules_after)
        elements[part] += parameter.elements
        tensor_counts[part] += 1
        replicated_elements[part] += parameter.elements * (not cuts.shards_parameter(parameter))
        if part == "before" and any(
            _model_part(fold_path(name), block_paths, modules_after) == "after" for name in parameter.aliases
        ):
            tied_elements += parameter.elements
    own_bytes = {path: size / _SAMPLES_FOR_RATIO for path, size in own_saved_bytes(profile, _SAMPLES_FOR_RATIO).items()}
    block_bytes = {
        path: size for path, size in own_bytes.items() if _model_part(path, block_paths, modules_after) == "block"
    }
    sharded_bytes = sum(size for path, size in block_bytes.items() if cuts.shards_saved(path))
    bytes_before, bytes_after = (
        sum(size for path, size in own_bytes.items() if _model_part(path, block_paths, modules_after) == part)
        for part in ("before", "after")
    )
    peak = max(snapshot.alive.per_sample for snapshot in profile.moments)
    modules = [module for module in profile.modules if fold_path(module.path) in block_paths]
    block_output = max((module.output.per_sample for module in modules), default=0.0)
    trained_elements = sum(optimizer.trainable_elements for optimizer in profile.optimizers)
    return ModelSummary(
        layers=layers,
        before=merge_elementwise(operators_by_part["before"]),
        block=merge_elementwise(operators_by_part["block"]),
        after=merge_elementwise(operators_by_part["after"]),
        elements=(elements["before"], elements["block"] / layers, elements["after"]),
        replicated_elements=(
            replicated_elements["before"],
            replicated_elements["block"] / layers,
            replicated_elements["after"],
        ),
        tied_elements=tied_elements,
        parameter_width=DTYPE_BYTES.get(profile.parameters[0].dtype, 4) if profile.parameters else 4,
        precision=profile.precision,
        optimizer_state_bytes=profile.state_bytes / max(trained_elements, 1),
        trained_fraction=min(trained_elements / max(profile.elements, 1), 1.0),
        clips_gradients=profile.clips_gradients,
        full_tensor_optimizers=tuple(
            (trained_fraction(profile, optimizer), optimizer.update_scope, optimizer.uses_rng)
            for optimizer in profile.optimizers
            if optimizer.update_scope != "element" or optimizer.uses_rng
        ),
        saved=SavedBytes(
            tp_sharded=sharded_bytes / layers,
            replicated=(sum(block_bytes.values()) - sharded_bytes) / layers,
            attention_core=sum(size for path, size in block_bytes.items() if path in attention_modules) / layers,
            products=_product_output_bytes(profile, block_paths) / layers,
        ),
        saved_outside_blocks=(bytes_before, bytes_after),
        block_output_bytes=block_output,
        key_value_bytes=_key_value_bytes(profile, attention_modules, layers, block_output),
        loss_bytes=max(peak - sum(block_bytes.values()) - bytes_before, bytes_after),
        loss_is_tp_sharded=cuts.shards_loss,
        tp_all_reduces_per_pass=cuts.all_reduces_per_block(layers),
        largest_operator_bytes=max((op.moved[1] for op in operators_by_part["block"]), default=0.0),
        input_bytes=float(profile.input_bytes),
        expert_elements=sum(operator.elements for operator in profile.parameters if experts.owns_parameter(operator))
        / layers,
        expert_count=experts.count,
        tensor_counts=(tensor_counts["before"], tensor_counts["block"] / layers, tensor_counts["after"]),
        routed_bytes=block_output * _experts_per_token(profile, block_paths, experts) if experts.count else 0.0,
        pipeline_units=_summarize_pipeline_units(profile, layers),
    )


class _TensorParallelCuts:
    """What tp divides: as a plan says, or by the ideal rule where no plan has cuts."""

    def __init__(self, profile: Profile, block_paths: tuple[str, ...], plan: Plan | None) -> None:
        has_cuts = plan is not None and plan.mesh.tp > 1 and bool(plan.tensor.placements or plan.tensor.replicated)
        self._plan = plan if has_cuts else None
        self._shares = (
            RankShares(profile, plan.replace(mesh=Mesh(tp=plan.mesh.tp), stages=())) if plan and has_cuts else None
        )
        self._cut_names = cuts_by_parameter(plan.tensor.placements) if plan and has_cuts else {}
        self._product_holders = _product_holder_modules(profile, block_paths)
        self._column_modules = _column_modules(profile, block_paths)
        self._block_paths = block_paths

    def shards_compute(self, path: str, part: str, kind: str) -> bool:
        """Of what a module computes."""
        if self._shares:
            return self._shares.compute_share(path, 0) < 1
        return part == "after" or (
            part == "block" and (kind != "stream" or _is_within_any(path, self._product_holders))
        )

    def shards_saved(self, path: str) -> bool:
        """Of what a module of a block keeps: a column keeps its input, which is whole."""
        if self._shares:
            return self._shares.saved_share(path, 0) < 1
        return _is_within_any(path, self._product_holders) and path not in self._column_modules

    def shards_parameter(self, parameter: ParameterProfile) -> bool:
        """Of what is held."""
        return not self._shares or any(name in self._cut_names for name in (parameter.name, *parameter.aliases))

    @property
    def shards_loss(self) -> bool:
        """Whether the loss is computed on parts."""
        return self._plan is None or any(placement.cut == "logits" for placement in self._plan.tensor.placements)

    def all_reduces_per_block(self, layers: int) -> float:
        """How often what a block gives, or about as much, is added up in one pass; to put parts together is half of that."""
        if self._plan is None:
            return float(_IDEAL_ALL_REDUCES)
        block_placements = [
            placement
            for placement in self._plan.tensor.placements
            if any(is_within(fold_path(placement.path), unit) for unit in self._block_paths)
        ]
        all_reduces_by_cut = {"row": 1.0, "attention": 1.0, "gather": 0.5, "stored": 0.5}
        return sum(all_reduces_by_cut.get(placement.cut, 0.0) for placement in block_placements) / layers


def _key_value_bytes(profile: Profile, attention_modules: set[str], layers: int, block_output: float) -> float:
    """Bytes per sample of the keys and values of one block: what the products around an attention give, less the queries, which are as
    large as what attention gives, and less what the last of them gives the block. Where that is not told, twice what the block gives."""
    attention_operators = [
        operator
        for operator in profile.operators
        if operator.phase == "forward" and _operator_kind(operator) == "attention"
    ]
    if not attention_operators:
        return 2 * block_output
    (_, batch_size), (queries, _), _, (head_dim, _) = (
        (dim.fixed, dim.per_sample) for dim in attention_operators[0].dims
    )
    query_bytes = batch_size * queries * head_dim * DTYPE_BYTES.get(attention_operators[0].dtype, 4)
    module = attention_operators[0].module
    while module:
        products = [
            operator for operator in profile.operators
            if operator.phase == "forward" and _operator_kind(operator) == "product" and is_within(operator.module, module)
        ]  # fmt: skip
        if products:
            product_output = sum(
                product.count * product.dims[1].per_sample * product.dims[2].fixed * DTYPE_BYTES.get(product.dtype, 4) for product in products
            ) / layers  # fmt: skip
            return min(max(product_output - query_bytes - block_output, 0.0), 2 * block_output) or 2 * block_output
        module = module.rpartition(".")[0]
    return 2 * block_output


def _summarize_pipeline_units(profile: Profile, layers: int) -> tuple[PipelineUnitSummary, ...]:
    """What each visit is in blocks, of those that are blocks or lie in one; all of them where the model has no blocks."""
    is_block = [
        not profile.fsdp_units or any(is_within(pipeline_unit.path, block_path) for block_path in profile.fsdp_units)
        for pipeline_unit in profile.pipeline_units
    ]
    own_elements = {
        pipeline_unit.path: 0.0
        for pipeline_unit, in_block in zip(profile.pipeline_units, is_block, strict=True)
        if in_block
    }
    for parameter in profile.parameters:
        path = next((path for path in _enclosing_modules(parameter.name) if path in own_elements), None)
        if path is not None:
            own_elements[path] += parameter.elements
    call_counts = Counter(pipeline_unit.path for pipeline_unit in profile.pipeline_units)
    total_work = sum(
        pipeline_unit.cost for pipeline_unit, in_block in zip(profile.pipeline_units, is_block, strict=True) if in_block
    )
    total_elements = sum(own_elements.values())
    return tuple(
        PipelineUnitSummary(
            blocks=layers * pipeline_unit.cost / total_work if in_block and total_work else 0.0,
            # One that is called several times is held once, by a part for each call.
            elements=layers * own_elements[pipeline_unit.path] / call_counts[pipeline_unit.path] / total_elements
            if in_block and total_elements
            else 0.0,
            crossing=pipeline_unit.boundary_bytes.per_sample,
        )
        for pipeline_unit, in_block in zip(profile.pipeline_units, is_block, strict=True)
    )


def _enclosing_modules(name: str) -> Iterator[str]:
    """The modules that a parameter lies in, the innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


@dataclass(frozen=True, slots=True)
class _Experts:
    """The experts of a block: modules of a list, or weights of three dims that hold one matrix for each."""

    module_paths: frozenset[str] = frozenset()  #: folded paths of modules
    stacked_parameters: frozenset[str] = frozenset()  #: folded names of parameters
    count: int = 0

    def owns_parameter(self, parameter: ParameterProfile) -> bool:
        """Whether a parameter is theirs."""
        name = fold_path(parameter.name)
        return name in self.stacked_parameters or _is_within_any(name, self.module_paths)

    def computes(self, operator: Operator) -> bool:
        """Whether an operator is theirs."""
        return _is_within_any(operator.module, self.module_paths) or (
            bool(self.stacked_parameters) and _stacked_product_count(operator) == self.count
        )


def _stacked_product_count(operator: Operator) -> float:
    """How many products one call of weights in a stack makes; 0: it has none."""
    batch_dim = operator.dims[0] if operator.kind == "matmul" and operator.dims else None
    return batch_dim.fixed if batch_dim and not batch_dim.per_sample and batch_dim.fixed > 1 else 0.0


def _find_experts(profile: Profile, block_paths: tuple[str, ...]) -> _Experts:
    """Modules alike in a list of a block, each of which sees fewer rows than the block has: layers in a row are alike too, and see all.
    Or weights of three dims whose products are as many as the first of them."""
    shapes_by_member: dict[str, dict[str, list[tuple[str, tuple[int, ...]]]]] = {}
    stack_sizes: dict[str, int] = {}
    for parameter in profile.parameters:
        folded_path = fold_path(parameter.name)
        unit = next((each for each in block_paths if is_within(folded_path, each)), None)
        if unit is None:
            continue
        folded_parts, path_parts = folded_path.split("."), parameter.name.split(".")
        list_indices = [
            list_index
            for list_index, folded_part in enumerate(folded_parts[:-1])
            if folded_part == "*" and list_index >= len(unit.split("."))
        ]
        if list_indices:
            list_index = list_indices[0] + 1
            member = shapes_by_member.setdefault(".".join(path_parts[: list_index - 1]), {}).setdefault(
                path_parts[list_index - 1], []
            )
            member.append((".".join(path_parts[list_index:]), tuple(parameter.shape)))
        elif len(parameter.shape) == 3:
            stack_sizes[folded_path] = parameter.shape[0]
    count_by_path: dict[str, int] = {}
    for path, each in shapes_by_member.items():
        folded_path = fold_path(f"{path}.0")
        have_equal_shapes = len({tuple(sorted(shapes)) for shapes in each.values()}) == 1
        if len(each) > 1 and have_equal_shapes and _reads_fewer_rows(profile, block_paths, folded_path):
            count_by_path[folded_path] = len(each)
    if count_by_path:
        return _Experts(frozenset(count_by_path), frozenset(), min(count_by_path.values()))
    product_counts = {
        _stacked_product_count(each)
        for each in profile.operators
        if any(is_within(each.module, unit) for unit in block_paths)
    }
    expert_counts = {
        name: stack_size for name, stack_size in stack_sizes.items() if stack_size > 1 and stack_size in product_counts
    }
    return _Experts(frozenset(), frozenset(expert_counts), min(expert_counts.values(), default=0))


def _reads_fewer_rows(profile: Profile, block_paths: tuple[str, ...], path: str) -> bool:
    """Whether the products of a module see fewer rows of a sample than those of its block beside it; where there are none beside it,
    fewer than the block gives."""
    unit = next(operator for operator in block_paths if is_within(path, operator))
    forward = [
        operator for operator in profile.operators
        if operator.phase == "forward" and _operator_kind(operator) == "product" and is_within(operator.module, unit)
    ]  # fmt: skip
    own_products = [operator for operator in forward if is_within(operator.module, path)]
    if not own_products:
        return False
    other_rows = [operator.dims[1].per_sample for operator in forward if not is_within(operator.module, path)]
    block_output = max(
        (module.output.per_sample for module in profile.modules if fold_path(module.path) == unit), default=0.0
    )
    last_product = own_products[-1]
    block_rows = max(
        other_rows, default=block_output / (last_product.dims[2].fixed * DTYPE_BYTES.get(last_product.dtype, 4))
    )
    mean = sum(operator.count * operator.dims[1].per_sample for operator in own_products) / sum(
        operator.count for operator in own_products
    )
    return mean < 0.99 * block_rows


def _experts_per_token(profile: Profile, block_paths: tuple[str, ...], experts: _Experts) -> float:
    """To how many experts a token goes: rows that all experts of a block compute over those that others compute; 1 where that is not told."""
    rows_by_owner: dict[bool, dict[str, float]] = {True: {}, False: {}}
    for operator in profile.operators:
        is_expert = experts.computes(operator)
        is_product = _operator_kind(operator) == "product" or (is_expert and _operator_kind(operator) == "inner")
        if operator.phase == "forward" and is_product and any(is_within(operator.module, unit) for unit in block_paths):
            rows_by_layer, layer = rows_by_owner[is_expert], f"{operator.module} {operator.dims[2].fixed}"
            product_count = operator.count * max(_stacked_product_count(operator), 1.0)
            rows_by_layer[layer] = rows_by_layer.get(layer, 0.0) + product_count * operator.dims[1].per_sample / max(
                len(profile.fsdp_units), 1
            )
    expert_rows, other_rows = (
        max(rows_by_layer.values(), default=0.0) for rows_by_layer in (rows_by_owner[True], rows_by_owner[False])
    )
    return expert_rows / other_rows if expert_rows and other_rows else 1.0


def merge_elementwise(ops: Sequence[OperatorSummary]) -> tuple[OperatorSummary, ...]:
    """Element-wise operators put together: they are priced by their bytes and their number, whatever each moves."""
    elementwise_groups: dict[tuple[str, bool, bool], list[OperatorSummary]] = {}
    for op in ops:
        if op.kind == "stream":
            elementwise_groups.setdefault((op.phase, op.in_attention_core, op.tp_sharded), []).append(op)
    merged_operators = []
    for group in elementwise_groups.values():
        count = sum(op.count for op in group)
        fixed, per_sample = (sum(op.count * op.moved[index] for op in group) / count for index in (0, 1))
        merged_operators.append(replace(group[0], count=count, moved=(fixed, per_sample)))
    return (*(op for op in ops if op.kind != "stream"), *merged_operators)


def _operator_kind(operator: Operator) -> Literal["product", "inner", "attention", "convolution", "stream"]:
    if operator.kind == "matmul":
        return "product" if operator.name.partition(":")[0] in _WEIGHT_PRODUCTS else "inner"
    return operator.kind


def _product_output_bytes(profile: Profile, block_paths: tuple[str, ...]) -> float:
    """Bytes per sample that products of weights, convolutions and attention in blocks give, all together."""
    return sum(
        operator.count * output_bytes(operator, _SAMPLES_FOR_RATIO) / _SAMPLES_FOR_RATIO
        for operator in profile.operators
        if operator.phase == "forward"
        and _operator_kind(operator) in ("product", "attention", "convolution")
        and (not block_paths or any(is_within(operator.module, unit) for unit in block_paths))
    )


def _model_part(
    path: str, block_paths: tuple[str, ...], modules_after: frozenset[str]
) -> Literal["before", "block", "after"]:
    if not block_paths or any(is_within(path, unit) for unit in block_paths):
        return "block"
    return "after" if not path or any(is_within(path, module) for module in modules_after if module) else "before"


def _modules_after_blocks(profile: Profile, block_paths: tuple[str, ...]) -> frozenset[str]:
    """Modules outside of blocks that first run behind them: the last norm, the head."""
    in_blocks, modules_after, modules_before = False, [], set()
    for operator in profile.operators:
        if operator.phase == "backward":
            break
        if any(is_within(operator.module, unit) for unit in block_paths):
            in_blocks = True
        elif in_blocks and operator.module not in modules_before:
            modules_after.append(operator.module)
        else:
            modules_before.add(operator.module)
    return frozenset(modules_after)


def _product_holder_modules(profile: Profile, block_paths: tuple[str, ...]) -> frozenset[str]:
    """Modules within blocks (the blocks themselves aside) that hold products: tp divides what they do."""
    holders = set()
    for operator in profile.operators:
        if operator.kind == "stream":
            continue
        path = operator.module
        while path and path not in block_paths and any(is_within(path, unit) for unit in block_paths):
            holders.add(path)
            path = path.rpartition(".")[0]
    return frozenset(holders)


def _column_modules(profile: Profile, block_paths: tuple[str, ...]) -> frozenset[str]:
    """Modules of products that read what passes from block to block, and whose outputs tp divides. In each part of a block the last
    product ends a pair; one that is such a part by itself does where it gives as much as the block."""
    output_by_block = {
        unit: max(
            (module.output.per_sample for module in profile.modules if fold_path(module.path) == unit), default=0.0
        )
        for unit in block_paths
    }
    products_by_part: dict[str, list[Operator]] = {}
    for operator in profile.operators:
        unit = next((each for each in block_paths if is_within(operator.module, each)), None)
        if (
            unit is not None
            and operator.phase == "forward"
            and _operator_kind(operator) == "product"
            and operator.module != unit
        ):
            part = operator.module[len(unit) + 1 :].partition(".")[0]
            products_by_part.setdefault(f"{unit}.{part}", []).append(operator)
    columns: set[str] = set()
    for part, products in products_by_part.items():
        if [each.module for each in products] == [part]:
            each = products[0]
            output_width = each.dims[1].per_sample * each.dims[2].fixed * DTYPE_BYTES.get(each.dtype, 4)
            columns |= {part} if output_width != output_by_block[part.rpartition(".")[0]] else set()
        else:
            columns |= {each.module for each in products} - {products[-1].module}
    return frozenset(columns)


def _is_within_any(path: str, holders: Iterable[str]) -> bool:
    return any(is_within(path, holder) for holder in holders)
