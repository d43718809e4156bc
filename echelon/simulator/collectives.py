"""What the ranks say to each other in one step: which collectives, how large, how often. Time only."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.plan.gradient_buckets import assign_buckets
from echelon.plan.plan import Plan
from echelon.plan.profile import Profile, fold_path
from echelon.plan.stages import stage_ranges
from echelon.simulator.cost.curves import message_seconds, stream_seconds
from echelon.simulator.node_load import NodeLoad
from echelon.simulator.rank_shares import RankShares
from echelon.simulator.recomputation import recomputed_operators

#: Operators' worth of host work that sharding costs per unit and pass (hooks, streams, views): a judgement, not measured.
_HOOK_OPERATORS_PER_UNIT = 60


@dataclass(frozen=True, slots=True)
class ExchangeTime:
    """Seconds of exchange in one step, all of it and the part that could hide behind compute."""

    total: float = 0.0
    overlappable: float = 0.0


def data_parallel_exchange(profile: Profile, plan: Plan, load: NodeLoad) -> ExchangeTime:
    """What the data ranks exchange in one step of `plan`."""
    dp = plan.mesh.dp
    if dp < 2:
        return ExchangeTime()
    if plan.zero == 0:
        sizes = gradient_bucket_bytes(profile, plan)
        message_total = sum(message_seconds(load, "all_reduce", size, dp) for size in sizes)
        copy_seconds_all = stream_seconds(load, "copy_", 2 * sum(sizes))
        # The last bucket holds the first layers' gradients: nothing is left to compute behind it.
        return ExchangeTime(
            message_total + copy_seconds_all, message_total - message_seconds(load, "all_reduce", sizes[-1], dp)
        )
    unit_sizes = () if plan.data.shard_as_one else profile.fsdp_unit_bytes
    sizes = [*unit_sizes, max(profile.bytes - sum(unit_sizes), 0)]
    gather_seconds = sum(message_seconds(load, "all_gather", size, dp) for size in sizes)
    scatter_seconds = sum(message_seconds(load, "reduce_scatter", size, dp) for size in sizes)
    copy_seconds = stream_seconds(load, "copy_", 2 * profile.bytes)
    micro_batch_count = len(load.micro_batch_sizes)
    gather_count = 2 * micro_batch_count if plan.zero == 3 else 1
    scatter_count = 1 if plan.zero == 1 or plan.data.keep_gradients else micro_batch_count
    hook_seconds = _HOOK_OPERATORS_PER_UNIT * load.device.overhead * len(sizes) * 2 * micro_batch_count
    total = (
        gather_count * (gather_seconds + copy_seconds) + scatter_count * (scatter_seconds + copy_seconds) + hook_seconds
    )
    return ExchangeTime(total, gather_count * gather_seconds + scatter_count * scatter_seconds)


def tensor_parallel_seconds(
    profile: Profile, plan: Plan, load: NodeLoad, shares: RankShares, rank: int, samples: int
) -> float:
    """What the ranks of tp say to each other in one micro-batch. Nothing computes meanwhile.

    A pair: one sum of the row's output forward, one of the gradient of the columns' input backward. A gather: the outputs put
    together forward, a sum of the input's gradient backward. A vocabulary: one sum forward.
    """
    modules = {module.path: module for module in profile.modules}
    shapes = {name: each.shape for each in profile.parameters for name in (each.name, *each.aliases)}
    recomputed_modules = {operator.module for operator in recomputed_operators(profile, profile, plan)}
    total = 0.0
    for each in plan.tensor.placements:
        folded_path = fold_path(each.path)
        module = modules.get(each.path) or modules.get(folded_path)
        if module is None or each.cut == "column":
            continue
        stage_share = shares.stage_share(folded_path, rank)
        is_recomputed = folded_path in recomputed_modules
        output_size = module.output.at(samples)
        forward = message_seconds(
            load, "all_gather" if each.cut == "gather" else "all_reduce", output_size, plan.mesh.tp
        )
        backward = 0.0
        if each.cut == "row":  # what the columns read is as wide as what the row gives, where blocks are alike
            backward = message_seconds(load, "all_reduce", output_size, plan.mesh.tp)
        elif each.cut == "gather":
            out_features, in_features, *_ = (*shapes.get(f"{each.path}.weight", (1, 1)), 1, 1)
            backward = message_seconds(
                load, "all_reduce", output_size * in_features / max(out_features, 1), plan.mesh.tp
            )
        total += stage_share * (forward * (1 + is_recomputed) + backward)
    return total


def pipeline_transfer_seconds(profile: Profile, plan: Plan, load: NodeLoad, rank: int, samples: int) -> float:
    """What a rank of pp waits to receive in one micro-batch: values from the stage before, gradients from the one after."""
    unit_ranges = stage_ranges(plan, len(profile.pipeline_units)) if plan.mesh.pp > 1 else []
    total = 0.0
    for stage, unit_range in enumerate(unit_ranges):
        if not stage:
            continue
        # No link between two ranks is measured by itself: to gather over two is to send each other half of it.
        transfer_seconds = message_seconds(
            load, "all_gather", 2 * profile.pipeline_units[unit_range.start].boundary_bytes.at(samples), 2
        )
        total += transfer_seconds * ((stage % plan.mesh.pp == rank) + ((stage - 1) % plan.mesh.pp == rank))
    return total


def gradient_bucket_bytes(profile: Profile, plan: Plan) -> list[float]:
    """Bytes of each bucket of zero=0, in the order of their exchange."""
    trainable_tensors = [(parameter.bytes, parameter.dtype) for parameter in profile.parameters if parameter.trainable]
    return [
        float(sum(trainable_tensors[index][0] for index in bucket))
        for bucket in assign_buckets(trainable_tensors, plan.data.bucket_megabytes)
    ] or [0.0]
