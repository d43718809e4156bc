"""The memory of a rank: what persists between steps, and what a step adds at each moment where it may peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from echelon.plan.forecast import MemoryForecast
from echelon.plan.profile import MemorySnapshot
from echelon.simulator.cost.cost_model import CostModel
from echelon.simulator.plan_layout import PlanLayout
from echelon.simulator.rank_memory import RankMemory

#: Blocks whose parameters are gathered at once under zero=3: the running one and the prefetched one.
_GATHERED_BLOCKS = 2


def fullest_rank_memory(layout: PlanLayout, cost: CostModel) -> tuple[MemoryForecast, str]:
    """(memory of the rank of pp that needs most, where it peaks)."""
    forecasts = [(cost.memory_forecast(memory), memory.where) for memory in rank_memories(layout)]
    return max(forecasts, key=lambda forecast: forecast[0].required)


def rank_memories(layout: PlanLayout, rank: int | None = None) -> list[RankMemory]:
    """The memory of the ranks of pp on these devices, or of one `rank`, at each moment where it may peak."""
    return [memory for pp_rank in (layout.pp_ranks if rank is None else (rank,)) for memory in _peaks(layout, pp_rank)]


def saved_bytes(layout: PlanLayout, rank: int, samples: float) -> float:
    """Bytes that a rank of pp keeps of one micro-batch for its backward."""
    model = layout.model
    if layout.runs_as_traced:
        return model.traced_saved_bytes(samples)
    before = model.before.saved_bytes * (rank == 0) / layout.sequence_shards
    saved = samples * (layout.computed_blocks(rank) * saved_per_block(layout)[0] + before)
    if layout.trusts_trace:  # the loss is not part of the model; without a trace, `loss_bytes` covers it
        saved += samples * (model.after.saved_bytes + model.loss_saved_bytes) * layout.computes_loss(rank)
        saved *= model.saved_fraction
    return saved


def saved_per_block(layout: PlanLayout) -> tuple[float, float]:
    """(bytes per sample that one block keeps for its backward, bytes that it recomputes then)."""
    stack, model, tp = layout.stack, layout.model, layout.plan.mesh.tp
    everything = model.saved.tp_sharded / tp + model.saved.replicated / layout.sequence_shards
    block_input = model.block_output_bytes / layout.sequence_shards
    products = model.saved.products / tp + model.saved.replicated_products
    if layout.plan.compile:
        # Fused kernels recompute element-wise results from outputs of products and from the inputs of the two norms.
        everything = min(everything, products + 2 * block_input)
    if stack.recompute == "attention":
        return everything - model.score_bytes / tp, model.score_bytes / tp
    if stack.recompute == "ops":
        return block_input + products / 2, everything
    if stack.recompute == "alternate":
        return (block_input + everything) / 2, everything
    if layout.recompute == "block":
        return block_input, everything
    if layout.recompute == "selective":
        return block_input + products, everything
    return everything, 0.0


def _peaks(layout: PlanLayout, rank: int) -> Iterator[RankMemory]:
    resting, growth = _resting_memory(layout, rank)
    for memory, gradients in _activation_peaks(layout, rank, resting):
        yield _with_gradients(memory, growth * gradients)
    yield _with_gradients(_optimizer_peak(layout, rank, resting), growth * _gradient_bytes(layout, rank))


def _activation_peaks(layout: PlanLayout, rank: int, resting: RankMemory) -> Iterator[tuple[RankMemory, float]]:
    """(memory, bytes of gradients that backward has produced by then)."""
    if not layout.trusts_trace:
        yield _block_peak(layout, rank, resting), 0.0
        yield _first_block_peak(layout, rank, resting), _gradient_bytes(layout, rank)
        return
    runs = {"before": rank == 0, "block": layout.computed_blocks(rank) > 0, "after": layout.computes_loss(rank)}
    gradient_share = layout.rank_elements(rank) / max(layout.model.elements, 1)
    for part, moment in layout.model.moments:
        if runs[part]:
            yield _traced_peak(layout, rank, resting, moment), moment.gradients * gradient_share
    if layout.recompute != "none" or not layout.computes_loss(rank):
        yield from _block_backward_peaks(layout, rank, resting)


def _gradient_bytes(layout: PlanLayout, rank: int) -> float:
    return layout.rank_elements(rank) * layout.gradient_width * layout.model.trained_fraction


def _with_gradients(memory: RankMemory, gradients: float) -> RankMemory:
    """Add gradients that backward has produced. Below zero: it has freed more gathered parameters than that."""
    if gradients < 0:
        return replace(memory, parameters=memory.parameters + gradients, gathered=max(memory.gathered + gradients, 0.0))
    return replace(memory, gradients=memory.gradients + gradients)


def _traced_peak(layout: PlanLayout, rank: int, resting: RankMemory, moment: MemorySnapshot) -> RankMemory:
    """At the peak of the trace, scaled to what this rank keeps of the model."""
    samples = layout.largest_micro_batch
    alive, saved = moment.alive.at(samples), moment.saved.at(samples)
    share = saved_bytes(layout, rank, samples) / (layout.model.traced_saved_bytes(samples) or 1.0)
    memory = _with_waiting(layout, rank, resting, saved * share, alive + saved * (share - 1))
    return replace(
        memory,
        blocks=moment.blocks,
        operator=moment.operator,
        operator_bytes=moment.moved.at(samples),
        where=f"{moment.module} ({moment.phase})",
    )


def _block_backward_peaks(layout: PlanLayout, rank: int, resting: RankMemory) -> Iterator[tuple[RankMemory, float]]:
    """In the backward of the last block and of the first: saved and recomputed activations, the gradients of the block's output and of its
    largest activation, and that of a weight."""
    model, samples, tp = layout.model, layout.largest_micro_batch, layout.plan.mesh.tp
    kept, recomputed = saved_per_block(layout)
    again = samples * max(recomputed - kept, 0.0)
    before = samples * model.before.saved_bytes * (rank == 0) / layout.sequence_shards
    sharded, whole = model.largest_outputs
    temporary = samples * (model.block_output_bytes + max(sharded / tp, whole)) + model.largest_weight_bytes
    blocks, width = layout.computed_blocks(rank), layout.gradient_width * model.trained_fraction
    after = layout.outside_elements(rank) - (model.before.tp_elements(tp) if rank == 0 else 0.0)
    for computed, elements, name in (
        (blocks, after, "last"),
        (min(blocks, 1.0), after + (layout.held_blocks(rank) - 1) * layout.held_block_elements, "first"),
    ):
        saved = model.saved_fraction * (before + computed * samples * kept + again)
        memory = _with_waiting(layout, rank, resting, saved, saved + temporary)
        where = f"backward of the {name} block"
        yield replace(memory, released=again, where=where), max(elements * width, 0.0)


def _with_waiting(layout: PlanLayout, rank: int, resting: RankMemory, saved: float, alive: float) -> RankMemory:
    """Add `alive` bytes, of which `saved` are kept for backward, and the other micro-batches in flight."""
    samples, in_flight = layout.largest_micro_batch, layout.in_flight_micro_batches(rank)
    waiting = (in_flight - 1) * saved_bytes(layout, rank, samples)
    input_bytes = sum(layout.stage_input_bytes[rank + 1 :: layout.plan.mesh.pp])
    waiting += in_flight * samples * input_bytes / layout.sequence_shards
    saved, alive = min(saved + waiting, alive + waiting), alive + waiting
    return replace(resting, activations=saved, temporary=alive - saved, fragmenting=alive if in_flight > 1 else 0.0)


def _block_peak(layout: PlanLayout, rank: int, resting: RankMemory) -> RankMemory:
    """At the loss, or at the start of the last block's backward."""
    plan, stack, model, tp = layout.plan, layout.stack, layout.model, layout.plan.mesh.tp
    in_flight, samples = layout.in_flight_micro_batches(rank), layout.largest_micro_batch
    recomputed = saved_per_block(layout)[1]
    is_last = layout.computes_loss(rank)
    activations = in_flight * saved_bytes(layout, rank, samples)
    loss = samples * model.loss_bytes / (tp if model.loss_is_tp_sharded else 1) if is_last else 0.0
    block = 0.0 if is_last and model.layers == 1 else samples * (recomputed + model.largest_operator_bytes / tp)
    temporary = max(loss, block) + _message_bytes(layout, in_flight)
    scores = model.score_bytes * samples / tp
    if plan.recompute == "none" and stack.recompute == "plan":
        scores *= in_flight * layout.computed_blocks(rank)
    if model.score_bytes:
        scores = max(scores, block)
    # One micro-batch frees in reverse order of allocation. Several in flight leave gaps, unless their tensors have equal sizes.
    keeps_equal_tensors = plan.recompute == "block" and stack.recompute == "plan"
    fragmenting = temporary + (0.0 if keeps_equal_tensors else activations) if in_flight > 1 else 0.0
    return replace(
        resting,
        activations=activations,
        temporary=temporary,
        fragmenting=max(fragmenting, scores),
        released=samples * recomputed,
        where="loss" if loss > block else "backward of a block",
    )


