"""Memory of the fullest rank on a cluster that is known by its data sheets, by component."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.plan.forecast import Memory
from echelon.simulator.calibration import Fitted
from echelon.simulator.plan_layout import Layout
from echelon.simulator.whole_tensor_cost import owned

#: Blocks whose parameters are gathered at once under zero=3: the one at work and the one fetched ahead.
_GATHERED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Bytes that a rank of pp holds, before anything that was fitted."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    temporary: float
    buckets: float
    #: Of activations and what is temporary, what comes and goes in blocks of unequal size: the allocator holds gaps between them.
    uneven: float
    axes: int  #: that are in use: each has a communicator
    where: str  #: of the peak


def fullest(layout: Layout, fitted: Fitted) -> tuple[Memory, str]:
    """(memory of the rank of pp that may need most, where it peaks)."""
    found = [(put_together(each, fitted), each.where) for each in held_by_ranks(layout)]
    return max(found, key=lambda each: each[0].high + each[0].framework)


def held_by_ranks(layout: Layout, rank: int | None = None) -> list[Parts]:
    """What each rank of pp on such devices holds, or one of them."""
    return [_rank(layout, each) for each in (layout.here if rank is None else (rank,))]


def put_together(held: Parts, fitted: Fitted) -> Memory:
    """With gaps, buffers and the driver. Parameters and states are counted; what a step makes is reckoned, and may lie off.

    Of many at once where the parts are arrays: fits reckon as forecasts do.
    """
    temporary = held.temporary + fitted.slack * held.uneven
    peak = held.parameters + held.gradients + held.optimizer + held.activations + temporary + held.buckets
    unsure = fitted.unsure * (held.activations + held.temporary) + fitted.spread * held.uneven
    return Memory(
        parameters=held.parameters,
        gradients=held.gradients,
        optimizer=held.optimizer,
        activations=held.activations,
        temporary=temporary,
        buckets=held.buckets,
        framework=fitted.context + fitted.buffers * held.axes,
        low=peak - unsure,
        high=peak + unsure,
    )


def reserved(held: Memory, capacity: float, fitted: Fitted) -> float:
    """Bytes that the allocator shows as its own: it keeps what was freed as long as there is room, so that this never decides what fits."""
    return larger(smaller(held.peak * (1 + fitted.cached), capacity - held.framework), held.peak)


def larger(a: float, b: float) -> float:
    """The larger of two numbers, or of each pair of two arrays."""
    return (a + b + abs(a - b)) / 2


def smaller(a: float, b: float) -> float:
    """The smaller of two numbers, or of each pair of two arrays."""
    return (a + b - abs(a - b)) / 2


def _rank(layout: Layout, rank: int) -> Parts:
    plan, stack, work, mesh = layout.plan, layout.stack, layout.work, layout.plan.mesh
    parameters, gradients, state, buckets = _at_rest(layout, rank)
    state += _owned(layout, rank)
    blocks = sum(layout.stages[rank :: mesh.pp])
    flying, samples = layout.in_flight(rank), layout.samples
    full = work.kept.cut / mesh.tp + work.kept.whole / layout.along
    if plan.compile:
        # Fused kernels compute element-wise results again in backward: from products' outputs and from what the two norms read.
        full = min(full, work.kept.products / mesh.tp + 2 * work.given / layout.along)
    kept, making = _kept(layout, full)
    activations = flying * blocks * kept * samples
    first, last = rank == 0, layout.last(rank)
    activations += flying * samples * work.outside[0] * first / layout.along
    at_loss = samples * work.loss / (mesh.tp if work.parted else 1) if last else 0.0
    at_block = samples * (making + work.working / mesh.tp)
    if last and work.layers == 1:
        at_block = 0.0
    sent = flying * samples * max(layout.crossing) / layout.along
    temporary = max(at_loss, at_block) + sent + samples * work.inputs
    where = "loss" if at_loss > at_block else "backward of a block"
    scores = work.scores * samples / mesh.tp
    if plan.recompute == "none" and stack.recompute == "plan":
        scores *= flying * blocks
    if work.scores:
        scores = max(scores, at_block)
    # One micro-batch gives back in reverse what it took; several under way leave gaps, but where all that waits is alike: inputs of blocks.
    alike = plan.recompute == "block" and stack.recompute == "plan"
    many = temporary + (0.0 if alike else activations) if flying > 1 else 0.0
    return Parts(
        parameters=parameters,
        gradients=gradients,
        optimizer=state,
        activations=activations,
        temporary=temporary,
        buckets=buckets,
        uneven=max(many, scores),
        axes=sum(getattr(mesh, axis) > 1 for axis in ("dp", "tp", "pp", "cp", "ep")),
        where=where,
    )


def _at_rest(layout: Layout, rank: int) -> tuple[float, float, float, float]:
    """Bytes of parameters, gradients, the optimizer's states, and of what ZeRO puts together for a while."""
    plan, work, stack, width = layout.plan, layout.work, layout.stack, layout.work.width
    size, shard, several = layout.elements(rank), layout.shard(rank), layout.shards > 1
    gradient = layout.gradient * work.trained
    parted = plan.zero >= 2 and not plan.keep_gradients
    gradients = gradient * (shard if parted else size)
    mine = shard if plan.zero else size
    if plan.zero == 3:
        # At rest the master copy is all there is of a parameter.
        state = mine * work.trained * (layout.state - 4 * layout.master)
        return mine * (4 if layout.master else width), gradients, state, _gathered(layout, rank) if several else 0.0
    # Gradients are widened to what the optimizer computes in.
    widened = 4.0 if layout.master and layout.gradient < 4 else 0.0
    state = mine * work.trained * (layout.state + widened)
    outside = layout.outside(rank)
    parameters = (size - outside) * (stack.parameters or width) + outside * width
    # Where shards are no master copies they lie beside what was gathered from them.
    parameters += shard * width if plan.zero and stack.beside and several else 0.0
    return parameters, gradients, state, 0.0


