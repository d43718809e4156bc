"""Finds the experts of a mixture-of-experts model in its profile."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from echelon.plan.profile import DTYPE_BYTES, Operator, ParameterProfile, Profile, fold_path
from echelon.simulator.model_parts import ModelParts, is_within, is_within_any, operator_kind
from echelon.simulator.tp_cuts import is_forward_product

#: Experts see fewer than this fraction of a block's rows; equal layers in sequence see all of them.
_FEWER_ROWS = 0.99


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a block: modules in a list, or 3-D weights with one matrix per expert."""

    module_paths: frozenset[str] = frozenset()  #: folded
    stacked_parameters: frozenset[str] = frozenset()  #: folded
    count: int = 0

    def owns_parameter(self, parameter: ParameterProfile) -> bool:
        """Whether a parameter belongs to an expert."""
        name = fold_path(parameter.name)
        return name in self.stacked_parameters or is_within_any(name, self.module_paths)

    def computes(self, operator: Operator) -> bool:
        """Whether an operator belongs to an expert."""
        if self.stacked_parameters and _stack_size(operator) == self.count:
            return True
        return is_within_any(operator.module, self.module_paths)


def find_experts(profile: Profile, parts: ModelParts) -> Experts:
    """Equal modules in a block's list that see fewer rows than the block, or 3-D weights whose first dim is the number of products."""
    listed = _listed_experts(profile, parts)
    if listed:
        return Experts(frozenset(listed), frozenset(), min(listed.values()))
    product_counts = {_stack_size(operator) for operator in profile.operators if parts.block_of(operator.module)}
    stacked = {
        fold_path(parameter.name): parameter.shape[0]
        for parameter in profile.parameters
        if len(parameter.shape) == 3 and parts.block_of(fold_path(parameter.name))
    }
    counts = {name: size for name, size in stacked.items() if size > 1 and size in product_counts}
    return Experts(frozenset(), frozenset(counts), min(counts.values(), default=0))


def experts_per_token(profile: Profile, parts: ModelParts, experts: Experts) -> float:
    """Experts per token: the rows of all experts of a block over the rows of its other products; 1 if unknown."""
    rows = {True: defaultdict[str, float](float), False: defaultdict[str, float](float)}
    for operator in profile.operators:
        is_expert = experts.computes(operator)
        is_product = operator_kind(operator) == "weight_matmul" or (is_expert and operator.kind == "matmul")
        if operator.phase == "forward" and is_product and parts.block_of(operator.module):
            layer = f"{operator.module} {operator.dims[2].fixed}"
            products = operator.count * max(_stack_size(operator), 1.0)
            rows[is_expert][layer] += products * operator.dims[1].per_sample / parts.layers
    expert_rows, other_rows = (max(rows[is_expert].values(), default=0.0) for is_expert in (True, False))
    return expert_rows / other_rows if expert_rows and other_rows else 1.0


def _listed_experts(profile: Profile, parts: ModelParts) -> dict[str, int]:
    """Folded path of each list of experts, and their number."""
    shapes_by_member: dict[str, dict[str, list[tuple[str, tuple[int, ...]]]]] = {}
    for parameter in profile.parameters:
        folded = fold_path(parameter.name)
        block = parts.block_of(folded)
        names, folded_names = parameter.name.split("."), folded.split(".")
        depth = 0 if block is None else len(block.split("."))
        position = next((index for index, name in enumerate(folded_names[:-1]) if name == "*" and index >= depth), None)
        if block is None or position is None:
            continue
        members = shapes_by_member.setdefault(".".join(names[:position]), {})
        shapes = members.setdefault(names[position], [])
        shapes.append((".".join(names[position + 1 :]), tuple(parameter.shape)))
    counts: dict[str, int] = {}
    for path, members in shapes_by_member.items():
        folded, are_equal = fold_path(f"{path}.0"), len({tuple(sorted(shapes)) for shapes in members.values()}) == 1
        if len(members) > 1 and are_equal and _sees_fewer_rows(profile, parts, folded):
            counts[folded] = len(members)
    return counts


def _sees_fewer_rows(profile: Profile, parts: ModelParts, path: str) -> bool:
    """Whether the products of a module see fewer rows per sample than the other products of its block, or than its output has."""
    block = parts.block_of(path) or ""
    products = [each for each in profile.operators if is_forward_product(each) and is_within(each.module, block)]
    own = [product for product in products if is_within(product.module, path)]
    if not own:
        return False
    last = own[-1]
    block_rows = max(
        (product.dims[1].per_sample for product in products if not is_within(product.module, path)),
        default=parts.block_output_bytes[block] / (last.dims[2].fixed * DTYPE_BYTES.get(last.dtype, 4)),
    )
    rows = sum(product.count * product.dims[1].per_sample for product in own)
    return rows / sum(product.count for product in own) < _FEWER_ROWS * block_rows


def _stack_size(operator: Operator) -> float:
    """The number of matrices in a product of stacked weights; 0 for other operators."""
    stack = operator.dims[0] if operator.kind == "matmul" and operator.dims else None
    return stack.fixed if stack and not stack.per_sample and stack.fixed > 1 else 0.0
