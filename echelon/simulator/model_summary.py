"""A model as a cluster's forecast needs it: one repeated block, what comes before the blocks, and what comes after them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from echelon.plan.plan import Precision
from echelon.plan.profile import DTYPE_BYTES, Phase, UpdateScope

#: Precisions in which what passes from operator to operator has 2 bytes.
_TWO_BYTE_PRECISIONS = ("bf16", "fp16", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSummary:
    """Operators that are alike, as one block (or the part outside of blocks) runs them."""

    kind: Literal["product", "inner", "attention", "convolution", "stream"]
    phase: Phase
    dtype: str
    count: float
    dims: tuple[tuple[float, float], ...]  #: (fixed, per sample)
    flops: tuple[float, float]
    moved: tuple[float, float]
    in_attention_core: bool  #: part of attention between its projections
    tp_sharded: bool  #: divided by tp
    operand_layout: str = ""  #: of a product, which factors lie transposed in memory: `nt`
    is_expert: bool = (
        False  #: one of a block's experts does it, or all of them: ep divides them, and each gets the rows of ep ranks
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBytes:
    """Bytes per sample that one block, or what is outside of blocks, keeps for backward."""

    tp_sharded: float = 0.0  #: of what tp divides
    replicated: float = 0.0
    attention_core: float = 0.0  #: of attention between its projections; part of `tp_sharded`
    products: float = 0.0  #: outputs of products and attention; tp divides about all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineUnitSummary:
    """A visit: a place where a stage may begin. Over all places `blocks` and `elements` add up to the number of blocks."""

    blocks: float  #: what it computes, in blocks
    elements: float  #: parameters of blocks that it holds, in blocks
    crossing: float  #: bytes per sample that pass to a stage that begins here


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """The model. Figures of `block` are of one; `before` and `after` are what a pipeline's first and last rank do besides."""

    layers: int
    before: tuple[OperatorSummary, ...]
    block: tuple[OperatorSummary, ...]
    after: tuple[OperatorSummary, ...]
    elements: tuple[float, float, float]  #: parameters before the blocks, in one block, after them
    replicated_elements: tuple[float, float, float]  #: of these, what tp leaves whole on every rank
    tied_elements: float  #: of those before, what is used after the blocks too
    parameter_width: int  #: bytes of one parameter as traced
    precision: Precision  #: as traced
    optimizer_state_bytes: float  #: bytes of the optimizer's state for one parameter
    trained_fraction: float  #: share of the parameters that is trained
    clips_gradients: bool  #: whether gradients are clipped
    saved: SavedBytes
    saved_outside_blocks: tuple[float, float]  #: bytes per sample kept before and after the blocks
    block_output_bytes: float  #: bytes per sample that one block passes to the next
    key_value_bytes: float  #: bytes per sample of one block's keys and values
    loss_bytes: float  #: bytes per sample alive at the loss beside what is kept anywhere
    loss_is_tp_sharded: bool  #: whether tp divides the loss
    tp_all_reduces_per_pass: float  #: how often ranks of tp add up in one pass of a block
    largest_operator_bytes: (
        float  #: bytes per sample that the largest operator of a block reads and writes: alive while it runs
    )
    input_bytes: float  #: bytes per sample that come from the data
    expert_elements: float = 0.0  #: of one block's parameters, those of experts: ep divides them
    expert_count: int = 0  #: of experts in a block
    tensor_counts: tuple[float, float, float] = (0.0, 0.0, 0.0)  #: how many parameters there are, as `elements`
    routed_bytes: float = 0.0  #: bytes per sample that go to one block's experts, and come back
    pipeline_units: tuple[PipelineUnitSummary, ...] = ()  #: empty: not known
    #: Optimizers that read more than each number by itself: share of the trained parameters, what they read, whether they draw.
    full_tensor_optimizers: tuple[tuple[float, UpdateScope, bool], ...] = ()

    def elements_per_tp_rank(self, part: int, tp: int) -> float:
        """Parameters that a rank of tp holds: 0 before the blocks, 1 of one block, 2 after them."""
        return (self.elements[part] - self.replicated_elements[part]) / tp + self.replicated_elements[part]

    @property
    def score_bytes(self) -> float:
        """Bytes per sample that one block keeps of written-out attention. What its projections gave, about three times what the block
        gives, is kept by any attention."""
        has_unfused_attention = any(op.kind == "inner" for op in self.block)
        return max(self.saved.attention_core - 3 * self.block_output_bytes, 0.0) if has_unfused_attention else 0.0


def convert_precision(model: ModelSummary, precision: Precision | None) -> ModelSummary:
    """The work in another precision than it was traced in: products, and about all that lies between them, are as wide as that says.

    Under fp8 what lies between products is as wide as under bf16; how products are then computed is priced where they are.
    """
    is_two_byte = precision in _TWO_BYTE_PRECISIONS
    if precision is None or is_two_byte == (model.precision in _TWO_BYTE_PRECISIONS):
        return model if precision in (None, model.precision) else replace(model, precision=precision)
    traced_dtype, target_dtype = ("float32", "bfloat16") if is_two_byte else ("bfloat16", "float32")
    products = [op for op in model.block if op.kind != "stream"]
    # A model that was built narrow is so in any precision.
    if not products or (DTYPE_BYTES.get(products[0].dtype, 4) <= 2) == is_two_byte:
        return replace(model, precision=precision)
    ratio = DTYPE_BYTES[target_dtype] / DTYPE_BYTES[traced_dtype]

    def convert_operators(ops: tuple[OperatorSummary, ...]) -> tuple[OperatorSummary, ...]:
        return tuple(
            replace(op, dtype=target_dtype, moved=(op.moved[0] * ratio, op.moved[1] * ratio))
            if (DTYPE_BYTES.get(op.dtype, 4) <= 2) != is_two_byte
            else op
            for op in ops
        )

    saved = model.saved
    return replace(
        model,
        before=convert_operators(model.before), block=convert_operators(model.block), after=convert_operators(model.after), precision=precision,
        saved=replace(saved, tp_sharded=saved.tp_sharded * ratio, replicated=saved.replicated * ratio, attention_core=saved.attention_core * ratio, products=saved.products * ratio),
        saved_outside_blocks=(model.saved_outside_blocks[0] * ratio, model.saved_outside_blocks[1] * ratio),
        pipeline_units=tuple(replace(unit, crossing=unit.crossing * ratio) for unit in model.pipeline_units),
        **{name: getattr(model, name) * ratio for name in ("block_output_bytes", "key_value_bytes", "loss_bytes", "largest_operator_bytes", "routed_bytes")},
    )  # fmt: skip
