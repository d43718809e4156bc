"""Memory of the fullest rank on a cluster that is known by its data sheets, by component."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.plan.forecast import MemoryForecast
from echelon.simulator.calibration import FittedConstants
from echelon.simulator.plan_layout import PlanLayout
from echelon.simulator.whole_tensor_cost import find_owned_tensors

#: Blocks whose parameters are gathered at once under zero=3: the one at work and the one fetched ahead.
_GATHERED_BLOCKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes that a rank of pp holds, before anything that was fitted."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    temporary: float
    buckets: float
    #: Of activations and what is temporary, what comes and goes in blocks of unequal size: the allocator holds gaps between them.
    fragmenting: float
    axes: int  #: that are in use: each has a communicator
    where: str  #: of the peak


def fullest_rank_memory(layout: PlanLayout, constants: FittedConstants) -> tuple[MemoryForecast, str]:
    """(memory of the rank of pp that may need most, where it peaks)."""
    memories = [(with_overheads(candidate, constants), candidate.where) for candidate in rank_memories(layout)]
    return max(memories, key=lambda candidate: candidate[0].high + candidate[0].framework)


def rank_memories(layout: PlanLayout, rank: int | None = None) -> list[RankMemory]:
    """What each rank of pp on such devices holds, or one of them."""
    return [_rank_memory(layout, pp_rank) for pp_rank in (layout.pp_ranks if rank is None else (rank,))]


def with_overheads(rank_memory: RankMemory, constants: FittedConstants) -> MemoryForecast:
    """With gaps, buffers and the driver. Parameters and states are counted; what a step makes is reckoned, and may lie off.

    Of many at once where the parts are arrays: fits reckon as forecasts do.
    """
    temporary = rank_memory.temporary + constants.slack * rank_memory.fragmenting
    peak = (
        rank_memory.parameters
        + rank_memory.gradients
        + rank_memory.optimizer
        + rank_memory.activations
        + temporary
        + rank_memory.buckets
    )
    error_bound = (
        constants.unsure * (rank_memory.activations + rank_memory.temporary)
        + constants.spread * rank_memory.fragmenting
    )
    return MemoryForecast(
        parameters=rank_memory.parameters,
        gradients=rank_memory.gradients,
        optimizer=rank_memory.optimizer,
        activations=rank_memory.activations,
        temporary=temporary,
        buckets=rank_memory.buckets,
        framework=constants.context + constants.buffers * rank_memory.axes,
        low=peak - error_bound,
        high=peak + error_bound,
    )


def reserved_bytes(memory: MemoryForecast, capacity: float, constants: FittedConstants) -> float:
    """Bytes that the allocator shows as its own: it keeps what was freed as long as there is room, so that this never decides what fits."""
    return maximum(minimum(memory.peak * (1 + constants.cached), capacity - memory.framework), memory.peak)


def maximum(a: float, b: float) -> float:
    """The larger of two numbers, or of each pair of two arrays."""
    return (a + b + abs(a - b)) / 2


def minimum(a: float, b: float) -> float:
    """The smaller of two numbers, or of each pair of two arrays."""
    return (a + b - abs(a - b)) / 2


def _rank_memory(layout: PlanLayout, rank: int) -> RankMemory:
    plan, stack, model, mesh = layout.plan, layout.stack, layout.model, layout.plan.mesh
    parameters, gradients, state_bytes, buckets = _persistent_bytes(layout, rank)
    state_bytes += _owner_bytes(layout, rank)
    block_count = sum(layout.stage_blocks[rank :: mesh.pp])
    in_flight, samples = layout.in_flight_micro_batches(rank), layout.samples
    saved_without_recompute = model.saved.tp_sharded / mesh.tp + model.saved.replicated / layout.sequence_shards
    if plan.compile:
        # Fused kernels compute element-wise results again in backward: from products' outputs and from what the two norms read.
        saved_without_recompute = min(
            saved_without_recompute,
            model.saved.products / mesh.tp + 2 * model.block_output_bytes / layout.sequence_shards,
        )
    saved_per_block, recomputed_per_block = _saved_per_block(layout, saved_without_recompute)
    activations = in_flight * block_count * saved_per_block * samples
    is_first, is_last = rank == 0, layout.computes_loss(rank)
    activations += in_flight * samples * model.saved_outside_blocks[0] * is_first / layout.sequence_shards
    loss_bytes = samples * model.loss_bytes / (mesh.tp if model.loss_is_tp_sharded else 1) if is_last else 0.0
    block_bytes = samples * (recomputed_per_block + model.largest_operator_bytes / mesh.tp)
    if is_last and model.layers == 1:
        block_bytes = 0.0
    send_bytes = in_flight * samples * max(layout.stage_input_bytes) / layout.sequence_shards
    temporary = max(loss_bytes, block_bytes) + send_bytes + samples * model.input_bytes
    peak_location = "loss" if loss_bytes > block_bytes else "backward of a block"
    score_bytes = model.score_bytes * samples / mesh.tp
    if plan.recompute == "none" and stack.recompute == "plan":
        score_bytes *= in_flight * block_count
    if model.score_bytes:
        score_bytes = max(score_bytes, block_bytes)
    # One micro-batch gives back in reverse what it took; several under way leave gaps, but where all that waits is alike: inputs of blocks.
    waits_uniformly = plan.recompute == "block" and stack.recompute == "plan"
    fragmenting = temporary + (0.0 if waits_uniformly else activations) if in_flight > 1 else 0.0
    return RankMemory(
        parameters=parameters,
        gradients=gradients,
        optimizer=state_bytes,
        activations=activations,
        temporary=temporary,
        buckets=buckets,
        fragmenting=max(fragmenting, score_bytes),
        axes=sum(getattr(mesh, axis) > 1 for axis in ("dp", "tp", "pp", "cp", "ep")),
        where=peak_location,
    )


def _persistent_bytes(layout: PlanLayout, rank: int) -> tuple[float, float, float, float]:
    """Bytes of parameters, gradients, the optimizer's states, and of what ZeRO puts together for a while."""
    plan, model, stack, width = layout.plan, layout.model, layout.stack, layout.model.parameter_width
    elements, shard, shards_over_ranks = layout.rank_elements(rank), layout.shard_elements(rank), layout.zero_shards > 1
    gradient_width = layout.gradient_width * model.trained_fraction
    shards_gradients = plan.zero >= 2 and not plan.data.keep_gradients
    gradients = gradient_width * (shard if shards_gradients else elements)
    updated_elements = shard if plan.zero else elements
    if plan.zero == 3:
        # At rest the master copy is all there is of a parameter.
        state_bytes = (
            updated_elements * model.trained_fraction * (layout.optimizer_state_bytes - 4 * layout.has_master_weights)
        )
        return (
            updated_elements * (4 if layout.has_master_weights else width),
            gradients,
            state_bytes,
            _gathered_bytes(layout, rank) if shards_over_ranks else 0.0,
        )
    # Gradients are widened to what the optimizer computes in.
    widened_gradient_width = 4.0 if layout.has_master_weights and layout.gradient_width < 4 else 0.0
    state_bytes = updated_elements * model.trained_fraction * (layout.optimizer_state_bytes + widened_gradient_width)
    outside_elements = layout.outside_elements(rank)
    parameters = (elements - outside_elements) * (stack.parameter_width or width) + outside_elements * width
    # Where shards are no master copies they lie beside what was gathered from them.
    parameters += shard * width if plan.zero and stack.keeps_shards and shards_over_ranks else 0.0
    return parameters, gradients, state_bytes, 0.0


