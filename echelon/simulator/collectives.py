"""What the ranks say to each other in one step: which collectives, how large, how often. Time only."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.plan.gradient_buckets import layout
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile, fold_path
from echelon.plan.stages import stage_ranges
from echelon.simulator.cost.curves import message_seconds, stream_seconds
from echelon.simulator.node_load import Load
from echelon.simulator.rank_shares import Shares
from echelon.simulator.recomputation import computed_again

#: Operators' worth of host work that sharding costs per unit and pass (hooks, streams, views): a judgement, not measured.
_HOOKS = 60


@dataclass(frozen=True, slots=True)
class Talk:
    """Seconds of exchange in one step, all of it and the part that could hide behind compute."""

    total: float = 0.0
    hideable: float = 0.0


def talk(profile: Profile, plan: Plan, load: Load) -> Talk:
    """What the data ranks exchange in one step of `plan`."""
    dp = plan.mesh.dp
    if dp < 2:
        return Talk()
    if plan.zero == 0:
        sizes = buckets(profile, plan)
        messages = sum(message_seconds(load, "all_reduce", size, dp) for size in sizes)
        copies = stream_seconds(load, "copy_", 2 * sum(sizes))
        # The last bucket holds the first layers' gradients: nothing is left to compute behind it.
        return Talk(messages + copies, messages - message_seconds(load, "all_reduce", sizes[-1], dp))
    parts = () if plan.whole else profile.unit_bytes
    sizes = [*parts, max(profile.bytes - sum(parts), 0)]
    gather = sum(message_seconds(load, "all_gather", size, dp) for size in sizes)
    scatter = sum(message_seconds(load, "reduce_scatter", size, dp) for size in sizes)
    copy = stream_seconds(load, "copy_", 2 * profile.bytes)
    rounds = len(load.micros)
    gathers = 2 * rounds if plan.zero == 3 else 1
    scatters = 1 if plan.zero == 1 or plan.keep_gradients else rounds
    hooks = _HOOKS * load.device.overhead * len(sizes) * 2 * rounds
    total = gathers * (gather + copy) + scatters * (scatter + copy) + hooks
    return Talk(total, gathers * gather + scatters * scatter)


def tensor_seconds(profile: Profile, plan: Plan, load: Load, shares: Shares, rank: int, samples: int) -> float:
    """What the ranks of tp say to each other in one micro-batch. Nothing computes meanwhile.

    A pair: one sum of the row's output forward, one of the gradient of the columns' input backward. A gather: the outputs put
    together forward, a sum of the input's gradient backward. A vocabulary: one sum forward.
    """
    modules = {module.path: module for module in profile.modules}
    shapes = {name: each.shape for each in profile.parameters for name in (each.name, *each.aliases)}
    repeated = {operator.module for operator in computed_again(profile, profile, plan)}
    total = 0.0
    for each in plan.placements:
        folded = fold_path(each.path)
        module = modules.get(each.path) or modules.get(folded)
        if module is None or each.cut == "column":
            continue
        here = shares.staged(folded, rank)
        again = folded in repeated
        size = module.output.at(samples)
        forward = message_seconds(load, "all_gather" if each.cut == "gather" else "all_reduce", size, plan.mesh.tp)
        backward = 0.0
        if each.cut == "row":  # what the columns read is as wide as what the row gives, where blocks are alike
            backward = message_seconds(load, "all_reduce", size, plan.mesh.tp)
        elif each.cut == "gather":
            outputs, inputs, *_ = (*shapes.get(f"{each.path}.weight", (1, 1)), 1, 1)
            backward = message_seconds(load, "all_reduce", size * inputs / max(outputs, 1), plan.mesh.tp)
        total += here * (forward * (1 + again) + backward)
    return total


def pipeline_seconds(profile: Profile, plan: Plan, load: Load, rank: int, samples: int) -> float:
    """What a rank of pp waits to receive in one micro-batch: values from the stage before, gradients from the one after."""
    ranges = stage_ranges(plan, len(profile.visits)) if plan.mesh.pp > 1 else []
    total = 0.0
    for number, places in enumerate(ranges):
        if not number:
            continue
        # No link between two ranks is measured by itself: to gather over two is to send each other half of it.
        seconds = message_seconds(load, "all_gather", 2 * profile.visits[places.start].crossing.at(samples), 2)
        total += seconds * ((number % plan.mesh.pp == rank) + ((number - 1) % plan.mesh.pp == rank))
    return total


def buckets(profile: Profile, plan: Plan) -> list[float]:
    """Bytes of each bucket of zero=0, in the order of their exchange."""
    trained = [(parameter.bytes, parameter.dtype) for parameter in profile.parameters if parameter.trainable]
    return [float(sum(trained[place][0] for place in group)) for group in layout(trained, plan.bucket)] or [0.0]
