"""A model in three parts: what runs before its repeated blocks, one block, and what runs after them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from echelon.plan.plan import Precision
from echelon.plan.profile import DTYPE_BYTES, Amount, MemorySnapshot, OptimizerProfile, Phase

#: Matrix products with a weight, products of activations (attention without a fused kernel), fused attention, convolutions, the rest.
OperatorKind = Literal["weight_matmul", "activation_matmul", "attention", "convolution", "stream"]
PartName = Literal["before", "block", "after"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
PARTS: tuple[PartName, ...] = ("before", "block", "after")
#: Precisions with activations of 2 bytes.
_TWO_BYTE_PRECISIONS = ("bf16", "fp16", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSummary:
    """Equal operators of one part of the model."""

    name: str  #: as torch names it, with the operands' layout: `mm:nt`
    kind: OperatorKind
    phase: Phase
    dtype: str
    count: float
    dims: tuple[Amount, ...]
    flops: Amount
    moved: Amount
    in_attention_core: bool = False  #: between the projections of attention
    tp_sharded: bool = False
    is_expert: bool = False  #: ep divides experts, and each gets the rows of ep ranks
    ends_block: bool = False  #: in forward: backward needs its inputs, not its output
    is_kept_by_selective: bool = False  #: recompute=selective keeps its output


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOperator:
    """One call of an operator with its shape on one rank."""

    name: str
    kind: OperatorKind
    phase: Phase
    dtype: str
    precision: str  #: of the matrix units
    dims: tuple[float, ...]
    flops: float
    moved: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TPMessage:
    """A collective over tp in every pass through a part of the model."""

    phase: Phase
    collective: Collective
    size: Amount  #: bytes
    count: float = 1.0
    #: Sums outputs of row-parallel products, which are not kept. With a sharded sequence, backward gathers their columns' input again.
    is_row_sum: bool = False
    ends_block: bool = False  #: backward does not need its result


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSummary:
    """One block, or everything before or after the blocks."""

    operators: tuple[OperatorSummary, ...]
    elements: float  #: parameter elements
    replicated_elements: float  #: those that every rank of tp holds in full
    tensors: float  #: number of parameters
    large_tensors: float  #: those of a megabyte or more
    saved_bytes: float  #: kept for backward, per sample
    shared_elements: float = 0.0  #: those in no pipeline unit, which every stage holds
    tp_messages: tuple[TPMessage, ...] = ()

    def tp_elements(self, tp: int) -> float:
        """Parameter elements on one rank of tp."""
        return (self.elements - self.replicated_elements) / tp + self.replicated_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBytes:
    """Bytes per sample that one block keeps for backward."""

    tp_sharded: float = 0.0
    replicated: float = 0.0
    attention_core: float = 0.0  #: between the projections of attention; part of `tp_sharded`
    products: float = 0.0  #: outputs of products and attention that tp shards
    replicated_products: float = 0.0  #: those that it does not


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineUnitSummary:
    """A module where a stage may begin. `blocks` and `elements` of all units each add up to the number of blocks."""

    blocks: float  #: computation, in blocks
    elements: float  #: parameters, in blocks
    boundary_bytes: float  #: per sample, sent to a stage that begins here


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """The work of a training step per part of the model; bytes are per sample unless stated otherwise."""

    layers: int  #: number of blocks
    repeats_blocks: bool  #: otherwise the whole model is one block
    before: PartSummary
    block: PartSummary
    after: PartSummary
    tied_elements: float  #: parameters of `before` that are used after the blocks too
    parameter_width: float  #: bytes of one parameter as traced
    precision: Precision  #: as traced
    optimizers: tuple[OptimizerProfile, ...]
    trained_tensors: tuple[tuple[int, str], ...]  #: (bytes, type) of each trained parameter, in the model's order
    clips_gradients: bool
    saved: SavedBytes
    block_output_bytes: float
    key_value_bytes: float  #: keys and values of one block
    loss_bytes: float  #: alive at the loss beyond what the model keeps for backward
    loss_saved_bytes: float  #: kept for backward outside of modules
    saved_fraction: float  #: what all modules kept over the sum of what each keeps: some keep the same tensor
    loss_is_tp_sharded: bool
    largest_operator_bytes: float  #: read and written by the largest operator of a block
    largest_outputs: tuple[float, float]  #: of modules in blocks: (sharded by tp, not sharded)
    largest_weight_bytes: float  #: of a parameter in a block on one rank; not per sample
    #: Where memory peaked for some micro-batch, with the part of the model that was running.
    moments: tuple[tuple[PartName, MemorySnapshot], ...]
    input_bytes: float
    buffer_bytes: float = 0.0  #: of the whole model
    expert_elements: float = 0.0  #: parameters of one block's experts
    expert_count: int = 0  #: experts in a block
    routed_bytes: float = 0.0  #: sent to one block's experts and back
    pipeline_units: tuple[PipelineUnitSummary, ...] = ()  #: empty: unknown

    @property
    def elements(self) -> float:
        """All parameters."""
        return self.before.elements + self.layers * self.block.elements + self.after.elements

    @property
    def trained_elements(self) -> float:
        """Parameters that an optimizer updates."""
        return self.elements * self.trained_fraction

    @property
    def trained_fraction(self) -> float:
        """Share of the parameters that an optimizer updates."""
        return min(sum(optimizer.trainable_elements for optimizer in self.optimizers) / max(self.elements, 1), 1.0)

    def traced_saved_bytes(self, samples: float) -> float:
        """Bytes that the traced step kept for the backward of `samples` samples."""
        return max(moment.saved.at(samples) for _, moment in self.moments)

    @property
    def score_bytes(self) -> float:
        """Bytes that unfused attention keeps in one block, beyond the outputs of its projections (about three times the block's)."""
        is_written_out = any(operator.kind == "activation_matmul" for operator in self.block.operators)
        return max(self.saved.attention_core - 3 * self.block_output_bytes, 0.0) if is_written_out else 0.0


def convert_precision(model: ModelSummary, precision: Precision | None) -> ModelSummary:
    """The model in another precision than the trace's: activations get its width, and products its dtype.

    Under fp8, activations are as wide as under bf16; compute.py prices the products.
    """
    is_two_byte = precision in _TWO_BYTE_PRECISIONS
    if precision is None or is_two_byte == (model.precision in _TWO_BYTE_PRECISIONS):
        return model if precision in (None, model.precision) else replace(model, precision=precision)
    products = [operator for operator in model.block.operators if operator.kind != "stream"]
    # A model that casts to 2 bytes by itself does so in any precision.
    if not products or _is_two_byte(products[0]) == is_two_byte:
        return replace(model, precision=precision)
    dtype, ratio = ("bfloat16", 0.5) if is_two_byte else ("float32", 2.0)

    def convert(part: PartSummary) -> PartSummary:
        operators = tuple(
            operator
            if _is_two_byte(operator) == is_two_byte
            else replace(operator, dtype=dtype, moved=operator.moved * ratio)
            for operator in part.operators
        )
        messages = tuple(
            replace(message, size=message.size * ratio) if message.size.per_sample else message  # else: of parameters
            for message in part.tp_messages
        )
        return replace(part, operators=operators, saved_bytes=part.saved_bytes * ratio, tp_messages=messages)

    saved = model.saved
    return replace(
        model,
        precision=precision,
        before=convert(model.before),
        block=convert(model.block),
        after=convert(model.after),
        saved=SavedBytes(
            tp_sharded=saved.tp_sharded * ratio,
            replicated=saved.replicated * ratio,
            attention_core=saved.attention_core * ratio,
            products=saved.products * ratio,
            replicated_products=saved.replicated_products * ratio,
        ),
        block_output_bytes=model.block_output_bytes * ratio,
        key_value_bytes=model.key_value_bytes * ratio,
        loss_bytes=model.loss_bytes * ratio,
        loss_saved_bytes=model.loss_saved_bytes * ratio,
        largest_operator_bytes=model.largest_operator_bytes * ratio,
        routed_bytes=model.routed_bytes * ratio,
        pipeline_units=tuple(
            replace(unit, boundary_bytes=unit.boundary_bytes * ratio) for unit in model.pipeline_units
        ),
    )


def _is_two_byte(operator: OperatorSummary) -> bool:
    return DTYPE_BYTES.get(operator.dtype, 4) <= 2