def _owner_bytes(layout: PlanLayout, rank: int) -> float:
    """Bytes that an owner of whole tensors keeps beyond the state of its shards: a copy, gathered gradients, and their state."""
    plan, model = layout.plan, layout.model
    trained_elements = (
        model.elements[0] + model.layers * model.elements[1] + model.elements[2]
    ) * model.trained_fraction
    rank_elements = (layout.shard_elements(rank) if plan.zero else layout.rank_elements(rank)) * model.trained_fraction
    owner_bytes = 0.0
    for fraction, reads, draws in model.full_tensor_optimizers:
        owned_tensors = find_owned_tensors(plan, reads, draws)
        if owned_tensors is not None:
            owner_bytes += fraction * (
                owned_tensors.fraction
                * trained_elements
                * (model.parameter_width + layout.gradient_width + layout.optimizer_state_bytes)
                - rank_elements * layout.optimizer_state_bytes
            )
    return owner_bytes


def _gathered_bytes(layout: PlanLayout, rank: int) -> float:
    """Bytes of what zero=3 puts together: the blocks at work and those outside of blocks, a message, and gradients before they go."""
    plan, model, width = layout.plan, layout.model, layout.model.parameter_width
    gradient_width = layout.gradient_width * model.trained_fraction
    if plan.data.shard_as_one:
        return (2 * width + gradient_width) * layout.rank_elements(rank)
    block_elements = model.elements_per_tp_rank(1, plan.mesh.tp) - model.expert_elements / plan.mesh.tp * (
        1 - 1 / plan.mesh.ep
    )
    return (
        width * (_GATHERED_BLOCKS * block_elements + layout.outside_elements(rank))
        + (width + gradient_width) * block_elements
    )


def _saved_per_block(layout: PlanLayout, saved_without_recompute: float) -> tuple[float, float]:
    """Bytes per sample that one block keeps until its backward, and that it makes anew then; `saved_without_recompute`: where nothing is computed again."""
    plan, stack, model, tp = layout.plan, layout.stack, layout.model, layout.plan.mesh.tp
    block_input = model.block_output_bytes / layout.sequence_shards
    if stack.recompute == "attention":
        score_bytes = model.score_bytes / tp
        return saved_without_recompute - score_bytes, score_bytes
    if stack.recompute == "ops":
        return block_input + model.saved.products / 2 / tp, saved_without_recompute
    if stack.recompute == "alternate":
        return (block_input + saved_without_recompute) / 2, saved_without_recompute
    if plan.recompute == "block":
        return block_input, saved_without_recompute
    if plan.recompute == "selective":
        return block_input + model.saved.products / tp, saved_without_recompute
    return saved_without_recompute, 0.0
