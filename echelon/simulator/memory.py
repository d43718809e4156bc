"""Memory of the largest rank, component by component, as the engine holds it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.plan.cluster import allocated_bytes
from echelon.plan.forecast import MemoryForecast
from echelon.plan.plan import Plan
from echelon.plan.profile import MemorySnapshot, Profile
from echelon.simulator.node_load import NodeLoad
from echelon.simulator.whole_tensor_cost import owner_bytes

#: How far a peak may lie from the forecast: replicated plans, and sharded ones whose gathered copies come and go.
_RELATIVE_ERROR = {False: 0.08, True: 0.12}


@dataclass(frozen=True, slots=True)
class PersistentMemory:
    """Bytes that stay from step to step, and what a step adds at its moments."""

    parameters: float
    gradients: float
    optimizer: float
    buckets: float
    #: What each byte of gradient that is done adds at a moment of backward; below zero where it frees more than it takes.
    gradient_growth: float
    #: Gathered parameters and messages under way.
    in_transit: float


def forecast_memory(
    profile: Profile,
    plan: Plan,
    load: NodeLoad,
    in_flight_bytes: float = 0.0,
    freed_bytes: float = 0.0,
    *,
    full_profile: Profile | None = None,
) -> tuple[MemoryForecast, str]:
    """(memory, where it peaks). `in_flight_bytes`: bytes that are kept beside the micro-batch at work; `freed_bytes`: that were given back before;
    `full_profile`: the model of which `profile` is a rank's part."""
    device = load.device
    persistent = _persistent_memory(profile, plan, load)
    owner_state_bytes, owner_step_bytes = owner_bytes(full_profile or profile, profile, plan)
    persistent = replace(persistent, optimizer=persistent.optimizer + owner_state_bytes)
    snapshot, samples = _peak_snapshot(profile, load, persistent), load.largest_micro_batch
    alive_bytes = snapshot.alive.at(samples) + in_flight_bytes + _workspace_bytes(snapshot, load)
    saved_bytes = min(snapshot.saved.at(samples) + in_flight_bytes, alive_bytes)
    gradients = persistent.gradients + persistent.gradient_growth * snapshot.gradients
    peak_location = f"{snapshot.module} ({snapshot.phase})"
    final_gradients = persistent.gradients + persistent.gradient_growth * profile.gradient_bytes
    optimizer_step_bytes = _optimizer_temporary_bytes(profile, plan) + owner_step_bytes
    if final_gradients + optimizer_step_bytes > gradients + alive_bytes:
        alive_bytes, saved_bytes, peak_location, gradients = (
            optimizer_step_bytes,
            0.0,
            "optimizer step",
            final_gradients,
        )
    large_tensors = sum(parameter.bytes >= 2**20 for parameter in profile.parameters)

    def allocated(size: float, blocks: float) -> float:
        return allocated_bytes(size, blocks, device.block_padding)

    if gradients < 0:  # gathered parameters that are gone by then
        persistent = replace(persistent, parameters=persistent.parameters + gradients)
        gradients = 0.0
    parameters = allocated(persistent.parameters + profile.buffers, large_tensors)
    optimizer = allocated(
        persistent.optimizer, large_tensors * (persistent.optimizer / max(persistent.parameters, 1.0))
    )
    gradients = allocated(gradients, large_tensors)
    activations = allocated(saved_bytes, snapshot.blocks)
    transient = allocated(alive_bytes - saved_bytes, snapshot.blocks) + allocated(persistent.in_transit, large_tensors)
    # Activations are taken in one order and given back in the other, unless several micro-batches are under way; what comes and goes
    # otherwise leaves gaps between blocks.
    freed_bytes += activations if in_flight_bytes else 0.0
    gathered_bytes = parameters - profile.bytes / plan.mesh.dp if plan.is_sharded else 0.0
    retained_bytes = device.retained * (transient + gradients + max(gathered_bytes, 0.0) + freed_bytes)
    temporary = transient + retained_bytes + device.workspace
    bucket_bytes = allocated(persistent.buckets, large_tensors)
    peak = parameters + gradients + optimizer + activations + temporary + bucket_bytes
    relative_error = _RELATIVE_ERROR[plan.is_sharded]
    if plan.precision not in (None, profile.precision):
        relative_error = 0.5
    return MemoryForecast(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        temporary=temporary,
        buckets=bucket_bytes,
        framework=device.framework,
        low=peak * (1 - relative_error),
        high=peak * (1 + relative_error),
    ), peak_location