def _owned(layout: Layout, rank: int) -> float:
    """Bytes that an owner of whole tensors keeps beyond the state of its shards: a copy, gathered gradients, and their state."""
    plan, work = layout.plan, layout.work
    total = (work.elements[0] + work.layers * work.elements[1] + work.elements[2]) * work.trained
    mine = (layout.shard(rank) if plan.zero else layout.elements(rank)) * work.trained
    found = 0.0
    for part, reads, draws in work.across:
        each = owned(plan, reads, draws)
        if each is not None:
            found += part * (each.share * total * (work.width + layout.gradient + layout.state) - mine * layout.state)
    return found


def _gathered(layout: Layout, rank: int) -> float:
    """Bytes of what zero=3 puts together: the blocks at work and those outside of blocks, a message, and gradients before they go."""
    plan, work, width = layout.plan, layout.work, layout.work.width
    gradient = layout.gradient * work.trained
    if plan.whole:
        return (2 * width + gradient) * layout.elements(rank)
    block = work.held(1, plan.mesh.tp) - work.experts / plan.mesh.tp * (1 - 1 / plan.mesh.ep)
    return width * (_GATHERED * block + layout.outside(rank)) + (width + gradient) * block


def _kept(layout: Layout, full: float) -> tuple[float, float]:
    """Bytes per sample that one block keeps until its backward, and that it makes anew then; `full`: where nothing is computed again."""
    plan, stack, work, tp = layout.plan, layout.stack, layout.work, layout.plan.mesh.tp
    given = work.given / layout.along
    if stack.recompute == "attention":
        core = work.scores / tp
        return full - core, core
    if stack.recompute == "ops":
        return given + work.kept.products / 2 / tp, full
    if stack.recompute == "alternate":
        return (given + full) / 2, full
    if plan.recompute == "block":
        return given, full
    if plan.recompute == "selective":
        return given + work.kept.products / tp, full
    return full, 0.0
