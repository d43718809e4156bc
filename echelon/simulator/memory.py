"""Memory of the largest rank, component by component, as the engine holds it."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.plan.cluster import rounded
from echelon.plan.forecast import Memory
from echelon.plan.plan import Plan
from echelon.plan.profile import Moment, Profile
from echelon.simulator.exchange import buckets
from echelon.simulator.load import Load

#: How far a peak may lie from the forecast: replicated plans, and sharded ones whose gathered copies come and go.
_SPREAD = {False: 0.08, True: 0.12}
#: The allocator has not yet given back at most this share of what comes and goes.
_UNRETURNED = 0.15


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that stay from step to step, and what a step adds at its moments."""

    parameters: float
    gradients: float
    optimizer: float
    buckets: float
    #: Gradients that grow during backward and go at its end (a share of those done at a moment).
    growing: float
    #: Gathered parameters and messages under way.
    passing: float


def memory(profile: Profile, plan: Plan, load: Load) -> tuple[Memory, str]:
    """(memory, where it peaks)."""
    device = load.device
    held = _held(profile, plan, load)
    moment, samples = _peak(profile, load, held), load.largest
    alive = moment.alive.at(samples)
    kept = min(moment.kept.at(samples), alive)
    gradients = held.gradients + held.growing * moment.gradients
    where = f"{moment.where} ({moment.phase})"
    step = _optimizer_extra(profile, plan) + max(held.gradients, held.growing * profile.gradient_bytes)
    if step > gradients + alive:
        alive, kept, where = _optimizer_extra(profile, plan), 0.0, "optimizer step"
        gradients = max(held.gradients, held.growing * profile.gradient_bytes)
    large = sum(parameter.bytes >= 2**20 for parameter in profile.parameters)

    def taken(size: float, blocks: float) -> float:
        return rounded(size, blocks, device.grain)

    parameters = taken(held.parameters + profile.buffers, large)
    optimizer = taken(held.optimizer, large * (held.optimizer / max(held.parameters, 1.0)))
    gradients = taken(gradients, large)
    activations = taken(kept, moment.blocks)
    loose = taken(alive - kept, moment.blocks) + taken(held.passing, large)
    unreturned = min(device.retained, _UNRETURNED * (activations + loose + gradients))
    temporary = loose + unreturned + device.workspace
    peak = parameters + gradients + optimizer + activations + temporary + held.buckets
    spread = _SPREAD[plan.zero > 0 and plan.mesh.dp > 1]
    if plan.precision != profile.precision:
        spread = 0.5
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        temporary=temporary,
        buckets=held.buckets,
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
        # Gradients live in the buckets; while micro-batches are summed they have a second home until the last of them.
        largest = max(buckets(profile, plan))
        return Held(size, gradients * (2 if several else 1), state, largest, 0.0, 0.0)
    largest = float(max(profile.unit_bytes, default=0))
    root = size - sum(profile.unit_bytes)
    full = several and (plan.zero == 1 or plan.keep_gradients)
    # One unit's gradients on their way: as computed, and flattened for the message.
    passing = 2 * max(largest, root if not profile.units else 0.0)
    if plan.zero == 3:
        # The root's own parameters, the unit at work and the one fetched ahead, and the message it came in.
        passing += root + 3 * largest
        parameters = size / dp
    else:
        passing += largest
        parameters = size + size / dp
    return Held(parameters, gradients / dp + (gradients if full else 0.0), state / dp, 0.0, 0.0, passing)


def _peak(profile: Profile, load: Load, held: Held) -> Moment:
    return max(profile.moments, key=lambda m: m.alive.at(load.largest) + held.growing * m.gradients)


def _optimizer_extra(profile: Profile, plan: Plan) -> float:
    share = 1 / plan.mesh.dp if plan.zero else 1.0
    return share * sum(rule.temporary for rule in profile.optimizers if not (plan.fused and rule.fused))