def _first_block_peak(layout: PlanLayout, rank: int, resting: RankMemory) -> RankMemory:
    """At the end of the first block's backward."""
    samples = layout.largest_micro_batch
    saved, recomputed = saved_per_block(layout)
    before = layout.model.before.saved_bytes * (rank == 0) / layout.sequence_shards
    block = samples * (recomputed + layout.model.largest_operator_bytes / layout.plan.mesh.tp)
    return replace(
        resting,
        activations=samples * (saved + before),
        temporary=block + _message_bytes(layout, 1.0),
        released=samples * recomputed,
        where="backward of the first block",
    )


def _optimizer_peak(layout: PlanLayout, rank: int, resting: RankMemory) -> RankMemory:
    """Optimizers that are not fused allocate temporary tensors."""
    temporary = sum(
        share * layout.updated_elements(rank) * optimizer.temporary_bytes / max(optimizer.trainable_elements, 1)
        for optimizer, share, _ in layout.optimizers()
        if not (layout.plan.fused and optimizer.has_fused_kernel(sharded=layout.plan.is_sharded))
    )
    return replace(resting, temporary=temporary, where="optimizer step")


def _message_bytes(layout: PlanLayout, in_flight: float) -> float:
    """Inputs of a micro-batch, and what stages send for those in flight."""
    samples = layout.largest_micro_batch
    sent = samples * max(layout.stage_input_bytes) / layout.sequence_shards
    return in_flight * sent + samples * layout.model.input_bytes


