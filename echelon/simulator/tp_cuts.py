"""What tp shards of a model and what its ranks communicate: by a plan's placements, or by the ideal rule.

The ideal rule prices plans without placements. It shards products in blocks, products with the vocabulary, and everything else in modules
that contain products. Norms, residuals and the inputs of columns stay replicated. A block has two all-reduces per pass: after attention
and after the MLP.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from echelon.plan.placement import Placement, cuts_by_parameter
from echelon.plan.plan import Plan
from echelon.plan.profile import DTYPE_BYTES, Amount, Operator, ParameterProfile, Phase, Profile, fold_path
from echelon.plan.recompute_policy import saves_output
from echelon.plan.stages import column_row_pairs
from echelon.simulator.model_parts import ModelParts, is_within, is_within_any, operator_kind
from echelon.simulator.model_summary import OperatorKind, PartName, TPMessage

PHASES: tuple[Phase, ...] = ("forward", "backward")


def cut_model(profile: Profile, parts: ModelParts, plan: Plan | None) -> TPCuts:
    """The cuts of a plan, or the ideal ones if it has none."""
    if plan is not None and plan.mesh.tp > 1 and (plan.tensor.placements or plan.tensor.replicated):
        return PlacedCuts(profile, parts, plan)
    return TPCuts(profile, parts)


class TPCuts:
    """The ideal rule."""

    def __init__(self, profile: Profile, parts: ModelParts) -> None:
        self._parts = parts
        self._product_holders = set(_product_holders(profile, parts))
        self._columns = _column_modules(profile, parts)

    #: Whether each rank computes the loss on its shard of the logits.
    shards_loss = True

    def shards_compute(self, path: str, part: PartName, kind: OperatorKind) -> bool:
        """Whether tp divides a module's computation."""
        return part == "after" or (part == "block" and (kind != "stream" or self._holds_products(path)))

    def shards_saved(self, path: str) -> bool:
        """Whether tp divides what a module in a block keeps for backward. Columns keep their replicated input."""
        return self._holds_products(path) and path not in self._columns

    def shards_output(self, path: str) -> bool:
        """Whether tp shards the output of a module in a block."""
        return True

    def keeps_output(self, operator: Operator) -> bool:
        """Whether recompute=selective keeps an operator's output."""
        return saves_output(operator.name)

    def replicated_elements(self, parameter: ParameterProfile) -> float:
        """Elements of a parameter that tp replicates."""
        return 0.0

    def local_bytes(self, parameter: ParameterProfile) -> float:
        """Bytes of a parameter on the rank that holds most."""
        return float(parameter.bytes)

    def messages(self, part: PartName) -> tuple[TPMessage, ...]:
        """The collectives in every pass through a part, for one block."""
        size = Amount(0.0, max(self._parts.block_output_bytes.values(), default=0.0))
        forward, backward = (TPMessage(phase=phase, collective="all_reduce", size=size) for phase in PHASES)
        if part != "block":
            return forward, backward
        attention = replace(forward, is_row_sum=True)
        return attention, replace(attention, ends_block=True), replace(backward, count=2.0)

    def _holds_products(self, path: str) -> bool:
        return is_within_any(path, self._product_holders)


