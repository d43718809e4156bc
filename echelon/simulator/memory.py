"""Memory of the largest rank, component by component, as the engine holds it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from echelon.plan.cluster import rounded
from echelon.plan.forecast import Memory
from echelon.plan.plan import Plan
from echelon.plan.profile import Moment, Profile
from echelon.simulator.node_load import Load
from echelon.simulator.whole_tensor_cost import owner_bytes

#: How far a peak may lie from the forecast: replicated plans, and sharded ones whose gathered copies come and go.
_SPREAD = {False: 0.08, True: 0.12}


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that stay from step to step, and what a step adds at its moments."""

    parameters: float
    gradients: float
    optimizer: float
    buckets: float
    #: What each byte of gradient that is done adds at a moment of backward; below zero where it frees more than it takes.
    growing: float
    #: Gathered parameters and messages under way.
    passing: float


def memory(
    profile: Profile, plan: Plan, load: Load, waiting: float = 0.0, freed: float = 0.0, *, whole: Profile | None = None
) -> tuple[Memory, str]:
    """(memory, where it peaks). `waiting`: bytes that are kept beside the micro-batch at work; `freed`: that were given back before;
    `whole`: the model of which `profile` is a rank's part."""
    device = load.device
    held = _held(profile, plan, load)
    owning, gathering = owner_bytes(whole or profile, profile, plan)
    held = replace(held, optimizer=held.optimizer + owning)
    moment, samples = _peak(profile, load, held), load.largest
    alive = moment.alive.at(samples) + waiting + _workspace(moment, load)
    kept = min(moment.kept.at(samples) + waiting, alive)
    gradients = held.gradients + held.growing * moment.gradients
    where = f"{moment.where} ({moment.phase})"
    end = held.gradients + held.growing * profile.gradient_bytes
    extra = _optimizer_extra(profile, plan) + gathering
    if end + extra > gradients + alive:
        alive, kept, where, gradients = extra, 0.0, "optimizer step", end
    large = sum(parameter.bytes >= 2**20 for parameter in profile.parameters)

    def taken(size: float, blocks: float) -> float:
        return rounded(size, blocks, device.grain)

    if gradients < 0:  # gathered parameters that are gone by then
        held = replace(held, parameters=held.parameters + gradients)
        gradients = 0.0
    parameters = taken(held.parameters + profile.buffers, large)
    optimizer = taken(held.optimizer, large * (held.optimizer / max(held.parameters, 1.0)))
    gradients = taken(gradients, large)
    activations = taken(kept, moment.blocks)
    loose = taken(alive - kept, moment.blocks) + taken(held.passing, large)
    # Activations are taken in one order and given back in the other, unless several micro-batches are under way; what comes and goes
    # otherwise leaves gaps between blocks.
    freed += activations if waiting else 0.0
    gathered = parameters - profile.bytes / plan.mesh.dp if plan.sharded else 0.0
    unreturned = device.retained * (loose + gradients + max(gathered, 0.0) + freed)
    temporary = loose + unreturned + device.workspace
    buckets = taken(held.buckets, large)
    peak = parameters + gradients + optimizer + activations + temporary + buckets
    spread = _SPREAD[plan.sharded]
    if plan.precision not in (None, profile.precision):
        spread = 0.5
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        temporary=temporary,
        buckets=buckets,
        framework=device.framework,
        low=peak * (1 - spread),
        high=peak * (1 + spread),
    ), where


def _held(profile: Profile, plan: Plan, load: Load) -> Held:
    dp, several = plan.mesh.dp, len(load.micros) > 1
    size, gradients, state = float(profile.bytes), float(profile.gradient_bytes), float(profile.state_bytes)
    if dp == 1:
        return Held(size, gradients if several else 0.0, state, 0.0, 0.0 if several else 1.0, 0.0)
    if plan.zero == 0:
        # Gradients live in the buckets from the first micro-batch on.
        return Held(size, gradients, state, 0.0, 0.0, 0.0)
    largest = float(max(profile.unit_bytes, default=0)) if not plan.whole else 0.0
    root = size - (sum(profile.unit_bytes) if not plan.whole else 0)
    # Of the unit at work: its gradients as computed and as sent, those of the unit before still under way, its parameters' message.
    passing = 4 * max(largest, 0.0 if largest else root)
    if plan.zero == 3:
        # The root's own parameters, and those of the unit at work and of the one fetched ahead.
        passing += root + 2 * largest
        return Held(size / dp, gradients / dp if several else 0.0, state / dp, 0.0, 0.0 if several else 1 / dp, passing)
    full = several and (plan.zero == 1 or plan.keep_gradients)
    if several:
        kept = gradients if full else gradients / dp
        return Held(size + size / dp, kept, state / dp, 0.0, 0.0, passing)
    # Units give up their gathered parameters as their gradients are done: the peak is where backward begins.
    return Held(size + size / dp, 0.0, state / dp, 0.0, 1 / dp - 1, passing)


def _peak(profile: Profile, load: Load, held: Held) -> Moment:
    def size(moment: Moment) -> float:
        alive = moment.alive.at(load.largest) + _workspace(moment, load)
        kept = min(moment.kept.at(load.largest), alive)
        return kept + (1 + load.device.retained) * (alive - kept + held.growing * moment.gradients)

    return max(profile.moments, key=size)


def _workspace(moment: Moment, load: Load) -> float:
    """Bytes that the operator's library takes while it runs."""
    moved = moment.moved.at(load.largest)
    curve = load.device.curve(f"workspace {moment.operator}", "float32") or load.device.curve(
        f"workspace {moment.operator}", "bfloat16"
    )
    return moved * curve.rate((moved,)) if curve is not None and moved else 0.0


def _optimizer_extra(profile: Profile, plan: Plan) -> float:
    share = 1 / plan.mesh.dp if plan.zero else 1.0
    plain = [rule for rule in profile.optimizers if not (plan.fused and rule.fuses(sharded=plan.sharded))]
    return share * sum(rule.temporary for rule in plain)