def _resting_memory(layout: PlanLayout, rank: int) -> tuple[RankMemory, float]:
    """(what persists during forward and backward, bytes that each byte of finished gradient adds)."""
    plan, model, stack, width = layout.plan, layout.model, layout.stack, layout.model.parameter_width
    elements, shard, outside = layout.rank_elements(rank), layout.shard_elements(rank), layout.outside_elements(rank)
    is_sharded = plan.zero > 0 and layout.zero_shards > 1
    if plan.zero == 3:
        # Between steps, only the master weights exist.
        parameters = shard * (4 if layout.has_master_weights else width)
    else:
        parameters = (elements - outside) * (stack.parameter_width or width) + outside * width
        # Shards that are not master weights exist in addition to the parameters gathered from them.
        parameters += shard * width if is_sharded and stack.keeps_shards else 0.0
    shards_gradients = plan.zero >= 2 and not plan.data.keep_gradients
    gradients = layout.gradient_width * model.trained_fraction * (shard if shards_gradients else elements)
    growth = 0.0
    if stack.frees_gradients and layout.micro_batches == 1 and (layout.data_ranks == 1 or is_sharded):
        gradients = 0.0
        growth = shard / elements if is_sharded else 1.0
        # Units free their gathered parameters once their gradients are scattered.
        growth -= 1.0 if is_sharded and plan.zero < 3 else 0.0
    return (
        RankMemory(
            parameters=parameters + model.buffer_bytes,
            gradients=gradients,
            optimizer=_state_bytes(layout, rank),
            activations=0.0,
            temporary=0.0,
            buckets=_bucket_bytes(layout, rank) if is_sharded else 0.0,
            gathered=max(parameters - shard * width, 0.0) if is_sharded else 0.0,
            tensors=layout.tensors(rank, large=True),
            axes=sum(getattr(plan.mesh, axis) > 1 for axis in ("dp", "tp", "pp", "cp", "ep")),
            is_sharded=is_sharded,
            is_converted=layout.is_converted,
        ),
        growth,
    )


def _state_bytes(layout: PlanLayout, rank: int) -> float:
    """The optimizers' state. The owner of full tensors keeps a copy of them, their gradients and their state."""
    plan, model, master = layout.plan, layout.model, layout.has_master_weights
    # Gradients are cast to the precision of the optimizer.
    extra = (4.0 if master and layout.gradient_width < 4 else 0.0) if plan.zero < 3 else -4.0 * master
    updated, total = layout.updated_elements(rank), 0.0
    for optimizer, share, owned in layout.optimizers():
        state = layout.state_width(optimizer)
        if owned is None:
            total += share * updated * (state + extra)
        else:
            copies = model.parameter_width + layout.gradient_width + state
            total += share * (owned.fraction * model.trained_elements * copies + updated * extra)
    return total


def _bucket_bytes(layout: PlanLayout, rank: int) -> float:
    """Parameters that ZeRO gathers, and the messages of one unit: its parameters, and each copy of its gradients."""
    plan, width = layout.plan, layout.model.parameter_width
    if plan.zero < 3 and not layout.stack.keeps_shards:
        return 0.0  # such stacks exchange the gradients in place
    whole = plan.data.shard_as_one or not layout.model.repeats_blocks
    unit = layout.rank_elements(rank) if whole else layout.held_block_elements
    gathered = 0.0
    if plan.zero == 3:
        gathered = layout.rank_elements(rank) if whole else _GATHERED_BLOCKS * unit + layout.outside_elements(rank)
    gradients = layout.stack.gradient_copies * layout.gradient_width * layout.model.trained_fraction
    return width * gathered + (width + gradients) * unit