class PlacedCuts(TPCuts):
    """The cuts by a plan's placements."""

    def __init__(self, profile: Profile, parts: ModelParts, plan: Plan) -> None:
        super().__init__(profile, parts)
        self._tp, self._placements = plan.mesh.tp, plan.tensor.placements
        self._modules = {module.path: module for module in profile.modules}
        self._parameters = {name: each for each in profile.parameters for name in (each.name, *each.aliases)}
        self._cut_by_parameter = cuts_by_parameter(self._placements)
        self._cut_by_module = {fold_path(placement.path): placement.cut for placement in self._placements}
        self._between = set(self._paths_between(plan))
        self.shards_loss = any(placement.cut == "logits" for placement in self._placements)

    def shards_compute(self, path: str, part: PartName, kind: OperatorKind) -> bool:
        return path in self._between or self._cut_by_module.get(path, "stored") not in ("vocabulary", "stored")

    def shards_saved(self, path: str) -> bool:
        return path in self._between or self._cut_by_module.get(path) == "row"

    def shards_output(self, path: str) -> bool:
        return path in self._between or self._cut_by_module.get(path) in ("column", "gather", "logits")

    def keeps_output(self, operator: Operator) -> bool:
        # The outputs of rows are summed in place.
        return saves_output(operator.name) and self._cut_by_module.get(operator.module) != "row"

    def replicated_elements(self, parameter: ParameterProfile) -> float:
        # Chosen so that replicated + (all - replicated) / tp is the largest shard.
        return (self._largest_shard(parameter) * self._tp - parameter.elements) / (self._tp - 1)

    def local_bytes(self, parameter: ParameterProfile) -> float:
        return parameter.bytes * self._largest_shard(parameter) / max(parameter.elements, 1)

    def _largest_shard(self, parameter: ParameterProfile) -> int:
        for name in (parameter.name, *parameter.aliases):
            if name in self._cut_by_parameter:
                placement, tensor_slice = self._cut_by_parameter[name]
                return math.prod(tensor_slice.largest_shard_shape(parameter.shape, self._tp, placement.unit))
        return parameter.elements

    def messages(self, part: PartName) -> tuple[TPMessage, ...]:
        count = 1 / self._parts.layers if part == "block" else 1.0
        return tuple(
            message
            for placement in self._placements
            if self._parts.part_of(fold_path(placement.path)) == part
            for message in self._placement_messages(placement, count)
        )

    def _placement_messages(self, placement: Placement, count: float) -> Iterator[TPMessage]:
        module = self._modules.get(placement.path) or self._modules.get(fold_path(placement.path))
        if placement.cut == "stored":
            # The ranks compute the same on the gathered weight, so each has the gradient of its shard already.
            names = (f"{placement.path}.{piece.name}".lstrip(".") for piece in placement.slices)
            size = sum(self._parameters[name].bytes for name in names if name in self._parameters)
            yield TPMessage(phase="forward", collective="all_gather", size=Amount(float(size)), count=count)
        if module is None or placement.cut in ("column", "between", "stored"):
            return
        output = module.output
        if placement.cut in ("row", "attention"):
            yield TPMessage(
                phase="forward",
                collective="all_reduce",
                size=output,
                count=count,
                is_row_sum=True,
                ends_block=fold_path(placement.path) in self._parts.ending_modules,
            )
            # The gradient of the columns' input, which is as wide as the row's output where blocks have one width.
            yield TPMessage(phase="backward", collective="all_reduce", size=output, count=count)
        elif placement.cut == "vocabulary":
            yield TPMessage(phase="forward", collective="all_reduce", size=output, count=count)
        else:
            weight = self._parameters.get(f"{placement.path}.weight".lstrip("."))
            outputs, inputs, *_ = (*(weight.shape if weight else ()), 1, 1)
            if placement.cut == "gather":
                yield TPMessage(phase="forward", collective="all_gather", size=output, count=count)
            else:  # logits: a maximum and two sums per row
                yield TPMessage(phase="forward", collective="all_reduce", size=output * (3 / outputs), count=count)
            input_gradient = output * (inputs / outputs)
            yield TPMessage(phase="backward", collective="all_reduce", size=input_gradient, count=count)

    def _paths_between(self, plan: Plan) -> Iterator[str]:
        """Folded paths of modules that compute on column outputs: the parent of a pair, and its submodules without parameters."""
        for columns, row in column_row_pairs(plan):
            split_paths = [placement.path.split(".") for placement in (*columns, row)]
            prefix = [names[0] for names in zip(*split_paths, strict=False) if len(set(names)) == 1]
            holder = fold_path(".".join(prefix))
            if columns and holder in self._modules:
                yield holder
                yield from (
                    path for path, module in self._modules.items() if is_within(path, holder) and not module.parameters
                )


def _product_holders(profile: Profile, parts: ModelParts) -> Iterator[str]:
    """Modules inside blocks that contain products."""
    for operator in profile.operators:
        path = operator.module if operator.kind != "stream" else ""
        while path and path not in parts.blocks and parts.block_of(path) is not None:
            yield path
            path = path.rpartition(".")[0]


def _column_modules(profile: Profile, parts: ModelParts) -> set[str]:
    """Column-parallel modules: in each child of a block, all products but the last, which is a row. A child that is a product itself is a row
    if its output is as wide as the block's."""
    products_by_child: dict[str, list[Operator]] = {}
    for operator in profile.operators:
        block = parts.block_of(operator.module)
        if block not in (None, operator.module) and is_forward_product(operator):
            child = operator.module[len(block or "") + 1 :].partition(".")[0]
            products_by_child.setdefault(f"{block}.{child}", []).append(operator)
    columns: set[str] = set()
    for child, products in products_by_child.items():
        first = products[0]
        if [product.module for product in products] == [child]:
            output_bytes = first.dims[1].per_sample * first.dims[2].fixed * DTYPE_BYTES.get(first.dtype, 4)
            if output_bytes != parts.block_output_bytes[child.rpartition(".")[0]]:
                columns.add(child)
        else:
            columns |= {product.module for product in products} - {products[-1].module}
    return columns


def is_forward_product(operator: Operator) -> bool:
    """Whether an operator is a forward product with a weight."""
    return operator.phase == "forward" and operator_kind(operator) == "weight_matmul"