def _persistent_memory(profile: Profile, plan: Plan, load: NodeLoad) -> PersistentMemory:
    dp, accumulates = plan.mesh.dp, len(load.micro_batch_sizes) > 1
    parameter_bytes, gradient_bytes, state_bytes = (
        float(profile.bytes),
        float(profile.gradient_bytes),
        float(profile.state_bytes),
    )
    if dp == 1:
        return PersistentMemory(
            parameter_bytes, gradient_bytes if accumulates else 0.0, state_bytes, 0.0, 0.0 if accumulates else 1.0, 0.0
        )
    if plan.zero == 0:
        # Gradients live in the buckets from the first micro-batch on.
        return PersistentMemory(parameter_bytes, gradient_bytes, state_bytes, 0.0, 0.0, 0.0)
    largest_unit = float(max(profile.fsdp_unit_bytes, default=0)) if not plan.data.shard_as_one else 0.0
    root_bytes = parameter_bytes - (sum(profile.fsdp_unit_bytes) if not plan.data.shard_as_one else 0)
    # Of the unit at work: its gradients as computed and as sent, those of the unit before still under way, its parameters' message.
    in_transit = 4 * max(largest_unit, 0.0 if largest_unit else root_bytes)
    if plan.zero == 3:
        # The root's own parameters, and those of the unit at work and of the one fetched ahead.
        in_transit += root_bytes + 2 * largest_unit
        return PersistentMemory(
            parameter_bytes / dp,
            gradient_bytes / dp if accumulates else 0.0,
            state_bytes / dp,
            0.0,
            0.0 if accumulates else 1 / dp,
            in_transit,
        )
    keeps_full_gradients = accumulates and (plan.zero == 1 or plan.data.keep_gradients)
    if accumulates:
        kept_gradients = gradient_bytes if keeps_full_gradients else gradient_bytes / dp
        return PersistentMemory(
            parameter_bytes + parameter_bytes / dp, kept_gradients, state_bytes / dp, 0.0, 0.0, in_transit
        )
    # Units give up their gathered parameters as their gradients are done: the peak is where backward begins.
    return PersistentMemory(parameter_bytes + parameter_bytes / dp, 0.0, state_bytes / dp, 0.0, 1 / dp - 1, in_transit)


def _peak_snapshot(profile: Profile, load: NodeLoad, persistent: PersistentMemory) -> MemorySnapshot:
    def estimated_bytes(snapshot: MemorySnapshot) -> float:
        alive_bytes = snapshot.alive.at(load.largest_micro_batch) + _workspace_bytes(snapshot, load)
        saved_bytes = min(snapshot.saved.at(load.largest_micro_batch), alive_bytes)
        return saved_bytes + (1 + load.device.retained) * (
            alive_bytes - saved_bytes + persistent.gradient_growth * snapshot.gradients
        )

    return max(profile.moments, key=estimated_bytes)


def _workspace_bytes(snapshot: MemorySnapshot, load: NodeLoad) -> float:
    """Bytes that the operator's library takes while it runs."""
    moved = snapshot.moved.at(load.largest_micro_batch)
    curve = load.device.nearest_curve(f"workspace {snapshot.operator}", "float32") or load.device.nearest_curve(
        f"workspace {snapshot.operator}", "bfloat16"
    )
    return moved * curve.rate_at((moved,)) if curve is not None and moved else 0.0


def _optimizer_temporary_bytes(profile: Profile, plan: Plan) -> float:
    shard_fraction = 1 / plan.mesh.dp if plan.zero else 1.0
    unfused = [
        optimizer
        for optimizer in profile.optimizers
        if not (plan.fused and optimizer.has_fused_kernel(sharded=plan.is_sharded))
    ]
    return shard_fraction * sum(optimizer.temporary_bytes for optimizer in unfused)
