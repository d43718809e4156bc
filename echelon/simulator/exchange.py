"""What the ranks say to each other in one step: which collectives, how large, how often. Time only."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.plan.buckets import layout
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile
from echelon.simulator.cost import message_seconds, stream_seconds
from echelon.simulator.load import Load

#: Operators' worth of host work that sharding costs per unit and pass (hooks, streams, views): a judgement, not measured.
_HOOKS = 60


@dataclass(frozen=True, slots=True)
class Talk:
    """Seconds of exchange in one step, all of it and the part that could hide behind compute."""

    total: float = 0.0
    hideable: float = 0.0


def talk(profile: Profile, plan: Plan, load: Load) -> Talk:
    """The exchange of one step of `plan`."""
    if plan.mesh.dp < 2:
        return Talk()
    if plan.zero == 0:
        sizes = buckets(profile, plan)
        messages = sum(message_seconds(load, "all_reduce", size) for size in sizes)
        copies = stream_seconds(load, "copy_", 2 * sum(sizes))
        # The last bucket holds the first layers' gradients: nothing is left to compute behind it.
        return Talk(messages + copies, messages - message_seconds(load, "all_reduce", sizes[-1]))
    parts = () if plan.whole else profile.unit_bytes
    sizes = [*parts, max(profile.bytes - sum(parts), 0)]
    gather = sum(message_seconds(load, "all_gather", size) for size in sizes)
    scatter = sum(message_seconds(load, "reduce_scatter", size) for size in sizes)
    copy = stream_seconds(load, "copy_", 2 * profile.bytes)
    rounds = len(load.micros)
    gathers = 2 * rounds if plan.zero == 3 else 1
    scatters = 1 if plan.zero == 1 or plan.keep_gradients else rounds
    hooks = _HOOKS * load.device.overhead * len(sizes) * 2 * rounds
    total = gathers * (gather + copy) + scatters * (scatter + copy) + hooks
    return Talk(total, gathers * gather + scatters * scatter)


def buckets(profile: Profile, plan: Plan) -> list[float]:
    """Bytes of each bucket of zero=0, in the order of their exchange."""
    trained = [(parameter.bytes, parameter.dtype) for parameter in profile.parameters if parameter.trainable]
    return [float(sum(trained[place][0] for place in group)) for group in layout(trained, plan.bucket)] or [0.0]
