"""Seconds that one rank computes in a pass through a part of the model, recomputation included."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from echelon.plan.profile import DTYPE_BYTES
from echelon.simulator.cost.cost_model import CostModel
from echelon.simulator.model_summary import LocalOperator, OperatorSummary, PartName
from echelon.simulator.plan_layout import PlanLayout

#: A pass through a part: forward, backward, or the part of a block's forward that backward recomputes.
Pass = Literal["forward", "backward", "recompute"]
#: Bytes of one element in the precisions of matrix units.
PRECISION_BYTES = {"fp32": 4, "tf32": 4, "half": 2, "bf16": 2, "fp8": 1, "fp4": 0.5}


@dataclass(frozen=True, slots=True)
class PassTime:
    """Seconds of one pass through a part of the model."""

    products: float = 0.0  #: matrix products with weights, and convolutions
    attention_core: float = 0.0
    elementwise: float = 0.0
    calls: float = 0.0  #: operators
    matmul_calls: float = 0.0
    convolution_calls: float = 0.0

    @property
    def total(self) -> float:
        """All seconds."""
        return self.products + self.attention_core + self.elementwise


#: Passes of one model that were priced on one cost model.
PassCache = dict[tuple[object, ...], PassTime]


@dataclass(frozen=True, slots=True)
class PlacedPlan:
    """A plan on devices of one kind."""

    layout: PlanLayout
    cost: CostModel
    cache: PassCache = field(default_factory=dict)


def pass_time(placed: PlacedPlan, part: PartName, which: Pass, samples: float) -> PassTime:
    """One micro-batch of `samples` through a part of the model on one rank."""
    layout, cache = placed.layout, placed.cache
    plan, stack = layout.plan, layout.stack
    cuts = plan.mesh.tp, layout.sequence_shards, plan.tensor.placements, plan.tensor.replicated
    recompute = layout.recompute if which == "recompute" else None
    key = (part, which, recompute, samples, cuts, plan.mesh.ep, plan.compile, layout.model.precision, stack)
    if key not in cache:
        cache[key] = _compute_pass_time(placed, part, which, samples)
    return cache[key]


def recompute_seconds(placed: PlacedPlan, samples: float) -> float:
    """Seconds of recomputation in one block."""
    stack = placed.layout.stack
    forward = pass_time(placed, "block", "forward", samples)
    if stack.recompute == "attention":
        return forward.attention_core
    if stack.recompute == "ops":
        return forward.products / 2 + forward.elementwise
    if stack.recompute == "alternate":
        return forward.total / 2
    return pass_time(placed, "block", "recompute", samples).total


def part_seconds(placed: PlacedPlan) -> tuple[float, float, float]:
    """Seconds of one micro-batch, forward and backward, before the blocks, in one block and after them: the mean over a step."""
    layout = placed.layout
    before = block = after = 0.0
    for samples, share in layout.sample_shares.items():
        before += share * _both_ways(placed, "before", samples)
        block += share * (_both_ways(placed, "block", samples) + recompute_seconds(placed, samples))
        after += share * _both_ways(placed, "after", samples)
    return before, block, after


def _both_ways(placed: PlacedPlan, part: PartName, samples: float) -> float:
    return pass_time(placed, part, "forward", samples).total + pass_time(placed, part, "backward", samples).total


def operators_of(layout: PlanLayout, part: PartName, which: Pass) -> Iterable[OperatorSummary]:
    """The operators that run in a pass."""
    for operator in layout.part(part).operators:
        if which != "recompute":
            is_run = operator.phase == which
        elif layout.recompute == "none" or (operator.ends_block and layout.stack.stops_recompute_early):
            is_run = False
        else:
            is_kept = layout.recompute == "selective" and operator.is_kept_by_selective
            is_run = operator.phase == "forward" and not is_kept
        if is_run:
            yield operator


def compute_precision(dtype: str, requested: str) -> str:
    """The precision in which matrix units compute a dtype. `requested`: the plan's precision, or the model's own."""
    if DTYPE_BYTES.get(dtype, 4) <= 2:
        return "bf16" if dtype == "bfloat16" and requested != "fp16" else "half"
    return "tf32" if requested == "tf32" else "fp32"


def _compute_pass_time(placed: PlacedPlan, part: PartName, which: Pass, samples: float) -> PassTime:
    layout, cost = placed.layout, placed.cost
    stream_fraction = cost.compiled_fraction if layout.plan.compile else 1.0
    narrow, scans = _block_precision(layout, cost) if part == "block" else (None, False)
    products = attention_core = elementwise = 0.0
    calls = dict.fromkeys(("all", "matmul", "convolution"), 0.0)
    for operator in cost.simplify(operators_of(layout, part, which)):
        count, local = _localize(layout, operator, samples)
        calls["all"] += count
        if operator.kind in ("weight_matmul", "activation_matmul", "convolution"):
            calls["convolution" if operator.kind == "convolution" else "matmul"] += count
        if narrow and operator.kind == "weight_matmul":
            local = replace(local, precision=narrow)
            # Both operands are read at full width, once more if their scale is computed from them, and written narrow.
            width = DTYPE_BYTES.get(local.dtype, 4) * (2 if scans else 1) + PRECISION_BYTES[narrow]
            batch, rows, columns, inner = local.dims
            cast_bytes = batch * inner * (rows + columns) * width
            elementwise += count * stream_fraction * cost.stream_seconds("copy_", cast_bytes)
        seconds = count * cost.operator_seconds(local)
        if operator.kind == "stream":
            seconds *= stream_fraction
            if operator.in_attention_core:
                attention_core += seconds
            else:
                elementwise += seconds
        elif operator.kind in ("attention", "activation_matmul"):
            attention_core += seconds
        else:
            products += seconds
    return PassTime(products, attention_core, elementwise, calls["all"], calls["matmul"], calls["convolution"])


def _block_precision(layout: PlanLayout, cost: CostModel) -> tuple[str | None, bool]:
    """(precision of the products of blocks if it is not the model's, whether their operands are scanned for a scale)."""
    stack = layout.stack
    if layout.model.precision == "fp8" and cost.computes_fp8 and not stack.block_precision:
        return "fp8", True
    return stack.block_precision, stack.scans_for_scale


def _localize(layout: PlanLayout, operator: OperatorSummary, samples: float) -> tuple[float, LocalOperator]:
    """(calls on one rank, one of them)."""
    shards, ep, count = layout.operator_shards(operator), layout.plan.mesh.ep, operator.count
    if operator.is_expert:  # a rank has its share of the experts, and each expert gets the rows of all ranks of ep
        samples, count = samples * ep, count / ep
    dims = [dim.at(samples) for dim in operator.dims]
    if operator.kind == "activation_matmul":
        dims[0] /= shards
    elif operator.kind == "weight_matmul" and shards > 1:
        # The longer one of the weight's two dims is sharded.
        dims[max((index for index in (1, 2, 3) if not operator.dims[index].per_sample), key=dims.__getitem__)] /= shards
    return count, LocalOperator(
        name=operator.name,
        kind=operator.kind,
        phase=operator.phase,
        dtype=operator.dtype,
        precision=compute_precision(operator.dtype, layout.model.precision),
        dims=tuple(dims),
        flops=operator.flops.at(samples) / shards,
        moved=operator.moved.at(samples) / shards,
    )
