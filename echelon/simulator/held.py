"""Memory of the fullest rank on a cluster that is known by its data sheets, by component."""

from __future__ import annotations

from echelon.plan.forecast import Memory
from echelon.simulator.fitted import Fitted
from echelon.simulator.wide import Layout

#: Blocks whose parameters are gathered at once under zero=3: the one at work and the one fetched ahead.
_GATHERED = 2


def memory(layout: Layout, fitted: Fitted) -> tuple[Memory, str]:
    """(memory of the rank of pp that holds most, where it peaks)."""
    found = [_rank(layout, rank, fitted) for rank in range(layout.plan.mesh.pp)]
    return max(found, key=lambda each: each[0].peak)


def in_flight(layout: Layout, rank: int) -> float:
    """Micro-batches that wait for their backward on a rank of pp, in blocks of all its stages."""
    plan, count = layout.plan, layout.count
    pp, chunks = plan.mesh.pp, len(layout.stages) // layout.plan.mesh.pp
    if pp == 1:
        return 1.0
    if plan.schedule == "gpipe" or (chunks > 1 and count % pp):
        return float(count)
    if chunks == 1:
        return float(min(count, pp - rank))
    return min(count * chunks, 2 * (pp - rank - 1) + (chunks - 1) * pp + 1) / chunks


def _rank(layout: Layout, rank: int, fitted: Fitted) -> tuple[Memory, str]:
    plan, stack, work, mesh = layout.plan, layout.stack, layout.work, layout.plan.mesh
    size, shards, width = layout.elements(rank), layout.shards, work.width
    master = stack.master and width < 4
    state = size * (12.0 if master else 8.0)
    block = work.elements[1] / mesh.tp
    passing = 0.0
    if plan.zero == 3:
        # At rest the master copy is all there is of a parameter.
        parameters, state = size * (4 if master else width) / shards, size * 8.0 / shards
        gradients = size * stack.gradients / shards
        rest = size - block * sum(layout.stages[rank :: mesh.pp])
        if shards > 1:
            passing = width * (_GATHERED * block + rest) + (width + stack.gradients) * block
    else:
        parameters = size * width
        gradients = size * stack.gradients / (shards if plan.zero == 2 else 1)
        if plan.zero:
            # The shard's gradients are widened to what the optimizer computes in.
            state = (state + (4.0 * size if master and stack.gradients < 4 else 0.0)) / shards
    blocks = sum(layout.stages[rank :: mesh.pp])
    flying, samples = in_flight(layout, rank), layout.samples
    full = work.kept.cut / mesh.tp + work.kept.whole / layout.along
    kept, making = _kept(layout, full)
    activations = flying * blocks * kept * samples
    first, last = rank == 0, rank == (len(layout.stages) - 1) % mesh.pp
    activations += flying * samples * work.outside[0] * first / layout.along
    loss = work.logits * (1 + 4 / work.width) if stack.fused_loss else work.loss
    at_loss = samples * loss / mesh.tp if last else 0.0
    at_block = samples * (making + work.working / mesh.tp)
    if last and work.layers == 1:
        at_block = 0.0
    sent = flying * samples * work.given / layout.along if mesh.pp > 1 else 0.0
    temporary = max(at_loss, at_block) + sent + passing + samples * work.inputs
    where = "loss" if at_loss > at_block else "backward of a block"
    # One micro-batch gives back in reverse what it took; several under way leave gaps.
    temporary += fitted.slack * (temporary + activations) * (flying > 1)
    axes = sum(getattr(mesh, axis) > 1 for axis in ("dp", "tp", "pp", "cp"))
    framework = fitted.context + fitted.buffers * axes
    peak = parameters + gradients + state + activations + temporary
    # Parameters and states are counted; what a step makes is reckoned.
    unsure = fitted.spread * (activations + temporary)
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=state,
        activations=activations,
        temporary=temporary,
        buckets=0.0,
        framework=framework,
        low=peak - unsure,
        high=peak + unsure,
    ), where


def _kept(layout: Layout, full: float) -> tuple[float, float]:
    """Bytes per sample that one block keeps until its backward, and that it makes anew then; `full`: where nothing is computed again."""
    plan, stack, work, tp = layout.plan, layout.stack, layout.work, layout.plan.mesh.tp
    given = work.given / layout.along
    if stack.recompute == "attention":
        # Attention keeps what its projections gave it: about three times what it gives.
        core = max(work.kept.core - 3 * work.given, 0.0) / tp
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
